#!/usr/bin/env python3
"""Compacts folders of measured kernels to the small tables that `models` embeds.

usage: compact_tables.py FOLDER_OF_CSVS [REPOSITORY_ROOT]

Reads gemm.csv, attention.csv, memory_bound.csv and collectives.csv; writes
models/shipped/efficiency/<device>.csv and planner/tests/data/kernels_{held_out,elsewhere}.csv.
Every seventh row is held out of the tables; a sample of those rows, and of others' measurements,
tests the kernel model. Needs only Python's standard library.
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

# aiconfigurator's fp8 products include the quantisation of a bf16 activation. For given m and k its
# times are linear in n, and their intercept exceeds bf16's by this (least squares over n <= 6144):
# seconds, and seconds an element. The planner prices casts separately, so it is subtracted, but the
# result stays below LIMIT of the peak.
QUANTISE_S = 6e-6
QUANTISE_ELEMENT_S = 2.3e-12
LIMIT = 0.9
# Sequences times heads beyond which speed is constant, and tokens at which it is half.
MOST_HEADS = 1024
HALF_TOKENS = 1000
# Cache writes are fitted to sequences up to this long, with at least this many tokens: there they
# are a visible part of the time.
SHORT_SEQUENCE = 2048
MANY_TOKENS = 4096
# Beyond this side the time of causal squares is proportional to their rows and to the rows' length.
LONGEST = 32768
# Sequences in the tables of training libraries besides those of serving: short ones, for windows.
BESIDE = (256, 512, LONGEST)
# XLA's times are of single executions and include a launch.
XLA_LAUNCH_S = 3e-6

# The rows that make each device's tables. `link` is the bandwidth of large messages per GPU and
# direction on the measured machines: line rate times the efficiency in the device's cluster file.
DEVICES = {
    "a100": {
        "gemm": {"bf16": ["aic:a100_sxm/vllm/0.14.0", "aic:a100_sxm/sglang/0.5.10"]},
        "attention": ("A100", "aic:a100_sxm"),
        "backward": ("A100-PCIe", "te_flash/cudnn"),
        "stream": ("A100", {"add", "mlp_act"}),
        "links": ["aic:a100_sxm/comm/nccl/2.27.3"],
        "link": 300e9 * 0.77,
        # The only device whose held-out rows are predicted better with waves.
        "waves": {"bf16": 108},
    },
    "h100": {
        "gemm": {"bf16": ["aic:h100_sxm/vllm/0.24.0"], "fp8": ["aic:h100_sxm/vllm/0.24.0"]},
        "attention": ("H100", "aic:h100_sxm"),
        "backward": ("H200", "cudnn 9"),  # the same chip; no backward pass of H100 is public
        "stream": ("H100", {"add", "mlp_act"}),
        "links": ["aic:h100_sxm/comm/nccl/2.29.2"],
        "link": 450e9 * 0.80,
    },
    "h200": {
        "gemm": {"bf16": ["aic:h200_sxm/vllm/0.24.0"], "fp8": ["aic:h200_sxm/vllm/0.24.0"]},
        "attention": ("H200", "aic:h200_sxm"),
        "backward": ("H200", "cudnn 9"),
        "stream": ("H200", {"rms_norm_fwd:cudnn", "rms_norm_bwd:cudnn"}),
        "links": ["aic:h200_sxm/comm/nccl/2.29.2"],
        "link": 450e9 * 0.80,
    },
    "b200": {
        # aiconfigurator's fp8 kernel on B200 is erratic (0.3 to 0.6 of the peak at large shapes).
        "gemm": {"bf16": ["aic:b200_sxm/vllm/0.24.0"], "fp8": ["xla:sm_100_B200"]},
        "attention": ("B200", "aic:b200_sxm"),
        "backward": ("B200", "te_flash/cudnn"),
        "stream": ("GB200", {"rms_norm_fwd:cudnn", "rms_norm_bwd:cudnn"}),
        "links": ["aic:b200_sxm/comm/nccl/2.29.2"],
        "link": 900e9 * 0.70,
    },
    "gb200": {
        "like": "b200",  # the same chip: its other kernels have the same fractions of peak
        "attention": ("B200", "aic:b200_sxm"),  # where it has no measurements of its own
        "forward": ("GB200", "cudnn 9"),
        "backward": ("GB200", "cudnn 9"),
        "links": ["aic:gb200/comm/nccl/2.29.2", "xla:sm_100_GB200"],
        "link": 900e9 * 0.72,
    },
    "gb300": {
        "like": "gb200",
        "attention": ("B200", "aic:b200_sxm"),
        "forward": ("GB300", "cudnn 9"),
        "backward": ("GB300", "cudnn 9"),
    },
}


def rows(folder, name):
    """Rows of one file, without those that the folder's README rejects."""
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
    """Matern's covariance of order 3/2, by distance in doublings."""
    scaled = math.sqrt(3) * abs(distance) / reach
    return (1 + scaled) * math.exp(-scaled)


class Surface:
    """Gaussian-process regression of logarithms of values over logarithmic axes.

    No neighbourhood has to be chosen: the covariances determine how far a measurement reaches.
    Their constants were chosen by cross-validation on measured rows, and are the same for all
    devices.
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
        """The expected value at a point."""
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
    """Covariance of products' efficiencies: smooth in all sizes, plus a term for equal tiles."""
    together = 0.28**2 * near(a[0] - b[0], 3) * near(a[1] - b[1], 3) * near(a[2] - b[2], 3)
    return together + (0.04**2 * near(a[2] - b[2], 2.8) if a[:2] == b[:2] else 0)


def fused(a, b):
    """Covariance of attention's efficiencies over width, sequence, and sequences times heads."""
    return 0.4**2 * near(a[0] - b[0], 2.5) * near(a[1] - b[1], 2.5) * near(a[2] - b[2], 2.5)


def carried(a, b):
    """Covariance of the ratio of two libraries' speeds: few points, so a long range."""
    return 0.3**2 * near(a[0] - b[0], 3) * near(a[1] - b[1], 4) * near(a[2] - b[2], 4)


def sent(a, b):
    """Covariance of a collective's times over ranks and bytes; algorithms change with both."""
    together = 0.5**2 * near(a[0] - b[0], 3) * near(a[1] - b[1], 4)
    return together + (0.3**2 * near(a[1] - b[1], 2) if a[0] == b[0] else 0)


def doublings(shape):
    return tuple(math.log2(size) for size in shape)


def fill(grid, axes, filled=lambda shape: 1.0):
    """Measured values, and expected ones between them; `filled` is the last wave's factor."""
    surface = Surface({doublings(shape): value / filled(shape) for shape, value in grid.items()}, tiled, 0.02)
    expected = lambda shape: surface.at(doublings(shape)) * filled(shape)
    return {shape: grid[shape] if shape in grid else expected(shape) for shape in itertools.product(*axes)}


def last_wave(multiprocessors):
    """Factor of a product's speed due to its last wave, as in models::cluster::Waves."""

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
            seconds = flops(r) / (float(r["tflops"]) * 1e12)  # as measured, with quantisation
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


def cores(folder, device, pass_, impl="", source=""):
    """Rows of 16-bit attention: one device, pass, and library or source."""
    return [
        r for r in rows(folder, "attention.csv")
        if (r["device"], r["pass"], r["dtype"]) == (device, pass_, "bf16")
        and r["impl"].startswith(impl) and r["source"].startswith(source)
    ]


def hold_out_shapes(kept, shape):
    """The same by shapes: rows of one shape would predict each other."""
    held = set(hold_out(list(dict.fromkeys(shape(r) for r in kept)))[1])
    apart = lambda r: shape(r) in held
    return [r for r in kept if not apart(r)], [r for r in kept if apart(r)]


def cell(r):
    """Width, sequence and heads of a causal square."""
    return int(r["head_dim_qk"]), int(r["seq"]), min(int(r["batch"]) * int(r["heads"]), MOST_HEADS)


def core_row(kind, device, r):
    """A row of the test data: widths, sequence, batch and mask, heads."""
    mask = ("causal" if r["causal"] == "1" else "full") + ("" if not r["window"] else f":{r['window']}")
    return [
        kind, device, f"{r['head_dim_qk']}/{r['head_dim_v']}", r["seq"], f"{r['batch']}:{mask}",
        f"{r['heads']}/{r['kv_heads']}", f"{float(r['time_ms']) / 1e3:.4g}", r["source"].split(":sdpa")[0],
    ]


class Writes:
    """Time of serving kernels besides attention: writing each token's keys and values to a cache.

    For equal attention, times differ by the tokens times a number that depends only on the
    key/value heads, on every device. With one head it follows from shapes with fewer sequences and
    more heads (their product being equal); with more heads, from the same shape with one. Medians
    over the shorter sequences, where it is the largest part.
    """

    def __init__(self, used):
        self.token_s = {}
        for width in {int(r["head_dim_qk"]) for r in used}:
            times, one = defaultdict(dict), defaultdict(dict)
            for r in used:
                if int(r["head_dim_qk"]) == width and int(r["seq"]) <= SHORT_SEQUENCE:
                    sequence, batch, heads = (int(r[a]) for a in ("seq", "batch", "heads"))
                    times[sequence, batch, heads][int(r["kv_heads"])] = float(r["time_ms"]) / 1e3
            more = defaultdict(list)
            for (sequence, batch, heads), by_kv in times.items():
                if 1 in by_kv:
                    one[sequence, batch * heads][batch] = by_kv[1]
                    if sequence * batch >= MANY_TOKENS:
                        for kv, seconds in by_kv.items():
                            more[kv].append((seconds - by_kv[1]) / (sequence * batch))
            first = [
                (by_batch[b] - by_batch[a]) / (sequence * (b - a))
                for (sequence, _), by_batch in one.items()
                for a, b in itertools.pairwise(sorted(by_batch)) if sequence * b >= MANY_TOKENS
            ]
            least = statistics.median(first)
            for kv, seconds in sorted(more.items()):
                least = max(least, statistics.median(first) + statistics.median(seconds))
                self.token_s[width, kv] = least

        for width, kv in {(int(r["head_dim_qk"]), int(r["kv_heads"])) for r in used}:
            most = max(known for w, known in self.token_s if w == width and known <= kv)
            self.token_s[width, kv] = self.token_s[width, most] * kv / most

    def seconds(self, r):
        token_s = self.token_s[int(r["head_dim_qk"]), int(r["kv_heads"])]
        return token_s * int(r["seq"]) * int(r["batch"])


short = lambda sequence: sequence / (sequence + HALF_TOKENS)


@functools.cache
def served(folder, device, source):
    """Surface of forward fractions of peak without cache writes; rows held out; writes; shapes
    measured."""
    used, held = hold_out_shapes(cores(folder, device, "fwd", source=source), cell)
    writes = Writes(used)
    cells = defaultdict(list)
    for r in used:
        seconds = float(r["time_ms"]) / 1e3
        rest = max(seconds - writes.seconds(r), 0.3 * seconds)
        fraction = float(r["fraction_of_peak"]) * seconds / rest
        cells[cell(r)].append(fraction)
    medians = {shape: statistics.median(v) / short(shape[1]) for shape, v in cells.items()}
    surface = Surface({doublings(shape): v for shape, v in medians.items()}, fused, 0.05)
    return surface, held, writes, sorted(cells)


def kept_pairs(r):
    """Query-key pairs that the mask keeps, of one head of one sequence."""
    sequence = float(r["seq"])
    window = min(sequence, float(r["window"] or sequence))
    return sequence * sequence if r["causal"] != "1" else window * (sequence - window / 2)


def square(r):
    """Mean width, and the causal square with as many and as long rows; see
    planner::cost::attention."""
    side = min(2 * kept_pairs(r) / float(r["seq"]), LONGEST)
    heads = int(r["batch"]) * int(r["heads"]) * float(r["seq"]) / side
    return (int(r["head_dim_qk"]) + int(r["head_dim_v"])) / 2, side, min(heads, MOST_HEADS)


def core_fraction(r):
    """Fraction of peak: two products forward, five backward, of the pairs kept."""
    of_qk, of_v = (3, 2) if r["pass"] == "bwd" else (1, 1)
    width = of_qk * int(r["head_dim_qk"]) + of_v * int(r["head_dim_v"])
    flops = 2 * width * kept_pairs(r) * int(r["batch"]) * int(r["heads"])
    peak = float(r["tflops"]) * 1e12 / float(r["fraction_of_peak"])
    return flops / (float(r["time_ms"]) / 1e3 * peak)


def trained(used, prior):
    """Surface of a training library's fractions of peak.

    The product of two surfaces: serving's forward pass, and the library's ratio to it.
    """
    ratios = defaultdict(list)
    for r in used:
        ratios[square(r)].append(core_fraction(r) / prior(square(r)))
    medians = {doublings(shape): statistics.median(v) for shape, v in ratios.items()}
    surface = Surface(medians, carried, 0.03)
    return lambda shape: prior(shape) * surface.at(doublings(shape))


def attention(folder, spec, held_out, device):
    """Fraction of peak by head width, sequence and batch x heads, of the forward and of the
    backward pass."""
    surface, held, writes, measured = served(folder, *spec["attention"])
    forward = lambda shape: surface.at(doublings(shape)) * short(shape[1])
    if "forward" in spec:
        used, held = hold_out_shapes(cores(folder, spec["forward"][0], "fwd", impl=spec["forward"][1]), square)
        forward = trained(used, forward)
        held_out += [core_row("attention", device, r) for r in held]
    else:
        held_out += [
            ["cache_write", device, width, kv, "", "", f"{seconds:.4g}", spec["attention"][1]]
            for (width, kv), seconds in sorted(writes.token_s.items())
        ]
        held_out += [core_row("attention", device, r) for r in sample(held)]
    used, held = hold_out_shapes(cores(folder, spec["backward"][0], "bwd", impl=spec["backward"][1]), square)
    backward = trained(used, forward)
    if device != "h100":  # h100's are measured on H200
        held_out += [core_row("attention_backward", device, r) for r in held]
    shapes = grid(measured, [square(r) for r in used], BESIDE if "forward" in spec else ())
    return [
        [key, *shape, round(expected(shape) * FORMAT)]
        for key, expected in (("attention", forward), ("attention_backward", backward)) for shape in shapes
    ]


def grid(measured, squares, longer):
    """Shapes of a table: for each width and sequence the measured heads, and those between them.

    Widths and sequences that were measured only backward get the heads of all others.
    """
    every = sorted({heads for _, _, heads in measured})
    sequences = {sequence for _, sequence, _ in measured}
    beyond = {LONGEST} if any(side > max(sequences) for _, side, _ in squares) else set()
    longer = set(longer) | beyond
    shapes = []
    for width in sorted({shape[0] for shape in measured} | {int(width) for width, _, _ in squares}):
        like = [shape for shape in measured if shape[0] == width] or measured
        for sequence in sorted({shape[1] for shape in like} | longer):
            seen = [heads for _, s, heads in like if s == sequence or sequence in longer]
            shapes += [(width, sequence, heads) for heads in every if min(seen) <= heads <= max(seen)]
    return shapes


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
    # The length of a series is a multiple of seven, so the same sizes would always be held out.
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
    """Microseconds of a start and of the bytes at the links' rate."""
    turns = 2 if op == "all_reduce" else 1
    return 15 + turns * (ranks - 1) / ranks * size / link * 1e6


def elsewhere(folder):
    """Measurements of others than the tables' sources: other libraries, stacks and machines."""
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
    # Forward passes of the libraries whose backward passes are in the tables, and both passes of
    # PyTorch's own cuDNN.
    for board, impl in (("A100-PCIe", "te_flash/cudnn"), ("B200", "te_flash/cudnn"), ("H200", "cudnn 9")):
        lines += [core_row("attention_forward", boards[board], r) for r in cores(folder, board, "fwd", impl=impl)]
    for kind, pass_ in (("attention_forward", "fwd"), ("attention_backward", "bwd")):
        lines += [core_row(kind, "b200", r) for r in cores(folder, "B200", pass_, impl="pyt_cudnn")]
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
    """Header of a table: the meaning and the sources of its numbers."""
    kernels = {s for many in spec.get("gemm", {}).values() for s in many}
    kernels |= {spec["attention"][1]}
    kernels |= {f"attention {kind} of {spec[kind][0]} ({spec[kind][1]})" for kind in ("forward", "backward") if kind in spec}
    kernels |= {f"stream of {spec['stream'][0]}"} if "stream" in spec else set()
    sources = sorted(kernels | set(spec.get("links", ())))
    return [
        "# Made by tools/compact_tables.py; every seventh measured row is held out for tests.",
        "# gemm: m, n, then for each k of gemm_k the fraction of the dense datasheet peak, 1e-4 (fp8: quantisation taken off).",
        "# waves: formats whose products run in waves of tiles.",
        "# like: what is not below is as in that file.",
        "# attention, attention_backward: head width, sequence, batch x heads, fraction of peak of two and of five products",
        "# (causal, half the square), 1e-4.",
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
        lines = [["like", spec["like"]]] if "like" in spec else gemm(folder, spec, held_out, device)
        lines += attention(folder, spec, held_out, device)
        lines += stream(folder, spec) if "stream" in spec else []
        lines += links(folder, spec, held_out, device) if "links" in spec else []
        text = "\n".join(header(spec) + [",".join(map(str, line)) for line in lines]) + "\n"
        (root / "models/shipped/efficiency" / f"{device}.csv").write_text(text)
    title = "kind,device,a,b,c,d,seconds,source"
    for name, samples in (("held_out", held_out), ("elsewhere", elsewhere(folder))):
        text = "\n".join([*LICENCES, title] + [",".join(map(str, line)) for line in samples]) + "\n"
        (root / f"planner/tests/data/kernels_{name}.csv").write_text(text)


if __name__ == "__main__":
    main()
