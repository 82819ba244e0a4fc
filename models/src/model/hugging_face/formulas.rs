//! Activations and dropout, and changes to the formulas that a spec cannot express.

use serde_yaml::Spanned;

use super::{Reader, implied, unplaced};
use crate::input::InputError;
use crate::model::raw::Maybe;
use crate::model::spec::{Activation, Gelu};

impl Reader<'_> {
    pub(super) fn gated_activation(&self) -> Result<Spanned<Activation>, InputError> {
        let Some(given) = self.activation() else {
            let gelu = self.is("gemma") || self.is("gemma2");
            let default = if gelu { Activation::Geglu } else { Activation::Swiglu };
            return Ok(unplaced(default));
        };
        let activation = match given.value.as_str() {
            "silu" | "swish" => Activation::Swiglu,
            "gelu" | "gelu_new" | "gelu_pytorch_tanh" => Activation::Geglu,
            _ => return Err(self.bad_activation(given, "silu, gelu, gelu_new, gelu_pytorch_tanh")),
        };
        Ok(Spanned::new(activation, given.referenced, given.defined))
    }

    pub(super) fn plain_activation(&self) -> Result<Spanned<Activation>, InputError> {
        let Some(given) = self.activation() else { return Ok(unplaced(Activation::Gelu)) };
        let activation = match given.value.as_str() {
            "gelu" | "gelu_new" | "gelu_pytorch_tanh" => Activation::Gelu,
            "relu" => Activation::Relu,
            "relu2" => Activation::SquaredRelu,
            _ => {
                return Err(
                    self.bad_activation(given, "gelu, gelu_new, gelu_pytorch_tanh, relu, relu2")
                );
            }
        };
        Ok(Spanned::new(activation, given.referenced, given.defined))
    }

    /// `gelu` is the exact form, the other names are the tanh form.
    pub(super) fn gelu(&self) -> Gelu {
        let exact = self.activation().is_some_and(|given| given.value == "gelu");
        if exact { Gelu::Erf } else { Gelu::Tanh }
    }

    fn activation(&self) -> Option<&Spanned<String>> {
        let config = self.config;
        match config.model_type.value.as_str() {
            "gemma2" => config.hidden_activation.as_ref(),
            "gpt2" => config.activation_function.as_ref(),
            _ => config.hidden_act.as_ref(),
        }
    }

    pub(super) fn bad_activation(&self, given: &Spanned<String>, valid: &str) -> InputError {
        let key = self.source.key_at(given.referenced).unwrap_or("hidden_act");
        self.error(given, format!("`{key}` cannot be this")).help(format!("valid: {valid}"))
    }

    /// Refuses dropout on attention alone, which a spec cannot express.
    pub(super) fn no_attention_dropout(&self) -> Result<(), InputError> {
        let given = self.config.attention_dropout.as_ref();
        given.filter(|dropout| dropout.value != 0.0).map_or(Ok(()), |dropout| {
            let message = format!("`attention_dropout` cannot be {}", dropout.value);
            Err(self
                .error(dropout, message)
                .help("valid: 0; dropout on attention alone is not supported"))
        })
    }

    /// The three probabilities of residuals, embeddings and attention as the one that a spec has.
    pub(super) fn same_dropout(
        &self,
        all: [(&str, &Maybe<f64>); 3],
        default: f64,
    ) -> Result<Maybe<f64>, InputError> {
        let values = all.map(|(_, given)| given.as_ref().map_or(default, |given| given.value));
        let differs = values.iter().any(|value| *value != values[0]);
        match all.iter().find_map(|(_, given)| given.as_ref()) {
            Some(given) if differs => {
                let [first, second, third] = all.map(|(key, _)| key);
                let message = format!("`{first}`, `{second}` and `{third}` differ");
                Err(self.error(given, message).help(format!(
                    "valid: the same probability three times ({default} where left out)"
                )))
            }
            given => Ok(given.cloned().or_else(|| implied(default))),
        }
    }

    /// Changes to the formulas that the configuration asks for and a spec cannot express.
    pub(super) fn unknown(&self) -> Vec<String> {
        let config = self.config;
        let is = |flag: &Maybe<bool>, value: bool| flag.as_ref().is_some_and(|f| f.value == value);
        let is_number =
            |given: &Maybe<f64>, usual: f64| given.as_ref().is_none_or(|x| x.value == usual);
        let rotates_heads = self.rotates_heads();
        let scaling = config.rope_scaling.as_ref().and_then(Option::as_ref);
        let known = [
            (
                "rope_scaling",
                scaling.is_none_or(|scaling| scaling.kind() == Some("default"))
                    || self.yarn().is_some(),
            ),
            ("rope_parameters", config.rope_parameters.is_none()),
            ("rope_interleave: false", !is(&config.rope_interleave, false) || rotates_heads),
            ("rope_interleave: true", !is(&config.rope_interleave, true) || !rotates_heads),
            (
                "partial_rotary_factor",
                is_number(&config.partial_rotary_factor, 1.0) || rotates_heads,
            ),
            ("qk_layernorm", !is(&config.qk_layernorm, true)),
            ("use_bidirectional_attention", !is(&config.use_bidirectional_attention, true)),
            ("use_parallel_residual", !is(&config.use_parallel_residual, true)),
            ("hidden_dropout", is_number(&config.hidden_dropout, 0.0) || self.is("gpt2")),
            ("logits_scaling", is_number(&config.logits_scaling, 1.0) || !self.is("granite")),
            (
                "residual_multiplier",
                is_number(&config.residual_multiplier, 1.0) || !self.is("granite"),
            ),
            ("router_jitter_noise", is_number(&config.router_jitter_noise, 0.0)),
            ("quantization_config", config.quantization_config.is_none()),
            ("add_cross_attention", !is(&config.add_cross_attention, true)),
            ("is_encoder_decoder", !is(&config.is_encoder_decoder, true)),
            ("scale_attn_weights: false", !is(&config.scale_attn_weights, false)),
            ("scale_attn_by_inverse_layer_idx", !is(&config.scale_attn_by_inverse_layer_idx, true)),
        ];
        known.into_iter().filter(|(_, known)| !known).map(|(key, _)| key.to_owned()).collect()
    }
}
