//! The input of a search.

use super::restrictions::Restrictions;
use super::rules::Waived;
use super::space::Space;
use crate::until::Until;
use models::cluster::ClusterSpec;
use models::model::ModelSpec;

/// The input of a search.
#[derive(Clone, Debug)]
pub struct Task<'a> {
    /// The model, with its sequence length and global batch.
    pub model: &'a ModelSpec,
    /// The cluster.
    pub cluster: &'a ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// The user's restrictions.
    pub restrictions: &'a Restrictions,
    /// Ignores memory, to say by how much a configuration does not fit.
    pub ignore_memory: bool,
    /// Prunes everything that is not faster than this, s.
    pub cutoff_s: f64,
    /// Ends with the first configuration that fits, however slow.
    pub any: bool,
    /// Work limit of all integer programs together, in units of
    /// [`ilp::Limits::work`](crate::partition::ilp::Limits::work).
    pub solver_work: u64,
    /// Work on every cut where only listed cuts were tried, in the same units; with 0, nothing is
    /// proven of these.
    pub every_cut_work: u64,
    /// When to end with the best plan so far.
    pub until: Until<'a>,
    /// Search nodes to expand at most. The same number gives the same plan and bound, whatever
    /// the machine and its threads.
    pub most_expansions: u64,
}

impl<'a> Task<'a> {
    /// A task with no limits but the restrictions.
    pub fn new(
        model: &'a ModelSpec,
        cluster: &'a ClusterSpec,
        gpus: u64,
        restrictions: &'a Restrictions,
    ) -> Self {
        Self {
            model,
            cluster,
            gpus,
            restrictions,
            ignore_memory: false,
            cutoff_s: f64::INFINITY,
            any: false,
            solver_work: SOLVER_WORK,
            every_cut_work: EVERY_CUT_WORK,
            until: Until::default(),
            most_expansions: u64::MAX,
        }
    }

    /// Whether the search was asked to end.
    pub fn is_stopped(&self) -> bool {
        self.until.is_over()
    }

    /// The space it spans.
    pub fn space(&self) -> Space<'a> {
        Space {
            model: self.model,
            cluster: self.cluster,
            gpus: self.gpus,
            restrictions: self.restrictions,
            waived: Waived::default(),
        }
    }
}

/// Default work limit of a search's integer programs, in units of
/// [`ilp::Limits::work`](crate::partition::ilp::Limits::work): some 20 s of one core. Programs of
/// `llama8b` on 16,384 GPUs of `selene` with tp 4 and pp 16 do 1.5 million a second (2026-11-23,
/// x86-64, 3 GHz).
pub const SOLVER_WORK: u64 = 30_000_000;

/// Default work limit on every cut, in the same units: about half a second of two cores.
pub const EVERY_CUT_WORK: u64 = 1_000_000;

/// The same with `--prove`, and integer programs: a few minutes of one core at most.
pub const PROVING_WORK: u64 = 100_000_000;
