//! Names of tensors in Hugging Face checkpoints.

use models::model::{ExpertTensors, ModelSpec, NormKind, Positions};

/// Tensor names of one family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorNames {
    /// GPT-2's: LayerNorm and learned positions.
    Gpt2,
    /// Llama's, which Mistral, Qwen, Gemma and StableLM share: all others.
    Llama,
}

/// Tensors of latent attention (DeepSeek-V3), without the output projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentNames {
    /// Queries, where no latent vector comes before them.
    pub q: &'static str,
    /// The latent vector of queries.
    pub q_down: &'static str,
    /// Its norm.
    pub q_norm: &'static str,
    /// Queries from it.
    pub q_up: &'static str,
    /// The latent vector of keys and values, and the part of keys that all heads share.
    pub kv_down: &'static str,
    /// The vector's norm.
    pub kv_norm: &'static str,
    /// For each head, its key and its value from that vector.
    pub kv_up: &'static str,
}

impl TensorNames {
    /// The family of a model.
    pub fn of(model: &ModelSpec) -> Self {
        match (model.norm.kind, model.positions) {
            (NormKind::LayerNorm, Positions::Learned { .. }) => Self::Gpt2,
            _ => Self::Llama,
        }
    }

    /// Whether query, key and value projections are one tensor, and matrices are stored
    /// `[in, out]`.
    pub fn is_gpt2(self) -> bool {
        self == Self::Gpt2
    }

    /// What the names of a layer's tensors begin with; the layer's number and a dot follow.
    pub fn layers(self) -> &'static str {
        match self {
            Self::Gpt2 => "transformer.h.",
            Self::Llama => "model.layers.",
        }
    }

    /// Name of a tensor of layer `index`.
    pub fn layer(self, index: usize, tensor: &str) -> String {
        format!("{}{index}.{tensor}", self.layers())
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

    /// Output matrix, unless it is the embedding.
    pub fn output(self) -> &'static str {
        "lm_head.weight"
    }

    /// Norms of a layer: before attention, after it, before the feed-forward block, after it.
    pub fn norms(self, after_blocks: bool) -> [&'static str; 4] {
        match (self, after_blocks) {
            (Self::Gpt2, _) => ["ln_1", "ln_1_post", "ln_2", "ln_2_post"],
            (Self::Llama, false) => ["input_layernorm", "", "post_attention_layernorm", ""],
            (Self::Llama, true) => [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
        }
    }

    /// Projections of attention: query, key, value, output.
    pub fn attention(self) -> [&'static str; 4] {
        match self {
            Self::Gpt2 => ["attn.c_attn", "attn.c_attn", "attn.c_attn", "attn.c_proj"],
            Self::Llama => {
                ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
            }
        }
    }

    /// Tensors of latent attention.
    pub fn latent() -> LatentNames {
        LatentNames {
            q: "self_attn.q_proj",
            q_down: "self_attn.q_a_proj",
            q_norm: "self_attn.q_a_layernorm",
            q_up: "self_attn.q_b_proj",
            kv_down: "self_attn.kv_a_proj_with_mqa",
            kv_norm: "self_attn.kv_a_layernorm",
            kv_up: "self_attn.kv_b_proj",
        }
    }

    /// Norms of the heads of queries and of keys (Qwen 3).
    pub fn head_norms(self) -> [&'static str; 2] {
        ["self_attn.q_norm", "self_attn.k_norm"]
    }

    /// Logits that attention counts beside its keys' (gpt-oss).
    pub fn sinks(self) -> &'static str {
        "self_attn.sinks"
    }

    /// The router of a mixture of experts.
    pub fn router(experts: ExpertTensors) -> &'static str {
        match experts {
            ExpertTensors::Mlp => "mlp.gate",
            ExpertTensors::BlockSparseMoe => "block_sparse_moe.gate",
            ExpertTensors::MlpRouter => "mlp.router",
        }
    }

    /// Projections of an expert: gate, up, down.
    pub fn expert(experts: ExpertTensors) -> [&'static str; 3] {
        match experts {
            ExpertTensors::Mlp | ExpertTensors::MlpRouter => ["gate_proj", "up_proj", "down_proj"],
            ExpertTensors::BlockSparseMoe => ["w1", "w3", "w2"],
        }
    }

    /// What the names of a layer's experts begin with; the expert's number and a dot follow.
    pub fn experts(experts: ExpertTensors) -> &'static str {
        match experts {
            ExpertTensors::Mlp | ExpertTensors::MlpRouter => "mlp.experts.",
            ExpertTensors::BlockSparseMoe => "block_sparse_moe.experts.",
        }
    }

    /// Projections of the shared experts, which are one block: gate, up, down (DeepSeek-V3).
    pub fn shared_expert() -> [&'static str; 3] {
        [
            "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj",
            "mlp.shared_experts.down_proj",
        ]
    }

    /// Projections of the feed-forward block: gate, up, down.
    pub fn mlp(self) -> [&'static str; 3] {
        match self {
            Self::Gpt2 => ["mlp.c_gate", "mlp.c_fc", "mlp.c_proj"],
            Self::Llama => ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        }
    }
}
