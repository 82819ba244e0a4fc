//! The loop over steps of one rank.

use super::final_outputs::{gather_text, write_tensors};
use super::lr_schedule::LrSchedule;
use super::metrics::{PeakMemory, PendingMetrics};
use super::outputs::{MetricsFile, Outputs};
use super::progress::Progress;
use super::step_clock::StepClock;
use super::{Flags, Run};
use crate::comm::{Traffic, since};
use crate::data::{self, Packed, Samples};
use crate::device::{Device, Space};
use crate::error::Error;
use crate::launch::interrupt::say;
use crate::rank::{Rank, StepResult};
use crate::report::Trace;
use crate::spec::TrainerSpec;
use crate::state::checkpoint::{Checkpoint, first_of};
use models::mesh::Mesh;
use std::collections::BTreeSet;
use std::time::Instant;

/// The run of one rank, as it goes through the steps.
pub(super) struct TrainingRun<'a, 'p, D: Space> {
    pub(super) job: Run<'a>,
    pub(super) rank: &'a mut Rank<'p, D>,
    pub(super) samples: Box<dyn Samples>,
    pub(super) lr: LrSchedule,
    pub(super) outputs: Outputs,
    /// On rank 0.
    pub(super) progress: Option<Progress>,
    pub(super) trace: Option<Trace>,
    /// Traffic before the first step.
    pub(super) before: Traffic,
    /// The last step's result; `None` before the first.
    pub(super) last: Option<StepResult>,
    /// Metrics of the last step, if its norm is not awaited.
    pub(super) pending_metrics: Option<PendingMetrics>,
    pub(super) peak_bytes: usize,
    /// Peak memory, as of the last step.
    pub(super) memory: PeakMemory,
}

/// Why the run ended early.
pub(super) struct Failure {
    pub(super) error: Error,
    /// Whether all ranks ended for it after the same step, and so can still communicate.
    pub(super) together: bool,
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { error: error.into(), together: false }
    }
}

/// Whether the run goes on after a step.
pub(super) enum Continuation {
    Continue,
    /// A rank was asked to end.
    Stop,
}

impl<'a, 'p, D: Device> TrainingRun<'a, 'p, D> {
    /// Opens the files that the flags name, and initialises or loads the weights.
    pub(super) fn new(job: Run<'a>, rank: &'a mut Rank<'p, D>) -> Result<Self, Failure> {
        let Run { spec, flags, .. } = job;
        let number = rank.groups().world.rank();
        let outputs = match number {
            0 => Outputs::open(flags, rank.model_bytes())?,
            _ => Outputs::default(),
        };
        job.interrupt.removes(outputs.unfinished());
        let samples = data::open(&flags.data, spec.seq_len, flags.seed);
        let samples = samples.map_err(|error| error.of_flag("data"))?;
        document_end_is_a_token(flags, spec)?;
        let samples = match flags.document_end {
            Some(end) => Box::new(Packed::new(samples, end)),
            None => samples,
        };
        enough_samples(&*samples, flags, spec)?;
        if number == 0 {
            let Mesh { tp, cp, dp, pp, .. } = spec.mesh;
            say(&format!("layout    tp {tp} · pp {pp} · cp {cp} · dp {dp}"));
            notes(&*samples, flags, spec).iter().for_each(|note| say(&format!("note: {note}")));
        }
        match &flags.init_from {
            Some(path) => {
                let weights = Checkpoint::open(path);
                let loaded = weights.and_then(|weights| rank.load(&weights).map(|()| weights));
                let weights = loaded.map_err(|error| error.of_flag("init-from"))?;
                if let Some(note) = unused(&weights, rank)? {
                    say(&note);
                }
            }
            None => rank.initialise()?,
        }
        let (peak, shape) = (flags.lr, flags.lr_schedule);
        let lr = LrSchedule { peak, shape, warmup: flags.lr_warmup, steps: flags.steps };
        rank.groups().world.barrier()?;
        let trace = flags.trace.is_some().then(|| Trace::new(Instant::now(), number));
        if trace.is_some() {
            rank.groups().world.stats().keep_spans();
        }
        let before = rank.groups().world.stats().traffic();
        Ok(Self {
            job,
            rank,
            samples,
            lr,
            outputs,
            progress: (number == 0).then(|| Progress::new(spec, flags.steps)),
            trace,
            before,
            last: None,
            pending_metrics: None,
            peak_bytes: 0,
            memory: PeakMemory::default(),
        })
    }

    pub(super) fn train(mut self) -> Result<(), Failure> {
        let interrupted = self.steps().inspect_err(|failure| self.save_weights(failure))?;
        if let Some(progress) = &self.progress {
            progress.finish(&self.job, self.memory);
        }
        let traffic = since(&self.before, &self.rank.groups().world.stats().traffic());
        // All three, even if one fails: other ranks take part in each.
        let written = [
            ("dump-weights", self.write_weights()),
            ("rank-report", self.write_rank_report(&traffic)),
            ("trace", self.write_trace()),
        ];
        let lost: Vec<(&str, Error)> = written
            .into_iter()
            .filter_map(|(flag, written)| Some((flag, written.err()?.of_flag(flag))))
            .collect();
        self.say_written(&lost.iter().map(|(flag, _)| *flag).collect::<Vec<_>>());
        let metrics = self.outputs.metrics.take();
        let metrics = metrics.and_then(MetricsFile::lost);
        let lost = lost.into_iter().map(|(_, error)| error);
        let mut errors = lost.chain(interrupted).chain(metrics);
        // All ranks end after the last step, whatever rank 0 could write.
        let error = errors.next();
        errors.for_each(|other| say(&format!("error: {other}")));
        error.map_or(Ok(()), |error| Err(Failure { error, together: true }))
    }

    /// Runs the steps; returns the error if somebody ended them early.
    fn steps(&mut self) -> Result<Option<Error>, Failure> {
        let mut interrupted = None;
        for step in 0..self.job.flags.steps {
            let continuation = match self.job.spec.post_validation {
                true => self.step_ahead(step)?,
                false => self.step(step)?,
            };
            self.job.interrupt.stepped();
            if matches!(continuation, Continuation::Stop) {
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
    fn step(&mut self, step: u64) -> Result<Continuation, Failure> {
        let clock = StepClock::start(self.rank);
        let result = self.rank.gradients(&*self.samples, step, None)?;
        let mut time = clock.parts(self.rank, Some(&result.outcome));
        self.finite(step, &result)?;
        self.dump_gradients(step)?;
        let (lr, updating) = (self.lr.at(step), Instant::now());
        self.rank.update(&self.job.flags.optimizer(), lr, result.norm)?;
        time.optimizer_s = updating.elapsed().as_secs_f64();
        self.peak_bytes = self.peak_bytes.max(result.outcome.peak_bytes);
        if let Some(trace) = &mut self.trace {
            trace.step(
                &result.outcome.ran,
                &result.reductions,
                self.rank.groups().world.stats().take_spans(),
            );
            trace.phase("update", updating, Instant::now());
        }
        let next = self.read_ahead(step + 1);
        let metrics = self.start_metrics(step, lr, clock.end(time), next.is_err())?;
        let continuation = self.write_metrics(metrics, &result, next)?;
        self.last = Some(result);
        Ok(continuation)
    }

    /// Reads the data of the next step, so that all ranks learn in time if one cannot.
    fn read_ahead(&mut self, step: u64) -> Result<(), Error> {
        if step == self.job.flags.steps {
            return Ok(());
        }
        self.rank.read_ahead(&*self.samples, step)
    }

    /// Runs a step without waiting for its norm, and reports the previous step.
    fn step_ahead(&mut self, step: u64) -> Result<Continuation, Failure> {
        let (clock, lr) = (StepClock::start(self.rank), self.lr.at(step));
        let optimizer = self.job.flags.optimizer();
        let before = self.rank.step_ahead(&*self.samples, step, &optimizer, lr)?;
        let time = clock.parts(self.rank, self.rank.pending_outcome());
        let continuation =
            before.map_or(Ok(Continuation::Continue), |before| self.settled(before))?;
        self.dump_gradients(step)?;
        if let Some(outcome) = self.rank.pending_outcome() {
            self.peak_bytes = self.peak_bytes.max(outcome.peak_bytes);
        }
        self.pending_metrics = Some(self.start_metrics(step, lr, clock.end(time), false)?);
        Ok(continuation)
    }

    /// Reports a step whose norm was not awaited.
    fn settled(&mut self, result: StepResult) -> Result<Continuation, Failure> {
        let Some(metrics) = self.pending_metrics.take() else { return Ok(Continuation::Continue) };
        self.finite(metrics.step, &result)?;
        if let Some(trace) = &mut self.trace {
            trace.step(
                &result.outcome.ran,
                &result.reductions,
                self.rank.groups().world.stats().take_spans(),
            );
        }
        let continuation = self.write_metrics(metrics, &result, Ok(()))?;
        self.last = Some(result);
        Ok(continuation)
    }

    /// Checks values that are the same on all ranks.
    fn finite(&self, step: u64, result: &StepResult) -> Result<(), Failure> {
        if result.valid_tokens == 0 {
            let error = Error::NothingToPredict { step: step + 1 };
            return Err(Failure { error, together: true });
        }
        let values = [("loss", result.loss), ("gradient norm", result.norm)];
        let wrong = values.into_iter().find(|(_, value)| !value.is_finite());
        let (step, steps) = (step + 1, self.job.flags.steps);
        wrong.map_or(Ok(()), |(what, value)| {
            let error = Error::NotFinite { step, steps, what, value };
            Err(Failure { error, together: true })
        })
    }

    /// Writes the first step's gradients if asked for.
    fn dump_gradients(&mut self, step: u64) -> Result<(), Error> {
        if step > 0 || self.job.flags.dump_gradients.is_none() {
            return Ok(());
        }
        let gradients = self.rank.whole_gradients()?;
        write_tensors(self.outputs.gradients.take(), gradients)
    }
}

/// On rank 0, a note on tensors of a checkpoint that no rank holds: weights of another model, or
/// what is no weight.
fn unused<D: Device>(weights: &Checkpoint, rank: &Rank<'_, D>) -> Result<Option<String>, Error> {
    let held = rank.inventory().all().iter().map(|held| held.declaration.name.as_str());
    let held = held.collect::<Vec<_>>().join("\n");
    let Some(all) = gather_text(&*rank.groups().world, &held)? else { return Ok(None) };
    let known: BTreeSet<&str> = all.iter().flat_map(|text| text.lines()).collect();
    let unused: Vec<String> =
        weights.names().filter(|name| !known.contains(*name)).map(str::to_owned).collect();
    let is_whole = unused.is_empty();
    let note = "note: --init-from: tensors that this model does not have";
    Ok((!is_whole).then(|| format!("{note}: {}", first_of(unused))))
}

fn document_end_is_a_token(flags: &Flags, spec: &TrainerSpec) -> Result<(), Error> {
    let tokens = spec.vocab_size as i64;
    let wrong = flags.document_end.filter(|&end| end >= tokens);
    wrong.map_or(Ok(()), |end| {
        let problem = format!("{end} is no token of the model; valid: 0 to {}", tokens - 1);
        Err(Error::Flag { flag: "document-end", problem })
    })
}

fn enough_samples(samples: &dyn Samples, flags: &Flags, spec: &TrainerSpec) -> Result<(), Error> {
    let batch = spec.global_batch() as u64;
    let most = samples.len() / batch;
    if samples.repeats() || flags.steps <= most {
        return Ok(());
    }
    let length = samples.len();
    if most == 0 {
        let problem = format!("it has {length} samples; valid: at least {batch}, those of a step");
        return Err(Error::Flag { flag: "data", problem });
    }
    let steps = flags.steps;
    let problem = format!(
        "{steps} steps of {batch} samples; the data has {length} samples: valid: up to {most}"
    );
    Err(Error::Flag { flag: "steps", problem })
}

/// What is valid and yet may not be meant.
fn notes(samples: &dyn Samples, flags: &Flags, spec: &TrainerSpec) -> Vec<String> {
    let (steps, warmup, batch) = (flags.steps, flags.lr_warmup, spec.global_batch() as u64);
    let repeats = steps.saturating_mul(batch) > samples.len();
    let pass = samples.len() as f64 / batch as f64;
    let data = flags.data.display();
    let notes = [
        repeats.then(|| {
            format!(
                "one pass over {data} has {pass:.1} steps ({} samples, {batch} a step); then it \
                 repeats, in another order",
                samples.len()
            )
        }),
        (warmup > steps).then(|| {
            format!("--lr-warmup {warmup} is more than --steps {steps}: --lr is not reached")
        }),
    ];
    notes.into_iter().flatten().collect()
}
