//! The command line. Doc comments of flags and commands are the help texts that `--help` prints.

use clap::{Args, Parser, Subcommand, ValueEnum};
use models::decisions::Decision;
use models::schedule::ScheduleName;
use planner::request::flags::{Flags, MOST_GPUS};
use std::path::PathBuf;

const EXIT_CODES: &str = "Exit codes: 0 done, 1 a bug or a failed run, 2 invalid input, \
                          3 nothing fits,\n4 time limit reached without a result, 130 interrupted.";

/// The limit of `plan estimate`, whose default is its own.
const ESTIMATE_LIMIT: &str = "Stop after this many seconds and print the best plan so far with its \
                              optimality gap. [default: 1; if every decision is set 0.05, and 0.5 \
                              in all where the gap is still over 0.5 %]";
/// The limits of `plan explain`, which hold for one alternative each.
const EXPLAIN_LIMIT: &str = "Stop the search for an alternative after this many seconds, and print \
                             the best one so far with its optimality gap. [default: 0.4]";
const EXPLAIN_PROVE: &str =
    "Search for each alternative without a time limit. This can take minutes";

/// Plans the fastest way to train a transformer on N GPUs.
#[derive(Debug, Parser)]
#[command(
    name = "plan",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    arg_required_else_help = true,
    allow_negative_numbers = true,
    after_help = EXIT_CODES
)]
pub struct Cli {
    /// What to do instead of planning.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Planning.
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Estimate the given settings, even if they do not fit; what is not given is chosen
    Estimate(EstimateArgs),
    /// Explain a plan: ranks, stages, memory, time, and the alternatives
    Explain(ExplainArgs),
    /// Verify a plan's figures
    Check(CheckArgs),
    /// Compare two plans
    Diff(DiffArgs),
    /// Simulate one pipeline schedule and draw it
    Schedule(ScheduleArgs),
    /// Compare the cost model with published measurements
    Validate(ValidateArgs),
    /// Generate the trainer of a plan
    Generate(GenerateArgs),
    /// Build a trainer and run it
    Launch(LaunchArgs),
    /// Measure this machine and write its cluster file
    Calibrate(CalibrateArgs),
    /// List the shipped models
    Models(ListArgs),
    /// List the shipped clusters
    Clusters(ListArgs),
}

/// What is to be trained, on what.
#[derive(Args, Debug)]
pub struct RequestArgs {
    /// Model: a file, a shipped name, a Hugging Face config.json, or - for standard input
    // `Option` although required, because a subcommand needs none (`subcommand_negates_reqs`).
    #[arg(long, value_name = "FILE|NAME|-", required_unless_present = "from")]
    pub model: Option<String>,
    /// Number of GPUs
    #[arg(
        long,
        value_name = "N",
        value_parser = gpus,
        required_unless_present = "from"
    )]
    pub gpus: Option<u64>,
    /// Cluster: a file or a shipped name [default: dgx_h100]
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: Option<String>,
    /// Sequences per iteration [default: the model file's, else as near as possible to 4M tokens]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub global_batch: Option<u64>,
    /// Tokens per sequence [default: the model file's, else its number of positions]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub seq_len: Option<u64>,
    /// Tokens to train on, such as 15T. The plan then states the days of training
    #[arg(long, value_name = "N")]
    pub tokens: Option<String>,
    /// Percent of each device's memory to leave free. Nine in ten published runs need less than 5 %
    /// beyond the prediction [default: 5]
    #[arg(long, value_name = "PERCENT")]
    pub headroom: Option<f64>,
    /// Ratio of the most loaded expert-parallel rank's tokens to the mean, such as 1.3. Capped at
    /// the largest ratio possible for `ep` [default: the model file's, else 1]
    #[arg(long, value_name = "FACTOR")]
    pub expert_imbalance: Option<f64>,
    /// Pin or narrow a decision: tp=8, schedule=1f1b,gpipe, 'tp<=8'; repeatable
    #[arg(long = "set", value_name = "KEY=VALUE", long_help = settings_help())]
    pub settings: Vec<String>,
    /// Consider only configurations that `plan generate` supports
    #[arg(long)]
    pub runnable: bool,
    /// Plan again from this plan: its model, batch and settings, on at most --gpus GPUs. A --set
    /// replaces the plan's own settings of that decision
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["model", "global_batch", "seq_len", "tokens", "headroom", "expert_imbalance", "runnable"])]
    pub from: Option<PathBuf>,
    /// Print JSON
    ///
    /// Where there is no plan (exit codes 3 and 4) it has the request, `error`, and `shortage`: the
    /// least memory found (`least`) and the changes with which something fits (`fits`).
    #[arg(long)]
    pub json: bool,
}

/// What a number should be that is too large for any use.
pub const TOO_LARGE: &str = "a whole number up to 18446744073709551615";

/// A number of GPUs.
fn gpus(text: &str) -> Result<u64, String> {
    let valid = format!("a whole number of 1 to {MOST_GPUS}");
    whole(text).map_err(|said| if said == TOO_LARGE { valid } else { said })
}

/// A whole number of at least 1. One that is too large is refused where it is used.
fn whole(text: &str) -> Result<u64, String> {
    let too_large = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty();
    text.parse().map_err(|_| match too_large {
        true => TOO_LARGE.to_owned(),
        false => "a whole number of at least 1".to_owned(),
    })
}

/// As [`whole`], as a count. 0 is refused where it is used.
fn count(text: &str) -> Result<usize, String> {
    whole(text).and_then(|n| usize::try_from(n).map_err(|_| TOO_LARGE.to_owned()))
}

/// A number of processes, which is not 0.
fn ranks(text: &str) -> Result<u64, String> {
    whole(text).and_then(|n| if n == 0 { whole("") } else { Ok(n) })
}

/// The help of `plan schedule NAME`.
fn schedules_help() -> String {
    let names: Vec<String> = ScheduleName::ALL.iter().map(ToString::to_string).collect();
    format!("Schedule: {}", names.join(", "))
}

/// What `--set` takes, decision by decision.
fn settings_help() -> String {
    let mut text = "Pin or narrow a decision: tp=8, schedule=1f1b,gpipe, 'tp<=8'; repeatable\n\n\
                    Decisions, by their names in plan.yaml:\n"
        .to_owned();
    for row in Decision::ALL.iter().filter(|row| row.is_set) {
        let Decision { name, values, help, .. } = row;
        text += &format!("{name}: {help} Takes {}.\n", values.in_words());
    }
    text
}

impl RequestArgs {
    /// The flags that make a request.
    pub fn flags(&self) -> Flags {
        Flags {
            model: self.model.clone().unwrap_or_default(),
            cluster: self.cluster.clone(),
            gpus: self.gpus.unwrap_or_default(),
            global_batch: self.global_batch,
            seq_len: self.seq_len,
            headroom: self.headroom,
            tokens: self.tokens.clone(),
            expert_imbalance: self.expert_imbalance,
            settings: self.settings.clone(),
            runnable: self.runnable,
        }
    }
}

/// `plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// What to minimize: `time`, or `memory` (peak memory, within 1 %; then time). With --from, the
    /// default is the plan's own objective [default: time]
    #[arg(long, value_enum)]
    pub objective: Option<Objective>,
    /// Number of alternatives to print: the best plan of every other pair of tp and pp, and with
    /// every other schedule at the plan's own pair. Also prints what more memory would save, if any
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top: usize,
    /// Search for an order of passes that is faster than every named schedule. For pipelines of one
    /// chunk per rank
    #[arg(long, value_enum)]
    pub order: Option<Order>,
    /// When to answer.
    #[command(flatten)]
    pub limit: LimitArgs,
    /// Write the plan to this file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// When a search has to answer.
#[derive(Args, Clone, Copy, Debug)]
pub struct LimitArgs {
    /// Stop after this many seconds and print the best plan so far with its optimality gap
    /// [default: 1; 0.2 with --from; --order ilp has 60 of its own]
    ///
    /// Without this flag, a search that has found nothing on a busy machine continues, for about
    /// 15 s at most.
    #[arg(long, value_name = "SECONDS")]
    pub time_limit: Option<f64>,
    /// Search without a time limit until the plan is proven optimal, or until the work limit of the
    /// integer programs is reached. This can take minutes. Ctrl-C prints the best plan so far
    #[arg(long, conflicts_with = "time_limit")]
    pub prove: bool,
}

impl LimitArgs {
    /// Whether neither option is given.
    pub fn is_default(self) -> bool {
        self.time_limit.is_none() && !self.prove
    }
}

/// What a plan minimizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Objective {
    /// Time per iteration.
    Time,
    /// Peak memory of the fullest rank, within 1 %; then time.
    Memory,
}

impl From<Objective> for models::plan::Objective {
    fn from(typed: Objective) -> Self {
        match typed {
            Objective::Time => Self::Time,
            Objective::Memory => Self::Memory,
        }
    }
}

/// How a plan's order of passes is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// Integer program, for small pipelines.
    Ilp,
    /// Heuristic: the greedy generator of zb_auto, with this plan's pass times and memory.
    Auto,
}

/// `plan estimate`.
#[derive(Args, Debug)]
#[command(
    allow_negative_numbers = true,
    mut_arg("time_limit", |arg| arg.help(ESTIMATE_LIMIT).long_help(ESTIMATE_LIMIT))
)]
pub struct EstimateArgs {
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// When to answer.
    #[command(flatten)]
    pub limit: LimitArgs,
}

/// `plan models` and `plan clusters`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `plan check`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct CheckArgs {
    /// The plan
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,
    /// The cluster it was made for: a file or a shipped name [default: the shipped cluster that the
    /// plan names]
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: Option<String>,
    /// Also refuse a plan that `plan generate` does not support
    #[arg(long)]
    pub runnable: bool,
    /// Also verify the proof: search for a configuration faster than the proven bound
    #[arg(long)]
    pub proof: bool,
    /// Time limit of --proof, seconds [default: none]
    #[arg(long, value_name = "SECONDS", requires = "proof")]
    pub time_limit: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `plan diff`.
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// A plan
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Another
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `plan schedule`. Times are those of one micro-batch on one pipeline rank's whole share, in any
/// unit.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct ScheduleArgs {
    #[arg(value_name = "NAME", help = schedules_help())]
    pub name: String,
    /// Pipeline ranks
    #[arg(long, value_name = "P", value_parser = count)]
    pub stages: usize,
    /// Micro-batches per iteration
    #[arg(long, value_name = "M", value_parser = count)]
    pub micro_batches: usize,
    /// Another schedule to compare with: both timelines, where each rank's time goes, and where the
    /// faster one gains
    #[arg(long, value_name = "NAME")]
    pub against: Option<String>,
    /// Chunks per pipeline rank [default: the fewest that the schedule allows on several ranks]
    #[arg(long, value_name = "V", value_parser = count)]
    pub chunks: Option<usize>,
    /// Forward pass
    #[arg(long, value_name = "TIME", default_value_t = 1.0)]
    pub forward: f64,
    /// Backward pass with respect to inputs
    #[arg(long, value_name = "TIME", default_value_t = 1.0)]
    pub backward: f64,
    /// Backward pass with respect to weights
    #[arg(long, value_name = "TIME", default_value_t = 1.0)]
    pub weight: f64,
    /// Latency between ranks
    #[arg(long, value_name = "TIME", default_value_t = 0.0)]
    pub latency: f64,
    /// Length of an overlapped forward and backward: sum or max [default: sum]
    #[arg(long, value_name = "sum|max")]
    pub pair_time: Option<String>,
    /// Activations that a backward pass to inputs (B) frees, for zb_auto [default: 0]
    #[arg(long, value_name = "MB")]
    pub act_b: Option<f64>,
    /// Activations that a weight gradient's pass (W) frees, for zb_auto [default: 1]
    #[arg(long, value_name = "MB")]
    pub act_w: Option<f64>,
    /// Activations that a rank may hold, for zb_auto [default: those of a micro-batch for each
    /// stage]
    #[arg(long, value_name = "MB")]
    pub memory_limit: Option<f64>,
    /// Find the shortest order of zb_auto with an integer program: by makespan or by stage time
    #[arg(long, value_name = "makespan|stage")]
    pub optimal: Option<String>,
    /// Time limit of the integer program, seconds [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "optimal")]
    pub time_limit: Option<f64>,
    /// Split the output layer over the ranks: parallel_naive, parallel_1, parallel_2 or
    /// interlaced
    #[arg(long, value_name = "NAME")]
    pub vocab: Option<String>,
    /// First vocabulary pass [default: 0.25]
    #[arg(long, value_name = "TIME")]
    pub vocab_s: Option<f64>,
    /// Last vocabulary pass [default: 0.25]
    #[arg(long, value_name = "TIME")]
    pub vocab_t: Option<f64>,
    /// Look-up in the input layer, a pass of every rank [default: 0]
    #[arg(long, value_name = "TIME")]
    pub vocab_if: Option<f64>,
    /// Backward pass of that look-up [default: 0]
    #[arg(long, value_name = "TIME")]
    pub vocab_ib: Option<f64>,
    /// Print every rank's passes in order
    #[arg(long)]
    pub orders: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `plan explain`.
#[derive(Args, Debug)]
#[command(
    allow_negative_numbers = true,
    mut_arg("time_limit", |arg| arg.help(EXPLAIN_LIMIT).long_help(EXPLAIN_LIMIT)),
    mut_arg("prove", |arg| arg.help(EXPLAIN_PROVE).long_help(EXPLAIN_PROVE))
)]
pub struct ExplainArgs {
    /// The plan
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,
    /// The plan's cluster, if it is not a shipped one
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: Option<String>,
    /// When to answer.
    #[command(flatten)]
    pub limit: LimitArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `plan validate`.
#[derive(Args, Debug)]
pub struct ValidateArgs {
    /// Measurements, with the columns of tests/papers/measured.csv
    #[arg(long, value_name = "FILE")]
    pub measured: PathBuf,
    /// Print JSON, with the prediction of every row
    #[arg(long)]
    pub json: bool,
}

/// `plan generate`.
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// The plan
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,
    /// Folder for the trainer: new, empty, or of an earlier trainer. Its generated files are
    /// replaced unless they were edited
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Also replace files that were edited
    #[arg(long)]
    pub overwrite: bool,
    /// The runtime to link with: a folder or a git URL [default: the one in this program's source
    /// tree]
    #[arg(long, value_name = "PATH|GIT")]
    pub runtime: Option<String>,
}

/// `plan launch`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct LaunchArgs {
    /// The trainer's folder
    #[arg(value_name = "DIR")]
    pub trainer: PathBuf,
    /// Run all ranks as threads of one process. This is the default
    #[arg(long)]
    pub local: bool,
    /// Run the ranks as processes that mpirun starts
    #[arg(long, conflicts_with = "local", requires = "processes")]
    pub mpi: bool,
    /// Number of processes, which must equal the plan's ranks. They run on this machine and connect
    /// over TCP, or over MPI with --mpi
    #[arg(short = 'n', value_name = "N", conflicts_with = "local", value_parser = ranks)]
    pub processes: Option<u64>,
    /// Train on an NVIDIA GPU, which all ranks of a process share. With -n each process has its own
    /// GPU and connects by NCCL
    #[arg(long)]
    pub gpu: bool,
    /// The trainer's own flags
    #[arg(last = true, value_name = "TRAINER FLAGS")]
    pub flags: Vec<String>,
}

/// `plan calibrate`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct CalibrateArgs {
    /// The cluster to start from: laptop, or a file made from it; with --gpu one that has this GPU.
    /// What is not measured is copied from it
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: String,
    /// Measure the GPU instead of the CPU
    #[arg(long)]
    pub gpu: bool,
    /// A file that measure-gpu wrote on another machine, instead of measuring here
    #[arg(long, value_name = "FILE", requires = "gpu")]
    pub measured: Option<PathBuf>,
    /// Also measure matrix products of this model's widths: a file or a shipped name
    #[arg(long, value_name = "FILE|NAME", requires = "gpu", conflicts_with = "measured")]
    pub model: Option<String>,
    /// Write measured and predicted training steps to this file, as JSON
    #[arg(long, value_name = "FILE", requires = "gpu")]
    pub steps: Option<PathBuf>,
    /// Number of ranks that run at once during the measurement [default: the cores; with --gpu 1]
    #[arg(long, value_name = "N")]
    pub gpus: Option<u64>,
    /// Write the cluster file here [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The runtime to measure: a folder [default: the one in this program's source tree]
    #[arg(long, value_name = "PATH")]
    pub runtime: Option<PathBuf>,
}
