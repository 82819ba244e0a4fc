//! Why a run ended.

use crate::comm::CommError;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a run ended, and who must act.
#[derive(Debug, Error)]
pub enum Error {
    /// Between ranks: one is lost, late, or makes another call.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The trainer's passes cannot run.
    #[error("{at}the passes cannot run: {problem}")]
    Passes {
        /// File and line of the table, with a colon, if it stands in the trainer.
        at: String,
        /// What is wrong.
        problem: String,
    },
    /// A backward pass leaves out a parameter.
    #[error(
        "no gradient reached {name}: the trainer's backward pass must give its work to \
         `gradients.add`"
    )]
    NoGradient {
        /// The parameter.
        name: String,
    },
    /// A file of the user's.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what would be valid.
        problem: String,
    },
    /// A flag of the user's.
    #[error("--{flag}: {problem}")]
    Flag {
        /// Without dashes.
        flag: &'static str,
        /// What is wrong, and what would be valid.
        problem: String,
    },
    /// The operating system.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// How the processes were launched.
    #[error("{problem}")]
    World {
        /// What is wrong, and what would be valid.
        problem: String,
    },
    /// A selection bias without a load to update it by.
    #[error(
        "{name}: its update needs the load of its layer; valid: a forward pass that calls \
         `note_load` of the router"
    )]
    NoLoad {
        /// The bias.
        name: String,
    },
    /// Another rank cannot read the data of a step; its own message says why.
    #[error("rank {rank} cannot read the data of step {step}; its message says why")]
    Unread {
        /// The step, counted from 1.
        step: u64,
        /// The world rank.
        rank: u64,
    },
    /// Metrics that could not be written, of a run that went on without them.
    #[error("--metrics: {path}: {lines} lines are missing: {source}")]
    Metrics {
        /// The file.
        path: PathBuf,
        /// Lines that are missing.
        lines: u64,
        /// The system's first error.
        source: std::io::Error,
    },
    /// The user ended the run.
    #[error("interrupted: {steps} steps are done, and what was asked for is written")]
    Interrupted {
        /// Number of steps done.
        steps: u64,
    },
    /// The user ended the run before it began.
    #[error("interrupted before all ranks had met: nothing is written")]
    NotStarted,
    /// Threads could not be started.
    #[error(transparent)]
    Cpu(#[from] kernels::CpuError),
    /// A step whose tokens all end documents.
    #[error(
        "step {step}: no token predicts another, as all are --document-end's; valid: the token \
         that ends documents in --data, or without it"
    )]
    NothingToPredict {
        /// The step, counted from 1.
        step: u64,
    },
    /// A loss or norm that is not finite: the run cannot go on.
    #[error(
        "step {step} of {steps}: the {what} is {value}; the run stops before this step's update. \
         Lower --lr, raise --lr-warmup, or look at what --init-from and --data hold"
    )]
    NotFinite {
        /// The step, counted from 1.
        step: u64,
        /// Steps that were asked for.
        steps: u64,
        /// Loss or gradient norm.
        what: &'static str,
        /// What it is.
        value: f64,
    },
}

impl Error {
    /// A problem with a file.
    pub(crate) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), problem: problem.into() }
    }

    /// A file of the user's that cannot be opened.
    pub(crate) fn unopened(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::file(path, source.to_string())
    }

    /// A problem with a file that a flag names.
    pub(crate) fn of_flag(self, flag: &'static str) -> Self {
        match self {
            Self::File { path, problem } => {
                Self::Flag { flag, problem: format!("{}: {problem}", path.display()) }
            }
            other => other,
        }
    }

    /// The system's error about a file.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}
