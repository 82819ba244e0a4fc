//! What context- and tensor-parallel ranks send to one another.

use super::run::{F32, RUNS, Ran, STEPS, handed, number, sent_in_rings, sizes};
use models::decisions::CpStyle;
use models::formulas::communication::{
    LOSS_STATISTICS, REDUCTIONS_A_PASS, all_gather_volume, all_reduce_volume,
};
use models::layer::LocalHeads;
use serde_json::Value;
use std::collections::BTreeMap;

/// Keys and values go round the ring, or are gathered, in both passes; their gradients one hop
/// further, in f32; Ulysses exchanges queries, keys, values and the output, and their gradients.
#[test]
fn context_parallel_ranks_send_what_was_planned() {
    for run in RUNS.iter().filter(|run| run.program.mesh.cp > 1) {
        let program = &run.program;
        let (tokens, ulysses) = (run.tokens(), program.cp_ulysses as f64);
        let ring = program.mesh.cp as f64 / ulysses;
        let heads = LocalHeads::new(&program.model, program.mesh.tp);
        let kv = tokens * heads.kv_width() as f64 * F32;
        for rank in &run.ranks {
            let stages = program.stages_of(run.pp_rank(rank)).into_iter();
            let layers: usize = stages.map(|stage| program.stages[stage].recompute.len()).sum();
            let times = run.micro_batches() * layers as f64;
            let sent =
                ["send", "all_gather", "reduce_scatter"].map(|call| handed(rank, "cp_ring", call));
            let planned = match (program.cp_style, ring) {
                (_, 1.0) => [0.0; 3],
                (CpStyle::AllGather, _) => [0.0, 2.0 * times * kv, times * kv * ring],
                _ => [times * kv * (2.0 * (ring - 1.0) + ring), 0.0, 0.0],
            };
            assert_eq!(sent, planned, "{}", run.what);
            if ulysses > 1.0 {
                let widths = heads.q_width() + heads.kv_width() + heads.out_width();
                let exchanged = times * 2.0 * tokens * widths as f64 * F32;
                let exchanged = (exchanged, handed(rank, "cp_ulysses", "all_to_all"));
                assert_eq!(exchanged.0, exchanged.1, "{}", run.what);
            }
        }
    }
}

#[test]
fn tensor_parallel_ranks_send_what_was_planned() {
    for run in RUNS.iter().filter(|run| run.program.mesh.tp > 1) {
        let tp = run.program.mesh.tp as f64;
        for rank in &run.ranks {
            let found = sent_in_rings(rank, "tp", tp);
            let planned = planned_in_tensor_groups(run, rank, tp);
            assert_eq!(found, planned, "{} rank {}", run.what, rank["rank"]);
        }
    }
}

fn planned_in_tensor_groups(run: &Ran, rank: &Value, tp: f64) -> f64 {
    let program = &run.program;
    let stages = program.stages_of(run.pp_rank(rank));
    let layers: usize = stages.iter().map(|&stage| program.stages[stage].recompute.len()).sum();
    let activation = run.activation();
    let both_passes = 2.0 * REDUCTIONS_A_PASS * all_reduce_volume(activation, tp);
    // Inputs of linear layers are stored sharded and gathered again backward.
    let again = if program.sequence_parallel { REDUCTIONS_A_PASS } else { 0.0 };
    // Layers that run again in groups repeat their reductions.
    let repeated = if program.recompute_group > 1 { REDUCTIONS_A_PASS } else { 0.0 };
    let each_layer = both_passes
        + again * all_gather_volume(activation, tp)
        + repeated * all_reduce_volume(activation, tp);
    let mut micro_batch = layers as f64 * each_layer;
    if program.vocab.is_some() {
        if program.sequence_parallel {
            // The output layer's input, for logits and for weight gradients; and the input layer's
            // gradient.
            let gathers = 2.0 + if stages.contains(&0) { 1.0 } else { 0.0 };
            micro_batch += gathers * all_gather_volume(activation, tp);
        }
    } else {
        micro_batch += vocabulary_in_tensor_groups(run, &stages, tp);
    }
    // If tensor-parallel ranks hold the whole stream, what they receive in parts is gathered.
    if !program.sequence_parallel {
        let parts = handed(rank, "pp", "recv") - run.copied_bytes(run.pp_rank(rank));
        let parts = parts / F32 / run.micro_batches();
        micro_batch += all_gather_volume(parts * tp, tp);
    }
    let step = all_reduce_volume(partial_gradients(run, rank) + 8.0, tp);
    run.micro_batches() * micro_batch * F32 + STEPS * step
}

/// Bytes of the whole tensors whose gradients are partial sums, of which a rank updates a part: all
/// that it holds, or what its pieces of units cut through.
fn partial_gradients(run: &Ran, rank: &Value) -> f64 {
    let ways = if run.program.zero_stage > 0 { run.sharing() } else { 1 };
    let [cp, dp] = ["cp", "dp"].map(|axis| number(&rank["at"][axis]));
    let member = (dp * run.program.mesh.cp + cp) % ways;
    let tensors = rank["tensors"].as_array().expect("a list");
    let mut whole: BTreeMap<&str, u64> = BTreeMap::new();
    for unit in tensors.chunk_by(|one, next| unit_of(one) == unit_of(next)) {
        let piece = unit.iter().map(elements).sum::<u64>().div_ceil(ways);
        let own = member * piece..(member + 1) * piece;
        let mut begin = 0;
        for tensor in unit {
            let end = begin + elements(tensor);
            if tensor["partial_gradient"] == true && begin < own.end && own.start < end {
                whole.insert(name(tensor), sizes(&tensor["global_shape"]).iter().product());
            }
            begin = end;
        }
    }
    whole.values().sum::<u64>() as f64 * F32
}

fn name(tensor: &Value) -> &str {
    tensor["name"].as_str().expect("a name")
}

/// The layer of a tensor; tables, and the norm behind the last layer, are units of their own.
fn unit_of(tensor: &Value) -> &str {
    let layer = name(tensor).split_once("layers.").and_then(|(_, rest)| rest.split('.').next());
    layer.unwrap_or(name(tensor))
}

/// Elements that a rank holds of a tensor, padding included.
fn elements(tensor: &Value) -> u64 {
    let mut shape = sizes(&tensor["local_shape"]);
    shape[0] += number(&tensor["padding_rows"]);
    shape.iter().product()
}

/// Elements of a micro-batch in stages that hold the embedding and the output layer.
fn vocabulary_in_tensor_groups(run: &Ran, stages: &[usize], tp: f64) -> f64 {
    let program = &run.program;
    let hidden_states = all_reduce_volume(run.activation(), tp);
    let mut micro_batch = 0.0;
    if stages.contains(&0) {
        micro_batch += hidden_states;
    }
    if stages.contains(&(program.stages.len() - 1)) {
        let statistics = all_reduce_volume(LOSS_STATISTICS * run.tokens(), tp);
        micro_batch += hidden_states + statistics;
        if program.sequence_parallel {
            // The output layer's input is stored sharded, as those of layers are.
            micro_batch += all_gather_volume(run.activation(), tp);
        }
    }
    micro_batch
}
