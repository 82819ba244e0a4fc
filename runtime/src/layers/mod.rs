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
//! Only the collectives of a [`Group`] change a placement; layers take one and give one:
//!
//! | | takes | gives |
//! |---|---|---|
//! | [`Group::all_gather`] | [`Split<A>`] | [`Whole`], with all ranks' rows |
//! | [`Group::reduce_scatter`] | [`Partial<A>`] | [`Split<A>`] |
//! | [`Group::all_reduce`] | [`Partial<A>`] | [`Whole`] |
//! | [`ColumnLinear`] | [`Whole`] | [`Columns<A>`] |
//! | [`RowLinear`] | [`Columns<A>`] | [`Partial<A>`] |
//! | [`Norm`], [`RowBias`], [`dropout`], [`Positions`] | [`Whole`] or [`Split<A>`] | the same |
//! | [`gated`], [`activate`] | all but [`Partial<A>`] | the same |
//! | [`Attention`], [`LatentAttention`] | [`Whole`] or [`Columns<A>`] | the same |
//! | [`DownLinear`], [`LatentNorm`] | [`Whole`] | the same, whole on every rank |
//! | [`Route`], which dispatches to [`Experts`] | [`Whole`] or [`Split<A>`] | the same |
//! | [`TokenEmbedding`] | tokens | [`Whole`], or [`Partial<A>`] of a split table |
//!
//! Backward passes go the other way: what a layer takes forward is what `backward` gives, except
//! that the input gradient of a [`ColumnLinear`] is [`Partial<A>`] and [`RowLinear`] takes a
//! [`Whole`] gradient of its output. [`DownLinear`] and [`LatentNorm`] take and give [`Partial<A>`]
//! gradients. So a block with sequence parallelism is
//!
//! ```text
//! forward    norm  all_gather  ColumnLinear  gated  RowLinear  reduce_scatter
//! backward   norm  reduce_scatter  ColumnLinear  gated  RowLinear  all_gather    (right to left)
//! ```
//!
//! Each layer has `forward`, `backward` (with respect to its input) and `weights`, the work that
//! [`Gradients::add`] runs now or later. What a layer reads for its backward pass is shared
//! ([`Tensor::share`]). What works in place takes its tensor by value, and copies it only if it is
//! shared. A collective that was started (`start_...`) runs while what follows computes, until
//! [`InFlight::wait`].
//!
//! What replicas share of a layer's parameters is in the type of its [`Parameters`]: they make the
//! [`PassContext`], from which no weights can be read, a [`Context`] that has them, and hand the
//! layer's gradients over.
//!
//! Numbers of rows and columns are those of one rank. Where the compiler cannot infer them, give
//! the result a type: `let h: Tensor<D, Whole, TOKENS, HIDDEN> = tp.all_gather(&h)?;`

mod activation;
mod attention;
mod embedding;
mod experts;
mod fused_loss;
mod group;
mod head_norm;
mod latent;
mod linear;
mod loss;
mod norm;
mod placement;
mod replicas;
mod tensor;

pub use crate::ops::{
    BalanceOver, BalanceScope, Chunk, Context, Gradients, Matrix, PassContext, Reduced,
    RouterLosses, VocabTable, WeightWork,
};
pub use activation::{activate, activate_backward, dropout, gated, gated_backward};
pub use attention::{Attention, AttentionCore, AttentionSums, HeadGradients, Saved};
pub use embedding::{Positions, TokenEmbedding};
pub use experts::{Copies, CopiesInFlight, CopyNumbers, Experts, Received, Route, Router};
pub use fused_loss::{FusedLoss, OutputLayer};
pub use group::{Group, InFlight};
pub use head_norm::HeadNorm;
pub use kernels::activation::Activation;
pub use kernels::routing::{Routing, Scoring};
pub use latent::{DownLinear, LatentAttention, LatentNorm};
pub use linear::{ColumnLinear, FromRows, FusedRows, Linear, RowBias, RowLinear};
pub use loss::CrossEntropy;
pub use norm::{LayerKind, LayerNorm, Norm, RmsKind, RmsNorm};
pub use placement::{
    Axis, Columns, Cp, Elementwise, GradientPlacement, HeadPlacement, Partial, PartialMax, Split,
    StreamPlacement, TablePlacement, TokenPlacement, Tp, VocabPlacement, Whole,
};
pub use replicas::{Parameters, ReplicaPlacement, Replicated, Sharded};
pub use tensor::{LogSumExp, Numbers, Statistics, Stream, Tensor};
