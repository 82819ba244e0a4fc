//! What bounds know of listed placements: the layers of their devices, and what an order of passes holds there.

use super::super::recompute_knapsack::RecomputeKnapsack;
use super::super::workload::{MicroBatchCost, PipelineSpec};
use crate::partition::{OrderMilestones, Pipeline};
use crate::pricing::layers::{Counts, Layers};
use crate::pricing::listed_cuts::{Ranges, few_cuts};
use models::decisions::Vocab;
use models::schedule::ScheduleName;
use std::rc::Rc;
use std::sync::Arc;

/// Listed placements on so many devices, whatever the order of passes.
#[derive(Clone, Debug, PartialEq)]
pub struct Shapes {
    /// The placements.
    pub list: Vec<Ranges>,
    pub(super) shapes: Vec<Shape>,
    /// Placements by the layers of their fullest device, fewest first: the fastest is likely among them.
    pub(super) evenest_first: Vec<usize>,
    /// Groups of alike chunks in all of them.
    alike: usize,
    /// Layers of the model.
    layers: usize,
}

/// One listed placement.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shape {
    /// Layers of the first chunks of the devices before each.
    pub before: Vec<Counts>,
    /// Layers by device.
    pub devices: Vec<Device>,
    /// Devices that one behind them with the same layers does not stand for: it starts later.
    pub corners: Vec<usize>,
    /// Layers by stage.
    pub stages: Vec<Counts>,
    /// Layers that stages between the first and the last have, each number once.
    pub inner: Vec<Counts>,
    /// The device with most layers.
    pub fullest: usize,
}

/// What a device holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Device {
    /// Layers of all chunks.
    pub layers: Counts,
    /// Chunks by their layers.
    pub alike: Vec<Alike>,
    /// Layers of the longest chunk of one kind.
    pub longest: usize,
    /// Groups of alike chunks on the devices and in the placements before it.
    first: usize,
}

/// Chunks of a device with the same layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Alike {
    pub layers: Counts,
    /// How many there are.
    pub chunks: f64,
}

impl Shapes {
    /// The placements `list` on the devices of a line.
    pub fn new(layers: &Layers, spec: &PipelineSpec, list: Vec<Ranges>) -> Self {
        let mut alike = 0;
        let shape = |ranges| Shape::new(layers, spec, ranges, &mut alike);
        let shapes: Vec<Shape> = list.iter().map(shape).collect();
        let mut evenest_first: Vec<usize> = (0..shapes.len()).collect();
        evenest_first.sort_by_key(|&position: &usize| shapes[position].most_layers());
        Self { list, shapes, evenest_first, alike, layers: layers.len() }
    }
}

/// Listed placements on one pipeline, with what devices hold.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedCuts {
    /// The placements.
    pub shapes: Rc<Shapes>,
    /// By group of alike chunks, their micro-batches in flight at one moment.
    alike_held: Vec<f64>,
    /// By device, micro-batches in flight of the first and of the last chunk.
    pub(super) held: Vec<(f64, f64)>,
    /// By kind, fewest layers times micro-batches in flight that a member has on all devices.
    least_held: [f64; 4],
    /// Most micro-batches in flight that a layer of a level which recomputes has on average on some device;
    /// where every mix is open, most of any chunk.
    most_held: f64,
    /// Nothing is known of what is in flight.
    pub(super) holds_nothing: bool,
    /// By device, most micro-batches in flight of a chunk, where every mix is open.
    pub(super) open: Option<Vec<f64>>,
    /// By device, the milestones of its order; none where chains are known without.
    pub(super) milestones: Vec<OrderMilestones>,
}

impl ListedCuts {
    /// What matters of a line to [`Self::new`]: the order of passes, devices, chunks, and the micro-batches as
    /// far as they limit what is in flight; all of them where milestones count.
    pub fn key(spec: &PipelineSpec) -> ListedCutsKey {
        let unlimited = 2 * spec.devices + 3;
        let whole = spec.schedule.is_whole() && spec.copies() == 1;
        let m = match spec.micro_batches {
            _ if holds_all(spec) => 1,
            m if whole => m.min(unlimited),
            m => m,
        };
        let over_pipeline = spec.vocab.over_pipeline() && !whole;
        let vocab = if over_pipeline { spec.vocab } else { Vocab::Tensor };
        (spec.schedule, spec.devices, spec.chunks, m, vocab)
    }

    /// Placements on the pipeline that a key describes. What is known of an order only once it is made,
    /// `pipeline` says.
    pub fn new(
        spec: &PipelineSpec,
        shapes: Rc<Shapes>,
        pipeline: impl FnOnce() -> Arc<Pipeline>,
    ) -> Self {
        let spec = PipelineSpec { micro_batches: Self::key(spec).3, ..*spec };
        if spec.is_known_unmade() {
            let counted = (0..spec.devices).filter_map(|device| spec.counted_milestones(device));
            let counted = counted.collect();
            return Self::with(&spec, shapes, &held_by(&spec), counted);
        }
        let pipeline = pipeline();
        let in_flight: Vec<_> = pipeline.in_flight.iter().map(|held| fullest(held)).collect();
        Self::with(&spec, shapes, &in_flight, pipeline.milestones.clone())
    }

    /// The same with what holds of any order without vocabulary passes, and nothing in flight.
    pub fn of_any(spec: &PipelineSpec, shapes: Rc<Shapes>) -> Self {
        let any = OrderMilestones::of_any(spec.micro_batches, spec.chunks);
        let nothing = vec![vec![0; spec.chunks]; spec.devices];
        Self::with(spec, shapes, &nothing, vec![any; spec.devices])
    }

    fn with(
        spec: &PipelineSpec,
        shapes: Rc<Shapes>,
        in_flight: &[Vec<usize>],
        milestones: Vec<OrderMilestones>,
    ) -> Self {
        let mut alike_held = Vec::with_capacity(shapes.alike);
        shapes.shapes.iter().for_each(|shape| shape.count_held(spec, in_flight, &mut alike_held));
        let end = |counts: &Vec<usize>| (counts[0] as f64, counts[spec.chunks - 1] as f64);
        let most = |counts: &Vec<usize>| counts.iter().copied().max().unwrap_or(1) as f64;
        let once = spec.chunks > 1 && spec.copies() == 1;
        let open = once && few_cuts(shapes.layers, spec.stages());
        let open: Option<Vec<f64>> = open.then(|| in_flight.iter().map(most).collect());
        let held = in_flight.iter().map(end).collect();
        let mut members = Self {
            shapes,
            alike_held,
            held,
            least_held: [0.0; 4],
            most_held: 1.0,
            holds_nothing: in_flight.iter().flatten().all(|&n| n == 0),
            open,
            milestones,
        };
        members.least_held = [0, 1, 2, 3].map(|kind| members.least_held(kind));
        members.most_held = members.most_held();
        members
    }

    /// Micro-batches in flight of each group of alike chunks of a device.
    pub(super) fn held_on(&self, device: &Device) -> &[f64] {
        &self.alike_held[device.first..device.first + device.alike.len()]
    }

    /// Fewest layers of a kind times their micro-batches in flight.
    fn least_held(&self, kind: usize) -> f64 {
        let on = |device: &Device| -> f64 {
            let alike = device.alike.iter().zip(self.held_on(device));
            alike.map(|(alike, held)| held * alike.layers[kind] as f64).sum()
        };
        let of = |shape: &Shape| shape.devices.iter().map(on).sum::<f64>();
        self.shapes.shapes.iter().map(of).fold(f64::INFINITY, f64::min)
    }

    fn most_held(&self) -> f64 {
        let devices = || self.shapes.shapes.iter().flat_map(|shape| &shape.devices);
        match &self.open {
            Some(most) => most.iter().copied().fold(1.0, f64::max),
            None => {
                devices().map(|device| device.most_held(self.held_on(device))).fold(1.0, f64::max)
            }
        }
    }

    /// Least recomputation of one micro-batch in the whole model that memory makes necessary on several
    /// chunks a device, s, where states take so many bytes a parameter and devices have `budget` bytes.
    ///
    /// What all devices lack together must be saved, and a second of recomputation in all chunks of a device
    /// to the same level saves as many times a layer's bytes as its layers are in flight on average. Nothing is
    /// said of stages that are there twice.
    pub fn recompute_s(
        &self,
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        knapsack: &RecomputeKnapsack,
        state_bytes: [f64; 2],
        budget: f64,
    ) -> f64 {
        let first_s = knapsack.at_first(&work.counts).0;
        if spec.copies() > 1 {
            return first_s;
        }
        let scale = if holds_all(spec) { spec.m() } else { 1.0 };
        let bytes = |(kind, held): (usize, &f64)| held * scale * knapsack.first_of(kind).1;
        let held: f64 = self.least_held.iter().take(work.kinds.len()).enumerate().map(bytes).sum();
        let params = work.params();
        let states = params.dense * state_bytes[0] + params.expert * state_bytes[1];
        let free = spec.devices as f64 * budget * (1.0 + 1e-9) - states;
        let excess = (held - free) / (self.most_held * scale);
        if excess <= 0.0 { first_s } else { knapsack.saving_s(&work.counts, first_s, excess) }
    }
}

/// See [`ListedCuts::key`].
pub type ListedCutsKey = (ScheduleName, usize, usize, usize, Vocab);

/// By device, micro-batches in flight of each chunk at a moment that it certainly reaches.
fn held_by(spec: &PipelineSpec) -> Vec<Vec<usize>> {
    let held = |device| {
        let mut counts = vec![];
        spec.in_flight(device, &mut counts);
        counts
    };
    (0..spec.devices).map(held).collect()
}

/// Micro-batches in flight of each chunk at a moment when there are most in all.
fn fullest(vectors: &[Vec<u32>]) -> Vec<usize> {
    let most = vectors.iter().max_by_key(|counts| counts.iter().sum::<u32>());
    most.map_or_else(Vec::new, |counts| counts.iter().map(|&n| n as usize).collect())
}

/// Every micro-batch is in flight at once, so that one stands for all.
pub(super) fn holds_all(spec: &PipelineSpec) -> bool {
    matches!(spec.schedule, ScheduleName::GPipe | ScheduleName::LoopedBfs)
}

impl Shape {
    /// `alike` counts the groups of alike chunks so far.
    fn new(layers: &Layers, spec: &PipelineSpec, ranges: &Ranges, alike: &mut usize) -> Self {
        let p = spec.devices;
        let mut devices = vec![Device::default(); p];
        let counts = |&(start, end): &(usize, usize)| layers.between(start, end);
        let stages: Vec<Counts> = ranges.iter().map(counts).collect();
        for (stage, &counts) in stages.iter().enumerate() {
            for copy in 0..spec.copies() {
                devices[spec.layout().holder(p, stage, copy as u16).0].add(counts);
            }
        }
        for device in &mut devices {
            device.first = *alike;
            *alike += device.alike.len();
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
        let mut inner: Vec<Counts> = stages.iter().copied().skip(1).collect();
        inner.pop();
        inner.sort_unstable();
        inner.dedup();
        Self { before, devices, corners, stages, inner, fullest: fullest.unwrap_or(0) }
    }

    /// Layers of the fullest device.
    fn most_layers(&self) -> usize {
        self.devices[self.fullest].layers.iter().sum()
    }

    /// Adds the micro-batches in flight of each group of alike chunks.
    fn count_held(&self, spec: &PipelineSpec, in_flight: &[Vec<usize>], held: &mut Vec<f64>) {
        let p = spec.devices;
        for (device, own) in self.devices.iter().enumerate() {
            let chunks = |alike: &Alike| {
                let of = |chunk: usize| {
                    let stage = spec.layout().stage_of(p, device, chunk);
                    if self.stages[stage] == alike.layers { in_flight[device][chunk] } else { 0 }
                };
                (0..spec.chunks).map(of).sum::<usize>() as f64
            };
            held.extend(own.alike.iter().map(chunks));
        }
    }
}

impl Device {
    fn add(&mut self, layers: Counts) {
        for (sum, count) in self.layers.iter_mut().zip(layers) {
            *sum += count;
            self.longest = self.longest.max(count);
        }
        match self.alike.iter_mut().find(|alike| alike.layers == layers) {
            Some(alike) => alike.chunks += 1.0,
            None => self.alike.push(Alike { layers, chunks: 1.0 }),
        }
    }

    /// Of so many layers of each chunk that recompute, the mean in flight of a layer.
    fn most_held(&self, held: &[f64]) -> f64 {
        let mut most = 1.0_f64;
        let alike = || self.alike.iter().zip(held);
        for kind in 0..Counts::default().len() {
            for level in 1..=self.longest {
                let layers = |alike: &Alike| alike.layers[kind].min(level) as f64;
                let all: f64 = alike().map(|(a, _)| a.chunks * layers(a)).sum();
                let held: f64 = alike().map(|(a, held)| held * layers(a)).sum();
                most = if all > 0.0 { most.max(held / all) } else { most };
            }
        }
        // The next layer of the longest chunks alone.
        alike().map(|(alike, held)| held / alike.chunks).fold(most, f64::max)
    }
}
