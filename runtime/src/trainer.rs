//! The front door: a generated trainer's `main` calls [`main`] with its program.

mod agreement;
mod gpus;
mod outputs;
mod processes;

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::comm::{CommError, Communicator, Op, Options, Request, Solo, Traffic, run_ranks, since};
use crate::data::{self, Samples};
use crate::device::{Device, Gpu, Host, Space};
use crate::error::Error;
use crate::interrupt::{INTERRUPTED, Interrupt};
use crate::launched;
use crate::program::Program;
use crate::rank::{Gradients, Optimizer, Rank};
use crate::reduce::Reduction;
use crate::report::{DeviceMemory, ProcessMemory, RankReport};
use crate::resident::Resident;
use crate::scalar::Scalar;
use crate::schedule::{LrSchedule, Shape};
use crate::trace::Trace;
use clap::Parser;
use gpus::{ONLY_GPU, open_gpu};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use kernels::Cpu;
use kernels::cuda::{self, bf16};
use outputs::{NewFile, Outputs};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Trains one model, split as it was planned.
#[derive(Clone, Debug, Parser)]
pub struct Flags {
    /// Hugging Face checkpoint to begin with: a directory or one .safetensors file. Without it,
    /// weights are drawn from the seed.
    #[arg(long, value_name = "DIR")]
    pub init_from: Option<PathBuf>,
    /// What to train on: Megatron's .bin (with .idx beside it), or a .safetensors file with `tokens`
    /// [steps, batch, seq_len + 1], taken in order.
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Steps to train.
    #[arg(long)]
    pub steps: u64,
    /// Highest learning rate.
    #[arg(long, default_value_t = 1e-3)]
    pub lr: f64,
    /// AdamW's decays of the moments.
    #[arg(long, value_name = "BETA1,BETA2", value_parser = pair, default_value = "0.9,0.95")]
    pub betas: (f64, f64),
    /// AdamW's epsilon.
    #[arg(long, default_value_t = 1e-8)]
    pub eps: f64,
    /// Decay of matrices; vectors do not decay.
    #[arg(long, default_value_t = 0.1)]
    pub weight_decay: f64,
    /// Largest gradient norm; 0 does not clip.
    #[arg(long, default_value_t = 1.0)]
    pub clip: f64,
    /// Shape of the learning rate behind its warm-up.
    #[arg(long, value_enum, default_value_t = Shape::Constant)]
    pub lr_schedule: Shape,
    /// Steps over which the learning rate rises.
    #[arg(long, default_value_t = 0)]
    pub lr_warmup: u64,
    /// Of initial weights, dropout and the order of data.
    #[arg(long, default_value_t = 1234)]
    pub seed: u64,
    /// Where to add one JSON object a step; lines that are there stay. One run at a time.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Where to write the first step's gradients, whole, before clipping.
    #[arg(long, value_name = "FILE")]
    pub dump_gradients: Option<PathBuf>,
    /// Where to write the final weights, whole. Where a run fails, those of the last step that all
    /// ranks completed, if they can still be put together.
    #[arg(long, value_name = "FILE")]
    pub dump_weights: Option<PathBuf>,
    /// Where to write one JSON object a rank: what it held, did and sent.
    #[arg(long, value_name = "FILE")]
    pub rank_report: Option<PathBuf>,
    /// Where to write a trace that opens in Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Threads of all ranks of a process together, at most 16 for each of the machine's cores; as
    /// many as cores where not said.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Train on an NVIDIA GPU, of this number where there are several: ranks of one process share it; processes that a
    /// launcher starts have one each, by their place on the machine.
    #[arg(long, value_name = "NUMBER", num_args = 0..=1)]
    pub gpu: Option<Option<usize>>,
    /// Where processes that a launcher starts find each other: an address at which rank 0 listens, or a file that all can
    /// read. Where not said, MASTER_ADDR and MASTER_PORT, or MPI. Set MESHWRIGHT_TOKEN to the same secret for all ranks,
    /// for example with `openssl rand -hex 32`: ranks then prove to each other that they have it. Without it whoever
    /// reaches the address before all have met can take a rank's place; a file holds a secret of its own. Nothing is
    /// encrypted: use a network whose machines you trust.
    #[arg(long, value_name = "HOST:PORT|FILE")]
    pub rendezvous: Option<String>,
    /// On a GPU, launch every step kernel by kernel, also where it could be replayed as a CUDA graph.
    #[arg(long)]
    pub no_cuda_graphs: bool,
    /// Seconds without news of a rank before the others give up; also how long the first Ctrl-C or
    /// SIGTERM waits for the end of a step.
    #[arg(long, default_value_t = 600)]
    pub time_limit_s: u64,
}

/// One line of the metrics.
#[derive(Clone, Debug, Serialize)]
struct Metrics {
    step: u64,
    loss: f64,
    aux_loss: f64,
    total_loss: f64,
    grad_norm: f64,
    lr: f64,
    tokens_per_s: f64,
    model_flops_per_s: f64,
    /// The most that tensors of a rank came to so far: weights, gradients, moments, and activations
    /// kept for backward passes. What a plan counts, but for what it reserves beside.
    peak_tensor_bytes: u64,
    /// What the plan gives a rank; 0 where it does not say.
    planned_memory_bytes: u64,
    /// Resident set of the process that has most, behind this step: everything it holds, for all of
    /// its ranks.
    resident_bytes: u64,
    /// The most that a process's resident set has been.
    peak_resident_bytes: u64,
    /// Ranks that are threads of rank 0's process, and share its memory.
    ranks_in_process: usize,
}

/// Reads the command line, trains, and says with the exit code how it went: 0 done, 2 the user's
/// input, 130 interrupted, 1 anything else. Ranks are threads of this process, or, where a launcher
/// started several, the launcher's processes.
pub fn main<T: Trained>(program: &Program) -> ExitCode {
    let flags = Flags::parse();
    match start::<T>(program, &flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In one piece: other processes write there too.
            let line = format!("error: {error}\n");
            let _closed = std::io::stderr().write_all(line.as_bytes());
            ExitCode::from(exit_code(&error))
        }
    }
}

/// 2 where the user must act, 130 where they did.
fn exit_code(error: &Error) -> u8 {
    match error {
        Error::File { .. } | Error::Flag { .. } | Error::World { .. } => 2,
        Error::Interrupted { .. } | Error::NotStarted => INTERRUPTED,
        _ => 1,
    }
}

fn start<T: Trained>(program: &Program, flags: &Flags) -> Result<(), Error> {
    flags.check()?;
    let patience = Duration::from_secs(flags.time_limit_s);
    let interrupt = Interrupt::listen(patience)?;
    let place = launched::discover(|name| std::env::var(name).ok())?;
    if launched::ends_with_input(place.as_ref(), |name| std::env::var(name).ok()) {
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

fn threads(flags: &Flags) -> usize {
    flags.threads.unwrap_or_else(cores)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The most threads that a user may ask for: more than a few on a core only take turns.
fn most_threads() -> usize {
    16 * cores()
}

fn options(flags: &Flags) -> Options {
    Options { time_limit: Duration::from_secs(flags.time_limit_s), ..Options::default() }
}

/// Trains with all ranks as threads of this process.
///
/// # Errors
/// Of the ranks' errors the one that made the others end.
pub fn train<T: Trained>(
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
        // Ranks that come first get what is left over.
        let share = threads / size + usize::from(rank < threads % size);
        T::train(job, gpu.as_ref(), world, share.max(1))
    };
    let results = match size {
        1 => vec![run(Box::new(Solo::new()))],
        _ => run_ranks(size, options(flags), run),
    };
    results.into_iter().filter_map(Result::err).min_by_key(consequence).map_or(Ok(()), Err)
}

/// How far an error is from the cause: those that only tell of another rank's come last.
fn consequence(error: &Error) -> u8 {
    match error {
        Error::Comm(CommError::Lost { .. } | CommError::Aborted { .. }) => 2,
        Error::Comm(CommError::Device(_)) => 0,
        Error::Comm(_) | Error::Unread { .. } => 1,
        _ => 0,
    }
}

/// What a run is told.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    program: &'a Program,
    flags: &'a Flags,
    interrupt: &'a Interrupt,
    /// Ranks that are threads of this process.
    ranks_in_process: usize,
}

/// The element types of plans.
pub trait Trained {
    /// Whether a GPU trains in it, and whether only a GPU does.
    const ON_GPU: (bool, bool);

    /// One rank's run, on a GPU or without, whatever connects it with the others.
    ///
    /// # Errors
    /// Its own, or what the others did to it; the others are told.
    fn train(
        job: Job<'_>,
        gpu: Option<&cuda::Gpu>,
        world: Box<dyn Communicator>,
        threads: usize,
    ) -> Result<(), Error>;
}

impl Trained for f64 {
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

impl Trained for f32 {
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

impl Trained for bf16 {
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

/// One rank's run on a device.
fn train_rank<D: Device>(
    job: Job<'_>,
    device: D,
    world: Box<dyn Communicator>,
) -> Result<(), Error> {
    let Job { program, flags, .. } = job;
    let mut rank = Rank::new(program, world, device, Reduction::default(), flags.seed)?;
    rank.replay_steps(flags.refuse_graphs());
    let ended = Run::new(job, &mut rank).and_then(Run::train);
    ended.map_err(|Failure { error, together }| {
        // Where all ranks end so, some do later.
        if !together {
            rank.groups().world.abort(&error.to_string());
        }
        error
    })
}

impl Flags {
    /// Refuses values that cannot be.
    fn check(&self) -> Result<(), Error> {
        let in_unit = |x: f64| (0.0..1.0).contains(&x);
        let threads = 1..=most_threads();
        let valid_threads =
            format!("valid: 1 to {}, 16 for each of the machine's cores", threads.end());
        let from_zero = |x: f64| x.is_finite() && x >= 0.0;
        let checks = [
            ("steps", self.steps > 0, "valid: 1 or more"),
            ("lr", from_zero(self.lr), "valid: 0 or more, for example 1e-3"),
            (
                "betas",
                in_unit(self.betas.0) && in_unit(self.betas.1),
                "valid: each from 0 up to, not including, 1",
            ),
            ("eps", self.eps.is_finite() && self.eps > 0.0, "valid: above 0, for example 1e-8"),
            ("weight-decay", from_zero(self.weight_decay), "valid: 0 or more, for example 0.1"),
            ("clip", from_zero(self.clip), "valid: above 0, or 0 for none"),
            ("threads", self.threads.is_none_or(|n| threads.contains(&n)), &valid_threads),
            ("time-limit-s", self.time_limit_s > 0, "valid: 1 or more"),
        ];
        let wrong = checks.into_iter().find(|(_, holds, _)| !holds);
        wrong.map_or(Ok(()), |(flag, _, valid)| refuse(flag, valid))
    }

    /// Why steps are not to be replayed.
    fn refuse_graphs(&self) -> Option<&'static str> {
        let traced = self.trace.is_some().then_some("--trace shows when each pass is launched");
        self.no_cuda_graphs.then_some("--no-cuda-graphs").or(traced)
    }

    fn optimizer(&self) -> Optimizer {
        Optimizer {
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            clip: (self.clip > 0.0).then_some(self.clip),
        }
    }
}

/// `0.9,0.95`
fn pair(text: &str) -> Result<(f64, f64), String> {
    let numbers = text.split_once(',').map(|(a, b)| (a.trim().parse(), b.trim().parse()));
    match numbers {
        Some((Ok(first), Ok(second))) => Ok((first, second)),
        _ => Err("valid: two numbers, for example 0.9,0.95".to_owned()),
    }
}

fn refuse(flag: &'static str, problem: &str) -> Result<(), Error> {
    Err(Error::Flag { flag, problem: problem.to_owned() })
}

/// A rank on its way through the steps.
struct Run<'a, 'p, D: Space> {
    job: Job<'a>,
    rank: &'a mut Rank<'p, D>,
    samples: Box<dyn Samples>,
    lr: LrSchedule,
    outputs: Outputs,
    bar: ProgressBar,
    trace: Option<Trace>,
    /// What was sent before the first step.
    before: Traffic,
    /// The last step's result; `None` before the first.
    last: Option<Gradients>,
    /// Of the last step, where its norm is not awaited.
    told: Option<Told>,
    peak_bytes: usize,
    /// What the last step told of memory.
    memory: MemoryTold,
}

/// The most memory so far: of a rank in tensors, and of a process in all.
#[derive(Clone, Copy, Debug, Default)]
struct MemoryTold {
    peak_tensor_bytes: u64,
    peak_resident_bytes: u64,
}

/// Why steps ended before their time.
struct Failure {
    error: Error,
    /// All ranks ended for it behind the same step, and can still call each other.
    together: bool,
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { error: error.into(), together: false }
    }
}

/// How the steps went on.
enum Goes {
    On,
    /// A rank was asked to end.
    Ends,
}

/// What a step tells of itself, beside what its gradients came to.
struct Told {
    step: u64,
    lr: f64,
    seconds: f64,
    /// The largest of all ranks' numbers, in the order of [`Run::start_telling`].
    most: Request<i64>,
}

impl<'a, 'p, D: Device> Run<'a, 'p, D> {
    /// Opens what the flags name, and fills the weights.
    fn new(job: Job<'a>, rank: &'a mut Rank<'p, D>) -> Result<Self, Failure> {
        let Job { program, flags, .. } = job;
        let number = rank.groups().world.rank();
        let outputs = match number {
            0 => Outputs::open(flags, rank.model_bytes())?,
            _ => Outputs::default(),
        };
        job.interrupt.removes(outputs.unfinished());
        let samples = data::open(&flags.data, program.seq_len(), flags.seed)?;
        enough_samples(&*samples, flags, program)?;
        match &flags.init_from {
            Some(path) => rank.load(&Checkpoint::open(path)?)?,
            None => rank.initialise(),
        }
        let (peak, shape) = (flags.lr, flags.lr_schedule);
        let lr = LrSchedule { peak, shape, warmup: flags.lr_warmup, steps: flags.steps };
        rank.groups().world.barrier()?;
        let trace = flags.trace.is_some().then(|| Trace::new(Instant::now(), number));
        let before = rank.groups().world.stats().traffic();
        Ok(Self {
            job,
            rank,
            samples,
            lr,
            outputs,
            bar: progress_bar(number == 0, flags.steps),
            trace,
            before,
            last: None,
            told: None,
            peak_bytes: 0,
            memory: MemoryTold::default(),
        })
    }

    fn train(mut self) -> Result<(), Failure> {
        let interrupted = self.steps().inspect_err(|failure| self.save_weights(failure))?;
        self.bar.finish();
        self.say_memory();
        let traffic = since(&self.before, &self.rank.groups().world.stats().traffic());
        // All of them, whatever becomes of one: other ranks take part in each.
        let written = [self.write_weights(), self.write_rank_report(&traffic), self.write_trace()];
        written.into_iter().collect::<Result<(), Error>>()?;
        match interrupted {
            Some(error) => Err(Failure { error, together: true }),
            None => Ok(()),
        }
    }

    /// Runs the steps; says whether somebody ended them early.
    fn steps(&mut self) -> Result<Option<Error>, Failure> {
        let mut interrupted = None;
        for step in 0..self.job.flags.steps {
            let goes = match self.job.program.post_validation {
                true => self.step_ahead(step)?,
                false => self.step(step)?,
            };
            self.job.interrupt.stepped();
            if matches!(goes, Goes::Ends) {
                interrupted = Some(Error::Interrupted { steps: step + 1 });
                break;
            }
        }
        self.job.interrupt.finishing();
        if let Some(result) = self.rank.settle()? {
            self.settled(result)?;
        }
        Ok(interrupted)
    }

    /// Runs a step.
    fn step(&mut self, step: u64) -> Result<Goes, Failure> {
        let begin = Instant::now();
        let result = self.rank.gradients(&*self.samples, step, None)?;
        finite(step, "loss", result.loss)?;
        finite(step, "gradient norm", result.norm)?;
        self.dump_gradients(step)?;
        let (lr, updating) = (self.lr.at(step), Instant::now());
        self.rank.update(&self.job.flags.optimizer(), lr, result.norm);
        self.peak_bytes = self.peak_bytes.max(result.outcome.peak_bytes);
        if let Some(trace) = &mut self.trace {
            trace.passes(&result.outcome.ran);
            trace.reductions(&result.reductions);
            trace.phase("update", updating, Instant::now());
        }
        let next = self.read_ahead(step + 1);
        let seconds = begin.elapsed().as_secs_f64();
        let told = self.start_telling(step, lr, seconds, next.is_err())?;
        let goes = self.tell(told, &result, next)?;
        self.last = Some(result);
        Ok(goes)
    }

    /// Reads what the next step trains on: all ranks learn in time where one cannot.
    fn read_ahead(&mut self, step: u64) -> Result<(), Error> {
        if step == self.job.flags.steps {
            return Ok(());
        }
        self.rank.read_ahead(&*self.samples, step)
    }

    /// The same without waiting for the norm: tells of the step before, and says whether any rank was asked to
    /// end by then.
    fn step_ahead(&mut self, step: u64) -> Result<Goes, Failure> {
        let (begin, lr) = (Instant::now(), self.lr.at(step));
        let optimizer = self.job.flags.optimizer();
        let before = self.rank.step_ahead(&*self.samples, step, &optimizer, lr)?;
        let goes = before.map_or(Ok(Goes::On), |before| self.settled(before))?;
        self.dump_gradients(step)?;
        if let Some(outcome) = self.rank.pending_outcome() {
            self.peak_bytes = self.peak_bytes.max(outcome.peak_bytes);
        }
        let seconds = begin.elapsed().as_secs_f64();
        self.told = Some(self.start_telling(step, lr, seconds, false)?);
        Ok(goes)
    }

    /// Takes up what a step came to whose norm was not awaited.
    fn settled(&mut self, result: Gradients) -> Result<Goes, Failure> {
        let Some(told) = self.told.take() else { return Ok(Goes::On) };
        finite(told.step, "loss", result.loss)?;
        finite(told.step, "gradient norm", result.norm)?;
        if let Some(trace) = &mut self.trace {
            trace.passes(&result.outcome.ran);
            trace.reductions(&result.reductions);
        }
        let goes = self.tell(told, &result, Ok(()))?;
        self.last = Some(result);
        Ok(goes)
    }

    /// Writes the first step's gradients, where they are asked for.
    fn dump_gradients(&mut self, step: u64) -> Result<(), Error> {
        if step > 0 || self.job.flags.dump_gradients.is_none() {
            return Ok(());
        }
        let gradients = self.rank.whole_gradients()?;
        write_tensors(self.outputs.gradients.take(), gradients)
    }

    fn start_telling(&self, step: u64, lr: f64, seconds: f64, unread: bool) -> Result<Told, Error> {
        let (world, asked) = (&self.rank.groups().world, self.job.interrupt.is_asked());
        let Resident { now_bytes, peak_bytes } = Resident::read();
        let tensor_bytes = self.rank.state_bytes() + self.peak_bytes as u64;
        // A rank that cannot read is named by a number above 0.
        let unread = if unread { world.rank() as u64 + 1 } else { 0 };
        let most = [tensor_bytes, now_bytes, peak_bytes, asked.into(), unread];
        let most = most.map(|number| number as i64).to_vec();
        Ok(Told { step, lr, seconds, most: world.start_all_reduce(most, Op::Max)? })
    }

    /// Writes a step's metrics. All ranks agree here on whether they were asked to end, and on
    /// whether the next step can be read, which `next` says of this rank.
    fn tell(
        &mut self,
        told: Told,
        result: &Gradients,
        next: Result<(), Error>,
    ) -> Result<Goes, Failure> {
        let Told { step, lr, seconds, most } = told;
        let most = most.wait()?;
        let [peak_tensor_bytes, resident_bytes, peak_resident_bytes, asked, unread] =
            [0, 1, 2, 3, 4].map(|n| most.get(n).map_or(0, |&most| most as u64));
        self.memory = MemoryTold { peak_tensor_bytes, peak_resident_bytes };
        let program = self.job.program;
        let tokens = (program.global_batch() * program.seq_len()) as f64;
        let forward_flops = models::layer::forward_flops(&program.model, tokens);
        let flops = models::formulas::flops::training_flops(forward_flops);
        let metrics = Metrics {
            step,
            loss: result.loss,
            aux_loss: 0.0,
            total_loss: result.loss,
            grad_norm: result.norm,
            lr,
            tokens_per_s: tokens / seconds,
            model_flops_per_s: flops / seconds,
            peak_tensor_bytes,
            planned_memory_bytes: program.planned_memory_bytes,
            resident_bytes,
            peak_resident_bytes,
            ranks_in_process: self.job.ranks_in_process,
        };
        self.bar.set_message(format!("loss {:.4}", metrics.loss));
        self.bar.inc(1);
        if let Some(output) = &mut self.outputs.metrics {
            output.line(&serde_json::to_string(&metrics).unwrap_or_default());
        }
        if let Some(rank) = unread.checked_sub(1) {
            let elsewhere = Error::Unread { step: step + 1, rank };
            return Err(Failure { error: next.err().unwrap_or(elsewhere), together: true });
        }
        Ok(if asked > 0 { Goes::Ends } else { Goes::On })
    }

    /// Says what memory came to, beside what was planned.
    fn say_memory(&self) {
        let MemoryTold { peak_tensor_bytes, peak_resident_bytes, .. } = self.memory;
        if self.rank.groups().world.rank() > 0 || peak_resident_bytes == 0 {
            return;
        }
        let planned = match self.job.program.planned_memory_bytes {
            0 => String::new(),
            bytes => format!(" of {} planned", HumanBytes(bytes)),
        };
        let ranks = match self.job.ranks_in_process {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        let (tensors, host) = (HumanBytes(peak_tensor_bytes), HumanBytes(peak_resident_bytes));
        eprintln!(
            "memory: at most {tensors}{planned} in tensors of a rank; at most {host} resident on the \
             host in a process of {ranks}"
        );
    }

    /// Writes the weights, where they are asked for.
    fn write_weights(&mut self) -> Result<(), Error> {
        if self.job.flags.dump_weights.is_none() {
            return Ok(());
        }
        let weights = self.rank.whole_weights()?;
        write_tensors(self.outputs.weights.take(), weights)
    }

    /// Writes the weights of a run that a failure ended, where they can still be put together; rank
    /// 0 says what became of them.
    fn save_weights(&mut self, failure: &Failure) {
        let Some(path) = &self.job.flags.dump_weights else { return };
        let (steps, ranks) = (self.rank.completed_steps(), self.rank.ranks_of_model());
        let device_failed = matches!(failure.error, Error::Comm(CommError::Device(_)));
        let why_not = if steps == 0 {
            Some("no step was completed".to_owned())
        } else if device_failed {
            Some("the device that holds the weights failed".to_owned())
        } else if !failure.together && ranks > 1 {
            let lost = "ranks that ended in the middle of a step, or are gone";
            Some(format!("the weights of step {} are split over {ranks} {lost}", steps - 1))
        } else {
            self.write_weights().err().map(|error| error.to_string())
        };
        if self.rank.groups().world.rank() > 0 {
            return;
        }
        let path = path.display();
        match why_not {
            None => {
                eprintln!("--dump-weights: the weights behind step {} are in {path}", steps - 1);
            }
            Some(why_not) => eprintln!("--dump-weights: {path} is not written: {why_not}"),
        }
    }

    fn write_rank_report(&mut self, traffic: &Traffic) -> Result<(), Error> {
        let (Some(_), Some(last)) = (&self.job.flags.rank_report, &self.last) else {
            return Ok(());
        };
        let (groups, inventory) = (self.rank.groups(), self.rank.inventory());
        let mut outcome = last.outcome.clone();
        outcome.peak_bytes = self.peak_bytes;
        let bytes = [size_of::<D::Stored>(), size_of::<D::Wide>()];
        let Resident { now_bytes, peak_bytes } = Resident::read();
        let process_memory = ProcessMemory {
            resident_bytes: now_bytes,
            peak_resident_bytes: peak_bytes,
            ranks: self.job.ranks_in_process,
        };
        let steps = self.rank.completed_steps();
        let mut report =
            RankReport::new(groups, inventory, bytes, &outcome, steps, process_memory, traffic);
        let planned_bytes = self.job.program.planned_memory_bytes;
        report.device_memory =
            self.rank.memory_use().map(|seen| DeviceMemory { planned_bytes, seen });
        report.cuda_graphs = self.job.flags.gpu.map(|_| self.rank.replays());
        report.chosen_kernels = self.rank.chosen_kernels();
        let line = serde_json::to_string(&report).unwrap_or_default();
        let lines = gather_text(&*groups.world, &line)?;
        write_lines(self.outputs.rank_report.take(), lines)
    }

    fn write_trace(&mut self) -> Result<(), Error> {
        let Some(trace) = &self.trace else { return Ok(()) };
        let text = trace.lines().join(",\n");
        let ranks = gather_text(&*self.rank.groups().world, &text)?;
        let events = |ranks: Vec<String>| {
            let events: Vec<String> = ranks.into_iter().filter(|text| !text.is_empty()).collect();
            vec![format!("{{\"traceEvents\":[\n{}\n]}}", events.join(",\n"))]
        };
        write_lines(self.outputs.trace.take(), ranks.map(events))
    }
}

/// Rank 0 gets everybody's text.
fn gather_text(world: &dyn Communicator, text: &str) -> Result<Option<Vec<String>>, CommError> {
    const TAG: u64 = (1 << 61) + 1;
    let lengths = world.gather(&[text.len() as i64], 0)?;
    if world.rank() > 0 {
        world.send(text.as_bytes(), 0, TAG)?;
        return Ok(None);
    }
    let mut all = vec![text.to_owned()];
    for (from, &length) in lengths.iter().enumerate().skip(1) {
        let bytes: Vec<u8> = world.recv(length as usize, from, TAG)?;
        all.push(String::from_utf8_lossy(&bytes).into_owned());
    }
    Ok(Some(all))
}

/// On rank 0, which has both.
fn write_lines(file: Option<NewFile>, lines: Option<Vec<String>>) -> Result<(), Error> {
    let (Some(file), Some(lines)) = (file, lines) else { return Ok(()) };
    file.write(|to| lines.iter().try_for_each(|line| writeln!(to, "{line}")))
}

/// On rank 0, which has both.
fn write_tensors<T: Scalar>(
    file: Option<NewFile>,
    tensors: Option<Tensors<T>>,
) -> Result<(), Error> {
    let (Some(file), Some(tensors)) = (file, tensors) else { return Ok(()) };
    file.write(|to| checkpoint::write(to, &tensors))
}

/// All ranks have the same value.
fn finite(step: u64, what: &'static str, value: f64) -> Result<(), Failure> {
    let failure = || Failure { error: Error::NotFinite { step, what, value }, together: true };
    value.is_finite().then_some(()).ok_or_else(failure)
}

fn enough_samples(samples: &dyn Samples, flags: &Flags, program: &Program) -> Result<(), Error> {
    let batch = program.global_batch() as u64;
    let most = samples.len() / batch;
    if samples.repeats() || flags.steps <= most {
        return Ok(());
    }
    let problem = format!(
        "{} steps of {batch} samples; the data has {} samples: valid: up to {most}",
        flags.steps,
        samples.len()
    );
    Err(Error::Flag { flag: "steps", problem })
}

/// A bar on rank 0 of a run that somebody watches.
fn progress_bar(first: bool, steps: u64) -> ProgressBar {
    if !first || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps  {msg}  {eta} left");
    ProgressBar::new(steps).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
