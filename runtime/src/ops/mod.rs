//! What one rank computes, on buffers whose shapes are values. [`crate::layers`] puts types with
//! shapes and placements around it, for trainers that are compiled.
//!
//! | letter | meaning |
//! |---|---|
//! | `n` | tokens of a micro-batch, `b·s`, sequence after sequence |
//! | `r` | rows of the residual stream on this rank: `n`, with sequence parallelism `n/t` |
//! | `h`, `f`, `V` | hidden size, feed-forward width, vocabulary |
//!
//! A layer has three steps: forward, gradients of inputs, and gradients of weights. The third is
//! data, [`WeightWork`], to be run at once or when the schedule says.

pub mod activation;
mod around;
mod attention;
mod bias;
mod capacity;
mod chunks;
mod collectives;
mod context;
mod embedding;
mod expert_loads;
mod experts;
mod fused_loss;
mod linear;
mod loss;
mod norm;
mod router;
mod router_losses;
mod sinks;
mod tiles;
mod vocabulary;
mod weights;

pub use around::ContextRanks;
pub use attention::{Attention, AttentionSaved, Latent};
pub use bias::RowBias;
pub use chunks::{AttentionSums, Chunk};
pub use collectives::InFlight;
pub use context::{Context, DropoutDraws, MicroBatch, PassContext, PassUnits, TokenIds};
pub use embedding::{Positions, TokenEmbedding, VocabTable};
pub use expert_loads::{ExpertLoads, update_bias};
pub use experts::{ExpertLinear, ExpertRanks, Received};
pub use fused_loss::FusedLoss;
pub use linear::{Linear, Matrix, declare_columns, declare_rows};
pub use loss::{CrossEntropy, OwnSums, Softmax};
pub use norm::{Norm, NormKind, Residual, Statistics};
pub use router::{CopiesInFlight, Route, Router};
pub use router_losses::{BalanceOver, BalanceScope, RouterLog, RouterLosses};
pub use vocabulary::{
    GradientParts, ShardKept, ShardLocal, ShardReduced, ShardSpec, SoftmaxSums, VocabularyShard,
};
pub use weights::{Complete, Gradients, Reduced, WeightWork};
