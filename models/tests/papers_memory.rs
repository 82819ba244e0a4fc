//! Activations (Korthikanti), ZeRO's and the Overview's memory tables, today's blocks.

use models::formulas::activation::{
    Block, Layer, Recompute, block_bytes, breakdown, embedding_bytes, first_stage_bytes,
    head_bytes, interleaved_factor, layer_bytes, moe_bytes, output_bytes,
};
use models::formulas::state::{
    StateBytes, Zero, distributed_optimizer_bytes, expert_ranks, zero_bytes,
};
use models::formulas::{pipeline, recompute};

const STAGES: [Zero; 4] = [Zero::Stage0, Zero::Stage1, Zero::Stage2, Zero::Stage3];

/// ZeRO Fig. 1: 7.5 B parameters on 64 ranks.
#[test]
fn zero_figure_1() {
    let gigabytes = STAGES.map(|z| zero_bytes(&StateBytes::MIXED, z, 7.5e9, 64.0) / 1e9);
    for (actual, printed) in gigabytes.into_iter().zip([120.0, 31.4, 16.6, 1.9]) {
        assert!((actual - printed).abs() <= 0.05, "{actual} {printed}");
    }
}

/// The Overview's table with its `k = 12`: `2Ψ + 2Ψ + kΨ`, `+ kΨ/N`, `(2Ψ + kΨ)/N`, `(2Ψ + 2Ψ + kΨ)/N`.
#[test]
fn overview_memory_table() {
    let (psi, k, n) = (1e9, 12.0, 16.0);
    let table = [
        2.0 * psi + 2.0 * psi + k * psi,
        2.0 * psi + 2.0 * psi + k * psi / n,
        2.0 * psi + (2.0 * psi + k * psi) / n,
        (2.0 * psi + 2.0 * psi + k * psi) / n,
    ];
    assert_eq!(STAGES.map(|z| zero_bytes(&StateBytes::MIXED, z, psi, n)), table);
    for z in STAGES {
        assert_eq!(zero_bytes(&StateBytes::MIXED, z, psi, 1.0), 16.0 * psi);
    }
}

#[test]
fn bytes_a_parameter() {
    assert_eq!(StateBytes::MIXED.total(), 16.0);
    assert_eq!(StateBytes::MIXED_FP32_GRADIENT.total(), 18.0);
    assert_eq!(StateBytes::MIXED_FP32_ACCUMULATION.total(), 20.0);
    assert_eq!(StateBytes::FP32.total(), 16.0);
    assert_eq!(distributed_optimizer_bytes(1e9, 8.0), 7.5e9);
    assert_eq!(expert_ranks(1024.0, 1.0, 8.0, 16.0), 8.0);
}

const GPT3: Layer =
    Layer { sequence: 2048.0, micro_batch: 1.0, hidden: 12288.0, heads: 96.0, tensor: 8.0 };

#[test]
fn korthikanti_table_2_in_its_own_units() {
    let sbh = GPT3.sequence * GPT3.micro_batch * GPT3.hidden;
    let units = |sp, what| layer_bytes(&GPT3, sp, what) / sbh;
    assert_eq!(units(false, Recompute::None), 10.0 + 24.0 / 8.0 + 80.0 / 8.0);
    assert_eq!(units(true, Recompute::None), (34.0 + 80.0) / 8.0);
    assert_eq!(units(false, Recompute::Selective), 10.0 + 24.0 / 8.0);
    assert_eq!(units(true, Recompute::Selective), 34.0 / 8.0);
    assert_eq!(units(false, Recompute::Full), 2.0);
    assert_eq!(units(true, Recompute::Full), 2.0 / 8.0);
    assert_eq!(breakdown::ATTENTION + breakdown::MLP + breakdown::NORMS, 34.0);
    assert_eq!(breakdown::TENSOR_REPLICATED, 10.0);
}

#[test]
fn first_stage_holds_all_layers_worth() {
    assert_eq!(first_stage_bytes(1.0, 96.0, 8.0, 1.0), 96.0);
    assert_eq!(interleaved_factor(8.0, 3.0), 1.0 + 7.0 / 24.0);
    // p = 4, v = 2: 5.5 micro-batches' worth of the device's share, where 1F1B holds 4.
    assert_eq!(4.0 * interleaved_factor(4.0, 2.0), 5.5);
    let sbh = 2048.0 * 12288.0;
    assert_eq!(embedding_bytes(&GPT3, 16.0), 2.0 * sbh);
    let head = 4.0 * sbh / 8.0 * (1.0 + 51_200.0 / 12288.0);
    assert!((head_bytes(&GPT3, 51_200.0) / head - 1.0).abs() < 1e-14);
}

/// Korthikanti's appendix prints 2.7 % and 1.6 %: three times the one forward run of the core that
/// recomputation adds.
#[test]
fn selective_recompute_costs_a_third_of_what_is_printed() {
    let printed = |h: f64| recompute::selective_overhead_printed(2048.0, h);
    assert!((printed(12288.0) - 0.027).abs() < 5e-4 && (printed(20480.0) - 0.016).abs() < 5e-4);
    for h in [6144.0, 12288.0, 20480.0] {
        let ratio = printed(h) / recompute::selective_overhead(2048.0, h);
        assert!((ratio - 3.0).abs() < 1e-9, "{ratio}");
    }
}

/// Llama-3-8B keeps about what Korthikanti's 34h counts, by other terms.
#[test]
fn modern_block_of_llama3_8b() {
    let widths =
        Block { hidden: 4096.0, query_width: 4096.0, kv_width: 1024.0, heads: 32.0, ffn: 14336.0 };
    let block = block_bytes(&widths);
    assert_eq!(block.total(), 139_392.0);
    assert_eq!(34.0 * widths.hidden, 139_264.0);
    assert_eq!(block.rank_bytes(8.0, true), block.total() / 8.0);
    let replicated = 8.0 * widths.hidden;
    assert_eq!(block.rank_bytes(8.0, false), replicated + (block.total() - replicated) / 8.0);
    assert_eq!(block.total() - block.product_recomputed().total(), 2.0 * 14336.0);
    assert_eq!(block.total() - block.norms_recomputed().total(), 4.0 * 4096.0);
    assert_eq!(block.fp32_residual().total() - block.total(), 4.0 * 4096.0);
}

#[test]
fn expert_and_output_layers() {
    let (h, f) = (4096.0, 14336.0);
    assert_eq!(moe_bytes(h, 8.0, f, 2.0), 64.0 + 2.0 * (4.0 * h + 6.0 * f));
    assert_eq!(output_bytes(h, 128_256.0, 4.0, 4.0, 8.0), 2.0 * h + 128_256.0);
    assert_eq!(output_bytes(h, 128_256.0, 0.0, 0.0, 1.0), 2.0 * h);
}

/// The Overview's orders of growth: 8 stages, 64 layers, batch 128.
#[test]
fn gpipe_keeps_less_than_a_naive_pipeline() {
    assert_eq!(pipeline::naive_activation(128.0, 64.0, 8.0), 1024.0);
    assert_eq!(pipeline::gpipe_activation(128.0, 64.0, 8.0, 32.0), 128.0 + 8.0 * 4.0);
}

/// The Overview's example at 8 devices: 87.5 % idle, 46.7 % with 8 micro-batches. It divides by the
/// total time; SC'21's ratio of the same bubble is 7/8.
#[test]
fn overview_bubbles() {
    assert_eq!(pipeline::naive_bubble(8.0), 0.875);
    assert_eq!(pipeline::bubble_over_total(8.0, 8.0, 1.0), 7.0 / 15.0);
    assert_eq!((1000.0 * pipeline::bubble_over_total(8.0, 8.0, 1.0)).round(), 467.0);
    assert_eq!(pipeline::bubble_over_ideal(8.0, 8.0, 1.0), 0.875);
}
