//! Ranks as threads of one process: the default backend, which needs nothing installed.
//!
//! Who starts a call puts its buffer into the group's slot for that call (collectives are numbered
//! per group; point-to-point goes by sender, receiver and tag) and goes on. Who waits sleeps until
//! everybody's buffer is there and takes what it needs. Nobody depends on another rank's waiting, so
//! any number of calls may be under way in any order of waits. Sums are taken in the order of ranks,
//! whoever comes first.

mod collect;
mod hub;
mod mail;

use super::{Call, CommError, Communicator, Dtype, Kind, Payload, Pending, Stats};
use collect::Collective;
use hub::{Group, Hub, Presence};
use mail::Receipt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// How ranks of one process wait.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long to wait for another rank before that is an error.
    pub time_limit: Duration,
    /// Random delays before each call, for tests.
    pub delays: Option<Delays>,
}

impl Default for Options {
    /// Ten minutes, no delays.
    fn default() -> Self {
        Self { time_limit: Duration::from_secs(600), delays: None }
    }
}

/// Random delays before each call of each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Which.
    pub seed: u64,
    /// The longest.
    pub longest: Duration,
}

impl Delays {
    /// The delay before call `n` of `rank`: a hash of all three (splitmix64).
    fn before(&self, rank: usize, n: u64) -> Duration {
        let mut z = self.seed ^ ((rank as u64) << 40) ^ n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        self.longest.mul_f64((z ^ (z >> 31)) as f64 / u64::MAX as f64)
    }
}

/// One rank's end of a group of threads.
pub struct LocalComm {
    rank: usize,
    group: Arc<Group>,
    hub: Arc<Hub>,
    presence: Arc<Presence>,
    stats: Stats,
    /// Collectives started so far: the number of the next.
    sequence: AtomicU64,
}

/// The communicators of `size` ranks, one for each thread.
pub fn world(size: usize, options: Options) -> Vec<LocalComm> {
    let hub = Arc::new(Hub::new(size, options));
    let group = Arc::new(Group::new("world", (0..size).collect()));
    let rank = |rank| LocalComm {
        rank,
        group: group.clone(),
        hub: hub.clone(),
        presence: Arc::new(Presence::new(hub.clone(), rank)),
        stats: Stats::default(),
        sequence: AtomicU64::new(0),
    };
    (0..size).map(rank).collect()
}

/// Runs `program` on `size` threads and gives back what each came to. A thread that panics is
/// reported to the others as a lost rank and panics here once all have ended.
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
    fn invalid(call: &Call, reason: String) -> CommError {
        CommError::Invalid { call: call.to_string(), reason }
    }

    /// Ranks named in a call exist.
    fn check(&self, call: &Call) -> Result<(), CommError> {
        let named = match call.kind {
            Kind::Send { to, .. } => to,
            Kind::Recv { from, .. } => from,
            Kind::Broadcast { root }
            | Kind::Scatter { root }
            | Kind::Gather { root }
            | Kind::Reduce { root, .. } => root,
            _ => 0,
        };
        if named < self.size() {
            return Ok(());
        }
        Err(Self::invalid(call, format!("there are {} ranks", self.size())))
    }

    fn start_collective(
        &self,
        call: Call,
        payload: Payload,
    ) -> Result<Box<dyn Pending>, CommError> {
        let number = self.sequence.fetch_add(1, Ordering::Relaxed);
        let slot = self.group.slot(number);
        let complete = slot.post(&self.hub, &self.group, self.rank, &call, payload)?;
        if complete {
            self.group.retire(number);
        }
        Ok(Box::new(Collective {
            slot,
            call,
            rank: self.rank,
            group: self.group.clone(),
            hub: self.hub.clone(),
        }))
    }
}

impl Communicator for LocalComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn group(&self) -> &str {
        &self.group.name
    }

    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn start(&self, call: Call, payload: Payload) -> Result<Box<dyn Pending>, CommError> {
        self.check(&call)?;
        self.hub.delay(self.presence.rank(), self.sequence.load(Ordering::Relaxed));
        self.hub.fail_if_failed()?;
        self.stats.count(&self.group.name, &call, payload.len());
        match call.kind {
            Kind::Send { to, tag } => {
                let dtype = call.dtype;
                self.group.mailbox(self.rank, to, tag).put(call, payload);
                Ok(Box::new(Sent(dtype)))
            }
            Kind::Recv { from, tag } => {
                let mailbox = self.group.mailbox(from, self.rank, tag);
                let (group, hub) = (self.group.clone(), self.hub.clone());
                Ok(Box::new(Receipt { mailbox, call, from, rank: self.rank, group, hub }))
            }
            _ => self.start_collective(call, payload),
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
        let told = me.all_gather(&[color as i64, key as i64])?;
        let mut members: Vec<(i64, usize)> = told
            .chunks_exact(2)
            .enumerate()
            .filter(|(_, said)| said[0] == color as i64)
            .map(|(rank, said)| (said[1], rank))
            .collect();
        members.sort_unstable();
        let order: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        let rank = order.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        let world = order.iter().map(|&rank| self.group.members[rank]).collect();
        let group = self.group.subgroup(number, color, || Group::new(name, world));
        Ok(Box::new(Self {
            rank,
            group,
            hub: self.hub.clone(),
            presence: self.presence.clone(),
            stats: self.stats.clone(),
            sequence: AtomicU64::new(0),
        }))
    }

    fn abort(&self, reason: &str) {
        let rank = self.presence.rank();
        self.hub.fail(CommError::Aborted { rank, reason: reason.to_owned() });
    }
}

/// A send: the buffer has been moved to the receiver's mailbox.
struct Sent(Dtype);

impl Pending for Sent {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        Ok(Payload::empty(self.0))
    }
}
