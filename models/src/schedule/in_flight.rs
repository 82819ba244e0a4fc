//! Number of micro-batches whose activations a pipeline rank holds.

use super::{Pass, PassKind, Schedule};

/// When a micro-batch's activations are freed, where backward is split.
///
/// The truth lies between: most are freed by `B`, those that weight gradients need stay until `W`
/// (Zero Bubble, arXiv 2401.10241, table 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// At the end of `B`.
    AtB,
    /// At the end of `W`.
    AtW,
}

impl Release {
    fn frees(self, kind: PassKind) -> bool {
        let last = if self == Self::AtB { PassKind::B } else { PassKind::W };
        kind == PassKind::BW || kind == last
    }
}

impl Schedule {
    /// Counts of micro-batches in flight, per chunk, that `rank` reaches and that no other count
    /// it reaches dominates. Allocated at the start of `F`.
    ///
    /// With activations `a_j` of chunk `j`, the rank's peak is the largest `Σ_j n_j·a_j` over
    /// these vectors `n`.
    pub fn max_in_flight(&self, rank: usize, release: Release) -> Vec<Vec<u32>> {
        let mut peaks: Vec<Vec<u32>> = Vec::new();
        self.walk(rank, release, |held| {
            if !peaks.iter().any(|peak| dominates(peak, held)) {
                peaks.retain(|peak| !dominates(held, peak));
                peaks.push(held.to_vec());
            }
        });
        peaks
    }

    /// Most activations `rank` holds, in those of one micro-batch of a pipeline rank's whole
    /// share, of which a chunk is `1/v`.
    pub fn peak_activations(&self, rank: usize, release: Release) -> f64 {
        let mut most = 0;
        self.walk(rank, release, |held| most = most.max(held.iter().sum::<u32>()));
        f64::from(most) / self.share_chunks() as f64
    }

    /// Calls `seen` with the counts held during each forward that no forward follows at once: only
    /// there can a count be largest.
    fn walk(&self, rank: usize, release: Release, mut seen: impl FnMut(&[u32])) {
        let order = self.passes.get(rank).map_or(&[][..], Vec::as_slice);
        let mut held = vec![0_u32; self.chunks];
        for (n, pass) in order.iter().enumerate() {
            let Some(count) = held.get_mut(usize::from(pass.chunk)) else { continue };
            if pass.kind == PassKind::F {
                *count += 1;
                if !order.get(n + 1).is_some_and(is_forward) {
                    seen(&held);
                }
            } else if release.frees(pass.kind) {
                *count = count.saturating_sub(1);
            }
        }
    }
}

fn is_forward(pass: &Pass) -> bool {
    pass.kind == PassKind::F
}

fn dominates(a: &[u32], b: &[u32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a >= b)
}
