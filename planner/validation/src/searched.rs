//! The order that Zero Bubble searches for each of its runs of ZB-2p.
//!
//! Its fork times passes and then orders them: the best order that a search finds within the memory of twice the
//! pipeline's depth (Zero Bubble, arXiv 2401.10241, section 3.1). As half of the activations go with the backward pass to
//! inputs, there is room for more than ZB-H2 has.

use super::row::{Reason, Row};
use models::decisions::Decisions;
use models::model::ModelSpec;
use models::schedule::{AutoCosts, Schedule, ScheduleError, ScheduleName, zb_auto};
use planner::order::choice::mean_costs;
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::priced::Placed;
use std::sync::Arc;

/// A searched order.
#[derive(Clone, Debug)]
pub struct Searched {
    order: Arc<Schedule>,
    /// Micro-batches whose whole activations a device may hold.
    held: u32,
}

/// Bytes for each token and unit of width that a layer keeps until its weight gradients, and until its backward pass
/// besides scores, of which there are `SCORES` for each head and key (Zero Bubble, section 2.1, table 1).
const UNTIL_WEIGHTS: f64 = 32.0;
const UNTIL_BACKWARD: f64 = 34.0;
const SCORES: f64 = 5.0;

impl Searched {
    /// The order that a row ran, where it says that it was searched for.
    ///
    /// # Errors
    /// There is none within that memory.
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
        let case = Configuration::new(cache, split).map_err(reason)?;
        let problem = case.problem_of(case.columns_of_placed(placed));
        let held = 2 * d.pp as u32;
        let freed_by_b = 1.0 - until_weights(cache.model);
        let costs = AutoCosts {
            freed_by_b,
            freed_by_w: 1.0 - freed_by_b,
            limit: held.into(),
            ..mean_costs(&problem, case.mean_link_s(), d.micro_batches as f64)
        };
        let order = zb_auto(d.pp as usize, d.micro_batches as usize, 1, costs).map_err(reason)?;
        let held = held.min(d.micro_batches as u32);
        Ok(Some(Self { order: Arc::new(order), held }))
    }

    /// The same configuration in this order.
    pub fn case<'a>(&self, case: Configuration<'a>) -> Configuration<'a> {
        debug_assert_eq!(case.decisions.schedule, ScheduleName::ZbAuto);
        case.in_order_within(self.order.as_ref().clone(), self.held)
    }
}

/// Part of a layer's activations that is kept until its weight gradients.
fn until_weights(model: &ModelSpec) -> f64 {
    let scores = SCORES * (model.attention.heads * model.seq_len) as f64 / model.hidden as f64;
    UNTIL_WEIGHTS / (UNTIL_BACKWARD + scores)
}
