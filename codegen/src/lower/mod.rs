//! A program as layers: what every rank computes, sends and keeps, in the order in which it
//! happens.
//!
//! A [`Segment`] is a part of a stage: the input layer, one transformer layer, or the output layer.
//! It is a list of operations in single assignment form, with shapes and placements.
//! [`crate::print`] writes it as Rust; the crate `direct` runs it as it is. Both read the same
//! list, so no layer is described twice.

mod attention;
mod builder;
mod ends;
mod expert_layer;
mod feed_forward;
mod half;
mod latent;
mod layer;
mod moe;
mod names;
mod op;
mod recompute;
mod sizes;

pub use ends::{Shard, Table};
pub use names::{LatentNames, TensorNames};
pub use op::{Heads, Op, Reduction, Step, Value};
pub use recompute::Restore;
pub use sizes::{Norm, Sizes};

use models::model::ModelSpec;
use models::program::{Program, Recompute};
use std::collections::BTreeMap;

/// A lowered program.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    /// What was lowered.
    pub program: Program,
    /// Shapes on one rank.
    pub sizes: Sizes,
    /// Names of tensors in checkpoints.
    pub names: TensorNames,
    /// Before the first layer.
    pub first: Segment,
    /// A transformer layer of each kind that occurs.
    pub layers: Vec<(Block, Segment)>,
    /// After the last layer.
    pub last: Segment,
    /// A vocabulary split over the pipeline, in place of the tables of the first and last segment.
    pub shard: Option<Shard>,
}

/// What follows attention in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Block {
    /// A dense feed-forward block.
    Dense,
    /// A mixture of experts.
    Experts,
}

impl Block {
    /// That of layer `index`.
    pub fn of(model: &ModelSpec, index: usize) -> Self {
        if model.layer_kind(index).moe { Self::Experts } else { Self::Dense }
    }
}

/// Where a tensor lies over the tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// Each rank has all of it.
    Whole,
    /// Each rank has consecutive rows.
    Split,
    /// Each rank has consecutive columns.
    Columns,
    /// Each rank has a summand of all of it.
    Partial,
}

/// Rows of a tensor on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rows {
    /// All tokens of a micro-batch.
    Tokens,
    /// Those of the residual stream that this rank has.
    Stream,
    /// Those of the whole Ulysses group, behind an exchange of tokens for heads.
    Behind,
}

/// Columns of a tensor on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Width {
    /// The residual stream's.
    Hidden,
    /// Those of this rank's query heads.
    Query,
    /// Those of this rank's key/value heads.
    KeyValue,
    /// Those of its query heads behind an exchange of tokens for heads.
    QueryBehind,
    /// Those of its key/value heads behind such an exchange.
    KeyValueBehind,
    /// Those of its heads of values and outputs in latent attention, where they have a width of
    /// their own.
    Value,
    /// The same behind an exchange of tokens for heads.
    ValueBehind,
    /// The latent vector of queries.
    QueryLatent,
    /// The latent vector of keys and values.
    KeyValueLatent,
    /// The part of keys that all heads of latent attention share.
    Rotary,
    /// What this rank's keys and values are made from in latent attention.
    UpProjected,
    /// This rank's part of the feed-forward width.
    Ffn,
    /// This rank's rows of the vocabulary.
    Vocab,
    /// One for each expert.
    Experts,
    /// This rank's part of an expert's feed-forward width.
    ExpertFfn,
    /// This rank's part of the shared experts' feed-forward width.
    SharedFfn,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// A matrix of activations or gradients.
    Tensor(Placement, Rows, Width),
    /// The residual stream, whose last sum the next norm computes.
    Stream,
    /// What a norm's backward pass needs of each row.
    Statistics,
    /// The same of each head of queries or keys.
    HeadStatistics(Width),
    /// The same of all tokens, whatever rows the stream has.
    TokenStatistics,
    /// The log-sum-exp of each row of attention's scores.
    LogSumExp,
    /// One number for each token.
    TokenNumbers,
    /// A tensor that a collective is making.
    InFlight(Placement, Rows, Width),
    /// Where the copies of this rank's rows go.
    Route,
    /// Copies of this rank's rows, one for each of a row's experts.
    Copies(Width),
    /// Rows for this rank's experts.
    Received(Width),
    /// One number for each copy.
    CopyNumbers,
    /// Copies on their way to experts, or back.
    CopiesInFlight(Width),
    /// Sums over chunks of the gradients of queries, keys and values.
    AttentionSums,
}

/// A value of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its name. Later values may have the same name: they replace it.
    pub name: String,
    /// Its type.
    pub of: Type,
    /// Whether it has the rows of one chunk.
    pub chunked: bool,
}

/// What an operation reads besides values: mostly parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name in the segment.
    pub name: &'static str,
    /// What it is.
    pub kind: FieldKind,
}

/// What a field is. Names of tensors are relative to the segment ([`TensorNames::layer`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// A norm over the hidden size.
    Norm {
        /// Its name, without `.weight`.
        tensor: &'static str,
    },
    /// Rows of a matrix, from the stream's width to `outputs`: column-parallel.
    Column {
        /// The matrix.
        matrix: Matrix,
        /// Which of its blocks.
        block: usize,
        /// Width of the result.
        outputs: Width,
    },
    /// A matrix from `inputs` to the stream's width: row-parallel.
    Row {
        /// The matrix.
        matrix: Matrix,
        /// Width of its input.
        inputs: Width,
    },
    /// The bias of a row-parallel matrix.
    RowBias {
        /// The matrix's name.
        tensor: &'static str,
    },
    /// A norm of each head of queries or keys.
    HeadNorm {
        /// Its name, without `.weight`.
        tensor: &'static str,
    },
    /// The core of attention, which has no parameters but sinks.
    Attention {
        /// The tensor of sinks, if there are any.
        sinks: Option<&'static str>,
    },
    /// Rows of a matrix from the stream's width to a latent vector, whole on every rank.
    Down {
        /// The matrix.
        matrix: Matrix,
        /// Which of its blocks.
        block: usize,
        /// Width of the result.
        outputs: Width,
    },
    /// A norm of a latent vector, whole on every rank.
    LatentNorm {
        /// Its name, without `.weight`.
        tensor: &'static str,
        /// Width of the vector.
        width: Width,
    },
    /// A matrix from a latent vector to this rank's heads: column-parallel.
    Up {
        /// The matrix.
        matrix: Matrix,
        /// Width of the latent vector.
        inputs: Width,
        /// Width of the result.
        outputs: Width,
    },
    /// The core of latent attention, which has no parameters.
    LatentAttention,
    /// A router.
    Router {
        /// Its name, without `.weight`.
        tensor: &'static str,
        /// Whether its logits have a bias.
        bias: bool,
        /// Whether load updates its selection bias.
        by_load: bool,
    },
    /// A matrix of each of this rank's experts.
    Experts {
        /// The name within an expert, without `.weight`.
        tensor: &'static str,
        /// Whether it has a bias.
        bias: bool,
        /// Widths of its result and of its input.
        outputs: Width,
        /// See `outputs`.
        inputs: Width,
    },
    /// The token table.
    Tokens,
    /// The table of learned positions, of this many rows.
    Positions(u64),
    /// The output matrix.
    Output,
    /// The loss, which has no parameters.
    Loss,
    /// Output matrix and loss together, for blocks of this many tokens.
    FusedLoss(u64),
}

/// A matrix of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Its name, without `.weight`.
    pub tensor: &'static str,
    /// Widths of its blocks of rows: one for each layer that the tensor holds.
    pub blocks: Vec<Width>,
    /// Stored `[in, out]` in checkpoints.
    pub transposed: bool,
    /// Whether it has a bias that is split like it.
    pub bias: bool,
    /// Whether it adds to the residual stream: then its initial weights are smaller.
    pub adds_to_stream: bool,
}

impl Matrix {
    /// One layer's matrix; what it is made of is set by whoever declares it.
    pub(crate) fn plain(tensor: &'static str, names: TensorNames, bias: bool) -> Self {
        let transposed = names.is_gpt2();
        Self { tensor, blocks: vec![], transposed, bias, adds_to_stream: false }
    }
}

/// Operations with what goes in and out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// What it is about, in a few words.
    pub title: &'static str,
    /// The gradient or stream that it is given; `None` if it needs none.
    pub input: Option<Value>,
    /// Its operations.
    pub steps: Vec<Step>,
    /// What it returns; `None` if nothing is left to pass on.
    pub output: Option<Value>,
}

/// A part of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Fields, in the order in which their parameters are declared.
    pub fields: Vec<Field>,
    /// All values.
    pub values: Vec<Named>,
    /// The forward pass.
    pub forward: Function,
    /// The backward pass, in parts: each gets the gradient that the part before it returned.
    pub backward: Vec<Function>,
    /// What the backward pass reads of the forward pass.
    pub read: Vec<Value>,
    /// For each way to recompute that the program uses: what is kept, and how the rest of what is
    /// read is computed again.
    pub restores: BTreeMap<Recompute, Restore>,
}

impl Segment {
    /// The values that are kept for the backward pass.
    pub fn kept(&self, recompute: Recompute) -> &[Value] {
        self.restores.get(&recompute).map_or(&[], |restore| &restore.kept)
    }
}

/// Lowers a program.
pub fn lower(program: &Program) -> Lowered {
    let sizes = Sizes::of(program);
    let names = TensorNames::of(&program.model);
    let shard = ends::shard(program, names);
    Lowered {
        first: ends::first(program, &sizes),
        layers: blocks(program)
            .into_iter()
            .map(|block| (block, layer::layer(program, &sizes, names, block)))
            .collect(),
        last: ends::last(program, &sizes),
        shard,
        program: program.clone(),
        sizes,
        names,
    }
}

/// The kinds of layer that occur.
fn blocks(program: &Program) -> Vec<Block> {
    let mut all: Vec<Block> =
        (0..program.model.layers).map(|index| Block::of(&program.model, index)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

impl Lowered {
    /// The segment of layer `index`.
    pub fn layer(&self, index: usize) -> &Segment {
        let block = Block::of(&self.program.model, index);
        let (_, segment) = self.layers.iter().find(|(of, _)| *of == block).expect("it occurs");
        segment
    }
}

/// Number of a layer's dropout in the model: three in a layer, 0 for attention's probabilities.
pub fn dropout_place(layer: usize, within: u32) -> u32 {
    layer as u32 * 4 + within
}

/// Added to the mean of squares in norms of latent vectors, whatever a model's other norms add
/// (DeepSeek-V3's in Hugging Face's transformers).
pub const LATENT_EPS: f64 = 1e-6;

/// Number of the embedding's dropout.
pub const EMBEDDING_PLACE: u32 = u32::MAX;
