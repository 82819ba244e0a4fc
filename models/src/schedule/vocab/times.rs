//! Relative lengths of passes, which decide an order.

use crate::schedule::ScheduleError;
use serde::{Deserialize, Serialize};

/// Relative lengths of passes and of the delays between them, in any unit. Passes are those of a
/// pipeline rank's whole share, of which each chunk takes an equal part.
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
    /// A transfer between stages of different pipeline ranks.
    pub link: f64,
    /// The broadcast of the last stage's output before `S` (`C0`).
    pub broadcast: f64,
    /// The barriers after `S`, `S2` and `T`.
    pub barriers: [f64; 3],
}

impl Default for PassTimes {
    /// Both halves of a backward as long as a forward, each vocabulary pass a twentieth, and no
    /// delays. An order for short vocabulary passes suits long ones; in an order for long ones
    /// short ones wait.
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
    /// The same times with no empty pass, so that whatever waits for another pass starts later.
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

/// [`PassTimes`] as integers relative to a forward of [`Self::FORWARD`]: what a plan keeps of them,
/// so that its order can be rebuilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassRatios {
    /// Backward to inputs.
    pub backward: u32,
    /// Backward to weights.
    pub weight: u32,
    /// The vocabulary passes `S`, `S2` and `T`.
    pub vocab: [u32; 3],
    /// A transfer between stages of different pipeline ranks.
    pub link: u32,
    /// The broadcast of the last stage's output before `S`.
    pub broadcast: u32,
    /// The barriers after `S`, `S2` and `T`.
    pub barriers: [u32; 3],
}

impl PassRatios {
    /// A forward.
    pub const FORWARD: u32 = 64;

    /// The nearest ratios; `None` where a forward takes no time.
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
