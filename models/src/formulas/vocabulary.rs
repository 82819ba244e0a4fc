//! The work of vocabulary layers in a pipeline, and moving layers to make up for it (Vocabulary
//! Parallelism §1, §6 and appendix A).

use super::flops::{product_flops, training_flops};

/// FLOPs of one transformer layer, forward and backward, `bsh(72h + 12s)` (appendix Table 4).
pub fn layer_flops(tokens: f64, hidden: f64, sequence: f64) -> f64 {
    tokens * hidden * (72.0 * hidden + 12.0 * sequence)
}

/// FLOPs of the output layer, forward and backward, `6bshV` (appendix Table 4).
pub fn output_flops(tokens: f64, hidden: f64, vocab: f64) -> f64 {
    training_flops(product_flops(tokens, vocab, hidden))
}

/// FLOPs of the input layer, forward and backward, `3bsh` (appendix Table 4).
pub fn input_flops(tokens: f64, hidden: f64) -> f64 {
    3.0 * tokens * hidden
}

/// The output layer's work over a transformer layer's, `6V/(72h + 12s)` (Fig. 3: 2.4 at `h` 4096,
/// `s` 2048, `V` 128 000).
pub fn output_compute_ratio(vocab: f64, hidden: f64, sequence: f64) -> f64 {
    output_flops(1.0, hidden, vocab) / layer_flops(1.0, hidden, sequence)
}

/// The input layer's work over a transformer layer's, `3/(72h + 12s)`: next to nothing.
pub fn input_compute_ratio(hidden: f64, sequence: f64) -> f64 {
    input_flops(1.0, hidden) / layer_flops(1.0, hidden, sequence)
}

/// The vocabulary padded to a multiple of `2·p·t`, so that all shards are even (§6.1; `t = 1`
/// there). A degree of 0 counts as 1.
pub fn padded_vocab(vocab: u64, stages: u64, tensor: u64) -> u64 {
    vocab.next_multiple_of(2 * stages.max(1) * tensor.max(1))
}

/// Layers for each stage so that the slowest stage is as fast as can be, the first stage also
/// carrying the input layer and the last the output layer; returns that stage's time and the
/// layers, first stage first (Redis, §6.2). Times and ratios in transformer layers.
///
/// Exact: layers are equal, so giving each to the stage that ends lowest minimises the maximum. A
/// tie goes to the latest stage before the last. A stage may end up with no layer. Without stages
/// there is no assignment and the time is infinite.
pub fn redis(layers: u64, stages: u64, input_ratio: f64, output_ratio: f64) -> (f64, Vec<u64>) {
    let extra = vocabulary_loads(stages as usize, input_ratio, output_ratio);
    let Some(last) = extra.len().checked_sub(1) else { return (f64::INFINITY, Vec::new()) };
    let mut assigned = vec![0_u64; extra.len()];
    for _ in 0..layers {
        let load = |stage: &usize| assigned[*stage] as f64 + extra[*stage];
        // The first of equals wins.
        let order = (0..last).rev().chain([last]);
        let lowest = order.min_by(|x, y| load(x).total_cmp(&load(y))).unwrap_or(last);
        assigned[lowest] += 1;
    }
    (longest_stage(&assigned, input_ratio, output_ratio), assigned)
}

/// Time of the slowest stage for given `layers` a stage, in transformer layers (§6.2).
pub fn longest_stage(layers: &[u64], input_ratio: f64, output_ratio: f64) -> f64 {
    let extra = vocabulary_loads(layers.len(), input_ratio, output_ratio);
    layers.iter().zip(extra).map(|(l, e)| *l as f64 + e).fold(0.0, f64::max)
}

/// What each stage carries besides its layers.
fn vocabulary_loads(stages: usize, input_ratio: f64, output_ratio: f64) -> Vec<f64> {
    let mut loads = vec![0.0; stages];
    if let Some(first) = loads.first_mut() {
        *first += input_ratio;
    }
    if let Some(last) = loads.last_mut() {
        *last += output_ratio;
    }
    loads
}
