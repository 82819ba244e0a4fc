//! Model FLOPs by hand: what a window leaves of attention.

use models::input::Source;
use models::layer::{core_flops, forward_flops};
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
