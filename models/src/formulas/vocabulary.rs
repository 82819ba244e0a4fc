//! The weight of vocabulary layers in a pipeline, and moving layers to make up for it (Vocabulary
//! Parallelism §1, §4–6 and appendix A).

/// FLOPs of one transformer layer, forward and backward, `bsh(72h + 12s)` (appendix Table 4).
pub fn layer_flops(tokens: f64, hidden: f64, sequence: f64) -> f64 {
    tokens * hidden * (72.0 * hidden + 12.0 * sequence)
}

/// FLOPs of the output layer, forward and backward, `6bshV` (appendix Table 4).
pub fn output_flops(tokens: f64, hidden: f64, vocab: f64) -> f64 {
    6.0 * tokens * hidden * vocab
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

/// Parameters of one vocabulary layer over a transformer layer's, `hV/(12h²)` (Fig. 3: 2.6).
pub fn memory_ratio(vocab: f64, hidden: f64) -> f64 {
    vocab / (12.0 * hidden)
}

/// The vocabulary padded to a multiple of `2·p·t`, so that all shards are even (§6.1; `t = 1`
/// there). A degree of 0 counts as 1.
pub fn padded_vocab(vocab: u64, stages: u64, tensor: u64) -> u64 {
    vocab.next_multiple_of(2 * stages.max(1) * tensor.max(1))
}

/// Micro-batches in flight on `stage` (0 first) of 1F1B whose output layer takes `barriers`
/// communication barriers, `min(m, p − i + barriers)` (§5.2, Fig. 10): 2 for Algorithm 1, 1 for
/// Algorithm 2.
pub fn in_flight(stages: u64, stage: u64, micro_batches: u64, barriers: u64) -> u64 {
    (stages.saturating_sub(stage) + barriers).min(micro_batches)
}

/// Layers for each stage so that the slowest stage is as fast as can be, the first stage also
/// carrying the input layer and the last the output layer; returns that stage's time and the layers,
/// first stage first (Redis, §6.2). Times and ratios in transformer layers.
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

/// A vocabulary layer as Table 3 measures it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partitioned {
    /// Output layer, Algorithm 1.
    Output1,
    /// Output layer, Algorithm 2.
    Output2,
    /// Input layer.
    Input,
}

/// Throughput of a vocabulary layer of 256k entries on `devices` over perfect scaling, as measured
/// on A100 (Table 3). `None` for anything the table does not list: sequences of 2048 and 4096, 8, 16
/// and 32 devices.
pub fn scaling_factor(layer: Partitioned, sequence: u64, devices: u64) -> Option<f64> {
    let row = match (layer, sequence) {
        (Partitioned::Output1, 2048) => [0.9129, 0.8422, 0.8059],
        (Partitioned::Output2, 2048) => [0.8672, 0.7984, 0.7593],
        (Partitioned::Input, 2048) => [0.3999, 0.2885, 0.1518],
        (Partitioned::Output1, 4096) => [0.9321, 0.8802, 0.8524],
        (Partitioned::Output2, 4096) => [0.8836, 0.8342, 0.7966],
        (Partitioned::Input, 4096) => [0.2769, 0.1552, 0.0835],
        _ => return None,
    };
    let column = [8, 16, 32].iter().position(|d| *d == devices)?;
    Some(row[column])
}

/// Seconds a vocabulary layer takes on each of `devices` that share it, given its seconds on one and
/// its [`scaling_factor`] (§6.5).
pub fn partitioned_s(whole_s: f64, devices: f64, scaling_factor: f64) -> f64 {
    whole_s / (devices * scaling_factor)
}
