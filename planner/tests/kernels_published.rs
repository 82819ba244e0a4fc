//! Whole passes of published A100 runs, built from kernels.
//!
//! The models are plain GPT (`f` = 4`h`) without tensor parallelism, on the machines of the
//! zero-bubble and vocabulary papers. Times are those of one micro-batch on one inner stage.

use models::cluster::{AttentionKernel, ClusterSpec, Dtype, shipped, software};
use planner::cost::attention::{AttentionShape, backward_s, forward_s};
use planner::cost::gemm::{gemm_s, weight_gradient_s};
use planner::cost::memory_bound::streaming_s;

struct Stage {
    layers: f64,
    hidden: u64,
    heads: u64,
    batch: u64,
    tokens: u64,
    attention: AttentionKernel,
}

const fn stage(layers: f64, hidden: u64, heads: u64, batch: u64, tokens: u64) -> Stage {
    Stage { layers, hidden, heads, batch, tokens, attention: AttentionKernel::Unfused }
}

impl Stage {
    fn cluster(&self) -> ClusterSpec {
        let mut cluster = shipped("a100_roce").unwrap().unwrap();
        let fork = match self.attention {
            AttentionKernel::Unfused => "zero_bubble_2023",
            AttentionKernel::Flash => "vocabulary_2024",
        };
        cluster.software = software(fork).unwrap().unwrap();
        cluster
    }

    fn core(&self) -> AttentionShape {
        AttentionShape {
            batch: self.batch,
            heads: self.heads,
            kv_heads: self.heads,
            query_len: self.tokens,
            key_len: self.tokens,
            head_dim_qk: self.hidden / self.heads,
            head_dim_v: self.hidden / self.heads,
            causal: true,
            last_queries: false,
            window: None,
            sinks: false,
        }
    }

    /// `n` and `k` of the four matrix products of a layer.
    fn products(&self) -> [[u64; 2]; 4] {
        let h = self.hidden;
        [[3 * h, h], [h, h], [4 * h, h], [h, 4 * h]]
    }

    fn rows(&self) -> u64 {
        self.batch * self.tokens
    }

    /// Norms, residuals, dropout and GeLU of a layer in one pass, some ten kernels. They move half
    /// of 64 bytes x tokens x hidden and of 11 bytes x tokens x width.
    fn elementwise_s(&self, cluster: &ClusterSpec) -> f64 {
        let bytes = self.rows() as f64 * (32.0 + 4.0 * 5.5) * self.hidden as f64;
        10.0 * streaming_s(cluster, bytes / 10.0)
    }

    fn forward_s(&self) -> f64 {
        let cluster = &self.cluster();
        let product = |[n, k]: [u64; 2]| gemm_s(cluster, Dtype::Bf16, self.rows(), n, k);
        let products: f64 = self.products().map(product).iter().sum();
        let core = forward_s(cluster, &self.core(), Dtype::Bf16);
        self.layers * (products + core + self.elementwise_s(cluster))
    }

    fn backward_s(&self) -> f64 {
        let cluster = &self.cluster();
        let product = |[n, k]: [u64; 2]| gemm_s(cluster, Dtype::Bf16, self.rows(), k, n);
        let products: f64 = self.products().map(product).iter().sum();
        let core = backward_s(cluster, &self.core(), Dtype::Bf16);
        self.layers * (products + core + self.elementwise_s(cluster))
    }

    fn weights_s(&self) -> f64 {
        let cluster = &self.cluster();
        let gradient =
            |[n, k]: [u64; 2]| weight_gradient_s(cluster, Dtype::Bf16, 1, self.rows(), n, k);
        self.layers * self.products().map(gradient).iter().sum::<f64>()
    }
}

/// Zero Bubble (Qi et al. 2023, table 9): F, B and W in ms. Each stage holds (layers + 2) / stages.
const ZERO_BUBBLE: [(Stage, [f64; 3]); 4] = [
    (stage(3.0, 2304, 24, 6, 1024), [18.52, 18.09, 9.33]),
    (stage(4.0, 4096, 32, 3, 1024), [29.80, 29.44, 19.53]),
    (stage(3.0, 5120, 40, 1, 1024), [11.31, 11.25, 8.10]),
    (stage(2.0, 6144, 48, 1, 1024), [10.41, 10.20, 7.70]),
];

#[test]
fn passes_of_the_zero_bubble_runs() {
    let mut errors = Vec::new();
    for (stage, measured_ms) in &ZERO_BUBBLE {
        let predicted = [stage.forward_s(), stage.backward_s(), stage.weights_s()];
        let ratios = [0, 1, 2].map(|i| predicted[i] * 1e3 / measured_ms[i]);
        println!("h {}: F {:.2} B {:.2} W {:.2}", stage.hidden, ratios[0], ratios[1], ratios[2]);
        errors.extend(ratios.map(|ratio| (ratio - 1.0).abs()));
    }
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    println!("mean error {:.1} %", 100.0 * mean);
    assert!(mean < 0.08);
}

#[test]
fn passes_of_the_vocabulary_run() {
    let stage = Stage { attention: AttentionKernel::Flash, ..stage(4.0, 3072, 24, 1, 2048) };
    // Artifact of VocabularyParallelism, one host, baseline with 2 k tokens, inner stages.
    let forward = stage.forward_s() / 10.47e-3;
    let backward = (stage.backward_s() + stage.weights_s()) / 20.93e-3;
    println!("F {forward:.2} B+W {backward:.2}");
    assert!((forward - 1.0).abs() < 0.1 && (backward - 1.0).abs() < 0.1);
}
