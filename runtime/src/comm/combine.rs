//! How collectives combine the ranks' buffers, independent of the transport.

use super::{Element, Kind, Op};

/// Range of the elements for `rank` in one rank's buffer of an all-to-all-v.
pub(super) fn range_for_rank(kind: &Kind, rank: usize) -> std::ops::Range<usize> {
    let Kind::AllToAllV { send_counts } = kind else { return 0..0 };
    let begin = send_counts[..rank].iter().sum::<usize>();
    begin..begin + send_counts[rank]
}

/// The elements for `rank` in one rank's buffer of an all-to-all-v.
pub(super) fn for_rank<'a, T>(of: &'a [T], kind: &Kind, rank: usize) -> &'a [T] {
    &of[range_for_rank(kind, rank)]
}

/// A range of all ranks' buffers, reduced in the order of ranks.
pub(super) fn reduced<T: Element>(given: &[&[T]], range: std::ops::Range<usize>, op: Op) -> Vec<T> {
    let mut result = given[0][range.clone()].to_vec();
    for of in &given[1..] {
        for (so_far, &next) in result.iter_mut().zip(&of[range.clone()]) {
            *so_far = match op {
                Op::Sum => so_far.plus(next),
                Op::Max if next > *so_far => next,
                Op::Max => *so_far,
            };
        }
    }
    result
}

/// What rank `from` (of `size`) sends to rank `to` for a collective.
pub(super) fn part_for<T: Element>(
    kind: &Kind,
    data: &[T],
    [from, to, size]: [usize; 3],
) -> Vec<T> {
    let piece = || data[to * data.len() / size..(to + 1) * data.len() / size].to_vec();
    let if_root = |is: bool, part: &dyn Fn() -> Vec<T>| if is { part() } else { Vec::new() };
    match kind {
        Kind::Barrier | Kind::Send { .. } | Kind::Recv { .. } => Vec::new(),
        Kind::Broadcast { root } => if_root(from == *root, &|| data.to_vec()),
        Kind::Scatter { root } => if_root(from == *root, &piece),
        Kind::Gather { root } | Kind::Reduce { root, .. } => {
            if_root(to == *root, &|| data.to_vec())
        }
        Kind::AllReduce { .. } | Kind::AllGather => data.to_vec(),
        Kind::ReduceScatter { .. } | Kind::AllToAll => piece(),
        Kind::AllToAllV { .. } => for_rank(data, kind, to).to_vec(),
    }
}

/// A rank's result from the received parts, in the order of ranks.
pub(super) fn joined<T: Element>(kind: &Kind, parts: &[&[T]], rank: usize) -> Vec<T> {
    match kind {
        Kind::Reduce { root, .. } if *root != rank => Vec::new(),
        Kind::Reduce { op, .. } | Kind::AllReduce { op } | Kind::ReduceScatter { op } => {
            reduced(parts, 0..parts[0].len(), *op)
        }
        // Ranks that contribute nothing sent an empty part.
        _ => parts.concat(),
    }
}
