//! Size, work and training time of a GPT model with a feed-forward width of `4h` (SC'21 §5.1).

/// Seconds in a day.
const DAY_S: f64 = 86_400.0;

/// The shape of a GPT model as SC'21 counts it: biases, LayerNorm, learned positions, tied
/// embeddings, feed-forward width `4h`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpt {
    /// Transformer layers `l`.
    pub layers: f64,
    /// Hidden size `h`.
    pub hidden: f64,
    /// Sequence length `s`, tokens.
    pub sequence: f64,
    /// Vocabulary size `V`.
    pub vocab: f64,
}

/// Parameters of the whole model, `12lh²(1 + 13/(12h) + (V+s)/(12lh))` (SC'21 eq. 2).
///
/// Written out as the sum it is, so that the result is a whole number.
pub fn parameters(gpt: &Gpt) -> f64 {
    let Gpt { layers: l, hidden: h, sequence: s, vocab } = *gpt;
    l * (12.0 * h * h + 13.0 * h) + (vocab + s) * h
}

/// FLOPs of one layer's forward pass over `batch` sequences, `24Bsh² + 4Bs²h` (SC'21 appendix).
///
/// Two FLOPs a multiply-add; the attention core is counted in full, with no credit for a causal
/// mask.
pub fn layer_forward_flops(gpt: &Gpt, batch: f64) -> f64 {
    let Gpt { hidden: h, sequence: s, .. } = *gpt;
    batch * s * h * (24.0 * h + 4.0 * s)
}

/// FLOPs of the logit layer, forward and backward, `6BshV` (SC'21 appendix).
pub fn logit_flops(gpt: &Gpt, batch: f64) -> f64 {
    6.0 * batch * gpt.sequence * gpt.hidden * gpt.vocab
}

/// FLOPs of one iteration when every layer is run forward twice,
/// `96Bslh²(1 + s/(6h) + V/(16lh))` (SC'21 eq. 3).
///
/// The logit layer is not run again: it enters three times, the layers four.
pub fn iteration_flops_recompute(gpt: &Gpt, batch: f64) -> f64 {
    4.0 * gpt.layers * layer_forward_flops(gpt, batch) + logit_flops(gpt, batch)
}

/// FLOPs of one iteration that the model itself asks for (nothing run twice),
/// `72Bslh²(1 + s/(6h) + V/(12lh))` (SC'21 eq. 3 less the second forward pass).
pub fn iteration_flops(gpt: &Gpt, batch: f64) -> f64 {
    3.0 * gpt.layers * layer_forward_flops(gpt, batch) + logit_flops(gpt, batch)
}

/// Seconds for `flops` on `gpus` that each achieve `gpu_flops_per_s`.
pub fn compute_s(flops: f64, gpus: f64, gpu_flops_per_s: f64) -> f64 {
    flops / (gpus * gpu_flops_per_s)
}

/// Iterations to see `tokens` at `batch` sequences of `sequence` tokens, `I = T/(Bs)` (SC'21 §5.1).
pub fn iterations(tokens: f64, batch: f64, sequence: f64) -> f64 {
    tokens / (batch * sequence)
}

/// Seconds to train on `tokens`, about `8TP/(nX)` (SC'21 eq. 4): full recompute, attention core and
/// logits left out.
pub fn training_s(tokens: f64, parameters: f64, gpus: f64, gpu_flops_per_s: f64) -> f64 {
    compute_s(8.0 * tokens * parameters, gpus, gpu_flops_per_s)
}

/// [`training_s`] in days (SC'21 eq. 4).
pub fn training_days(tokens: f64, parameters: f64, gpus: f64, gpu_flops_per_s: f64) -> f64 {
    training_s(tokens, parameters, gpus, gpu_flops_per_s) / DAY_S
}

/// Days to train on `tokens` by eq. 3 instead of eq. 4's approximation: one iteration's time, times
/// `T/(Bs)` (SC'21 §5.1; the days of Table 2 come from this).
pub fn training_days_exact(gpt: &Gpt, tokens: f64, gpus: f64, gpu_flops_per_s: f64) -> f64 {
    let one_sequence_s = compute_s(iteration_flops_recompute(gpt, 1.0), gpus, gpu_flops_per_s);
    iterations(tokens, 1.0, gpt.sequence) * one_sequence_s / DAY_S
}

/// Share of peak: FLOPs of one iteration over what `gpus` could do in `iteration_s`.
///
/// With [`iteration_flops`] this is model FLOPs utilisation (MFU); with
/// [`iteration_flops_recompute`] hardware utilisation, which is what SC'21 Table 1 prints.
pub fn utilisation(flops: f64, iteration_s: f64, gpus: f64, peak_flops_per_s: f64) -> f64 {
    flops / (iteration_s * gpus * peak_flops_per_s)
}
