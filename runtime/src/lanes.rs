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
use crate::groups::VocabGroups;
use crate::layers::{Local, Reduced, VocabularyShard};
use crate::params::Store;
use crate::program::Program;
use crate::scalar::Scalar;
use kernels::Cpu;
use models::schedule::PassKind;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};

/// Rows of the input layer wait for the first stage's forward: one micro-batch here, and one that is reduced.
const AHEAD: usize = 1;

/// One rank's lanes during one step.
pub struct Lanes<'scope, T> {
    /// Behind `S`, `S2` and `T`.
    barriers: [Barrier<'scope, T>; 3],
    input: Input<'scope, T>,
    input_gradient: InputGradient<'scope, T>,
}

/// What lanes read.
#[derive(Clone, Copy)]
pub struct Read<'a, T> {
    /// The program.
    pub program: &'a Program,
    /// This rank's rows of the tables.
    pub shard: &'a VocabularyShard,
    /// Their weights.
    pub weights: &'a Store<T>,
    /// The lanes' groups.
    pub groups: &'a VocabGroups,
}

impl<'scope, T: Scalar> Lanes<'scope, T> {
    /// Starts them; `tokens` by micro-batch.
    pub fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: Read<'env, T>,
        tokens: &[&[i64]],
    ) -> Self {
        let groups = read.groups;
        let barriers = [&groups.first, &groups.middle, &groups.last];
        Self {
            barriers: barriers.map(|group| Barrier::open(scope, &**group, groups.on_last_stage)),
            input: Input::open(scope, read, tokens),
            input_gradient: InputGradient::open(scope, read, tokens),
        }
    }

    /// Reduces what a pass left.
    pub fn reduce(&mut self, behind: PassKind, micro_batch: u32, local: Local<T>) {
        self.barrier(behind).start(micro_batch, local);
    }

    /// What the reduction behind a pass knows of the logits; once.
    ///
    /// # Errors
    /// As any collective call.
    pub fn sums(&mut self, behind: PassKind, micro_batch: u32) -> Result<Reduced<T>, CommError> {
        let barrier = self.barrier(behind);
        loop {
            match barrier.sums.remove(&micro_batch) {
                Some(sums) => return Ok(sums),
                None => barrier.next()?,
            }
        }
    }

    /// The output layer's input gradient, `[n, h]`; once, on ranks of the last stage.
    ///
    /// # Errors
    /// As any collective call.
    pub fn gradient(&mut self, behind: PassKind, micro_batch: u32) -> Result<Vec<T>, CommError> {
        let barrier = self.barrier(behind);
        loop {
            match barrier.gradients.remove(&micro_batch) {
                Some(gradient) => return Ok(gradient),
                None => barrier.next()?,
            }
        }
    }

    fn barrier(&mut self, behind: PassKind) -> &mut Barrier<'scope, T> {
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
    pub fn rows(&mut self, micro_batch: u32) -> Result<Vec<T>, CommError> {
        self.input.wait(micro_batch)
    }

    /// Hands on the gradient of a micro-batch's rows, `[n, h]`; on the first rank of the first stage.
    pub fn add_to_rows(&mut self, gradient: Vec<T>) {
        if let Some(todo) = &self.input_gradient.todo {
            // A lane that has ended says why when it is closed.
            let _ended = todo.send(gradient);
        }
    }

    /// Waits for all of them; gives the gradient of this rank's rows of the input table.
    ///
    /// # Errors
    /// As any collective call.
    pub fn close(self) -> Result<Vec<T>, CommError> {
        let Self { barriers, input, input_gradient } = self;
        barriers.into_iter().try_for_each(Barrier::close)?;
        drop(input.rows);
        joined(input.thread)?;
        drop(input_gradient.todo);
        joined(input_gradient.thread)
    }
}

/// Reductions behind one kind of pass, in the order in which they are asked for.
struct Barrier<'scope, T> {
    todo: Sender<(u32, Local<T>)>,
    done: Receiver<(u32, Result<Reduced<T>, CommError>)>,
    /// What came, by micro-batch, until it is asked for.
    sums: HashMap<u32, Reduced<T>>,
    gradients: HashMap<u32, Vec<T>>,
    thread: ScopedJoinHandle<'scope, ()>,
}

impl<'scope, T: Scalar> Barrier<'scope, T> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        comm: &'env dyn Communicator,
        takes_gradient: bool,
    ) -> Self {
        let (todo, given) = channel::<(u32, Local<T>)>();
        let (told, done) = channel();
        let thread = scope.spawn(move || {
            let cpu = Cpu::serial();
            for (micro_batch, local) in given {
                let mut reduced = local.reduce(comm, &cpu);
                if let (Ok(reduced), false) = (&mut reduced, takes_gradient) {
                    reduced.take_gradient();
                }
                if told.send((micro_batch, reduced)).is_err() {
                    return;
                }
            }
        });
        Self { todo, done, sums: HashMap::new(), gradients: HashMap::new(), thread }
    }

    fn start(&self, micro_batch: u32, local: Local<T>) {
        // A lane that has ended says why when it is waited for.
        let _ended = self.todo.send((micro_batch, local));
    }

    /// Waits for the next of them, of whichever micro-batch.
    fn next(&mut self) -> Result<(), CommError> {
        let (micro_batch, reduced) = self.done.recv().map_err(|_| ended("a reduction"))?;
        let mut reduced = reduced?;
        if let Some(gradient) = reduced.take_gradient() {
            self.gradients.insert(micro_batch, gradient);
        }
        if reduced.has_sums() {
            self.sums.insert(micro_batch, reduced);
        }
        Ok(())
    }

    /// Waits for what nobody has waited for.
    fn close(self) -> Result<(), CommError> {
        drop(self.todo);
        for (_, reduced) in self.done {
            reduced?;
        }
        joined_unit(self.thread)
    }
}

/// Rows of the input layer, looked up everywhere and summed.
struct Input<'scope, T> {
    rows: Receiver<(u32, Vec<T>)>,
    there: HashMap<u32, Vec<T>>,
    thread: ScopedJoinHandle<'scope, Result<(), CommError>>,
}

impl<'scope, T: Scalar> Input<'scope, T> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: Read<'env, T>,
        tokens: &[&[i64]],
    ) -> Self {
        let (told, rows) = sync_channel(AHEAD);
        let todo = in_order(read.program, &[PassKind::F], tokens);
        let thread = scope.spawn(move || look_up(read, todo, &told));
        Self { rows, there: HashMap::new(), thread }
    }

    fn wait(&mut self, micro_batch: u32) -> Result<Vec<T>, CommError> {
        loop {
            if let Some(rows) = self.there.remove(&micro_batch) {
                return Ok(rows);
            }
            let (other, rows) = self.rows.recv().map_err(|_| ended("the input layer"))?;
            self.there.insert(other, rows);
        }
    }
}

fn look_up<T: Scalar>(
    read: Read<'_, T>,
    todo: Vec<(u32, Vec<i64>)>,
    told: &SyncSender<(u32, Vec<T>)>,
) -> Result<(), CommError> {
    let (cpu, comm) = (Cpu::serial(), &*read.groups.input);
    for (micro_batch, tokens) in todo {
        let own = read.shard.look_up(&cpu, read.weights, &tokens);
        let rows = comm.start_all_reduce(own, crate::comm::Op::Sum)?.wait()?;
        // Where the passes have ended early, they say why.
        if read.groups.on_first_stage && told.send((micro_batch, rows)).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Gradients of the input layer's rows, told everywhere.
struct InputGradient<'scope, T> {
    /// On the rank that tells.
    todo: Option<Sender<Vec<T>>>,
    thread: ScopedJoinHandle<'scope, Result<Vec<T>, CommError>>,
}

impl<'scope, T: Scalar> InputGradient<'scope, T> {
    fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        read: Read<'env, T>,
        tokens: &[&[i64]],
    ) -> Self {
        let (todo, given) = channel();
        let order = in_order(read.program, &[PassKind::B, PassKind::BW], tokens);
        let thread = scope.spawn(move || scatter(read, order, &given));
        Self { todo: (read.groups.input_gradient.rank() == 0).then_some(todo), thread }
    }
}

fn scatter<T: Scalar>(
    read: Read<'_, T>,
    order: Vec<(u32, Vec<i64>)>,
    given: &Receiver<Vec<T>>,
) -> Result<Vec<T>, CommError> {
    let (cpu, comm) = (Cpu::serial(), &*read.groups.input_gradient);
    let mut sum = vec![T::ZERO; read.shard.input_elements()];
    for (_, tokens) in order {
        let elements = tokens.len() * read.program.model.hidden as usize;
        let own = match comm.rank() {
            // The passes have ended early, and say why.
            0 => match given.recv() {
                Ok(own) => own,
                Err(_) => return Ok(sum),
            },
            _ => vec![T::ZERO; elements],
        };
        let gradient = comm.start_broadcast(own, 0)?.wait()?;
        read.shard.scatter(&cpu, &tokens, &gradient, &mut sum);
    }
    Ok(sum)
}

/// Micro-batches with their tokens in the order in which the first stage runs such passes.
fn in_order(program: &Program, kinds: &[PassKind], tokens: &[&[i64]]) -> Vec<(u32, Vec<i64>)> {
    let passes = program.passes.first().map_or(&[][..], Vec::as_slice);
    let of_first = passes.iter().filter(|pass| pass.chunk == 0 && kinds.contains(&pass.kind));
    let of = |k: u32| (k, tokens.get(k as usize).map_or_else(Vec::new, |tokens| tokens.to_vec()));
    of_first.map(|pass| of(pass.micro_batch)).collect()
}

fn ended(what: &str) -> CommError {
    CommError::Invalid { call: what.to_owned(), reason: "its lane has ended".to_owned() }
}

/// What a lane came to.
fn joined<R>(thread: ScopedJoinHandle<'_, Result<R, CommError>>) -> Result<R, CommError> {
    thread.join().unwrap_or_else(|panicked| std::panic::resume_unwind(panicked))
}

fn joined_unit(thread: ScopedJoinHandle<'_, ()>) -> Result<(), CommError> {
    thread.join().map_err(|panicked| std::panic::resume_unwind(panicked))
}
