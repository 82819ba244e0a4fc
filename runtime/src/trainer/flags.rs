//! The command line of a generated trainer, and which values it accepts.

use super::lr_schedule::LrShape;
use crate::comm::Options;
use crate::error::Error;
use crate::rank::Optimizer;
use crate::step::graph_replay::CudaGraphs;
use clap::Parser;
use std::path::PathBuf;
use std::time::Duration;

/// Trains one model, split as it was planned.
#[derive(Clone, Debug, Parser)]
#[command(allow_negative_numbers = true)]
pub struct Flags {
    /// Hugging Face checkpoint to begin with: a directory or one .safetensors file. Without it,
    /// weights are drawn from the seed.
    #[arg(long, value_name = "DIR")]
    pub init_from: Option<PathBuf>,
    /// What to train on: Megatron's .bin with .idx beside it (its tools/preprocess_data.py makes
    /// them), which repeats in another order; or a .safetensors file with one tensor `tokens`,
    /// I64 [steps, batch, seq_len + 1], taken in order, once (docs/running.md shows how to make
    /// one).
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// The token that ends each document in the data. Attention then stays within a document,
    /// positions count from its beginning, and this token predicts nothing. Without it, every
    /// sequence is one document.
    #[arg(long, value_name = "TOKEN", value_parser = clap::value_parser!(i64).range(0..))]
    pub document_end: Option<i64>,
    /// Steps to train.
    #[arg(long, value_parser = whole)]
    pub steps: u64,
    /// Highest learning rate.
    #[arg(long, value_parser = number, default_value_t = 1e-3)]
    pub lr: f64,
    /// AdamW's decay rates of the moments.
    #[arg(long, value_name = "BETA1,BETA2", value_parser = pair, default_value = "0.9,0.95")]
    pub betas: (f64, f64),
    /// AdamW's epsilon.
    #[arg(long, value_parser = number, default_value_t = 1e-8)]
    pub eps: f64,
    /// Weight decay of matrices; vectors do not decay.
    #[arg(long, value_parser = number, default_value_t = 0.1)]
    pub weight_decay: f64,
    /// Largest gradient norm; 0 does not clip.
    #[arg(long, value_parser = number, default_value_t = 1.0)]
    pub clip: f64,
    /// Shape of the learning rate after its warm-up.
    #[arg(long, value_enum, default_value_t = LrShape::Constant)]
    pub lr_schedule: LrShape,
    /// Steps over which the learning rate rises.
    #[arg(long, default_value_t = 0, value_parser = whole)]
    pub lr_warmup: u64,
    /// Seed of initial weights, dropout and the order of data.
    #[arg(long, default_value_t = 1234, value_parser = whole)]
    pub seed: u64,
    /// Where to append one JSON object a step; existing lines stay. Only one run at a time may
    /// write.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Where to write the first step's gradients, whole, before clipping.
    #[arg(long, value_name = "FILE")]
    pub dump_gradients: Option<PathBuf>,
    /// Where to write the final weights, whole. If a run fails, the weights after the last step
    /// that all ranks completed are written if they can still be put together.
    #[arg(long, value_name = "FILE")]
    pub dump_weights: Option<PathBuf>,
    /// Where to write one JSON object a rank: what it held, did and sent.
    #[arg(long, value_name = "FILE")]
    pub rank_report: Option<PathBuf>,
    /// Where to write a trace of the last 100 steps, which opens in Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Threads of all ranks of a process together, at most 16 for each of the machine's cores. The
    /// default is one for each core.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Train on an NVIDIA GPU, with this number if there are several. Ranks of one process share
    /// it; processes that a launcher starts have one each, by their rank on the host.
    #[arg(long, value_name = "NUMBER", num_args = 0..=1)]
    pub gpu: Option<Option<usize>>,
    /// Where processes that a launcher starts find each other: an address at which rank 0 listens,
    /// or a file that all can read. The default is MASTER_ADDR and MASTER_PORT, or MPI. Set
    /// MESHWRIGHT_TOKEN to the same secret for all ranks, for example with `openssl rand -hex 32`:
    /// ranks then prove to each other that they have it. Without it, anybody who reaches the
    /// address before all have met can take a rank's place; a file holds a secret of its own.
    /// Nothing is encrypted: use a network whose machines you trust.
    #[arg(long, value_name = "HOST:PORT|FILE")]
    pub rendezvous: Option<String>,
    /// On a GPU, when steps are replayed as a CUDA graph instead of launched kernel by kernel.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    pub cuda_graphs: CudaGraphs,
    /// Seconds without news of a rank before the others give up; also how long the first Ctrl-C or
    /// SIGTERM waits for the end of a step.
    #[arg(long, default_value_t = 600, value_parser = whole)]
    pub time_limit_s: u64,
}

impl Flags {
    /// Refuses invalid values.
    pub(super) fn check(&self) -> Result<(), Error> {
        let in_unit = |x: f64| (0.0..1.0).contains(&x);
        let threads = 1..=most_threads();
        let valid_threads = format!("1 to {}, 16 for each of the machine's cores", threads.end());
        let from_zero = |x: f64| x.is_finite() && x >= 0.0;
        let checks = [
            ("steps", self.steps.to_string(), self.steps > 0, "1 or more"),
            ("lr", self.lr.to_string(), from_zero(self.lr), "0 or more, for example 1e-3"),
            (
                "betas",
                format!("{},{}", self.betas.0, self.betas.1),
                in_unit(self.betas.0) && in_unit(self.betas.1),
                "each from 0 up to, not including, 1",
            ),
            (
                "eps",
                self.eps.to_string(),
                self.eps.is_finite() && self.eps > 0.0,
                "above 0, for example 1e-8",
            ),
            (
                "weight-decay",
                self.weight_decay.to_string(),
                from_zero(self.weight_decay),
                "0 or more, for example 0.1",
            ),
            ("clip", self.clip.to_string(), from_zero(self.clip), "above 0, or 0 for none"),
            (
                "threads",
                self.threads.unwrap_or_default().to_string(),
                self.threads.is_none_or(|n| threads.contains(&n)),
                &valid_threads,
            ),
            (
                "cuda-graphs",
                "always".to_owned(),
                self.gpu.is_some() || self.cuda_graphs != CudaGraphs::Always,
                "auto or never on the CPU, or with --gpu",
            ),
            ("time-limit-s", self.time_limit_s.to_string(), self.time_limit_s > 0, "1 or more"),
        ];
        let wrong = checks.into_iter().find(|(.., holds, _)| !holds);
        wrong.map_or(Ok(()), |(flag, value, _, valid)| {
            refuse(flag, &format!("it cannot be {value}; valid: {valid}"))
        })
    }

    /// Why steps must not be replayed, if there is a reason.
    pub(super) fn refuse_graphs(&self) -> Option<&'static str> {
        let traced = self.trace.is_some().then_some("--trace shows when each pass is launched");
        let packed = self.document_end.is_some().then_some("with --document-end steps differ");
        traced.or(packed)
    }

    pub(super) fn optimizer(&self) -> Optimizer {
        Optimizer {
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            clip: (self.clip > 0.0).then_some(self.clip),
        }
    }
}

/// Parses two numbers: `0.9,0.95`.
fn pair(text: &str) -> Result<(f64, f64), String> {
    let numbers = text.split_once(',').map(|(a, b)| (a.trim().parse(), b.trim().parse()));
    match numbers {
        Some((Ok(first), Ok(second))) => Ok((first, second)),
        _ => Err("valid: two numbers, for example 0.9,0.95".to_owned()),
    }
}

/// Parses a number.
fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "valid: a number, for example 1e-3".to_owned())
}

/// Parses a count.
fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "valid: a whole number, 0 or more".to_owned())
}

pub(super) fn refuse(flag: &'static str, problem: &str) -> Result<(), Error> {
    Err(Error::Flag { flag, problem: problem.to_owned() })
}

pub(super) fn threads(flags: &Flags) -> usize {
    flags.threads.unwrap_or_else(cores)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The most threads that may be asked for: more than a few on a core only take turns.
fn most_threads() -> usize {
    16 * cores()
}

pub(super) fn options(flags: &Flags) -> Options {
    Options { time_limit: Duration::from_secs(flags.time_limit_s), ..Options::default() }
}
