//! The trainer's entry point: flags in, files out, and the errors of wrong input.

mod common;
mod trainer_runs;

use clap::Parser;
use common::{Split, check_trajectory_of, golden, model};
use direct::Direct;
use models::decisions::Vocab;
use models::program::Program;
use models::schedule::ScheduleName;
use runtime::state::checkpoint;
use runtime::trainer::{Flags, train};
use runtime::{Error, Interrupt};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;
use trainer_runs::{Folder, json_lines};

fn flags(case: &str, more: &[(&str, &Path)]) -> Flags {
    let (init, data) = (golden(case), golden(case).join("tokens.safetensors"));
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let mut words: Vec<String> = ["trainer", "--steps", "3"].map(str::to_owned).to_vec();
    words.extend(["--init-from".to_owned(), text(&init), "--data".to_owned(), text(&data)]);
    for (flag, value) in more {
        words.extend([format!("--{flag}"), text(value)]);
    }
    Flags::parse_from(words)
}

fn split() -> Split {
    Split { tp: 2, pp: 2, dp: 2, micro_batch: 1, ..Split::default() }
}

fn program() -> Program {
    split().program(&model("llama_gqa"))
}

#[test]
fn defaults_replay_a_golden_case() {
    let folder = Folder::new("replay");
    let (metrics, gradients) = (folder.file("run.jsonl"), folder.file("gradients.safetensors"));
    let weights = folder.file("weights.safetensors");
    let named: [(&str, &Path); 3] =
        [("metrics", &metrics), ("dump-gradients", &gradients), ("dump-weights", &weights)];
    train::<f32, _>(&Direct::new(&program()), &flags("llama_gqa", &named), &Interrupt::default())
        .unwrap();
    let lines = json_lines(&metrics);
    assert_eq!(lines.len(), 3);
    let of = |key: &str| lines.iter().map(|line| line[key].as_f64().unwrap()).collect::<Vec<_>>();
    check_trajectory_of("llama_gqa", &of("loss"), &of("grad_norm"));
    assert_eq!(of("loss"), of("total_loss"));
    assert_eq!(of("step"), [0.0, 1.0, 2.0]);
    assert_eq!(of("lr"), [1e-3; 3]);
    assert!(of("tokens_per_s").into_iter().all(|rate| rate > 0.0));

    let dumped = checkpoint::TensorFile::open(&gradients).unwrap();
    let golden = common::golden_gradients("llama_gqa");
    assert_eq!(dumped.names().len(), golden.len());
    for (name, (shape, values)) in golden {
        let (found_shape, found) = dumped.read::<f64>(&name).unwrap();
        assert_eq!(found_shape, shape, "{name}");
        assert!(common::distance(&found, &values) < 3e-5, "{name}");
    }
    // The dumped weights can be loaded, with another split.
    let mut again = flags("llama_gqa", &[]);
    again.init_from = Some(weights);
    again.steps = 1;
    train::<f32, _>(
        &Direct::new(&Split { tp: 4, ..Split::default() }.program(&model("llama_gqa"))),
        &again,
        &Interrupt::default(),
    )
    .unwrap();
}

#[test]
fn the_rank_report_covers_every_tensor_once() {
    let folder = Folder::new("report");
    let path = folder.file("ranks.jsonl");
    for (case, tp, sequence_parallel) in [("gpt2", 2, true), ("qwen2", 4, false)] {
        let split = Split { tp, pp: 2, dp: 2, sequence_parallel, ..split() };
        let flags = flags(case, &[("rank-report", &path)]);
        let program = split.program(&model(case));
        train::<f32, _>(&Direct::new(&program), &flags, &Interrupt::default()).unwrap();
        let ranks = json_lines(&path);
        assert_eq!(ranks.len(), split.ranks());
        let mut covered: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for rank in ranks.iter().filter(|rank| rank["at"]["dp"] == 0) {
            for piece in rank["tensors"].as_array().unwrap() {
                if piece["copy"] == false {
                    cover(&mut covered, piece);
                }
            }
        }
        let golden = common::golden_gradients(case);
        assert!(covered.keys().eq(golden.keys()));
        for (name, counts) in covered {
            assert!(counts.iter().all(|&count| count == 1), "{case}: {name}");
        }
        for rank in &ranks {
            check_passes(&program, rank);
        }
    }
}

/// Adds one to every element of a piece.
fn cover(covered: &mut BTreeMap<String, Vec<u8>>, piece: &Value) {
    let list = |key: &str| -> Vec<usize> {
        let values = piece[key].as_array().unwrap().iter();
        values.map(|value| value.as_u64().unwrap() as usize).collect()
    };
    let (whole, offset) = (list("global_shape"), list("global_offset"));
    let local = list("local_shape");
    let name = piece["name"].as_str().unwrap().to_owned();
    let counts = covered.entry(name).or_insert_with(|| vec![0; whole.iter().product()]);
    let width = whole.get(1).copied().unwrap_or(1);
    let (first, columns) = match whole.len() {
        1 => (0, 1),
        _ => (offset[1], local[1]),
    };
    for row in offset[0]..offset[0] + local[0] {
        for column in first..first + columns {
            counts[row * width + column] += 1;
        }
    }
}

/// Checks that passes ran in the schedule's order, with as many in flight as 1F1B has.
fn check_passes(program: &Program, rank: &Value) {
    let pp_rank = rank["at"]["pp"].as_u64().unwrap() as usize;
    let ran: Vec<&str> =
        rank["passes"].as_array().unwrap().iter().map(|pass| pass.as_str().unwrap()).collect();
    let planned: Vec<String> = program.passes[pp_rank]
        .passes
        .iter()
        .map(|pass| format!("{:?}{}.{}", pass.kind, pass.micro_batch, pass.chunk))
        .collect();
    assert_eq!(ran, planned);
    let in_flight = rank["peak_in_flight"].as_u64().unwrap() as usize;
    let pp = program.mesh.pp as usize;
    assert_eq!(in_flight, (pp - pp_rank).min(program.micro_batches));
}

#[test]
fn the_rank_report_counts_what_was_sent() {
    let folder = Folder::new("sent");
    let path = folder.file("ranks.jsonl");
    let program = program();
    train::<f32, _>(
        &Direct::new(&program),
        &flags("llama_gqa", &[("rank-report", &path)]),
        &Interrupt::default(),
    )
    .unwrap();
    for rank in json_lines(&path) {
        let pp_rank = rank["at"]["pp"].as_u64().unwrap();
        let sent = |group: &str, call: &str, of: &str| rank["traffic"][group][call][of].as_u64();
        // Three steps, four micro-batches of 32 tokens x 64 hidden in f32, to the other pipeline
        // rank: half from each of two tensor-parallel ranks, all-gathered there.
        let stream = 3 * 4 * 32 * 64 * 4;
        assert_eq!(sent("pp", "send", "bytes"), Some(stream / 2));
        assert_eq!(sent("pp", "recv", "bytes"), Some(stream / 2));
        assert_eq!(sent("tp", "all_gather", "bytes"), Some(stream / 2));
        // A layer reduces twice forward and twice backward; the embedding once forward, the output
        // layer once backward, and the loss three vectors of 32 tokens; the norm one f64 a step.
        let blocks = 2 * 4 * 3 * 4 * 32 * 64 * 4;
        let ends = if pp_rank == 0 { stream } else { stream + 3 * 3 * 4 * 32 * 4 };
        assert_eq!(sent("tp", "all_reduce", "bytes"), Some(blocks + ends + 3 * 8));
        // Every gradient once a step, the count of valid tokens, and the sum of squares.
        let gradients = rank["gradient_bytes"].as_u64().unwrap();
        assert_eq!(sent("dp", "all_reduce", "bytes"), Some(3 * (gradients + 16)));
    }
}

#[test]
fn the_trace_has_every_pass_of_every_rank() {
    let folder = Folder::new("trace");
    let path = folder.file("trace.json");
    train::<f32, _>(
        &Direct::new(&program()),
        &flags("llama_gqa", &[("trace", &path)]),
        &Interrupt::default(),
    )
    .unwrap();
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let passes = events.iter().filter(|event| event["cat"] == "pass").count();
    // 3 steps x 8 ranks x 4 micro-batches x 2 passes
    assert_eq!(passes, 3 * 8 * 4 * 2);
    let reductions = events.iter().filter(|event| event["cat"] == "dp").count();
    assert_eq!(reductions, 3 * 8);
    // As many calls as the rank report counts for steps: a rank's blocks, input and output layers.
    let calls = |name: &str| {
        let named = |event: &&Value| event["name"].as_str().is_some_and(|is| is.starts_with(name));
        events.iter().filter(|event| event["cat"] == "call").filter(named).count()
    };
    let waits = events.iter().filter(|event| event["cat"] == "wait");
    assert!(waits.filter(|event| event["name"] == "wait all_reduce tp").count() > 0);
    assert!(calls("all_reduce tp, ") > 3 * 8 && calls("recv pp") > 0, "{events:?}");
    for (n, event) in events.iter().enumerate().filter(|(_, event)| event["cat"] == "call") {
        let [begin, took] = ["ts", "dur"].map(|name| event[name].as_f64().unwrap());
        let beside = events[n + 1..].iter().find(|other| {
            other["pid"] == event["pid"]
                && other["tid"] == event["tid"]
                && other["ts"].as_f64().unwrap() + 1e-3 < begin + took
                && other["ts"].as_f64().unwrap() + other["dur"].as_f64().unwrap() > begin + 1e-3
        });
        assert!(beside.is_none(), "on one track: {event} and {beside:?}");
    }
}

/// Parts of a step, by the names of the metrics.
const PARTS: [&str; 6] = ["compute_s", "tp_s", "pp_s", "dp_s", "optimizer_s", "other_s"];

/// The metrics of ten steps, written to a folder of this name, and the seconds of the whole run.
fn metrics(folder: &str, program: &Program) -> (Vec<Value>, f64) {
    let folder = Folder::new(folder);
    let path = folder.file("run.jsonl");
    let flags = Flags { steps: 10, ..flags("llama_gqa", &[("metrics", &path)]) };
    let begun = Instant::now();
    train::<f32, _>(&Direct::new(program), &flags, &Interrupt::default()).unwrap();
    (json_lines(&path), begun.elapsed().as_secs_f64())
}

#[test]
fn the_parts_of_a_step_add_up_to_it() {
    let zb = Split { schedule: ScheduleName::ZbH1, dp: 1, ..split() };
    let ahead = Program { post_validation: true, ..zb.program(&model("llama_gqa")) };
    let one = Split { tp: 1, pp: 1, dp: 1, ..split() };
    let shared = Split { vocab: Vocab::Parallel1, ..split() };
    let [one, shared] = [one, shared].map(|split| split.program(&model("llama_gqa")));
    for program in [program(), ahead, one, shared] {
        let (lines, run_s) = metrics("parts", &program);
        let mut all_s = 0.0;
        for line in lines {
            let parts = PARTS.map(|part| line[part].as_f64().unwrap());
            let step_s = line["step_s"].as_f64().unwrap();
            assert!((parts.iter().sum::<f64>() - step_s).abs() < 1e-9 * step_s, "{line}");
            assert!(parts.iter().all(|&part_s| part_s >= 0.0), "{line}");
            assert!(line["compute_s"].as_f64().unwrap() > 0.0, "{line}");
            assert!(line["optimizer_s"].as_f64().unwrap() > 0.0, "{line}");
            assert!(line.get("predicted_step_s").is_none(), "{line}");
            all_s += step_s;
        }
        // The rest of a run loads weights, and exchanges metrics.
        assert!((0.5 * run_s..run_s).contains(&all_s), "{all_s} s of {run_s}");
    }
}

#[test]
fn waiting_for_another_stage_is_the_pipelines_time() {
    // Two stages take turns: each waits while the other computes.
    let turns = Split { tp: 1, dp: 1, schedule: ScheduleName::Naive, ..split() };
    for line in &metrics("turns", &turns.program(&model("llama_gqa"))).0[1..] {
        let [compute_s, pp_s, step_s] =
            ["compute_s", "pp_s", "step_s"].map(|part| line[part].as_f64().unwrap());
        assert!(pp_s > 0.25 * step_s && compute_s > 0.1 * step_s, "{line}");
    }
}

#[test]
fn the_command_line_of_a_replay() {
    let line = "trainer --init-from DIR --data DIR/tokens.safetensors --steps 20 --lr 1e-3 \
                --betas 0.9,0.95 --eps 1e-8 --weight-decay 0.1 --clip 1.0 --metrics run.jsonl";
    let flags = Flags::try_parse_from(line.split_whitespace()).unwrap();
    assert_eq!((flags.betas, flags.eps, flags.steps), ((0.9, 0.95), 1e-8, 20));
    let short = Flags::try_parse_from("trainer --data x --steps 1".split_whitespace()).unwrap();
    assert_eq!((short.betas, short.lr, short.eps), (flags.betas, flags.lr, flags.eps));
    assert_eq!((short.weight_decay, short.clip), (flags.weight_decay, flags.clip));
    let wrong = Flags::try_parse_from("trainer --data x --steps 1 --betas 0.9".split_whitespace());
    assert!(wrong.unwrap_err().to_string().contains("two numbers"));
}

fn error(change: impl FnOnce(&mut Flags)) -> Error {
    let mut flags = flags("llama_gqa", &[]);
    change(&mut flags);
    train::<f32, _>(&Direct::new(&program()), &flags, &Interrupt::default()).unwrap_err()
}

/// Checks that the error's text has all of these parts.
fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    parts.iter().for_each(|part| assert!(text.contains(part), "{text:?} lacks {part:?}"));
}

#[test]
fn wrong_input_is_refused_with_what_would_be_valid() {
    let folder = Folder::new("wrong");
    let bytes = std::fs::read(golden("llama_gqa").join("model.safetensors")).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.file(name), bytes).unwrap();
        folder.file(name)
    };
    let cut = write("cut.safetensors", &bytes[..bytes.len() / 2]);
    let short = write("short.safetensors", &bytes[..100]);
    let noise = write("noise.safetensors", &[9; 40]);

    let init = |path: PathBuf| error(|flags| flags.init_from = Some(path));
    let missing = init(folder.file("nowhere"));
    says(&missing, &["--init-from: ", "nowhere: No such file", "valid: a .safetensors file"]);
    says(&init(cut), &["cut.safetensors", "truncated", &bytes.len().to_string()]);
    says(&init(short), &["short.safetensors", "truncated"]);
    says(&init(noise), &["noise.safetensors", "truncated"]);
    says(&init(golden("qwen2")), &["model.layers.0.self_attn.k_proj", "[16, 64]", "[32, 64]"]);
    says(&init(golden("gpt2")), &["there is no tensor `model.embed_tokens.weight`"]);
    says(&init(folder.file("")), &["no ", "model.safetensors; valid: a .safetensors file"]);

    says(
        &error(|flags| flags.data = folder.file("gone.bin")),
        &["--data: ", "gone.bin: No such file"],
    );
    says(&error(|flags| flags.data = folder.file("x.txt")), &["x.txt", "valid: a file NAME.bin"]);
    says(&error(|flags| flags.steps = 21), &["--steps", "160 samples", "up to 20"]);
    says(&error(|flags| flags.betas = (0.9, 1.0)), &["--betas", "valid"]);
    says(&error(|flags| flags.steps = 0), &["--steps", "1 or more"]);
    says(&error(|flags| flags.lr = f64::NAN), &["--lr", "valid"]);
    let end = error(|flags| flags.document_end = Some(515));
    says(&end, &["--document-end", "515 is no token", "valid: 0 to 514"]);
    says(&error(|flags| flags.threads = Some(1_000_000)), &["--threads", "valid: 1 to", "cores"]);
    // The case's tokens go up to 514, outside a smaller vocabulary.
    let mut small = program();
    small.model.vocab = 300;
    let mut from_seed = flags("llama_gqa", &[]);
    from_seed.init_from = None;
    let refused =
        train::<f32, _>(&Direct::new(&small), &from_seed, &Interrupt::default()).unwrap_err();
    says(&refused, &["--data: ", "tokens.safetensors: tokens[0, ", "valid: 0 to 299"]);
}

#[test]
fn a_loss_that_is_no_number_ends_the_run() {
    let wild = error(|flags| flags.lr = 1e30);
    says(&wild, &["step 2 of 3: ", "stops before this step"]);
}

#[test]
fn an_interrupted_run_ends_behind_its_step_with_everything_written() {
    let folder = Folder::new("interrupted");
    let (metrics, weights) = (folder.file("run.jsonl"), folder.file("weights.safetensors"));
    let report = folder.file("ranks.jsonl");
    let flags = flags(
        "llama_gqa",
        &[("metrics", &metrics), ("dump-weights", &weights), ("rank-report", &report)],
    );
    let interrupt = Interrupt::default();
    interrupt.ask();
    let ended = train::<f32, _>(&Direct::new(&program()), &flags, &interrupt).unwrap_err();
    assert!(matches!(ended, Error::Interrupted { steps: 1 }), "{ended}");
    assert_eq!((json_lines(&metrics).len(), json_lines(&report).len()), (1, 8));
    assert!(checkpoint::TensorFile::open(&weights).is_ok());
}
