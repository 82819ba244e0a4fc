#!/usr/bin/env python3
"""The losses of a generated trainer beside PyTorch's, as a line of JSON. tools/gpu_all.sh runs it:

    tools/gpu_program_losses.py NAME CASE FORMAT EXIT_STATUS OUT WANTED

OUT/program-NAME.jsonl is what the trainer wrote with --metrics. WANTED is a file of
the same kind, with losses of the same trainer on processors: where it is there, they are wanted in
place of PyTorch's. In f32, losses may be off by 1e-4;
in bf16 by 2e-3 of themselves, as those of gpu_golden.
"""

import json
import pathlib
import sys

TOLERANCES = {"f32": (1e-4, 0.0), "bf16": (0.0, 2e-3)}


def losses_of(metrics):
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def main():
    name, case, number_format, status, out, on_processors = sys.argv[1:]
    out, on_processors = pathlib.Path(out), pathlib.Path(on_processors)
    if on_processors.exists():
        wanted = losses_of(on_processors)
    else:
        wanted = json.loads(pathlib.Path(f"tests/golden/{case}/expected.json").read_text())["trajectory"]["loss_f64"]
    metrics, ranks = out / f"program-{name}.jsonl", out / f"program-{name}-ranks.jsonl"
    losses = losses_of(metrics) if metrics.exists() else []
    absolute, relative = TOLERANCES[number_format]
    off = [abs(loss - right) for loss, right in zip(losses, wanted)]
    within = all(by <= absolute + relative * right for by, right in zip(off, wanted))
    row = {"program": name, "case": case, "format": number_format, "steps": len(losses),
           "beside": "processors" if on_processors.exists() else "PyTorch", "worst_loss_off": max(off, default=None),
           "worst_loss_relative": max((by / right for by, right in zip(off, wanted)), default=None)}
    if ranks.exists():
        first = json.loads(ranks.read_text().splitlines()[0])
        row["cuda_graphs"] = first.get("cuda_graphs")
    right = status == "0" and len(losses) == len(wanted) and within
    row["result"] = "ok" if right else (out / f"program-{name}.log").read_text()[-600:]
    print(json.dumps(row))
    sys.exit(not right)


if __name__ == "__main__":
    main()
