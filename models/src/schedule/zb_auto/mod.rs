//! Heuristic search for zero-bubble orders, for given times and memory.

mod floor;
mod frame;
mod line;
mod polish;
mod run;
mod vee;

use self::floor::Floor;
use self::frame::Frame;
use self::run::Ties;
use super::generate::Counts;
use super::{Pass, PassKind, Schedule, ScheduleError, ScheduleName};
use super::{StageLayout, v_half, v_min, zb_h1, zb_h2, zb_v};
use std::cmp::Ordering;

/// Input of the search: times of one micro-batch on one pipeline rank's whole share and its
/// activations, each in any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoCosts {
    /// Forward, `F`.
    pub forward: f64,
    /// Backward to inputs, `B`.
    pub backward: f64,
    /// Backward to weights, `W`.
    pub weight: f64,
    /// Latency between neighbouring pipeline ranks, `c`.
    pub latency: f64,
    /// Activations that backward to inputs frees.
    pub freed_by_b: f64,
    /// Activations that backward to weights frees.
    pub freed_by_w: f64,
    /// Activations that a pipeline rank may hold.
    pub limit: f64,
}

impl AutoCosts {
    /// Equal times, no latency, activations of 1 held until weight gradients, and the memory of
    /// 1F1B over `ranks`.
    pub fn even(ranks: usize) -> Self {
        Self {
            forward: 1.0,
            backward: 1.0,
            weight: 1.0,
            latency: 0.0,
            freed_by_b: 0.0,
            freed_by_w: 1.0,
            limit: ranks as f64,
        }
    }

    /// The costs of one of `chunks` equal parts of a share.
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

/// The best of several greedy runs and of the hand-made orders that fit: with one chunk a pipeline
/// rank ZB-1p and ZB-2p (Zero Bubble, arXiv 2401.10241, section 3.1), with two on a V of stages
/// ZB-V (section 6).
///
/// The best order minimises the longest stage time, the time between a pipeline rank's own first
/// start and last end; ties go to the shorter makespan. An order that meets the lower bound is
/// taken at once; hand-made ones are tried first: see [`ScheduleName::made_by_hand`].
///
/// # Errors
/// A count is zero, there are more than two chunks, a cost is negative or not finite, or no order
/// found keeps the memory limit.
pub fn zb_auto(
    ranks: usize,
    micro_batches: usize,
    chunks: usize,
    costs: AutoCosts,
) -> Result<Schedule, ScheduleError> {
    ScheduleName::ZbAuto.check(ranks, micro_batches, chunks)?;
    costs.check()?;
    let counts = Counts::new(ranks, micro_batches, chunks)?;
    let orders = Orders::found(counts, costs.of_chunk(chunks), |orders| orders.is_done)?;
    match orders.best() {
        Some(schedule) => Ok(schedule),
        None => Err(ScheduleError::Memory {
            limit: costs.limit.to_string(),
            least: rounded_up(least_limit(counts, costs.of_chunk(chunks))?).to_string(),
        }),
    }
}

/// The least number of six digits that is not smaller.
fn rounded_up(value: f64) -> f64 {
    let nearest = format!("{value:.5e}");
    let parts = nearest.split_once('e').map(|(digits, power)| (digits.replace('.', ""), power));
    let parsed = parts.map(|(digits, power)| (digits.parse::<u64>(), power.parse::<i32>()));
    let Some((Ok(digits), Ok(power))) = parsed else { return value };
    let read = |digits: u64| format!("{digits}e{}", power - 5).parse().unwrap_or(value);
    let nearest = read(digits);
    if nearest < value { read(digits + 1) } else { nearest }
}

/// The least limit, in whole activations of a chunk, for which there is an order. `costs` are those
/// of a chunk.
fn least_limit(counts: Counts, costs: AutoCosts) -> Result<f64, ScheduleError> {
    let limit = |held: usize| held as f64 * change(PassKind::F, costs);
    let (mut too_few, mut enough) = (0, counts.micro_batches * counts.chunks);
    while enough - too_few > 1 {
        let middle = usize::midpoint(too_few, enough);
        let costs = AutoCosts { limit: limit(middle), ..costs };
        let orders = Orders::found(counts, costs, |orders| !orders.fitting.is_empty())?;
        *(if orders.fitting.is_empty() { &mut too_few } else { &mut enough }) = middle;
    }
    Ok(limit(enough))
}

/// Orders found so far that keep the memory limit.
struct Orders {
    counts: Counts,
    layout: StageLayout,
    /// Costs of a chunk.
    costs: AutoCosts,
    floor: Floor,
    fitting: Vec<(Lengths, Schedule, Frame)>,
    /// Whether the last of them meets the lower bound.
    is_done: bool,
}

impl Orders {
    /// Orders until there are enough of them; `costs` are those of a chunk.
    fn found(
        counts: Counts,
        costs: AutoCosts,
        is_enough: impl Fn(&Self) -> bool,
    ) -> Result<Self, ScheduleError> {
        let Counts { ranks, micro_batches, chunks } = counts;
        let mut orders = Self::new(counts, costs);
        let makers = if chunks == 1 { &[zb_h1, zb_h2][..] } else { &[zb_v, v_half, v_min] };
        let mut by_hand = makers.iter().map(|make| make(ranks, micro_batches));
        // Expensive ones come last.
        if let Some(schedule) = by_hand.next() {
            orders.add(schedule?);
        }
        orders.search(&is_enough);
        while !is_enough(&orders)
            && let Some(schedule) = by_hand.next()
        {
            orders.add(schedule?);
        }
        Ok(orders)
    }

    fn new(counts: Counts, costs: AutoCosts) -> Self {
        let layout = ScheduleName::ZbAuto.layout(counts.chunks);
        let floor = Floor::new(counts, layout, costs);
        Self { counts, layout, costs, floor, fitting: Vec::new(), is_done: false }
    }

    fn add(&mut self, schedule: Schedule) {
        if self.is_done {
            return;
        }
        if most_held(&schedule, self.costs) <= self.costs.limit * (1.0 + 1e-9)
            && !self.fitting.iter().any(|(_, other, _)| *other == schedule)
            && let Some(mut frame) = Frame::new(&schedule, self.costs)
        {
            let lengths = frame.lengths();
            self.is_done = self.floor.is_met(lengths);
            self.fitting.push((lengths, schedule, frame));
        }
    }

    /// Adds the orders of greedy runs until there are enough.
    fn search(&mut self, is_enough: impl Fn(&Self) -> bool) {
        let (counts, costs) = (self.counts, self.costs);
        let mut line = with_ties(&line::Taste::ALL);
        let mut vee = with_ties(&vee::Taste::ALL);
        let mut next = || match counts.chunks {
            1 => line.next().map(|taste| line::order(counts, costs, taste)),
            _ => vee.next().map(|taste| vee::order(counts, costs, taste)),
        };
        while !is_enough(self)
            && let Some(found) = next()
        {
            if let Some(passes) = found {
                self.add(counts.schedule(self.layout, passes));
            }
        }
    }

    /// The best order, with its weight gradients polished.
    fn best(mut self) -> Option<Schedule> {
        if self.is_done
            && let Some((_, schedule, _)) = self.fitting.pop()
        {
            return Some(schedule);
        }
        let by_length = |a: &Lengths, b: &Lengths| a.partial_cmp(b).unwrap_or(Ordering::Equal);
        self.fitting.sort_by(|(a, ..), (b, ..)| by_length(a, b));
        self.fitting.truncate(polish::MOST);
        let polish =
            |(lengths, schedule, frame)| polish::polished(schedule, frame, lengths, self.costs);
        let polished = self.fitting.into_iter().map(polish);
        polished.min_by(|(a, _), (b, _)| by_length(a, b)).map(|(_, s)| s)
    }
}

fn with_ties<T: Copy>(tastes: &[T]) -> impl Iterator<Item = (T, Ties)> {
    tastes.iter().flat_map(|&taste| Ties::all().map(move |ties| (taste, ties)))
}

/// Longest stage time, makespan, and sum of the pipeline ranks' stage times.
type Lengths = (f64, f64, f64);

/// Busy time of a pipeline rank.
fn busy(order: &[Pass], costs: AutoCosts) -> f64 {
    let length = |kind: PassKind| match kind {
        PassKind::F => costs.forward,
        PassKind::B => costs.backward,
        // Orders here have no other passes.
        _ => costs.weight,
    };
    order.iter().map(|pass| length(pass.kind)).sum()
}

/// Most activations any pipeline rank holds.
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

/// By how much a pass changes what its pipeline rank holds.
fn change(kind: PassKind, costs: AutoCosts) -> f64 {
    match kind {
        PassKind::F => costs.freed_by_b + costs.freed_by_w,
        PassKind::B => -costs.freed_by_b,
        PassKind::W => -costs.freed_by_w,
        _ => 0.0,
    }
}
