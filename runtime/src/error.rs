//! What a run can end with.

use crate::comm::CommError;
use crate::program::ProgramError;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a run ended, and who must act.
#[derive(Debug, Error)]
pub enum Error {
    /// Ranks: one is lost, late, or does something else.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The plan asks for what cannot be done.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The user's files: what is wrong with which, and what would do.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what would be valid.
        problem: String,
    },
    /// The user's flags.
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
        /// What the system says.
        source: std::io::Error,
    },
    /// Whoever launched the processes.
    #[error("{problem}")]
    World {
        /// What is wrong, and what would be valid.
        problem: String,
    },
    /// Another rank cannot read what a step trains on, and says why.
    #[error("rank {rank} cannot read the data of step {step}; its message says why")]
    Unread {
        /// 0-based.
        step: u64,
        /// The rank of the world.
        rank: u64,
    },
    /// The user ended it.
    #[error("interrupted: {steps} steps are done, and what was asked for is written")]
    Interrupted {
        /// Steps done.
        steps: u64,
    },
    /// The user ended it before it began.
    #[error("interrupted before all ranks had met: nothing is written")]
    NotStarted,
    /// No threads.
    #[error(transparent)]
    Cpu(#[from] kernels::CpuError),
    /// The numbers: the run cannot go on.
    #[error("step {step}: the {what} is {value}; the run stops before it spoils the weights")]
    NotFinite {
        /// 0-based.
        step: u64,
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

    /// What the system says about a file.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}
