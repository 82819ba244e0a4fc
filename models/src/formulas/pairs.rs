//! A forward and a backward of different micro-batches that run together, so that all-to-alls of
//! one lie under computation of the other (DualPipe; DeepSeek-V3, arXiv 2412.19437, section 3.2.1,
//! figure 4).
//!
//! The two take turns: one computes until it would wait for an all-to-all, then the other does.
//! Over layers of one kind the turns settle: attention beside attention, experts beside experts.

use super::ampipe::Chunk;

/// A layer's forward and backward as one of many alike.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairedLayer {
    /// Forward: attention, dispatch, experts, combine.
    pub forward: Chunk,
    /// Backward: what gradients go through first is `experts_s`, between the two all-to-alls;
    /// `attention_s` comes after them.
    pub backward: Chunk,
    /// Computation beside the second all-to-all of its own pass, forward and backward: shared
    /// experts.
    pub beside_s: [f64; 2],
}

/// Seconds of a layer's all-to-alls that the other pass hides, forward and backward. Computation
/// is `slowdown` times slower while an all-to-all runs beside it.
///
/// The forward's dispatch lies under the backward's attention, and its combine under the backward's
/// experts; the backward's first all-to-all lies under the forward's experts, and its second under
/// the forward's attention. An all-to-all of `d` under computation of `c` saves
/// `min(d / slowdown, c)`: without overlap both take `d + c`, with it `d` and what is left of `c`.
#[must_use]
pub fn hidden_s(layer: &PairedLayer, slowdown: f64) -> [f64; 2] {
    let PairedLayer { forward: f, backward: b, beside_s } = layer;
    let saved = |sent_s: f64, computed_s: f64| (sent_s / slowdown).min(computed_s);
    [
        saved(f.dispatch_s, b.attention_s) + saved(f.combine_s, beside_s[0] + b.experts_s),
        saved(b.dispatch_s, f.experts_s) + saved(b.combine_s, beside_s[1] + f.attention_s),
    ]
}

#[cfg(test)]
mod tests {
    use super::{Chunk, PairedLayer, hidden_s};

    /// Computation of one pass up to where it waits, what then leaves, and what is computed beside
    /// that before the other pass runs.
    type Turn = (f64, f64, f64);

    /// Seconds of two passes by turns: one stream computes, one sends, each in order.
    fn by_turns_s(passes: &[Vec<Turn>; 2]) -> f64 {
        let (mut computed_s, mut sent_s) = (0.0_f64, 0.0_f64);
        let mut arrived_s = [0.0_f64; 2];
        for turn in 0..passes[0].len().max(passes[1].len()) {
            for (of, pass) in passes.iter().enumerate() {
                let Some(&(compute_s, leaves_s, beside_s)) = pass.get(turn) else { continue };
                computed_s = computed_s.max(arrived_s[of]) + compute_s;
                sent_s = sent_s.max(computed_s) + leaves_s;
                arrived_s[of] = sent_s;
                computed_s += beside_s;
            }
        }
        computed_s.max(arrived_s[0]).max(arrived_s[1])
    }

    /// With as many layers as wanted the two agree up to the ends of the passes.
    #[test]
    fn turns_hide_what_the_formula_says() {
        let chunk = |attention_s, dispatch_s, experts_s, combine_s| Chunk {
            attention_s,
            dispatch_s,
            experts_s,
            combine_s,
        };
        let cases = [
            (chunk(4.0, 1.0, 3.0, 2.0), chunk(7.0, 1.5, 6.0, 2.5), [0.0, 0.0]),
            (chunk(1.0, 5.0, 2.0, 6.0), chunk(2.0, 5.0, 3.0, 6.0), [0.0, 0.0]),
            (chunk(1.0, 9.0, 2.0, 7.0), chunk(2.0, 9.0, 3.0, 9.0), [0.5, 1.0]),
            (chunk(4.0, 0.0, 3.0, 0.0), chunk(7.0, 0.0, 6.0, 0.0), [1.0, 2.0]),
        ];
        for (forward, backward, beside_s) in cases {
            let layer = PairedLayer { forward, backward, beside_s };
            let layers = 400;
            let of_layer = |c: &Chunk, beside_s| {
                [(c.attention_s, c.dispatch_s, 0.0), (c.experts_s, c.combine_s, beside_s)]
            };
            let forwards = (0..layers).flat_map(|_| of_layer(&forward, beside_s[0])).collect();
            // Backward nothing is computed before the first all-to-all, and attention comes last.
            let mut backwards: Vec<(f64, f64, f64)> = vec![(0.0, backward.dispatch_s, 0.0)];
            for _ in 0..layers {
                let [(attention_s, dispatch_s, _), experts] = of_layer(&backward, beside_s[1]);
                backwards.extend([experts, (attention_s, dispatch_s, 0.0)]);
            }
            let each = |c: &Chunk| c.computed_s() + c.dispatch_s + c.combine_s;
            let alone_s = each(&forward) + each(&backward) + beside_s[0] + beside_s[1];
            let saved_s = alone_s - by_turns_s(&[forwards, backwards]) / f64::from(layers);
            let [of_forward, of_backward] = hidden_s(&layer, 1.0);
            let expected_s = of_forward + of_backward;
            assert!((saved_s - expected_s).abs() < 0.02 * alone_s, "{saved_s} {expected_s}");
        }
    }
}
