//! Every schedule with every vocabulary placement gives the numbers of one rank, in f64: on a model
//! of eight layers drawn from a seed, and on golden cases.
//!
//! The tests run a covering set; `every_combination` (ignored: `make equivalence`) runs them all.

mod channels;
mod common;

use channels::run_wired;
use common::{Run, Split, schedule, train_program, train_rank};
use direct::Direct;
use models::decisions::{
    AuxScope, CpStyle, DpReduction, MoeOverlap, Offload, USUAL_BUCKET_MIB, Vocab,
};
use models::formulas::vocabulary;
use models::input::Source;
use models::mesh::Mesh;
use models::model::{ModelSpec, read};
use models::program::{Program, Recompute, StageProgram};
use models::schedule::{Pass, PassKind, Schedule, ScheduleName, StageLayout};
use runtime::comm::{Delays, Options, run_ranks};
use runtime::data::{Sample, Samples};
use runtime::{Error, Host, Optimizer, Rank, StepResult};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Vocabulary sizes: one that needs at most a little padding, and one for which some shards hold
/// only padding.
const VOCAB: [u64; 2] = [90, 17];

/// All placements of the vocabulary.
const PLACES: [Vocab; 7] = [
    Vocab::FirstLast,
    Vocab::Redistribute,
    Vocab::Tensor,
    Vocab::ParallelNaive,
    Vocab::Parallel1,
    Vocab::Parallel2,
    Vocab::Interlaced,
];

/// With tied embeddings logits are capped, low enough for the cap's slope to matter.
fn eight(tied: bool, vocab: u64) -> ModelSpec {
    let cap = if tied { "final_soft_cap: 0.5" } else { "" };
    let text = format!(
        "
name: eight
layers: 8
hidden: 32
heads: 4
kv_heads: 4
ffn: 48
vocab: {vocab}
max_positions: 16
seq_len: 16
global_batch: 12
tied_embeddings: {tied}
{cap}
"
    );
    read(&Source::from_bytes("eight.yaml", text.into_bytes()).unwrap()).unwrap()
}

/// Tokens by a formula; some have no label.
struct Made(u64);

impl Samples for Made {
    fn len(&self) -> u64 {
        1 << 20
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |n: u64| (index * 7919 + n * n * 31 + n * 17) % self.0;
        let mut sample = Sample::of_tokens((0..17).map(|n| token(n) as i64).collect());
        if index % 3 == 1 {
            sample.labels[..5].fill(-1);
        }
        Ok(sample)
    }
}

/// A run: its schedule, pipeline ranks, tensor-parallel ranks and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    schedule: ScheduleName,
    place: Vocab,
    pp: usize,
    tp: usize,
    micro_batches: usize,
    tied: bool,
    vocab: u64,
    dp: usize,
    cp: usize,
    /// ZeRO stage.
    zero: u8,
    sequence_parallel: bool,
    fused_loss: bool,
}

impl Case {
    fn chunks(&self) -> usize {
        self.schedule.chunk_rule().nearest(2)
    }

    fn schedule(&self) -> Option<Schedule> {
        let Self { pp, micro_batches, place, .. } = *self;
        schedule(self.schedule, pp, micro_batches, self.chunks(), place).ok()
    }

    /// Whether the case can be run.
    fn exists(&self) -> bool {
        let hosts = self.place.passes().is_none() || self.schedule.takes_vocab();
        hosts && self.schedule().is_some()
    }

    /// Twelve sequences if the micro-batches divide them, else one each; the same number on each
    /// replica.
    fn micro_batch(&self) -> usize {
        if 12 % self.micro_batches == 0 { 12 / self.micro_batches } else { 1 }
    }

    fn sequences(&self) -> usize {
        self.micro_batch() * self.micro_batches * self.dp
    }

    /// Layers of each stage: even; by layer redistribution, for an output layer as long as two
    /// layers; or none at the ends.
    fn layers(&self, stages: usize) -> Vec<usize> {
        let even = |layers: usize, stages: usize| {
            (0..stages).map(move |n| (n + 1) * layers / stages - n * layers / stages)
        };
        match self.place {
            Vocab::Redistribute => {
                let (_, layers) = vocabulary::redis(8, stages as u64, 0.1, 2.0);
                layers.into_iter().map(|layers| layers as usize).collect()
            }
            Vocab::Tensor if stages == 2 => vec![8, 0],
            Vocab::Tensor => std::iter::once(0).chain(even(8, stages - 2)).chain([0]).collect(),
            _ => even(8, stages).collect(),
        }
    }

    fn program(&self) -> Program {
        let schedule = self.schedule().unwrap();
        let mut first_layer = 0;
        let stage = |layers: usize| {
            first_layer += layers;
            let recompute = vec![Recompute::None; layers];
            StageProgram { first_layer: first_layer - layers, recompute }
        };
        let stages = self.layers(schedule.stages()).into_iter().map(stage).collect();
        Program {
            mesh: Mesh {
                tp: self.tp as u64,
                cp: self.cp as u64,
                dp: self.dp as u64,
                pp: self.pp as u64,
                order: Split::default().order,
            },
            experts: None,
            aux_scope: AuxScope::MicroBatch,
            moe_overlap: MoeOverlap::None,
            moe_chunks: 1,
            sequence_parallel: self.sequence_parallel,
            fused_loss: self.fused_loss,
            cp_style: CpStyle::Zigzag,
            cp_ulysses: 1,
            micro_batch: self.micro_batch(),
            micro_batches: self.micro_batches,
            layout: schedule.layout,
            vocab: schedule.vocab,
            zero_stage: self.zero,
            dp_shard: if self.zero > 0 { self.dp * self.cp } else { 1 },
            offload: Offload::None,
            dp_reduction: DpReduction::Bucketed,
            dp_bucket_mib: USUAL_BUCKET_MIB,
            post_validation: false,
            recompute_group: 1,
            stages,
            passes: schedule.by_rank(),
            planned_memory_bytes: 0,
            model: eight(self.tied, self.vocab),
        }
    }

    fn split(&self) -> Split {
        Split { tp: self.tp, pp: self.pp, dp: self.dp, cp: self.cp, ..Split::default() }
    }

    fn run(&self, delays: Option<Delays>) -> Run {
        let split = Split { delays, ..self.split() };
        train_program::<f64>(&self.program(), &split, 2, None, &Made(self.vocab))
    }

    /// One rank, one micro-batch.
    fn alone(&self) -> Run {
        let one = Self {
            schedule: ScheduleName::OneFOneB,
            place: Vocab::FirstLast,
            pp: 1,
            tp: 1,
            micro_batches: 1,
            dp: 1,
            cp: 1,
            zero: 0,
            sequence_parallel: false,
            fused_loss: false,
            ..*self
        };
        let program = Program { micro_batch: self.sequences(), ..one.program() };
        train_program::<f64>(&program, &one.split(), 2, None, &Made(self.vocab))
    }
}

/// Largest deviations so far.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    loss: f64,
    gradient: f64,
}

#[track_caller]
fn same(found: &Run, reference: &Run, worst: &mut Worst, what: &str) {
    let pairs = |f: fn(&Run) -> &Vec<f64>| f(found).iter().zip(f(reference));
    for (ours, theirs) in pairs(|run| &run.losses).chain(pairs(|run| &run.norms)) {
        let off = (ours - theirs).abs();
        assert!(off <= 1e-12 * theirs.abs(), "{what}: {ours} {theirs}");
        worst.loss = worst.loss.max(off);
    }
    assert_eq!(found.losses.len(), reference.losses.len());
    assert!(found.gradients.keys().eq(reference.gradients.keys()), "{what}");
    for (name, (_, ours)) in &found.gradients {
        let off = common::distance(ours, &reference.gradients[name].1);
        assert!(off <= 1e-11, "{what}: gradient of {name} is off by {off:e}");
        worst.gradient = worst.gradient.max(off);
    }
    assert!(found.weights.keys().eq(reference.weights.keys()), "{what}");
    for (name, (_, ours)) in &found.weights {
        let off = common::distance(ours, &reference.weights[name].1);
        // Adam divides by the root of a value that may be almost 0.
        assert!(off <= 1e-9, "{what}: {name} is off by {off:e}");
    }
}

/// Runs on one rank, by what they depend on.
#[derive(Default)]
struct References(BTreeMap<(bool, u64, usize), Run>);

impl References {
    fn of(&mut self, case: &Case) -> &Run {
        let key = (case.tied, case.vocab, case.sequences());
        self.0.entry(key).or_insert_with(|| case.alone())
    }
}

fn check(cases: &[Case]) -> Worst {
    let (mut references, mut worst) = (References::default(), Worst::default());
    for case in cases {
        let what = format!("{case:?}");
        same(&case.run(None), references.of(case), &mut worst, &what);
    }
    worst
}

/// Every schedule and placement, on two and four pipeline ranks of one or two tensor-parallel
/// ranks, with as many micro-batches as pipeline ranks, twice as many, and an odd number. Every
/// second case is tied; every third has little more vocabulary than shards, two replicas or
/// sequence parallelism; every fifth two context-parallel ranks. Replicas share their state by one
/// ZeRO stage after the other.
fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for schedule in ScheduleName::ALL.into_iter().filter(|&name| name != ScheduleName::Naive) {
        for place in PLACES {
            for (pp, tp) in [(2, 1), (2, 2), (4, 1), (4, 2)] {
                for micro_batches in [pp, 2 * pp, pp + 1] {
                    let n = cases.len();
                    let turn = |of: usize, at: usize| n % of == at;
                    let dp = if turn(3, 2) && pp * tp < 8 { 2 } else { 1 };
                    let cp = if turn(5, 4) && pp * tp * dp < 16 { 2 } else { 1 };
                    let case = Case {
                        schedule,
                        place,
                        pp,
                        tp,
                        micro_batches,
                        tied: turn(2, 1),
                        vocab: VOCAB[usize::from(turn(3, 1))],
                        dp,
                        cp,
                        zero: if dp * cp > 1 { (n / 3 % 4) as u8 } else { 0 },
                        sequence_parallel: tp == 2 && turn(3, 0),
                        fused_loss: place.passes().is_none() && turn(2, 0),
                    };
                    cases.extend(case.exists().then_some(case));
                }
            }
        }
    }
    cases
}

/// Two cases of each schedule and placement, with different pipeline sizes.
fn some() -> Vec<Case> {
    let mut by_kind: BTreeMap<(ScheduleName, Vocab), Vec<Case>> = BTreeMap::new();
    for case in all() {
        by_kind.entry((case.schedule, case.place)).or_default().push(case);
    }
    let mut chosen = Vec::new();
    for (turn, cases) in by_kind.values().enumerate() {
        let of = |pp: usize| {
            let these: Vec<&Case> = cases.iter().filter(|case| case.pp == pp).collect();
            *these[turn % these.len()]
        };
        chosen.extend([of(2), of(4)]);
    }
    chosen
}

#[test]
fn a_covering_set() {
    let chosen = some();
    println!("{} of {} combinations", chosen.len(), all().len());
    check(&chosen);
}

#[test]
fn the_set_has_every_schedule_with_every_placement_it_can_have() {
    let kind = |case: &Case| (case.schedule, case.place);
    let kinds: BTreeSet<_> = some().iter().map(kind).collect();
    let hosts = ScheduleName::VOCAB.len();
    // Interlaced layers exist only with 1F1B.
    assert_eq!(kinds.len(), 16 * 3 + hosts * 3 + 1);
    // Schedules that run micro-batches in groups or from two ends need an even number, and DualPipe
    // needs more of them than pipeline ranks.
    let plain = all().iter().filter(|case| case.place == Vocab::FirstLast).count();
    assert_eq!(plain, 4 * (14 + 16 + 10));
    for case in [true, false] {
        assert!(some().iter().any(|chosen| chosen.tied == case && chosen.place.passes().is_some()));
        assert!(some().iter().any(|chosen| chosen.sequence_parallel == case));
    }
    for zero in 0..4 {
        let of = |wanted: &dyn Fn(&Case) -> bool| {
            all().iter().any(|case| case.dp == 2 && case.zero == zero && wanted(case))
        };
        assert!(of(&|case| case.place.passes().is_some()), "{zero}");
        assert!(of(&|case| case.schedule.splits_backward()), "{zero}");
        let copies = |case: &Case| case.schedule.layout(case.chunks()).copies() == 2;
        assert!(of(&copies), "{zero}");
        assert!(some().iter().any(|case| case.dp == 2 && case.zero == zero), "{zero}");
    }
}

#[test]
#[ignore = "long: make equivalence"]
fn every_combination() {
    let (begin, cases) = (Instant::now(), all());
    let worst = check(&cases);
    let golden = golden_cases();
    let (of_golden, golden_worst) = check_golden(&golden);
    common::write_section(
        "Schedules and vocabulary",
        &report(&cases, &golden, worst, golden_worst),
    );
    println!("{} combinations in {:.0?}", cases.len() + of_golden, begin.elapsed());
}

/// Golden cases: four layers and eight sequences.
fn golden_cases() -> Vec<(&'static str, Split)> {
    let mut cases = Vec::new();
    for case in ["llama_gqa", "llama_tied", "gpt2"] {
        for schedule in ScheduleName::ALL.into_iter().filter(|&name| name != ScheduleName::Naive) {
            for vocab in PLACES {
                for (pp, tp) in [(2, 1), (2, 2), (4, 1), (4, 2)] {
                    for micro_batch in [1, 2, 4] {
                        let vpp = schedule.chunk_rule().nearest(2);
                        let split =
                            Split { tp, pp, vpp, micro_batch, schedule, vocab, ..Split::default() };
                        let hosts = match vocab {
                            Vocab::Interlaced => schedule == ScheduleName::OneFOneB,
                            _ => vocab.passes().is_none() || schedule.takes_vocab(),
                        };
                        // Layer redistribution cuts models this small as evenly as `first_last`.
                        if split.exists() && hosts && vocab != Vocab::Redistribute {
                            cases.push((case, split));
                        }
                    }
                }
            }
        }
    }
    cases
}

fn check_golden(cases: &[(&'static str, Split)]) -> (usize, Worst) {
    let (mut references, mut worst) = (BTreeMap::new(), Worst::default());
    for (case, split) in cases {
        let alone = || common::train::<f64>(case, &Split::default(), 2);
        let reference = references.entry(*case).or_insert_with(alone);
        let mut run = common::train::<f64>(case, split, 2);
        if *case == "gpt2" {
            // Key biases have a gradient of 0, up to rounding, from which Adam makes steps of
            // either sign.
            run.weights = reference.weights.clone();
        }
        same(&run, reference, &mut worst, &format!("{case} {split:?}"));
    }
    (cases.len(), worst)
}

#[test]
fn golden_cases_in_turn() {
    let cases = golden_cases();
    let stride = cases.len() / 40;
    let interlaced = |(_, split): &&(&str, Split)| split.vocab == Vocab::Interlaced;
    // They are few among many: a few more of them.
    let besides = cases.iter().filter(interlaced).step_by(7);
    let chosen: Vec<_> = cases.iter().step_by(stride).chain(besides).copied().collect();
    let kinds = |of: fn(&Split) -> &'static str| -> BTreeSet<_> {
        chosen.iter().map(|(_, split)| of(split)).collect()
    };
    assert!(kinds(|split| split.vocab.name()).len() == PLACES.len() - 1, "{chosen:?}");
    assert!(kinds(|split| split.schedule.name()).len() > 9, "{chosen:?}");
    check_golden(&chosen);
}

fn report(cases: &[Case], golden: &[(&str, Split)], worst: Worst, of_golden: Worst) -> String {
    let mut table = String::new();
    let mut row = |name: String, ours: usize, theirs: usize| {
        table += &format!("| {name} | {ours} | {theirs} |\n");
    };
    for schedule in ScheduleName::ALL.into_iter().filter(|&name| name != ScheduleName::Naive) {
        let ours = cases.iter().filter(|case| case.schedule == schedule).count();
        let theirs = golden.iter().filter(|(_, split)| split.schedule == schedule).count();
        row(schedule.to_string(), ours, theirs);
    }
    for place in PLACES {
        let ours = cases.iter().filter(|case| case.place == place).count();
        let theirs = golden.iter().filter(|(_, split)| split.vocab == place).count();
        row(format!("vocabulary {place}"), ours, theirs);
    }
    format!(
        "**{}** combinations of schedule, placement of the vocabulary, tp 1 and 2, pp 2 and 4, and as many micro-batches as \
         pipeline ranks,\ntwice as many, and an odd number, on a model of 8 layers and 12 sequences drawn from a seed (every \
         second one tied,\nevery third with vocabulary for a few shards only, some with two replicas or sequence \
         parallelism): losses within\n1e-12 (worst {:.1e}), every gradient within 1e-11 by norm (worst {:.1e}). And \
         **{}** on golden cases (4 layers and\n8 sequences, one copy of each stage): worst {:.1e} and {:.1e}.\n\n\
         | of these | 8 layers | golden cases |\n|---|---|---|\n{table}",
        cases.len(),
        worst.loss,
        worst.gradient,
        golden.len(),
        of_golden.loss,
        of_golden.gradient
    )
}

/// Four pipeline ranks, with the most passes between them.
fn busy() -> impl Iterator<Item = Case> {
    all().into_iter().filter(|case| {
        let plain = case.place == Vocab::FirstLast || case.place.passes().is_some();
        plain && case.pp == 4 && case.tp == 1 && case.micro_batches == 8
    })
}

/// Random delays change no order, and so no bit of the results.
#[test]
fn random_delays_change_nothing() {
    for (n, case) in busy().enumerate() {
        let longest = Duration::from_micros(if n % 2 == 0 { 300 } else { 1500 });
        let delays = Delays { seed: 7 + n as u64, longest };
        assert_eq!(case.run(Some(delays)), case.run(None), "{case:?}");
    }
}

/// Without these passes the first stage would wait for ever for its embedding rows.
#[test]
fn passes_of_the_input_layer_are_asked_for() {
    let case = busy().find(|case| case.place.passes().is_some()).unwrap();
    let (mut program, split, samples) = (case.program(), case.split(), Made(case.vocab));
    let is_input = |pass: &Pass| matches!(pass.kind, PassKind::IF | PassKind::IB);
    program.passes.iter_mut().for_each(|order| order.passes.retain(|pass| !is_input(pass)));
    let run = |world| {
        let device = Host::<f64>::serial();
        let stages = Direct::new(&program);
        let mut rank = Rank::new(&stages, world, device, split.reduction, 1).unwrap();
        rank.gradients(&samples, 0, None).unwrap_err().to_string()
    };
    let errors = run_ranks(split.ranks(), Options::default(), run);
    let named = |error: &String| error.contains("no passes of the input layer");
    assert!(errors.iter().any(named), "{errors:?}");
}

/// Ranks as processes give the bits of ranks as threads.
#[test]
fn ranks_as_processes() {
    for case in busy().filter(|case| {
        let hosts = [ScheduleName::OneFOneB, ScheduleName::VHalf].contains(&case.schedule);
        hosts || case.schedule.layout(case.chunks()) == StageLayout::Bidirectional
    }) {
        let (program, split, samples) = (case.program(), case.split(), Made(case.vocab));
        let run = |world| train_rank::<f64>(&program, &split, 2, None, &samples, world);
        let wired = run_wired(split.ranks(), Options::default(), run).swap_remove(0).unwrap();
        assert!(wired == case.run(None), "{case:?}");
    }
}

/// Trains with steps that begin before the previous step's norm is known; losses and norms arrive a
/// step later.
fn trained_ahead(case: &Case, optimizer: &Optimizer, steps: u64, delays: Option<Delays>) -> Run {
    let (program, samples) =
        (Program { post_validation: true, ..case.program() }, Made(case.vocab));
    let rank = |world| {
        let reduction = Split::default().reduction;
        let stages = Direct::new(&program);
        let mut rank = Rank::new(&stages, world, Host::<f64>::serial(), reduction, 1234).unwrap();
        rank.initialise().unwrap();
        let mut results = Vec::new();
        for step in 0..steps {
            let lr = 1e-3 / (step + 1) as f64;
            results.extend(rank.step_ahead(&samples, step, optimizer, lr).unwrap());
        }
        results.extend(rank.settle().unwrap());
        finished(&rank, &results)
    };
    let options = Options { delays, ..Options::default() };
    run_ranks(program.world_size(), options, rank).swap_remove(0).unwrap()
}

fn trained_in_step(case: &Case, optimizer: &Optimizer, steps: u64) -> Run {
    let (program, samples) = (case.program(), Made(case.vocab));
    let rank = |world| {
        let reduction = Split::default().reduction;
        let stages = Direct::new(&program);
        let mut rank = Rank::new(&stages, world, Host::<f64>::serial(), reduction, 1234).unwrap();
        rank.initialise().unwrap();
        let mut results = Vec::new();
        for step in 0..steps {
            let result = rank.gradients(&samples, step, None).unwrap();
            rank.update(optimizer, 1e-3 / (step + 1) as f64, result.norm).unwrap();
            results.push(result);
        }
        finished(&rank, &results)
    };
    run_ranks(program.world_size(), Options::default(), rank).swap_remove(0).unwrap()
}

/// Rank 0's numbers, and its last gradients.
fn finished(rank: &Rank<'_, Host<f64>>, results: &[StepResult]) -> Option<Run> {
    let (gradients, weights) = (rank.whole_gradients().unwrap(), rank.whole_weights().unwrap());
    let losses = results.iter().map(|result| result.loss).collect();
    let norms = results.iter().map(|result| result.norm).collect();
    let aux_losses = results.iter().map(|result| result.aux_loss).collect();
    Some(Run { losses, norms, aux_losses, gradients: gradients?, weights: weights? })
}

/// Post-validation changes no bit, whether the norm clips never, always, or in some steps, after
/// which the forwards that ran ahead run again.
#[test]
fn post_validation_changes_nothing() {
    let cases = all().into_iter().filter(|case| {
        let plain = [Vocab::FirstLast, Vocab::Tensor].contains(&case.place);
        plain && case.micro_batches == 2 * case.pp && case.pp * case.tp == 4
    });
    let (mut checked, mut clipped) = (0, [0, 0]);
    for (n, case) in cases.enumerate() {
        let without = Optimizer { clip: None, ..common::optimizer() };
        let free = trained_in_step(&case, &without, 1);
        // About the norms seen, so that some steps clip.
        let about = Some(free.norms[0] * 0.98);
        let clip = [None, Some(free.norms[0] * 0.1), about][n % 3];
        let optimizer = Optimizer { clip, ..without };
        let delays = Delays { seed: n as u64, longest: Duration::from_micros(200) };
        let delays = (n % 2 == 0).then_some(delays);
        let found = trained_ahead(&case, &optimizer, 4, delays);
        let expected = trained_in_step(&case, &optimizer, 4);
        assert_eq!(found, expected, "{case:?} {clip:?}");
        let over = expected.norms.iter().filter(|&&norm| clip.is_some_and(|most| norm > most));
        let count = over.count();
        clipped[0] += count;
        clipped[1] += expected.norms.len() - count;
        checked += 1;
    }
    assert!(checked >= 60, "{checked}");
    assert!(clipped[0] > 50 && clipped[1] > 50, "{clipped:?}");
}

/// Numbers that are not finite leave the weights as they were.
#[test]
fn post_validation_stops_before_weights_are_spoiled() {
    let case = all().into_iter().find(|case| case.schedule == ScheduleName::ZbH1).unwrap();
    let program = Program { post_validation: true, ..case.program() };
    let optimizer = Optimizer { clip: None, ..common::optimizer() };
    let rank = |world| {
        let reduction = Split::default().reduction;
        let stages = Direct::new(&program);
        let mut rank = Rank::new(&stages, world, Host::<f64>::serial(), reduction, 1234).unwrap();
        rank.initialise().unwrap();
        let samples = Made(case.vocab);
        // An absurd rate, after which the second step's numbers are not finite.
        assert!(rank.step_ahead(&samples, 0, &optimizer, 1e300).unwrap().is_none());
        let first = rank.step_ahead(&samples, 1, &optimizer, 1e-3).unwrap().unwrap();
        assert!(first.norm.is_finite());
        let second = rank.step_ahead(&samples, 2, &optimizer, 1e-3).unwrap().unwrap();
        assert!(!(second.norm.is_finite() && second.loss.is_finite()));
        assert!(rank.pending_outcome().is_none());
        assert!(rank.settle().unwrap().is_none());
    };
    run_ranks(program.world_size(), Options::default(), rank);
}
