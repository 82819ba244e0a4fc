//! What the user asks for: flags and settings, the finished request, the space it spans.

pub mod conflicts;
pub mod flags;
pub mod pipeline_choices;
pub mod restrictions;
pub mod rules;
pub mod space;
pub mod task;

pub use task::Task;

use crate::until::{Processors, Until};
use models::cluster::ClusterSpec;
use models::input::{InputError, Source};
use models::model::ModelSpec;
use models::plan::Objective;
use restrictions::Restrictions;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// A finished request: every value is present and none contradicts another.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model.
    pub model: ModelSpec,
    /// Its file, for error messages; `None` for a shipped model.
    pub file: Option<Source>,
    /// The cluster.
    pub cluster: ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// Fraction of each device's memory that is left free. [`Request::cluster`] has it too, except
    /// in an estimate.
    pub headroom: f64,
    /// Tokens to train on.
    pub tokens: Option<u64>,
    /// Every `--set` as typed.
    pub settings: Vec<String>,
    /// Whether only what our own trainer can run was asked for.
    pub runnable: bool,
    /// The same as restrictions.
    pub restrictions: Restrictions,
    /// Set to end a search early with the best plan so far.
    pub stop: Arc<AtomicBool>,
    /// When its searches have to answer; `None` where they go on to a proof.
    pub deadline: Option<Instant>,
    /// [`Task::every_cut_work`] of its searches.
    pub every_cut_work: u64,
    /// What the threads of its searches got of the processors.
    pub processors: Arc<Processors>,
    /// What its plan makes least.
    pub objective: Objective,
}

/// Default headroom. A run fails where it needs more memory than predicted; nine in ten groups of
/// published runs need at most 4.9 % more (docs/validation.md), rounded up here.
pub const DEFAULT_HEADROOM: f64 = 0.05;

impl Request {
    /// The same without headroom: estimates are feasible up to the whole memory of a device.
    #[must_use]
    pub fn without_headroom(&self) -> Self {
        Self { cluster: self.cluster.clone().with_headroom(0.0), ..self.clone() }
    }

    /// The same with a share of the time left.
    #[must_use]
    pub fn with_share(&self, share: f64) -> Self {
        let until = Until { deadline: self.deadline, ..Until::default() };
        Self { deadline: until.share(share).deadline, ..self.clone() }
    }

    /// Restrictions of fewer settings than the request's.
    ///
    /// # Errors
    /// A setting with a value that its decision does not take.
    pub fn narrowed_by(&self, settings: &[String]) -> Result<Restrictions, InputError> {
        let runnable = self.restrictions.runnable;
        Ok(Restrictions { runnable, ..Restrictions::parse(settings)? })
    }

    /// The search that answers it.
    pub fn task(&self) -> Task<'_> {
        let task = Task::new(&self.model, &self.cluster, self.gpus, &self.restrictions);
        let (interrupt, processors) = (Some(&*self.stop), Some(&*self.processors));
        let until = Until { interrupt, deadline: self.deadline, processors };
        Task { until, every_cut_work: self.every_cut_work, ..task }
    }
}
