//! Dynamic program over (stage, first layer): the exact optimum of a closed form.
//!
//! For strict 1F1B with unequal stages the iteration takes at least
//!
//! ```text
//! max_q [ Σ_{j<q} (F_j + B_j + 2c_j) + m(F_q + B_q)
//!         + max(0, D_q − w_q F_q) + max(0, D_q − w_q B_q) ]
//! ```
//!
//! and each stage's reductions follow its own last backward. Here
//! `D_q = Σ_{j>q} (F_j + B_j) + 2 Σ_{j≥q} c_j` and `w_q = p − 1 − q`. The terms, in order: the
//! first micro-batch's forward path to stage `q` and the last one's backward path from it; the
//! stage's own `m` micro-batches; its wait for its first backward in warm-up; and its wait after
//! its last forward in cooldown. Each wait is the round trip to the last stage minus the passes
//! that stage `q` runs meanwhile. Every term is the length of a chain of passes that must follow
//! one another, so the value never exceeds the simulated time. Where the two waits may coincide
//! (`m < w_q + 2`) only the longer counts. With vocabulary passes, more forwards come first and the
//! round trip leads through those passes (`Warm`).
//!
//! Where all forwards come before the first backward (GPipe and naive, one chunk a rank) the
//! iteration takes exactly
//!
//! ```text
//! Σ F + (m − 1) max F + Σ c + max_q [ Σ_{j≥q} (B_j + c_j) + (m − 1) max_{j≥q} B_j + tail_q ]
//! ```
//!
//! Among stages that run the same micro-batches one after another, only the slowest delays the
//! others, in forwards and in backwards.
//!
//! Where backward is split, the backward path leaves out the weight gradients, which may also run
//! after the last backward. The chains are then those between the milestones of the order
//! ([`super::milestones`]).

use super::milestones::{ArrivalTimes, OwnSeconds};
use super::warm_up::Warm;
use super::{Choice, Column, Problem};
use crate::simulate::BeforeVocab;

/// The optimum of the closed form and a choice that attains it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounded {
    /// Lower bound on the iteration time of every choice that fits, s.
    pub bound_s: f64,
    /// A choice whose closed form equals the bound.
    pub choice: Choice,
}

/// A way to fill the stages from one stage to the last, reduced to what earlier stages need of it.
#[derive(Clone, Copy, Debug)]
struct Label {
    /// Σ (F + B) of these stages and 2c of the boundaries between them, s.
    load_s: f64,
    /// From the start of the first forward on these stages to the end of the last backward, s.
    span_s: f64,
    /// From the same start to the end of their last pass and of the reductions behind it, s.
    end_s: f64,
    /// Longest step after the barrier among them, s.
    step_s: f64,
    /// The last micro-batch's backward path through these stages, s, where vocabulary passes are
    /// looked at.
    back_s: f64,
    /// Longest forward and longest backward, s, used where all forwards come first. There `load_s`
    /// is the forward path, `span_s` the backward path, and `end_s` is counted from the first
    /// backward.
    longest_s: [f64; 2],
    column: usize,
    next: usize,
}

/// Solves the closed form of a problem with one chunk a rank. `None` where nothing fits below
/// `cutoff_s`.
///
/// Memory is checked column by column: with one chunk a rank, a rank is a stage. A label is dropped
/// when another is no worse in load, span, end, step and backward path. This keeps the optimum
/// because the value of a longer chain never falls when any of these grows.
pub fn solve(problem: &Problem, cutoff_s: f64) -> Option<Bounded> {
    solve_with(problem, &[], cutoff_s)
}

/// The same, where a backward also waits for every rank to come to the vocabulary passes of its
/// micro-batch. The order of passes is generated for it.
pub fn solve_with_vocab(problem: &Problem, cutoff_s: f64) -> Option<Bounded> {
    solve_with(problem, problem.pipeline.prepared.before_vocab(), cutoff_s)
}

fn solve_with(problem: &Problem, ranks: &[BeforeVocab], cutoff_s: f64) -> Option<Bounded> {
    let stages = problem.stages();
    let first_layers = first_layer_ranges(problem);
    let before = LeastBefore::new(problem, cutoff_s);
    let mut table: Vec<Vec<Vec<Label>>> = vec![vec![]; stages];
    for stage in (0..stages).rev() {
        let below = table.get(stage + 1).map(Vec::as_slice);
        let stage_of = Stage { problem, stage, vocab: ranks.get(stage) };
        table[stage] = fill_stage(stage_of, below, (first_layers[stage], &before));
    }
    let (index, bound_s) = best_start(problem, &table[0][0])?;
    (bound_s < cutoff_s).then(|| Bounded { bound_s, choice: trace(problem, &table, index) })
}

/// A stage of a problem, with what its rank runs before its vocabulary passes, where these are
/// looked at.
#[derive(Clone, Copy)]
struct Stage<'a> {
    problem: &'a Problem,
    stage: usize,
    vocab: Option<&'a BeforeVocab>,
}

/// The least that layers before a stage add to the iteration, whatever their stages.
struct LeastBefore {
    /// Forward and backward of a layer, s.
    each_s: [f64; 2],
    cutoff_s: f64,
}

impl LeastBefore {
    fn new(problem: &Problem, cutoff_s: f64) -> Self {
        let columns = || problem.columns.iter().flatten().filter(|column| column.layers() > 0);
        let least = |seconds: fn(&Column) -> f64| {
            let each = columns().map(|column| seconds(column) / column.layers() as f64);
            each.fold(f64::INFINITY, f64::min)
        };
        // Where all forwards come first, labels have another meaning.
        let cutoff_s = if problem.pipeline.forwards_first { f64::INFINITY } else { cutoff_s };
        Self {
            each_s: [least(|column| column.forward_s), least(|column| column.backward_s)],
            cutoff_s,
        }
    }

    /// Whether every partition with these stages behind `layers` layers reaches the cutoff: the
    /// first micro-batch runs forward through those layers first, and the last one backward after
    /// the span.
    fn is_beyond(&self, layers: usize, label: &Label) -> bool {
        if layers == 0 || self.cutoff_s == f64::INFINITY {
            return label.end_s.max(label.span_s) + label.step_s >= self.cutoff_s;
        }
        let [forward_s, backward_s] = self.each_s.map(|each_s| layers as f64 * each_s);
        let end_s = (forward_s + label.end_s).max(forward_s + label.span_s + backward_s);
        end_s + label.step_s >= self.cutoff_s * (1.0 + 1e-12)
    }
}

/// Range of first layers that each stage may have. The stages before it hold at least their fewest
/// and at most their most layers, and so do the stages from it on.
fn first_layer_ranges(problem: &Problem) -> Vec<(usize, usize)> {
    let counts = |columns: &Vec<Column>| {
        let layers = columns.iter().map(Column::layers);
        (layers.clone().min().unwrap_or(0), layers.max().unwrap_or(0))
    };
    let fewest_and_most: Vec<(usize, usize)> = problem.columns.iter().map(counts).collect();
    let all = fewest_and_most.iter().fold((0, 0), |sum, own| (sum.0 + own.0, sum.1 + own.1));
    let mut before = (0, 0);
    fewest_and_most
        .iter()
        .map(|own| {
            let from_here = (all.0 - before.0, all.1 - before.1);
            let least = before.0.max(problem.layers.saturating_sub(from_here.1));
            let most = before.1.min(problem.layers.saturating_sub(from_here.0));
            before = (before.0 + own.0, before.1 + own.1);
            (least, most)
        })
        .collect()
}

fn fill_stage(
    at: Stage<'_>,
    below: Option<&[Vec<Label>]>,
    (first_layers, before): ((usize, usize), &LeastBefore),
) -> Vec<Vec<Label>> {
    let Stage { problem, stage, .. } = at;
    let uniform = problem.is_uniform();
    let mut by_start = vec![vec![]; problem.layers + 1];
    for (column, c) in problem.columns[stage].iter().enumerate() {
        if !fits_alone(problem, stage, column) {
            continue;
        }
        let starts = if uniform { first_layers.0..=first_layers.1 } else { c.start..=c.start };
        for start in starts.take_while(|start| start + c.layers() <= problem.layers) {
            let labels = &mut by_start[start];
            extend(at, column, (start, start + c.layers()), (below, before), labels);
        }
    }
    by_start
}

fn fits_alone(problem: &Problem, stage: usize, column: usize) -> bool {
    let c = &problem.columns[stage][column];
    let rank = problem.pipeline.rank_of[stage];
    let bytes = c.state_bytes + problem.most_in_flight(stage) * c.in_flight_bytes;
    bytes <= problem.budget_bytes[rank]
}

/// Adds to `labels` every way to put `column` before the stages after it, which start at layer
/// `end`.
fn extend(
    at: Stage<'_>,
    column: usize,
    (start, end): (usize, usize),
    (below, before): (Option<&[Vec<Label>]>, &LeastBefore),
    labels: &mut Vec<Label>,
) {
    let mut insert = |label: Label| {
        if !before.is_beyond(start, &label) {
            insert(labels, label);
        }
    };
    match below {
        None if end == at.problem.layers => insert(join(at, column, 0, None)),
        None => {}
        Some(below) => {
            for (next, after) in below[end].iter().enumerate() {
                insert(join(at, column, next, Some(after)));
            }
        }
    }
}

fn join(at: Stage<'_>, column: usize, next: usize, after: Option<&Label>) -> Label {
    let Stage { problem, stage, .. } = at;
    let c = &problem.columns[stage][column];
    let link_s = problem.fixed.link_s.get(stage).copied().unwrap_or(0.0);
    if problem.pipeline.forwards_first {
        return Label { column, next, ..join_forwards_first(problem, c, link_s, after) };
    }
    if !problem.pipeline.milestones.is_empty() {
        return Label { column, next, ..join_split(at, c, link_s, after) };
    }
    let (below_s, span_below_s, step_below_s) = after.map_or((0.0, 0.0, 0.0), |label| {
        (label.load_s + 2.0 * link_s, label.span_s + 2.0 * link_s, label.step_s)
    });
    let m = problem.pipeline.micro_batches as f64;
    let first_s = waiting(problem, stage, c.forward_s, below_s);
    let last_s = waiting(problem, stage, c.backward_s, below_s);
    let micro_batches = problem.pipeline.micro_batches;
    let waiting_s = Warm::new(problem, stage).both_s(micro_batches, first_s, last_s);
    let unpaired_s = unpaired_s(problem, stage, c);
    let own_s = m * (c.load_s() + problem.vocab.output_s) + unpaired_s + waiting_s;
    let back_s = after.map_or(0.0, |below| below.back_s + link_s);
    let through_vocab_s = at.through_vocab_s(c, below_s, back_s);
    let span_s = own_s.max(c.load_s() + span_below_s).max(through_vocab_s);
    // Every stage reduces its gradients after its last backward.
    let end_below_s = after.map_or(0.0, |label| c.forward_s + link_s + label.end_s);
    Label {
        load_s: c.load_s() + below_s,
        span_s,
        end_s: end_below_s.max(span_s + c.tail_s),
        step_s: c.step_s.max(step_below_s),
        back_s: at.back_s(c, link_s, after),
        longest_s: [0.0; 2],
        column,
        next,
    }
}

impl Stage<'_> {
    /// The longest chain through the vocabulary passes to the end of the last backward of a stage
    /// that keeps it whole, from the start of its first forward, s. Later stages take `below_s` for
    /// a round trip, and `back_s` for the backward path.
    fn through_vocab_s(&self, c: &Column, below_s: f64, back_s: f64) -> f64 {
        let Problem { pipeline, vocab, .. } = self.problem;
        let later_s = vocab.later_s(pipeline.micro_batches);
        let last_s = later_s + c.load_s() + below_s + vocab.path_s;
        let barriers = self.barriers(c, back_s).filter(|_| pipeline.one_f_one_b);
        let Some([first_ready_s, last_ready_s]) = barriers else { return last_s };
        let m = pipeline.micro_batches as f64;
        let forwards = Warm::new(self.problem, self.stage).forwards();
        // Of the vocabulary passes, one more than of the forwards may come before.
        let outputs_s = (m - forwards - 1.0).max(0.0) * vocab.output_s;
        let behind_s = (m - forwards) * c.forward_s + m * c.backward_s + outputs_s;
        last_s.max(first_ready_s + behind_s).max(last_ready_s + c.backward_s)
    }

    /// Earliest starts of the backwards of the first and of the last micro-batch, from the start of
    /// the stage's first forward, s: the stage comes to its vocabulary passes, and after the
    /// barriers the micro-batch goes back through the later stages, for `back_s`.
    fn barriers(&self, c: &Column, back_s: f64) -> Option<[f64; 2]> {
        let BeforeVocab { first, last } = *self.vocab?;
        let Problem { vocab, fixed, .. } = self.problem;
        let behind_s = vocab.path_s - fixed.vocab.broadcast_s + back_s;
        let seconds = [c.forward_s, c.backward_s, c.weight_s, vocab.output_s];
        let before_s =
            |counts: [f64; 4]| counts.iter().zip(seconds).map(|(n, s)| n * s).sum::<f64>();
        Some([first, last].map(|counts| before_s(counts) + behind_s))
    }

    /// The backward path through this stage and those after it, s.
    fn back_s(&self, c: &Column, link_s: f64, after: Option<&Label>) -> f64 {
        let below_s = after.map_or(0.0, |label| label.back_s + link_s);
        if self.vocab.is_some() { c.backward_s + below_s } else { 0.0 }
    }
}

/// What the passes of a stage that are no part of a pair take longer than in pairs, s.
fn unpaired_s(problem: &Problem, stage: usize, c: &Column) -> f64 {
    if !problem.pipeline.has_pairs() {
        return 0.0;
    }
    let unpaired = problem.pipeline.alone(problem.pipeline.rank_of[stage], 0);
    unpaired.iter().zip(c.unpaired_s).map(|(count, each_s)| count * each_s).sum()
}

/// Adds a stage before those after it, where all forwards come before the first backward.
fn join_forwards_first(problem: &Problem, c: &Column, link_s: f64, after: Option<&Label>) -> Label {
    let m = problem.pipeline.micro_batches as f64;
    let [forward_s, backward_s] = after.map_or([0.0; 2], |below| below.longest_s);
    let longest_s = [forward_s.max(c.forward_s), backward_s.max(c.backward_s)];
    let below = |value: fn(&Label) -> f64| after.map_or(0.0, |below| value(below) + link_s);
    let span_s = c.backward_s + below(|below| below.span_s);
    let own_s = span_s + (m - 1.0) * longest_s[1] + c.tail_s;
    Label {
        load_s: c.forward_s + below(|below| below.load_s),
        span_s,
        end_s: own_s.max(after.map_or(0.0, |below| below.end_s)),
        step_s: c.step_s.max(after.map_or(0.0, |below| below.step_s)),
        back_s: 0.0,
        longest_s,
        column: 0,
        next: 0,
    }
}

/// Adds a stage with split backward before those after it. `load_s` is a micro-batch's round trip
/// through these stages.
fn join_split(at: Stage<'_>, c: &Column, link_s: f64, after: Option<&Label>) -> Label {
    let Stage { problem, stage, .. } = at;
    let path_s = after.map_or(problem.vocab.path_s, |below| below.load_s + 2.0 * link_s);
    let seconds = [[c.forward_s, c.backward_s, c.weight_s]];
    let own = OwnSeconds { chunks: &seconds, shared: [0.0; 3], vocab_s: problem.vocab.output_s };
    let barriers = at.barriers(c, after.map_or(0.0, |below| below.back_s + link_s));
    let [ready_s, last_s] = barriers.unwrap_or_default();
    let ready_s = ready_s.max(c.forward_s + path_s);
    let arrivals = ArrivalTimes { arrive_s: 0.0, ready_s, path_s };
    let milestones = &problem.pipeline.milestones[stage];
    let behind_s = milestones.ends(&own, &ArrivalTimes::default());
    let behind_s = behind_s.own_s - behind_s.last_backward_s;
    let mut span_s = milestones.ends(&own, &arrivals).last_backward_s;
    let later_s = problem.vocab.later_s(problem.pipeline.micro_batches);
    span_s = span_s.max(later_s + c.forward_s + path_s + c.backward_s);
    span_s = span_s.max(last_s + c.backward_s);
    if let Some(below) = after {
        span_s = span_s.max(c.forward_s + link_s + below.span_s + link_s + c.backward_s);
    }
    let own_end_s = span_s + behind_s + c.tail_s;
    let end_below_s = after.map_or(0.0, |below| c.forward_s + link_s + below.end_s);
    Label {
        load_s: c.forward_s + c.backward_s + path_s,
        span_s,
        end_s: own_end_s.max(end_below_s),
        step_s: after.map_or(0.0, |below| below.step_s).max(c.step_s),
        back_s: at.back_s(c, link_s, after),
        longest_s: [0.0; 2],
        column: 0,
        next: 0,
    }
}

/// Time a stage waits for a round trip through later stages, beyond what its warm-up passes fill.
fn waiting(problem: &Problem, stage: usize, pass_s: f64, below_s: f64) -> f64 {
    if !problem.pipeline.one_f_one_b {
        return 0.0;
    }
    Warm::new(problem, stage).wait_s(pass_s, below_s)
}

fn insert(labels: &mut Vec<Label>, new: Label) {
    let no_worse = |a: &Label, b: &Label| {
        let faster = a.load_s <= b.load_s && a.span_s <= b.span_s && a.end_s <= b.end_s;
        let [forward, backward] = [0, 1].map(|pass| a.longest_s[pass] <= b.longest_s[pass]);
        faster && a.step_s <= b.step_s && a.back_s <= b.back_s && forward && backward
    };
    if labels.iter().any(|old| no_worse(old, &new)) {
        return;
    }
    labels.retain(|old| !no_worse(&new, old));
    labels.push(new);
}

/// The best label that starts at layer 0, with its value.
fn best_start(problem: &Problem, labels: &[Label]) -> Option<(usize, f64)> {
    let others = problem.pipeline.micro_batches as f64 - 1.0;
    let down_s = |label: &Label| match problem.pipeline.forwards_first {
        true => label.load_s + others * label.longest_s[0],
        false => 0.0,
    };
    let [look_up_s, add_s] = problem.vocab.input_s;
    let end_s = |label: &Label| look_up_s + label.end_s.max(label.span_s + add_s);
    let value = |label: &Label| down_s(label) + end_s(label) + label.step_s;
    labels
        .iter()
        .enumerate()
        .map(|(index, label)| (index, value(label)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
}

fn trace(problem: &Problem, table: &[Vec<Vec<Label>>], mut index: usize) -> Choice {
    let (mut start, mut choice) = (0, vec![]);
    for stage in table {
        let label = &stage[start][index];
        choice.push(label.column);
        start += problem.columns[choice.len() - 1][label.column].layers();
        index = label.next;
    }
    choice
}
