//! Shapes on one rank, and the numbers of a model that its layers need.

use super::{Placement, Rows, Type, Width};
use models::decisions::MoeOverlap;
use models::layer::LocalHeads;
use models::mesh::ExpertSplit;
use models::model::{ModelSpec, NormKind, Positions};
use models::program::Program;
use models::shapes;

/// Standard deviation of initial weights (GPT-2, section 2.3).
const DEVIATION: f64 = 0.02;

/// Shapes on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// Tensor-parallel ranks.
    pub tp: u64,
    /// Whether the residual stream is split over them.
    pub sequence_parallel: bool,
    /// Context-parallel ranks that exchange keys and values, and those that exchange tokens for
    /// heads.
    pub ring: u64,
    /// See `ring`.
    pub ulysses: u64,
    /// Tokens of a micro-batch on this rank.
    pub tokens: u64,
    /// Rows of the residual stream on this rank.
    pub rows: u64,
    /// Columns of the residual stream.
    pub hidden: u64,
    /// Columns of an attention head of queries and keys.
    pub head_dim: u64,
    /// Columns of an attention head of values.
    pub value_dim: u64,
    /// Columns of a head that are rotated, if positions are rotary.
    pub rotary_dim: u64,
    /// Elements of the latent vectors of queries, and of keys and values; 0 if there are none.
    pub latents: [u64; 2],
    /// Query heads of all ranks, and of this one.
    pub heads: [u64; 2],
    /// Key/value heads of all ranks, and of this one.
    pub kv_heads: [u64; 2],
    /// Feed-forward width of all ranks.
    pub ffn: u64,
    /// Chunks in which rows pass through experts.
    pub chunks: u64,
    /// Whether the other pass of a pair runs where this one would wait for rows for experts.
    pub paired: bool,
    /// Experts of a layer, of all ranks and of this one; 0 if there are none.
    pub experts: [u64; 2],
    /// Experts of a token.
    pub top_k: u64,
    /// Feed-forward width of an expert, of all ranks and of this one.
    pub expert_ffn: [u64; 2],
    /// Feed-forward width of the shared experts, of all ranks.
    pub shared_ffn: u64,
    /// Vocabulary of all ranks, without padding.
    pub vocab: u64,
    /// Rows of the vocabulary on this rank, with padding.
    pub vocab_rows: u64,
    /// Norms.
    pub norm: Norm,
    /// Standard deviation of initial weights.
    pub deviation: f64,
    /// The same, of matrices that add to the residual stream: smaller by √(2L) (GPT-2, section
    /// 2.3).
    pub stream_deviation: f64,
    /// Rotary positions.
    pub rotary: bool,
    /// Rows of the table of learned positions.
    pub positions: Option<u64>,
}

/// The model's kind of norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// RMSNorm or LayerNorm.
    pub kind: NormKind,
    /// Added to the variance or mean of squares.
    pub eps: f64,
    /// Whether weights count from 1 (Gemma).
    pub unit_offset: bool,
}

impl Sizes {
    /// The shapes of a program.
    pub fn of(program: &Program) -> Self {
        let (model, tp) = (&program.model, program.mesh.tp);
        let mla = model.attention.mla;
        let local = LocalHeads::new(model, tp);
        let tokens = program.micro_batch as u64 * model.seq_len / program.mesh.cp;
        let ulysses = program.cp_ulysses as u64;
        let sequence_parallel = program.sequence_parallel && tp > 1;
        let split = program.experts.unwrap_or(ExpertSplit { ep: 1, etp: 1 });
        let [experts, top_k, expert_ffn] =
            model.moe.as_ref().map_or([0; 3], |moe| [moe.experts, moe.top_k, moe.ffn]);
        Self {
            tp,
            sequence_parallel,
            ring: program.mesh.cp / ulysses,
            ulysses,
            tokens,
            rows: if sequence_parallel { tokens / tp } else { tokens },
            hidden: model.hidden,
            head_dim: local.qk_dim,
            value_dim: local.v_dim,
            rotary_dim: mla
                .map(|mla| mla.rope_dim)
                .or(model.attention.rotary_dim)
                .unwrap_or(local.qk_dim),
            latents: mla.map_or([0; 2], |mla| [mla.q_rank.unwrap_or(0), mla.kv_rank]),
            heads: [model.attention.heads, model.attention.heads / tp],
            kv_heads: [model.attention.kv_heads, local.kv_heads],
            ffn: model.mlp.ffn,
            chunks: program.moe_chunks as u64,
            paired: program.moe_overlap == MoeOverlap::Pair,
            experts: [experts, experts / split.ep],
            top_k,
            expert_ffn: [expert_ffn, expert_ffn / split.etp],
            shared_ffn: model.moe.as_ref().map_or(0, |moe| moe.shared_ffn),
            vocab: model.vocab,
            vocab_rows: shapes::vocabulary_rows(model.vocab, tp),
            norm: norm(model),
            deviation: DEVIATION,
            stream_deviation: DEVIATION / (2.0 * model.layers as f64).sqrt(),
            rotary: model.positions == Positions::Rope,
            positions: match model.positions {
                Positions::Learned { max } => Some(max),
                Positions::Rope => None,
            },
        }
    }

    /// Columns on this rank.
    pub fn columns(&self, width: Width) -> u64 {
        match width {
            Width::Hidden => self.hidden,
            Width::Query => self.heads[1] * self.head_dim,
            Width::QueryBehind => self.heads[1] / self.ulysses * self.head_dim,
            Width::KeyValueBehind => (self.kv_heads[1] / self.ulysses).max(1) * self.head_dim,
            Width::KeyValue => self.kv_heads[1] * self.head_dim,
            Width::Value => self.heads[1] * self.value_dim,
            Width::ValueBehind => self.heads[1] / self.ulysses * self.value_dim,
            Width::QueryLatent => self.latents[0],
            Width::KeyValueLatent => self.latents[1],
            Width::Rotary => self.rotary_dim,
            Width::UpProjected => self.heads[1] * self.up_dim(),
            Width::Ffn => self.ffn / self.tp,
            Width::Vocab => self.vocab_rows,
            Width::Experts => self.experts[0],
            Width::ExpertFfn => self.expert_ffn[1],
            Width::SharedFfn => self.shared_ffn / self.tp,
        }
    }

    /// Columns of a head of latent attention that are projected up: of its key, without the part
    /// that all heads share, and of its value.
    fn up_dim(&self) -> u64 {
        self.head_dim - self.rotary_dim + self.value_dim
    }

    /// Columns of all ranks together, and into how many parts they are cut: fewer than there are
    /// ranks if ranks hold copies.
    pub fn whole(&self, width: Width) -> (u64, u64) {
        match width {
            Width::Hidden => (self.hidden, 1),
            Width::Value | Width::ValueBehind => (self.heads[0] * self.value_dim, self.tp),
            Width::UpProjected => (self.heads[0] * self.up_dim(), self.tp),
            Width::QueryLatent | Width::KeyValueLatent | Width::Rotary => (self.columns(width), 1),
            Width::Query | Width::QueryBehind => (self.heads[0] * self.head_dim, self.tp),
            Width::KeyValue | Width::KeyValueBehind => {
                (self.kv_heads[0] * self.head_dim, self.tp.min(self.kv_heads[0]))
            }
            Width::Ffn => (self.ffn, self.tp),
            Width::Vocab => (self.vocab, self.tp),
            Width::SharedFfn => (self.shared_ffn, self.tp),
            Width::Experts => (self.experts[0], 1),
            Width::ExpertFfn => {
                (self.expert_ffn[0], self.expert_ffn[0] / self.expert_ffn[1].max(1))
            }
        }
    }

    /// Rows on this rank.
    pub fn rows(&self, rows: Rows) -> u64 {
        match rows {
            Rows::Tokens => self.tokens,
            Rows::Stream => self.rows,
            Rows::Behind => self.tokens * self.ulysses,
        }
    }

    /// Elements of a tensor on this rank.
    pub fn elements(&self, rows: Rows, width: Width) -> u64 {
        self.rows(rows) * self.columns(width)
    }

    /// A tensor of the residual stream's rows.
    pub fn stream(&self) -> Type {
        match self.sequence_parallel {
            true => Type::Tensor(Placement::Split, Rows::Stream, Width::Hidden),
            false => Type::Tensor(Placement::Whole, Rows::Tokens, Width::Hidden),
        }
    }

    /// Copies of this rank's rows, one for each expert of a row.
    pub fn copies(&self) -> u64 {
        self.rows * self.top_k
    }

    /// One number for each expert of each row of the stream.
    pub fn logits_of_experts(&self) -> Type {
        match self.sequence_parallel {
            true => Type::Tensor(Placement::Split, Rows::Stream, Width::Experts),
            false => Type::Tensor(Placement::Whole, Rows::Tokens, Width::Experts),
        }
    }

    /// The stream's columns of all tokens.
    pub fn full(&self) -> Type {
        Type::Tensor(Placement::Whole, Rows::Tokens, Width::Hidden)
    }

    /// A summand of each rank, of all tokens.
    pub fn part(&self) -> Type {
        let placement = if self.tp > 1 { Placement::Partial } else { Placement::Whole };
        Type::Tensor(placement, Rows::Tokens, Width::Hidden)
    }

    /// Columns of this rank, of all tokens.
    pub fn split(&self, width: Width) -> Type {
        let placement = if self.tp > 1 { Placement::Columns } else { Placement::Whole };
        Type::Tensor(placement, Rows::Tokens, width)
    }

    /// Columns of this rank, behind an exchange of tokens for heads.
    pub fn behind(&self, width: Width) -> Type {
        let placement = if self.tp > 1 { Placement::Columns } else { Placement::Whole };
        match (self.ulysses, width) {
            (1, _) => self.split(width),
            (_, Width::Query) => Type::Tensor(placement, Rows::Behind, Width::QueryBehind),
            (_, Width::Value) => Type::Tensor(placement, Rows::Behind, Width::ValueBehind),
            (_, _) => Type::Tensor(placement, Rows::Behind, Width::KeyValueBehind),
        }
    }
}

fn norm(model: &ModelSpec) -> Norm {
    let numerics = &model.numerics;
    Norm {
        kind: model.norm.kind,
        eps: numerics.norm_eps,
        unit_offset: numerics.norm_unit_offset && model.norm.kind == NormKind::RmsNorm,
    }
}
