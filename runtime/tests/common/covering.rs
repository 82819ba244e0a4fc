//! Sets of combinations that together have every possible pair of two decisions' values.

use std::collections::BTreeSet;

/// A combination, as the index of each decision's value.
pub type Indices<const N: usize> = [usize; N];

/// Two decisions, each with the index of its value.
pub type Pair = ((usize, usize), (usize, usize));

/// The pairs of a combination.
pub fn pairs<const N: usize>(of: &Indices<N>) -> impl Iterator<Item = Pair> + '_ {
    (0..N).flat_map(move |a| (a + 1..N).map(move |b| ((a, of[a]), (b, of[b]))))
}

/// A covering set, chosen greedily: each time the combination with most new pairs.
pub fn covering<const N: usize>(mut all: Vec<Indices<N>>) -> Vec<Indices<N>> {
    let mut open: BTreeSet<Pair> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let new = |of: &Indices<N>| pairs(of).filter(|pair| open.contains(pair)).count();
        // A few hundred candidates, varied each time, are enough to choose from.
        let stride = (all.len() / 997).max(1);
        let offset = chosen.len() % stride;
        let sampled = all.iter().skip(offset).step_by(stride).max_by_key(|of| new(of)).copied();
        let best = match sampled.filter(|of| new(of) > 0) {
            Some(best) => best,
            None => *all.iter().max_by_key(|of| new(of)).unwrap(),
        };
        pairs(&best).for_each(|pair| {
            open.remove(&pair);
        });
        all.retain(|of| *of != best);
        chosen.push(best);
    }
    chosen
}
