#!/usr/bin/env python3
"""Calibrates this machine, plans a model for some splits, trains each as planned, and compares step
times.

    tools/planned_and_seen.py --plan target/release/plan [--gpus 2] [--rounds 3] [--steps 10] [--markdown FILE]

Every round calibrates and then trains, because a machine's speed drifts; the median round counts.
Step times are medians, as in calibration. The model is not one that calibration times.
"""

import argparse
import json
import os
import pathlib
import statistics
import struct
import subprocess
import tempfile

MODEL = """name: seen
layers: 4
hidden: 512
heads: 8
kv_heads: 4
ffn: 1408
vocab: 2000
seq_len: 128
global_batch: 8
"""
HEADING = """# Predicted and measured on a laptop

Written by `make calibration` on an otherwise idle machine. Each round calibrates, plans and trains;
the median round counts. Rounds differ because a virtual machine's speed drifts between calibration
and training.

"""
SPLITS = [(1, []), (2, ["tp=2", "sequence_parallel=false"]), (2, ["dp=2"]), (2, ["pp=2", "micro_batch=1"])]


def tokens(path):
    """A document in Megatron's format."""
    count = 65536
    path.with_suffix(".bin").write_bytes(struct.pack(f"<{count}H", *(i * 7919 % 2000 for i in range(count))))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
    path.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", count, 0, 0, 1))


def middle(values):
    return statistics.median(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plan", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--markdown", type=pathlib.Path)
    flags = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="seen-"))
    (folder / "model.yaml").write_text(MODEL)
    tokens(folder / "tokens")
    cluster = folder / "cluster.yaml"

    # Trainers share a target folder.
    environment = {**os.environ, "CARGO_TARGET_DIR": str(folder / "target")}

    def plan(*words):
        subprocess.run([flags.plan, *map(str, words)], check=True, stdout=subprocess.DEVNULL, env=environment)

    def planned_s(number, gpus, pinned):
        name = folder / f"{number}.yaml"
        settings = [word for setting in [*pinned, "recompute=none"] for word in ("--set", setting)]
        plan("--prove", "--model", folder / "model.yaml", "--cluster", cluster, "--gpus", gpus, *settings, "-o", name)
        return next(float(line.split(":")[1]) for line in name.read_text().splitlines() if "iteration_s:" in line)

    def seen_s(number, steps):
        metrics = folder / f"{number}.jsonl"
        metrics.unlink(missing_ok=True)
        plan("launch", folder / f"trainer{number}", "--", "--data", folder / "tokens.bin", "--steps", steps, "--metrics", metrics)
        return sorted(8 * 128 / json.loads(line)["tokens_per_s"] for line in metrics.read_text().splitlines()[1:])

    def calibrate():
        plan("calibrate", "--cluster", "laptop", "--gpus", flags.gpus, "-o", cluster)

    # Built once: splits are pinned, so a later calibration gives the same programs.
    calibrate()
    for number, (gpus, pinned) in enumerate(SPLITS):
        planned_s(number, gpus, pinned)
        plan("generate", folder / f"{number}.yaml", "-o", folder / f"trainer{number}")
        seen_s(number, 2)
    print("built", flush=True)
    rounds = [[] for _ in SPLITS]
    for turn in range(flags.rounds):
        calibrate()
        for number, (gpus, pinned) in enumerate(SPLITS):
            seen = seen_s(number, flags.steps)
            rounds[number].append((planned_s(number, gpus, pinned), seen[0], middle(seen)))
            print(turn, " ".join(pinned) or "one rank", " ".join(f"{1e3 * s:.0f}" for s in rounds[number][-1]), "ms", flush=True)
    lines = ["| ranks | split | planned | measured, best | median | planned over median | of every round |", "|---|---|---|---|---|---|---|"]
    for (gpus, pinned), found in zip(SPLITS, rounds):
        ratios = [predicted / median for predicted, _, median in found]
        columns = " | ".join(f"{1e3 * middle(column):.0f} ms" for column in zip(*found))
        every = " ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {gpus} | {' '.join(pinned) or 'one rank'} | {columns} | {middle(ratios):.2f} | {every} |")
    text = HEADING + "\n".join(lines) + "\n\nThe last round's cluster:\n\n```yaml\n" + cluster.read_text() + "```\n"
    print(text)
    if flags.markdown:
        flags.markdown.write_text(text)


if __name__ == "__main__":
    main()
