//! Ranks as processes: collectives over any transport of messages.
//!
//! A [`Wire`] moves bytes between processes. One thread sends and one receives into mailboxes, so
//! that no rank's progress depends on another rank's waiting. For a collective, every rank sends
//! every other rank the part it needs, together with a description of the call. Sums are taken in
//! the order of ranks, to the same bits as between threads, and calls that do not match are
//! detected. This is fast enough for a few processes; hundreds need a backend whose library
//! reduces.

mod endpoint;
mod message;

use super::combine::{joined, part_for};
use super::liveness::{Members, Waiter};
use super::{
    Call, CommError, Communicator, Dtype, Element, Kind, Options, Payload, Peer, Pending, Stats,
};
use endpoint::Endpoint;
use message::{Address, Message};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Transport of messages between the processes of a world. Messages from one process to another
/// arrive in the order sent.
pub trait Wire: Send + Sync + 'static {
    /// This process's rank.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn size(&self) -> usize;

    /// Sends a message. Called from one thread only.
    ///
    /// # Errors
    /// The transport's error, in words.
    fn send(&self, to: usize, message: &[u8]) -> Result<(), String>;

    /// Receives the next message and its sender's rank; `None` if none arrives within `patience`.
    /// Called from one thread only.
    ///
    /// # Errors
    /// The transport's error, in words.
    fn receive(&self, patience: Duration) -> Result<Option<(usize, Vec<u8>)>, String>;
}

/// One process's handle to a group.
pub struct WireComm {
    rank: usize,
    members: Arc<Members>,
    /// Identifies the group on the wire; the same on all its ranks.
    id: u64,
    endpoint: Arc<Endpoint>,
    stats: Stats,
    sequence: AtomicU64,
}

impl WireComm {
    /// The world of a wire.
    pub fn new(wire: impl Wire, options: Options) -> Self {
        let (rank, size) = (wire.rank(), wire.size());
        let members = Members { name: "world".to_owned(), ranks: (0..size).collect() };
        Self {
            rank,
            members: Arc::new(members),
            id: 0,
            endpoint: Arc::new(Endpoint::new(Arc::new(wire), options)),
            stats: Stats::default(),
            sequence: AtomicU64::new(0),
        }
    }

    fn send(&self, to: usize, stream: u64, call: &Call, payload: &Payload) {
        let address = Address { group: self.id, from: self.rank, stream };
        let message = Message {
            address,
            signature: call.signature(),
            call: call.to_string(),
            dtype: payload.dtype(),
            bytes: payload.to_bytes(),
        };
        self.endpoint.send(self.members.ranks[to], &message);
    }

    /// Sends all other ranks their parts, and keeps this rank's own.
    fn start_collective<T: Element>(&self, call: Call, data: &[T]) -> Box<dyn Pending> {
        let (rank, size) = (self.rank, self.size());
        let number = self.sequence.fetch_add(1, Ordering::Relaxed);
        let stream = COLLECTIVE | number;
        let part = |to: usize| part_for(&call.kind, data, [rank, to, size]);
        for to in (0..size).filter(|&to| to != rank) {
            self.send(to, stream, &call, &T::wrap(part(to)));
        }
        let own = part(rank);
        let (members, endpoint, id) = (self.members.clone(), self.endpoint.clone(), self.id);
        Box::new(Collective { own, call, rank, members, endpoint, group: id, stream })
    }
}

/// A process's last packet, for wires that notice that a process has ended.
pub(super) fn gone() -> Vec<u8> {
    message::Packet::Gone(None).encode()
}

/// Marks the streams of collectives; message tags are smaller.
const COLLECTIVE: u64 = 1 << 63;

/// A collective in flight.
struct Collective<T> {
    own: Vec<T>,
    call: Call,
    rank: usize,
    members: Arc<Members>,
    endpoint: Arc<Endpoint>,
    group: u64,
    stream: u64,
}

impl<T: Element> Pending for Collective<T> {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        let mut parts = Vec::with_capacity(self.members.ranks.len());
        for from in 0..self.members.ranks.len() {
            parts.push(if from == self.rank { self.own.clone() } else { self.part(from)? });
        }
        let parts: Vec<&[T]> = parts.iter().map(Vec::as_slice).collect();
        Ok(T::wrap(joined(&self.call.kind, &parts, self.rank)))
    }
}

impl<T: Element> Collective<T> {
    fn part(&self, from: usize) -> Result<Vec<T>, CommError> {
        let address = Address { group: self.group, from, stream: self.stream };
        let waiter = Waiter { members: &self.members, rank: self.rank, call: &self.call };
        let message = self.endpoint.take(address, &waiter, true)?;
        if message.signature != self.call.signature() {
            return Err(self.endpoint.mismatch(&waiter, from, &message));
        }
        let payload = Payload::from_bytes(message.dtype, &message.bytes);
        Ok(T::unwrap(payload).unwrap_or_default())
    }
}

/// A receive in flight.
struct Receipt {
    address: Address,
    call: Call,
    rank: usize,
    members: Arc<Members>,
    endpoint: Arc<Endpoint>,
}

impl Pending for Receipt {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        let waiter = Waiter { members: &self.members, rank: self.rank, call: &self.call };
        let message = self.endpoint.take(self.address, &waiter, false)?;
        let payload = Payload::from_bytes(message.dtype, &message.bytes);
        if message.dtype == self.call.dtype && payload.len() == self.call.count {
            return Ok(payload);
        }
        Err(self.endpoint.mismatch(&waiter, self.address.from, &message))
    }
}

/// A send: the endpoint has copied the buffer.
struct Sent(Dtype);

impl Pending for Sent {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        Ok(Payload::empty(self.0))
    }
}

impl Communicator for WireComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.ranks.len()
    }

    fn group(&self) -> &str {
        &self.members.name
    }

    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn start(&self, call: Call, payload: Payload) -> Result<Box<dyn Pending>, CommError> {
        call.check_ranks(self.size())?;
        self.endpoint.ready()?;
        self.stats.count(&self.members.name, &call, payload.len());
        match (&call.kind, &payload) {
            (_, Payload::Device(_)) => {
                let reason = "processes exchange what is on the host alone".to_owned();
                Err(CommError::Invalid { call: call.to_string(), reason })
            }
            (&Kind::Send { to, tag }, _) => {
                self.send(to, tag, &call, &payload);
                Ok(Box::new(Sent(call.dtype)))
            }
            (&Kind::Recv { from, tag }, _) => {
                let address = Address { group: self.id, from, stream: tag };
                let (members, endpoint) = (self.members.clone(), self.endpoint.clone());
                Ok(Box::new(Receipt { address, call, rank: self.rank, members, endpoint }))
            }
            (_, Payload::F32(data)) => Ok(self.start_collective(call, data)),
            (_, Payload::F64(data)) => Ok(self.start_collective(call, data)),
            (_, Payload::I64(data)) => Ok(self.start_collective(call, data)),
            (_, Payload::Bf16(data)) => Ok(self.start_collective(call, data)),
            (_, Payload::U8(data)) => Ok(self.start_collective(call, data)),
        }
    }

    #[track_caller]
    fn split(
        &self,
        name: &str,
        color: usize,
        key: usize,
    ) -> Result<Box<dyn Communicator>, CommError> {
        let number = self.sequence.load(Ordering::Relaxed);
        let me: &dyn Communicator = self;
        let order = me.members_of_color(color, key)?;
        let rank = order.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        let ranks = order.iter().map(|&rank| self.members.ranks[rank]).collect();
        Ok(Box::new(Self {
            rank,
            members: Arc::new(Members { name: name.to_owned(), ranks }),
            id: subgroup_id(self.id, number, color as u64),
            endpoint: self.endpoint.clone(),
            stats: self.stats.clone(),
            sequence: AtomicU64::new(0),
        }))
    }

    fn abort(&self, reason: &str) {
        self.endpoint.abort(reason);
    }

    fn twin(&self) -> Option<Box<dyn Communicator>> {
        Some(Box::new(Self {
            rank: self.rank,
            members: self.members.clone(),
            id: subgroup_id(self.id, u64::MAX, 0),
            endpoint: self.endpoint.clone(),
            stats: Stats::default(),
            sequence: AtomicU64::new(0),
        }))
    }

    fn health(&self) -> Result<(), CommError> {
        self.endpoint.health()
    }

    fn lost(&self, call: &str) -> Option<CommError> {
        let waiter = Waiter { members: &self.members, rank: self.rank, call: &call };
        self.endpoint.lost(&waiter)
    }

    fn peer(&self, rank: usize) -> Peer {
        self.endpoint.peer(self.members.ranks[rank])
    }

    fn introduce(&self, processes: Vec<String>) {
        self.endpoint.introduce(processes);
    }
}

/// Identifier of a subgroup, the same on all its ranks and different from other groups: FNV-1a of
/// the split that made it.
fn subgroup_id(parent: u64, number: u64, color: u64) -> u64 {
    let bytes = [parent, number, color].map(u64::to_le_bytes);
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.as_flattened().iter().fold(0xcbf2_9ce4_8422_2325, mix)
}
