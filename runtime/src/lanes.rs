//! Lanes: threads of a rank that carry the collectives of a vocabulary split over the pipeline, while its
//! passes go on.
//!
//! Each kind of reduction has a group of its own, and so an order of its own: that of its passes, which is the
//! same on all devices (the schedule's check says so). A lane waits for nothing but the same lane of
//! other ranks and what this rank's passes give it, passes wait for lanes, and a schedule that runs to its
//! end with its barriers runs to its end so.
//!
//! The input layer has no passes in the schedule: all ranks look tokens up ahead of the first stage's
//! forwards, and add to their rows behind its backwards (Vocabulary Parallelism, arXiv 2411.05288, appendix C).

use crate::comm::{CommError, Communicator};
use crate::device::{Device, Group, Space};
use crate::groups::VocabGroups;
use crate::layers::{Local, Numbers, Reduced, VocabularyShard};
use crate::params::WeightStore;
use crate::program::Program;
use models::schedule::PassKind;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};

/// Rows of the input layer wait for the first stage's forward: one micro-batch here, and one that is reduced.
const AHEAD: usize = 1;

/// Activations.
type Stream<D> = <D as Space>::Memory<<D as Space>::Stored>;
/// What a lane's reduction came to.
type Told<D> = Result<Marked<D, Reduced<D>>, CommError>;
/// The input table's gradient.
type Scattered<D> = Marked<D, <D as Space>::Memory<<D as Space>::Wide>>;

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

/// One rank's lanes during one step.
pub struct Lanes<'scope, D: Space> {
    device: &'scope D,
    /// Behind `S`, `S2` and `T`.
    barriers: [Barrier<'scope, D>; 3],
    input: Input<'scope, D>,
    input_gradient: InputGradient<'scope, D>,
}

/// What lanes read.
pub struct Read<'a, D: Space> {
    /// Where they work.
    pub device: &'a D,
    /// The program.
    pub program: &'a Program,
    /// This rank's rows of the tables.
    pub shard: &'a VocabularyShard,
    /// Their weights.
    pub weights: &'a WeightStore<D>,
    /// The lanes' groups.
    pub groups: &'a VocabGroups,
}

impl<D: Space> Clone for Read<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Space> Copy for Read<'_, D> {}

impl<'scope, D: Device> Lanes<'scope, D> {
    /// Starts them; `tokens` by micro-batch.
    pub fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: Read<'env, D>,
        tokens: &[Numbers<D>],
    ) -> Self {
        let (device, groups) = (read.device, read.groups);
        let barriers = [&*groups.first, &*groups.middle, &*groups.last];
        let open = |group| Barrier::open(scope, device.lane(), group, groups.on_last_stage);
        Self {
            device,
            barriers: barriers.map(open),
            input: Input::open(scope, read, tokens),
            input_gradient: InputGradient::open(scope, read, tokens),
        }
    }

    /// Reduces what a pass left.
    pub fn reduce(&mut self, behind: PassKind, micro_batch: u32, local: Local<D>) {
        let local = Marked::new(self.device, local);
        self.barrier(behind).start(micro_batch, local);
    }

    /// What the reduction behind a pass knows of the logits; once.
    ///
    /// # Errors
    /// As any collective call.
    pub fn sums(&mut self, behind: PassKind, micro_batch: u32) -> Result<Reduced<D>, CommError> {
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
    pub fn gradient(&mut self, behind: PassKind, micro_batch: u32) -> Result<Stream<D>, CommError> {
        let device = self.device;
        let barrier = self.barrier(behind);
        loop {
            match barrier.gradients.remove(&micro_batch) {
                Some(gradient) => return Ok(gradient),
                None => barrier.next(device)?,
            }
        }
    }

    fn barrier(&mut self, behind: PassKind) -> &mut Barrier<'scope, D> {
        let [first, middle, last] = &mut self.barriers;
        match behind {
            PassKind::S => first,
            PassKind::S2 => middle,
            _ => last,
        }
    }

    /// Rows of a micro-batch's tokens, `[n, h]`; on ranks of the first stage.
    ///
    /// # Errors
    /// As any collective call.
    pub fn rows(&mut self, micro_batch: u32) -> Result<Stream<D>, CommError> {
        self.input.wait(self.device, micro_batch)
    }

    /// Hands on the gradient of a micro-batch's rows, `[n, h]`; on the first rank of the first stage.
    pub fn add_to_rows(&mut self, gradient: Stream<D>) {
        if let Some(todo) = &self.input_gradient.todo {
            // A lane that has ended says why when it is closed.
            let _ended = todo.send(Marked::new(self.device, gradient));
        }
    }

    /// Waits for all of them, and for what they read; gives the gradient of this rank's rows of the input table.
    ///
    /// # Errors
    /// As any collective call.
    pub fn close(self) -> Result<D::Memory<D::Wide>, CommError> {
        let Self { device, barriers, input, input_gradient } = self;
        barriers.into_iter().try_for_each(|barrier| barrier.close(device))?;
        drop(input.rows);
        device.wait_for(&joined(input.thread)?);
        drop(input_gradient.todo);
        joined(input_gradient.thread).map(|sum| sum.take(device, |sum| device.adopt(sum)))
    }
}

/// Reductions behind one kind of pass, in the order in which they are asked for.
struct Barrier<'scope, D: Space> {
    todo: Sender<(u32, Marked<D, Local<D>>)>,
    done: Receiver<(u32, Told<D>)>,
    /// What came, by micro-batch, until it is asked for.
    sums: HashMap<u32, Reduced<D>>,
    gradients: HashMap<u32, Stream<D>>,
    thread: ScopedJoinHandle<'scope, D::Mark>,
}

impl<'scope, D: Device> Barrier<'scope, D> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        device: D,
        comm: &'env dyn Communicator,
        takes_gradient: bool,
    ) -> Self {
        let (todo, given) = channel::<(u32, Marked<D, Local<D>>)>();
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

    fn start(&self, micro_batch: u32, local: Marked<D, Local<D>>) {
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

/// Rows of the input layer, looked up everywhere and summed.
struct Input<'scope, D: Space> {
    rows: Receiver<(u32, Marked<D, Stream<D>>)>,
    there: HashMap<u32, Stream<D>>,
    thread: ScopedJoinHandle<'scope, Result<D::Mark, CommError>>,
}

impl<'scope, D: Device> Input<'scope, D> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: Read<'env, D>,
        tokens: &[Numbers<D>],
    ) -> Self {
        let (told, rows) = sync_channel(AHEAD);
        let todo = in_order(read.program, &[PassKind::F], tokens);
        let device = read.device.lane();
        let thread = scope.spawn(move || look_up(&device, read, todo, &told));
        Self { rows, there: HashMap::new(), thread }
    }

    fn wait(&mut self, device: &D, micro_batch: u32) -> Result<Stream<D>, CommError> {
        loop {
            if let Some(rows) = self.there.remove(&micro_batch) {
                return Ok(rows);
            }
            let (other, rows) = self.rows.recv().map_err(|_| ended("the input layer"))?;
            self.there.insert(other, rows.take(device, |rows| device.adopt(rows)));
        }
    }
}

fn look_up<D: Device>(
    device: &D,
    read: Read<'_, D>,
    todo: Vec<(u32, Numbers<D>)>,
    told: &SyncSender<(u32, Marked<D, Stream<D>>)>,
) -> Result<D::Mark, CommError> {
    let group = Group::new(device, &*read.groups.input);
    for (micro_batch, tokens) in todo {
        tokens.adopt(device);
        let own = read.shard.look_up(device, read.weights, tokens.view(), tokens.len());
        let rows = group.all_reduce(own, crate::comm::Op::Sum)?;
        let tell = || told.send((micro_batch, Marked::new(device, rows)));
        // Where the passes have ended early, they say why.
        if read.groups.on_first_stage && tell().is_err() {
            break;
        }
    }
    Ok(device.mark())
}

/// Gradients of the input layer's rows, told everywhere.
struct InputGradient<'scope, D: Space> {
    /// On the rank that tells.
    todo: Option<Sender<Marked<D, Stream<D>>>>,
    thread: ScopedJoinHandle<'scope, Result<Scattered<D>, CommError>>,
}

impl<'scope, D: Device> InputGradient<'scope, D> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: Read<'env, D>,
        tokens: &[Numbers<D>],
    ) -> Self {
        let (todo, given) = channel();
        let order = in_order(read.program, &[PassKind::B, PassKind::BW], tokens);
        let device = read.device.lane();
        let thread = scope.spawn(move || scatter(&device, read, order, &given));
        Self { todo: (read.groups.input_gradient.rank() == 0).then_some(todo), thread }
    }
}

fn scatter<D: Device>(
    device: &D,
    read: Read<'_, D>,
    order: Vec<(u32, Numbers<D>)>,
    given: &Receiver<Marked<D, Stream<D>>>,
) -> Result<Scattered<D>, CommError> {
    let comm = &*read.groups.input_gradient;
    let group = Group::new(device, comm);
    let mut sum = device.zeros(read.shard.input_elements());
    for (_, tokens) in order {
        tokens.adopt(device);
        let elements = tokens.len() * read.program.model.hidden as usize;
        let own = match comm.rank() {
            0 => match given.recv() {
                Ok(own) => own.take(device, |own| device.adopt(own)),
                // The passes have ended early, and say why.
                Err(_) => break,
            },
            _ => device.zeros(elements),
        };
        let gradient = group.start_broadcast(own, 0)?.wait(device)?;
        read.shard.scatter(device, (tokens.view(), tokens.len()), &gradient, &mut sum);
    }
    Ok(Marked::new(device, sum))
}

/// Micro-batches with their tokens in the order in which the first stage runs such passes.
fn in_order<D: Space>(
    program: &Program,
    kinds: &[PassKind],
    tokens: &[Numbers<D>],
) -> Vec<(u32, Numbers<D>)> {
    let passes = program.passes.first().map_or(&[][..], Vec::as_slice);
    let of_first = passes.iter().filter(|pass| pass.chunk == 0 && kinds.contains(&pass.kind));
    let of = |k: u32| tokens.get(k as usize).map(|tokens| (k, tokens.clone()));
    of_first.filter_map(|pass| of(pass.micro_batch)).collect()
}

fn ended(what: &str) -> CommError {
    CommError::Invalid { call: what.to_owned(), reason: "its lane has ended".to_owned() }
}

/// What a lane came to.
fn joined<R>(thread: ScopedJoinHandle<'_, Result<R, CommError>>) -> Result<R, CommError> {
    unwound(thread.join())
}

fn unwound<R>(joined: std::thread::Result<R>) -> R {
    joined.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked))
}
