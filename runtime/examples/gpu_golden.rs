//! Trains golden cases on a GPU and compares with PyTorch's results:
//!
//!     gpu_golden [--bf16] [--launched] [--on-cpu] [--steps N] FOLDER
//!
//! The folder is laid out as those of tests/golden. Prints one line of JSON: the largest
//! differences from `expected.json`, and `ok` or what is out of tolerance. In f32 the tolerances
//! are those of the golden cases' README; in bf16, losses may be off by 2e-3 of themselves. Steps
//! from the third on are replayed as a CUDA graph, unless `--launched` is given. Exits with 1 if
//! something is out of tolerance, with 2 if there is no GPU. `--on-cpu` runs the kernels on the
//! emulator.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Run, Split};
use direct::Direct;
use half::bf16;
use kernels::cuda::cpu_emulator::CpuEmulator;
use kernels::cuda::{self, Stored};
use models::input::Source;
use models::model::read;
use models::program::Program;
use runtime::comm::Solo;
use runtime::data;
use runtime::device::Gpu;
use runtime::state::checkpoint::{Checkpoint, TensorFile};
use runtime::{CudaGraphs, Number, Rank, Reduction, Scalar};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Largest relative difference of a loss in bf16.
const BF16_TOLERANCE: f64 = 2e-3;

#[derive(Default)]
struct Options {
    in_bf16: bool,
    launched: bool,
    on_cpu: bool,
    steps: usize,
    folder: PathBuf,
}

fn options() -> Options {
    let mut options = Options { steps: 20, ..Options::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--bf16" => options.in_bf16 = true,
            "--launched" => options.launched = true,
            "--on-cpu" => options.on_cpu = true,
            "--steps" => {
                let steps = words.next().and_then(|steps| steps.parse().ok());
                options.steps = steps.expect("--steps needs a whole number");
            }
            folder => options.folder = std::path::absolute(folder).expect("a folder"),
        }
    }
    options
}

fn main() -> ExitCode {
    let options = options();
    let gpu = match options.on_cpu {
        true => {
            let folder = std::env::temp_dir().join("meshwright-cuda-emulator");
            Ok(cuda::Gpu::on(Arc::new(CpuEmulator::new(&folder).expect("a folder"))))
        }
        false => cuda::Gpu::open(0),
    };
    let gpu = match gpu {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let mut row = json!({
        "case": options.folder.file_name().map(|name| name.to_string_lossy()),
        "format": if options.in_bf16 { "bf16" } else { "f32" },
        "steps": if options.launched { "launched" } else { "replayed" },
    });
    let judged = catch_unwind(AssertUnwindSafe(|| match options.in_bf16 {
        true => judge::<bf16>(&gpu, &options, &mut row),
        false => judge::<f32>(&gpu, &options, &mut row),
    }));
    let text = judged.err().map(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "panicked".to_owned())
    });
    row["result"] = json!(text.as_deref().unwrap_or("ok"));
    println!("{row}");
    ExitCode::from(u8::from(text.is_some()))
}

/// Trains, writes differences to `row` and panics if one is out of tolerance.
fn judge<S: Number + Stored>(gpu: &cuda::Gpu, options: &Options, row: &mut Value) {
    let case = options.folder.to_str().expect("a path in UTF-8");
    let begin = Instant::now();
    let run = train::<S>(gpu, options, row);
    row["seconds"] = json!(begin.elapsed().as_secs_f64());
    let trajectory = &common::expected(case)["trajectory"];
    let wanted: Vec<f64> = ["loss_f64", "loss"]
        .iter()
        .find_map(|name| trajectory[name].as_array())
        .expect("losses")
        .iter()
        .filter_map(Value::as_f64)
        .collect();
    let off = run.losses.iter().zip(&wanted).map(|(loss, wanted)| (loss / wanted - 1.0).abs());
    let worst_loss = off.fold(0.0, f64::max);
    row["worst_loss_relative"] = json!(worst_loss);
    row["losses"] = json!(run.losses);
    row["wanted"] = json!(wanted);
    row["norms"] = json!(run.norms);
    if options.folder.join("grads.safetensors").exists() {
        let golden = common::golden_gradients(case);
        let off = |(name, (_, found)): (&String, &(Vec<usize>, Vec<f64>))| {
            common::distance(found, &golden[name].1)
        };
        row["worst_gradient_relative"] = json!(run.gradients.iter().map(off).fold(0.0, f64::max));
    }
    match options.in_bf16 {
        true => assert!(worst_loss <= BF16_TOLERANCE, "a loss is off by {worst_loss:e}"),
        false => common::check(case, &run),
    }
}

fn train<S: Number + Stored>(gpu: &cuda::Gpu, options: &Options, row: &mut Value) -> Run {
    let program = program(&options.folder);
    let seq_len = program.model.seq_len;
    let tokens = options.folder.join("tokens.safetensors");
    let samples = data::open(&tokens, seq_len as usize, 0).expect("tokens");
    let stages = Direct::new(&program);
    let world = Box::new(Solo::new());
    let device = Gpu::<S>::new(gpu.fork().expect("a queue"));
    let mut rank = Rank::new(&stages, world, device, Reduction::default(), 1234).unwrap();
    rank.replay_steps(
        match options.launched {
            true => CudaGraphs::Never,
            false => CudaGraphs::Always,
        },
        None,
    );
    rank.load(&Checkpoint::open(&options.folder).unwrap()).unwrap();
    let expected = common::expected(options.folder.to_str().expect("a path in UTF-8"));
    let lr = expected["lr"].as_f64().unwrap_or(1e-3);
    let mut run = Run {
        losses: Vec::new(),
        norms: Vec::new(),
        aux_losses: Vec::new(),
        gradients: Default::default(),
        weights: Default::default(),
    };
    let small = options.folder.join("grads.safetensors").exists();
    for step in 0..options.steps as u64 {
        let result = rank.gradients(&*samples, step, None).unwrap();
        run.losses.push(result.loss);
        run.norms.push(result.norm);
        run.aux_losses.push(result.aux_loss);
        if step == 0 && small {
            run.gradients = wide(rank.whole_gradients().unwrap().unwrap_or_default());
        }
        rank.update(&common::optimizer(), lr, result.norm).unwrap();
    }
    if small {
        run.weights = wide(rank.whole_weights().unwrap().unwrap_or_default());
    }
    let replays = rank.replays();
    row["replayed_steps"] = json!(replays.replayed_steps);
    row["why_not"] = json!(replays.why_not);
    row["kernels"] = json!(rank.chosen_kernels());
    run
}

/// The folder's model on one rank, in one micro-batch of the batch of its tokens.
fn program(folder: &Path) -> Program {
    let tokens = TensorFile::open(&folder.join("tokens.safetensors")).expect("tokens");
    let shape = tokens.info("tokens").expect("a tensor `tokens`").shape.clone();
    let [_, batch, length] = shape[..] else { panic!("tokens of shape {shape:?}") };
    let config = std::fs::read(folder.join("config.json")).expect("config.json");
    let source = Source::from_bytes("config.json", config).expect("config.json");
    let model = read(&source).expect("config.json");
    let model = model.with_run(Some(length as u64 - 1), Some(batch as u64)).expect("a run");
    assert_eq!(batch, 8, "splits of these tests are of 8 sequences");
    Split::default().program(&model)
}

fn wide<T: Scalar>(
    tensors: runtime::state::checkpoint::Tensors<T>,
) -> runtime::state::checkpoint::Tensors<f64> {
    let widened = |values: Vec<T>| values.into_iter().map(kernels::Real::to_f64).collect();
    tensors.into_iter().map(|(name, (shape, values))| (name, (shape, widened(values)))).collect()
}
