//! Iteration times without simulation: bounds for the search and checks for the simulator.
//!
//! Symbols: `p` devices, `m` micro-batches, `v` chunks a device; `forward_s` and `backward_s` (the whole
//! backward, `B + W`) of one micro-batch on one device's whole share; `link_s` the latency between
//! neighbouring devices. All results in seconds.

/// Bubble of GPipe, `(p − 1)(F + B + W) + 2(p − 1)c` (Megatron PTD-P, arXiv 2104.04473, section 2.2.1;
/// the latency term is the first micro-batch's way down and the last one's way back).
pub fn gpipe_bubble_s(p: usize, forward_s: f64, backward_s: f64, link_s: f64) -> f64 {
    p.saturating_sub(1) as f64 * (forward_s + backward_s + 2.0 * link_s)
}

/// Bubble of 1F1B without latency, `(p − 1)(F + B + W)`, for any `m` (Megatron PTD-P, arXiv
/// 2104.04473, section 2.2.1).
pub fn one_f_one_b_bubble_s(p: usize, forward_s: f64, backward_s: f64) -> f64 {
    p.saturating_sub(1) as f64 * (forward_s + backward_s)
}

/// What latency adds to strict 1F1B, `2c((p − 1)m/p + p − 2)`, where `p` is at least 2 and divides `m`
/// and `c` is short beside `F` and `B` (found by simulation: each `p` micro-batches wait once for a way
/// there and back).
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

/// Stages of a pipeline of one chunk a device, with unequal times, s.
#[derive(Clone, Copy, Debug)]
pub struct Stages<'a> {
    /// Forward of a micro-batch, by stage.
    pub forward: &'a [f64],
    /// Whole backward of a micro-batch (with any recomputing), by stage.
    pub backward: &'a [f64],
    /// Latency from stage `j` to stage `j + 1` and back; missing ones are zero.
    pub link_s: &'a [f64],
}

impl Stages<'_> {
    /// Forward and backward of stage `j`.
    fn work_s(&self, j: usize) -> f64 {
        self.forward[j] + self.backward[j]
    }

    /// There and back between stages `j` and `j + 1`.
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
/// For each stage `q`: the way to it and back, `Σ_{j<q} (F_j + B_j + 2c_j)`; its own work; and its
/// idling at both ends (see `idle_s`), of which only the longer counts where the two may fall together,
/// `m ≤ p − q`. Without latency and with idling only for the way to the last stage and back this is
/// `Σ_{j<q} (F_j + B_j) + m(F_q + B_q) + max(0, D_q − w_q·F_q) + max(0, D_q − w_q·B_q)` with
/// `D_q = Σ_{j>q} (F_j + B_j)` and `w_q = p − 1 − q`. Exact for equal stages without latency, and nearly so
/// for unequal ones where backward is about two forwards.
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

/// What stage `q` must idle from the start of its first forward to the end of the same micro-batch's
/// backward, with `times` those of forwards; by symmetry in time, with those of backwards, what it must
/// idle for its last micro-batch.
///
/// A stage `r` behind it turns back the first micro-batch only after `n_r` more forwards
/// ([`Stages::between`]), which come no faster than the slowest stage on the way lets them, so that
/// `n_r·max_{q≤j≤r} F_j + Σ_{q≤j≤r} (F_j + B_j) + Σ_{q≤j<r} 2c_j` pass; of these `q` works `n_q·F_q + F_q + B_q`.
fn idle_s(stages: Stages<'_>, q: usize, m: usize, times: &[f64]) -> f64 {
    let mut slowest_s = 0.0_f64;
    let mut way_s = 0.0;
    let mut longest_s = 0.0_f64;
    for (r, &time_s) in times.iter().enumerate().skip(q) {
        slowest_s = slowest_s.max(time_s);
        way_s += stages.work_s(r);
        longest_s = longest_s.max(stages.between(r, m) as f64 * slowest_s + way_s);
        way_s += stages.round_trip_s(r);
    }
    longest_s - stages.between(q, m) as f64 * times[q] - stages.work_s(q)
}

/// An upper bound on the makespan of 1F1B with unequal stages,
/// `(m − 1)(max_q F_q + max_q B_q) + Σ_q (F_q + B_q)`, in which a pass that sends takes its latency, too.
///
/// The common estimate has `max_q (F_q + B_q)` instead (Alpa, arXiv 2201.12023, section 5.2), which is the
/// same where the slowest forward and the slowest backward are on one stage, and too low elsewhere:
/// stages wait for slow forwards of one and slow backwards of another in turn.
pub fn one_f_one_b_upper_bound_s(stages: Stages<'_>, m: usize) -> f64 {
    let p = stages.forward.len();
    let way_s = |j: usize| stages.round_trip_s(j) / 2.0;
    // Forwards send over the link behind the stage, backwards over the one before it.
    let forward_s = || (0..p).map(|q| stages.forward[q] + way_s(q));
    let backward_s = || (0..p).map(|q| stages.backward[q] + q.checked_sub(1).map_or(0.0, way_s));
    let longest_s = forward_s().fold(0.0, f64::max) + backward_s().fold(0.0, f64::max);
    let sum_s = forward_s().sum::<f64>() + backward_s().sum::<f64>();
    m.saturating_sub(1) as f64 * longest_s + sum_s
}
