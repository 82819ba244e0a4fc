//! How long passes, transfers and barriers take, and their places in one flat table.

use models::schedule::{Latency, Pass, PassKind, Schedule, Work};

/// How long the passes of one micro-batch take, s.
///
/// A duration that the schedule needs and that is missing here counts as infinite.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Durations {
    /// Forward, by stage.
    pub forward: Vec<f64>,
    /// Backward to inputs, by stage; with weight gradients where none are given apart.
    pub backward: Vec<f64>,
    /// Weight gradients by stage, which a whole backward takes on top; none where no backward is split.
    pub weight: Vec<f64>,
    /// By device, a forward and a whole backward that run together, by the forward's chunk; unused where
    /// none do.
    pub pair: Vec<[f64; 2]>,
    /// Latency from stage `j` to stage `j + 1` and back; unused within a device.
    pub link_s: Vec<f64>,
    /// The vocabulary passes; unused without them.
    pub vocab: VocabDurations,
}

/// How long the vocabulary passes of one micro-batch and their barriers take, s.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VocabDurations {
    /// `S` by device.
    pub first: Vec<f64>,
    /// `S2` by device; only `parallel_naive` has it.
    pub middle: Vec<f64>,
    /// `T` by device.
    pub last: Vec<f64>,
    /// Broadcast of the last stage's output to the other devices, before `S` (`C0`).
    pub broadcast_s: f64,
    /// Barrier behind `S` (`C1`; with `parallel_2` it brings the input gradient, too).
    pub after_first_s: f64,
    /// Barrier behind `S2`.
    pub after_middle_s: f64,
    /// Barrier behind `T` (`C2`).
    pub after_last_s: f64,
    /// Those of the input layer; unused where the schedule has none.
    pub input: InputDurations,
}

/// How long the passes of an input layer split over the devices take for one micro-batch, s.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InputDurations {
    /// `IF` by device.
    pub forward: Vec<f64>,
    /// `IB` by device.
    pub backward: Vec<f64>,
    /// Sum of the rows that devices looked up, before the first stage's forward.
    pub after_forward_s: f64,
    /// Broadcast of the first stage's input gradient, before `IB`.
    pub before_backward_s: f64,
}

impl Durations {
    /// The same for every stage: `forward`, `backward` and `weight` are those of a device's whole
    /// share, of which each of its chunks takes an equal part; `backward` is `B` alone, and a whole backward
    /// takes `weight` on top. Pairs are as long as their parts.
    pub fn uniform(
        schedule: &Schedule,
        forward: f64,
        backward: f64,
        weight: f64,
        link_s: f64,
    ) -> Self {
        let (stages, chunks) = (schedule.stages(), schedule.share_chunks() as f64);
        let [forward, backward, weight] = [forward, backward, weight].map(|time| time / chunks);
        Self {
            forward: vec![forward; stages],
            backward: vec![backward; stages],
            weight: vec![weight; stages],
            pair: vec![[forward + backward + weight; 2]; schedule.devices],
            link_s: vec![link_s; stages.saturating_sub(1)],
            vocab: VocabDurations::default(),
        }
    }

    /// The whole backward of a stage.
    fn whole_s(&self, stage: usize) -> f64 {
        self.backward.get(stage).copied().unwrap_or(f64::INFINITY)
            + self.weight.get(stage).copied().unwrap_or(0.0)
    }
}

impl VocabDurations {
    /// The same `S` (and `S2`) and `T` on every device; barriers and passes of the input layer take no time.
    pub fn uniform(devices: usize, first: f64, last: f64) -> Self {
        Self {
            first: vec![first; devices],
            last: vec![last; devices],
            middle: vec![first; devices],
            input: InputDurations::uniform(devices, 0.0, 0.0),
            ..Self::default()
        }
    }

    /// What lies between passes, in the order of the table.
    pub(super) fn barriers(&self) -> [f64; BARRIERS] {
        let Self { broadcast_s, after_first_s, after_middle_s, after_last_s, input, .. } = self;
        let InputDurations { after_forward_s, before_backward_s, .. } = input;
        [
            *broadcast_s,
            *after_first_s,
            *after_middle_s,
            *after_last_s,
            *after_forward_s,
            *before_backward_s,
        ]
    }
}

impl InputDurations {
    /// The same on every device, with nothing between them and other passes.
    pub fn uniform(devices: usize, forward: f64, backward: f64) -> Self {
        let (forward, backward) = (vec![forward; devices], vec![backward; devices]);
        Self { forward, backward, ..Self::default() }
    }
}

/// Barriers and broadcasts, each with an own place in the table.
pub(super) const BARRIERS: usize = 6;

/// Where each duration lies in a flat table whose first entry is zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    pub stages: usize,
    pub devices: usize,
}

impl Table {
    pub fn new(schedule: &Schedule) -> Self {
        Self { stages: schedule.stages(), devices: schedule.devices }
    }

    /// By stage: forward, backward, weight, link, whole backward.
    pub fn stage_row(self, row: usize) -> usize {
        1 + row * self.stages
    }

    /// By device: `S`, `S2`, `T`, pairs with the forward of chunk 0, of chunk 1, `IF`, `IB`.
    pub fn device_row(self, row: usize) -> usize {
        self.stage_row(5) + row * self.devices
    }

    pub fn barriers(self) -> usize {
        self.device_row(7)
    }

    pub fn len(self) -> usize {
        self.barriers() + BARRIERS
    }

    /// Of what a node runs; the start of the table for a join.
    pub fn of_work(self, schedule: &Schedule, device: usize, work: Work) -> usize {
        match work {
            Work::Join => 0,
            Work::Pair(forward, _) => self.device_row(3 + usize::from(forward.chunk)) + device,
            Work::Pass(pass) => {
                self.of_pass(device, schedule.stage_of(device, usize::from(pass.chunk)), pass)
            }
        }
    }

    fn of_pass(self, device: usize, stage: usize, pass: Pass) -> usize {
        match pass.kind {
            PassKind::F => self.stage_row(0) + stage,
            PassKind::B => self.stage_row(1) + stage,
            PassKind::BW => self.stage_row(4) + stage,
            PassKind::W => self.stage_row(2) + stage,
            PassKind::S => self.device_row(0) + device,
            PassKind::S2 => self.device_row(1) + device,
            PassKind::T => self.device_row(2) + device,
            PassKind::IF => self.device_row(5) + device,
            PassKind::IB => self.device_row(6) + device,
        }
    }

    pub fn of_latency(self, latency: Latency) -> usize {
        match latency {
            Latency::None => 0,
            Latency::Link(stage) => self.stage_row(3) + stage as usize,
            Latency::Broadcast => self.barriers(),
            Latency::Barrier(PassKind::S2) => self.barriers() + 2,
            Latency::Barrier(PassKind::T) => self.barriers() + 3,
            Latency::Barrier(PassKind::IF) => self.barriers() + 4,
            Latency::InputGradient => self.barriers() + 5,
            Latency::Barrier(_) => self.barriers() + 1,
        }
    }

    /// Writes the durations to their places.
    pub fn fill(self, durations: &Durations, table: &mut Vec<f64>) {
        let Durations { forward, backward, weight, link_s, vocab, pair } = durations;
        table.clear();
        table.resize(self.len(), f64::INFINITY);
        table[0] = 0.0;
        for (row, values) in [forward, backward, weight, link_s].into_iter().enumerate() {
            put(&mut table[self.stage_row(row)..][..self.stages], values);
        }
        for (row, values) in [&vocab.first, &vocab.middle, &vocab.last].into_iter().enumerate() {
            put(&mut table[self.device_row(row)..][..self.devices], values);
        }
        let whole = &mut table[self.stage_row(4)..][..self.stages];
        whole.iter_mut().enumerate().for_each(|(n, place)| *place = durations.whole_s(n));
        for chunk in 0..2 {
            let row = &mut table[self.device_row(3 + chunk)..][..self.devices];
            row.iter_mut().zip(pair).for_each(|(place, pair)| *place = pair[chunk]);
        }
        for (row, values) in [&vocab.input.forward, &vocab.input.backward].into_iter().enumerate() {
            put(&mut table[self.device_row(5 + row)..][..self.devices], values);
        }
        put(&mut table[self.barriers()..], &vocab.barriers());
    }
}

fn put(places: &mut [f64], values: &[f64]) {
    for (place, value) in places.iter_mut().zip(values) {
        *place = *value;
    }
}
