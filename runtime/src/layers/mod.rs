//! Typed tensors and parallel layers. A tensor's type holds its local shape and how the ranks of an
//! axis share it, so that a trainer with a wrong split does not compile. Each method is one call of
//! [`crate::ops`].
//!
//! | placement | the ranks of axis `A` hold |
//! |---|---|
//! | [`Whole`] | the same matrix |
//! | [`Split<A>`] | consecutive rows each |
//! | [`Columns<A>`] | consecutive columns each |
//! | [`Partial<A>`] | a summand each, of the whole shape |
//!
//! Only the collectives of a [`Group`] change a placement. What a layer reads for its backward pass
//! is shared ([`Tensor::share`]). What works in place takes its tensor by value, and copies it only
//! if it is shared.

mod activation;
mod attention;
mod embedding;
mod group;
mod linear;
mod loss;
mod norm;
mod placement;
mod tensor;

pub use crate::ops::{Context, Gradients, Matrix, VocabTable, WeightWork};
pub use activation::{activate, activate_backward, dropout, gated, gated_backward};
pub use attention::{Attention, Saved};
pub use embedding::{Positions, TokenEmbedding};
pub use group::{Group, InFlight};
pub use kernels::activation::Activation;
pub use linear::{ColumnLinear, FromRows, FusedRows, Linear, RowBias, RowLinear};
pub use loss::CrossEntropy;
pub use norm::{LayerKind, LayerNorm, Norm, RmsKind, RmsNorm};
pub use placement::{
    Axis, Columns, Cp, Dp, Elementwise, HeadPlacement, Partial, PartialMax, Pp, Split,
    StreamPlacement, TablePlacement, Tp, VocabPlacement, Whole,
};
pub use tensor::{LogSumExp, Numbers, Statistics, Stream, Tensor};
