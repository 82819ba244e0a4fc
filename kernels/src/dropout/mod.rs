//! Dropout `y = x mask / (1 - p)` with a mask that depends on global element indices.
//!
//! The mask is never stored: the backward pass applies the same function to `dy`.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::apply;

use crate::Real;
use crate::random::{Stream, philox};

/// Probability and random stream of a dropout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability that an element is dropped, `0 <= p < 1`.
    pub p: f64,
    /// Random stream of this dropout and step.
    pub stream: Stream,
}

impl Dropout {
    /// Random words below this are dropped.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 <= p < 1
    pub(crate) fn threshold(&self) -> u32 {
        assert!((0.0..1.0).contains(&self.p), "p is {}: it must lie in [0, 1)", self.p);
        (self.p * 4_294_967_296.0) as u32
    }

    /// Factor of the elements that are kept.
    pub(crate) fn scale(&self) -> f64 {
        1.0 / (1.0 - self.p)
    }
}

/// A dropout mask in the element type, for runs of elements.
#[derive(Clone, Copy)]
pub(crate) struct Mask<T> {
    stream: Stream,
    threshold: u32,
    scale: T,
}

impl<T: Real> Mask<T> {
    pub(crate) fn new(dropout: &Dropout) -> Self {
        let (threshold, scale) = (dropout.threshold(), T::from_f64(dropout.scale()));
        Self { stream: dropout.stream, threshold, scale }
    }

    /// Multiplies elements with the global indices `index..` by 0 or the scale.
    #[inline(always)]
    pub(crate) fn multiply(self, index: u64, y: &mut [T]) {
        let mut words = [0; 4 * philox::MANY];
        let (mut group, mut skip, mut rest) = (index / 4, (index % 4) as usize, y);
        while !rest.is_empty() {
            philox::many(self.stream, group, &mut words);
            let (now, later) = rest.split_at_mut(rest.len().min(words.len() - skip));
            for (y, &word) in now.iter_mut().zip(&words[skip..]) {
                *y = if word >= self.threshold { self.scale * *y } else { T::ZERO };
            }
            (group, skip, rest) = (group + philox::MANY as u64, 0, later);
        }
    }
}
