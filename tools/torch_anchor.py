#!/usr/bin/env python3
"""The anchor model in plain PyTorch, to compare speeds with: a Llama with hidden 512, ffn 1408, 8
layers, 8 heads, 4 key/value heads, a vocabulary of 515, sequences of 256, batch 8, f32 (24.1M
parameters).

    tools/torch_anchor.py [--threads 2] [--steps 5] [--check tests/golden/llama_gqa]

Prints one JSON object: seconds of every step (forward, backward, clipping, AdamW). It uses the
fastest eager variants found here: fused attention, fused norm and fused AdamW. With `--check` it
instead trains a golden case of that architecture and fails unless the losses agree, which shows
that it is the same model as ours.
"""

import argparse
import json
import pathlib
import struct
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

ANCHOR = dict(vocab_size=515, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
              num_key_value_heads=4, rope_theta=500000.0, rms_norm_eps=1e-5)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config["hidden_size"]))
        self.eps = config["rms_norm_eps"]

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads, self.width = config["num_key_value_heads"], hidden // self.heads
        self.q_proj = linear(hidden, hidden)
        self.k_proj = linear(hidden, self.kv_heads * self.width)
        self.v_proj = linear(hidden, self.kv_heads * self.width)
        self.o_proj = linear(hidden, hidden)

    def forward(self, x, cos, sin):
        b, s, h = x.shape
        q, k, v = (p(x).view(b, s, -1, self.width).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        each = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(each, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, h))


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = linear(hidden, ffn), linear(hidden, ffn), linear(ffn, hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(config), Attention(config)
        self.post_attention_layernorm, self.mlp = Norm(config), Mlp(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.config = config
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm, self.lm_head = Norm(config), linear(hidden, vocab)

    def loss(self, tokens):
        x, labels = self.embed_tokens(tokens[:, :-1]), tokens[:, 1:]
        cos, sin = self.angles(x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())

    def angles(self, length):
        width = self.config["hidden_size"] // self.config["num_attention_heads"]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length), frequencies)
        return angles.cos(), angles.sin()


def optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


def step(model, adamw, tokens):
    adamw.zero_grad(set_to_none=True)
    loss = model.loss(tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    return loss.item()


def tensors(path):
    """The tensors of a .safetensors file, f32 and i64."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    kinds = {"F32": torch.float32, "I64": torch.int64}
    for name, said in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in said["data_offsets"])
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=kinds[said["dtype"]])
            yield name, flat.view(said["shape"])


def check(folder):
    """Trains a golden case and compares the losses."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(config)
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors(folder / "model.safetensors")}
    model.load_state_dict(weights)
    batches, adamw = dict(tensors(folder / "tokens.safetensors"))["tokens"], optimizer(model)
    expected = json.loads((folder / "expected.json").read_text())["trajectory"]["loss_f64"]
    found = [step(model, adamw, batch) for batch in batches]
    worst = max(abs(a - b) for a, b in zip(found, expected))
    print(json.dumps(dict(steps=len(found), worst_loss_error=worst)))
    return 0 if worst < 1e-4 else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--check", type=pathlib.Path)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(1)
    if flags.check:
        return check(flags.check)
    model, seconds = Llama(ANCHOR), []
    adamw = optimizer(model)
    for _ in range(flags.steps + 1):
        tokens = torch.randint(0, 515, (8, 257))
        begin = time.perf_counter()
        step(model, adamw, tokens)
        seconds.append(time.perf_counter() - begin)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    products = []
    for _ in range(8):
        begin = time.perf_counter()
        a @ b
        products.append(time.perf_counter() - begin)
    # The first step allocates memory, so it is not counted.
    print(json.dumps(dict(torch=torch.__version__, parameters=sum(p.numel() for p in model.parameters()),
                          step_s=seconds[1:], gemm_flops_per_s=2 * 2048**3 / min(products))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
