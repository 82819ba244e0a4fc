//! Rotary position embedding: which columns turn, and how their frequencies are scaled.

use serde_yaml::Spanned;

use super::{Reader, implied};
use crate::input::InputError;
use crate::model::raw::{Maybe, RawModel, RawYarn};

impl Reader<'_> {
    /// Rotated columns of a head: of its width the given part, which classes round down.
    pub(super) fn rotary_dim(&self, raw: &RawModel) -> Result<Maybe<u64>, InputError> {
        let default = implied(0.25).filter(|_| self.is("stablelm"));
        let factor = self.config.partial_rotary_factor.clone().or(default);
        let Some(factor) = factor.filter(|_| self.rotates_heads()) else { return Ok(None) };
        let shared_out = || raw.hidden.value.checked_div(raw.heads.value);
        let head_dim = raw.head_dim.as_ref().map(|width| width.value).or_else(shared_out);
        // Without a width of heads the model is refused for that.
        let Some(head_dim) = head_dim else { return Ok(None) };
        let rotated = (head_dim as f64 * factor.value) as u64;
        let is_part = factor.value > 0.0 && factor.value <= 1.0;
        if is_part && rotated > 0 && rotated.is_multiple_of(2) {
            return Ok(Some(Spanned::new(rotated, factor.referenced, factor.defined)));
        }
        let message = format!("`partial_rotary_factor` cannot be {}", factor.value);
        Err(self.error(&factor, message).help(format!(
            "valid: above 0, up to 1, so that an even number of a head's {head_dim} columns turns"
        )))
    }

    /// Whether RoPE turns heads, and not a part beside them, or none.
    pub(super) fn rotates_heads(&self) -> bool {
        !self.is("deepseek_v3") && !self.is("gpt2")
    }

    /// The scaling of RoPE's frequencies, if it is YaRN as in the paper.
    pub(super) fn yarn(&self) -> Option<RawYarn> {
        let scaling = self.config.rope_scaling.as_ref()?.as_ref()?;
        let other = [&scaling.mscale, &scaling.mscale_all_dim, &scaling.attention_factor];
        let plain = other.into_iter().all(Option::is_none);
        let is_yarn = scaling.kind() == Some("yarn");
        let positions = scaling.original_max_position_embeddings.as_ref();
        (plain && is_yarn).then_some(())?;
        Some(RawYarn {
            factor: scaling.factor.clone()?,
            original_positions: positions.or(self.config.max_position_embeddings.as_ref())?.clone(),
            beta_fast: scaling.beta_fast.clone(),
            beta_slow: scaling.beta_slow.clone(),
            truncate: scaling.truncate.clone(),
        })
    }
}
