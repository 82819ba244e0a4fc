//! Bubbles, micro-batches and activation growth of a pipeline (SC'21 §2.2, §3; Overview, pipeline
//! parallelism).
//!
//! Two denominators are in use: SC'21 divides the bubble by the *ideal* time, the Overview by the
//! *total*. Each function says which.

/// Data parallel degree left by `n` GPUs, `d = n/(t·p)` (SC'21 §3.1).
pub fn data_parallel(gpus: f64, tensor: f64, stages: f64) -> f64 {
    gpus / (tensor * stages)
}

/// Micro-batches of one pipeline, `m = B/(d·b)` (SC'21 §3.1).
pub fn micro_batches(global_batch: f64, micro_batch: f64, data_parallel: f64) -> f64 {
    global_batch / (data_parallel * micro_batch)
}

/// Sequences of one iteration over all replicas, `m·b·d` (TP write-up, footnote 10).
pub fn global_batch(micro_batches: f64, micro_batch: f64, data_parallel: f64) -> f64 {
    micro_batches * micro_batch * data_parallel
}

/// Seconds for one batch without communication, `(b'/b + p − 1)(t_f + t_b)` (SC'21 eq. 1).
///
/// `replica_batch` is `b' = B/d`, in sequences; the times are those of one micro-batch on one stage.
pub fn batch_s(
    replica_batch: f64,
    micro_batch: f64,
    stages: f64,
    forward_s: f64,
    backward_s: f64,
) -> f64 {
    (replica_batch / micro_batch + stages - 1.0) * (forward_s + backward_s)
}

/// The micro-batch among the divisors of `replica_batch` for which eq. 1 is shortest, and its
/// seconds (SC'21 §3.4). `stage_s` gives `t_f(b) + t_b(b)`; the smaller micro-batch wins a tie.
///
/// `None` where no divisor has a time: an empty batch, or times that are not numbers.
pub fn best_micro_batch(
    replica_batch: u64,
    stages: u64,
    stage_s: impl Fn(u64) -> f64,
) -> Option<(u64, f64)> {
    let time_s = |b: u64| batch_s(replica_batch as f64, b as f64, stages as f64, stage_s(b), 0.0);
    (1..=replica_batch)
        .filter(|b| replica_batch.is_multiple_of(*b))
        .map(|b| (b, time_s(b)))
        .filter(|(_, s)| !s.is_nan())
        .min_by(|x, y| x.1.total_cmp(&y.1))
}

/// Seconds each device idles in a flush with `v` chunks a device, `(p − 1)(t_f + t_b)/v`
/// (SC'21 §2.2.1; §2.2.2 for `v > 1`). GPipe and 1F1B are `v = 1`.
pub fn bubble_s(stages: f64, chunks: f64, forward_s: f64, backward_s: f64) -> f64 {
    (stages - 1.0) * (forward_s + backward_s) / chunks
}

/// Bubble over ideal time, `(p − 1)/(v·m)` (SC'21 §2.2.1, §2.2.2).
pub fn bubble_over_ideal(stages: f64, micro_batches: f64, chunks: f64) -> f64 {
    (stages - 1.0) / (chunks * micro_batches)
}

/// Bubble over total time, `(p − 1)/(v·m + p − 1)` (Overview, GPipe analysis; there `v = 1`).
pub fn bubble_over_total(stages: f64, micro_batches: f64, chunks: f64) -> f64 {
    (stages - 1.0) / (chunks * micro_batches + stages - 1.0)
}

/// Bubble over ideal time against tensor parallelism at `d = 1`, `(n/t − 1)/m` (SC'21 §3.2).
pub fn bubble_against_tensor(gpus: f64, tensor: f64, micro_batches: f64) -> f64 {
    (gpus / tensor - 1.0) / micro_batches
}

/// Bubble over ideal time against data parallelism at `t = 1`, `(n − d)/b'` (SC'21 §3.3.1, Fig. 6).
///
/// Here `b' = B/b`, a count of micro-batches over all replicas: not the `b' = B/d` of eq. 1.
pub fn bubble_against_data(gpus: f64, data_parallel: f64, all_micro_batches: f64) -> f64 {
    (gpus - data_parallel) / all_micro_batches
}

/// Bubble over total time when one device works at a time, `(K − 1)/K` (Overview, naive pipeline).
pub fn naive_bubble(stages: f64) -> f64 {
    (stages - 1.0) / stages
}

/// Activations a naive pipeline holds on one device, `N·L/K` (Overview), in units of one
/// sequence's activations of one layer.
pub fn naive_activation(batch: f64, layers: f64, stages: f64) -> f64 {
    batch * layers / stages
}

/// Activations GPipe holds on one device with checkpointing, `N + (L/K)(N/M)` (Overview): stage
/// inputs of the whole batch, and one micro-batch's layers. An order of growth, in the units of
/// [`naive_activation`].
pub fn gpipe_activation(batch: f64, layers: f64, stages: f64, micro_batches: f64) -> f64 {
    batch + layers / stages * batch / micro_batches
}

/// Micro-batches in flight on `stage` (0 first) under 1F1B, `min(m, p − i)` (SC'21 §2.2.1).
pub fn in_flight(stages: u64, stage: u64, micro_batches: u64) -> u64 {
    stages.saturating_sub(stage).min(micro_batches)
}
