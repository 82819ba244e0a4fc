//! Runs golden cases under any split, with ranks as threads, and compares with PyTorch's results.

#![allow(dead_code)] // each test is a program of its own and uses a part of this

pub mod covering;

use direct::Direct;
use models::decisions::{
    AuxScope, CpStyle, DpReduction, MoeOverlap, Offload, RankOrder, USUAL_BUCKET_MIB, Vocab,
};
use models::formulas::vocabulary;
use models::input::Source;
use models::mesh::{ExpertSplit, Mesh};
use models::model::{ModelSpec, read};
use models::program::{Program, Recompute, StageProgram};
use models::schedule::{PassTimes, Schedule, ScheduleError, ScheduleName};
use runtime::comm::{Communicator, Options, run_ranks};
use runtime::data::{self, Samples};
use runtime::state::checkpoint::{self, Checkpoint, TensorFile, Whole};
use runtime::{Device, Host, LrSchedule, LrShape, Optimizer, Rank, Reduction, Scalar};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Directory of a golden case.
pub fn golden(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(case)
}

/// A case's model, with its sequence length and batch.
pub fn model(case: &str) -> ModelSpec {
    let of = |file: &&str| golden(case).join(file).exists();
    let file = ["config.json", "model.yaml"].into_iter().find(of).unwrap();
    let bytes = std::fs::read(golden(case).join(file)).unwrap();
    let source = Source::from_bytes(file, bytes).unwrap();
    read(&source).unwrap().with_run(Some(32), Some(8)).unwrap()
}

/// How a run is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    pub tp: usize,
    pub pp: usize,
    pub vpp: usize,
    pub dp: usize,
    pub cp: usize,
    pub cp_style: CpStyle,
    /// Ulysses degree inside `cp`; 0 for the style's own.
    pub cp_ulysses: usize,
    pub micro_batch: usize,
    /// Ranks that have different experts, and tensor-parallel ranks of an expert.
    pub ep: usize,
    pub etp: usize,
    pub aux_scope: AuxScope,
    /// What hides the all-to-alls of experts, and chunks of rows.
    pub moe_overlap: MoeOverlap,
    pub moe_chunks: usize,
    pub sequence_parallel: bool,
    pub fused_loss: bool,
    pub recompute: Recompute,
    /// Layers that full recomputation keeps one input of.
    pub recompute_group: usize,
    pub schedule: ScheduleName,
    /// How vocabulary layers are placed, and which layers the end stages have beside them.
    pub vocab: Vocab,
    pub order: RankOrder,
    pub reduction: Reduction,
    /// ZeRO stage.
    pub zero: u8,
    /// Replicas that share one copy of the state; 0 for all.
    pub dp_shard: usize,
    pub offload: Offload,
    pub delays: Option<runtime::comm::Delays>,
}

impl Default for Split {
    fn default() -> Self {
        Self {
            tp: 1,
            pp: 1,
            vpp: 1,
            dp: 1,
            cp: 1,
            cp_style: CpStyle::Zigzag,
            cp_ulysses: 0,
            micro_batch: 8,
            ep: 1,
            etp: 1,
            aux_scope: AuxScope::MicroBatch,
            moe_overlap: MoeOverlap::None,
            moe_chunks: 1,
            sequence_parallel: false,
            fused_loss: false,
            recompute: Recompute::None,
            recompute_group: 1,
            schedule: ScheduleName::OneFOneB,
            vocab: Vocab::FirstLast,
            order: RankOrder::DpInner,
            reduction: Reduction::Buckets { bytes: 1 << 14 },
            zero: 0,
            dp_shard: 0,
            offload: Offload::None,
            delays: None,
        }
    }
}

impl Split {
    pub fn ranks(&self) -> usize {
        self.tp * self.pp * self.dp * self.cp
    }

    pub fn micro_batches(&self) -> usize {
        8 / self.dp / self.micro_batch
    }

    pub fn ulysses(&self) -> usize {
        match (self.cp_style, self.cp_ulysses) {
            (CpStyle::Ulysses, _) => self.cp,
            (CpStyle::Hybrid, ways) => ways.max(1),
            _ => 1,
        }
    }

    /// Whether the split exists for 4 layers and 8 sequences.
    pub fn exists(&self) -> bool {
        let whole = 8 % (self.dp * self.micro_batch) == 0 && self.pp * self.vpp <= 4;
        // tests/schedules.rs covers schedules with two copies of each stage.
        let once = self.schedule.layout(self.vpp).copies() == 1;
        whole && once && self.schedule.check(self.pp, self.micro_batches(), self.vpp).is_ok()
    }

    /// Number of layers of each stage. `first_last`: as even as possible; `redistribute`: by layer
    /// redistribution; `tensor`: none at the ends, the least even cut that the solver may choose.
    pub fn layers(&self, model: &ModelSpec) -> Vec<usize> {
        let count = self.pp * self.vpp / self.schedule.layout(self.vpp).copies();
        let even = |layers: usize, stages: usize| {
            (0..stages).map(move |n| (n + 1) * layers / stages - n * layers / stages)
        };
        match self.vocab {
            Vocab::Redistribute => {
                let [hidden, vocab] = [model.hidden, model.vocab].map(|size| size as f64);
                let seq_len = model.seq_len as f64;
                let output = vocabulary::output_compute_ratio(vocab, hidden, seq_len);
                let input = vocabulary::input_compute_ratio(hidden, seq_len);
                let (_, layers) =
                    vocabulary::redis(model.layers as u64, count as u64, input, output);
                layers.into_iter().map(|layers| layers as usize).collect()
            }
            Vocab::Tensor if count == 2 => vec![model.layers, 0],
            Vocab::Tensor if count > 2 => {
                let inner = even(model.layers, count - 2);
                std::iter::once(0).chain(inner).chain([0]).collect()
            }
            _ => even(model.layers, count).collect(),
        }
    }

    fn stages(&self, model: &ModelSpec) -> Vec<StageProgram> {
        let mut first_layer = 0;
        let stage = |layers: usize| {
            let recompute = vec![self.recompute; layers];
            first_layer += layers;
            StageProgram { first_layer: first_layer - layers, recompute }
        };
        self.layers(model).into_iter().map(stage).collect()
    }

    pub fn program(&self, model: &ModelSpec) -> Program {
        let naive = self.schedule == ScheduleName::Naive;
        let (micro_batch, micro_batches) = match naive {
            true => (8 / self.dp, 1),
            false => (self.micro_batch, self.micro_batches()),
        };
        let schedule =
            schedule(self.schedule, self.pp, micro_batches, self.vpp, self.vocab).unwrap();
        Program {
            model: model.clone(),
            mesh: Mesh {
                tp: self.tp as u64,
                cp: self.cp as u64,
                dp: self.dp as u64,
                pp: self.pp as u64,
                order: self.order,
            },
            experts: model
                .moe
                .as_ref()
                .map(|_| ExpertSplit { ep: self.ep as u64, etp: self.etp as u64 }),
            aux_scope: self.aux_scope,
            moe_overlap: self.moe_overlap,
            moe_chunks: self.moe_chunks,
            sequence_parallel: self.sequence_parallel && self.tp > 1,
            fused_loss: self.fused_loss,
            cp_style: self.cp_style,
            cp_ulysses: self.ulysses(),
            micro_batch,
            micro_batches,
            layout: schedule.layout,
            vocab: schedule.vocab,
            zero_stage: self.zero,
            dp_shard: match (self.zero, self.dp_shard) {
                (0, _) => 1,
                (_, 0) => self.dp * self.cp,
                (_, ways) => ways,
            },
            offload: self.offload,
            dp_reduction: DpReduction::Bucketed,
            dp_bucket_mib: USUAL_BUCKET_MIB,
            post_validation: false,
            recompute_group: self.recompute_group,
            stages: self.stages(model),
            passes: schedule.by_rank(),
            planned_memory_bytes: 0,
        }
    }
}

/// A schedule, with vocabulary passes if the vocabulary is split over the pipeline.
pub fn schedule(
    name: ScheduleName,
    pp: usize,
    micro_batches: usize,
    chunks: usize,
    vocab: Vocab,
) -> Result<Schedule, ScheduleError> {
    match vocab.passes() {
        Some(passes) => {
            let schedule = name.build_with_vocab(pp, micro_batches, chunks, passes, None)?;
            schedule.with_input_passes(PassTimes::default())
        }
        None => name.build(pp, micro_batches, chunks),
    }
}

/// Results of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    /// What routers add to losses.
    pub aux_losses: Vec<f64>,
    /// Of step 0, before clipping.
    pub gradients: BTreeMap<String, Whole<f64>>,
    /// After the last step.
    pub weights: BTreeMap<String, Whole<f64>>,
}

pub fn optimizer() -> Optimizer {
    Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) }
}

fn widen<T: Scalar>(tensors: BTreeMap<String, Whole<T>>) -> BTreeMap<String, Whole<f64>> {
    let wide = |values: Vec<T>| values.into_iter().map(kernels::Real::to_f64).collect();
    tensors.into_iter().map(|(name, (shape, values))| (name, (shape, wide(values)))).collect()
}

/// Trains a case from its weights, as its README says.
pub fn train<T: Scalar>(case: &str, split: &Split, steps: usize) -> Run {
    train_program::<T>(&split.program(&model(case)), split, steps, Some(case), &*open(case))
}

/// Trains a program, from a case's weights or from its seed.
pub fn train_program<T: Scalar>(
    program: &Program,
    split: &Split,
    steps: usize,
    init: Option<&str>,
    samples: &dyn Samples,
) -> Run {
    let options = Options { delays: split.delays, ..Options::default() };
    let run = |world| train_rank::<T>(program, split, steps, init, samples, world);
    run_ranks(split.ranks(), options, run).swap_remove(0).unwrap()
}

/// One rank of [`train_program`]; rank 0 returns the result.
pub fn train_rank<T: Scalar>(
    program: &Program,
    split: &Split,
    steps: usize,
    init: Option<&str>,
    samples: &dyn Samples,
    world: Box<dyn Communicator>,
) -> Option<Run> {
    train_on(Host::<T>::serial(), program, split, steps, init, samples, world)
}

/// The same on a device.
pub fn train_on<D: Device>(
    device: D,
    program: &Program,
    split: &Split,
    steps: usize,
    init: Option<&str>,
    samples: &dyn Samples,
    world: Box<dyn Communicator>,
) -> Option<Run> {
    let lr = LrSchedule { peak: 1e-3, shape: LrShape::Constant, warmup: 0, steps: steps as u64 };
    let stages = Direct::new(program);
    let mut rank = Rank::new(&stages, world, device, split.reduction, 1234).unwrap();
    match init {
        Some(case) => rank.load(&Checkpoint::open(&golden(case)).unwrap()).unwrap(),
        None => rank.initialise().unwrap(),
    }
    let (mut losses, mut norms, mut aux_losses) = (Vec::new(), Vec::new(), Vec::new());
    let mut gradients = None;
    for step in 0..steps as u64 {
        let result = rank.gradients(samples, step, None).unwrap();
        losses.push(result.loss);
        norms.push(result.norm);
        aux_losses.push(result.aux_loss);
        if step == 0 {
            gradients = rank.whole_gradients().unwrap();
        }
        rank.update(&optimizer(), lr.at(step), result.norm).unwrap();
    }
    let weights = rank.whole_weights().unwrap();
    let gradients = widen(gradients.unwrap_or_default());
    Some(Run { losses, norms, aux_losses, gradients, weights: widen(weights?) })
}

pub fn open(case: &str) -> Box<dyn Samples> {
    data::open(&golden(case).join("tokens.safetensors"), 32, 0).unwrap()
}

/// A checkpoint of a case's weights, changed, as a file for the caller to delete.
pub fn changed(case: &str, change: impl Fn(&str, &mut [f64])) -> PathBuf {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let file = TensorFile::open(&golden(case).join("model.safetensors")).unwrap();
    let read = |name: String| {
        let (shape, mut values): Whole<f64> = file.read(&name).unwrap();
        change(&name, &mut values);
        (name, (shape, values))
    };
    let tensors = file.names().into_iter().map(read).collect();
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let name = format!("{case}-{}-{number}.safetensors", std::process::id());
    let path = std::env::temp_dir().join(name);
    checkpoint::write(&mut File::create(&path).unwrap(), &tensors).unwrap();
    path
}

pub fn expected(case: &str) -> Value {
    let text = std::fs::read_to_string(golden(case).join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

pub fn golden_gradients(case: &str) -> BTreeMap<String, Whole<f64>> {
    let file = TensorFile::open(&golden(case).join("grads.safetensors")).unwrap();
    file.names().into_iter().map(|name| (name.clone(), file.read(&name).unwrap())).collect()
}

/// ||a - b|| / ||b||
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    square(&mut a.iter().zip(b).map(|(a, b)| a - b)) / square(&mut b.iter().copied())
}

/// Compares an f64 run with one rank's: losses to 1e-12, gradients to 1e-11.
pub fn compare(what: &str, run: &Run, reference: &Run) {
    for (step, (found, expected)) in run.losses.iter().zip(&reference.losses).enumerate() {
        let off = (found - expected).abs();
        assert!(off <= 1e-12, "{what}: loss of step {step} is off by {off:e}");
    }
    for (step, (found, expected)) in run.norms.iter().zip(&reference.norms).enumerate() {
        let off = (found / expected - 1.0).abs();
        assert!(off <= 1e-11, "{what}: norm of step {step} is off by {off:e}");
    }
    for (step, (found, expected)) in run.aux_losses.iter().zip(&reference.aux_losses).enumerate() {
        let off = (found - expected).abs();
        assert!(off <= 1e-12, "{what}: auxiliary loss of step {step} is off by {off:e}");
    }
    assert!(run.gradients.keys().eq(reference.gradients.keys()), "{what}: other parameters");
    for (name, (shape, values)) in &run.gradients {
        assert_eq!(shape, &reference.gradients[name].0, "{what}: {name}");
        let expected = &reference.gradients[name].1;
        if expected.iter().all(|value| *value == 0.0) {
            assert_eq!(values, expected, "{what}: gradient of {name}");
            continue;
        }
        let off = distance(values, expected);
        assert!(off <= 1e-11, "{what}: gradient of {name} is off by {off:e}");
    }
    for (name, (_, values)) in &run.weights {
        let expected = &reference.weights[name].1;
        let off = if values == expected { 0.0 } else { distance(values, expected) };
        assert!(off <= 1e-8, "{what}: {name} is off by {off:e}");
    }
}

/// The README's checksums of a tensor: sum, l2 and dot.
pub fn checksums(values: &[f64]) -> [f64; 3] {
    let dot = |(i, x): (usize, &f64)| x * ((i % 997 + 1) as f64 / 997.0);
    [
        values.iter().sum(),
        values.iter().map(|x| x * x).sum::<f64>().sqrt(),
        values.iter().enumerate().map(dot).sum(),
    ]
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn near(what: &str, found: f64, expected: f64, tolerance: f64) {
    let off = (found - expected).abs();
    assert!(off <= tolerance, "{what}: {found} is not {expected}: off by {off:e} > {tolerance:e}");
}

/// Compares an f32 run of up to all 20 steps, with the README's tolerances.
pub fn check(case: &str, run: &Run) {
    let expected = expected(case);
    check_trajectory(&expected, &run.losses, &run.norms);
    check_gradients(case, run);
    if run.losses.len() == 20 {
        check_weights(case, &expected, run);
    }
}

/// Compares losses and gradient norms with the README's tolerances.
pub fn check_trajectory_of(case: &str, losses: &[f64], norms: &[f64]) {
    check_trajectory(&expected(case), losses, norms);
}

fn check_trajectory(expected: &Value, losses: &[f64], norms: &[f64]) {
    let step0 = &expected["step0"];
    near("step-0 loss", losses[0], number(&step0["loss_f64"]), 5e-6);
    let trajectory = &expected["trajectory"];
    for (step, (&loss, &norm)) in losses.iter().zip(norms).enumerate() {
        let tolerance = if step < 5 { 3e-5 } else { 1e-4 };
        let wanted = number(&trajectory["loss_f64"][step]);
        near(&format!("loss of step {step}"), loss, wanted, tolerance);
        let wanted = number(&trajectory["grad_norm_f64"][step]);
        near(&format!("gradient norm of step {step}"), norm, wanted, tolerance * wanted);
    }
}

fn check_gradients(case: &str, run: &Run) {
    let golden = golden_gradients(case);
    assert!(run.gradients.keys().eq(golden.keys()), "{:?}", run.gradients.keys());
    for (name, (shape, values)) in &run.gradients {
        let (golden_shape, golden) = &golden[name];
        assert_eq!(shape, golden_shape, "{name}");
        let off = distance(values, golden);
        assert!(off <= 3e-5, "gradient of {name} is off by {off:e}");
    }
}

fn check_weights(case: &str, expected: &Value, run: &Run) {
    let file = TensorFile::open(&golden(case).join("model.safetensors")).unwrap();
    for (name, (_, values)) in &run.weights {
        if name.ends_with("e_score_correction_bias") {
            // Training leaves it as it is.
            let (_, initial): Whole<f64> = file.read(name).unwrap();
            assert!(*values == initial && values.iter().any(|value| *value != 0.0), "{name}");
            continue;
        }
        let noisy = case.ends_with("gpt2") && name.ends_with("c_attn.bias");
        let tolerance = if noisy { 1e-3 } else { 1e-4 };
        let wanted = &expected["params"][name]["final_f64"];
        let [sum, l2, dot] = checksums(values);
        let wide = tolerance * number(&wanted["l2"]) * (values.len() as f64).sqrt();
        near(&format!("l2 of {name}"), l2, number(&wanted["l2"]), tolerance * l2);
        near(&format!("sum of {name}"), sum, number(&wanted["sum"]), wide);
        near(&format!("dot of {name}"), dot, number(&wanted["dot"]), wide);
    }
}

/// A paragraph in lines of 100 columns; tables stay as they are.
fn wrapped(paragraph: &str) -> String {
    if paragraph.starts_with('|') {
        return paragraph.to_owned();
    }
    let mut lines = vec![String::new()];
    for word in paragraph.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.len() + 1 + word.len() <= 100 => *line += &format!(" {word}"),
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// Replaces a section of docs/equivalence.md, from its heading to the next.
pub fn write_section(title: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/equivalence.md");
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    let (head, sections) = known.split_once("\n## ").unwrap_or((&known, ""));
    let others = sections.split("\n## ").filter_map(|section| section.split_once("\n\n"));
    let mut sections: BTreeMap<&str, &str> = others.collect();
    sections.insert(title, text);
    let mut page = head.trim_end().to_owned() + "\n";
    for (title, text) in sections {
        let paragraphs: Vec<String> = text.trim().split("\n\n").map(wrapped).collect();
        page += &format!("\n## {title}\n\n{}\n", paragraphs.join("\n\n"));
    }
    std::fs::write(path, page).unwrap();
}
