//! A process's endpoint of a wire: one thread sends, one receives.

use super::Wire;
use super::message::{Address, Failure, Message, Packet};
use crate::comm::liveness::{Liveness, Waiter, lock};
use crate::comm::{CommError, Options, Peer};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the receiving thread waits before it checks whether to stop.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long a process that has ended accepts messages from others that have not.
const LINGER: Duration = Duration::from_secs(5);

/// Messages of one address, oldest first.
#[derive(Default)]
struct Mailbox {
    messages: Mutex<VecDeque<Message>>,
    arrived: Condvar,
}

/// State that the threads share.
struct EndpointState {
    liveness: Liveness,
    rank: usize,
    mailboxes: Mutex<HashMap<Address, Arc<Mailbox>>>,
    closing: AtomicBool,
}

/// A process's endpoint; it closes when its last communicator is dropped.
pub(super) struct Endpoint {
    shared: Arc<EndpointState>,
    outgoing: Option<Sender<(usize, Vec<u8>)>>,
    size: usize,
    calls: AtomicU64,
    threads: Vec<JoinHandle<()>>,
}

impl Endpoint {
    pub fn new(wire: Arc<dyn Wire>, options: Options) -> Self {
        let (rank, size) = (wire.rank(), wire.size());
        let shared = Arc::new(EndpointState {
            liveness: Liveness::new(size, options),
            rank,
            mailboxes: Mutex::default(),
            closing: AtomicBool::new(false),
        });
        let (outgoing, queue) = channel();
        let (sending, receiving) = (wire.clone(), wire);
        let (ours, theirs) = (shared.clone(), shared.clone());
        let threads = vec![
            std::thread::spawn(move || send_all(&*sending, &queue, &ours)),
            std::thread::spawn(move || receive_all(&*receiving, &theirs)),
        ];
        Self { shared, outgoing: Some(outgoing), size, calls: AtomicU64::new(0), threads }
    }

    /// To be called before a call: sleeps for test delays and returns any failure so far.
    pub fn ready(&self) -> Result<(), CommError> {
        self.shared.liveness.delay(self.shared.rank, self.calls.fetch_add(1, Ordering::Relaxed));
        self.shared.liveness.fail_if_failed()
    }

    pub fn health(&self) -> Result<(), CommError> {
        self.shared.liveness.fail_if_failed()
    }

    /// The error of a rank of the group that has ended.
    pub fn lost(&self, waiter: &Waiter<'_>) -> Option<CommError> {
        self.shared.liveness.lost(waiter)
    }

    /// How errors name a world rank.
    pub fn peer(&self, rank: usize) -> Peer {
        self.shared.liveness.peer(rank)
    }

    pub fn introduce(&self, processes: Vec<String>) {
        self.shared.liveness.introduce(processes);
    }

    pub fn send(&self, to: usize, message: &Message) {
        self.post(to, &Packet::Message(message.clone()));
    }

    fn post(&self, to: usize, packet: &Packet) {
        if to == self.shared.rank {
            return self.shared.deliver(to, packet.clone());
        }
        if let Some(outgoing) = &self.outgoing {
            // A sending thread that has ended has recorded a failure, which the next wait returns.
            let _ended = outgoing.send((to, packet.encode()));
        }
    }

    fn post_all(&self, packet: &Packet) {
        (0..self.size).for_each(|to| self.post(to, packet));
    }

    /// Waits for a message; `once` removes the mailbox of an address that is used only once.
    pub fn take(
        &self,
        address: Address,
        waiter: &Waiter<'_>,
        once: bool,
    ) -> Result<Message, CommError> {
        let mailbox = self.shared.mailbox(address);
        let message = self.shared.liveness.wait(
            lock(&mailbox.messages),
            &mailbox.arrived,
            VecDeque::pop_front,
            |_| vec![address.from],
            waiter,
        );
        if once {
            lock(&self.shared.mailboxes).remove(&address);
        }
        message.inspect_err(|error| self.report_to_all(error))
    }

    /// Reports calls that do not match to all ranks; returns the error.
    pub fn mismatch(&self, waiter: &Waiter<'_>, from: usize, message: &Message) -> CommError {
        let error = self.shared.liveness.mismatch(waiter, from, &message.call);
        self.report_to_all(&error);
        error
    }

    /// Tells other ranks of an error that ends this rank, unless it came from them.
    fn report_to_all(&self, error: &CommError) {
        if !matches!(error, CommError::Aborted { .. }) {
            self.abort(&error.to_string());
        }
    }

    pub fn abort(&self, reason: &str) {
        self.post_all(&Packet::Abort { reason: reason.to_owned() });
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.post_all(&Packet::Gone(self.shared.failure()));
        self.outgoing = None;
        self.shared.closing.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // A panic in the thread has already been printed.
            let _panicked = thread.join();
        }
    }
}

impl EndpointState {
    fn mailbox(&self, address: Address) -> Arc<Mailbox> {
        lock(&self.mailboxes).entry(address).or_default().clone()
    }

    fn deliver(&self, from: usize, packet: Packet) {
        match packet {
            Packet::Message(message) => {
                let mailbox = self.mailbox(message.address);
                lock(&mailbox.messages).push_back(message);
                mailbox.arrived.notify_one();
            }
            Packet::Gone(failure) => {
                if let Some(Failure { rank, reason }) = failure {
                    self.fail(rank, reason);
                }
                self.liveness.set_gone(from);
            }
            Packet::Abort { reason } => self.fail(from, reason),
        }
    }

    /// What ended this rank, if anything did, as other ranks hear of it.
    fn failure(&self) -> Option<Failure> {
        Some(match self.liveness.fail_if_failed().err()? {
            CommError::Aborted { peer, reason } => Failure { rank: peer.rank, reason },
            error => Failure { rank: self.rank, reason: error.to_string() },
        })
    }

    fn fail(&self, rank: usize, reason: String) {
        self.liveness.fail(CommError::Aborted { peer: self.liveness.peer(rank), reason });
    }
}

/// Sends queued packets until the queue is closed.
fn send_all(wire: &dyn Wire, queue: &Receiver<(usize, Vec<u8>)>, shared: &EndpointState) {
    while let Ok((to, packet)) = queue.recv() {
        if let Err(said) = wire.send(to, &packet) {
            return shared.fail(shared.rank, format!("cannot send: {said}"));
        }
    }
}

/// Delivers packets until this process and all others have ended.
fn receive_all(wire: &dyn Wire, shared: &EndpointState) {
    let mut closing: Option<Instant> = None;
    loop {
        if shared.closing.load(Ordering::Acquire) {
            let since = *closing.get_or_insert_with(Instant::now);
            if shared.liveness.alone(shared.rank) || since.elapsed() > LINGER {
                return;
            }
        }
        match wire.receive(PATIENCE) {
            Ok(Some((from, bytes))) => match Packet::decode(&bytes) {
                Some(packet) => shared.deliver(from, packet),
                None => shared.fail(from, "it sent a message that is garbled".to_owned()),
            },
            Ok(None) => {}
            Err(said) => return shared.fail(shared.rank, format!("cannot receive: {said}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(rank: usize) -> EndpointState {
        EndpointState {
            liveness: Liveness::new(3, Options::default()),
            rank,
            mailboxes: Mutex::default(),
            closing: AtomicBool::new(false),
        }
    }

    #[test]
    fn a_rank_that_ends_passes_on_why() {
        let [giving_up, told, last] = [0, 1, 2].map(state);
        assert_eq!(told.failure(), None);
        let reason = "no space".to_owned();
        giving_up.deliver(0, Packet::Abort { reason: reason.clone() });
        told.deliver(0, Packet::Abort { reason: reason.clone() });
        let failure = Failure { rank: 0, reason };
        assert_eq!((giving_up.failure(), told.failure()), (Some(failure.clone()), Some(failure)));
        // The last rank hears from the second one first.
        last.deliver(1, Packet::Gone(told.failure()));
        assert_eq!(last.liveness.fail_if_failed(), told.liveness.fail_if_failed());
        assert!(!last.liveness.alone(2), "rank 0 has not ended");
    }

    #[test]
    fn a_rank_passes_on_what_it_saw_itself() {
        let late = state(1);
        let peers = vec![late.liveness.peer(0)];
        let (group, call) = ("world".to_owned(), "barrier".to_owned());
        let error = CommError::TimedOut { peers, by: 1, group, limit_s: 1, call };
        late.liveness.fail(error.clone());
        assert_eq!(late.failure(), Some(Failure { rank: 1, reason: error.to_string() }));
    }
}
