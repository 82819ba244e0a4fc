//! VocabCollectives: threads of a rank that carry the collectives of a vocabulary split over the pipeline, while its
//! passes go on.
//!
//! Each kind of reduction has a group of its own, and so an order of its own: that of its passes, which is the
//! same on all devices (the schedule's check says so). A lane waits for nothing but the same lane of
//! other ranks and what this rank's passes give it, passes wait for collectives, and a schedule that runs to its
//! end with its barriers runs to its end so.
//!
//! The input layer has two collectives (Vocabulary Parallelism, arXiv 2411.05288, appendix C): one sums what all ranks looked
//! up, ahead of the first stage's forwards; one tells all ranks what its backwards leave.

use crate::comm::{CommError, Communicator, Op};
use crate::device::{Device, DeviceGroup, Space};
use crate::groups::VocabGroups;
use crate::layers::{ShardLocal, ShardReduced};
use crate::program::Program;
use models::schedule::PassKind;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};

/// Activations.
type Activations<D> = <D as Space>::Memory<<D as Space>::Stored>;
/// What a lane's reduction came to.
type ReductionResult<D> = Result<Marked<D, ShardReduced<D>>, CommError>;
/// What a lane of the input layer came to for a micro-batch.
type RowsResult<D> = (u32, Result<Marked<D, Activations<D>>, CommError>);

/// What one thread of a rank hands to another, and where on its stream it is ready.
struct Marked<D: Space, V> {
    value: V,
    mark: D::Mark,
}

impl<D: Space, V> Marked<D, V> {
    fn new(device: &D, value: V) -> Self {
        Self { value, mark: device.mark() }
    }

    /// Memory in it goes back to the stream that made it, and `adopt` says which there is.
    fn take(self, device: &D, adopt: impl FnOnce(&V)) -> V {
        device.wait_for(&self.mark);
        adopt(&self.value);
        self.value
    }
}

/// One rank's collectives during one step.
pub struct VocabCollectives<'scope, D: Space> {
    device: &'scope D,
    /// Behind `S`, `S2` and `T`.
    barriers: [ReductionThread<'scope, D>; 3],
    rows: RowSumThread<'scope, D>,
    row_gradients: RowGradientThread<'scope, D>,
}

/// What collectives read.
pub struct CollectiveInputs<'a, D: Space> {
    /// Where they work.
    pub device: &'a D,
    /// The program.
    pub program: &'a Program,
    /// The collectives' groups.
    pub groups: &'a VocabGroups,
}

impl<D: Space> Clone for CollectiveInputs<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Space> Copy for CollectiveInputs<'_, D> {}

impl<'scope, D: Device> VocabCollectives<'scope, D> {
    /// Starts them; `elements` of the tokens' rows, by micro-batch.
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

    /// Reduces what a pass left.
    pub fn reduce(&mut self, behind: PassKind, micro_batch: u32, local: ShardLocal<D>) {
        let local = Marked::new(self.device, local);
        self.barrier(behind).start(micro_batch, local);
    }

    /// What the reduction behind a pass knows of the logits; once.
    ///
    /// # Errors
    /// As any collective call.
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

    /// The output layer's input gradient, `[n, h]`; once, on ranks of the last stage.
    ///
    /// # Errors
    /// As any collective call.
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

    /// Sums the rows that this rank looked up, `[n, h]`, with those of all others.
    pub fn sum_rows(&self, micro_batch: u32, own: Activations<D>) {
        // A lane that has ended says why when it is waited for.
        let _ended = self.rows.todo.send((micro_batch, Marked::new(self.device, own)));
    }

    /// RowSumThread of a micro-batch's tokens, `[n, h]`; once, on ranks of the first stage.
    ///
    /// # Errors
    /// As any collective call.
    pub fn rows(&mut self, micro_batch: u32) -> Result<Activations<D>, CommError> {
        self.rows.done.take(self.device, micro_batch)
    }

    /// Tells all ranks the gradient of a micro-batch's rows, `[n, h]`; on the first rank of the first stage.
    pub fn tell_row_gradient(&self, gradient: Activations<D>) {
        if let Some(todo) = &self.row_gradients.todo {
            // A lane that has ended says why when it is waited for.
            let _ended = todo.send(Marked::new(self.device, gradient));
        }
    }

    /// The gradient of a micro-batch's rows, `[n, h]`; once.
    ///
    /// # Errors
    /// As any collective call.
    pub fn row_gradient(&mut self, micro_batch: u32) -> Result<Activations<D>, CommError> {
        self.row_gradients.done.take(self.device, micro_batch)
    }

    /// Waits for all of them, and for what they read.
    ///
    /// # Errors
    /// As any collective call.
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

/// Reductions behind one kind of pass, in the order in which they are asked for.
struct ReductionThread<'scope, D: Space> {
    todo: Sender<(u32, Marked<D, ShardLocal<D>>)>,
    done: Receiver<(u32, ReductionResult<D>)>,
    /// What came, by micro-batch, until it is asked for.
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
        let (told, done) = channel();
        let thread = scope.spawn(move || {
            for (micro_batch, local) in given {
                let local = local.take(&device, |local| local.adopt(&device));
                let mut reduced = local.reduce(comm, &device);
                if let (Ok(reduced), false) = (&mut reduced, takes_gradient) {
                    reduced.take_gradient();
                }
                let reduced = reduced.map(|reduced| Marked::new(&device, reduced));
                if told.send((micro_batch, reduced)).is_err() {
                    break;
                }
            }
            device.mark()
        });
        Self { todo, done, sums: HashMap::new(), gradients: HashMap::new(), thread }
    }

    fn start(&self, micro_batch: u32, local: Marked<D, ShardLocal<D>>) {
        // A lane that has ended says why when it is waited for.
        let _ended = self.todo.send((micro_batch, local));
    }

    /// Waits for the next of them, of whichever micro-batch.
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

    /// Waits for what nobody has waited for.
    fn close(self, device: &D) -> Result<(), CommError> {
        drop(self.todo);
        for (_, reduced) in self.done {
            reduced?;
        }
        device.wait_for(&unwound(self.thread.join()));
        Ok(())
    }
}

/// What a lane of the input layer gives, by micro-batch, until it is asked for.
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

    /// Waits for what nobody has waited for.
    fn close(self) -> Result<(), CommError> {
        self.done.into_iter().try_for_each(|(_, rows)| rows.map(drop))
    }
}

/// RowSumThread of the input layer, looked up everywhere, summed in the order in which they are.
struct RowSumThread<'scope, D: Space> {
    todo: Sender<(u32, Marked<D, Activations<D>>)>,
    done: Inbox<D>,
    thread: ScopedJoinHandle<'scope, D::Mark>,
}

impl<'scope, D: Device> RowSumThread<'scope, D> {
    fn open<'env>(scope: &'scope Scope<'scope, 'env>, read: CollectiveInputs<'env, D>) -> Self {
        let (todo, given) = channel::<(u32, Marked<D, Activations<D>>)>();
        let (told, done) = channel();
        let (device, groups) = (read.device.fork_stream(), read.groups);
        let thread = scope.spawn(move || {
            let group = DeviceGroup::new(&device, &*groups.input);
            for (micro_batch, own) in given {
                let own = own.take(&device, |own| device.adopt(own));
                let rows = group.all_reduce(own, Op::Sum).map(|rows| Marked::new(&device, rows));
                // Others have no use for them, unless it went wrong.
                let wanted = groups.on_first_stage || rows.is_err();
                if wanted && told.send((micro_batch, rows)).is_err() {
                    break;
                }
            }
            device.mark()
        });
        Self { todo, done: Inbox::new(done), thread }
    }
}

/// Gradients of the input layer's rows, told everywhere in the order of the first stage's backwards.
struct RowGradientThread<'scope, D: Space> {
    /// On the rank that tells.
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
        let (told, done) = channel();
        let order = in_order(read.program, elements);
        let (device, comm) = (read.device.fork_stream(), &*read.groups.input_gradient);
        let tells = comm.rank() == 0;
        let thread = scope.spawn(move || {
            let group = DeviceGroup::new(&device, comm);
            for (micro_batch, elements) in order {
                let own = match tells.then(|| given.recv()) {
                    Some(Ok(own)) => own.take(&device, |own| device.adopt(own)),
                    // The passes have ended early, and say why.
                    Some(Err(_)) => break,
                    None => device.zeros(elements),
                };
                let gradient = group.start_broadcast(own, 0).and_then(|sent| sent.wait(&device));
                let gradient = gradient.map(|gradient| Marked::new(&device, gradient));
                let failed = gradient.is_err();
                if told.send((micro_batch, gradient)).is_err() || failed {
                    break;
                }
            }
            device.mark()
        });
        Self { todo: tells.then_some(todo), done: Inbox::new(done), thread }
    }
}

/// Micro-batches with the elements of their tokens' rows in the order of the first stage's backwards.
fn in_order(program: &Program, elements: &[usize]) -> Vec<(u32, usize)> {
    let passes = program.passes.first().map_or(&[][..], Vec::as_slice);
    let backward = |kind: PassKind| matches!(kind, PassKind::B | PassKind::BW);
    let of_first = passes.iter().filter(|pass| pass.chunk == 0 && backward(pass.kind));
    let of = |k: u32| elements.get(k as usize).map(|&elements| (k, elements));
    of_first.filter_map(|pass| of(pass.micro_batch)).collect()
}

fn ended(what: &str) -> CommError {
    CommError::Invalid { call: what.to_owned(), reason: "its lane has ended".to_owned() }
}

fn unwound<R>(joined: std::thread::Result<R>) -> R {
    joined.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked))
}
