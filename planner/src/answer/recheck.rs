//! Checks a plan by pricing it again, beyond what the consistency of its figures shows.

use crate::answer::changes::{Change, changes};
use crate::answer::contradictions::contradictions;
use crate::answer::report::{self, TOOL};
use crate::answer::text::seconds;
use crate::partition::Scratch;
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::{Placed, PlacedStage};
use crate::request::Request;
use crate::request::flags::request_on;
use crate::search::Found;
use models::check::{Violation, check};
use models::input::InputError;
use models::placement::{Stage, kind_name};
use models::plan::{ClusterFigures, Objective, Plan, Proof};
use serde_json::{Value, json};

/// The partition of a plan.
pub fn placed_of(cache: &CostCache<'_>, stages: &[Stage]) -> Placed {
    let of_kind = |stage: &Stage, kind| {
        let counts = stage.recompute.get(kind_name(kind)).copied().unwrap_or_default();
        [counts.none, counts.selective, counts.full]
    };
    let placed = |stage: &Stage| PlacedStage {
        start: stage.first_layer,
        end: stage.first_layer + stage.layers,
        recompute: cache.layers.kinds.iter().map(|&kind| of_kind(stage, kind)).collect(),
    };
    stages.iter().map(placed).collect()
}

/// A plan with this version's prices.
#[derive(Clone, Debug, PartialEq)]
pub struct Repriced {
    /// The same plan with the figures that follow from its decisions and stages.
    pub plan: Plan,
    /// Whether it fits, with the headroom it was made with.
    pub fits: bool,
}

/// Prices the plan's decisions and partition. `None` where its schedule cannot be built.
pub fn repriced(request: &Request, plan: &Plan) -> Option<Repriced> {
    let found = priced(request, plan)?;
    let fits = found.priced.fits;
    let now = report::priced_plan(request, &found, plan.proof);
    Some(Repriced { plan: Plan { order: plan.order.clone(), ..now }, fits })
}

/// A plan from the file `path` with this version's prices on its request's cluster; and a note
/// where they are not its own.
///
/// # Errors
/// With these prices it cannot be made, or does not fit.
pub fn as_priced_now(
    request: &Request,
    plan: Plan,
    path: &str,
) -> Result<(Plan, Option<String>), InputError> {
    let help = || format!("plan check {path} lists what is wrong with it");
    let Some(now) = repriced(request, &plan) else {
        let message = format!("the schedule of {path} cannot be made for its degrees");
        return Err(InputError::new(message).help(help()));
    };
    if now.moved(&plan).is_empty() {
        return Ok((plan, None));
    }
    let (name, tool) = (&request.cluster.name, &plan.tool);
    let [then, here] = [&plan, &now.plan].map(|plan| seconds(plan.predicted.iteration_s));
    let why = match tool == TOOL {
        true => {
            "it was edited, or made for another cluster of that name, which --cluster FILE names"
                .to_owned()
        }
        false => format!("{tool} wrote it, and this is {TOOL}"),
    };
    let what = match then == here {
        true => format!("{path} has other figures than its decisions and stages on `{name}`"),
        false => format!(
            "{path} says {then} a step, and its decisions and stages take {here} on `{name}`"
        ),
    };
    let note = format!("{what}: {why}");
    if !now.fits {
        return Err(InputError::new(format!("{note}. It does not fit")).help(help()));
    }
    // Nothing is proven of what was not searched.
    let proof = Proof { gap: 1.0, searched_gap: 1.0, ..Proof::default() };
    Ok((Plan { proof, ..now.plan }, Some(note)))
}

/// The request for what is compared with its plan. One of least memory compares with plans that
/// need no more than it does.
#[must_use]
pub fn in_memory_of(request: &Request, plan: &Plan) -> Request {
    match plan.inputs.objective {
        Objective::Time => request.clone(),
        Objective::Memory => in_own_memory(request, plan).unwrap_or_else(|| request.clone()),
    }
}

/// The request on devices with the least memory in which the plan fits. `None` where its schedule
/// cannot be built, or it does not fit.
pub fn in_own_memory(request: &Request, plan: &Plan) -> Option<Request> {
    let whole = priced(request, plan)?.priced;
    whole.fits.then_some(())?;
    let needs_bytes = whole.device_bytes.into_iter().fold(0.0, f64::max);
    let mut own = request.clone();
    let hbm_bytes = &mut own.cluster.device.hbm_bytes;
    *hbm_bytes = hbm_bytes.min(needs_bytes / (1.0 - request.cluster.headroom));
    // The sums that decide what fits may round otherwise than this quotient.
    while !priced(&own, plan)?.priced.fits {
        own.cluster.device.hbm_bytes = own.cluster.device.hbm_bytes.next_up();
    }
    Some(own)
}

fn priced(request: &Request, plan: &Plan) -> Option<Found> {
    let cache = CostCache::new(&request.model, &request.cluster, request.gpus);
    let configuration = Configuration::new(&cache, plan.decisions.clone()).ok()?;
    let configuration = match plan.own_order().ok()? {
        Some(order) => configuration.in_order(order),
        None => configuration,
    };
    let placed = placed_of(&cache, &plan.stages);
    let priced = configuration.price(&placed, &mut Scratch::default());
    Some(Found { decisions: plan.decisions.clone(), placed, priced })
}

impl Repriced {
    /// Figures of `plan` that differ from these.
    pub fn moved(&self, plan: &Plan) -> Vec<Change> {
        let figures = |plan: &Plan| json!({"predicted": plan.predicted, "stages": plan.stages});
        changed(&figures(plan), &figures(&self.plan))
    }
}

/// Fields that differ by more than the digits that plans keep.
fn changed(found: &Value, now: &Value) -> Vec<Change> {
    let mut moved = changes(found, now);
    moved.retain(|change| !alike(&change.a, &change.b));
    moved
}

/// Whether two numbers differ by no more than rounding on another machine.
fn alike(a: &Value, b: &Value) -> bool {
    match (a.as_i64(), b.as_i64(), a.as_f64(), b.as_f64()) {
        (Some(a), Some(b), ..) => a.abs_diff(b) <= 1,
        (.., Some(a), Some(b)) => (a - b).abs() <= 1e-6 * a.abs().max(b.abs()),
        _ => false,
    }
}

/// Result of pricing a plan again.
#[derive(Clone, Debug, PartialEq)]
pub enum Prices {
    /// Not priced: the plan is inconsistent.
    NotAsked,
    /// No cluster of its name is shipped, and none was given.
    NoCluster,
    /// Its cluster's figures differ from the shipped or given cluster's.
    OtherCluster(Vec<Change>),
    /// Its schedule cannot be built.
    NoSchedule,
    /// Priced, with the figures that differ from the plan's.
    Again(Box<Repriced>, Vec<Change>),
}

/// The result of `plan check`.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// Violations: what makes the plan invalid for this version.
    pub violations: Vec<Violation>,
    /// Result of pricing it again.
    pub prices: Prices,
    /// The version that wrote the plan, where it is another one. Its figures may differ from this
    /// one's.
    pub other_version: Option<String>,
}

/// Parts of a plan that pricing it again cannot verify, and why.
pub const NOT_VERIFIED: [(&str, &str); 1] = [("proof", "it takes the search again: --proof")];

/// Checks a plan by itself, then prices it on the shipped cluster of its name or on the one given.
///
/// A figure that does not follow from the plan's decisions is a violation, unless another version
/// of the tool wrote the plan.
///
/// # Errors
/// The cluster given cannot be read.
pub fn checked(plan: &Plan, cluster: Option<&str>) -> Result<Checked, InputError> {
    // Where only figures contradict one another, their prices tell which are right.
    let is_figure = |violation: &Violation| violation.field.starts_with("predicted.");
    let mut violations = check(plan);
    let figures_only = violations.iter().all(is_figure);
    let mut others = vec![];
    if figures_only {
        others = match request_on(plan, cluster) {
            Ok(request) => contradictions(plan, request.as_ref()),
            // Settings that cannot be parsed are violations of the plan, not errors.
            Err(error) => {
                Some(contradictions(plan, None)).filter(|v| !v.is_empty()).ok_or(error)?
            }
        };
    }
    let prices = match figures_only && others.is_empty() {
        true => prices(plan, cluster)?,
        false => Prices::NotAsked,
    };
    violations.extend(others);
    let other_version = (plan.tool != TOOL).then(|| plan.tool.clone());
    if other_version.is_none() && !prices.moved().is_empty() {
        violations.clear();
    }
    violations.extend(prices.misfits());
    if other_version.is_none() {
        violations.extend(prices.moved().iter().map(|change| prices.violation(change)));
    }
    Ok(Checked { violations, prices, other_version })
}

fn prices(plan: &Plan, cluster: Option<&str>) -> Result<Prices, InputError> {
    let Some(request) = request_on(plan, cluster)? else { return Ok(Prices::NoCluster) };
    let here = ClusterFigures::new(&request.cluster, &plan.decisions);
    if here != plan.inputs.cluster {
        let figures = |figures: &ClusterFigures| json!({"inputs": {"cluster": figures}});
        return Ok(Prices::OtherCluster(changes(&figures(&plan.inputs.cluster), &figures(&here))));
    }
    Ok(match repriced(&request, plan) {
        None => Prices::NoSchedule,
        Some(now) => {
            let moved = now.moved(plan);
            Prices::Again(Box::new(now), moved)
        }
    })
}

impl Prices {
    /// Figures that differ: the plan's value and the right one.
    pub fn moved(&self) -> &[Change] {
        match self {
            Self::OtherCluster(moved) | Self::Again(_, moved) => moved,
            _ => &[],
        }
    }

    /// Violations that another version's prices do not excuse.
    fn misfits(&self) -> Option<Violation> {
        let violation = |field: &str, found: String, valid: &str| {
            Some(Violation { field: field.to_owned(), found, valid: valid.to_owned() })
        };
        match self {
            Self::NoSchedule => violation(
                "decisions.schedule",
                "what cannot be made for these degrees".to_owned(),
                "a schedule that exists for them",
            ),
            Self::Again(now, _) if !now.fits => violation(
                "predicted.peak_memory_bytes",
                format!(
                    "what it says: priced again it is {}",
                    now.plan.predicted.peak_memory_bytes
                ),
                "what a device has without inputs.headroom",
            ),
            _ => None,
        }
    }

    fn violation(&self, change: &Change) -> Violation {
        let whose = match self {
            Self::OtherCluster(_) => "as the cluster has it",
            _ => "which is what the decisions and stages give",
        };
        Violation {
            field: change.field.clone(),
            found: change.a.to_string(),
            valid: format!("{}, {whose}", change.b),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::report::Answer;
    use crate::answer::shortage::least_memory;
    use crate::request::flags::Flags;

    /// Its own memory, to the last byte, although plans have whole bytes.
    #[test]
    fn a_plan_of_least_memory_fits_into_its_own() {
        // Sevenths of bytes in parts of every stage.
        for settings in [
            &["dp=7", "pp=2", "schedule=interleaved_1f1b", "vpp=4"][..],
            &["dp=7", "pp=4", "schedule=zb_v"],
            &["dp=7", "pp=1"],
        ] {
            let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
            let (model, global_batch) = ("llama8b".to_owned(), Some(448));
            let flags = Flags { model, gpus: 28, global_batch, settings, ..Flags::default() };
            let mut request = Request::new(&flags).expect("it is shipped");
            request.objective = Objective::Memory;
            let (outcome, _) = least_memory(&request, &mut |_| {}).expect("it fits");
            let plan = Answer::new(&request, outcome).expect("it was found").plan;
            let own = in_memory_of(&request, &plan);
            assert!(repriced(&own, &plan).is_some_and(|now| now.fits), "{flags:?}");
            let needs_bytes = plan.predicted.peak_memory_bytes as f64 / (1.0 - own.headroom);
            let spare_bytes = own.cluster.device.hbm_bytes - needs_bytes;
            assert!((0.0..100.0).contains(&spare_bytes), "{spare_bytes}: {flags:?}");
            assert!(own.cluster.device.hbm_bytes < request.cluster.device.hbm_bytes);
        }
    }
}
