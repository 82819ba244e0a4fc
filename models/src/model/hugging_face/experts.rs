//! Experts: how many, where, and how they are chosen.

use serde_yaml::Spanned;

use super::{Reader, implied, unplaced};
use crate::input::InputError;
use crate::model::raw::{Maybe, RawMoe};
use crate::model::spec::{AuxOver, ExpertTensors, Router};

impl Reader<'_> {
    pub(super) fn experts(&self, key: &str, experts: &Maybe<u64>) -> Result<RawMoe, InputError> {
        Ok(RawMoe {
            experts: self.need(key, experts)?,
            top_k: self.experts_of_a_token()?,
            ffn: None,
            shared_ffn: None,
            first_dense: None,
            every: None,
            capacity_factor: None,
            imbalance: None,
            router: implied(Router::Softmax),
            renormalised: self.config.norm_topk_prob.clone(),
            groups: None,
            kept_groups: None,
            weight_scale: None,
            aux_loss: self.aux_loss(),
            aux_over: implied(AuxOver::AllLayers),
            z_loss: None,
            bias_update_rate: None,
            biased: None,
            tensors: ExpertTensors::Mlp,
        })
    }

    fn experts_of_a_token(&self) -> Result<Spanned<u64>, InputError> {
        let renamed = self.config.experts_per_token.as_ref().filter(|_| self.is("gpt_oss"));
        match (&self.config.num_experts_per_tok, renamed) {
            (None, Some(given)) => Ok(given.clone()),
            (Some(usual), Some(given)) if usual.value != given.value => {
                let values = (given.value, usual.value);
                let message = format!(
                    "`experts_per_token` ({}) differs from `num_experts_per_tok` ({})",
                    values.0, values.1
                );
                Err(self.error(given, message).help("valid: the same in both, or one of them"))
            }
            (given, _) => self.need("num_experts_per_tok", given),
        }
    }

    /// The coefficient counts only where router logits are asked for; it is 0.001 by default.
    pub(super) fn aux_loss(&self) -> Maybe<f64> {
        let on = self.config.output_router_logits.as_ref().is_some_and(|on| on.value);
        on.then(|| self.config.router_aux_loss_coef.clone().unwrap_or_else(|| unplaced(0.001)))
    }

    pub(super) fn fine_grained_experts(&self) -> Result<RawMoe, InputError> {
        let config = self.config;
        let ffn = self.need("moe_intermediate_size", &config.moe_intermediate_size)?;
        let shared = config.n_shared_experts.clone().unwrap_or_else(|| implied(1));
        self.constant("moe_layer_freq", &config.moe_layer_freq, 1)?;
        Ok(RawMoe {
            shared_ffn: shared.map(|n| Spanned { value: n.value.saturating_mul(ffn.value), ..n }),
            ffn: Some(ffn),
            first_dense: config.first_k_dense_replace.clone().or_else(|| implied(3)),
            router: implied(Router::SigmoidBias),
            groups: config.n_group.clone().or_else(|| implied(8)),
            kept_groups: config.topk_group.clone().or_else(|| implied(4)),
            weight_scale: config.routed_scaling_factor.clone().or_else(|| implied(2.5)),
            aux_loss: None,
            ..self.experts("n_routed_experts", &config.n_routed_experts)?
        })
    }

    /// Qwen's list of dense layers, which must be the first ones, and in step with
    /// `decoder_sparse_step`: that counts from layer 0, ours from the first sparse layer.
    pub(super) fn leading_dense(&self) -> Result<Maybe<u64>, InputError> {
        let Some(listed) = &self.config.mlp_only_layers else { return Ok(None) };
        let step = self.config.decoder_sparse_step.as_ref().map_or(1, |step| step.value.max(1));
        let count = listed.value.len() as u64;
        let mut sorted = listed.value.clone();
        sorted.sort_unstable();
        if sorted.into_iter().eq(0..count) && count.is_multiple_of(step) {
            return Ok(Some(Spanned::new(count, listed.referenced, listed.defined)));
        }
        Err(self
            .error(listed, "`mlp_only_layers` is not a list of the first layers".to_owned())
            .help(format!("valid: [], or 0, 1, 2, ... without gaps, as many as {step} divides")))
    }
}
