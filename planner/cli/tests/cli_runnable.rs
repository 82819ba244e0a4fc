//! `--runnable`: what our trainer cannot run is not planned and not accepted, and has its price.

mod cli_common;

use cli_common::{plan, scratch};
use serde_json::Value;

/// Small, and faster in a number format that the trainer does not have.
const FP8: &str = "--model llama8b --gpus 8 --set schedule=1f1b --set vocab=tensor \
    --set micro_batch<=2 --set dtype=bf16,fp8";

/// Latent attention with norms of heads and with sinks.
const LATENT: &str = "\
name: latent
layers: 4
hidden: 64
heads: 4
head_dim: 16
ffn: 128
vocab: 512
seq_len: 64
global_batch: 64
sinks: true
qk_norm: true
mla: { kv_rank: 32, rope_dim: 8, value_dim: 16 }
";

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
    let said = ["--runnable costs +", "no faster plan was found without --runnable"];
    assert!(said.iter().any(|said| run.out.contains(said)), "{run:?}");
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
    std::fs::write(&model, LATENT).expect("writable");
    let run = plan(&format!("--model {} --gpus 64 --runnable", model.display()));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.err.contains("model.qk_norm") && run.err.contains("model.sinks"), "{run:?}");
}

/// Two of the model and one of the decisions.
#[test]
fn generate_names_every_reason_at_once() {
    let [model, file, trainer] = ["reasons-model.yaml", "reasons.yaml", "reasons"].map(scratch);
    std::fs::write(&model, LATENT).expect("writable");
    let (model, path) = (model.display(), file.display());
    let planned = plan(&format!("--model {model} --gpus 8 --set dtype=fp8 -o {path}"));
    assert_eq!(planned.code, 0, "{planned:?}");
    let run = plan(&format!("generate {path} -o {}", trainer.display()));
    assert_eq!(run.code, 2, "{run:?}");
    for reason in [
        "model.qk_norm cannot be true with latent attention in training yet; valid: false\n",
        "model.sinks cannot be true with latent attention in training yet; valid: false\n",
        "dtype cannot be fp8 in training yet; valid: f32, f64, bf16\n",
    ] {
        assert!(run.err.contains(reason), "no `{reason}` in {run:?}");
    }
    assert!(run.out.is_empty() && !trainer.exists(), "{run:?}");
}
