//! Attention and experts in chunks, beside their all-to-alls (AMPipe, Tutel).
//!
//! Each chunk's kernels are priced at the chunk's own shape, so what smaller kernels lose is what
//! the tables and formulas say that they lose. `models::formulas::ampipe` lays the chunks out in
//! time.

use super::experts::ExpertPieces;
use super::layer::{LayerPricer, Pieces, Shape, ThreePasses};
use super::parts::{AttentionChunks, Both, ExpertChunk, Parts};
use super::{attention, memory_bound};
use models::decisions::MoeOverlap;
use models::formulas::ampipe::{self, Chunk, Interference};
use models::layer::{self, Gemm, LocalHeads};
use models::model::LayerKind;

/// Kernels that a further chunk adds, forward and backward, of attention and routing and of experts
/// (`AttMoEPipe` of AMPipe's code).
const ATTENTION_KERNELS: [f64; 2] = [16.0, 24.0];
const EXPERT_KERNELS: [f64; 2] = [6.0, 10.0];
/// Tensors that move for each chunk's gradient of all keys and values: written, read, and added to
/// the sum, which is read and written.
const SUMMED_TENSORS: f64 = 4.0;

fn both(passes: &ThreePasses) -> Both {
    Both {
        forward_s: passes.forward.total_s(),
        backward_s: passes.input.total_s() + passes.weight.total_s(),
    }
}

/// The chunks of a layer in both passes, and what attention computes outside of them.
struct Chunked {
    forward: Vec<Chunk>,
    backward: Vec<Chunk>,
    outside: Both,
}

impl LayerPricer<'_> {
    /// Routed experts of a layer in chunks: with what chunks compute beyond the whole, and the time
    /// that all-to-alls add.
    pub(super) fn chunked_experts(
        &self,
        shape: &Shape,
        (attention, chunks): (&ThreePasses, &AttentionChunks),
        whole: &ExpertPieces,
    ) -> ThreePasses {
        let chunked = self.chunked(shape, (attention, chunks), whole.chunk);
        let how = self.interference();
        let [before, computed] = [both(attention), both(&whole.experts)];
        let alone = |of: fn(&Both) -> f64| of(&before) + of(&computed);
        let added = |chunks: &[Chunk], total_s: f64, outside_s: f64, alone_s: f64| {
            let chunks_s: f64 = chunks.iter().map(Chunk::computed_s).sum();
            let ep_s = total_s - chunks_s;
            let compute_s = (outside_s + chunks_s - alone_s).max(0.0);
            Parts { compute_s, ep_s, tp_s: whole.tensor_parallel_s, ..Parts::default() }
        };
        let Chunked { forward, backward, outside } = &chunked;
        let forward_s = ampipe::forward_s(forward, how);
        let backward_s = ampipe::backward_s(backward, how);
        let mut found = whole.experts + whole.router;
        found.forward += added(forward, forward_s, outside.forward_s, alone(|b| b.forward_s));
        found.input += added(backward, backward_s, outside.backward_s, alone(|b| b.backward_s));
        found
    }

    /// Kernels are placed on multiprocessors in the order in which they start: an all-to-all takes
    /// its own only when the kernels before it leave some.
    pub(super) fn interference(&self) -> Interference {
        let (sms, taken) = (self.cluster.device.sms as f64, self.cluster.software.dispatch_sms);
        Interference { slowdown: sms / (sms - taken).max(sms / 2.0), late: true }
    }

    fn chunked(
        &self,
        shape: &Shape,
        (attention, AttentionChunks { parts, outside }): (&ThreePasses, &AttentionChunks),
        ExpertChunk { products, sent_s }: ExpertChunk,
    ) -> Chunked {
        let degree = shape.moe_overlap_degree.max(1);
        let whole = both(attention);
        let chunk = |attention_s, experts_s| Chunk {
            attention_s,
            dispatch_s: sent_s,
            experts_s,
            combine_s: sent_s,
        };
        if shape.moe_overlap != MoeOverlap::Ampipe {
            // Attention is whole: before the first chunk forward, after the last one backward.
            let only = |at: u64, number: u64, seconds| if at == number { seconds } else { 0.0 };
            let forward = |i| chunk(only(0, i, whole.forward_s), products.forward_s);
            let backward = |i| chunk(only(degree - 1, i, whole.backward_s), products.backward_s);
            return Chunked {
                forward: (0..degree).map(forward).collect(),
                backward: (0..degree).map(backward).collect(),
                outside: Both::default(),
            };
        }
        Chunked {
            forward: parts.iter().map(|a| chunk(a.forward_s, products.forward_s)).collect(),
            backward: parts.iter().map(|a| chunk(a.backward_s, products.backward_s)).collect(),
            outside: *outside,
        }
    }

    /// A layer's attention in as many chunks as AMPipe has under this shape.
    pub fn attention_chunks(
        &self,
        kind: LayerKind,
        shape: &Shape,
        pieces: &Pieces,
    ) -> AttentionChunks {
        if shape.moe_overlap != MoeOverlap::Ampipe {
            return AttentionChunks::default();
        }
        let degree = shape.moe_overlap_degree.max(1);
        let whole = both(&pieces.attention);
        let core = self.attention_chunk(kind, shape, 0, 1);
        let outside = Both {
            forward_s: (whole.forward_s - core.forward_s).max(0.0),
            backward_s: (whole.backward_s - core.backward_s).max(0.0),
        };
        let [forward_s, backward_s] = self.further_chunk_s(shape);
        let further = |chunk: Both| Both {
            forward_s: chunk.forward_s + forward_s,
            backward_s: chunk.backward_s + backward_s,
        };
        let first = self.attention_chunk(kind, shape, 0, degree);
        let others = (1..degree).map(|number| {
            further(match chunks_are_alike(shape) {
                true => first,
                false => self.attention_chunk(kind, shape, number, degree),
            })
        });
        AttentionChunks { parts: std::iter::once(first).chain(others).collect(), outside }
    }

    /// Attention's core and its output projection for chunk `number` of `degree`.
    fn attention_chunk(&self, kind: LayerKind, shape: &Shape, number: u64, degree: u64) -> Both {
        let mut core = self.core_shape(kind, shape);
        core.query_len /= degree;
        if !chunks_are_alike(shape) {
            core.key_len = core.key_len / degree * (number + 1);
            core.last_queries = true;
        }
        let projections = layer::attention_gemms(self.model, &shape.split);
        let last = projections.last().map(|&out| Gemm { m: out.m.div_ceil(degree), ..out });
        let out = both(&self.products(shape.dtype, last.as_slice()));
        let forward_s = attention::forward_s(self.cluster, &core, shape.dtype);
        let backward_s = attention::backward_s(self.cluster, &core, shape.dtype);
        Both { forward_s: forward_s + out.forward_s, backward_s: backward_s + out.backward_s }
    }

    /// What a further chunk of attention costs beside its kernels: gaps between them, another
    /// routing, and gradients of keys and values that are added up.
    fn further_chunk_s(&self, shape: &Shape) -> [f64; 2] {
        let software = &self.cluster.software;
        let routing_s = if software.graphed_routing { 0.0 } else { software.routing_s };
        let heads = LocalHeads::new(self.model, shape.split.tp);
        let elements = shape.split.tokens(self.model) as f64 * heads.kv_width() as f64;
        let summed = SUMMED_TENSORS * elements * shape.dtype.storage_bytes();
        let [forward_s, backward_s] =
            ATTENTION_KERNELS.map(|kernels| kernels * self.cluster.device.kernel_launch_s);
        [forward_s + routing_s, backward_s + memory_bound::elementwise_s(self.cluster, summed)]
    }

    /// One chunk of the experts, of as many as the shape has.
    pub(super) fn expert_chunk(&self, shape: &Shape) -> ExpertChunk {
        if matches!(shape.moe_overlap, MoeOverlap::None | MoeOverlap::Pair) {
            return ExpertChunk::default();
        }
        let degree = shape.moe_overlap_degree.max(1);
        let gemms: Vec<Gemm> = layer::fullest_expert_gemms(self.model, &shape.split)
            .into_iter()
            .map(|gemm| Gemm { m: gemm.m.div_ceil(degree), ..gemm })
            .collect();
        let slowdown = self.cluster.software.expert_slowdown;
        let products = both(&self.slowed_products(shape.dtype, &gemms, slowdown));
        let further = 1.0 - 1.0 / degree as f64;
        let [forward_s, backward_s] =
            EXPERT_KERNELS.map(|kernels| further * kernels * self.cluster.device.kernel_launch_s);
        let products = Both {
            forward_s: products.forward_s + forward_s,
            backward_s: products.backward_s + backward_s,
        };
        ExpertChunk { products, sent_s: self.all_to_all_s(shape, degree) }
    }
}

/// Where a rank has several runs of rows, of sequences or of tensor-parallel ranks, a chunk has
/// queries of each, and chunks see about as many keys.
fn chunks_are_alike(shape: &Shape) -> bool {
    let split = &shape.split;
    let runs = split.micro_batch * if split.sequence_parallel { split.tp } else { 1 };
    split.cp > 1 || runs > 1
}

#[cfg(test)]
mod tests {
    use super::{Chunked, LayerPricer, Shape, both};
    use models::decisions::{CpStyle, Dtype, MoeOverlap};
    use models::layer::Split;
    use models::mesh::GroupShape;

    /// All steps of a layer's chunks one after another.
    fn in_turn_s(chunked: &Chunked) -> f64 {
        let steps = chunked.forward.iter().chain(&chunked.backward);
        let chunks_s: f64 =
            steps.map(|chunk| chunk.computed_s() + chunk.dispatch_s + chunk.combine_s).sum();
        chunks_s + chunked.outside.forward_s + chunked.outside.backward_s
    }

    /// What degree 4 costs without overlap, of the block's time.
    fn overhead(cluster: &str, model: &str, seq_len: u64, factor: f64) -> f64 {
        let cluster = models::cluster::shipped(cluster).and_then(Result::ok).expect("shipped");
        let model = models::model::shipped(model).and_then(Result::ok).expect("shipped");
        let ranks = cluster.node_gpus();
        let mut model = model.with_run(Some(seq_len), Some(ranks)).expect("a valid run");
        model.moe.as_mut().expect("has experts").capacity_factor = Some(factor);
        let group = |ranks| GroupShape::strided(ranks, 1, &[ranks, u64::MAX]);
        let shape = |degree| Shape {
            split: Split {
                tp: 1,
                cp: 1,
                cp_ulysses: 1,
                ep: ranks,
                etp: 1,
                sequence_parallel: false,
                micro_batch: 1,
            },
            cp_style: CpStyle::Zigzag,
            moe_overlap: MoeOverlap::Ampipe,
            moe_overlap_degree: degree,
            fused_loss: false,
            recompute_group: 1,
            offload_activations: false,
            dtype: Dtype::Fp16,
            tp_group: group(1),
            cp_group: group(1),
            ep_group: group(ranks),
            etp_group: group(1),
        };
        let pricer = LayerPricer { model: &model, cluster: &cluster };
        let kind = model.layer_kind(0);
        let (whole, cut) = (shape(1), shape(4));
        let pieces = pricer.pieces(kind, &whole, &pricer.body(kind, &whole));
        let in_turn_s = |shape: &Shape| {
            let chunks = pricer.attention_chunks(kind, shape, &pieces);
            let experts = pricer.expert_chunk(shape);
            in_turn_s(&pricer.chunked(shape, (&pieces.attention, &chunks), experts))
        };
        let alone_s = in_turn_s(&whole);
        let attention = both(&pieces.attention);
        assert!(alone_s > attention.forward_s + attention.backward_s);
        in_turn_s(&cut) / alone_s - 1.0
    }

    /// AMPipe's figure 9, on A10G: degree 4 without overlap slows blocks down by less than 5 % in
    /// all cases.
    #[test]
    fn chunks_alone_cost_what_ampipe_measured() {
        for model in ["ampipe_base", "ampipe_medium", "ampipe_large"] {
            for seq_len in [16 << 10, 24 << 10, 32 << 10] {
                for factor in [1.0, 2.0, 4.0] {
                    let found = 100.0 * overhead("a10g_pcie", model, seq_len, factor);
                    let case = format!("{found:.1} %: {model}, {seq_len} tokens, {factor}");
                    assert!((1.0..5.0).contains(&found), "{case}");
                }
            }
        }
    }
}
