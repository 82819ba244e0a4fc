#!/usr/bin/env bash
# Everything that only a GPU tells, in parts that run alone:
#
#   tools/gpu_all.sh [--bin DIR] [--out DIR] [--on-cpu] PART...
#
# Parts: versions test golden programs defaults nccl bench steps kernels torch turns beside
# calibrate sanitize.
# `make gpu-pack` builds the programs that it calls into one folder; it needs neither cargo nor a
# network. Each part writes to the output folder as figures come, so a part that is cut short keeps
# what it has.
# --on-cpu rehearses parts, with figures that mean nothing: test, golden and bench on the emulator,
# for which gpu-test and gpu-bench must be built (`--features cuda,cpu_emulator`); programs and nccl
# on processors, where TCP connects the processes.
#
# CUDA's libraries are looked for where the loader looks, and in the folders of PyTorch's packages.
set -uo pipefail
cd "$(dirname "$0")/.."

bin=gpu-pack out=gpu-out on_cpu=() on_gpu=--gpu parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --on-cpu) on_cpu=(--on-cpu) on_gpu=; shift ;;
    -*) echo "error: $1: valid: --bin DIR, --out DIR, --on-cpu, then parts" >&2; exit 1 ;;
    *) parts+=("$1"); shift ;;
  esac
done
mkdir -p "$out"
bin=$(realpath "$bin") out=$(realpath "$out")
python=${PYTHON:-python3}
export MESHWRIGHT_CACHE=${MESHWRIGHT_CACHE:-$out/cache}
# Sequences of a step, by model: as many as the GPU's memory holds.
SEQUENCES_124M=${SEQUENCES_124M:-64} SEQUENCES_1_5B=${SEQUENCES_1_5B:-32} SEQUENCES_LLAMA=${SEQUENCES_LLAMA:-1}
MODELS=${MODELS:-"GPT-2 124M:$SEQUENCES_124M;GPT-2 1.5B:$SEQUENCES_1_5B;Llama 3 8B, 4 layers:$SEQUENCES_LLAMA"}
# How our steps run.
read -ra hows <<<"${HOWS:-replayed launched}"
declare -A graphs=([replayed]=always [launched]=never [default]=auto)
# Models that PyTorch compiles whole; the others by layer.
WHOLE=${WHOLE:-"GPT-2 124M;Llama 3 8B, 4 layers"}
# mixtral_aux has mixtral's weights and tokens, and its loss over the whole batch another path.
CASES=${CASES:-"llama_gqa llama_tied gpt2 qwen2 gemma2 mixtral qwen3_moe deepseek_v3 stablelm"}

packages=$("$python" - <<'PYTHON' 2>/dev/null
import glob, os, sysconfig
print(":".join(sorted(glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "lib")))))
PYTHON
)
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}${packages:+:$packages}

versions() {
  { date -u +%Y-%m-%dT%H:%M:%SZ; nvidia-smi; echo "$LD_LIBRARY_PATH" | tr : '\n'
    "$python" -c 'import torch; print("torch", torch.__version__, torch.version.cuda, torch.backends.cudnn.version())'
    "$bin/gpu-test" "${on_cpu[@]}" --only transpose --json "$out/opened.json"; } >"$out/versions.txt" 2>&1
  tail -12 "$out/versions.txt"
}

# A process a case: an illegal access fails all later work of its process.
test_one() {
  "$bin/gpu-test" "${on_cpu[@]}" --only "$1" --json "$out/test-$1.json" >"$out/test-$1.log" 2>&1 ||
    { echo "FAILED $1"; grep -v '^|' "$out/test-$1.log" | head -c 600; }
}
golden_one() {
  "$bin/gpu_golden" "${on_cpu[@]}" "${@:2}" "tests/golden/$1" 2>"$out/golden-$1.log" | tee -a "$out/golden.jsonl" |
    "$python" -c 'import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(*(row.get(name) for name in ("case", "format", "steps", "replayed_steps", "why_not", "worst_loss_relative", "worst_gradient_relative")), row["result"][:300])'
}
export -f test_one golden_one
export bin out python on_gpu
tests() {
  "$bin/gpu-test" --only nothing 2>&1 | sed -n 's/.*valid: //p' | tr -d ',' | tr ' ' '\n' |
    xargs -P "${JOBS:-8}" -I{} bash -c 'on_cpu=('"${on_cpu[*]}"'); test_one {}'
  echo "tests: $(grep -l '"result": "ok"' "$out"/test-*.json | wc -l) of $(ls "$out"/test-*.log | wc -l) cases passed"
}
golden() {
  for case in $CASES; do for flags in "--steps 20" "--launched" "--bf16"; do echo "$case $flags"; done; done |
    xargs -P "${JOBS:-8}" -I{} bash -c 'on_cpu=('"${on_cpu[*]}"'); golden_one {}'
}

# Generated trainers of golden cases, whose ranks share the GPU: their losses beside PyTorch's, or
# beside their own on processors.
compare_losses() { # NAME CASE FORMAT EXIT_STATUS RAN_AS LINES
  "$python" tools/gpu_program_losses.py "$5" "$2" "$3" "$4" "$out" "$bin/programs/$1.wanted.jsonl" | tee -a "$out/$6"
}
trainer() { # NAME CASE RAN_AS FLAGS...
  # A case that changes how another trains has the other's weights and tokens.
  of=tests/golden/${2%_bias}
  "$bin/programs/$1" $on_gpu --init-from "$of" --data "$of/tokens.safetensors" --steps 20 --time-limit-s 60 \
    --metrics "$out/program-$3.jsonl" --rank-report "$out/program-$3-ranks.jsonl" "${@:4}"
}
program_one() {
  read -r name case format _ flags <<<"$1"
  rm -f "$out/program-$name.jsonl"
  trainer "$name" "$case" "$name" $flags >"$out/program-$name.log" 2>&1
  compare_losses "$name" "$case" "$format" $? "$name" programs.jsonl
}
export -f compare_losses trainer program_one
programs() { xargs -P "${PROGRAM_JOBS:-3}" -d '\n' -I{} bash -c 'program_one "{}"' <"$bin/programs/list.txt"; }

# Default plans of shipped models, on tokens drawn at random. Model, tokens of the vocabulary,
# sequences, their length, steps.
DEFAULTS=${DEFAULTS:-"gpt2_124m 50257 64 1024 8
ampipe_base 50257 8 24576 5
ampipe_base_dropout_0 50257 8 24576 8"}
defaults() {
  while read -r model vocab sequences length steps; do
    "$python" - "$out/tokens.safetensors" "$vocab" "$steps" "$sequences" $((length + 1)) <<'PYTHON'
import json, sys
import numpy
at, vocab, *shape = sys.argv[1], *map(int, sys.argv[2:])
tokens = numpy.random.default_rng(1).integers(vocab, size=shape).astype("<i8").tobytes()
head = json.dumps({"tokens": {"dtype": "I64", "shape": shape, "data_offsets": [0, len(tokens)]}}).encode()
with open(at, "wb") as file:
    file.write(len(head).to_bytes(8, "little") + head + tokens)
PYTHON
    rm -f "$out/program-$model.jsonl"
    "$bin/programs/$model" --gpu --data "$out/tokens.safetensors" --steps "$steps" --metrics "$out/program-$model.jsonl" \
      --rank-report "$out/program-$model-ranks.jsonl" >"$out/program-$model.log" 2>&1
    echo "$model: exit $?, $(tail -1 "$out/program-$model.jsonl")"
    rm "$out/tokens.safetensors"
  done <<<"$DEFAULTS"
}

# The same trainers with a process for each rank, which NCCL connects. NCCL takes one rank on a GPU
# of a host, so each process says that it is on a host of its own (NCCL_HOSTID), and all transfers
# are NCCL's over sockets. The processes take turns on the GPU. A line of NCCL_RUNS is a name in
# list.txt and more flags; without NCCL_RUNS every trainer of several ranks runs.
nccl_one() {
  read -r wanted more <<<"$1"
  read -r name case format ranks flags < <(grep "^$wanted " "$bin/programs/list.txt")
  [[ $more$flags == *cuda-graphs* ]] && as=nccl-$name-recorded || as=nccl-$name
  meeting=$(mktemp -d)/meeting begun=$(date +%s)
  rm -f "$out/program-$as.jsonl"
  export WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks LOCAL_RANK=0 NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32} NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0
  started=()
  for ((rank = ranks - 1; rank >= 0; rank--)); do
    RANK=$rank NCCL_HOSTID=host$rank timeout -k 5 "${NCCL_S:-60}" bash -c \
      'trainer "$@"' _ "$name" "$case" "$as" --rendezvous "$meeting" $flags $more >"$out/program-$as-$rank.log" 2>&1 &
    started+=($!)
  done
  status=0
  for process in "${started[@]}"; do wait "$process" || status=$?; done
  cat "$out/program-$as"-[0-9]*.log >"$out/program-$as.log"
  compare_losses "$name" "$case" "$format" $status "$as" nccl.jsonl
  echo "$as: $ranks processes, $(($(date +%s) - begun)) s"
}
export -f nccl_one
nccl() {
  while read -r run; do nccl_one "$run" </dev/null; done <<<"${NCCL_RUNS:-$(awk '$4 > 1 {print $1}' "$bin/programs/list.txt")}"
}

bench() { "$bin/gpu-bench" "${on_cpu[@]}" --require-cudnn --json "$out/bench.json" ${BENCH:+--only "$BENCH"}; }

# Each model's step, launched and replayed: a line each.
steps() {
  local IFS=';' model
  for model in $MODELS; do
    for how in "${hows[@]}"; do
      s=$("$bin/measure-gpu" --step "${model%:*}" --sequences "${model##*:}" \
        --cuda-graphs "${graphs[$how]}" 2>>"$out/steps.log") || { tail -1 "$out/steps.log"; continue; }
      printf '{"by": "%s", "model": "%s", "sequences": %s, "s": %s}\n' $how "${model%:*}" "${model##*:}" "$s" |
        tee -a "$out/steps.jsonl"
    done
  done
}

# The time of every kernel of a launched step.
kernels() {
  local IFS=';' model
  for model in ${PROFILED:-$MODELS}; do
    name=$(echo "${model%:*}" | tr ' ,' '__')
    ncu --metrics gpu__time_duration.sum --clock-control none --csv --launch-skip "${SKIP:-3000}" \
      --launch-count "${COUNT:-2000}" "$bin/measure-gpu" --step "${model%:*}" --sequences "${model##*:}" \
      --cuda-graphs never >"$out/kernels-$name.csv" 2>"$out/kernels-$name.log"
    "$python" tools/gpu_kernel_times.py "$out/kernels-$name.csv" | tee "$out/kernels-$name.txt" | head -${LINES_SHOWN:-40}
  done
}

# PyTorch's step of a model; more flags follow it.
torch_step() {
  how=layers
  case ";$WHOLE;" in *";${1%:*};"*) how=whole ;; esac
  "$python" tools/gpu_torch_step.py --model "${1%:*}" --sequences "${1##*:}" --backend "${BACKEND:-cudnn}" \
    --compiled $how "${@:2}" 2>>"$out/torch.log" | tee -a "$out/steps.jsonl"
}
torch() {
  local IFS=';' model
  for model in $MODELS; do torch_step "$model"; done
}

# Our step and PyTorch's in turns, of models that fit the GPU's memory together.
turns() {
  local IFS=';' model turn at
  for model in ${TAKING_TURNS:-$WHOLE}; do
    model=$(grep -o "$model:[0-9]*" <<<"$MODELS")
    at=$(mktemp -d)/turn
    torch_step "$model" --turns "${TURNS:-4}" --at "$at" &
    while [ ! -e "$at.ready" ] && kill -0 $! 2>/dev/null; do sleep 0.1; done
    for ((turn = 0; turn < ${TURNS:-4}; turn++)); do
      (MODELS=$model; hows=(default); steps)
      touch "$at.$turn"
      while [ ! -e "$at.$turn.done" ] && kill -0 $! 2>/dev/null; do sleep 0.1; done
    done
    wait
    rm -r "$(dirname "$at")"
  done
}

# 20 steps of each model from PyTorch's weights, beside PyTorch's losses.
beside() {
  local IFS=';' model
  for model in ${BESIDE:-GPT-2 124M;Llama 3 8B, 4 layers}; do
    case_folder=$(mktemp -d)/$(echo "$model" | tr ' ,' '__')
    "$python" tools/gpu_torch_case.py --model "$model" --out "$case_folder" 2>>"$out/beside.log" >>"$out/beside.jsonl" &&
      "$bin/gpu_golden" --bf16 "$case_folder" 2>>"$out/beside.log" | tee -a "$out/beside.jsonl" |
      "$python" -c 'import json, sys
row = json.loads(sys.stdin.read())
print(row["case"], row.get("worst_loss_relative"), row["result"][:300])
print(*zip(row.get("losses", []), row.get("wanted", [])), sep="\n")'
    rm -rf "$(dirname "$case_folder")"
  done
}

calibrate() {
  timeout "${MEASURE_S:-600}" "$bin/measure-gpu" ${COARSE:+--coarse} --sizes "${SIZES:-1600,6400}" --json "$out/measured.json" --parts "${MEASURED:-memory,attention,steps,products}"
  "$bin/plan" calibrate --gpu --cluster "${CLUSTER:-dgx_h100}" --measured "$out/measured.json" \
    --steps "$out/predicted.json" -o "$out/cluster.yaml"
}

# Our kernels alone: NVIDIA's libraries do things on purpose that the checkers report.
sanitize_one() {
  log="$out/sanitize-$1-$2.log"
  MESHWRIGHT_ATTENTION=own timeout "${SANITIZER_S:-60}" compute-sanitizer --tool "$1" --error-exitcode 3 \
    --kernel-name-exclude 'regex=nvjet|cublas|cutlass|gemm|splitK' "$bin/gpu-test" --only "$2" \
    --json "$out/sanitize-$1-$2.json" >"$log" 2>&1
  echo "$1 $2: exit $?, $(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/=* *//')" | tee -a "$out/sanitize.txt"
}
export -f sanitize_one
sanitize() {
  for tool in ${SANITIZERS:-memcheck racecheck initcheck synccheck}; do
    for case in ${SANITIZED:-rms_norm layer_norm activations rope packed_rope adamw elementwise embedding cross_entropy vocabulary_split dropout random transpose weighted_rows latent_heads attention wide_attention attention_with_dropout attention_in_f32 merged_attention sinks}; do
      echo "$tool $case"
    done
  done | xargs -P "${JOBS:-8}" -I{} bash -c 'sanitize_one {}'
}

for part in "${parts[@]}"; do
  begin=$SECONDS
  echo "==== $part ===="
  case $part in
    test) tests ;;
    versions | golden | programs | defaults | nccl | bench | steps | kernels | torch | turns | beside | calibrate | sanitize) $part ;;
    *) echo "error: $part: valid: versions, test, golden, programs, defaults, nccl, bench, steps, kernels, torch, turns, beside, calibrate, sanitize" >&2 ;;
  esac
  echo "$part $((SECONDS - begin)) s" | tee -a "$out/parts.txt"
done
