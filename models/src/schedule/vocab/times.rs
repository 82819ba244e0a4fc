//! How long passes take, where that decides an order.

use crate::schedule::ScheduleError;
use serde::{Deserialize, Serialize};

/// How long passes and what lies between them take relative to one another, where that decides an order; any
/// unit. Passes are those of a device's whole share, of which each of its chunks takes an equal part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassTimes {
    /// Forward.
    pub forward: f64,
    /// Backward to inputs.
    pub backward: f64,
    /// Backward to weights.
    pub weight: f64,
    /// The vocabulary passes `S`, `S2` and `T`.
    pub vocab: [f64; 3],
    /// A transfer between stages of different devices.
    pub link: f64,
    /// The broadcast of the last stage's output before `S` (`C0`).
    pub broadcast: f64,
    /// The barriers behind `S`, `S2` and `T`.
    pub barriers: [f64; 3],
}

impl Default for PassTimes {
    /// Halves of a backward as long as a forward, each vocabulary pass a twentieth, and nothing between them. An order
    /// made for short vocabulary passes bears long ones; in one made for long ones short ones wait.
    fn default() -> Self {
        Self {
            forward: 1.0,
            backward: 1.0,
            weight: 1.0,
            vocab: [0.05; 3],
            link: 0.0,
            broadcast: 0.0,
            barriers: [0.0; 3],
        }
    }
}

impl PassTimes {
    /// The same with no pass that takes no time at all, so that what waits for another starts later.
    pub(in crate::schedule) fn without_empty(self) -> Self {
        let all = self.forward + self.backward + self.weight + self.vocab.iter().sum::<f64>();
        let least = if all > 0.0 { all * 1e-9 } else { 1.0 };
        let Self { forward, backward, weight, vocab, .. } = self;
        let [forward, backward, weight] = [forward, backward, weight].map(|time| time.max(least));
        Self { forward, backward, weight, vocab: vocab.map(|time| time.max(least)), ..self }
    }

    /// # Errors
    /// A time that is negative or not finite.
    pub(in crate::schedule) fn check(self) -> Result<(), ScheduleError> {
        let backward = [("backward", self.backward), ("weight", self.weight)];
        let vocab = self.vocab.map(|time| ("vocabulary", time));
        let between = [self.link, self.broadcast].into_iter().chain(self.barriers);
        let named = [("forward", self.forward)].into_iter().chain(backward).chain(vocab);
        let named = named.chain(between.map(|time| ("between", time)));
        match named.into_iter().find(|(_, time)| !time.is_finite() || *time < 0.0) {
            Some((what, time)) => Err(ScheduleError::Time { what, time: time.to_string() }),
            None => Ok(()),
        }
    }
}

/// [`PassTimes`] as whole numbers, of which a forward has [`Self::FORWARD`]: what a plan keeps of them, so that its
/// order can be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassRatios {
    /// Backward to inputs.
    pub backward: u32,
    /// Backward to weights.
    pub weight: u32,
    /// The vocabulary passes `S`, `S2` and `T`.
    pub vocab: [u32; 3],
    /// A transfer between stages of different devices.
    pub link: u32,
    /// The broadcast of the last stage's output before `S`.
    pub broadcast: u32,
    /// The barriers behind `S`, `S2` and `T`.
    pub barriers: [u32; 3],
}

impl PassRatios {
    /// A forward.
    pub const FORWARD: u32 = 64;

    /// The nearest to these times; `None` where a forward takes none.
    pub fn nearest(times: PassTimes) -> Option<Self> {
        let most = f64::from(u32::MAX >> 8);
        let of = |time: f64| (time / times.forward * f64::from(Self::FORWARD)).round().min(most);
        let whole = |time: f64| of(time) as u32;
        (times.forward > 0.0 && times.check().is_ok()).then(|| Self {
            backward: whole(times.backward),
            weight: whole(times.weight),
            vocab: times.vocab.map(whole),
            link: whole(times.link),
            broadcast: whole(times.broadcast),
            barriers: times.barriers.map(whole),
        })
    }

    /// The times they stand for.
    pub fn times(self) -> PassTimes {
        PassTimes {
            forward: f64::from(Self::FORWARD),
            backward: f64::from(self.backward),
            weight: f64::from(self.weight),
            vocab: self.vocab.map(f64::from),
            link: f64::from(self.link),
            broadcast: f64::from(self.broadcast),
            barriers: self.barriers.map(f64::from),
        }
    }
}
