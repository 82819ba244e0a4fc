//! Cuts of a model's layers into stages that are listed rather than left to the solver.

use super::cost_cache::CostCache;
use models::decisions::{Decisions, RecomputePolicy, Vocab};
use models::formulas::vocabulary;

/// First layer and one past the last, by stage.
pub type Ranges = Vec<(usize, usize)>;

/// Most layers that the first or the last stage may have fewer than the others.
pub const LIGHTER: usize = 2;

/// All cuts are tried where there are at most this many.
pub const FEW_CUTS: u64 = 300;

/// Which cuts are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CutList {
    /// The single even cut.
    Even,
    /// The single cut of layer redistribution.
    Redis,
    /// Every cut where they are few. Otherwise the family: even cuts, those with lighter ends, and
    /// the cut of layer redistribution.
    Family,
}

impl CutList {
    /// The list for the decisions. `None` where the solver places layers freely.
    pub fn of(vocab: Vocab, chunks: u64) -> Option<Self> {
        match vocab {
            Vocab::FirstLast => Some(Self::Even),
            Vocab::Redistribute => Some(Self::Redis),
            _ if chunks > 1 => Some(Self::Family),
            _ => None,
        }
    }
}

/// Whether only the family of cuts is tried: cuts are neither free nor all listed.
pub fn is_family(d: &Decisions, layers: usize) -> bool {
    CutList::of(d.vocab, d.vpp) == Some(CutList::Family) && !few_cuts(layers, d.stages())
}

/// Whether every cut and every recompute choice that the decisions allow is tried.
pub fn is_complete(d: &Decisions, layers: usize) -> bool {
    let Some(list) = CutList::of(d.vocab, d.vpp) else { return true };
    let few = few_cuts(layers, d.stages());
    let every_split = d.vpp == 1 || d.recompute != RecomputePolicy::PerLayer;
    (list != CutList::Family || few) && (every_split || few && d.layout().copies() == 1)
}

/// Counts as even as possible. The last stages before the final one get the remainder.
pub fn even_counts(layers: usize, stages: usize) -> Vec<usize> {
    let (base, more) = (layers / stages, layers % stages);
    let gets_more = |stage: usize| stage + 1 < stages && stage + 1 + more >= stages;
    (0..stages).map(|stage| base + usize::from(gets_more(stage))).collect()
}

/// Whether there are at most [`FEW_CUTS`] cuts for a pipeline with several chunks a rank. Every
/// stage but the first and the last, which hold the vocabulary layers, takes at least one layer, so
/// there are `C(L + 1, stages − 1)` cuts.
pub fn few_cuts(layers: usize, stages: usize) -> bool {
    let (all, chosen) = (layers as u64 + 1, stages as u64 - 1);
    let mut cuts = 1_u64;
    for taken in 0..chosen.min(all.saturating_sub(chosen)) {
        cuts = cuts * (all - taken) / (taken + 1);
        if cuts > FEW_CUTS {
            return false;
        }
    }
    true
}

/// Every cut in which at most the first and the last stage are empty.
pub(crate) fn every_cut(layers: usize, stages: usize) -> Vec<Vec<usize>> {
    let mut cuts: Vec<(Vec<usize>, usize)> = vec![(vec![], layers)];
    for stage in 0..stages {
        let later = stages - stage - 1;
        let fewest = usize::from(stage > 0 && later > 0);
        let extended = cuts.into_iter().flat_map(|(cut, left)| {
            // The last stage takes what is left. Each stage between here and there needs a layer.
            let most = (left + 1).saturating_sub(later).min(left);
            let least = if later == 0 { left } else { fewest };
            (least..=most).map(move |count| ([cut.as_slice(), &[count]].concat(), left - count))
        });
        cuts = extended.collect();
    }
    cuts.into_iter().map(|(cut, _)| cut).collect()
}

/// Even counts with up to [`LIGHTER`] layers fewer on the first and the last stage.
pub(crate) fn lighter_ends(layers: usize, stages: usize) -> Vec<Vec<usize>> {
    let mut found: Vec<Vec<usize>> = vec![];
    for first in 0..=LIGHTER {
        for last in 0..=LIGHTER {
            let mut counts = even_counts(layers + first + last, stages);
            let enough = counts[0] >= first && counts[stages - 1] >= last;
            if enough && counts[1..stages - 1].iter().all(|&count| count > 0) {
                counts[0] -= first;
                counts[stages - 1] -= last;
                found.push(counts);
            }
        }
    }
    found
}

pub(crate) fn to_ranges(counts: Vec<usize>) -> Ranges {
    let mut start = 0;
    let range = |count: usize| {
        start += count;
        (start - count, start)
    };
    counts.into_iter().map(range).collect()
}

impl CostCache<'_> {
    /// Layer ranges of the cuts in a list. Cuts with an empty stage are left out where the
    /// vocabulary is split over the pipeline: then no stage may be empty.
    pub fn listed_ranges(&self, list: CutList, stages: usize, vocab: Vocab) -> Vec<Ranges> {
        let layers = self.layers.len();
        let counts = match list {
            CutList::Even => vec![even_counts(layers, stages)],
            CutList::Redis => vec![self.redis_counts(stages)],
            CutList::Family if few_cuts(layers, stages) => every_cut(layers, stages),
            CutList::Family => {
                let mut family = lighter_ends(layers, stages);
                family.push(self.redis_counts(stages));
                family.sort_unstable();
                family.dedup();
                family
            }
        };
        let full = |counts: &Vec<usize>| !vocab.over_pipeline() || !counts.contains(&0);
        counts.into_iter().filter(full).map(to_ranges).collect()
    }

    /// Layer redistribution by the compute ratio of output layer and layer (Vocabulary Parallelism,
    /// section 3; its appendix's FLOP counts).
    fn redis_counts(&self, stages: usize) -> Vec<usize> {
        let (vocab, hidden) = (self.model.vocab as f64, self.model.hidden as f64);
        let seq_len = self.model.seq_len as f64;
        let ratio = vocabulary::output_compute_ratio(vocab, hidden, seq_len);
        let input = vocabulary::input_compute_ratio(hidden, seq_len);
        let layers = self.layers.len() as u64;
        let (_, counts) = vocabulary::redis(layers, stages as u64, input, ratio);
        counts.into_iter().map(|count| count as usize).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_is_listed_once() {
        for (layers, stages) in [(2, 4), (3, 4), (5, 4), (12, 4), (4, 3), (3, 2), (4, 6)] {
            let cuts = every_cut(layers, stages);
            let binomial = (0..stages - 1).fold(1, |c, i| c * (layers + 1 - i) / (i + 1));
            assert_eq!(cuts.len(), binomial, "{layers} layers, {stages} stages");
            assert_eq!(few_cuts(layers, stages), binomial as u64 <= FEW_CUTS);
            let holds_all = |cut: &Vec<usize>| {
                let inner = cut[1..stages - 1].iter().all(|&count| count > 0);
                inner && cut.iter().sum::<usize>() == layers
            };
            assert!(cuts.iter().all(holds_all));
            assert!(cuts.windows(2).all(|pair| pair[0] < pair[1]), "sorted without duplicates");
        }
        assert!(!few_cuts(80, 40));
        assert!(few_cuts(16, 16));
    }

    #[test]
    fn lighter_ends_hold_every_layer_once() {
        for (layers, stages) in [(61, 16), (8, 4), (80, 40), (4, 4)] {
            let family = lighter_ends(layers, stages);
            assert!(family.contains(&even_counts(layers, stages)));
            for counts in family {
                assert_eq!(counts.iter().sum::<usize>(), layers, "{counts:?}");
                let ranges = to_ranges(counts);
                assert_eq!(ranges.first().map(|r| r.0), Some(0));
                assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
            }
        }
    }
}
