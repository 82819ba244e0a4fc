//! Errors between ranks.

use crate::device_error::DeviceError;
use std::fmt::{self, Display};
use thiserror::Error;

/// A world rank, as errors name it: `rank 3 (host a, pid 123)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its world rank.
    pub rank: usize,
    /// Where it runs, for example `host a, pid 123`, if ranks are processes.
    pub process: Option<String>,
}

impl Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        self.process.as_ref().map_or(Ok(()), |process| write!(f, " ({process})"))
    }
}

fn listed(peers: &[Peer]) -> String {
    peers.iter().map(Peer::to_string).collect::<Vec<_>>().join(", ")
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CommError {
    /// Two ranks of a group made calls that do not match: our bug, or ranks built from different
    /// plans.
    #[error("ranks of group `{group}` disagree: {first}; {second}")]
    Mismatch {
        /// The group.
        group: String,
        /// The first rank and its call.
        first: String,
        /// The rank that differs and its call.
        second: String,
    },
    /// A rank that a call waits for has ended.
    #[error("{peer} is gone, seen by rank {by} in group `{group}`: {call} waits for it")]
    Lost {
        /// The rank that has ended.
        peer: Peer,
        /// The world rank that waits.
        by: usize,
        /// The group.
        group: String,
        /// The call that waits.
        call: String,
    },
    /// Some ranks were not heard of in time.
    #[error(
        "nothing from {} within {limit_s} s, seen by rank {by} in group `{group}`: {call} waits",
        listed(peers)
    )]
    TimedOut {
        /// The ranks not heard of.
        peers: Vec<Peer>,
        /// The world rank that waits.
        by: usize,
        /// The group.
        group: String,
        /// The limit, s.
        limit_s: u64,
        /// The call that waits.
        call: String,
    },
    /// A rank gave up and told the others.
    #[error("{peer} gave up: {reason}")]
    Aborted {
        /// The rank that gave up.
        peer: Peer,
        /// Its reason.
        reason: String,
    },
    /// An invalid call: our bug.
    #[error("{call}: {reason}")]
    Invalid {
        /// The call.
        call: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
