//! AdamW (Loshchilov and Hutter 2019): decoupled weight decay, bias-corrected moments. At step `t`,
//! from 1 on:
//!
//! ```text
//! g <- gradient_scale g
//! w <- w (1 - lr decay)
//! m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
//! w <- w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{proposal, update};

/// Hyperparameters of one step, the same for all its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// The step, from 1 on.
    pub step: u32,
    /// Factor of the gradients: from clipping, otherwise 1.
    pub gradient_scale: f64,
}

/// A parameter and its state, or a shard of them: slices of one length.
#[derive(Debug)]
pub struct Parameter<'a, T> {
    /// Weights, updated in place.
    pub w: &'a mut [T],
    /// Gradient.
    pub g: &'a [T],
    /// First moment, updated in place.
    pub m: &'a mut [T],
    /// Second moment, updated in place.
    pub v: &'a mut [T],
    /// Weight decay of this parameter, 0 for none.
    pub decay: f64,
}

/// A parameter whose state stays unchanged while the step's weights are written elsewhere: slices
/// of one length.
#[derive(Debug)]
pub struct Proposal<'a, T> {
    /// The weights after the step; written.
    pub to: &'a mut [T],
    /// Weights.
    pub w: &'a [T],
    /// Gradient.
    pub g: &'a [T],
    /// First moment.
    pub m: &'a [T],
    /// Second moment.
    pub v: &'a [T],
    /// Weight decay of this parameter, 0 for none.
    pub decay: f64,
}

impl<T> Proposal<'_, T> {
    #[track_caller]
    fn check(&self) {
        let lengths = [self.w.len(), self.g.len(), self.m.len(), self.v.len()];
        for (name, got) in ["w", "g", "m", "v"].into_iter().zip(lengths) {
            crate::check::length(name, got, self.to.len());
        }
    }
}

impl<T> Parameter<'_, T> {
    #[track_caller]
    fn check(&self) {
        for (name, got) in [("g", self.g.len()), ("m", self.m.len()), ("v", self.v.len())] {
            crate::check::length(name, got, self.w.len());
        }
    }
}

/// Factors of a step that are the same for all elements.
#[derive(Clone, Copy, Debug)]
struct Factors {
    /// `lr / (1 - beta1^t)`.
    rate: f64,
    /// `sqrt(1 - beta2^t)`.
    root: f64,
}

impl AdamW {
    #[allow(clippy::cast_possible_wrap)]
    fn factors(&self) -> Factors {
        assert!(self.step >= 1, "step is 0: steps count from 1");
        let t = f64::from(self.step);
        let rate = self.lr / (1.0 - self.beta1.powf(t));
        Factors { rate, root: (1.0 - self.beta2.powf(t)).sqrt() }
    }
}
