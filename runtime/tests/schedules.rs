//! Every schedule trains to what one rank comes to, in f64, on a model of eight layers drawn from a seed.

mod common;

use common::{Run, Split, train_program};
use models::input::Source;
use models::mesh::Mesh;
use models::model::{ModelSpec, read};
use models::schedule::{Schedule, ScheduleName};
use runtime::Error;
use runtime::comm::Delays;
use runtime::data::{Sample, Samples};
use runtime::program::{Program, Recompute, StageProgram};
use std::time::Duration;

const MODEL: &str = "
name: eight
layers: 8
hidden: 32
heads: 4
kv_heads: 4
ffn: 48
vocab: 96
max_positions: 16
seq_len: 16
global_batch: 12
tied_embeddings: false
";

fn eight() -> ModelSpec {
    read(&Source::from_bytes("eight.yaml", MODEL.as_bytes().to_vec()).unwrap()).unwrap()
}

/// Tokens by a formula.
struct Made;

impl Samples for Made {
    fn len(&self) -> u64 {
        1 << 20
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |n: u64| (index * 7919 + n * n * 31 + n * 17) % 96;
        Ok(Sample::of_tokens((0..17).map(|n| token(n) as i64).collect()))
    }
}

fn program(schedule: Schedule, tp: usize, micro_batch: usize) -> Program {
    let model = eight();
    let stages = schedule.stages();
    let each = model.layers / stages;
    let stage =
        |n: usize| StageProgram { first_layer: n * each, recompute: vec![Recompute::None; each] };
    Program {
        mesh: Mesh {
            tp: tp as u64,
            cp: 1,
            dp: 1,
            pp: schedule.devices as u64,
            order: Split::default().order,
        },
        sequence_parallel: false,
        micro_batch,
        micro_batches: schedule.micro_batches,
        layout: schedule.layout,
        stages: (0..stages).map(stage).collect(),
        passes: schedule.passes,
        planned_memory_bytes: 0,
        model,
    }
}

fn train(program: &Program, delays: Option<Delays>) -> Run {
    let (tp, pp) = (program.mesh.tp as usize, program.mesh.pp as usize);
    train_program::<f64>(program, &Split { tp, pp, delays, ..Split::default() }, 2, None, &Made)
}

/// One rank, one micro-batch.
fn alone(sequences: usize) -> Run {
    train(&program(ScheduleName::OneFOneB.build(1, 1, 1).unwrap(), 1, sequences), None)
}

#[track_caller]
fn same(found: &Run, reference: &Run, what: &str) {
    let pairs = |f: fn(&Run) -> &Vec<f64>| f(found).iter().zip(f(reference));
    for (ours, theirs) in pairs(|run| &run.losses).chain(pairs(|run| &run.norms)) {
        assert!((ours - theirs).abs() <= 1e-12 * theirs.abs(), "{what}: {ours} {theirs}");
    }
    assert!(found.weights.keys().eq(reference.weights.keys()), "{what}");
    for (name, (_, ours)) in &found.weights {
        let off = common::distance(ours, &reference.weights[name].1);
        assert!(off <= 1e-12, "{what}: {name} is off by {off:e}");
    }
}

/// Twelve sequences where the micro-batches divide them, else one each.
fn sequences(micro_batches: usize) -> (usize, usize) {
    let each = if 12 % micro_batches == 0 { 12 / micro_batches } else { 1 };
    (each, each * micro_batches)
}

/// All schedules but `naive`, with two chunks a device where they have a choice.
fn schedules(p: usize, m: usize) -> impl Iterator<Item = (ScheduleName, Schedule)> {
    ScheduleName::ALL
        .into_iter()
        .filter(|&name| name != ScheduleName::Naive)
        .filter_map(move |name| Some((name, name.build(p, m, name.chunk_rule().nearest(2)).ok()?)))
}

fn check(p: usize, tp: usize, micro_batches: &[usize]) -> usize {
    let mut checked = 0;
    for &m in micro_batches {
        let (each, all) = sequences(m);
        let reference = alone(all);
        for (name, schedule) in schedules(p, m) {
            let run = train(&program(schedule, tp, each), None);
            same(&run, &reference, &format!("{name} p {p} m {m} tp {tp}"));
            checked += 1;
        }
    }
    checked
}

/// 15 schedules; an odd number of micro-batches is not for those that run them in groups or in two directions,
/// and as many as devices are too few for DualPipe.
#[test]
fn two_devices() {
    assert_eq!(check(2, 1, &[2, 4, 3]), 13 + 15 + 10);
}

#[test]
fn two_devices_of_two_ranks() {
    assert_eq!(check(2, 2, &[2, 4, 3]), 13 + 15 + 10);
}

#[test]
fn four_devices() {
    assert_eq!(check(4, 1, &[4, 8, 5]), 13 + 15 + 10);
}

#[test]
fn four_devices_of_two_ranks() {
    assert_eq!(check(4, 2, &[4, 8, 5]), 13 + 15 + 10);
}

/// Orders do not depend on who is slow, and so neither do results, to the last bit.
#[test]
fn random_delays_change_nothing() {
    for (name, schedule) in schedules(2, 4) {
        let program = program(schedule, 1, 3);
        let (prompt, delays) =
            (train(&program, None), Delays { seed: 7, longest: Duration::from_micros(500) });
        assert_eq!(train(&program, Some(delays)), prompt, "{name}");
    }
}
