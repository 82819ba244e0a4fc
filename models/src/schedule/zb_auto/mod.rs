//! Zero-bubble orders searched for by a heuristic, for given times and memory.

mod line;
mod polish;
mod run;
mod vee;

use self::run::Ties;
use super::generate::Counts;
use super::{Graph, Latency, NO_NODE, Pass, PassKind, Schedule, ScheduleError, ScheduleName};
use super::{StageLayout, Work, v_half, v_min, zb_h1, zb_h2, zb_v};
use std::cmp::Ordering;

/// What an order is searched for: times of one micro-batch on one device's whole share, in any unit, and
/// its activations, in any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoCosts {
    /// Forward, `F`.
    pub forward: f64,
    /// Backward to inputs, `B`.
    pub backward: f64,
    /// Backward to weights, `W`.
    pub weight: f64,
    /// Latency between neighbouring devices, `c`.
    pub latency: f64,
    /// Activations that backward to inputs frees.
    pub freed_by_b: f64,
    /// Activations that backward to weights frees.
    pub freed_by_w: f64,
    /// Activations that a device may hold.
    pub limit: f64,
}

impl AutoCosts {
    /// Equal times, no latency, activations of 1 held until weight gradients, and the memory of 1F1B over
    /// `devices`.
    pub fn even(devices: usize) -> Self {
        Self {
            forward: 1.0,
            backward: 1.0,
            weight: 1.0,
            latency: 0.0,
            freed_by_b: 0.0,
            freed_by_w: 1.0,
            limit: devices as f64,
        }
    }

    /// The same of one of `chunks` equal parts of a share.
    fn of_chunk(self, chunks: usize) -> Self {
        let part = |whole: f64| whole / chunks as f64;
        Self {
            forward: part(self.forward),
            backward: part(self.backward),
            weight: part(self.weight),
            freed_by_b: part(self.freed_by_b),
            freed_by_w: part(self.freed_by_w),
            ..self
        }
    }

    fn check(&self) -> Result<(), ScheduleError> {
        let named = [
            ("forward time", self.forward),
            ("backward time", self.backward),
            ("weight time", self.weight),
            ("latency", self.latency),
            ("activations freed by B", self.freed_by_b),
            ("activations freed by W", self.freed_by_w),
            ("memory limit", self.limit),
        ];
        match named.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            Some((what, value)) => Err(ScheduleError::Cost { what, value: value.to_string() }),
            None => Ok(()),
        }
    }
}

/// The best of several greedy runs, and of the orders made by hand that fit: with one chunk a device as ZB-1p
/// and ZB-2p (Zero Bubble, arXiv 2401.10241, section 3.1), with two on a V of stages as ZB-V (section 6).
///
/// The best has the shortest longest time between a device's own first start and last end, of equal ones the
/// shortest makespan.
///
/// # Errors
/// A count is zero, there are more than two chunks, a cost is negative or not finite, or no order found
/// keeps the memory limit.
pub fn zb_auto(
    devices: usize,
    micro_batches: usize,
    chunks: usize,
    costs: AutoCosts,
) -> Result<Schedule, ScheduleError> {
    ScheduleName::ZbAuto.check(devices, micro_batches, chunks)?;
    costs.check()?;
    let counts = Counts::new(devices, micro_batches, chunks)?;
    let part = costs.of_chunk(chunks);
    let found = if chunks == 1 { contiguous(counts, part) } else { on_a_v(counts, part) }?;
    let mut least_held = f64::INFINITY;
    let mut fitting: Vec<(Lengths, Schedule)> = Vec::new();
    for schedule in found {
        let held = most_held(&schedule, part);
        least_held = least_held.min(held);
        if held <= costs.limit * (1.0 + 1e-9)
            && !fitting.iter().any(|(_, other)| *other == schedule)
        {
            fitting.push((lengths(&schedule, part)?, schedule));
        }
    }
    let by_length = |a: &Lengths, b: &Lengths| a.partial_cmp(b).unwrap_or(Ordering::Equal);
    fitting.sort_by(|(a, _), (b, _)| by_length(a, b));
    fitting.truncate(polish::MOST);
    let polished = fitting.into_iter().map(|(lengths, s)| polish::polished(s, lengths, part));
    let limit = costs.limit.to_string();
    let none = || ScheduleError::Memory { limit, nearest: least_held.to_string() };
    polished.min_by(|(a, _), (b, _)| by_length(a, b)).map(|(_, s)| s).ok_or_else(none)
}

fn contiguous(counts: Counts, costs: AutoCosts) -> Result<Vec<Schedule>, ScheduleError> {
    let Counts { devices, micro_batches, .. } = counts;
    let orders = with_ties(&line::Taste::ALL).filter_map(|taste| line::order(counts, costs, taste));
    let searched = orders.map(|orders| counts.schedule(StageLayout::RoundRobin, orders));
    let by_hand = [zb_h1(devices, micro_batches)?, zb_h2(devices, micro_batches)?];
    Ok(searched.chain(by_hand).collect())
}

fn on_a_v(counts: Counts, costs: AutoCosts) -> Result<Vec<Schedule>, ScheduleError> {
    let Counts { devices, micro_batches, .. } = counts;
    let orders = with_ties(&vee::Taste::ALL).filter_map(|taste| vee::order(counts, costs, taste));
    let searched = orders.map(|orders| counts.schedule(StageLayout::V, orders));
    let makers = [zb_v, v_half, v_min];
    let by_hand: Result<Vec<Schedule>, ScheduleError> =
        makers.into_iter().map(|make| make(devices, micro_batches)).collect();
    Ok(searched.chain(by_hand?).collect())
}

fn with_ties<T: Copy>(tastes: &[T]) -> impl Iterator<Item = (T, Ties)> {
    tastes.iter().flat_map(|&taste| Ties::all().map(move |ties| (taste, ties)))
}

/// Longest stage time, makespan, and sum of the devices' stage times.
type Lengths = (f64, f64, f64);

/// Runs an order with equal chunks.
fn lengths(schedule: &Schedule, costs: AutoCosts) -> Result<Lengths, ScheduleError> {
    let nodes = Graph::new(schedule)?.nodes;
    let mut ends: Vec<f64> = Vec::with_capacity(nodes.len());
    let mut spans = vec![(f64::INFINITY, 0.0_f64); schedule.devices];
    for node in &nodes {
        let end = |n: u32| if n == NO_NODE { 0.0 } else { ends[n as usize] };
        let way = if node.latency == Latency::None { 0.0 } else { costs.latency };
        let start = end(node.before).max(end(node.needs) + way);
        let end = start + length(node.work, costs);
        let span = &mut spans[node.device as usize];
        *span = (span.0.min(start), span.1.max(end));
        ends.push(end);
    }
    let stages = || spans.iter().map(|(start, end)| end - start);
    let makespan = spans.iter().map(|&(_, end)| end).fold(0.0, f64::max);
    Ok((stages().fold(0.0, f64::max), makespan, stages().sum()))
}

fn length(work: Work, costs: AutoCosts) -> f64 {
    match work {
        Work::Pass(Pass { kind: PassKind::F, .. }) => costs.forward,
        Work::Pass(Pass { kind: PassKind::B, .. }) => costs.backward,
        Work::Pass(Pass { kind: PassKind::W, .. }) => costs.weight,
        // Orders here have no other passes.
        _ => 0.0,
    }
}

/// Most activations any device holds.
fn most_held(schedule: &Schedule, costs: AutoCosts) -> f64 {
    let of = |order: &Vec<Pass>| {
        let (mut held, mut most) = (0.0_f64, 0.0_f64);
        for pass in order {
            held += change(pass.kind, costs);
            most = most.max(held);
        }
        most
    };
    schedule.passes.iter().map(of).fold(0.0, f64::max)
}

/// By how much a pass changes what its device holds.
fn change(kind: PassKind, costs: AutoCosts) -> f64 {
    match kind {
        PassKind::F => costs.freed_by_b + costs.freed_by_w,
        PassKind::B => -costs.freed_by_b,
        PassKind::W => -costs.freed_by_w,
        _ => 0.0,
    }
}
