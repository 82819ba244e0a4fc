//! A process's post office: one thread sends, one receives.

use super::Wire;
use super::letter::{Address, Letter, Message};
use crate::comm::hub::{Hub, Waiter, lock};
use crate::comm::{CommError, Options, Peer};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a receiving thread waits before it looks whether it is still wanted.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long a process that has ended takes messages from others that have not.
const LINGER: Duration = Duration::from_secs(5);

/// Letters of one address, oldest first.
#[derive(Default)]
struct Mailbox {
    letters: Mutex<VecDeque<Letter>>,
    arrived: Condvar,
}

/// What the threads share.
struct Shared {
    hub: Hub,
    rank: usize,
    boxes: Mutex<HashMap<Address, Arc<Mailbox>>>,
    closing: AtomicBool,
}

/// A process's post office; it closes when its last communicator is dropped.
pub(super) struct Station {
    shared: Arc<Shared>,
    outgoing: Option<Sender<(usize, Vec<u8>)>>,
    size: usize,
    calls: AtomicU64,
    threads: Vec<JoinHandle<()>>,
}

impl Station {
    pub fn new(wire: Arc<dyn Wire>, options: Options) -> Self {
        let (rank, size) = (wire.rank(), wire.size());
        let shared = Arc::new(Shared {
            hub: Hub::new(size, options),
            rank,
            boxes: Mutex::default(),
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

    /// Before a call: delays that tests want, and failures so far.
    pub fn ready(&self) -> Result<(), CommError> {
        self.shared.hub.delay(self.shared.rank, self.calls.fetch_add(1, Ordering::Relaxed));
        self.shared.hub.fail_if_failed()
    }

    pub fn health(&self) -> Result<(), CommError> {
        self.shared.hub.fail_if_failed()
    }

    /// The error of a rank of the group that has ended.
    pub fn lost(&self, waiter: &Waiter<'_>) -> Option<CommError> {
        self.shared.hub.lost(waiter)
    }

    /// How errors name a rank of the world.
    pub fn peer(&self, rank: usize) -> Peer {
        self.shared.hub.peer(rank)
    }

    pub fn introduce(&self, processes: Vec<String>) {
        self.shared.hub.introduce(processes);
    }

    pub fn send(&self, to: usize, letter: &Letter) {
        self.post(to, &Message::Letter(letter.clone()));
    }

    fn post(&self, to: usize, message: &Message) {
        if to == self.shared.rank {
            return self.shared.deliver(to, message.clone());
        }
        if let Some(outgoing) = &self.outgoing {
            // A sender that has ended has left a failure, which the next wait finds.
            let _ended = outgoing.send((to, message.encode()));
        }
    }

    fn post_all(&self, message: &Message) {
        (0..self.size).for_each(|to| self.post(to, message));
    }

    /// Waits for a letter. An address that is used once is forgotten afterwards.
    pub fn take(
        &self,
        address: Address,
        waiter: &Waiter<'_>,
        once: bool,
    ) -> Result<Letter, CommError> {
        let mailbox = self.shared.mailbox(address);
        let letter = self.shared.hub.wait(
            lock(&mailbox.letters),
            &mailbox.arrived,
            VecDeque::pop_front,
            |_| vec![address.from],
            waiter,
        );
        if once {
            lock(&self.shared.boxes).remove(&address);
        }
        letter.inspect_err(|error| self.tell(error))
    }

    /// The failure of calls that do not belong together; the others are told.
    pub fn mismatch(&self, waiter: &Waiter<'_>, from: usize, letter: &Letter) -> CommError {
        let error = self.shared.hub.mismatch(waiter, from, &letter.call);
        self.tell(&error);
        error
    }

    /// Others end for what made this rank end, unless they told it.
    fn tell(&self, error: &CommError) {
        if !matches!(error, CommError::Aborted { .. }) {
            self.abort(&error.to_string());
        }
    }

    pub fn abort(&self, reason: &str) {
        self.post_all(&Message::Abort { reason: reason.to_owned() });
    }
}

impl Drop for Station {
    fn drop(&mut self) {
        self.post_all(&Message::Gone);
        self.outgoing = None;
        self.shared.closing.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // A thread of ours that panicked has already said so.
            let _panicked = thread.join();
        }
    }
}

impl Shared {
    fn mailbox(&self, address: Address) -> Arc<Mailbox> {
        lock(&self.boxes).entry(address).or_default().clone()
    }

    fn deliver(&self, from: usize, message: Message) {
        match message {
            Message::Letter(letter) => {
                let mailbox = self.mailbox(letter.address);
                lock(&mailbox.letters).push_back(letter);
                mailbox.arrived.notify_one();
            }
            Message::Gone => self.hub.set_gone(from),
            Message::Abort { reason } => self.fail(from, reason),
        }
    }

    fn fail(&self, rank: usize, reason: String) {
        self.hub.fail(CommError::Aborted { peer: self.hub.peer(rank), reason });
    }
}

/// Sends what is queued until the queue is closed.
fn send_all(wire: &dyn Wire, queue: &Receiver<(usize, Vec<u8>)>, shared: &Shared) {
    while let Ok((to, message)) = queue.recv() {
        if let Err(said) = wire.send(to, &message) {
            return shared.fail(shared.rank, format!("cannot send: {said}"));
        }
    }
}

/// Delivers what arrives until this process has ended and the others have too.
fn receive_all(wire: &dyn Wire, shared: &Shared) {
    let mut closing: Option<Instant> = None;
    loop {
        if shared.closing.load(Ordering::Acquire) {
            let since = *closing.get_or_insert_with(Instant::now);
            if shared.hub.alone(shared.rank) || since.elapsed() > LINGER {
                return;
            }
        }
        match wire.receive(PATIENCE) {
            Ok(Some((from, bytes))) => match Message::decode(&bytes) {
                Some(message) => shared.deliver(from, message),
                None => shared.fail(from, "it sent a message that is garbled".to_owned()),
            },
            Ok(None) => {}
            Err(said) => return shared.fail(shared.rank, format!("cannot receive: {said}")),
        }
    }
}
