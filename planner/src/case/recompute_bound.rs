//! How much recomputation memory makes necessary, before any placement is looked at.

use super::ground::Ground;
use crate::cost::layer::LayerCost;
use crate::cost::state::StateCost;
use models::decisions::{Decisions, Recompute};

/// One layer's choices as a convex trade of activation bytes for seconds, cheapest layer kind in every
/// respect.
#[derive(Clone, Copy, Debug)]
pub struct LayerTrade {
    /// Forward and backward without recomputation, s.
    load_s: f64,
    /// (bytes, recompute seconds) with bytes falling and seconds growing.
    points: [(f64, f64); 3],
}

impl LayerTrade {
    /// The trade of the layer kinds of a model; `least` is the first option allowed, and only it where
    /// `only`.
    pub fn new(layers: &[LayerCost], allowed: &[usize]) -> Self {
        let least = |value: &dyn Fn(&LayerCost) -> f64| {
            layers.iter().map(value).fold(f64::INFINITY, f64::min)
        };
        let point = |option: usize| {
            (least(&|l| l.saved_bytes[option]), least(&|l| l.recompute[option].total_s()))
        };
        let first = allowed.first().copied().unwrap_or(0);
        let mut points = [point(first); 3];
        for (slot, &option) in allowed.iter().enumerate().take(3) {
            points[slot..].fill(point(option));
        }
        Self { load_s: least(&LayerCost::total_s), points }
    }

    /// Least seconds of recomputation with at most `bytes` of activations a layer on average, mixing
    /// layers; infinite where even the leanest option is larger.
    fn recompute_s(&self, bytes: f64) -> f64 {
        let mut least_s = f64::INFINITY;
        for &(large, fast_s) in &self.points {
            if large <= bytes {
                least_s = least_s.min(fast_s);
            }
            for &(small, slow_s) in &self.points {
                if small <= bytes && bytes < large {
                    let share = (bytes - small) / (large - small);
                    least_s = least_s.min(slow_s + (fast_s - slow_s) * share);
                }
            }
        }
        least_s
    }

    /// Most layers, fractions allowed, of which a device with `in_flight` micro-batches can do one
    /// micro-batch in `limit_s` when a layer's states take `state_bytes` of its `budget_bytes`.
    fn most_layers(&self, limit_s: f64, in_flight: f64, state_bytes: f64, budget_bytes: f64) -> f64 {
        let load_s = |layers: f64| {
            let bytes = (budget_bytes / layers - state_bytes) / in_flight;
            layers * (self.load_s + self.recompute_s(bytes))
        };
        let (mut low, mut high) = (0.0, limit_s / self.load_s);
        for _ in 0..BISECTIONS {
            let middle = (low + high) / 2.0;
            if load_s(middle) <= limit_s { low = middle } else { high = middle }
        }
        high
    }
}

/// Steps of each bisection; what they leave open is taken on the safe side.
const BISECTIONS: usize = 14;

/// Lower bound on the longest device's seconds for one micro-batch of its layers: the least limit under
/// which devices with `in_flight[i]` micro-batches can hold all `layers` between them, fractions of layers
/// allowed.
pub fn longest_device_s(
    trade: &LayerTrade,
    layers: f64,
    in_flight: &[f64],
    state_bytes: f64,
    budget_bytes: f64,
) -> f64 {
    let holds = |limit_s: f64| {
        let most = |&count: &f64| trade.most_layers(limit_s, count, state_bytes, budget_bytes);
        in_flight.iter().map(most).sum::<f64>() >= layers
    };
    let even_s = trade.load_s * layers / in_flight.len() as f64;
    let slowest_s = even_s * (1.0 + trade.points[2].1.max(trade.points[1].1) / trade.load_s) * 4.0;
    if !holds(slowest_s) {
        return even_s;
    }
    let (mut low, mut high) = (even_s * 0.999, slowest_s);
    if holds(low) {
        return low;
    }
    for _ in 0..BISECTIONS {
        let middle = (low + high) / 2.0;
        if holds(middle) { high = middle } else { low = middle }
    }
    low
}

/// Lower bound on the passes of 1F1B under decisions whose states take least memory, s: the longest
/// device's layers with the recomputation that memory makes necessary. Device `i` has `min(m, p − i)`
/// micro-batches in flight, or more with vocabulary passes; buffers are not counted.
pub fn one_f_one_b_bound_s(ground: &Ground<'_>, d: &Decisions) -> f64 {
    let sheet = ground.sheet(d);
    let state = StateCost::new(ground.cluster, d, &ground.domains);
    let allowed: &[usize] = match d.recompute {
        Recompute::PerLayer => &[0, 1, 2],
        Recompute::None => &[0],
        Recompute::Selective => &[1],
        Recompute::Full => &[2],
    };
    let trade = LayerTrade::new(&sheet.layer, allowed);
    let states = sheet.params.iter().map(|&params| state.memory(params).device_bytes());
    let state_bytes = states.fold(f64::INFINITY, f64::min);
    let in_flight: Vec<f64> =
        (0..d.pp).map(|device| d.micro_batches.min(d.pp - device) as f64).collect();
    let layers = ground.layers.len() as f64;
    let budget = ground.cluster.usable_bytes();
    d.micro_batches as f64 * longest_device_s(&trade, layers, &in_flight, state_bytes, budget)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::parts::Parts;

    fn layer() -> LayerCost {
        LayerCost {
            forward: Parts::compute(1.0),
            backward_input: Parts::compute(2.0),
            recompute: [0.0, 0.1, 1.0].map(Parts::compute),
            saved_bytes: [10.0, 6.0, 1.0],
            ..LayerCost::default()
        }
    }

    #[test]
    fn plenty_of_memory_means_the_even_share() {
        let trade = LayerTrade::new(&[layer()], &[0, 1, 2]);
        let bound_s = longest_device_s(&trade, 8.0, &[2.0, 1.0], 0.0, 1e9);
        assert!((bound_s / 12.0 - 1.0).abs() < 0.01, "{bound_s}");
    }

    #[test]
    fn too_little_memory_means_recomputing_everything() {
        let trade = LayerTrade::new(&[layer()], &[0, 1, 2]);
        // Two devices, four layers each, two micro-batches in flight: 8 bytes hold full recomputation only.
        let bound_s = longest_device_s(&trade, 8.0, &[2.0, 2.0], 0.0, 8.0);
        assert!((bound_s / 16.0 - 1.0).abs() < 0.01, "{bound_s}");
    }

    #[test]
    fn the_bound_never_exceeds_the_best_whole_placement() {
        let trade = LayerTrade::new(&[layer()], &[0, 1, 2]);
        for budget in [20.0, 40.0, 60.0, 90.0] {
            let bound_s = longest_device_s(&trade, 6.0, &[3.0, 1.0], 1.0, budget);
            let best_s = (0..=6).map(|n| best(n, 3.0, budget).max(best(6 - n, 1.0, budget)));
            let best_s = best_s.fold(f64::INFINITY, f64::min);
            assert!(bound_s <= best_s + 1e-9, "budget {budget}: {bound_s} > {best_s}");
        }
    }

    /// Least seconds of `n` whole layers on a device with `in_flight` micro-batches, by trying all mixes.
    fn best(n: usize, in_flight: f64, budget: f64) -> f64 {
        let mut least_s = f64::INFINITY;
        for full in 0..=n {
            for selective in 0..=n - full {
                let none = n - full - selective;
                let bytes = 10.0 * none as f64 + 6.0 * selective as f64 + full as f64;
                if in_flight * bytes + n as f64 <= budget {
                    least_s = least_s.min(3.0 * n as f64 + 0.1 * selective as f64 + full as f64);
                }
            }
        }
        least_s
    }
}
