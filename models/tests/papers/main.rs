//! The papers' own numbers against what the planner computes with: `models::layer`,
//! `models::model::params` and `models::formulas`.

mod ampipe;
mod communication;
mod megatron;
mod memory;
mod oracles;
mod vocabulary;

use models::input::Source;
use models::model::{LayerKind, ModelSpec};

/// A dense layer with full attention.
const DENSE: LayerKind = LayerKind { moe: false, windowed: false };

fn shipped(name: &str) -> ModelSpec {
    models::model::shipped(name).and_then(Result::ok).expect("shipped models read")
}

/// A GPT as SC'21 and Korthikanti count it: feed-forward width `4h`, dropout, learned positions,
/// 2048 tokens, a vocabulary of 51 200.
fn gpt(hidden: u64, layers: u64, heads: u64) -> ModelSpec {
    let text = format!(
        "name: gpt\nlayers: {layers}\nhidden: {hidden}\nheads: {heads}\nffn: {}\nvocab: 51200\n\
         activation: gelu\nnorm: layer_norm\npositions: learned\nmax_positions: 2048\n\
         tied_embeddings: true\nbias: true\ndropout: 0.1\nseq_len: 2048\nglobal_batch: 1\n",
        4 * hidden
    );
    let source = Source::from_bytes("gpt.yaml", text.into_bytes()).expect("not empty");
    models::model::read(&source).expect("a valid model")
}

/// Whether `actual` is what a paper prints as `printed`, to half a unit in the last place `unit`.
#[track_caller]
fn assert_prints(actual: f64, printed: f64, unit: f64) {
    assert!((actual - printed).abs() <= 0.5 * unit * (1.0 + 1e-9), "{actual} prints {printed}");
}
