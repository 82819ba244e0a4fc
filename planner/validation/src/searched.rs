//! The order of passes that Zero Bubble's fork searched for each of its ZB-2p runs.
//!
//! The fork measures passes and then takes the best order that a search finds within twice the
//! pipeline's depth of activations (Zero Bubble, arXiv 2401.10241, section 3.1). About half of the
//! activations are freed by the backward to inputs, which leaves more room than ZB-H2 uses.

use super::row::{Reason, Row};
use models::decisions::Decisions;
use models::model::ModelSpec;
use models::schedule::{AutoCosts, Schedule, ScheduleError, ScheduleName, zb_auto};
use planner::order::choice::mean_costs;
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::priced::Placed;
use std::sync::Arc;

/// A searched order of passes.
#[derive(Clone, Debug)]
pub struct Searched {
    order: Arc<Schedule>,
    /// Micro-batches whose full activations fit on a pipeline rank.
    held: u32,
}

/// Bytes per token and hidden unit that a layer keeps until its weight gradients, and until its
/// backward without scores; `SCORES` bytes per head and key are kept for scores (Zero Bubble,
/// section 2.1, table 1).
const UNTIL_WEIGHTS: f64 = 32.0;
const UNTIL_BACKWARD: f64 = 34.0;
const SCORES: f64 = 5.0;

impl Searched {
    /// The order of a row's run, if the row says that it was searched.
    ///
    /// # Errors
    /// No order fits into that memory.
    pub fn of(
        row: &Row,
        cache: &CostCache<'_>,
        d: &Decisions,
        placed: &Placed,
    ) -> Result<Option<Self>, Reason> {
        if row.schedule != "ZB-2p" {
            return Ok(None);
        }
        let reason = |error: ScheduleError| error.to_string();
        let split = Decisions { schedule: ScheduleName::ZbH1, ..d.clone() };
        let configuration = Configuration::new(cache, split).map_err(reason)?;
        let problem = configuration.problem_of(configuration.columns_of_placed(placed));
        let held = 2 * d.pp as u32;
        let freed_by_b = 1.0 - until_weights(cache.model);
        let costs = AutoCosts {
            freed_by_b,
            freed_by_w: 1.0 - freed_by_b,
            limit: held.into(),
            ..mean_costs(&problem, configuration.mean_link_s(), d.micro_batches as f64)
        };
        let order = zb_auto(d.pp as usize, d.micro_batches as usize, 1, costs).map_err(reason)?;
        let held = held.min(d.micro_batches as u32);
        Ok(Some(Self { order: Arc::new(order), held }))
    }

    /// `configuration` with this order of passes.
    pub fn applied_to<'a>(&self, configuration: Configuration<'a>) -> Configuration<'a> {
        debug_assert_eq!(configuration.decisions.schedule, ScheduleName::ZbAuto);
        configuration.in_order_within(self.order.as_ref().clone(), self.held)
    }
}

/// Fraction of a layer's activations that is kept until its weight gradients.
fn until_weights(model: &ModelSpec) -> f64 {
    let scores = SCORES * (model.attention.heads * model.seq_len) as f64 / model.hidden as f64;
    UNTIL_WEIGHTS / (UNTIL_BACKWARD + scores)
}
