//! Time of the router and of the routed experts for one micro-batch on one rank.

use super::collective::{self, Collective};
use super::layer::{LayerPricer, Shape, ThreePasses};
use super::memory_bound;
use super::parts::{ExpertChunk, Parts};
use models::decisions::Dtype;
use models::formulas::communication;
use models::layer::{self, Gemm, Split};

/// Bytes that adding an expert's bias moves for each element of its output, forward and backward:
/// weighted by the router in 32 bits, added, concatenated and cast (Megatron-Core 0.15,
/// `TEGroupedMLP._apply_bias`).
const BIAS_BYTES: [f64; 2] = [28.0, 36.0];
/// Bytes that clamping an activation's inputs moves for each element of its output, forward and
/// backward: clamped and concatenated (`weighted_bias_quick_geglu_impl`).
const CLAMP_BYTES: [f64; 2] = [16.0, 20.0];

/// Routed experts before their all-to-all is overlapped.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertPieces {
    pub(super) experts: ThreePasses,
    pub(super) router: ThreePasses,
    all_to_all_s: f64,
    pub(super) tensor_parallel_s: f64,
    /// One of the chunks that they are cut into.
    pub(super) chunk: ExpertChunk,
}

impl LayerPricer<'_> {
    /// Router, experts and their collectives, before the all-to-all is overlapped.
    pub fn experts(&self, shape: &Shape) -> ExpertPieces {
        ExpertPieces {
            experts: self.expert_products(shape.dtype, &shape.split),
            router: self.router(shape),
            all_to_all_s: self.all_to_all_s(shape, 1),
            tensor_parallel_s: self.expert_tensor_parallel_s(shape),
            chunk: self.expert_chunk(shape),
        }
    }

    /// Routed experts with the exposed part of their all-to-alls.
    pub(super) fn expert_block(&self, pieces: &ExpertPieces) -> ThreePasses {
        let ExpertPieces { experts, router, all_to_all_s: a2a_s, tensor_parallel_s: tp_s, .. } =
            *pieces;
        let sent = Parts { ep_s: self.exposed_all_to_all_s(a2a_s), tp_s, ..Parts::default() };
        let input = Parts::compute(experts.input.compute_s);
        ThreePasses {
            forward: experts.forward + sent + router.forward,
            input: input + sent + router.input,
            weight: experts.weight + router.weight,
        }
    }

    /// Lower bound on router and experts over all `splits`: their fastest products, and no
    /// all-to-all. It depends on the number of tokens on a rank, not on the split.
    pub fn expert_floor(&self, shape: &Shape, splits: &[Split]) -> ThreePasses {
        let router = self.router(shape);
        let products = splits.iter().map(|split| self.expert_products(shape.dtype, split));
        let least = products.reduce(|a, b| ThreePasses {
            forward: Parts::compute(a.forward.compute_s.min(b.forward.compute_s)),
            input: Parts::compute(a.input.compute_s.min(b.input.compute_s)),
            weight: Parts::compute(a.weight.compute_s.min(b.weight.compute_s)),
        });
        router + least.unwrap_or_default()
    }

    fn expert_products(&self, dtype: Dtype, split: &Split) -> ThreePasses {
        let slowdown = self.cluster.software.expert_slowdown;
        self.slowed_products(dtype, &layer::fullest_expert_gemms(self.model, split), slowdown)
    }

    /// The router's products, and the fixed time of routing.
    fn router(&self, shape: &Shape) -> ThreePasses {
        let mut router = self.products(shape.dtype, &[self.router_gemm(shape)]);
        let software = &self.cluster.software;
        let routing_s = if software.graphed_routing { 0.0 } else { software.routing_s };
        router.forward += Parts::compute(routing_s);
        router
    }

    fn router_gemm(&self, shape: &Shape) -> Gemm {
        let experts = self.model.moe.as_ref().map_or(1, |moe| moe.experts);
        let m = shape.split.resident_tokens(self.model);
        Gemm { groups: 1, m, n: experts, k: self.model.hidden }
    }

    /// Seconds of one dispatch or combine of one of `chunks` of the rank's routed copies.
    pub(super) fn all_to_all_s(&self, shape: &Shape, chunks: u64) -> f64 {
        let copies = layer::routed_copies(self.model);
        let elements = layer::routed_elements(self.model, &shape.split) / chunks as f64;
        let bytes = elements * shape.dtype.storage_bytes();
        if self.cluster.software.dispatch_once_a_node {
            return collective::dispatch_s(self.cluster, bytes, &shape.ep_group, copies);
        }
        collective::time_s(self.cluster, Collective::AllToAll, bytes, &shape.ep_group)
    }

    /// All-gather before and reduce-scatter after an expert that is itself split.
    fn expert_tensor_parallel_s(&self, shape: &Shape) -> f64 {
        let etp = shape.split.etp;
        if etp == 1 {
            return 0.0;
        }
        let tokens = shape.split.resident_tokens(self.model) as f64;
        let copies = layer::fullest_copies(self.model, shape.split.ep);
        let width = (etp * self.model.hidden) as f64;
        let elements = communication::dispatched_elements(tokens, copies, width);
        let bytes = elements * shape.dtype.storage_bytes();
        collective::time_s(self.cluster, Collective::AllGather, bytes, &shape.etp_group)
            + collective::time_s(self.cluster, Collective::ReduceScatter, bytes, &shape.etp_group)
    }

    /// What of the two all-to-alls stays exposed where a layer is not cut into chunks.
    fn exposed_all_to_all_s(&self, a2a_s: f64) -> f64 {
        let software = &self.cluster.software;
        let exposed = if software.dispatch_once_a_node { software.ep_exposed } else { 1.0 };
        2.0 * a2a_s * exposed
    }

    /// Kernels that sort a token's copies by expert and combine their results, and that add biases,
    /// forward and backward.
    pub(super) fn routed(&self, shape: &Shape) -> [Parts; 2] {
        let elements = layer::routed_elements(self.model, &shape.split);
        let wide = shape.dtype.storage_bytes() / Dtype::Bf16.storage_bytes();
        let each = self.cluster.software.permute_bytes / 2.0 * wide * elements;
        let permuted = 2.0 * memory_bound::elementwise_s(self.cluster, each);
        self.bias_bytes(&shape.split).map(|bytes| {
            Parts::compute(permuted + memory_bound::elementwise_s(self.cluster, bytes * wide))
        })
    }

    /// Bytes that the biases and clamps of routed experts move in separate kernels, forward and
    /// backward.
    fn bias_bytes(&self, split: &Split) -> [f64; 2] {
        let Some(moe) = self.model.moe.as_ref().filter(|moe| moe.biased) else { return [0.0; 2] };
        if self.cluster.software.fused_experts {
            return [0.0; 2];
        }
        let elements = layer::routed_elements(self.model, split);
        let activated = elements * moe.ffn as f64 / self.model.hidden as f64;
        [0, 1].map(|pass| BIAS_BYTES[pass] * elements + CLAMP_BYTES[pass] * activated)
    }
}
