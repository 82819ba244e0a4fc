//! The front door: a generated trainer's `main` calls [`main`] with its program.

mod agreement;
mod gpus;
mod processes;

use crate::checkpoint::{self, Checkpoint};
use crate::comm::{CommError, Communicator, Op, Options, Request, Solo, Traffic, run_ranks, since};
use crate::data::{self, Samples};
use crate::device::{Device, Gpu, Host, Space};
use crate::error::Error;
use crate::interrupt::{INTERRUPTED, Interrupt};
use crate::launched;
use crate::program::Program;
use crate::rank::{Gradients, Optimizer, Rank};
use crate::reduce::Reduction;
use crate::report::{DeviceMemory, RankReport};
use crate::schedule::{LrSchedule, Shape};
use crate::trace::Trace;
use clap::Parser;
use gpus::{ONLY_GPU, open_gpu};
use indicatif::{ProgressBar, ProgressStyle};
use kernels::Cpu;
use kernels::cuda::{self, bf16};
use serde::Serialize;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
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
    /// Where to write one JSON object a step.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Where to write the first step's gradients, whole, before clipping.
    #[arg(long, value_name = "FILE")]
    pub dump_gradients: Option<PathBuf>,
    /// Where to write the final weights, whole.
    #[arg(long, value_name = "FILE")]
    pub dump_weights: Option<PathBuf>,
    /// Where to write one JSON object a rank: what it held, did and sent.
    #[arg(long, value_name = "FILE")]
    pub rank_report: Option<PathBuf>,
    /// Where to write a trace that opens in Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Threads of all ranks together; the machine's cores where not said.
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
    /// Seconds without news of a rank before the others give up.
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
    peak_memory_bytes: u64,
    planned_memory_bytes: u64,
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
    let interrupt = Interrupt::listen()?;
    let place = launched::discover(|name| std::env::var(name).ok())?;
    if launched::ends_with_input(place.as_ref(), |name| std::env::var(name).ok()) {
        interrupt.ask_at_end_of(std::io::stdin());
    }
    match place.filter(|place| place.world > 1) {
        None => train::<T>(program, flags, &interrupt),
        Some(place) => processes::train::<T>(Job { program, flags, interrupt: &interrupt }, &place),
    }
}

fn threads(flags: &Flags) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    flags.threads.unwrap_or_else(cores)
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
    let job = Job { program, flags, interrupt };
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
        Error::Comm(_) => 1,
        _ => 0,
    }
}

/// What a run is told.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    program: &'a Program,
    flags: &'a Flags,
    interrupt: &'a Interrupt,
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
    let Job { program, flags, interrupt } = job;
    let mut rank = Rank::new(program, world, device, Reduction::default(), flags.seed)?;
    rank.replay_steps(flags.refuse_graphs());
    let ended = Run::new(program, flags, interrupt, &mut rank).and_then(Run::train);
    match &ended {
        // All ranks end so, some of them later.
        Ok(()) | Err(Error::Interrupted { .. }) => {}
        Err(error) => rank.groups().world.abort(&error.to_string()),
    }
    ended
}

impl Flags {
    /// Refuses values that cannot be.
    fn check(&self) -> Result<(), Error> {
        let in_unit = |x: f64| (0.0..1.0).contains(&x);
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
            ("threads", self.threads != Some(0), "valid: 1 or more"),
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
    program: &'a Program,
    flags: &'a Flags,
    interrupt: &'a Interrupt,
    rank: &'a mut Rank<'p, D>,
    samples: Box<dyn Samples>,
    lr: LrSchedule,
    /// Rank 0's outputs.
    metrics: Option<Output>,
    bar: ProgressBar,
    trace: Option<Trace>,
    /// What was sent before the first step.
    before: Traffic,
    /// The last step's result; `None` before the first.
    last: Option<Gradients>,
    /// Of the last step, where its norm is not awaited.
    told: Option<Told>,
    peak_bytes: usize,
}

/// What a step tells of itself, beside what its gradients came to.
struct Told {
    step: u64,
    lr: f64,
    seconds: f64,
    /// Most bytes on any rank, and whether any was asked to end.
    most: Request<i64>,
}

/// A file that is written line by line.
struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    fn create(path: &Path) -> Result<Self, Error> {
        let file = File::create(path).map_err(Error::io(path))?;
        Ok(Self { path: path.to_owned(), file })
    }

    fn line(&mut self, text: &str) -> Result<(), Error> {
        self.file.write_all(format!("{text}\n").as_bytes()).map_err(Error::io(&self.path))
    }
}

impl<'a, 'p, D: Device> Run<'a, 'p, D> {
    /// Opens what the flags name, and fills the weights.
    fn new(
        program: &'a Program,
        flags: &'a Flags,
        interrupt: &'a Interrupt,
        rank: &'a mut Rank<'p, D>,
    ) -> Result<Self, Error> {
        let samples = data::open(&flags.data, program.seq_len(), flags.seed)?;
        enough_samples(&*samples, flags, program)?;
        match &flags.init_from {
            Some(path) => rank.load(&Checkpoint::open(path)?)?,
            None => rank.initialise(),
        }
        let first = rank.groups().world.rank() == 0;
        let metrics = flags.metrics.as_deref().filter(|_| first);
        let metrics = metrics.map(Output::create).transpose()?;
        let (peak, shape) = (flags.lr, flags.lr_schedule);
        let lr = LrSchedule { peak, shape, warmup: flags.lr_warmup, steps: flags.steps };
        rank.groups().world.barrier()?;
        let trace = flags.trace.is_some();
        let trace = trace.then(|| Trace::new(Instant::now(), rank.groups().world.rank()));
        let before = rank.groups().world.stats().traffic();
        let (bar, last) = (progress_bar(first, flags.steps), None);
        Ok(Self {
            program,
            flags,
            interrupt,
            rank,
            samples,
            lr,
            metrics,
            bar,
            trace,
            before,
            last,
            told: None,
            peak_bytes: 0,
        })
    }

    fn train(mut self) -> Result<(), Error> {
        let mut interrupted = None;
        for step in 0..self.flags.steps {
            let ends = match self.program.post_validation {
                true => self.step_ahead(step)?,
                false => self.step(step)?,
            };
            if ends {
                interrupted = Some(Error::Interrupted { steps: step + 1 });
                break;
            }
        }
        if let Some(result) = self.rank.settle()? {
            self.settled(result)?;
        }
        self.bar.finish();
        let traffic = since(&self.before, &self.rank.groups().world.stats().traffic());
        if let Some(path) = &self.flags.dump_weights
            && let Some(weights) = self.rank.whole_weights()?
        {
            checkpoint::write(path, &weights)?;
        }
        self.write_rank_report(&traffic)?;
        self.write_trace()?;
        interrupted.map_or(Ok(()), Err)
    }

    /// Says whether any rank was asked to end.
    fn step(&mut self, step: u64) -> Result<bool, Error> {
        let begin = Instant::now();
        let result = self.rank.gradients(&*self.samples, step, None)?;
        finite(step, "loss", result.loss)?;
        finite(step, "gradient norm", result.norm)?;
        self.dump_gradients(step)?;
        let (lr, updating) = (self.lr.at(step), Instant::now());
        self.rank.update(&self.flags.optimizer(), lr, result.norm);
        self.peak_bytes = self.peak_bytes.max(result.outcome.peak_bytes);
        if let Some(trace) = &mut self.trace {
            trace.passes(&result.outcome.ran);
            trace.reductions(&result.reductions);
            trace.phase("update", updating, Instant::now());
        }
        let told = self.start_telling(step, lr, begin)?;
        let ends = self.tell(told, &result)?;
        self.last = Some(result);
        Ok(ends)
    }

    /// The same without waiting for the norm: tells of the step before, and says whether any rank was asked to
    /// end by then.
    fn step_ahead(&mut self, step: u64) -> Result<bool, Error> {
        let (begin, lr) = (Instant::now(), self.lr.at(step));
        let before = self.rank.step_ahead(&*self.samples, step, &self.flags.optimizer(), lr)?;
        let ends = before.map_or(Ok(false), |before| self.settled(before))?;
        self.dump_gradients(step)?;
        if let Some(outcome) = self.rank.pending_outcome() {
            self.peak_bytes = self.peak_bytes.max(outcome.peak_bytes);
        }
        self.told = Some(self.start_telling(step, lr, begin)?);
        Ok(ends)
    }

    /// Takes up what a step came to whose norm was not awaited.
    fn settled(&mut self, result: Gradients) -> Result<bool, Error> {
        let Some(told) = self.told.take() else { return Ok(false) };
        finite(told.step, "loss", result.loss)?;
        finite(told.step, "gradient norm", result.norm)?;
        if let Some(trace) = &mut self.trace {
            trace.passes(&result.outcome.ran);
            trace.reductions(&result.reductions);
        }
        let ends = self.tell(told, &result)?;
        self.last = Some(result);
        Ok(ends)
    }

    /// Writes the first step's gradients, where they are asked for.
    fn dump_gradients(&self, step: u64) -> Result<(), Error> {
        if let (0, Some(path)) = (step, &self.flags.dump_gradients)
            && let Some(gradients) = self.rank.whole_gradients()?
        {
            checkpoint::write(path, &gradients)?;
        }
        Ok(())
    }

    fn start_telling(&self, step: u64, lr: f64, begin: Instant) -> Result<Told, Error> {
        let peak = (self.rank.state_bytes() + self.peak_bytes as u64) as i64;
        let most = vec![peak, i64::from(self.interrupt.is_asked())];
        let most = self.rank.groups().world.start_all_reduce(most, Op::Max)?;
        Ok(Told { step, lr, seconds: begin.elapsed().as_secs_f64(), most })
    }

    /// Writes a step's metrics. All ranks agree here on whether they were asked to end.
    fn tell(&mut self, told: Told, result: &Gradients) -> Result<bool, Error> {
        let Told { step, lr, seconds, most } = told;
        let most = most.wait()?;
        let [peak, asked] = [0, 1].map(|n| most.get(n).copied().unwrap_or_default());
        let tokens = (self.program.global_batch() * self.program.seq_len()) as f64;
        let flops = 3.0 * models::layer::forward_flops(&self.program.model, tokens);
        let metrics = Metrics {
            step,
            loss: result.loss,
            aux_loss: 0.0,
            total_loss: result.loss,
            grad_norm: result.norm,
            lr,
            tokens_per_s: tokens / seconds,
            model_flops_per_s: flops / seconds,
            peak_memory_bytes: peak as u64,
            planned_memory_bytes: self.program.planned_memory_bytes,
        };
        self.bar.set_message(format!("loss {:.4}", metrics.loss));
        self.bar.inc(1);
        if let Some(output) = &mut self.metrics {
            output.line(&serde_json::to_string(&metrics).unwrap_or_default())?;
        }
        Ok(asked > 0)
    }

    fn write_rank_report(&self, traffic: &Traffic) -> Result<(), Error> {
        let (Some(path), Some(last)) = (&self.flags.rank_report, &self.last) else {
            return Ok(());
        };
        let (groups, inventory) = (self.rank.groups(), self.rank.inventory());
        let mut outcome = last.outcome.clone();
        outcome.peak_bytes = self.peak_bytes;
        let bytes = [size_of::<D::Stored>(), size_of::<D::Wide>()];
        let mut report =
            RankReport::new(groups, inventory, bytes, &outcome, self.flags.steps, traffic);
        let planned_bytes = self.program.planned_memory_bytes;
        report.device_memory =
            self.rank.memory_use().map(|seen| DeviceMemory { planned_bytes, seen });
        report.cuda_graphs = self.flags.gpu.map(|_| self.rank.replays());
        report.chosen_kernels = self.rank.chosen_kernels();
        let line = serde_json::to_string(&report).unwrap_or_default();
        let Some(lines) = gather_text(&*groups.world, &line)? else { return Ok(()) };
        write_lines(path, lines)
    }

    fn write_trace(&self) -> Result<(), Error> {
        let (Some(path), Some(trace)) = (&self.flags.trace, &self.trace) else { return Ok(()) };
        let text = trace.lines().join(",\n");
        let Some(ranks) = gather_text(&*self.rank.groups().world, &text)? else { return Ok(()) };
        let events: Vec<String> = ranks.into_iter().filter(|text| !text.is_empty()).collect();
        write_lines(path, [format!("{{\"traceEvents\":[\n{}\n]}}", events.join(",\n"))])
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

fn write_lines(path: &Path, lines: impl IntoIterator<Item = String>) -> Result<(), Error> {
    let mut output = Output::create(path)?;
    lines.into_iter().try_for_each(|line| output.line(&line))
}

fn finite(step: u64, what: &'static str, value: f64) -> Result<(), Error> {
    if value.is_finite() { Ok(()) } else { Err(Error::NotFinite { step, what, value }) }
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
