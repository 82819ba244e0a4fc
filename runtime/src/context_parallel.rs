//! How context-parallel ranks divide a sequence.
//!
//! `ranks = ulysses * ring`, with Ulysses inside. For attention, the ranks of a Ulysses group
//! exchange tokens for heads (DeepSpeed Ulysses, arXiv 2309.14509): together they hold what one
//! ring member attends with. Ring members exchange keys and values (Ring Attention, arXiv
//! 2310.01889).

use std::ops::Range;

/// How the sequence is divided, and how keys and values get around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextParallel {
    /// Ranks that divide a sequence.
    pub ranks: usize,
    /// Ranks of a Ulysses group; 1 for none.
    pub ulysses: usize,
    /// How ring members exchange keys and values.
    pub exchange: Exchange,
}

/// How ring members exchange keys and values, and which part of the sequence each has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// From rank to rank, while each computes with what it has. Member `i` has the `i`-th of `r`
    /// parts: with a causal mask the last has most to compute.
    Ring,
    /// The same, and member `i` has the `i`-th and the `(2r - 1 - i)`-th of `2r` parts: all have
    /// the same to compute (Llama 3, arXiv 2407.21783, section 3.3.2).
    ZigZag,
    /// Gathered from all members before attention; parts as in [`Self::ZigZag`] (Llama 3).
    AllGather,
}

impl ContextParallel {
    /// Every rank has whole sequences.
    pub const NONE: Self = Self { ranks: 1, ulysses: 1, exchange: Exchange::Ring };

    /// Members of a ring.
    pub const fn ring(self) -> usize {
        self.ranks / self.ulysses
    }

    /// Equal parts into which a sequence must be divisible.
    pub const fn parts(self) -> usize {
        let ring = self.ring();
        match self.exchange {
            Exchange::ZigZag | Exchange::AllGather if ring > 1 => 2 * ring * self.ulysses,
            _ => self.ranks,
        }
    }

    /// The positions with which ring member `member` attends, in the order in which they lie.
    pub fn attended(self, member: usize, seq_len: usize) -> Vec<Range<usize>> {
        let ring = self.ring();
        let part = |n: usize, of: usize| n * seq_len / of..(n + 1) * seq_len / of;
        match self.exchange {
            Exchange::Ring => std::iter::once(part(member, ring)).collect(),
            Exchange::ZigZag | Exchange::AllGather => {
                let (first, second) =
                    (part(member, 2 * ring), part(2 * ring - 1 - member, 2 * ring));
                match first.end == second.start {
                    true => std::iter::once(first.start..second.end).collect(),
                    false => vec![first, second],
                }
            }
        }
    }

    /// The positions that rank `rank` holds, in the order in which they lie.
    pub fn held(self, rank: usize, seq_len: usize) -> Vec<Range<usize>> {
        let all = self.attended(rank / self.ulysses, seq_len);
        let own = seq_len / self.ranks;
        let (begin, end) = (rank % self.ulysses * own, (rank % self.ulysses + 1) * own);
        let mut at = 0;
        let mut held = Vec::new();
        for run in all {
            let (from, to) = (begin.max(at), end.min(at + run.len()));
            if from < to {
                held.push(run.start + from - at..run.start + to - at);
            }
            at += run.len();
        }
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positions of some runs.
    fn all(runs: Vec<Range<usize>>) -> Vec<usize> {
        runs.into_iter().flatten().collect()
    }

    #[test]
    fn zig_zag_gives_each_member_an_early_and_a_late_part() {
        let of = ContextParallel { ranks: 4, ulysses: 1, exchange: Exchange::ZigZag };
        assert_eq!(of.attended(0, 16), [0..2, 14..16]);
        assert!(all(of.attended(3, 16)).into_iter().eq(6..10));
        assert_eq!(of.held(1, 16), [2..4, 12..14]);
    }

    #[test]
    fn ulysses_ranks_cut_what_their_member_attends_with() {
        let of = ContextParallel { ranks: 4, ulysses: 2, exchange: Exchange::ZigZag };
        assert!(all(of.held(0, 16)).into_iter().eq(0..4));
        assert!(all(of.held(1, 16)).into_iter().eq(12..16));
        let alone = ContextParallel { ranks: 4, ulysses: 4, exchange: Exchange::Ring };
        assert!(all(alone.held(2, 16)).into_iter().eq(8..12));
    }

    /// Every position is held once, whatever the division.
    #[test]
    fn every_position_is_held_once() {
        for exchange in [Exchange::Ring, Exchange::ZigZag, Exchange::AllGather] {
            for ranks in [1, 2, 3, 4, 6, 8] {
                for ulysses in (1..=ranks).filter(|ulysses| ranks % ulysses == 0) {
                    let of = ContextParallel { ranks, ulysses, exchange };
                    let seq_len = 2 * of.parts();
                    let mut positions: Vec<usize> =
                        (0..ranks).flat_map(|rank| of.held(rank, seq_len)).flatten().collect();
                    positions.sort_unstable();
                    assert!(positions.into_iter().eq(0..seq_len), "{of:?}");
                }
            }
        }
    }
}
