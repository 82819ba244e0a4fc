//! Dynamic program over (stage, first layer) for 1F1B: the exact optimum of the closed form.
//!
//! With unequal stages and strict 1F1B the iteration is at least
//! `max_q [ Σ_{j<q} (F_j + B_j + 2c_j) + m(F_q + B_q) + max(0, D_q − w_q F_q) + max(0, D_q − w_q B_q) ]`
//! with `D_q = Σ_{j>q} (F_j + B_j) + 2 Σ_{j≥q} c_j` and `w_q = p − 1 − q`: stage `q` starts when the
//! first micro-batch has come down to it, is busy with all `m`, waits for its first backward and its
//! last forward's way down and back as long as its own warm-up work does not fill it, and what the
//! stages before it do to the last micro-batch comes behind. Every term is the length of a chain of
//! passes that must follow one another, so the value never exceeds the simulation; where the two waits
//! may be the same time (m < w_q + 2) only the longer counts. With vocabulary passes more forwards
//! come first, and the way leads through those passes (`Warm`).
//!
//! Where all forwards come before the first backward (GPipe and naive, one chunk a device) the iteration is exactly
//! `Σ F + (m − 1) max F + Σ c + max_q [ Σ_{j≥q} (B_j + c_j) + (m − 1) max_{j≥q} B_j + tail_q ]`: stages that
//! run the same micro-batches one after another are held up by the longest alone, down and back up again.
//!
//! Where backward is split, the way back leaves out the weight gradients, which may also come behind the
//! last backward; the chains are those between the milestones of the order ([`super::milestones`]).

use super::milestones::{ArrivalTimes, OwnSeconds};
use super::{Choice, Column, Problem};
use models::schedule::VocabPasses;

/// The optimum of the closed form and a choice that attains it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounded {
    /// Lower bound on the iteration of every choice that fits, s.
    pub bound_s: f64,
    /// A choice whose closed form is the bound.
    pub choice: Choice,
}

/// A way to fill the stages from one stage to the last: what later decisions need of it.
#[derive(Clone, Copy, Debug)]
struct Label {
    /// Σ (F + B) of these stages and 2c of the boundaries below their first, s.
    load_s: f64,
    /// From the first forward reaching these stages to the last backward leaving them, s.
    span_s: f64,
    /// The same to the last of their passes and, where weight gradients may come behind the last backward,
    /// their devices' reductions, s.
    finish_s: f64,
    /// Largest step behind the barrier among them, s.
    step_s: f64,
    /// Longest forward and longest backward, s, where all forwards come first; there `load_s` is the way down, `span_s`
    /// the way back up, and `finish_s` begins with the first backward.
    longest_s: [f64; 2],
    column: usize,
    next: usize,
}

/// Solves the closed form of a problem with one chunk a device; `None` where nothing fits.
///
/// Stage-local memory is checked column by column: with one chunk a device, a device is a stage.
/// Labels that are no better in any of load, span, finish and step are dropped, which keeps the optimum
/// because the value of a longer chain never falls when any of these grows.
pub fn solve(problem: &Problem) -> Option<Bounded> {
    let stages = problem.stages();
    let reach = reachable(problem);
    let mut table: Vec<Vec<Vec<Label>>> = vec![vec![]; stages];
    for stage in (0..stages).rev() {
        let below = table.get(stage + 1).map(Vec::as_slice);
        table[stage] = fill_stage(problem, stage, below, reach[stage]);
    }
    let (index, bound_s) = best_start(problem, &table[0][0])?;
    Some(Bounded { bound_s, choice: trace(problem, &table, index) })
}

/// First layers each stage may have: the stages before it hold at least their fewest and at most their
/// most layers, and so do the stages from it on.
fn reachable(problem: &Problem) -> Vec<(usize, usize)> {
    let counts = |columns: &Vec<Column>| {
        let layers = columns.iter().map(Column::layers);
        (layers.clone().min().unwrap_or(0), layers.max().unwrap_or(0))
    };
    let ends: Vec<(usize, usize)> = problem.columns.iter().map(counts).collect();
    let all = ends.iter().fold((0, 0), |sum, end| (sum.0 + end.0, sum.1 + end.1));
    let mut before = (0, 0);
    ends.iter()
        .map(|end| {
            let from_here = (all.0 - before.0, all.1 - before.1);
            let least = before.0.max(problem.layers.saturating_sub(from_here.1));
            let most = before.1.min(problem.layers.saturating_sub(from_here.0));
            before = (before.0 + end.0, before.1 + end.1);
            (least, most)
        })
        .collect()
}

fn fill_stage(
    problem: &Problem,
    stage: usize,
    below: Option<&[Vec<Label>]>,
    reach: (usize, usize),
) -> Vec<Vec<Label>> {
    let uniform = problem.is_uniform();
    let mut by_start = vec![vec![]; problem.layers + 1];
    for (column, c) in problem.columns[stage].iter().enumerate() {
        if !fits_alone(problem, stage, column) {
            continue;
        }
        let starts = if uniform { reach.0..=reach.1 } else { c.start..=c.start };
        for start in starts.take_while(|start| start + c.layers() <= problem.layers) {
            extend(problem, stage, column, start + c.layers(), below, &mut by_start[start]);
        }
    }
    by_start
}

fn fits_alone(problem: &Problem, stage: usize, column: usize) -> bool {
    let c = &problem.columns[stage][column];
    let device = problem.pipeline.device_of[stage];
    let bytes = c.state_bytes + problem.most_in_flight(stage) * c.in_flight_bytes;
    bytes <= problem.budget_bytes[device]
}

/// Adds to `labels` every way to put `column` before the stages below, which start at layer `end`.
fn extend(
    problem: &Problem,
    stage: usize,
    column: usize,
    end: usize,
    below: Option<&[Vec<Label>]>,
    labels: &mut Vec<Label>,
) {
    match below {
        None if end == problem.layers => {
            let label = join(problem, stage, column, 0, None);
            insert(labels, label);
        }
        None => {}
        Some(below) => {
            for (next, after) in below[end].iter().enumerate() {
                let label = join(problem, stage, column, next, Some(after));
                insert(labels, label);
            }
        }
    }
}

fn join(
    problem: &Problem,
    stage: usize,
    column: usize,
    next: usize,
    after: Option<&Label>,
) -> Label {
    let c = &problem.columns[stage][column];
    let link_s = problem.fixed.link_s.get(stage).copied().unwrap_or(0.0);
    if problem.pipeline.forwards_first {
        return Label { column, next, ..join_forwards_first(problem, c, link_s, after) };
    }
    if !problem.pipeline.milestones.is_empty() {
        return Label { column, next, ..join_split(problem, stage, c, link_s, after) };
    }
    let (below_s, span_below_s, step_below_s) = after.map_or((0.0, 0.0, 0.0), |label| {
        (label.load_s + 2.0 * link_s, label.span_s + 2.0 * link_s, label.step_s)
    });
    let m = problem.pipeline.micro_batches as f64;
    let first_s = waiting(problem, stage, c.forward_s, below_s);
    let last_s = waiting(problem, stage, c.backward_s, below_s);
    let micro_batches = problem.pipeline.micro_batches;
    let waiting_s = Warm::new(problem, stage).both_s(micro_batches, first_s, last_s);
    let own_s = m * (c.load_s() + problem.vocab.passes_s) + waiting_s;
    // Nothing hides the first stage's tail: it is the last to be done with its passes.
    let tail_s = if stage == 0 { c.tail_s } else { 0.0 };
    let span_s = own_s.max(c.load_s() + span_below_s) + tail_s;
    Label {
        load_s: c.load_s() + below_s,
        span_s,
        finish_s: span_s,
        step_s: c.step_s.max(step_below_s),
        longest_s: [0.0; 2],
        column,
        next,
    }
}

/// A stage before the stages below it where all forwards come before the first backward.
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
        finish_s: own_s.max(after.map_or(0.0, |below| below.finish_s)),
        step_s: c.step_s.max(after.map_or(0.0, |below| below.step_s)),
        longest_s,
        column: 0,
        next: 0,
    }
}

/// A stage whose backward is split before the stages below it. `load_s` is a micro-batch's way down these
/// stages and back.
fn join_split(
    problem: &Problem,
    stage: usize,
    c: &Column,
    link_s: f64,
    after: Option<&Label>,
) -> Label {
    let way_s = after.map_or(0.0, |below| below.load_s + 2.0 * link_s);
    let seconds = [[c.forward_s, c.backward_s, c.weight_s]];
    let own = OwnSeconds { chunks: &seconds, shared_s: 0.0, vocab_s: problem.vocab.passes_s };
    let around = ArrivalTimes { arrive_s: 0.0, ready_s: c.forward_s + way_s, way_s };
    let milestones = &problem.pipeline.milestones[stage];
    let behind_s = milestones.ends(&own, &ArrivalTimes::default());
    let behind_s = behind_s.own_s - behind_s.last_backward_s;
    let mut span_s = milestones.ends(&own, &around).last_backward_s;
    if let Some(below) = after {
        span_s = span_s.max(c.forward_s + link_s + below.span_s + link_s + c.backward_s);
    }
    let own_finish_s = span_s + behind_s + c.tail_s;
    let finish_below_s = after.map_or(0.0, |below| c.forward_s + link_s + below.finish_s);
    Label {
        load_s: c.forward_s + c.backward_s + way_s,
        span_s,
        finish_s: own_finish_s.max(finish_below_s),
        step_s: after.map_or(0.0, |below| below.step_s).max(c.step_s),
        longest_s: [0.0; 2],
        column: 0,
        next: 0,
    }
}

/// Time a stage waits for the way down and back beyond what its warm-up passes fill.
fn waiting(problem: &Problem, stage: usize, pass_s: f64, below_s: f64) -> f64 {
    if !problem.pipeline.one_f_one_b {
        return 0.0;
    }
    Warm::new(problem, stage).wait_s(pass_s, below_s)
}

/// What a stage of 1F1B may do while its first micro-batch is on its way down and back, and by symmetry
/// while its last one is.
///
/// In its order, `forwards` forwards come before the first backward. With vocabulary passes these are as
/// many more as there are barriers; the way then leads through the vocabulary layers, and before the first
/// backward can come only vocabulary passes of micro-batches whose forwards do (one more where a pass lags
/// behind the barrier that the backward waits for).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Warm {
    forwards: f64,
    vocab: VocabWay,
}

/// Vocabulary passes on a micro-batch's way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VocabWay {
    /// All passes of one micro-batch on a device, s.
    pub passes_s: f64,
    /// From the end of the last stage's forward to the start of its backward, s.
    pub way_s: f64,
    /// Which: they say how many micro-batches are on the way.
    pub passes: Option<VocabPasses>,
}

impl Warm {
    pub(crate) fn of(devices: usize, micro_batches: usize, stage: usize, vocab: VocabWay) -> Self {
        let plain = devices - stage;
        let forwards = vocab.passes.map_or(plain, |passes| passes.in_flight(plain));
        Self { forwards: forwards.min(micro_batches) as f64, vocab }
    }

    pub(super) fn new(problem: &Problem, stage: usize) -> Self {
        let pipeline = &problem.pipeline;
        Self::of(pipeline.devices, pipeline.micro_batches, stage, problem.vocab)
    }

    /// What the way of `below_s` beyond the stage takes longer than its own passes in the meantime, of
    /// which a forward (a backward, at the end) takes `pass_s`.
    pub(crate) fn wait_s(&self, pass_s: f64, below_s: f64) -> f64 {
        (below_s + self.vocab_s() - self.passes() * pass_s).max(0.0)
    }

    /// Forwards between the first micro-batch's own and its backward.
    pub(super) fn passes(&self) -> f64 {
        self.forwards - 1.0
    }

    /// The way through the vocabulary layers, less the vocabulary passes run in the meantime at most, s.
    pub(super) fn vocab_s(&self) -> f64 {
        let vocab = &self.vocab;
        let run_s = if vocab.passes_s > 0.0 { (self.forwards + 1.0) * vocab.passes_s } else { 0.0 };
        vocab.way_s - run_s
    }

    /// Whether the waits at both ends are different times: with few micro-batches they may be the same.
    pub(super) fn apart(&self, micro_batches: usize) -> bool {
        micro_batches as f64 >= self.forwards + 1.0
    }

    /// Both waits where they are different times: with few micro-batches they may be the same.
    pub(crate) fn both_s(&self, micro_batches: usize, first_s: f64, last_s: f64) -> f64 {
        let apart = self.apart(micro_batches);
        if apart { first_s + last_s } else { first_s.max(last_s) }
    }
}

fn insert(labels: &mut Vec<Label>, new: Label) {
    let no_worse = |a: &Label, b: &Label| {
        let faster = a.load_s <= b.load_s && a.span_s <= b.span_s && a.finish_s <= b.finish_s;
        let [forward, backward] = [0, 1].map(|pass| a.longest_s[pass] <= b.longest_s[pass]);
        faster && a.step_s <= b.step_s && forward && backward
    };
    if labels.iter().any(|old| no_worse(old, &new)) {
        return;
    }
    labels.retain(|old| !no_worse(&new, old));
    labels.push(new);
}

/// The best label that starts at layer 0.
fn best_start(problem: &Problem, labels: &[Label]) -> Option<(usize, f64)> {
    let others = problem.pipeline.micro_batches as f64 - 1.0;
    let down_s = |label: &Label| match problem.pipeline.forwards_first {
        true => label.load_s + others * label.longest_s[0],
        false => 0.0,
    };
    let value = |label: &Label| down_s(label) + label.finish_s + label.step_s;
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
