//! Golden cases (`tests/golden`), as split by the planner.

use models::plan::Plan;
use planner::answer::report::plan as make_plan;
use planner::request::Request;
use planner::request::flags::Flags;
use planner::search::search;
use std::path::PathBuf;

/// Folder of a case.
pub fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(case)
}

/// Whether a case has weights; without, training begins with those of a seed.
pub fn has_weights(case: &str) -> bool {
    folder(case).join("model.safetensors").exists()
}

/// Folder of a case's weights and tokens, which may be another's.
pub fn inputs(case: &str) -> PathBuf {
    match case {
        "deepseek_v3_bias" => folder("deepseek_v3"),
        _ => folder(case),
    }
}

/// A case's model: Hugging Face's file, or our own.
fn model(case: &str) -> PathBuf {
    let files = ["config.json", "model.yaml"].map(|file| folder(case).join(file));
    files.into_iter().find(|file| file.exists()).expect("every case has a model")
}

/// The fastest plan of a case for a laptop's CPU, with these settings pinned.
///
/// # Panics
/// If the request is invalid, or nothing fits.
pub fn planned(case: &str, gpus: u64, settings: &[&str]) -> Plan {
    planned_on("laptop", case, gpus, 8, settings)
}

/// The same on another cluster, or with another global batch.
///
/// # Panics
/// As [`planned`].
pub fn planned_on(
    cluster: &str,
    case: &str,
    gpus: u64,
    global_batch: u64,
    settings: &[&str],
) -> Plan {
    let request = Request::new(&Flags {
        model: model(case).display().to_string(),
        cluster: Some(cluster.to_owned()),
        gpus,
        global_batch: Some(global_batch),
        seq_len: Some(32),
        headroom: None,
        tokens: None,
        expert_imbalance: None,
        runnable: false,
        settings: settings.iter().map(|&setting| setting.to_owned()).collect(),
    })
    .expect("the request is valid");
    let outcome = search(&request.task(), &mut |_| {});
    let best = outcome.best.unwrap_or_else(|| panic!("{case} with {settings:?}: nothing fits"));
    make_plan(&request, &best, &outcome.proof)
}
