//! Pipeline schedules as values: for every pipeline rank, the passes it runs, in order.
//!
//! A schedule is made by a pure function (one file each) and is then costed, checked, drawn,
//! printed and executed from the same list. Stages are numbered along the model: with `p` pipeline
//! ranks and `v` chunks there are `p·v` stages, and [`StageLayout`] says which pipeline rank holds
//! which.

mod building_block;
mod chimera;
mod dualpipe;
mod dualpipe_v;
mod error;
mod generate;
mod gpipe;
mod graph;
mod in_flight;
mod input;
mod interleaved_1f1b;
mod interleaved_zb;
mod looped_bfs;
mod naive;
mod name;
mod notation;
mod one_f_one_b;
mod orders;
mod overlapped_1f1b;
mod run;
mod v_1f1b;
mod v_half;
mod v_min;
mod vocab;
mod zb_auto;
mod zb_h1;
mod zb_h2;
mod zb_v;

pub use chimera::chimera;
pub use dualpipe::dualpipe;
pub use dualpipe_v::dualpipe_v;
pub use error::ScheduleError;
pub use gpipe::gpipe;
pub use graph::{Graph, Latency, NO_NODE, Node, Work};
pub use in_flight::Release;
pub use input::LOOK_UPS_AHEAD;
pub use interleaved_1f1b::interleaved_1f1b;
pub use interleaved_zb::interleaved_zb;
pub use looped_bfs::looped_bfs;
pub use naive::naive;
pub use name::{ChunkRule, ScheduleName};
pub use notation::{MOST_PASSES, NotationError, parse_passes, write_passes};
pub use one_f_one_b::one_f_one_b;
pub use overlapped_1f1b::overlapped_1f1b;
pub use v_1f1b::v_1f1b;
pub use v_half::{v_half, v_half_repeated};
pub use v_min::v_min;
pub use vocab::{PassRatios, PassTimes};
pub use zb_auto::{AutoCosts, zb_auto};
pub use zb_h1::zb_h1;
pub use zb_h2::zb_h2;
pub use zb_v::zb_v;

/// What a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PassKind {
    /// Forward.
    F,
    /// Backward with respect to inputs.
    B,
    /// Backward with respect to weights.
    W,
    /// Whole backward, where a schedule does not split it.
    BW,
    /// First vocabulary pass: local logits, maximum and sum (Vocabulary Parallelism, section 4).
    S,
    /// Middle vocabulary pass, of the three-barrier algorithm only: local sum, now that the maximum
    /// over all pipeline ranks is known (Vocabulary Parallelism, section 4.1).
    S2,
    /// Last vocabulary pass: weight (and, for algorithm 1, input) gradients.
    T,
    /// Input layer of a vocabulary split over the pipeline: looks up the tokens whose rows are
    /// local (Vocabulary Parallelism, appendix C).
    IF,
    /// Its backward: adds the gradient of these rows.
    IB,
}

/// One pass: its kind, its micro-batch and its chunk of the pipeline rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pass {
    /// What is computed.
    pub kind: PassKind,
    /// Micro-batch, 0-based.
    pub micro_batch: u32,
    /// Chunk of the pipeline rank, 0-based, in model order on that pipeline rank.
    pub chunk: u16,
}

/// Which pipeline rank holds which stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StageLayout {
    /// Stage `j·p + i` is chunk `j` of pipeline rank `i` (with one chunk: stage `i` on pipeline
    /// rank `i`).
    RoundRobin,
    /// Two chunks: pipeline rank `i` holds stages `i` and `2p − 1 − i`.
    V,
    /// Two chunks, two copies of every stage: pipeline rank `i` holds stage `i` for the first half
    /// of the micro-batches and stage `p − 1 − i` for the second, which go the other way.
    Bidirectional,
}

/// The passes of one iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Pipeline ranks, `p`.
    pub ranks: usize,
    /// Chunks a pipeline rank, `v`.
    pub chunks: usize,
    /// Micro-batches an iteration, `m`.
    pub micro_batches: usize,
    /// Which pipeline rank holds which stage.
    pub layout: StageLayout,
    /// How the output layer is split over the pipeline ranks, where the schedule has vocabulary
    /// passes.
    pub vocab: Option<VocabPasses>,
    /// Per pipeline rank, its passes in order.
    pub passes: Vec<Vec<Pass>>,
    /// Per pipeline rank, positions of forwards that run together with the next backward: the two
    /// start when both can, and both end when the pair does.
    pub pairs: Vec<Vec<u32>>,
}

/// The passes of one pipeline rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassOrder {
    /// In order.
    pub passes: Vec<Pass>,
    /// Positions of forwards that run together with the next backward, as [`Schedule::pairs`].
    pub pairs: Vec<u32>,
}

impl From<Vec<Pass>> for PassOrder {
    fn from(passes: Vec<Pass>) -> Self {
        Self { passes, pairs: Vec::new() }
    }
}

/// How the vocabulary passes of an output layer that is split over the pipeline ranks wait for
/// one another (Vocabulary Parallelism, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VocabPasses {
    /// `parallel_naive`: maximum, sum and input gradient each have a barrier (section 4.1).
    Naive,
    /// `parallel_1`: maximum and sum share a barrier, the input gradient has its own (section 4.2).
    One,
    /// `parallel_2`: one barrier; weight gradients may come any time later (section 4.3).
    Two,
    /// `interlaced`: as `parallel_1`, but all pipeline ranks run a micro-batch's passes together
    /// and wait for their reductions (nnScaler; section 2). With 1F1B alone.
    Interlaced,
}

impl VocabPasses {
    /// The algorithms whose reductions run beside other passes, in the order of the paper.
    pub const ALL: [Self; 3] = [Self::Naive, Self::One, Self::Two];

    /// The name users type for the decision `vocab`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "parallel_naive",
            Self::One => "parallel_1",
            Self::Two => "parallel_2",
            Self::Interlaced => "interlaced",
        }
    }

    /// The algorithm with this name; `None` for the other ways to place a vocabulary.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::Interlaced]).find(|v| v.name() == name)
    }

    /// Barriers between the last stage's forward and its backward. Each keeps one more micro-batch
    /// in flight on every pipeline rank (Vocabulary Parallelism, section 5.1), where other passes
    /// run beside them.
    pub fn barriers(self) -> usize {
        match self {
            Self::Naive => 3,
            Self::One | Self::Interlaced => 2,
            Self::Two => 1,
        }
    }

    /// Micro-batches that a pipeline rank of 1F1B holds with these passes, if there are enough,
    /// where it holds `plain` without: one more for each barrier; interlaced half as many again.
    pub fn in_flight(self, plain: usize) -> usize {
        match self {
            Self::Interlaced => 3 * plain / 2,
            _ => plain + self.barriers(),
        }
    }

    /// The kinds of vocabulary pass that every pipeline rank runs for every micro-batch, in order.
    pub fn kinds(self) -> &'static [PassKind] {
        match self {
            Self::Naive => &[PassKind::S, PassKind::S2, PassKind::T],
            Self::One | Self::Two | Self::Interlaced => &[PassKind::S, PassKind::T],
        }
    }
}

impl StageLayout {
    /// Stages of a model over `ranks` with `chunks` each.
    pub fn stages(self, ranks: usize, chunks: usize) -> usize {
        ranks * chunks / self.copies()
    }

    /// How many pipeline ranks hold each stage.
    pub fn copies(self) -> usize {
        if self == Self::Bidirectional { 2 } else { 1 }
    }

    /// The stage that is chunk `chunk` of pipeline rank `rank`, of `ranks`.
    pub fn stage_of(self, ranks: usize, rank: usize, chunk: usize) -> usize {
        match self {
            Self::V if chunk == 1 => 2 * ranks - 1 - rank,
            Self::Bidirectional if chunk == 1 => ranks - 1 - rank,
            Self::Bidirectional => rank,
            Self::RoundRobin | Self::V => chunk * ranks + rank,
        }
    }

    /// The pipeline rank of `ranks` that holds `stage`; of two copies, the first direction's.
    pub fn rank_of(self, ranks: usize, stage: usize) -> usize {
        match self {
            Self::V if stage >= ranks => 2 * ranks - 1 - stage,
            Self::RoundRobin | Self::V | Self::Bidirectional => stage % ranks,
        }
    }

    /// Whether one pipeline rank holds the first and the last of all `stages`, and so one tied
    /// table for both. With two copies of each stage, every stage has a table of its own.
    pub fn ends_meet(self, ranks: usize, stages: usize) -> bool {
        self.copies() == 1 && self.rank_of(ranks, stages.saturating_sub(1)) == 0
    }

    /// Pipeline rank and chunk that run `stage` for a micro-batch of which chunk `from` of some
    /// pipeline rank runs another stage: its copy of the stage, where there are two.
    pub fn holder(self, ranks: usize, stage: usize, from: u16) -> (usize, u16) {
        match self {
            Self::Bidirectional if from == 1 => (ranks - 1 - stage, 1),
            _ => (self.rank_of(ranks, stage), (stage / ranks) as u16),
        }
    }
}

/// Whether every forward pass of a pipeline rank comes before its first backward pass.
pub fn forwards_come_first(passes: &[Pass]) -> bool {
    let forward = |pass: &Pass| pass.kind == PassKind::F;
    let backward = |pass: &Pass| matches!(pass.kind, PassKind::B | PassKind::BW);
    let first = passes.iter().position(backward).unwrap_or(passes.len());
    !passes[first..].iter().any(forward)
}

impl Schedule {
    /// The passes of each pipeline rank, with those that run together.
    pub fn by_rank(&self) -> Vec<PassOrder> {
        let pairs = self.pairs.iter().cloned().chain(std::iter::repeat_with(Vec::new));
        let order = |(passes, pairs): (&Vec<Pass>, _)| PassOrder { passes: passes.clone(), pairs };
        self.passes.iter().zip(pairs).map(order).collect()
    }

    /// Stages of the model: pipeline ranks times chunks, less where there are copies.
    pub fn stages(&self) -> usize {
        self.layout.stages(self.ranks, self.chunks)
    }

    /// The stage that is chunk `chunk` of pipeline rank `rank`.
    pub fn stage_of(&self, rank: usize, chunk: usize) -> usize {
        self.layout.stage_of(self.ranks, rank, chunk)
    }

    /// The pipeline rank that holds `stage`; of two copies, the first direction's.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.layout.rank_of(self.ranks, stage)
    }

    /// The chunk that `stage` is of that pipeline rank.
    pub fn chunk_of(&self, stage: usize) -> usize {
        stage / self.ranks
    }

    /// The chunk of a pipeline rank that a micro-batch begins on; all its passes are on chunks of
    /// the same direction.
    pub fn direction(&self, micro_batch: u32) -> u16 {
        let second = micro_batch as usize >= self.micro_batches.div_ceil(2);
        u16::from(self.layout == StageLayout::Bidirectional && second)
    }

    /// Whether a micro-batch passes through this chunk of each pipeline rank.
    pub fn runs(&self, chunk: u16, micro_batch: u32) -> bool {
        self.layout != StageLayout::Bidirectional || chunk == self.direction(micro_batch)
    }

    /// Pipeline rank and chunk that run `stage` for a micro-batch.
    pub fn holder(&self, stage: usize, micro_batch: u32) -> (usize, u16) {
        self.layout.holder(self.ranks, stage, self.direction(micro_batch))
    }

    /// The stage whose output `stage` takes; `None` where the model begins.
    pub fn stage_before(&self, stage: usize) -> Option<usize> {
        stage.checked_sub(1)
    }

    /// The stage that takes the output of `stage`; `None` where the model ends.
    pub fn stage_after(&self, stage: usize) -> Option<usize> {
        (stage + 1 < self.stages()).then_some(stage + 1)
    }

    /// Stages that a micro-batch passes through on each pipeline rank: what a pipeline rank's whole
    /// share of the model is cut into.
    pub fn share_chunks(&self) -> usize {
        self.stages() / self.ranks
    }

    /// Whether backward is split into [`PassKind::B`] and [`PassKind::W`] anywhere.
    pub fn splits_backward(&self) -> bool {
        self.passes.iter().flatten().any(|pass| pass.kind == PassKind::W)
    }

    /// Checks that every pass occurs exactly once and that the order can run to its end.
    ///
    /// # Errors
    /// Says which pass is missing, doubled or too early, or where the pipeline ranks wait for one
    /// another.
    pub fn validate(&self) -> Result<(), ScheduleError> {
        Graph::new(self).map(drop)
    }
}
