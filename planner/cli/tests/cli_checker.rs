//! A good plan with one field broken: the checker names the field.

mod cli_common;

use cli_common::{plan, scratch};
use models::check::check;
use models::input::Source;
use models::plan::Plan;
use serde_json::{Value, json};

fn good(name: &str, words: &str) -> Plan {
    let path = scratch(name);
    let run = plan(&format!("{words} --top 0 -o {}", path.display()));
    assert_eq!(run.code, 0, "{run:?}");
    Plan::read(&Source::open(&path).unwrap()).unwrap()
}

fn dense() -> Plan {
    good(
        "checker_dense.yaml",
        "--model llama8b --gpus 16 --tokens 15T --set tp=2 --set pp=4 --set schedule=1f1b --set vocab=tensor \
         --set zero_stage=1 --set cp=1 --set micro_batch=1",
    )
}

fn mixture() -> Plan {
    good(
        "checker_moe.yaml",
        "--model mixtral_8x7b --gpus 32 --set tp=2 --set pp=4 --set ep=4 --set etp=1 --set schedule=1f1b \
         --set vocab=tensor --set cp=1 --set micro_batch=1",
    )
}

/// The plan with one field changed, and what the checker says.
fn fields_refused(good: &Plan, pointer: &str, value: Value) -> Vec<String> {
    let mut edited = serde_json::to_value(good).unwrap();
    *edited.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value;
    let edited: Plan = serde_json::from_value(edited).unwrap();
    check(&edited).into_iter().map(|violation| violation.field).collect()
}

#[test]
fn good_plans_pass() {
    for plan in [dense(), mixture()] {
        assert_eq!(check(&plan), []);
    }
}

#[test]
fn every_edit_is_caught() {
    let dense = dense();
    let edits = [
        ("/version", json!(2), "version"),
        ("/inputs/gpus", json!(8), "decisions.tp · pp · cp · dp"),
        ("/inputs/global_batch", json!(256), "decisions.micro_batches"),
        ("/inputs/seq_len", json!(4096), "inputs.model.seq_len"),
        ("/inputs/tokens", json!(1), "predicted.training_days"),
        ("/inputs/cluster/peak_flops", json!(1e15), "predicted.mfu"),
        (
            "/inputs/cluster/hbm_bytes",
            json!(10_000_000_000u64),
            "stages on pipeline rank 0: memory.total together",
        ),
        ("/inputs/cluster/level_gpus", json!([8, 8]), "inputs.cluster.level_gpus"),
        ("/inputs/model/layers", json!(31), "stages"),
        ("/inputs/model/attention/heads", json!(31), "decisions.tp"),
        ("/inputs/model/attention/kv_heads", json!(7), "inputs.model.attention.kv_heads"),
        ("/inputs/model/mlp/ffn", json!(14335), "decisions.tp"),
        ("/inputs/model/hidden", json!(0), "inputs.model.hidden"),
        ("/decisions/tp", json!(4), "decisions.tp · pp · cp · dp"),
        ("/decisions/tp", json!(0), "decisions.tp"),
        ("/decisions/pp", json!(u64::MAX), "decisions.pp"),
        ("/decisions/vpp", json!(2), "decisions.schedule"),
        ("/decisions/cp_ulysses", json!(2), "decisions.cp_ulysses"),
        ("/decisions/dp_shard", json!(3), "decisions.dp_shard"),
        ("/decisions/zero_stage", json!(4), "decisions.zero_stage"),
        ("/decisions/ep", json!(2), "decisions.ep"),
        ("/decisions/etp", json!(2), "decisions.etp"),
        ("/decisions/moe_overlap", json!("tutel"), "decisions.moe_overlap"),
        ("/decisions/moe_overlap_degree", json!(2), "decisions.moe_overlap_degree"),
        ("/decisions/capacity_factor", json!(1.5), "decisions.capacity_factor"),
        ("/decisions/micro_batch", json!(3), "decisions.micro_batches"),
        ("/decisions/micro_batches", json!(3), "decisions.micro_batches"),
        ("/decisions/schedule", json!("interleaved_1f1b"), "decisions.schedule"),
        ("/decisions/vocab", json!("parallel_1"), "stages[0].vocab_share.input"),
        ("/decisions/post_validation", json!(true), "decisions.post_validation"),
        ("/stages/0/stage", json!(1), "stages[0].stage"),
        ("/stages/0/device", json!(1), "stages[0].device"),
        ("/stages/0/chunk", json!(1), "stages[0].chunk"),
        ("/stages/1/first_layer", json!(0), "stages[1].first_layer"),
        ("/stages/1/layers", json!(1), "stages[2].first_layer"),
        ("/stages/3/layers", json!(1), "stages"),
        ("/stages/1/layers", json!(0), "stages[1].layers"),
        ("/stages/0/vocab_share/output", json!(1.0), "stages[0].vocab_share.output"),
        ("/stages/0/recompute/dense/none", json!(99), "stages[0].recompute"),
        ("/stages/0/memory/parameters", json!(1), "stages[0].memory.total"),
        ("/stages/0/memory/total", json!(1), "stages[0].memory.total"),
        ("/predicted/iteration_s", json!(1.0), "predicted.breakdown"),
        ("/predicted/iteration_s", json!(-1.0), "predicted.iteration_s"),
        ("/predicted/tokens_per_s_per_gpu", json!(1.0), "predicted.tokens_per_s_per_gpu"),
        ("/predicted/model_tflops_per_gpu", json!(1.0), "predicted.model_tflops_per_gpu"),
        ("/predicted/hardware_tflops_per_gpu", json!(1.0), "predicted.hardware_tflops_per_gpu"),
        ("/predicted/mfu", json!(2.0), "predicted.mfu"),
        ("/predicted/bubble_fraction", json!(0.9), "predicted.bubble_fraction"),
        ("/predicted/error_band/relative", json!(-1.0), "predicted.error_band.relative"),
        ("/predicted/training_days", json!(1.0), "predicted.training_days"),
        ("/predicted/peak_memory_bytes", json!(1), "predicted.peak_memory_bytes"),
        ("/predicted/breakdown/compute_s", json!(1.0), "predicted.breakdown"),
        ("/proof/candidates", json!(0), "proof.candidates"),
        ("/proof/gap", json!(0.5), "proof.gap"),
    ];
    for (pointer, value, field) in edits {
        let said = fields_refused(&dense, pointer, value.clone());
        assert!(said.iter().any(|name| name == field), "{pointer} = {value}: {said:?}");
    }
}

#[test]
fn edits_of_a_mixture_are_caught() {
    let mixture = mixture();
    let edits = [
        ("/decisions/ep", json!(3), "decisions.ep"),
        ("/decisions/etp", json!(3), "decisions.etp"),
        ("/decisions/sequence_parallel", json!(false), "decisions.sequence_parallel"),
        ("/decisions/moe_overlap", json!("tutel"), "decisions.moe_overlap_degree"),
        ("/inputs/model/moe/top_k", json!(9), "inputs.model.moe.top_k"),
        ("/inputs/model/moe/experts", json!(7), "decisions.ep"),
    ];
    for (pointer, value, field) in edits {
        if mixture.decisions.moe_overlap.name() != "none" && pointer == "/decisions/moe_overlap" {
            continue;
        }
        let said = fields_refused(&mixture, pointer, value.clone());
        assert!(said.iter().any(|name| name == field), "{pointer} = {value}: {said:?}");
    }
}

#[test]
fn a_stage_left_out_is_caught() {
    let mut plan = dense();
    plan.stages.remove(2);
    let said = check(&plan);
    assert!(said.iter().any(|violation| violation.field == "stages"), "{said:?}");
    assert!(said.iter().any(|violation| violation.field == "stages[2].first_layer"), "{said:?}");
}

#[test]
fn the_command_lists_what_is_wrong_and_ends_with_2() {
    let mut broken = dense();
    broken.decisions.tp = 4;
    let path = scratch("checker_broken.yaml");
    std::fs::write(&path, broken.to_yaml().unwrap()).unwrap();
    let run = plan(&format!("check {}", path.display()));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.out.contains("decisions.tp · pp · cp · dp cannot be 32; valid: 16"), "{run:?}");
}

/// A plan file with another schedule: 1F1B's memory is not GPipe's, and the times differ as well.
#[test]
fn a_plan_is_priced_again() {
    let path = scratch("priced_again.yaml");
    let words = "--model llama8b --gpus 16 --set tp=2 --set pp=4 --set schedule=1f1b --set vocab=tensor \
                 --set micro_batch=1 --set cp=1 --set zero_stage=1";
    assert_eq!(plan(&format!("{words} -o {}", path.display())).code, 0);
    let good = plan(&format!("check {}", path.display()));
    assert_eq!((good.code, good.out.lines().count()), (0, 2), "{good:?}");
    // Settings that allow any schedule: one that they forbid would be refused before it is priced.
    let text = std::fs::read_to_string(&path).unwrap();
    let any = |line: &&str| !line.contains("- schedule=1f1b");
    let text: String = text.lines().filter(any).flat_map(|line| [line, "\n"]).collect();
    let edited = |from: &str, to: &str| {
        assert!(text.contains(from), "no {from:?} in {text}");
        let other = scratch("edited.yaml");
        std::fs::write(&other, text.replacen(from, to, 1)).unwrap();
        plan(&format!("check {}", other.display()))
    };
    let gpipe = edited("  schedule: 1f1b", "  schedule: gpipe");
    assert_eq!(gpipe.code, 2, "{gpipe:?}");
    assert!(gpipe.out.contains("peak_memory_bytes") && gpipe.out.contains("priced again"));
    let slower = edited("  schedule: 1f1b", "  schedule: zb_h1");
    assert_eq!(slower.code, 2, "{slower:?}");
    assert!(slower.out.contains("predicted.iteration_s cannot be"), "{slower:?}");
    let elsewhere = edited("    name: dgx_h100", "    name: mine");
    assert_eq!(elsewhere.code, 2, "{elsewhere:?}");
    assert!(elsewhere.out.contains("not priced again: no cluster `mine`"), "{elsewhere:?}");
}
