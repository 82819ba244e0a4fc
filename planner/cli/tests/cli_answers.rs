//! What `plan` prints, as text, as JSON and in plan.yaml.

mod cli_common;

use cli_common::{Run, plan, plan_with, scratch};
use models::input::Source;
use models::plan::Plan;
use serde_json::{Value, json};

/// Small enough to be searched at once.
const SMALL: &str = "--model llama8b --gpus 8 --tokens 15T --set schedule=1f1b --set vocab=tensor,first_last --set micro_batch<=2";

/// Masks wall times, which differ from run to run.
fn masked(text: &str) -> String {
    let mask = |line: &str| match line.starts_with("searched ") {
        true => line.rsplit_once(", ").map_or(line, |(head, _)| head).to_owned() + ", <time>\n",
        false => line.trim_end().to_owned() + "\n",
    };
    text.lines().map(mask).collect()
}

fn snapshot(name: &str, found: &str) {
    let path = format!("{}/tests/snapshots/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::create_dir_all(std::path::Path::new(&path).parent().unwrap()).unwrap();
        std::fs::write(&path, found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "{name} has changed; if that is meant: \
         UPDATE_SNAPSHOTS=1 cargo test -p meshwright-cli --test cli_answers\n\
         --- expected\n{expected}\n--- found\n{found}"
    );
}

#[test]
fn the_screen_of_a_plan() {
    let run = plan(SMALL);
    assert_eq!(run.code, 0, "{run:?}");
    snapshot("plan_llama8b.txt", &masked(&run.out));
}

#[test]
fn the_screen_of_an_explanation() {
    let path = scratch("explain.yaml");
    let path = path.display();
    assert_eq!(plan(&format!("{SMALL} --top 0 -o {path}")).code, 0);
    let run = plan(&format!("explain {path}"));
    assert_eq!(run.code, 0, "{run:?}");
    snapshot("explain_llama8b.txt", &masked(&run.out));
}

/// Every documented name is present.
fn assert_names(value: &Value, names: &str) {
    for name in names.split_whitespace() {
        assert!(value.get(name).is_some(), "`{name}` is missing in {value}");
    }
}

#[test]
fn json_has_the_documented_names() {
    for words in [format!("{SMALL} --json"), format!("estimate {SMALL} --json")] {
        let json = plan(&words).json();
        assert_names(
            &json,
            "model cluster gpus global_batch seq_len decisions feasible stages predicted search \
             alternatives",
        );
        assert_names(
            &json["decisions"],
            "tp pp vpp cp cp_style cp_ulysses dp dp_shard ep etp zero_stage sequence_parallel \
             micro_batch micro_batches schedule recompute vocab moe_overlap moe_overlap_degree \
             capacity_factor aux_scope dtype offload rank_order post_validation",
        );
        assert_names(&json["stages"][0], "stage chunk layers vocab_share recompute memory");
        assert_names(
            &json["stages"][0]["memory"],
            "parameters gradients optimizer activations workspace total",
        );
        assert_names(
            &json["predicted"],
            "iteration_s tokens_per_s_per_gpu model_tflops_per_gpu hardware_tflops_per_gpu mfu \
             bubble_fraction error_band training_days peak_memory_bytes breakdown",
        );
        assert_names(
            &json["predicted"]["breakdown"],
            "compute_s tp_s cp_s ep_s pp_s dp_s bubble_s recompute_s optimizer_s",
        );
        assert_names(&json["search"], "candidates pruned solved elapsed_s proven_optimal gap");
    }
}

#[test]
fn the_parts_of_an_iteration_add_up() {
    let json = plan(&format!("estimate {SMALL} --json")).json();
    let predicted = &json["predicted"];
    let parts = predicted["breakdown"].as_object().unwrap();
    let sum: f64 = parts.values().map(|part| part.as_f64().unwrap()).sum();
    let iteration_s = predicted["iteration_s"].as_f64().unwrap();
    assert!((sum / iteration_s - 1.0).abs() < 1e-6, "{sum} {iteration_s}");
}

#[test]
fn an_estimate_prices_what_does_not_fit() {
    let words = "estimate --model llama70b --gpus 8 --set pp=1 --set tp=8 --set zero_stage=0 \
                 --set recompute=none --set micro_batch=1 --set offload=none --json";
    let run = plan(words);
    assert_eq!(run.code, 0, "{run:?}");
    let json = run.json();
    assert_eq!(json["feasible"], false);
    assert!(json["short_of_memory"]["bytes"].as_u64().unwrap() > 1_000_000_000);
}

#[test]
fn the_same_question_gives_the_same_bytes_and_reads_back() {
    let paths = [scratch("same_a.yaml"), scratch("same_b.yaml")];
    let texts = paths.map(|path| {
        let run = plan(&format!("{SMALL} --top 0 -o {}", path.display()));
        assert_eq!(run.code, 0, "{run:?}");
        std::fs::read(path).unwrap()
    });
    assert!(texts[0] == texts[1]);
    let source = Source::from_bytes("plan.yaml", texts[0].clone()).unwrap();
    let read = Plan::read(&source).unwrap();
    assert_eq!(read.to_yaml().unwrap().into_bytes(), texts[0]);
}

#[test]
fn plans_of_every_kind_of_model_read_back_and_check() {
    let cases = [
        ("gpt2_124m", "selene", "--set schedule=1f1b --set tp=1"),
        ("gemma2_9b", "dgx_h100", "--set schedule=1f1b --set tp=8"),
        (
            "mixtral_8x7b",
            "dgx_h100",
            "--set schedule=1f1b --set tp=1 --set micro_batch=1 --set cp=1",
        ),
    ];
    for (model, cluster, settings) in cases {
        let path = scratch(&format!("{model}.yaml"));
        let path = path.display();
        let words =
            format!("--model {model} --cluster {cluster} --gpus 16 {settings} --top 0 -o {path}");
        let run = plan(&words);
        assert_eq!(run.code, 0, "{model}: {run:?}");
        let run = plan(&format!("check {path}"));
        assert_eq!(run.code, 0, "{model}: {run:?}");
    }
}

#[test]
fn a_model_may_come_from_standard_input() {
    let tiny = models::model::shipped_source("tiny").unwrap().unwrap();
    let run = plan_with("--model - --gpus 1 --top 0 --json", tiny.text().as_bytes());
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.json()["model"], "tiny");
}

#[test]
fn lists_name_what_is_shipped() {
    for (words, name) in [("models", "llama70b"), ("clusters", "dgx_h100")] {
        assert!(plan(words).out.contains(name), "{words}");
        let json = plan(&format!("{words} --json")).json();
        let names = json.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap());
        assert!(names.collect::<Vec<_>>().contains(&name), "{words}");
    }
}

/// What two plans differ in, in words and with units.
#[test]
fn differences_of_plans_are_words() {
    let paths = [scratch("words_a.yaml"), scratch("words_b.yaml")].map(|p| p.display().to_string());
    for (path, pp) in paths.iter().zip([2, 4]) {
        let words = format!("--model tiny --cluster laptop --gpus 4 --set pp={pp} -o {path}");
        assert_eq!(plan(&words).code, 0);
    }
    let out = plan(&format!("diff {} {}", paths[0], paths[1])).out;
    assert!(!out.contains(['{', '[', '"']) || out.contains("stages[2]"), "{out}");
    let row = out.lines().find(|line| line.starts_with("stages[2] ")).expect("there are four");
    assert!(row.contains("absent -> ") && row.contains(" and "), "{row}");
    assert!(!row.contains('{') && !row.contains('"'), "{row}");
    let time = out.lines().find(|line| line.starts_with("predicted.iteration_s")).unwrap();
    assert!(time.ends_with('s'), "{time}");
    assert!(out.lines().any(|line| line.starts_with("decisions.pp ") && line.ends_with("2 -> 4")));
}

/// No line is wider than what is no terminal, and the figures are of both schedules.
#[test]
fn schedules_are_drawn_within_the_columns() {
    for words in [
        "1f1b --stages 4 --micro-batches 64",
        "zb_v --stages 16 --micro-batches 8",
        "zb_v --stages 16 --micro-batches 40 --against 1f1b",
    ] {
        let out = plan(&format!("schedule {words}")).out;
        let widest = out.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(100), "{out}");
    }
    let out = plan("schedule 1f1b --stages 4 --micro-batches 64").out;
    assert!(out.contains("its start // its end\np0 F0"), "{out}");
    let out = plan("schedule zb_v --stages 4 --micro-batches 8 --against 1f1b").out;
    let head = out.split_once("\n\nzb_v\np0").expect("the figures come first").0;
    for part in ["schedule   zb_v\nmakespan   25.5", "schedule   1f1b\nmakespan   33"] {
        assert!(head.contains(part), "{head}");
    }
}

#[test]
fn a_schedule_is_reported_and_drawn() {
    let run = plan("schedule 1f1b --stages 2 --micro-batches 4 --json --orders");
    let json = run.json();
    assert_eq!(json["makespan"], 15.0);
    assert_eq!(json["orders"][1][0], "F0@1");
    let drawn = plan("schedule 1f1b --stages 2 --micro-batches 4").out;
    assert!(drawn.contains("p0 F0"), "{drawn}");
}

/// 33 and 27 units: `data/oracles.csv`.
#[test]
fn two_schedules_are_held_against_each_other() {
    let words = "schedule zb_h1 --against 1f1b --stages 4 --micro-batches 8";
    let out = plan(words).out;
    assert!(out.contains("zb_h1\np0 F0") && out.contains("1f1b\np0 F0"), "{out}");
    assert!(
        out.contains("zb_h1 is 6 (18.2 %) shorter than 1f1b: on average a rank waits"),
        "{out}"
    );
    let json = plan(&format!("{words} --json")).json();
    assert_eq!(json["report"]["makespan"], 27.0);
    assert_eq!(json["comparison"]["against"]["makespan"], 33.0);
    let last = &json["comparison"]["against"]["devices"][3];
    assert_eq!((&last["work"], &last["cooldown_wait"]), (&24.0.into(), &6.0.into()));
    for (flag, part) in [("--orders", "no effect"), ("--act-b 1", "no effect")] {
        let run = plan(&format!("{words} {flag}"));
        assert!(run.code != 0 && run.err.contains(part), "{run:?}");
    }
    let run = plan("schedule zb_h1 --against dualpipe --stages 3 --micro-batches 8");
    assert!(run.code != 0 && run.err.contains("2 or 4 would do"), "{run:?}");
}

/// A plan says where its schedule beats 1F1B, and its explanation shows it.
#[test]
fn a_plan_says_why_its_schedule_wins() {
    let path = scratch("why.yaml");
    let path = path.display();
    let words = "--model gpt_3.6b --gpus 8 --global-batch 96 --set tp=1 --set cp=1 --set pp=4 --set schedule=zb_v --set micro_batch=1";
    let run = plan(&format!("{words} -o {path}"));
    assert_eq!(run.code, 0, "{run:?}");
    let out = plan(&format!("explain {path}")).out;
    assert!(out.contains("\nzb_v, its start // its end\np0 F0"), "{out}");
    assert!(out.contains("\n1f1b, its start // its end\np0 F0"), "{out}");
    assert!(out.contains("shorter than 1f1b: on average a rank"), "{out}");
}

/// A plan with two copies of each stage is written and passes the check.
#[test]
fn a_plan_with_two_copies_works_out() {
    let path = scratch("copies.yaml");
    let file = path.display();
    let words = "--model tiny --cluster laptop --gpus 4 --set pp=4 --set schedule=dualpipe --set micro_batch=1";
    let run = plan(&format!("{words} -o {file}"));
    assert!(run.out.contains("pp 4 (2 copies)") && run.out.contains("dualpipe"), "{run:?}");
    assert_eq!(plan(&format!("check {file}")).code, 0);
    let text = std::fs::read_to_string(&path).expect("it was written");
    for (from, to, field) in [
        ("  copy:\n    device: 3\n", "  copy:\n    device: 2\n", "stages[0].copy"),
        ("schedule: dualpipe", "schedule: dualpipe_v", "stages"),
    ] {
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replacen(from, to, 1)).expect("it can be written");
        let refused = plan(&format!("check {file}"));
        let said = format!("{}{}", refused.out, refused.err);
        assert!(refused.code != 0 && said.contains(field), "{refused:?}");
    }
    let run = plan(&format!("explain {file}"));
    assert_eq!(run.code, 2, "the file still says dualpipe_v: {run:?}");
}

#[test]
fn post_validation_is_decided_by_hand() {
    let words = "estimate --model llama8b --gpus 8 --set tp=1 --set cp=1 --set pp=4 --set micro_batch=1 --set post_validation=true";
    let run = plan(&format!("{words} --set schedule=zb_h1"));
    assert!(run.code == 0 && run.out.contains("post-validation"), "{run:?}");
    let json = plan(&format!("{words} --set schedule=zb_h1 --json")).json();
    assert_eq!(json["decisions"]["post_validation"], true);
    let run = plan("--model llama8b --gpus 64 --set post_validation=true");
    assert!(run.code == 0 && run.out.contains("of what layers alone take"), "{run:?}");
    for (setting, valid) in [
        ("schedule=1f1b", "needs a schedule with split backward passes: zb_h1,"),
        ("vocab=parallel_1", "goes with post_validation false"),
    ] {
        let run = plan(&format!("{words} --set {setting}"));
        assert!(run.code != 0 && run.err.contains(valid), "{run:?}");
    }
}

/// The best order that the greedy runs find for a plan's times and memory.
#[test]
fn a_plan_keeps_the_order_of_greedy_runs() {
    let file = scratch("greedy.yaml");
    let path = file.display();
    let words = "--model llama8b --gpus 8 --set tp=1 --set cp=1 --set pp=8 --set schedule=1f1b --set micro_batch=1 --set vocab=tensor";
    let run = plan(&format!("{words} --order auto -o {path}"));
    assert!(run.out.contains("zb_auto's for these times"), "{run:?}");
    assert_eq!(plan(&format!("check {path}")).code, 0);
}

/// A setting that no combination can have is refused, not dropped.
#[test]
fn settings_are_never_dropped() {
    for (words, named) in [
        (
            "--model gpt2_124m --gpus 8 --set cp=1 --set cp_ulysses=2",
            "cp_ulysses is 1 where cp is 1",
        ),
        (
            "--model mixtral_8x7b --gpus 16 --set moe_overlap=none --set moe_overlap_degree=4",
            "moe_overlap_degree of moe_overlap none is 1",
        ),
    ] {
        let run = plan(words);
        assert!(run.code == 2 && run.err.contains(named), "{words}: {run:?}");
    }
}

/// How far from the least memory a plan is that was to need the least.
#[test]
fn the_least_memory_is_bounded() {
    let words = "--model llama8b --gpus 16 --set pp=2 --objective memory";
    let all = plan(&format!("{words} --json")).json();
    let [needs, least] = [&all["predicted"]["peak_memory_bytes"], &all["least_memory_bytes"]]
        .map(|bytes| bytes.as_f64().unwrap());
    assert!(least < needs && needs < 1.02 * least, "{least} {needs}");
    assert!(plan(words).out.contains("no plan fits in 2 % less memory"));
    let refused = plan(&format!("{words} --top 2"));
    assert!(refused.code == 2 && refused.err.contains("--objective time"), "{refused:?}");
}

/// A plan knows that it was to need the least memory: what checks, explains and repeats it compares
/// it with what needs no more.
#[test]
fn a_plan_of_least_memory_says_so() {
    let file = scratch("least.yaml");
    let path = file.display();
    let words = "--model llama8b --gpus 16 --set pp=2 --set schedule=1f1b --set micro_batch=1";
    let made = plan(&format!("{words} --objective memory -o {path}"));
    assert_eq!(made.code, 0, "{made:?}");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("\n  objective: memory\n"), "{text}");
    let checked = plan(&format!("check {path} --proof"));
    assert!(checked.code == 0 && checked.out.contains("proof verified"), "{checked:?}");
    let explained = plan(&format!("explain {path}"));
    assert!(explained.out.contains("least memory"), "{explained:?}");
    assert!(!explained.out.contains("faster than the plan"), "{explained:?}");
    let binds = explained.out.lines().find(|line| line.starts_with("limit")).unwrap();
    assert!(binds.contains("1 GB more than its") && !binds.contains("left"), "{binds}");
    let needs = |run: &Run| run.json()["predicted"]["peak_memory_bytes"].clone();
    let direct = plan(&format!("{words} --objective memory --prove --json"));
    let again = plan(&format!("--from {path} --prove --json"));
    assert_eq!(needs(&again), needs(&direct));
    let by_time = plan(&format!("--from {path} --objective time --json"));
    assert!(needs(&by_time).as_u64() > needs(&again).as_u64(), "{by_time:?}");
    // Without the record, as in older plans, what is faster in more memory counts.
    std::fs::write(&file, text.replacen("  objective: memory\n", "", 1)).unwrap();
    assert_eq!(plan(&format!("check {path}")).code, 0);
    let checked = plan(&format!("check {path} --proof"));
    assert!(checked.code == 2 && checked.out.contains("`objective: memory`"), "{checked:?}");
}

/// A proof that holds in no memory is wrong, and nothing is said of an older version.
#[test]
fn a_wrong_proof_is_not_taken_for_one_of_least_memory() {
    let file = scratch("slow.yaml");
    let path = file.display();
    let slow = "--model llama8b --gpus 16 --set pp=2 --set recompute=none --set tp=8";
    assert_eq!(plan(&format!("{slow} -o {path}")).code, 0);
    let text = std::fs::read_to_string(&file).unwrap();
    let start = text.find("  settings:").unwrap();
    let end = start + text[start..].find("  headroom:").unwrap();
    let free = format!("{}  settings: []\n{}", &text[..start], &text[end..]);
    std::fs::write(&file, free).unwrap();
    let checked = plan(&format!("check {path} --proof"));
    assert!(checked.code == 2 && checked.out.contains("proof.searched_gap"), "{checked:?}");
    assert!(!checked.out.contains("objective"), "{checked:?}");
}

/// Of a plan's degrees nothing may fit elsewhere, on the same number of GPUs, where others do.
#[test]
fn other_degrees_are_tried_on_as_many_gpus() {
    let path = scratch("narrow.yaml").display().to_string();
    let words = "--model llama8b --gpus 16 --set zero_stage=0 --set offload=none";
    assert_eq!(plan(&format!("{words} -o {path}")).code, 0);
    let direct = plan(&format!("{words} --cluster a100_40g --json"));
    let again = plan(&format!("--from {path} --cluster a100_40g --json"));
    let step = |run: &Run| run.json()["predicted"]["iteration_s"].clone();
    assert_eq!(step(&again), step(&direct));
}

/// An order of its own takes no more memory than a plan of least memory needs.
#[test]
fn an_order_for_a_plan_of_least_memory_stays_in_it() {
    let path = scratch("ordered.yaml").display().to_string();
    let words = "--model llama8b --gpus 16 --set pp=4 --set schedule=1f1b --set micro_batch=1";
    let asked = format!("{words} --set vocab=first_last --objective memory --prove");
    let named = plan(&format!("{asked} --json"));
    let ordered = plan(&format!("{asked} --order auto -o {path} --json"));
    let needs = |run: &Run| run.json()["predicted"]["peak_memory_bytes"].as_u64();
    assert!(needs(&ordered) <= needs(&named), "{ordered:?}");
    assert_eq!(plan(&format!("check {path} --proof")).code, 0);
}

/// A capacity factor is part of the model, also where a setting on `--from` brings it.
#[test]
fn a_plan_made_again_takes_a_capacity_factor() {
    let (file, other) = (scratch("dropless.yaml"), scratch("capacity.yaml"));
    let (path, capacity) = (file.display(), other.display());
    // With other degrees of context parallelism there are plans that take exactly as long.
    let words =
        "--model mixtral_8x7b --gpus 16 --set pp=2 --set tp=2 --set cp=1 --set schedule=1f1b";
    assert_eq!(plan(&format!("{words} -o {path}")).code, 0);
    for factor in [1.25, 2.0] {
        // The second time the plan has a factor already.
        let from = if factor == 2.0 { &capacity } else { &path };
        let set = format!("--set capacity_factor={factor}");
        let again = plan(&format!("--from {from} {set} --json"));
        let direct = plan(&format!("{words} {set} --json"));
        assert_eq!(again.json()["decisions"], direct.json()["decisions"]);
        assert_eq!(again.json()["predicted"], direct.json()["predicted"]);
        assert_eq!(plan(&format!("--from {from} {set} -o {capacity}")).code, 0);
        let text = std::fs::read_to_string(&other).unwrap();
        let model = text.split("\n  model:").nth(1).unwrap();
        assert!(model.contains(&format!("capacity_factor: {factor}")), "{model}");
        assert_eq!(plan(&format!("check {capacity}")).code, 0);
    }
    let dense = scratch("dense.yaml");
    let dense = dense.display();
    assert_eq!(plan(&format!("--model tiny --cluster laptop --gpus 2 -o {dense}")).code, 0);
    let refused = plan(&format!("--from {dense} --set capacity_factor=2"));
    assert!(refused.code == 2 && refused.err.contains("has no experts"), "{refused:?}");
}

/// The loss of GPUs: the plan's model, batch and settings stay, and what cannot be split idles.
#[test]
fn a_plan_is_made_again_for_fewer_gpus() {
    let file = scratch("before.yaml");
    let path = file.display();
    let words = "--model llama8b --gpus 16 --seq-len 4096 --set cp=1";
    let before = plan(&format!("{words} -o {path} --json")).json();
    // 15 = 3 x 5 leaves no tp and dp; 14 has pp 7.
    let after = plan(&format!("--from {path} --gpus 15 --json")).json();
    let direct =
        plan(&format!("{} --json", words.replace("16", &after["gpus"].to_string()))).json();
    assert!(after["gpus"].as_u64().unwrap() <= 15);
    for kept in ["model", "seq_len", "global_batch"] {
        assert_eq!(before[kept], after[kept]);
    }
    assert_eq!(after["decisions"]["cp"], 1);
    let time_s = |answer: &Value| answer["predicted"]["iteration_s"].as_f64().unwrap();
    assert!((time_s(&after) / time_s(&direct) - 1.0).abs() < 1e-9, "{after} {direct}");
    let screen = plan(&format!("--from {path} --gpus 15"));
    assert!(screen.out.contains("\nidle       "), "{screen:?}");
    // 15 can be split with other degrees, and is slower.
    let proven = plan(&format!("--from {path} --gpus 15 --prove"));
    assert!(proven.out.contains("or no plan on them is as fast"), "{proven:?}");
    let same = plan(&format!("--from {path} --json")).json();
    assert!((time_s(&same) / time_s(&before) - 1.0).abs() < 1e-9, "{same} {before}");
    let other = plan(&format!("--from {path} --set cp=2 --json")).json();
    assert_eq!(other["decisions"]["cp"], 2, "a setting takes the place of the plan's: {other}");
    let refused = plan(&format!("--from {path} --model llama8b"));
    assert!(refused.code == 2 && refused.err.contains("cannot be used with"), "{refused:?}");
    let refused = plan(&format!("estimate --from {path} --gpus 37"));
    assert!(refused.code == 2 && !refused.err.contains("bug of ours"), "{refused:?}");
}

/// However little the time, there is an answer, and its gap tells what is left.
#[test]
fn an_answer_is_there_in_time() {
    let words = "--model deepseek_v3 --gpus 2048 --json";
    let hurried = plan(&format!("{words} --time-limit 0.5"));
    let search = |run: &Run| run.json()["search"].clone();
    assert!(hurried.code == 0 || hurried.err.contains("in the time"), "{hurried:?}");
    let small = "--model llama8b --gpus 64 --json";
    let (soon, proven) = (search(&plan(&format!("{small} --time-limit 2"))), search(&plan(small)));
    assert_eq!(proven["searched_gap"], 0.0);
    assert!(proven["first_s"].as_f64().unwrap() < proven["elapsed_s"].as_f64().unwrap());
    assert_eq!(soon["candidates"], proven["candidates"]);
    for wrong in ["--time-limit -1", "--time-limit 1 --prove"] {
        assert_eq!(plan(&format!("{small} {wrong}")).code, 2);
    }
}

/// Zero Bubble's small pipelines have proven optima (`data/oracles.csv`): 14 for p = 3, m = 4
/// within p.
#[test]
fn the_shortest_order_is_drawn_with_its_proof() {
    let words = "schedule zb_auto --stages 3 --micro-batches 4 --optimal stage --memory-limit 6";
    let json = plan(&format!("{words} --json --orders")).json();
    assert_eq!((&json["stage_time"], &json["proven_optimal"]), (&13.0.into(), &true.into()));
    assert_eq!(json["orders"].as_array().map(Vec::len), Some(3));
    let drawn = plan("schedule zb_auto --stages 3 --micro-batches 4 --optimal makespan").out;
    assert!(drawn.contains("proven: no order is shorter"), "{drawn}");
    let hurried = "schedule zb_auto --stages 4 --micro-batches 12 --backward 1.3 --weight 0.6";
    let hurried = plan(&format!("{hurried} --optimal makespan --time-limit 0.1")).out;
    assert!(hurried.contains("shorter"), "{hurried}");
}

/// The order is in the file, and the file can be checked without solving again.
#[test]
fn a_plan_keeps_the_order_that_an_integer_program_found() {
    let file = scratch("ordered.yaml");
    let path = file.display();
    let small = "--model tiny --cluster laptop --gpus 2 --set pp=2 --set vpp=1 --set schedule=1f1b \
                 --set micro_batch=2 --set vocab=tensor";
    let run = plan(&format!("{small} --order ilp --time-limit 30 -o {path}"));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.out.contains("an integer program's"), "{}", run.out);
    let text = std::fs::read_to_string(&file).expect("it was written");
    assert!(text.contains("order:\n") && text.contains("F0@0 F1@0"), "{text}");
    assert_eq!(plan(&format!("check {path}")).code, 0);
    let broken = text.replacen("F0@0 F1@0", "F1@0 F0@0", 1).replacen("B0@1", "B9@1", 1);
    std::fs::write(&file, broken).expect("it can be written");
    let refused = plan(&format!("check {path}"));
    assert!(refused.code != 0, "{refused:?}");
    assert!(format!("{}{}", refused.out, refused.err).contains("order"), "{refused:?}");
}

#[test]
fn two_plans_are_compared_field_by_field() {
    let (a, b) = (scratch("diff_a.yaml"), scratch("diff_b.yaml"));
    let (a, b) = (a.display(), b.display());
    assert_eq!(plan(&format!("{SMALL} --top 0 --set tp=1 -o {a}")).code, 0);
    assert_eq!(plan(&format!("{SMALL} --top 0 --set tp=2 -o {b}")).code, 0);
    let out = plan(&format!("diff {a} {b}")).out;
    assert!(out.contains("decisions.tp") && out.contains("1 -> 2"), "{out}");
    assert!(plan(&format!("diff {a} {a}")).out.contains("the same"));
}

#[test]
fn nothing_is_offloaded_where_there_is_no_host_memory() {
    let run = plan("--model tiny --cluster laptop --gpus 4 --top 0 --json");
    assert_eq!(run.code, 0, "{run:?}");
    let json = run.json();
    assert_eq!((&json["feasible"], &json["decisions"]["offload"]), (&true.into(), &"none".into()));
}

/// What no measured run of the software had widens the error band, and is named.
#[test]
fn a_band_is_that_of_software_left_out_where_no_measured_run_was() {
    let unseen = models::cluster::measured_runs().unwrap().unseen_band;
    let words = "estimate --model mixtral_8x7b --gpus 32 --set tp=2 --set pp=4 --set ep=4 --set etp=1 --set schedule=1f1b \
                 --set vocab=tensor --set cp=1 --set micro_batch=1 --set zero_stage=1 --set offload=none";
    let seen = plan(&format!("{words} --set moe_overlap=none --json")).json();
    let band = &seen["predicted"]["error_band"];
    assert_eq!(band["basis"], "validated");
    assert!(band["relative"].as_f64().unwrap() < unseen && band.get("unseen").is_none(), "{band}");
    let cases = [
        ("--set moe_overlap=ampipe", "ampipe"),
        ("--set moe_overlap=none --set offload=optimizer", "offload optimizer"),
        ("--set moe_overlap=none --set schedule=zb_h1", "zb_h1"),
        ("--set moe_overlap=none --set zero_stage=2", "zero 2"),
        (
            "--set moe_overlap=none --seq-len 1024",
            "1024 tokens a sequence (measured: 2048 to 1048576)",
        ),
        ("--set moe_overlap=none --cluster dgx_h200", "H200-SXM5-141GB"),
    ];
    for (change, named) in cases {
        let json = plan(&format!("{} --json", changed(words, change))).json();
        let band = &json["predicted"]["error_band"];
        assert_eq!((&band["basis"], &band["relative"]), (&json!("unseen"), &json!(unseen)));
        assert_eq!(band["unseen"], json!([named]), "{change}");
    }
    let screen = plan(&format!("{words} --set moe_overlap=ampipe")).out;
    let line =
        format!("±{:.0} %: no measured run of its software generation has ampipe", 100.0 * unseen);
    assert!(screen.contains(&line), "{screen}");
}

/// The fullest rank's load is an input. It takes time and memory, and a plan says what the worst
/// load would need.
#[test]
fn an_imbalance_of_experts_is_priced_and_its_worst_case_printed() {
    let words = "estimate --model mixtral_8x7b --gpus 32 --set tp=2 --set pp=4 --set ep=4 --set etp=1 --set schedule=1f1b \
                 --set vocab=tensor --set cp=1 --set micro_batch=1 --set zero_stage=1 --set offload=none \
                 --set moe_overlap=none --set recompute=full";
    let of = |more: &str| plan(&format!("{words} {more} --json")).json();
    let memory = |json: &Value| json["predicted"]["peak_memory_bytes"].as_u64().unwrap();
    let seconds = |json: &Value| json["predicted"]["iteration_s"].as_f64().unwrap();
    let (even, uneven) = (of(""), of("--expert-imbalance 1.5"));
    assert!(seconds(&uneven) > seconds(&even) && memory(&uneven) > memory(&even));
    let worst = even["worst_case_memory_bytes"].as_u64().unwrap();
    assert!(worst > memory(&uneven));
    assert_eq!(uneven["worst_case_memory_bytes"].as_u64(), Some(worst));
    assert_eq!(memory(&of("--expert-imbalance 4")), worst);
    let screen = plan(words).out;
    assert!(screen.contains("if all tokens went to the experts of one rank"), "{screen}");
    for (flags, why) in [
        ("--expert-imbalance 0.9", "valid: 1 to 1000"),
        ("--expert-imbalance 2 --set capacity_factor=1", "padded to a capacity"),
    ] {
        let refused = plan(&format!("{words} {flags}"));
        assert!(refused.err.contains(why), "{}", refused.err);
    }
    assert!(plan(&format!("{SMALL} --expert-imbalance 2")).err.contains("has no experts"));
}

/// `words` without the settings that `more` sets again.
fn changed(words: &str, more: &str) -> String {
    let again =
        |word: &str| more.split_whitespace().any(|given| given.split('=').next() == Some(word));
    let settings: Vec<&str> = words.split(" --set ").collect();
    let kept = settings[1..].iter().filter(|set| !again(set.split('=').next().unwrap_or_default()));
    let kept = kept.map(|set| format!(" --set {}", set.trim()));
    format!("{}{} {more}", settings[0], kept.collect::<String>())
}

/// There are three reasons: a configuration does not exist, does not fit, or takes too long.
#[test]
fn an_explanation_tells_why_something_is_not_considered() {
    let words = "--model llama70b --gpus 64 --set tp=8 --set pp=8 --set cp=1 --set vpp=1 --set vocab=tensor \
                 --set recompute=selective,none --set offload=none --set schedule=1f1b,naive,gpipe";
    let reasons = |more: &str| -> Vec<(String, Value)> {
        let path = scratch("why_not.yaml");
        let run = plan(&format!("{words} {more} -o {}", path.display()));
        assert_eq!(run.code, 0, "{run:?}");
        let json = plan(&format!("explain {} --json", path.display())).json();
        let considered = json["explanation"]["considered"].as_array().unwrap().clone();
        let reason = |tried: &Value| {
            assert_eq!(tried["best"].is_null(), !tried["why_not"].is_null(), "{tried}");
            (tried["what"].as_str().unwrap().to_owned(), tried["why_not"].clone())
        };
        considered.iter().map(reason).collect()
    };
    let has = |found: &[(String, Value)], what: &str, why: &str| {
        assert!(found.contains(&(what.to_owned(), json!(why))), "{what} {why}: {found:?}");
    };
    // One sequence per micro-batch: naive runs one micro-batch at a time, and GPipe keeps all
    // 2,048.
    let many = reasons("--set micro_batch=1");
    has(&many, "naive", "does_not_exist");
    has(&many, "zero 1", "does_not_exist");
    has(&many, "gpipe", "does_not_fit");
    // All 32 sequences in one micro-batch: each of the eight stages waits for the other seven.
    let few = reasons("--global-batch 32 --seq-len 2048");
    has(&few, "naive", "too_slow");
}

/// What a search leaves out unless it is asked for is tried on its plan.
#[test]
fn settings_that_were_not_searched_are_tried() {
    let cases = [
        (
            "--model vocab_10b --cluster selene --gpus 144 --set vocab=tensor --set tp=2 --set pp=9 \
             --set schedule=zb_h2 --set micro_batch=1 --set zero_stage=1",
            "post_validation=true",
        ),
        ("--model llama70b --cluster a100_40g --gpus 64 --set pp=1", "offload=activations"),
    ];
    for (words, setting) in cases {
        let json = plan(&format!("{words} --json")).json();
        let with = &json["faster_with"][0];
        assert_eq!(with["setting"], json!(setting), "{words}: {json}");
        let pinned = plan(&format!("{words} --set {setting} --json")).json();
        let [own, with, pinned] = [
            &json["predicted"]["iteration_s"],
            &with["iteration_s"],
            &pinned["predicted"]["iteration_s"],
        ]
        .map(|seconds| seconds.as_f64().unwrap());
        assert!(pinned <= with * (1.0 + 1e-6) && with < own, "{words}: {pinned} {with} {own}");
        let screen = plan(words).out;
        assert!(screen.contains(&format!("\nfaster     {setting}: ")), "{screen}");
        // Asked for, it is no longer left out.
        assert!(
            plan(&format!("{words} --set {setting} --json")).json()["faster_with"][0].is_null()
        );
    }
}
