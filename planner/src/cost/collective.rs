//! What communication costs.
//!
//! `bytes` is the whole tensor throughout: the buffer of an all-reduce, the output of an all-gather, the
//! input of a reduce-scatter, one rank's send buffer of an all-to-all.

use models::cluster::{ClusterSpec, LinkLevel};
use models::mesh::GroupShape;

/// What a group of ranks does together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Collective {
    /// Every rank ends with the sum.
    AllReduce,
    /// Every rank ends with all shards.
    AllGather,
    /// Every rank ends with its shard of the sum.
    ReduceScatter,
    /// Every rank sends a different shard to each.
    AllToAll,
    /// Every rank ends with the first one's tensor.
    Broadcast,
    /// One rank sends to one other.
    P2p,
}

/// Seconds of one collective over a group; 0 for a group of one or for nothing to send.
pub fn time_s(cluster: &ClusterSpec, op: Collective, bytes: f64, group: &GroupShape) -> f64 {
    let fans = fans(cluster, group);
    if group.size() <= 1 || bytes <= 0.0 {
        return 0.0;
    }
    match op {
        Collective::AllReduce => hierarchical_s(&fans, bytes, 2.0),
        Collective::AllGather | Collective::ReduceScatter => hierarchical_s(&fans, bytes, 1.0),
        Collective::AllToAll => all_to_all_s(&fans, bytes, group.size() as f64),
        Collective::Broadcast => fans.iter().map(|fan| broadcast_s(fan, bytes)).sum(),
        Collective::P2p => p2p_s(cluster, bytes, cluster.levels.len().saturating_sub(1)),
    }
}

/// Seconds to send `bytes` to one rank over level `level_index`.
pub fn p2p_s(cluster: &ClusterSpec, bytes: f64, level_index: usize) -> f64 {
    let level = cluster.levels.get(level_index).or_else(|| cluster.levels.last());
    let Some(level) = level.filter(|_| bytes > 0.0) else { return 0.0 };
    level.latency_s + bytes / level.achieved_bytes_per_s()
}

/// How a group splits at one level.
struct Fan<'a> {
    level: &'a LinkLevel,
    /// Subgroups that meet at this level.
    ways: f64,
    /// Ranks inside one of them: each carries that part of the tensor.
    inside: f64,
}

/// The levels at which a group splits, innermost first. Levels beyond the cluster's are taken for its
/// outermost.
fn fans<'a>(cluster: &'a ClusterSpec, group: &GroupShape) -> Vec<Fan<'a>> {
    let last = cluster.levels.len().saturating_sub(1);
    let mut inside = 1;
    let mut fans = Vec::with_capacity(group.within.len());
    for (i, within) in group.within.iter().enumerate() {
        let Some(level) = cluster.levels.get(i.min(last)).filter(|_| *within > inside) else {
            continue;
        };
        fans.push(Fan { level, ways: *within as f64 / inside as f64, inside: inside as f64 });
        inside = *within;
    }
    fans
}

/// Reduce-scatter inwards out, all-gather back: at each level a ring over the part that one rank of a
/// subgroup holds. `turns` is 2 for an all-reduce, 1 for half of it.
fn hierarchical_s(fans: &[Fan<'_>], bytes: f64, turns: f64) -> f64 {
    fans.iter().map(|fan| turns * ring_s(fan, bytes / fan.inside)).sum()
}

/// One way around a ring: `(n - 1) alpha + (n - 1)/n S/B`.
fn ring_s(fan: &Fan<'_>, bytes: f64) -> f64 {
    let steps = fan.ways.ceil() - 1.0;
    steps * fan.level.latency_s
        + (fan.ways - 1.0) / fan.ways * bytes / fan.level.achieved_bytes_per_s()
}

/// Each level carries what leaves the subgroup inside it and stays in its own domain.
fn all_to_all_s(fans: &[Fan<'_>], bytes: f64, size: f64) -> f64 {
    let one = |fan: &Fan<'_>| {
        let peers = fan.inside * (fan.ways - 1.0);
        (fan.ways - 1.0).ceil() * fan.level.latency_s
            + peers / size * bytes / fan.level.achieved_bytes_per_s()
    };
    fans.iter().map(one).sum()
}

/// Pipelined: the tensor once over the link, and a latency for each doubling.
fn broadcast_s(fan: &Fan<'_>, bytes: f64) -> f64 {
    fan.ways.log2().ceil() * fan.level.latency_s + bytes / fan.level.achieved_bytes_per_s()
}
