//! What a run reports of itself: the rank report, the trace, and resident memory.

mod rank_report;
mod resident_memory;
mod trace;

pub use rank_report::{
    CallTraffic, DeviceMemory, MeshPosition, ProcessMemory, RankReport, TensorPiece,
};
pub(crate) use resident_memory::Resident;
pub use trace::Trace;
