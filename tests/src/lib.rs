//! Shared by the tests: seeded random numbers, small models, clusters and placement problems, and
//! brute-force answers to compare with.

pub mod brute;
pub mod crates;
pub mod golden;
pub mod pairs;
pub mod random;
pub mod small;
pub mod sources;
pub mod stages;

use rayon::prelude::*;

/// Instances of a random test: `quick`; `slow` with the feature `slow`; with `thorough` a third of
/// those.
pub fn instances(quick: u64, slow: u64) -> u64 {
    match (cfg!(feature = "thorough"), cfg!(feature = "slow")) {
        (_, true) => slow,
        (true, false) => (slow / 3).max(quick),
        (false, false) => quick,
    }
}

/// What `examine` gives for the first seeds from `first` on, as many as are `wanted`, for which it
/// gives anything; on all cores.
pub fn examined<T: Send>(
    first: u64,
    wanted: u64,
    examine: impl Fn(u64) -> Option<T> + Sync,
) -> Vec<T> {
    let (mut results, mut next) = (vec![], first);
    while (results.len() as u64) < wanted {
        let seeds = next..next + (wanted - results.len() as u64);
        next = seeds.end;
        results.par_extend(seeds.into_par_iter().filter_map(&examine));
    }
    results
}

/// Whether two times are equal up to rounding.
pub fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 2e-7 * a.abs().max(b.abs())
}
