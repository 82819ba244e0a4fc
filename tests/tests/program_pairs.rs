//! Generated programs give the bits of the lowering that runs directly.
//!
//! The programs together have every pair of two decisions' values. They are modules of one crate,
//! so that cargo builds once.
#![cfg(feature = "thorough")]

#[path = "program_pairs/train.rs"]
mod train;

use codegen::{RuntimeSource, render};
use direct::Direct;
use meshwright_tests::crates::{build, first_error, manifest, module, runtime, write_all};
use meshwright_tests::golden::{folder as golden, planned};
use meshwright_tests::pairs::{combinations, covering, pairs};
use models::decisions::{
    AuxScope, CpStyle, DpReduction, Dtype, MoeOverlap, Offload, RankOrder, USUAL_BUCKET_MIB, Vocab,
};
use models::mesh::{ExpertSplit, Mesh};
use models::model::{AuxOver, ModelSpec, Moe, Router};
use models::plan::Plan;
use models::program::{Program, Recompute, StageProgram};
use models::schedule::{PassTimes, Schedule, ScheduleName};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

const CASES: [&str; 8] =
    ["llama_gqa", "llama_tied", "gpt2", "qwen2", "gemma2", "qwen3_moe", "mixtral", "latent"];
const TP: [usize; 3] = [1, 2, 4];
const PP: [usize; 3] = [1, 2, 4];
const DP: [usize; 2] = [1, 2];
const MICRO_BATCH: [usize; 3] = [1, 2, 4];
/// What layers recompute in turn.
/// What layers compute again, in turn, and the layers of a group.
const RECOMPUTE: [(&[Recompute], usize); 5] = [
    (&[Recompute::None], 1),
    (&[Recompute::Selective], 1),
    (&[Recompute::Full], 1),
    (&[Recompute::Full, Recompute::Selective, Recompute::None], 1),
    (&[Recompute::Full], 2),
];
const SCHEDULE: [ScheduleName; 11] = [
    ScheduleName::GPipe,
    ScheduleName::OneFOneB,
    ScheduleName::Interleaved1F1B,
    ScheduleName::Overlapped1F1B,
    ScheduleName::ZbH1,
    ScheduleName::InterleavedZb,
    ScheduleName::ZbV,
    ScheduleName::VHalf,
    ScheduleName::DualPipe,
    ScheduleName::DualPipeV,
    ScheduleName::Chimera,
];
const VOCAB: [Vocab; 6] = [
    Vocab::FirstLast,
    Vocab::Tensor,
    Vocab::Parallel1,
    Vocab::Parallel2,
    Vocab::ParallelNaive,
    Vocab::Interlaced,
];
/// ZeRO stage, and where the optimizer's state lies.
const ZERO: [(u8, Offload); 6] = [
    (0, Offload::None),
    (1, Offload::None),
    (2, Offload::None),
    (3, Offload::None),
    (3, Offload::Optimizer),
    (1, Offload::Activations),
];
/// Context-parallel ranks, how they exchange, and the ranks of a Ulysses group.
const CP: [(usize, CpStyle, usize); 5] = [
    (1, CpStyle::Zigzag, 1),
    (2, CpStyle::Zigzag, 1),
    (2, CpStyle::AllGather, 1),
    (2, CpStyle::Ulysses, 2),
    (4, CpStyle::Hybrid, 2),
];
/// Ranks that have different experts, and tensor-parallel ranks of an expert.
const EXPERTS: [ExpertSplit; 3] =
    [ExpertSplit { ep: 1, etp: 1 }, ExpertSplit { ep: 4, etp: 1 }, ExpertSplit { ep: 2, etp: 2 }];
/// What hides the all-to-alls of experts, and chunks of rows.
const OVERLAP: [(MoeOverlap, usize); 4] =
    [(MoeOverlap::None, 1), (MoeOverlap::Ampipe, 2), (MoeOverlap::Tutel, 4), (MoeOverlap::Pair, 1)];
const VALUES: Indices = [
    CASES.len(),
    TP.len(),
    PP.len(),
    DP.len(),
    2,
    MICRO_BATCH.len(),
    RECOMPUTE.len(),
    SCHEDULE.len(),
    VOCAB.len(),
    ZERO.len(),
    CP.len(),
    2,
    DpReduction::ALL.len(),
    EXPERTS.len(),
    OVERLAP.len(),
];

/// A combination, as the index of each decision's value.
type Indices = [usize; 15];

/// Layers and sequences of every golden case.
const LAYERS: usize = 4;
const SEQUENCES: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Combination {
    case: &'static str,
    tp: usize,
    pp: usize,
    dp: usize,
    experts: ExpertSplit,
    overlap: (MoeOverlap, usize),
    sequence_parallel: bool,
    fused_loss: bool,
    reduction: DpReduction,
    micro_batch: usize,
    recompute: &'static [Recompute],
    recompute_group: usize,
    schedule: ScheduleName,
    vocab: Vocab,
    zero: (u8, Offload),
    cp: (usize, CpStyle, usize),
}

/// What schedules depend on.
type Counts = (ScheduleName, usize, usize, Vocab);

impl Combination {
    fn of(of: &Indices) -> Self {
        Self {
            case: CASES[of[0]],
            tp: TP[of[1]],
            pp: PP[of[2]],
            dp: DP[of[3]],
            experts: EXPERTS[of[13]],
            overlap: OVERLAP[of[14]],
            sequence_parallel: of[4] == 1,
            fused_loss: of[11] == 1,
            reduction: DpReduction::ALL[of[12]],
            micro_batch: MICRO_BATCH[of[5]],
            recompute: RECOMPUTE[of[6]].0,
            recompute_group: RECOMPUTE[of[6]].1,
            schedule: SCHEDULE[of[7]],
            vocab: VOCAB[of[8]],
            zero: ZERO[of[9]],
            cp: CP[of[10]],
        }
    }

    fn counts(&self) -> Counts {
        (self.schedule, self.pp, SEQUENCES / self.dp / self.micro_batch, self.vocab)
    }

    /// Whether it can be run, and is not another one by a second name.
    fn exists(&self, schedules: &mut Schedules, models: &BTreeMap<&str, ModelSpec>) -> bool {
        let named_once = (self.tp > 1 || !self.sequence_parallel)
            && (self.pp > 1 || self.vocab == Vocab::FirstLast)
            && !(self.fused_loss && self.vocab.over_pipeline())
            && (self.dp * self.cp.0 > 1
                || self.zero.0 == 0 && self.reduction == DpReduction::Bucketed);
        let model = &models[self.case];
        let heads = model.attention.heads;
        named_once
            && self.places_experts(model)
            && self.tp * self.pp * self.dp * self.cp.0 <= 16
            && heads.is_multiple_of((self.tp * self.cp.2) as u64)
            && schedules.of(self.counts()).is_some_and(|schedule| {
                let ends = if self.vocab == Vocab::Tensor { 2 } else { 0 };
                schedule.stages() <= LAYERS + ends
            })
    }

    /// Whether experts can lie so, if there are any.
    fn places_experts(&self, model: &ModelSpec) -> bool {
        let ExpertSplit { ep, etp } = self.experts;
        let ranks = (self.tp * self.dp * self.cp.0) as u64;
        match model.moe {
            None => ep * etp == 1 && self.overlap.0 == MoeOverlap::None,
            Some(_) => {
                let different = self.tp == 1 || self.sequence_parallel;
                let overlaps = match self.overlap.0 {
                    MoeOverlap::Ampipe => self.cp.0 == 1,
                    MoeOverlap::Pair => self.schedule.has_pairs() && self.recompute_group == 1,
                    MoeOverlap::None | MoeOverlap::Tutel => true,
                };
                overlaps
                    && different
                    && (self.tp as u64).is_multiple_of(etp)
                    && ranks.is_multiple_of(ep * etp)
            }
        }
    }

    /// Layers of each stage; with `tensor` none at the ends.
    fn layers(&self, stages: usize) -> Vec<usize> {
        let even = |stages: usize| {
            (0..stages).map(move |n| (n + 1) * LAYERS / stages - n * LAYERS / stages)
        };
        match self.vocab {
            Vocab::Tensor if stages == 2 => vec![LAYERS, 0],
            Vocab::Tensor => std::iter::once(0).chain(even(stages - 2)).chain([0]).collect(),
            _ => even(stages).collect(),
        }
    }

    fn stages(&self, count: usize) -> Vec<StageProgram> {
        let mut in_turn = self.recompute.iter().copied().cycle();
        let mut first_layer = 0;
        let stage = |layers: usize| {
            first_layer += layers;
            let recompute = in_turn.by_ref().take(layers).collect();
            StageProgram { first_layer: first_layer - layers, recompute }
        };
        self.layers(count).into_iter().map(stage).collect()
    }

    fn program(&self, model: &ModelSpec) -> Program {
        let schedule = built(self.counts()).expect("it exists");
        Program {
            model: model.clone(),
            mesh: Mesh {
                tp: self.tp as u64,
                cp: self.cp.0 as u64,
                dp: self.dp as u64,
                pp: self.pp as u64,
                order: RankOrder::DpInner,
            },
            experts: model.moe.as_ref().map(|_| self.experts),
            aux_scope: AuxScope::MicroBatch,
            moe_overlap: self.overlap.0,
            moe_chunks: self.overlap.1,
            sequence_parallel: self.sequence_parallel,
            fused_loss: self.fused_loss,
            cp_style: self.cp.1,
            cp_ulysses: self.cp.2,
            micro_batch: self.micro_batch,
            micro_batches: SEQUENCES / self.dp / self.micro_batch,
            layout: schedule.layout,
            vocab: schedule.vocab,
            zero_stage: self.zero.0,
            dp_shard: if self.zero.0 > 0 { self.dp * self.cp.0 } else { 1 },
            offload: self.zero.1,
            dp_reduction: self.reduction,
            dp_bucket_mib: USUAL_BUCKET_MIB,
            post_validation: false,
            recompute_group: self.recompute_group,
            stages: self.stages(schedule.stages()),
            passes: schedule.by_rank(),
            planned_memory_bytes: 0,
        }
    }
}

/// A schedule, with vocabulary passes if the vocabulary is split over the pipeline.
fn built((name, pp, micro_batches, vocab): Counts) -> Option<Schedule> {
    let chunks = name.chunk_rule().nearest(2);
    let Some(passes) = vocab.passes() else {
        return name.build(pp, micro_batches, chunks).ok();
    };
    if !name.takes_vocab() {
        return None;
    }
    let schedule = name.build_with_vocab(pp, micro_batches, chunks, passes, None).ok()?;
    schedule.with_input_passes(PassTimes::default()).ok()
}

/// Schedules that were built before.
#[derive(Default)]
struct Schedules(BTreeMap<String, Option<Schedule>>);

impl Schedules {
    fn of(&mut self, counts: Counts) -> Option<&Schedule> {
        self.0.entry(format!("{counts:?}")).or_insert_with(|| built(counts)).as_ref()
    }
}

/// A plan of each case, whose decisions the programs replace.
fn plans() -> BTreeMap<&'static str, Plan> {
    let plan = |case| {
        let mut plan = planned(case, 1, &["tp=1", "pp=1"]);
        plan.decisions.dtype = Dtype::F64;
        match plan.inputs.model.moe.as_mut() {
            Some(moe) if case == "mixtral" => add_to(moe),
            Some(moe) => {
                (moe.router, moe.bias_update_rate) = (Router::SigmoidBias, 0.05);
            }
            None => {}
        }
        (case, plan)
    };
    CASES.into_iter().map(plan).collect()
}

/// Whether a case's model is that of its checkpoint.
fn has_weights(case: &str) -> bool {
    !["mixtral", "qwen3_moe", "latent"].contains(&case)
}

/// What mixtures may have besides.
fn add_to(moe: &mut Moe) {
    moe.aux_loss = 0.02;
    moe.losses.over = AuxOver::EachLayer;
    moe.losses.z_loss = 0.01;
    moe.capacity_factor = Some(1.25);
    moe.shared_ffn = 32;
}

fn all(plans: &BTreeMap<&'static str, Plan>) -> Vec<Indices> {
    let models = plans.iter().map(|(&case, plan)| (case, plan.inputs.model.clone())).collect();
    let mut schedules = Schedules::default();
    combinations(VALUES, |of| Combination::of(of).exists(&mut schedules, &models))
}

/// A main function that trains every program and prints a line for each.
fn main_of(chosen: &[Combination]) -> String {
    let modules = (0..chosen.len()).map(|n| format!("mod p{n};\n")).collect::<String>();
    let runs = chosen.iter().enumerate().map(|(n, of)| {
        format!(
            "    println!(\"{{}}\", train::bits(&p{n}::Trainer, &golden.join({:?}), {}));\n",
            of.case,
            has_weights(of.case)
        )
    });
    format!(
        "#![allow(warnings)]\nmod train;\n{modules}\nfn main() {{\n    let golden = \
         std::path::PathBuf::from(std::env::args().nth(1).unwrap());\n{}}}\n",
        runs.collect::<String>()
    )
}

/// Writes the crate of all programs.
fn write_crate(
    folder: &std::path::Path,
    plans: &BTreeMap<&str, Plan>,
    chosen: &[Combination],
    programs: &[Program],
) {
    let source = RuntimeSource::Path(runtime());
    let mut files = vec![
        ("Cargo.toml".to_owned(), manifest()),
        ("src/main.rs".to_owned(), main_of(chosen)),
        ("src/train.rs".to_owned(), include_str!("program_pairs/train.rs").to_owned()),
    ];
    for (n, (of, program)) in chosen.iter().zip(programs).enumerate() {
        let rendered = render(&plans[of.case], program, "", &source).expect("templates are whole");
        if n == 0 {
            files.push(("Cargo.lock".to_owned(), rendered["Cargo.lock"].clone()));
        }
        files.extend(module(&format!("p{n}"), rendered));
    }
    // Cargo rewrites the lock file, and keeps it from then on.
    if folder.join("Cargo.lock").exists() {
        files.retain(|(path, _)| path != "Cargo.lock");
    }
    write_all(folder, files.iter().map(|(path, text)| (path.as_str(), text.as_str())));
}

#[test]
fn programs_have_the_bits_of_the_lowering_run_directly() {
    let begin = Instant::now();
    let plans = plans();
    let chosen: Vec<Combination> = covering(all(&plans)).iter().map(Combination::of).collect();
    let programs: Vec<Program> =
        chosen.iter().map(|of| of.program(&plans[of.case].inputs.model)).collect();
    println!("{} programs chosen in {:.0?}", chosen.len(), begin.elapsed());
    let temporary = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let folder = temporary.join("trainers-of-pairs");
    write_crate(&folder, &plans, &chosen, &programs);
    let output = build(&folder, &temporary.join("unoptimized"));
    let error = first_error(&output).unwrap_or_default().concat();
    assert!(output.status.success(), "{error}{}", String::from_utf8_lossy(&output.stderr));
    println!("built after {:.0?}", begin.elapsed());
    let run = Command::new(temporary.join("unoptimized/debug/trainers"))
        .arg(golden(""))
        .output()
        .expect("it was built");
    let printed = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success(), "{printed}{}", String::from_utf8_lossy(&run.stderr));
    println!("run after {:.0?}", begin.elapsed());
    assert_eq!(printed.lines().count(), chosen.len());
    let mut others = Vec::new();
    for (n, ((of, program), line)) in chosen.iter().zip(&programs).zip(printed.lines()).enumerate()
    {
        let expected = train::bits(&Direct::new(program), &golden(of.case), has_weights(of.case));
        if line != expected {
            others.push(format!("p{n}, {of:?}:\n  program {line}\n  direct  {expected}"));
        }
    }
    println!("compared after {:.0?}", begin.elapsed());
    let folder = folder.display();
    assert!(others.is_empty(), "{} differ, in {folder}\n{}", others.len(), others.join("\n"));
}

#[test]
fn the_programs_have_every_pair() {
    let all = all(&plans());
    let chosen = covering(all.clone());
    let had: BTreeSet<_> = chosen.iter().flat_map(pairs).collect();
    assert!(all.iter().flat_map(pairs).all(|pair| had.contains(&pair)));
    for (decision, &count) in VALUES.iter().enumerate() {
        let values: BTreeSet<usize> = chosen.iter().map(|of| of[decision]).collect();
        assert_eq!(values.len(), count, "decision {decision}");
    }
    assert!(chosen.len() >= 60, "{}", chosen.len());
}
