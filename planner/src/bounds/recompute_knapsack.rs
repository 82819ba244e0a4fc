//! The least recomputation that fits into memory, relaxed to fractions of layers (a fractional
//! knapsack).

use super::workload::KindCost;

/// One layer kind moves from a recompute option to a leaner one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    kind: usize,
    /// Bytes saved per layer.
    bytes: f64,
    /// Seconds added per layer.
    seconds: f64,
}

/// Steps along the lower convex hulls of all kinds' (bytes, seconds) points, cheapest byte first.
///
/// Taking steps in this order gives the least seconds that save a number of bytes if layers may be
/// split between options. Whole layers cannot do better, so the result is a lower bound.
#[derive(Clone, Debug, PartialEq)]
pub struct RecomputeKnapsack {
    steps: Vec<Step>,
    /// By kind, seconds and bytes of the first option.
    first: Vec<(f64, f64)>,
    /// By kind, the least buffer that a recomputed layer needs; 0 where nothing may be recomputed.
    buffer: Vec<f64>,
}

impl RecomputeKnapsack {
    /// The knapsack of these layer kinds; `options` are those allowed, cheapest in time first.
    pub fn new(kinds: &[KindCost], options: &[usize]) -> Self {
        let mut steps = vec![];
        let first = options.first().copied().unwrap_or(0);
        for (index, kind) in kinds.iter().enumerate() {
            hull(index, kind, options, &mut steps);
        }
        steps.sort_by(|a, b| (a.seconds * b.bytes).total_cmp(&(b.seconds * a.bytes)));
        let rebuilt =
            |kind: &KindCost, option: usize| kind.saved_bytes[0] - kind.saved_bytes[option];
        let buffer = |kind: &KindCost| {
            let all = options.iter().filter(|&&option| option > 0);
            all.map(|&option| rebuilt(kind, option)).reduce(f64::min).map_or(0.0, |b| b.max(0.0))
        };
        let start = |kind: &KindCost| (kind.recompute_s[first], kind.saved_bytes[first]);
        Self {
            steps,
            first: kinds.iter().map(start).collect(),
            buffer: kinds.iter().map(buffer).collect(),
        }
    }

    /// Seconds and bytes of one layer of a kind with the first option.
    pub fn first_of(&self, kind: usize) -> (f64, f64) {
        self.first[kind]
    }

    /// Seconds and bytes of `counts` layers of each kind with the first option.
    pub fn at_first(&self, counts: &[usize]) -> (f64, f64) {
        let all = self.first.iter().zip(counts);
        all.fold((0.0, 0.0), |(s, b), (&(seconds, bytes), &count)| {
            (s + count as f64 * seconds, b + count as f64 * bytes)
        })
    }

    /// Least recomputation of one micro-batch, s, in a stage with `counts` layers of each kind,
    /// where the activations of `in_flight` micro-batches and a buffer fit into `bytes`; infinite
    /// where they cannot.
    pub fn least_s(&self, counts: &[usize], in_flight: f64, bytes: f64) -> f64 {
        let (first_s, first_bytes) = self.at_first(counts);
        if in_flight * first_bytes <= bytes {
            return first_s;
        }
        let buffer = self.least_buffer(counts);
        self.saving_s(counts, first_s, first_bytes - (bytes - buffer) / in_flight)
    }

    /// Least recomputation of one micro-batch, s, where the activations that `counts` layers of
    /// each kind keep of it must fit into `bytes`; infinite where they cannot, and `None` where
    /// they fit with the first option.
    pub fn forced_s(&self, counts: &[usize], bytes: f64) -> Option<f64> {
        let (first_s, first_bytes) = self.at_first(counts);
        let excess = first_bytes - bytes * (1.0 + 1e-9);
        (excess > 0.0).then(|| self.saving_s(counts, first_s, excess))
    }

    /// The least buffer that a recomputed layer needs, of `counts` layers of each kind, bytes.
    pub fn least_buffer(&self, counts: &[usize]) -> f64 {
        let present = self.buffer.iter().zip(counts).filter(|(_, count)| **count > 0);
        present.map(|(least, _)| *least).fold(f64::INFINITY, f64::min)
    }

    /// `total_s` plus the least seconds that save `excess` bytes of a micro-batch.
    pub fn saving_s(&self, counts: &[usize], mut total_s: f64, mut excess: f64) -> f64 {
        let whole = excess;
        for step in &self.steps {
            let count = counts[step.kind] as f64;
            if excess <= count * step.bytes {
                return total_s + excess / step.bytes * step.seconds;
            }
            excess -= count * step.bytes;
            total_s += count * step.seconds;
        }
        // Rounding must not rule out what just fits.
        if excess <= 1e-9 * whole { total_s } else { f64::INFINITY }
    }
}

/// Steps along the lower convex hull from the first option to the leanest.
fn hull(index: usize, kind: &KindCost, options: &[usize], steps: &mut Vec<Step>) {
    let point = |option: usize| (kind.saved_bytes[option], kind.recompute_s[option]);
    let Some(&first) = options.first() else { return };
    let mut at = point(first);
    loop {
        let leaner = options.iter().map(|&option| point(option)).filter(|next| next.0 < at.0);
        let slope = |next: &(f64, f64)| (next.1 - at.1) / (at.0 - next.0);
        // Of equal slopes the longest step, so that the walk ends at the leanest option.
        let best = leaner.min_by(|a, b| slope(a).total_cmp(&slope(b)).then(a.0.total_cmp(&b.0)));
        let Some(next) = best else { return };
        steps.push(Step { kind: index, bytes: at.0 - next.0, seconds: next.1 - at.1 });
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind() -> KindCost {
        KindCost {
            recompute_s: [0.0, 0.1, 1.0],
            saved_bytes: [10.0, 6.0, 1.0],
            ..KindCost::default()
        }
    }

    #[test]
    fn the_least_time_never_exceeds_that_of_whole_layers() {
        let kinds = [kind(), KindCost { saved_bytes: [7.0, 6.5, 2.0], ..kind() }];
        let knapsack = RecomputeKnapsack::new(&kinds, &[0, 1, 2]);
        for bytes in 0..200 {
            for in_flight in [1.0, 3.0] {
                let bound_s = knapsack.least_s(&[3, 2], in_flight, f64::from(bytes));
                let best_s = best_s(&kinds, [3, 2], in_flight, f64::from(bytes));
                assert!(bound_s <= best_s + 1e-9, "{bytes}: {bound_s} > {best_s}");
            }
        }
    }

    #[test]
    fn what_fits_only_fully_recomputed_costs_full_recomputation() {
        let knapsack = RecomputeKnapsack::new(&[kind()], &[0, 1, 2]);
        assert_eq!(knapsack.least_s(&[4], 2.0, 80.0), 0.0);
        assert!((knapsack.least_s(&[4], 2.0, 4.0 + 8.0) - 4.0).abs() < 1e-9);
        assert_eq!(knapsack.least_s(&[4], 2.0, 7.0), f64::INFINITY);
    }

    #[test]
    fn without_recompute_options_excess_bytes_never_fit() {
        let knapsack = RecomputeKnapsack::new(&[kind()], &[0]);
        assert_eq!(knapsack.least_s(&[4], 2.0, 80.0), 0.0);
        assert_eq!(knapsack.least_s(&[4], 2.0, 79.0), f64::INFINITY);
    }

    /// By all splits of whole layers; the buffer is that of the kind which needs the larger one.
    fn best_s(kinds: &[KindCost; 2], counts: [usize; 2], in_flight: f64, bytes: f64) -> f64 {
        let mut best_s = f64::INFINITY;
        for a in splits(counts[0]) {
            for b in splits(counts[1]) {
                let (mut used, mut time_s, mut buffer) = (0.0, 0.0, 0.0_f64);
                for (kind, split) in kinds.iter().zip([a, b]) {
                    for (option, &count) in split.iter().enumerate() {
                        used += count as f64 * kind.saved_bytes[option] * in_flight;
                        time_s += count as f64 * kind.recompute_s[option];
                        if count > 0 {
                            buffer = buffer.max(kind.saved_bytes[0] - kind.saved_bytes[option]);
                        }
                    }
                }
                if used + buffer <= bytes {
                    best_s = best_s.min(time_s);
                }
            }
        }
        best_s
    }

    fn splits(count: usize) -> impl Iterator<Item = [usize; 3]> {
        (0..=count).flat_map(move |full| {
            (0..=count - full).map(move |some| [count - full - some, some, full])
        })
    }
}
