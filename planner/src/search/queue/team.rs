//! The threads that expand search nodes.

use super::super::expand::{
    Allowance, Context, Expansion, Paths, SearchNode, Shared, Tight, Worker,
};
use crate::request::Task;
use crate::until::ThreadTime;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

/// Contexts that one thread bounds at a time. Neighbours share layer costs.
const CONTEXTS: usize = 256;

/// Work for all threads, which take its pieces in turn.
pub(super) enum Batch {
    Contexts(Arc<[Context]>),
    /// Search nodes, the incumbent's time, what integer programs of each may take, known chains.
    Nodes(Vec<SearchNode>, f64, Allowance, Arc<Paths>),
    /// Search nodes to dive into, a limit on the time, s, with the work of each dive's integer
    /// programs, how many pipelines to price, and whether what is short of memory is followed.
    Dives(Vec<Vec<SearchNode>>, (f64, u64), (usize, Tight)),
}

pub(super) enum Answer {
    /// Bounds, with overheads, s.
    Contexts(Vec<f64>),
    Expansion(Box<Expansion>),
}

/// A batch that was sent: its number, and the index of the next piece to take.
type SentBatch = (usize, Arc<Batch>, Arc<AtomicUsize>);

/// Answers, each with the index of its piece.
type Answers = Vec<(usize, Answer)>;

/// The threads, each with its own [`Worker`].
pub(super) struct Team<'scope> {
    to: Vec<Sender<SentBatch>>,
    threads: Vec<ScopedJoinHandle<'scope, ()>>,
    from: Receiver<(usize, Answers)>,
    /// Batches sent so far.
    sent: usize,
    /// Batches not answered in full, oldest first: the number of pieces, and the answers so far.
    under_way: VecDeque<(usize, Answers)>,
}

/// Time without an answer after which the threads are checked for panics.
const PATIENCE: Duration = Duration::from_millis(200);

impl<'scope> Team<'scope> {
    pub fn new<'env>(
        scope: &'scope Scope<'scope, 'env>,
        task: &'env Task<'env>,
        known: &Arc<Shared>,
        threads: usize,
    ) -> Self {
        let (answer, from) = channel();
        let (mut to, mut handles) = (vec![], vec![]);
        for _ in 0..threads {
            let (own, work) = channel();
            let answer = answer.clone();
            let shared = Arc::clone(known);
            handles.push(scope.spawn(move || {
                let begun = ThreadTime::now();
                serve(task, &shared, &work, &answer);
                task.until.count(begun);
            }));
            to.push(own);
        }
        Self { to, threads: handles, from, sent: 0, under_way: VecDeque::new() }
    }

    /// Sends a batch to the threads, which finish earlier batches first.
    pub fn send(&mut self, batch: Batch) {
        let pieces = match &batch {
            Batch::Contexts(contexts) => contexts.len().div_ceil(CONTEXTS),
            Batch::Nodes(nodes, ..) => nodes.len(),
            Batch::Dives(dives, ..) => dives.len(),
        };
        let (batch, next) = (Arc::new(batch), Arc::new(AtomicUsize::new(0)));
        for to in self.to.iter().take(pieces) {
            let _ = to.send((self.sent, Arc::clone(&batch), Arc::clone(&next)));
        }
        self.sent += 1;
        self.under_way.push_back((pieces, Vec::with_capacity(pieces)));
    }

    /// Whether the threads would wait while the answers to one batch are taken.
    pub fn is_hungry(&self) -> bool {
        self.under_way.len() < 2
    }

    /// Whether every batch is answered.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Answers to the oldest batch, in the order of its pieces.
    ///
    /// # Panics
    /// Passes on the panic of a thread.
    pub fn receive(&mut self) -> Vec<Answer> {
        while self.under_way.front().is_some_and(|(pieces, answers)| answers.len() < *pieces) {
            match self.from.recv_timeout(PATIENCE) {
                Ok((batch, some)) => {
                    let oldest = self.sent - self.under_way.len();
                    self.under_way[batch - oldest].1.extend(some);
                }
                Err(_) => self.pass_on_panics(),
            }
        }
        let (_, mut answers) = self.under_way.pop_front().unwrap_or_default();
        answers.sort_by_key(|(piece, _)| *piece);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }
}

impl Team<'_> {
    /// Threads end before the team is dropped only where they panic.
    fn pass_on_panics(&mut self) {
        let ended = self.threads.iter().position(ScopedJoinHandle::is_finished);
        if let Some(Err(panic)) = ended.map(|at| self.threads.swap_remove(at).join()) {
            self.to.clear();
            std::panic::resume_unwind(panic);
        }
    }
}

fn serve(
    task: &Task<'_>,
    shared: &Arc<Shared>,
    work: &Receiver<SentBatch>,
    answer: &Sender<(usize, Answers)>,
) {
    let mut worker = Worker::new(task, shared);
    for (number, batch, next) in work {
        // One message per batch: waking the receiver takes longer than many a piece.
        let mut answers = vec![];
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            let done = match batch.as_ref() {
                Batch::Contexts(contexts) => {
                    let some = contexts.chunks(CONTEXTS).nth(piece);
                    some.map(|some| Answer::Contexts(worker.contexts_s(some)))
                }
                Batch::Dives(dives, limits, how) => dives
                    .get(piece)
                    .map(|nodes| Answer::Expansion(Box::new(worker.dive(nodes, *limits, *how)))),
                Batch::Nodes(nodes, best_s, allowed, paths) => nodes.get(piece).map(|node| {
                    Answer::Expansion(Box::new(worker.expand(node, *best_s, *allowed, paths)))
                }),
            };
            let Some(done) = done else { break };
            answers.push((piece, done));
        }
        if !answers.is_empty() && answer.send((number, answers)).is_err() {
            return;
        }
    }
}
