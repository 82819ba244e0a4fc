//! Allowed dependencies between crates, checked with cargo's own metadata.

use meshwright_tests::sources::{files, read, root, short};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Names of the packages that each package depends on, without development dependencies.
type Graph = BTreeMap<String, BTreeSet<String>>;

const OURS: &str = "meshwright-";

fn metadata() -> Value {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let arguments = ["metadata", "--format-version", "1", "--locked", "--manifest-path", manifest];
    let output = Command::new(env!("CARGO")).args(arguments).output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo prints JSON")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn graph() -> Graph {
    let metadata = metadata();
    let packages = list(&metadata["packages"]).iter();
    let names: BTreeMap<String, String> =
        packages.map(|p| (text(&p["id"]), text(&p["name"]))).collect();
    let name = |id: &Value| names[&text(id)].clone();
    let needed =
        |dependency: &&Value| list(&dependency["dep_kinds"]).iter().any(|k| k["kind"] != "dev");
    let edges = |node: &Value| -> BTreeSet<String> {
        list(&node["deps"])
            .iter()
            .filter(needed)
            .map(|dependency| name(&dependency["pkg"]))
            .collect()
    };
    let nodes = list(&metadata["resolve"]["nodes"]).iter();
    let mut graph = Graph::new();
    for node in nodes {
        graph.entry(name(&node["id"])).or_default().extend(edges(node));
    }
    graph
}

fn ours(graph: &Graph, package: &str) -> BTreeSet<String> {
    graph[package].iter().filter(|name| name.starts_with(OURS)).cloned().collect()
}

fn names(parts: &[&str]) -> BTreeSet<String> {
    parts.iter().map(|part| format!("{OURS}{part}")).collect()
}

/// All packages that a package is built from.
fn tree(graph: &Graph, package: &str) -> BTreeSet<String> {
    let mut open = vec![package.to_owned()];
    let mut seen = BTreeSet::new();
    while let Some(name) = open.pop() {
        if seen.insert(name.clone()) {
            open.extend(graph.get(&name).into_iter().flatten().cloned());
        }
    }
    seen
}

#[test]
fn models_depends_on_nothing_of_ours() {
    assert_eq!(ours(&graph(), "meshwright-models"), BTreeSet::new());
}

#[test]
fn models_is_built_without_solvers_devices_or_networks() {
    let banned = [
        "highs", "good_lp", "microlp", "cuda", "cudarc", "nccl", "mpi", "tokio", "reqwest", "hyper",
    ];
    for name in tree(&graph(), "meshwright-models") {
        assert!(!banned.iter().any(|part| name.contains(part)), "models is built from {name}");
    }
}

#[test]
fn the_planner_depends_on_models_alone() {
    assert_eq!(ours(&graph(), "meshwright-planner"), names(&["models"]));
    assert_eq!(ours(&graph(), "meshwright-validation"), names(&["models", "planner"]));
    let program = names(&["codegen", "models", "planner", "validation"]);
    assert_eq!(ours(&graph(), "meshwright-cli"), program);
}

#[test]
fn nobody_but_the_program_and_the_tests_depends_on_the_planner() {
    let graph = graph();
    let may = names(&["cli", "tests", "validation"]);
    for package in graph.keys().filter(|name| name.starts_with(OURS) && !may.contains(*name)) {
        assert!(!graph[package].contains("meshwright-planner"), "{package} depends on the planner");
    }
}

#[test]
fn the_planner_knows_no_device() {
    for name in tree(&graph(), "meshwright-cli") {
        assert!(
            !["cuda", "nccl", "mpi"].iter().any(|part| name.contains(part)),
            "planner is built from {name}"
        );
    }
}

#[test]
fn kernels_depend_on_nothing_of_ours() {
    assert_eq!(ours(&graph(), "meshwright-kernels"), BTreeSet::new());
}

#[test]
fn the_runtime_depends_on_models_and_kernels_alone() {
    let allowed = ["meshwright-models", "meshwright-kernels"].map(str::to_owned).into();
    assert_eq!(ours(&graph(), "meshwright-runtime"), allowed);
}

#[test]
fn the_runtime_is_built_without_a_solver() {
    for name in tree(&graph(), "meshwright-runtime") {
        assert!(!["highs", "good_lp", "microlp"].contains(&name.as_str()), "built from {name}");
    }
}

/// Folders that the design plans but that do not exist yet are absent, not empty.
#[test]
fn every_member_holds_code() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for folder in ["models", "planner", "codegen", "runtime", "kernels"] {
        let folder = root.join(folder);
        assert!(
            !folder.exists() || folder.join("src/lib.rs").exists(),
            "{} is a shell",
            folder.display()
        );
    }
}

/// Elsewhere in the crate the lint denies unsafe code. These files pass pointers to matrix products
/// or call foreign libraries: the driver, cuBLASLt, cuDNN, NCCL, NVRTC, and kernels compiled as C++
/// for tests.
#[test]
fn unsafe_code_of_kernels_is_where_libraries_are_called() {
    let allowed = |path: &std::path::Path| {
        let text = std::fs::read_to_string(path).expect("sources can be read");
        text.contains("allow(unsafe_code)")
    };
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/src");
    let (mut open, mut found) = (vec![root.clone()], Vec::new());
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).expect("folders can be read").flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else if allowed(&path) {
                let path = path.strip_prefix(&root).expect("it lies in there");
                found.push(path.to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    let libraries = [
        "cuda/cpu_emulator.rs",
        "cuda/cpu_emulator/compiled.rs",
        "cuda/cpu_emulator/products.rs",
        "cuda/cublaslt.rs",
        "cuda/cudnn/mod.rs",
        "cuda/device.rs",
        "cuda/libnccl.rs",
        "cuda/nvrtc.rs",
        "matrix.rs",
    ];
    assert_eq!(found, libraries);
}

/// The runtime is a library for trainers: it knows no model and no plan.
#[test]
fn the_runtime_uses_meshes_and_passes_alone() {
    let allowed = ["mesh", "schedule"];
    let mut checked = 0;
    for path in files(&root().join("runtime/src")) {
        let text = read(&path);
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for used in line.split("models::").skip(1) {
                checked += 1;
                assert!(
                    allowed.iter().any(|module| used.trim_start_matches('{').starts_with(module)),
                    "{}: `{line}`: of `models`, the runtime uses {allowed:?} alone",
                    short(&path)
                );
            }
        }
    }
    assert!(checked > 0, "no file uses `models`: the test looks in the wrong place");
}

#[test]
fn what_turns_plans_into_trainers_depends_on_models_and_the_runtime() {
    let graph = graph();
    assert_eq!(ours(&graph, "meshwright-codegen"), names(&["models"]));
    let direct = names(&["codegen", "kernels", "models", "runtime"]);
    assert_eq!(ours(&graph, "meshwright-direct"), direct);
    let measure = names(&["direct", "kernels", "models", "runtime"]);
    assert_eq!(ours(&graph, "meshwright-measure"), measure);
}
