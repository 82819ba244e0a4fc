//! Listed placements: the fastest of them, by chains of passes.
//!
//! Device `i` starts when the first micro-batch has come down the first chunks before it, does all its
//! micro-batches of all its chunks one after another, and the last one still has to go back up those
//! chunks to the first device, whose reductions come last. Every pass of that chain must follow the one
//! before it in naive, GPipe, 1F1B, interleaved and breadth-first orders alike.

use super::states::StateView;
use super::trade::Trade;
use super::work::{End, Line, Work};
use crate::case::layers::{Counts, Layers};
use crate::case::levels::{Chain, Levels};
use crate::cost::state::LocalParams;

/// First layer and one past the last, by stage.
pub type Ranges = Vec<(usize, usize)>;

/// One listed placement.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Its ranges.
    pub ranges: Ranges,
    /// Layers by stage.
    stages: Vec<Counts>,
    /// Layers by device.
    devices: Vec<Counts>,
}

impl Member {
    /// Stages go round the devices.
    pub fn new(layers: &Layers, devices: usize, ranges: Ranges) -> Self {
        let stages: Vec<Counts> =
            ranges.iter().map(|&(start, end)| layers.between(start, end)).collect();
        let mut by_device = vec![Counts::default(); devices];
        for (stage, counts) in stages.iter().enumerate() {
            for (sum, count) in by_device[stage % devices].iter_mut().zip(counts) {
                *sum += count;
            }
        }
        Self { ranges, stages, devices: by_device }
    }

    /// Layers of the longest chunk of one kind on a device.
    pub fn longest(&self, device: usize) -> usize {
        let chunks = self.stages.iter().skip(device).step_by(self.devices.len());
        chunks.flatten().copied().max().unwrap_or(0)
    }
}

/// What the bounds of listed placements are computed from.
pub struct Lister<'a> {
    /// The pipeline.
    pub line: &'a Line,
    /// One micro-batch, with what the states add to its passes.
    pub work: &'a Work,
    /// The states.
    pub state: &'a StateView,
    /// What a device has for states and activations; infinite where memory does not count.
    pub budget_bytes: f64,
}

impl Lister<'_> {
    /// Lower bound on passes and the first device's reductions of every member, s; infinite where none
    /// fits or lies below `limit_s`.
    pub fn bound_s(&self, members: &[Member], limit_s: f64) -> f64 {
        let trade = Trade::new(&self.work.kinds, self.line.options());
        let bounds = members.iter().map(|member| {
            let free_s = self.rows_s(member, |device| trade.at_first(&member.devices[device]).0);
            if free_s >= limit_s || self.budget_bytes == f64::INFINITY {
                return free_s;
            }
            self.fitting_s(member, &trade)
        });
        let tail_s = |bound_s: f64| if bound_s < limit_s { bound_s } else { f64::INFINITY };
        bounds.map(tail_s).fold(f64::INFINITY, f64::min)
    }

    fn fitting_s(&self, member: &Member, trade: &Trade) -> f64 {
        if self.line.chunks == 1 {
            let mut held = vec![];
            let needs_s = |device: usize| {
                self.line.in_flight(device, &mut held);
                let n = held[0] as f64;
                let free = self.free_bytes(member, device, &held);
                trade.least_s(&member.devices[device], n, free)
            };
            return self.rows_s(member, needs_s);
        }
        let chains = Levels::chains(self.line.recompute).iter();
        let of = |&chain: &Chain| self.rows_s(member, |device| self.level_s(member, device, chain));
        chains.map(of).fold(f64::INFINITY, f64::min)
    }

    /// Bytes left on a device for activations of layers.
    fn free_bytes(&self, member: &Member, device: usize, held: &[usize]) -> f64 {
        let mut params = params_of(self.work, &member.devices[device]);
        let (mut fixed, p) = (0.0, self.line.devices);
        if self.line.vocab_s.is_some() {
            params.dense += self.work.embedding.params + self.work.head.params;
        } else {
            let mut add = |end: &End, held: usize| {
                params.dense += end.params;
                fixed += end.workspace_bytes + held as f64 * end.in_flight_bytes;
            };
            if device == 0 {
                add(&self.work.embedding, held[0]);
            }
            if device + 1 == p {
                add(&self.work.head, held[self.line.chunks - 1]);
            }
        }
        // What just fits must not be declared too large by another order of summation.
        self.budget_bytes * (1.0 + 1e-9) - self.state.bytes_of(params) - fixed
    }

    /// Recomputation at the least level of a chain that fits a moment the device certainly reaches.
    fn level_s(&self, member: &Member, device: usize, chain: Chain) -> f64 {
        let mut held = vec![];
        self.line.in_flight(device, &mut held);
        let free = self.free_bytes(member, device, &held);
        let levels = Levels::new(chain, self.line.recompute, member.longest(device));
        let chunks = || member.stages.iter().skip(device).step_by(self.line.devices);
        let fits = |level: usize| {
            let bytes = |(counts, &held): (&Counts, &usize)| self.stage_bytes(levels, level, counts, held);
            chunks().zip(&held).map(bytes).sum::<f64>() <= free
        };
        let Some(level) = levels.least(fits) else { return f64::INFINITY };
        chunks().map(|counts| self.stage_s(levels, level, counts)).sum()
    }

    fn stage_bytes(&self, levels: Levels, level: usize, counts: &Counts, held: usize) -> f64 {
        let (mut each, mut buffer) = (0.0, 0.0_f64);
        for (kind, &count) in self.work.kinds.iter().zip(counts) {
            let split = levels.split(level, count);
            for option in 0..3 {
                each += split[option] as f64 * kind.saved_bytes[option];
            }
            let leanest = (1..3).rev().find(|&option| split[option] > 0).unwrap_or(0);
            buffer = buffer.max(kind.saved_bytes[0] - kind.saved_bytes[leanest]);
        }
        held as f64 * each + buffer
    }

    fn stage_s(&self, levels: Levels, level: usize, counts: &Counts) -> f64 {
        let of = |(kind, &count): (&super::work::KindWork, &usize)| -> f64 {
            let split = levels.split(level, count);
            (0..3).map(|option| split[option] as f64 * kind.recompute_s[option]).sum()
        };
        self.work.kinds.iter().zip(counts).map(of).sum()
    }

    /// The longest chain, with `recompute_s` of each device's recomputation of one micro-batch.
    fn rows_s(&self, member: &Member, mut recompute_s: impl FnMut(usize) -> f64) -> f64 {
        let (line, work) = (self.line, self.work);
        let (mut ramp_s, mut longest_s) = (0.0, 0.0_f64);
        let (mut all_s, last) = (0.0, line.devices * line.chunks - 1);
        for device in 0..line.devices {
            let ends_s = |stage: usize| match line.vocab_s {
                Some(_) => 0.0,
                None => {
                    (if stage == 0 { work.embedding.load_s() } else { 0.0 })
                        + if stage == last { work.head.load_s() } else { 0.0 }
                }
            };
            let crossings_s = |stage: usize| line.crossings_s(stage).0 + line.crossings_s(stage).1;
            let last_chunk = device + line.devices * (line.chunks - 1);
            let inner = line.chunks.saturating_sub(2) as f64;
            let mut own_s = load_s(work, &member.devices[device]) + recompute_s(device);
            own_s += ends_s(device) + crossings_s(device);
            if line.chunks > 1 {
                own_s += ends_s(last_chunk) + crossings_s(last_chunk);
                own_s += inner * crossings_s(device + line.devices);
            }
            longest_s = longest_s.max(ramp_s + line.m() * (own_s + line.passes_s()));
            all_s += own_s;
            ramp_s += load_s(work, &member.stages[device]) + ends_s(device) + crossings_s(device);
            ramp_s += line.round_trip_s();
        }
        let way_s = super::closed::looped_way_s(line, all_s);
        longest_s.max(way_s) + self.state.tail_of_s(params_of(work, &member.devices[0]))
    }
}

fn load_s(work: &Work, counts: &Counts) -> f64 {
    work.kinds.iter().zip(counts).map(|(kind, &count)| count as f64 * kind.load_s()).sum()
}

fn params_of(work: &Work, counts: &Counts) -> LocalParams {
    let all = work.kinds.iter().zip(counts);
    all.fold(LocalParams::default(), |sum, (kind, &count)| sum + kind.params * count as f64)
}
