//! Best-first branch and bound over the space of combinations.
//!
//! docs/design/search.md explains it: [`queue`] holds what waits, [`expand`] splits and bounds it.

mod candidate_chains;
pub mod every_cut;
mod expand;
mod local_search;
pub mod partition_candidates;
mod partition_problem;
mod post_validation;
mod queue;

use crate::partition::Scratch;
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::{Placed, Priced};
use crate::request::Task;
use crate::until::ThreadTime;
use models::decisions::Decisions;
use models::plan::Proof;

pub use queue::lean::least_activations;

/// What a search cost: wall times, which differ from run to run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effort {
    /// The search, s.
    pub elapsed_s: f64,
    /// From its start to the first plan that fits, s, if there is one.
    pub first_s: Option<f64>,
    /// Whether there was a deadline.
    pub limited: bool,
    /// Integer programs on average, ms.
    pub ms_per_ilp: f64,
}

/// How far a search is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standing {
    /// Combinations settled.
    pub settled: u64,
    /// All combinations.
    pub all: u64,
    /// The incumbent's time, s; infinite where there is none.
    pub best_s: f64,
    /// What no combination undercuts, s.
    pub bound_s: f64,
}

/// The best configuration found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its decisions.
    pub decisions: Decisions,
    /// Its placement.
    pub placed: Placed,
    /// Its price.
    pub priced: Priced,
}

/// A configuration that fits, with its time alone.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its decisions.
    pub decisions: Decisions,
    /// Its placement.
    pub placed: Placed,
    /// Its iteration, s.
    pub iteration_s: f64,
}

impl Found {
    /// A placement priced; `None` where its schedule cannot be built.
    pub fn new(cache: &CostCache<'_>, decisions: Decisions, placed: Placed) -> Option<Self> {
        let configuration = Configuration::new(cache, decisions).ok()?;
        let priced = configuration.price(&placed, &mut Scratch::default());
        Some(Self { decisions: configuration.decisions, placed, priced })
    }
}

impl From<Found> for Candidate {
    fn from(Found { decisions, placed, priced }: Found) -> Self {
        Self { decisions, placed, iteration_s: priced.iteration_s }
    }
}

/// What a search returns.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The fastest configuration that fits, if any.
    pub best: Option<Found>,
    /// Of each tp, pp and schedule, the fastest configuration that the search priced
    /// on its way, where it priced any. Nothing is proven of them.
    pub passed: Vec<Candidate>,
    /// What is proven of it.
    pub proof: Proof,
    /// What the search cost.
    pub effort: Effort,
}

/// Why a search found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Empty {
    /// There is nothing.
    Proven,
    /// The time was up before, or the work allowed for integer programs.
    Undecided,
}

/// Called now and then with how far a search is.
pub type Progress<'a> = &'a mut dyn FnMut(Standing);

/// Finds the fastest configuration that fits.
pub fn search(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    let begun = ThreadTime::now();
    let outcome = match task.restrictions.wants_post_validation() {
        true => post_validation::run(task, progress),
        false => queue::run(task, progress),
    };
    task.until.count(begun);
    outcome
}

impl Outcome {
    /// The outcome, if anything was found.
    ///
    /// # Errors
    /// Why not.
    pub fn found(self) -> Result<Self, Empty> {
        match (&self.best, self.proof.searched_gap > 0.0) {
            (Some(_), _) => Ok(self),
            (None, true) => Err(Empty::Undecided),
            (None, false) => Err(Empty::Proven),
        }
    }
}
