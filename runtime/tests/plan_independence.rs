//! What no split may change, beyond the golden cases: initial weights, dropout, masked labels, and
//! a backward pass that is cut in two.

mod common;

use common::{Run, Split, distance, golden, model, open, train_program};
use models::decisions::CpStyle;
use models::model::ModelSpec;
use models::program::{Program, Recompute};
use models::schedule::{Pass, PassKind, PassOrder, ScheduleName, StageLayout};
use runtime::data::{Sample, Samples};
use runtime::{Error, Reduction};

const CASES: [&str; 3] = ["llama_gqa", "gpt2", "gemma2"];

/// With eight replicas of one sequence each, a rank may have masked labels alone.
fn a_sequence_a_rank() -> [Split; 3] {
    let split = Split { dp: 8, micro_batch: 1, ..Split::default() };
    [split, Split { zero: 3, ..split }, Split { dp: 4, cp: 4, ..split }]
}

fn splits() -> [Split; 6] {
    [
        Split { tp: 2, dp: 2, micro_batch: 2, ..Split::default() },
        Split { tp: 2, pp: 2, micro_batch: 1, sequence_parallel: true, ..Split::default() },
        Split { tp: 4, recompute: Recompute::Full, micro_batch: 4, ..Split::default() },
        Split { pp: 4, dp: 2, micro_batch: 1, recompute: Recompute::Selective, ..Split::default() },
        Split { cp: 4, dp: 2, zero: 3, micro_batch: 2, ..Split::default() },
        Split { cp: 4, cp_style: CpStyle::Hybrid, cp_ulysses: 2, tp: 2, ..Split::default() },
    ]
}

fn same(run: &Run, reference: &Run, what: &str) {
    for (found, expected) in run.losses.iter().zip(&reference.losses) {
        assert!((found - expected).abs() <= 1e-12, "{what}: loss {found} is not {expected}");
    }
    for (name, (_, values)) in &run.gradients {
        let off = distance(values, &reference.gradients[name].1);
        assert!(off <= 1e-11, "{what}: gradient of {name} is off by {off:e}");
    }
}

fn run(model: &ModelSpec, split: &Split, init: Option<&str>, samples: &dyn Samples) -> Run {
    train_program::<f64>(&split.program(model), split, 2, init, samples)
}

#[test]
fn weights_drawn_from_the_seed() {
    for case in CASES {
        let (model, samples) = (model(case), open(case));
        let reference = run(&model, &Split::default(), None, &*samples);
        for split in splits() {
            let split_run = run(&model, &split, None, &*samples);
            same(&split_run, &reference, &format!("{case} {split:?}"));
        }
    }
}

#[test]
fn initial_weights_are_as_wide_as_said() {
    let split = Split::default();
    // No steps, so that the weights are the initial ones.
    let samples = open("llama_gqa");
    let mut model = model("llama_gqa");
    model.layers = 1;
    let run = train_program::<f64>(&split.program(&model), &split, 0, None, &*samples);
    assert_eq!(run.losses.len(), 0);
    let deviation = |name: &str| {
        let (_, values) = &run.weights[name];
        (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt()
    };
    assert!((deviation("model.embed_tokens.weight") / 0.02 - 1.0).abs() < 0.03);
    let output = 0.02 / 2f64.sqrt();
    let name = "model.layers.0.mlp.down_proj.weight";
    assert!((deviation(name) / output - 1.0).abs() < 0.03);
    assert_eq!(run.weights["model.norm.weight"].1, vec![1.0; 64]);
}

#[test]
fn dropout_masks() {
    for case in CASES {
        let samples = open(case);
        let mut model = model(case);
        let dry = run(&model, &Split::default(), Some(case), &*samples);
        model.dropout = 0.2;
        let reference = run(&model, &Split::default(), Some(case), &*samples);
        let moved = (reference.losses[0] - dry.losses[0]).abs();
        assert!(moved > 1e-3, "{case}: dropout does nothing");
        for split in splits() {
            let split_run = run(&model, &split, Some(case), &*samples);
            same(&split_run, &reference, &format!("{case} {split:?}"));
        }
    }
}

/// Samples whose labels are masked unevenly over sequences: none of the first, all of the last.
struct Masked(Box<dyn Samples>);

impl Samples for Masked {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let mut sample = self.0.read(index)?;
        let masked = (index % 8) as usize * sample.labels.len() / 7;
        sample.labels[..masked].fill(-1);
        Ok(sample)
    }
}

#[test]
fn masked_labels_that_replicas_have_unequally_many_of() {
    for case in CASES {
        let (model, samples) = (model(case), Masked(open(case)));
        let reference = run(&model, &Split::default(), Some(case), &samples);
        let whole = run(&model, &Split::default(), Some(case), &*open(case));
        assert!((reference.losses[0] - whole.losses[0]).abs() > 1e-4, "{case}");
        for split in splits().into_iter().chain(a_sequence_a_rank()) {
            let split_run = run(&model, &split, Some(case), &samples);
            same(&split_run, &reference, &format!("{case} {split:?}"));
        }
    }
}

/// Cuts every backward pass in two, and delays the second half to the pipeline rank's next
/// backward.
fn cut(order: &PassOrder) -> PassOrder {
    let (mut cut, mut waiting) = (Vec::new(), None);
    for &pass in &order.passes {
        if pass.kind == PassKind::BW {
            cut.push(Pass { kind: PassKind::B, ..pass });
            cut.extend(waiting.replace(Pass { kind: PassKind::W, ..pass }));
        } else {
            cut.push(pass);
        }
    }
    cut.extend(waiting);
    cut.into()
}

#[test]
fn a_backward_pass_cut_in_two() {
    for case in CASES {
        let (model, samples) = (model(case), open(case));
        for split in splits() {
            let whole = split.program(&model);
            let mut halved = whole.clone();
            halved.passes = whole.passes.iter().map(cut).collect();
            assert_ne!(whole.passes, halved.passes);
            let train = |program| train_program::<f32>(program, &split, 2, Some(case), &*samples);
            assert!(train(&whole) == train(&halved), "{case} {split:?}");
        }
    }
}

/// One micro-batch after the other, down a V and up again: the first pipeline rank holds both ends.
fn down_and_up(program: &mut Program) {
    program.layout = StageLayout::V;
    let passes = |kinds: [(PassKind, u16); 4], micro_batch: u32| {
        kinds.map(|(kind, chunk)| Pass { kind, micro_batch, chunk })
    };
    let (f, bw) = (PassKind::F, PassKind::BW);
    let each = |k: u32| passes([(f, 0), (f, 1), (bw, 1), (bw, 0)], k);
    let all: Vec<Pass> = (0..program.micro_batches as u32).flat_map(each).collect();
    program.passes = vec![all.into(); 2];
}

#[test]
fn stages_in_a_v() {
    for case in ["llama_tied", "gpt2", "qwen2"] {
        let (model, samples) = (model(case), open(case));
        let reference = run(&model, &Split::default(), Some(case), &*samples);
        let split = Split {
            pp: 2,
            vpp: 2,
            dp: 2,
            micro_batch: 1,
            schedule: ScheduleName::Interleaved1F1B,
            reduction: Reduction::PerParameter,
            ..Split::default()
        };
        let mut program = split.program(&model);
        down_and_up(&mut program);
        let whole = train_program::<f64>(&program, &split, 2, Some(case), &*samples);
        same(&whole, &reference, &format!("{case} in a V"));
        // The output layer's weight gradients last of all, after the embedding's.
        for order in &mut program.passes {
            let (late, mut early): (Vec<Pass>, Vec<Pass>) = cut(order)
                .passes
                .into_iter()
                .partition(|pass| pass.kind == PassKind::W && pass.chunk == 1);
            early.extend(late);
            order.passes = early;
        }
        let halved = train_program::<f64>(&program, &split, 2, Some(case), &*samples);
        same(&halved, &reference, &format!("{case} in a V, cut"));
    }
}

/// A transfer between two stages of one pipeline rank waits there, for many micro-batches at a
/// time.
#[test]
fn several_stages_on_one_pipeline_rank() {
    for case in ["llama_tied", "gemma2"] {
        let (model, samples) = (model(case), open(case));
        let reference = run(&model, &Split::default(), Some(case), &*samples);
        let schedule = ScheduleName::LoopedBfs;
        let split = Split { vpp: 4, micro_batch: 1, schedule, ..Split::default() };
        let split_run = run(&model, &split, Some(case), &*samples);
        same(&split_run, &reference, &format!("{case} {split:?}"));
    }
}

#[test]
fn stages_of_any_length() {
    let (model, samples) = (model("llama_tied"), open("llama_tied"));
    let reference = run(&model, &Split::default(), Some("llama_tied"), &*samples);
    let split = Split { pp: 4, micro_batch: 2, ..Split::default() };
    let mut program = split.program(&model);
    // The end stages hold no layers, as if vocabulary layers had stages of their own.
    for (stage, (first, layers)) in program.stages.iter_mut().zip([(0, 0), (0, 3), (3, 1), (4, 0)])
    {
        stage.first_layer = first;
        stage.recompute = vec![Recompute::None; layers];
    }
    let uneven = train_program::<f64>(&program, &split, 2, Some("llama_tied"), &*samples);
    same(&uneven, &reference, "uneven stages");
}

#[test]
fn a_checkpoint_in_shards() {
    use runtime::state::checkpoint::{Checkpoint, TensorFile, write};
    let folder = std::env::temp_dir().join(format!("meshwright-shards-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = TensorFile::open(&golden("llama_gqa").join("model.safetensors")).unwrap();
    let mut shards = [std::collections::BTreeMap::new(), std::collections::BTreeMap::new()];
    let mut map = serde_json::Map::new();
    for (n, name) in file.names().into_iter().enumerate() {
        let shard = format!("model-0000{}-of-00002.safetensors", n % 2 + 1);
        map.insert(name.clone(), shard.into());
        shards[n % 2].insert(name.clone(), file.read::<f32>(&name).unwrap());
    }
    for (n, shard) in shards.iter().enumerate() {
        let path = folder.join(format!("model-0000{}-of-00002.safetensors", n + 1));
        write(&mut std::fs::File::create(path).unwrap(), shard).unwrap();
    }
    let index = serde_json::json!({ "weight_map": map });
    let index_path = folder.join("model.safetensors.index.json");
    std::fs::write(&index_path, index.to_string()).unwrap();
    let whole = Checkpoint::open(&golden("llama_gqa")).unwrap();
    let sharded = Checkpoint::open(&folder).unwrap();
    for name in file.names() {
        let shape = &file.info(&name).unwrap().shape;
        let (a, b) = (whole.read::<f32>(&name, shape), sharded.read::<f32>(&name, shape));
        assert_eq!(a.unwrap(), b.unwrap(), "{name}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
