//! The model that a row trained: from its columns, and from the model's own card where columns are
//! empty.

use super::row::{Reason, Row, required};
use models::model::{
    self, ExpertChoice, ExpertTensors, ModelSpec, Moe, Positions, Router, RouterLosses,
};

/// Part of a model's name (in any case), and the shipped model whose card applies; the first match
/// counts.
const CARDS: [(&str, &str); 18] = [
    ("deepseek v3", "deepseek_v3"),
    ("deepseekv3", "deepseek_v3"),
    ("qwen3_235b", "qwen3_235b_a22b"),
    ("qwen3-235b", "qwen3_235b_a22b"),
    ("qwen3_30b", "qwen3_30b_a3b"),
    ("gpt oss 120b", "gpt_oss_120b"),
    ("grok1", "grok1"),
    ("mixtral", "mixtral_8x7b"),
    ("llama4", "llama4_maverick"),
    ("nemotron", "nemotron4_15b"),
    ("llama2", "llama2_70b"),
    ("llama3", "llama70b"),
    ("llama", "llama70b"),
    ("internlm", "llama2_7b"),
    ("mpt", "mpt_7b"),
    ("deepseekv2", "deepseek_v2"),
    ("deepseek-v2", "deepseek_v2"),
    ("deepseek", "deepseek_v3"),
];
/// The card for all other models: a GPT.
const OTHERS: &str = "gpt3_175b";

/// Software whose runs all had separate input and output embeddings, as the authors of Vocabulary
/// Parallelism state (section 6.1).
const UNTIED: [&str; 2] = ["sail-megatron-2024", "sail-megatron-artifact"];

/// The model.
///
/// # Errors
/// A required column is empty, or the model's card is not shipped.
pub fn model(row: &Row) -> Result<ModelSpec, Reason> {
    let mut spec = card(row)?;
    let own_width = spec.attention.mla.is_some() || spec.moe.is_some();
    spec.moe = experts(row, &spec)?;
    spec.name.clone_from(&row.model_name);
    spec.layers = required(row.layers, "layers")? as usize;
    spec.hidden = required(row.hidden, "hidden")?;
    spec.seq_len = required(row.seq_len, "seq_len")?;
    spec.global_batch = required(row.global_batch, "global_batch")?;
    spec.vocab = row.vocab.unwrap_or(spec.vocab);
    spec.attention.heads = required(row.heads, "heads")?;
    spec.attention.kv_heads = row.kv_heads.unwrap_or(spec.attention.heads);
    if !own_width {
        spec.attention.head_dim = spec.hidden / spec.attention.heads;
    }
    if let Positions::Learned { max } = &mut spec.positions {
        *max = spec.seq_len;
    }
    spec.mlp.ffn = row.ffn_hidden.unwrap_or(4 * spec.hidden);
    if UNTIED.iter().any(|name| row.software.starts_with(name)) {
        spec.tied_embeddings = false;
    }
    Ok(spec)
}

/// The architecture of a row's model: the shipped model whose card applies to it, whatever its
/// size.
pub fn architecture(row: &Row) -> &'static str {
    let name = row.model_name.to_lowercase();
    CARDS.iter().find(|(part, _)| name.contains(part)).map_or(OTHERS, |card| card.1)
}

fn card(row: &Row) -> Result<ModelSpec, Reason> {
    let card = architecture(row);
    let shipped = model::shipped(card).ok_or_else(|| format!("model {card} is not shipped"))?;
    shipped.map_err(|error| error.to_string())
}

fn experts(row: &Row, card: &ModelSpec) -> Result<Option<Moe>, Reason> {
    let Some(experts) = row.n_experts.filter(|&experts| experts > 1) else { return Ok(None) };
    let own = card.moe.clone().unwrap_or(Moe {
        experts,
        top_k: 1,
        ffn: card.mlp.ffn,
        shared_ffn: 0,
        first_dense: 0,
        every: 1,
        capacity_factor: None,
        imbalance: 1.0,
        router: Router::Softmax,
        choice: ExpertChoice::default(),
        tensors: ExpertTensors::default(),
        aux_loss: 0.0,
        losses: RouterLosses::default(),
        bias_update_rate: 0.0,
        biased: false,
    });
    let top_k = required(row.top_k, "top_k")?;
    let ffn = row.moe_ffn_hidden.or(row.ffn_hidden).unwrap_or(own.ffn);
    let first_dense = first_dense(&own, row.layers, card.layers);
    Ok(Some(Moe { experts, top_k, ffn, first_dense, ..own }))
}

/// Dense layers in front of a model that was cut down to fewer layers: the same share, and at least
/// one if the card has any.
fn first_dense(card: &Moe, layers: Option<u64>, card_layers: usize) -> usize {
    let layers = layers.map_or(card_layers, |layers| layers as usize).min(card_layers);
    (card.first_dense * layers).div_ceil(card_layers)
}
