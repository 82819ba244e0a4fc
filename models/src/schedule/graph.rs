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

/// What a node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing: a join of a barrier, or of what both passes of a pair wait for.
    Join,
    /// A pass.
    Pass(Pass),
    /// A forward and a whole backward together.
    Pair(Pass, Pass),
}

/// A pass, a pair of passes, or a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The device that runs it.
    pub device: u32,
    /// What it runs.
    pub work: Work,
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
        places.check_pairs()?;
        places.check_vocab_order()?;
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
        if schedule.layout != StageLayout::RoundRobin && schedule.chunks != 2 {
            return Err(ScheduleError::Layout { chunks: schedule.chunks });
        }
        let size = KINDS * devices * schedule.chunks * schedule.micro_batches;
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
        let Schedule { chunks, micro_batches, .. } = *self.schedule;
        let chunks = if is_vocab(pass.kind) { 1 } else { chunks };
        let vocab = is_vocab(pass.kind);
        let kind = !vocab || vocab_kinds(self.schedule.vocab).contains(&pass.kind);
        let exists =
            usize::from(pass.chunk) < chunks && (pass.micro_batch as usize) < micro_batches;
        kind && exists && (vocab || self.schedule.runs(pass.chunk, pass.micro_batch))
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
                let all = 0..self.schedule.micro_batches as u32;
                for micro_batch in all.filter(|&k| self.schedule.runs(chunk, k)) {
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
            if self.begins(forward) {
                for &kind in vocab_kinds(self.schedule.vocab) {
                    self.check_has(device, Pass { kind, chunk: 0, ..forward })?;
                }
            }
            self.check_one_backward(device, forward)
        })
    }

    /// Whether a micro-batch's first chunk of a device is this one, so that each micro-batch counts once.
    fn begins(&self, forward: Pass) -> bool {
        forward.chunk == self.schedule.direction(forward.micro_batch)
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
            let in_order = |kinds: &[PassKind], of: Pass| {
                kinds.windows(2).try_for_each(|pair| {
                    let [needs, pass] = [pair[0], pair[1]].map(|kind| Pass { kind, ..of });
                    self.check_after(device, pass, needs)
                })
            };
            in_order(self.kinds_due(device, forward), forward)?;
            let vocab = vocab_kinds(self.schedule.vocab);
            if self.begins(forward) {
                in_order(vocab, Pass { chunk: 0, ..forward })
            } else {
                Ok(())
            }
        })
    }

    fn check_after(&self, device: usize, pass: Pass, needs: Pass) -> Result<(), ScheduleError> {
        if self.position(device, needs) < self.position(device, pass) {
            Ok(())
        } else {
            Err(ScheduleError::TooEarly { device, pass, needs })
        }
    }

    /// Pairs are a forward and the whole backward of another chunk behind it.
    fn check_pairs(&self) -> Result<(), ScheduleError> {
        for (device, pairs) in self.schedule.pairs.iter().enumerate() {
            let order = self.schedule.passes.get(device).map_or(&[][..], Vec::as_slice);
            let fits = |place: u32| match order.get(place as usize..) {
                Some([forward, backward, ..]) => {
                    let kinds = (forward.kind, backward.kind) == (PassKind::F, PassKind::BW);
                    kinds && forward.chunk != backward.chunk
                }
                _ => false,
            };
            if let Some(&place) = pairs.iter().find(|&&place| !fits(place)) {
                return Err(ScheduleError::Pair { device, place });
            }
        }
        Ok(())
    }

    /// All devices run the vocabulary passes of a kind in one order of micro-batches: each kind's reductions
    /// follow one another on a lane of their own, and would meet others' on a device that has another order.
    fn check_vocab_order(&self) -> Result<(), ScheduleError> {
        let order = |device: usize, kind: PassKind| {
            let of_kind = self.schedule.passes[device].iter().filter(move |pass| pass.kind == kind);
            of_kind.map(|pass| pass.micro_batch)
        };
        for &kind in vocab_kinds(self.schedule.vocab) {
            let differs = |&device: &usize| !order(device, kind).eq(order(0, kind));
            if let Some(device) = (1..self.schedule.devices).find(differs) {
                return Err(ScheduleError::VocabOrder { device, kind });
            }
        }
        Ok(())
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
            (PassKind::T, Some(VocabPasses::Naive)) => Need::Barrier(PassKind::S2),
            (PassKind::S2 | PassKind::T, _) => Need::Barrier(PassKind::S),
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
            (None, Some(_)) => Need::Barrier(PassKind::T),
        }
    }

    /// A pass of the neighbouring stage `other`, over the link behind stage `link`.
    fn neighbour(&self, device: usize, other: usize, pass: Pass, link: usize) -> Need {
        let (other_device, chunk) = self.schedule.holder(other, pass.micro_batch);
        let forward = Pass { chunk, ..pass };
        let is_before = other == link;
        let needed = if is_before { forward } else { self.backward(other_device, forward) };
        let same = other_device == device;
        let latency = if same { Latency::None } else { Latency::Link(link as u32) };
        Need::Pass(other_device, needed, latency)
    }

    fn last_forward(&self, device: usize, pass: Pass) -> Need {
        let (holder, chunk) = self.schedule.holder(self.schedule.stages() - 1, pass.micro_batch);
        let latency = if holder == device { Latency::None } else { Latency::Broadcast };
        Need::Pass(holder, Pass { kind: PassKind::F, chunk, ..pass }, latency)
    }
}

/// A walk over all devices at once, a pass of each in turn as far as nothing is missing.
struct Walk<'a> {
    places: &'a Places<'a>,
    /// Next position, by device.
    next: Vec<u32>,
    /// Next pair, by device.
    next_pair: Vec<usize>,
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
            next_pair: vec![0; schedule.devices],
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

    /// The backward that runs together with the device's next pass.
    fn partner(&self, device: usize) -> Option<Pass> {
        let schedule = self.places.schedule;
        let place = *schedule.pairs.get(device)?.get(self.next_pair[device])?;
        let behind = schedule.passes[device].get(place as usize + 1).copied();
        behind.filter(|_| place == self.next[device])
    }

    /// Takes the device's next pass, or pair, if what it waits for is there.
    fn advance(&mut self, device: usize) -> bool {
        let Some(pass) = self.upcoming(device) else { return false };
        let Some(arrival) = self.arrival(device, pass) else { return false };
        match self.partner(device) {
            None => self.push(device, Work::Pass(pass), arrival),
            Some(partner) => {
                let Some(second) = self.arrival(device, partner) else { return false };
                self.push(device, Work::Join, arrival);
                self.push(device, Work::Pair(pass, partner), second);
            }
        }
        true
    }

    /// The node a pass waits for and the way from it; `None` where it has not run.
    fn arrival(&self, device: usize, pass: Pass) -> Option<(u32, Latency)> {
        let (node, latency) = match self.places.need(device, pass) {
            Need::Nothing => return Some((NO_NODE, Latency::None)),
            Need::Pass(other, needed, latency) => (self.node_of(other, needed), latency),
            Need::Barrier(kind) => (self.barrier(kind, pass.micro_batch), Latency::Barrier(kind)),
        };
        (node != NO_NODE).then_some((node, latency))
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

    fn push(&mut self, device: usize, work: Work, (needs, latency): (u32, Latency)) {
        let node = self.nodes.len() as u32;
        let before = std::mem::replace(&mut self.latest[device], node);
        self.nodes.push(Node { device: device as u32, work, before, needs, latency });
        match work {
            Work::Join => {}
            Work::Pass(pass) => {
                self.ran(device, node);
                if self.is_awaited(pass.kind) {
                    self.join(device as u32, pass, node);
                }
            }
            Work::Pair(..) => {
                self.ran(device, node);
                self.ran(device, node);
                self.next_pair[device] += 1;
            }
        }
    }

    /// Notes that a node ran the device's next pass.
    fn ran(&mut self, device: usize, node: u32) {
        self.node_at[self.offsets[device] + self.next[device] as usize] = node;
        self.next[device] += 1;
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
        self.nodes.push(Node { device, work: Work::Join, before, needs, latency: Latency::None });
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
