//! A transformer to train, as finished input: every field is present and has been validated.

use serde::{Deserialize, Serialize};

/// One decoder-only transformer.
///
/// Made by [`crate::model::read`] from our YAML or a Hugging Face `config.json`; nothing downstream
/// re-validates it. Sizes are elements unless the name ends in a unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Name as the user knows it, for example `llama70b`.
    pub name: String,
    /// Transformer layers, `L`.
    pub layers: usize,
    /// Hidden size, `h`.
    pub hidden: u64,
    /// Vocabulary size before padding, `V`.
    pub vocab: u64,
    /// Sequence length, `s`, tokens.
    pub seq_len: u64,
    /// Global batch, sequences an iteration.
    pub global_batch: u64,
    /// Assumptions of the reader about what the file leaves out, one sentence each, to be printed.
    pub assumptions: Vec<String>,
    /// Attention of every layer.
    pub attention: Attention,
    /// Dense feed-forward block (layers that are not mixture-of-experts).
    pub mlp: Mlp,
    /// Mixture-of-experts block, where the model has one.
    pub moe: Option<Moe>,
    /// Normalisation.
    pub norm: Norm,
    /// How positions enter.
    pub positions: Positions,
    /// Output layer shares the input embedding's weights.
    pub tied_embeddings: bool,
    /// `tanh` cap on the final logits (Gemma 2).
    pub final_soft_cap: Option<f64>,
    /// Dropout probability on attention, residuals and embeddings; 0 for none.
    pub dropout: f64,
    /// Constants of its formulas.
    pub numerics: Numerics,
}

/// Constants that change what a model computes, but neither its shapes nor its costs: training
/// needs them, planning does not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numerics {
    /// Added to the mean square or variance in norms.
    pub norm_eps: f64,
    /// Norm weights are stored as their distance from 1 (Gemma).
    pub norm_unit_offset: bool,
    /// Base of RoPE's frequencies.
    pub rope_theta: f64,
    /// How they are stretched for longer sequences, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yarn: Option<Yarn>,
    /// Attention scores are divided by the root of this; most models: the width of a head.
    pub query_pre_attn_scalar: f64,
    /// Factor of the embedding; 1 in most models, √h in Gemma's.
    pub embedding_scale: f64,
    /// Which GELU, where there is one.
    pub gelu: Gelu,
    /// Requests of the model's file that cannot be computed, in words; empty for models that can be
    /// trained.
    pub unknown: Vec<String>,
}

impl Numerics {
    /// Factor of attention's scores.
    pub fn score_scale(&self) -> f64 {
        let stretched = self.yarn.as_ref().map_or(1.0, Yarn::score_factor);
        self.query_pre_attn_scalar.powf(-0.5) * stretched
    }
}

/// YaRN: RoPE's slow frequencies are divided by a factor, its fast ones are kept, and those between
/// are mixed (arXiv 2309.00071, section 3.2). The mixture is linear in a frequency's number, as in
/// the authors' code.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Yarn {
    /// The factor: longest sequence over the longest before.
    pub factor: f64,
    /// Longest sequence before.
    pub original_positions: u64,
    /// Rotations over that length from which on a frequency is kept.
    pub beta_fast: f64,
    /// Rotations up to which it is divided.
    pub beta_slow: f64,
    /// Whether the mixed range is widened to whole pairs of elements.
    pub truncate: bool,
}

impl Yarn {
    /// Factor of attention's scores: queries and keys are lengthened by its root (arXiv 2309.00071,
    /// section 3.4).
    pub fn score_factor(&self) -> f64 {
        (0.1 * self.factor.max(1.0).ln() + 1.0).powi(2)
    }
}

/// The two forms of GELU in use (Hendrycks and Gimpel 2016, section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gelu {
    /// x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))): GPT-2, Gemma.
    Tanh,
    /// x/2 (1 + erf(x/√2)).
    Erf,
}

/// Self-attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Query heads, `a`.
    pub heads: u64,
    /// Key/value heads, `k`: equal to `heads` for multi-head, 1 for multi-query.
    pub kv_heads: u64,
    /// Width of one query/key head (for MLA: without the RoPE part).
    pub head_dim: u64,
    /// Columns of a head that RoPE rotates, its first ones in pairs of halves, where it does not
    /// rotate all (GPT-NeoX, StableLM). Latent attention has [`Mla::rope_dim`] instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotary_dim: Option<u64>,
    /// Multi-head latent attention, where used (DeepSeek-V3).
    pub mla: Option<Mla>,
    /// Bias on Q, K and V projections.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub out_bias: bool,
    /// RMSNorm over each query and key head (Qwen 3).
    pub qk_norm: bool,
    /// A learned logit for each head that every softmax counts beside its keys' (gpt-oss).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sinks: bool,
    /// `tanh` cap on attention scores (Gemma 2).
    pub soft_cap: Option<f64>,
    /// Sliding window.
    pub window: Option<Window>,
}

/// Multi-head latent attention (DeepSeek-V2, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mla {
    /// Rank of the query compression; `None` projects queries directly.
    pub q_rank: Option<u64>,
    /// Rank of the shared key/value compression.
    pub kv_rank: u64,
    /// RoPE part of a query/key head, beside `head_dim`.
    pub rope_dim: u64,
    /// Width of a value head.
    pub value_dim: u64,
}

/// Sliding-window attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Tokens a query sees, itself included.
    pub tokens: u64,
    /// Layer `i` is windowed unless `(i + 1) % every == 0`; `None` windows all layers.
    /// Gemma 2 alternates: `every` = 2.
    pub full_every: Option<u64>,
}

/// Dense feed-forward block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mlp {
    /// Feed-forward width, `f`.
    pub ffn: u64,
    /// Activation; gated ones have two input projections.
    pub activation: Activation,
    /// Bias on its linear layers.
    pub bias: bool,
}

/// Activation of the feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// max(x, 0)²
    SquaredRelu,
    /// Gaussian error linear unit, exact or tanh form.
    Gelu,
    /// SiLU-gated (Llama).
    Swiglu,
    /// GELU-gated (Gemma).
    Geglu,
    /// Gated by GELU's logistic approximation, with bounds on both inputs (gpt-oss).
    ClampedGeglu,
}

impl Activation {
    /// Gated activations have a gate and an up projection: three matrices a block instead of two.
    pub fn is_gated(self) -> bool {
        matches!(self, Self::Swiglu | Self::Geglu | Self::ClampedGeglu)
    }
}

/// Mixture-of-experts block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moe {
    /// Routed experts, `E`.
    pub experts: u64,
    /// Experts a token is sent to.
    pub top_k: u64,
    /// Feed-forward width of one routed expert.
    pub ffn: u64,
    /// Total feed-forward width of the shared experts; 0 for none.
    pub shared_ffn: u64,
    /// Number of leading dense layers.
    pub first_dense: usize,
    /// Period of the mixture-of-experts layers after `first_dense`: 1 for all of them; AMPipe's
    /// models have 1 or 2.
    pub every: usize,
    /// Tokens an expert takes, as a multiple of the balanced share; `None` is dropless.
    pub capacity_factor: Option<f64>,
    /// Tokens of the fullest expert-parallel rank over the mean, at least 1. It is an input, since
    /// nothing predicts how a router spreads tokens. Ranks that can have no such imbalance have
    /// their worst one ([`crate::layer::worst_imbalance`]): without expert parallelism none. Where
    /// tokens are padded to a capacity it has no effect.
    #[serde(default = "even_load", skip_serializing_if = "is_even_load")]
    pub imbalance: f64,
    /// How the router scores.
    pub router: Router,
    /// How scores become a choice and weights.
    #[serde(default, skip_serializing_if = "ExpertChoice::is_usual")]
    pub choice: ExpertChoice,
    /// How checkpoints name the tensors of experts.
    #[serde(default, skip_serializing_if = "ExpertTensors::is_usual")]
    pub tensors: ExpertTensors,
    /// Weight of the load-balancing loss; 0 for none.
    pub aux_loss: f64,
    /// What that loss counts, and the router's other loss.
    #[serde(default, skip_serializing_if = "RouterLosses::is_usual")]
    pub losses: RouterLosses,
    /// What a step adds to the selection bias of an expert with less load than the mean, and takes
    /// from one with more (Wang et al., arXiv 2408.15664, algorithm 1); 0 leaves biases as they
    /// are. Load is counted over the global batch. No time depends on it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bias_update_rate: f64,
    /// Whether the experts and their router have biases (gpt-oss). The time of a clamped activation
    /// is counted with them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub biased: bool,
}

/// Least rate of bias updates above 0: far smaller steps are lost beside an `f32` bias.
pub const MIN_BIAS_UPDATE_RATE: f64 = 1e-6;

/// Largest imbalance of a model.
pub const MAX_IMBALANCE: f64 = 1e3;

fn even_load() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_even_load(imbalance: &f64) -> bool {
    *imbalance == even_load()
}

/// How scores become a choice of experts and their weights. Only what is computed depends on it, no
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertChoice {
    /// Whether a token's weights are divided by their sum.
    pub renormalised: bool,
    /// Groups of experts.
    pub groups: u64,
    /// Groups that a token's experts may be of (DeepSeek-V3, section 2.1.2).
    pub kept_groups: u64,
    /// Factor of all weights.
    pub scale: f64,
}

impl Default for ExpertChoice {
    fn default() -> Self {
        Self { renormalised: true, groups: 1, kept_groups: 1, scale: 1.0 }
    }
}

impl ExpertChoice {
    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

impl Moe {
    /// Whether routers add to the loss.
    pub fn has_losses(&self) -> bool {
        self.aux_loss > 0.0 || self.losses.z_loss > 0.0
    }

    /// Whether load updates selection biases.
    pub fn updates_biases(&self) -> bool {
        self.bias_update_rate > 0.0
    }
}

/// Losses of the router apart from the balance loss's weight. No time depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterLosses {
    /// Of which layers the balance loss is.
    pub over: AuxOver,
    /// Weight of the mean squared log-sum-exp of a router's logits (ST-MoE, arXiv 2202.08906,
    /// equation 5); 0 for none.
    pub z_loss: f64,
}

impl RouterLosses {
    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

/// Of which layers a load-balancing loss is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuxOver {
    /// One for each layer, summed over layers (Switch Transformers, Megatron).
    #[default]
    EachLayer,
    /// One for all layers' rows together (Hugging Face's Mixtral): of the global batch alone.
    AllLayers,
}

/// How checkpoints name the tensors of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertTensors {
    /// `mlp.gate`, `mlp.experts.0.gate_proj`: Qwen 3, DeepSeek-V3.
    #[default]
    Mlp,
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.w1`: Mixtral.
    BlockSparseMoe,
    /// `mlp.router`, `mlp.experts.0.gate_proj`: gpt-oss, whose own checkpoints hold all experts of
    /// a layer in one quantised tensor. Nothing here reads those.
    MlpRouter,
}

impl ExpertTensors {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde passes a reference
    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

/// Router scoring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Router {
    /// Softmax over experts, then top-k.
    Softmax,
    /// Sigmoid scores with a selection bias (DeepSeek-V3).
    SigmoidBias,
}

/// Normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Norm {
    /// LayerNorm has scale and shift, RMSNorm scale only.
    pub kind: NormKind,
    /// Norms a layer: 2 (before attention and MLP) or 4 (also after each: Gemma 2).
    pub per_layer: u64,
}

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Mean and variance, scale and shift.
    LayerNorm,
    /// Root mean square, scale.
    RmsNorm,
}

/// How positions enter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Positions {
    /// Rotary, on queries and keys.
    Rope,
    /// A learned table of `max` rows added to the embedding.
    Learned {
        /// Rows of the table.
        max: u64,
    },
}

/// Kind of a layer within its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct LayerKind {
    /// Mixture-of-experts instead of the dense block.
    pub moe: bool,
    /// Attention is windowed.
    pub windowed: bool,
}

impl ModelSpec {
    /// Whether routed experts have biases.
    pub fn expert_bias(&self) -> bool {
        self.mlp.bias || self.moe.as_ref().is_some_and(|moe| moe.biased)
    }

    /// Kind of layer `index` (0-based).
    pub fn layer_kind(&self, index: usize) -> LayerKind {
        let moe = self.moe.as_ref().is_some_and(|moe| {
            index >= moe.first_dense && (index - moe.first_dense) % moe.every == moe.every - 1
        });
        let windowed = self.attention.window.is_some_and(|window| {
            window.tokens < self.seq_len
                && window.full_every.is_none_or(|every| !(index as u64 + 1).is_multiple_of(every))
        });
        LayerKind { moe, windowed }
    }

    /// Tokens an iteration.
    pub fn tokens_per_step(&self) -> u64 {
        self.global_batch * self.seq_len
    }
}
