//! Bounds from parallel degrees and total load alone.

use super::workload::{KindCost, MicroBatchCost, PipelineSpec, VocabEnd};
use models::schedule::ScheduleName;

/// Lower bound on the passes of any placement on a pipeline, s. `spent_s` is a lower bound on what
/// memory and parameter state add to the layers' forward and backward of one micro-batch.
///
/// The load is that of the layers, of the vocabulary layers where stages hold them, and of blocking
/// transfers.
pub fn passes_s(spec: &PipelineSpec, work: &MicroBatchCost, spent_s: f64) -> f64 {
    let (m, p) = (spec.m(), spec.ranks as f64);
    let crossings_s = 2.0 * spec.boundaries() as f64 * spec.transfer_s;
    let blocking_s = if spec.transfer_blocks { crossings_s } else { 0.0 };
    if !spec.schedule.is_whole() {
        return unlike_1f1b_s(spec, work, spent_s, blocking_s);
    }
    if let Some(way) = spec.passes {
        return with_passes_s(m, p, work.load_s() + spent_s + blocking_s, way.passes_s);
    }
    let half_s = blocking_s / 2.0;
    let ends_s = |value: fn(&VocabEnd) -> f64| value(&work.embedding) + value(&work.head);
    let forward_s = work.layers_s(|kind| kind.forward_s) + ends_s(|end| end.forward_s) + half_s;
    let backward_s = work.layers_s(|kind| kind.backward_s) + ends_s(|end| end.backward_s) + half_s;
    let total_s = forward_s + backward_s + spent_s;
    if spec.chunks > 1 {
        return several_chunks_s(spec, total_s);
    }
    one_chunk_s(m, p, forward_s, backward_s, total_s)
}

/// Bound for schedules that split the backward or lay stages in a V, the largest of:
/// - the mean load of the ranks, which some rank has at least;
/// - the forward and backward path of one micro-batch, without weight gradients where they are
///   separate;
/// - with one chunk per rank, all micro-batches of a stage after the first forwards of the stages
///   before it ([`split_rows_s`]).
fn unlike_1f1b_s(spec: &PipelineSpec, work: &MicroBatchCost, spent_s: f64, blocking_s: f64) -> f64 {
    let (m, p) = (spec.m(), spec.ranks as f64);
    let held =
        |end: &VocabEnd, value: f64| if spec.passes.is_some() { 0.0 } else { end.load_s() - value };
    let ends_s = held(&work.embedding, 0.0) + held(&work.head, 0.0);
    let mean_s = (work.load_s() + ends_s + spent_s + blocking_s) / p + spec.passes_s();
    let apart = |weight_s: f64| if spec.splits_backward() { weight_s } else { 0.0 };
    let way_s = work.layers_s(|kind| kind.load_s() - apart(kind.weight_s))
        + held(&work.embedding, 0.0)
        + held(&work.head, apart(work.head.weight_s))
        + blocking_s
        + spent_s;
    let longest_s = (m * mean_s).max(looped_way_s(spec, way_s));
    if spec.chunks > 1 {
        return longest_s;
    }
    let forward_share = |kind: &KindCost| kind.forward_s / kind.load_s();
    let share = work.kinds.iter().map(forward_share).fold(1.0, f64::min);
    longest_s.max(split_rows_s(m, p, share, work.load_s(), spent_s) + m * spec.passes_s())
}

/// Stage `q` runs all its micro-batches, and before them each earlier stage runs one forward. A
/// forward is at least a share `r` of a stage's load per micro-batch, so `T ≥ r Σ_{j<q} ℓ_j + m
/// ℓ_q`. In the weighted average of these rows that gives every stage the same coefficient, the
/// layers count `r/(1 − (1 − r/m)^p)` times. `spent_s` is not part of a forward, and counts at
/// least as often as in the row of the first stage.
fn split_rows_s(m: f64, p: f64, share: f64, layers_s: f64, spent_s: f64) -> f64 {
    if share <= 0.0 || !share.is_finite() {
        return 0.0;
    }
    let kept = 1.0 - share / m;
    let times = share / (1.0 - kept.powf(p));
    times * (layers_s + kept.powf(p - 1.0) * spent_s)
}

/// Several chunks per rank: some rank has at least the mean load and runs its micro-batches one
/// after another.
fn several_chunks_s(spec: &PipelineSpec, total_s: f64) -> f64 {
    let (m, p) = (spec.m(), spec.ranks as f64);
    (m / p * total_s).max(looped_way_s(spec, total_s))
}

/// The forward and backward path of one micro-batch, whose passes and blocking transfers take
/// `total_s`. GPipe and breadth-first loops run the other m − 1 forwards of the stage with the
/// longest forward before the last micro-batch goes on, and as many backwards of some stage before
/// the first micro-batch goes back: at least the mean over stages of either.
fn looped_way_s(spec: &PipelineSpec, total_s: f64) -> f64 {
    let stages = spec.stages() as f64;
    let latency_s = spec.boundaries() as f64 * spec.round_trip_s();
    let others_s = match spec.schedule {
        ScheduleName::LoopedBfs | ScheduleName::GPipe => (spec.m() - 1.0) * total_s / stages,
        _ => 0.0,
    };
    total_s + latency_s + others_s
}

/// 1F1B, GPipe and naive with any placement, without latencies. The larger of two bounds:
/// - the forward and backward path of one micro-batch, with the other m − 1 forwards (or backwards)
///   of the stage where they take longest, which is at least the mean stage;
/// - for m > p the weighted average of the rows of the closed form
///   ([`crate::partition::dynamic_program`]) that gives every stage the same coefficient. With the
///   weights `λ_q = ((m−1)/p − Σ_{j<q} λ_j)/(m − 1 − w_q) ≥ 0`, which sum to one, every stage's
///   load counts `(m + p − 1)/p` times. GPipe and naive take no less than 1F1B.
fn one_chunk_s(m: f64, p: f64, forward_s: f64, backward_s: f64, total_s: f64) -> f64 {
    let way_s = total_s + (m - 1.0) * forward_s.max(backward_s) / p;
    let rows_s = if m > p { (m + p - 1.0) / p * total_s } else { m / p * total_s };
    way_s.max(rows_s)
}

/// 1F1B with vocabulary passes of `vocab_s` per micro-batch on every rank: stage `q` runs all its
/// micro-batches and waits for one micro-batch on each earlier stage, `T ≥ Σ_{j<q} ℓ_j + m(ℓ_q +
/// vocab)`. In the weighted average of these rows that gives every stage the same coefficient, the
/// whole model counts `1/(1 − (1 − 1/m)^p)` times.
fn with_passes_s(m: f64, p: f64, total_s: f64, vocab_s: f64) -> f64 {
    total_s / (1.0 - (1.0 - 1.0 / m).powf(p)) + m * vocab_s
}

/// Lower bound on the bytes of the fullest device: the mean over devices of parameter state and of
/// one micro-batch's activations with the leanest recomputation, or the same for the most layers of
/// one kind that some device must hold.
pub fn least_bytes(spec: &PipelineSpec, work: &MicroBatchCost, state_bytes: [f64; 2]) -> f64 {
    let (params, options) = (work.params(), spec.options());
    let ends = work.embedding.params + work.head.params;
    let states = (params.dense + ends) * state_bytes[0] + params.expert * state_bytes[1];
    let leanest = |kind: &KindCost| {
        options.iter().map(|&option| kind.saved_bytes[option]).fold(f64::INFINITY, f64::min)
    };
    let mean = (spec.copies() as f64 * states + work.layers_s(leanest)) / spec.ranks as f64;
    let copies = spec.copies() as f64;
    let fullest = work.fullest(spec.ranks, spec.copies(), |_, kind| {
        let KindCost { params, .. } = kind;
        copies * (params.dense * state_bytes[0] + params.expert * state_bytes[1]) + leanest(kind)
    });
    mean.max(fullest)
}
