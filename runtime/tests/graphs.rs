//! Steps that a GPU would replay as a CUDA graph, on emulated queues that lag and record calls with
//! the bytes of their arguments. Replayed steps give the bits of steps that are launched kernel by
//! kernel, whatever changes from step to step.

mod common;

use clap::Parser;
use common::{Split, model, open};
use direct::Direct;
use models::decisions::{CpStyle, Vocab};
use models::model::ModelSpec;
use models::program::{Program, Recompute};
use models::schedule::ScheduleName;
use runtime::CudaGraphs;
use runtime::Interrupt;
use runtime::comm::{Communicator, NcclComm, Options, Solo, Traffic, run_ranks};
use runtime::data::{Sample, Samples};
use runtime::device::Gpu;
use runtime::kernels::cuda::{self, AsyncEmulator, FakeNccl, cpu_emulator::CpuEmulator};
use runtime::state::checkpoint::{Checkpoint, Whole};
use runtime::trainer::{Flags, train_alone};
use runtime::{Host, LrSchedule, LrShape, Optimizer, Rank, Replays};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const STEPS: u64 = 5;

fn machine() -> CpuEmulator {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-machine");
    CpuEmulator::new(&folder).expect("a folder for compiled sources")
}

/// A GPU whose queues lag.
fn gpu(machine: &CpuEmulator) -> cuda::Gpu {
    cuda::Gpu::on(Arc::new(AsyncEmulator::new(machine.clone(), Duration::from_micros(50))))
}

/// A case's samples with some labels masked: different ones, and a different number, in each step.
struct Masked(Box<dyn Samples>);

impl Samples for Masked {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn repeats(&self) -> bool {
        self.0.repeats()
    }

    fn read(&self, index: u64) -> Result<Sample, runtime::Error> {
        let mut sample = self.0.read(index)?;
        let masked = |n: usize| (n as u64 * 7 + index).is_multiple_of(2 + index / 8);
        let labels = sample.labels.iter_mut().enumerate();
        labels.filter(|(n, _)| masked(*n)).for_each(|(_, label)| *label = -1);
        Ok(sample)
    }
}

/// Results of a run, compared to the bit.
#[derive(Debug, PartialEq)]
struct Ended {
    losses: Vec<u64>,
    norms: Vec<u64>,
    gradients: BTreeMap<String, Whole<f32>>,
    weights: BTreeMap<String, Whole<f32>>,
    /// Traffic of the first rank.
    traffic: Traffic,
}

/// Trains with a learning rate that changes in each step, and clipping in some steps.
fn train(
    (case, program, split): (&str, &Program, &Split),
    device: Gpu<f32>,
    world: Box<dyn Communicator>,
    refused: Option<&'static str>,
) -> (Option<Ended>, Replays) {
    let lr = LrSchedule { peak: 1e-2, shape: LrShape::Cosine, warmup: 2, steps: STEPS };
    let clip = Some(0.9);
    let optimizer = Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip };
    let samples = Masked(open(case));
    let stats = world.stats().clone();
    let stages = Direct::new(program);
    let mut rank = Rank::new(&stages, world, device, split.reduction, 1234).unwrap();
    rank.replay_steps(CudaGraphs::Always, refused);
    rank.load(&Checkpoint::open(&common::golden(case)).unwrap()).unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let result = rank.gradients(&samples, step, None).unwrap();
        losses.push(result.loss.to_bits());
        norms.push(result.norm.to_bits());
        rank.update(&optimizer, lr.at(step), result.norm).unwrap();
    }
    let traffic = stats.traffic();
    let gradients = rank.whole_gradients().unwrap();
    let weights = rank.whole_weights().unwrap();
    let ended = gradients.zip(weights);
    let ended =
        ended.map(|(gradients, weights)| Ended { losses, norms, gradients, weights, traffic });
    (ended, rank.replays())
}

/// Trains on one GPU for each rank.
fn trained(case: &str, model: &ModelSpec, split: &Split, refused: Option<&'static str>) -> Ended {
    let (program, machine) = (split.program(model), machine());
    let what = (case, &program, split);
    let ended = match split.ranks() {
        1 => vec![train(what, Gpu::new(gpu(&machine)), Box::new(Solo::new()), refused)],
        ranks => {
            let (options, library) = (Options::default(), FakeNccl::new(machine.clone()));
            run_ranks(ranks, options, |control| {
                let gpu = gpu(&machine);
                let library = Arc::new(library.clone());
                let world = NcclComm::new(control, library, &gpu, options).unwrap();
                train(what, Gpu::new(gpu), Box::new(world), refused)
            })
        }
    };
    let replayed = if refused.is_some() { 0 } else { STEPS - 2 };
    let why_not = refused.map(str::to_owned);
    let wanted = Replays { replayed_steps: replayed, why_not };
    assert!(ended.iter().all(|(_, replays)| *replays == wanted), "{:?}", ended[0].1);
    ended.into_iter().next().and_then(|(ended, _)| ended).expect("the first rank's")
}

/// Compares replayed steps with launched ones.
fn check(case: &str, model: &ModelSpec, split: &Split) {
    let (launched, replayed) =
        (trained(case, model, split, Some("to compare")), trained(case, model, split, None));
    assert_eq!(launched.losses, replayed.losses, "losses of {split:?}");
    assert_eq!(launched.norms, replayed.norms, "norms of {split:?}");
    assert_eq!(launched.traffic, replayed.traffic, "traffic of {split:?}");
    assert!(launched == replayed, "gradients or weights of {split:?}");
    let norms: Vec<f64> = replayed.norms.iter().map(|bits| f64::from_bits(*bits)).collect();
    assert!(norms.iter().any(|norm| *norm > 0.9) && norms.iter().all(|norm| norm.is_finite()));
}

#[test]
fn golden_cases() {
    for case in ["llama_gqa", "gpt2"] {
        check(case, &model(case), &Split::default());
    }
}

/// Dropout draws differ in each step.
#[test]
fn dropout() {
    let case = "gpt2";
    let dropped = ModelSpec { dropout: 0.1, ..model(case) };
    check(case, &dropped, &Split { micro_batch: 4, ..Split::default() });
}

#[test]
fn a_pipeline_with_micro_batches_on_gpus_of_their_own() {
    let split = Split { pp: 2, micro_batch: 2, ..Split::default() };
    check("llama_gqa", &model("llama_gqa"), &split);
    let split = Split { schedule: ScheduleName::ZbH1, recompute: Recompute::Selective, ..split };
    check("llama_tied", &model("llama_tied"), &split);
}

#[test]
fn tensor_parallel_replicas_on_gpus_of_their_own() {
    let split = Split { tp: 2, dp: 2, micro_batch: 2, sequence_parallel: true, ..Split::default() };
    check("llama_gqa", &model("llama_gqa"), &split);
}

/// Its collectives run on threads and queues beside the rank's.
#[test]
fn a_vocabulary_over_the_pipeline() {
    let split = Split { pp: 2, micro_batch: 4, vocab: Vocab::Parallel2, ..Split::default() };
    check("llama_tied", &model("llama_tied"), &split);
}

/// Reasons for which steps are launched one by one.
#[test]
fn who_replays_nothing_says_why() {
    let (case, split) = ("llama_gqa", Split::default());
    let program = split.program(&model(case));
    let why = |rank: &mut Rank<'_, Gpu<f32>>| {
        rank.replay_steps(CudaGraphs::Always, None);
        rank.replays().why_not.unwrap_or_default()
    };
    let machine = machine();
    let alone = || Box::new(Solo::new());
    let [plain, early] = [false, true]
        .map(|post_validation| Direct::new(&Program { post_validation, ..program.clone() }));
    let new = |stages, world, device| Rank::new(stages, world, device, split.reduction, 1);
    let mut rank = new(&plain, alone(), Gpu::new(gpu(&machine))).unwrap();
    assert_eq!(why(&mut rank), "steps are replayed from the third on");
    let at_once = cuda::Gpu::on(Arc::new(machine.clone()));
    let mut rank = new(&plain, alone(), Gpu::new(at_once)).unwrap();
    assert_eq!(why(&mut rank), "the device records nothing");
    let mut rank = new(&early, alone(), Gpu::new(gpu(&machine))).unwrap();
    assert!(why(&mut rank).contains("post-validation"));
    let stages = Direct::new(&program);
    let mut rank = Rank::new(&stages, alone(), Host::<f32>::serial(), split.reduction, 1).unwrap();
    rank.replay_steps(CudaGraphs::Always, None);
    assert_eq!(rank.replays().why_not.unwrap(), "the rank is on a processor");

    let one = gpu(&machine);
    for (zero, why) in [(0, "ranks share the GPU"), (1, "gather updated weights into new memory")] {
        let shared = Split { dp: 2, micro_batch: 4, zero, ..split };
        let program = shared.program(&model(case));
        for said in run_ranks(2, Options::default(), |world| {
            let device = Gpu::<f32>::new(one.fork().unwrap());
            let stages = Direct::new(&program);
            let mut rank = Rank::new(&stages, world, device, shared.reduction, 1).unwrap();
            rank.replay_steps(CudaGraphs::Always, None);
            rank.replays().why_not
        }) {
            assert!(said.as_ref().is_some_and(|said| said.contains(why)), "{said:?}");
        }
    }
}

/// Trains a small model on an emulated GPU; returns the losses, and what the rank report says
/// of graphs.
fn trained_by_flags(folder: &Path, flags: &[&str]) -> (Vec<Value>, Value) {
    let stages = Direct::new(&Split::default().program(&model("llama_gqa")));
    let data = "../tests/golden/llama_gqa/tokens.safetensors";
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join(data);
    let [metrics, report] = ["metrics", "report"].map(|name| folder.join(name));
    // A run appends to existing metrics.
    let _new = std::fs::remove_file(&metrics);
    let paths = [("--data", &data), ("--metrics", &metrics), ("--rank-report", &report)];
    let paths = paths.map(|(flag, path)| format!("{flag}={}", path.display()));
    let words = ["trainer", "--gpu", "--steps=4"].into_iter().chain(flags.iter().copied());
    let flags = Flags::parse_from(words.chain(paths.iter().map(String::as_str)));
    let machine = CpuEmulator::new(&folder.join("machine")).unwrap();
    let gpu = cuda::Gpu::on(Arc::new(AsyncEmulator::new(machine, Duration::ZERO)));
    train_alone::<f32, _>(&stages, &flags, &Interrupt::default(), &gpu).unwrap();
    let lines = |path| std::fs::read_to_string(path).unwrap();
    let json = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let steps: Vec<Value> = lines(metrics).lines().map(json).collect();
    // Where a GPU computes, waits of the host are not those of the device.
    for step in &steps {
        assert!(step["step_s"].as_f64() > Some(0.0) && step.get("compute_s").is_none(), "{step}");
    }
    let losses = steps.iter().map(|step| step["loss"].clone()).collect();
    (losses, json(lines(report).trim())["cuda_graphs"].clone())
}

#[test]
fn steps_are_replayed_unless_that_is_refused() {
    let folder = std::env::temp_dir().join(format!("meshwright-graphs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (losses, said) = trained_by_flags(&folder, &["--cuda-graphs=always"]);
    assert_eq!((losses.len(), &said["replayed_steps"]), (4, &Value::from(2)), "{said}");
    assert!(said["why_not"].is_null());
    let trace = format!("--trace={}", folder.join("trace").display());
    for flag in ["--cuda-graphs=never", &trace] {
        let (launcher, said) = trained_by_flags(&folder, &[flag]);
        assert_eq!((&launcher, &said["replayed_steps"]), (&losses, &Value::from(0)));
        let why = said["why_not"].as_str().unwrap();
        assert!(why.starts_with(flag.split('=').next().unwrap()), "{why}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// What is exchanged along a sequence, and shards of weights, gradients and optimizer.
#[test]
fn a_sequence_and_state_that_ranks_share() {
    let hybrid = Split { cp: 4, cp_style: CpStyle::Hybrid, cp_ulysses: 2, ..Split::default() };
    check("llama_gqa", &model("llama_gqa"), &Split { zero: 3, micro_batch: 8, ..hybrid });
}
