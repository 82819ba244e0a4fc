//! Where ranks lie: the one place that decides rank order.

/// How a group of ranks that communicate lies on the cluster's link levels.
///
/// `within[i]` counts the group's ranks inside one domain of link level `i` (innermost first), so it
/// never falls and its last entry is the group's size. Eight tensor-parallel ranks in an
/// eight-GPU node: `[8, 8]`; 512 data-parallel ranks, one in each node: `[1, 512]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupShape {
    /// Ranks of the group inside one domain of each level.
    pub within: Vec<u64>,
}

impl GroupShape {
    /// Ranks in the group.
    pub fn size(&self) -> u64 {
        self.within.last().copied().unwrap_or(1)
    }
}
