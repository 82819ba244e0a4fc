//! Plans edited by hand so that pricing them again shows nothing: the checker refuses or notes
//! them.

mod cli_common;

use cli_common::{plan, scratch};
use models::input::Source;
use models::plan::Plan;
use planner::answer::contradictions::notes;
use planner::answer::recheck::{Prices, checked};
use planner::answer::report::TOOL;
use planner::request::flags::request_of;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn good(words: &str) -> Value {
    let path = scratch("forged.yaml");
    let run = plan(&format!("{words} -o {}", path.display()));
    assert_eq!(run.code, 0, "{run:?}");
    serde_json::to_value(Plan::read(&Source::open(&path).unwrap()).unwrap()).unwrap()
}

fn dense() -> Value {
    good(
        "--model llama8b --gpus 16 --set tp=2 --set pp=4 --set schedule=1f1b --set vocab=tensor --set zero_stage=1 \
         --set cp=1 --set micro_batch=1",
    )
}

fn mixture() -> Value {
    good(
        "--model mixtral_8x7b --gpus 32 --set tp=2 --set pp=4 --set ep=4 --set etp=1 --set schedule=1f1b \
         --set vocab=tensor --set cp=1 --set micro_batch=1",
    )
}

/// What the checker says of a plan: refused fields, and notes.
#[derive(Debug, Default)]
struct Said {
    refused: Vec<String>,
    notes: Vec<String>,
}

impl Said {
    fn of(plan: &Plan) -> Self {
        let fields =
            |found: Vec<models::check::Violation>| found.into_iter().map(|v| v.field).collect();
        let found = checked(plan, None).expect("the shipped cluster reads");
        let refused: Vec<String> = fields(found.violations);
        let mut notes = match refused.is_empty() {
            true => notes(plan, request_of(plan, None).ok().as_ref(), TOOL),
            false => vec![],
        };
        if found.prices == Prices::NoCluster {
            notes.push("not priced again".to_owned());
        }
        Self { refused, notes }
    }

    fn is_silent(&self) -> bool {
        self.refused.is_empty() && self.notes.is_empty()
    }
}

fn edited(plan: &Value, pointer: &str, value: Value) -> Option<Plan> {
    let mut plan = plan.clone();
    match plan.pointer_mut(pointer) {
        Some(found) => *found = value,
        // A field that is left out where it is empty.
        None => {
            let (parent, field) = pointer.rsplit_once('/').expect("a pointer starts with a slash");
            plan.pointer_mut(parent).unwrap_or_else(|| panic!("no {parent}"))[field] = value;
        }
    }
    serde_json::from_value(plan).ok()
}

#[test]
fn good_plans_are_good() {
    let laptop = "--model tiny --cluster laptop --gpus 2";
    for words in [
        laptop,
        "--model llama8b --gpus 16 --objective memory --set pp=2",
        "--model gemma2_9b --gpus 16 --set pp=4 --set tp=1 --set vocab=parallel_1",
        "--model gpt2_124m --cluster laptop --gpus 2 --set tp=1 --set pp=2 --order auto",
        "--model mixtral_8x7b --gpus 16 --set capacity_factor=1.25 --set pp=2 --set tp=2",
    ] {
        let plan: Plan = serde_json::from_value(good(words)).unwrap();
        let said = Said::of(&plan);
        assert!(said.is_silent(), "{words}: {said:?}");
    }
    for plan in [dense(), mixture()] {
        let said = Said::of(&serde_json::from_value(plan).unwrap());
        assert!(said.is_silent(), "{said:?}");
    }
}

#[test]
fn forgeries_are_refused() {
    let (dense, mixture) = (dense(), mixture());
    let mut sigmoid = mixture.clone();
    sigmoid["inputs"]["model"]["moe"]["router"] = json!("sigmoid_bias");
    let candidates = dense["proof"]["candidates"].as_u64().unwrap();
    let edits = [
        (&dense, "/proof/candidates", json!(candidates + 1), "proof.candidates"),
        (&dense, "/proof/placed", json!(0), "proof.candidates"),
        (&dense, "/proof/cut_by_dominance", json!(u64::MAX), "proof.candidates"),
        (&dense, "/tool", json!("evil 1.0.0"), "tool"),
        (&dense, "/tool", json!("meshwright"), "tool"),
        (&dense, "/tool", json!("meshwright 1.0.0; rm"), "tool"),
        (&dense, "/predicted/error_band/relative", json!(0.001), "predicted.error_band.relative"),
        (
            &dense,
            "/predicted/error_band/basis",
            json!("uncalibrated"),
            "predicted.error_band.basis",
        ),
        (&dense, "/decisions/dtype", json!("fp16"), "decisions.dtype"),
        (&dense, "/decisions/vocab", json!("redistribute"), "decisions.vocab"),
        (&dense, "/decisions/schedule", json!("overlapped_1f1b"), "decisions.schedule"),
        (&dense, "/decisions/aux_scope", json!("micro_batch"), "decisions.aux_scope"),
        (&dense, "/inputs/settings", json!(["tp=8"]), "decisions.tp"),
        (&dense, "/inputs/settings", json!(["nonsense"]), "inputs.settings"),
        (&dense, "/inputs/model/numerics/norm_eps", json!(0.0), "inputs.model.numerics.norm_eps"),
        (
            &dense,
            "/inputs/model/numerics/rope_theta",
            json!(-1.0),
            "inputs.model.numerics.rope_theta",
        ),
        (
            &dense,
            "/inputs/model/numerics/query_pre_attn_scalar",
            json!(0.0),
            "inputs.model.numerics.query_pre_attn_scalar",
        ),
        (
            &dense,
            "/inputs/model/numerics/embedding_scale",
            json!(1e300),
            "inputs.model.numerics.embedding_scale",
        ),
        (
            &dense,
            "/inputs/model/attention/rotary_dim",
            json!(33),
            "inputs.model.attention.rotary_dim",
        ),
        (&dense, "/inputs/model/dropout", json!(1.5), "inputs.model.dropout"),
        (&dense, "/inputs/model/final_soft_cap", json!(-3.0), "inputs.model.final_soft_cap"),
        (&mixture, "/decisions/capacity_factor", json!(1.5), "decisions.capacity_factor"),
        (
            &mixture,
            "/inputs/model/moe/losses",
            json!({"over": "each_layer", "z_loss": -1.0}),
            "inputs.model.moe.losses.z_loss",
        ),
        (
            &mixture,
            "/inputs/model/moe/bias_update_rate",
            json!(0.001),
            "inputs.model.moe.bias_update_rate",
        ),
        (
            &sigmoid,
            "/inputs/model/moe/bias_update_rate",
            json!(1e-9),
            "inputs.model.moe.bias_update_rate",
        ),
        (&mixture, "/inputs/model/moe/capacity_factor", json!(1.5), "decisions.capacity_factor"),
    ];
    for (plan, pointer, value, field) in edits {
        let said = Said::of(&edited(plan, pointer, value.clone()).unwrap());
        assert!(said.refused.iter().any(|name| name == field), "{pointer} = {value}: {said:?}");
    }
}

#[test]
fn what_may_be_meant_is_noted() {
    let dense = dense();
    let mut fewer = dense.clone();
    for pointer in ["/proof/candidates", "/proof/placed"] {
        let value = fewer.pointer_mut(pointer).unwrap();
        *value = json!(value.as_u64().unwrap() - 1);
    }
    let fewer: Plan = serde_json::from_value(fewer).unwrap();
    let edits = [
        (fewer, "its proof is of"),
        (
            edited(&dense, "/tool", json!("meshwright 9.9.9")).unwrap(),
            "written by meshwright 9.9.9",
        ),
        (
            edited(&dense, "/inputs/model/numerics/rope_theta", json!(10_000.0)).unwrap(),
            "numerics.rope_theta",
        ),
        (
            edited(&dense, "/inputs/model/numerics/norm_unit_offset", json!(true)).unwrap(),
            "norm_unit_offset",
        ),
    ];
    for (plan, says) in edits {
        let said = Said::of(&plan);
        assert_eq!(said.refused, [""; 0], "{says}");
        assert!(said.notes.iter().any(|note| note.contains(says)), "{says}: {said:?}");
    }
    let path = scratch("noted.yaml");
    let noted = edited(&dense, "/inputs/model/numerics/rope_theta", json!(10_000.0)).unwrap();
    std::fs::write(&path, noted.to_yaml().unwrap()).unwrap();
    let run = plan(&format!("check {}", path.display()));
    assert_eq!(run.code, 0, "{run:?}");
    let says = "note: its model differs from the shipped llama8b in numerics.rope_theta";
    assert!(run.out.contains(says), "{run:?}");
}

/// Pointers to every number, boolean and text of a plan.
fn leaves(value: &Value, at: &str, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(entries) => {
            entries.iter().for_each(|(key, value)| leaves(value, &format!("{at}/{key}"), found));
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, value)| leaves(value, &format!("{at}/{index}"), found));
        }
        leaf => drop(found.insert(at.to_owned(), leaf.clone())),
    }
}

/// Changes every leaf of a plan to a few other values, one at a time. Not covered are the model's
/// name and the headroom, which the user chooses, and what only a search could verify of the proof.
#[test]
fn single_edits_are_seen() {
    let plan = mixture();
    let mut all = BTreeMap::new();
    leaves(&plan, "", &mut all);
    let (mut tried, mut silent) = (0, vec![]);
    for (pointer, leaf) in all {
        let others = match &leaf {
            Value::Bool(on) => vec![json!(!on)],
            Value::Number(n) => {
                let n = n.as_f64().unwrap();
                vec![json!(n as u64 + 1), json!(n * 1.5), json!(0), json!((n * 0.5) as u64)]
            }
            Value::String(_) => vec![json!("other"), json!("")],
            _ => vec![json!(1), json!(1.5)],
        };
        for value in others
            .into_iter()
            .filter(|value| *value != leaf && value.as_f64() != leaf.as_f64().or(Some(-1.0)))
        {
            let Some(plan) = edited(&plan, &pointer, value.clone()) else { continue };
            tried += 1;
            if Said::of(&plan).is_silent() {
                silent.push(format!("{pointer} = {value}"));
            }
        }
    }
    println!("{} of {tried} edits are silent: {silent:#?}", silent.len());
    let known = [
        "/inputs/headroom",
        "/inputs/model/name",
        "/proof/ilps",
        "/proof/family",
        "/proof/gap",
        "/proof/proven_optimal = false",
    ];
    let unknown: Vec<_> =
        silent.iter().filter(|edit| !known.iter().any(|name| edit.starts_with(name))).collect();
    assert!(unknown.is_empty(), "{unknown:#?}");
}
