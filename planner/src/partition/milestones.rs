//! Milestones of a device's order of passes, and the chains of passes that lead from one to the next.
//!
//! Where backward is split or stages lie on a V, no closed form of the whole iteration is known, but every
//! order has the same few milestones on each device: its first backward, the last forward and the last
//! backward of its first chunk, and its end. Which passes lie between them is a property of the order. A
//! chain starts when the first micro-batch has come down to the device, or when it is on its way back;
//! follows the device's own passes, or the last micro-batch down to the last stage and back; and ends with
//! the device's own weight gradients and reductions, or with the last micro-batch's way back to the
//! first device. Every such chain bounds the iteration from below.

use models::schedule::{PassKind, Schedule, ScheduleName};

/// Passes of one chunk: forwards, backwards to inputs, weight gradients. A whole backward counts as both
/// of the latter.
pub type PassCounts = [f64; 3];

/// Passes of one chunk up to each milestone of its device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ChunkMilestones {
    /// Before the device's first backward.
    pub first_backward: PassCounts,
    /// Up to the last forward of the device's first chunk.
    pub last_forward: PassCounts,
    /// Up to the last backward of the device's first chunk.
    pub last_backward: PassCounts,
}

/// The milestones of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderMilestones {
    /// By chunk.
    pub chunks: Vec<ChunkMilestones>,
    /// Vocabulary passes of each kind up to the three milestones.
    vocab: [[f64; 3]; 3],
    /// Chunk of the first backward.
    pub first_chunk: usize,
    /// The first backward comes before the last forward of the first chunk.
    pub apart: bool,
    /// What comes before a milestone need not come behind it: see [`Self::of_any`].
    any_order: bool,
    micro_batches: f64,
}

/// What happens around a device's own passes, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ArrivalTimes {
    /// The first micro-batch reaches the device's first chunk.
    pub arrive_s: f64,
    /// The first backward can start.
    pub ready_s: f64,
    /// From the end of a forward of the first chunk to the start of its backward.
    pub way_s: f64,
}

/// When a device's last milestones are reached, s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndTimes {
    /// The last backward of the first chunk ends.
    pub last_backward_s: f64,
    /// The device's last pass ends.
    pub own_s: f64,
}

/// Seconds of a device's passes.
#[derive(Clone, Copy, Debug)]
pub struct OwnSeconds<'a> {
    /// Forward, backward to inputs and weight gradients, by chunk.
    pub chunks: &'a [PassCounts],
    /// What the backwards of a micro-batch take on top, whichever chunk does it.
    pub shared_s: f64,
    /// All vocabulary passes of a micro-batch.
    pub vocab_s: f64,
}

/// A milestone, or an end of the order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Start,
    FirstBackward,
    LastForward,
    LastBackward,
    End,
}

impl OrderMilestones {
    /// The milestones of a device's order.
    pub fn of(schedule: &Schedule, device: usize) -> Self {
        let order = schedule.passes.get(device).map_or(&[][..], Vec::as_slice);
        let is_backward = |kind: PassKind| matches!(kind, PassKind::B | PassKind::BW);
        let first = order.iter().position(|pass| is_backward(pass.kind)).unwrap_or(order.len());
        let last = |wanted: &dyn Fn(PassKind) -> bool| {
            order
                .iter()
                .rposition(|pass| pass.chunk == 0 && wanted(pass.kind))
                .map_or(0, |place| place + 1)
        };
        let forward = last(&|kind| kind == PassKind::F);
        let ends = [first, forward, last(&is_backward)];
        let chunk = |chunk: usize| {
            let [first_backward, last_forward, last_backward] = ends.map(|end| {
                let own = || order[..end].iter().filter(|pass| usize::from(pass.chunk) == chunk);
                let of = |kind| own().filter(|pass| pass.kind == kind).count() as f64;
                let whole = of(PassKind::BW);
                [of(PassKind::F), of(PassKind::B) + whole, of(PassKind::W) + whole]
            });
            ChunkMilestones { first_backward, last_forward, last_backward }
        };
        let vocab = ends.map(|end| {
            let of = |kind| order[..end].iter().filter(|pass| pass.kind == kind).count() as f64;
            let (first, middle, rest) = (of(PassKind::S), of(PassKind::S2), of(PassKind::T));
            let has_middle = order.iter().any(|pass| pass.kind == PassKind::S2);
            [first, if has_middle { middle } else { first }, rest]
        });
        Self {
            chunks: (0..schedule.chunks).map(chunk).collect(),
            vocab,
            first_chunk: order.get(first).map_or(0, |pass| usize::from(pass.chunk)),
            apart: first < forward,
            any_order: false,
            micro_batches: schedule.micro_batches as f64,
        }
    }

    /// The same by counting, for the orders of `zb_h1`, `zb_h2` and `interleaved_zb`: forwards first, then
    /// backward to inputs, weight gradients some backwards later, and forward, in turn.
    pub fn counted(
        schedule: ScheduleName,
        (devices, micro_batches, chunks): (usize, usize, usize),
        device: usize,
    ) -> Option<Self> {
        let (p, m, v) = (devices, micro_batches, chunks);
        let (warm_up, lag) = match schedule {
            ScheduleName::ZbH1 => (p - device, device),
            ScheduleName::ZbH2 => (2 * (p - device) - 1, 2 * device),
            ScheduleName::InterleavedZb => (p - device + (v - 1) * p, device),
            _ => return None,
        };
        let all = m * v;
        let warm_up = warm_up.min(all);
        // The last forward of the first chunk, by its place among all forwards.
        let last = all + p - 1 - p * v;
        let backwards = if last < warm_up { 0 } else { last - warm_up + 1 };
        let weights = |backwards: usize| backwards.saturating_sub(lag);
        let before_last = weights(all - 1);
        let milestones =
            [(warm_up, 0, 0), (last + 1, backwards, weights(backwards)), (all, all, before_last)];
        let chunk = |chunk: usize| {
            let of = |items: usize, chunk: usize| {
                let (rounds, rest) = (items / (p * v), items % (p * v));
                (rounds * p + rest.saturating_sub(chunk * p).min(p)) as f64
            };
            let back = v - 1 - chunk;
            let [first_backward, last_forward, last_backward] =
                milestones.map(|(f, b, w)| [of(f, chunk), of(b, back), of(w, back)]);
            ChunkMilestones { first_backward, last_forward, last_backward }
        };
        Some(Self {
            chunks: (0..v).map(chunk).collect(),
            vocab: [[0.0; 3]; 3],
            first_chunk: v - 1,
            apart: warm_up <= last,
            any_order: false,
            micro_batches: m as f64,
        })
    }

    /// What holds of any order without vocabulary passes: all forwards may come before the first backward, and all weight gradients
    /// behind the last.
    pub fn of_any(micro_batches: usize, chunks: usize) -> Self {
        let m = micro_batches as f64;
        let chunk = |chunk: usize| ChunkMilestones {
            first_backward: [m, 0.0, 0.0],
            last_forward: [if chunk == 0 { m } else { 0.0 }, 0.0, 0.0],
            last_backward: [m, m, 0.0],
        };
        Self {
            chunks: (0..chunks).map(chunk).collect(),
            vocab: [[0.0; 3]; 3],
            first_chunk: chunks - 1,
            apart: false,
            any_order: true,
            micro_batches: m,
        }
    }

    /// When the last milestones are reached at the earliest.
    pub fn ends(&self, own: &OwnSeconds<'_>, around: &ArrivalTimes) -> EndTimes {
        let work_s = |from: At, to: At| self.work_s(own, from, to);
        let mut forward_s = around.arrive_s + work_s(At::Start, At::LastForward);
        let mut backward_s = around.arrive_s + work_s(At::Start, At::LastBackward);
        if self.apart {
            let ready_s = around.ready_s + work_s(At::FirstBackward, At::LastForward);
            forward_s = forward_s.max(ready_s);
        }
        backward_s = backward_s.max(around.ready_s + work_s(At::FirstBackward, At::LastBackward));
        let first_s = own.chunks.first().map_or(0.0, |chunk| chunk[1]);
        let last_backward_s = backward_s.max(forward_s + around.way_s + first_s);
        if self.any_order {
            // Weight gradients of other micro-batches may run wherever the device waits.
            let weight_s = own.chunks.first().map_or(0.0, |chunk| chunk[2]);
            let all_s = around.arrive_s + work_s(At::Start, At::End);
            let behind_s = around.ready_s + work_s(At::FirstBackward, At::End);
            return EndTimes {
                last_backward_s,
                own_s: (last_backward_s + weight_s).max(all_s).max(behind_s),
            };
        }
        EndTimes { last_backward_s, own_s: last_backward_s + work_s(At::LastBackward, At::End) }
    }

    /// Passes of the only chunk between two milestones, and whole sets of vocabulary passes.
    pub(super) fn between(&self, from: At, to: At) -> (PassCounts, f64) {
        let chunk = self.chunks.first().copied().unwrap_or_default();
        let (before, until) = (self.counts(&chunk, from), self.counts(&chunk, to));
        (difference(until, before), self.sets_between(from, to))
    }

    fn sets_between(&self, from: At, to: At) -> f64 {
        let sets = difference(self.sets(to), self.sets(from));
        sets.into_iter().fold(f64::INFINITY, f64::min).max(0.0)
    }

    fn counts(&self, chunk: &ChunkMilestones, at: At) -> PassCounts {
        match at {
            At::Start => [0.0; 3],
            At::FirstBackward => chunk.first_backward,
            At::LastForward => chunk.last_forward,
            At::LastBackward => chunk.last_backward,
            At::End => [self.micro_batches; 3],
        }
    }

    fn sets(&self, at: At) -> [f64; 3] {
        match at {
            At::Start => [0.0; 3],
            At::FirstBackward => self.vocab[0],
            At::LastForward => self.vocab[1],
            At::LastBackward => self.vocab[2],
            At::End => [self.micro_batches; 3],
        }
    }

    /// Seconds of the device's passes between two milestones, at least.
    fn work_s(&self, own: &OwnSeconds<'_>, from: At, to: At) -> f64 {
        let (mut sum_s, mut fewest) = (0.0, f64::INFINITY);
        for (milestones, seconds) in self.chunks.iter().zip(own.chunks) {
            let done = difference(self.counts(milestones, to), self.counts(milestones, from));
            sum_s += done[0] * seconds[0] + done[1] * seconds[1] + done[2] * seconds[2];
            fewest = fewest.min(done[1]);
        }
        if own.shared_s > 0.0 {
            sum_s += fewest * own.shared_s;
        }
        if own.vocab_s > 0.0 {
            sum_s += self.sets_between(from, to) * own.vocab_s;
        }
        sum_s
    }
}

fn difference(until: PassCounts, before: PassCounts) -> PassCounts {
    [until[0] - before[0], until[1] - before[1], until[2] - before[2]]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some durations, different ones for each seed.
    fn seconds(seed: usize, count: usize) -> Vec<PassCounts> {
        let value = |n: usize| 0.2 + ((seed * 7919 + n * 104_729) % 997) as f64 / 500.0;
        (0..count).map(|n| [value(3 * n), value(3 * n + 1), value(3 * n + 2)]).collect()
    }

    #[test]
    fn what_holds_of_any_order_is_no_more_than_what_holds_of_one() {
        let mut compared = 0;
        let split = |name: &ScheduleName| !name.is_whole() && name.layout(2).copies() == 1;
        for schedule in ScheduleName::ALL.into_iter().filter(split) {
            for (p, m, v) in [(2, 1, 2), (2, 4, 2), (3, 7, 2), (4, 12, 2), (4, 12, 1), (3, 2, 1)] {
                let Ok(order) = schedule.build(p, m, v) else { continue };
                for device in 0..p {
                    let (any, own) =
                        (OrderMilestones::of_any(m, v), OrderMilestones::of(&order, device));
                    let chunks = seconds(compared, v);
                    let own_s = OwnSeconds { chunks: &chunks, shared_s: 0.3, vocab_s: 0.0 };
                    let way_s = [2.0, 20.0][compared % 2];
                    let around = ArrivalTimes { arrive_s: 1.0, ready_s: 4.0 + way_s, way_s };
                    let (any, one) = (any.ends(&own_s, &around), own.ends(&own_s, &around));
                    let none_later = any.own_s <= one.own_s + 1e-9
                        && any.last_backward_s <= one.last_backward_s + 1e-9;
                    assert!(none_later, "{schedule} {p} {m} {v} device {device}: {any:?} {one:?}");
                    compared += 1;
                }
            }
        }
        assert!(compared > 60, "{compared}");
    }

    #[test]
    fn counted_milestones_are_those_of_the_order() {
        let mut compared = 0;
        for schedule in [ScheduleName::ZbH1, ScheduleName::ZbH2, ScheduleName::InterleavedZb] {
            for (p, m, v) in (1..=5)
                .flat_map(|p| (1..=12).map(move |m| (p, m)))
                .flat_map(|(p, m)| (1..=3).map(move |v| (p, m, v)))
            {
                let Ok(order) = schedule.build(p, m, v) else { continue };
                for device in 0..p {
                    let counted = OrderMilestones::counted(schedule, (p, m, v), device);
                    assert_eq!(
                        counted.as_ref(),
                        Some(&OrderMilestones::of(&order, device)),
                        "{schedule} p {p} m {m} v {v} device {device}"
                    );
                    compared += 1;
                }
            }
        }
        assert!(compared > 300);
    }
}
