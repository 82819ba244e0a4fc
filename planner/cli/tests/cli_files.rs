//! Files that a user has changed: trainers, plans, and clusters that kept their name.

mod cli_common;

use cli_common::{plan, scratch};
use std::fs;
use std::path::{Path, PathBuf};

const SMALL: &str = "--model tiny --cluster laptop --gpus 2 --set pp=2 --set schedule=1f1b";

/// A plan file of a small request.
fn small(name: &str, more: &str) -> PathBuf {
    let file = scratch(name);
    assert_eq!(plan(&format!("{SMALL} {more} -o {}", file.display())).code, 0);
    file
}

fn append(path: &Path, text: &str) {
    let before = fs::read_to_string(path).unwrap();
    fs::write(path, before + text).unwrap();
}

#[test]
fn a_changed_trainer_is_not_overwritten() {
    let (file, other) = (small("keep.yaml", ""), small("keep2.yaml", "--set micro_batch=2"));
    let folder = scratch("keep-trainer");
    let _ = fs::remove_dir_all(&folder);
    let generate = |file: &Path, more: &str| {
        plan(&format!("generate {} -o {} {more}", file.display(), folder.display()))
    };
    assert_eq!(generate(&file, "").code, 0);
    // Unchanged, it is replaced: by the same, and by another plan's.
    assert_eq!(generate(&file, "").code, 0);
    assert_eq!(generate(&other, "").code, 0);
    // Cargo itself writes this one.
    append(&folder.join("Cargo.lock"), "# by cargo\n");
    assert_eq!(generate(&file, "").code, 0);
    let main = folder.join("src/main.rs");
    append(&main, "// mine\n");
    for plan in [&file, &other] {
        let refused = generate(plan, "");
        assert_eq!(refused.code, 2, "{refused:?}");
        for part in ["src/main.rs would be replaced", "another folder", "--overwrite"] {
            assert!(refused.err.contains(part), "{refused:?}");
        }
        assert!(!refused.err.contains("passes.rs"), "{refused:?}");
    }
    assert!(fs::read_to_string(&main).unwrap().ends_with("// mine\n"));
    assert_eq!(generate(&other, "--overwrite").code, 0);
    assert!(!fs::read_to_string(&main).unwrap().contains("// mine"));
}

/// Stages of two ranks, then the one of a single rank.
#[test]
fn files_of_the_trainer_before_are_removed() {
    let (two, one) = (small("two.yaml", ""), scratch("one.yaml"));
    let words = "--model tiny --cluster laptop --gpus 1";
    assert_eq!(plan(&format!("{words} -o {}", one.display())).code, 0);
    let folder = scratch("fewer-files");
    let generate = |file: &Path, more: &str| {
        plan(&format!("generate {} -o {} {more}", file.display(), folder.display()))
    };
    let has = |name: &str| folder.join("src").join(name).exists();
    for more in ["", "--overwrite"] {
        assert_eq!(generate(&two, more).code, 0);
        assert!(has("first.rs") && has("last.rs") && !has("only.rs"));
        fs::write(folder.join("src/mine.rs"), "").unwrap();
        assert_eq!(generate(&one, more).code, 0);
        assert!(has("only.rs") && has("mine.rs") && !has("first.rs") && !has("last.rs"));
    }
    assert_eq!(generate(&two, "").code, 0);
    append(&folder.join("src/last.rs"), "// mine\n");
    let refused = generate(&one, "");
    assert!(refused.code == 2 && refused.err.contains("src/last.rs would be"), "{refused:?}");
    assert!(has("first.rs") && has("last.rs"));
}

/// A cluster file that kept the name of the shipped one it was made from.
#[test]
fn a_plan_of_another_cluster_of_its_name_is_noticed() {
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/shipped/clusters/laptop.yaml");
    let text = fs::read_to_string(shipped).unwrap();
    let slower = text.replace("bytes_per_s: 5e9", "bytes_per_s: 1e7");
    assert_ne!(text, slower);
    let cluster = scratch("slower.yaml");
    fs::write(&cluster, slower).unwrap();
    let file = scratch("on-slower.yaml");
    let (own, path) = (format!("--cluster {}", cluster.display()), file.display().to_string());
    let words = SMALL.replace("--cluster laptop", &own);
    assert_eq!(plan(&format!("{words} -o {path}")).code, 0);
    for words in [format!("explain {path}"), format!("--from {path}")] {
        let (with, without) = (plan(&format!("{words} {own}")), plan(&words));
        assert_eq!([with.code, without.code], [0, 0], "{without:?}");
        assert!(!with.err.contains("note:"), "{with:?}");
        for part in ["note:", "on `laptop`", "--cluster FILE"] {
            assert!(without.err.contains(part), "{without:?}");
        }
    }
    // What is explained is not faster than itself.
    let explained = plan(&format!("explain {path}")).out;
    assert!(!explained.contains("less than this plan"), "{explained}");
    let checked = plan(&format!("check {path}"));
    assert!(checked.code == 2 && checked.out.contains("--cluster FILE"), "{checked:?}");
}

/// Of figures that contradict one another those are wrong that do not follow from the decisions.
#[test]
fn a_check_names_the_wrong_figure_and_no_right_one() {
    let file = small("figure.yaml", "");
    let text = fs::read_to_string(&file).unwrap();
    let line = text.lines().find(|line| line.trim_start().starts_with("iteration_s:")).unwrap();
    let right = line.trim().strip_prefix("iteration_s: ").unwrap();
    fs::write(&file, text.replacen(line, "  iteration_s: 1000.0", 1)).unwrap();
    let checked = plan(&format!("check {}", file.display()));
    assert_eq!(checked.code, 2);
    let valid = format!("predicted.iteration_s cannot be 1000.0; valid: {right}");
    assert!(checked.out.contains(&valid), "{checked:?}");
    assert!(!checked.out.contains("tokens_per_s"), "{checked:?}");
}

#[test]
fn a_check_says_that_a_plan_is_runnable() {
    let file = small("runs.yaml", "");
    let said = |flag: &str| plan(&format!("check {} {flag}", file.display())).out;
    assert!(said("--runnable").contains("the trainer can run it"));
    assert!(!said("").contains("the trainer can run it"));
}

#[test]
fn formats_that_a_device_lacks_are_refused() {
    for (cluster, dtype, valid) in [
        ("dgx_h100", "nvfp4", "bf16, fp16, fp8, f32, f64"),
        ("dgx_h100", "bf16,mxfp8", "bf16, fp16, fp8, f32, f64"),
        ("selene", "fp8", "bf16, fp16, f32, f64"),
    ] {
        let words = format!("--model llama8b --gpus 8 --cluster {cluster} --set dtype={dtype}");
        let refused = plan(&words);
        assert!(refused.code == 2 && refused.err.contains(valid), "{refused:?}");
    }
    // Wider formats are emulated.
    let emulated = plan(&format!("{SMALL} --set dtype=bf16"));
    assert_eq!(emulated.code, 0, "{emulated:?}");
}

/// As many alternatives as were asked for, or why there are fewer.
#[test]
fn alternatives_are_counted() {
    let close = |more: &str| {
        let run = plan(&format!("--model llama8b --gpus 8 {more}"));
        let lines: Vec<String> = run.out.lines().map(str::to_owned).collect();
        let first = lines.iter().position(|line| line.starts_with("others ")).unwrap();
        let block = lines[first..].iter().take_while(|line| !line.is_empty());
        block.filter(|line| !line.starts_with("limit")).cloned().collect::<Vec<_>>()
    };
    let three = close("--top 3");
    assert!(three.len() == 3 && three.iter().all(|line| line.contains(" %")), "{three:?}");
    let pinned = close("--set tp=1 --set pp=1 --set schedule=1f1b --top 2");
    assert!(pinned.len() == 1 && pinned[0].contains("no others"), "{pinned:?}");
}
