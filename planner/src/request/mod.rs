//! What the user asks for, finished: what [`flags`] makes of flags.

pub mod conflicts;
pub mod flags;
pub mod restrictions;
pub mod space;
pub mod task;

pub use task::Task;

use models::cluster::ClusterSpec;
use models::input::Source;
use models::model::ModelSpec;
use restrictions::Restrictions;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A finished request: everything is present and goes together.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model.
    pub model: ModelSpec,
    /// Its file, to point into; `None` for a shipped model.
    pub file: Option<Source>,
    /// The cluster.
    pub cluster: ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// Share of each device's memory that is left free; [`Request::cluster`] has it too, except in
    /// an estimate.
    pub headroom: f64,
    /// Tokens to train on.
    pub tokens: Option<u64>,
    /// Every `--set` as typed.
    pub settings: Vec<String>,
    /// The same, finished.
    pub restrictions: Restrictions,
    /// Where it turns true, searches end with the best they know.
    pub stop: Arc<AtomicBool>,
}

/// Headroom where the user names none. Memory that is predicted too low makes runs fail: nine in
/// ten groups of published runs take at most 4.9 % more than predicted (docs/validation.md),
/// rounded up.
pub const DEFAULT_HEADROOM: f64 = 0.05;

impl Request {
    /// The same against the whole memory of a device: what an estimate holds to be feasible.
    #[must_use]
    pub fn without_headroom(&self) -> Self {
        Self { cluster: self.cluster.clone().with_headroom(0.0), ..self.clone() }
    }

    /// The search for it.
    pub fn task(&self) -> Task<'_> {
        let task = Task::new(&self.model, &self.cluster, self.gpus, &self.restrictions);
        Task { stop: Some(&self.stop), ..task }
    }
}
