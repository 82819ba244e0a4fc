//! Contradictions between a plan and its own inputs or its cluster, found without pricing anything.

use crate::answer::changes::changes;
use crate::request::Request;
use crate::request::restrictions::{Choice, Restrictions};
use crate::request::rules::Waived;
use crate::request::space::Space;
use models::check::Violation;
use models::decisions::{AuxScope, Decisions, Offload};
use models::model::{self, ModelSpec};
use models::plan::Plan;
use models::program::unsupported;
use models::schedule::ScheduleName;
use models::text::quotable;
use std::fmt::Display;

/// Decisions that `inputs.settings` do not allow. Where the cluster is known, also a number format
/// that it does not train in.
pub fn contradictions(plan: &Plan, request: Option<&Request>) -> Vec<Violation> {
    let settings = &plan.inputs.settings;
    let mut found = match (request, Restrictions::typed(settings)) {
        (Some(request), _) => disallowed(plan, &request.restrictions),
        (None, Ok(typed)) => disallowed(plan, &typed),
        (None, Err(error)) => {
            let found = quotable(&format!("{settings:?}"));
            vec![violation("inputs.settings", found, error.message)]
        }
    };
    if plan.inputs.runnable && !unsupported(&plan.inputs.model, &plan.decisions).is_empty() {
        found.push(violation("inputs.runnable", true, "false: the trainer cannot run this plan"));
    }
    let Some(request) = request else { return found };
    let dtypes = space(request, &request.restrictions).dtypes();
    let dtype = plan.decisions.dtype;
    if !dtypes.contains(&dtype) {
        let valid: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        let valid = format!("{}, which this cluster trains in", valid.join(" or "));
        found.push(violation("decisions.dtype", dtype.name(), valid));
    }
    found
}

fn violation(field: &str, found: impl Display, valid: impl Display) -> Violation {
    Violation { field: field.to_owned(), found: found.to_string(), valid: valid.to_string() }
}

fn space<'a>(request: &'a Request, restrictions: &'a Restrictions) -> Space<'a> {
    let Request { model, cluster, gpus, .. } = request;
    Space { model, cluster, gpus: *gpus, restrictions, waived: Waived::default() }
}

fn disallowed(plan: &Plan, r: &Restrictions) -> Vec<Violation> {
    let d: &Decisions = &plan.decisions;
    let usual = AuxScope::usual(&plan.inputs.model);
    let aux_scope = r.aux_scope.pinned().unwrap_or(usual);
    let numbers = [
        ("tp", &r.tp, d.tp),
        ("pp", &r.pp, d.pp),
        ("vpp", &r.vpp, d.vpp),
        ("cp", &r.cp, d.cp),
        ("dp", &r.dp, d.dp),
        ("dp_shard", &r.dp_shard, d.dp_shard),
        ("ep", &r.ep, d.ep),
        ("etp", &r.etp, d.etp),
        ("zero_stage", &r.zero_stage, u64::from(d.zero_stage)),
        ("micro_batch", &r.micro_batch, d.micro_batch),
    ];
    let numbers = numbers.map(|(name, allowed, n)| (name, allowed.allows(n), n.to_string()));
    // What is not searched has the value that it gets where nothing else is asked for.
    let usual = r.unsearched();
    let unsearched = [
        ("recompute_group", usual.recompute_group, d.recompute_group),
        ("dp_bucket_mib", usual.dp_bucket_mib, d.dp_bucket_mib),
    ];
    let unsearched = unsearched.map(|(name, usual, n)| (name, n == usual, n.to_string()));
    // An order of its own is not that of a named schedule.
    let schedule = !plan.order.is_empty() || r.schedule.allows(d.schedule);
    let offload = r.offload.allows(d.offload) && d.offload.of_layers() == usual.offload;
    let choices = [
        ("cp_style", r.cp_style.allows(d.cp_style), d.cp_style.name()),
        ("schedule", schedule, d.schedule.name()),
        ("recompute", r.recompute.allows(d.recompute), d.recompute.name()),
        ("vocab", r.vocab.allows(d.vocab), d.vocab.name()),
        ("moe_overlap", r.moe_overlap.allows(d.moe_overlap), d.moe_overlap.name()),
        ("aux_scope", d.aux_scope == aux_scope, d.aux_scope.name()),
        ("dtype", r.dtype.allows(d.dtype), d.dtype.name()),
        ("offload", offload, d.offload.name()),
        ("dp_reduction", d.dp_reduction == usual.dp_reduction, d.dp_reduction.name()),
        ("rank_order", r.rank_order.allows(d.rank_order), d.rank_order.name()),
    ];
    let choices = choices.map(|(name, allowed, value)| (name, allowed, value.to_owned()));
    let switches = [
        ("sequence_parallel", &r.sequence_parallel, d.sequence_parallel),
        ("fused_loss", &r.fused_loss, d.fused_loss),
        ("post_validation", &r.post_validation, d.post_validation),
    ];
    let switches = switches.map(|(name, allowed, on)| (name, allowed.allows(on), on.to_string()));
    let all = numbers.into_iter().chain(unsearched).chain(choices).chain(switches);
    let valid = match plan.inputs.settings.is_empty() {
        true => "what is searched where nothing is set".to_owned(),
        false => {
            format!("what inputs.settings allow: {}", quotable(&plan.inputs.settings.join(" ")))
        }
    };
    all.filter(|(_, allowed, _)| !allowed)
        .map(|(name, _, found)| violation(&format!("decisions.{name}"), found, &valid))
        .collect()
}

/// Facts that are allowed but should be known, one sentence each.
pub fn notes(plan: &Plan, request: Option<&Request>, own_tool: &str) -> Vec<String> {
    let tool =
        (plan.tool != own_tool).then(|| format!("written by {}, this is {own_tool}", plan.tool));
    let proof = request.and_then(|request| other_candidates(plan, request));
    tool.into_iter().chain(shipped(&plan.inputs.model)).chain(proof).collect()
}

/// A note where the proof counts another number of combinations than the inputs have.
fn other_candidates(plan: &Plan, request: &Request) -> Option<String> {
    let said = plan.proof.candidates;
    let typed = &request.restrictions;
    // Searches that widen to every schedule, or leave offloading out, count other combinations.
    let all_schedules = Restrictions { schedule: Choice::of(&ScheduleName::ALL), ..typed.clone() };
    let no_offload = Restrictions { offload: Choice::of(&[Offload::None]), ..typed.clone() };
    let own = space(request, typed).count();
    let others =
        [&all_schedules, &no_offload].map(|restrictions| || space(request, restrictions).count());
    let known = said == own || others.into_iter().any(|count| count() == said);
    (!known).then(|| format!("its proof is of {said} combinations, but these inputs have {own}"))
}

/// A note where a model has a shipped one's name but differs in more than its run.
fn shipped(model: &ModelSpec) -> Option<String> {
    let shipped = model::shipped(&model.name)?.ok()?;
    let shipped = shipped.with_run(Some(model.seq_len), Some(model.global_batch)).ok()?;
    let (Ok(own), Ok(other)) = (serde_json::to_value(model), serde_json::to_value(shipped)) else {
        return None;
    };
    let mut fields: Vec<_> = changes(&own, &other).into_iter().map(|change| change.field).collect();
    // Fields that a run sets besides the model, and what its reader assumed.
    fields.retain(|field| field != "moe.capacity_factor" && !field.starts_with("assumptions"));
    let name = &model.name;
    (!fields.is_empty())
        .then(|| format!("its model differs from the shipped {name} in {}", fields.join(", ")))
}
