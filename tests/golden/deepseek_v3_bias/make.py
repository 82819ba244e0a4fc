"""Makes this folder's `expected.json` and `biases.safetensors` with PyTorch 2.6.0 and transformers
4.57.6: see ../README.md.

    python tests/golden/deepseek_v3_bias/make.py
"""

import json
import pathlib
import types

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

HERE = pathlib.Path(__file__).parent
# Its weights and tokens.
OF = HERE.parent / "deepseek_v3"
STEPS, RATE = 20, 0.01


def in_f64():
    """The model in float64, with what its classes compute in float32."""
    modeling.torch = types.SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    made = DeepseekV3ForCausalLM.from_pretrained(OF, attn_implementation="eager")
    made = made.double().train()
    config = made.config
    columns = config.qk_rope_head_dim

    def angles(x, positions):
        exponents = torch.arange(0, columns, 2, dtype=torch.float64) / columns
        frequency = config.rope_theta**-exponents
        angle = (positions[..., None].double() * frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    made.model.rotary_emb.forward = angles
    return made


class Loads:
    """Counts how often each router chooses each expert, and moves its bias by the counts."""

    def __init__(self, model):
        layers = enumerate(model.model.layers)
        routers = {n: layer.mlp.gate for n, layer in layers if hasattr(layer.mlp, "gate")}
        self.routers = routers
        self.counts = {n: torch.zeros_like(self.bias(n)) for n in routers}
        for n, router in routers.items():
            router.register_forward_hook(lambda _, __, out, n=n: self.count(n, out[0]))

    def bias(self, n):
        return self.routers[n].e_score_correction_bias

    def count(self, n, chosen):
        self.counts[n] += torch.bincount(chosen.flatten(), minlength=len(self.counts[n]))

    def update(self, rate):
        """Wang et al., arXiv 2408.15664, algorithm 1."""
        for n, counts in self.counts.items():
            self.bias(n).add_(rate * torch.sign(counts.mean() - counts))
            counts.zero_()


def train(rate):
    model, tokens = in_f64(), load_file(OF / "tokens.safetensors")["tokens"]
    loads, parameters = Loads(model), list(model.parameters())
    decays = [{"weight_decay": 0.1, "params": []}, {"weight_decay": 0.0, "params": []}]
    for p in parameters:
        decays[p.ndim != 2]["params"].append(p)
    optimizer = torch.optim.AdamW(decays, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    result = {"loss_f64": [], "grad_norm_f64": [], "counts": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=tokens[step][:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[step][:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        result["loss_f64"].append(loss.item())
        result["grad_norm_f64"].append(norm.item())
        result["counts"].append({n: c.long().tolist() for n, c in loads.counts.items()})
        loads.update(rate)
    result["biases"] = {
        f"model.layers.{n}.mlp.gate.e_score_correction_bias": loads.bias(n).clone()
        for n in loads.routers
    }
    return result


def main():
    torch.use_deterministic_algorithms(True)
    fixed = train(0.0)
    known = json.loads((OF / "expected.json").read_text())["trajectory"]["loss_f64"]
    off = max(abs(a - b) for a, b in zip(fixed["loss_f64"], known))
    assert off < 1e-12, off
    moved = train(RATE)
    counts = {"fixed": fixed.pop("counts"), "moved": moved.pop("counts")}
    save_file(moved.pop("biases"), HERE / "biases.safetensors")
    expected = {"case": "deepseek_v3_bias", "bias_update_rate": RATE, "trajectory": moved}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    off = max(abs(a - b) for a, b in zip(fixed["loss_f64"], moved["loss_f64"]))
    for name, of_steps in counts.items():
        fullest = max(max(of_layer) for of_layer in of_steps[-1].values())
        print(f"{name} biases: the fullest expert of the last step has {fullest} of 512 copies")
    print(f"losses differ by up to {off:.1e}")


main()
