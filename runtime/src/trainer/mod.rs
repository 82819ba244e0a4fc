//! The entry point: a generated trainer's `main` calls [`main`] with its program.

mod agreement;
mod final_outputs;
mod flags;
mod gpus;
pub mod lr_schedule;
mod metrics;
mod outputs;
mod processes;
mod run;

pub use flags::Flags;

use crate::comm::{CommError, Communicator, Solo, run_ranks};
use crate::device::{Device, Gpu, Host};
use crate::error::Error;
use crate::launch::interrupt::{INTERRUPTED, Interrupt};
use crate::launch::launcher;
use crate::program::Program;
use crate::rank::Rank;
use crate::step::reduce::Reduction;
use clap::Parser;
use flags::{options, refuse, threads};
use gpus::{ONLY_GPU, open_gpu};
use kernels::Cpu;
use kernels::cuda::{self, bf16};
use run::{Failure, TrainingRun};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// Reads the command line, trains, and returns the exit code: 0 for success, 2 for an error in the
/// user's input, 130 if interrupted, 1 otherwise. Ranks are threads of this process, or one process
/// each if a launcher started several.
pub fn main<T: TrainedDtype>(program: &Program) -> ExitCode {
    let flags = Flags::parse();
    match start::<T>(program, &flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In one write: other processes write to the terminal too.
            let line = format!("error: {error}\n");
            let _closed = std::io::stderr().write_all(line.as_bytes());
            ExitCode::from(exit_code(&error))
        }
    }
}

/// The exit code: 2 if the user must act, 130 if the user interrupted.
fn exit_code(error: &Error) -> u8 {
    match error {
        Error::File { .. } | Error::Flag { .. } | Error::World { .. } => 2,
        Error::Interrupted { .. } | Error::NotStarted => INTERRUPTED,
        _ => 1,
    }
}

fn start<T: TrainedDtype>(program: &Program, flags: &Flags) -> Result<(), Error> {
    flags.check()?;
    let patience = Duration::from_secs(flags.time_limit_s);
    let interrupt = Interrupt::listen(patience)?;
    let place = launcher::discover(|name| std::env::var(name).ok())?;
    if launcher::ends_with_input(place.as_ref(), |name| std::env::var(name).ok()) {
        interrupt.ask_at_end_of(std::io::stdin(), patience);
    }
    match place.filter(|place| place.world > 1) {
        None => train::<T>(program, flags, &interrupt),
        Some(place) => {
            let job = Job { program, flags, interrupt: &interrupt, ranks_in_process: 1 };
            processes::train::<T>(job, &place)
        }
    }
}

/// Trains with all ranks as threads of this process.
///
/// # Errors
/// The error of the rank that made the others end.
pub fn train<T: TrainedDtype>(
    program: &Program,
    flags: &Flags,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    flags.check()?;
    let size = program.world_size();
    let (threads, gpu) = (threads(flags), open_gpu::<T>(program, flags, None, size)?);
    let job = Job { program, flags, interrupt, ranks_in_process: size };
    let run = |world: Box<dyn Communicator>| {
        let rank = world.rank();
        // The first ranks get the remaining threads.
        let share = threads / size + usize::from(rank < threads % size);
        T::train(job, gpu.as_ref(), world, share.max(1))
    };
    let results = match size {
        1 => vec![run(Box::new(Solo::new()))],
        _ => run_ranks(size, options(flags), run),
    };
    results.into_iter().filter_map(Result::err).min_by_key(consequence).map_or(Ok(()), Err)
}

/// Distance of an error from the cause: errors that only report another rank's come last.
fn consequence(error: &Error) -> u8 {
    match error {
        Error::Comm(CommError::Lost { .. } | CommError::Aborted { .. }) => 2,
        Error::Comm(CommError::Device(_)) => 0,
        Error::Comm(_) | Error::Unread { .. } => 1,
        _ => 0,
    }
}

/// What a run is given.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    program: &'a Program,
    flags: &'a Flags,
    interrupt: &'a Interrupt,
    /// Ranks that are threads of this process.
    ranks_in_process: usize,
}

/// Element types of plans.
pub trait TrainedDtype {
    /// Whether it trains on a GPU, and whether it trains only on a GPU.
    const ON_GPU: (bool, bool);

    /// Trains one rank, on a GPU or on the CPU, over any communicator.
    ///
    /// # Errors
    /// This rank's error, which it tells the others, or one that another rank caused.
    fn train(
        job: Job<'_>,
        gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        threads: usize,
    ) -> Result<(), Error>;
}

impl TrainedDtype for f64 {
    const ON_GPU: (bool, bool) = (false, false);

    fn train(
        job: Job<'_>,
        _gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        threads: usize,
    ) -> Result<(), Error> {
        train_rank(job, Host::<Self>::new(Cpu::new(threads)?), world)
    }
}

impl TrainedDtype for f32 {
    const ON_GPU: (bool, bool) = (true, false);

    fn train(
        job: Job<'_>,
        gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        threads: usize,
    ) -> Result<(), Error> {
        match gpu {
            Some(gpu) => train_rank(job, own_queue::<Self>(gpu)?, world),
            None => train_rank(job, Host::<Self>::new(Cpu::new(threads)?), world),
        }
    }
}

impl TrainedDtype for bf16 {
    const ON_GPU: (bool, bool) = (true, true);

    fn train(
        job: Job<'_>,
        gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        _threads: usize,
    ) -> Result<(), Error> {
        match gpu {
            Some(gpu) => train_rank(job, own_queue::<Self>(gpu)?, world),
            None => refuse("gpu", ONLY_GPU),
        }
    }
}

fn own_queue<S>(gpu: &cuda::Gpu) -> Result<Gpu<S>, Error> {
    let queue = gpu.fork().map_err(|error| CommError::Device(error.into()))?;
    Ok(Gpu::new(queue))
}

/// Trains one rank on a device.
fn train_rank<D: Device>(
    job: Job<'_>,
    device: D,
    world: Box<dyn Communicator>,
) -> Result<(), Error> {
    let Job { program, flags, .. } = job;
    let mut rank = Rank::new(program, world, device, Reduction::default(), flags.seed)?;
    rank.replay_steps(flags.refuse_graphs());
    let ended = TrainingRun::new(job, &mut rank).and_then(TrainingRun::train);
    ended.map_err(|Failure { error, together }| {
        // If all ranks end alike, there is nobody to tell.
        if !together {
            rank.groups().world.abort(&error.to_string());
        }
        error
    })
}
