#!/usr/bin/env python3
"""Compacts folders of measured kernels to the small tables that `models` embeds.

usage: compact_tables.py FOLDER_OF_CSVS [REPOSITORY_ROOT]

Reads gemm.csv, attention.csv, memory_bound.csv and collectives.csv; writes
models/shipped/efficiency/<device>.csv and planner/tests/data/kernels_{held_out,elsewhere}.csv. Every
seventh row is held out of the tables; a sample of those rows, and of what others measured, tests the kernel model. Python's standard library only.
"""

import csv
import functools
import itertools
import math
import operator
import random
import statistics
import sys
from collections import defaultdict
from pathlib import Path

HOLD_EVERY = 7
SAMPLE = 60  # held-out rows committed of each kind, device and format
FORMAT = 1e4  # fractions are written in units of 1e-4

# aiconfigurator's fp8 products begin by quantising a bf16 activation. At a given m and k its times are linear
# in n, with this intercept (least squares over n <= 6144) above that of bf16: seconds, and seconds an element.
# The planner prices casts by themselves, so it is taken off, but never to more than LIMIT of the peak.
QUANTISE_S = 6e-6
QUANTISE_ELEMENT_S = 2.3e-12
LIMIT = 0.9
# Sequences times heads beyond which nothing changes, and tokens at which kernels run at half their speed.
MOST_HEADS = 1024
HALF_TOKENS = 1000
# XLA's times are of single executions and hold a launch.
XLA_LAUNCH_S = 3e-6

# Which rows make which device's tables. `link` is what large messages reach per GPU and direction on the
# machines that were measured: line rate times the efficiency that the cluster file of that device says.
DEVICES = {
    "a100": {
        "gemm": {"bf16": ["aic:a100_sxm/vllm/0.14.0", "aic:a100_sxm/sglang/0.5.10"]},
        "attention": "aic:a100_sxm",
        "backward": ("A100-PCIe", "te_flash/cudnn"),
        "stream": ("A100", {"add", "mlp_act"}),
        "links": ["aic:a100_sxm/comm/nccl/2.27.3"],
        "link": 300e9 * 0.77,
        # Of all devices only here times without waves are farther from rows left out than those with them.
        "waves": {"bf16": 108},
    },
    "h100": {
        "gemm": {"bf16": ["aic:h100_sxm/vllm/0.24.0"], "fp8": ["aic:h100_sxm/vllm/0.24.0"]},
        "attention": "aic:h100_sxm",
        "backward": ("H200", "cudnn 91901"),  # the same chip; no backward pass of H100 is public
        "stream": ("H100", {"add", "mlp_act"}),
        "links": ["aic:h100_sxm/comm/nccl/2.29.2"],
        "link": 450e9 * 0.80,
    },
    "h200": {
        "gemm": {"bf16": ["aic:h200_sxm/vllm/0.24.0"], "fp8": ["aic:h200_sxm/vllm/0.24.0"]},
        "attention": "aic:h200_sxm",
        "backward": ("H200", "cudnn 91901"),
        "stream": ("H200", {"rms_norm_fwd:cudnn", "rms_norm_bwd:cudnn"}),
        "links": ["aic:h200_sxm/comm/nccl/2.29.2"],
        "link": 450e9 * 0.80,
    },
    "b200": {
        # aiconfigurator's fp8 kernel on B200 is erratic (0.3 to 0.6 of the peak at large shapes).
        "gemm": {"bf16": ["aic:b200_sxm/vllm/0.24.0"], "fp8": ["xla:sm_100_B200"]},
        "attention": "aic:b200_sxm",
        "backward": ("GB200", "cudnn 91901"),
        "stream": ("GB200", {"rms_norm_fwd:cudnn", "rms_norm_bwd:cudnn"}),
        "links": ["aic:b200_sxm/comm/nccl/2.29.2"],
        "link": 900e9 * 0.70,
    },
    "gb200": {
        "like": "b200",  # the same chip: kernels as fractions of its own peak, links measured
        "links": ["aic:gb200/comm/nccl/2.29.2", "xla:sm_100_GB200"],
        "link": 900e9 * 0.72,
    },
}


def rows(folder, name):
    """Rows of one file without those that the folder's README flags."""
    with open(folder / name, newline="") as file:
        return [row for row in csv.DictReader(file) if not row.get("flag")]


def hold_out(kept):
    """Splits rows into those for the tables and every seventh."""
    return [r for i, r in enumerate(kept) if (i + 1) % HOLD_EVERY], kept[HOLD_EVERY - 1 :: HOLD_EVERY]


def sample(held):
    """At most SAMPLE of the rows, evenly spread."""
    step = max(1, math.ceil(len(held) / SAMPLE))
    return held[::step]


@functools.cache
def near(distance, reach):
    """How alike values are so many doublings apart: Matern's covariance of order 3/2."""
    scaled = math.sqrt(3) * abs(distance) / reach
    return (1 + scaled) * math.exp(-scaled)


class Surface:
    """Regression by a Gaussian process through logarithms of values at points on logarithmic axes.

    What was measured says by itself how far it reaches, which no choice of neighbours does; every constant of the
    covariances was chosen by leaving measured rows out, and is the same for all devices.
    """

    def __init__(self, values, covariance, noise):
        self.points = list(values)
        self.covariance = covariance
        logs = [math.log(values[point]) for point in self.points]
        self.mean = statistics.fmean(logs)
        lower = []
        for i, point in enumerate(self.points):
            row = []
            for j in range(i):
                known = sum(map(operator.mul, row, lower[j]))
                row.append((covariance(point, self.points[j]) - known) / lower[j][j])
            own = covariance(point, point) + noise**2
            row.append(math.sqrt(own - sum(map(operator.mul, row, row))))
            lower.append(row)
        self.weights = solve(lower, [log - self.mean for log in logs])

    def at(self, point):
        """The value expected at a point."""
        alike = (self.covariance(point, other) for other in self.points)
        return math.exp(self.mean + sum(map(operator.mul, alike, self.weights)))


def solve(lower, right):
    """Solves L L' x = right."""
    x = []
    for row, value in zip(lower, right):
        x.append((value - sum(map(operator.mul, row, x))) / row[-1])
    for i in reversed(range(len(x))):
        x[i] /= lower[i][i]
        for j in range(i):
            x[j] -= lower[i][j] * x[i]
    return x


def tiled(a, b):
    """Covariance of products' efficiencies: smooth in all sizes, and what the tiles of one output have in common."""
    together = 0.28**2 * near(a[0] - b[0], 3) * near(a[1] - b[1], 3) * near(a[2] - b[2], 3)
    return together + (0.04**2 * near(a[2] - b[2], 2.8) if a[:2] == b[:2] else 0)


def fused(a, b):
    """Covariance of attention's efficiencies over width, sequence, and sequences times heads."""
    return 0.4**2 * near(a[0] - b[0], 2.5) * near(a[1] - b[1], 2.5) * near(a[2] - b[2], 2.5)


def sent(a, b):
    """Covariance of a collective's times over ranks and bytes: algorithms change with both."""
    together = 0.5**2 * near(a[0] - b[0], 3) * near(a[1] - b[1], 4)
    return together + (0.3**2 * near(a[1] - b[1], 2) if a[0] == b[0] else 0)


def doublings(shape):
    return tuple(math.log2(size) for size in shape)


def fill(grid, axes, filled=lambda shape: 1.0):
    """What was measured, and between it what is expected; `filled` is what the last wave leaves of the speed."""
    surface = Surface({doublings(shape): value / filled(shape) for shape, value in grid.items()}, tiled, 0.02)
    expected = lambda shape: surface.at(doublings(shape)) * filled(shape)
    return {shape: grid[shape] if shape in grid else expected(shape) for shape in itertools.product(*axes)}


def last_wave(multiprocessors):
    """What of a product's speed its last wave leaves, as models::cluster::Waves has it."""

    def waves(m, n, rows, columns):
        return min(math.ceil(math.ceil(m / a) * math.ceil(n / b) / multiprocessors) for a, b in ((rows, columns), (columns, rows)))

    def filled(shape):
        m, n, _ = shape
        halves = min(waves(m, n, 128, 128), waves(m, n, 256, 64))
        return (m * n / (256 * 128) / multiprocessors / min(waves(m, n, 256, 128), halves / 1.5)) ** 0.75

    return filled


def flops(row):
    return 2 * float(row["m"]) * float(row["n"]) * float(row["k"])


def product(row):
    """Seconds of a product, and its fraction of the datasheet peak, without quantisation."""
    seconds = flops(row) / (float(row["tflops"]) * 1e12)
    fraction = float(row["fraction_of_peak"])
    if row["dtype"] != "fp8":
        return seconds, fraction
    cast = QUANTISE_S + QUANTISE_ELEMENT_S * float(row["m"]) * float(row["k"])
    if row["source"].startswith("xla"):
        cast = XLA_LAUNCH_S
    rest = max(seconds - cast, seconds * fraction / LIMIT, 0.3 * seconds)
    return rest, fraction * seconds / rest


def gemm(folder, spec, held_out, device):
    """Fraction of peak on a full grid of m, n, k."""
    lines = []
    for dtype, sources in spec["gemm"].items():
        kept = [r for r in rows(folder, "gemm.csv") if r["source"] in sources and r["dtype"] == dtype]
        kept = [r for r in kept if r["batch"] == "1" and "f8e5m2" not in r["notes"]]
        used, held = hold_out(kept)
        for r in sample(held):
            seconds = flops(r) / (float(r["tflops"]) * 1e12)  # as measured: nothing taken off
            held_out.append(["gemm", device, dtype, r["m"], r["n"], r["k"], f"{seconds:.4g}", r["source"]])
        shape = lambda r: (int(r["m"]), int(r["n"]), int(r["k"]))
        grid = {shape(r): product(r)[1] for r in used}
        axes = [sorted({shape(r)[a] for r in kept}) for a in range(3)]
        waves = spec.get("waves", {}).get(dtype)
        full = fill(grid, axes, last_wave(waves)) if waves else fill(grid, axes)
        lines += [["waves", dtype]] if waves else []
        lines.append([f"gemm_k:{dtype}", *axes[2]])
        for m in axes[0]:
            for n in axes[1]:
                lines.append([f"gemm:{dtype}", m, n, *[round(full[m, n, k] * FORMAT) for k in axes[2]]])
    return lines


def attention(folder, spec, held_out, device):
    """Forward fraction of peak by head width, sequence and batch x heads; backward over forward."""
    everything = rows(folder, "attention.csv")

    def wanted(r):
        # Serving kernels also write the KV cache: with few heads and many tokens that dominates.
        big = r["batch"] == "1" or int(r["heads"]) >= 32
        usual = r["heads"] == "1" or r["heads"] != r["kv_heads"] or int(r["heads"]) <= 8
        return (
            r["source"].startswith(spec["attention"]) and r["pass"] == "fwd" and r["dtype"] == "bf16"
            and r["causal"] == "1" and not r["window"] and big and usual
        )

    used, held = hold_out([r for r in everything if wanted(r)])
    for r in sample(held):
        held_out.append([
            "attention", device, r["head_dim_qk"], r["seq"], r["batch"], f"{r['heads']}/{r['kv_heads']}",
            f"{float(r['time_ms']) / 1e3:.4g}", r["source"],
        ])
    cells = defaultdict(list)
    for r in used:
        heads = min(int(r["batch"]) * int(r["heads"]), MOST_HEADS)
        cells[int(r["head_dim_qk"]), int(r["seq"]), heads].append(float(r["fraction_of_peak"]))
    short = lambda sequence: sequence / (sequence + HALF_TOKENS)
    medians = {shape: statistics.median(v) / short(shape[1]) for shape, v in cells.items()}
    surface = Surface({doublings(shape): v for shape, v in medians.items()}, fused, 0.05)
    every = sorted({heads for _, _, heads in cells})
    lines = []
    for width, sequence in sorted({shape[:2] for shape in cells}):
        seen = [heads for w, s, heads in cells if (w, s) == (width, sequence)]
        for heads in (heads for heads in every if min(seen) <= heads <= max(seen)):
            expected = surface.at(doublings((width, sequence, heads))) * short(sequence)
            lines.append(["attention", width, sequence, heads, round(expected * FORMAT)])
    return lines + backward(everything, *spec["backward"])


def backward(everything, hardware, impl):
    """Median, by sequence, of the backward pass's fraction of peak over the forward pass's."""
    passes = defaultdict(dict)
    for r in everything:
        if r["device"] == hardware and r["impl"] == impl and r["dtype"] == "bf16" and r["causal"] == "1":
            if r["head_dim_qk"] == "128" and not r["window"] and int(r["heads"]) >= 32:
                key = (int(r["seq"]), r["batch"], r["heads"])
                passes[key][r["pass"]] = float(r["fraction_of_peak"])
    ratios = defaultdict(list)
    for (sequence, *_), found in passes.items():
        if "fwd" in found and "bwd" in found:
            ratios[sequence].append(found["bwd"] / found["fwd"])
    return [["backward", s, round(statistics.median(v) * FORMAT)] for s, v in sorted(ratios.items())]


def stream(folder, spec):
    """Fraction of memory bandwidth by bytes, powers of two."""
    hardware, ops = spec["stream"]
    bins = defaultdict(list)
    for r in rows(folder, "memory_bound.csv"):
        if r["device"] == hardware and r["op"] in ops and r["bytes"]:
            # Below 50 MB the data may lie in the L2 cache.
            bins[2 ** round(math.log2(float(r["bytes"])))].append(min(0.9, float(r["fraction_of_peak_bw"])))
    return [["stream", b, round(statistics.median(v) * FORMAT)] for b, v in sorted(bins.items()) if len(v) > 1]


OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def links(folder, spec, held_out, device):
    """Time of collectives inside one NVLink domain, microseconds on powers of two of bytes."""
    kept = [r for r in rows(folder, "collectives.csv") if r["source"] in spec["links"] and r["collective"] in OPS]
    kept = [r for r in kept if not (r["source"].startswith("xla") and int(r["devices"]) not in (8, 16, 32, 64))]
    # Series are multiples of seven long, and the same sizes would always be held out.
    random.Random(7).shuffle(kept)
    used, held = hold_out(kept)
    for r in sample([r for r in held if int(r["bytes"]) >= 2**20]):
        held_out.append([
            "collective", device, r["collective"], r["devices"], r["bytes"], "", f"{float(r['time_us']) / 1e6:.4g}",
            r["source"],
        ])
    series = defaultdict(dict)
    for r in used:
        series[r["collective"], int(r["devices"])][int(r["bytes"])] = float(r["time_us"])
    lines = [["link", f"{spec['link']:.4g}"]]
    exponents = range(12, 31, 1)
    lines.append(["collective_bytes", *[2**e for e in exponents]])
    for op in sorted(OPS):
        ideal = lambda ranks, size: ideal_us(op, ranks, size, spec["link"])
        of_op = {ranks: times for (other, ranks), times in series.items() if other == op}
        points = {(ranks, size): us / ideal(ranks, size) for ranks, times in of_op.items() for size, us in times.items()}
        surface = Surface({doublings(point): v for point, v in points.items()}, sent, 0.05)
        for ranks, times in sorted(of_op.items()):
            least, most = min(times), max(times)
            row = []
            for size in (2**e for e in exponents):
                inside = min(max(size, least), most)
                known = times[inside] if inside in times else surface.at(doublings((ranks, inside))) * ideal(ranks, inside)
                row.append(f"{known * max(1, size / most):.4g}")
            lines.append([f"collective:{op}", ranks, *row])
    return lines


def ideal_us(op, ranks, size, link):
    """Microseconds at the links' rate, behind a start."""
    turns = 2 if op == "all_reduce" else 1
    return 15 + turns * (ranks - 1) / ranks * size / link * 1e6


def elsewhere(folder):
    """Measured by others than whom the tables come from: other libraries, stacks and machines."""
    lines = []

    def add(kind, device, cells, seconds, source):
        lines.append([kind, device, *cells, *[""] * (4 - len(cells)), f"{seconds:.4g}", source])

    boards = {"A100-PCIe": "a100", "A100": "a100", "H100": "h100", "H800": "h100", "B200": "b200", "GB200": "gb200"}
    boards |= {"H200": "h200"}
    other = ("vidur", "simumax", "ml-eng", "deepgemm")
    kept = [r for r in rows(folder, "gemm.csv") if r["source"].startswith(other) and r["batch"] == "1"]
    for source in sorted({r["source"] for r in kept}):
        of = [r for r in kept if r["source"] == source and r["device"] in boards and int(r["m"]) >= 128]
        for r in sample(of):
            flops = 2 * float(r["m"]) * float(r["n"]) * float(r["k"])
            cells = [r["dtype"], r["m"], r["n"], r["k"]]
            add("gemm", boards[r["device"]], cells, flops / (float(r["tflops"]) * 1e12), source)
    for r in rows(folder, "attention.csv"):
        impl = r["impl"] in ("cudnn 91901", "te_flash/cudnn") and r["dtype"] == "bf16"
        if impl and r["device"] in boards and r["pass"] in ("fwd", "bwd"):
            mask = ("causal" if r["causal"] == "1" else "full") + ("" if not r["window"] else f":{r['window']}")
            cells = [f"{r['head_dim_qk']}/{r['head_dim_v']}", r["seq"], f"{r['batch']}:{mask}", f"{r['heads']}/{r['kv_heads']}"]
            add("attention_" + r["pass"], boards[r["device"]], cells, float(r["time_ms"]) / 1e3, r["source"][:14])
    # Left out of the tables by choice (see attention): as many key/value heads as query heads, few heads.
    left_out = [
        r for r in rows(folder, "attention.csv")
        if r["source"].startswith("aic") and r["device"] in boards and r["dtype"] == "bf16" and r["pass"] == "fwd"
        and not r["window"]
    ]
    for kind, chosen in (
        ("attention_mha", lambda r: int(r["heads"]) > 8 and r["heads"] == r["kv_heads"]),
        ("attention_few_heads", lambda r: r["batch"] != "1" and int(r["heads"]) < 32 and r["heads"] != r["kv_heads"]),
    ):
        for board in sorted({boards[r["device"]] for r in left_out}):
            for r in sample([r for r in left_out if boards[r["device"]] == board and chosen(r)])[::2]:
                cells = [r["head_dim_qk"], r["seq"], r["batch"], f"{r['heads']}/{r['kv_heads']}"]
                add(kind, board, cells, float(r["time_ms"]) / 1e3, r["source"])
    for r in rows(folder, "grouped_gemm.csv"):
        if r["source"].startswith(("simumax", "deepgemm")) and "masked" not in r["stage"]:
            shape = [float(r[a]) for a in ("groups", "m_per_group", "n", "k")]
            cells = [f"{r['dtype']}:{r['groups']}", r["m_per_group"], r["n"], r["k"]]
            kind = "grouped_weight" if r["stage"] == "bwd_grad_w" else "grouped"
            add(kind, boards[r["device"]], cells, 2 * math.prod(shape) / (float(r["tflops"]) * 1e12), r["source"])
    for r in rows(folder, "collectives.csv"):
        nodes = r["source"] in ("aws:nccl-tests", "ml-eng:net") and r["nodes"] != "1" and r["hardware"][0] in "HB" and "EKS" not in r["hardware"]
        if nodes and int(r["bytes"]) >= 2**20:
            cells = [r["collective"], r["devices"], r["bytes"], r["nodes"]]
            add("nodes", r["hardware"][:4].lower(), cells, float(r["time_us"]) / 1e6, r["source"])
        if r["source"] in ("vidur:h100_dgx", "vidur:a100_dgx") and r["collective"] == "send_recv" and r["nodes"] == "1":
            add("p2p", r["hardware"][:4].lower(), ["p2p", "2", r["bytes"]], float(r["time_us"]) / 1e6, r["source"])
    return lines


LICENCES = [
    "# aic = ai-dynamo/aiconfigurator 095f58a (Apache-2.0, NVIDIA); xla = openxla/xla performance tables",
    "# (ROCm/xla 42954ef, Apache-2.0); cudnn = NVIDIA/cudnn-frontend df73764 benchmarks (MIT); te_flash, simumax =",
    "# MooreThreads/SimuMax 4dcaae5 (Apache-2.0); vidur, stream of A100 and H100 = microsoft/vidur 7d47513 (MIT);",
    "# deepgemm = deepseek-ai/DeepGEMM 327ec92 (MIT); ml-eng = stas00/ml-engineering 744d01e (CC-BY-SA-4.0,",
    "# Stas Bekman); aws = aws-samples/awsome-distributed-training 7217859 (MIT-0).",
]


def header(spec):
    """What the numbers are and whose."""
    kernels = {s for many in spec.get("gemm", {}).values() for s in many}
    kernels |= {spec[kind] for kind in ("attention",) if kind in spec}
    kernels |= {f"{kind} of {spec[kind][0]}" for kind in ("backward", "stream") if kind in spec}
    sources = sorted(kernels | set(spec["links"]))
    return [
        "# Made by tools/compact_tables.py; every seventh measured row is held out for tests.",
        "# gemm: m, n, then for each k of gemm_k the fraction of the dense datasheet peak, 1e-4 (fp8: quantisation taken off).",
        "# waves: formats whose products run in waves of tiles.",
        "# attention: head width, sequence, batch x heads, forward fraction of peak (causal, half the square), 1e-4.",
        "# backward: sequence, backward fraction of peak over forward fraction, 1e-4.",
        "# stream: bytes, fraction of the datasheet memory bandwidth, 1e-4.",
        "# collective: ranks, then for each size of collective_bytes microseconds; link: bytes/s behind them.",
        f"# source: {', '.join(sources)}",
        *LICENCES,
    ]


def main():
    folder = Path(sys.argv[1])
    root = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    held_out = []
    for device, spec in DEVICES.items():
        lines = [["like", spec["like"]]] if "like" in spec else []
        if not lines:
            lines += gemm(folder, spec, held_out, device) + attention(folder, spec, held_out, device)
            lines += stream(folder, spec)
        lines += links(folder, spec, held_out, device)
        text = "\n".join(header(spec) + [",".join(map(str, line)) for line in lines]) + "\n"
        (root / "models/shipped/efficiency" / f"{device}.csv").write_text(text)
    title = "kind,device,a,b,c,d,seconds,source"
    for name, samples in (("held_out", held_out), ("elsewhere", elsewhere(folder))):
        text = "\n".join([*LICENCES, title] + [",".join(map(str, line)) for line in samples]) + "\n"
        (root / f"planner/tests/data/kernels_{name}.csv").write_text(text)


if __name__ == "__main__":
    main()
