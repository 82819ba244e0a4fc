//! Gradients against differences of losses, in cases without golden data: dropout, masked labels,
//! and activations that no golden case uses.

mod common;

use common::{Split, golden, golden_gradients, model};
use direct::Direct;
use models::model::{Activation, Gelu, ModelSpec};
use runtime::Host;
use runtime::Rank;
use runtime::comm::Solo;
use runtime::data::{Sample, Samples};
use runtime::state::checkpoint::{Checkpoint, Whole, write};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

type Tensors = BTreeMap<String, Whole<f64>>;

/// A case's samples, with the first half of every second sample's labels masked.
struct Masked(Box<dyn Samples>);

impl Samples for Masked {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, runtime::Error> {
        let mut sample = self.0.read(index)?;
        if index % 2 == 1 {
            sample.labels[..16].fill(-1);
        }
        Ok(sample)
    }
}

/// Loss and gradients with these weights.
fn gradients(model: &ModelSpec, case: &str, weights: &Tensors, folder: &Path) -> (f64, Tensors) {
    let path = folder.join("weights.safetensors");
    write(&mut File::create(&path).unwrap(), weights).unwrap();
    let split = Split::default();
    let program = split.program(model);
    let world = Box::new(Solo::new());
    let stages = Direct::new(&program);
    let mut rank = Rank::new(&stages, world, Host::<f64>::serial(), split.reduction, 7).unwrap();
    rank.load(&Checkpoint::open(&path).unwrap()).unwrap();
    let result = rank.gradients(&Masked(common::open(case)), 0, None).unwrap();
    (result.loss, rank.whole_gradients().unwrap().unwrap())
}

/// Compares a few elements of each tensor with central differences, to 1e-6.
fn compare(model: &ModelSpec, case: &str, names: &[&str]) {
    let folder = std::env::temp_dir().join(format!(
        "meshwright-differences-{}-{case}-{}",
        std::process::id(),
        names.len()
    ));
    std::fs::create_dir_all(&folder).unwrap();
    let checkpoint = Checkpoint::open(&golden(case)).unwrap();
    let shapes = golden_gradients(case).into_iter().map(|(name, (shape, _))| (name, shape));
    let mut weights: Tensors = shapes
        .map(|(name, shape)| {
            let values = checkpoint.read(&name, &shape).unwrap();
            (name, (shape, values))
        })
        .collect();
    let (_, exact) = gradients(model, case, &weights, &folder);
    for &name in names {
        let (_, values) = &exact[name];
        let largest =
            (0..values.len()).max_by(|&a, &b| values[a].abs().total_cmp(&values[b].abs()));
        for at in [largest.unwrap(), values.len() / 3] {
            let step = 1e-5;
            let mut shifted = |by: f64| {
                weights.get_mut(name).unwrap().1[at] += by;
                let loss = gradients(model, case, &weights, &folder).0;
                weights.get_mut(name).unwrap().1[at] -= by;
                loss
            };
            let difference = (shifted(step) - shifted(-step)) / (2.0 * step);
            let off = (difference - values[at]).abs();
            let scale = values[at].abs().max(1e-3);
            assert!(
                off <= 1e-6 * scale.max(1.0),
                "{case} {name}[{at}]: {difference} {}",
                values[at]
            );
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

const LLAMA: [&str; 6] = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.2.mlp.up_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "lm_head.weight",
];

const GPT2: [&str; 5] = [
    "transformer.wpe.weight",
    "transformer.h.0.attn.c_attn.weight",
    "transformer.h.1.mlp.c_fc.bias",
    "transformer.h.2.attn.c_proj.bias",
    "transformer.ln_f.bias",
];

const GEMMA: [&str; 3] = [
    "model.embed_tokens.weight",
    "model.layers.1.post_attention_layernorm.weight",
    "model.layers.0.self_attn.k_proj.weight",
];

#[test]
fn with_dropout_and_masked_labels() {
    for (case, names) in [("llama_gqa", &LLAMA[..]), ("gpt2", &GPT2), ("gemma2", &GEMMA)] {
        let mut model = model(case);
        model.dropout = 0.2;
        compare(&model, case, names);
    }
}

#[test]
fn with_other_activations() {
    let up = ["model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"];
    let mut exact = model("llama_gqa");
    (exact.mlp.activation, exact.numerics.gelu) = (Activation::Geglu, Gelu::Erf);
    compare(&exact, "llama_gqa", &up);
    for activation in [Activation::Relu, Activation::SquaredRelu] {
        let mut model = model("gpt2");
        model.mlp.activation = activation;
        compare(&model, "gpt2", &GPT2[1..3]);
    }
}
