#!/usr/bin/env python3
"""PyTorch's speed on the GPU that gpu-bench measured: the same products, the same attentions, and training steps.

Run on the GPU's machine with its own PyTorch, after `make gpu-bench`:

    tools/gpu_side_by_side.py --bench gpu-bench.json --json gpu-torch.json

Attention is PyTorch's fused one with the better of its backends (cuDNN, flash), products are torch.matmul in bf16; steps are
GPT-2 124M, GPT-2 1.5B and four layers of Llama 3 8B, compiled, in bf16 with f32 masters and fused AdamW. Each figure is the
least of five measurements. Prints a table last, with the kernels' own figures beside PyTorch's where gpu-bench has them.
"""

import argparse
import json
import sys
import time

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
# Name, layers, hidden, heads, kv heads, feed-forward, vocabulary, sequence, sequences of a micro-batch, Llama's parts.
MODELS = [
    ("GPT-2 124M", 12, 768, 12, 12, 3072, 50304, 1024, 16, False),
    ("GPT-2 1.5B", 48, 1600, 25, 25, 6400, 50304, 1024, 8, False),
    ("Llama 3 8B, 4 layers", 4, 4096, 32, 8, 14336, 128256, 8192, 1, True),
]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", help="what gpu-bench wrote")
    parser.add_argument("--json", default="gpu-torch.json", help="where the figures go")
    parser.add_argument("--no-steps", action="store_true", help="no training steps: they compile for minutes")
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
        best = {}
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def forward():
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

            try:
                with sdpa_kernel(backend):
                    out = forward()
                    dout = torch.randn_like(out)
                    with torch.no_grad():
                        ahead = least_seconds(torch, forward)
                    # The graph is kept, so that only the backward pass runs.
                    back = least_seconds(
                        torch, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                    )
            except RuntimeError as error:
                print(f"{shape}: {backend}: {error}", file=sys.stderr)
                continue
            for what, seconds in (("forward", ahead), ("backward", back), ("both", ahead + back)):
                if what not in best or seconds < best[what][0]:
                    best[what] = (seconds, backend.name)
        pairs = batch * heads * visible_pairs(length)
        flops = {"forward": 4 * pairs * dim, "backward": 10 * pairs * dim, "both": 14 * pairs * dim}
        for what, (seconds, backend) in best.items():
            rows.append((f"attention {what}", shape, seconds, flops[what] / seconds / 1e12, backend))
    return rows


def model_of(torch, layers, hidden, heads, kv_heads, wide, vocabulary, length, llama):
    nn, functional = torch.nn, torch.nn.functional
    dim = hidden // heads

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden))
            self.bias = None if llama else nn.Parameter(torch.zeros(hidden))

        def forward(self, x):
            if llama:
                return functional.rms_norm(x, (hidden,), self.weight, 1e-5)
            return functional.layer_norm(x, (hidden,), self.weight, self.bias, 1e-5)

    def rotated(x, cosine, sine):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = Norm(), Norm()
            self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * dim, bias=not llama)
            self.out = nn.Linear(hidden, hidden, bias=not llama)
            self.up = nn.Linear(hidden, wide * (2 if llama else 1), bias=not llama)
            self.down = nn.Linear(wide, hidden, bias=not llama)

        def forward(self, x, cosine, sine):
            batch, tokens, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).split((heads * dim, kv_heads * dim, kv_heads * dim), -1)
            q = q.view(batch, tokens, heads, dim).transpose(1, 2)
            k = k.view(batch, tokens, kv_heads, dim).transpose(1, 2)
            v = v.view(batch, tokens, kv_heads, dim).transpose(1, 2)
            if llama:
                q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, hidden))
            y = self.up(self.norm2(x))
            if llama:
                gate, y = y.chunk(2, -1)
                y = functional.silu(gate) * y
            else:
                y = functional.gelu(y, approximate="tanh")
            return x + self.down(y)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocabulary, hidden)
            self.positions = None if llama else nn.Parameter(torch.zeros(length, hidden))
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = Norm()
            self.head = nn.Linear(hidden, vocabulary, bias=False)
            if not llama:
                self.head.weight = self.embed.weight
            angles = torch.outer(torch.arange(length), 5e5 ** (-torch.arange(0, dim, 2) / dim))
            self.register_buffer("cosine", angles.cos())
            self.register_buffer("sine", angles.sin())

        def forward(self, ids, targets):
            x = self.embed(ids)
            if self.positions is not None:
                x = x + self.positions
            cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)
            for layer in self.layers:
                x = layer(x, cosine, sine)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.view(-1, vocabulary).float(), targets.view(-1))

    return Model()


def steps(torch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows = []
    for name, layers, hidden, heads, kv_heads, wide, vocabulary, length, sequences, llama in MODELS:
        ids = torch.randint(vocabulary, (sequences, length), device="cuda")
        targets = torch.randint(vocabulary, (sequences, length), device="cuda")
        best = None
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            torch.manual_seed(0)
            model = model_of(torch, layers, hidden, heads, kv_heads, wide, vocabulary, length, llama).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            compiled = torch.compile(model)

            def step():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = compiled(ids, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            try:
                with sdpa_kernel(backend):
                    seconds = least_seconds(torch, step, launches=5)
            except RuntimeError as error:
                print(f"{name}: {backend}: {error}", file=sys.stderr)
                continue
            finally:
                parameters = sum(p.numel() for p in model.parameters())
                embedded = model.embed.weight.numel() + (0 if llama else model.positions.numel())
                del model, optimizer, compiled
                torch.cuda.empty_cache()
            if best is None or seconds < best[0]:
                best = (seconds, backend.name)
        if best is None:
            continue
        tokens = sequences * length
        # 6 operations a weight that is multiplied, tied embeddings once; attention's over the pairs that see each other.
        multiplied = parameters - embedded + (0 if llama else hidden * vocabulary)
        flops = 6 * multiplied * tokens + 12 * layers * hidden * sequences * visible_pairs(length)
        rows.append((f"step, {name}", f"{sequences} x {length}", best[0], flops / best[0] / 1e12, best[1]))
    return rows


def main():
    options = parse()
    try:
        import torch
    except ImportError:
        sys.exit("error: no PyTorch here: run this with the Python of the GPU's machine")
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU")
    ours = {}
    if options.bench:
        with open(options.bench, encoding="utf-8") as file:
            ours = {(row["kernel"], row["shape"]): row for row in json.load(file)["kernels"]}
    rows = products(torch) + attentions(torch)
    if not options.no_steps:
        rows += steps(torch)
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
    head = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump({**head, "kernels": entries}, file, indent=1)
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    print("| " + " | ".join(entries[0]) + " |")
    print("|" + "---|" * len(entries[0]))
    for entry in entries:
        cells = (f"{cell:.4g}" if isinstance(cell, float) else cell or "" for cell in entry.values())
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
