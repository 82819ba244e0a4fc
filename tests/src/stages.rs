//! Random placement problems, with brute-force answers.

use crate::random::Random;
use models::decisions::Vocab;
use models::schedule::ScheduleName;
use planner::partition::{Choice, Column, Pipeline, Problem, Scratch, VocabPath};
use planner::pricing::pipelines::{PipelineKey, Pipelines};
use planner::simulate::{Durations, VocabDurations};
use std::sync::Arc;

/// Maximum number of choices of a random problem.
const MOST_CHOICES: u64 = 20_000;

/// A random pipeline of up to four stages.
pub fn pipeline(random: &mut Random, vocab: Vocab, schedule: ScheduleName) -> Arc<Pipeline> {
    let looped = match schedule {
        ScheduleName::LoopedBfs => true,
        ScheduleName::Overlapped1F1B => random.percent(70),
        _ => schedule.chunk_rule().nearest(1) == 2,
    };
    let twice = schedule.layout(2).copies() == 2;
    let ranks = match (twice, looped) {
        (true, _) => random.pick(&[2, 4]),
        (_, true) => 2,
        _ if schedule == ScheduleName::Overlapped1F1B => 1,
        _ => random.whole(1 + usize::from(vocab.over_pipeline()), 4),
    };
    let rounds = random.whole(1, 8);
    let micro_batches = match schedule {
        ScheduleName::Naive => 1,
        ScheduleName::Interleaved1F1B
        | ScheduleName::Overlapped1F1B
        | ScheduleName::InterleavedZb
        | ScheduleName::Chimera => ranks * rounds.div_ceil(ranks),
        ScheduleName::DualPipeV => 2 * ranks + rounds,
        ScheduleName::DualPipe => 2 * ranks + rounds / 2 * 2,
        _ => rounds,
    };
    let chunks = if looped { 2 } else { 1 };
    let key = PipelineKey {
        schedule,
        ranks,
        micro_batches,
        chunks,
        vocab,
        post_validation: false,
        pass_times: None,
    };
    Pipelines::default().get(key)
}

/// A random schedule and vocabulary placement.
pub fn kind(random: &mut Random) -> (ScheduleName, Vocab) {
    let schedule = random.pick(&[
        ScheduleName::OneFOneB,
        ScheduleName::OneFOneB,
        ScheduleName::OneFOneB,
        ScheduleName::GPipe,
        ScheduleName::Interleaved1F1B,
        ScheduleName::Overlapped1F1B,
        ScheduleName::Overlapped1F1B,
        ScheduleName::LoopedBfs,
        ScheduleName::ZbH1,
        ScheduleName::ZbH1,
        ScheduleName::ZbH2,
        ScheduleName::InterleavedZb,
        ScheduleName::ZbV,
        ScheduleName::VHalf,
        ScheduleName::VMin,
        ScheduleName::V1F1B,
        ScheduleName::DualPipeV,
        ScheduleName::DualPipe,
        ScheduleName::Chimera,
    ]);
    let over = schedule == ScheduleName::OneFOneB && random.percent(40);
    let vocab =
        random.pick(&[Vocab::ParallelNaive, Vocab::Parallel1, Vocab::Parallel2, Vocab::Interlaced]);
    (schedule, if over { vocab } else { Vocab::Tensor })
}

/// A random problem with up to 12 layers and three recompute mixes a range.
pub fn problem(random: &mut Random) -> Problem {
    loop {
        let (schedule, vocab) = kind(random);
        let pipeline = pipeline(random, vocab, schedule);
        let problem = Maker::new(random, pipeline, vocab).problem();
        if choices(&problem) <= MOST_CHOICES {
            return problem;
        }
    }
}

/// Costs of one layer in a random problem.
#[derive(Clone, Copy)]
struct Layer {
    forward_s: f64,
    backward_s: f64,
    state_bytes: f64,
    in_flight_bytes: f64,
}

struct Maker<'a> {
    random: &'a mut Random,
    pipeline: Arc<Pipeline>,
    vocab: Vocab,
    layers: Vec<Layer>,
    uniform: bool,
    tail_s: f64,
    step_s: f64,
    /// Share of weight gradients in a split backward pass.
    weight_share: f64,
}

impl<'a> Maker<'a> {
    fn new(random: &'a mut Random, pipeline: Arc<Pipeline>, vocab: Vocab) -> Self {
        let uniform = random.percent(50);
        let count = random.whole(pipeline.rank_of.len(), 12);
        let layers = layers(random, count, uniform);
        let (tail_s, step_s) = (random.between(0.0, 3.0), random.between(0.0, 1.0));
        let weight_share = random.between(0.1, 0.7);
        Self { random, pipeline, vocab, layers, uniform, tail_s, step_s, weight_share }
    }

    fn problem(mut self) -> Problem {
        let stages = self.pipeline.rank_of.len();
        let columns: Vec<Vec<Column>> = (0..stages).map(|stage| self.columns(stage)).collect();
        let vocab = self.vocab_durations();
        let way = way(self.vocab, &vocab);
        let link_s = if self.random.percent(50) { 0.0 } else { self.random.between(0.0, 0.5) };
        let mut problem = Problem {
            fixed: Durations { link_s: vec![link_s; stages - 1], vocab, ..Durations::default() },
            vocab: way,
            layers: self.layers.len(),
            kinds: [self.layers.len(), 0, 0, 0],
            columns,
            budget_bytes: vec![0.0; self.pipeline.ranks],
            host_budget_bytes: f64::INFINITY,
            pipeline: self.pipeline,
        };
        problem.budget_bytes = budgets(self.random, &problem);
        problem
    }

    fn vocab_durations(&mut self) -> VocabDurations {
        if !self.vocab.over_pipeline() {
            return VocabDurations::default();
        }
        let ranks = self.pipeline.ranks;
        // Equal on every pipeline rank, as slices of one vocabulary are.
        let mut each = |most: f64| vec![self.random.between(0.0, most); ranks];
        let (first, middle, last) = (each(1.0), each(0.3), each(1.0));
        let middle = if self.vocab == Vocab::ParallelNaive { middle } else { vec![0.0; ranks] };
        VocabDurations {
            first,
            middle,
            last,
            broadcast_s: self.random.between(0.0, 0.2),
            after_first_s: self.random.between(0.0, 0.2),
            after_middle_s: self.random.between(0.0, 0.2),
            after_last_s: self.random.between(0.0, 0.2),
            ..VocabDurations::default()
        }
    }

    fn columns(&mut self, stage: usize) -> Vec<Column> {
        let (count, stages) = (self.layers.len(), self.pipeline.rank_of.len());
        let end_of_model = stage == 0 || stage + 1 == stages;
        let extra_s = if end_of_model { self.random.between(0.0, 2.0) } else { 0.0 };
        let fewest = usize::from(!(end_of_model && stages > 1));
        let recompute_choices = self.random.whole(1, 3);
        let mut columns = vec![];
        for start in 0..=(if self.uniform { 0 } else { count }) {
            for end in start + fewest..=count {
                columns.extend(
                    (0..recompute_choices)
                        .map(|recompute| self.column(start, end, recompute, extra_s)),
                );
            }
        }
        columns
    }

    fn column(&self, start: usize, end: usize, recompute: usize, extra_s: f64) -> Column {
        let layers = &self.layers[start..end];
        let sum = |value: fn(&Layer) -> f64| layers.iter().map(value).sum::<f64>();
        let forward_s = sum(|layer| layer.forward_s) + extra_s;
        let kept = [1.0, 0.6, 0.2][recompute];
        let states = sum(|layer| layer.state_bytes);
        let backward_s = sum(|layer| layer.backward_s);
        let weight_s =
            if self.pipeline.splits_backward { self.weight_share * backward_s } else { 0.0 };
        Column {
            start,
            end,
            kinds: [end - start, 0, 0, 0],
            recompute,
            forward_s,
            backward_s: backward_s - weight_s + forward_s * [0.0, 0.15, 0.9][recompute],
            unpaired_s: [forward_s, backward_s]
                .map(|s| if self.pipeline.has_pairs() { 0.1 * s } else { 0.0 }),
            weight_s,
            tail_s: self.tail_s * (states + extra_s),
            step_s: self.step_s * (states + extra_s),
            in_flight_bytes: sum(|layer| layer.in_flight_bytes) * kept,
            state_bytes: states + extra_s,
            host_bytes: 0.0,
        }
    }
}

/// A micro-batch's path through vocabulary passes that are alike on all pipeline ranks.
fn way(vocab: Vocab, d: &VocabDurations) -> VocabPath {
    let (Some(first), Some(middle), Some(last)) =
        (d.first.first(), d.middle.first(), d.last.first())
    else {
        return VocabPath::default();
    };
    let first_s = d.broadcast_s + first + d.after_first_s;
    let rest_s = middle + d.after_middle_s + last + d.after_last_s;
    let path_s = match vocab {
        Vocab::ParallelNaive => first_s + rest_s,
        Vocab::Parallel2 => first_s,
        // One pass and barrier fewer.
        _ => first_s + rest_s - middle - d.after_middle_s,
    };
    let passes_s = first + middle + last;
    VocabPath { passes_s, output_s: passes_s, path_s, input_s: [0.0; 2], passes: vocab.passes() }
}

fn layers(random: &mut Random, count: usize, uniform: bool) -> Vec<Layer> {
    let one = |random: &mut Random| {
        let forward_s = random.between(0.2, 1.0);
        Layer {
            forward_s,
            backward_s: forward_s * random.between(1.0, 3.0),
            state_bytes: random.between(0.0, 1.0),
            in_flight_bytes: random.between(0.0, 1.0),
        }
    };
    let first = one(random);
    (0..count).map(|_| if uniform { first } else { one(random) }).collect()
}

/// Memory budgets between too little and plenty for an even share.
fn budgets(random: &mut Random, problem: &Problem) -> Vec<f64> {
    let ranks = problem.pipeline.ranks;
    let all: f64 = problem
        .columns
        .iter()
        .filter_map(|columns| columns.last())
        .map(|column| column.state_bytes + column.in_flight_bytes)
        .sum();
    let most = problem.pipeline.in_flight.iter().flatten().flatten().max().copied().unwrap_or(1);
    let budget = all * random.scaled(0.3, 3.0 * f64::from(most)) / ranks as f64;
    vec![budget.max(1e-3); ranks]
}

/// The layer at which a column ends that follows stages ending at layer `start`; `None` if it
/// cannot follow.
fn follows(problem: &Problem, uniform: bool, column: &Column, start: usize) -> Option<usize> {
    let end = start + column.layers();
    ((uniform || column.start == start) && end <= problem.layers).then_some(end)
}

/// Number of choices in which stages join end to end.
pub fn choices(problem: &Problem) -> u64 {
    let uniform = problem.is_uniform();
    let mut ways = vec![0u64; problem.layers + 1];
    ways[0] = 1;
    for columns in &problem.columns {
        let mut next = vec![0u64; problem.layers + 1];
        for (start, count) in ways.iter().enumerate() {
            for end in columns.iter().filter_map(|c| follows(problem, uniform, c, start)) {
                next[end] += count;
            }
        }
        ways = next;
    }
    ways[problem.layers]
}

/// Calls `visit` with every choice in which stages join end to end.
pub fn every_choice(problem: &Problem, visit: &mut dyn FnMut(&Choice)) {
    walk(problem, problem.is_uniform(), 0, &mut vec![], visit);
}

fn walk(
    problem: &Problem,
    uniform: bool,
    start: usize,
    choice: &mut Choice,
    visit: &mut dyn FnMut(&Choice),
) {
    let stage = choice.len();
    if stage == problem.stages() {
        if start == problem.layers {
            visit(choice);
        }
        return;
    }
    for (index, column) in problem.columns[stage].iter().enumerate() {
        if let Some(end) = follows(problem, uniform, column, start) {
            choice.push(index);
            walk(problem, uniform, end, choice, visit);
            choice.pop();
        }
    }
}

/// The best choice that fits, with its iteration time in s, by brute force.
pub fn best(problem: &Problem, scratch: &mut Scratch) -> Option<(Choice, f64)> {
    let mut best: Option<(Choice, f64)> = None;
    every_choice(problem, &mut |choice| {
        if !problem.fits(choice) {
            return;
        }
        let value_s = problem.iteration_s(choice, scratch);
        if best.as_ref().is_none_or(|(_, best_s)| value_s < *best_s) {
            best = Some((choice.clone(), value_s));
        }
    });
    best
}
