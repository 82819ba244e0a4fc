//! What context- and tensor-parallel ranks send to one another.

use super::run::{F32, RUNS, Ran, STEPS, handed, sent_in_rings, sizes};
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
            // Replicas that share state sum partial gradients of their pieces alone.
            let fewer =
                if run.program.zero_stage > 0 { STEPS * partial_gradients(rank) } else { 0.0 };
            let least = planned - all_reduce_volume(fewer, tp);
            assert!((least..=planned).contains(&found), "{} rank {}", run.what, rank["rank"]);
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
    let step = all_reduce_volume(partial_gradients(rank) + 8.0, tp);
    run.micro_batches() * micro_batch * F32 + STEPS * step
}

/// Bytes of the whole tensors whose gradients are partial sums.
fn partial_gradients(rank: &Value) -> f64 {
    let partial = rank["tensors"].as_array().expect("a list").iter();
    let partial = partial.filter(|piece| piece["partial_gradient"] == true);
    let mut whole: BTreeMap<&str, u64> = BTreeMap::new();
    for piece in partial {
        let name = piece["name"].as_str().expect("a name");
        whole.insert(name, sizes(&piece["global_shape"]).iter().product());
    }
    whole.values().sum::<u64>() as f64 * F32
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
