//! `--runnable`: what our trainer cannot run is not planned and not accepted, and has its price.

mod cli_common;

use cli_common::{plan, scratch};
use serde_json::Value;

/// Small, and faster in a number format that the trainer does not have.
const FP8: &str = "--model llama8b --gpus 8 --set schedule=1f1b --set vocab=tensor \
    --set micro_batch<=2 --set dtype=bf16,fp8";

#[test]
fn what_the_trainer_cannot_run_is_left_out_and_priced() {
    let any: Value = serde_json::from_str(&plan(&format!("{FP8} --json")).out).expect("JSON");
    let run = plan(&format!("{FP8} --runnable --json"));
    let ours: Value = serde_json::from_str(&run.out).expect("JSON");
    assert_eq!(
        (&any["decisions"]["dtype"], &ours["decisions"]["dtype"]),
        (&"fp8".into(), &"bf16".into())
    );
    let other = &ours["not_runnable"];
    let seconds = |value: &Value| value["iteration_s"].as_f64().expect("seconds");
    assert!((seconds(other) / seconds(&any["predicted"]) - 1.0).abs() < 1e-6, "{other}");
    let costs = seconds(&ours["predicted"]) / seconds(other) - 1.0;
    assert!(costs > 0.0 && (other["costs"].as_f64().expect("a share") - costs).abs() < 1e-4);
    let screen = plan(&format!("{FP8} --runnable")).out;
    assert!(screen.contains("--runnable costs +"), "{screen}");
    assert!(screen.contains("dtype cannot be fp8"), "{screen}");
}

/// A search that was cut short has not shown that nothing is faster.
#[test]
fn what_was_not_searched_is_not_said_to_cost_nothing() {
    let request = "--model qwen3_235b_a22b --gpus 1024 --cluster dgx_b200";
    let run = plan(&format!("{request} --runnable --time-limit 8"));
    assert!(run.out.contains("--runnable costs "), "{run:?}");
    assert!(!run.out.contains("costs nothing"), "{run:?}");
}

#[test]
fn a_plan_of_what_the_trainer_cannot_run_is_refused_where_that_is_asked() {
    let file = scratch("fp8.yaml");
    let path = file.display();
    assert_eq!(plan(&format!("{FP8} -o {path}")).code, 0);
    assert_eq!(plan(&format!("check {path}")).code, 0);
    let run = plan(&format!("check {path} --runnable"));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.out.contains("decisions.dtype cannot be fp8"), "{run:?}");
    // The plan remembers what it was made for.
    let text = std::fs::read_to_string(&file).expect("it was written");
    let forged = text.replacen("inputs:\n", "inputs:\n  runnable: true\n", 1);
    std::fs::write(&file, forged).expect("writable");
    let run = plan(&format!("check {path}"));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.out.contains("inputs.runnable"), "{run:?}");
}

#[test]
fn a_model_that_the_trainer_cannot_run_is_refused_with_every_reason() {
    let model = scratch("latent.yaml");
    let text = "name: latent\nlayers: 4\nhidden: 64\nheads: 4\nhead_dim: 16\nffn: 128\nvocab: 512\n\
                seq_len: 64\nglobal_batch: 64\nsinks: true\nqk_norm: true\n\
                mla: { kv_rank: 32, rope_dim: 8, value_dim: 16 }\n";
    std::fs::write(&model, text).expect("writable");
    let run = plan(&format!("--model {} --gpus 64 --runnable", model.display()));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.err.contains("model.mla") && run.err.contains("model.sinks"), "{run:?}");
}

/// A plan in a format that the trainer does not have, whose sequences it cannot cut, is refused for
/// both at once.
#[test]
fn generate_names_every_reason_at_once() {
    let (file, trainer) = (scratch("reasons.yaml"), scratch("reasons-trainer"));
    let (path, words) = (file.display(), "--set cp=2 --set cp_style=zigzag --set tp=1 --set pp=1");
    let planned =
        plan(&format!("--model llama8b --gpus 8 --seq-len 4098 --set dtype=fp8 {words} -o {path}"));
    assert_eq!(planned.code, 0, "{planned:?}");
    let run = plan(&format!("generate {path} -o {}", trainer.display()));
    assert_eq!(run.code, 2, "{run:?}");
    for reason in [
        "dtype cannot be fp8 in training yet; valid: f32, f64, bf16",
        "cp cannot be 2 in training yet; valid: a degree that cuts a sequence's 4098 tokens",
    ] {
        assert!(run.err.contains(reason), "no `{reason}` in {run:?}");
    }
    assert!(run.out.is_empty() && !trainer.exists(), "{run:?}");
}
