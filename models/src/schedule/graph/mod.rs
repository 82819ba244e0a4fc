//! Dependency graph of a schedule: its passes in an order in which they can run.
//!
//! Besides the previous pass of its pipeline rank, a pass waits for at most one thing elsewhere: a
//! neighbouring stage's pass or a barrier. A barrier over `p` pipeline ranks is a chain of `p`
//! joins that take no time, so that every graph node waits for at most two others.

mod places;

use super::{Pass, PassKind, Schedule, ScheduleError, VocabPasses};
use places::{Need, Places, is_vocab};

/// Stands for "no such graph node" in [`Node`].
pub const NO_NODE: u32 = u32::MAX;

/// Delay between the end of a pass elsewhere and the start of the one that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latency {
    /// Nothing: the same pipeline rank, or nothing to wait for.
    None,
    /// A transfer between stages `j` and `j + 1`, either way.
    Link(u32),
    /// The broadcast of the last stage's output before `S` (`C0`).
    Broadcast,
    /// The barrier after this kind of vocabulary pass.
    Barrier(PassKind),
    /// The broadcast of the first stage's input gradient before `IB`.
    InputGradient,
}

/// Work of a graph node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing: a join of a barrier, or of the inputs of both passes of a pair.
    Join,
    /// A pass.
    Pass(Pass),
    /// A forward and a whole backward together.
    Pair(Pass, Pass),
}

/// A pass, a pair of passes, or a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The pipeline rank that runs it.
    pub rank: u32,
    /// Its work.
    pub work: Work,
    /// The graph node before it on its pipeline rank; for a join, the pass it adds to the joins
    /// before it.
    pub before: u32,
    /// The graph node elsewhere that it waits for.
    pub needs: u32,
    /// Delay between that graph node's end and this one's start.
    pub latency: Latency,
}

/// The graph nodes of a schedule, each after those it waits for.
#[derive(Clone, Debug)]
pub struct Graph {
    /// All graph nodes.
    pub nodes: Vec<Node>,
}

impl Graph {
    /// Orders the passes of a schedule.
    ///
    /// # Errors
    /// Says which pass is missing, doubled, foreign or too early, or where the pipeline ranks wait
    /// for one another.
    pub fn new(schedule: &Schedule) -> Result<Self, ScheduleError> {
        let places = Places::new(schedule)?;
        places.check_complete()?;
        places.check_local_order()?;
        places.check_pairs()?;
        places.check_vocab_order()?;
        Walk::new(&places).run()
    }
}

/// A walk over all pipeline ranks at once that takes a pass of each in turn while its inputs are
/// there.
struct Walk<'a> {
    places: &'a Places<'a>,
    /// Next position, by pipeline rank.
    next: Vec<u32>,
    /// Next pair, by pipeline rank.
    next_pair: Vec<usize>,
    /// Graph node of the latest pass, by pipeline rank.
    latest: Vec<u32>,
    /// First slot of each pipeline rank in `node_at`.
    offsets: Vec<usize>,
    /// Graph node of each pass, by pipeline rank and position.
    node_at: Vec<u32>,
    barriers: Barriers,
    nodes: Vec<Node>,
}

/// For each kind of vocabulary pass and micro-batch, how many pipeline ranks are done and the last
/// join.
struct Barriers {
    micro_batches: usize,
    done: Vec<u32>,
    last_join: Vec<u32>,
}

impl Barriers {
    fn new(schedule: &Schedule) -> Self {
        let micro_batches = schedule.micro_batches;
        let size = if schedule.vocab.is_some() { 4 * micro_batches } else { 0 };
        Self { micro_batches, done: vec![0; size], last_join: vec![NO_NODE; size] }
    }

    fn slot(&self, kind: PassKind, micro_batch: u32) -> usize {
        (kind as usize - PassKind::S as usize) * self.micro_batches + micro_batch as usize
    }
}

impl<'a> Walk<'a> {
    fn new(places: &'a Places<'a>) -> Self {
        let schedule = places.schedule;
        let mut passes = 0;
        let starts = schedule.passes.iter().map(|order| {
            let start = passes;
            passes += order.len();
            start
        });
        let offsets = starts.collect();
        Self {
            places,
            next: vec![0; schedule.ranks],
            next_pair: vec![0; schedule.ranks],
            latest: vec![NO_NODE; schedule.ranks],
            offsets,
            node_at: vec![NO_NODE; passes],
            barriers: Barriers::new(schedule),
            nodes: Vec::with_capacity(passes),
        }
    }

    fn run(mut self) -> Result<Graph, ScheduleError> {
        let ranks = self.places.schedule.ranks;
        // Not `any`, which would stop at the first pipeline rank that moves.
        while (0..ranks).filter(|&rank| self.advance(rank)).count() > 0 {}
        let waiting: Vec<_> = (0..ranks).filter_map(|d| Some((d, self.upcoming(d)?))).collect();
        if waiting.is_empty() {
            Ok(Graph { nodes: self.nodes })
        } else {
            Err(ScheduleError::Deadlock { waiting })
        }
    }

    fn upcoming(&self, rank: usize) -> Option<Pass> {
        self.places.schedule.passes[rank].get(self.next[rank] as usize).copied()
    }

    /// The backward that runs together with the pipeline rank's next pass.
    fn partner(&self, rank: usize) -> Option<Pass> {
        let schedule = self.places.schedule;
        let place = *schedule.pairs.get(rank)?.get(self.next_pair[rank])?;
        let behind = schedule.passes[rank].get(place as usize + 1).copied();
        behind.filter(|_| place == self.next[rank])
    }

    /// Takes the pipeline rank's next pass, or pair, if its inputs are there.
    fn advance(&mut self, rank: usize) -> bool {
        let Some(pass) = self.upcoming(rank) else { return false };
        let Some(arrival) = self.arrival(rank, pass) else { return false };
        match self.partner(rank) {
            None => self.push(rank, Work::Pass(pass), arrival),
            Some(partner) => {
                let Some(second) = self.arrival(rank, partner) else { return false };
                self.push(rank, Work::Join, arrival);
                self.push(rank, Work::Pair(pass, partner), second);
            }
        }
        true
    }

    /// The graph node that a pass waits for, and the way from it; `None` where it has not run.
    fn arrival(&self, rank: usize, pass: Pass) -> Option<(u32, Latency)> {
        let (node, latency) = match self.places.need(rank, pass) {
            Need::Nothing => return Some((NO_NODE, Latency::None)),
            Need::Pass(other, needed, latency) => (self.node_of(other, needed), latency),
            Need::Barrier(kind) => (self.barrier(kind, pass.micro_batch), Latency::Barrier(kind)),
        };
        (node != NO_NODE).then_some((node, latency))
    }

    fn node_of(&self, rank: usize, pass: Pass) -> u32 {
        let position = self.places.position(rank, pass) as usize;
        self.node_at[self.offsets[rank] + position]
    }

    fn barrier(&self, kind: PassKind, micro_batch: u32) -> u32 {
        let slot = self.barriers.slot(kind, micro_batch);
        let complete = self.barriers.done[slot] as usize == self.places.schedule.ranks;
        if complete { self.barriers.last_join[slot] } else { NO_NODE }
    }

    fn push(&mut self, rank: usize, work: Work, (needs, latency): (u32, Latency)) {
        let node = self.nodes.len() as u32;
        let before = std::mem::replace(&mut self.latest[rank], node);
        self.nodes.push(Node { rank: rank as u32, work, before, needs, latency });
        match work {
            Work::Join => {}
            Work::Pass(pass) => {
                self.ran(rank, node);
                if self.is_awaited(pass.kind) {
                    self.join(rank as u32, pass, node);
                }
            }
            Work::Pair(..) => {
                self.ran(rank, node);
                self.ran(rank, node);
                self.next_pair[rank] += 1;
            }
        }
    }

    /// Records that a graph node ran the pipeline rank's next pass.
    fn ran(&mut self, rank: usize, node: u32) {
        self.node_at[self.offsets[rank] + self.next[rank] as usize] = node;
        self.next[rank] += 1;
    }

    /// Whether all pipeline ranks' passes of this kind end in a barrier.
    fn is_awaited(&self, kind: PassKind) -> bool {
        let freely = self.places.schedule.vocab == Some(VocabPasses::Two) && kind == PassKind::T;
        is_vocab(kind) && kind != PassKind::IB && !freely
    }

    fn join(&mut self, rank: u32, pass: Pass, before: u32) {
        let slot = self.barriers.slot(pass.kind, pass.micro_batch);
        let node = self.nodes.len() as u32;
        let needs = std::mem::replace(&mut self.barriers.last_join[slot], node);
        self.barriers.done[slot] += 1;
        self.nodes.push(Node { rank, work: Work::Join, before, needs, latency: Latency::None });
    }
}
