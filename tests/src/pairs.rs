//! Combinations of decisions that together have every pair of two decisions' values.

use std::collections::BTreeSet;

/// Two decisions, each with the index of its value.
pub type Pair = ((usize, usize), (usize, usize));

/// All pairs of a combination, which has the index of each decision's value.
pub fn pairs<const N: usize>(of: &[usize; N]) -> impl Iterator<Item = Pair> + '_ {
    (0..N).flat_map(move |a| (a + 1..N).map(move |b| ((a, of[a]), (b, of[b]))))
}

/// All combinations of decisions with these numbers of values that exist.
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
    (0..values.iter().product()).map(decode).filter(|of| exists(of)).collect()
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
