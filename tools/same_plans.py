#!/usr/bin/env python3
"""Proves that a change moved no number: two `plan` binaries must write the same bytes.

    tools/same_plans.py BEFORE AFTER [--repeat N]

Runs 40 requests (10 shipped models, 4 clusters and sizes each) with both binaries and compares
the plan.yaml files byte by byte. A plan.yaml holds no time of its own search, so nothing is
masked. Compares `plan validate` on tests/papers/measured.csv as well, as a table and as JSON.

Prints CPU seconds of both for every request, the least of N runs, and their ratio over all
searches. Exits 1 where anything differs or a run fails. Python's standard library only.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEASURED = ROOT / "tests/papers/measured.csv"

# Model, then GPUs, cluster and pinned decisions. Pins reach what the best plans leave out.
REQUESTS = {
    "gpt2_124m": [
        "8 dgx_h100 recompute=selective",
        "16 a10g_pcie",
        "4 laptop",
        "8 a800 schedule=zb_h1 pp=4",
    ],
    "llama8b": [
        "64 dgx_h100",
        "32 a100_40g offload=optimizer",
        "256 gb200_nvl72 dtype=fp8",
        "128 h100_hbm2e cp=8 cp_style=ring",
    ],
    "llama70b": [
        "128 dgx_h100",
        "512 dgx_b200 zero_stage=3",
        "256 h800 vocab=parallel_2",
        "1024 gb300_nvl72",
    ],
    "gemma2_9b": [
        "16 dgx_h100",
        "64 a100_roce",
        "32 a100_40g recompute=full",
        "128 dgx_b200 cp=4 cp_style=ulysses",
    ],
    "mixtral_8x7b": [
        "64 dgx_h100 moe_overlap=ampipe",
        "128 a100_roce",
        "256 dgx_h200 moe_overlap=tutel",
        "72 gb200_nvl72",
    ],
    "qwen3_30b_a3b": [
        "32 dgx_h100",
        "64 h800 ep=8",
        "16 dgx_b300 recompute=selective",
        "72 gb300_nvl72",
    ],
    "deepseek_v2": [
        "64 dgx_h200",
        "128 h800",
        "256 dgx_b200 cp=2 cp_style=all_gather",
        "512 gb200_nvl72 zero_stage=2",
    ],
    "gpt3_175b": [
        "96 selene",
        "256 dgx_h100 schedule=dualpipe_v",
        "512 selene recompute=selective sequence_parallel=false",
        "128 dgx_b200",
    ],
    "vocab_4b": [
        "8 a100_roce vocab=parallel_1",
        "32 dgx_h100",
        "16 selene vocab=redistribute pp=8",
        "8 dgx_h200 dtype=fp16",
    ],
    "ampipe_large": [
        "8 a800 moe_overlap=ampipe",
        "32 dgx_b200",
        "8 dgx_h100 etp=2",
        "16 a100_roce",
    ],
}


def run(binary, arguments):
    """Exit status, standard output and CPU seconds of one run, which is shown where it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen([binary, *arguments], stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode != 0:
            text = err.read().decode(errors="replace")
            print(f"{binary} {' '.join(arguments)} ended with {child.returncode}:\n{text}")
        return child.returncode, out.read(), usage.ru_utime + usage.ru_stime


def planned(binary, arguments, folder, repeat):
    """The bytes of the plan, None where there is none, and the least CPU seconds."""
    path = pathlib.Path(folder) / "plan.yaml"
    least = float("inf")
    plan = None
    for _ in range(repeat):
        path.unlink(missing_ok=True)
        status, _, cpu_s = run(binary, [*arguments, "-o", str(path)])
        if status != 0:
            return None, cpu_s
        plan = path.read_bytes()
        least = min(least, cpu_s)
    return plan, least


def first_difference(before, after):
    """The first line that differs, of both."""
    lines = [text.decode(errors="replace").splitlines() for text in (before, after)]
    for number, (left, right) in enumerate(zip(*lines), start=1):
        if left != right:
            return f"line {number}: {left[:200]!r}, now {right[:200]!r}"
    return f"{len(lines[0])} lines, now {len(lines[1])}"


def verdict(before, after):
    """Whether two outputs are there and equal, and a word on it."""
    if before is None or after is None:
        return False, "FAILED"
    if before == after:
        return True, "same"
    return False, "DIFFERENT: " + first_difference(before, after)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", help="a plan binary")
    parser.add_argument("after", help="another, built with the same flags")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, the least time counts")
    flags = parser.parse_args()
    binaries = [os.path.abspath(binary) for binary in (flags.before, flags.after)]
    all_same = True
    totals = [0.0, 0.0]
    number = 0
    with tempfile.TemporaryDirectory(prefix="same-plans-") as folder:
        for model, sizes in REQUESTS.items():
            for size in sizes:
                gpus, cluster, *pins = size.split()
                arguments = ["--prove", "--model", model, "--gpus", gpus, "--cluster", cluster]
                arguments += [part for pin in pins for part in ("--set", pin)]
                # They take turns in going first, so that neither always finds a cold cache.
                swapped = number % 2 == 1
                number += 1
                order = binaries[::-1] if swapped else binaries
                runs = [planned(binary, arguments, folder, flags.repeat) for binary in order]
                runs = runs[::-1] if swapped else runs
                same, word = verdict(*(plan for plan, _ in runs))
                all_same &= same
                times = [cpu_s for _, cpu_s in runs]
                totals = [total + cpu_s for total, cpu_s in zip(totals, times)]
                print(f"{times[0]:6.2f} {times[1]:6.2f} s  {model} {size}  {word}", flush=True)
    for form in ([], ["--json"]):
        arguments = ["validate", "--measured", str(MEASURED), *form]
        runs = [run(binary, arguments) for binary in binaries]
        same, word = verdict(*(out if status == 0 else None for status, out, _ in runs))
        all_same &= same
        print(f"{runs[0][2]:6.2f} {runs[1][2]:6.2f} s  plan validate {' '.join(form)} {word}")
    ratio = totals[1] / totals[0]
    print(f"{totals[0]:6.2f} {totals[1]:6.2f} s of CPU for all searches, a ratio of {ratio:.3f}")
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()
