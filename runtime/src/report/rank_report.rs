//! The rank report: what each rank held, did and sent, one JSON object a line.

use crate::comm::Traffic;
use crate::device::MemoryUse;
use crate::groups::Groups;
use crate::rank::StateBytes;
use crate::state::params::{Gradient, HeldParameter, Inventory};
use crate::step::executor::Outcome;
use crate::step::graph_replay::Replays;
use models::schedule::Pass;
use serde::Serialize;
use std::collections::BTreeMap;

/// What one rank held, did and sent.
#[derive(Clone, Debug, Serialize)]
pub struct RankReport {
    /// World rank.
    pub rank: usize,
    /// Its coordinates in the mesh.
    pub at: MeshPosition,
    /// Its pieces of the model's tensors, before replicas share them.
    pub tensors: Vec<TensorPiece>,
    /// Bytes of its weights between passes, padding included; of its share if replicas share them.
    pub parameter_bytes: u64,
    /// Bytes of its gradients, or of its share.
    pub gradient_bytes: u64,
    /// Bytes of its moments, and of exact weights if they are separate.
    pub optimizer_bytes: u64,
    /// The same in host memory, if they lie there.
    pub host_optimizer_bytes: u64,
    /// Most bytes kept for backward passes at any time.
    pub peak_activation_bytes: u64,
    /// Most micro-batches in flight at any time, over all chunks.
    pub peak_in_flight: usize,
    /// Passes of a step in the order run: kind, micro-batch, chunk (`F0.1`).
    pub passes: Vec<String>,
    /// Number of steps run.
    pub steps: u64,
    /// Memory of its process after the last step.
    pub process_memory: ProcessMemory,
    /// Memory of its device over all ranks that share it, beside the plan's figure for each rank;
    /// absent if it is not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<DeviceMemory>,
    /// On a GPU: how many steps were replayed as a CUDA graph, or why none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda_graphs: Option<Replays>,
    /// The kernels that the device chose by measurement, and the time of each candidate, by shape;
    /// absent if the device does not choose.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub chosen_kernels: BTreeMap<String, Vec<String>>,
    /// Traffic of all steps, by group and call.
    pub traffic: BTreeMap<String, BTreeMap<&'static str, CallTraffic>>,
}

/// Planned and measured memory of a device.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DeviceMemory {
    /// Planned for one rank.
    pub planned_bytes: u64,
    /// Measured over all ranks that share the device.
    #[serde(flatten)]
    pub seen: MemoryUse,
}

/// Memory of a rank's process on the host: tensors on a CPU, buffers, code and everything else.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ProcessMemory {
    /// Its resident set, bytes; 0 if the system does not say.
    pub resident_bytes: u64,
    /// The largest resident set since the process began, bytes.
    pub peak_resident_bytes: u64,
    /// Ranks that are threads of the process and share this memory.
    pub ranks: usize,
}

/// Coordinates in the mesh.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MeshPosition {
    /// Tensor parallel index.
    pub tp: u64,
    /// Pipeline rank.
    pub pp: u64,
    /// Context parallel index.
    pub cp: u64,
    /// Data parallel index.
    pub dp: u64,
}

/// A rectangular piece of a tensor, in the checkpoint's dimensions. A fused tensor may be held in
/// several.
#[derive(Clone, Debug, Serialize)]
pub struct TensorPiece {
    /// Hugging Face name.
    pub name: String,
    /// Shape of the whole tensor.
    pub global_shape: Vec<usize>,
    /// Where the piece begins.
    pub global_offset: Vec<usize>,
    /// Shape of the piece.
    pub local_shape: Vec<usize>,
    /// Rows of zeros stored after it.
    pub padding_rows: usize,
    /// Pipeline stage.
    pub stage: usize,
    /// Whether another rank of the replica holds the same piece and counts it.
    pub copy: bool,
    /// Whether its gradient is summed over tensor-parallel ranks.
    pub partial_gradient: bool,
    /// Whether weight decay applies.
    pub decays: bool,
}

/// Number of calls, and bytes handed in.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CallTraffic {
    /// Calls.
    pub calls: u64,
    /// Bytes.
    pub bytes: u64,
}

/// `F0.1`: forward of micro-batch 0 on chunk 1.
pub fn pass_name(pass: &Pass) -> String {
    format!("{:?}{}.{}", pass.kind, pass.micro_batch, pass.chunk)
}

impl RankReport {
    /// The report of a rank after `steps` steps, the last of which ran as `outcome`.
    pub fn new(
        groups: &Groups,
        inventory: &Inventory,
        state: StateBytes,
        outcome: &Outcome,
        steps: u64,
        process_memory: ProcessMemory,
        traffic: &Traffic,
    ) -> Self {
        Self {
            rank: groups.world.rank(),
            at: MeshPosition {
                tp: groups.at.tp,
                pp: groups.at.pp,
                cp: groups.at.cp,
                dp: groups.at.dp,
            },
            tensors: inventory.all().iter().flat_map(pieces).collect(),
            parameter_bytes: state.parameters,
            gradient_bytes: state.gradients,
            optimizer_bytes: state.optimizer,
            host_optimizer_bytes: state.host,
            peak_activation_bytes: outcome.peak_bytes as u64,
            peak_in_flight: outcome.peak_in_flight,
            passes: outcome.ran.iter().map(|ran| pass_name(&ran.pass)).collect(),
            steps,
            process_memory,
            device_memory: None,
            cuda_graphs: None,
            chosen_kernels: BTreeMap::new(),
            traffic: by_group(traffic),
        }
    }
}

fn by_group(traffic: &Traffic) -> BTreeMap<String, BTreeMap<&'static str, CallTraffic>> {
    let mut groups: BTreeMap<String, BTreeMap<&'static str, CallTraffic>> = BTreeMap::new();
    for ((group, call), counted) in traffic {
        let sent = CallTraffic { calls: counted.calls, bytes: counted.bytes };
        groups.entry(group.clone()).or_default().insert(call, sent);
    }
    groups
}

fn pieces(held: &HeldParameter) -> impl Iterator<Item = TensorPiece> + '_ {
    let (declaration, extent) = (&held.declaration, &held.extent);
    let last = extent.rows.len() - 1;
    extent.rows.iter().enumerate().map(move |(n, rows)| {
        let (offset, shape) =
            ((rows.start, extent.columns.start), (rows.len(), extent.columns.len()));
        let oriented = |(row, column): (usize, usize)| match declaration.shape.len() {
            1 => vec![row],
            _ if declaration.transposed => vec![column, row],
            _ => vec![row, column],
        };
        TensorPiece {
            name: declaration.name.clone(),
            global_shape: declaration.shape.clone(),
            global_offset: oriented(offset),
            local_shape: oriented(shape),
            padding_rows: if n == last { extent.padding } else { 0 },
            stage: held.stage,
            copy: !held.counted,
            partial_gradient: declaration.gradient == Gradient::Partial,
            decays: declaration.decays(),
        }
    })
}
