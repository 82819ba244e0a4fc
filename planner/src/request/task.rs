//! What a search is asked.

use super::restrictions::Restrictions;
use super::space::Space;
use crate::partition::ilp;
use models::cluster::ClusterSpec;
use models::model::ModelSpec;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is to be planned.
#[derive(Clone, Debug)]
pub struct Task<'a> {
    /// The model, with its sequence length and global batch.
    pub model: &'a ModelSpec,
    /// The cluster.
    pub cluster: &'a ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// What the user narrowed.
    pub restrictions: &'a Restrictions,
    /// Places layers as if memory were endless, to say by how much a configuration does not fit.
    pub ignore_memory: bool,
    /// Cuts everything that is not faster than this, s.
    pub cutoff_s: f64,
    /// Work for integer programs in all, as [`ilp::Limits::work`] counts it.
    pub solver_work: u64,
    /// Where it turns true, the search ends with the best known.
    pub stop: Option<&'a AtomicBool>,
}

impl<'a> Task<'a> {
    /// A task with nothing relaxed.
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
            solver_work: ilp::MUCH_WORK,
            stop: None,
        }
    }

    /// Whether the search is to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    /// The task's space.
    pub fn space(&self) -> Space<'a> {
        Space {
            model: self.model,
            cluster: self.cluster,
            gpus: self.gpus,
            restrictions: self.restrictions,
        }
    }
}

/// Most combinations that are priced one by one.
pub const MOST_ONE_BY_ONE: u64 = 4096;
