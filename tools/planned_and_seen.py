#!/usr/bin/env python3
"""Calibrates this machine, plans a model for some splits, trains each as planned, and compares step times.

    tools/planned_and_seen.py --plan target/release/plan [--gpus 2] [--steps 12] [--markdown FILE]

Steps are compared by their best, as everything is measured here: other programs disturb the mean. The model is none
of those that calibration times.
"""

import argparse
import json
import pathlib
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
SPLITS = [(1, []), (2, ["tp=2", "sequence_parallel=false"]), (2, ["dp=2"]), (2, ["pp=2", "micro_batch=1"])]


def tokens(path):
    """A document of Megatron's format."""
    count = 65536
    path.with_suffix(".bin").write_bytes(struct.pack(f"<{count}H", *(i * 7919 % 2000 for i in range(count))))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
    path.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", count, 0, 0, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plan", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--markdown", type=pathlib.Path)
    flags = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="seen-"))
    (folder / "model.yaml").write_text(MODEL)
    tokens(folder / "tokens")

    def plan(*words):
        subprocess.run([flags.plan, *map(str, words)], check=True, stdout=subprocess.DEVNULL)

    cluster = folder / "cluster.yaml"
    plan("calibrate", "--cluster", "laptop", "--gpus", flags.gpus, "-o", cluster)
    lines = ["| ranks | split | planned | seen, best | median | planned over best |", "|---|---|---|---|---|---|"]
    for number, (gpus, pinned) in enumerate(SPLITS):
        name, trainer = folder / f"{number}.yaml", folder / f"trainer{number}"
        settings = [word for setting in [*pinned, "recompute=none"] for word in ("--set", setting)]
        plan("--model", folder / "model.yaml", "--cluster", cluster, "--gpus", gpus, *settings, "-o", name)
        predicted = next(float(line.split(":")[1]) for line in name.read_text().splitlines() if "iteration_s:" in line)
        plan("generate", name, "-o", trainer)
        metrics = folder / f"{number}.jsonl"
        plan("launch", trainer, "--", "--data", folder / "tokens.bin", "--steps", flags.steps, "--metrics", metrics)
        seen = sorted(8 * 128 / json.loads(line)["tokens_per_s"] for line in metrics.read_text().splitlines()[1:])
        best, median = seen[0], seen[len(seen) // 2]
        split = " ".join(pinned) or "one rank"
        lines.append(f"| {gpus} | {split} | {predicted * 1e3:.0f} ms | {best * 1e3:.0f} ms | {median * 1e3:.0f} ms | {predicted / best:.2f} |")
        print(lines[-1], flush=True)
    print(cluster.read_text())
    if flags.markdown:
        flags.markdown.write_text("# Planned and seen\n\nWritten by `make calibration`.\n\n" + "\n".join(lines) + "\n\n```yaml\n"
                                  + cluster.read_text() + "```\n")


if __name__ == "__main__":
    main()
