//! The process groups that one rank belongs to.

use crate::comm::{CommError, Communicator};
use crate::ops::ExpertRanks;
use crate::spec::TrainerSpec;
use crate::state::params::{ByDivision, Division};
use crate::state::shards::Zero;
use models::mesh::{Axis, Coordinates, ExpertPlace, ExpertSplit};

/// One rank's groups, derived from the mesh.
pub struct Groups {
    /// All ranks.
    pub world: Box<dyn Communicator>,
    /// Tensor parallel: same pipeline rank and replica.
    pub tp: Box<dyn Communicator>,
    /// Context parallel: the members of the ring.
    pub ring: Box<dyn Communicator>,
    /// Context parallel: the Ulysses group.
    pub ulysses: Box<dyn Communicator>,
    /// The ranks that hold the same weights, along the context-parallel, then the data-parallel
    /// axis.
    pub dense: Replicas,
    /// The groups of the experts, if there are any.
    pub experts: Option<ExpertGroups>,
    /// Pipeline: rank `i` of the group is pipeline rank `i`.
    pub pp: Box<dyn Communicator>,
    /// First and last pipeline rank, which may share tied embeddings; any other rank is alone.
    pub ends: Box<dyn Communicator>,
    /// The groups of a vocabulary split over the pipeline, if the spec splits it.
    pub vocab: Option<VocabGroups>,
    /// This rank's coordinates.
    pub at: Coordinates,
}

/// The ranks that hold the same parameters.
pub struct Replicas {
    /// All of them.
    pub all: Box<dyn Communicator>,
    /// Hybrid sharding: its groups, if fewer than all replicas share one copy of the state.
    hybrid: Option<HybridGroups>,
}

impl Replicas {
    /// Divides replicas as ZeRO says; `names` are those of the two groups.
    fn new(all: Box<dyn Communicator>, zero: Zero, names: [&str; 2]) -> Result<Self, CommError> {
        let (ways, replica) = (zero.group(all.size()), all.rank());
        let divide = || -> Result<HybridGroups, CommError> {
            Ok(HybridGroups {
                sharing: all.split(names[0], replica / ways, replica)?,
                across: all.split(names[1], replica % ways, replica)?,
            })
        };
        let hybrid = (ways < all.size()).then(divide).transpose()?;
        Ok(Self { all, hybrid })
    }

    /// Those that share one copy of the state, or divide the work on it.
    pub fn sharing(&self) -> &dyn Communicator {
        self.hybrid.as_ref().map_or(&*self.all, |hybrid| &*hybrid.sharing)
    }

    /// One replica of each copy of the state, if there are several.
    pub fn across(&self) -> Option<&dyn Communicator> {
        self.hybrid.as_ref().map(|hybrid| &*hybrid.across)
    }

    fn settle(&self) -> Result<(), CommError> {
        self.all.settle()?;
        let Some(HybridGroups { sharing, across }) = &self.hybrid else { return Ok(()) };
        sharing.settle()?;
        across.settle()
    }
}

/// The ranks of a mixture of experts: `tp cp dp = etp ep edp`, counted through tp, cp and dp
/// ([`models::mesh::Mesh::fold`]).
pub struct ExpertGroups {
    /// Expert parallel: ranks that have different experts.
    pub ep: Box<dyn Communicator>,
    /// Tensor parallel inside an expert.
    pub etp: Box<dyn Communicator>,
    /// The ranks that hold the same of the same experts.
    pub replicas: Replicas,
}

impl ExpertGroups {
    fn new(
        world: &dyn Communicator,
        spec: &TrainerSpec,
        experts: ExpertSplit,
        at: Coordinates,
    ) -> Result<Self, CommError> {
        let (mesh, folded) = (&spec.mesh, spec.mesh.fold(at));
        let own = experts.place(folded);
        let group = |name: &str, first: ExpertPlace| {
            let color = at.pp * mesh.folded_ranks() + experts.fold(first);
            world.split(name, color as usize, folded as usize)
        };
        let replicas = group("edp", ExpertPlace { edp: 0, ..own })?;
        Ok(Self {
            ep: group("ep", ExpertPlace { ep: 0, ..own })?,
            etp: group("etp", ExpertPlace { etp: 0, ..own })?,
            replicas: Replicas::new(replicas, spec.zero, ["edp_shard", "edp_across"])?,
        })
    }
}

impl ExpertGroups {
    /// The ranks among which experts are divided.
    pub fn ranks(&self) -> ExpertRanks<'_> {
        ExpertRanks { ep: &*self.ep, etp: &*self.etp }
    }
}

/// Replicas, divided into groups of neighbours that share one copy of the state.
struct HybridGroups {
    /// The replicas that share this rank's copy.
    sharing: Box<dyn Communicator>,
    /// One replica of each copy: those that hold the same pieces.
    across: Box<dyn Communicator>,
}

/// All ranks of a replica, one pipeline rank after the other: a group for each sequence of
/// collectives that runs beside the others.
pub struct VocabGroups {
    /// After the passes `S`.
    pub first: Box<dyn Communicator>,
    /// After the passes `S2`.
    pub middle: Box<dyn Communicator>,
    /// After the passes `T`.
    pub last: Box<dyn Communicator>,
    /// Sums of the input layer's rows.
    pub input: Box<dyn Communicator>,
    /// Gradients of the input layer's rows.
    pub input_gradient: Box<dyn Communicator>,
    /// Whether this rank takes the summed rows.
    pub on_first_stage: bool,
    /// Whether this rank takes the output layer's input gradient.
    pub on_last_stage: bool,
}

impl VocabGroups {
    fn new(
        world: &dyn Communicator,
        spec: &TrainerSpec,
        at: Coordinates,
    ) -> Result<Self, CommError> {
        let replica = (at.dp * spec.mesh.cp + at.cp) as usize;
        let place = (at.pp * spec.mesh.tp + at.tp) as usize;
        let group = |name: &str| world.split(name, replica, place);
        Ok(Self {
            first: group("vocab_s")?,
            middle: group("vocab_s2")?,
            last: group("vocab_t")?,
            input: group("vocab_input")?,
            input_gradient: group("vocab_input_gradient")?,
            on_first_stage: at.pp == 0,
            on_last_stage: at.pp as usize == spec.last_rank(),
        })
    }
}

impl Groups {
    /// Splits the world.
    ///
    /// # Errors
    /// Those of any collective call, and a spec whose ranks cannot divide sequences or state so.
    pub fn new(world: Box<dyn Communicator>, spec: &TrainerSpec) -> Result<Self, CommError> {
        if let Some(reason) = spec.wrong_division() {
            return Err(CommError::Invalid { call: "the trainer's spec".to_owned(), reason });
        }
        let (rank, mesh) = (world.rank(), &spec.mesh);
        let at = mesh.coordinates(rank as u64);
        let along = |name: &str, axis: Axis, place: u64| {
            let color = rank - (place * mesh.stride(axis)) as usize;
            world.split(name, color, place as usize)
        };
        let tp = along("tp", Axis::Tp, at.tp)?;
        // Apart from the position along an axis, ranks of a group have the same coordinates.
        let first_of = |others: Coordinates| mesh.rank(others) as usize;
        let ways = spec.context.ulysses as u64;
        let ring_of = Coordinates { cp: at.cp % ways, ..at };
        let ring = world.split("cp_ring", first_of(ring_of), at.cp as usize)?;
        let ulysses_of = Coordinates { cp: at.cp - at.cp % ways, ..at };
        let ulysses = world.split("cp_ulysses", first_of(ulysses_of), at.cp as usize)?;
        let dp_of = Coordinates { cp: 0, dp: 0, ..at };
        let dp = world.split("dp", first_of(dp_of), (at.dp * mesh.cp + at.cp) as usize)?;
        let pp = along("pp", Axis::Pp, at.pp)?;
        let end = at.pp == 0 || at.pp + 1 == mesh.pp;
        let first = mesh.rank(Coordinates { pp: 0, ..at }) as usize;
        let color = if end { first } else { world.size() + rank };
        let ends = world.split("ends", color, at.pp as usize)?;
        let vocab = spec.vocab.map(|_| VocabGroups::new(&*world, spec, at)).transpose()?;
        let dense = Replicas::new(dp, spec.zero, ["dp_shard", "dp_across"])?;
        let of_experts = |experts| ExpertGroups::new(&*world, spec, experts, at);
        let experts = spec.experts.map(of_experts).transpose()?;
        Ok(Self { world, tp, ring, ulysses, dense, experts, pp, ends, vocab, at })
    }

    /// The ranks that hold the same parameters of a division. Without experts nobody asks for
    /// theirs.
    pub fn replicas(&self, division: Division) -> &Replicas {
        match (division, &self.experts) {
            (Division::Expert, Some(experts)) => &experts.replicas,
            _ => &self.dense,
        }
    }

    /// The replicas that share one copy of the state, or divide the work on it.
    pub fn sharing(&self) -> ByDivision<&dyn Communicator> {
        ByDivision {
            dense: self.replicas(Division::Dense).sharing(),
            expert: self.replicas(Division::Expert).sharing(),
        }
    }

    /// Waits until everything that was started is queued on the device ([`Communicator::settle`]).
    ///
    /// # Errors
    /// What went wrong meanwhile.
    pub fn settle(&self) -> Result<(), CommError> {
        let Self { world, tp, ring, ulysses, pp, ends, .. } = self;
        let all = [world, tp, ring, ulysses, pp, ends];
        all.into_iter().try_for_each(|group| group.settle())?;
        self.dense.settle()?;
        if let Some(ExpertGroups { ep, etp, replicas }) = &self.experts {
            ep.settle()?;
            etp.settle()?;
            replicas.settle()?;
        }
        let Some(vocab) = &self.vocab else { return Ok(()) };
        let VocabGroups { first, middle, last, input, input_gradient, .. } = vocab;
        let vocab_groups = [first, middle, last, input, input_gradient];
        vocab_groups.into_iter().try_for_each(|group| group.settle())
    }
}
