//! The GPU device without a GPU: an emulator runs the CUDA twins as C++ on the CPU. Every kernel is
//! called in the order in which a GPU would be asked, but queues never lag behind the host.

mod common;

use common::{Run, Split, check, model, open, train_on, train_program};
use half::bf16;
use models::decisions::{CpStyle, Offload, Vocab};
use models::input::Source;
use models::model::{ModelSpec, read};
use models::program::Recompute;
use models::schedule::ScheduleName;
use runtime::Number;
use runtime::comm::{Options, run_ranks};
use runtime::data::{Sample, Samples};
use runtime::device::Gpu;
use runtime::kernels::cuda::{self, Stored, cpu_emulator::CpuEmulator};
use std::path::Path;
use std::sync::Arc;

/// The emulator; compiled sources are kept for the next run.
fn machine() -> cuda::Gpu {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-machine");
    cuda::Gpu::on(Arc::new(CpuEmulator::new(&folder).expect("a folder for compiled sources")))
}

/// Trains a golden case with all ranks on one GPU, each with a stream of its own.
fn train_gpu<S: Number + Stored>(case: &str, split: &Split, steps: usize) -> Run {
    train_on_gpu::<S>(&machine(), case, split, steps)
}

fn train_on_gpu<S: Number + Stored>(
    gpu: &cuda::Gpu,
    case: &str,
    split: &Split,
    steps: usize,
) -> Run {
    let (program, samples) = (split.program(&model(case)), open(case));
    let run = |world| {
        let device = Gpu::<S>::new(gpu.fork().expect("a queue"));
        train_on(device, &program, split, steps, Some(case), &*samples, world)
    };
    run_ranks(split.ranks(), Options::default(), run).swap_remove(0).unwrap()
}

#[test]
fn golden_cases_in_f32() {
    for case in ["llama_gqa", "gpt2", "stablelm"] {
        check(case, &train_gpu::<f32>(case, &Split::default(), 1));
    }
}

#[test]
fn ranks_that_share_a_gpu_in_f32() {
    let split = Split { tp: 2, pp: 2, dp: 2, micro_batch: 2, ..Split::default() };
    let split = Split { sequence_parallel: true, recompute: Recompute::Selective, ..split };
    check("llama_gqa", &train_gpu::<f32>("llama_gqa", &split, 1));
}

#[test]
fn a_sequence_and_state_that_ranks_share_in_f32() {
    let hybrid = Split { cp: 4, cp_style: CpStyle::Hybrid, cp_ulysses: 2, ..Split::default() };
    let zigzag = Split { cp: 2, dp: 2, tp: 2, micro_batch: 2, ..Split::default() };
    let host = Split { offload: Offload::Optimizer, zero: 2, ..zigzag };
    for split in [Split { zero: 1, ..hybrid }, Split { zero: 3, ..zigzag }, host] {
        check("llama_gqa", &train_gpu::<f32>("llama_gqa", &split, 1));
    }
}

/// Each step brings experts other numbers of rows.
#[test]
fn memory_for_rows_of_experts_does_not_pile_up() {
    let split = Split { ep: 2, dp: 2, micro_batch: 4, ..Split::default() };
    let bytes_after = |steps| {
        let gpu = machine();
        train_on_gpu::<f32>(&gpu, "mixtral", &split, steps);
        gpu.bytes_beyond_arena()
    };
    let [early, late] = [4, 16].map(bytes_after);
    // More steps meet larger numbers of rows, so memory may still grow a little.
    assert!(late * 4 <= early * 5, "{late} bytes after 16 steps, {early} after 4");
}

#[test]
fn a_vocabulary_over_the_pipeline_in_f32() {
    let split = Split { pp: 2, micro_batch: 4, vocab: Vocab::Parallel2, ..Split::default() };
    check("llama_tied", &train_gpu::<f32>("llama_tied", &split, 1));
}

/// Arbitrary tokens.
struct Noise;

impl Samples for Noise {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn repeats(&self) -> bool {
        true
    }

    fn read(&self, index: u64) -> Result<Sample, runtime::Error> {
        let token = |i: u64| ((index * 31 + i * i * 7) % 96) as i64;
        Ok(Sample::of_tokens((0..33).map(token).collect()))
    }
}

/// Models with heads of 16, the narrowest for tensor cores, in bf16 against the CPU's f32: one with
/// grouped queries, and one with latent attention, whose keys are wider than its values.
#[test]
fn heads_of_16_in_bf16() {
    for heads in
        ["kv_heads: 2", "head_dim: 16\nmla: {q_rank: 24, kv_rank: 16, rope_dim: 16, value_dim: 16}"]
    {
        let text = format!(
            "name: small\nlayers: 2\nhidden: 64\nheads: 4\n{heads}\nffn: 96\nvocab: 96\n\
             seq_len: 32\nglobal_batch: 8\n"
        );
        let source = Source::from_bytes("small.yaml", text.into_bytes()).unwrap();
        in_bf16(&read(&source).unwrap());
    }
}

fn in_bf16(model: &ModelSpec) {
    let gpu = machine();
    let schedule = ScheduleName::ZbH1;
    let split = Split { pp: 2, tp: 2, micro_batch: 4, schedule, ..Split::default() };
    let shared = Split { cp: 2, dp: 2, zero: 3, micro_batch: 2, ..Split::default() };
    let ulysses = Split { cp: 2, cp_style: CpStyle::Ulysses, zero: 2, ..Split::default() };
    for split in [Split::default(), split, shared, ulysses] {
        let program = split.program(model);
        let run = |world| {
            let device = Gpu::<bf16>::new(gpu.fork().expect("a queue"));
            train_on(device, &program, &split, 2, None, &Noise, world)
        };
        let run = run_ranks(split.ranks(), Options::default(), run).swap_remove(0).unwrap();
        let exact = train_program::<f32>(&program, &split, 2, None, &Noise);
        let near = |what: &str, found: &[f64], wanted: &[f64], tolerance: f64| {
            for (step, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                let off = (found / wanted - 1.0).abs();
                assert!(off <= tolerance, "{split:?}: {what} of step {step} is off by {off:e}");
            }
        };
        near("loss", &run.losses, &exact.losses, 2e-3);
        near("norm", &run.norms, &exact.norms, 2e-2);
        for (name, (_, wanted)) in &exact.gradients {
            let off = common::distance(&run.gradients[name].1, wanted);
            assert!(off <= 0.1, "{split:?}: gradient of {name} is off by {off:e}");
        }
    }
}
