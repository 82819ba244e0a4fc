# make plan MODEL=llama70b GPUS=16384      make test      make ci      make bench

.PHONY: setup packages rust build plan test quick slow programs thorough hostile ci fmt lint bench bench-torch latency calibration equivalence mutations mpi mpi-packages cuda nvrtc cudnn gpu gpu-pack

MODEL ?= llama70b
GPUS ?= 16384
CLUSTER ?= dgx_h100

# Where rustup puts a Rust that this shell does not know yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

# What the solver (HiGHS, built from the sources in highs-sys) needs besides Rust.
PACKAGES := make cmake g++ libclang-dev
MPI_PACKAGES := openmpi-bin libopenmpi-dev
RUST := 1.90

# What cargo builds for tests and for `make plan`.
DEV := $(or $(CARGO_TARGET_DIR),target)/debug

heading = @printf '\n==== %s ====\n' '$(1)'

setup: packages rust

packages:
	@if command -v cmake >/dev/null && command -v c++ >/dev/null && \
	   { [ -n "$$LIBCLANG_PATH" ] || /sbin/ldconfig -p 2>/dev/null | grep -q libclang || \
	     ls /usr/lib/llvm-*/lib/libclang*.so* >/dev/null 2>&1 || ls /Library/Developer/CommandLineTools/usr/lib/libclang* >/dev/null 2>&1; }; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
	  echo 'error: cmake, a C++ compiler and libclang are needed; install them with this system'\''s package manager' >&2; exit 1; fi; \
	if [ "$$(id -u)" = 0 ]; then as=''; elif command -v sudo >/dev/null; then as=sudo; else \
	  echo 'error: run as root: apt-get install -y --no-install-recommends $(PACKAGES)' >&2; exit 1; fi; \
	echo 'make: installing what the solver needs ($(PACKAGES)): a minute' >&2; \
	export DEBIAN_FRONTEND=noninteractive; \
	$$as apt-get update -q && $$as apt-get install -y -q --no-install-recommends $(PACKAGES)

rust:
	@new_enough() { v=$$(cargo --version 2>/dev/null | cut -d' ' -f2) && [ -n "$$v" ] && \
	    [ "$$(printf '%s\n' $(RUST) "$$v" | sort -V | head -1)" = $(RUST) ]; }; \
	if new_enough; then exit 0; fi; \
	echo 'make: installing Rust $(RUST) or newer: a minute' >&2; \
	if [ "$$(id -u)" = 0 ]; then as=''; else as=sudo; fi; \
	if ! command -v rustup >/dev/null && command -v apt-get >/dev/null && \
	   apt-cache show rustup >/dev/null 2>&1; then \
	  $$as apt-get install -y -q --no-install-recommends rustup; fi; \
	if ! command -v rustup >/dev/null; then \
	  echo 'no rustup package here: fetching Rust from https://rustup.rs' >&2; \
	  command -v curl >/dev/null || $$as apt-get install -y -q --no-install-recommends curl ca-certificates; \
	  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal --default-toolchain none; fi; \
	rustup toolchain install stable --profile minimal --component rustfmt,clippy && rustup default stable && \
	new_enough

build: setup
	cargo build --release --locked

# With the tests' profile, so that the solver is built once for both. Cargo shows how far it is.
plan: setup
	@[ -x $(DEV)/plan ] || printf '%s\n' 'make: building the planner and its solver: 6 minutes on two cores, once' >&2
	@cargo build --locked $(if $(wildcard $(DEV)/plan),--quiet) --bin plan
	@$(DEV)/plan --model $(MODEL) --gpus $(GPUS) --cluster $(CLUSTER)

# Without the thousands of random instances of `make slow`, and what else CI runs.
test: setup
	@printf '%s\n' 'make: building the tests and running them: 16 minutes on two cores, half of it building' >&2
	@$(MAKE) --no-print-directory quick

quick:
	$(call heading,quick tests)
	cargo test --workspace --locked

# The whole workspace is named, so that its dependencies are built once, with the same features.
SLOW_TESTS = $(basename $(notdir $(shell grep -lE 'feature = "thorough"|instances\>' tests/tests/*.rs)))
slow:
	$(call heading,slow tests: thousands of random instances)
	cargo test --workspace --locked --features meshwright-tests/slow $(addprefix --test ,$(SLOW_TESTS))

# The default plans, on 8, 64 and 512 GPUs, of every shipped model that can be trained: generated,
# compiled, and trained at a small size. Then all reviewed programs, trained.
programs: setup
	$(call heading,default plans of all models that can be trained)
	cargo test --workspace --locked --features meshwright-tests/slow,meshwright-tests/programs --test default_plans --test programs -- --nocapture

# All tests in one run, with a third of the random instances of `make slow`.
thorough:
	$(call heading,all tests)
	cargo test --workspace --locked --features meshwright-tests/thorough

# Hostile input at length: attacks over the network, fuzzed files, long runs. CI runs the short
# ones.
hostile: setup
	$(call heading,hostile tests that take minutes)
	cargo test --workspace --locked --no-fail-fast -- --ignored hostile

fmt:
	$(call heading,format)
	cargo fmt --all --check

lint:
	$(call heading,lints)
	cargo clippy --workspace --all-targets --features meshwright-tests/slow,meshwright-kernels/cuda,meshwright-runtime/cuda --locked -- -D warnings

# Recipe by recipe, because later ones need what setup installs. Without debug information and
# incremental builds, since nothing built here is debugged or built again.
ci: export CARGO_PROFILE_DEV_DEBUG := 0
ci: export CARGO_INCREMENTAL := 0
ci:
	$(call heading,setup)
	@$(MAKE) --no-print-directory setup
	@cargo --version
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || rustup component add rustfmt clippy
	@$(MAKE) --no-print-directory fmt
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory thorough
	$(call heading,kernels for GPUs)
	@$(MAKE) --no-print-directory cuda
	$(call heading,deliberate bugs: each can still be planted)
	@said=$$(tools/mutations.py --list) || { echo "$$said" | grep BROKEN >&2; exit 1; }
	$(call heading,ranks as processes)
	@$(MAKE) --no-print-directory mpi
	$(call heading,all passed)

bench: setup
	cargo bench --locked -p meshwright-planner --bench search
	cargo bench --locked -p meshwright-kernels --bench layer
	cargo bench --locked -p meshwright-runtime --bench step -- 2 5
	cargo bench --locked -p meshwright-runtime --bench hidden
	@$(MAKE) --no-print-directory bench-torch

# What users wait for: 1,000 random requests and 1,000 random pinnings, each answered by the
# program. Five minutes on two cores; the figures are in docs/speed.md.
latency: build
	cargo bench --locked -p meshwright-tests --bench latency -- --plan $(or $(CARGO_TARGET_DIR),target)/release/plan

# The anchor model beside PyTorch, in one run: CPU only, in an environment of its own.
TORCH := $(or $(CARGO_TARGET_DIR),target)/torch
bench-torch: setup
	@[ -x $(TORCH)/bin/python ] || python3 -m venv $(TORCH)
	@$(TORCH)/bin/python -c 'import torch' 2>/dev/null || $(TORCH)/bin/pip install -q torch==2.6.0 numpy
	cargo bench --locked -p meshwright-runtime --bench step --no-run
	@$(TORCH)/bin/python tools/side_by_side.py --step "$$(cargo bench --locked -p meshwright-runtime --bench step --no-run \
	  --message-format=json 2>/dev/null | sed -n 's/.*"executable":"\([^"]*step-[^"]*\)".*/\1/p' | tail -1)"

# Every split of the golden cases against one rank; the count goes to docs/equivalence.md.
equivalence: setup
	cargo test --release --locked -p meshwright-runtime --test equivalence --test mixtures --test schedules -- --ignored --nocapture

# Calibrates, plans, trains, and compares step times.
calibration: build
	tools/planned_and_seen.py --plan $(or $(CARGO_TARGET_DIR),target)/release/plan --markdown docs/calibration.md

# Deliberate bugs, each of which a test must catch.
mutations: setup
	tools/mutations.py --markdown docs/mutations.md

# Ranks as processes must give the bits of ranks as threads, and end cleanly. Installs Open MPI.
MPI_EXAMPLE = cargo build --workspace --locked --features meshwright-runtime/mpi --example golden
mpi: setup mpi-packages
	$(MPI_EXAMPLE)
	@golden=$$($(MPI_EXAMPLE) --quiet --message-format=json | sed -n 's/.*"executable":"\([^"]*\/golden\)".*/\1/p') && \
	  ls -l "$$golden" && tools/mpi_equals_threads.sh "$$golden" && tools/ends_cleanly.sh "$$golden"

# Every CUDA kernel compiled for the GPUs it is meant for, and its machine code read: registers,
# spills, and the share of a copy's bandwidth that its instructions leave. Spills and low shares
# fail. Needs no GPU: NVRTC and nvdisasm come from the Python package index.
NVRTC := $(or $(CARGO_TARGET_DIR),target)/nvrtc
cuda: setup
	@[ -e $(NVRTC)/nvdisasm ] || $(MAKE) --no-print-directory nvrtc
	@rm -rf $(NVRTC)/cubins && mkdir -p $(NVRTC)/cubins
	CUBIN_DIR=$(abspath $(NVRTC))/cubins LD_LIBRARY_PATH=$(abspath $(NVRTC)) cargo test --workspace --locked \
	  --features meshwright-kernels/cuda --test cuda_compiles -- --nocapture
	tools/machine_code.py --nvdisasm $(NVRTC)/nvdisasm $(NVRTC)/cubins/*-sm_90a.cubin

nvrtc:
	@python3 -c 'import ensurepip' 2>/dev/null || { as=''; [ "$$(id -u)" = 0 ] || as=sudo; \
	  $$as apt-get install -y -q --no-install-recommends python3-venv; }
	@rm -rf $(NVRTC) && mkdir -p $(NVRTC) && python3 -m venv $(NVRTC)/venv
	@$(NVRTC)/venv/bin/pip install -q --no-deps --target $(NVRTC)/package nvidia-cuda-nvrtc-cu12==12.9.86 \
	  nvidia-cuda-nvdisasm==13.5.37
	@mv $(NVRTC)/package/nvidia/cuda_nvrtc/lib/libnvrtc* $(NVRTC)/package/nvidia/cu13/bin/nvdisasm $(NVRTC)/ && rm -rf $(NVRTC)/package $(NVRTC)/venv

# Whether cuDNN takes our graphs of attention, for GPUs that are described to it. Needs no GPU, but
# 1 GB: no part of `ci`.
CUDNN := $(or $(CARGO_TARGET_DIR),target)/cudnn
CUDNN_VERSION ?= 9.19.0.56
cudnn: setup
	@[ -e $(NVRTC)/nvdisasm ] || $(MAKE) --no-print-directory nvrtc
	@[ -e $(CUDNN)/$(CUDNN_VERSION)/libcudnn.so.9 ] || { rm -rf $(CUDNN) && mkdir -p $(CUDNN) && python3 -m venv $(CUDNN)/venv && \
	  $(CUDNN)/venv/bin/pip install -q --no-deps --target $(CUDNN)/package nvidia-cudnn-cu12==$(CUDNN_VERSION) && \
	  mv $(CUDNN)/package/nvidia/cudnn/lib $(CUDNN)/$(CUDNN_VERSION) && rm -rf $(CUDNN)/package $(CUDNN)/venv; }
	LD_LIBRARY_PATH=$(abspath $(CUDNN)/$(CUDNN_VERSION)):$(abspath $(NVRTC)) MESHWRIGHT_NEEDS_CUDNN=1 \
	  cargo test --locked -p meshwright-kernels --features cuda --test cudnn_accepts -- --nocapture

# On a GPU: everything that only a GPU tells, by tools/gpu_all.sh, which lists its parts. What it
# calls needs neither cargo nor a network, only the driver, CUDA's libraries and, for what is beside
# PyTorch, a Python with it: `make gpu-pack` here, then copy the folder and this repository there.
GPU_PACK ?= gpu-pack
GPU_PARTS ?= versions test golden programs defaults nccl bench steps kernels torch turns beside calibrate sanitize
gpu: gpu-pack
	tools/gpu_all.sh --bin $(GPU_PACK) --out gpu-out $(GPU_PARTS)

gpu-pack: setup
	cargo build --release --locked -p meshwright-kernels --features cuda --bin gpu-test --bin gpu-bench
	cargo build --release --locked -p meshwright-measure --features cuda --bin measure-gpu
	cargo build --release --locked -p meshwright-runtime --features cuda --example gpu_golden
	cargo build --release --locked -p meshwright-cli
	mkdir -p $(GPU_PACK)
	for program in gpu-test gpu-bench measure-gpu plan examples/gpu_golden; do \
	  strip -o $(GPU_PACK)/$${program##*/} $(or $(CARGO_TARGET_DIR),target)/release/$$program || exit 1; done
	tools/gpu_programs.sh $(GPU_PACK)/plan $(GPU_PACK)/programs

mpi-packages:
	@if command -v mpirun >/dev/null && command -v mpicc >/dev/null; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
	  echo 'error: Open MPI is needed (mpirun and mpicc); install it with this system'\''s package manager' >&2; exit 1; fi; \
	if [ "$$(id -u)" = 0 ]; then as=''; elif command -v sudo >/dev/null; then as=sudo; else \
	  echo 'error: run as root: apt-get install -y --no-install-recommends $(MPI_PACKAGES)' >&2; exit 1; fi; \
	echo 'make: installing Open MPI ($(MPI_PACKAGES)): a minute' >&2; \
	export DEBIAN_FRONTEND=noninteractive; \
	$$as apt-get update -q && $$as apt-get install -y -q --no-install-recommends $(MPI_PACKAGES)
