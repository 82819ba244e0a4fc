#!/bin/sh
# Runs that are interrupted or lose a process end soon, with an exit code that says so: Ctrl-C with
# ranks as threads and as MPI processes, a killed process, a rank that fails alone, a wrong number
# of processes. The argument is the example `golden`, built with the feature `mpi`.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
golden=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CASE=llama_gqa TP=2 PP=2 DP=2 MICRO_BATCH=1
failed=0

# Training data: 4,096 tokens as one document in Megatron's format.
python3 - "$scratch/tokens" <<'PYTHON'
import struct, sys
count = 4096
with open(sys.argv[1] + ".bin", "wb") as data:
    data.write(struct.pack(f"<{count}H", *(i * 7919 % 515 for i in range(count))))
with open(sys.argv[1] + ".idx", "wb") as index:
    index.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", count, 0, 0, 1))
PYTHON

ok() { echo "$1: exit code $2"; }
wrong() { echo "$1: $2" >&2; failed=1; }

# Starts a run of many steps in the background and waits for its first step. Sets $run.
start() {
    : >"$scratch/metrics"
    "$@" "$golden" --data "$scratch/tokens.bin" --steps 1000000 --metrics "$scratch/metrics" \
        --dump-weights "$scratch/weights" 2>"$scratch/said" &
    run=$!
    for _ in $(seq 600); do
        [ -s "$scratch/metrics" ] && return
        sleep 0.1
    done
    wrong "$*" "no step within a minute"
}

# Waits up to 30 s for $run to end. Arguments: name, minimum and maximum exit code.
ends() {
    for _ in $(seq 300); do
        kill -0 "$run" 2>/dev/null || break
        sleep 0.1
    done
    if kill -0 "$run" 2>/dev/null; then
        kill -9 "$run"
        wrong "$1" "still runs after 30 s"
        return
    fi
    wait "$run"
    code=$?
    if [ "$code" -ge "$2" ] && [ "$code" -le "$3" ]; then ok "$1" "$code"; else wrong "$1" "exit code $code, not $2 to $3"; fi
}

mpi="mpirun --allow-run-as-root --oversubscribe -n 8"

start env
kill -INT "$run"
ends "Ctrl-C, ranks as threads" 130 130
grep -q "steps are done" "$scratch/said" || wrong "Ctrl-C" "$(cat "$scratch/said")"
[ -s "$scratch/weights" ] || wrong "Ctrl-C" "no weights were written"
python3 -c "import json, sys; [json.loads(line) for line in open(sys.argv[1])]" "$scratch/metrics" || wrong "Ctrl-C" "torn metrics"

if command -v mpirun >/dev/null; then
    start $mpi
    kill -INT "$run"
    ends "Ctrl-C, ranks as processes" 1 255

    start $mpi
    kill -9 "$(pgrep -P "$run" | sed -n 3p)"
    ends "a killed rank" 1 255

    # Only rank 0 writes metrics.
    timeout 60 $mpi "$golden" --data "$scratch/tokens.bin" --steps 5 --metrics /dev/full >"$scratch/said" 2>&1
    code=$?
    if [ $code -ne 0 ] && [ $code -ne 124 ] && grep -q "No space left" "$scratch/said"; then ok "a full disk on one rank" $code
    else wrong "a full disk on one rank" "exit code $code: $(cat "$scratch/said")"; fi

    timeout 60 mpirun --allow-run-as-root --oversubscribe -n 4 "$golden" --data "$scratch/tokens.bin" --steps 5 >"$scratch/said" 2>&1
    code=$?
    if [ $code -ne 0 ] && [ $code -ne 124 ] && grep -q "4 processes; the plan is for 8" "$scratch/said"; then ok "four processes for eight ranks" $code
    else wrong "four processes for eight ranks" "exit code $code: $(cat "$scratch/said")"; fi
else
    wrong "mpirun" "is not installed: make mpi installs it"
fi
exit $failed
