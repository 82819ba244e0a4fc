//! Changes every figure of a plan alone: `plan check` refuses the change or lists the figure as not
//! verified.

mod cli_common;

use cli_common::{plan, scratch};
use models::input::Source;
use models::plan::Plan;
use planner::answer::recheck::{Checked, NOT_VERIFIED, Prices, checked};
use planner::answer::report::TOOL;
use serde_json::{Value, json};

const DENSE: &str = "--model llama8b --gpus 16 --tokens 15T --set tp=2 --set pp=4 --set schedule=1f1b --set vocab=tensor \
                     --set zero_stage=1 --set cp=1 --set micro_batch=1";
const MIXTURE: &str = "--model mixtral_8x7b --gpus 32 --set tp=2 --set pp=4 --set ep=4 --set etp=1 --set schedule=1f1b \
                       --set vocab=tensor --set cp=1 --set micro_batch=1";
/// A bidirectional pipeline: two copies of each stage.
const BIDIRECTIONAL: &str =
    "--model llama8b --gpus 16 --set schedule=dualpipe --set pp=4 --set tp=2 --set micro_batch=1";

fn made(words: &str) -> Plan {
    let path = scratch("mutated.yaml");
    let run = plan(&format!("{words} -o {}", path.display()));
    assert_eq!(run.code, 0, "{run:?}");
    Plan::read(&Source::open(&path).unwrap()).unwrap()
}

fn check(plan: &Plan) -> Checked {
    checked(plan, None).unwrap()
}

/// A JSON pointer and how the figure there changes.
type Edit<'a> = (&'a str, &'a dyn Fn(&Value) -> Value);

/// The plan with some figures changed.
fn edited(plan: &Plan, edits: &[Edit<'_>]) -> Plan {
    let mut value = serde_json::to_value(plan).unwrap();
    for (pointer, edit) in edits {
        let figure = value.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}"));
        *figure = edit(figure);
    }
    serde_json::from_value(value).unwrap()
}

fn fields(found: &Checked) -> Vec<&str> {
    found.violations.iter().map(|violation| violation.field.as_str()).collect()
}

fn more(bytes: i64) -> impl Fn(&Value) -> Value {
    move |value| json!(value.as_i64().unwrap() + bytes)
}

fn longer(s: f64) -> impl Fn(&Value) -> Value {
    move |value| json!(value.as_f64().unwrap() + s)
}

/// Pointers of all numbers below a value.
fn numbers(at: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| numbers(&format!("{at}/{key}"), value, found));
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, value)| numbers(&format!("{at}/{index}"), value, found));
        }
        Value::Number(_) => found.push(at.to_owned()),
        _ => {}
    }
}

/// A slightly larger number: by a thousandth, and by at least 2 for a count.
fn nudged(value: &Value) -> Value {
    match value.as_u64() {
        Some(count) => json!(count + (count / 1000).max(2)),
        None => json!(value.as_f64().unwrap() * 1.001 + 1e-6),
    }
}

/// Figures of the model and the request that no price depends on.
fn is_asked_alone(pointer: &str) -> bool {
    pointer.starts_with("/inputs/model/") || pointer == "/inputs/headroom"
}

#[test]
fn good_plans_are_priced_the_same() {
    for words in [DENSE, MIXTURE, BIDIRECTIONAL] {
        let found = check(&made(words));
        assert_eq!(found.violations, [], "{words}");
        assert!(matches!(&found.prices, Prices::Again(_, moved) if moved.is_empty()), "{words}");
    }
}

#[test]
fn every_figure_changed_alone_is_refused_or_said_to_be_unverified() {
    for words in [DENSE, MIXTURE, BIDIRECTIONAL] {
        let good = made(words);
        let mut pointers = vec![];
        numbers("", &serde_json::to_value(&good).unwrap(), &mut pointers);
        pointers.retain(|pointer| !is_asked_alone(pointer));
        assert!(pointers.len() > 100, "{}", pointers.len());
        for pointer in pointers {
            let part = pointer[1..].split('/').next().unwrap();
            let unverified = NOT_VERIFIED.iter().any(|(name, _)| *name == part);
            let found = check(&edited(&good, &[(&pointer, &nudged)]));
            assert!(unverified || !found.violations.is_empty(), "{words}: {pointer} passed");
        }
    }
}

#[test]
fn memory_moved_or_dropped_is_named() {
    let good = made(MIXTURE);
    // Not of the fullest stage, where the peak memory would reveal the change.
    let held = good.stages[1].memory.activations as i64;
    let none = edited(
        &good,
        &[("/stages/1/memory/activations", &more(-held)), ("/stages/1/memory/total", &more(-held))],
    );
    let said = ["stages[1].memory.activations", "stages[1].memory.total"];
    assert_eq!(fields(&check(&none)), said);
    let gb = 1_000_000_000;
    let moved = edited(
        &good,
        &[("/stages/1/memory/parameters", &more(gb)), ("/stages/1/memory/gradients", &more(-gb))],
    );
    let found = check(&moved);
    assert_eq!(fields(&found), ["stages[1].memory.parameters", "stages[1].memory.gradients"]);
}

#[test]
fn seconds_moved_between_parts_are_named() {
    let good = made(DENSE);
    let moved = edited(
        &good,
        &[
            ("/predicted/breakdown/compute_s", &longer(-0.5)),
            ("/predicted/breakdown/tp_s", &longer(0.5)),
        ],
    );
    let found = check(&moved);
    assert_eq!(fields(&found), ["predicted.breakdown.compute_s", "predicted.breakdown.tp_s"]);
}

/// All times times two thirds, all rates times one and a half: the figures stay consistent.
#[test]
fn a_plan_that_is_faster_everywhere_is_refused() {
    let mut fast = made(DENSE);
    let before = fast.predicted.clone();
    let p = &mut fast.predicted;
    p.iteration_s /= 1.5;
    let mut parts = serde_json::to_value(p.breakdown).unwrap();
    for seconds in parts.as_object_mut().unwrap().values_mut() {
        *seconds = json!(seconds.as_f64().unwrap() / 1.5);
    }
    p.breakdown = serde_json::from_value(parts).unwrap();
    p.training_days = p.training_days.map(|days| days / 1.5);
    for rate in [
        &mut p.tokens_per_s_per_gpu,
        &mut p.model_tflops_per_gpu,
        &mut p.hardware_tflops_per_gpu,
        &mut p.mfu,
    ] {
        *rate *= 1.5;
    }
    assert_eq!(models::check::check(&fast), []);
    let found = check(&fast);
    let first = &found.violations[0];
    assert_eq!(first.field, "predicted.iteration_s");
    let says = first.valid.starts_with(&before.iteration_s.to_string());
    assert!(says && first.valid.contains("decisions"), "{first}");
    assert!(fields(&found).contains(&"predicted.mfu"), "{found:?}");
}

/// A larger device that is not shipped, filled.
#[test]
fn memory_that_a_shipped_cluster_lacks_is_named() {
    let tb = |_: &Value| json!(1_000_000_000_000_u64);
    let half = 500_000_000_000;
    let large = edited(
        &made(DENSE),
        &[
            ("/inputs/cluster/hbm_bytes", &tb),
            ("/stages/0/memory/activations", &more(half)),
            ("/stages/0/memory/total", &more(half)),
            ("/predicted/peak_memory_bytes", &more(half)),
        ],
    );
    assert!(fields(&check(&large)).contains(&"inputs.cluster.hbm_bytes"));
}

/// Another version may have other figures: they are noted, and the plan passes.
#[test]
fn figures_of_another_version_are_noted() {
    let mut old = made(DENSE);
    old.predicted.iteration_s *= 1.01;
    old.predicted.breakdown.compute_s += old.predicted.iteration_s * (0.01 / 1.01);
    let timing = models::plan::Timing {
        iteration_s: old.predicted.iteration_s,
        breakdown: old.predicted.breakdown,
        error_band: old.predicted.error_band.clone(),
    };
    old.predicted = models::plan::Predicted::new(&old.inputs, &old.decisions, &old.stages, timing);
    assert!(!check(&old).violations.is_empty());
    old.tool = "meshwright 0.0.9".to_owned();
    let found = check(&old);
    assert_eq!(found.violations, []);
    let moved: Vec<&str> = found.prices.moved().iter().map(|moved| moved.field.as_str()).collect();
    assert!(moved.contains(&"predicted.iteration_s"), "{moved:?}");
    let path = scratch("old.yaml");
    std::fs::write(&path, old.to_yaml().unwrap()).unwrap();
    let run = plan(&format!("check {}", path.display()));
    assert_eq!(run.code, 0, "{run:?}");
    let said = [format!("meshwright 0.0.9 wrote it, with other figures than {TOOL}")];
    assert!(said.iter().all(|words| run.out.contains(words.as_str())), "{run:?}");
    assert!(run.out.contains("predicted.iteration_s: "), "{run:?}");
}

/// A plan holds the name of its cluster. One that is not shipped cannot be priced again.
#[test]
fn a_plan_on_a_cluster_that_is_not_shipped_is_not_priced() {
    let mut own = made(DENSE);
    own.inputs.cluster.name = "/dev/null".to_owned();
    let found = check(&own);
    assert_eq!((found.violations.as_slice(), &found.prices), (&[][..], &Prices::NoCluster));
}

/// A search below what a proof allows verifies it, and finds what a forged one hides.
#[test]
fn proofs_are_verified_by_searching_below() {
    let path = scratch("proven.yaml");
    let checked = |of: &Plan, more: &str| {
        std::fs::write(&path, of.to_yaml().unwrap()).unwrap();
        plan(&format!("check {} --proof{more}", path.display()))
    };
    for words in [DENSE, MIXTURE, BIDIRECTIONAL] {
        let good = made(words);
        let run = checked(&good, "");
        assert!(run.code == 0 && run.out.contains("proof verified"), "{words}: {run:?}");
        let json = checked(&good, " --json").json();
        assert_eq!((&json["proof"]["holds"], &json["not_verified"]), (&json!(true), &json!([])));
        let run = checked(&good, " --time-limit 0");
        assert!(run.out.contains("not verified in the time"), "{words}: {run:?}");
        assert_eq!(run.code, 4, "{words}: {run:?}");
        // Without what it was pinned to there is a faster plan, of which its proof knows nothing.
        let mut forged = good;
        forged.inputs.settings.clear();
        let run = checked(&forged, "");
        assert!(run.code == 2 && run.out.contains("proof.searched_gap"), "{words}: {run:?}");
    }
}

/// What a proof says of the cuts that were not tried is bounded again.
#[test]
fn a_proof_over_all_cuts_that_says_too_much_is_refused() {
    let path = scratch("over_all.yaml");
    let checked = |of: &Plan, limit: &str| {
        std::fs::write(&path, of.to_yaml().unwrap()).unwrap();
        plan(&format!("check {} --proof{limit}", path.display()))
    };
    let words = "--model llama8b --gpus 64 --set pp=4 --set schedule=interleaved_1f1b --set tp=1";
    let good = made(words);
    assert!(good.proof.gap > good.proof.searched_gap + 0.004, "{:?}", good.proof);
    let run = checked(&good, "");
    assert!(run.code == 0 && run.out.contains("nor over all cuts"), "{run:?}");
    let mut forged = good;
    forged.proof.gap = 0.5 * (forged.proof.gap + forged.proof.searched_gap);
    let run = checked(&forged, " --time-limit 20");
    assert!(run.code == 4 && run.out.contains("not verified: proof.gap"), "{run:?}");
}

/// Only a search could verify a proof.
#[test]
fn a_proof_is_said_not_to_be_verified() {
    let mut forged = made(DENSE);
    forged.proof.candidates += 1_000_000;
    forged.proof.cut_by_time += 1_000_000;
    let path = scratch("forged.yaml");
    std::fs::write(&path, forged.to_yaml().unwrap()).unwrap();
    let run = plan(&format!("check {}", path.display()));
    assert!(run.code == 0 && run.out.contains("not verified: proof"), "{run:?}");
    let json = plan(&format!("check {} --json", path.display())).json();
    assert_eq!(json["not_verified"], json!(["proof"]));
}
