//! Calls of a communicator: what is asked for, and where in the program.

use super::error::CommError;
use super::payload::Dtype;
use std::fmt;
use std::panic::Location;

/// Distinguishes messages between the same two ranks.
pub type Tag = u64;

/// How a reduction combines values, always in the order of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// a + b
    Sum,
    /// The larger value.
    Max,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
        }
    }
}

/// Kind of call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Sends to one rank.
    Send {
        /// Receiver.
        to: usize,
        /// Tag.
        tag: Tag,
    },
    /// Receives from one rank.
    Recv {
        /// Sender.
        from: usize,
        /// Tag.
        tag: Tag,
    },
    /// Returns once every rank has called it.
    Barrier,
    /// One rank's buffer to all ranks.
    Broadcast {
        /// The rank whose buffer it is.
        root: usize,
    },
    /// Equal pieces of one rank's buffer, one to each rank.
    Scatter {
        /// The rank whose buffer it is.
        root: usize,
    },
    /// All ranks' buffers to one rank, in the order of ranks.
    Gather {
        /// The receiver.
        root: usize,
    },
    /// All ranks' buffers, reduced, to one rank.
    Reduce {
        /// The receiver.
        root: usize,
        /// How to combine.
        op: Op,
    },
    /// All ranks' buffers, reduced, to all ranks.
    AllReduce {
        /// How to combine.
        op: Op,
    },
    /// All ranks' buffers to all ranks, in the order of ranks.
    AllGather,
    /// All ranks' buffers, reduced, one piece to each rank.
    ReduceScatter {
        /// How to combine.
        op: Op,
    },
    /// An equal piece from each rank to each rank.
    AllToAll,
    /// Pieces of any length from each rank to each rank.
    AllToAllV {
        /// Elements for each rank, in order.
        send_counts: Vec<usize>,
    },
}

impl Kind {
    /// Name in errors and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
            Self::Barrier => "barrier",
            Self::Broadcast { .. } => "broadcast",
            Self::Scatter { .. } => "scatter",
            Self::Gather { .. } => "gather",
            Self::Reduce { .. } => "reduce",
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV { .. } => "all_to_all_v",
        }
    }

    /// Whether two ranks' calls match in everything but lengths that may differ.
    fn matches(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::AllToAllV { .. }, Self::AllToAllV { .. }) => true,
            _ => self == other,
        }
    }

    fn op(&self) -> Option<Op> {
        match self {
            Self::Reduce { op, .. } | Self::AllReduce { op } | Self::ReduceScatter { op } => {
                Some(*op)
            }
            _ => None,
        }
    }

    fn root(&self) -> Option<usize> {
        match self {
            Self::Broadcast { root }
            | Self::Scatter { root }
            | Self::Gather { root }
            | Self::Reduce { root, .. } => Some(*root),
            _ => None,
        }
    }
}

/// One call of one rank.
#[derive(Clone, Debug)]
pub struct Call {
    /// Kind of call.
    pub kind: Kind,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements that all ranks must agree on: of the buffer; for scatter, of one piece. 0
    /// for `all_to_all_v`, where lengths may differ.
    pub count: usize,
    /// Where in the program it was made.
    pub site: &'static Location<'static>,
}

impl Call {
    /// Whether two ranks' calls belong together.
    pub fn matches(&self, other: &Self) -> bool {
        self.kind.matches(&other.kind) && self.dtype == other.dtype && self.count == other.count
    }
}

impl Call {
    /// Checks that ranks named by the call are in the group.
    pub(super) fn check_ranks(&self, size: usize) -> Result<(), CommError> {
        let named = match self.kind {
            Kind::Send { to, .. } => to,
            Kind::Recv { from, .. } => from,
            _ => self.kind.root().unwrap_or(0),
        };
        if named < size {
            return Ok(());
        }
        Err(CommError::Invalid {
            call: self.to_string(),
            reason: format!("there are {size} ranks"),
        })
    }

    /// What ranks must agree on, in words.
    pub(super) fn signature(&self) -> String {
        let mut text = format!("{} of {} x {}", self.kind.name(), self.count, self.dtype.name());
        if let Some(op) = self.kind.op() {
            text += &format!(", {}", op.name());
        }
        if let Some(root) = self.kind.root() {
            text += &format!(", root {root}");
        }
        text
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.signature())?;
        match self.kind {
            Kind::Send { to, tag } => write!(f, " to rank {to} of the group, tag {tag:#x}")?,
            Kind::Recv { from, tag } => write!(f, " from rank {from} of the group, tag {tag:#x}")?,
            _ => {}
        }
        // `{:#}`: without the place in the program.
        match f.alternate() {
            true => Ok(()),
            false => write!(f, " at {}:{}", self.site.file(), self.site.line()),
        }
    }
}
