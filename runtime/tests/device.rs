//! Training on a fake asynchronous device, whose memory the host cannot see. No layer bypasses the
//! device, no stream runs ahead of its inputs, and ranks that share a device exchange its memory.

mod channels;
mod common;
mod fake_async_device;

use channels::run_wired;
use common::{Run, Split, check, model, open, train, train_on};
use direct::Direct;
use fake_async_device::{FakeAsyncDevice, SharedDevice};
use half::bf16;
use models::decisions::{CpStyle, Vocab};
use models::program::{Program, Recompute};
use models::schedule::ScheduleName;
use runtime::comm::{CommError, Options, run_ranks};
use runtime::device::DeviceError;
use runtime::{Device, Error, Host, Number, Rank, Scalar};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Trains a golden case with all ranks on one device.
fn train_async<S: Number, W: Scalar, const MASTERS: bool>(
    shared: &Arc<SharedDevice>,
    case: &str,
    split: &Split,
    steps: usize,
) -> Run {
    let (program, samples) = (split.program(&model(case)), open(case));
    let run = |world| {
        let device = FakeAsyncDevice::<S, W, MASTERS>::on(shared);
        train_on(device, &program, split, steps, Some(case), &*samples, world)
    };
    run_ranks(split.ranks(), Options::default(), run).swap_remove(0).unwrap()
}

/// Splits that together cover everything that ranks exchange.
fn splits() -> [Split; 11] {
    let d = Split::default();
    let vocab = Split { pp: 2, tp: 2, micro_batch: 2, sequence_parallel: true, ..d };
    [
        d,
        Split { tp: 2, pp: 2, dp: 2, micro_batch: 1, sequence_parallel: true, ..d },
        Split { tp: 4, dp: 2, micro_batch: 2, recompute: Recompute::Selective, ..d },
        Split {
            tp: 2,
            pp: 2,
            vpp: 2,
            micro_batch: 2,
            recompute: Recompute::Full,
            schedule: ScheduleName::Interleaved1F1B,
            ..d
        },
        Split { pp: 2, micro_batch: 1, schedule: ScheduleName::ZbH1, ..d },
        Split { pp: 2, vpp: 2, micro_batch: 1, schedule: ScheduleName::ZbV, ..d },
        Split { vocab: Vocab::ParallelNaive, ..vocab },
        Split { vocab: Vocab::Parallel1, ..vocab },
        Split { vocab: Vocab::Parallel2, ..vocab },
        Split { cp: 2, dp: 2, tp: 2, zero: 3, micro_batch: 2, ..d },
        Split { cp: 4, cp_style: CpStyle::Hybrid, cp_ulysses: 2, zero: 2, pp: 2, ..d },
    ]
}

/// The same bits as on the host, for every split.
#[test]
fn a_device_comes_to_the_bits_of_the_host() {
    for case in ["llama_tied", "gpt2", "gemma2"] {
        for split in splits() {
            let shared = Arc::new(SharedDevice::default());
            let found = train_async::<f32, f32, false>(&shared, case, &split, 3);
            assert!(found == train::<f32>(case, &split, 3), "{case} {split:?}");
        }
    }
}

/// A whole golden case with separate exact weights, which equal the weights that layers read.
#[test]
fn exact_weights_apart_change_nothing() {
    let shared = Arc::new(SharedDevice::default());
    let run = train_async::<f32, f32, true>(&shared, "llama_gqa", &Split::default(), 20);
    check("llama_gqa", &run);
    assert!(run == train::<f32>("llama_gqa", &Split::default(), 20));
}

/// Tensors in bf16, sums and exact weights in f32, on the device and on the CPU: PyTorch's f64
/// losses within 2e-3 and gradient norms within 2e-2, relative, under all splits. Single tensors of
/// so small a model differ by more, those of keys most.
#[test]
fn bf16_with_exact_weights_in_f32() {
    for case in ["llama_gqa", "gpt2"] {
        let expected = common::expected(case);
        let golden = common::golden_gradients(case);
        for split in splits() {
            let shared = Arc::new(SharedDevice::default());
            let on_device = train_async::<bf16, f32, true>(&shared, case, &split, 5);
            let (program, samples) = (split.program(&model(case)), open(case));
            let on_host = |world| {
                let host = Host::<bf16, f32>::serial();
                train_on(host, &program, &split, 5, Some(case), &*samples, world)
            };
            let ranks = split.ranks();
            let on_host = run_ranks(ranks, Options::default(), on_host).swap_remove(0).unwrap();
            for run in [on_device, on_host] {
                let near = |what: &str, found: &[f64], tolerance: f64| {
                    for (step, found) in found.iter().enumerate() {
                        let wanted = expected["trajectory"][what][step].as_f64().unwrap();
                        let off = (found / wanted - 1.0).abs();
                        assert!(
                            off <= tolerance,
                            "{case} {split:?} {what} of step {step}: {off:e}"
                        );
                    }
                };
                near("loss_f64", &run.losses, 2e-3);
                near("grad_norm_f64", &run.norms, 2e-2);
                for (name, (_, values)) in &run.gradients {
                    let off = common::distance(values, &golden[name].1);
                    assert!(off <= 0.1, "{case} {split:?}: gradient of {name} is off by {off:e}");
                }
            }
        }
    }
}

/// Norm weights are about 1, where bf16 has 256 steps to the next power of two. Without exact
/// weights, rounding loses an update.
#[test]
fn exact_weights_keep_what_rounding_would_lose() {
    let shared = Arc::new(SharedDevice::default());
    let case = "llama_gqa";
    let apart = train_async::<bf16, f32, true>(&shared, case, &Split::default(), 20);
    let rounded = train_async::<bf16, f32, false>(&shared, case, &Split::default(), 20);
    let exact = train::<f32>(case, &Split::default(), 20);
    let off = |run: &Run| {
        let norms = exact.weights.iter().filter(|(name, _)| name.ends_with("norm.weight"));
        let of = norms.map(|(name, (_, wanted))| {
            // Distance from the initial value, 1.
            let moved = |values: &[f64]| values.iter().map(|value| value - 1.0).collect::<Vec<_>>();
            common::distance(&moved(&run.weights[name].1), &moved(wanted))
        });
        of.fold(0.0, f64::max)
    };
    let (apart, rounded) = (off(&apart), off(&rounded));
    assert!(apart < 0.02 && rounded > 0.1, "{apart} {rounded}");
}

/// A step downloads two sums, and uploads the tokens of each micro-batch, in their order and by id,
/// and its labels.
#[test]
fn a_step_reads_two_sums_and_nothing_else() {
    for split in [splits()[0], splits()[1], splits()[4]] {
        let (case, shared) = ("llama_gqa", Arc::new(SharedDevice::default()));
        let (program, samples) = (split.program(&model(case)), open(case));
        run_ranks(split.ranks(), Options::default(), |world| {
            let device = FakeAsyncDevice::<f32, f32>::on(&shared);
            let stages = Direct::new(&program);
            let mut rank = Rank::new(&stages, world, device, split.reduction, 1).unwrap();
            rank.initialise().unwrap();
            rank.groups().world.barrier().unwrap();
            let before = counts(&shared);
            rank.groups().world.barrier().unwrap();
            for step in 0..2 {
                let result = rank.gradients(&*samples, step, None).unwrap();
                rank.update(&common::optimizer(), 1e-3, result.norm).unwrap();
            }
            rank.groups().world.barrier().unwrap();
            let after = counts(&shared);
            let (steps, ranks) = (2, split.ranks());
            assert_eq!(after[0] - before[0], steps * ranks * 3 * split.micro_batches(), "uploads");
            assert_eq!(after[1] - before[1], 0, "downloads");
            assert_eq!(after[2] - before[2], steps * ranks * 2, "sums");
        });
    }
}

fn counts(shared: &SharedDevice) -> [usize; 3] {
    [&shared.uploads, &shared.downloads, &shared.reads].map(|n| n.load(Ordering::Relaxed))
}

/// Ranks in other processes exchange copies on the host.
#[test]
fn ranks_as_processes_go_by_way_of_the_host() {
    let split = Split { tp: 2, pp: 2, micro_batch: 2, ..Split::default() };
    let (case, shared) = ("llama_gqa", Arc::new(SharedDevice::default()));
    let (program, samples) = (split.program(&model(case)), open(case));
    let run = |world| {
        let device = FakeAsyncDevice::<f32, f32>::on(&shared);
        train_on(device, &program, &split, 2, Some(case), &*samples, world)
    };
    let found = run_wired(split.ranks(), Options::default(), run).swap_remove(0).unwrap();
    assert!(found == train::<f32>(case, &split, 2));
}

/// Post-validation, with and without separate exact weights.
#[test]
fn post_validation_on_a_device() {
    let split = Split { pp: 2, micro_batch: 1, schedule: ScheduleName::ZbH1, ..Split::default() };
    let case = "llama_gqa";
    let program = Program { post_validation: true, ..split.program(&model(case)) };
    fn ahead<D: Device>(program: &Program, device: impl Fn() -> D + Sync) -> Vec<(f64, f64)> {
        let samples = open("llama_gqa");
        let run = |world| {
            let reduction = Split::default().reduction;
            let stages = Direct::new(program);
            let mut rank = Rank::new(&stages, world, device(), reduction, 5).unwrap();
            rank.initialise().unwrap();
            let mut results = Vec::new();
            for step in 0..4 {
                let optimizer = common::optimizer();
                results.extend(rank.step_ahead(&*samples, step, &optimizer, 1e-3).unwrap());
            }
            results.extend(rank.settle().unwrap());
            results.iter().map(|result| (result.loss, result.norm)).collect()
        };
        run_ranks(program.world_size(), Options::default(), run).swap_remove(0)
    }
    let shared = Arc::new(SharedDevice::default());
    let host = ahead(&program, Host::<f32>::serial);
    assert_eq!(ahead(&program, || FakeAsyncDevice::<f32, f32>::on(&shared)), host);
    assert_eq!(ahead(&program, || FakeAsyncDevice::<f32, f32, true>::on(&shared)), host);
}

/// The next call that waits reports a failure of the device, which ends all ranks.
#[test]
fn a_device_that_fails_ends_the_run() {
    let split = Split { pp: 2, micro_batch: 2, ..Split::default() };
    let (case, shared) = ("llama_gqa", Arc::new(SharedDevice::default()));
    let (program, samples) = (split.program(&model(case)), open(case));
    let ends = run_ranks(split.ranks(), Options::default(), |world| {
        let device = FakeAsyncDevice::<f32, f32>::on(&shared);
        let stages = Direct::new(&program);
        let mut rank = Rank::new(&stages, world, device, split.reduction, 1).unwrap();
        rank.initialise().unwrap();
        rank.gradients(&*samples, 0, None).unwrap();
        rank.groups().world.barrier().unwrap();
        shared.fail("an illegal address");
        rank.gradients(&*samples, 1, None).map(|result| result.loss)
    });
    let wanted = DeviceError("an illegal address".to_owned());
    for end in ends {
        assert!(
            matches!(end, Err(Error::Comm(CommError::Device(ref why))) if *why == wanted),
            "{end:?}"
        );
    }
}
