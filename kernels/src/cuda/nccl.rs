//! The operations of a collectives library on device memory: the minimal subset of NCCL, behind a
//! trait, so that its users are tested without a GPU ([`super::FakeNccl`]).
//!
//! No call waits. Creating a group or queueing a call is in progress until [`Group::is_ready`]
//! returns true; a group takes one call at a time. Queued calls run in the order of their queue,
//! together with the same call on the other members' queues.

use super::{Gpu, GpuError, Span};
use std::fmt::Debug;

/// Bytes of the id by which the members of a new group find each other.
pub const ID_BYTES: usize = 128;

/// Identifies a group that is being created.
pub type Id = [u8; ID_BYTES];

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
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

impl DataType {
    /// Bytes of an element.
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

/// Reductions over members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// The maximum.
    Max,
}

/// A collective, or a point-to-point transfer, among the members of a group. Members are numbered
/// from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Reduces all members' elements and gives all the result. `from` and `to` may be the same,
    /// also in the next two.
    AllReduce(ReduceOp),
    /// Reduces all members' elements to one member.
    Reduce(ReduceOp, usize),
    /// Copies one member's elements to all.
    Broadcast(usize),
    /// Reduces all members' elements and gives each member a piece of `to`'s length.
    ReduceScatter(ReduceOp),
    /// Concatenates all members' elements, for all.
    AllGather,
    /// Sends `from` to a member.
    Send(usize),
    /// Receives `to` from a member.
    Receive(usize),
}

/// One call. Spans that a call does not read or write may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The operation.
    pub moves: Collective,
    /// The element type.
    pub of: DataType,
    /// The memory it reads.
    pub from: Span,
    /// The memory it writes.
    pub to: Span,
}

/// A library of collectives.
pub trait Library: Debug + Send + Sync {
    /// Name and version.
    fn version(&self) -> String;

    /// A new id; one member asks for it and tells the others.
    ///
    /// # Errors
    /// If the library fails; the same holds for the functions below.
    fn new_id(&self) -> Result<Id, GpuError>;

    /// Joins the group with that id as member `rank` of `size`, with the queue's device.
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

/// A group of devices, as seen by one member. Dropping it leaves the group after queued work is
/// done.
pub trait Group: Debug + Send + Sync {
    /// Splits the group: members that give the same colour form a new group in the order of their
    /// keys; without a colour a member joins none. All members must call it. This group is ready
    /// again once the new one is made.
    ///
    /// # Errors
    /// If the library fails; the same holds for the functions below.
    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Box<dyn Group>>, GpuError>;

    /// Whether the last call is queued, or the group is made.
    ///
    /// # Errors
    /// A failure since, here or on another member.
    fn is_ready(&self) -> Result<bool, GpuError>;

    /// Queues calls as one operation. Sends and receives that wait for each other must be in one
    /// call.
    ///
    /// # Errors
    /// As above.
    fn queue(&self, gpu: &Gpu, transfers: &[Transfer]) -> Result<(), GpuError>;

    /// Abandons work in progress on this device. Its queue continues with undefined memory
    /// contents, and the group cannot be used afterwards.
    fn abort(&self);
}
