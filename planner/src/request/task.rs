//! The input of a search.

use super::restrictions::Restrictions;
use super::space::Space;
use crate::partition::ilp;
use models::cluster::ClusterSpec;
use models::model::ModelSpec;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// Work limit of all integer programs together, in units of [`ilp::Limits::work`].
    pub solver_work: u64,
    /// Set to end the search early with the best plan so far.
    pub stop: Option<&'a AtomicBool>,
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
            solver_work: ilp::MUCH_WORK,
            stop: None,
        }
    }

    /// Whether the search was asked to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    /// The space it spans.
    pub fn space(&self) -> Space<'a> {
        Space {
            model: self.model,
            cluster: self.cluster,
            gpus: self.gpus,
            restrictions: self.restrictions,
        }
    }
}

/// Largest number of combinations that are priced one by one.
pub const MOST_ONE_BY_ONE: u64 = 4096;
