//! A schedule as flat arrays, priced by one walk over them.

use super::costs::{Durations, Table};
use super::path::CriticalPath;
use models::schedule::{Graph, NO_NODE, Node, Pass, PassKind, Schedule, ScheduleError, Work};

/// A pass, a pair or a join. It ends at
/// `max(end[before], end[needs] + table[latency]) + table[duration]`.
#[derive(Clone, Copy, Debug)]
struct Step {
    before: u32,
    needs: u32,
    latency: u32,
    duration: u32,
}

/// What a pipeline rank with one chunk runs before two of its vocabulary passes `S`: forwards,
/// backwards to inputs, weight gradients, and whole sets of vocabulary passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeforeVocab {
    /// Before that of the first micro-batch.
    pub first: [f64; 4],
    /// Before that of the last micro-batch.
    pub last: [f64; 4],
}

/// A schedule with a valid order and resolved dependencies, ready to be priced with any durations.
#[derive(Clone, Debug)]
pub struct Prepared {
    table: Table,
    /// Step 0 is the start of the iteration. Steps are in topological order.
    steps: Vec<Step>,
    /// Last step of each pipeline rank.
    last: Vec<u32>,
    /// The step of each pass, by pipeline rank in order. The two passes of a pair share a step.
    rank_steps: Vec<Vec<u32>>,
    /// By pipeline rank; empty with several chunks, and without vocabulary passes.
    before_vocab: Vec<BeforeVocab>,
}

/// Buffers for pricing. One workspace serves any number of schedules.
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    table: Vec<f64>,
    end: Vec<f64>,
    rank_end: Vec<f64>,
}

impl Prepared {
    /// Checks and prepares a schedule.
    ///
    /// # Errors
    /// The passes are incomplete or wait for one another.
    pub fn new(schedule: &Schedule) -> Result<Self, ScheduleError> {
        let graph = Graph::new(schedule)?;
        let table = Table::new(schedule);
        let start = Step { before: 0, needs: 0, latency: 0, duration: 0 };
        let steps = graph.nodes.iter().map(|node| step(schedule, &table, *node));
        let steps = std::iter::once(start).chain(steps).collect();
        let rank_steps = rank_steps(schedule, &graph);
        let last = rank_steps.iter().map(|steps| steps.last().copied().unwrap_or(0)).collect();
        Ok(Self { table, steps, last, rank_steps, before_vocab: before_vocab(schedule) })
    }

    /// By pipeline rank, what it runs before its vocabulary passes; empty with several chunks, and
    /// without vocabulary passes.
    pub fn before_vocab(&self) -> &[BeforeVocab] {
        &self.before_vocab
    }

    /// End of the last pass, s.
    pub fn makespan(&self, durations: &Durations, workspace: &mut Workspace) -> f64 {
        self.end_times(durations, workspace).iter().copied().fold(0.0, f64::max)
    }

    /// End of each pipeline rank's last pass, s.
    pub fn end_times<'a>(&self, durations: &Durations, workspace: &'a mut Workspace) -> &'a [f64] {
        self.run(durations, workspace);
        let Workspace { end, rank_end, .. } = workspace;
        rank_end.clear();
        rank_end.extend(self.last.iter().map(|&step| end[step as usize]));
        rank_end
    }

    /// End of the iteration where rank `i` works for `tails[i]` seconds after its last pass (on its
    /// optimizer step, say).
    pub fn makespan_with_tails(
        &self,
        durations: &Durations,
        tails: &[f64],
        workspace: &mut Workspace,
    ) -> f64 {
        let ends = self.end_times(durations, workspace);
        ends.iter().zip(tails).map(|(end, tail)| end + tail).fold(0.0, f64::max)
    }

    /// Longest time any rank takes from the start of its first pass to the end of its tail.
    pub fn longest_stage_with_tails(
        &self,
        durations: &Durations,
        tails: &[f64],
        workspace: &mut Workspace,
    ) -> f64 {
        self.run(durations, workspace);
        let stage_s = |(steps, tail): (&Vec<u32>, &f64)| match (steps.first(), steps.last()) {
            (Some(&first), Some(&last)) => {
                workspace.end[last as usize] - self.start(first, workspace) + tail
            }
            _ => 0.0,
        };
        self.rank_steps.iter().zip(tails).map(stage_s).fold(0.0, f64::max)
    }

    /// The critical path: its durations add up to the makespan.
    pub fn critical_path(&self, durations: &Durations, workspace: &mut Workspace) -> CriticalPath {
        self.critical_path_with_tails(durations, &[], workspace)
    }

    /// The critical path where rank `i` works for `tails[i]` seconds after its last pass. It ends
    /// on the rank that finishes last. Missing tails are zero.
    pub fn critical_path_with_tails(
        &self,
        durations: &Durations,
        tails: &[f64],
        workspace: &mut Workspace,
    ) -> CriticalPath {
        let ends = self.end_times(durations, workspace);
        let end_rank = latest(ends, tails);
        let mut counts = vec![0; self.table.len()];
        let mut at = self.last.get(end_rank).copied().unwrap_or(0);
        while at != 0 {
            let step = self.steps[at as usize];
            counts[step.duration as usize] += 1;
            at = step.before;
            let end = |n: u32| workspace.end[n as usize];
            if end(step.needs) + workspace.table[step.latency as usize] > end(step.before) {
                counts[step.latency as usize] += 1;
                at = step.needs;
            }
        }
        CriticalPath::new(&self.table, &counts, end_rank)
    }

    /// Start and end of each rank's passes in order, s, from the latest run with this workspace.
    pub(super) fn spans(&self, workspace: &Workspace) -> Vec<Vec<(f64, f64)>> {
        let span = |&n: &u32| {
            let end = workspace.end[n as usize];
            (self.start(n, workspace), end)
        };
        self.rank_steps.iter().map(|steps| steps.iter().map(span).collect()).collect()
    }

    fn start(&self, step: u32, workspace: &Workspace) -> f64 {
        let Step { before, needs, latency, .. } = self.steps[step as usize];
        let ready = workspace.end[needs as usize] + workspace.table[latency as usize];
        ready.max(workspace.end[before as usize])
    }

    pub(super) fn run(&self, durations: &Durations, workspace: &mut Workspace) {
        let Workspace { table, end, .. } = workspace;
        self.table.fill(durations, table);
        end.clear();
        end.resize(self.steps.len(), 0.0);
        for (n, step) in self.steps.iter().enumerate() {
            let ready = end[step.needs as usize] + table[step.latency as usize];
            let free = end[step.before as usize];
            // Not `f64::max`, whose handling of NaN makes it slower.
            let start = if ready > free { ready } else { free };
            end[n] = start + table[step.duration as usize];
        }
    }
}

fn step(schedule: &Schedule, table: &Table, node: Node) -> Step {
    let after_start = |n: u32| if n == NO_NODE { 0 } else { n + 1 };
    let rank = node.rank as usize;
    let duration = table.of_work(schedule, rank, node.work);
    Step {
        before: after_start(node.before),
        needs: after_start(node.needs),
        latency: table.of_latency(node.latency) as u32,
        duration: duration as u32,
    }
}

fn rank_steps(schedule: &Schedule, graph: &Graph) -> Vec<Vec<u32>> {
    let mut steps = vec![Vec::new(); schedule.ranks];
    for (n, node) in graph.nodes.iter().enumerate() {
        let passes = match node.work {
            Work::Join => 0,
            Work::Pass(_) => 1,
            Work::Pair(..) => 2,
        };
        steps[node.rank as usize].extend(std::iter::repeat_n(n as u32 + 1, passes));
    }
    steps
}

fn before_vocab(schedule: &Schedule) -> Vec<BeforeVocab> {
    if schedule.chunks > 1 {
        return vec![];
    }
    let of_rank = |order: &Vec<Pass>| {
        let place = |k: usize| {
            order.iter().position(|pass| pass.kind == PassKind::S && pass.micro_batch as usize == k)
        };
        let before = |place: usize| {
            let count = |kinds: &[PassKind]| {
                order[..place].iter().filter(|pass| kinds.contains(&pass.kind)).count() as f64
            };
            let kinds = [PassKind::S, PassKind::S2, PassKind::T];
            let present = kinds.into_iter().filter(|kind| order.iter().any(|p| p.kind == *kind));
            let sets = present.map(|kind| count(&[kind])).fold(f64::INFINITY, f64::min);
            let backwards = [PassKind::B, PassKind::BW];
            let weights = [PassKind::W, PassKind::BW];
            [count(&[PassKind::F]), count(&backwards), count(&weights), sets]
        };
        let (first, last) = (place(0)?, place(schedule.micro_batches - 1)?);
        Some(BeforeVocab { first: before(first), last: before(last) })
    };
    schedule.passes.iter().map(of_rank).collect::<Option<_>>().unwrap_or_default()
}

fn latest(ends: &[f64], tails: &[f64]) -> usize {
    let tails = tails.iter().copied().chain(std::iter::repeat(0.0));
    let done = ends.iter().zip(tails).map(|(end, tail)| end + tail).enumerate();
    let later = |best: (usize, f64), next: (usize, f64)| if next.1 > best.1 { next } else { best };
    done.fold((0, f64::NEG_INFINITY), later).0
}
