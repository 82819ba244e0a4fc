#!/usr/bin/env python3
"""PyTorch's speed on the GPU that gpu-bench measured, for the same products and attentions; then all
results beside their requirements. `tools/gpu_all.sh` makes the files it reads:

    tools/gpu_side_by_side.py --bench bench.json --steps steps.jsonl --predicted predicted.json

Attention is PyTorch's fused attention with each of its backends (cuDNN, flash). Products are
torch.matmul in bf16. A kernel's time is the minimum of five measurements. Without PyTorch there are
only results that do not need it.
"""

import argparse
import json
import statistics
import sys
import time

from gpu_torch_step import MODELS

ATTENTIONS = [
    (8, 1024, 12, 12, 64),
    (8, 2048, 64, 8, 128),
    (4, 4096, 64, 8, 128),
    (2, 8192, 64, 8, 128),
    (1, 16384, 64, 8, 128),
    (2, 8192, 32, 8, 128),
    (2, 8192, 16, 8, 256),
]
LAYERS = [
    ("GPT-2 124M", 8192, 768, 3072),
    ("GPT-2 1.5B", 8192, 1600, 6400),
    ("Llama 3 8B", 8192, 4096, 14336),
    ("square", 8192, 8192, 8192),
]
# Minimum fraction of the peak for a step.
MFU = {"GPT-2 124M": 0.40, "GPT-2 1.5B": 0.50, "Llama 3 8B, 4 layers": 0.54}
MFU_FORMULA = "(6 x weights that are multiplied x tokens + 12 x layers x hidden x query-key pairs that see each other) / (s x peak)"
# Required ratios: speed to PyTorch's, bandwidth to a copy's, speed to the best cuBLASLt
# algorithm's, attention's time to cuDNN's, predicted to measured step time.
OVER_TORCH, OF_COPY, OF_BEST, OVER_CUDNN, OFF_PREDICTED = 1.05, 0.85, 0.97, 1.05, 0.05
# Dense bf16 peak of the datasheet, FLOP/s.
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "B200": 2250e12}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", help="what gpu-bench wrote")
    parser.add_argument("--steps", help="lines of steps, ours and PyTorch's")
    parser.add_argument("--predicted", help="what plan calibrate --gpu --steps wrote")
    parser.add_argument("--gpu", default="", help="the GPU's name, where none is here and there is no --bench")
    parser.add_argument("--json", default="gpu-torch.json", help="where the figures go")
    return parser.parse_args()


def least_seconds(torch, run, launches=10, warm=3, times=5):
    for _ in range(warm):
        run()
    least = float("inf")
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(launches):
            run()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / 1e3 / launches)
    return least


def products(torch):
    rows = []
    for name, tokens, inputs, outputs in LAYERS:
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        for what, shape, run in [
            ("forward NT", (tokens, outputs, inputs), lambda: x @ w.T),
            ("to inputs NN", (tokens, inputs, outputs), lambda: dy @ w),
            ("to weights TN", (outputs, inputs, tokens), lambda: dy.T @ x),
        ]:
            seconds = least_seconds(torch, run)
            m, n, k = shape
            rows.append((f"product, {name} {what}", f"{m} x {n} x {k}", seconds, 2 * m * n * k / seconds / 1e12))
    return rows


def visible_pairs(length):
    return length * (length + 1) // 2


def attentions(torch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    rows = []
    for batch, length, heads, kv_heads, dim in ATTENTIONS:
        shape = f"{batch} x {length}, {heads}/{kv_heads} heads of {dim}, causal"

        def tensor(count):
            return torch.randn(batch, count, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
        best = {}  # by pass and backend
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def forward():
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

            try:
                with sdpa_kernel(backend):
                    out = forward()
                    dout = torch.randn_like(out)
                    with torch.no_grad():
                        ahead = least_seconds(torch, forward)
                    # Retain the graph, so that only the backward pass is timed.
                    back = least_seconds(
                        torch, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                    )
            except RuntimeError as error:
                print(f"{shape}: {backend}: {error}", file=sys.stderr)
                continue
            for what, seconds in (("forward", ahead), ("backward", back), ("both", ahead + back)):
                best[what, backend.name] = seconds
        pairs = batch * heads * visible_pairs(length)
        flops = {"forward": 4 * pairs * dim, "backward": 10 * pairs * dim, "both": 14 * pairs * dim}
        for (what, backend), seconds in best.items():
            rows.append((f"attention {what}", shape, seconds, flops[what] / seconds / 1e12, backend))
    return rows


def step_flops(layers, hidden, heads, kv_heads, wide, vocabulary, length, llama, sequences):
    dim = hidden // heads
    layer = hidden * (heads + 2 * kv_heads) * dim + hidden * hidden + hidden * wide * (3 if llama else 2)
    multiplied = layers * layer + hidden * vocabulary
    pairs = sequences * visible_pairs(length)
    return 6 * multiplied * sequences * length + 12 * layers * hidden * pairs


def middle_of(seconds):
    return statistics.median(seconds) if seconds else None


def steps(path):
    """Each model's seconds, from the lines of gpu_torch_step.py and of the script that ran ours:
    PyTorch's with its better backend, with what it is of; ours as trainers run by default, or
    replayed; ours launched. Each is the median of its runs. The models' sequences are those that
    were run last."""
    found = {}
    for line in open(path, encoding="utf-8") if path else ():
        row = json.loads(line)
        if row["by"] == "torch without clipping":
            continue
        by = (row["by"], row["backend"], row["compiled"]) if row["by"] == "torch" else row["by"]
        found.setdefault((row["model"], row["sequences"]), {}).setdefault(by, []).append(row["s"])
    medians = {name: {by: middle_of(seconds) for by, seconds in runs.items()} for name, runs in found.items()}
    return {
        name: {
            "torch": min(((s, f"{by[1]}, compiled {by[2]}") for by, s in runs.items() if by[0] == "torch"), default=None),
            "own": runs.get("default", runs.get("replayed")),
            "launched": runs.get("launched"),
        }
        for name, runs in medians.items()
    }


def requirement(what, shape, value, wanted, met):
    return {"what": what, "shape": shape, "value": value, "wanted": wanted, "met": met}


def absent(what, shape, wanted):
    return requirement(what, shape, None, wanted, None)


def of_steps(timed, predicted, peak):
    """Tokens a second beside PyTorch's, fractions of the peak, and errors of predictions."""
    rows = []
    for (name, sequences), of in timed.items():
        *shape_of_model, llama = MODELS[name]
        length = shape_of_model[-1]
        shape, tokens = f"{sequences} x {length}", sequences * length
        own, torch_best = of["own"], of["torch"]
        for what, s in (("tokens/s", own), ("tokens/s, launched kernel by kernel", of["launched"])):
            if s is not None:
                rows.append(requirement(f"{what}, {name}", shape, tokens / s, "measured", True))
        if torch_best is not None:
            what = f"tokens/s of PyTorch, {name} ({torch_best[1]})"
            rows.append(requirement(what, shape, tokens / torch_best[0], "measured", True))
        wanted = f"at least {OVER_TORCH}"
        if own is None or torch_best is None:
            rows.append(absent(f"tokens/s over PyTorch's, {name}", shape, wanted))
        else:
            ratio = torch_best[0] / own
            rows.append(requirement(f"tokens/s over PyTorch's, {name}", shape, ratio, wanted, ratio >= OVER_TORCH))
        wanted = f"at least {MFU[name]}"
        if own is None or peak is None:
            rows.append(absent(f"MFU, {name}", shape, wanted))
        else:
            part = step_flops(*shape_of_model, llama, sequences) / own / peak
            rows.append(requirement(f"MFU, {name}", shape, part, wanted, part >= MFU[name]))
    wanted = f"1, off by at most {OFF_PREDICTED}"
    for name, step in predicted.items():
        ratio = step["predicted_s"] / step["measured_s"]
        met = abs(ratio - 1) <= OFF_PREDICTED
        rows.append(requirement(f"predicted over measured step time, {name}", "", ratio, wanted, met))
    return rows


def of_kernels(ours, beside):
    """Memory-bound kernels beside a copy, products beside the best algorithm, attention beside
    cuDNN."""
    rows = []
    for (kernel, shape), row in ours.items():
        # Attention is compared with PyTorch's below; its share here is of this machine's cuDNN.
        if row.get("share") is None or kernel == "copy" or kernel.startswith("attention"):
            continue
        is_product = kernel.startswith("product")
        least = OF_BEST if is_product else OF_COPY
        what = f"{kernel}, of the best algorithm" if is_product else f"{kernel}, of a copy's bandwidth"
        rows.append(requirement(what, shape, row["share"], f"at least {least}", row["share"] >= least))
    for batch, length, heads, kv_heads, dim in ATTENTIONS:
        shape = f"{batch} x {length}, {heads}/{kv_heads} heads of {dim}, causal"
        own = ours.get(("attention both", shape), {}).get("us")
        cudnn = beside.get(("attention both", shape))
        what, wanted = "attention's time over cuDNN's", f"at most {OVER_CUDNN}"
        if own is None or cudnn is None:
            rows.append(absent(what, shape, wanted))
        else:
            rows.append(requirement(what, shape, own / cudnn, wanted, own / cudnn <= OVER_CUDNN))
    return rows


def table(rows):
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    said = {True: "yes", False: "NO", None: ""}
    for row in rows:
        cells = (
            said[cell] if cell is None or isinstance(cell, bool) else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
            for cell in row.values()
        )
        print("| " + " | ".join(cells) + " |")


def loaded(path):
    if not path:
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def torch_with_gpu():
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def entries_of(rows, ours):
    entries = []
    for kernel, shape, seconds, tflops, *backend in rows:
        own = ours.get((kernel, shape), {}).get("us")
        entries.append(
            {
                "kernel": kernel,
                "shape": shape,
                "backend": backend[0] if backend else None,
                "torch us": seconds * 1e6,
                "torch TFLOP/s": tflops,
                "us": own,
                "torch over ours": seconds * 1e6 / own if own else None,
            }
        )
    return entries


def main():
    options = parse()
    bench = loaded(options.bench)
    predicted = {step["model"]: step for step in loaded(options.predicted) or []}
    ours = {(row["kernel"], row["shape"]): row for row in (bench or {}).get("kernels", [])}
    timed = steps(options.steps)
    torch = torch_with_gpu()
    if torch is None and not (bench or timed):
        sys.exit("error: no PyTorch that sees a GPU here, and nothing that was measured: run this where the GPU is")
    gpu = bench["gpu"] if bench else torch.cuda.get_device_name() if torch else options.gpu
    head = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "gpu": gpu}
    entries = []
    if torch is None:
        print("no PyTorch that sees a GPU here: no kernel is beside its", file=sys.stderr)
    else:
        head |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        entries = entries_of(products(torch) + attentions(torch), ours)
    peak = next((flops for name, flops in PEAKS.items() if name in gpu), None)
    head |= {"MFU": MFU_FORMULA, "peak FLOP/s": peak}
    beside = {
        (entry["kernel"], entry["shape"]): entry["torch us"] for entry in entries if entry["backend"] == "CUDNN_ATTENTION"
    }
    must = of_steps(timed, predicted, peak) + of_kernels(ours, beside)
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump({**head, "kernels": entries, "requirements": must}, file, indent=1)
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    if entries:
        table(entries)
    table(must)
    met = [row["met"] for row in must]
    print(f"{met.count(True)} of {len(must)} as wanted, {met.count(False)} not, {met.count(None)} not measured: {options.json}")


if __name__ == "__main__":
    main()
