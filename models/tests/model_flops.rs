//! Model FLOPs by hand: what a window leaves of attention.

use models::decisions::{Dtype, Recompute};
use models::input::Source;
use models::layer::{Gemm, Split, core_flops, expert_gemms, forward_flops, fullest_expert_gemms};
use models::layer::{attention_gemms, dense_gemms, separate_attention_gemms, separate_dense_gemms};
use models::layer::{routed_elements, saved_bytes, streams, worst_imbalance};
use models::model::{ModelSpec, read, shipped};

/// Four layers, 64 wide, 8 heads of 8, an SwiGLU of 176, 512 words, 64 tokens.
fn small(window: &str) -> ModelSpec {
    let text = format!(
        "name: small\nlayers: 4\nhidden: 64\nheads: 8\nffn: 176\nvocab: 512\nseq_len: 64\nglobal_batch: 16\n{window}"
    );
    read(&Source::from_bytes("small.yaml", text.into_bytes()).unwrap()).unwrap()
}

/// Products of one layer and 64 tokens: Q, K, V and O are 64 by 64, three matrices of the MLP 64 by
/// 176.
const LAYER: f64 = 2.0 * 64.0 * (4.0 * 64.0 * 64.0 + 3.0 * 64.0 * 176.0);
/// The output layer.
const OUTPUT: f64 = 2.0 * 64.0 * 64.0 * 512.0;

/// Scores and their product with V: 8 heads, 8 + 8 wide, `keys` for each of 64 queries.
fn core(keys: f64) -> f64 {
    2.0 * 64.0 * keys * 8.0 * (8.0 + 8.0)
}

#[test]
fn a_window_leaves_as_many_keys_as_it_is_long() {
    let cases = [
        ("", 4.0 * core(64.0)),
        ("window: {tokens: 16}\n", 4.0 * core(16.0)),
        ("window: {tokens: 16, full_every: 2}\n", 2.0 * core(16.0) + 2.0 * core(64.0)),
        ("window: {tokens: 16, full_every: 4}\n", 3.0 * core(16.0) + core(64.0)),
        ("window: {tokens: 64}\n", 4.0 * core(64.0)),
        ("window: {tokens: 4096}\n", 4.0 * core(64.0)),
    ];
    for (window, attention) in cases {
        let flops = 4.0 * LAYER + attention + OUTPUT;
        assert_eq!(forward_flops(&small(window), 64.0), flops, "{window}");
        // Twice the tokens are twice the sequences.
        assert_eq!(forward_flops(&small(window), 128.0), 2.0 * flops, "{window}");
    }
}

/// Layers 0, 2, 4, ... of Gemma 2 and GPT-OSS are windowed.
#[test]
fn alternating_layers_of_shipped_models_are_counted_apart() {
    let cases =
        [("gemma2_9b", 4096.0, 2.0 * 256.0, 16.0), ("gpt_oss_120b", 128.0, 2.0 * 64.0, 64.0)];
    for (name, window, widths, heads) in cases {
        let model = shipped(name).unwrap().unwrap().with_run(Some(8192), Some(1)).unwrap();
        for (index, keys) in [(0, window), (1, 8192.0), (2, window), (3, 8192.0)] {
            let flops = 2.0 * 8192.0 * keys * heads * widths;
            assert_eq!(core_flops(&model, model.layer_kind(index)), flops, "{name} {index}");
        }
    }
}

/// Eight experts, two a token, on four ranks.
const ON_FOUR: Split =
    Split { tp: 1, cp: 1, cp_ulysses: 1, ep: 4, etp: 1, sequence_parallel: false, micro_batch: 1 };

/// The fullest of four ranks has one and a half times the rows, and the FLOPs of the model stay. A
/// capacity pads all ranks alike.
#[test]
fn an_imbalance_fills_the_fullest_rank() {
    let even = small("moe: {experts: 8, top_k: 2, ffn: 32}\n");
    let uneven = small("moe: {experts: 8, top_k: 2, ffn: 32, imbalance: 1.5}\n");
    let padded =
        small("moe: {experts: 8, top_k: 2, ffn: 32, imbalance: 1.5, capacity_factor: 1}\n");
    let rows = |model: &ModelSpec| fullest_expert_gemms(model, &ON_FOUR)[0].m;
    // 64 tokens twice on each of four ranks, over eight experts.
    assert_eq!([&even, &uneven, &padded].map(rows), [64, 96, 64]);
    assert_eq!(expert_gemms(&uneven, &ON_FOUR)[0].m, 64);
    assert_eq!(routed_elements(&uneven, &ON_FOUR), 1.5 * routed_elements(&even, &ON_FOUR));
    assert_eq!(forward_flops(&uneven, 64.0), forward_flops(&even, 64.0));
    let kept = |model: &ModelSpec| {
        let kind = model.layer_kind(0);
        saved_bytes(model, kind, &ON_FOUR, Dtype::Bf16, true, Recompute::None)
    };
    // Inputs and outputs of experts, 64 wide, and three values of 32 between them, of 64 copies
    // more.
    assert_eq!(kept(&uneven) - kept(&even), 64.0 * 2.0 * (2.0 * 64.0 + 3.0 * 32.0));
    assert_eq!(kept(&padded), kept(&even));
}

/// All tokens of four ranks to the two experts of one; with eight experts a token, to both of them.
#[test]
fn the_worst_load_is_all_tokens_on_one_rank() {
    let of = |top_k: u64, more: &str, ep: u64| {
        let model = small(&format!("moe: {{experts: 8, top_k: {top_k}, ffn: 32{more}}}\n"));
        worst_imbalance(&model, ep)
    };
    assert_eq!(of(2, "", 4), Some(4.0));
    assert_eq!(of(2, "", 8), Some(4.0));
    assert_eq!(of(8, "", 4), None);
    assert_eq!(of(2, "", 1), None);
    assert_eq!(of(2, ", capacity_factor: 1", 4), None);
    assert_eq!(worst_imbalance(&small(""), 4), None);
}

/// Products of their own for queries, keys and values, and for gate and up, do the same work, on
/// every tensor-parallel degree; latent attention has them apart already.
#[test]
fn separate_products_do_the_same_work() {
    let flops = |gemms: &[Gemm]| gemms.iter().map(Gemm::flops).sum::<f64>();
    for name in ["llama70b", "gpt_1.7b", "gemma2_9b", "deepseek_v3"] {
        let Some(Ok(model)) = shipped(name) else { panic!("{name} is not shipped") };
        for tp in [1, 2, 8] {
            let (split, kind) = (Split { tp, ..ON_FOUR }, model.layer_kind(0));
            let (one, apart) =
                (attention_gemms(&model, &split), separate_attention_gemms(&model, &split));
            assert_eq!(flops(&one), flops(&apart), "{name} {tp}");
            assert_eq!(apart.len(), if name == "deepseek_v3" { one.len() } else { 4 }, "{name}");
            assert_eq!(one.last(), apart.last(), "{name}");
            let (one, apart) =
                (dense_gemms(&model, kind, &split), separate_dense_gemms(&model, kind, &split));
            assert_eq!(flops(&one), flops(&apart), "{name} {tp}");
            assert_eq!(apart.len(), if name == "gpt_1.7b" { 2 } else { 3 }, "{name}");
        }
    }
}

/// A kernel reads and writes in place what it rotates: here two columns of eight.
#[test]
fn rotation_moves_the_rotated_columns() {
    let split = Split::WHOLE;
    let moved = |model: &ModelSpec| {
        let streams = streams(model, model.layer_kind(0), &split, Dtype::F32);
        streams.forward.iter().sum::<f64>() + streams.backward.iter().sum::<f64>()
    };
    // Six columns of queries and of keys, 64 tokens, eight heads, there and back, forward and
    // backward, four bytes.
    let left_out = f64::from(6 * 2 * 64 * 8 * 2 * 2 * 4);
    assert_eq!(moved(&small("")) - moved(&small("rotary_dim: 2\n")), left_out);
}
