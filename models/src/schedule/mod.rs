//! Pipeline schedules as values: for every device, the passes it runs, in order.
//!
//! A schedule is made by a pure function (one file each) and is then costed, checked, drawn,
//! printed and executed from the same list. Stages are numbered along the model: with `p` devices
//! and `v` chunks there are `p·v` stages, and [`Placement`] says which device holds which.

/// What a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PassKind {
    /// Forward.
    F,
    /// Backward with respect to inputs.
    B,
    /// Backward with respect to weights.
    W,
    /// Whole backward, where a schedule does not split it.
    BW,
    /// First vocabulary pass: local logits, maximum and sum (Vocabulary Parallelism, section 4).
    S,
    /// Second vocabulary pass: weight (and, for algorithm 1, input) gradients.
    T,
}

/// One pass: what, for which micro-batch, on which of the device's chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pass {
    /// What is computed.
    pub kind: PassKind,
    /// Micro-batch, 0-based.
    pub micro_batch: u32,
    /// Chunk of the device, 0-based, in model order on that device.
    pub chunk: u16,
}

/// Which device holds which stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StageLayout {
    /// Stage `j·p + i` is chunk `j` of device `i` (with one chunk: stage `i` on device `i`).
    RoundRobin,
    /// Two chunks: device `i` holds stages `i` and `2p − 1 − i`.
    V,
}

/// The passes of one iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Pipeline devices, `p`.
    pub devices: usize,
    /// Chunks a device, `v`.
    pub chunks: usize,
    /// Micro-batches an iteration, `m`.
    pub micro_batches: usize,
    /// Which device holds which stage.
    pub layout: StageLayout,
    /// Per device, its passes in order.
    pub passes: Vec<Vec<Pass>>,
}
