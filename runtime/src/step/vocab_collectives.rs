//! Collectives of a vocabulary split over the pipeline, on threads of their own beside the rank's
//! passes.
//!
//! Each kind of reduction has a group and a thread of its own, and follows the order of its passes.
//! That order is the same on all pipeline ranks: the schedule's check requires it. A thread waits
//! only for the same thread of other ranks and for input from this rank's passes, and passes wait
//! for threads. So a schedule that completes when its reductions are barriers completes here too.
//!
//! The input layer has two threads (Vocabulary Parallelism, arXiv 2411.05288, appendix C). One sums
//! the looked-up embedding rows of all ranks before the first stage's forwards; the other
//! broadcasts the row gradients of the first stage's backwards.

use crate::comm::{CommError, Communicator, Op};
use crate::device::{Device, DeviceGroup, Space};
use crate::groups::VocabGroups;
use crate::ops::{ShardLocal, ShardReduced};
use crate::spec::TrainerSpec;
use models::schedule::PassKind;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};

/// Memory of activations.
type Activations<D> = <D as Space>::Memory<<D as Space>::Stored>;
/// Result of an output-layer reduction.
type ReductionResult<D> = Result<Marked<D, ShardReduced<D>>, CommError>;
/// A micro-batch, and the result of an input-layer collective for it.
type RowsResult<D> = (u32, Result<Marked<D, Activations<D>>, CommError>);

/// A value that one thread of a rank hands to another, and the mark after which it is ready.
struct Marked<D: Space, V> {
    value: V,
    mark: D::Mark,
}

impl<D: Space, V> Marked<D, V> {
    fn new(device: &D, value: V) -> Self {
        Self { value, mark: device.mark() }
    }

    /// Waits for the mark on `device`. `adopt` tells `device` about each memory in the value,
    /// because memory returns to the stream that allocated it.
    fn take(self, device: &D, adopt: impl FnOnce(&V)) -> V {
        device.wait_for(&self.mark);
        adopt(&self.value);
        self.value
    }
}

/// One rank's collective threads during one step.
pub struct VocabCollectives<'scope, D: Space> {
    device: &'scope D,
    /// After the passes `S`, `S2` and `T`.
    barriers: [ReductionThread<'scope, D>; 3],
    rows: RowSumThread<'scope, D>,
    row_gradients: RowGradientThread<'scope, D>,
}

/// What the threads need.
pub struct CollectiveInputs<'a, D: Space> {
    /// The rank's device; each thread forks a stream of it.
    pub device: &'a D,
    /// The spec.
    pub spec: &'a TrainerSpec,
    /// The groups of the collectives.
    pub groups: &'a VocabGroups,
}

impl<D: Space> Clone for CollectiveInputs<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Space> Copy for CollectiveInputs<'_, D> {}

impl<'scope, D: Device> VocabCollectives<'scope, D> {
    /// Starts the threads. `elements`: elements of the tokens' embedding rows, for each
    /// micro-batch.
    pub fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: CollectiveInputs<'env, D>,
        elements: &[usize],
    ) -> Self {
        let (device, groups) = (read.device, read.groups);
        let barriers = [&*groups.first, &*groups.middle, &*groups.last];
        let open =
            |group| ReductionThread::open(scope, device.fork_stream(), group, groups.on_last_stage);
        Self {
            device,
            barriers: barriers.map(open),
            rows: RowSumThread::open(scope, read),
            row_gradients: RowGradientThread::open(scope, read, elements),
        }
    }

    /// Starts reducing what a pass left.
    pub fn reduce(&mut self, behind: PassKind, micro_batch: u32, local: ShardLocal<D>) {
        let local = Marked::new(self.device, local);
        self.barrier(behind).start(micro_batch, local);
    }

    /// What the reduction after a pass found out about the logits; can be taken once.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn sums(
        &mut self,
        behind: PassKind,
        micro_batch: u32,
    ) -> Result<ShardReduced<D>, CommError> {
        let device = self.device;
        let barrier = self.barrier(behind);
        loop {
            match barrier.sums.remove(&micro_batch) {
                Some(sums) => return Ok(sums),
                None => barrier.next(device)?,
            }
        }
    }

    /// Input gradient of the output layer, `[n, h]`; can be taken once, on ranks of the last stage.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn gradient(
        &mut self,
        behind: PassKind,
        micro_batch: u32,
    ) -> Result<Activations<D>, CommError> {
        let device = self.device;
        let barrier = self.barrier(behind);
        loop {
            match barrier.gradients.remove(&micro_batch) {
                Some(gradient) => return Ok(gradient),
                None => barrier.next(device)?,
            }
        }
    }

    fn barrier(&mut self, behind: PassKind) -> &mut ReductionThread<'scope, D> {
        let [first, middle, last] = &mut self.barriers;
        match behind {
            PassKind::S => first,
            PassKind::S2 => middle,
            _ => last,
        }
    }

    /// Starts summing the embedding rows that this rank looked up, `[n, h]`, with those of all
    /// others.
    pub fn sum_rows(&self, micro_batch: u32, own: Activations<D>) {
        // If the thread has ended, the next wait for it reports why.
        let _ended = self.rows.todo.send((micro_batch, Marked::new(self.device, own)));
    }

    /// Embedding rows of a micro-batch's tokens, `[n, h]`; can be taken once, on ranks of the first
    /// stage.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn rows(&mut self, micro_batch: u32) -> Result<Activations<D>, CommError> {
        self.rows.done.take(self.device, micro_batch)
    }

    /// Broadcasts the gradient of a micro-batch's embedding rows, `[n, h]`, from the first rank of
    /// the first stage.
    pub fn broadcast_row_gradient(&self, gradient: Activations<D>) {
        if let Some(todo) = &self.row_gradients.todo {
            // If the thread has ended, the next wait for it reports why.
            let _ended = todo.send(Marked::new(self.device, gradient));
        }
    }

    /// The gradient of a micro-batch's embedding rows, `[n, h]`; can be taken once.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn row_gradient(&mut self, micro_batch: u32) -> Result<Activations<D>, CommError> {
        self.row_gradients.done.take(self.device, micro_batch)
    }

    /// Waits for all threads and for the work on their streams.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn close(self) -> Result<(), CommError> {
        let Self { device, barriers, rows, row_gradients } = self;
        barriers.into_iter().try_for_each(|barrier| barrier.close(device))?;
        drop((rows.todo, row_gradients.todo));
        let inboxes = [(rows.done, rows.thread), (row_gradients.done, row_gradients.thread)];
        inboxes.into_iter().try_for_each(|(done, thread)| {
            done.close()?;
            device.wait_for(&unwound(thread.join()));
            Ok(())
        })
    }
}

/// The reductions after one kind of pass, in the order in which they are started.
struct ReductionThread<'scope, D: Space> {
    todo: Sender<(u32, Marked<D, ShardLocal<D>>)>,
    done: Receiver<(u32, ReductionResult<D>)>,
    /// Results by micro-batch, until they are taken.
    sums: HashMap<u32, ShardReduced<D>>,
    gradients: HashMap<u32, Activations<D>>,
    thread: ScopedJoinHandle<'scope, D::Mark>,
}

impl<'scope, D: Device> ReductionThread<'scope, D> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        device: D,
        comm: &'env dyn Communicator,
        takes_gradient: bool,
    ) -> Self {
        let (todo, given) = channel::<(u32, Marked<D, ShardLocal<D>>)>();
        let (results, done) = channel();
        let thread = scope.spawn(move || {
            for (micro_batch, local) in given {
                let local = local.take(&device, |local| local.adopt(&device));
                let mut reduced = local.reduce(comm, &device);
                if let (Ok(reduced), false) = (&mut reduced, takes_gradient) {
                    reduced.take_gradient();
                }
                let reduced = reduced.map(|reduced| Marked::new(&device, reduced));
                if results.send((micro_batch, reduced)).is_err() {
                    break;
                }
            }
            device.mark()
        });
        Self { todo, done, sums: HashMap::new(), gradients: HashMap::new(), thread }
    }

    fn start(&self, micro_batch: u32, local: Marked<D, ShardLocal<D>>) {
        // If the thread has ended, the next wait for it reports why.
        let _ended = self.todo.send((micro_batch, local));
    }

    /// Waits for the next result, of any micro-batch.
    fn next(&mut self, device: &D) -> Result<(), CommError> {
        let (micro_batch, reduced) = self.done.recv().map_err(|_| ended("a reduction"))?;
        let mut reduced = reduced?.take(device, |reduced| reduced.adopt(device));
        if let Some(gradient) = reduced.take_gradient() {
            self.gradients.insert(micro_batch, gradient);
        }
        if reduced.has_sums() {
            self.sums.insert(micro_batch, reduced);
        }
        Ok(())
    }

    /// Waits for all remaining results.
    fn close(self, device: &D) -> Result<(), CommError> {
        drop(self.todo);
        for (_, reduced) in self.done {
            reduced?;
        }
        device.wait_for(&unwound(self.thread.join()));
        Ok(())
    }
}

/// Results of an input-layer thread by micro-batch, until they are taken.
struct Inbox<D: Space> {
    done: Receiver<RowsResult<D>>,
    there: HashMap<u32, Activations<D>>,
}

impl<D: Device> Inbox<D> {
    fn new(done: Receiver<RowsResult<D>>) -> Self {
        Self { done, there: HashMap::new() }
    }

    fn take(&mut self, device: &D, micro_batch: u32) -> Result<Activations<D>, CommError> {
        loop {
            if let Some(rows) = self.there.remove(&micro_batch) {
                return Ok(rows);
            }
            let (other, rows) = self.done.recv().map_err(|_| ended("the input layer"))?;
            self.there.insert(other, rows?.take(device, |rows| device.adopt(rows)));
        }
    }

    /// Waits for all remaining results.
    fn close(self) -> Result<(), CommError> {
        self.done.into_iter().try_for_each(|(_, rows)| rows.map(drop))
    }
}

/// All-reduces of the looked-up embedding rows, in the order in which they are looked up.
struct RowSumThread<'scope, D: Space> {
    todo: Sender<(u32, Marked<D, Activations<D>>)>,
    done: Inbox<D>,
    thread: ScopedJoinHandle<'scope, D::Mark>,
}

impl<'scope, D: Device> RowSumThread<'scope, D> {
    fn open<'env>(scope: &'scope Scope<'scope, 'env>, read: CollectiveInputs<'env, D>) -> Self {
        let (todo, given) = channel::<(u32, Marked<D, Activations<D>>)>();
        let (results, done) = channel();
        let (device, groups) = (read.device.fork_stream(), read.groups);
        let thread = scope.spawn(move || {
            let group = DeviceGroup::new(&device, &*groups.input);
            for (micro_batch, own) in given {
                let own = own.take(&device, |own| device.adopt(own));
                let rows = group.all_reduce(own, Op::Sum).map(|rows| Marked::new(&device, rows));
                // Other ranks need only learn of an error.
                let wanted = groups.on_first_stage || rows.is_err();
                if wanted && results.send((micro_batch, rows)).is_err() {
                    break;
                }
            }
            device.mark()
        });
        Self { todo, done: Inbox::new(done), thread }
    }
}

/// Broadcasts of the embedding rows' gradients, in the order of the first stage's backwards.
struct RowGradientThread<'scope, D: Space> {
    /// Input on the rank that broadcasts.
    todo: Option<Sender<Marked<D, Activations<D>>>>,
    done: Inbox<D>,
    thread: ScopedJoinHandle<'scope, D::Mark>,
}

impl<'scope, D: Device> RowGradientThread<'scope, D> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: CollectiveInputs<'env, D>,
        elements: &[usize],
    ) -> Self {
        let (todo, given) = channel::<Marked<D, Activations<D>>>();
        let (results, done) = channel();
        let order = in_order(read.spec, elements);
        let (device, comm) = (read.device.fork_stream(), &*read.groups.input_gradient);
        let is_root = comm.rank() == 0;
        let thread = scope.spawn(move || {
            let group = DeviceGroup::new(&device, comm);
            for (micro_batch, elements) in order {
                let own = match is_root.then(|| given.recv()) {
                    Some(Ok(own)) => own.take(&device, |own| device.adopt(own)),
                    // The passes ended early, and report why.
                    Some(Err(_)) => break,
                    None => device.zeros(elements),
                };
                let gradient = group.start_broadcast(own, 0).and_then(|sent| sent.wait(&device));
                let gradient = gradient.map(|gradient| Marked::new(&device, gradient));
                let failed = gradient.is_err();
                if results.send((micro_batch, gradient)).is_err() || failed {
                    break;
                }
            }
            device.mark()
        });
        Self { todo: is_root.then_some(todo), done: Inbox::new(done), thread }
    }
}

/// Micro-batches, and the elements of their tokens' embedding rows, in the order of the first
/// stage's backwards.
fn in_order(spec: &TrainerSpec, elements: &[usize]) -> Vec<(u32, usize)> {
    let passes = spec.passes.first().map_or(&[][..], |order| &order.passes);
    let backward = |kind: PassKind| matches!(kind, PassKind::B | PassKind::BW);
    let of_first = passes.iter().filter(|pass| pass.chunk == 0 && backward(pass.kind));
    let of = |k: u32| elements.get(k as usize).map(|&elements| (k, elements));
    of_first.filter_map(|pass| of(pass.micro_batch)).collect()
}

fn ended(what: &str) -> CommError {
    CommError::Invalid { call: what.to_owned(), reason: "its thread has ended".to_owned() }
}

fn unwound<R>(joined: std::thread::Result<R>) -> R {
    joined.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked))
}
