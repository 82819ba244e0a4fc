//! Errors of requests for schedules, and of schedules.

use super::{Pass, PassKind, ScheduleName};
use std::fmt;
use thiserror::Error;

/// Why there is no such schedule, or why these passes cannot be run.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ScheduleError {
    /// No schedule has this name.
    #[error("no schedule is called `{name}`; there are {}", known_names())]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// A count lies outside what a schedule can hold.
    #[error("a schedule needs 1 to {most} {what}: {value}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// What was asked for.
        value: usize,
        /// The largest count.
        most: usize,
    },
    /// The schedule does not exist for this number of chunks.
    #[error("{schedule} needs {rule} per pipeline rank: {chunks}; {nearest} would do")]
    Chunks {
        /// The schedule.
        schedule: ScheduleName,
        /// What the schedule asks for, such as `exactly 1 chunk`.
        rule: String,
        /// What was asked for.
        chunks: usize,
        /// The nearest valid number.
        nearest: usize,
    },
    /// The schedule does not exist for this number of pipeline ranks.
    #[error("{schedule} needs an even number of stages: {ranks}; {} would do", either(nearest))]
    Ranks {
        /// The schedule.
        schedule: ScheduleName,
        /// What was asked for.
        ranks: usize,
        /// The nearest valid numbers.
        nearest: Vec<usize>,
    },
    /// The schedule does not exist for this number of micro-batches.
    #[error(
        "{schedule} needs micro-batches {rule}: {micro_batches} with p = {ranks}; {} would do",
        either(nearest)
    )]
    MicroBatches {
        /// The schedule.
        schedule: ScheduleName,
        /// What the schedule asks for, such as `divisible by stages`.
        rule: &'static str,
        /// What was asked for.
        micro_batches: usize,
        /// Pipeline ranks.
        ranks: usize,
        /// The nearest valid numbers.
        nearest: Vec<usize>,
    },
    /// The schedule cannot split the vocabulary over its pipeline ranks.
    #[error(
        "{schedule} has no place for vocabulary passes ({vocab}); valid: {}",
        ScheduleName::VOCAB.map(ScheduleName::name).join(", ")
    )]
    NoVocab {
        /// The schedule.
        schedule: ScheduleName,
        /// How the vocabulary was to be split.
        vocab: &'static str,
    },
    /// The schedule has no moment at which all pipeline ranks could run the vocabulary layers
    /// together.
    #[error("{schedule} has no place for interlaced vocabulary layers; valid: 1f1b")]
    NotInterlaced {
        /// The schedule.
        schedule: ScheduleName,
    },
    /// Passes of the input layer go with those of the output layer.
    #[error(
        "an input layer has passes of its own only beside vocabulary passes of the output layer"
    )]
    NoInputPasses,
    /// No order leaves room for the barriers: our bug.
    #[error("no order has room for vocabulary passes ({vocab})")]
    NoRoom {
        /// How the vocabulary was to be split.
        vocab: &'static str,
    },
    /// An order is searched for with this time or size.
    #[error("{what} cannot be {value}: it is finite and not negative")]
    Cost {
        /// Which.
        what: &'static str,
        /// What was asked for.
        value: String,
    },
    /// No order found keeps the memory limit.
    #[error(
        "no order of zb_auto was found within a memory limit of {limit}; the least that it has one for is {least}"
    )]
    Memory {
        /// What was asked for.
        limit: String,
        /// The least limit, in whole activations of a chunk, for which one is found.
        least: String,
    },
    /// A pass cannot take this long.
    #[error("{what} passes cannot take {time}: a time is finite and not negative")]
    Time {
        /// Which passes.
        what: &'static str,
        /// What was asked for.
        time: String,
    },
    /// The list of passes does not fit the schedule's own counts.
    #[error("the schedule has passes for {lists} pipeline ranks but says it has {ranks}")]
    RankLists {
        /// Lists of passes.
        lists: usize,
        /// Pipeline ranks.
        ranks: usize,
    },
    /// The layout of stages is not made for this number of chunks.
    #[error("stages on a V or in both directions are 2 chunks per pipeline rank, not {chunks}")]
    Layout {
        /// Chunks a pipeline rank.
        chunks: usize,
    },
    /// A pass names a micro-batch or a chunk that does not exist, or a kind that does not belong.
    #[error("pipeline rank {rank} has {pass}, which this schedule has no place for")]
    Foreign {
        /// Pipeline rank, 0-based.
        rank: usize,
        /// The pass.
        pass: Pass,
    },
    /// A word of a written order is no pass of its pipeline rank.
    #[error("`{word}` is no pass of pipeline rank {rank}; F0@{rank} would be one")]
    Word {
        /// Pipeline rank, 0-based.
        rank: usize,
        /// The word.
        word: String,
    },
    /// A pipeline rank runs a pass twice.
    #[error("pipeline rank {rank} runs {pass} twice")]
    Duplicate {
        /// Pipeline rank, 0-based.
        rank: usize,
        /// The pass.
        pass: Pass,
    },
    /// A pipeline rank never runs a pass that it must run.
    #[error("pipeline rank {rank} never runs {pass}")]
    Missing {
        /// Pipeline rank, 0-based.
        rank: usize,
        /// The pass.
        pass: Pass,
    },
    /// A pipeline rank runs a pass before another one of its own that it needs.
    #[error("pipeline rank {rank} runs {pass} before {needs}")]
    TooEarly {
        /// Pipeline rank, 0-based.
        rank: usize,
        /// The pass.
        pass: Pass,
        /// What it needs.
        needs: Pass,
    },
    /// Passes that should run together cannot.
    #[error("pipeline rank {rank} cannot run passes {place} and {} of its order together", place + 1)]
    Pair {
        /// Pipeline rank, 0-based.
        rank: usize,
        /// Place of the first in the pipeline rank's order.
        place: u32,
    },
    /// Reductions of vocabulary passes would meet those of other micro-batches.
    #[error(
        "pipeline rank {rank} runs its {kind} passes in another order of micro-batches than rank 0"
    )]
    VocabOrder {
        /// Pipeline rank, 0-based.
        rank: usize,
        /// The kind of vocabulary pass.
        kind: PassKind,
    },
    /// The pipeline ranks deadlock.
    #[error("the pipeline ranks wait for one another: {}", waiting_list(waiting))]
    Deadlock {
        /// Pipeline ranks that are not done, each with the pass it cannot start.
        waiting: Vec<(usize, Pass)>,
    },
}

fn known_names() -> String {
    ScheduleName::ALL.map(ScheduleName::name).join(", ")
}

fn either(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
}

fn waiting_list(waiting: &[(usize, Pass)]) -> String {
    let one = |(rank, pass): &(usize, Pass)| format!("rank {rank} at {pass}");
    waiting.iter().map(one).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, micro_batch, chunk } = self;
        write!(f, "{kind} of micro-batch {micro_batch} on chunk {chunk}")
    }
}
