//! Recompute splits: how many layers of a stage recompute what, and which splits no other
//! dominates.

use crate::cost::layer::LayerCost;
use models::decisions::RecomputePolicy;
use rustc_hash::FxHashMap as HashMap;

/// By kind: how many layers keep everything, recompute selectively, and recompute fully.
pub type RecomputeSplit = Vec<[usize; 3]>;

/// Options of `Recompute::ALL` that layers may have, cheapest first.
pub fn options(recompute: RecomputePolicy) -> &'static [usize] {
    match recompute {
        RecomputePolicy::PerLayer => &[0, 1, 2],
        RecomputePolicy::None => &[0],
        RecomputePolicy::Selective => &[1],
        RecomputePolicy::Full => &[2],
    }
}

/// A recompute split with its costs in one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct RecomputeCost {
    /// The split.
    pub recompute: RecomputeSplit,
    /// Recomputation of one micro-batch, s.
    pub recompute_s: f64,
    /// Activation bytes of one micro-batch in flight.
    pub in_flight_bytes: f64,
}

impl RecomputeCost {
    fn empty() -> Self {
        Self { recompute: vec![], recompute_s: 0.0, in_flight_bytes: 0.0 }
    }

    /// Bit set of the options that its layers use.
    fn options(&self) -> u32 {
        let used = self.recompute.iter().flatten().enumerate().filter(|(_, count)| **count > 0);
        used.fold(0, |bits, (position, _)| bits | 1 << position)
    }

    fn and(&self, other: &Self) -> Self {
        Self {
            recompute: self.recompute.iter().chain(&other.recompute).copied().collect(),
            recompute_s: self.recompute_s + other.recompute_s,
            in_flight_bytes: self.in_flight_bytes + other.in_flight_bytes,
        }
    }
}

/// The split with the least recomputation allowed: the first of [`undominated`].
pub fn least_recomputing(
    costs: &[LayerCost],
    counts: &[usize],
    allowed: RecomputePolicy,
) -> RecomputeCost {
    let option = match allowed {
        RecomputePolicy::None | RecomputePolicy::PerLayer => 0,
        RecomputePolicy::Selective => 1,
        RecomputePolicy::Full => 2,
    };
    let mut recompute = RecomputeCost::empty();
    for (cost, &count) in costs.iter().zip(counts) {
        let mut split = [0; 3];
        split[option] = count;
        recompute = recompute.and(&priced(cost, split));
    }
    recompute
}

/// Undominated splits of a stage with `counts[k]` layers of kind `k`, fastest first. Of those that
/// use the same options, each needs less memory than the one before.
pub fn undominated(
    costs: &[LayerCost],
    counts: &[usize],
    allowed: RecomputePolicy,
) -> Vec<RecomputeCost> {
    let mut choices = vec![RecomputeCost::empty()];
    for (cost, &count) in costs.iter().zip(counts) {
        let own = of_kind(cost, count, allowed);
        let joined =
            choices.iter().flat_map(|recompute| own.iter().map(move |more| recompute.and(more)));
        choices = keep_undominated(joined.collect());
    }
    choices
}

/// The fastest split that fits, for a stage with at most two kinds of layers: `in_flight`
/// micro-batches and the buffer for recomputed layers together take at most `bytes`.
///
/// It enumerates the splits of the first kind and the number of layers of the second that recompute
/// fully. The fewest that must recompute selectively follow from these.
pub fn fastest_of_two(
    costs: &[LayerCost],
    counts: &[usize],
    in_flight: f64,
    bytes: f64,
) -> Option<RecomputeCost> {
    let (last, before) = counts.split_last()?;
    let own = costs.get(before.len())?;
    let mut best: Option<(f64, Vec<[usize; 3]>)> = None;
    let firsts = match before {
        [] => vec![vec![]],
        [count] => splits(*count).map(|split| vec![split]).collect(),
        _ => return None,
    };
    for first in firsts {
        let taken = Taken::new(costs, &first);
        for full in 0..=*last {
            let time_s = taken.recompute_s + full as f64 * own.recompute[2].total_s();
            if best.as_ref().is_some_and(|(best_s, _)| *best_s <= time_s) {
                break;
            }
            let some = taken.fewest_selective(own, *last, full, in_flight, bytes);
            let Some(some) = some else { continue };
            let time_s = time_s + some as f64 * own.recompute[1].total_s();
            if best.as_ref().is_none_or(|(best_s, _)| time_s < *best_s) {
                let split = [*last - full - some, some, full];
                best = Some((time_s, first.iter().copied().chain([split]).collect()));
            }
        }
    }
    let priced_all = |splits: Vec<[usize; 3]>| {
        let all = costs.iter().zip(splits);
        all.fold(RecomputeCost::empty(), |recompute, (cost, split)| {
            recompute.and(&priced(cost, split))
        })
    };
    best.map(|(_, splits)| priced_all(splits))
}

/// What the kinds already decided take.
struct Taken {
    recompute_s: f64,
    bytes: f64,
    buffer: f64,
}

impl Taken {
    fn new(costs: &[LayerCost], splits: &[[usize; 3]]) -> Self {
        let mut taken = Self { recompute_s: 0.0, bytes: 0.0, buffer: 0.0 };
        for (cost, &split) in costs.iter().zip(splits) {
            let recompute = priced(cost, split);
            taken.recompute_s += recompute.recompute_s;
            taken.bytes += recompute.in_flight_bytes;
            taken.buffer = taken.buffer.max(buffer_bytes(cost, &split));
        }
        taken
    }

    /// Fewest of `count` layers that must recompute selectively, where `full` recompute fully.
    fn fewest_selective(
        &self,
        cost: &LayerCost,
        count: usize,
        full: usize,
        in_flight: f64,
        bytes: f64,
    ) -> Option<usize> {
        let [none_bytes, some_bytes, full_bytes] = cost.saved_bytes;
        let kept = (count - full) as f64 * none_bytes + full as f64 * full_bytes;
        let needed =
            |buffer: f64| in_flight * (self.bytes + kept) + self.buffer.max(buffer) - bytes;
        if needed(buffer_bytes(cost, &[count - full, 0, full])) <= 0.0 {
            return Some(0);
        }
        let saved = in_flight * (none_bytes - some_bytes);
        if saved <= 0.0 || full == count {
            return None;
        }
        // A number that is whole up to rounding counts as whole. Callers check the result.
        let some = needed(buffer_bytes(cost, &[0, 1, full])) / saved;
        let some = (some - 1e-9).ceil().max(1.0);
        (some <= (count - full) as f64).then_some(some as usize)
    }
}

/// Bytes of a layer's full activations while it is recomputed, besides what is kept.
pub fn buffer_bytes(cost: &LayerCost, split: &[usize; 3]) -> f64 {
    let leanest = (1..3).rev().find(|&option| split[option] > 0).unwrap_or(0);
    cost.saved_bytes[0] - cost.saved_bytes[leanest]
}

fn splits(count: usize) -> impl Iterator<Item = [usize; 3]> {
    (0..=count).flat_map(move |full| {
        (0..=count - full).map(move |selective| [count - full - selective, selective, full])
    })
}

fn of_kind(cost: &LayerCost, count: usize, allowed: RecomputePolicy) -> Vec<RecomputeCost> {
    let all = |position: usize| {
        let mut split = [0; 3];
        split[position] = count;
        vec![priced(cost, split)]
    };
    match allowed {
        RecomputePolicy::None => all(0),
        RecomputePolicy::Selective => all(1),
        RecomputePolicy::Full => all(2),
        RecomputePolicy::PerLayer => {
            keep_undominated(splits(count).map(|split| priced(cost, split)).collect())
        }
    }
}

fn priced(cost: &LayerCost, split: [usize; 3]) -> RecomputeCost {
    let sum = |value: &dyn Fn(usize) -> f64| {
        split.iter().enumerate().map(|(option, &count)| count as f64 * value(option)).sum()
    };
    RecomputeCost {
        recompute: vec![split],
        recompute_s: sum(&|option| cost.recompute[option].total_s()),
        in_flight_bytes: sum(&|option| cost.saved_bytes[option]),
    }
}

fn keep_undominated(mut choices: Vec<RecomputeCost>) -> Vec<RecomputeCost> {
    choices.sort_by(|a, b| {
        a.recompute_s
            .total_cmp(&b.recompute_s)
            .then(a.in_flight_bytes.total_cmp(&b.in_flight_bytes))
    });
    // The buffer that a recomputed layer needs depends on the options in use, so only splits with
    // the same options are compared.
    let mut least_bytes: HashMap<u32, f64> = HashMap::default();
    choices.retain(|recompute| {
        let least = least_bytes.entry(recompute.options()).or_insert(f64::INFINITY);
        let better = recompute.in_flight_bytes < *least;
        *least = least.min(recompute.in_flight_bytes);
        better
    });
    choices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::parts::Parts;

    fn cost() -> LayerCost {
        LayerCost {
            recompute: [0.0, 1.0, 4.0].map(Parts::compute),
            saved_bytes: [10.0, 7.0, 1.0],
            host_bytes: [0.0; 3],
            ..LayerCost::default()
        }
    }

    #[test]
    fn no_split_dominates_another() {
        let choices = undominated(&[cost(), cost()], &[3, 2], RecomputePolicy::PerLayer);
        for (position, recompute) in choices.iter().enumerate() {
            for faster in &choices[..position] {
                assert!(faster.recompute_s <= recompute.recompute_s);
                let leaner = faster.in_flight_bytes > recompute.in_flight_bytes;
                assert!(leaner || faster.options() != recompute.options());
            }
        }
        assert_eq!(choices[0].in_flight_bytes, 50.0);
        let leanest =
            choices.iter().map(|recompute| recompute.in_flight_bytes).fold(f64::INFINITY, f64::min);
        assert_eq!(leanest, 5.0);
    }

    #[test]
    fn a_pinned_option_leaves_one_split() {
        let choices = undominated(&[cost()], &[3], RecomputePolicy::Full);
        assert_eq!(choices.len(), 1);
        assert_eq!(choices[0].recompute, [[0, 0, 3]]);
    }
}
