//! Listed placements: the fastest of them, by chains of passes.
//!
//! Device `i` starts when the first micro-batch has come down the first chunks before it, does all its
//! micro-batches of all its chunks one after another, and the last one still has to go back up those
//! chunks to the first device, whose reductions come last. Every pass of that chain must follow the one
//! before it in naive, GPipe, 1F1B, interleaved and breadth-first orders alike. In other orders the chains
//! are those between the milestones of each device ([`crate::placement::milestones`]).

use super::states::StateView;
use super::trade::Trade;
use super::work::{KindWork, Line, Work};
use crate::case::family::{Ranges, few_cuts};
use crate::case::layers::{Counts, Layers};
use crate::case::levels::{Chain, Levels};
use crate::cost::state::LocalParams;
use crate::placement::milestones::{Around, OwnSeconds, PassCounts};
use crate::placement::{Marks, Pipeline};
use models::decisions::Vocab;
use models::schedule::{ScheduleName, StageLayout};
use std::sync::Arc;

/// Listed placements on one pipeline, with what devices hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Members {
    /// The placements.
    pub list: Vec<Ranges>,
    members: Vec<Member>,
    /// Members by the layers of their fullest device, fewest first: the fastest is likely among them.
    evenest_first: Vec<usize>,
    /// By device, micro-batches in flight of the first and of the last chunk.
    held: Vec<(f64, f64)>,
    /// By kind, fewest layers times micro-batches in flight that a member has on all devices.
    least_held: [f64; 4],
    /// Most micro-batches in flight that a layer of a level which recomputes has on average on some device;
    /// where every mix is open, most of any chunk.
    most_held: f64,
    /// By device, most micro-batches in flight of a chunk, where every mix is open.
    open: Option<Vec<f64>>,
    /// By device, the milestones of its order; none where chains are known without.
    marks: Vec<Marks>,
}

/// One listed placement.
#[derive(Clone, Debug, PartialEq)]
struct Member {
    /// Layers of the first chunks of the devices before each.
    before: Vec<Counts>,
    /// Layers by device.
    devices: Vec<Device>,
    /// Devices that one behind them with the same layers does not stand for: it starts later.
    corners: Vec<usize>,
    /// Layers by stage.
    stages: Vec<Counts>,
    /// The device with most layers.
    fullest: usize,
}

/// What a device holds.
#[derive(Clone, Debug, Default, PartialEq)]
struct Device {
    /// Layers of all chunks.
    layers: Counts,
    /// Chunks by their layers.
    alike: Vec<Alike>,
    /// Layers of the longest chunk of one kind.
    longest: usize,
}

/// Chunks of a device with the same layers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Alike {
    layers: Counts,
    /// How many there are.
    chunks: f64,
    /// Their micro-batches in flight at one moment.
    held: f64,
}

impl Members {
    /// What matters of a line to [`Self::new`]: the order of passes, devices, chunks, and the micro-batches as
    /// far as they limit what is in flight; all of them where milestones count.
    pub fn key(line: &Line) -> MembersKey {
        let unlimited = 2 * line.devices + 3;
        let whole = line.schedule.is_whole();
        let m = match line.micro_batches {
            _ if holds_all(line) => 1,
            m if whole => m.min(unlimited),
            m => m,
        };
        let over_pipeline = line.vocab.over_pipeline() && !whole;
        let vocab = if over_pipeline { line.vocab } else { Vocab::Tensor };
        (line.schedule, line.devices, line.chunks, m, vocab)
    }

    /// The placements `list` on the pipeline that a key describes. What is known of an order only once it is
    /// made, `pipeline` says.
    pub fn new(
        layers: &Layers,
        line: &Line,
        list: Vec<Ranges>,
        pipeline: impl FnOnce() -> Arc<Pipeline>,
    ) -> Self {
        let line = Line { micro_batches: Self::key(line).3, ..*line };
        let counted: Vec<Marks> =
            (0..line.devices).filter_map(|device| line.counted_marks(device)).collect();
        if line.schedule.is_whole() || !counted.is_empty() {
            return Self::with(layers, &line, list, &held_by(&line), counted);
        }
        let pipeline = pipeline();
        let in_flight: Vec<_> = pipeline.in_flight.iter().map(|held| fullest(held)).collect();
        Self::with(layers, &line, list, &in_flight, pipeline.marks.clone())
    }

    /// The same with what holds of any order without vocabulary passes, and nothing in flight.
    pub fn of_any(layers: &Layers, line: &Line, list: Vec<Ranges>) -> Self {
        let any = Marks::of_any(line.micro_batches, line.chunks);
        let nothing = vec![vec![0; line.chunks]; line.devices];
        Self::with(layers, line, list, &nothing, vec![any; line.devices])
    }

    fn with(
        layers: &Layers,
        line: &Line,
        list: Vec<Ranges>,
        in_flight: &[Vec<usize>],
        marks: Vec<Marks>,
    ) -> Self {
        let end = |counts: &Vec<usize>| (counts[0] as f64, counts[line.chunks - 1] as f64);
        let members: Vec<Member> =
            list.iter().map(|ranges| Member::new(layers, line, in_flight, ranges)).collect();
        let of_kind = |kind: usize| {
            members.iter().map(|member| member.held(kind)).fold(f64::INFINITY, f64::min)
        };
        let most = |counts: &Vec<usize>| counts.iter().copied().max().unwrap_or(1) as f64;
        let open = line.chunks > 1 && few_cuts(layers.len(), line.devices * line.chunks);
        let open: Option<Vec<f64>> = open.then(|| in_flight.iter().map(most).collect());
        let most_held = match &open {
            Some(most) => most.iter().copied().fold(1.0, f64::max),
            None => members.iter().map(Member::most_held).fold(1.0, f64::max),
        };
        let mut evenest_first: Vec<usize> = (0..members.len()).collect();
        evenest_first.sort_by_key(|&member: &usize| members[member].most_layers());
        Self {
            evenest_first,
            held: in_flight.iter().map(end).collect(),
            least_held: [0, 1, 2, 3].map(of_kind),
            most_held,
            open,
            members,
            list,
            marks,
        }
    }

    /// Least recomputation of one micro-batch in the whole model that memory makes necessary on several
    /// chunks a device, s, where states take so many bytes a parameter and devices have `budget` bytes.
    ///
    /// What all devices lack together must be saved, and a second of recomputation in all chunks of a device
    /// to the same level saves as many times a layer's bytes as its layers are in flight on average.
    pub fn recompute_s(
        &self,
        line: &Line,
        work: &Work,
        trade: &Trade,
        state_bytes: [f64; 2],
        budget: f64,
    ) -> f64 {
        let first_s = trade.at_first(&work.counts).0;
        let scale = if holds_all(line) { line.m() } else { 1.0 };
        let bytes = |(kind, held): (usize, &f64)| held * scale * trade.first_of(kind).1;
        let held: f64 = self.least_held.iter().take(work.kinds.len()).enumerate().map(bytes).sum();
        let params = work.params();
        let states = params.dense * state_bytes[0] + params.expert * state_bytes[1];
        let free = line.devices as f64 * budget * (1.0 + 1e-9) - states;
        let excess = (held - free) / (self.most_held * scale);
        if excess <= 0.0 { first_s } else { trade.saving_s(&work.counts, first_s, excess) }
    }
}

/// See [`Members::key`].
pub type MembersKey = (ScheduleName, usize, usize, usize, Vocab);

/// By device, micro-batches in flight of each chunk at a moment that it certainly reaches.
fn held_by(line: &Line) -> Vec<Vec<usize>> {
    let held = |device| {
        let mut counts = vec![];
        line.in_flight(device, &mut counts);
        counts
    };
    (0..line.devices).map(held).collect()
}

/// Micro-batches in flight of each chunk at a moment when there are most in all.
fn fullest(vectors: &[Vec<u32>]) -> Vec<usize> {
    let most = vectors.iter().max_by_key(|counts| counts.iter().sum::<u32>());
    most.map_or_else(Vec::new, |counts| counts.iter().map(|&n| n as usize).collect())
}

/// Every micro-batch is in flight at once, so that one stands for all.
fn holds_all(line: &Line) -> bool {
    matches!(line.schedule, ScheduleName::GPipe | ScheduleName::LoopedBfs)
}

impl Member {
    fn new(layers: &Layers, line: &Line, in_flight: &[Vec<usize>], ranges: &Ranges) -> Self {
        let p = in_flight.len();
        let mut devices = vec![Device::default(); p];
        let counts = |&(start, end): &(usize, usize)| layers.between(start, end);
        let stages: Vec<Counts> = ranges.iter().map(counts).collect();
        for (stage, &counts) in stages.iter().enumerate() {
            let device = line.layout().device_of(p, stage);
            devices[device].add(counts, in_flight[device][stage / p] as f64);
        }
        let mut sum = Counts::default();
        let mut before = vec![];
        for counts in ranges.iter().take(p).map(counts) {
            before.push(sum);
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        // Vocabulary and transfers make the ends different.
        let stands_for =
            |i: usize| i > 0 && i + 2 < p && devices[i].layers == devices[i + 1].layers;
        let corners = (0..p).filter(|&device| !stands_for(device)).collect();
        let fullest = (0..p).max_by_key(|&device| devices[device].layers.iter().sum::<usize>());
        Self { before, devices, corners, stages, fullest: fullest.unwrap_or(0) }
    }
}

impl Member {
    /// Layers of the fullest device.
    fn most_layers(&self) -> usize {
        self.devices[self.fullest].layers.iter().sum()
    }

    /// Layers of a kind times their micro-batches in flight.
    fn held(&self, kind: usize) -> f64 {
        let alike = self.devices.iter().flat_map(|device| &device.alike);
        alike.map(|alike| alike.held * alike.layers[kind] as f64).sum()
    }

    /// Of a device that recomputes so many layers of each chunk, the mean in flight of a layer.
    fn most_held(&self) -> f64 {
        let mut most = 1.0_f64;
        for device in &self.devices {
            for kind in 0..Counts::default().len() {
                for level in 1..=device.longest {
                    let layers = |alike: &Alike| alike.layers[kind].min(level) as f64;
                    let all: f64 = device.alike.iter().map(|a| a.chunks * layers(a)).sum();
                    let held: f64 = device.alike.iter().map(|a| a.held * layers(a)).sum();
                    most = if all > 0.0 { most.max(held / all) } else { most };
                }
                // The next layer of the longest chunks alone.
                for alike in &device.alike {
                    most = most.max(alike.held / alike.chunks);
                }
            }
        }
        most
    }
}

impl Device {
    fn add(&mut self, layers: Counts, held: f64) {
        for (sum, count) in self.layers.iter_mut().zip(layers) {
            *sum += count;
            self.longest = self.longest.max(count);
        }
        match self.alike.iter_mut().find(|alike| alike.layers == layers) {
            Some(alike) => {
                alike.chunks += 1.0;
                alike.held += held;
            }
            None => self.alike.push(Alike { layers, chunks: 1.0, held }),
        }
    }
}

/// What the bounds of listed placements are computed from.
#[derive(Clone, Copy)]
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
    pub fn bound_s(&self, members: &Members, limit_s: f64) -> f64 {
        let trade = Trade::new(&self.work.kinds, self.line.options());
        let mut least_s = limit_s;
        for &member in &members.evenest_first {
            let member = &members.members[member];
            least_s = least_s.min(self.member_s(members, member, &trade, least_s));
        }
        if least_s < limit_s { least_s } else { f64::INFINITY }
    }

    /// The members below `limit_s` by position, with their bounds.
    pub fn below(&self, members: &Members, limit_s: f64) -> Vec<(usize, f64)> {
        let trade = Trade::new(&self.work.kinds, self.line.options());
        let of = |member| self.member_s(members, member, &trade, limit_s);
        let bounds = members.members.iter().map(of).enumerate();
        bounds.filter(|(_, bound_s)| *bound_s < limit_s).collect()
    }

    /// A member's bound; infinite where it is not below the limit.
    fn member_s(&self, members: &Members, member: &Member, trade: &Trade, limit_s: f64) -> f64 {
        let pinned_s = |device: usize| trade.at_first(&member.devices[device].layers).0;
        let free_s =
            self.rows_s(members, member, member.corners.iter().copied(), limit_s, pinned_s);
        if free_s >= limit_s {
            return f64::INFINITY;
        }
        if self.budget_bytes == f64::INFINITY {
            return free_s;
        }
        self.fitting_s(members, member, trade, (free_s, limit_s))
    }

    /// With the recomputation that memory makes necessary.
    fn fitting_s(
        &self,
        members: &Members,
        member: &Member,
        trade: &Trade,
        (free_s, limit_s): (f64, f64),
    ) -> f64 {
        let p = self.line.devices;
        let all = || 0..p;
        let free = |device: usize| self.free_bytes(member, device, members.held[device]);
        if self.line.chunks == 1 {
            let needs_s = |device: usize| {
                let of = &member.devices[device];
                trade.least_s(&of.layers, members.held[device].0 * self.scale(), free(device))
            };
            return self.rows_s(members, member, all(), limit_s, needs_s);
        }
        // Most pipelines that do not fit show it on their first device.
        if !self.leanest_fits(&member.devices[0], free(0)) {
            return f64::INFINITY;
        }
        if let Some(most) = &members.open {
            let needs_s = |device: usize| {
                self.any_mix_s(&member.devices[device], trade, most[device], free(device))
            };
            return self.rows_s(members, member, all(), limit_s, needs_s);
        }
        let chains = Levels::chains(self.line.recompute);
        let mut least_s = f64::INFINITY;
        for &chain in chains {
            let (mut recompute_s, mut any) = (vec![0.0; p], false);
            for (device, own_s) in recompute_s.iter_mut().enumerate() {
                *own_s = self.level_s(&member.devices[device], chain, free(device));
                any |= *own_s > 0.0;
                // The first devices hold most; where they take too long already, that is enough.
                if self.row_s(member, device, *own_s) >= limit_s {
                    *own_s = f64::INFINITY;
                    break;
                }
            }
            if !any {
                // No recomputation is what the rows were without memory.
                return least_s.min(free_s);
            }
            let own_s = |device: usize| recompute_s[device];
            least_s = least_s.min(self.rows_s(members, member, all(), limit_s, own_s));
        }
        least_s
    }

    /// Micro-batches that one of [`Members`] stands for.
    fn scale(&self) -> f64 {
        if holds_all(self.line) { self.line.m() } else { 1.0 }
    }

    /// Bytes left on a device for activations of layers.
    fn free_bytes(&self, member: &Member, device: usize, held: (f64, f64)) -> f64 {
        let mut params = params_of(self.work, &member.devices[device].layers);
        let mut fixed = 0.0;
        let (embedding, head) = (&self.work.embedding, &self.work.head);
        if self.line.passes.is_some() {
            params.dense += embedding.params + head.params;
        } else {
            if device == 0 {
                params.dense += embedding.params;
                fixed +=
                    embedding.workspace_bytes + held.0 * self.scale() * embedding.in_flight_bytes;
            }
            if device == self.head_device() {
                params.dense += head.params;
                fixed += head.workspace_bytes + held.1 * self.scale() * head.in_flight_bytes;
            }
        }
        // What just fits must not be declared too large by another order of summation.
        self.budget_bytes * (1.0 + 1e-9) - self.state.bytes_of(params) - fixed
    }

    fn leanest_fits(&self, device: &Device, free: f64) -> bool {
        let options = self.line.options();
        let leanest = |kind: &KindWork| {
            options.iter().map(|&option| kind.saved_bytes[option]).fold(f64::INFINITY, f64::min)
        };
        let of = |alike: &Alike| {
            let layers = self.work.kinds.iter().zip(&alike.layers);
            alike.held * layers.map(|(kind, &count)| count as f64 * leanest(kind)).sum::<f64>()
        };
        device.alike.iter().map(of).sum::<f64>() * self.scale() <= free
    }

    /// Least recomputation of all mixes that fit a moment the device certainly reaches, s: what is held
    /// beyond its memory must be saved, and a second of recomputation saves at most as many times a layer's
    /// bytes as micro-batches of a chunk are in flight.
    fn any_mix_s(&self, device: &Device, trade: &Trade, most_held: f64, free: f64) -> f64 {
        let first_s = trade.at_first(&device.layers).0;
        let of = |alike: &Alike| alike.held * trade.at_first(&alike.layers).1;
        let held = device.alike.iter().map(of).sum::<f64>() * self.scale();
        let excess = (held - free) / (most_held * self.scale());
        if excess <= 0.0 { first_s } else { trade.saving_s(&device.layers, first_s, excess) }
    }

    /// Recomputation at the least level of a chain that fits a moment the device certainly reaches, s.
    fn level_s(&self, device: &Device, chain: Chain, free: f64) -> f64 {
        let levels = Levels::new(chain, self.line.recompute, device.longest);
        let level = levels.least(|level| self.device_bytes(device, levels, level) <= free);
        let Some(level) = level else { return f64::INFINITY };
        device
            .alike
            .iter()
            .map(|alike| alike.chunks * self.stage_s(levels, level, &alike.layers))
            .sum()
    }

    fn device_bytes(&self, device: &Device, levels: Levels, level: usize) -> f64 {
        let of = |alike: &Alike| {
            let (each, buffer) = self.stage_bytes(levels, level, &alike.layers);
            alike.held * self.scale() * each + alike.chunks * buffer
        };
        device.alike.iter().map(of).sum()
    }

    /// Activations of a micro-batch in a stage, and its buffer.
    fn stage_bytes(&self, levels: Levels, level: usize, layers: &Counts) -> (f64, f64) {
        let (mut each, mut buffer) = (0.0, 0.0_f64);
        for (kind, &count) in self.work.kinds.iter().zip(layers) {
            let split = levels.split(level, count);
            let layers = split.iter().zip(kind.saved_bytes);
            each += layers.map(|(&count, bytes)| count as f64 * bytes).sum::<f64>();
            let leanest = (1..3).rev().find(|&option| split[option] > 0).unwrap_or(0);
            buffer = buffer.max(kind.saved_bytes[0] - kind.saved_bytes[leanest]);
        }
        (each, buffer)
    }

    fn stage_s(&self, levels: Levels, level: usize, layers: &Counts) -> f64 {
        let of = |(kind, &count): (&KindWork, &usize)| -> f64 {
            let split = levels.split(level, count);
            (0..3).map(|option| split[option] as f64 * kind.recompute_s[option]).sum()
        };
        self.work.kinds.iter().zip(layers).map(of).sum()
    }

    /// The longest chain over some devices, with `recompute_s` of each device's recomputation of one
    /// micro-batch; the first that reaches the limit, where one does.
    fn rows_s(
        &self,
        members: &Members,
        member: &Member,
        devices: impl Iterator<Item = usize>,
        limit_s: f64,
        recompute_s: impl Fn(usize) -> f64,
    ) -> f64 {
        if !members.marks.is_empty() {
            return self.marked_rows_s(members, member, limit_s, recompute_s);
        }
        let (mut longest_s, mut recomputing_s) = (0.0_f64, 0.0);
        for device in devices {
            let own_s = recompute_s(device);
            longest_s = longest_s.max(self.row_s(member, device, own_s));
            if longest_s >= limit_s {
                return longest_s;
            }
            recomputing_s += own_s;
        }
        let way_s = super::closed::looped_way_s(self.line, self.whole_s() + recomputing_s);
        let params = params_of(self.work, &member.devices[0].layers);
        let tail_s = self.state.tail_of_s(params, self.line.chunks);
        longest_s.max(way_s) + tail_s
    }

    /// The same between milestones.
    fn marked_rows_s(
        &self,
        members: &Members,
        member: &Member,
        limit_s: f64,
        recompute_s: impl Fn(usize) -> f64,
    ) -> f64 {
        let line = self.line;
        // A device does all its work, however long it waits for it.
        let of_fullest_s = load_s(self.work, &member.devices[member.fullest].layers)
            + recompute_s(member.fullest)
            + line.passes_s();
        if line.m() * of_fullest_s >= limit_s {
            return line.m() * of_fullest_s;
        }
        let ways = Ways::new(line, self.work, &member.stages);
        let (mut longest_s, mut recomputing_s, mut chunks) = (0.0_f64, 0.0, vec![]);
        for (device, marks) in members.marks.iter().enumerate() {
            let shared_s = recompute_s(device);
            let stage_of = |chunk: usize| line.layout().stage_of(line.devices, device, chunk);
            chunks.clear();
            chunks.extend((0..line.chunks).map(|chunk| ways.seconds[stage_of(chunk)]));
            let own = OwnSeconds { chunks: &chunks, shared_s, vocab_s: line.passes_s() };
            let around = Around {
                arrive_s: ways.down_s[device],
                ready_s: ways.there_and_back_s(0, stage_of(marks.first_chunk)),
                way_s: ways.there_and_back_s(device + 1, device) + ways.link_s(device),
            };
            let ends = marks.ends(&own, &around);
            let params = params_of(self.work, &member.devices[device].layers);
            let tail_s = self.state.tail_of_s(params, line.chunks);
            let last_s = ends.last_backward_s + ways.back_s[device];
            longest_s = longest_s.max(ends.own_s + tail_s).max(last_s);
            if longest_s >= limit_s {
                return longest_s;
            }
            recomputing_s += shared_s;
        }
        longest_s.max(ways.there_and_back_s(0, 0) + ways.first_backward_s() + recomputing_s)
    }

    /// The device of the output layer.
    fn head_device(&self) -> usize {
        self.line.layout().device_of(self.line.devices, self.line.stages() - 1)
    }

    /// A device's chain, s.
    fn row_s(&self, member: &Member, device: usize, recompute_s: f64) -> f64 {
        let (line, work) = (self.line, self.work);
        let layers_s = load_s(work, &member.devices[device].layers);
        let stage_of = |chunk: usize| line.layout().stage_of(line.devices, device, chunk);
        let crossings_s: f64 = (0..line.chunks)
            .map(|chunk| line.crossings_s(stage_of(chunk)))
            .map(|(forward_s, backward_s)| forward_s + backward_s)
            .sum();
        let (mut own_s, mut ramp_s) = (layers_s + recompute_s + crossings_s + line.passes_s(), 0.0);
        if line.passes.is_none() {
            own_s += if device == 0 { work.embedding.load_s() } else { 0.0 };
            own_s += if device == self.head_device() { work.head.load_s() } else { 0.0 };
            ramp_s += if device > 0 { work.embedding.load_s() } else { 0.0 };
        }
        if device > 0 && line.schedule.is_whole() {
            ramp_s += load_s(work, &member.before[device]);
            ramp_s += self.crossing_s() * (2 * device - 1) as f64;
            ramp_s += line.round_trip_s() * device as f64;
        }
        let ramp_s = if line.schedule.is_whole() { ramp_s } else { 0.0 };
        ramp_s + line.m() * own_s
    }

    /// A transfer where it blocks, s.
    fn crossing_s(&self) -> f64 {
        if self.line.devices > 1 && self.line.hop_blocks { self.line.hop_s } else { 0.0 }
    }

    /// One micro-batch's passes over the whole model, s.
    fn whole_s(&self) -> f64 {
        let (line, work) = (self.line, self.work);
        let ends_s = match line.passes {
            Some(_) => 0.0,
            None => work.embedding.load_s() + work.head.load_s(),
        };
        let stages = line.devices * line.chunks;
        work.load_s() + ends_s + 2.0 * (stages - 1) as f64 * self.crossing_s()
    }
}

/// Seconds of one micro-batch by stage, with the vocabulary and transfers they hold, and of its ways.
struct Ways {
    /// Forward, backward (to inputs where it is split) and weight gradients apart.
    seconds: Vec<PassCounts>,
    /// By stage, the forwards before it and the links between, s.
    down_s: Vec<f64>,
    /// By stage, the backwards of the stages before it and the links between, s.
    back_s: Vec<f64>,
    /// By stage, links before it, s.
    links_s: Vec<f64>,
}

impl Ways {
    fn new(line: &Line, work: &Work, stages: &[Counts]) -> Self {
        let (splits, blocks) = (line.splits_backward(), line.hop_blocks && line.devices > 1);
        // On a V there is no transfer where it turns.
        let turn = (line.layout() == StageLayout::V).then_some(line.devices - 1);
        let hop_s = |stage: usize| {
            let crosses = line.devices > 1 && stage + 1 < stages.len() && turn != Some(stage);
            if crosses { line.hop_s } else { 0.0 }
        };
        let more = stages.len() + 1;
        let mut seconds = Vec::with_capacity(more);
        let [mut down_s, mut back_s, mut links_s] = [0, 1, 2].map(|_| Vec::with_capacity(more));
        [&mut down_s, &mut back_s, &mut links_s].into_iter().for_each(|sums| sums.push(0.0));
        let mut before_s = 0.0;
        for (stage, counts) in stages.iter().enumerate() {
            let behind_s = hop_s(stage);
            let (mut forward_s, mut backward_s) =
                if blocks { (before_s, behind_s) } else { (0.0, 0.0) };
            before_s = behind_s;
            let mut weight_s = 0.0;
            for (kind, &n) in work.kinds.iter().zip(counts) {
                forward_s += n as f64 * kind.forward_s;
                backward_s += n as f64 * if splits { kind.input_s } else { kind.backward_s };
                weight_s += if splits { n as f64 * kind.weight_s } else { 0.0 };
            }
            let ends = [(stage == 0, &work.embedding), (stage + 1 == stages.len(), &work.head)];
            for (_, end) in ends.into_iter().filter(|(here, _)| *here && line.passes.is_none()) {
                let apart_s = if splits { end.weight_s } else { 0.0 };
                forward_s += end.forward_s;
                backward_s += end.backward_s - apart_s;
                weight_s += apart_s;
            }
            let link_s = if blocks { 0.0 } else { behind_s };
            down_s.push(down_s[stage] + forward_s + link_s);
            back_s.push(back_s[stage] + backward_s + link_s);
            links_s.push(links_s[stage] + link_s);
            seconds.push([forward_s, backward_s, weight_s]);
        }
        Self { seconds, down_s, back_s, links_s }
    }

    /// The forwards of stage `from` and those behind it, and the backwards of the stages behind `to`.
    fn there_and_back_s(&self, from: usize, to: usize) -> f64 {
        let last = self.seconds.len();
        let down_s = self.down_s[last] - self.down_s[from];
        let back_s = self.back_s[last] - self.back_s[to + 1];
        // The links to stages behind `to` are on the way back to it.
        down_s + back_s + self.link_s(to)
    }

    /// The link behind a stage, s.
    fn link_s(&self, stage: usize) -> f64 {
        self.links_s[stage + 1] - self.links_s[stage]
    }

    fn first_backward_s(&self) -> f64 {
        self.seconds[0][1]
    }
}

fn load_s(work: &Work, counts: &Counts) -> f64 {
    work.kinds.iter().zip(counts).map(|(kind, &count)| count as f64 * kind.load_s()).sum()
}

fn params_of(work: &Work, counts: &Counts) -> LocalParams {
    let all = work.kinds.iter().zip(counts);
    all.fold(LocalParams::default(), |sum, (kind, &count)| sum + kind.params * count as f64)
}
