//! Kernels for training transformers: on the CPU in f32 and f64, and on GPUs ([`cuda`]).
//!
//! Each operation has a folder: `mod.rs` holds the contract (shapes, formulas, what is saved for
//! the backward pass), `reference.rs` the specification, `fast.rs` the implementation for training.
//! Both have the same signatures, so one test body runs every implementation. An operation's module
//! re-exports the fast functions.
//!
//! # Conventions
//!
//! - Tensors are row-major slices. Each operation has a small struct with its dimensions; results
//!   go into the caller's buffers.
//! - **A slice of the wrong length is a programming error and panics on entry**, with the name of
//!   the argument, before anything is written. So do inconsistent dimensions.
//! - Gradients of *parameters* accumulate (`+=`). Gradients of *inputs* overwrite, or take an
//!   [`Output`] where adding to a residual stream is common. The gradients of inputs and of weights
//!   are separate functions.
//! - Every function takes a [`Cpu`]: the threads and the scratch memory of its caller. There are no
//!   globals.
//! - Results have the same bits for any number of threads: work is cut into blocks that depend on
//!   the shape alone, and sums over blocks are taken in block order. They may differ between
//!   processors (see [`gemm`]).
//! - Nothing here knows of ranks, plans or models. A sharded caller passes what it needs as
//!   arguments: offsets of positions ([`attention`]), ranges of rows ([`embedding`]), columns of a
//!   vocabulary ([`cross_entropy`]), and global element indices for random numbers
//!   ([`random::GlobalIndices`]).
//!
//! # Shapes
//!
//! Letters: `b` batch, `s` sequence, `t = b s` tokens, `h` hidden, `f` feed-forward width, `d` head
//! dimension, `q`/`k` query and key-value heads, `v` vocabulary. Wherever only `t` appears, a
//! sequence-first layout `[s, b, h]` works as well.
//!
//! | operation | forward | backward |
//! |---|---|---|
//! | [`gemm`] | `C[m,n] = alpha op(A)[m,k] op(B)[k,n] + beta C` | `dx = dy W`, `dW += dy^T x` |
//! | [`attention`] | `q, k, v -> out[b,s,q,d'], lse[b,q,s]` | `out, lse, dout -> dq, dk, dv` |
//! | [`cross_entropy`] | `logits[t,v/n], targets[t] -> loss[t]` | in place over the logits |
//! | [`rms_norm`] | `x[r,c] w[c] -> y[r,c], inverse_rms[r]` | `dx`; `dw +=` |
//! | [`layer_norm`] | `x[r,c] w[c] bias[c] -> y, mean[r], inverse_std[r]` | `dx`; `dw, dbias +=` |
//! | [`rope`] | in place on `x[t,heads,d]`; table `[t, 2, rotary/2]` | the inverse rotation |
//! | [`activation`] | `y = f(x)`; gated `y = f(gate) g(up)` | `dx`; `dgate, dup` |
//! | [`embedding`] | `ids[t], table[rows,h] -> out[t,h]` | `dtable +=` |
//! | [`elementwise`] | `x[r,c] += bias[c]`, `y += x`, `y = a x`, sums | `dbias +=` column sums |
//! | [`dropout`] | `y = x mask / (1 - p)` | the same function on `dy` |
//! | [`random`] | uniform and normal numbers by global element index | |
//! | [`adamw`] | weights and moments in place | |
//! | [`transpose`] | `[a, b, inner] -> [b, a, inner]` | itself |
//! | [`latent_heads`] | `up[t,heads,c+d] rotary[t,r] -> k[t,heads,c+r], v[t,heads,d]` | `dup`, `drotary` |
//! | [`sinks`] | in place on `out[b,s,q,d]`, `lse[b,q,s]` with `sinks[q]` | `dsinks` by row |

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
pub mod latent_heads;
pub mod layer_norm;
pub mod random;
pub mod rms_norm;
pub mod rope;
pub mod routing;
pub mod sinks;
pub mod transpose;
pub mod weighted_rows;

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
