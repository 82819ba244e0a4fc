#!/usr/bin/env bash
# Plans, generates and builds trainers of golden cases for one GPU, which their ranks share:
#
#   tools/gpu_programs.sh PLAN FOLDER
#
# PLAN is the planner's program. FOLDER gets each trainer as FOLDER/NAME, and FOLDER/list.txt with
# a line for each: name, golden case, format, ranks, flags of the trainer. `tools/gpu_all.sh` runs
# them (parts `programs` and `nccl`) beside PyTorch's losses, or beside those that the same trainer
# has on this machine's processors: FOLDER/NAME.wanted.jsonl, for what changes the model or the data
# of a golden case.
# FOLDER/gpt2_124m and FOLDER/ampipe_base are the default plans of those models on one H200, as is
# FOLDER/ampipe_base_dropout_0 of the latter without dropout.
set -euo pipefail
cd "$(dirname "$0")/.."
plan=$(realpath "$1") folder=$2
mkdir -p "$folder"
folder=$(realpath "$folder")
target=${CARGO_TARGET_DIR:-target}/gpu-programs
mkdir -p "$target"
target=$(realpath "$target")
: >"$folder/list.txt"

# Name, case, format, ranks, flags of the trainer, with a comma for a space (- for none), decisions.
# A flag `--as=JSON` changes keys of the model's config.json instead, and makes
# FOLDER/NAME.wanted.jsonl.
programs() {
  cat <<'LIST'
one_rank llama_gqa f32 1 --cuda-graphs=always tp=1 pp=1 micro_batch=8 zero_stage=0
tp_pp_dp llama_gqa f32 8 - tp=2 pp=2 dp=2 cp=1 zero_stage=0 schedule=1f1b micro_batch=1
cp_zero3 llama_gqa f32 4 - tp=1 pp=1 cp=2 cp_style=zigzag zero_stage=3 dp_shard=4 micro_batch=2
ulysses_zero2 qwen2 f32 4 - tp=1 pp=1 cp=2 cp_style=ulysses zero_stage=2 micro_batch=2
two_chunks gpt2 bf16 2 - tp=1 pp=2 vpp=2 cp=1 zero_stage=0 schedule=interleaved_1f1b micro_batch=2 recompute=full
zero_bubble gpt2 bf16 2 - tp=1 pp=2 cp=1 zero_stage=0 schedule=zb_h1 micro_batch=1
fused_loss gemma2 bf16 2 - tp=2 pp=1 cp=1 zero_stage=0 micro_batch=4 sequence_parallel=true fused_loss=true
vocabulary llama_tied f32 4 - tp=2 pp=2 cp=1 zero_stage=0 schedule=1f1b vocab=parallel_naive micro_batch=1
expert_parallel qwen3_moe f32 4 - tp=2 pp=1 cp=1 sequence_parallel=true ep=4 etp=1 moe_overlap=none zero_stage=0 micro_batch=2
pairs mixtral f32 4 - tp=1 pp=2 cp=1 ep=2 schedule=dualpipe_v moe_overlap=pair zero_stage=1 micro_batch=1 recompute=full
ampipe deepseek_v3 f32 4 - tp=2 pp=2 cp=1 sequence_parallel=true ep=2 etp=1 schedule=1f1b moe_overlap=ampipe moe_overlap_degree=2 zero_stage=0 micro_batch=1
overlapped_1f1b mixtral f32 4 - tp=1 pp=2 vpp=2 cp=1 ep=2 schedule=overlapped_1f1b moe_overlap=pair zero_stage=1 micro_batch=1 recompute=full
biases deepseek_v3_bias f32 4 - tp=1 pp=2 cp=1 ep=2 etp=1 schedule=1f1b moe_overlap=none zero_stage=1 micro_batch=1
partly_rotated stablelm f32 4 - tp=2 pp=2 cp=1 zero_stage=0 schedule=1f1b micro_batch=1
zero3 llama_gqa f32 4 - tp=1 pp=1 cp=1 zero_stage=3 dp_shard=4 micro_batch=1
sinks gpt_oss f32 2 - tp=1 pp=1 cp=1 ep=2 etp=1 moe_overlap=none zero_stage=1 micro_batch=2
activations_in_host_memory llama_gqa f32 2 - tp=1 pp=2 cp=1 zero_stage=0 schedule=1f1b offload=activations micro_batch=1
optimizer_in_host_memory llama_gqa f32 2 - tp=1 pp=1 cp=1 dp=2 zero_stage=2 offload=optimizer micro_batch=2
post_validation gpt2 f32 2 - tp=1 pp=2 cp=1 zero_stage=0 schedule=zb_h1 post_validation=true micro_batch=1
dropout gpt2 f32 1 --cuda-graphs=always,--as={"attn_pdrop":0.1,"embd_pdrop":0.1,"resid_pdrop":0.1} tp=1 pp=1 micro_batch=8 zero_stage=0
documents gpt2 f32 2 --document-end=7 tp=1 pp=1 cp=2 cp_style=ring zero_stage=0 micro_batch=4
LIST
}

# Generates and builds the trainer of a plan: NAME, and the model's name as its crate has it.
build() {
  "$plan" generate "$target/$1.yaml" -o "$target/$1" >>"$target/$1.log"
  CARGO_TARGET_DIR=$target cargo build --quiet --release --features cuda --manifest-path "$target/$1/Cargo.toml"
  strip -o "$folder/$1" "$target/release/trainer-${2//_/-}"
}

programs | while read -r name case format ranks flags decisions; do
  settings=() model=tests/golden/$case/config.json
  [ -e "$model" ] || model=tests/golden/$case/model.yaml
  for decision in $decisions; do settings+=(--set "$decision"); done
  [ "$flags" != - ] || flags=
  changes=$(sed -n 's/.*--as=//p' <<<"$flags")
  flags=$(sed 's/--as=.*//; s/,/ /g' <<<"$flags")
  if [ "$changes" ]; then
    mkdir -p "$target/$name-model/$case"
    python3 -c 'import json, sys
print(json.dumps(json.load(open(sys.argv[1])) | json.loads(sys.argv[2])))' "$model" "$changes" >"$target/$name-model/$case/config.json"
    model=$target/$name-model/$case/config.json
  fi
  "$plan" --model "$model" --cluster dgx_h100 --gpus "$ranks" --global-batch 8 \
    --seq-len 32 --set "dtype=$format" "${settings[@]}" -o "$target/$name.yaml" >"$target/$name.log"
  build "$name" "$case"
  rm -f "$folder/$name.wanted.jsonl"
  if [ "$changes" ] || [[ $flags == *--document-end* ]]; then
    "$folder/$name" --init-from "tests/golden/$case" --data "tests/golden/$case/tokens.safetensors" --steps 20 \
      --metrics "$folder/$name.wanted.jsonl" $flags >>"$target/$name.log"
  fi
  echo "$name $case $format $ranks $flags" >>"$folder/list.txt"
done

# Shipped models as they are planned by default. Model, sequences of a step; the last has another
# dropout than the shipped one.
while read -r model sequences dropout; do
  given=$model name=$model
  if [ "$dropout" ]; then
    name=${model}_dropout_$dropout given=$target/$name.model.yaml
    sed "s/^dropout: .*/dropout: $dropout/; s/^name: .*/name: $name/" "models/shipped/models/$model.yaml" >"$given"
  fi
  "$plan" --model "$given" --cluster dgx_h200 --gpus 1 --global-batch "$sequences" -o "$target/$name.yaml" >"$target/$name.log"
  build "$name" "$name"
done <<'LIST'
gpt2_124m 64
ampipe_base 8
ampipe_base 8 0
LIST
