//! A plan priced again: what a check that reads figures alone cannot know.

use crate::case::Case;
use crate::case::ground::Ground;
use crate::case::priced::{Placed, PlacedStage};
use crate::placement::Scratch;
use crate::request::Request;
use models::placement::{Stage, kind_name};
use models::plan::{Plan, significant};

/// Where a plan's layers lie.
pub fn placed_of(ground: &Ground<'_>, stages: &[Stage]) -> Placed {
    let of_kind = |stage: &Stage, kind| {
        let counts = stage.recompute.get(kind_name(kind)).copied().unwrap_or_default();
        [counts.none, counts.selective, counts.full]
    };
    let placed = |stage: &Stage| PlacedStage {
        start: stage.first_layer,
        end: stage.first_layer + stage.layers,
        mix: ground.layers.kinds.iter().map(|&kind| of_kind(stage, kind)).collect(),
    };
    stages.iter().map(placed).collect()
}

/// What a plan costs by this version's prices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repriced {
    /// One iteration, s.
    pub iteration_s: f64,
    /// On the fullest device, bytes.
    pub peak_bytes: f64,
    /// Whether that fits.
    pub fits: bool,
}

/// The plan's decisions and placement, priced; `None` where its schedule cannot be made.
pub fn repriced(request: &Request, plan: &Plan) -> Option<Repriced> {
    let ground = Ground::new(&request.model, &request.cluster, request.gpus);
    let case = Case::new(&ground, plan.decisions.clone()).ok()?;
    let case = match plan.own_order().ok()? {
        Some(order) => case.in_order(order),
        None => case,
    };
    let priced = case.price(&placed_of(&ground, &plan.stages), &mut Scratch::default());
    let peak_bytes = priced.device_bytes.iter().copied().fold(0.0, f64::max);
    Some(Repriced { iteration_s: priced.iteration_s, peak_bytes, fits: priced.fits })
}

/// Bytes that rounding of a device's parts may take off.
const ROUNDING_BYTES: f64 = 1e4;

impl Repriced {
    /// Whether the plan says the same.
    pub fn agrees(&self, plan: &Plan) -> bool {
        let time = significant(self.iteration_s) == plan.predicted.iteration_s;
        let bytes = self.peak_bytes - plan.predicted.peak_memory_bytes as f64;
        time && bytes.abs() <= ROUNDING_BYTES
    }
}
