//! Time limit and test delays of communicators.

use std::time::Duration;

/// Options of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long to wait for another rank until that is an error.
    pub time_limit: Duration,
    /// Random delays before each call, for tests.
    pub delays: Option<Delays>,
    /// A slow link between ranks that are threads, for measurements of what hides it.
    pub slow_link: Option<SlowLink>,
}

/// A link on which what is sent arrives some time later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowLink {
    /// The group that uses it.
    pub group: &'static str,
    /// From the start of a call to the earliest end of its wait.
    pub transit: Duration,
}

impl Default for Options {
    /// Ten minutes, no delays, no slow link.
    fn default() -> Self {
        Self { time_limit: Duration::from_secs(600), delays: None, slow_link: None }
    }
}

/// Random delays before each call of each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Seed of the delays.
    pub seed: u64,
    /// The longest delay.
    pub longest: Duration,
}

impl Delays {
    /// The delay before call `n` of `rank`: a hash of all three (splitmix64).
    pub(super) fn before(&self, rank: usize, n: u64) -> Duration {
        let mut z = self.seed ^ ((rank as u64) << 40) ^ n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        self.longest.mul_f64((z ^ (z >> 31)) as f64 / u64::MAX as f64)
    }
}
