//! One query at a time with all its scores, in f64.

use super::{Attention, Gradients, ProbabilityDropout, Saved};
use crate::random::philox;
use crate::{Cpu, Output, Real};

/// Computes `out` and `lse` from `q`, `k`, `v`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length, or `kv_heads` does not divide `q_heads`.
pub fn forward<T: Real>(
    _cpu: &Cpu,
    attention: &Attention,
    q: &[T],
    k: &[T],
    v: &[T],
    out: &mut [T],
    lse: &mut [T],
) {
    attention.check(q.len(), k.len(), v.len(), out.len(), lse.len());
    for row in rows(attention) {
        let scores = row.scores(attention, q, k);
        let max = scores.iter().map(|s| s.value).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s.value - max).exp()).sum();
        let log_sum = if scores.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
        lse[row.lse_index(attention)] = T::from_f64(log_sum);
        let mut o = vec![0.0; attention.v_dim];
        for score in &scores {
            let p = (score.value - log_sum).exp() * score.mask;
            let value = &v[score.v_start..score.v_start + attention.v_dim];
            o.iter_mut().zip(value).for_each(|(o, v)| *o += p * v.to_f64());
        }
        let start = row.out_start(attention);
        out[start..].iter_mut().zip(&o).for_each(|(out, &o)| *out = T::from_f64(o));
    }
}

/// Computes `dq`, `dk`, `dv` from `dout` and what the forward pass saved. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length, or `kv_heads` does not divide `q_heads`.
pub fn backward<T: Real>(
    _cpu: &Cpu,
    attention: &Attention,
    saved: &Saved<T>,
    dout: &[T],
    gradients: &mut Gradients<T>,
    output: Output,
) {
    let Saved { q, k, v, out, lse } = *saved;
    attention.check(q.len(), k.len(), v.len(), out.len(), lse.len());
    attention.check(
        gradients.dq.len(),
        gradients.dk.len(),
        gradients.dv.len(),
        dout.len(),
        lse.len(),
    );
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let (d, e) = (attention.qk_dim, attention.v_dim);
    for row in rows(attention) {
        let o = row.out_start(attention);
        let delta = dot(&dout[o..o + e], &out[o..o + e]);
        let log_sum = lse[row.lse_index(attention)].to_f64();
        let q_start = row.q_start(attention);
        for score in row.scores(attention, q, k) {
            let p = (score.value - log_sum).exp();
            let dp = dot(&dout[o..o + e], &v[score.v_start..score.v_start + e]) * score.mask;
            let ds = p * (dp - delta) * score.slope * attention.scale;
            for l in 0..e {
                dv[score.v_start + l] += p * score.mask * dout[o + l].to_f64();
            }
            for l in 0..d {
                dq[q_start + l] += ds * k[score.k_start + l].to_f64();
                dk[score.k_start + l] += ds * q[q_start + l].to_f64();
            }
        }
    }
    put(output, gradients.dq, &dq);
    put(output, gradients.dk, &dk);
    put(output, gradients.dv, &dv);
}

/// Merges the result over another range of keys into `out` and `lse`, in place: `lse <- ln(e^lse +
/// e^lse')`, `out <- e^(lse_old - lse) out + e^(lse' - lse) out'`.
///
/// # Panics
/// If a slice has the wrong length.
pub fn merge<T: Real>(
    _cpu: &Cpu,
    attention: &Attention,
    out: &mut [T],
    lse: &mut [T],
    part_out: &[T],
    part_lse: &[T],
) {
    crate::check::length("out", out.len(), attention.out_elements());
    crate::check::length("lse", lse.len(), attention.lse_elements());
    crate::check::length("part_out", part_out.len(), out.len());
    crate::check::length("part_lse", part_lse.len(), lse.len());
    for row in rows(attention) {
        let at = row.lse_index(attention);
        let (mine, part) = (lse[at].to_f64(), part_lse[at].to_f64());
        let max = mine.max(part);
        if max == f64::NEG_INFINITY {
            continue;
        }
        let sum = max + ((mine - max).exp() + (part - max).exp()).ln();
        lse[at] = T::from_f64(sum);
        let start = row.out_start(attention);
        for l in start..start + attention.v_dim {
            let merged =
                (mine - sum).exp() * out[l].to_f64() + (part - sum).exp() * part_out[l].to_f64();
            out[l] = T::from_f64(merged);
        }
    }
}

fn put<T: Real>(output: Output, places: &mut [T], values: &[f64]) {
    for (place, &value) in places.iter_mut().zip(values) {
        output.put(place, T::from_f64(value));
    }
}

/// One query of one head of one sequence.
struct Row {
    batch: usize,
    head: usize,
    query: usize,
}

/// A visible key of a row.
struct Score {
    /// After soft cap and scale.
    value: f64,
    /// Derivative of the soft cap.
    slope: f64,
    /// 0 where dropped, else `1 / (1 - p)`.
    mask: f64,
    k_start: usize,
    v_start: usize,
}

fn rows(a: &Attention) -> impl Iterator<Item = Row> {
    let (heads, queries) = (a.q_heads, a.q_len);
    (0..a.batch * heads * queries).map(move |at| Row {
        batch: at / (heads * queries),
        head: at / queries % heads,
        query: at % queries,
    })
}

impl Row {
    fn token_head(&self, a: &Attention) -> usize {
        (self.batch * a.q_len + self.query) * a.q_heads + self.head
    }
    fn q_start(&self, a: &Attention) -> usize {
        self.token_head(a) * a.qk_dim
    }
    fn out_start(&self, a: &Attention) -> usize {
        self.token_head(a) * a.v_dim
    }
    fn lse_index(&self, a: &Attention) -> usize {
        (self.batch * a.q_heads + self.head) * a.q_len + self.query
    }
    fn scores<T: Real>(&self, a: &Attention, q: &[T], k: &[T]) -> Vec<Score> {
        a.visible(self.query).map(|key| self.score(a, key, q, k)).collect()
    }
    fn score<T: Real>(&self, a: &Attention, key: usize, q: &[T], k: &[T]) -> Score {
        let kv = (self.batch * a.kv_len + key) * a.kv_heads + self.head / a.group();
        let (q_start, k_start) = (self.q_start(a), kv * a.qk_dim);
        let raw = a.scale * dot(&q[q_start..q_start + a.qk_dim], &k[k_start..k_start + a.qk_dim]);
        let (value, slope) = match a.soft_cap {
            None => (raw, 1.0),
            Some(cap) => (cap * (raw / cap).tanh(), 1.0 - (raw / cap).tanh().powi(2)),
        };
        let mask = a.dropout.as_ref().map_or(1.0, |dropout| self.mask(a, key, dropout));
        Score { value, slope, mask, k_start, v_start: kv * a.v_dim }
    }
    fn mask(&self, a: &Attention, key: usize, dropout: &ProbabilityDropout) -> f64 {
        let row = dropout.row_index(self.batch, self.head, a.q_offset + self.query);
        let word = philox::word(dropout.dropout.stream, row + (a.kv_offset + key) as u64);
        if word >= dropout.dropout.threshold() { dropout.dropout.scale() } else { 0.0 }
    }
}

fn dot<T: Real>(a: &[T], b: &[T]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum()
}
