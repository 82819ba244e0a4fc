//! What a library of collectives does with device memory: NCCL's calls, as few as there can be, behind a trait, so that
//! what is built on them is tested where there is no GPU ([`super::FakeNccl`]).
//!
//! No call waits. A group that is being made, or a call that is being queued, is under way until [`Group::is_ready`]
//! says so; a group takes one call at a time. What was queued runs in the order of its queue, together with the same
//! call on the other members' queues.

use super::{Gpu, GpuError, Span};
use std::fmt::Debug;

/// Bytes by which the members of a new group find each other.
pub const ID_BYTES: usize = 128;

/// What tells a new group from others.
pub type Id = [u8; ID_BYTES];

/// Element types that can be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// f32
    F32,
    /// f64
    F64,
    /// bf16
    Bf16,
    /// i64
    I64,
    /// Bytes.
    U8,
}

impl Numbers {
    /// Of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }
}

/// How members' elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
}

/// What is moved to where, among the members of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Everybody's elements, combined, to all. `from` and `to` may be the same; so in the next two.
    AllReduce(Combine),
    /// Everybody's elements, combined, to one member.
    Reduce(Combine, usize),
    /// One member's elements to all.
    Broadcast(usize),
    /// Everybody's elements, combined: a piece of `to`'s length to each.
    ReduceScatter(Combine),
    /// Everybody's elements to all, one behind the other.
    AllGather,
    /// `from` to a member.
    Send(usize),
    /// `to` from a member.
    Receive(usize),
}

/// One call: what goes where. What a call does not read or write may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// What.
    pub moves: Move,
    /// Of which elements.
    pub of: Numbers,
    /// Read.
    pub from: Span,
    /// Written.
    pub to: Span,
}

/// A library of collectives.
pub trait Library: Debug + Send + Sync {
    /// Its name and version.
    fn version(&self) -> String;

    /// An id for a new group; one member asks for it and tells the others.
    ///
    /// # Errors
    /// As the library has it; so below.
    fn new_id(&self) -> Result<Id, GpuError>;

    /// Joins the group of that id as member `rank` of `size`, with the device of that queue.
    ///
    /// # Errors
    /// As above.
    fn join(
        &self,
        gpu: &Gpu,
        id: &Id,
        size: usize,
        rank: usize,
    ) -> Result<Box<dyn Group>, GpuError>;
}

/// A group of devices, as one of them sees it. Dropped, it is left; what is queued is waited for.
pub trait Group: Debug + Send + Sync {
    /// The members that give the same colour, in the order of their keys; nothing for who gives no colour. All must call
    /// it. This group is ready again once the new one is made.
    ///
    /// # Errors
    /// As the library has it; so below.
    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Box<dyn Group>>, GpuError>;

    /// Whether what was asked for last is queued, or made.
    ///
    /// # Errors
    /// What went wrong since, here or on another member.
    fn is_ready(&self) -> Result<bool, GpuError>;

    /// Queues calls, which go on together. Sends and receives that wait for each other must be in one call.
    ///
    /// # Errors
    /// As above.
    fn queue(&self, gpu: &Gpu, transfers: &[Transfer]) -> Result<(), GpuError>;

    /// Gives up what is under way, on this device: its queue goes on with anything in its memory. The group is of no use
    /// afterwards.
    fn abort(&self);
}
