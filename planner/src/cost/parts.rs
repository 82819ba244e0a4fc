//! Seconds by cause.

use std::ops::{Add, AddAssign, Mul};

/// Exposed seconds of one piece of work by cause; they add up to its length.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Parts {
    /// Kernels: matrix products, attention, memory-bound work.
    pub compute_s: f64,
    /// Tensor-parallel collectives.
    pub tp_s: f64,
    /// Context-parallel transfers that attention does not hide.
    pub cp_s: f64,
    /// Expert all-to-all that nothing hides.
    pub ep_s: f64,
    /// Pipeline sends and receives that block the pipeline rank, and gaps before passes.
    pub pp_s: f64,
    /// Data-parallel gathers and reductions that nothing hides.
    pub dp_s: f64,
    /// Activations to and from host memory that nothing hides.
    pub host_s: f64,
}

impl Parts {
    /// Computation only.
    pub fn compute(compute_s: f64) -> Self {
        Self { compute_s, ..Self::default() }
    }

    /// The same parts with computation `slowdown` times slower.
    #[must_use]
    pub fn slowed(self, slowdown: f64) -> Self {
        Self { compute_s: self.compute_s * slowdown, ..self }
    }

    /// Length of the work.
    pub fn total_s(&self) -> f64 {
        self.compute_s + self.tp_s + self.cp_s + self.ep_s + self.pp_s + self.dp_s + self.host_s
    }
}

impl Add for Parts {
    type Output = Self;
    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, other: Self) {
        self.compute_s += other.compute_s;
        self.tp_s += other.tp_s;
        self.cp_s += other.cp_s;
        self.ep_s += other.ep_s;
        self.pp_s += other.pp_s;
        self.dp_s += other.dp_s;
        self.host_s += other.host_s;
    }
}

/// Seconds forward and backward.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Both {
    pub forward_s: f64,
    pub backward_s: f64,
}

/// Attention in chunks (AMPipe), which no split of the experts changes; empty where attention is
/// whole.
#[derive(Clone, Debug, Default)]
pub struct AttentionChunks {
    /// Core and output projection of each chunk.
    pub(super) parts: Vec<Both>,
    /// What attention computes outside of them.
    pub(super) outside: Both,
}

/// One chunk of the experts (AMPipe, Tutel).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ExpertChunk {
    pub products: Both,
    /// Its dispatch, or its combine, s.
    pub sent_s: f64,
}

impl Mul<f64> for Parts {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        Self {
            compute_s: self.compute_s * factor,
            tp_s: self.tp_s * factor,
            cp_s: self.cp_s * factor,
            ep_s: self.ep_s * factor,
            pp_s: self.pp_s * factor,
            dp_s: self.dp_s * factor,
            host_s: self.host_s * factor,
        }
    }
}

impl std::iter::Sum for Parts {
    fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
        items.fold(Self::default(), Add::add)
    }
}
