//! The entry point: a generated trainer's `main` calls [`main`] with its spec.

mod agreement;
mod final_outputs;
mod flags;
mod gpus;
pub mod lr_schedule;
mod metrics;
mod outputs;
mod passes;
mod processes;
mod progress;
mod run;
mod step_clock;

pub use flags::Flags;

use crate::comm::{CommError, Communicator, Solo, run_ranks};
use crate::device::{Device, Gpu, Host};
use crate::error::Error;
use crate::launch::interrupt::{INTERRUPTED, Interrupt};
use crate::launch::launcher::{self, Launcher};
use crate::rank::Rank;
use crate::spec::TrainerSpec;
use crate::stages::Stages;
use clap::{CommandFactory, FromArgMatches};
use flags::{options, threads};
pub use gpus::OnGpu;
use gpus::open_gpu;
use kernels::Cpu;
use kernels::cuda::{self, bf16};
use passes::check_passes;
use run::{Failure, TrainingRun};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Reads the command line, trains, and returns the exit code: 0 for success, 2 for an error in the
/// user's input, 130 if interrupted, 1 otherwise. Ranks are threads of this process, or one process
/// each if a launcher started several.
pub fn main<T: TrainedDtype<S>, S: Sync>(stages: &S) -> ExitCode {
    let read = Flags::command().bin_name(program_name()).try_get_matches();
    let flags = read.and_then(|read| Flags::from_arg_matches(&read)).unwrap_or_else(|error| {
        if error.use_stderr() && is_a_later_rank() {
            std::process::exit(error.exit_code());
        }
        error.exit()
    });
    match start::<T, S>(stages, &flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_said_elsewhere(&error) => ExitCode::from(exit_code(&error)),
        Err(error) => {
            // In one write: other processes write to the terminal too.
            let line = format!("error: {error}\n");
            let _closed = std::io::stderr().write_all(line.as_bytes());
            ExitCode::from(exit_code(&error))
        }
    }
}

/// The program's name, without the hash that `plan launch` gives it.
fn program_name() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&path).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_hash = |word: &str| word.len() == 16 && word.bytes().all(|b| b.is_ascii_hexdigit());
    match name.rsplit_once('-') {
        Some((name, hash)) if is_hash(hash) => name.to_owned(),
        _ => name,
    }
}

/// The exit code: 2 if the user must act, 130 if the user interrupted.
fn exit_code(error: &Error) -> u8 {
    match error {
        Error::File { .. } | Error::Flag { .. } | Error::World { .. } | Error::Passes { .. } => 2,
        Error::Unread { .. } => 2,
        Error::Interrupted { .. } | Error::NotStarted => INTERRUPTED,
        _ => 1,
    }
}

/// Whether another process of `plan launch` says it. What all ranks find alike is rank 0's to say:
/// they have the same flags. What one rank finds alone, rank 0 hears from it.
/// That rank 0 itself is lost, every rank says that notices: the others only hear that one gave up.
fn is_said_elsewhere(error: &Error) -> bool {
    launched_rank().is_some_and(|rank| is_said_by_another(error, rank))
}

/// Whether this is one of several processes of `plan launch`, and not rank 0.
fn is_a_later_rank() -> bool {
    launched_rank().is_some_and(|rank| rank > 0)
}

/// The rank of a process of `plan launch`.
fn launched_rank() -> Option<usize> {
    let variable = |name: &str| std::env::var(name).ok();
    let place = launcher::discover(variable).ok().flatten();
    let place = place.filter(|place| place.launcher == Launcher::Torchrun)?;
    launcher::ends_with_input(Some(&place), variable).then_some(place.rank)
}

fn is_said_by_another(error: &Error, rank: usize) -> bool {
    match error {
        Error::Interrupted { .. } | Error::NotFinite { .. } => rank > 0,
        Error::NothingToPredict { .. } => rank > 0,
        Error::Flag { .. } | Error::Passes { .. } => rank > 0,
        // The rank that cannot read says why.
        Error::Unread { .. } => true,
        Error::Comm(CommError::Lost { peer, .. }) => rank > 0 && peer.rank > 0,
        // The rank that gave up has said why, unless it is silent itself.
        Error::Comm(CommError::Aborted { peer, .. }) => rank > 0 || peer.rank == 0,
        _ => false,
    }
}

fn start<T: TrainedDtype<S>, S: Sync>(stages: &S, flags: &Flags) -> Result<(), Error> {
    flags.check()?;
    let patience = Duration::from_secs(flags.time_limit_s);
    let interrupt = Interrupt::listen(patience)?;
    let place = launcher::discover(|name| std::env::var(name).ok())?;
    if launcher::ends_with_input(place.as_ref(), |name| std::env::var(name).ok()) {
        interrupt.ask_at_end_of(std::io::stdin(), patience);
    }
    match place.filter(|place| place.world > 1) {
        None if flags.rendezvous.is_some() => Err(Error::Flag {
            flag: "rendezvous",
            problem: "this is the only process, which trains all ranks as threads; valid: without \
                      it, or with RANK and WORLD_SIZE of several processes"
                .to_owned(),
        }),
        None => train::<T, S>(stages, flags, &interrupt),
        Some(place) => {
            let (spec, interrupt) = (&T::spec(stages), &interrupt);
            check_passes(spec)?;
            let job = Job { stages, spec, flags, interrupt, ranks_in_process: 1 };
            processes::train::<T, S>(job, &place)
        }
    }
}

/// Trains with all ranks as threads of this process.
///
/// # Errors
/// The error of the rank that made the others end.
pub fn train<T: TrainedDtype<S>, S: Sync>(
    stages: &S,
    flags: &Flags,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    flags.check()?;
    let spec = &T::spec(stages);
    check_passes(spec)?;
    let size = spec.world_size();
    let (threads, gpu) = (threads(flags), open_gpu(spec, flags, T::ON_GPU, None, size)?);
    let job = Job { stages, spec, flags, interrupt, ranks_in_process: size };
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

/// Trains the one rank of a trainer on a GPU that is open already.
///
/// # Errors
/// The rank's error.
pub fn train_alone<T: TrainedDtype<S>, S: Sync>(
    stages: &S,
    flags: &Flags,
    interrupt: &Interrupt,
    gpu: &cuda::Gpu,
) -> Result<(), Error> {
    let job = Job { stages, spec: &T::spec(stages), flags, interrupt, ranks_in_process: 1 };
    T::train(job, Some(gpu), Box::new(Solo::new()), 1)
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

/// What a run is given: layers of type `S`, and everything else.
pub struct Job<'a, S> {
    stages: &'a S,
    spec: &'a TrainerSpec,
    flags: &'a Flags,
    interrupt: &'a Interrupt,
    /// Ranks that are threads of this process.
    ranks_in_process: usize,
}

/// A run, whatever its layers.
#[derive(Clone, Copy)]
struct Run<'a> {
    spec: &'a TrainerSpec,
    flags: &'a Flags,
    interrupt: &'a Interrupt,
    /// Ranks that are threads of this process.
    ranks_in_process: usize,
}

impl Run<'_> {
    /// Whether parts of a step are measured. On a GPU the host waits for neither kernels nor
    /// transfers, so that its clock does not see them.
    fn measures_parts(&self) -> bool {
        self.flags.gpu.is_none()
    }
}

impl<S> Clone for Job<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Job<'_, S> {}

/// Element types of plans, for layers of type `S`.
pub trait TrainedDtype<S> {
    /// Whether it trains on a GPU.
    const ON_GPU: OnGpu;

    /// The trainer apart from its layers.
    fn spec(stages: &S) -> TrainerSpec;

    /// Trains one rank, on a GPU or on the CPU, over any communicator.
    ///
    /// # Errors
    /// This rank's error, which it tells the others, or one that another rank caused.
    fn train(
        job: Job<'_, S>,
        gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        threads: usize,
    ) -> Result<(), Error>;
}

impl<S: Stages<Host<Self>>> TrainedDtype<S> for f64 {
    const ON_GPU: OnGpu = OnGpu::No;

    fn spec(stages: &S) -> TrainerSpec {
        stages.spec()
    }

    fn train(
        job: Job<'_, S>,
        _gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        threads: usize,
    ) -> Result<(), Error> {
        train_rank(job, Host::<Self>::new(Cpu::new(threads)?), world)
    }
}

impl<S: Stages<Host<Self>> + Stages<Gpu<Self>>> TrainedDtype<S> for f32 {
    const ON_GPU: OnGpu = OnGpu::Yes;

    fn spec(stages: &S) -> TrainerSpec {
        Stages::<Host<Self>>::spec(stages)
    }

    fn train(
        job: Job<'_, S>,
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

impl<S: Stages<Host<Self, f32>> + Stages<Gpu<Self>>> TrainedDtype<S> for bf16 {
    const ON_GPU: OnGpu = OnGpu::WithTensorCores;

    fn spec(stages: &S) -> TrainerSpec {
        Stages::<Gpu<Self>>::spec(stages)
    }

    fn train(
        job: Job<'_, S>,
        gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        threads: usize,
    ) -> Result<(), Error> {
        match gpu {
            Some(gpu) => train_rank(job, own_queue::<Self>(gpu)?, world),
            None => {
                if world.rank() == 0 {
                    eprintln!("bf16 on the CPU is as exact as on a GPU, but slow; --gpu uses one");
                }
                train_rank(job, Host::<Self, f32>::new(Cpu::new(threads)?), world)
            }
        }
    }
}

fn own_queue<S>(gpu: &cuda::Gpu) -> Result<Gpu<S>, Error> {
    let queue = gpu.fork().map_err(|error| CommError::Device(error.into()))?;
    Ok(Gpu::new(queue))
}

/// Trains one rank on a device.
fn train_rank<D: Device, S: Stages<D>>(
    job: Job<'_, S>,
    device: D,
    world: Box<dyn Communicator>,
) -> Result<(), Error> {
    let Job { stages, spec, flags, interrupt, ranks_in_process } = job;
    let mut rank = Rank::new(stages, world, device, spec.reduction, flags.seed)?;
    rank.replay_steps(flags.cuda_graphs, flags.refuse_graphs());
    let run = Run { spec, flags, interrupt, ranks_in_process };
    let ended = TrainingRun::new(run, &mut rank).and_then(TrainingRun::train);
    ended.map_err(|Failure { error, together }| {
        // If all ranks end alike, there is nobody to tell.
        if !together {
            rank.groups().world.abort(&error.to_string());
        }
        error
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Peer;

    #[test]
    fn of_several_processes_one_says_what_ends_all() {
        let silent = |error: &Error| [0, 1, 2, 3].map(|rank| is_said_by_another(error, rank));
        let peer = |rank| Peer { rank, process: None };
        let gave_up =
            |rank| Error::Comm(CommError::Aborted { peer: peer(rank), reason: String::new() });
        assert_eq!(silent(&gave_up(2)), [false, true, true, true]);
        assert_eq!(silent(&gave_up(0)), [true; 4]);
        let lost = |rank| {
            let (group, call) = (String::new(), String::new());
            Error::Comm(CommError::Lost { peer: peer(rank), by: 1, group, call })
        };
        assert_eq!(silent(&lost(2)), [false, true, true, true]);
        assert_eq!(silent(&lost(0)), [false; 4]);
        assert_eq!(silent(&Error::Interrupted { steps: 1 }), [false, true, true, true]);
        assert_eq!(silent(&Error::NotStarted), [false; 4]);
        let missing = Error::Flag { flag: "data", problem: "no.bin: not found".to_owned() };
        assert_eq!(silent(&missing), [false, true, true, true]);
        // The data of a step that one rank alone cannot read: it says why, the others nothing.
        let ends = Error::file("tokens.bin".as_ref(), "it ends early");
        assert_eq!(silent(&ends), [false; 4]);
        let unread = Error::Unread { step: 3, rank: 2 };
        assert_eq!((silent(&unread), exit_code(&unread)), ([true; 4], exit_code(&ends)));
    }
}
