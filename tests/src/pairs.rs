//! Combinations of decisions that together have every pair of two decisions' values.

use std::collections::BTreeSet;

/// Two decisions, each with the index of its value.
pub type Pair = ((usize, usize), (usize, usize));

/// All pairs of a combination, which has the index of each decision's value.
pub fn pairs<const N: usize>(of: &[usize; N]) -> impl Iterator<Item = Pair> + '_ {
    (0..N).flat_map(move |a| (a + 1..N).map(move |b| ((a, of[a]), (b, of[b]))))
}

/// Combinations that are looked at: enough to meet all pairs many times over.
const MOST: usize = 2_000_000;

/// Combinations of decisions with these numbers of values that exist: all, or if there are more
/// than [`MOST`], that many of them, spread evenly.
pub fn combinations<const N: usize>(
    values: [usize; N],
    mut exists: impl FnMut(&[usize; N]) -> bool,
) -> Vec<[usize; N]> {
    let decode = |mut number: usize| {
        let mut of = [0; N];
        for (index, count) in of.iter_mut().zip(values).rev() {
            *index = number % count;
            number /= count;
        }
        of
    };
    let count: usize = values.iter().product();
    let looked_at = count.min(MOST);
    // Steps by the golden ratio visit no number twice, since they have no common factor with it.
    let ratio = (count as f64 * 0.618_033_988_749_895) as usize;
    let step = if looked_at == count { 1 } else { coprime(ratio, count) };
    let numbers = (0..looked_at).map(|n| (n as u128 * step as u128 % count as u128) as usize);
    numbers.map(decode).filter(|of| exists(of)).collect()
}

/// The first number from `from` on that has no factor in common with `other`.
fn coprime(from: usize, other: usize) -> usize {
    let shares = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a > 1
    };
    (from.max(1)..).find(|&number| !shares(number, other)).unwrap_or(1)
}

/// A covering set, chosen greedily: each time the combination with most new pairs.
///
/// # Panics
/// Never: some combination has a pair that is open.
pub fn covering<const N: usize>(mut all: Vec<[usize; N]>) -> Vec<[usize; N]> {
    let mut open: BTreeSet<Pair> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let new = |of: &[usize; N]| pairs(of).filter(|pair| open.contains(pair)).count();
        // A thousand candidates, varied each time, are enough to choose from.
        let stride = (all.len() / 997).max(1);
        let offset = chosen.len() % stride;
        let sampled = all.iter().skip(offset).step_by(stride).max_by_key(|of| new(of)).copied();
        let best = match sampled.filter(|of| new(of) > 0) {
            Some(best) => best,
            None => *all.iter().max_by_key(|of| new(of)).expect("an open pair is somewhere"),
        };
        pairs(&best).for_each(|pair| {
            open.remove(&pair);
        });
        all.retain(|of| *of != best);
        chosen.push(best);
    }
    chosen
}
