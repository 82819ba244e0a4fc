//! Layers with experts in pairs of passes: what a pair hides of their all-to-alls.

use super::experts::ExpertPieces;
use super::layer::{LayerCost, LayerPricer, Pieces};
use super::parts::Parts;
use models::formulas::ampipe::Chunk;
use models::formulas::pairs::{PairedLayer, hidden_s};

impl LayerPricer<'_> {
    /// The layer as one of a pair, with what its passes take longer unpaired. `cost` is that of the
    /// layer without overlap.
    ///
    /// The pair's other pass is taken to be one of the same kind of layer. What a pair hides of the
    /// all-to-alls that recomputation repeats is not counted.
    pub(super) fn paired(
        &self,
        cost: LayerCost,
        pieces: &Pieces,
        experts: &ExpertPieces,
    ) -> LayerCost {
        let ExpertPieces { experts: of_experts, .. } = experts;
        let shared = pieces.feed();
        let pass = |pass: &Parts, experts: Parts, beside: Parts| {
            let (experts_s, sent_s) = (experts.compute_s, pass.ep_s / 2.0);
            let attention_s = pass.total_s() - pass.ep_s - experts_s - beside.compute_s;
            Chunk { attention_s, dispatch_s: sent_s, experts_s, combine_s: sent_s }
        };
        let backward = cost.backward();
        let layer = PairedLayer {
            forward: pass(&cost.forward, of_experts.forward, shared.forward),
            backward: pass(
                &backward,
                of_experts.input + of_experts.weight,
                shared.input + shared.weight,
            ),
            beside_s: [shared.forward.compute_s, (shared.input + shared.weight).compute_s],
        };
        let hidden_s = hidden_s(&layer, self.interference().slowdown);
        let without = |parts: Parts, hidden_s: f64| Parts { ep_s: parts.ep_s - hidden_s, ..parts };
        LayerCost {
            forward: without(cost.forward, hidden_s[0]),
            backward_input: without(cost.backward_input, hidden_s[1]),
            unpaired_s: hidden_s,
            ..cost
        }
    }
}
