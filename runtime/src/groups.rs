//! The groups that one rank belongs to.

use crate::comm::{CommError, Communicator};
use models::mesh::{Axis, Coordinates, Mesh};

/// One rank's groups, from the mesh.
pub struct Groups {
    /// All ranks.
    pub world: Box<dyn Communicator>,
    /// Tensor parallel: same device and replica.
    pub tp: Box<dyn Communicator>,
    /// Data parallel: same shard of the model.
    pub dp: Box<dyn Communicator>,
    /// Pipeline: rank `i` of it is device `i`.
    pub pp: Box<dyn Communicator>,
    /// First and last device of the pipeline, which may share tied embeddings; others are alone.
    pub ends: Box<dyn Communicator>,
    /// Where this rank is.
    pub at: Coordinates,
}

impl Groups {
    /// Splits the world.
    ///
    /// # Errors
    /// As any collective call.
    pub fn new(world: Box<dyn Communicator>, mesh: &Mesh) -> Result<Self, CommError> {
        let rank = world.rank();
        let at = mesh.coordinates(rank as u64);
        let along = |name: &str, axis: Axis, place: u64| {
            let color = rank - (place * mesh.stride(axis)) as usize;
            world.split(name, color, place as usize)
        };
        let (tp, dp) = (along("tp", Axis::Tp, at.tp)?, along("dp", Axis::Dp, at.dp)?);
        let pp = along("pp", Axis::Pp, at.pp)?;
        let end = at.pp == 0 || at.pp + 1 == mesh.pp;
        let first = mesh.rank(Coordinates { pp: 0, ..at }) as usize;
        let color = if end { first } else { world.size() + rank };
        let ends = world.split("ends", color, at.pp as usize)?;
        Ok(Self { world, tp, dp, pp, ends, at })
    }
}
