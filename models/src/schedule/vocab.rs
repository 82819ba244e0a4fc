//! 1F1B with the output layer split over all devices.

use super::generate::{Counts, one_forward_one_backward, pass};
use super::{Pass, PassKind, Schedule, ScheduleError, StageLayout, VocabPasses};
use std::ops::Range;

/// How long passes take relative to one another, where that decides an order; any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassTimes {
    /// Forward of a stage.
    pub forward: f64,
    /// Whole backward of a stage.
    pub backward: f64,
    /// Each vocabulary pass.
    pub vocab: f64,
}

impl Default for PassTimes {
    /// Backward as two forwards, each vocabulary pass as a quarter.
    fn default() -> Self {
        Self { forward: 1.0, backward: 2.0, vocab: 0.25 }
    }
}

impl PassTimes {
    fn check(self) -> Result<(), ScheduleError> {
        let named =
            [("forward", self.forward), ("backward", self.backward), ("vocabulary", self.vocab)];
        match named.into_iter().find(|(_, time)| !time.is_finite() || *time < 0.0) {
            Some((what, time)) => Err(ScheduleError::Time { what, time: time.to_string() }),
            None => Ok(()),
        }
    }
}

/// 1F1B where every device also runs the vocabulary passes of its slice of the output layer for every
/// micro-batch (Vocabulary Parallelism, arXiv 2411.05288, section 5).
///
/// Forwards and backwards keep their 1F1B order with one more micro-batch in flight for each barrier,
/// `min(m, p − i + barriers)` on device `i`; the vocabulary passes go where a greedy run with `times`
/// finds them ready, as in the reference implementation `T` of one micro-batch with `S` of the next.
/// While transfers and barriers take no time, the makespan is `m(F + B + W + S + T) + (p − 1)(F + B + W)`.
///
/// # Errors
/// No devices, no micro-batches, or a time that is negative or not finite.
pub fn one_f_one_b_with_vocab(
    devices: usize,
    micro_batches: usize,
    vocab: VocabPasses,
    times: PassTimes,
) -> Result<Schedule, ScheduleError> {
    let counts = Counts::new(devices, micro_batches, 1)?;
    times.check()?;
    let passes = Greedy::new(counts, vocab, times).run();
    let schedule = counts.schedule(StageLayout::RoundRobin, passes);
    Ok(Schedule { vocab: Some(vocab), ..schedule })
}

/// Not known yet.
const NEVER: f64 = f64::INFINITY;

/// A run in which every device takes what it can start first, vocabulary passes before others.
struct Greedy {
    counts: Counts,
    vocab: VocabPasses,
    times: PassTimes,
    devices: Vec<Device>,
    /// Ends of forwards and backwards by stage and micro-batch.
    forward_end: Vec<f64>,
    backward_end: Vec<f64>,
    /// By kind of vocabulary pass and micro-batch: devices done and the latest end.
    barriers: Vec<(usize, f64)>,
    /// By device: what it can start first, and when; as many more as make a power of two never start.
    upcoming: Vec<(f64, Next)>,
    /// A tree over the devices, the root at 1 and the leaves in its second half: the device that can start
    /// first, of several the first.
    first: Vec<usize>,
}

/// A device in the middle of a run.
struct Device {
    /// Its forwards and backwards in order.
    order: Vec<Pass>,
    /// How many of them are done.
    done: usize,
    /// Vocabulary steps done; step `n` runs the `j`-th kind of pass for micro-batch `n − j`.
    steps: usize,
    free: f64,
    passes: Vec<Pass>,
}

#[derive(Clone, Copy)]
enum Next {
    Step,
    Pass(Pass),
}

impl Greedy {
    fn new(counts: Counts, vocab: VocabPasses, times: PassTimes) -> Self {
        let Counts { devices, micro_batches, .. } = counts;
        let in_flight = |i: usize| devices - i + vocab.barriers();
        let leaves = devices.next_power_of_two();
        Self {
            counts,
            vocab,
            times,
            devices: (0..devices).map(|i| Device::new(micro_batches, in_flight(i))).collect(),
            forward_end: vec![NEVER; devices * micro_batches],
            backward_end: vec![NEVER; devices * micro_batches],
            barriers: vec![(0, 0.0); vocab.kinds().len() * micro_batches],
            upcoming: vec![(NEVER, Next::Step); leaves],
            first: first_leaves(leaves),
        }
    }

    fn run(mut self) -> Vec<Vec<Pass>> {
        self.look_ahead(0..self.counts.devices);
        while let Some((device, (start, next))) = self.earliest() {
            let opened = match next {
                Next::Step => self.run_step(device, start),
                Next::Pass(pass) => self.run_pass(device, pass, start),
            };
            let devices = self.counts.devices;
            self.look_ahead(device.saturating_sub(1)..(device + 2).min(devices));
            if let Some(step) = opened {
                self.look_ahead_to(step);
            }
        }
        self.devices.into_iter().map(|device| device.passes).collect()
    }

    /// What can start first of all; `None` when all is done.
    fn earliest(&self) -> Option<(usize, (f64, Next))> {
        let device = self.first[1];
        let (start, next) = self.upcoming[device];
        (start < NEVER).then_some((device, (start, next)))
    }

    /// Corrects the tree after a device's next start changed.
    fn rank(&mut self, device: usize) {
        let mut node = (self.first.len() / 2 + device) / 2;
        while node > 0 {
            let (left, right) = (self.first[2 * node], self.first[2 * node + 1]);
            let later = self.upcoming[right].0 < self.upcoming[left].0;
            self.first[node] = if later { right } else { left };
            node /= 2;
        }
    }

    /// Finds again what devices can start first that come to a vocabulary step, and the last one, whose
    /// backwards wait for it too.
    fn look_ahead_to(&mut self, step: usize) {
        let last = self.counts.devices - 1;
        for device in 0..last {
            if self.devices[device].steps == step {
                self.look_ahead(device..device + 1);
            }
        }
        self.look_ahead(last..last + 1);
    }

    /// Finds again what these devices can start first, vocabulary steps before others.
    fn look_ahead(&mut self, devices: Range<usize>) {
        for device in devices {
            let (step, pass) = (self.next_step(device), self.next_pass(device));
            self.upcoming[device] = if step.0 <= pass.0 { step } else { pass };
            self.rank(device);
        }
    }

    fn next_step(&self, device: usize) -> (f64, Next) {
        let Device { steps, free, .. } = self.devices[device];
        let all = self.counts.micro_batches + self.vocab.kinds().len() - 1;
        let ready = self.step_passes(steps).map(|(kind, k)| self.vocab_ready(kind, k));
        (if steps < all { ready.fold(free, f64::max) } else { NEVER }, Next::Step)
    }

    /// The passes of a vocabulary step, by index into the kinds, oldest micro-batch first.
    fn step_passes(&self, step: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let micro_batches = self.counts.micro_batches;
        let kinds = (0..self.vocab.kinds().len()).rev();
        kinds
            .filter_map(move |kind| Some((kind, step.checked_sub(kind)?)))
            .filter(move |&(_, k)| k < micro_batches)
    }

    fn vocab_ready(&self, kind: usize, k: usize) -> f64 {
        match kind {
            0 => self.forward_end[self.at(self.counts.devices - 1, k)],
            _ => self.barrier(kind - 1, k),
        }
    }

    fn barrier(&self, kind: usize, k: usize) -> f64 {
        match self.barriers[self.at(kind, k)] {
            (done, end) if done == self.counts.devices => end,
            _ => NEVER,
        }
    }

    fn next_pass(&self, device: usize) -> (f64, Next) {
        let Device { order, done, free, .. } = &self.devices[device];
        let Some(&pass) = order.get(*done) else { return (NEVER, Next::Step) };
        let k = pass.micro_batch as usize;
        let ready = match pass.kind {
            PassKind::F if device == 0 => 0.0,
            PassKind::F => self.forward_end[self.at(device - 1, k)],
            _ if device + 1 < self.counts.devices => self.backward_end[self.at(device + 1, k)],
            _ => self.last_backward_ready(k),
        };
        (ready.max(*free), Next::Pass(pass))
    }

    fn last_backward_ready(&self, k: usize) -> f64 {
        let kind = if self.vocab == VocabPasses::Two { 0 } else { self.vocab.kinds().len() - 1 };
        self.barrier(kind, k)
    }

    /// Runs a step; the next one if barriers waited for this device last.
    fn run_step(&mut self, device: usize, start: f64) -> Option<usize> {
        let mut end = start;
        let mut completes = false;
        let step = self.devices[device].steps;
        for (kind, k) in self.step_passes(step) {
            end += self.times.vocab;
            let slot = self.at(kind, k);
            let (done, latest) = self.barriers[slot];
            self.barriers[slot] = (done + 1, latest.max(end));
            completes |= done + 1 == self.counts.devices;
            self.devices[device].passes.push(pass(self.vocab.kinds()[kind], k, 0));
        }
        self.devices[device].steps += 1;
        self.devices[device].free = end;
        completes.then_some(step + 1)
    }

    /// Runs a forward or a backward; the step of all devices that waits for it.
    fn run_pass(&mut self, device: usize, pass: Pass, start: f64) -> Option<usize> {
        let is_last = device + 1 == self.counts.devices;
        let slot = self.at(device, pass.micro_batch as usize);
        let (ends, time) = match pass.kind {
            PassKind::F => (&mut self.forward_end, self.times.forward),
            _ => (&mut self.backward_end, self.times.backward),
        };
        ends[slot] = start + time;
        let device = &mut self.devices[device];
        device.free = start + time;
        device.done += 1;
        device.passes.push(pass);
        (is_last && pass.kind == PassKind::F).then_some(pass.micro_batch as usize)
    }

    fn at(&self, row: usize, micro_batch: usize) -> usize {
        row * self.counts.micro_batches + micro_batch
    }
}

/// A tree over leaves that are all alike: each node has its first leaf.
fn first_leaves(leaves: usize) -> Vec<usize> {
    let mut first = vec![0; 2 * leaves];
    for node in (1..2 * leaves).rev() {
        first[node] = if node >= leaves { node - leaves } else { first[2 * node] };
    }
    first
}

impl Device {
    fn new(micro_batches: usize, in_flight: usize) -> Self {
        let all = |kind| (0..micro_batches).map(move |k| pass(kind, k, 0));
        let order = one_forward_one_backward(all(PassKind::F), all(PassKind::BW), in_flight - 1);
        Self { order, done: 0, steps: 0, free: 0.0, passes: Vec::new() }
    }
}
