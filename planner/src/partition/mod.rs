//! Which layers a stage holds and what it recomputes: the inner problem of the search.
//!
//! A [`Problem`] is abstract: choose one [`Column`] for every stage so that the columns' layer
//! ranges join end to end and every pipeline rank's memory fits its budget. The objective is the
//! simulated iteration time. Where the columns' seconds and bytes come from is the business of
//! `crate::pricing`. [`dynamic_program`] gives incumbents and bounds, [`ilp`] the exact answer.

pub mod bidirectional;
pub mod dynamic_program;
pub mod ilp;
pub mod milestones;
pub mod relaxation;
mod rows;
pub(crate) mod warm_up;

pub use milestones::OrderMilestones;
pub use warm_up::VocabPath;

use crate::simulate::{CriticalPath, Durations, Prepared, Workspace};
use std::sync::{Arc, LazyLock};

/// One way to fill a stage: a layer range and a recompute choice, with their costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Column {
    /// First layer.
    pub start: usize,
    /// One past the last layer.
    pub end: usize,
    /// Layers of each kind.
    pub kinds: [usize; 4],
    /// Recompute choice: an index that only the maker of the column interprets.
    pub recompute: usize,
    /// Forward pass of one micro-batch, s; as one of a pair, where passes of pairs are shorter.
    pub forward_s: f64,
    /// Backward pass of one micro-batch with its recomputation, s. Backward to inputs alone where
    /// the schedule splits it.
    pub backward_s: f64,
    /// Extra seconds of a forward and of a backward pass that run unpaired.
    pub unpaired_s: [f64; 2],
    /// Weight gradients of one micro-batch, s, where the schedule splits the backward; else 0.
    pub weight_s: f64,
    /// Work for this stage between the rank's last pass and the global barrier, s.
    pub tail_s: f64,
    /// Work for this stage after the global barrier, s.
    pub step_s: f64,
    /// Activation bytes of one micro-batch in flight.
    pub in_flight_bytes: f64,
    /// Bytes held during the whole iteration.
    pub state_bytes: f64,
    /// Bytes of host memory.
    pub host_bytes: f64,
}

impl Column {
    /// Forward and backward pass of one micro-batch that run alone, s.
    pub fn alone(&self) -> [f64; 2] {
        [self.forward_s + self.unpaired_s[0], self.backward_s + self.unpaired_s[1]]
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.end - self.start
    }

    /// Seconds of one micro-batch: forward, backward and weight gradients.
    pub fn load_s(&self) -> f64 {
        self.forward_s + self.backward_s + self.weight_s
    }
}

/// An order of passes, prepared when it is first priced.
pub type LazyPrepared = LazyLock<Prepared, Box<dyn FnOnce() -> Prepared + Send>>;

/// A pipeline with a fixed order of passes.
#[derive(Debug)]
pub struct Pipeline {
    /// The prepared order.
    pub prepared: LazyPrepared,
    /// Pipeline ranks, `p`.
    pub ranks: usize,
    /// Micro-batches, `m`.
    pub micro_batches: usize,
    /// Rank of each stage; the first direction's copy where the pipeline is bidirectional.
    pub rank_of: Vec<usize>,
    /// Chunk of each stage on its rank.
    pub chunk_of: Vec<usize>,
    /// The pipeline is bidirectional: every stage has two copies. The second copy is chunk 1 of
    /// rank `p − 1 − i`, where rank `i` holds the first. Each copy runs half of the micro-batches.
    pub bidirectional: bool,
    /// By rank, micro-batches in flight per chunk: all maximal combinations.
    pub in_flight: Vec<Vec<Vec<u32>>>,
    /// Some backward is split: columns have weight gradients of their own.
    pub splits_backward: bool,
    /// By rank and chunk, how many forwards and backwards are part of pairs. A pair takes as long
    /// as both, less what it hides. Empty without pairs.
    pub paired: Vec<Vec<[u32; 2]>>,
    /// Ranks update without waiting for one another and roll back an update that validation rejects
    /// (Zero Bubble, arXiv 2401.10241, section 4). An iteration then lasts from the start of a
    /// rank's first pass to the end of its own work.
    pub post_validation: bool,
    /// The order is 1F1B with one chunk a rank, with or without vocabulary passes: its closed form
    /// holds.
    pub one_f_one_b: bool,
    /// All forwards come before the first backward, with one chunk a rank: a closed form is exact.
    pub forwards_first: bool,
    /// By rank, milestones of orders without a known closed form: those with split backwards or on
    /// a V of stages. Empty for others.
    pub milestones: Vec<OrderMilestones>,
}

impl Pipeline {
    /// Rank and chunk of each copy of a stage.
    pub fn holders(&self, stage: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (rank, chunk) = (self.rank_of[stage], self.chunk_of[stage]);
        let second = self.bidirectional.then(|| (self.ranks - 1 - rank, 1));
        std::iter::once((rank, chunk)).chain(second)
    }

    /// Whether some forward runs together with a backward.
    pub fn has_pairs(&self) -> bool {
        !self.paired.is_empty()
    }

    /// Forwards and backwards of a rank's chunk that are no part of a pair.
    pub fn alone(&self, rank: usize, chunk: usize) -> [f64; 2] {
        let paired = self.paired.get(rank).map_or([0; 2], |chunks| chunks[chunk]);
        paired.map(|paired| self.runs() - f64::from(paired))
    }

    /// Stages of a rank, each with its chunk.
    pub fn stages_on(&self, rank: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let on = move |stage| {
            let here = self.holders(stage).find(|&(holder, _)| holder == rank);
            here.map(|(_, chunk)| (stage, chunk))
        };
        (0..self.rank_of.len()).filter_map(on)
    }

    /// Most micro-batches of a stage in flight on one rank.
    pub fn most_in_flight(&self, stage: usize) -> f64 {
        let counts = |(rank, chunk): (usize, usize)| {
            self.in_flight[rank].iter().map(move |vector| vector[chunk])
        };
        f64::from(self.holders(stage).flat_map(counts).max().unwrap_or(0))
    }

    /// Micro-batches that one copy of a stage runs.
    pub fn runs(&self) -> f64 {
        self.micro_batches as f64 / if self.bidirectional { 2.0 } else { 1.0 }
    }

    /// How often a stage's forward, backward to inputs and weight gradients lie on a path, those in
    /// pairs included.
    pub fn counts_on(&self, path: &CriticalPath, stage: usize) -> [u32; 3] {
        let [forward, backward] = [0, 1].map(|part: usize| path.paired_count[part][stage]);
        [
            path.forward_count[stage] + forward,
            path.backward_count[stage] + backward,
            path.weight_count[stage] + backward,
        ]
    }
}

/// A partition problem.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The order of passes.
    pub pipeline: Arc<Pipeline>,
    /// Latencies and vocabulary passes. Forward and backward are filled in from columns.
    pub fixed: Durations,
    /// Vocabulary passes that a micro-batch goes through, for bounds.
    pub vocab: VocabPath,
    /// Layers of the model.
    pub layers: usize,
    /// The same of each kind.
    pub kinds: [usize; 4],
    /// By stage, its columns.
    pub columns: Vec<Vec<Column>>,
    /// Bytes each pipeline rank has for states and activations.
    pub budget_bytes: Vec<f64>,
    /// Bytes of host memory that each pipeline rank has; infinite where columns fit whatever the
    /// choice.
    pub host_budget_bytes: f64,
}

/// A choice of one column for every stage, by index.
pub type Choice = Vec<usize>;

/// Buffers for pricing choices.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    durations: Durations,
    tails: Vec<f64>,
    workspace: Workspace,
}

impl Problem {
    /// Stages, p·v.
    pub fn stages(&self) -> usize {
        self.columns.len()
    }

    fn chosen<'a>(&'a self, choice: &'a [usize]) -> impl Iterator<Item = (usize, &'a Column)> {
        choice.iter().enumerate().map(|(stage, &index)| (stage, &self.columns[stage][index]))
    }

    /// Durations of every pass under a choice.
    pub fn durations(&self, choice: &[usize]) -> Durations {
        let mut durations = self.fixed.clone();
        durations.forward = self.chosen(choice).map(|(_, column)| column.alone()[0]).collect();
        durations.backward = self.chosen(choice).map(|(_, column)| column.alone()[1]).collect();
        self.fill_split(choice, &mut durations);
        durations
    }

    /// Fills in weight gradients and pairs, where the pipeline has any.
    fn fill_split(&self, choice: &[usize], durations: &mut Durations) {
        if self.pipeline.splits_backward {
            durations.weight = self.chosen(choice).map(|(_, column)| column.weight_s).collect();
        }
        if self.pipeline.has_pairs() {
            let backward_s = |column: &Column| column.backward_s + column.weight_s;
            durations.paired = [
                self.chosen(choice).map(|(_, column)| column.forward_s).collect(),
                self.chosen(choice).map(|(_, column)| backward_s(column)).collect(),
            ];
        }
    }

    fn fill(&self, choice: &[usize], scratch: &mut Scratch) -> f64 {
        let Scratch { durations, tails, .. } = scratch;
        durations.clone_from(&self.fixed);
        tails.clear();
        tails.resize(self.pipeline.ranks, 0.0);
        let mut steps = vec![0.0; self.pipeline.ranks];
        for (stage, column) in self.chosen(choice) {
            let [forward_s, backward_s] = column.alone();
            durations.forward.push(forward_s);
            durations.backward.push(backward_s);
            for (rank, _) in self.pipeline.holders(stage) {
                tails[rank] += column.tail_s;
                steps[rank] += column.step_s;
            }
        }
        self.fill_split(choice, durations);
        if self.pipeline.post_validation {
            tails.iter_mut().zip(&steps).for_each(|(tail, step)| *tail += step);
            return 0.0;
        }
        steps.into_iter().fold(0.0, f64::max)
    }

    /// Iteration time of a choice, s, whether or not it fits in memory: the simulated passes and
    /// tails up to the barrier, then the longest step after it. Without a barrier it is the longest
    /// time any rank takes for all of that.
    pub fn iteration_s(&self, choice: &[usize], scratch: &mut Scratch) -> f64 {
        let step_s = self.fill(choice, scratch);
        let Scratch { durations, tails, workspace } = scratch;
        let prepared = &self.pipeline.prepared;
        if self.pipeline.post_validation {
            return prepared.longest_stage_with_tails(durations, tails, workspace);
        }
        prepared.makespan_with_tails(durations, tails, workspace) + step_s
    }

    /// Length of a path under a choice, with the tail of its last rank and the longest step after
    /// the barrier, s. It is at most [`Self::iteration_s`] where there is a barrier.
    pub fn path_s(&self, choice: &[usize], path: &CriticalPath, scratch: &mut Scratch) -> f64 {
        let step_s = self.fill(choice, scratch);
        path.length_s(&scratch.durations) + scratch.tails[path.end_rank] + step_s
    }

    /// The critical path under a choice, including the tail of its last rank.
    pub fn critical_path(&self, choice: &[usize], scratch: &mut Scratch) -> CriticalPath {
        self.fill(choice, scratch);
        let Scratch { durations, tails, workspace } = scratch;
        self.pipeline.prepared.critical_path_with_tails(durations, tails, workspace)
    }

    /// Peak bytes of each rank under a choice.
    pub fn memory_bytes(&self, choice: &[usize]) -> Vec<f64> {
        let mut states = vec![0.0; self.pipeline.ranks];
        let mut activations: Vec<Vec<f64>> =
            self.pipeline.in_flight.iter().map(|vectors| vec![0.0; vectors.len()]).collect();
        for (stage, column) in self.chosen(choice) {
            for (rank, chunk) in self.pipeline.holders(stage) {
                states[rank] += column.state_bytes;
                let vectors = &self.pipeline.in_flight[rank];
                for (bytes, counts) in activations[rank].iter_mut().zip(vectors) {
                    *bytes += f64::from(counts[chunk]) * column.in_flight_bytes;
                }
            }
        }
        let peak = |vectors: &Vec<f64>| vectors.iter().copied().fold(0.0, f64::max);
        states.iter().zip(&activations).map(|(state, vectors)| state + peak(vectors)).collect()
    }

    /// Bytes of host memory that each rank needs under a choice.
    fn host_bytes(&self, choice: &[usize]) -> Vec<f64> {
        let mut host = vec![0.0; self.pipeline.ranks];
        for (stage, column) in self.chosen(choice) {
            for (rank, _) in self.pipeline.holders(stage) {
                host[rank] += column.host_bytes;
            }
        }
        host
    }

    /// Whether every rank's memory suffices.
    pub fn fits(&self, choice: &[usize]) -> bool {
        let used = self.memory_bytes(choice);
        let on_devices = || used.iter().zip(&self.budget_bytes).all(|(used, most)| used <= most);
        let most = self.host_budget_bytes;
        let on_hosts = || most.is_infinite() || self.host_bytes(choice).iter().all(|b| *b <= most);
        on_devices() && on_hosts()
    }

    /// Most micro-batches of a stage in flight on one rank.
    pub fn most_in_flight(&self, stage: usize) -> f64 {
        self.pipeline.most_in_flight(stage)
    }

    /// Whether columns of a stage depend only on their number of layers, not on where they start.
    pub fn is_uniform(&self) -> bool {
        self.columns.iter().all(|columns| columns.iter().all(|column| column.start == 0))
    }
}
