//! Ranks as threads of one process: the default backend.
//!
//! To start a collective, a rank posts its buffer in the group's slot for that call and goes on;
//! collectives are numbered within a group. Messages go by sender, receiver and tag. To wait, a
//! rank sleeps until all buffers are there and computes its result from them. No rank depends on
//! another rank's waiting, so any number of calls may be in flight and waits may come in any order.
//! Sums are taken in the order of ranks, whichever arrives first.
//!
//! Ranks that share a device exchange its memory in the same way (loopback): nothing is copied to
//! the host, and reductions are queued on the device.

mod collect;
mod group;
mod mailbox;

use super::{Call, CommError, Communicator, Dtype, Kind, Options, Payload, Peer, Pending, Stats};
use crate::comm::liveness::{Liveness, Members, Waiter};
use collect::Collective;
use group::{Group, Presence};
use mailbox::Receipt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// One rank's handle to a group of threads.
pub struct LocalComm {
    rank: usize,
    group: Arc<Group>,
    liveness: Arc<Liveness>,
    presence: Arc<Presence>,
    stats: Stats,
    /// Number of the next collective.
    sequence: AtomicU64,
}

/// The communicators of `size` ranks, one for each thread.
pub fn world(size: usize, options: Options) -> Vec<LocalComm> {
    let liveness = Arc::new(Liveness::new(size, options));
    let group = Arc::new(Group::new("world", (0..size).collect()));
    let rank = |rank| LocalComm {
        rank,
        group: group.clone(),
        liveness: liveness.clone(),
        presence: Arc::new(Presence::new(liveness.clone(), rank)),
        stats: Stats::default(),
        sequence: AtomicU64::new(0),
    };
    (0..size).map(rank).collect()
}

/// Runs `program` on `size` threads and returns their results. A thread that panics is reported to
/// the others as a lost rank; the panic continues here once all have ended.
pub fn run_ranks<R: Send>(
    size: usize,
    options: Options,
    program: impl Fn(Box<dyn Communicator>) -> R + Sync,
) -> Vec<R> {
    let program = &program;
    std::thread::scope(|scope| {
        let run = |comm: LocalComm| scope.spawn(move || program(Box::new(comm)));
        let threads: Vec<_> = world(size, options).into_iter().map(run).collect();
        let ended: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
        let unwind = |panicked| std::panic::resume_unwind(panicked);
        ended.into_iter().map(|ended| ended.unwrap_or_else(unwind)).collect()
    })
}

impl LocalComm {
    fn start_collective(
        &self,
        call: Call,
        payload: Payload,
    ) -> Result<Box<dyn Pending>, CommError> {
        let number = self.sequence.fetch_add(1, Ordering::Relaxed);
        let slot = self.group.slot(number);
        let complete = slot.post(&self.liveness, &self.group.members, self.rank, &call, payload)?;
        if complete {
            self.group.retire(number);
        }
        Ok(Box::new(Collective {
            slot,
            call,
            rank: self.rank,
            members: self.group.members.clone(),
            liveness: self.liveness.clone(),
        }))
    }
}

impl Communicator for LocalComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.members.ranks.len()
    }

    fn group(&self) -> &str {
        &self.group.members.name
    }

    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn carries_devices(&self) -> bool {
        true
    }

    fn not_recordable(&self) -> Option<&'static str> {
        // Each waits on the host for work that others have queued.
        Some("ranks share the GPU")
    }

    fn start(&self, call: Call, payload: Payload) -> Result<Box<dyn Pending>, CommError> {
        call.check_ranks(self.size())?;
        self.liveness.delay(self.presence.rank(), self.sequence.load(Ordering::Relaxed));
        self.liveness.fail_if_failed()?;
        self.stats.count(&self.group.members.name, &call, payload.len());
        let transit = self.liveness.transit(&self.group.members.name);
        let until = transit.map(|transit| Instant::now() + transit);
        let pending: Box<dyn Pending> = match call.kind {
            Kind::Send { to, tag } => {
                let dtype = call.dtype;
                self.group.mailbox(self.rank, to, tag).put(call, payload);
                return Ok(Box::new(Sent(dtype)));
            }
            Kind::Recv { from, tag } => {
                let mailbox = self.group.mailbox(from, self.rank, tag);
                let (members, liveness) = (self.group.members.clone(), self.liveness.clone());
                Box::new(Receipt { mailbox, call, from, rank: self.rank, members, liveness })
            }
            _ => self.start_collective(call, payload)?,
        };
        Ok(match until {
            Some(until) => Box::new(InTransit { pending, until }),
            None => pending,
        })
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
        let world = order.iter().map(|&rank| self.group.members.ranks[rank]).collect();
        let group = self.group.subgroup(number, color, || Group::new(name, world));
        Ok(Box::new(Self {
            rank,
            group,
            liveness: self.liveness.clone(),
            presence: self.presence.clone(),
            stats: self.stats.clone(),
            sequence: AtomicU64::new(0),
        }))
    }

    fn abort(&self, reason: &str) {
        let peer = self.liveness.peer(self.presence.rank());
        self.liveness.fail(CommError::Aborted { peer, reason: reason.to_owned() });
    }

    fn twin(&self) -> Option<Box<dyn Communicator>> {
        let Members { name, ranks } = &*self.group.members;
        let group = self.group.subgroup(u64::MAX, 0, || Group::new(name, ranks.clone()));
        Some(Box::new(Self {
            rank: self.rank,
            group,
            liveness: self.liveness.clone(),
            presence: self.presence.clone(),
            stats: Stats::default(),
            sequence: AtomicU64::new(0),
        }))
    }

    fn health(&self) -> Result<(), CommError> {
        self.liveness.fail_if_failed()
    }

    fn lost(&self, call: &str) -> Option<CommError> {
        self.liveness.lost(&Waiter { members: &self.group.members, rank: self.rank, call: &call })
    }

    fn peer(&self, rank: usize) -> Peer {
        self.liveness.peer(self.group.members.ranks[rank])
    }
}

/// A call on a slow link.
struct InTransit {
    pending: Box<dyn Pending>,
    until: Instant,
}

impl Pending for InTransit {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        std::thread::sleep(self.until.saturating_duration_since(Instant::now()));
        self.pending.wait()
    }
}

/// A send: the buffer has been moved to the receiver's mailbox.
struct Sent(Dtype);

impl Pending for Sent {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        Ok(Payload::empty(self.0))
    }
}
