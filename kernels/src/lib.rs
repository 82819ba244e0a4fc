//! Kernels for training transformers on the CPU, in f32 and f64; their twins for GPUs are in [`cuda`].
//!
//! One folder per operation: `mod.rs` holds the contract (shapes, formulas, what is saved for the backward pass),
//! `reference.rs` the specification, `fast.rs` what training runs. Both have the same signatures, so one
//! test body runs every implementation. The functions re-exported by an operation's module are the fast ones.
//!
//! # Rules that hold everywhere
//!
//! - Tensors are row-major slices. Each operation has a small struct that says its dimensions; results go into
//!   the caller's buffers.
//! - **A slice of the wrong length is a programming error and panics at the door**, with the name of the
//!   argument, before anything is written. So do dimensions that contradict each other.
//! - Gradients of *parameters* accumulate (`+=`). Gradients of *inputs* overwrite, or take an [`Output`] where
//!   adding to a residual stream is common. Backward to inputs and backward to weights are separate functions.
//! - Every function takes a [`Cpu`]: the threads and the scratch memory of its caller. There are no globals.
//! - Results are the same bits for any number of threads: work is cut in blocks that depend on the shape alone,
//!   and sums over blocks are taken in block order. They may differ between processors (see [`gemm`]).
//! - Nothing here knows of ranks, plans or models. What a sharded caller needs is in the arguments: offsets of
//!   positions ([`attention`]), ranges of rows ([`embedding`]), columns of a vocabulary ([`cross_entropy`]), and
//!   global element indices for randomness ([`random::GlobalIndices`]).
//!
//! # Shapes
//!
//! Letters: `b` batch, `s` sequence, `t = b s` tokens, `h` hidden, `f` feed-forward width, `d` head
//! dimension, `q`/`k` query and key-value heads, `v` vocabulary. A leading-token layout `[s, b, h]` serves as
//! well wherever only `t` appears.
//!
//! | operation | forward | backward |
//! |---|---|---|
//! | [`gemm`] | `C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C` | linear `y = x W^T`, `W[out,in]`: `dx = dy W` (NN), `dW += dy^T x` (TN, beta 1) |
//! | [`attention`] | `q[b,s,q,d] k[b,s',k,d] v[b,s',k,d'] -> out[b,s,q,d'], lse[b,q,s]` | `dq dk dv` from `out`, `lse`, `dout` |
//! | [`cross_entropy`] | `logits[t,v/n], targets[t] -> max[t], sum_exp[t], target_logit[t] -> loss[t]` | in place over the logits |
//! | [`rms_norm`] | `x[r,c] w[c] -> y[r,c], inverse_rms[r]` | `dx`; `dw +=` |
//! | [`layer_norm`] | `x[r,c] w[c] bias[c] -> y[r,c], mean[r], inverse_std[r]` | `dx`; `dw, dbias +=` |
//! | [`rope`] | in place on `x[t,heads,d]` with a table `[t, 2, rotary/2]` | the inverse rotation, in place |
//! | [`activation`] | `y = f(x)`; gated `y = f(gate) up` | `dx`; `dgate, dup` |
//! | [`embedding`] | `ids[t], table[rows,h] -> out[t,h]` | `dtable +=` |
//! | [`elementwise`] | `x[r,c] += bias[c]`, `y += x`, `y = a x`, sums of squares | `dbias += column sums` |
//! | [`dropout`] | `y = x mask / (1 - p)` | the same function on `dy` |
//! | [`random`] | uniform and normal numbers by global element index | |
//! | [`adamw`] | weights and moments in place | |
//! | [`transpose`] | `[a, b, inner] -> [b, a, inner]` | itself |

mod check;
mod columns;
mod cpu;
mod matrix;
mod pool;
mod real;
mod simd;

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod cross_entropy;
pub mod cuda;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod layer_norm;
pub mod random;
pub mod rms_norm;
pub mod rope;
pub mod transpose;

pub use cpu::{Cpu, CpuError};
pub use real::Real;

/// What a kernel does with the values already in its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// They are replaced, and never read.
    Overwrite,
    /// The result is added to them.
    Accumulate,
}

impl Output {
    /// Stores or adds one value.
    #[inline(always)]
    pub(crate) fn put<T: Real>(self, place: &mut T, value: T) {
        match self {
            Self::Overwrite => *place = value,
            Self::Accumulate => *place += value,
        }
    }
}
