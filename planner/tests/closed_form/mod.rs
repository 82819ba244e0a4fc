//! Oracles for the simulator: closed forms of iteration times, and bounds on them.
//!
//! Symbols: `p` pipeline ranks, `m` micro-batches, `v` chunks a rank; `forward_s` and `backward_s`
//! (the whole backward, `B + W`) of one micro-batch on all chunks of one rank; `link_s` the latency
//! between neighbouring ranks. All results are in seconds.

/// Bubble of GPipe, `(p − 1)(F + B + W) + 2(p − 1)c` (Megatron PTD-P, arXiv 2104.04473, section
/// 2.2.1). The latency term is the first micro-batch's forward path and the last one's backward
/// path.
pub fn gpipe_bubble_s(p: usize, forward_s: f64, backward_s: f64, link_s: f64) -> f64 {
    p.saturating_sub(1) as f64 * (forward_s + backward_s + 2.0 * link_s)
}

/// Bubble of 1F1B without latency, `(p − 1)(F + B + W)`, for any `m` (Megatron PTD-P, arXiv
/// 2104.04473, section 2.2.1).
pub fn one_f_one_b_bubble_s(p: usize, forward_s: f64, backward_s: f64) -> f64 {
    p.saturating_sub(1) as f64 * (forward_s + backward_s)
}

/// Time that latency adds to strict 1F1B, `2c((p − 1)m/p + p − 2)`, where `p` is at least 2 and
/// divides `m`, and `c` is short compared with `F` and `B`. Found by simulation: each group of `p`
/// micro-batches waits once for a round trip.
pub fn strict_1f1b_latency_s(p: usize, m: usize, link_s: f64) -> f64 {
    let (p, m) = (p as f64, m as f64);
    2.0 * link_s * ((p - 1.0) * m / p + p - 2.0)
}

/// Bubble of interleaved 1F1B and of looped breadth-first without latency, `(p − 1)(F + B + W)/v`
/// (Megatron PTD-P, arXiv 2104.04473, section 2.2.2; Breadth-First Pipeline Parallelism, arXiv
/// 2211.05953, section 4).
pub fn interleaved_bubble_s(p: usize, v: usize, forward_s: f64, backward_s: f64) -> f64 {
    one_f_one_b_bubble_s(p, forward_s, backward_s) / v as f64
}

/// Iteration of overlapped 1F1B without latency whose pairs take `pair_s` for `v` chunks, at least
/// as long as either part alone. The last rank waits for the first micro-batch, runs
/// `w = (v − 1)p + 1` chunks forward, then pairs, then `w` chunks backward; the last micro-batch's
/// backward path ends on the first rank: `((p − 1)(F + B) + w(F + B) + (mv − w)P)/v`.
pub fn overlapped_1f1b_s(p: usize, m: usize, v: usize, both_s: f64, pair_s: f64) -> f64 {
    let alone = ((v - 1) * p + 1).min(m * v);
    ((p - 1 + alone) as f64 * both_s + (m * v - alone) as f64 * pair_s) / v as f64
}

/// Stages of a pipeline with one chunk a rank and unequal times, s.
#[derive(Clone, Copy, Debug)]
pub struct Stages<'a> {
    /// Forward of a micro-batch, by stage.
    pub forward: &'a [f64],
    /// Whole backward of a micro-batch (with any recomputation), by stage.
    pub backward: &'a [f64],
    /// Latency between stages `j` and `j + 1`, either direction. Missing entries are zero.
    pub link_s: &'a [f64],
}

impl Stages<'_> {
    /// Forward and backward of stage `j`.
    fn work_s(&self, j: usize) -> f64 {
        self.forward[j] + self.backward[j]
    }

    /// Round trip between stages `j` and `j + 1`.
    fn round_trip_s(&self, j: usize) -> f64 {
        let link_s = self.link_s.get(j).copied().unwrap_or(0.0);
        if j + 1 < self.forward.len() { 2.0 * link_s } else { 0.0 }
    }

    /// Forwards that stage `q` runs between the first micro-batch's forward and its backward.
    fn between(&self, q: usize, m: usize) -> usize {
        (self.forward.len() - 1 - q).min(m.saturating_sub(1))
    }
}

/// A lower bound on the makespan of 1F1B with unequal stages.
///
/// It is the maximum over stages `q` of three terms: the round trip to the stage,
/// `Σ_{j<q} (F_j + B_j + 2c_j)`; the stage's own work; and its idle time in warm-up and cooldown
/// (see `idle_s`). Where the two idle times may coincide, `m ≤ p − q`, only the longer counts.
/// Without latency, and with idle time only for the round trip to the last stage, this is
///
/// ```text
/// Σ_{j<q} (F_j + B_j) + m(F_q + B_q) + max(0, D_q − w_q·F_q) + max(0, D_q − w_q·B_q)
/// ```
///
/// with `D_q = Σ_{j>q} (F_j + B_j)` and `w_q = p − 1 − q`. The bound is exact for equal stages
/// without latency, and nearly exact for unequal ones where a backward takes about two forwards.
pub fn one_f_one_b_lower_bound_s(stages: Stages<'_>, m: usize) -> f64 {
    let mut before_s = 0.0;
    let mut bound_s = 0.0_f64;
    for q in 0..stages.forward.len() {
        let (first_s, last_s) =
            (idle_s(stages, q, m, stages.forward), idle_s(stages, q, m, stages.backward));
        let apart = m >= stages.between(q, m) + 2;
        let idle_s = if apart { first_s + last_s } else { first_s.max(last_s) };
        bound_s = bound_s.max(before_s + m as f64 * stages.work_s(q) + idle_s);
        before_s += stages.work_s(q) + stages.round_trip_s(q);
    }
    bound_s
}

/// Least idle time of stage `q` from the start of its first forward to the end of the same
/// micro-batch's backward, given `times` of forwards. By symmetry in time, given `times` of
/// backwards, it is the idle time for the last micro-batch.
///
/// A later stage `r` starts the first backward only after `n_r` more forwards
/// ([`Stages::between`]), which arrive no faster than the slowest stage from `q` to `r` lets them.
/// This takes `n_r·max_{q≤j≤r} F_j + Σ_{q≤j≤r} (F_j + B_j) + Σ_{q≤j<r} 2c_j`, of which `q` itself
/// works for `n_q·F_q + F_q + B_q`.
fn idle_s(stages: Stages<'_>, q: usize, m: usize, times: &[f64]) -> f64 {
    let mut slowest_s = 0.0_f64;
    let mut path_s = 0.0;
    let mut longest_s = 0.0_f64;
    for (r, &time_s) in times.iter().enumerate().skip(q) {
        slowest_s = slowest_s.max(time_s);
        path_s += stages.work_s(r);
        longest_s = longest_s.max(stages.between(r, m) as f64 * slowest_s + path_s);
        path_s += stages.round_trip_s(r);
    }
    longest_s - stages.between(q, m) as f64 * times[q] - stages.work_s(q)
}

/// An upper bound on the makespan of 1F1B with unequal stages,
/// `(m − 1)(max_q F_q + max_q B_q) + Σ_q (F_q + B_q)`, where each pass includes the latency of what
/// it sends.
///
/// The common estimate has `max_q (F_q + B_q)` instead (Alpa, arXiv 2201.12023, section 5.2). The
/// two agree where one stage has both the slowest forward and the slowest backward. Elsewhere the
/// estimate is too low: stages wait alternately for slow forwards of one stage and slow backwards
/// of another.
pub fn one_f_one_b_upper_bound_s(stages: Stages<'_>, m: usize) -> f64 {
    let p = stages.forward.len();
    let path_s = |j: usize| stages.round_trip_s(j) / 2.0;
    // Forwards send over the link after the stage, backwards over the one before it.
    let forward_s = || (0..p).map(|q| stages.forward[q] + path_s(q));
    let backward_s = || (0..p).map(|q| stages.backward[q] + q.checked_sub(1).map_or(0.0, path_s));
    let longest_s = forward_s().fold(0.0, f64::max) + backward_s().fold(0.0, f64::max);
    let sum_s = forward_s().sum::<f64>() + backward_s().sum::<f64>();
    m.saturating_sub(1) as f64 * longest_s + sum_s
}
