//! Dropout `y = x mask / (1 - p)` with a mask that follows from global element indices.
//!
//! The mask is never stored: the backward pass applies the same function to `dy`.

pub mod reference;

pub use reference::apply;

use crate::random::Stream;

/// How much is dropped, and by which draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability of being dropped, `0 <= p < 1`.
    pub p: f64,
    /// Draws of this place and step.
    pub stream: Stream,
}

impl Dropout {
    /// Words below this are dropped.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 <= p < 1
    pub(crate) fn threshold(&self) -> u32 {
        assert!((0.0..1.0).contains(&self.p), "p is {}: it must lie in [0, 1)", self.p);
        (self.p * 4_294_967_296.0) as u32
    }

    /// What kept elements are multiplied by.
    pub(crate) fn scale(&self) -> f64 {
        1.0 / (1.0 - self.p)
    }
}
