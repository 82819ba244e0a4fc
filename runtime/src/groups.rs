//! The groups that one rank belongs to.

use crate::comm::{CommError, Communicator};
use crate::program::Program;
use models::mesh::{Axis, Coordinates};

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
    /// Those that share a vocabulary split over the pipeline, where it is.
    pub vocab: Option<VocabGroups>,
    /// Where this rank is.
    pub at: Coordinates,
}

/// All ranks of a replica, device after device: a group for each order of calls that goes beside the others.
pub struct VocabGroups {
    /// Behind the passes `S`.
    pub first: Box<dyn Communicator>,
    /// Behind the passes `S2`.
    pub middle: Box<dyn Communicator>,
    /// Behind the passes `T`.
    pub last: Box<dyn Communicator>,
    /// Rows of the input layer.
    pub input: Box<dyn Communicator>,
    /// Their gradients.
    pub input_gradient: Box<dyn Communicator>,
    /// This rank takes the rows.
    pub on_first_stage: bool,
    /// This rank takes the output layer's input gradient.
    pub on_last_stage: bool,
}

impl VocabGroups {
    fn new(
        world: &dyn Communicator,
        program: &Program,
        at: Coordinates,
    ) -> Result<Self, CommError> {
        let (replica, place) = (at.dp as usize, (at.pp * program.mesh.tp + at.tp) as usize);
        let group = |name: &str| world.split(name, replica, place);
        Ok(Self {
            first: group("vocab_s")?,
            middle: group("vocab_s2")?,
            last: group("vocab_t")?,
            input: group("vocab_input")?,
            input_gradient: group("vocab_input_gradient")?,
            on_first_stage: at.pp == 0,
            on_last_stage: at.pp as usize == program.last_device(),
        })
    }
}

impl Groups {
    /// Splits the world.
    ///
    /// # Errors
    /// As any collective call.
    pub fn new(world: Box<dyn Communicator>, program: &Program) -> Result<Self, CommError> {
        let (rank, mesh) = (world.rank(), &program.mesh);
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
        let vocab = program.vocab.map(|_| VocabGroups::new(&*world, program, at)).transpose()?;
        Ok(Self { world, tp, dp, pp, ends, vocab, at })
    }

    /// Waits until all that was started is queued ([`Communicator::settle`]).
    ///
    /// # Errors
    /// What went wrong meanwhile.
    pub fn settle(&self) -> Result<(), CommError> {
        let all = [&self.world, &self.tp, &self.dp, &self.pp, &self.ends];
        all.into_iter().try_for_each(|group| group.settle())?;
        let Some(vocab) = &self.vocab else { return Ok(()) };
        let VocabGroups { first, middle, last, input, input_gradient, .. } = vocab;
        let vocab_groups = [first, middle, last, input, input_gradient];
        vocab_groups.into_iter().try_for_each(|group| group.settle())
    }
}
