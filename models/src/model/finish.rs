//! Turns a model as written into a [`ModelSpec`]: the only place for defaults and checks.

use serde_yaml::{Location, Spanned};

use super::params;
use super::raw::{Maybe, RawMla, RawModel, RawMoe, RawPositions, RawWindow, RawYarn};
use super::spec::{
    Activation, Attention, AuxOver, ExpertChoice, Gelu, MAX_IMBALANCE, MIN_BIAS_UPDATE_RATE, Mla,
    Mlp, ModelSpec, Moe, Norm, NormKind, Numerics, Positions, Router, RouterLosses, Window, Yarn,
};
use crate::input::{InputError, Source};
use crate::text::{VALID_NAME, figure, name_fault};

// Limits far above every known model, and small enough that no count below overflows 64 bits. The
// deepest published transformer has 1,000 layers (DeepNet, arXiv 2203.00555).
const MAX_LAYERS: u64 = 1000;
const MAX_WIDTH: u64 = 1_000_000;
const MAX_FFN: u64 = 10_000_000;
const MAX_HEADS: u64 = 100_000;
const MAX_EXPERTS: u64 = 100_000;
const MAX_VOCAB: u64 = 100_000_000;
const MAX_SEQUENCE: u64 = 1_000_000_000;
/// As many micro-batches as a schedule can have.
const MAX_BATCH: u64 = 1 << 24;
const MAX_PARAMETERS: u128 = 1_000_000_000_000_000_000;

/// Tokens an iteration where neither the file nor the user says: 4 Mi.
const DEFAULT_BATCH_TOKENS: u64 = 4 << 20;

/// Default sequences an iteration: the power of two that comes nearest to 4 Mi tokens, at least 1.
/// `seq_len` in tokens.
pub fn default_global_batch(seq_len: u64) -> u64 {
    let sequences = DEFAULT_BATCH_TOKENS / seq_len.max(1);
    let below = if sequences == 0 { 1 } else { 1 << sequences.ilog2() };
    let distance = |batch: u64| batch.saturating_mul(seq_len.max(1)).abs_diff(DEFAULT_BATCH_TOKENS);
    if distance(2 * below) < distance(below) { 2 * below } else { below }
}

/// Prefix of the assumptions that [`ModelSpec::with_run`] lifts.
const SEQUENCE_ASSUMED: &str = "sequence length";
const BATCH_ASSUMED: &str = "global batch";

impl ModelSpec {
    /// The model with the user's sequence length (tokens) and global batch (sequences) in place of
    /// its file's. Values that the user gives are no longer assumptions; an assumed batch follows
    /// the sequence length.
    ///
    /// # Errors
    /// Zero or absurd values, and more tokens than there are learned positions.
    pub fn with_run(
        self,
        seq_len: Option<u64>,
        global_batch: Option<u64>,
    ) -> Result<Self, InputError> {
        let spec = match seq_len {
            Some(tokens) => self.with_seq_len(tokens)?,
            None => self,
        };
        match global_batch {
            Some(sequences) => spec.with_global_batch(sequences),
            None => Ok(spec),
        }
    }

    fn with_seq_len(mut self, tokens: u64) -> Result<Self, InputError> {
        let most = match self.positions {
            Positions::Learned { max } => max,
            Positions::Rope => MAX_SEQUENCE,
        };
        self.seq_len = flag("--seq-len", tokens, most).map_err(|error| match self.positions {
            Positions::Learned { max } if tokens > max => {
                error.help(format!("valid: 1 to {max}, as many as the model has learned positions"))
            }
            _ => error,
        })?;
        self.lift(SEQUENCE_ASSUMED);
        if self.lift(BATCH_ASSUMED) {
            self.global_batch = assume_batch(tokens, &mut self.assumptions);
        }
        Ok(self)
    }

    fn with_global_batch(mut self, sequences: u64) -> Result<Self, InputError> {
        self.global_batch = flag("--global-batch", sequences, MAX_BATCH)?;
        self.lift(BATCH_ASSUMED);
        Ok(self)
    }

    /// Drops an assumption; says whether it was there.
    fn lift(&mut self, assumed: &str) -> bool {
        let before = self.assumptions.len();
        self.assumptions.retain(|said| !said.starts_with(assumed));
        self.assumptions.len() < before
    }
}

/// A value from the command line, within 1 and `most`.
fn flag(name: &str, value: u64, most: u64) -> Result<u64, InputError> {
    let refused = || InputError::new(format!("{name} cannot be {value}"));
    let valid = (1..=most).contains(&value);
    valid.then_some(value).ok_or_else(|| refused().help(format!("valid: 1 to {most}")))
}

/// Checks a raw model and fills in what it leaves out.
///
/// # Errors
/// The first value that cannot be, at its place, with what would be valid.
pub(super) fn finish(source: &Source, mut raw: RawModel) -> Result<ModelSpec, InputError> {
    let check = Checker { source };
    let layers = check.count("layers", &raw.layers, MAX_LAYERS)?;
    let hidden = check.count("hidden", &raw.hidden, MAX_WIDTH)?;
    let mut assumptions = std::mem::take(&mut raw.assumptions);
    let seq_len = sequence(&check, &raw, &mut assumptions)?;
    let attention = attention(&check, &raw, hidden)?;
    let spec = ModelSpec {
        name: check.name(raw.name.as_ref())?,
        layers: layers as usize,
        hidden,
        vocab: check.count("vocab", &raw.vocab, MAX_VOCAB)?,
        seq_len,
        global_batch: batch(&check, raw.global_batch.as_ref(), seq_len, &mut assumptions)?,
        assumptions,
        numerics: numerics(&check, &raw, &attention)?,
        attention,
        mlp: mlp(&check, &raw)?,
        moe: raw.moe.as_ref().map(|moe| mixture(&check, moe, &raw.ffn, layers)).transpose()?,
        norm: norm(&check, &raw)?,
        positions: positions(&check, &raw, seq_len)?,
        tied_embeddings: or(&raw.tied_embeddings, false),
        final_soft_cap: check.cap("final_soft_cap", &raw.final_soft_cap)?,
        dropout: check.real(
            "dropout",
            &raw.dropout,
            0.0,
            |p| (0.0..1.0).contains(&p),
            "valid: 0 up to, not including, 1",
        )?,
    };
    check.total(&raw.layers, spec)
}

/// Sequence length, tokens: as given, else as many as there are positions.
fn sequence(
    check: &Checker<'_>,
    raw: &RawModel,
    assumptions: &mut Vec<String>,
) -> Result<u64, InputError> {
    if let Some(given) = &raw.seq_len {
        return check.count("seq_len", given, MAX_SEQUENCE);
    }
    let Some(positions) = &raw.max_positions else {
        return Err(check
            .error(&raw.layers, "missing `seq_len`: the file gives neither it nor `max_positions`")
            .help("add `seq_len: ...`, tokens, for example 4096"));
    };
    let seq_len = check.count("max_positions", positions, MAX_SEQUENCE)?;
    let key = check.key("max_positions", positions);
    assumptions.push(format!(
        "{SEQUENCE_ASSUMED} {seq_len} tokens, from {key}: the model file gives none"
    ));
    Ok(seq_len)
}

/// Global batch, sequences.
fn batch(
    check: &Checker<'_>,
    given: Option<&Spanned<u64>>,
    seq_len: u64,
    assumptions: &mut Vec<String>,
) -> Result<u64, InputError> {
    if let Some(given) = given {
        return check.count("global_batch", given, MAX_BATCH);
    }
    Ok(assume_batch(seq_len, assumptions))
}

/// The default batch, recorded as an assumption.
fn assume_batch(seq_len: u64, assumptions: &mut Vec<String>) -> u64 {
    let sequences = default_global_batch(seq_len);
    let tokens = sequences * seq_len;
    assumptions.push(format!(
        "{BATCH_ASSUMED} {sequences} sequences, {tokens} tokens, nearest to 4M: the model file gives none"
    ));
    sequences
}

fn attention(check: &Checker<'_>, raw: &RawModel, hidden: u64) -> Result<Attention, InputError> {
    let heads = check.count("heads", &raw.heads, MAX_HEADS)?;
    let mla = raw.mla.as_ref().map(|mla| latent(check, mla)).transpose()?;
    let bias = or(&raw.bias, false);
    let head_dim = head_dim(check, raw, hidden, heads)?;
    let attention = Attention {
        heads,
        kv_heads: kv_heads(check, raw, heads)?,
        head_dim,
        rotary_dim: rotary_dim(check, raw, head_dim)?,
        mla,
        qkv_bias: or(&raw.qkv_bias, bias),
        out_bias: or(&raw.out_bias, bias),
        qk_norm: or(&raw.qk_norm, false),
        sinks: or(&raw.sinks, false),
        soft_cap: check.cap("attention_soft_cap", &raw.attention_soft_cap)?,
        window: raw.window.as_ref().map(|window| windowed(check, window)).transpose()?,
    };
    rotates_pairs(check, raw, &attention)?;
    Ok(attention)
}

/// Key/value heads: a divisor of the query heads, and with MLA equal to them.
fn kv_heads(check: &Checker<'_>, raw: &RawModel, heads: u64) -> Result<u64, InputError> {
    let Some(given) = &raw.kv_heads else { return Ok(heads) };
    let kv_heads = check.count("kv_heads", given, MAX_HEADS)?;
    let names = (check.key("kv_heads", given), check.key("heads", &raw.heads));
    let message = format!("{} ({kv_heads}) does not divide {} ({heads})", names.0, names.1);
    if raw.mla.is_some() && kv_heads != heads {
        return Err(check
            .error(given, message)
            .help(format!("valid with mla: {heads}, or leave it out")));
    }
    if !heads.is_multiple_of(kv_heads) {
        return Err(check.error(given, message).help(format!("valid: {}", divisors(heads))));
    }
    Ok(kv_heads)
}

/// Width of a head: as given, else the hidden size shared out.
fn head_dim(
    check: &Checker<'_>,
    raw: &RawModel,
    hidden: u64,
    heads: u64,
) -> Result<u64, InputError> {
    if let Some(given) = &raw.head_dim {
        return check.count("head_dim", given, MAX_WIDTH);
    }
    if !hidden.is_multiple_of(heads) {
        let names = (check.key("heads", &raw.heads), check.key("hidden", &raw.hidden));
        let message = format!("{} ({heads}) does not divide {} ({hidden})", names.0, names.1);
        return Err(check
            .error(&raw.heads, message)
            .help(format!("valid: {}; or give head_dim", divisors(hidden))));
    }
    Ok(hidden / heads)
}

/// Rotated columns of a head, unless they are all.
fn rotary_dim(
    check: &Checker<'_>,
    raw: &RawModel,
    head_dim: u64,
) -> Result<Option<u64>, InputError> {
    let Some(given) = &raw.rotary_dim else { return Ok(None) };
    let refused = |valid: &str| Err(check.refuse("rotary_dim", given, valid));
    if raw.mla.is_some() {
        return refused("valid with mla: leave it out; mla's `rope_dim` is what is rotated");
    }
    if or(&raw.positions, RawPositions::Rope) != RawPositions::Rope {
        return refused("valid with positions: rope");
    }
    match given.value {
        0 => refused("valid: 2 or more; without rotation, positions: learned"),
        width if width % 2 != 0 || width > head_dim => {
            refused(&format!("valid: an even number up to {head_dim}, the width of a head"))
        }
        width => Ok((width < head_dim).then_some(width)),
    }
}

/// RoPE turns pairs of elements, so the width it works on is even.
fn rotates_pairs(
    check: &Checker<'_>,
    raw: &RawModel,
    attention: &Attention,
) -> Result<(), InputError> {
    let rope = or(&raw.positions, RawPositions::Rope) == RawPositions::Rope;
    let (width, at, name) = match (&raw.mla, &raw.head_dim) {
        (Some(mla), _) => (mla.rope_dim.value, &mla.rope_dim, "mla.rope_dim"),
        (None, Some(given)) => (attention.head_dim, given, "head_dim"),
        (None, None) => (attention.head_dim, &raw.heads, "heads"),
    };
    if rope && attention.rotary_dim.is_none() && width % 2 != 0 {
        let message =
            format!("{} makes rotary heads {width} wide, an odd number", check.key(name, at));
        return Err(check.error(at, message).help("valid: an even width, or positions: learned"));
    }
    Ok(())
}

fn latent(check: &Checker<'_>, raw: &RawMla) -> Result<Mla, InputError> {
    let q_rank = raw.q_rank.as_ref().map(|rank| check.count("q_rank", rank, MAX_WIDTH));
    Ok(Mla {
        q_rank: q_rank.transpose()?,
        kv_rank: check.count("kv_rank", &raw.kv_rank, MAX_WIDTH)?,
        rope_dim: check.count("rope_dim", &raw.rope_dim, MAX_WIDTH)?,
        value_dim: check.count("value_dim", &raw.value_dim, MAX_WIDTH)?,
    })
}

fn windowed(check: &Checker<'_>, raw: &RawWindow) -> Result<Window, InputError> {
    let every =
        raw.full_every.as_ref().map(|every| check.within("full_every", every, 2, MAX_LAYERS));
    Ok(Window {
        tokens: check.count("tokens", &raw.tokens, MAX_SEQUENCE)?,
        full_every: every.transpose()?,
    })
}

fn mlp(check: &Checker<'_>, raw: &RawModel) -> Result<Mlp, InputError> {
    Ok(Mlp {
        ffn: check.count("ffn", &raw.ffn, MAX_FFN)?,
        activation: or(&raw.activation, Activation::Swiglu),
        bias: or(&raw.mlp_bias, or(&raw.bias, false)),
    })
}

fn mixture(
    check: &Checker<'_>,
    raw: &RawMoe,
    dense_ffn: &Spanned<u64>,
    layers: u64,
) -> Result<Moe, InputError> {
    let experts = check.count("experts", &raw.experts, MAX_EXPERTS)?;
    let first_dense = check.optional("first_dense", &raw.first_dense, 0, (0, layers))?;
    let above_zero = |x: f64| x > 0.0 && x <= 1e6;
    let not_negative = |x: f64| (0.0..=1e6).contains(&x);
    let factor = raw.capacity_factor.as_ref();
    let factor = factor.map(|x| {
        check.number(
            "capacity_factor",
            x,
            above_zero,
            "valid: above 0, for example 1.25; leave out for dropless",
        )
    });
    Ok(Moe {
        experts,
        top_k: check.top_k(&raw.top_k, experts)?,
        ffn: check.count("ffn", raw.ffn.as_ref().unwrap_or(dense_ffn), MAX_FFN)?,
        shared_ffn: check.optional("shared_ffn", &raw.shared_ffn, 0, (0, MAX_FFN))?,
        first_dense: first_dense as usize,
        every: check.optional("every", &raw.every, 1, (1, layers))? as usize,
        capacity_factor: factor.transpose()?,
        imbalance: check.real(
            "imbalance",
            &raw.imbalance,
            1.0,
            |x| (1.0..=MAX_IMBALANCE).contains(&x),
            "valid: 1 to 1000, the fullest rank's tokens over the mean, for example 1.3",
        )?,
        router: or(&raw.router, Router::Softmax),
        choice: expert_choice(check, raw, experts)?,
        tensors: raw.tensors,
        biased: or(&raw.biased, false),
        losses: router_losses(check, raw)?,
        bias_update_rate: bias_update_rate(check, raw)?,
        aux_loss: check.real(
            "aux_loss",
            &raw.aux_loss,
            0.0,
            not_negative,
            "valid: 0 or more, for example 0.01",
        )?,
    })
}

fn router_losses(check: &Checker<'_>, raw: &RawMoe) -> Result<RouterLosses, InputError> {
    let over = or(&raw.aux_over, AuxOver::EachLayer);
    let not_negative = |x: f64| (0.0..=1e6).contains(&x);
    let help = "valid: 0 or more, for example 0.001";
    let z_loss = check.real("z_loss", &raw.z_loss, 0.0, not_negative, help)?;
    match &raw.z_loss {
        Some(given) if z_loss > 0.0 && or(&raw.router, Router::Softmax) == Router::SigmoidBias => {
            Err(check.refuse(
                "z_loss",
                given,
                "valid: 0 with `router: sigmoid_bias`, whose scores have no log-sum-exp",
            ))
        }
        _ => Ok(RouterLosses { over, z_loss }),
    }
}

fn bias_update_rate(check: &Checker<'_>, raw: &RawMoe) -> Result<f64, InputError> {
    let given = &raw.bias_update_rate;
    let moves = |x: f64| x == 0.0 || (MIN_BIAS_UPDATE_RATE..=1e6).contains(&x);
    let help = "valid: 0 for never, or 0.000001 or more, for example 0.001";
    let rate = check.real("bias_update_rate", given, 0.0, moves, help)?;
    match given {
        Some(given) if rate > 0.0 && or(&raw.router, Router::Softmax) == Router::Softmax => {
            Err(check.refuse(
                "bias_update_rate",
                given,
                "valid: 0 with `router: softmax`, which has no selection bias",
            ))
        }
        _ => Ok(rate),
    }
}

fn expert_choice(
    check: &Checker<'_>,
    raw: &RawMoe,
    experts: u64,
) -> Result<ExpertChoice, InputError> {
    let groups = check.optional("groups", &raw.groups, 1, (1, experts))?;
    let kept_groups = check.optional("kept_groups", &raw.kept_groups, groups, (1, groups))?;
    if let Some(given) = raw.groups.as_ref().filter(|_| !experts.is_multiple_of(groups)) {
        let valid = format!("valid: a divisor of the {experts} experts");
        return Err(check.refuse("groups", given, &valid));
    }
    Ok(ExpertChoice {
        renormalised: or(&raw.renormalised, true),
        groups,
        kept_groups,
        scale: check.real(
            "weight_scale",
            &raw.weight_scale,
            1.0,
            |x| x > 0.0 && x <= 1e6,
            "valid: above 0, for example 2.5",
        )?,
    })
}

fn norm(check: &Checker<'_>, raw: &RawModel) -> Result<Norm, InputError> {
    let per_layer = check.optional("norms_per_layer", &raw.norms_per_layer, 2, (2, 4))?;
    match (&raw.norms_per_layer, per_layer) {
        (Some(given), 3) => Err(check.refuse(
            "norms_per_layer",
            given,
            "valid: 2, or 4 with norms after attention and MLP too",
        )),
        _ => Ok(Norm { kind: or(&raw.norm, NormKind::RmsNorm), per_layer }),
    }
}

/// Positions; a learned table holds at least a sequence.
fn positions(check: &Checker<'_>, raw: &RawModel, seq_len: u64) -> Result<Positions, InputError> {
    if or(&raw.positions, RawPositions::Rope) == RawPositions::Rope {
        return Ok(Positions::Rope);
    }
    let max = check.optional("max_positions", &raw.max_positions, seq_len, (1, MAX_SEQUENCE))?;
    match &raw.seq_len {
        Some(given) if seq_len > max => Err(check.refuse(
            "seq_len",
            given,
            &format!("valid: 1 to {max}, the learned positions"),
        )),
        _ => Ok(Positions::Learned { max }),
    }
}

/// Constants of the model's formulas; defaults are those of most models.
fn numerics(
    check: &Checker<'_>,
    raw: &RawModel,
    attention: &Attention,
) -> Result<Numerics, InputError> {
    let small = |x: f64| x > 0.0 && x <= 1.0;
    let positive = |x: f64| x > 0.0 && x <= 1e12;
    let head = attention.head_dim + attention.mla.map_or(0, |mla| mla.rope_dim);
    let help = "valid: above 0, for example";
    Ok(Numerics {
        norm_eps: check.real("norm_eps", &raw.norm_eps, 1e-5, small, &format!("{help} 1e-5"))?,
        norm_unit_offset: or(&raw.norm_unit_offset, false),
        rope_theta: check.real(
            "rope_theta",
            &raw.rope_theta,
            10_000.0,
            |x| (1.0..=1e12).contains(&x),
            "valid: 1 or more, for example 10000",
        )?,
        yarn: raw.yarn.as_ref().map(|yarn| stretched(check, raw, yarn)).transpose()?,
        query_pre_attn_scalar: check.real(
            "query_pre_attn_scalar",
            &raw.query_pre_attn_scalar,
            head as f64,
            positive,
            &format!("{help} {head}, the width of a head"),
        )?,
        embedding_scale: check.real(
            "embedding_scale",
            &raw.embedding_scale,
            1.0,
            positive,
            &format!("{help} 1"),
        )?,
        gelu: or(&raw.gelu, Gelu::Tanh),
        unknown: raw.unknown.clone(),
    })
}

fn stretched(check: &Checker<'_>, model: &RawModel, raw: &RawYarn) -> Result<Yarn, InputError> {
    let rope = or(&model.positions, RawPositions::Rope) == RawPositions::Rope;
    if !rope || model.rope_theta.as_ref().is_some_and(|theta| theta.value <= 1.0) {
        let message = "`yarn` stretches frequencies that this model does not have";
        return Err(check
            .error(&raw.factor, message)
            .help("valid with positions: rope and a rope_theta above 1"));
    }
    let from_one = |x: f64| (1.0..=1e6).contains(&x);
    let positive = |x: f64| x > 0.0 && x <= 1e6;
    let help = "valid: 1 or more, for example 32";
    let beta = |name, given, default, help| check.real(name, given, default, positive, help);
    let yarn = Yarn {
        factor: check.number("factor", &raw.factor, from_one, help)?,
        original_positions: check.count(
            "original_positions",
            &raw.original_positions,
            MAX_SEQUENCE,
        )?,
        beta_fast: beta("beta_fast", &raw.beta_fast, 32.0, "valid: above 0, for example 32")?,
        beta_slow: beta("beta_slow", &raw.beta_slow, 1.0, "valid: above 0, for example 1")?,
        truncate: or(&raw.truncate, true),
    };
    match (&raw.beta_slow, &raw.beta_fast) {
        _ if yarn.beta_slow < yarn.beta_fast => Ok(yarn),
        (Some(given), _) => {
            Err(check.refuse("beta_slow", given, &format!("valid: below {}", yarn.beta_fast)))
        }
        (None, Some(given)) => Err(check.refuse("beta_fast", given, "valid: above 1, beta_slow")),
        (None, None) => Ok(yarn),
    }
}

/// A value, or its default.
fn or<T: Copy>(value: &Maybe<T>, default: T) -> T {
    value.as_ref().map_or(default, |value| value.value)
}

/// The divisors of `n` in words, the first sixteen.
fn divisors(n: u64) -> String {
    let mut all = (1..=n).filter(|d| n.is_multiple_of(*d)).map(|d| d.to_string());
    let shown: Vec<String> = all.by_ref().take(16).collect();
    let more = if all.next().is_some() { ", ..." } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// Reads values of a raw model and reports invalid ones at their place.
struct Checker<'a> {
    source: &'a Source,
}

impl Checker<'_> {
    fn error<T>(&self, value: &Spanned<T>, message: impl Into<String>) -> InputError {
        self.source.error_at(value.referenced, message)
    }

    /// The key of a value as the file has it, which in a Hugging Face file differs from ours.
    fn key<T>(&self, name: &str, value: &Spanned<T>) -> String {
        let known = value.referenced != Location::UNKNOWN;
        let written = known.then(|| self.source.key_at(value.referenced)).flatten();
        format!("`{}`", written.unwrap_or(name))
    }

    fn refuse<T: std::fmt::Display>(
        &self,
        name: &str,
        value: &Spanned<T>,
        help: &str,
    ) -> InputError {
        let message = format!("{} cannot be {}", self.key(name, value), value.value);
        self.error(value, message).help(help)
    }

    fn within(
        &self,
        name: &str,
        value: &Spanned<u64>,
        least: u64,
        most: u64,
    ) -> Result<u64, InputError> {
        if (least..=most).contains(&value.value) {
            return Ok(value.value);
        }
        Err(self.refuse(name, value, &format!("valid: {least} to {most}")))
    }

    fn count(&self, name: &str, value: &Spanned<u64>, most: u64) -> Result<u64, InputError> {
        self.within(name, value, 1, most)
    }

    fn optional(
        &self,
        name: &str,
        value: &Maybe<u64>,
        default: u64,
        range: (u64, u64),
    ) -> Result<u64, InputError> {
        value.as_ref().map_or(Ok(default), |value| self.within(name, value, range.0, range.1))
    }

    fn number(
        &self,
        name: &str,
        value: &Spanned<f64>,
        valid: impl Fn(f64) -> bool,
        help: &str,
    ) -> Result<f64, InputError> {
        if valid(value.value) {
            return Ok(value.value);
        }
        let number = value.value;
        let found = if number.abs() < 1e15 { number.to_string() } else { figure(number) };
        let message = format!("{} cannot be {found}", self.key(name, value));
        Err(self.error(value, message).help(help))
    }

    fn real(
        &self,
        name: &str,
        value: &Maybe<f64>,
        default: f64,
        valid: impl Fn(f64) -> bool,
        help: &str,
    ) -> Result<f64, InputError> {
        value.as_ref().map_or(Ok(default), |value| self.number(name, value, valid, help))
    }

    fn cap(&self, name: &str, value: &Maybe<f64>) -> Result<Option<f64>, InputError> {
        let valid = |cap: f64| cap > 0.0 && cap <= 1e9;
        let cap = value.as_ref().map(|cap| {
            self.number(name, cap, valid, "valid: above 0, for example 50; leave out for none")
        });
        cap.transpose()
    }

    fn top_k(&self, value: &Spanned<u64>, experts: u64) -> Result<u64, InputError> {
        let top_k = self.count("top_k", value, MAX_EXPERTS)?;
        if top_k > experts {
            let message = format!(
                "{} ({top_k}) is more than the {experts} experts there are",
                self.key("top_k", value)
            );
            return Err(self.error(value, message).help(format!("valid: 1 to {experts}")));
        }
        Ok(top_k)
    }

    /// The name as given, else from the file's name.
    fn name(&self, given: Option<&Spanned<String>>) -> Result<String, InputError> {
        let Some(given) = given else {
            let name = name_of_file(self.source.name());
            let Some(fault) = name_fault(&name) else { return Ok(name) };
            let message = format!("{}: its name, as the model's, {fault}", self.source.name());
            return Err(InputError::new(message).help("add `name: ...` to it, or rename the file"));
        };
        let name = given.value.trim();
        let Some(fault) = name_fault(name) else { return Ok(name.to_owned()) };
        let message = format!("{} {fault}", self.key("name", given));
        Err(self.error(given, message).help(format!("valid: {VALID_NAME}")))
    }

    /// Refuses a model of more than 10^18 parameters, so that no later sum can overflow.
    fn total(&self, layers: &Spanned<u64>, spec: ModelSpec) -> Result<ModelSpec, InputError> {
        let largest = params::largest_layer(&spec);
        if u128::from(largest) * u128::from(layers.value) > MAX_PARAMETERS {
            let message = format!(
                "{} ({}) of {largest} parameters each are more than 10^18",
                self.key("layers", layers),
                layers.value
            );
            return Err(self.error(layers, message).help("valid: fewer or narrower layers"));
        }
        Ok(spec)
    }
}

/// `dir/llama70b.yaml` is `llama70b`; `Llama-3/config.json` is `Llama-3`.
fn name_of_file(path: &str) -> String {
    let path = std::path::Path::new(path);
    let stem =
        |path: &std::path::Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let parent = path
        .parent()
        .and_then(|parent| parent.file_name())
        .map(|name| name.to_string_lossy().into_owned());
    let name =
        if path.ends_with("config.json") { parent.or_else(|| stem(path)) } else { stem(path) };
    name.unwrap_or_else(|| "model".to_owned())
}
