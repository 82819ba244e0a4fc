//! A run's files: checked for writability before the first step, written completely or not at all,
//! and saved as far as possible if a run fails. And what a run says of its steps.

mod trainer_runs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, mkfifo};
use runtime::state::checkpoint::{self, TensorFile, Tensors};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use trainer_runs::{
    Folder, as_rank_of, ended_within, golden_data, golden_tokens, json_lines, many_tokens,
    wait_until, write_indexed,
};

/// Longer than any run here takes, on a busy machine too.
const LIMIT: Duration = Duration::from_secs(600);

/// A run of the golden case, split by these variables.
fn trainer(split: &[(&str, &str)], data: &Path, steps: u64) -> Command {
    let mut command = trainer_runs::trainer();
    command.envs(split.iter().copied()).args(["--threads", "4", "--steps", &steps.to_string()]);
    command.arg("--init-from").arg(golden_data()).arg("--data").arg(data);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Process `rank` of two, which meet in a file.
fn as_rank<'a>(command: &'a mut Command, folder: &Folder, rank: usize) -> &'a mut Command {
    as_rank_of(command, rank, 2).arg("--rendezvous").arg(folder.file("meeting"))
}

fn ended(child: Child) -> (Option<i32>, String) {
    ended_within(LIMIT, child)
}

fn run(command: &mut Command) -> (Option<i32>, String) {
    ended(command.spawn().unwrap())
}

fn count_lines(path: &Path) -> usize {
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

const WRITTEN_AT_THE_END: [&str; 4] =
    ["--dump-gradients", "--dump-weights", "--rank-report", "--trace"];

#[test]
fn paths_that_cannot_be_written_are_refused_before_the_first_step() {
    let folder = Folder::new("refused");
    // A link of our own: a writer that replaced its path would replace the link, not the machine's
    // device.
    let (full, locked) = (folder.file("full"), folder.file("locked"));
    std::os::unix::fs::symlink("/dev/full", &full).unwrap();
    std::fs::create_dir(&locked).unwrap();
    let bad = [
        (folder.file("nowhere/file"), "No such file"),
        (full.clone(), "No space left"),
        (locked.clone(), "directory"),
    ];
    for flag in WRITTEN_AT_THE_END.into_iter().chain(["--metrics"]) {
        for (path, why) in &bad {
            let mut command = trainer(&[("PP", "2")], &golden_tokens(), 2);
            if flag != "--metrics" {
                command.arg("--metrics").arg(folder.file("m"));
            }
            let (code, said) = run(command.arg(flag).arg(path));
            assert_eq!(code, Some(2), "{flag}: {said}");
            for part in [&format!("error: {flag}: {}", path.display()), *why, "valid"] {
                assert!(said.contains(part), "{said:?} lacks {part:?}");
            }
            assert_eq!(count_lines(&folder.file("m")), 0, "{flag}: steps were run");
        }
    }
    assert!(full.is_symlink(), "the link was replaced");
    assert_eq!(folder.files(), ["full", "locked", "m"]);
}

#[test]
fn a_file_stays_until_another_takes_its_place() {
    let folder = Folder::new("stays");
    for flag in WRITTEN_AT_THE_END {
        std::fs::write(folder.file(flag), "of another run").unwrap();
    }
    let all = |command: &mut Command| {
        for flag in WRITTEN_AT_THE_END {
            command.arg(flag).arg(folder.file(flag));
        }
        run(command)
    };
    // More steps than the data has: refused after files are opened.
    let (code, said) = all(&mut trainer(&[], &golden_tokens(), 21));
    assert_eq!(code, Some(2), "{said}");
    for flag in WRITTEN_AT_THE_END {
        assert_eq!(std::fs::read(folder.file(flag)).unwrap(), b"of another run", "{flag}");
    }
    assert_eq!(folder.files(), WRITTEN_AT_THE_END);
    let (code, said) = all(&mut trainer(&[], &golden_tokens(), 1));
    assert_eq!(code, Some(0), "{said}");
    for flag in WRITTEN_AT_THE_END {
        assert!(std::fs::metadata(folder.file(flag)).unwrap().len() > 100, "{flag}");
    }
    assert_eq!(folder.files(), WRITTEN_AT_THE_END);
}

#[test]
fn metrics_that_can_no_longer_be_written_fail_the_run_at_its_end() {
    let folder = Folder::new("pipe");
    let (pipe, weights) = (folder.file("pipe"), folder.file("w"));
    mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut command = trainer(&[("TP", "2")], &many_tokens(folder.path()), 300);
    command.arg("--metrics").arg(&pipe).arg("--dump-weights").arg(&weights);
    let child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(File::open(&pipe).unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("{\"step\":0"), "{line}");
    // Nobody reads the rest.
    let (code, said) = ended(child);
    assert_eq!(code, Some(1), "{said}");
    assert_eq!(said.matches("the run goes on").count(), 1, "{said}");
    let lacks = format!("error: --metrics: {}: ", pipe.display());
    assert!(said.contains(&lacks) && said.contains("lines are missing: Broken pipe"), "{said}");
    assert!(said.contains("wrote     ") && !said.contains("(--metrics)"), "{said}");
    assert!(TensorFile::open(&weights).is_ok());
}

#[test]
fn inputs_are_not_written() {
    let folder = Folder::new("inputs");
    let (tokens, weights) = (folder.file("t.safetensors"), folder.file("model.safetensors"));
    std::fs::copy(golden_tokens(), &tokens).unwrap();
    std::fs::copy(golden_data().join("model.safetensors"), &weights).unwrap();
    let link = folder.file("link");
    std::os::unix::fs::symlink(&tokens, &link).unwrap();
    for flag in WRITTEN_AT_THE_END.into_iter().chain(["--metrics"]) {
        for (path, of) in [(&tokens, "--data"), (&link, "--data"), (&weights, "--init-from")] {
            let mut command = trainer_runs::trainer();
            command.args(["--steps", "1"]).arg("--data").arg(&tokens).arg(flag).arg(path);
            let (code, said) = run(command
                .arg("--init-from")
                .arg(folder.path())
                .stdout(Stdio::null())
                .stderr(Stdio::piped()));
            assert_eq!(code, Some(2), "{said}");
            let refused = format!("error: {flag}: {} is read by {of}; valid: ", path.display());
            assert!(said.starts_with(&refused), "{said}");
        }
    }
}

/// What a run says of its flags: each with a part of what it says, and its exit code.
#[test]
fn flags_that_cannot_be_meant_are_named() {
    let folder = Folder::new("flags");
    let data = many_tokens(folder.path());
    let (missing, no_index) = (folder.file("x.bin"), folder.file("y.bin"));
    std::fs::write(&no_index, [0; 100]).unwrap();
    let place = folder.path();
    let [data, missing, no_index, place] =
        [&data, &missing, &no_index, place].map(|path| path.display().to_string());
    let cases: [(&[&str], i32, String); 11] = [
        (&["--lr", "-1"], 2, "--lr: it cannot be -1; valid: 0 or more".to_owned()),
        (&["--clip", "-1"], 2, "--clip: it cannot be -1; valid: above 0, or 0 for none".to_owned()),
        (&["--steps", "-3"], 2, "'-3' for '--steps <STEPS>': valid: a whole number".to_owned()),
        (
            &["--cuda-graphs", "always"],
            2,
            "--cuda-graphs: it cannot be always; valid: auto".to_owned(),
        ),
        (&["--data", &missing], 2, format!("--data: {missing}: No such file")),
        (&["--data", &no_index], 2, format!("--data: {}: No such file", missing_index(&no_index))),
        (&["--data", &place], 2, format!("--data: {place}: it is a directory; valid: ")),
        (&["--init-from", "/nonexistent"], 2, "--init-from: /nonexistent: No such".to_owned()),
        (&["--lr-warmup", "2"], 0, "note: --lr-warmup 2 is more than --steps 1".to_owned()),
        (&["--steps", "80"], 0, format!("note: one pass over {data} has 78.0 steps (624 samples")),
        (&["--steps", "1"], 0, String::new()),
    ];
    for (flags, expected, says) in cases {
        let mut command = trainer_runs::trainer();
        command.args(["--threads", "4"]).stdout(Stdio::null()).stderr(Stdio::piped());
        for (flag, value) in [("--steps", "1"), ("--data", &data)] {
            if !flags.contains(&flag) {
                command.args([flag, value]);
            }
        }
        let (code, said) = run(command.args(flags));
        assert_eq!(code, Some(expected), "{flags:?}: {said}");
        assert!(said.contains(&says), "{flags:?}: {said}");
        assert!(!says.is_empty() || !said.contains("note: "), "{said}");
    }
}

fn missing_index(bin: &str) -> String {
    bin.replace(".bin", ".idx")
}

#[test]
fn a_second_run_does_not_write_into_the_files_of_the_first() {
    let folder = Folder::new("second");
    let (metrics, weights, data) = (folder.file("m"), folder.file("w"), many_tokens(folder.path()));
    let mut first = trainer(&[], &data, 400);
    first.arg("--metrics").arg(&metrics).arg("--dump-weights").arg(&weights);
    let first = first.spawn().unwrap();
    wait_until("line of metrics", || count_lines(&metrics) > 0);
    for (flag, path) in [("--metrics", &metrics), ("--dump-weights", &weights)] {
        let (code, said) = run(trainer(&[], &data, 400).arg(flag).arg(path));
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(flag) && said.contains("another run"), "{said}");
        assert_eq!(said.matches("valid: ").count(), 1, "{said}");
    }
    assert!(count_lines(&metrics) < 400, "the first run had ended");
    let (code, said) = ended(first);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(json_lines(&metrics).len(), 400);
}

#[test]
fn a_run_that_is_started_again_adds_to_the_metrics() {
    let folder = Folder::new("again");
    let metrics = folder.file("m");
    // As a killed run may leave it.
    std::fs::write(&metrics, "{\"step\":0}\n{\"st").unwrap();
    for _ in 0..2 {
        let (code, said) = run(trainer(&[], &golden_tokens(), 2).arg("--metrics").arg(&metrics));
        assert_eq!(code, Some(0), "{said}");
    }
    let text = std::fs::read_to_string(&metrics).unwrap();
    let found: Vec<&str> = text.lines().map(|line| &line[..line.len().min(9)]).collect();
    assert_eq!(
        found,
        ["{\"step\":0", "{\"st", "{\"step\":0", "{\"step\":1", "{\"step\":0", "{\"step\":1"]
    );
}

/// Weights of a model with another layer would train a model without it.
#[test]
fn tensors_that_no_rank_holds_are_named() {
    let folder = Folder::new("unused");
    let golden = TensorFile::open(&golden_data().join("model.safetensors")).unwrap();
    let names = golden.names().into_iter();
    let mut tensors: Tensors<f32> =
        names.map(|name| (name.clone(), golden.read(&name).unwrap())).collect();
    let from = |tensors: &Tensors<f32>| {
        let path = folder.file("model.safetensors");
        checkpoint::write(&mut File::create(&path).unwrap(), tensors).unwrap();
        let mut command = trainer_runs::trainer();
        command.envs([("TP", "2"), ("PP", "2")]).args(["--threads", "4", "--steps", "1"]);
        command.arg("--init-from").arg(path).arg("--data").arg(golden_tokens());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        run(&mut command)
    };
    let (code, said) = from(&tensors);
    assert!(code == Some(0) && !said.contains("does not have"), "{said}");
    tensors.insert("model.layers.99.norm.weight".to_owned(), (vec![2], vec![1.0; 2]));
    let (code, said) = from(&tensors);
    let note = "note: --init-from: tensors that this model does not have: model.layers.99.norm";
    assert!(code == Some(0) && said.contains(note), "{said}");
}

#[test]
fn a_step_that_predicts_nothing_ends_the_run() {
    let folder = Folder::new("nothing");
    let data = write_indexed(folder.path(), (0..4096).map(|_| 7));
    let mut command = trainer(&[("PP", "2"), ("DP", "2")], &data, 2);
    let (code, said) = run(command.args(["--document-end", "7"]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("step 1: no token predicts another"), "{said}");
    assert_eq!(said.matches("error: ").count(), 1, "{said}");
}

/// Golden tokens with one outside the vocabulary, in step 2 and the last sequence.
fn spoiled_tokens(folder: &Folder) -> PathBuf {
    let path = folder.file("spoiled.safetensors");
    std::fs::copy(golden_tokens(), &path).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    // `tokens`, [20, 8, 33], is the last tensor of the file.
    let (tokens, spoiled) = (20 * 8 * 33, (2 * 8 + 7) * 33 + 5);
    let begin = file.metadata().unwrap().len() - 8 * tokens;
    file.write_all_at(&99_999_i64.to_le_bytes(), begin + 8 * spoiled).unwrap();
    path
}

/// The weights after `steps` steps of an undisturbed run.
fn weights_behind(folder: &Folder, steps: u64, split: &[(&str, &str)], more: &[&str]) -> Vec<u8> {
    let path = folder.file("reference");
    let mut command = trainer(split, &golden_tokens(), steps);
    let (code, said) = run(command.args(more).arg("--dump-weights").arg(&path));
    assert_eq!(code, Some(0), "{said}");
    std::fs::read(path).unwrap()
}

#[test]
fn weights_before_a_bad_token_are_written() {
    let folder = Folder::new("token");
    let (data, weights) = (spoiled_tokens(&folder), folder.file("w"));
    // The token is in the second replica: all ranks must end after the same step.
    let split = [("TP", "2"), ("PP", "2"), ("DP", "2")];
    let (code, said) = run(trainer(&split, &data, 20).arg("--dump-weights").arg(&weights));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("the weights after step 2 are in"), "{said}");
    assert!(
        said.contains("spoiled.safetensors: tokens[2, 7, 5] is 99999; valid: 0 to 514"),
        "{said}"
    );
    assert!(std::fs::read(&weights).unwrap() == weights_behind(&folder, 2, &split, &[]));
}

#[test]
fn weights_before_a_bad_token_are_written_by_processes() {
    let folder = Folder::new("token-tcp");
    let (data, weights, split) = (spoiled_tokens(&folder), folder.file("w"), [("TP", "2")]);
    let start = |rank| {
        let mut command = trainer(&split, &data, 20);
        as_rank(&mut command, &folder, rank).arg("--dump-weights").arg(&weights).spawn().unwrap()
    };
    for child in [start(0), start(1)] {
        let (code, said) = ended(child);
        assert_eq!(code, Some(2), "{said}");
        assert!(
            said.contains("spoiled.safetensors: tokens[2, 7, 5] is 99999; valid: 0 to 514"),
            "{said}"
        );
    }
    assert!(std::fs::read(&weights).unwrap() == weights_behind(&folder, 2, &split, &[]));
}

#[test]
fn weights_before_a_loss_that_is_no_number_are_written() {
    let folder = Folder::new("nan");
    let (weights, wild) = (folder.file("w"), ["--lr", "1e30"]);
    for ahead in [None, Some(("POST_VALIDATION", "1"))] {
        let split: Vec<_> = [("TP", "2"), ("PP", "2")].into_iter().chain(ahead).collect();
        let mut command = trainer(&split, &golden_tokens(), 20);
        let (code, said) = run(command.args(wild).arg("--dump-weights").arg(&weights));
        assert_eq!(code, Some(1), "{said}");
        let stops = "step 2 of 20: the ";
        assert!(said.contains(stops) && said.contains("stops before this step"), "{said}");
        assert!(said.contains("the weights after step 1 are in"), "{said}");
        let reference = weights_behind(&folder, 1, &split, &wild);
        assert!(std::fs::read(&weights).unwrap() == reference, "{ahead:?}");
    }
}

/// Kills the second of two processes; returns what the first prints in the end.
fn without_the_second(folder: &Folder, split: &[(&str, &str)], data: &Path) -> String {
    let start = |rank| {
        let mut command = trainer(split, data, 100_000);
        command.arg("--metrics").arg(folder.file("m"));
        command.arg("--dump-weights").arg(folder.file("w"));
        as_rank(&mut command, folder, rank).spawn().unwrap()
    };
    let (first, mut second) = (start(0), start(1));
    wait_until("fifth line of metrics", || count_lines(&folder.file("m")) >= 5);
    second.kill().unwrap();
    second.wait().unwrap();
    let (code, said) = ended(first);
    assert_eq!(code, Some(1), "{said}");
    said
}

#[test]
fn a_replica_that_is_lost_leaves_the_weights_of_the_other() {
    let folder = Folder::new("replica");
    let (data, split) = (many_tokens(folder.path()), [("DP", "2")]);
    let said = without_the_second(&folder, &split, &data);
    let step = said.split("the weights after step ").nth(1).expect(&said);
    let step: u64 = step.split(' ').next().unwrap().parse().unwrap();
    let path = folder.file("reference");
    let (code, said) = run(trainer(&split, &data, step).arg("--dump-weights").arg(&path));
    assert_eq!(code, Some(0), "{said}");
    assert!(std::fs::read(path).unwrap() == std::fs::read(folder.file("w")).unwrap());
}

#[test]
fn weights_that_a_lost_rank_holds_are_missed_by_name() {
    let folder = Folder::new("half");
    let said = without_the_second(&folder, &[("TP", "2")], &many_tokens(folder.path()));
    assert!(said.contains("is not written: the weights of step"), "{said}");
    assert!(said.contains("split over 2 ranks"), "{said}");
    assert!(!folder.file("w").exists());
    assert!(!folder.file(".w.unfinished").exists());
}

#[test]
fn a_first_sigterm_ends_a_run_that_has_not_begun() {
    let folder = Folder::new("sigterm");
    let mut command = trainer(&[("TP", "2")], &golden_tokens(), 20);
    let child = as_rank(&mut command, &folder, 0).spawn().unwrap();
    // It waits for the other process, which does not come.
    wait_until("meeting", || folder.file("meeting").exists());
    let begun = Instant::now();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let (code, said) = ended(child);
    assert_eq!(code, Some(130), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn a_first_sigterm_ends_a_run_that_is_stuck() {
    let folder = Folder::new("stuck");
    let pipe = folder.file("pipe");
    mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut command = trainer(&[], &many_tokens(folder.path()), 100_000);
    command.arg("--metrics").arg(&pipe).args(["--time-limit-s", "1"]);
    command.arg("--dump-weights").arg(folder.file("w"));
    let child = command.spawn().unwrap();
    // Nobody reads any further: the pipe holds some hundred lines.
    let reader = File::open(&pipe).unwrap();
    let mut line = String::new();
    BufReader::with_capacity(1, &reader).read_line(&mut line).unwrap();
    let mut before = String::new();
    wait_until("standstill", || {
        std::thread::sleep(Duration::from_millis(300));
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let spent = stat.split(' ').skip(13).take(2).collect::<Vec<_>>().join(" ");
        std::mem::replace(&mut before, spent.clone()) == spent
    });
    let begun = Instant::now();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let (code, said) = ended(child);
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("the step has not ended within 1 s"), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(!folder.file(".w.unfinished").exists());
}

#[test]
fn a_first_sigterm_ends_a_run_behind_its_step() {
    let folder = Folder::new("sigterm-later");
    let (metrics, weights) = (folder.file("m"), folder.file("w"));
    let mut command = trainer(&[("TP", "2")], &many_tokens(folder.path()), 100_000);
    command.arg("--metrics").arg(&metrics).arg("--dump-weights").arg(&weights);
    let child = command.spawn().unwrap();
    wait_until("line of metrics", || count_lines(&metrics) > 0);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let (code, said) = ended(child);
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("what was asked for is written"), "{said}");
    assert!(TensorFile::open(&weights).is_ok());
}

/// `timeout` signals its child, and then the child's process group.
#[test]
fn signals_at_once_are_one_request() {
    let folder = Folder::new("sigterm-twice");
    let (metrics, weights) = (folder.file("m"), folder.file("w"));
    let mut command = trainer(&[("TP", "2")], &many_tokens(folder.path()), 100_000);
    command.arg("--metrics").arg(&metrics).arg("--dump-weights").arg(&weights);
    let child = command.spawn().unwrap();
    wait_until("line of metrics", || count_lines(&metrics) > 0);
    for _ in 0..3 {
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let (code, said) = ended(child);
    assert_eq!(code, Some(130), "{said}");
    assert!(!said.contains("interrupted again"), "{said}");
    assert!(TensorFile::open(&weights).is_ok());
}

#[test]
fn two_outputs_in_one_file_are_refused() {
    let folder = Folder::new("one-file");
    let file = folder.file("both");
    for [first, second] in
        [["--metrics", "--dump-weights"], ["--dump-gradients", "--trace"], ["--trace", "--metrics"]]
    {
        let mut command = trainer(&[], &golden_tokens(), 2);
        command.arg(first).arg(&file).arg(second).arg(folder.path().join(".").join("both"));
        let (code, said) = run(&mut command);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("both is written by --"), "{said}");
        assert!(!file.exists(), "{said}");
    }
}

/// Lines about steps.
fn about_steps(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("step ")).collect()
}

#[test]
fn a_run_says_how_it_goes_beside_its_plan() {
    let folder = Folder::new("says");
    let (metrics, weights) = (folder.file("m"), folder.file("w"));
    let mut command = trainer(&[("TP", "2"), ("PREDICTED", "1")], &golden_tokens(), 5);
    command.arg("--metrics").arg(&metrics).arg("--dump-weights").arg(&weights);
    let (code, said) = run(&mut command);
    assert_eq!(code, Some(0), "{said}");
    // A slow machine may take ten seconds for a step.
    let steps = about_steps(&said);
    assert!((2..=5).contains(&steps.len()), "{said}");
    assert!(steps[0].starts_with("step 1 of 5  loss 6."), "{said}");
    assert!(steps.last().unwrap().starts_with("step 5 of 5  loss 6."), "{said}");
    for part in [" tokens/s  ", " a step (planned 1.25 s)"] {
        assert!(steps.iter().all(|line| line.contains(part)), "{said}");
    }
    let summary: Vec<&str> =
        said.lines().skip_while(|line| !line.starts_with("5 steps, ")).collect();
    assert_eq!(summary.len(), 6, "{said}");
    let row = |n: usize| summary[n].split_whitespace().collect::<Vec<_>>();
    assert_eq!(
        row(1)[2..],
        ["compute", "tp", "cp", "ep", "pp", "dp", "optimizer", "other", "total"]
    );
    let planned = "planned 1.00 s 100 ms 0.00 ms 0.00 ms 50.0 ms 40.0 ms 50.0 ms 10.0 ms 1.25 s";
    assert_eq!(row(3).join(" "), planned);
    assert_eq!((row(2)[0], row(2).len()), ("measured", row(3).len()), "{said}");
    assert!(summary[1..4].iter().all(|line| line.len() == summary[1].len()), "{said}");
    assert!(summary[4].starts_with("memory    at most "), "{said}");
    assert!(summary[4].contains(" of 64.00 MiB planned in tensors of a rank; "), "{said}");
    let (metrics_path, weights_path) = (metrics.display(), weights.display());
    let wrote = format!("wrote     {metrics_path} (--metrics), {weights_path} (--dump-weights)");
    assert_eq!(summary[5], wrote);
    for line in json_lines(&metrics) {
        assert!((line["predicted_step_s"].as_f64().unwrap() - 1.25).abs() < 1e-9, "{line}");
        assert_eq!(line["planned_memory_bytes"].as_u64(), Some(64 << 20));
    }
}

#[test]
fn of_several_processes_one_says_how_it_goes() {
    let folder = Folder::new("one-says");
    let start = |rank| {
        let mut command = trainer(&[("TP", "2")], &golden_tokens(), 3);
        as_rank(&mut command, &folder, rank).spawn().unwrap()
    };
    let [first, second] = [start(0), start(1)].map(ended);
    assert_eq!((first.0, second), (Some(0), (Some(0), String::new())));
    assert!(about_steps(&first.1).len() >= 2, "{}", first.1);
    // Without a plan nothing is said of one.
    assert!(first.1.contains("\n3 steps, ") && !first.1.contains("planned"), "{}", first.1);
}
