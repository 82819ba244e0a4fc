//! Rank order: the one place that decides where ranks lie.
//!
//! Ranks number the mesh with the first axis of [`RankOrder`] varying fastest. Experts fold into
//! the same ranks (tp·cp·dp = etp·ep·edp) with `etp` fastest, then `ep`, then `edp`.

pub use crate::decisions::RankOrder;

use crate::decisions::Decisions;

/// How a group of ranks that communicate lies on the cluster's link levels.
///
/// `within[i]` counts the group's ranks inside one domain of link level `i` (innermost first), so
/// it never falls and its last entry is the group's size. Eight tensor-parallel ranks in an
/// eight-GPU node: `[8, 8]`; 512 data-parallel ranks, one in each node: `[1, 512]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupShape {
    /// Ranks of the group inside one domain of each level.
    pub within: Vec<u64>,
}

impl GroupShape {
    /// Shape of a group of `size` ranks that are `stride` apart, on levels whose domains hold
    /// `domains` GPUs (innermost first; `u64::MAX` for an unbounded outermost level).
    ///
    /// Where the stride does not divide a domain, the mean number of ranks in it is rounded up.
    pub fn strided(size: u64, stride: u64, domains: &[u64]) -> Self {
        let mut within: Vec<u64> =
            domains.iter().map(|&gpus| gpus.div_ceil(stride).clamp(1, size)).collect();
        if let Some(outermost) = within.last_mut() {
            *outermost = size;
        }
        Self { within }
    }

    /// Ranks in the group.
    pub fn size(&self) -> u64 {
        self.within.last().copied().unwrap_or(1)
    }
}

/// Axes of the dense mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Tensor parallel.
    Tp,
    /// Context parallel.
    Cp,
    /// Data parallel.
    Dp,
    /// Pipeline parallel.
    Pp,
}

/// Position of one rank on every axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Tensor parallel index.
    pub tp: u64,
    /// Context parallel index.
    pub cp: u64,
    /// Data parallel index.
    pub dp: u64,
    /// Pipeline index.
    pub pp: u64,
}

/// The mesh of a plan's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Tensor parallel size.
    pub tp: u64,
    /// Context parallel size.
    pub cp: u64,
    /// Data parallel size.
    pub dp: u64,
    /// Pipeline parallel size.
    pub pp: u64,
    /// Order of axes over ranks.
    pub order: RankOrder,
}

impl Mesh {
    /// The mesh that decisions describe.
    pub fn new(d: &Decisions) -> Self {
        Self { tp: d.tp, cp: d.cp, dp: d.dp, pp: d.pp, order: d.rank_order }
    }

    /// Distance in ranks between neighbours on an axis.
    pub fn stride(&self, axis: Axis) -> u64 {
        match (axis, self.order) {
            (Axis::Tp, _) => 1,
            (Axis::Cp, _) => self.tp,
            (Axis::Dp, RankOrder::DpInner) | (Axis::Pp, RankOrder::PpInner) => self.tp * self.cp,
            (Axis::Pp, RankOrder::DpInner) => self.tp * self.cp * self.dp,
            (Axis::Dp, RankOrder::PpInner) => self.tp * self.cp * self.pp,
        }
    }

    /// Coordinates of a rank.
    pub fn coordinates(&self, rank: u64) -> Coordinates {
        let along = |axis, size| rank / self.stride(axis) % size;
        Coordinates {
            tp: along(Axis::Tp, self.tp),
            cp: along(Axis::Cp, self.cp),
            dp: along(Axis::Dp, self.dp),
            pp: along(Axis::Pp, self.pp),
        }
    }

    /// Rank at coordinates.
    pub fn rank(&self, at: Coordinates) -> u64 {
        at.tp * self.stride(Axis::Tp)
            + at.cp * self.stride(Axis::Cp)
            + at.dp * self.stride(Axis::Dp)
            + at.pp * self.stride(Axis::Pp)
    }

    /// Number of a rank counted through tp, cp and dp, within its pipeline rank.
    pub fn fold(&self, at: Coordinates) -> u64 {
        at.tp + self.tp * (at.cp + self.cp * at.dp)
    }

    /// Ranks of a pipeline rank, tp·cp·dp.
    pub fn folded_ranks(&self) -> u64 {
        self.tp * self.cp * self.dp
    }

    /// Group of the `size` nearest replicas of one rank's dense weights: along cp, then dp.
    pub fn replica_group(&self, size: u64, domains: &[u64]) -> GroupShape {
        self.folded(size, self.tp, domains)
    }

    /// Group of the `size` nearest replicas of one rank's experts, `apart` = etp·ep ranks from one
    /// another in the fold of tp, cp and dp.
    pub fn expert_replica_group(&self, size: u64, apart: u64, domains: &[u64]) -> GroupShape {
        self.folded(size, apart, domains)
    }

    /// Expert-parallel group: `ep` ranks, `etp` apart in the fold of tp, cp and dp.
    pub fn expert_group(&self, ep: u64, etp: u64, domains: &[u64]) -> GroupShape {
        self.folded(ep, etp, domains)
    }

    /// Group of `size` ranks `stride` apart, counted through tp, cp and dp. With the pipeline
    /// inside dp, each step of dp jumps over the pipeline.
    fn folded(&self, size: u64, stride: u64, domains: &[u64]) -> GroupShape {
        let block = self.tp * self.cp;
        if self.order == RankOrder::DpInner || self.pp == 1 {
            return GroupShape::strided(size, stride, domains);
        }
        let in_block = (block / stride).clamp(1, size);
        let beyond = GroupShape::strided(
            size.div_ceil(in_block),
            self.stride(Axis::Dp) * stride.div_ceil(block),
            domains,
        );
        let inner = GroupShape::strided(in_block, stride, domains);
        let joined = inner.within.iter().zip(&beyond.within);
        let mut within: Vec<u64> = joined.map(|(a, b)| (a * b).min(size)).collect();
        if let Some(outermost) = within.last_mut() {
            *outermost = size;
        }
        GroupShape { within }
    }

    /// Innermost link level that joins pipeline neighbours, given domain sizes (innermost first).
    ///
    /// For a pipeline that spans two domains it is the level that joins them.
    pub fn pipeline_level(&self, domains: &[u64]) -> usize {
        let within = |gpus: &u64| self.pipeline_ranks_meet(0, self.pp - 1, *gpus);
        domains.iter().position(within).unwrap_or(domains.len().saturating_sub(1))
    }

    /// Whether each world rank of one pipeline rank shares its domain of `gpus` with the same rank
    /// of another, in every replica of the pipeline.
    pub fn pipeline_ranks_meet(&self, one: u64, other: u64, gpus: u64) -> bool {
        let stride = self.stride(Axis::Pp);
        let (first, apart) = (one.min(other), one.abs_diff(other));
        if apart == 0 {
            return true;
        }
        let block = (apart + 1).saturating_mul(stride);
        if block > gpus {
            return false;
        }
        // Pipelines begin at multiples of their span, so their layout on domains repeats.
        let span = stride * self.pp;
        let pipelines = if self.order == RankOrder::PpInner { self.dp } else { 1 };
        let first = first * stride;
        if first + (pipelines - 1) * span + block <= gpus {
            return true;
        }
        let step = greatest_common_divisor(span, gpus);
        if pipelines >= gpus / step {
            // The pipelines begin at every multiple of the step.
            return first % step + block <= step;
        }
        (0..pipelines).all(|pipeline| (first + pipeline * span) % gpus + block <= gpus)
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// How experts lie over the ranks of a pipeline rank: tp·cp·dp = etp·ep·edp, with etp inside ep
/// inside edp ("parallel folding", Megatron-Core MoE, arXiv 2504.14960).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSplit {
    /// Ranks that have different experts.
    pub ep: u64,
    /// Tensor-parallel ranks of an expert.
    pub etp: u64,
}

/// A rank's place among those of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPlace {
    /// Along the tensor-parallel ranks of its experts.
    pub etp: u64,
    /// Along those that have different experts.
    pub ep: u64,
    /// Along those that hold the same.
    pub edp: u64,
}

impl ExpertSplit {
    /// The place of the rank with this number ([`Mesh::fold`]).
    pub fn place(&self, folded: u64) -> ExpertPlace {
        ExpertPlace {
            etp: folded % self.etp,
            ep: folded / self.etp % self.ep,
            edp: folded / (self.etp * self.ep),
        }
    }

    /// The number of the rank at this place.
    pub fn fold(&self, at: ExpertPlace) -> u64 {
        at.etp + self.etp * (at.ep + self.ep * at.edp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(order: RankOrder) -> Mesh {
        Mesh { tp: 2, cp: 3, dp: 4, pp: 5, order }
    }

    #[test]
    fn ranks_and_coordinates_are_inverse() {
        for order in [RankOrder::DpInner, RankOrder::PpInner] {
            let mesh = mesh(order);
            for rank in 0..120 {
                assert_eq!(mesh.rank(mesh.coordinates(rank)), rank, "{order}");
            }
        }
    }

    #[test]
    fn strides_follow_the_order() {
        assert_eq!(mesh(RankOrder::DpInner).stride(Axis::Pp), 24);
        assert_eq!(mesh(RankOrder::PpInner).stride(Axis::Dp), 30);
    }

    #[test]
    fn groups_count_ranks_in_each_domain() {
        let domains = [8, u64::MAX];
        assert_eq!(GroupShape::strided(8, 1, &domains).within, [8, 8]);
        assert_eq!(GroupShape::strided(512, 8, &domains).within, [1, 512]);
        assert_eq!(GroupShape::strided(64, 4, &domains).within, [2, 64]);
        assert_eq!(GroupShape::strided(16, 1, &domains).within, [8, 16]);
        assert_eq!(GroupShape::strided(1, 1, &domains).within, [1, 1]);
    }

    #[test]
    fn pipeline_neighbours_meet_on_the_level_that_holds_them_all() {
        let inner = Mesh { tp: 2, cp: 1, dp: 4, pp: 4, order: RankOrder::PpInner };
        assert_eq!(inner.pipeline_level(&[8, u64::MAX]), 0);
        let outer = Mesh { order: RankOrder::DpInner, ..inner };
        assert_eq!(outer.pipeline_level(&[8, u64::MAX]), 1);
        // Each has 6 ranks, and the second lies on two nodes.
        let across = Mesh { pp: 3, ..inner };
        assert_eq!(across.pipeline_level(&[8, u64::MAX]), 1);
        assert_eq!(Mesh { dp: 1, ..across }.pipeline_level(&[8, u64::MAX]), 0);
    }

    #[test]
    fn pipeline_ranks_meet_where_all_their_gpus_share_domains() {
        for order in [RankOrder::DpInner, RankOrder::PpInner] {
            let shapes = [(1, 1, 1, 16), (2, 1, 3, 6), (4, 1, 2, 4), (2, 3, 5, 7), (1, 1, 30, 4)];
            for (tp, cp, dp, pp) in shapes {
                let mesh = Mesh { tp, cp, dp, pp, order };
                for (one, other) in (0..pp).flat_map(|a| (0..pp).map(move |b| (a, b))) {
                    for gpus in [1, 4, 6, 8, 72, u64::MAX] {
                        let together = |rank| {
                            let at = mesh.coordinates(rank);
                            let domain = |pp| mesh.rank(Coordinates { pp, ..at }) / gpus;
                            domain(one) == domain(other)
                        };
                        let all = (0..tp * cp * dp * pp).all(together);
                        assert_eq!(
                            mesh.pipeline_ranks_meet(one, other, gpus),
                            all,
                            "{mesh:?} {one} {other} {gpus}"
                        );
                    }
                }
            }
        }
    }
}
