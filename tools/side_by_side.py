#!/usr/bin/env python3
"""Trains the anchor model with this project and with PyTorch in turn, and prints both speeds and
their ratio.

    tools/side_by_side.py --step target/release/deps/step-... [--rounds 3] [--steps 4] [--threads 2] [--markdown FILE]

Run it with a Python that has torch (`make bench` makes one). A round is a few steps of ours and a
few of PyTorch's, so that a disturbance of the machine affects both. Speeds are those of the best
step of all rounds; medians are printed too.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TOKENS = 8 * 256
SPLITS = ["one", "tp2", "tp2sp", "pp2", "dp2"]


def said(command):
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split("\n")[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--step", required=True, help="the benchmark `step` of meshwright-runtime, built")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", type=pathlib.Path)
    flags = parser.parse_args()
    threads, steps = str(flags.threads), str(flags.steps)
    torch_script = [sys.executable, HERE / "torch_anchor.py"]
    subprocess.run([*torch_script, "--check", HERE.parent / "tests/golden/llama_gqa"], check=True, stdout=subprocess.DEVNULL)
    seconds, peaks, version = {}, {"ours": [], "torch": []}, ""
    for _ in range(flags.rounds):
        theirs = said([*torch_script, "--threads", threads, "--steps", steps])
        ours = said([flags.step, "--bench", "--json", threads, steps, *SPLITS])
        version, parameters = theirs["torch"], theirs["parameters"]
        seconds.setdefault("PyTorch", []).extend(theirs["step_s"])
        for split, times in ours["step_s"].items():
            seconds.setdefault(split, []).extend(times)
        peaks["torch"].append(theirs["gemm_flops_per_s"])
        peaks["ours"].append(ours["gemm_flops_per_s"])
    peak = max(max(peaks["ours"]), max(peaks["torch"]))
    # Counted as in the trainer: 6 for every parameter except the embedding, and attention in full.
    flops = 3 * TOKENS * (2 * (parameters - 515 * 512) + 8 * 4 * 256 * 512)
    lines = [f"| {flags.threads} threads, PyTorch {version} | tokens/s, best step | median | model GFLOP/s | of a large product's |",
             "|---|---|---|---|---|"]
    rate = {name: TOKENS / min(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        best, median = rate[name], TOKENS / statistics.median(times)
        lines.append(f"| {name} | {best:.0f} | {median:.0f} | {flops / TOKENS * best / 1e9:.0f} | {flops / TOKENS * best / peak:.0%} |")
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    summary = (f"one rank over PyTorch: {rate['one'] / rate['PyTorch']:.2f} by best steps, "
               f"{middle['PyTorch'] / middle['one']:.2f} by medians; tp2 over one rank: {rate['tp2'] / rate['one']:.2f} "
               f"and {middle['one'] / middle['tp2']:.2f}; a product of 2048 x 2048: {max(peaks['ours']) / 1e9:.0f} GFLOP/s ours, "
               f"{max(peaks['torch']) / 1e9:.0f} PyTorch's")
    print(*lines, "", summary, sep="\n")
    if flags.markdown:
        flags.markdown.write_text("\n".join([*lines, "", summary, ""]))


if __name__ == "__main__":
    main()
