//! What can go wrong between ranks.

use crate::device::DeviceError;
use thiserror::Error;

/// A call that did not come about.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CommError {
    /// Two ranks of a group made calls that do not belong together: our bug, or a program whose
    /// ranks were built from different plans.
    #[error("ranks of group `{group}` disagree: {first}; {second}")]
    Mismatch {
        /// The group.
        group: String,
        /// Rank and call that came first.
        first: String,
        /// Rank and call that differ from it.
        second: String,
    },
    /// A rank that is waited for has ended.
    #[error("rank {rank} of group `{group}` is gone: {call} waits for it")]
    Lost {
        /// The group.
        group: String,
        /// The rank within it.
        rank: usize,
        /// Who waits.
        call: String,
    },
    /// Ranks were not heard of in time.
    #[error("nothing from rank {ranks:?} of group `{group}` within {limit_s} s: {call} waits")]
    TimedOut {
        /// The group.
        group: String,
        /// The ranks within it.
        ranks: Vec<usize>,
        /// The limit, s.
        limit_s: u64,
        /// Who waits.
        call: String,
    },
    /// A rank gave up and told the others.
    #[error("rank {rank} gave up: {reason}")]
    Aborted {
        /// The rank of the world.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// A call that cannot be: our bug.
    #[error("{call}: {reason}")]
    Invalid {
        /// The call.
        call: String,
        /// What is wrong with it.
        reason: String,
    },
    /// What ranks compute on.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
