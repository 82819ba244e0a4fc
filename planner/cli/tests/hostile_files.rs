//! Untrusted files: what `-o` may overwrite, and what is read.

#![cfg(unix)]

mod cli_common;

use cli_common::{Run, file, plan, plan_with, run_plan, scratch};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const MODEL: &str =
    "layers: 4\nhidden: 64\nheads: 8\nffn: 96\nvocab: 100\nseq_len: 32\nglobal_batch: 8\n";

fn folder(name: &str) -> PathBuf {
    let folder = scratch(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn with_path(words: &str, path: &Path) -> Run {
    let words = words.split_whitespace().map(OsString::from);
    let begun = Instant::now();
    let run = run_plan(words.chain([path.as_os_str().to_owned()]), &[]);
    assert!(begun.elapsed() < Duration::from_secs(60), "{path:?}: it waited");
    run
}

fn planned(path: &Path) -> Run {
    with_path("--model tiny --cluster laptop --gpus 2 --set tp=2 -o", path)
}

fn refused(run: &Run, says: &str) {
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.err.contains(says) && run.err.contains("help: "), "no `{says}` in {run:?}");
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Files in a folder, with hidden ones.
fn entries(folder: &Path) -> Vec<OsString> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

#[test]
fn a_plan_replaces_plans_alone() {
    let folder = folder("plans");
    let shipped = models::cluster::shipped_source("laptop").unwrap().unwrap();
    for (name, content) in [
        ("weights.bin", vec![0xff, 0xfe, 0x00, 0x80]),
        ("docker-compose.yaml", b"version: 1\nservices:\n  db: {image: postgres}\n".to_vec()),
        ("tooled.yaml", b"version: 1\ntool: meshwright 0.1.0\nservices: {}\n".to_vec()),
        (
            "other-tool.yaml",
            b"version: 1\ntool: x\ninputs: {}\ndecisions: {}\nstages: []\n".to_vec(),
        ),
        ("model.yaml", MODEL.as_bytes().to_vec()),
        ("cluster.yaml", shipped.text().as_bytes().to_vec()),
        ("notes.txt", b"# version: 1\nversion: my precious notes\n".to_vec()),
        ("table.csv", b"version:,a\n1,2\n".to_vec()),
        ("large.yaml", vec![b'#'; (16 << 20) + 1]),
    ] {
        let path = folder.join(name);
        fs::write(&path, &content).unwrap();
        refused(&planned(&path), &format!("{name} exists and is no plan"));
        assert_eq!(fs::read(&path).unwrap(), content, "{name}");
        fs::remove_file(path).unwrap();
    }
    let path = folder.join("plan.yaml");
    fs::write(&path, "").unwrap();
    for _ in 0..2 {
        assert_eq!(planned(&path).code, 0);
    }
    assert_eq!(entries(&folder), ["plan.yaml"], "something else was left");
}

#[test]
fn links_and_devices_are_not_written_to() {
    let folder = folder("links");
    let (real, link, dangling) =
        (folder.join("real.yaml"), folder.join("link"), folder.join("dangling"));
    assert_eq!(planned(&real).code, 0);
    let before = fs::read(&real).unwrap();
    symlink(&real, &link).unwrap();
    symlink(folder.join("nowhere"), &dangling).unwrap();
    fifo(&folder.join("pipe"));
    fs::create_dir(folder.join("folder")).unwrap();
    for (name, says) in [
        ("link", "is a symbolic link"),
        ("dangling", "is a symbolic link"),
        ("pipe", "is a pipe"),
        ("folder", "is a directory"),
        ("/dev/zero", "is a device"),
        ("/dev/full", "is a device"),
        ("/dev/null", "is a device"),
        ("none/plan.yaml", "there is no folder"),
    ] {
        refused(&planned(&folder.join(name)), says);
        let calibrate = with_path("calibrate --cluster laptop -o", &folder.join(name));
        refused(&calibrate, says);
    }
    assert_eq!(fs::read(&real).unwrap(), before);
    assert!(!folder.join("nowhere").exists());
}

#[test]
fn calibration_replaces_its_own_clusters_alone() {
    let shipped = models::cluster::shipped_source("laptop").unwrap().unwrap();
    for (name, content) in [("mine.yaml", shipped.text()), ("Cargo.toml", "[package]\n")] {
        let path = file(name, content.as_bytes());
        refused(
            &with_path("calibrate --cluster laptop -o", Path::new(&path)),
            "exists and is no cluster",
        );
        let steps = "calibrate --gpu --cluster dgx_h200 --measured none.json --steps";
        refused(&with_path(steps, Path::new(&path)), "exists and is no list of steps");
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }
}

#[test]
fn a_trainer_replaces_trainers_alone() {
    let folder = folder("trainers");
    let path = folder.join("plan.yaml");
    assert_eq!(planned(&path).code, 0);
    let generate = |to: &Path| with_path(&format!("generate {} -o", path.display()), to);
    let own = folder.join("own");
    fs::create_dir_all(own.join("src")).unwrap();
    for (name, content) in [
        ("Cargo.toml", "# Written by me from plan 9.\n[package]\nname = \"own\"\n"),
        ("src/main.rs", "fn main() { /* my precious work */ }\n"),
    ] {
        fs::write(own.join(name), content).unwrap();
        refused(&generate(&own), "has files that `plan generate` did not make");
        assert_eq!(fs::read_to_string(own.join(name)).unwrap(), content);
    }
    assert_eq!(entries(&own), ["Cargo.toml", "src"]);

    let (new, empty) = (folder.join("new"), folder.join("empty"));
    fs::create_dir(&empty).unwrap();
    for to in [&new, &empty, &new] {
        assert_eq!(generate(to).code, 0);
    }
    assert!(entries(&new).iter().all(|name| !name.to_string_lossy().contains("tmp")));

    let link = folder.join("link");
    symlink(&new, &link).unwrap();
    refused(&generate(&link), "is a symbolic link");
    refused(&generate(&path), "no folder");
    refused(&generate(Path::new("/dev/null")), "is a device");

    // Links that somebody put into a trainer's folder are not followed.
    for name in ["src/main.rs", "src", "README.md", "launch", "Cargo.toml"] {
        let trainer = folder.join(format!("linked-{}", name.replace('/', "-")));
        assert_eq!(generate(&trainer).code, 0);
        let (at, victim) =
            (trainer.join(name), folder.join(format!("victim-{}", name.replace('/', "-"))));
        fs::rename(&at, &victim).unwrap();
        symlink(&victim, &at).unwrap();
        let inside = if victim.is_dir() { entries(&victim) } else { vec![] };
        let says = if name == "Cargo.toml" { "did not make" } else { "is a symbolic link" };
        refused(&generate(&trainer), says);
        assert!(at.is_symlink() && (inside.is_empty() || entries(&victim) == inside), "{name}");
    }
}

#[test]
fn pipes_and_devices_are_not_waited_for() {
    let folder = folder("pipes");
    let pipe = folder.join("pipe");
    fifo(&pipe);
    for words in [
        "--cluster laptop --gpus 1 --model",
        "--model tiny --gpus 1 --cluster",
        "check",
        "diff nowhere.yaml",
        "explain",
        "generate -o trainer",
        "validate --measured",
        "calibrate --gpu --cluster dgx_h200 --measured",
    ] {
        // The first of the two plans is read first.
        if words != "diff nowhere.yaml" {
            refused(&with_path(words, &pipe), "is a pipe, no regular file");
        }
        let zero = with_path(words, Path::new("/dev/zero"));
        assert!(zero.code == 2 && zero.err.contains("error: "), "{words}: {zero:?}");
    }
}

/// Open pipes and standard input are read, and no more of them than of a file.
#[test]
fn open_pipes_are_read() {
    let words = "estimate --cluster laptop --gpus 1 --set tp=1 --model";
    for from in ["-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"] {
        let named = format!("name: piped\n{MODEL}");
        let run = plan_with(&format!("{words} {from}"), named.as_bytes());
        assert!(run.code == 0 && run.out.contains("piped"), "{from}: {run:?}");
        let run = plan_with(&format!("{words} {from}"), &vec![b'#'; 17 << 20]);
        assert!(run.code == 2 && run.err.contains("larger than 16 MiB"), "{from}: {run:?}");
    }
    let model = file("model.yaml", format!("name: substituted\n{MODEL}").as_bytes());
    let program = env!("CARGO_BIN_EXE_plan");
    let script = format!("{program} {words} <(cat {model})");
    let run = Command::new("bash").args(["-c", &script]).output().unwrap();
    let out = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && out.contains("substituted"), "{out}");
    assert_eq!(plan(&format!("{words} /dev/null")).code, 2);
}

#[test]
fn what_a_model_file_asks_for_in_vain_is_said() {
    let path = file(
        "config.json",
        b"{\"model_type\": \"llama\", \"hidden_size\": 64, \"num_attention_heads\": 8, \"num_hidden_layers\": 4,\n\
          \"intermediate_size\": 128, \"vocab_size\": 100, \"max_position_embeddings\": 64,\n\
          \"router_jitter_noise\": 0.5, \"mystery\": 1, \"use_cache\": true}",
    );
    let to = scratch("plan.yaml");
    let words =
        format!("--cluster laptop --gpus 1 --global-batch 4 --model {path} -o {}", to.display());
    let run = plan(&words);
    assert_eq!(run.code, 0, "{run:?}");
    for says in ["warning: ", "`mystery` (line 3)", "router_jitter_noise"] {
        assert!(run.err.contains(says), "no `{says}` in {run:?}");
    }
    assert!(!run.err.contains("use_cache"), "{run:?}");
    let trainer = to.with_file_name("trainer");
    refused(&with_path(&format!("generate {} -o", to.display()), &trainer), "router_jitter_noise");
}

/// A cluster whose figures are possible one by one, and exceed its peak together.
#[test]
fn no_prediction_is_beyond_the_peak() {
    let laptop = models::cluster::shipped_source("laptop").unwrap().unwrap();
    let text = laptop.text().replacen(
        "base: meshwright_cpu",
        "base: meshwright_cpu, gemm_slowdown: 0.1, attention_slowdown: 0.1, stream_slowdown: 0.1",
        1,
    );
    assert_ne!(text, laptop.text());
    let path = file("fast.yaml", text.as_bytes());
    for words in ["", "estimate"] {
        let run = plan(&format!(
            "{words} --model llama8b --gpus 1 --set offload=none --set micro_batch=1 --cluster {path}"
        ));
        assert!(run.code != 0, "{run:?}");
        if words == "estimate" {
            refused(&run, "% of its peak");
        }
    }
}
