"""Makes this folder's files with PyTorch 2.6.0 and transformers 4.57.6: see ../README.md.

    python tests/golden/stablelm/make.py
"""

import copy
import json
import pathlib

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import StableLmConfig, StableLmForCausalLM

HERE = pathlib.Path(__file__).parent
SEED, BATCH, SEQ, STEPS, VOCAB = 1234, 8, 32, 20, 67


def model():
    config = StableLmConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Three pairs of a head of eight columns.
        partial_rotary_factor=0.75,
        vocab_size=VOCAB,
        max_position_embeddings=40,
        use_cache=False,
        dtype=torch.float32,
    )
    config._attn_implementation = "eager"
    made = StableLmForCausalLM(config).train()
    draw = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, p in made.named_parameters():
            noise = torch.randn(p.shape, generator=draw)
            if p.ndim == 2:
                # Scores of about 1, so that a wrong rotation changes them.
                p.copy_(noise * (0.5 if "embed" in name else 1.5 * p.shape[1] ** -0.5))
            else:
                p.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))
    return made


def in_f64(made):
    """The same in float64, its angles too, which the class computes in float32."""
    wide = copy.deepcopy(made).double()
    rotary = wide.model.rotary_emb

    def angles(x, positions):
        frequency = 10_000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
        angle = (positions[..., None].double() * frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    rotary.forward = angles
    return wide


softmax = torch.nn.functional.softmax


def softmax_of_input(x, dim=None, dtype=None):
    """In the precision of its input: the class asks for float32."""
    return softmax(x, dim=dim, dtype=x.dtype)


class Run:
    def __init__(self, made):
        self.model, self.parameters = made, dict(made.named_parameters())
        decays = [{"weight_decay": 0.1, "params": []}, {"weight_decay": 0.0, "params": []}]
        for p in self.parameters.values():
            decays[p.ndim != 2]["params"].append(p)
        self.optimizer = torch.optim.AdamW(
            decays,
            lr=1e-3,
            betas=(0.9, 0.95),
            eps=1e-8,
        )

    def step(self, tokens):
        self.optimizer.zero_grad()
        logits = self.model(input_ids=tokens[:, :-1]).logits
        nll = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = nll.mean()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        outputs = {"logits_seq0": logits[0].detach().clone(), "nll": nll.detach().view(BATCH, SEQ)}
        return loss.item(), norm.item(), gradients, outputs


def checksums(tensor):
    flat = tensor.detach().double().flatten()
    weights = (torch.arange(flat.numel()) % 997 + 1) / torch.tensor(997.0, dtype=torch.float64)
    sums = {"sum": flat.sum(), "l2": flat.norm(), "dot": (flat * weights).sum()}
    return {name: value.item() for name, value in sums.items()}


def main():
    torch.nn.functional.softmax = softmax_of_input
    torch.use_deterministic_algorithms(True)
    made = model()
    made.save_pretrained(HERE)
    (HERE / "generation_config.json").unlink(missing_ok=True)
    # Half of the tokens follow from the one before, so that there is something to learn.
    draw = torch.Generator().manual_seed(SEED + 1)
    tokens = torch.randint(VOCAB, (STEPS, BATCH, SEQ + 1), generator=draw)
    follows = torch.rand(tokens.shape, generator=draw) < 0.5
    for at in range(1, SEQ + 1):
        next_token = (7 * tokens[..., at - 1] + 3) % VOCAB
        tokens[..., at] = torch.where(follows[..., at], next_token, tokens[..., at])
    save_file({"tokens": tokens}, HERE / "tokens.safetensors")
    initial = {name: checksums(p) for name, p in made.named_parameters()}
    wide, narrow = Run(in_f64(made)), Run(made)
    results = {"loss": [], "grad_norm": [], "loss_f64": [], "grad_norm_f64": []}
    for step in range(STEPS):
        loss, norm, gradients, outputs = narrow.step(tokens[step])
        loss_f64, norm_f64, _, _ = wide.step(tokens[step])
        for key, value in zip(results, (loss, norm, loss_f64, norm_f64)):
            results[key].append(value)
        if step == 0:
            save_file(gradients, HERE / "grads.safetensors")
            save_file(outputs, HERE / "outputs.safetensors")
    parameters = {
        name: {
            "shape": list(p.shape),
            "init": initial[name],
            "final_f32": checksums(p),
            "final_f64": checksums(wide.parameters[name]),
        }
        for name, p in narrow.parameters.items()
    }
    expected = {
        "seed": SEED,
        "case": "stablelm",
        "optimizer": {
            "name": "AdamW",
            "lr": 1e-3,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "clip_global_norm": 1.0,
        },
        "step0": {key: values[0] for key, values in results.items()},
        "trajectory": results,
        "params": parameters,
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    off = max(abs(a - b) for a, b in zip(results["loss"], results["loss_f64"]))
    print(f"loss {results['loss'][0]:.4f} to {results['loss'][-1]:.4f}; f32 off by {off:.1e}")


main()
