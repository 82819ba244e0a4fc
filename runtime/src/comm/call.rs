//! What a rank asks for, and from where in the program.

use super::error::CommError;
use super::payload::Dtype;
use std::fmt;
use std::panic::Location;

/// Tells messages between the same two ranks apart.
pub type Tag = u64;

/// How a reduction combines. The order is that of ranks, always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// a + b
    Sum,
    /// The larger.
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

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// To one rank.
    Send {
        /// Receiver.
        to: usize,
        /// Tag.
        tag: Tag,
    },
    /// From one rank.
    Recv {
        /// Sender.
        from: usize,
        /// Tag.
        tag: Tag,
    },
    /// Nobody leaves before everybody came.
    Barrier,
    /// One rank's buffer to all.
    Broadcast {
        /// Whose.
        root: usize,
    },
    /// Equal pieces of one rank's buffer, one to each.
    Scatter {
        /// Whose.
        root: usize,
    },
    /// Everybody's buffer to one rank, in the order of ranks.
    Gather {
        /// To whom.
        root: usize,
    },
    /// Everybody's buffers, reduced, to one rank.
    Reduce {
        /// To whom.
        root: usize,
        /// How.
        op: Op,
    },
    /// Everybody's buffers, reduced, to all.
    AllReduce {
        /// How.
        op: Op,
    },
    /// Everybody's buffer to all, in the order of ranks.
    AllGather,
    /// Everybody's buffers, reduced, a piece to each.
    ReduceScatter {
        /// How.
        op: Op,
    },
    /// An equal piece from each to each.
    AllToAll,
    /// Pieces of any length from each to each.
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

    /// Whether two ranks' calls belong together: everything but lengths that may differ.
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
    /// What is asked for.
    pub kind: Kind,
    /// Element type.
    pub dtype: Dtype,
    /// Elements that all ranks must agree on: of the buffer, for scatter of one piece. 0 for
    /// `all_to_all_v`, where they may differ.
    pub count: usize,
    /// Where in the program.
    pub site: &'static Location<'static>,
}

impl Call {
    /// Whether two ranks' calls belong together.
    pub fn matches(&self, other: &Self) -> bool {
        self.kind.matches(&other.kind) && self.dtype == other.dtype && self.count == other.count
    }
}

impl Call {
    /// Ranks that the call names are in the group.
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
        write!(f, " at {}:{}", self.site.file(), self.site.line())
    }
}
