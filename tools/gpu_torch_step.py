#!/usr/bin/env python3
"""PyTorch's time of a training step, of one model a call:

    tools/gpu_torch_step.py --model "GPT-2 124M" --sequences 64 --backend cudnn --compiled whole

The step is compiled, in bf16 by autocast with f32 master weights, with fused AdamW. Gradients are
clipped by their norm, as ours are; the time without that is printed too. `--compiled layers`
compiles each layer by itself, which takes seconds where the whole of a deep model takes minutes.
Prints a line of JSON with the median step for each.

With `--turns N --at FILE` it takes turns with another program on the same GPU, so that both run at
the same temperature: it makes FILE.ready once it has compiled, times itself whenever FILE.0, FILE.1
and so on are made, and makes FILE.0.done and so on.
"""

import argparse
import json
import os
import statistics
import time

# Layers, hidden, heads, kv heads, feed-forward, vocabulary, sequence, whether it has Llama's
# architecture.
MODELS = {
    "GPT-2 124M": (12, 768, 12, 12, 3072, 50304, 1024, False),
    "GPT-2 1.5B": (48, 1600, 25, 25, 6400, 50304, 1024, False),
    "Llama 3 8B, 4 layers": (4, 4096, 32, 8, 14336, 128256, 8192, True),
}


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
            return self.loss(x, targets)

        def loss(self, x, targets):
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.view(-1, vocabulary).float(), targets.view(-1))

    return Model()


def middle_seconds(torch, run, warm=3, times=10):
    for _ in range(warm):
        run()
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.02)


def make(path):
    open(path, "w", encoding="utf-8").close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--sequences", required=True, type=int)
    parser.add_argument("--backend", default="cudnn", choices=("cudnn", "flash"))
    parser.add_argument("--compiled", default="whole", choices=("whole", "layers", "not"))
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--at", help="beginning of the names of the files by which turns are taken")
    options = parser.parse_args()

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[options.backend]
    torch.manual_seed(0)
    *shape, vocabulary, length, llama = MODELS[options.model]
    with torch.device("cuda"):
        model = model_of(torch, *shape, vocabulary, length, llama)
    ids = torch.randint(vocabulary, (options.sequences, length), device="cuda")
    targets = torch.randint(vocabulary, (options.sequences, length), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if options.compiled == "whole":
        model.compile()
    elif options.compiled == "layers":
        for layer in model.layers:
            layer.compile()
        model.loss = torch.compile(model.loss)

    def step(clip=True):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, targets)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    with sdpa_kernel(backend):
        step()
        torch.cuda.synchronize()
        compiled_s = time.perf_counter() - begin
        if options.at:
            make(f"{options.at}.ready")
        for turn in range(options.turns):
            if options.at:
                wait_for(f"{options.at}.{turn}")
            for clip in (True, False):
                s = middle_seconds(torch, lambda: step(clip))
                row = {
                    "by": "torch" if clip else "torch without clipping",
                    "model": options.model,
                    "sequences": options.sequences,
                    "turn": turn,
                    "s": s,
                    "tokens_per_s": options.sequences * length / s,
                    "backend": options.backend,
                    "compiled": options.compiled,
                    "first_step_s": compiled_s,
                    "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "cudnn": torch.backends.cudnn.version(),
                }
                print(json.dumps(row), flush=True)
            if options.at:
                make(f"{options.at}.{turn}.done")


if __name__ == "__main__":
    main()
