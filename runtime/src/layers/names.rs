//! Names of tensors in Hugging Face checkpoints.

use models::model::{ModelSpec, NormKind};

/// Tensor names of one family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorNames {
    /// GPT-2's: LayerNorm models.
    Gpt2,
    /// Llama's, which Mistral, Qwen and Gemma share: RMSNorm models.
    Llama,
}

impl TensorNames {
    /// The family of a model.
    pub fn of(model: &ModelSpec) -> Self {
        match model.norm.kind {
            NormKind::LayerNorm => Self::Gpt2,
            NormKind::RmsNorm => Self::Llama,
        }
    }

    /// Whether query, key and value projections are one tensor, stored `[in, out]`.
    pub fn is_gpt2(self) -> bool {
        self == Self::Gpt2
    }

    /// Name of a part of a layer, without `.weight` or `.bias`.
    fn layer(self, index: usize, part: &str) -> String {
        match self {
            Self::Gpt2 => format!("transformer.h.{index}.{part}"),
            Self::Llama => format!("model.layers.{index}.{part}"),
        }
    }

    /// Token embedding.
    pub fn embedding(self) -> &'static str {
        match self {
            Self::Gpt2 => "transformer.wte.weight",
            Self::Llama => "model.embed_tokens.weight",
        }
    }

    /// Table of learned positions.
    pub fn positions(self) -> &'static str {
        match self {
            Self::Gpt2 => "transformer.wpe.weight",
            Self::Llama => "model.embed_positions.weight",
        }
    }

    /// Norm before the output layer.
    pub fn final_norm(self) -> &'static str {
        match self {
            Self::Gpt2 => "transformer.ln_f",
            Self::Llama => "model.norm",
        }
    }

    /// Norms of a layer: before attention, after it, before the feed-forward block, after it.
    pub fn norms(self, index: usize, after_blocks: bool) -> [String; 4] {
        let names = match (self, after_blocks) {
            (Self::Gpt2, _) => ["ln_1", "ln_1_post", "ln_2", "ln_2_post"],
            (Self::Llama, false) => ["input_layernorm", "", "post_attention_layernorm", ""],
            (Self::Llama, true) => [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
        };
        names.map(|name| self.layer(index, name))
    }

    /// A projection of attention: `q`, `k`, `v`, `qkv` or `o`.
    pub fn attention(self, index: usize, projection: &str) -> String {
        let name = match (self, projection) {
            (Self::Gpt2, "qkv") => "attn.c_attn".to_owned(),
            (Self::Gpt2, "o") => "attn.c_proj".to_owned(),
            (Self::Gpt2, other) => format!("attn.{other}_proj"),
            (Self::Llama, other) => format!("self_attn.{other}_proj"),
        };
        self.layer(index, &name)
    }

    /// A projection of the feed-forward block: `gate`, `up` or `down`.
    pub fn mlp(self, index: usize, projection: &str) -> String {
        let name = match (self, projection) {
            (Self::Gpt2, "up") => "mlp.c_fc".to_owned(),
            (Self::Gpt2, "down") => "mlp.c_proj".to_owned(),
            (Self::Gpt2, _) => "mlp.c_gate".to_owned(),
            (Self::Llama, other) => format!("mlp.{other}_proj"),
        };
        self.layer(index, &name)
    }
}
