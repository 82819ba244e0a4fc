#!/bin/sh
# Trains golden cases with ranks as threads and as MPI processes, and compares metrics (without
# times), weights and rank reports (without the processes' memory) byte by byte. The argument is the
# example `golden`, built with the feature `mpi`.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
golden=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

train() { # name, launcher...
    name=$1
    shift
    data=$root/tests/golden/$CASE
    "$@" "$golden" --init-from "$data" --data "$data/tokens.safetensors" --steps 20 --metrics "$scratch/$name.jsonl" \
        --dump-weights "$scratch/$name.safetensors" --rank-report "$scratch/$name.ranks"
    sed -i 's/"tokens_per_s.*//' "$scratch/$name.jsonl"
    sed -i 's/"process_memory":{[^}]*},//g' "$scratch/$name.ranks"
}

compare() { # CASE TP PP DP
    export CASE=$1 TP=$2 PP=$3 DP=$4 MICRO_BATCH=1
    train threads
    train mpi mpirun --allow-run-as-root --oversubscribe -n $((TP * PP * DP))
    for kind in jsonl safetensors ranks; do cmp "$scratch/threads.$kind" "$scratch/mpi.$kind"; done
    echo "$CASE tp=$TP pp=$PP dp=$DP: the same bytes"
}

compare llama_gqa 2 2 2
compare gemma2 4 1 2
compare gpt2 2 4 1
