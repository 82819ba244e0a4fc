//! What a stage costs: its layers, vocabulary layers and transfers, and its reductions.

use super::recompute_split;
use super::stage_transfers::{copies_s, gap_s, slowdown_beside_passes};
use super::{Configuration, StageCost};
use crate::cost::collective::{self, Collective};
use crate::cost::parts::Parts;
use crate::cost::state::LocalParams;
use models::mesh::{Axis, GroupShape, Mesh};
use models::schedule::ScheduleName;

impl Configuration<'_> {
    /// Cost of a stage that holds layers `start..end`.
    pub fn stage(&self, stage: usize, start: usize, end: usize) -> StageCost {
        let layers = self.stage_of_layers(start, end);
        let mut cost = self.stage_ends(stage);
        cost.tail_s += self.tied_exposed_s(stage, layers.weight_s);
        cost.forward += layers.forward;
        cost.backward += layers.backward;
        cost.weight_s += layers.weight_s;
        cost.unpaired_s = layers.unpaired_s;
        cost.host_in_flight_bytes = layers.host_in_flight_bytes;
        cost.params = cost.params + layers.params;
        let (forward_s, backward_s) = (cost.forward.total_s(), cost.backward.total_s());
        cost.tail_s += self.reduced_s(stage, cost.params, backward_s);
        cost.optimizer_s = self.state.optimizer_s(cost.params);
        cost.gather_s = self.state.gather_exposed_s(cost.params, forward_s);
        cost
    }

    /// Time of the gradient reductions of a stage that passes do not hide, s. In a bidirectional
    /// pipeline the two copies exchange their gradients after the last pass, and only then are the
    /// replicas' gradients summed.
    fn reduced_s(&self, stage: usize, params: LocalParams, backward_s: f64) -> f64 {
        let d = &self.decisions;
        if d.layout().copies() == 1 {
            return self.state.reduce_exposed_s(params, backward_s);
        }
        let bytes = self.state.copied_bytes(params);
        copies_s(self.cache, d, stage, bytes) + self.state.reduce_exposed_s(params, 0.0)
    }

    /// Passes and parameters of the layers alone.
    pub(crate) fn stage_of_layers(&self, start: usize, end: usize) -> StageCost {
        let counts = self.cache.layers.counts(start, end);
        let mut cost = StageCost::default();
        let slowdown = slowdown_beside_passes(self.cache, &self.decisions);
        let slowed = |parts: Parts| parts.slowed(slowdown);
        // Layers that run again together are gathered for that and for their backward passes.
        let gathers = if self.decisions.recompute_group > 1 { 2.0 } else { 1.0 };
        for (kind, &count) in counts.iter().enumerate() {
            let layer = &self.layer_costs.layer[kind];
            let params = self.layer_costs.params[kind];
            let (forward, backward) = (slowed(layer.forward), slowed(layer.backward()));
            cost.forward += self.with_gather(forward, params, 1.0, 0.0) * count as f64;
            cost.backward += self.with_gather(backward, params, gathers, 1.0) * count as f64;
            cost.params = cost.params + params * count as f64;
            // Activations on the host are of layers that recompute alike.
            let option = recompute_split::options(self.decisions.recompute)[0];
            cost.host_in_flight_bytes += layer.host_bytes[option] * count as f64;
            for (unpaired_s, more_s) in cost.unpaired_s.iter_mut().zip(layer.unpaired_s) {
                *unpaired_s += more_s * count as f64;
            }
            if self.decisions.schedule.splits_backward() {
                cost.weight_s += slowed(layer.backward_weight).total_s() * count as f64;
            }
        }
        cost
    }

    /// Adds the communication of ZeRO stages 2 and 3 for one layer and one micro-batch that the
    /// pass does not hide. Looped breadth-first runs a chunk's micro-batches one after another, so
    /// it gathers and reduces once for all of them.
    fn with_gather(
        &self,
        mut pass: Parts,
        params: LocalParams,
        gathers: f64,
        reductions: f64,
    ) -> Parts {
        let d = &self.decisions;
        let gather_s = if d.zero_stage >= 3 { gathers * self.state.gather_s(params) } else { 0.0 };
        let reduce_s =
            if d.zero_stage >= 2 { reductions * self.state.reduce_scatter_s(params) } else { 0.0 };
        if gather_s + reduce_s > 0.0 {
            let shared =
                if d.schedule == ScheduleName::LoopedBfs { d.micro_batches as f64 } else { 1.0 };
            pass.dp_s += self.state.pass_exposed_s((gather_s + reduce_s) / shared, pass.total_s());
        }
        pass
    }

    /// Costs of a stage besides its layers: vocabulary layers, transfers and gaps between passes.
    fn stage_ends(&self, stage: usize) -> StageCost {
        let mut cost = StageCost::default();
        self.add_transfers(stage, &mut cost);
        self.add_gaps(&mut cost);
        if self.passes.is_some() {
            self.add_vocab_shard(stage, &mut cost);
        } else {
            self.add_vocab_ends(stage, &mut cost);
        }
        cost
    }

    fn add_transfers(&self, stage: usize, cost: &mut StageCost) {
        if !self.p2p_transfer.blocks {
            return;
        }
        let behind = |stage| Parts { pp_s: self.transfer_after_s(stage), ..Parts::default() };
        if stage > 0 {
            cost.forward += behind(stage - 1);
        }
        if stage + 1 < self.stages() {
            cost.backward += behind(stage);
        }
    }

    /// Adds the gap with which every pass starts.
    fn add_gaps(&self, cost: &mut StageCost) {
        let gap_s = gap_s(self.cache, &self.decisions);
        let gap = Parts { pp_s: gap_s, ..Parts::default() };
        cost.forward += gap;
        cost.backward += gap;
        if self.decisions.schedule.splits_backward() {
            cost.backward += gap;
            cost.weight_s += gap_s;
        }
    }

    /// Adds the embedding on the first stage and the output layer on the last.
    fn add_vocab_ends(&self, stage: usize, cost: &mut StageCost) {
        let (vocab, tied) = (&self.layer_costs.vocab, self.cache.model.tied_embeddings);
        let (embedding, head) = self.cache.vocab_params(self.decisions.tp);
        let (first, last) = (stage == 0, stage + 1 == self.stages());
        let dense = |count| LocalParams { dense: count, expert: 0.0 };
        if first {
            let table = dense(embedding);
            cost.forward += self.with_gather(vocab.embed_forward, table, 1.0, 0.0);
            // Its backward pass reads no weights.
            cost.backward += self.with_gather(vocab.embed_backward, table, 0.0, 1.0);
            cost.params.dense += embedding;
            cost.extra_in_flight_bytes += vocab.embed_saved_bytes;
        }
        if last {
            let (table, backward) =
                (dense(head), vocab.head_backward_input + vocab.head_backward_weight);
            // A tied table is reduced once, behind the input layer.
            let shared = tied && self.decisions.layout().ends_meet(self.ranks(), self.stages());
            let (reductions, own) = if shared { (0.0, 0.0) } else { (1.0, head) };
            cost.forward += self.with_gather(vocab.head_forward, table, 1.0, 0.0);
            cost.backward += self.with_gather(backward, table, 1.0, reductions);
            if self.decisions.schedule.splits_backward() {
                cost.weight_s += vocab.head_backward_weight.total_s();
            }
            cost.params.dense += own;
            cost.extra_in_flight_bytes += vocab.head_saved_bytes;
            cost.workspace_bytes += vocab.logits_bytes;
        }
    }

    /// Exposed time of summing a tied embedding's gradients, s. `layers_weight_s` are the weight
    /// gradients of the stage's layers, which come after those of the output layer and may hide the
    /// sum.
    fn tied_exposed_s(&self, stage: usize, layers_weight_s: f64) -> f64 {
        let (first, last) = (stage == 0, stage + 1 == self.stages());
        // On a V of stages the first rank holds both copies of the embedding. In a bidirectional
        // pipeline each end does.
        let apart = || !self.holders_of(0).any(|rank| rank == self.rank_of(self.stages() - 1));
        let summed = self.cache.model.tied_embeddings && self.passes.is_none();
        if !summed || first == last || !apart() {
            return 0.0;
        }
        let under = self.cache.cluster.software.tied_under_weights;
        let hidden_s = if under { layers_weight_s } else { 0.0 };
        (self.tied_gradient_s() - hidden_s).max(0.0)
    }

    /// Time to sum the gradients of a tied embedding on the first and the last stage.
    fn tied_gradient_s(&self) -> f64 {
        let (_, rows) = self.cache.vocab_params(self.decisions.tp);
        let mesh = Mesh::new(&self.decisions);
        let stride = mesh.stride(Axis::Pp) * (self.decisions.pp - 1);
        let pair = GroupShape::strided(2, stride, &self.cache.domains);
        let bytes = rows * self.state.reduced_bytes();
        let (cluster, senders) = (self.cache.cluster, mesh.stride(Axis::Pp));
        collective::time_of_some_s(cluster, Collective::AllReduce, bytes, &pair, senders)
    }

    /// Adds one shard of both vocabulary layers on every rank.
    fn add_vocab_shard(&self, stage: usize, cost: &mut StageCost) {
        if stage >= self.ranks() {
            return;
        }
        let (embedding, head) = self.cache.vocab_shard_params(&self.decisions);
        cost.params.dense += embedding;
        cost.params.dense += if self.cache.model.tied_embeddings { 0.0 } else { head };
    }
}
