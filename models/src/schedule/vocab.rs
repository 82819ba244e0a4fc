//! Schedules with the output layer split over all devices.

use super::building_block::{Block, PERIOD, repeated};
use super::generate::{Counts, one_forward_one_backward, pass, split_backward};
use super::interleaved_1f1b::rounds;
use super::{Pass, PassKind, Schedule, ScheduleError, StageLayout, VocabPasses};
use super::{gpipe, looped_bfs, v_half, v_min};

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
    let all = |kind| (0..micro_batches).map(move |k| pass(kind, k, 0));
    let order = |i: usize| {
        let warm_up = devices - 1 - i + vocab.barriers();
        one_forward_one_backward(all(PassKind::F), all(PassKind::BW), warm_up)
    };
    let passes = (0..devices).map(order).collect();
    insert(&counts.schedule(StageLayout::RoundRobin, passes), vocab, times)
}

/// Interleaved 1F1B with vocabulary passes: for each barrier a round more of forwards first.
pub(super) fn interleaved_with_vocab(
    counts: Counts,
    vocab: VocabPasses,
    times: PassTimes,
) -> Result<Schedule, ScheduleError> {
    let Counts { devices, chunks, .. } = counts;
    let order = |i: usize| {
        let forwards = rounds(counts).map(|(k, chunk)| pass(PassKind::F, k, chunk));
        let backwards = rounds(counts).map(|(k, chunk)| pass(PassKind::BW, k, chunks - 1 - chunk));
        let warm_up = 2 * (devices - 1 - i) + (chunks - 1) * devices + vocab.barriers() * chunks;
        one_forward_one_backward(forwards, backwards, warm_up)
    };
    let passes = (0..devices).map(order).collect();
    insert(&counts.schedule(StageLayout::RoundRobin, passes), vocab, times)
}

/// ZB-H1, ZB-H2 (`eager`) and interleaved zero bubble with vocabulary passes.
pub(super) fn zero_bubble_with_vocab(
    counts: Counts,
    eager: bool,
    vocab: VocabPasses,
    times: PassTimes,
) -> Result<Schedule, ScheduleError> {
    let Counts { devices, chunks, .. } = counts;
    let order = |i: usize| {
        let backwards = rounds(counts).map(move |(k, chunk)| (k, chunks - 1 - chunk));
        let depth = if eager { 2 * (devices - i) - 1 } else { devices - i };
        let warm_up = depth + (chunks - 1) * devices + vocab.barriers() * chunks;
        split_backward(rounds(counts), backwards, warm_up, if eager { 2 * i } else { i })
    };
    let passes = (0..devices).map(order).collect();
    insert(&counts.schedule(StageLayout::RoundRobin, passes), vocab, times)
}

/// V-Half and V-Min with vocabulary passes: backwards come a period later for each barrier, and every
/// device holds as many micro-batches more (Vocabulary Parallelism, arXiv 2411.05288, section 5.3).
pub(super) fn building_block_with_vocab(
    counts: Counts,
    blocks: Vec<Block>,
    vocab: VocabPasses,
    times: PassTimes,
) -> Result<Schedule, ScheduleError> {
    let later = vocab.barriers() * PERIOD;
    let delayed = |[f0, f1, b1, b0]: Block| [f0, f1, b1 + later, b0 + later];
    let blocks: Vec<Block> = blocks.into_iter().map(delayed).collect();
    let passes = repeated(&blocks, counts.micro_batches);
    insert(&counts.schedule(StageLayout::V, passes), vocab, times)
}

/// Any other schedule with one copy of each stage: its order for as many micro-batches more as there are
/// barriers, in which each backward is that of a micro-batch so many before. So every device's backwards
/// come later by a micro-batch for each barrier, and it holds as many more (the building block of Vocabulary
/// Parallelism, arXiv 2411.05288, section 5.1, of an order that need not repeat a block).
///
/// `build` makes the order of a number of micro-batches.
pub(super) fn delayed_with_vocab(
    micro_batches: usize,
    build: impl FnOnce(usize) -> Result<Schedule, ScheduleError>,
    vocab: VocabPasses,
    times: PassTimes,
) -> Result<Schedule, ScheduleError> {
    let longer = build(micro_batches + vocab.barriers())?;
    let delay = |order: &Vec<Pass>, pairs: &Vec<u32>| {
        let (mut kept, mut kept_pairs) = (Vec::new(), Vec::new());
        let delayed = |pass: &Pass| delayed(*pass, micro_batches, vocab.barriers());
        for (place, pass) in order.iter().enumerate() {
            let Some(pass) = delayed(pass) else { continue };
            // A pair of which only one is left runs alone.
            let behind = order.get(place + 1).and_then(delayed);
            if pairs.binary_search(&(place as u32)).is_ok() && behind.is_some() {
                kept_pairs.push(kept.len() as u32);
            }
            kept.push(pass);
        }
        (kept, kept_pairs)
    };
    let orders = longer.passes.iter().zip(&longer.pairs).map(|(order, pairs)| delay(order, pairs));
    let (passes, pairs) = orders.unzip();
    insert(&Schedule { micro_batches, passes, pairs, ..longer }, vocab, times)
}

/// A pass of the longer order as one of the order with later backwards; `None` where there is no such
/// micro-batch.
fn delayed(pass: Pass, micro_batches: usize, by: usize) -> Option<Pass> {
    if pass.kind == PassKind::F {
        return ((pass.micro_batch as usize) < micro_batches).then_some(pass);
    }
    let micro_batch = pass.micro_batch.checked_sub(by as u32)?;
    Some(Pass { micro_batch, ..pass })
}

/// Breadth-first schedules have room as they are: backwards begin behind all forwards.
pub(super) fn breadth_first_with_vocab(
    counts: Counts,
    looped: bool,
    vocab: VocabPasses,
    times: PassTimes,
) -> Result<Schedule, ScheduleError> {
    let Counts { devices, micro_batches, chunks } = counts;
    let base = if looped {
        // Vocabulary passes come micro-batch by micro-batch; so must the backwards that wait for them.
        let mut base = looped_bfs(devices, micro_batches, chunks)?;
        let last = micro_batches as u32 - 1;
        let backwards = base.passes.iter_mut().flatten().filter(|pass| pass.kind == PassKind::BW);
        backwards.for_each(|pass| pass.micro_batch = last - pass.micro_batch);
        base
    } else {
        gpipe(devices, micro_batches)?
    };
    insert(&base, vocab, times)
}

/// The blocks of V-Half or V-Min.
pub(super) fn blocks(devices: usize, least: bool) -> Vec<Block> {
    if least { v_min::blocks(devices) } else { v_half::blocks(devices) }
}

/// Puts vocabulary passes into a schedule whose order leaves room for the barriers.
fn insert(
    schedule: &Schedule,
    vocab: VocabPasses,
    times: PassTimes,
) -> Result<Schedule, ScheduleError> {
    times.check()?;
    let (passes, pairs) = Greedy::new(schedule, vocab, times).run();
    let Schedule { devices, chunks, micro_batches, layout, .. } = *schedule;
    Ok(Schedule { devices, chunks, micro_batches, layout, vocab: Some(vocab), passes, pairs })
}

/// Not known yet.
const NEVER: f64 = f64::INFINITY;

/// A run in which every device takes what it can start first, vocabulary passes before others.
struct Greedy<'a> {
    schedule: &'a Schedule,
    vocab: VocabPasses,
    times: PassTimes,
    /// Whether `T` of one micro-batch runs in one step with `S` of the next, as in the reference. With several
    /// rounds of chunks the next micro-batch may come much later.
    fused: bool,
    devices: Vec<Device<'a>>,
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
struct Device<'a> {
    /// Its forwards and backwards in order.
    order: &'a [Pass],
    /// How many of them are done.
    done: usize,
    /// Vocabulary passes done, by kind.
    vocab: [usize; 3],
    free: f64,
    passes: Vec<Pass>,
    /// Places in its order of forwards that run together with the backward behind them, and in what is made
    /// of it.
    pairs: &'a [u32],
    paired: Vec<u32>,
}

#[derive(Clone, Copy)]
enum Next {
    /// Vocabulary passes, from this kind on, each of a micro-batch before the last.
    Vocab(usize),
    Pass(Pass),
}

impl<'a> Greedy<'a> {
    fn new(schedule: &'a Schedule, vocab: VocabPasses, times: PassTimes) -> Self {
        let Schedule { devices, micro_batches, .. } = *schedule;
        let leaves = devices.next_power_of_two();
        let part = schedule.share_chunks() as f64;
        let PassTimes { forward, backward, vocab: each } = times;
        let passes = schedule.stages() * micro_batches;
        Self {
            schedule,
            vocab,
            fused: schedule.chunks == 1 || schedule.layout == StageLayout::V,
            times: PassTimes { forward: forward / part, backward: backward / part, vocab: each },
            devices: schedule
                .passes
                .iter()
                .zip(&schedule.pairs)
                .map(|(order, pairs)| Device::new(order, pairs))
                .collect(),
            forward_end: vec![NEVER; passes],
            backward_end: vec![NEVER; passes],
            barriers: vec![(0, 0.0); vocab.kinds().len() * micro_batches],
            upcoming: vec![(NEVER, Next::Vocab(0)); leaves],
            first: first_leaves(leaves),
        }
    }

    fn run(mut self) -> (Vec<Vec<Pass>>, Vec<Vec<u32>>) {
        let all = self.schedule.devices;
        self.look_ahead(0..all);
        while let Some((device, (start, next))) = self.earliest() {
            let opens = match next {
                Next::Vocab(kind) => self.run_vocab(device, kind, start),
                Next::Pass(pass) => self.run_pass(device, pass, start),
            };
            self.open(device, opens);
        }
        self.devices.into_iter().map(|device| (device.passes, device.paired)).unzip()
    }

    fn open(&mut self, device: usize, opens: Opens) {
        match opens {
            Opens::One(other) => self.look_ahead([device, other]),
            Opens::Vocab(passes) => {
                self.look_ahead([device]);
                self.look_ahead_to(passes);
            }
        }
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

    /// Finds again what devices can start first that come to one of these vocabulary passes, and the last
    /// stage's, whose backwards wait for them too.
    fn look_ahead_to(&mut self, passes: [Option<usize>; 3]) {
        for device in 0..self.schedule.devices {
            let next = self.devices[device].vocab;
            if passes.iter().zip(next).any(|(&pass, next)| pass == Some(next)) {
                self.look_ahead([device]);
            }
        }
        self.look_ahead([self.schedule.device_of(self.schedule.stages() - 1)]);
    }

    /// Finds again what these devices can start first, vocabulary passes before others.
    fn look_ahead(&mut self, devices: impl IntoIterator<Item = usize>) {
        for device in devices {
            let (vocab, pass) = (self.next_vocab(device), self.next_pass(device));
            self.upcoming[device] = if vocab.0 <= pass.0 { vocab } else { pass };
            self.rank(device);
        }
    }

    fn next_vocab(&self, device: usize) -> (f64, Next) {
        let free = self.devices[device].free;
        let start = |kind: usize| {
            let ready = self.step(device, kind).map(|(kind, k)| self.vocab_ready(kind, k));
            let start = ready.reduce(f64::max).map_or(NEVER, |ready| ready.max(free));
            (start, Next::Vocab(kind))
        };
        if self.fused {
            // The last step lacks the first kind, and so on.
            let first = (0..self.vocab.kinds().len()).find(|&kind| self.is_due(device, kind));
            return first.map_or((NEVER, Next::Vocab(0)), start);
        }
        let each = (0..self.vocab.kinds().len()).rev().map(start);
        each.min_by(|(a, _), (b, _)| a.total_cmp(b)).unwrap_or((NEVER, Next::Vocab(0)))
    }

    fn is_due(&self, device: usize, kind: usize) -> bool {
        self.devices[device].vocab[kind] < self.schedule.micro_batches
    }

    /// The passes that run with the next one of a kind, oldest micro-batch first: with the reference's
    /// fused steps the next of each later kind, a micro-batch before.
    fn step(&self, device: usize, kind: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let done = self.devices[device].vocab;
        let (fused, due) = (self.fused, self.is_due(device, kind));
        let (kinds, micro_batches) = (self.vocab.kinds().len(), self.schedule.micro_batches);
        // Kind `j` of step `n` is of micro-batch `n − j`.
        let step = done[kind] + kind;
        let runs = move |&other: &usize| other == kind || fused && other > kind;
        (kind..kinds)
            .rev()
            .filter(move |other| due && runs(other))
            .filter_map(move |other| Some((other, step.checked_sub(other)?)))
            .filter(move |&(_, k)| k < micro_batches)
    }

    fn vocab_ready(&self, kind: usize, k: usize) -> f64 {
        match kind {
            0 => self.forward_end[self.at(self.schedule.stages() - 1, k)],
            _ => self.barrier(kind - 1, k),
        }
    }

    fn barrier(&self, kind: usize, k: usize) -> f64 {
        match self.barriers[self.at(kind, k)] {
            (done, end) if done == self.schedule.devices => end,
            _ => NEVER,
        }
    }

    fn next_pass(&self, device: usize) -> (f64, Next) {
        let Device { order, done, free, .. } = &self.devices[device];
        let Some(&pass) = order.get(*done) else { return (NEVER, Next::Vocab(0)) };
        let partner = self.partner(device).map_or(0.0, |pass| self.ready(device, pass));
        (self.ready(device, pass).max(partner).max(*free), Next::Pass(pass))
    }

    /// The backward that runs together with a device's next pass.
    fn partner(&self, device: usize) -> Option<Pass> {
        let Device { order, done, pairs, .. } = &self.devices[device];
        let paired = pairs.binary_search(&(*done as u32)).is_ok();
        order.get(done + 1).copied().filter(|_| paired)
    }

    fn ready(&self, device: usize, pass: Pass) -> f64 {
        let k = pass.micro_batch as usize;
        let stage = self.schedule.stage_of(device, usize::from(pass.chunk));
        match pass.kind {
            PassKind::F if stage == 0 => 0.0,
            PassKind::F => self.forward_end[self.at(stage - 1, k)],
            // Behind its backward in the device's own order.
            PassKind::W => 0.0,
            _ if stage + 1 < self.schedule.stages() => self.backward_end[self.at(stage + 1, k)],
            _ => self.last_backward_ready(k),
        }
    }

    fn last_backward_ready(&self, k: usize) -> f64 {
        let kind = if self.vocab == VocabPasses::Two { 0 } else { self.vocab.kinds().len() - 1 };
        self.barrier(kind, k)
    }

    /// Runs a step.
    fn run_vocab(&mut self, device: usize, first: usize, start: f64) -> Opens {
        let mut end = start;
        let (mut opened, mut completes) = ([None; 3], false);
        for (kind, k) in self.step(device, first) {
            end += self.times.vocab;
            let slot = self.at(kind, k);
            let (done, latest) = self.barriers[slot];
            self.barriers[slot] = (done + 1, latest.max(end));
            if done + 1 == self.schedule.devices {
                completes = true;
                opened.iter_mut().skip(kind + 1).take(1).for_each(|next| *next = Some(k));
            }
            self.devices[device].passes.push(pass(self.vocab.kinds()[kind], k, 0));
            self.devices[device].vocab[kind] += 1;
        }
        self.devices[device].free = end;
        if completes { Opens::Vocab(opened) } else { Opens::One(device) }
    }

    /// Runs a forward, a backward or weights; with a forward the backward that is paired with it.
    fn run_pass(&mut self, device: usize, pass: Pass, start: f64) -> Opens {
        let Some(partner) = self.partner(device) else {
            return self.end_pass(device, pass, start + self.time(pass.kind));
        };
        let end = start + self.time(pass.kind) + self.time(partner.kind);
        let place = self.devices[device].passes.len() as u32;
        self.devices[device].paired.push(place);
        let opens = self.end_pass(device, pass, end);
        self.open(device, opens);
        self.end_pass(device, partner, end)
    }

    fn end_pass(&mut self, device: usize, pass: Pass, end: f64) -> Opens {
        let stage = self.schedule.stage_of(device, usize::from(pass.chunk));
        let slot = self.at(stage, pass.micro_batch as usize);
        let other = match pass.kind {
            PassKind::F => {
                self.forward_end[slot] = end;
                self.schedule.stage_after(stage)
            }
            PassKind::W => Some(stage),
            _ => {
                self.backward_end[slot] = end;
                Some(self.schedule.stage_before(stage).unwrap_or(stage))
            }
        };
        let own = &mut self.devices[device];
        own.free = end;
        own.done += 1;
        own.passes.push(pass);
        // All devices wait for the last stage's forward.
        let vocab = Opens::Vocab([Some(pass.micro_batch as usize), None, None]);
        other.map_or(vocab, |other| Opens::One(self.schedule.device_of(other)))
    }

    /// Halves of a backward are taken to be equal.
    fn time(&self, kind: PassKind) -> f64 {
        match kind {
            PassKind::F => self.times.forward,
            PassKind::BW => self.times.backward,
            _ => self.times.backward / 2.0,
        }
    }

    fn at(&self, row: usize, micro_batch: usize) -> usize {
        row * self.schedule.micro_batches + micro_batch
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

impl<'a> Device<'a> {
    fn new(order: &'a [Pass], pairs: &'a [u32]) -> Self {
        let (passes, paired) = (Vec::new(), Vec::new());
        Self { order, done: 0, vocab: [0; 3], free: 0.0, passes, pairs, paired }
    }
}

/// What a pass makes ready.
#[derive(Clone, Copy)]
enum Opens {
    /// The next pass of this device.
    One(usize),
    /// Vocabulary passes of all devices: by kind, of which micro-batch.
    Vocab([Option<usize>; 3]),
}
