//! Generated programs: each is compared with its reviewed text, is formatted, and (feature `slow`)
//! builds and trains to PyTorch's losses.

use codegen::{GenerateError, RuntimeSource, generate};
#[cfg(feature = "thorough")]
use meshwright_tests::crates::{build, first_error, warnings};
use meshwright_tests::golden::planned;
#[cfg(feature = "thorough")]
use meshwright_tests::golden::{folder as golden_folder, inputs};
#[cfg(feature = "thorough")]
use models::decisions::Dtype;
use models::input::Source;
use models::plan::Plan;
use models::program::Program;
use models::schedule::ScheduleName;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Name, golden case, number of GPUs, and pinned settings.
const PROGRAMS: [(&str, &str, u64, &[&str]); 13] = [
    (
        "llama_gqa_tp2_pp2_dp2",
        "llama_gqa",
        8,
        &["tp=2", "cp=1", "zero_stage=0", "pp=2", "schedule=1f1b", "micro_batch=1"],
    ),
    (
        "gpt2_pp2_two_chunks",
        "gpt2",
        2,
        &[
            "tp=1",
            "cp=1",
            "zero_stage=0",
            "pp=2",
            "vpp=2",
            "schedule=interleaved_1f1b",
            "micro_batch=2",
            "recompute=full",
        ],
    ),
    (
        "gemma2_tp2",
        "gemma2",
        2,
        &[
            "tp=2",
            "cp=1",
            "zero_stage=0",
            "pp=1",
            "micro_batch=4",
            "sequence_parallel=true",
            "fused_loss=true",
        ],
    ),
    (
        "llama_tied_vocabulary",
        "llama_tied",
        4,
        &[
            "tp=2",
            "cp=1",
            "zero_stage=0",
            "pp=2",
            "schedule=1f1b",
            "vocab=parallel_naive",
            "micro_batch=1",
        ],
    ),
    (
        "qwen2_dualpipe_v",
        "qwen2",
        2,
        &[
            "tp=1",
            "cp=1",
            "zero_stage=0",
            "pp=2",
            "vpp=2",
            "schedule=dualpipe_v",
            "vocab=tensor",
            "micro_batch=1",
        ],
    ),
    (
        "llama_gqa_dualpipe",
        "llama_gqa",
        4,
        &[
            "tp=1",
            "cp=1",
            "zero_stage=0",
            "pp=2",
            "dp=2",
            "schedule=dualpipe",
            "vocab=tensor",
            "micro_batch=1",
        ],
    ),
    (
        "llama_gqa_cp2_dp2_zero3",
        "llama_gqa",
        4,
        &["tp=1", "pp=1", "cp=2", "cp_style=zigzag", "zero_stage=3", "dp_shard=4", "micro_batch=2"],
    ),
    (
        "stablelm_tp2",
        "stablelm",
        2,
        &["tp=2", "pp=1", "cp=1", "zero_stage=0", "micro_batch=2", "sequence_parallel=true"],
    ),
    (
        "qwen3_moe_tp2_ep4",
        "qwen3_moe",
        4,
        &[
            "tp=2",
            "pp=1",
            "cp=1",
            "sequence_parallel=true",
            "ep=4",
            "etp=1",
            "moe_overlap=none",
            "zero_stage=0",
            "micro_batch=2",
        ],
    ),
    (
        "gpt_oss_tp2_ep4_tutel",
        "gpt_oss",
        4,
        &[
            "tp=2",
            "pp=1",
            "cp=1",
            "sequence_parallel=true",
            "ep=4",
            "etp=1",
            "moe_overlap=tutel",
            "moe_overlap_degree=2",
            "zero_stage=1",
            "micro_batch=2",
            "recompute=selective",
        ],
    ),
    (
        "mixtral_pairs",
        "mixtral",
        4,
        &[
            "tp=1",
            "pp=2",
            "cp=1",
            "ep=2",
            "schedule=dualpipe_v",
            "moe_overlap=pair",
            "zero_stage=1",
            "micro_batch=1",
            "recompute=full",
        ],
    ),
    (
        "deepseek_v3_ampipe",
        "deepseek_v3",
        4,
        &[
            "tp=2",
            "pp=2",
            "cp=1",
            "sequence_parallel=true",
            "ep=2",
            "etp=1",
            "schedule=1f1b",
            "moe_overlap=ampipe",
            "moe_overlap_degree=2",
            "zero_stage=0",
            "micro_batch=1",
        ],
    ),
    (
        "deepseek_v3_bias_tp2_ep2",
        "deepseek_v3_bias",
        4,
        &[
            "tp=2",
            "pp=1",
            "cp=1",
            "sequence_parallel=true",
            "ep=2",
            "etp=1",
            "moe_overlap=none",
            "zero_stage=3",
            "micro_batch=2",
            // In f32 a choice between near equals goes another way in step 12.
            "dtype=f64",
        ],
    ),
];

/// Of these, the ones that are trained without feature `programs`: every kind of rank, and every
/// kind of layer. That programs have the bits of what is run directly is checked of many more
/// (`program_pairs`).
#[cfg(feature = "thorough")]
const TRAINED: [&str; 3] = ["llama_gqa_tp2_pp2_dp2", "llama_gqa_cp2_dp2_zero3", "mixtral_pairs"];

/// The same, of programs for which there are no losses of PyTorch's.
const WITHOUT_LOSSES: [(&str, &str, u64, &[&str]); 1] = [(
    "latent_tp2_cp2",
    "latent",
    4,
    &[
        "tp=2",
        "pp=1",
        "cp=2",
        "cp_style=ulysses",
        "sequence_parallel=true",
        "zero_stage=0",
        "micro_batch=2",
        "recompute=selective",
    ],
)];

fn files(plan: &Plan, runtime: &str) -> BTreeMap<&'static str, String> {
    let text = plan.to_yaml().expect("plans can be written");
    generate(plan, &text, &RuntimeSource::Path(runtime.to_owned())).expect("it can be trained")
}

/// The files that a reviewer of a change would read, as one text, without the plan's own text and
/// hash.
fn reviewed(files: &BTreeMap<&'static str, String>) -> String {
    let mut text = String::new();
    for (path, content) in files {
        if !matches!(*path, "Cargo.lock" | "plan.yaml") {
            write!(text, "==== {path}\n{content}").expect("strings can be written to");
        }
    }
    let hash = text.split("from plan ").nth(1).and_then(|rest| rest.get(..64)).unwrap_or_default();
    text.replace(hash, "HASH").replace(&hash[..12], "HASH")
}

#[test]
fn programs_are_those_that_were_reviewed() {
    for &(name, case, gpus, settings) in PROGRAMS.iter().chain(&WITHOUT_LOSSES) {
        let text = reviewed(&files(&planned(case, gpus, settings), "../../runtime"));
        let path = PathBuf::from(HERE).join(format!("programs/{name}.txt"));
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            std::fs::write(&path, &text).expect("snapshots can be written");
        }
        let known = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            text == known,
            "{name} changed; look at the difference and accept it with\n  \
             UPDATE_SNAPSHOTS=1 cargo test -p meshwright-tests --test programs"
        );
    }
}

#[test]
fn programs_are_formatted() {
    for &(name, case, gpus, settings) in PROGRAMS.iter().chain(&WITHOUT_LOSSES) {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("format-{name}"));
        write_all(&folder, &files(&planned(case, gpus, settings), "../../runtime"));
        let checked = Command::new("rustfmt")
            .args(["--check", "--edition", "2024"])
            .arg(folder.join("src/main.rs"))
            .output()
            .expect("rustfmt is installed with the toolchain");
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    }
}

fn write_all(folder: &std::path::Path, files: &BTreeMap<&'static str, String>) {
    for (path, text) in files {
        let path = folder.join(path);
        let parent = path.parent().expect("every file lies in a folder");
        std::fs::create_dir_all(parent).expect("folders can be made");
        std::fs::write(path, text).expect("files can be written");
    }
}

#[test]
fn two_splits_of_a_model_differ_where_the_split_is() {
    let text = |settings: &[&str]| files(&planned("llama_gqa", 2, settings), "../../runtime");
    let (a, b) = (text(&["tp=2", "pp=1"]), text(&["tp=1", "pp=2", "schedule=1f1b"]));
    let same = |path: &str| a.get(path) == b.get(path);
    // Constants and layers say the split; two ways to arrange one rank's layers share the layer.
    assert!(!same("src/plan.rs") && !same("src/layer.rs"));
    let two = ["tp=1", "pp=1", "cp=1", "zero_stage=0", "micro_batch=2"];
    let c = text(&two);
    let four = ["tp=1", "pp=2", "cp=1", "zero_stage=0", "schedule=gpipe", "micro_batch=2"];
    let d = files(&planned("llama_gqa", 4, &four), "../../runtime");
    assert_eq!(d["src/layer.rs"], c["src/layer.rs"]);
    assert!(c.contains_key("src/only.rs") && d.contains_key("src/first.rs"));
}

/// A plan with an order of its own runs that order, not its schedule's.
#[test]
fn a_plans_own_order_is_what_its_program_runs() {
    let settings = ["tp=1", "pp=2", "schedule=zb_h1", "micro_batch=1"];
    let mut plan = planned("llama_gqa", 2, &settings);
    let own = ScheduleName::ZbH2.build(2, plan.decisions.micro_batches as usize, 1);
    let own = own.expect("it exists for these counts");
    plan.decisions.schedule = ScheduleName::ZbAuto;
    let named = files(&plan, "../../runtime");
    plan.order = (0..2).map(|rank| own.order_words(rank).join(" ")).collect();
    let read = plan.to_yaml().expect("plans can be written");
    let source = Source::from_bytes("plan.yaml", read.into_bytes()).expect("not empty");
    let plan = Plan::read(&source).expect("what was written can be read");
    assert_eq!(Program::of(&plan).expect("it can be trained").passes, own.by_rank());
    let ordered = files(&plan, "../../runtime");
    let passes = |files: &BTreeMap<&'static str, String>| files["src/passes.rs"].clone();
    assert!(passes(&ordered) != passes(&named), "the order is nowhere in the program");
    let mut broken = plan.clone();
    broken.order[0] = broken.order[0].replacen("F0@0 F1@0", "F1@0 F1@0", 1);
    let found = models::check::check(&broken);
    assert!(found.iter().any(|violation| violation.field == "order"), "{found:?}");
}

#[test]
fn what_training_cannot_do_yet_is_refused_by_name() {
    let mut plan = planned("llama_gqa", 2, &["tp=1", "pp=1"]);
    plan.inputs.model.numerics.unknown = vec!["rope_scaling".to_owned(), "router".to_owned()];
    let text = plan.to_yaml().expect("plans can be written");
    let runtime = RuntimeSource::Path("../../runtime".to_owned());
    let error = generate(&plan, &text, &runtime).expect_err("nobody knows these").to_string();
    assert!(
        error.contains("rope_scaling, router") && error.contains("valid: a description"),
        "{error}"
    );
    plan.decisions.tp = 3;
    let error = generate(&plan, &text, &runtime).expect_err("the plan was edited");
    assert!(matches!(error, GenerateError::Violations(_)), "{error}");
}

/// Builds programs outside the workspace and trains them to PyTorch's losses.
#[cfg(feature = "thorough")]
#[test]
fn programs_train_to_pytorchs_losses() {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unoptimized");
    let trained = |name: &str| cfg!(feature = "programs") || TRAINED.contains(&name);
    for (name, case, gpus, settings) in PROGRAMS.into_iter().filter(|of| trained(of.0)) {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("trainer-{name}"));
        let plan = planned(case, gpus, settings);
        write_all(&folder, &files(&plan, &format!("{HERE}/../runtime")));
        // The program contains its plan, so the file is not needed.
        std::fs::remove_file(folder.join("plan.yaml")).expect("it was written");
        let (golden, metrics) = (inputs(case).display().to_string(), folder.join("run.jsonl"));
        let report = folder.join("ranks.jsonl");
        // A run appends to existing metrics.
        let _new = std::fs::remove_file(&metrics);
        let built = build(&folder, &target);
        let error = first_error(&built).unwrap_or_default().concat();
        assert!(built.status.success(), "{error}{}", String::from_utf8_lossy(&built.stderr));
        assert_eq!(warnings(&built), "", "{name}");
        let status = Command::new(trainer(&target, case))
            .args(["--init-from", &golden])
            .args(["--data", &format!("{golden}/tokens.safetensors"), "--steps", "20"])
            .arg("--metrics")
            .arg(&metrics)
            .arg("--rank-report")
            .arg(&report)
            .status()
            .expect("it was built");
        assert!(status.success(), "{name}: {status}");
        let expected =
            std::fs::read_to_string(golden_folder(case).join("expected.json")).expect("it is here");
        let expected: serde_json::Value = serde_json::from_str(&expected).expect("it is JSON");
        let reference = expected["trajectory"]["loss_f64"].as_array().expect("20 losses");
        let seen = std::fs::read_to_string(&metrics).expect("the trainer wrote it");
        let seen: Vec<serde_json::Value> =
            seen.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
        assert_eq!(seen.len(), reference.len(), "{name}");
        for (step, (line, loss)) in seen.iter().zip(reference).enumerate() {
            let (found, loss) = (line["loss"].as_f64(), loss.as_f64());
            let (found, loss) = (found.expect("a number"), loss.expect("a number"));
            assert!((found - loss).abs() < 1e-4, "{name}, step {step}: {found} against {loss}");
        }
        ranks_hold_what_the_program_says(&plan, &report);
        other_numbers_of_processes_are_refused(&plan, &target, case, &golden);
    }
}

/// The program of a case.
#[cfg(feature = "thorough")]
fn trainer(target: &std::path::Path, case: &str) -> PathBuf {
    target.join(format!("debug/trainer-{}", case.replace('_', "-")))
}

/// Errors if a launcher starts fewer processes than there are ranks, or if processes do not know
/// where the others are.
#[cfg(feature = "thorough")]
fn other_numbers_of_processes_are_refused(
    plan: &Plan,
    target: &std::path::Path,
    case: &str,
    golden: &str,
) {
    let trainer = trainer(target, case);
    let ranks = plan.inputs.gpus;
    for (found, said) in [
        (ranks + 3, format!("the plan is for {ranks} ranks")),
        (ranks, "--rendezvous HOST:PORT".to_owned()),
    ] {
        let output = Command::new(&trainer)
            .args(["--data", &format!("{golden}/tokens.safetensors"), "--steps", "1"])
            .env("OMPI_COMM_WORLD_RANK", "0")
            .env("OMPI_COMM_WORLD_SIZE", found.to_string())
            .output()
            .expect("it was built");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(&format!("mpirun started {found} processes")), "{text}");
        assert!(text.contains(&said), "{text}");
    }
}

/// The shapes in the program, derived from the model and the split, equal those that the runtime's
/// layers declare.
#[cfg(feature = "thorough")]
fn ranks_hold_what_the_program_says(plan: &Plan, report: &std::path::Path) {
    let program = Program::of(plan);
    let expected = models::shapes::rank_elements(&program.expect("it has been trained"));
    let report = std::fs::read_to_string(report).expect("the trainer wrote it");
    for line in report.lines() {
        let rank: serde_json::Value = serde_json::from_str(line).expect("a JSON line");
        let pp_rank = rank["at"]["pp"].as_u64().expect("a device") as usize;
        let bytes = rank["parameter_bytes"].as_u64().expect("bytes");
        let d = &plan.decisions;
        let shared = if d.zero_stage == 3 { d.dp_shard } else { 1 };
        let element = if d.dtype == Dtype::F64 { 8 } else { 4 };
        assert_eq!(bytes, element * expected[pp_rank] / shared, "{line}");
    }
}
