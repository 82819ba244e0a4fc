#!/usr/bin/env python3
"""Trains a model with PyTorch on the GPU for 20 steps and writes a folder laid out as those of
tests/golden: weights before training, tokens, and losses. `gpu_golden --bf16 FOLDER` trains the
same, beside it.

    tools/gpu_torch_case.py --model "GPT-2 124M" --out FOLDER

Weights and tokens are random; tokens follow Zipf's law, so that there is something to learn. Each
step has 8 sequences of 1024 tokens. AdamW and clipping are those of tests/golden/README.md.
"""

import argparse
import json
import os

from gpu_torch_step import MODELS, model_of

STEPS, BATCH, LENGTH = 20, 8, 1024
# Without warm-up a deep or wide model leaves the range in which two runs can be compared.
LR = {"GPT-2 124M": 3e-4, "GPT-2 1.5B": 3e-5, "Llama 3 8B, 4 layers": 3e-5}


def gpt2_names(model):
    tensors = {"transformer.wte.weight": model.embed.weight, "transformer.wpe.weight": model.positions}
    for number, layer in enumerate(model.layers):
        parts = {"attn.c_attn": layer.qkv, "attn.c_proj": layer.out, "mlp.c_fc": layer.up, "mlp.c_proj": layer.down}
        for name, linear in parts.items():
            tensors[f"transformer.h.{number}.{name}.weight"] = linear.weight.T
            tensors[f"transformer.h.{number}.{name}.bias"] = linear.bias
        for name, norm in {"ln_1": layer.norm1, "ln_2": layer.norm2}.items():
            tensors[f"transformer.h.{number}.{name}.weight"] = norm.weight
            tensors[f"transformer.h.{number}.{name}.bias"] = norm.bias
    return tensors | {"transformer.ln_f.weight": model.norm.weight, "transformer.ln_f.bias": model.norm.bias}


def llama_names(model, heads, kv_heads, dim):
    tensors = {"model.embed_tokens.weight": model.embed.weight, "lm_head.weight": model.head.weight}
    for number, layer in enumerate(model.layers):
        q, k, v = layer.qkv.weight.split((heads * dim, kv_heads * dim, kv_heads * dim))
        gate, up = layer.up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
            "input_layernorm": layer.norm1.weight,
            "post_attention_layernorm": layer.norm2.weight,
        }
        for name, weight in parts.items():
            tensors[f"model.layers.{number}.{name}.weight"] = weight
    return tensors | {"model.norm.weight": model.norm.weight}


def config_of(layers, hidden, heads, kv_heads, wide, vocabulary, llama):
    if not llama:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "n_layer": layers,
            "n_embd": hidden,
            "n_head": heads,
            "n_inner": wide,
            "vocab_size": vocabulary,
            "n_positions": LENGTH,
            "layer_norm_epsilon": 1e-5,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "tie_word_embeddings": True,
            "dtype": "float32",
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    import torch
    from safetensors.torch import save_file

    layers, hidden, heads, kv_heads, wide, vocabulary, _, llama = MODELS[options.model]
    torch.manual_seed(1234)
    with torch.device("cuda"):
        model = model_of(torch, layers, hidden, heads, kv_heads, wide, vocabulary, LENGTH, llama)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02)
    odds = 1.0 / torch.arange(1, vocabulary + 1, device="cuda", dtype=torch.float64)
    tokens = torch.multinomial(odds, STEPS * BATCH * (LENGTH + 1), replacement=True)
    tokens = tokens.view(STEPS, BATCH, LENGTH + 1)
    os.makedirs(options.out, exist_ok=True)
    tensors = llama_names(model, heads, kv_heads, hidden // heads) if llama else gpt2_names(model)
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, os.path.join(options.out, "model.safetensors"))
    save_file({"tokens": tokens.cpu()}, os.path.join(options.out, "tokens.safetensors"))
    with open(os.path.join(options.out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config_of(layers, hidden, heads, kv_heads, wide, vocabulary, llama), file)

    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR[options.model], betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses, norms = [], []
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens[step, :, :-1].contiguous(), tokens[step, :, 1:].contiguous())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    expected = {"lr": LR[options.model], "trajectory": {"loss": losses, "grad_norm": norms}}
    with open(os.path.join(options.out, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(expected, file)
    print(json.dumps({"case": options.model, "torch": torch.__version__, **expected}), flush=True)


if __name__ == "__main__":
    main()
