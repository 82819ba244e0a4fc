//! Activations (Korthikanti), ZeRO's and the Overview's memory tables, today's blocks.

use crate::{DENSE, gpt, shipped};
use models::decisions::{Dtype, Recompute};
use models::formulas::activation::least_memory_group;
use models::formulas::state::{StateBytes, zero_bytes};
use models::layer::{Split, saved_bytes};
use models::model::{LayerKind, ModelSpec};

/// 16-bit weights and gradients, fp32 master weights and moments (ZeRO §3.1, `K = 12`).
const MIXED: StateBytes = StateBytes { weights: 2.0, gradients: 2.0, optimizer: 12.0 };

/// Bytes of all state on one of `ranks`, by ZeRO stage.
pub(crate) fn by_stage(parameters: f64, ranks: f64) -> [f64; 4] {
    [0, 1, 2, 3].map(|stage| {
        let held = zero_bytes(&MIXED, stage, parameters, ranks);
        held.weights + held.gradients + held.optimizer
    })
}

/// ZeRO Fig. 1: 7.5 B parameters on 64 ranks.
#[test]
fn zero_figure_1() {
    let gigabytes = by_stage(7.5e9, 64.0).map(|bytes| bytes / 1e9);
    for (actual, printed) in gigabytes.into_iter().zip([120.0, 31.4, 16.6, 1.9]) {
        assert!((actual - printed).abs() <= 0.05, "{actual} {printed}");
    }
}

/// The Overview's table with its `k = 12`: `2Ψ + 2Ψ + kΨ`, `+ kΨ/N`, `(2Ψ + kΨ)/N`,
/// `(2Ψ + 2Ψ + kΨ)/N`.
#[test]
fn overview_memory_table() {
    let (psi, k, n) = (1e9, 12.0, 16.0);
    let table = [
        2.0 * psi + 2.0 * psi + k * psi,
        2.0 * psi + 2.0 * psi + k * psi / n,
        2.0 * psi + (2.0 * psi + k * psi) / n,
        (2.0 * psi + 2.0 * psi + k * psi) / n,
    ];
    assert_eq!(by_stage(psi, n), table);
    assert_eq!(by_stage(psi, 1.0), [16.0 * psi; 4]);
}

/// A micro-batch over `tp` tensor-parallel ranks.
pub(crate) fn split(tp: u64, micro_batch: u64, sequence_parallel: bool) -> Split {
    Split { tp, cp: 1, cp_ulysses: 1, ep: 1, etp: 1, sequence_parallel, micro_batch }
}

/// Bytes one layer keeps of one micro-batch on one rank, with unfused attention as Korthikanti has
/// it. The memory model also counts the log-sum-exp that only fused attention keeps, 4 bytes a head
/// and token: that is left out here.
pub(crate) fn unfused_bytes(model: &ModelSpec, split: &Split, recompute: Recompute) -> f64 {
    let log_sum_exp = match recompute {
        Recompute::Full => 0.0,
        _ => (4 * split.tokens(model) * model.attention.heads / split.tp) as f64,
    };
    saved_bytes(model, DENSE, split, Dtype::Bf16, false, recompute) - log_sum_exp
}

/// Korthikanti Table 2: with `t` tensor-parallel ranks `sbh(10 + 24/t + 5as/(ht))`, selective
/// `sbh(10 + 24/t)`, full `2sbh`; with sequence parallelism all of it over `t`.
#[test]
fn korthikanti_table_2_in_its_own_units() {
    let gpt3 = gpt(12288, 96, 96);
    let sbh = 2048.0 * 12288.0;
    let units = |sp, recompute| unfused_bytes(&gpt3, &split(8, 1, sp), recompute) / sbh;
    assert_eq!(units(false, Recompute::None), 10.0 + 24.0 / 8.0 + 80.0 / 8.0);
    assert_eq!(units(true, Recompute::None), (34.0 + 80.0) / 8.0);
    assert_eq!(units(false, Recompute::Selective), 10.0 + 24.0 / 8.0);
    assert_eq!(units(true, Recompute::Selective), 34.0 / 8.0);
    assert_eq!(units(false, Recompute::Full), 2.0);
    assert_eq!(units(true, Recompute::Full), 2.0 / 8.0);
}

/// Bytes a token keeps in a layer with fused attention on one of `tp` ranks.
fn a_token(model: &ModelSpec, kind: LayerKind, tp: u64, sp: bool, recompute: Recompute) -> f64 {
    let split = split(tp, 1, sp);
    let bytes = saved_bytes(model, kind, &split, Dtype::Bf16, true, recompute);
    bytes / split.tokens(model) as f64
}

/// Llama-3-8B keeps `8h + 4q + 4k + 4a + 6f`, about what Korthikanti's `34h` counts by other terms.
/// Selective recomputation spares the norms' outputs, `4h`, and the gated product, `2f`.
#[test]
fn modern_block_of_llama3_8b() {
    let llama = shipped("llama8b");
    let bytes = |tp, sp, recompute| a_token(&llama, DENSE, tp, sp, recompute);
    let whole = bytes(1, false, Recompute::None);
    assert_eq!(whole, 139_392.0);
    assert_eq!(34.0 * 4096.0, 139_264.0);
    assert_eq!(bytes(8, true, Recompute::None), whole / 8.0);
    let replicated = 8.0 * 4096.0;
    assert_eq!(bytes(8, false, Recompute::None), replicated + (whole - replicated) / 8.0);
    let spared = 4.0 * 4096.0 + 2.0 * 14336.0;
    assert_eq!(bytes(1, false, Recompute::Selective), whole - spared);
}

/// In place of a dense block's `6f`, experts keep `8E` for the router and `4h + 6f_e` for each
/// copy.
#[test]
fn experts_of_mixtral() {
    let mixtral = shipped("mixtral_8x7b");
    let (h, f) = (4096.0, 14336.0);
    let moe = LayerKind { moe: true, windowed: false };
    let bytes = |kind| a_token(&mixtral, kind, 1, false, Recompute::None);
    let experts = 64.0 + 2.0 * (4.0 * h + 6.0 * f);
    assert_eq!(bytes(moe) - bytes(DENSE), experts - 6.0 * mixtral.mlp.ffn as f64);
}

/// SC'21 section 3.5: of `c` layers a group, inputs of all groups and values of one.
#[test]
fn the_square_root_rule_needs_least_memory() {
    let stages = [(9.0, 14.0, 2.0, 12.0), (24.0, 1.0, 2.0, 34.0), (8.0, 16.0, 2.0, 70.0)];
    for (layers, in_flight, input, values) in stages {
        let bytes = |group: f64| layers / group * in_flight * input + group * values;
        let rule = least_memory_group(layers, in_flight, input, values);
        let groups = (100..=(100.0 * layers) as u64).map(|hundredths| hundredths as f64 / 100.0);
        let least = groups.map(bytes).fold(f64::INFINITY, f64::min);
        assert!(bytes(rule) <= least, "{rule}: {} of {least}", bytes(rule));
    }
}
