//! What replicas share, hold and send to one another.

use super::run::{F32, RUNS, Ran, STEPS, calls, number, sent_in_rings};
use meshwright_tests::golden::planned_on;
use models::decisions::{DpReduction, Offload};
use models::formulas::communication::{all_gather_volume, all_reduce_volume};
use models::formulas::state::{StateBytes, zero_bytes};
use models::program::Program;
use models::shapes::{self, Held};

/// Elements of the units that replicas divide of one end of the model: its table is a unit of its
/// own, and the rest another.
fn end_units(tensors: &[Held]) -> Vec<u64> {
    let is_table = |held: &&Held| matches!(held.name, "embedding" | "output");
    let (tables, rest): (Vec<&Held>, Vec<&Held>) = tensors.iter().partition(is_table);
    let elements = |held: &&Held| held.shape.iter().product::<u64>();
    let rest: u64 = rest.iter().map(elements).sum();
    let tables = tables.iter().map(elements);
    tables.chain((rest > 0).then_some(rest)).collect()
}

/// Elements of the units of a pipeline rank.
fn units(program: &Program, pp_rank: usize) -> Vec<u64> {
    let mut units = Vec::new();
    for stage in program.stages_of(pp_rank) {
        let layers = program.stages[stage].layers();
        units.extend(layers.map(|layer| shapes::elements(&shapes::layer(program, layer))));
        units.extend(shapes::ends(program, stage).iter().flat_map(|end| end_units(end)));
    }
    if program.vocab.is_some() {
        let shards = program.mesh.tp * program.mesh.pp;
        units.extend(end_units(&shapes::vocabulary_shard(&program.model, shards)));
    }
    units
}

/// Bytes of units that are padded and cut into as many equal pieces.
fn padded_bytes(units: &[u64], pieces: u64) -> f64 {
    units.iter().map(|unit| unit.next_multiple_of(pieces)).sum::<u64>() as f64 * F32
}

/// Gradients are reduced once a step, or once a micro-batch if replicas share them; weights are
/// gathered once a step, or by each pass that reads them (ZeRO, section 7). Where several copies of
/// the state remain, each replica sums its pieces over them once a step.
#[test]
fn replicas_send_what_was_planned() {
    RUNS.iter().for_each(sends_what_was_planned);
}

fn sends_what_was_planned(run: &Ran) {
    let (replicas, sharing) = (run.replicas(), run.sharing());
    let group = if sharing < replicas { "dp_shard" } else { "dp" };
    for rank in run.ranks.iter().filter(|_| replicas > 1) {
        let pp_rank = run.pp_rank(rank);
        // The count of valid tokens, of all replicas, and the sum of squares: 8 bytes each.
        let [tokens, squares] = [replicas, sharing].map(|ways| all_reduce_volume(8.0, ways as f64));
        let shared = state_sent(run, pp_rank) + STEPS * squares;
        let (alone, both) = (STEPS * tokens, shared + STEPS * tokens);
        let (planned, of_all) = if sharing < replicas { (shared, alone) } else { (both, both) };
        let pieces = padded_bytes(&units(&run.program, pp_rank), sharing) / sharing as f64;
        let copies = replicas / sharing;
        let across = STEPS * all_reduce_volume(pieces, copies as f64);
        for (group, ways, planned) in
            [(group, sharing, planned), ("dp", replicas, of_all), ("dp_across", copies, across)]
        {
            // A third is no binary fraction.
            let sent = sent_in_rings(rank, group, ways as f64);
            let same = (sent - planned).abs() <= 1e-15 * planned;
            assert!(same, "{}, {group}: {sent}, not {planned}", run.what);
        }
    }
}

/// Bytes of gradients and weights that a rank sends to those with which it shares a copy.
fn state_sent(run: &Ran, pp_rank: usize) -> f64 {
    let (program, ways) = (&run.program, run.sharing());
    let held = shapes::rank_elements(program)[pp_rank] as f64 * F32;
    // A reduce-scatter sends as much as an all-gather.
    let moved = |units: &[u64]| all_gather_volume(padded_bytes(units, ways), ways as f64);
    let gathered = moved(&units(program, pp_rank));
    let passes = run.micro_batches();
    match program.zero_stage {
        0 => STEPS * all_reduce_volume(held, ways as f64),
        1 => STEPS * 2.0 * gathered,
        2 => passes * gathered + STEPS * gathered,
        _ => {
            // The input layer's backward pass reads no weights.
            let stages = program.stages_of(pp_rank);
            let first = stages.iter().filter(|&&stage| stage == 0);
            let input = first.flat_map(|&stage| end_units(&shapes::ends(program, stage)[0]));
            let input: Vec<u64> = input.collect();
            // The output layer reads a tied table in both passes, besides the input layer's read.
            let both = [0, program.stages.len() - 1].iter().all(|stage| stages.contains(stage));
            let tied = both && program.model.tied_embeddings && program.vocab.is_none();
            let again = if tied { 2.0 * moved(&input[..1]) } else { 0.0 };
            // Layers that run again together are gathered for that too.
            let layers = stages.iter().flat_map(|&stage| program.stages[stage].layers());
            let layers: Vec<u64> =
                layers.map(|layer| shapes::elements(&shapes::layer(program, layer))).collect();
            let rerun = if program.recompute_group > 1 { moved(&layers) } else { 0.0 };
            passes * (3.0 * gathered - moved(&input) + again + rerun)
        }
    }
}

/// Golden cases train in f32, without exact weights of their own (ZeRO, section 5). Those that host
/// memory holds are its own.
#[test]
fn replicas_hold_what_was_planned() {
    RUNS.iter().for_each(holds_what_was_planned);
}

fn holds_what_was_planned(run: &Ran) {
    let Program { zero_stage, dp_shard, offload, .. } = run.program;
    let elements = shapes::rank_elements(&run.program);
    let on_host = offload == Offload::Optimizer;
    let optimizer = if on_host { 3.0 * F32 } else { 2.0 * F32 };
    let each = StateBytes { weights: F32, gradients: F32, optimizer };
    for rank in &run.ranks {
        let pp_rank = run.pp_rank(rank);
        let by_hand = zero_bytes(&each, zero_stage, elements[pp_rank] as f64, dp_shard as f64);
        let (device, host) =
            if on_host { (0.0, by_hand.optimizer) } else { (by_hand.optimizer, 0.0) };
        let planned = &run.planned_memory[pp_rank];
        for (what, by_hand, planned) in [
            ("parameter_bytes", by_hand.weights, Some(planned.parameters)),
            ("gradient_bytes", by_hand.gradients, Some(planned.gradients)),
            ("optimizer_bytes", device, Some(planned.optimizer)),
            ("host_optimizer_bytes", host, None),
        ] {
            let seen = number(&rank[what]) as f64;
            for expected in planned.map(|planned| planned as f64).into_iter().chain([by_hand]) {
                let off = (seen - expected).abs();
                assert!(off <= 0.03 * expected, "{}: {what} {seen}, not {expected}", run.what);
            }
        }
    }
}

/// Three replicas divide no layer evenly.
#[test]
fn units_are_padded_where_replicas_do_not_divide_them() {
    for settings in ["zero_stage=1", "zero_stage=2", "zero_stage=3"] {
        let settings = ["tp=1", "pp=1", "cp=1", "dp=3", "micro_batch=1", settings];
        let plan = planned_on("laptop", "llama_gqa", 3, 6, &settings);
        let run = Ran::of(&plan, "llama_gqa", &settings);
        let all = units(&run.program, 0);
        let padding = padded_bytes(&all, 3) - padded_bytes(&all, 1);
        assert!(padding > 0.0, "{}", run.what);
        sends_what_was_planned(&run);
        holds_what_was_planned(&run);
    }
}

/// The CPU updates what lies in host memory: devices hold and send the same besides.
#[test]
fn optimizer_state_in_host_memory_is_what_was_planned() {
    for settings in ["pp=2 dp=2 schedule=1f1b zero_stage=1", "pp=1 dp=4 zero_stage=3 dp_shard=2"] {
        let pinned = ["tp=1", "cp=1", "micro_batch=1", "dtype=f32", "offload=optimizer"];
        let settings: Vec<&str> = settings.split(' ').chain(pinned).collect();
        let plan = planned_on("dgx_h100", "llama_gqa", 4, 8, &settings);
        let run = Ran::of(&plan, "llama_gqa", &settings);
        sends_what_was_planned(&run);
        holds_what_was_planned(&run);
    }
}

/// `naive` reduces a stage at once, after the passes, as `bucketed` does with gradients that are
/// smaller than a bucket; `overlapped` has a call for each tensor.
#[test]
fn replicas_reduce_as_often_as_was_planned() {
    for run in RUNS.iter().filter(|run| run.replicas() > 1 && run.program.zero_stage == 0) {
        let program = &run.program;
        for rank in &run.ranks {
            let stages = program.stages_of(run.pp_rank(rank));
            let tensors = |&stage: &usize| {
                let layers = program.stages[stage].layers();
                let layers: usize = layers.map(|layer| shapes::layer(program, layer).len()).sum();
                layers + shapes::ends(program, stage).iter().map(Vec::len).sum::<usize>()
            };
            let reductions = match program.dp_reduction {
                DpReduction::Overlapped => stages.iter().map(tensors).sum(),
                DpReduction::Naive | DpReduction::Bucketed => stages.len(),
            };
            // A vocabulary's shard is reduced apart. Tokens and squares are summed, too.
            let shard = usize::from(program.vocab.is_some());
            let planned = STEPS * (reductions + shard + 2) as f64;
            assert_eq!(calls(rank, "dp", "all_reduce") as f64, planned, "{}", run.what);
        }
    }
}
