//! The command line. Doc comments of flags and commands are the help texts that `--help` prints.

use clap::{Args, Parser, Subcommand, ValueEnum};
use models::decisions::Decision;
use planner::request::flags::Flags;
use std::path::PathBuf;

/// Plans the fastest way to train a transformer on N GPUs.
#[derive(Debug, Parser)]
#[command(
    name = "plan",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    arg_required_else_help = true,
    allow_negative_numbers = true,
    after_help = "Exit codes: 0 done, 1 our bug or a failed run, 2 the user's input, 3 nothing fits,\n4 the time ended before anything was known."
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
    /// Price one configuration, also where it does not fit
    Estimate(EstimateArgs),
    /// Say why a plan is what it is, and what lost by how much
    Explain(ExplainArgs),
    /// Check that a plan works out; changes nothing
    Check(CheckArgs),
    /// Say where two plans differ
    Diff(DiffArgs),
    /// Run a pipeline schedule by itself and draw it
    Schedule(ScheduleArgs),
    /// Compare the cost model with published measurements
    Validate(ValidateArgs),
    /// Write the trainer that a plan describes
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
    /// GPUs
    #[arg(
        long,
        value_name = "N",
        value_parser = whole,
        required_unless_present = "from"
    )]
    pub gpus: Option<u64>,
    /// Cluster: a file or a shipped name [default: dgx_h100]
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: Option<String>,
    /// Sequences an iteration [default: the model file's, else nearest to 4M tokens]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub global_batch: Option<u64>,
    /// Tokens a sequence [default: the model file's, else its positions]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub seq_len: Option<u64>,
    /// Tokens to train on, such as 15T: gives the days it takes
    #[arg(long, value_name = "N")]
    pub tokens: Option<String>,
    /// Percent of each device's memory to leave free; 0 fills it [default: 5, the error of the
    /// memory model]
    #[arg(long, value_name = "PERCENT")]
    pub headroom: Option<f64>,
    /// Tokens of the fullest expert-parallel rank over the mean, such as 1.3; at most the worst
    /// that `ep` ranks can have [default: the model file's, else 1]
    #[arg(long, value_name = "FACTOR")]
    pub expert_imbalance: Option<f64>,
    /// Pin or narrow a decision: tp=8, schedule=1f1b,gpipe, 'tp<=8'; repeatable
    #[arg(long = "set", value_name = "KEY=VALUE", long_help = settings_help())]
    pub settings: Vec<String>,
    /// Leave out what `plan generate` cannot make a trainer of
    #[arg(long)]
    pub runnable: bool,
    /// Plan again from this plan: its model, batch and settings, on --gpus or fewer. A --set takes
    /// the place of the plan's own settings of that decision
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["model", "global_batch", "seq_len", "tokens", "headroom", "expert_imbalance", "runnable"])]
    pub from: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A whole number of at least 1. One that is too large is refused where it is used.
fn whole(text: &str) -> Result<u64, String> {
    let too_large = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty();
    text.parse().map_err(|_| match too_large {
        true => "a smaller number".to_owned(),
        false => "a whole number of at least 1".to_owned(),
    })
}

/// As [`whole`], as a count. 0 is refused where it is used.
fn count(text: &str) -> Result<usize, String> {
    whole(text).and_then(|n| usize::try_from(n).map_err(|_| "a smaller number".to_owned()))
}

/// A number of processes, which is not 0.
fn ranks(text: &str) -> Result<u64, String> {
    whole(text).and_then(|n| if n == 0 { whole("") } else { Ok(n) })
}

/// What `--set` takes, decision by decision.
fn settings_help() -> String {
    let mut text = "Pin or narrow a decision: tp=8, schedule=1f1b,gpipe, 'tp<=8'; repeatable\n\n\
                    Decisions, by the names that plan.yaml has:\n"
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
    /// What to make least: time, or (to 1 %) memory on the fullest rank [default: time, with --from
    /// what its plan makes least]
    #[arg(long, value_enum)]
    pub objective: Option<Objective>,
    /// Alternatives to search for and print: the best of other tp and pp, and of other schedules,
    /// and what more memory would buy
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top: usize,
    /// Look for a faster order of passes than any schedule's, where pipeline ranks have one chunk
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
    /// Seconds until the best plan so far is printed, with how far from the best possible it may
    /// be [default: 1; 0.2 with --from; where that shows nothing and other programs had the
    /// processors, `plan` goes on for about 15 s at most; 0.05 for `estimate` with everything set,
    /// 0.4 for each alternative of `explain`; 60 more for --order ilp]
    #[arg(long, value_name = "SECONDS")]
    pub time_limit: Option<f64>,
    /// Go on until nothing can be faster, or integer programs have done all the work they are
    /// allowed, those over every cut of the layers included (minutes for large requests); Ctrl-C
    /// prints the best so far
    #[arg(long, conflicts_with = "time_limit")]
    pub prove: bool,
}

impl LimitArgs {
    /// Whether neither option is given.
    pub fn is_default(self) -> bool {
        self.time_limit.is_none() && !self.prove
    }
}

/// What a plan makes least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Objective {
    /// The iteration's time.
    Time,
    /// The device memory that anything fits into, to 1 %; then time.
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
    /// By an integer program, for small pipelines.
    Ilp,
    /// By zb_auto's greedy runs for the plan's own times and memory.
    Auto,
}

/// `plan estimate`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
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
    /// The cluster it was made for, a file or a shipped name [default: the shipped one of the
    /// plan's name]
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: Option<String>,
    /// Also refuse a plan that `plan generate` cannot make a trainer of
    #[arg(long)]
    pub runnable: bool,
    /// Also verify the proof: search for anything that takes less time than it allows
    #[arg(long)]
    pub proof: bool,
    /// Seconds after which --proof gives up [default: none]
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
    /// Schedule: naive, gpipe, 1f1b, interleaved_1f1b, overlapped_1f1b, looped_bfs, zb_h1, zb_h2,
    /// zb_auto, interleaved_zb, zb_v, v_half, v_min, v_1f1b, dualpipe, dualpipe_v or chimera
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Pipeline ranks
    #[arg(long, value_name = "P", value_parser = count)]
    pub stages: usize,
    /// Micro-batches an iteration
    #[arg(long, value_name = "M", value_parser = count)]
    pub micro_batches: usize,
    /// Another schedule to hold it against: both timelines, where each rank's time goes, and
    /// where the faster gains
    #[arg(long, value_name = "NAME")]
    pub against: Option<String>,
    /// Chunks per pipeline rank [default: the fewest the schedule has on several ranks]
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
    /// Activations that B frees, for zb_auto [default: 0]
    #[arg(long, value_name = "MB")]
    pub act_b: Option<f64>,
    /// Activations that W frees, for zb_auto [default: 1]
    #[arg(long, value_name = "MB")]
    pub act_w: Option<f64>,
    /// Activations that a rank may hold, for zb_auto [default: those of a micro-batch for each
    /// stage]
    #[arg(long, value_name = "MB")]
    pub memory_limit: Option<f64>,
    /// Look for the shortest order of zb_auto by an integer program: of makespan or stage time
    #[arg(long, value_name = "makespan|stage")]
    pub optimal: Option<String>,
    /// Seconds for it [default: 60]
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
    /// Its backward [default: 0]
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
#[command(allow_negative_numbers = true)]
pub struct ExplainArgs {
    /// The plan
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,
    /// The plan's cluster, where it is no shipped one
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
    /// Print JSON, every row's prediction included
    #[arg(long)]
    pub json: bool,
}

/// `plan generate`.
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// The plan
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,
    /// Folder for the trainer: a new or an empty one, or a trainer's, whose generated files are
    /// replaced unless they were changed
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Replace files of a trainer that were changed, too
    #[arg(long)]
    pub overwrite: bool,
    /// The runtime it links with: a folder or a git URL [default: the one this program was built
    /// beside]
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
    /// All ranks as threads of one process, the default
    #[arg(long)]
    pub local: bool,
    /// Ranks as processes of MPI, which mpirun starts
    #[arg(long, conflicts_with = "local", requires = "processes")]
    pub mpi: bool,
    /// Processes, as many as the plan has ranks: on this machine, over TCP, unless MPI starts them
    #[arg(short = 'n', value_name = "N", conflicts_with = "local", value_parser = ranks)]
    pub processes: Option<u64>,
    /// On an NVIDIA GPU, which all ranks of one process share; with -n each process has a GPU of
    /// its own, over NCCL
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
    /// The cluster whose other figures stay: laptop, or a file made of it; with --gpu one that has
    /// this GPU
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: String,
    /// Measure the GPU instead of the processor
    #[arg(long)]
    pub gpu: bool,
    /// What measure-gpu wrote on the GPU's machine, instead of measuring here
    #[arg(long, value_name = "FILE", requires = "gpu")]
    pub measured: Option<PathBuf>,
    /// Measure products of this model's widths, too: a file or a shipped name
    #[arg(long, value_name = "FILE|NAME", requires = "gpu", conflicts_with = "measured")]
    pub model: Option<String>,
    /// Where training steps as measured and as predicted go, as JSON
    #[arg(long, value_name = "FILE", requires = "gpu")]
    pub steps: Option<PathBuf>,
    /// Ranks that work at a time while it is measured [default: the cores; with --gpu 1]
    #[arg(long, value_name = "N")]
    pub gpus: Option<u64>,
    /// Where to write it [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The runtime that is measured: a folder [default: the one this program was built beside]
    #[arg(long, value_name = "PATH")]
    pub runtime: Option<PathBuf>,
}
