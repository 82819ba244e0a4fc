//! Errors, with their exit codes and messages.

mod cli_common;

use cli_common::{file, plan, scratch};
use std::path::Path;
use std::time::{Duration, Instant};

/// Asserts that the command ends with this code and prints all these parts.
fn fails(words: &str, code: i32, parts: &[&str]) {
    let begun = Instant::now();
    let run = plan(words);
    assert_eq!(run.code, code, "{words}: {run:?}");
    assert!(run.out.is_empty(), "{words}: {run:?}");
    for part in parts {
        assert!(run.err.contains(part), "{words}: no `{part}` in {run:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "{words}");
}

const MODEL: &str = "\
layers: 4
hidden: 64
heads: 6
ffn: 96
vocab: 100
seq_len: 32
global_batch: 8
head_dim: 8
";

fn model(name: &str, text: &str) -> String {
    file(name, text.as_bytes())
}

#[test]
fn bad_files_are_refused_at_their_place() {
    let cases: [(&str, Vec<u8>, &[&str]); 6] = [
        (
            "key.yaml",
            format!("{MODEL}layerz: 4\n").into_bytes(),
            &["unknown key `layerz`", "key.yaml:9"],
        ),
        (
            "type.yaml",
            MODEL.replace("64", "many").into_bytes(),
            &["`hidden` cannot be `many`", "type.yaml:2:9"],
        ),
        ("empty.yaml", vec![], &["is empty"]),
        ("binary.yaml", vec![b'a', 0xff, 0xfe], &["is not UTF-8"]),
        ("bomb.yaml", bomb().into_bytes(), &["error: "]),
        ("list.yaml", b"- 1\n- 2\n".to_vec(), &["a mapping of keys"]),
    ];
    for (name, text, parts) in cases {
        let path = file(name, &text);
        fails(&format!("--model {path} --gpus 8"), 2, parts);
    }
}

/// Ten levels of ten aliases each.
fn bomb() -> String {
    let first = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    let level = |n: usize| {
        let aliases = vec![format!("*a{}", n - 1); 10].join(", ");
        format!("a{n}: &a{n} [{aliases}]\n")
    };
    first + &(1..10).map(level).collect::<String>()
}

/// A file of another kind is called by its name, not by its first key.
#[test]
fn files_of_another_kind_name_their_flag() {
    let folder = scratch("kinds");
    std::fs::create_dir_all(&folder).unwrap();
    let made = folder.join("plan.yaml").display().to_string();
    assert_eq!(plan(&format!("--model tiny --cluster laptop --gpus 2 -o {made}")).code, 0);
    let tiny = model("tiny_kind.yaml", MODEL);
    let cluster = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/shipped/clusters/laptop.yaml");
    let config = file("no_type.json", b"{\"hidden_size\": 64, \"num_hidden_layers\": 4}");
    let cases = [
        (format!("--model {made} --gpus 2"), "is a plan, no model", "--from"),
        (format!("--model {cluster} --gpus 2"), "is a cluster, no model", "--cluster"),
        (format!("--model tiny --gpus 2 --cluster {tiny}"), "is a model, no cluster", "--model"),
        (format!("--model tiny --gpus 2 --cluster {made}"), "is a plan, no cluster", "--from"),
        (format!("--model {config} --gpus 2"), "has no `model_type`", "config.json"),
        (format!("explain {}", folder.display()), "is a directory", "plan.yaml"),
        (format!("explain {made} --cluster dgx_h200"), "was made for `laptop`", "dgx_h200"),
    ];
    for (words, says, helps) in cases {
        fails(&words, 2, &[says, helps]);
    }
}

#[test]
fn a_folder_is_no_model() {
    fails(&format!("--model {} --gpus 8", env!("CARGO_TARGET_TMPDIR")), 2, &["is a directory"]);
}

#[test]
fn degrees_that_do_not_divide_name_what_would() {
    let path = model("divide.yaml", MODEL);
    let cases: [(&str, &[&str]); 9] = [
        (
            "--gpus 8 --set tp=4",
            &["heads (6) cannot be split over tp = 4", "divide.yaml:3:8", "1, 2, 3, 6"],
        ),
        (
            "--gpus 6 --set dp=6",
            &["global_batch (8) cannot be split over dp = 6", "divide.yaml:7:15", "12"],
        ),
        ("--gpus 8 --set pp=8", &["layers (4) cannot be split over pp = 8", "1, 2, 4"]),
        (
            "--gpus 8 --set tp=3",
            &["8 GPUs cannot be split over tp = 3", "it must divide 8: 1, 2, 4, 8"],
        ),
        (
            "--gpus 8 --set dp=2 --set micro_batch=3",
            &["cannot be split into micro_batch = 3", "1, 2, 4"],
        ),
        ("--gpus 8 --set ep=2", &["--set ep=2 leaves nothing", "ep can be 1"]),
        ("--gpus 8 --set schedule=interleaved_1f1b --set pp=1", &["needs pp above 1"]),
        ("--gpus 7", &["7 GPUs cannot be split over this model", "--gpus 6 or 8 can"]),
        ("--gpus 0", &["--gpus cannot be 0"]),
    ];
    for (words, parts) in cases {
        fails(&format!("--model {path} {words}"), 2, parts);
    }
}

/// Programs read why there is no plan, by the names that answers have.
#[test]
fn without_a_plan_json_has_the_facts_of_the_text() {
    let run =
        plan("--model llama8b --gpus 1 --set offload=none --set micro_batch=1 --headroom 0 --json");
    assert!(run.code == 3 && run.err.contains("nothing fits"), "{run:?}");
    let json = run.json();
    assert_eq!((&json["model"], &json["feasible"]), (&"llama8b".into(), &false.into()));
    assert_eq!(json["error"], "nothing fits");
    let least = &json["shortage"]["least"];
    let bytes = |key: &str| least[key].as_u64().unwrap_or_else(|| panic!("{key}: {least}"));
    assert_eq!(bytes("needed_bytes") - bytes("available_bytes"), bytes("missing_bytes"));
    assert!(least["decisions"]["tp"] == 1 && least["memory_bytes"]["optimizer"].is_u64());
    let fits = json["shortage"]["fits"].as_array().expect("changes are listed");
    assert!(fits.iter().any(|one| one["change"] == "without --set offload=none"), "{fits:?}");

    let words = "--model gpt_1t --gpus 46 --cluster gb300_nvl72 --time-limit 0.001 --json";
    let run = plan(words);
    assert!(run.code == 4 && run.err.contains("no plan was found in the time"), "{run:?}");
    let json = run.json();
    assert!(json["feasible"].is_null() && json["shortage"].is_null(), "{json}");
    assert_eq!(json["error"], "no plan was found in the time, nor that there is none");
}

/// A figure of no machine is warned of, and planned with.
#[test]
fn strange_figures_of_a_cluster_are_warned_of() {
    let good = models::cluster::shipped_source("dgx_h100").unwrap().unwrap();
    let text = good.text().replacen("bytes_per_s: 450e9", "bytes_per_s: 450e11", 1);
    let path = file("strange.yaml", text.as_bytes());
    let run = plan(&format!("--model llama8b --gpus 8 --set tp=1 --set pp=1 --cluster {path}"));
    assert_eq!(run.code, 0, "{run:?}");
    let said: Vec<&str> = run.err.lines().filter(|line| line.starts_with("warning")).collect();
    assert!(said.len() == 1 && said[0].contains("`bytes_per_s` is 4.5e13 bytes/s"), "{run:?}");
}

/// Before anything is built.
#[test]
fn a_machine_without_a_gpu_is_told_so() {
    let files = ["/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu"];
    if cfg!(target_os = "linux") && !files.iter().any(|file| Path::new(file).exists()) {
        let parts = ["no NVIDIA GPU here", "/dev/nvidiactl is missing", "--measured FILE"];
        fails("calibrate --gpu --cluster dgx_h200", 2, &parts);
    }
}

/// Each rule between decisions that a user can break, in the words of its request.
#[test]
fn settings_that_exclude_each_other_name_the_rule() {
    let dense = "--model llama8b --gpus 8 --global-batch 8";
    let experts = "--model mixtral_8x7b --gpus 16";
    let ours = "--model mixtral_8x7b --gpus 16 --cluster laptop";
    let cases: [(&str, &str, &[&str]); 31] = [
        (dense, "ep=4", &["--set ep=4 leaves nothing", "llama8b has no experts"]),
        (dense, "dtype=bf16 'tp>=4' 'tp<=2'", &["no tp is allowed", "tp>=4", "tp<=2"]),
        (dense, "'tp<=2' pp=1 'cp<=1' dp=2", &["must be the number of GPUs (8)"]),
        (dense, "'dp>=8' 'micro_batch>=2'", &["a replica's batch (1 with dp 8)"]),
        (dense, "cp=4 cp_style=hybrid cp_ulysses=4", &["a divisor of cp other than 1 and cp (4)"]),
        (dense, "cp=2 cp_style=zigzag cp_ulysses=2", &["cp_ulysses of cp_style zigzag is 1"]),
        (dense, "sequence_parallel=true tp=1", &["needs tp above 1", "tp can be 2, 4, 8"]),
        (dense, "schedule=zb_v pp=4 vpp=3", &["exactly 2 chunks per pipeline rank: 3"]),
        (
            dense,
            "schedule=dualpipe pp=8 offload=none",
            &["dualpipe needs micro-batches", "16 would"],
        ),
        (dense, "schedule=naive pp=8 micro_batch=1", &["naive runs one micro-batch"]),
        (dense, "schedule=1f1b post_validation=true", &["split backward passes: zb_h1, "]),
        (dense, "schedule=zb_h1 offload=activations", &["whole backward passes: naive, gpipe"]),
        (dense, "recompute=per_layer offload=activations", &["none, selective or full"]),
        (dense, "recompute=none recompute_group=2", &["recompute_group 2 needs recompute full"]),
        (dense, "fused_loss=true vocab=parallel_1", &["goes with fused_loss false"]),
        (dense, "vocab=parallel_1 pp=1", &["it needs pp above 1"]),
        (dense, "vocab=interlaced schedule=gpipe", &["a place for its passes: 1f1b"]),
        (dense, "vocab=first_last pp=2 vpp=3 schedule=looped_bfs", &["32 layers over 6 stages"]),
        (dense, "zero_stage=3 dp=1 cp=1", &["among dp · cp ranks, and here that is 1"]),
        (dense, "dp_shard=3", &["dp_shard is 1 with zero_stage 0; or dp_shard of zero_stage 1"]),
        (dense, "schedule=overlapped_1f1b", &["is for moe_overlap pair"]),
        (experts, "ep=3", &["divide the number of experts (8), and 3", "1, 2, 4, 8"]),
        (experts, "ep=8 tp=2 sequence_parallel=false", &["needs sequence_parallel"]),
        (experts, "ep=8 pp=8 dtype=bf16", &["etp · ep (8) must divide tp · cp · dp (2)"]),
        (experts, "etp=4 tp=2", &["etp must divide tp (2)"]),
        (experts, "moe_overlap=tutel ep=1", &["it needs ep above 1"]),
        (experts, "moe_overlap=tutel moe_overlap_degree=3", &["is 2, 4 or 8"]),
        (experts, "moe_overlap=pair schedule=zb_v", &["overlapped_1f1b, dualpipe, dualpipe_v"]),
        (experts, "aux_scope=global_batch schedule=1f1b", &["schedule naive, gpipe, looped_bfs"]),
        (ours, "offload=optimizer", &["laptop has none beside its devices'", "can be none"]),
        (ours, "moe_overlap=ampipe cp=2", &["laptop plans only what the trainer", "none or tutel"]),
    ];
    for (model, settings, parts) in cases {
        let settings: Vec<String> = settings
            .split_whitespace()
            .map(|setting| format!("--set {}", setting.trim_matches('\'')))
            .collect();
        fails(&format!("{model} {}", settings.join(" ")), 2, parts);
    }
}

/// A setting that has no part in it is not named.
#[test]
fn settings_without_a_part_in_a_conflict_are_not_named() {
    let words = "--model llama8b --gpus 8 --set dtype=bf16 --set tp=1 --set sequence_parallel=true";
    let said = plan(words).err;
    assert!(said.contains("--set tp=1 and --set sequence_parallel=true exclude each"), "{said}");
    assert!(!said.contains("dtype"), "{said}");
    assert!(!plan("--model tiny --cluster laptop --gpus 7 --set dtype=f32").err.contains("dtype"));
}

#[test]
fn names_and_flags_that_do_not_exist_suggest_some() {
    let cases: [(&str, &[&str]); 41] = [
        ("--model lama70b --gpus 8", &["did you mean `llama70b`"]),
        ("--model tiny --gpus 8 --cluster dgx_h10", &["did you mean `dgx_h100`"]),
        ("--model tiny --gpus 8 --set tq=8", &["did you mean `tp`"]),
        ("--model tiny --gpus 8 --tokens many", &["--tokens cannot be `many`"]),
        ("--model tiny --gpus eight", &["--gpus needs a whole number of at least 1, not `eight`"]),
        ("--model tiny --gpus -8", &["--gpus needs a whole number of at least 1, not `-8`"]),
        (
            "--model tiny --gpus 99999999999999999999",
            &["--gpus needs a whole number of 1 to 1048576"],
        ),
        (
            "--model tiny --gpus 8 --seq-len 99999999999999999999",
            &["--seq-len needs a whole number up to 18446744073709551615"],
        ),
        (
            "--model tiny --gpus 8 --top 99999999999999999999",
            &["--top needs a whole number up to 18446744073709551615"],
        ),
        ("--model tiny --gpus 8 --set tp=99999999999999999999", &["from 1 to 1073741824"]),
        ("--model tiny --gpus 8 --time-limit 1e300", &["cannot be 1e300", "0 to 1000000"]),
        ("--model tiny --gpus 8 --headroom 1e300", &["cannot be 1e300", "0 to "]),
        (
            "--model tiny --gpus 8 --set micro_batches=4",
            &["micro_batches follows from other decisions", "set micro_batch or dp"],
        ),
        ("--model tiny --gpus 8 --set pass_times=1", &["set schedule and vocab"]),
        ("--model tiny --gpus 8 --top -1", &["--top needs a whole number, 0 or more, not `-1`"]),
        ("--model tiny --gpus 8 --headroom x", &["--headroom needs a number, not `x`"]),
        ("schedule 1f1b --stages -4 --micro-batches 8", &["--stages needs a whole number"]),
        ("--model tiny --gpus 8 --set tp=8 pp=2", &["`pp=2` stands alone", "--set pp=2"]),
        ("--model tiny --gpus 8 --set tp 2", &["--set tp has no value", "--set tp=2"]),
        ("estimate --model tiny --gpus 8 tp=8", &["`tp=8` stands alone", "--set tp=8"]),
        ("-model tiny --gpus 8", &["unexpected argument `-model`", "two dashes: --model"]),
        ("--model tiny --gpus 8 --tokens -1", &["--tokens cannot be `-1`"]),
        (
            "schedule zb_auto --stages 4 --micro-batches 8 --memory-limit 0.5",
            &["memory limit of 0.5", "least that it has one for is 1"],
        ),
        ("schedule 1f1c --stages 4 --micro-batches 8", &["did you mean `1f1b`"]),
        ("schedule 1f1b --stages 4 --micro-batches 8 --optimal stage", &["no effect on 1f1b"]),
        (
            "schedule zb_auto --stages 4 --micro-batches 8 --optimal best",
            &["--optimal cannot be `best`", "makespan, stage"],
        ),
        (
            "schedule zb_auto --stages 16 --micro-batches 64 --optimal stage",
            &["16 stages x 64 micro-batches", "128 at most"],
        ),
        ("schedule zb_v --stages 4 --micro-batches 8 --chunks 3", &["2 would do"]),
        (
            "schedule 1f1b --stages 4 --micro-batches 8 --pair-time max",
            &["--pair-time has no effect"],
        ),
        ("schedule 1f1b --stages 4 --micro-batches 8 --vocab-s 1", &["no effect without --vocab"]),
        ("report plan.yaml", &["unrecognized subcommand"]),
        ("generate nowhere.yaml -o trainer", &["cannot read nowhere.yaml"]),
        ("launch nowhere", &["there is no trainer in nowhere", "plan generate"]),
        ("launch nowhere --mpi", &["-n <N>"]),
        ("launch nowhere -n 0", &["-n needs a whole number of at least 1, not `0`"]),
        ("launch nowhere --local -n 8", &["cannot be used with"]),
        ("launch nowhere --local --mpi -n 8", &["cannot be used with"]),
        ("calibrate --cluster dgx_h100", &["no machine whose ranks are threads", "laptop"]),
        ("calibrate --gpu --cluster laptop", &["threads of a processor", "dgx_h200"]),
        ("calibrate --cluster laptop --measured nowhere", &["--gpu"]),
        ("calibrate --gpu --cluster dgx_h200 --measured nowhere.json", &["nowhere.json"]),
    ];
    for (words, parts) in cases {
        fails(words, 2, parts);
    }
}

#[test]
fn a_model_that_fits_nowhere_says_by_how_much_and_what_would_fit() {
    let words = "--model llama8b --gpus 1 --set offload=none --set micro_batch=1";
    fails(
        words,
        3,
        &["nothing fits", "limit", "more than there is", "optimizer", "without --set offload=none"],
    );
}

/// Of nine layers a rank, 14 micro-batches in flight, and values 6 times as large as their input:
/// the square-root rule says 4.6 layers.
#[test]
fn where_inputs_take_the_memory_layers_are_recomputed_in_groups() {
    let words = "--model llama405b --gpus 112 --headroom 0 --prove --set tp=8 --set cp=1 --set \
                 zero_stage=0 --set offload=none --set sequence_parallel=false";
    fails(words, 3, &["--set recompute_group=4", "recompute full by 4 layers"]);
}

#[test]
fn plans_that_are_none_are_refused() {
    let path = file("no_plan.yaml", b"layers: 4\n");
    fails(&format!("check {path}"), 2, &["is no plan", "no `version`"]);
    let path = file("later_plan.yaml", b"version: 2\nnew: 1\n");
    fails(&format!("check {path}"), 2, &["`version` cannot be 2", "later_plan.yaml:1:10"]);
    fails("explain nowhere.yaml", 2, &["cannot read nowhere.yaml"]);
    fails(&format!("generate {path} -o trainer"), 2, &["`version` cannot be 2"]);
}

#[test]
fn a_plan_overwrites_plans_alone() {
    let model = model("kept.yaml", MODEL);
    let words = format!("--model {model} --cluster laptop --gpus 1");
    fails(&format!("{words} -o {model}"), 2, &["kept.yaml exists and is no plan"]);
    assert_eq!(std::fs::read_to_string(&model).unwrap(), MODEL);
    let path = scratch("twice.yaml");
    for _ in 0..2 {
        assert_eq!(plan(&format!("{words} -o {}", path.display())).code, 0);
    }
}

#[test]
fn measurements_have_their_columns() {
    let path = file("columns.csv", b"id,model_name,layers\na,b,3\n");
    fails(&format!("validate --measured {path}"), 2, &["has no column `hidden`"]);
    let papers = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/papers/measured.csv");
    let header = std::fs::read_to_string(papers).unwrap();
    let path = file("header.csv", header.lines().next().unwrap().as_bytes());
    fails(&format!("validate --measured {path}"), 2, &["has no rows"]);
}

#[test]
fn batches_are_no_larger_than_schedules() {
    let words = "--model llama8b --gpus 8 --global-batch 100000000";
    fails(words, 2, &["--global-batch cannot be 100000000", "1 to 16777216"]);
}

#[test]
fn no_trainer_is_made_of_a_plan_edited_by_hand() {
    let folder = scratch("edited");
    std::fs::create_dir_all(&folder).unwrap();
    let (good, edited) = (folder.join("plan.yaml"), folder.join("edited.yaml"));
    let words = format!(
        "--model {} --cluster laptop --gpus 2 --set tp=2 -o {}",
        model("edited-model.yaml", MODEL),
        good.display()
    );
    assert_eq!(plan(&words).code, 0);
    let text = std::fs::read_to_string(&good).unwrap();
    for (from, to, parts) in [
        ("\n  tp: 2\n", "\n  tp: 3\n", &["tp", "plan check"][..]),
        ("\n  layers: 4\n", "\n  layers: 3\n", &["layers", "plan check"]),
        ("\n  dp: 1\n", "\n  dp: 7\n", &["dp cannot be 7", "plan check"]),
        ("\n  dtype: f32\n", "\n  dtype: f33\n", &["f33", "edited.yaml:"]),
        ("\nstages:", "\nstaged:", &["staged", "edited.yaml:"]),
    ] {
        assert!(text.contains(from), "no {from:?} in {text}");
        std::fs::write(&edited, text.replacen(from, to, 1)).unwrap();
        let trainer = folder.join("trainer");
        let words = format!("generate {} -o {}", edited.display(), trainer.display());
        fails(&words, 2, parts);
        assert!(!trainer.exists(), "{to:?}: something was written");
    }
}

#[test]
fn processes_are_as_many_as_the_plan_has_ranks() {
    let folder = scratch("processes");
    std::fs::create_dir_all(&folder).unwrap();
    let (path, trainer) = (folder.join("plan.yaml"), folder.join("trainer"));
    let model = model("processes-model.yaml", MODEL);
    let words =
        format!("--model {model} --cluster laptop --gpus 2 --set tp=2 -o {}", path.display());
    assert_eq!(plan(&words).code, 0);
    assert_eq!(plan(&format!("generate {} -o {}", path.display(), trainer.display())).code, 0);
    for flags in ["-n 3", "--mpi -n 3", "--gpu -n 3"] {
        let words = format!("launch {} {flags}", trainer.display());
        fails(&words, 2, &["-n 3", "is for 2 ranks", "valid: -n 2"]);
    }
}
