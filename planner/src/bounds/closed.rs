//! Bounds from parallel degrees and total load alone.

use super::pipeline_spec::PipelineSpec;
use super::recompute_knapsack::RecomputeKnapsack;
use super::states::StateView;
use super::workload::{KindCost, MicroBatchCost, VocabEnd};
use crate::cost::state::LocalParams;
use crate::partition::VocabPath;
use models::schedule::ScheduleName;

/// Lower bound on the passes of any placement on a pipeline, s. `spent_s` is a lower bound on what
/// memory and parameter state add to the layers' forward and backward of one micro-batch.
///
/// The load is that of the layers, of the vocabulary layers where stages hold them, of blocking
/// transfers and of the gaps between passes.
pub fn passes_s(spec: &PipelineSpec, work: &MicroBatchCost, spent_s: f64) -> f64 {
    let (m, p) = (spec.m(), spec.ranks as f64);
    let between_s = 2.0 * spec.blocking_s() + spec.stages() as f64 * 2.0 * spec.gap_s;
    if !spec.schedule.is_whole() {
        return unlike_1f1b_s(spec, work, spent_s, between_s);
    }
    if let Some(path) = spec.passes {
        let total_s = work.load_s() + spent_s + between_s;
        let path_s = total_s + around_s(spec, &path);
        return with_passes_s(m, p, total_s, path.output_s).max(path_s);
    }
    let half_s = between_s / 2.0;
    let ends_s = |value: fn(&VocabEnd) -> f64| value(&work.embedding) + value(&work.head);
    let forward_s = work.layers_s(|kind| kind.forward_s) + ends_s(|end| end.forward_s) + half_s;
    let backward_s = work.layers_s(|kind| kind.backward_s) + ends_s(|end| end.backward_s) + half_s;
    let total_s = forward_s + backward_s + spent_s;
    if spec.chunks > 1 {
        return several_chunks_s(spec, total_s);
    }
    one_chunk_s(m, p, forward_s, backward_s, total_s)
}

/// Forwards and backwards of one micro-batch on the vocabulary layers that stages hold, s.
pub(super) fn ends_s(spec: &PipelineSpec, work: &MicroBatchCost) -> f64 {
    match spec.passes {
        Some(_) => 0.0,
        None => work.embedding.load_s() + work.head.load_s(),
    }
}

/// Bound for schedules that split the backward or lay stages in a V, the largest of:
/// - the mean load of the ranks, which some rank has at least;
/// - the forward and backward path of one micro-batch, without weight gradients where they are
///   separate;
/// - with one chunk per rank, all micro-batches of a stage after the first forwards of the stages
///   before it ([`split_rows_s`]).
fn unlike_1f1b_s(spec: &PipelineSpec, work: &MicroBatchCost, spent_s: f64, between_s: f64) -> f64 {
    let (m, p) = (spec.m(), spec.ranks as f64);
    let ends_s = ends_s(spec, work);
    let weight_gaps_s = spec.stages() as f64 * spec.gaps_s()[2];
    let load_s = work.load_s() + ends_s + spent_s + between_s + weight_gaps_s;
    let mean_s = load_s / p + spec.passes_s();
    let unpaired_s = spec.least_unpaired() * work.unpaired_s() / p;
    let apart = |weight_s: f64| if spec.splits_backward() { weight_s } else { 0.0 };
    let head_apart_s = if spec.passes.is_some() { 0.0 } else { apart(work.head.weight_s) };
    let path_s = work.layers_s(|kind| kind.load_s() - apart(kind.weight_s)) + ends_s - head_apart_s
        + between_s
        + spec.passes.map_or(0.0, |path| around_s(spec, &path))
        + spent_s;
    let longest_s = (m * mean_s + unpaired_s).max(looped_path_s(spec, path_s));
    if spec.chunks > 1 {
        return longest_s;
    }
    let forward_share = |kind: &KindCost| kind.forward_s / kind.load_s();
    let share = work.kinds.iter().map(forward_share).fold(1.0, f64::min);
    longest_s.max(split_rows_s(m, p, share, work.load_s(), spent_s) + m * spec.output_s())
}

/// What the last micro-batch's path through all stages takes beside their forwards and backwards
/// where the vocabulary is split over the pipeline, s: the passes of the output layer, and at
/// either end that of the input layer.
fn around_s(spec: &PipelineSpec, path: &VocabPath) -> f64 {
    let [look_up_s, add_s] = path.input_s;
    look_up_s + path.later_s(spec.micro_batches) + path.path_s + add_s
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
    (m / p * total_s).max(looped_path_s(spec, total_s))
}

/// The forward and backward path of one micro-batch, whose passes and blocking transfers take
/// `total_s`. GPipe and breadth-first loops run the other m − 1 forwards of the stage with the
/// longest forward before the last micro-batch goes on, and as many backwards of some stage before
/// the first micro-batch goes back: at least the mean over stages of either.
fn looped_path_s(spec: &PipelineSpec, total_s: f64) -> f64 {
    let stages = spec.stages() as f64;
    let latency_s = 2.0 * (spec.transfers_s() - spec.blocking_s());
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
    let path_s = total_s + (m - 1.0) * forward_s.max(backward_s) / p;
    let rows_s = if m > p { (m + p - 1.0) / p * total_s } else { m / p * total_s };
    path_s.max(rows_s)
}

/// 1F1B with vocabulary passes of `vocab_s` per micro-batch on every rank: stage `q` runs all its
/// micro-batches and waits for one micro-batch on each earlier stage, `T ≥ Σ_{j<q} ℓ_j + m(ℓ_q +
/// vocab)`. In the weighted average of these rows that gives every stage the same coefficient, the
/// whole model counts `1/(1 − (1 − 1/m)^p)` times.
fn with_passes_s(m: f64, p: f64, total_s: f64, vocab_s: f64) -> f64 {
    total_s / (1.0 - (1.0 - 1.0 / m).powf(p)) + m * vocab_s
}

/// Lower bound on passes, reductions and the step after the barrier for one choice of parameter
/// state, s, whatever the partition. `work` includes what the state adds to passes; `spent_s` is a
/// lower bound on the recomputation of one micro-batch.
///
/// Every rank runs its passes and then the reductions of its own parameters. The largest of:
/// - the mean over ranks of passes and reductions;
/// - the averages of rows in [`rows_and_reductions_s`] and [`path_and_reductions_s`];
/// - the ranks of the vocabulary layers: the backward path of any micro-batch ends on the rank of
///   the embedding; the first micro-batch takes its forward path to that of the output layer, which
///   then runs it for every micro-batch.
pub fn with_state_s(
    spec: &PipelineSpec,
    work: &MicroBatchCost,
    view: &StateView,
    spent_s: f64,
) -> f64 {
    let (m, p) = (spec.m(), spec.ranks as f64);
    let (embedding, head) = (&work.embedding, &work.head_of(spec));
    // What backward passes of `hidden_in_s` at most leave of the reductions.
    let left_s = |params, hidden_in_s| match spec.copies() {
        1 => view.tail_of_s(params, spec.least_stages(), hidden_in_s),
        _ => view.tail_of_copies_s(params, spec.least_stages()),
    };
    let tail_s = |params| left_s(params, f64::INFINITY);
    let layers = work.params() * (spec.copies() as f64 / p);
    let over_pipeline = spec.passes.is_some();
    let ends = embedding.params + head.params;
    // With vocabulary passes every rank holds a shard.
    let shared = if over_pipeline { ends } else { ends * spec.copies() as f64 / p };
    let head_s = if over_pipeline { 0.0 } else { spec.runs() * head.load_s() };
    let vocab_s = m * spec.passes_s();
    let gaps_s: f64 = spec.gaps_s().iter().sum();
    let between_s = 2.0 * spec.blocking_s() + spec.stages() as f64 * gaps_s;
    let unpaired_s = spec.least_unpaired() * work.unpaired_s();
    let loads_s = m * (work.load_s() + spent_s + ends_s(spec, work) + between_s) + unpaired_s;
    let mean_s = loads_s / p + vocab_s;
    let ends_backward_s = if over_pipeline { 0.0 } else { embedding.backward_s + head.backward_s };
    let hidden_in_s = backwards_s(spec, work) + ends_backward_s;
    let mean_s = mean_s + left_s(layers + dense(shared), hidden_in_s / p);
    let mut longest_s = mean_s;
    if p > 1.0 && spec.copies() == 1 {
        let held = dense(if over_pipeline { ends } else { 0.0 });
        let rows_s = rows_and_reductions_s(spec, work, view, held) + m * gaps_s;
        let rows_s = rows_s + m * spec.output_s();
        let path_s = path_and_reductions_s(spec, work, view) + tail_s(held);
        longest_s = longest_s.max(rows_s).max(path_s);
    }
    if !over_pipeline {
        let down_s =
            work.layers_s(|kind| kind.forward_s) + embedding.forward_s + forward_path_s(spec);
        let there_and_back_s = path_s(spec, work) + 2.0 * forward_path_s(spec);
        let first_s = there_and_back_s + tail_s(dense(embedding.params));
        let head_tail_s = left_s(dense(head.params), head.backward_s);
        longest_s = longest_s.max(first_s).max(down_s + head_s + head_tail_s);
    }
    longest_s + least_step_s(spec, work, view)
}

/// All that a rank does which holds at least `⌈n/p⌉` layers of a kind, s: its passes, reductions,
/// and the step after the barrier. Whatever else it holds adds at least as much to its passes as it
/// hides of the reductions and gathers. `spec` is one pipeline, and does not stand for others.
pub fn fullest_rank_s(spec: &PipelineSpec, work: &MicroBatchCost, view: &StateView) -> f64 {
    let first = spec.options()[0];
    let copies = spec.copies() as f64;
    let own_s = |_, kind: &KindCost| {
        let unpaired_s = spec.least_unpaired() * kind.both_unpaired_s();
        let passes_s = spec.m() * (kind.load_s() + kind.recompute_s[first]) + unpaired_s;
        let held = kind.params * copies;
        let tail_s = match spec.copies() {
            1 => view.tail_of_s(held, 0, kind.backward_s),
            _ => view.tail_of_copies_s(held, 0),
        };
        passes_s + tail_s + view.step_of_s(held, 0, copies * kind.forward_s)
    };
    let gaps_s: f64 = spec.gaps_s().iter().sum();
    // One micro-batch's gaps may hide some of what follows.
    let others_s = spec.m() * spec.passes_s() + (spec.m() - 1.0) * gaps_s;
    others_s + work.fullest(spec.ranks, spec.copies(), own_s)
}

/// Lower bound on the work after the barrier, s: some rank has at least the mean parameters, one
/// the embedding, and one the output layer. Where forward passes hide gathers, the bound holds
/// together with all passes, as in `StateView::tail_of_s`.
pub fn least_step_s(spec: &PipelineSpec, work: &MicroBatchCost, view: &StateView) -> f64 {
    let (embedding, head) = (work.embedding.params, work.head_of(spec).params);
    let share = spec.copies() as f64 / spec.ranks as f64;
    let shared = (embedding + head) * if spec.passes.is_some() { 1.0 } else { share };
    let mean = work.params() * share + dense(shared);
    // With ZeRO 3, forward passes gather, too.
    let known = view.zero_stage < 3;
    let forwards_s = work.layers_s(|kind| kind.forward_s)
        + work.embedding.forward_s
        + work.head.forward_s
        + spec.stages() as f64 * (spec.gap_s + spec.most_crossing_s());
    let hidden_in_s = if known { forwards_s * share } else { f64::INFINITY };
    let all =
        [(mean, hidden_in_s), (dense(embedding), f64::INFINITY), (dense(head), f64::INFINITY)];
    let step_s = |(params, hidden_in_s)| view.step_of_s(params, spec.least_stages(), hidden_in_s);
    all.into_iter().map(step_s).fold(0.0, f64::max)
}

/// [`least_step_s`] of one configuration, whose costs are known and not only bounded: some rank
/// holds at least `⌈n/p⌉` layers of a kind. Where no layer's forward hides all of its gather,
/// whatever else the rank holds hides no more than the vocabulary layers' forward, a gap and a
/// transfer.
pub fn own_step_s(spec: &PipelineSpec, work: &MicroBatchCost, view: &StateView) -> f64 {
    let gathered_s = |kind: &KindCost| view.gathers_s(kind.params);
    let exposed = work.kinds.iter().all(|kind| gathered_s(kind) >= kind.forward_s);
    let ends_s = work.embedding.forward_s + work.head.forward_s;
    let others_s = ends_s + spec.chunks as f64 * (spec.gap_s + spec.most_crossing_s());
    let of = |(kind, &count): (&KindCost, &usize)| {
        let most = (spec.copies() * count).div_ceil(spec.ranks) as f64;
        let known = exposed && view.zero_stage < 3;
        let hidden_in_s = if known { most * kind.forward_s + others_s } else { f64::INFINITY };
        view.step_of_s(kind.params * most, 0, hidden_in_s)
    };
    let fullest_s = work.kinds.iter().zip(&work.counts).map(of).fold(0.0, f64::max);
    least_step_s(spec, work, view).max(fullest_s)
}

/// The backward passes of one micro-batch through all layers, with blocking transfers and gaps, s.
fn backwards_s(spec: &PipelineSpec, work: &MicroBatchCost) -> f64 {
    let [_, backward_s, weight_s] = spec.gaps_s();
    let gaps_s = spec.stages() as f64 * (backward_s + weight_s);
    work.layers_s(|kind| kind.backward_s) + spec.blocking_s() + gaps_s
}

fn dense(dense: f64) -> LocalParams {
    LocalParams { dense, expert: 0.0 }
}

/// Transfers and gaps of one micro-batch's forward path through all stages, s.
fn forward_path_s(spec: &PipelineSpec) -> f64 {
    spec.transfers_s() + spec.stages() as f64 * spec.gap_s
}

/// The forward and backward path of one micro-batch, s, without separate weight gradients,
/// vocabulary passes, transfers and gaps.
fn path_s(spec: &PipelineSpec, work: &MicroBatchCost) -> f64 {
    let first = spec.options()[0];
    let apart = |weight_s: f64| if spec.splits_backward() { weight_s } else { 0.0 };
    let layers_s =
        work.layers_s(|kind| kind.load_s() + kind.recompute_s[first] - apart(kind.weight_s));
    let ends_s = work.embedding.load_s() + work.head.load_s() - apart(work.head.weight_s);
    layers_s + if spec.passes.is_some() { 0.0 } else { ends_s }
}

/// One chunk a rank: rank `q` runs its passes after one forward of each earlier rank, and then its
/// reductions, `T ≥ Σ_{j<q} f_j + o_q` with `o` the passes and reductions of a rank. The rows are
/// averaged with weights `λ_q = (1 − r)^(p−1−q) λ`, `λ = r/(1 − (1 − r)^p)` and `r` the least
/// `f/o` of any layer: then every layer counts at least `λ o`, wherever it lies. What is exposed of
/// a rank's reductions is at least the share that the software cannot hide, and at least what
/// exceeds its backward of one micro-batch. Either is a sum over layers. Every rank holds `held`
/// besides its layers.
fn rows_and_reductions_s(
    spec: &PipelineSpec,
    work: &MicroBatchCost,
    view: &StateView,
    held: LocalParams,
) -> f64 {
    if spec.chunks > 1 {
        return view.tail_of_s(held, spec.least_stages(), f64::INFINITY);
    }
    let (held_s, least) = view.reductions_s(held, 1);
    let share_s = |params, _| least * view.reductions_s(params, 0).0;
    let excess_s = |params, backward_s| view.reductions_s(params, 0).0 - backward_s;
    let [_, backward_gap_s, weight_gap_s] = spec.gaps_s();
    let shares_s = average_row_s(spec, work, share_s) + least * held_s;
    let excesses_s = average_row_s(spec, work, excess_s) + held_s - backward_gap_s - weight_gap_s;
    shares_s.max(excesses_s)
}

/// The average of rows above, where `exposed_s` gives what is exposed of the reductions of some
/// parameters, whose backward passes of one micro-batch take that long.
fn average_row_s(
    spec: &PipelineSpec,
    work: &MicroBatchCost,
    exposed_s: impl Fn(LocalParams, f64) -> f64,
) -> f64 {
    let first = spec.options()[0];
    let own_s = |kind: &KindCost| {
        let passes_s = spec.m() * (kind.load_s() + kind.recompute_s[first]);
        passes_s + exposed_s(kind.params, kind.backward_s)
    };
    let present = || work.kinds.iter().zip(&work.counts).filter(|(_, count)| **count > 0);
    let share = present().map(|(kind, _)| kind.forward_s / own_s(kind)).fold(1.0, f64::min);
    let weight = if share > 0.0 && share < 1.0 {
        share / (1.0 - (1.0 - share).powf(spec.ranks as f64))
    } else {
        1.0 / spec.ranks as f64
    };
    let head = work.head_of(spec);
    let head_s = spec.m() * head.load_s() + exposed_s(dense(head.params), head.backward_s);
    weight * (work.layers_s(own_s) + if spec.passes.is_some() { 0.0 } else { head_s })
}

/// A micro-batch's last backward on rank `q` ends before its backward path to the first rank, so
/// `T ≥ way − Σ_{j<q} b_j + t_q` with `t` a rank's reductions and `b` the backward of its layers.
/// The rows are averaged with weights `λ_q = (1 + r)^(p−1−q) λ`, `λ = r/((1 + r)^p − 1)` and `r`
/// the largest `b/t` of any layer: then every layer counts at least `λ t`, wherever it lies.
fn path_and_reductions_s(spec: &PipelineSpec, work: &MicroBatchCost, view: &StateView) -> f64 {
    let first = spec.options()[0];
    let tail_s = |kind: &KindCost| view.tail_of_s(kind.params, 0, f64::INFINITY);
    let back_s = |kind: &KindCost| {
        let backward_s = if spec.splits_backward() { kind.input_s } else { kind.backward_s };
        backward_s + kind.recompute_s[first]
    };
    let present = || work.kinds.iter().zip(&work.counts).filter(|(_, count)| **count > 0);
    let ratio = present().map(|(kind, _)| back_s(kind) / tail_s(kind)).fold(0.0, f64::max);
    // On the first rank `IB` waits for no broadcast, and reductions may begin.
    let add_s = spec.passes.map_or(0.0, |path| path.input_s[1]);
    let around_s = spec.passes.map_or(0.0, |path| around_s(spec, &path)) - add_s;
    let path_s = path_s(spec, work) + forward_path_s(spec) + around_s;
    if !ratio.is_finite() || ratio <= 0.0 {
        return path_s + add_s;
    }
    let weight = ratio / ((1.0 + ratio).powf(spec.ranks as f64) - 1.0);
    path_s + add_s.max(weight * work.layers_s(tail_s))
}

/// Least recomputation of one micro-batch in the whole model, s, for any schedule and partition:
/// when a micro-batch has gone forward through all layers, the ranks together hold its activations
/// beside their parameter state. Infinite where they cannot.
pub fn least_recompute_s(
    spec: &PipelineSpec,
    work: &MicroBatchCost,
    knapsack: &RecomputeKnapsack,
    state: &StateView,
    budget: f64,
) -> f64 {
    let free = budget * (1.0 + 1e-9) - mean_state_bytes(spec, work, state);
    let forced_s = knapsack.forced_s(&work.counts, spec.ranks as f64 * free);
    forced_s.unwrap_or_else(|| knapsack.at_first(&work.counts).0)
}

/// Bytes of parameter state on a device, on average.
pub fn mean_state_bytes(spec: &PipelineSpec, work: &MicroBatchCost, state: &StateView) -> f64 {
    let mut params = work.params();
    params.dense += work.embedding.params + work.head_of(spec).params;
    spec.copies() as f64 * state.bytes_of(params) / spec.ranks as f64
}

/// Lower bound on the bytes of the fullest device: the mean over devices of parameter state and of
/// one micro-batch's activations with the leanest recomputation, or the same for the most layers of
/// one kind that some device must hold.
pub fn least_bytes(spec: &PipelineSpec, work: &MicroBatchCost, state: &StateView) -> f64 {
    let options = spec.options();
    let leanest = |kind: &KindCost| {
        options.iter().map(|&option| kind.saved_bytes[option]).fold(f64::INFINITY, f64::min)
    };
    let states = mean_state_bytes(spec, work, state);
    let mean = states + work.layers_s(leanest) / spec.ranks as f64;
    let copies = spec.copies() as f64;
    let fullest = work.fullest(spec.ranks, spec.copies(), |_, kind| {
        copies * state.bytes_of(kind.params) + leanest(kind)
    });
    mean.max(fullest)
}
