//! What waits for what: a schedule's passes in an order in which they can run.
//!
//! Besides the pass before it on its device, a pass waits for at most one thing elsewhere: a
//! neighbouring stage's pass or a barrier. A barrier over `p` devices is a chain of `p` joins that
//! take no time, so that every node waits for at most two others.

use super::{Pass, PassKind, Schedule, ScheduleError, StageLayout, VocabPasses};

/// Stands for "no such node" in [`Node`].
pub const NO_NODE: u32 = u32::MAX;

/// What passes between the end of a pass elsewhere and the start of the one that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latency {
    /// Nothing: the same device, or nothing to wait for.
    None,
    /// A transfer between stages `j` and `j + 1`, either way.
    Link(u32),
    /// The broadcast of the last stage's output before `S` (`C0`).
    Broadcast,
    /// The barrier between this kind of vocabulary pass and what follows it.
    Barrier(PassKind),
}

/// A pass, or a join of a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The device that runs the pass.
    pub device: u32,
    /// The pass; `None` for a join.
    pub pass: Option<Pass>,
    /// The node before it on its device; for a join, the pass it adds to the joins before it.
    pub before: u32,
    /// The node elsewhere that it waits for.
    pub needs: u32,
    /// What lies between that node's end and this one's start.
    pub latency: Latency,
}

/// The nodes of a schedule, each behind those it waits for.
#[derive(Clone, Debug)]
pub struct Graph {
    /// All nodes.
    pub nodes: Vec<Node>,
}

impl Graph {
    /// Orders the passes of a schedule.
    ///
    /// # Errors
    /// Says which pass is missing, doubled, foreign or too early, or where the devices wait for one
    /// another.
    pub fn new(schedule: &Schedule) -> Result<Self, ScheduleError> {
        let places = Places::new(schedule)?;
        places.check_complete()?;
        places.check_local_order()?;
        Walk::new(&places).run()
    }
}

const ABSENT: u32 = u32::MAX;

/// Where in its device's order each pass lies.
struct Places<'a> {
    schedule: &'a Schedule,
    /// By kind, device, chunk and micro-batch.
    positions: Vec<u32>,
}

impl<'a> Places<'a> {
    fn new(schedule: &'a Schedule) -> Result<Self, ScheduleError> {
        let (devices, lists) = (schedule.devices, schedule.passes.len());
        if lists != devices {
            return Err(ScheduleError::DeviceLists { lists, devices });
        }
        if schedule.layout == StageLayout::V && schedule.chunks != 2 {
            return Err(ScheduleError::Layout { chunks: schedule.chunks });
        }
        let size = KINDS * schedule.stages() * schedule.micro_batches;
        let mut places = Self { schedule, positions: vec![ABSENT; size] };
        for (device, passes) in schedule.passes.iter().enumerate() {
            for (n, pass) in passes.iter().enumerate() {
                places.add(device, *pass, n as u32)?;
            }
        }
        Ok(places)
    }

    fn add(&mut self, device: usize, pass: Pass, position: u32) -> Result<(), ScheduleError> {
        if !self.belongs(pass) {
            return Err(ScheduleError::Foreign { device, pass });
        }
        let slot = self.slot(device, pass);
        match std::mem::replace(&mut self.positions[slot], position) {
            ABSENT => Ok(()),
            _ => Err(ScheduleError::Duplicate { device, pass }),
        }
    }

    fn belongs(&self, pass: Pass) -> bool {
        let Schedule { chunks, micro_batches, vocab, .. } = *self.schedule;
        let chunks = if is_vocab(pass.kind) { 1 } else { chunks };
        let kind = !is_vocab(pass.kind) || vocab_kinds(vocab).contains(&pass.kind);
        kind && usize::from(pass.chunk) < chunks && (pass.micro_batch as usize) < micro_batches
    }

    fn slot(&self, device: usize, pass: Pass) -> usize {
        let Schedule { devices, chunks, micro_batches, .. } = *self.schedule;
        let place = (pass.kind as usize * devices + device) * chunks + usize::from(pass.chunk);
        place * micro_batches + pass.micro_batch as usize
    }

    fn position(&self, device: usize, pass: Pass) -> u32 {
        self.positions[self.slot(device, pass)]
    }

    fn has(&self, device: usize, pass: Pass) -> bool {
        self.position(device, pass) != ABSENT
    }

    /// Calls `check` for every device, chunk and micro-batch with that forward.
    fn each(
        &self,
        check: impl Fn(usize, Pass) -> Result<(), ScheduleError>,
    ) -> Result<(), ScheduleError> {
        for device in 0..self.schedule.devices {
            for chunk in 0..self.schedule.chunks as u16 {
                for micro_batch in 0..self.schedule.micro_batches as u32 {
                    check(device, Pass { kind: PassKind::F, micro_batch, chunk })?;
                }
            }
        }
        Ok(())
    }

    fn check_complete(&self) -> Result<(), ScheduleError> {
        self.each(|device, forward| {
            for &kind in self.kinds_due(device, forward) {
                self.check_has(device, Pass { kind, ..forward })?;
            }
            if forward.chunk == 0 {
                for &kind in vocab_kinds(self.schedule.vocab) {
                    self.check_has(device, Pass { kind, ..forward })?;
                }
            }
            self.check_one_backward(device, forward)
        })
    }

    fn kinds_due(&self, device: usize, forward: Pass) -> &'static [PassKind] {
        if self.has(device, Pass { kind: PassKind::BW, ..forward }) {
            &[PassKind::F, PassKind::BW]
        } else {
            &[PassKind::F, PassKind::B, PassKind::W]
        }
    }

    fn check_has(&self, device: usize, pass: Pass) -> Result<(), ScheduleError> {
        if self.has(device, pass) { Ok(()) } else { Err(ScheduleError::Missing { device, pass }) }
    }

    /// Where there is a whole backward, there are no halves.
    fn check_one_backward(&self, device: usize, forward: Pass) -> Result<(), ScheduleError> {
        let has = |kind| self.has(device, Pass { kind, ..forward });
        let extra = [PassKind::B, PassKind::W].into_iter().find(|&kind| has(kind));
        match extra {
            Some(kind) if has(PassKind::BW) => {
                Err(ScheduleError::Duplicate { device, pass: Pass { kind, ..forward } })
            }
            _ => Ok(()),
        }
    }

    fn check_local_order(&self) -> Result<(), ScheduleError> {
        self.each(|device, forward| {
            let in_order = |kinds: &[PassKind]| {
                kinds.windows(2).try_for_each(|pair| {
                    let [needs, pass] = [pair[0], pair[1]].map(|kind| Pass { kind, ..forward });
                    self.check_after(device, pass, needs)
                })
            };
            in_order(self.kinds_due(device, forward))?;
            if forward.chunk == 0 { in_order(vocab_kinds(self.schedule.vocab)) } else { Ok(()) }
        })
    }

    fn check_after(&self, device: usize, pass: Pass, needs: Pass) -> Result<(), ScheduleError> {
        if self.position(device, needs) < self.position(device, pass) {
            Ok(())
        } else {
            Err(ScheduleError::TooEarly { device, pass, needs })
        }
    }

    /// The backward of a stage whose input gradients the stage before it waits for.
    fn backward(&self, device: usize, forward: Pass) -> Pass {
        let whole = Pass { kind: PassKind::BW, ..forward };
        let half = Pass { kind: PassKind::B, ..forward };
        if self.has(device, whole) { whole } else { half }
    }
}

/// What a pass waits for besides the pass before it on its device.
enum Need {
    Nothing,
    Pass(usize, Pass, Latency),
    /// All devices' passes of this kind for its micro-batch.
    Barrier(PassKind),
}

impl Places<'_> {
    fn need(&self, device: usize, pass: Pass) -> Need {
        let stage = self.schedule.stage_of(device, usize::from(pass.chunk));
        match (pass.kind, self.schedule.vocab) {
            (PassKind::F, _) => self.forward_need(device, stage, pass),
            (PassKind::B | PassKind::BW, _) => self.backward_need(device, stage, pass),
            (PassKind::S, _) => self.last_forward(device, pass),
            (PassKind::S2, _) | (PassKind::T, Some(VocabPasses::One | VocabPasses::Two)) => {
                Need::Barrier(PassKind::S)
            }
            (PassKind::T, _) => Need::Barrier(PassKind::S2),
            (PassKind::W, _) => Need::Nothing,
        }
    }

    fn forward_need(&self, device: usize, stage: usize, pass: Pass) -> Need {
        match self.schedule.stage_before(stage) {
            None => Need::Nothing,
            Some(before) => self.neighbour(device, before, pass, before),
        }
    }

    fn backward_need(&self, device: usize, stage: usize, pass: Pass) -> Need {
        match (self.schedule.stage_after(stage), self.schedule.vocab) {
            (Some(after), _) => {
                let forward = Pass { kind: PassKind::F, ..pass };
                self.neighbour(device, after, forward, stage)
            }
            (None, None) => Need::Nothing,
            (None, Some(VocabPasses::Two)) => Need::Barrier(PassKind::S),
            (None, Some(VocabPasses::Naive | VocabPasses::One)) => Need::Barrier(PassKind::T),
        }
    }

    /// A pass of the neighbouring stage `other`, over the link behind stage `link`.
    fn neighbour(&self, device: usize, other: usize, pass: Pass, link: usize) -> Need {
        let other_device = self.schedule.device_of(other);
        let forward = Pass { chunk: self.schedule.chunk_of(other) as u16, ..pass };
        let is_before = other == link;
        let needed = if is_before { forward } else { self.backward(other_device, forward) };
        let same = other_device == device;
        let latency = if same { Latency::None } else { Latency::Link(link as u32) };
        Need::Pass(other_device, needed, latency)
    }

    fn last_forward(&self, device: usize, pass: Pass) -> Need {
        let last = self.schedule.stages() - 1;
        let holder = self.schedule.device_of(last);
        let chunk = self.schedule.chunk_of(last) as u16;
        let latency = if holder == device { Latency::None } else { Latency::Broadcast };
        Need::Pass(holder, Pass { kind: PassKind::F, chunk, ..pass }, latency)
    }
}

/// A walk over all devices at once, a pass of each in turn as far as nothing is missing.
struct Walk<'a> {
    places: &'a Places<'a>,
    /// Next position, by device.
    next: Vec<u32>,
    /// Node of the latest pass, by device.
    latest: Vec<u32>,
    /// First slot of each device in `node_at`.
    offsets: Vec<usize>,
    /// Node of each pass, by device and position.
    node_at: Vec<u32>,
    barriers: Barriers,
    nodes: Vec<Node>,
}

/// For each kind of vocabulary pass and micro-batch, how many devices are done and the last join.
struct Barriers {
    micro_batches: usize,
    done: Vec<u32>,
    last_join: Vec<u32>,
}

impl Barriers {
    fn new(schedule: &Schedule) -> Self {
        let micro_batches = schedule.micro_batches;
        let size = if schedule.vocab.is_some() { 3 * micro_batches } else { 0 };
        Self { micro_batches, done: vec![0; size], last_join: vec![NO_NODE; size] }
    }

    fn slot(&self, kind: PassKind, micro_batch: u32) -> usize {
        (kind as usize - PassKind::S as usize) * self.micro_batches + micro_batch as usize
    }
}

impl<'a> Walk<'a> {
    fn new(places: &'a Places<'a>) -> Self {
        let schedule = places.schedule;
        let mut passes = 0;
        let starts = schedule.passes.iter().map(|order| {
            let start = passes;
            passes += order.len();
            start
        });
        let offsets = starts.collect();
        Self {
            places,
            next: vec![0; schedule.devices],
            latest: vec![NO_NODE; schedule.devices],
            offsets,
            node_at: vec![NO_NODE; passes],
            barriers: Barriers::new(schedule),
            nodes: Vec::with_capacity(passes),
        }
    }

    fn run(mut self) -> Result<Graph, ScheduleError> {
        let devices = self.places.schedule.devices;
        // Not `any`, which would stop at the first device that moves.
        while (0..devices).filter(|&device| self.advance(device)).count() > 0 {}
        let waiting: Vec<_> = (0..devices).filter_map(|d| Some((d, self.upcoming(d)?))).collect();
        if waiting.is_empty() {
            Ok(Graph { nodes: self.nodes })
        } else {
            Err(ScheduleError::Deadlock { waiting })
        }
    }

    fn upcoming(&self, device: usize) -> Option<Pass> {
        self.places.schedule.passes[device].get(self.next[device] as usize).copied()
    }

    /// Takes the device's next pass if what it waits for is there.
    fn advance(&mut self, device: usize) -> bool {
        let Some(pass) = self.upcoming(device) else { return false };
        let (needs, latency) = match self.places.need(device, pass) {
            Need::Nothing => (NO_NODE, Latency::None),
            Need::Pass(other, needed, latency) => match self.node_of(other, needed) {
                NO_NODE => return false,
                node => (node, latency),
            },
            Need::Barrier(kind) => match self.barrier(kind, pass.micro_batch) {
                NO_NODE => return false,
                node => (node, Latency::Barrier(kind)),
            },
        };
        self.push(device, pass, needs, latency);
        true
    }

    fn node_of(&self, device: usize, pass: Pass) -> u32 {
        let position = self.places.position(device, pass) as usize;
        self.node_at[self.offsets[device] + position]
    }

    fn barrier(&self, kind: PassKind, micro_batch: u32) -> u32 {
        let slot = self.barriers.slot(kind, micro_batch);
        let complete = self.barriers.done[slot] as usize == self.places.schedule.devices;
        if complete { self.barriers.last_join[slot] } else { NO_NODE }
    }

    fn push(&mut self, device: usize, pass: Pass, needs: u32, latency: Latency) {
        let node = self.nodes.len() as u32;
        let before = std::mem::replace(&mut self.latest[device], node);
        self.node_at[self.offsets[device] + self.next[device] as usize] = node;
        self.next[device] += 1;
        let device = device as u32;
        self.nodes.push(Node { device, pass: Some(pass), before, needs, latency });
        if self.is_awaited(pass.kind) {
            self.join(device, pass, node);
        }
    }

    /// Whether all devices' passes of this kind end in a barrier.
    fn is_awaited(&self, kind: PassKind) -> bool {
        let freely = self.places.schedule.vocab == Some(VocabPasses::Two) && kind == PassKind::T;
        is_vocab(kind) && !freely
    }

    fn join(&mut self, device: u32, pass: Pass, before: u32) {
        let slot = self.barriers.slot(pass.kind, pass.micro_batch);
        let node = self.nodes.len() as u32;
        let needs = std::mem::replace(&mut self.barriers.last_join[slot], node);
        self.barriers.done[slot] += 1;
        self.nodes.push(Node { device, pass: None, before, needs, latency: Latency::None });
    }
}

/// Kinds of pass.
const KINDS: usize = PassKind::T as usize + 1;

fn is_vocab(kind: PassKind) -> bool {
    matches!(kind, PassKind::S | PassKind::S2 | PassKind::T)
}

fn vocab_kinds(vocab: Option<VocabPasses>) -> &'static [PassKind] {
    vocab.map_or(&[], VocabPasses::kinds)
}
