//! Latent attention: PyTorch's first layer of DeepSeek-V3, differences of losses, and one rank's
//! numbers on many.

mod common;

use common::{Run, Split, compare, golden, open, train_on, train_program};
use direct::Direct;
use half::bf16;
use models::decisions::{CpStyle, Offload};
use models::input::Source;
use models::model::{ModelSpec, read};
use models::program::Recompute;
use models::schedule::ScheduleName;
use models::shapes;
use runtime::comm::{Options, Solo, run_ranks};
use runtime::state::checkpoint::{self, Checkpoint, TensorFile, Whole};
use runtime::{Host, Rank, Scalar};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

type Tensors = BTreeMap<String, Whole<f64>>;

const CASE: &str = "deepseek_v3";

/// The first layer of DeepSeek-V3, which has no experts, with its vocabulary.
fn first_layer() -> ModelSpec {
    ModelSpec { layers: 1, moe: None, ..common::model(CASE) }
}

/// Small dense models with latent attention, with heads of 6 + 4 columns of queries and keys, and
/// 8 of values. All of a rank's tensors have different widths.
fn dense(q_rank: bool, bias: bool) -> ModelSpec {
    let q_rank = if q_rank { "q_rank: 20, " } else { "" };
    let text = format!(
        "name: latent\nlayers: 4\nhidden: 48\nheads: 8\nhead_dim: 6\nffn: 64\nvocab: 256\n\
         mla: {{{q_rank}kv_rank: 12, rope_dim: 4, value_dim: 8}}\nqkv_bias: {bias}\n\
         out_bias: {bias}\nseq_len: 32\nglobal_batch: 8\n"
    );
    let source = Source::from_bytes("latent.yaml", text.into_bytes()).unwrap();
    read(&source).unwrap()
}

/// A number around 0 with variance 1, from a name and an index (splitmix64, twelve uniforms).
fn normal(name: &str, at: usize) -> f64 {
    let seed = name.bytes().fold(at as u64, |seed, byte| seed.wrapping_mul(257) + u64::from(byte));
    let unit = |n: u64| {
        let mut z = (seed.wrapping_mul(12) + n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..12).map(unit).sum::<f64>() - 6.0
}

/// Weights large enough that attention is far from uniform.
fn weights(model: &ModelSpec) -> Tensors {
    let program = Split::default().program(model);
    let stages = Direct::new(&program);
    let world = Box::new(Solo::new());
    let reduction = Split::default().reduction;
    let mut rank = Rank::new(&stages, world, Host::<f64>::serial(), reduction, 0).unwrap();
    rank.initialise().unwrap();
    let tensors = rank.whole_weights().unwrap().unwrap();
    let drawn = |(name, (shape, values)): (String, Whole<f64>)| {
        let value = |at| match shape.as_slice() {
            [_, _] if name.contains("embed") => 0.5 * normal(&name, at),
            [_, inputs] => normal(&name, at) * 1.2 / (*inputs as f64).sqrt(),
            _ if name.ends_with("bias") => 0.1 * normal(&name, at),
            _ => 1.0 + 0.1 * normal(&name, at),
        };
        let values = (0..values.len()).map(value).collect();
        (name, (shape, values))
    };
    tensors.into_iter().map(drawn).collect()
}

/// A folder of this process, removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("latent-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, tensors: &Tensors) -> PathBuf {
        let path = self.0.join("weights.safetensors");
        checkpoint::write(&mut File::create(&path).unwrap(), tensors).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// Logits of the first sequence, gathered over the vocabulary's shards.
fn logits<T: Scalar>(model: &ModelSpec, split: &Split) -> Vec<f64> {
    let program = split.program(model);
    let ranks = run_ranks(split.ranks(), Options::default(), |world| {
        let stages = Direct::new(&program);
        let mut rank = Rank::new(&stages, world, Host::<T>::serial(), split.reduction, 0).unwrap();
        rank.load(&Checkpoint::open(&golden(CASE)).unwrap()).unwrap();
        let mut logits = Vec::new();
        let mut watch = |micro_batch: usize, losses: &[T], columns: &[T]| {
            if micro_batch == 0 {
                let width = columns.len() / losses.len();
                logits = columns[..32 * width].iter().map(|logit| logit.to_f64()).collect();
            }
        };
        rank.gradients(&*open(CASE), 0, Some(&mut watch)).unwrap();
        logits
    });
    let vocab = model.vocab as usize;
    let width = shapes::vocabulary_rows(model.vocab, split.tp as u64) as usize;
    let column = |at: usize| ranks[at % vocab / width][at / vocab * width + at % vocab % width];
    (0..32 * vocab).map(column).collect()
}

/// The residual stream behind the first layer, as PyTorch has it, through the final norm and the
/// output matrix: logits of the model's first layer alone.
fn pytorchs_logits(model: &ModelSpec) -> Vec<f64> {
    let read = |file: &str, name: &str| {
        let file = TensorFile::open(&golden(CASE).join(file)).unwrap();
        file.read::<f64>(name).unwrap().1
    };
    let stream = read("outputs.safetensors", "act_seq0.layer.0");
    let norm = read("model.safetensors", "model.norm.weight");
    let output = read("model.safetensors", "lm_head.weight");
    let hidden = model.hidden as usize;
    let row = |x: &[f64]| {
        let square = x.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
        let inverse = (square + model.numerics.norm_eps).powf(-0.5);
        let h: Vec<f64> = x.iter().zip(&norm).map(|(x, w)| x * inverse * w).collect();
        let dot = |w: &[f64]| h.iter().zip(w).map(|(h, w)| h * w).sum::<f64>();
        output.chunks(hidden).map(dot).collect::<Vec<f64>>()
    };
    stream.chunks(hidden).flat_map(row).collect()
}

#[test]
fn pytorchs_first_layer_of_deepseek_v3() {
    let model = first_layer();
    let expected = pytorchs_logits(&model);
    for tp in [1, 2, 4] {
        let found = logits::<f32>(&model, &Split { tp, ..Split::default() });
        assert_eq!(found.len(), expected.len());
        let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off <= 5e-5, "tp {tp}: logits are off by {off:e}");
    }
}

/// Loss, and gradients, of one step with these weights.
fn step(model: &ModelSpec, path: &Path) -> (f64, Tensors) {
    let program = Split::default().program(model);
    let stages = Direct::new(&program);
    let world = Box::new(Solo::new());
    let reduction = Split::default().reduction;
    let mut rank = Rank::new(&stages, world, Host::<f64>::serial(), reduction, 0).unwrap();
    rank.load(&Checkpoint::open(path).unwrap()).unwrap();
    let result = rank.gradients(&*open(CASE), 0, None).unwrap();
    (result.loss, rank.whole_gradients().unwrap().unwrap())
}

/// The largest element of each gradient, and another one, against central differences, to 1e-6.
#[test]
fn gradients_are_differences_of_losses() {
    for (q_rank, bias) in [(true, true), (false, false)] {
        let model = ModelSpec { layers: 2, ..dense(q_rank, bias) };
        let folder = Folder::new(&format!("differences-{q_rank}"));
        let mut tensors = weights(&model);
        let (_, gradients) = step(&model, &folder.write(&tensors));
        let layer = |name: &&String| name.contains("layers.0.self_attn");
        let names: Vec<String> = gradients.keys().filter(layer).cloned().collect();
        assert_eq!(names.len(), if q_rank { 10 } else { 5 }, "{names:?}");
        for name in names {
            let exact = &gradients[&name].1;
            let largest = |&a: &usize, &b: &usize| exact[a].abs().total_cmp(&exact[b].abs());
            let largest = (0..exact.len()).max_by(largest).unwrap();
            for at in [largest, exact.len() / 3] {
                let mut shifted = |by: f64| {
                    tensors.get_mut(&name).unwrap().1[at] += by;
                    let loss = step(&model, &folder.write(&tensors)).0;
                    tensors.get_mut(&name).unwrap().1[at] -= by;
                    loss
                };
                let difference = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
                let off = (difference - exact[at]).abs();
                let scale = exact[at].abs().max(1e-3);
                assert!(off <= 1e-6 * scale, "{name}[{at}]: {difference}, not {}", exact[at]);
            }
        }
    }
}

/// Splits of every kind, up to 16 ranks.
fn splits() -> Vec<Split> {
    let one = Split::default();
    let of = |tp, pp, dp, cp| Split { tp, pp, dp, cp, micro_batch: 2, ..one };
    let around = |cp, cp_style, cp_ulysses| Split { cp_style, cp_ulysses, ..of(2, 1, 1, cp) };
    let whole = Split { tp: 2, sequence_parallel: true, ..one };
    let mut all = vec![
        of(2, 1, 1, 1),
        of(4, 1, 1, 1),
        of(8, 1, 2, 1),
        of(1, 2, 1, 1),
        of(1, 4, 2, 1),
        of(1, 1, 4, 1),
        Split { sequence_parallel: true, ..of(2, 1, 2, 1) },
        Split { sequence_parallel: true, ..of(4, 2, 2, 1) },
        Split { sequence_parallel: true, ..of(8, 2, 1, 1) },
        around(2, CpStyle::Ring, 1),
        around(4, CpStyle::Ring, 1),
        around(2, CpStyle::Zigzag, 1),
        around(4, CpStyle::Zigzag, 1),
        around(2, CpStyle::AllGather, 1),
        around(2, CpStyle::Ulysses, 2),
        around(4, CpStyle::Ulysses, 4),
        around(4, CpStyle::Hybrid, 2),
        Split { sequence_parallel: true, ..around(4, CpStyle::Hybrid, 2) },
        Split { sequence_parallel: true, ..of(2, 2, 2, 2) },
        Split { schedule: ScheduleName::ZbH1, micro_batch: 1, ..of(2, 2, 2, 1) },
        Split { schedule: ScheduleName::ZbV, vpp: 2, micro_batch: 1, ..of(2, 2, 1, 1) },
        Split { recompute: Recompute::Full, recompute_group: 2, ..of(2, 1, 1, 1) },
        Split { fused_loss: true, ..of(2, 1, 2, 1) },
        Split { zero: 1, offload: Offload::Optimizer, ..of(2, 1, 2, 1) },
        Split { zero: 3, dp_shard: 2, ..of(1, 1, 4, 1) },
    ];
    for recompute in [Recompute::Selective, Recompute::Full] {
        all.push(Split { recompute, ..one });
        all.push(Split { recompute, ..whole });
        all.push(Split { recompute, ..around(2, CpStyle::Ulysses, 2) });
        all.push(Split { recompute, ..around(2, CpStyle::Zigzag, 1) });
    }
    for zero in 1..=3 {
        all.push(Split { zero, ..of(2, 1, 4, 1) });
        all.push(Split { zero, sequence_parallel: true, ..of(2, 2, 2, 2) });
    }
    all
}

fn train(model: &ModelSpec, split: &Split, from: &Path, steps: usize) -> Run {
    let (program, from) = (split.program(model), from.to_str());
    train_program::<f64>(&program, split, steps, from, &*open(CASE))
}

#[test]
fn splits_give_one_ranks_numbers() {
    for (q_rank, bias) in [(true, false), (false, false), (true, true)] {
        let model = dense(q_rank, bias);
        let folder = Folder::new(&format!("splits-{q_rank}-{bias}"));
        let path = folder.write(&weights(&model));
        let reference = train(&model, &Split::default(), &path, 2);
        for split in splits() {
            assert!(split.exists() && split.ranks() <= 16, "{split:?}");
            let run = train(&model, &split, &path, 2);
            compare(&format!("q_rank {q_rank}, bias {bias}, {split:?}"), &run, &reference);
        }
    }
}

/// Tensors in bf16, sums and exact weights in f32: losses near those of f64.
#[test]
fn bf16_trains_to_the_losses_of_f64() {
    let model = dense(true, false);
    let folder = Folder::new("bf16");
    let path = folder.write(&weights(&model));
    let reference = train(&model, &Split::default(), &path, 5);
    let around =
        Split { tp: 2, cp: 2, micro_batch: 2, sequence_parallel: true, ..Split::default() };
    for split in [Split::default(), around] {
        let program = split.program(&model);
        let run = |world| {
            let host = Host::<bf16, f32>::serial();
            train_on(host, &program, &split, 5, path.to_str(), &*open(CASE), world)
        };
        let run = run_ranks(split.ranks(), Options::default(), run).swap_remove(0).unwrap();
        for (step, (found, expected)) in run.losses.iter().zip(&reference.losses).enumerate() {
            let off = (found / expected - 1.0).abs();
            assert!(off <= 2e-3, "{split:?}: loss of step {step} is off by {off:e}");
        }
    }
}
