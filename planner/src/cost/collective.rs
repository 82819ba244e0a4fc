//! Time of collectives and of point-to-point transfers.
//!
//! `bytes` is the whole tensor: the buffer of an all-reduce, the output of an all-gather, the input
//! of a reduce-scatter, one rank's send buffer of an all-to-all.

use models::cluster::{ClusterSpec, LinkLevel};
use models::formulas::communication::{all_gather_volume, all_reduce_volume, all_to_all_volume};
use models::mesh::GroupShape;

/// Collective operation of a group of ranks.
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
}

/// Part of the faster levels' time that the slowest one does not hide. Chunks are pipelined through
/// the levels. All-reduces of gigabytes show 0 over 2 nodes of H100, and 0.4 over 4 of H200 and of
/// B200.
const UNHIDDEN: f64 = 0.3;
/// Cost of starting a collective, in kernel launches; inside NVLink domains the tables include it.
const STARTING_LAUNCHES: f64 = 3.0;
/// Bandwidth of a double binary tree over a ring's (NCCL's tuning model).
const TREE_BANDWIDTH: f64 = 0.9;
/// Part of a ring's bandwidth that all-to-alls reach between nodes (60 to 80 % of line rate).
const SCATTERED_BANDWIDTH: f64 = 0.8;
/// Sends of an all-to-all that are under way at once.
const SENDS_AT_ONCE: f64 = 8.0;

/// Seconds of one collective over a group; 0 for a group of one or for nothing to send.
///
/// Takes the fastest algorithm, as the libraries' tuners do: one ring or tree through all ranks, or
/// level by level with the fastest of each level.
pub fn time_s(cluster: &ClusterSpec, op: Collective, bytes: f64, group: &GroupShape) -> f64 {
    time_of_some_s(cluster, op, bytes, group, ALL)
}

/// As [`time_s`], where at most `senders` ranks of each domain take part in any such group at a
/// time: they have its links to themselves.
pub fn time_of_some_s(
    cluster: &ClusterSpec,
    op: Collective,
    bytes: f64,
    group: &GroupShape,
    senders: u64,
) -> f64 {
    if group.size() <= 1 || bytes <= 0.0 {
        return 0.0;
    }
    let fans = fans(cluster, group, senders);
    if op == Collective::Broadcast {
        return STARTING_LAUNCHES * cluster.device.kernel_launch_s + chain_s(&fans, bytes);
    }
    let by_level = || pipelined(fans.iter().map(|fan| level_s(cluster, op, bytes, fan)));
    if op != Collective::AllReduce || fans.len() == 1 {
        return by_level();
    }
    let start_s = STARTING_LAUNCHES * cluster.device.kernel_launch_s;
    let through_all = start_s + flat_ring_s(&fans, bytes).min(flat_tree_s(&fans, bytes));
    if sums_inside(&fans) { through_all.min(by_level()) } else { through_all }
}

/// Whether the innermost links reduce in the network. Only then do the libraries reduce level by
/// level (NVLSTree); otherwise their rings and trees pass through all ranks.
fn sums_inside(fans: &[Fan<'_>]) -> bool {
    fans.first().is_some_and(|fan| fan.level.in_network)
}

/// Seconds of an all-to-all in which a token's copies for several ranks of one domain leave their
/// own domain once. Inside domains all `copies` of each token travel. `bytes` counts all copies.
pub fn dispatch_s(cluster: &ClusterSpec, bytes: f64, group: &GroupShape, copies: f64) -> f64 {
    if group.size() <= 1 || bytes <= 0.0 {
        return 0.0;
    }
    let level = |fan: &Fan<'_>| {
        let domains = fan.size / fan.inside;
        let once = if fan.innermost { 1.0 } else { distinct(domains, copies) / copies };
        level_s(cluster, Collective::AllToAll, bytes * once, fan)
    };
    pipelined(fans(cluster, group, ALL).iter().map(level))
}

/// Expected number of different domains among `copies` drawn evenly from `domains`.
fn distinct(domains: f64, copies: f64) -> f64 {
    domains * (1.0 - (1.0 - 1.0 / domains).powf(copies))
}

/// Latency of one turn along a ring through all ranks of a group, as libraries broadcast.
pub fn ring_latency_s(cluster: &ClusterSpec, group: &GroupShape) -> f64 {
    if group.size() <= 1 { 0.0 } else { ring_turn_s(&fans(cluster, group, ALL)) }
}

/// Seconds of each level's part, innermost first; only levels at which the group splits. Their sum
/// is the time without pipelining.
pub fn by_level_s(
    cluster: &ClusterSpec,
    op: Collective,
    bytes: f64,
    group: &GroupShape,
) -> Vec<f64> {
    fans(cluster, group, ALL).iter().map(|fan| level_s(cluster, op, bytes, fan)).collect()
}

/// Seconds to send `bytes` to one rank over level `level_index` (the outermost, if there are fewer
/// levels) while `senders` ranks of each inner domain do the same: a send and a receive kernel, the
/// link's latency and the wire.
pub fn p2p_s(cluster: &ClusterSpec, bytes: f64, level_index: usize, senders: u64) -> f64 {
    let level = cluster.levels.get(level_index).or_else(|| cluster.levels.last());
    let Some(level) = level.filter(|_| bytes > 0.0) else { return 0.0 };
    let wire_s = bytes / level.achieved_by(senders);
    2.0 * cluster.device.kernel_launch_s + level.latency_s + wire_s
}

/// Senders of a domain where nothing is known about them.
const ALL: u64 = u64::MAX;

/// Split of a group at one level.
struct Fan<'a> {
    level: &'a LinkLevel,
    /// Each rank's share of its links, bytes/s.
    bytes_per_s: f64,
    /// Whether it is the level on which the tables were measured.
    innermost: bool,
    /// Subgroups that meet at this level.
    ways: f64,
    /// Ranks inside one subgroup; each carries that part of the tensor.
    inside: f64,
    /// Ranks of the whole group.
    size: f64,
}

/// The levels at which a group splits, innermost first. Further levels than the cluster's count as
/// its outermost one.
fn fans<'a>(cluster: &'a ClusterSpec, group: &GroupShape, senders: u64) -> Vec<Fan<'a>> {
    let last = cluster.levels.len().saturating_sub(1);
    let mut inside = 1;
    let mut fans = Vec::with_capacity(group.within.len());
    for (i, within) in group.within.iter().enumerate() {
        let index = i.min(last);
        if let Some(level) = cluster.levels.get(index).filter(|_| *within > inside) {
            let ways = *within as f64 / inside as f64;
            let size = group.size() as f64;
            let bytes_per_s = level.achieved_by(senders);
            let (innermost, inside_ranks) = (index == 0, inside as f64);
            fans.push(Fan { level, bytes_per_s, innermost, ways, inside: inside_ranks, size });
            inside = *within;
        }
    }
    fans
}

/// The slowest level, and the part of the others that it does not hide.
fn pipelined(levels: impl Iterator<Item = f64>) -> f64 {
    let (slowest, sum) = levels.fold((0.0, 0.0), |(slowest, sum), s| (s.max(slowest), s + sum));
    slowest + UNHIDDEN * (sum - slowest)
}

/// One level's part: measured inside an NVLink domain, else by formula.
///
/// A reduction leaves each rank inside with `1/inside` of the tensor for the level; an all-to-all
/// carries what goes to the ranks that this level adds.
fn level_s(cluster: &ClusterSpec, op: Collective, bytes: f64, fan: &Fan<'_>) -> f64 {
    let bytes = match op {
        Collective::AllToAll => bytes * fan.inside * fan.ways / fan.size,
        Collective::Broadcast => bytes,
        _ => bytes / fan.inside,
    };
    let start_s = STARTING_LAUNCHES * cluster.device.kernel_launch_s;
    measured_s(cluster, op, bytes, fan).unwrap_or_else(|| start_s + formula_s(op, bytes, fan))
}

/// Seconds by the tables. A link with half of the measured bandwidth takes as long as the measured
/// one for twice the bytes.
fn measured_s(cluster: &ClusterSpec, op: Collective, bytes: f64, fan: &Fan<'_>) -> Option<f64> {
    let tables = cluster.tables.links.as_ref().filter(|_| fan.innermost)?;
    let table = match op {
        Collective::AllReduce => &tables.all_reduce,
        Collective::AllGather => &tables.all_gather,
        Collective::ReduceScatter => &tables.reduce_scatter,
        Collective::AllToAll => tables.all_to_all.as_ref()?,
        Collective::Broadcast => return None,
    };
    let as_measured = bytes * tables.bytes_per_s / fan.bytes_per_s;
    Some(table.at([fan.ways, as_measured]))
}

fn formula_s(op: Collective, bytes: f64, fan: &Fan<'_>) -> f64 {
    match op {
        Collective::AllReduce => all_reduce_s(bytes, fan),
        Collective::AllGather | Collective::ReduceScatter => ring_s(bytes, fan),
        Collective::AllToAll => all_to_all_s(bytes, fan),
        Collective::Broadcast => chain_s(std::slice::from_ref(fan), bytes),
    }
}

/// The fastest of a ring, a double binary tree, and reduction in the switches.
fn all_reduce_s(bytes: f64, fan: &Fan<'_>) -> f64 {
    let level = fan.level;
    let ring_s = 2.0 * latencies_s(fan) + all_reduce_volume(bytes, fan.ways) / fan.bytes_per_s;
    let wire_s = bytes / fan.bytes_per_s;
    let tree_s = 2.0 * (fan.ways.log2().ceil() * level.latency_s + wire_s / TREE_BANDWIDTH);
    // Each rank sends its tensor up once and receives the sum: a bus factor of (n - 1)/(n + 1).
    let switch_s = 2.0 * level.latency_s + (fan.ways + 1.0) / fan.ways * wire_s;
    if level.in_network { ring_s.min(tree_s).min(switch_s) } else { ring_s.min(tree_s) }
}

/// Once around a ring: `(n - 1) alpha + (n - 1)/n S/B`.
fn ring_s(bytes: f64, fan: &Fan<'_>) -> f64 {
    latencies_s(fan) + all_gather_volume(bytes, fan.ways) / fan.bytes_per_s
}

/// Latencies once around a ring.
fn latencies_s(fan: &Fan<'_>) -> f64 {
    (fan.ways.ceil() - 1.0) * fan.level.latency_s
}

/// An all-reduce along rings through all ranks. Each link out of a domain carries its part of the
/// rings, so the slower of a GPU's link and all links of a domain together limits the rate.
fn flat_ring_s(fans: &[Fan<'_>], bytes: f64) -> f64 {
    let size = fans.last().map_or(1.0, |fan| fan.size);
    2.0 * chain_s(fans, all_gather_volume(bytes, size))
}

/// Once along rings through all ranks, pipelined: NCCL's only algorithm for a broadcast.
fn chain_s(fans: &[Fan<'_>], bytes: f64) -> f64 {
    let per_byte_s = |fan: &Fan<'_>| 1.0 / (fan.inside * fan.bytes_per_s);
    ring_turn_s(fans) + bytes * fans.iter().map(per_byte_s).fold(0.0, f64::max)
}

/// Latencies once around a ring through all ranks.
fn ring_turn_s(fans: &[Fan<'_>]) -> f64 {
    let size = fans.last().map_or(1.0, |fan| fan.size);
    let hops = |fan: &Fan<'_>| (fan.ways - 1.0) * size / fan.inside / fan.ways;
    fans.iter().map(|fan| hops(fan) * fan.level.latency_s).sum()
}

/// A double binary tree over domains with chains inside them. Every link carries the tensor up and
/// down, in twice its time (NCCL's tuning model), but only each doubling of the domains adds a
/// latency.
fn flat_tree_s(fans: &[Fan<'_>], bytes: f64) -> f64 {
    let mut per_byte_s = 0.0_f64;
    let mut turn_s = 0.0;
    for (position, fan) in fans.iter().enumerate() {
        per_byte_s = per_byte_s.max(1.0 / (fan.inside * fan.bytes_per_s));
        let hops = if position == 0 { fan.ways - 1.0 } else { fan.ways.log2().ceil() };
        turn_s += hops * fan.level.latency_s;
    }
    2.0 * (turn_s + bytes * per_byte_s / TREE_BANDWIDTH)
}

/// Every rank sends to each of the others, several sends at once.
fn all_to_all_s(bytes: f64, fan: &Fan<'_>) -> f64 {
    let bandwidth = fan.bytes_per_s * if fan.innermost { 1.0 } else { SCATTERED_BANDWIDTH };
    let turns = ((fan.ways - 1.0) / SENDS_AT_ONCE).max(1.0);
    turns * fan.level.latency_s + all_to_all_volume(bytes, fan.ways) / bandwidth
}
