//! `plan models` and `plan clusters`.

use crate::args::ListArgs;
use crate::failure::Failure;
use crate::output;
use models::cluster::{self, ClusterSpec};
use models::input::InputError;
use models::model::{self, ModelSpec, params};
use planner::answer::text::{bytes, count, thousands};
use serde_json::{Value, json};

/// Lists the shipped models.
pub fn models(args: &ListArgs) -> Result<(), Failure> {
    let all: Result<Vec<ModelSpec>, InputError> =
        model::shipped_names().filter_map(model::shipped).collect();
    let all = all?;
    if args.json {
        return output::print_json(&all.iter().map(model_json).collect::<Vec<_>>());
    }
    output::print(&all.iter().map(model_line).collect::<String>())
}

fn model_line(model: &ModelSpec) -> String {
    let active = match &model.moe {
        Some(_) => format!("   {} active", count(params::active(model) as f64)),
        None => String::new(),
    };
    format!(
        "{:<16} {:>7}   {:>3} layers   {:>7} tokens x {:>6}{active}\n",
        model.name,
        count(params::total(model) as f64),
        model.layers,
        thousands(model.seq_len),
        thousands(model.global_batch),
    )
}

fn model_json(model: &ModelSpec) -> Value {
    json!({
        "name": model.name,
        "parameters": params::total(model),
        "active_parameters": params::active(model),
        "layers": model.layers,
        "seq_len": model.seq_len,
        "global_batch": model.global_batch,
    })
}

/// Lists the shipped clusters.
pub fn clusters(args: &ListArgs) -> Result<(), Failure> {
    let all: Result<Vec<ClusterSpec>, InputError> =
        cluster::shipped_names().filter_map(cluster::shipped).collect();
    let all = all?;
    if args.json {
        return output::print_json(&all.iter().map(cluster_json).collect::<Vec<_>>());
    }
    output::print(&all.iter().map(cluster_line).collect::<String>())
}

fn cluster_line(cluster: &ClusterSpec) -> String {
    let memory = bytes(cluster.device.hbm_bytes as u64);
    let (name, description) = (&cluster.name, &cluster.description);
    format!("{name:<14} {:>3} a node   {memory:>9}   {description}\n", cluster.node_gpus())
}

fn cluster_json(cluster: &ClusterSpec) -> Value {
    json!({
        "name": cluster.name,
        "description": cluster.description,
        "device": cluster.device.name,
        "node_gpus": cluster.node_gpus(),
        "hbm_bytes": cluster.device.hbm_bytes,
        "peak_flops": cluster.device.peak_flops,
    })
}
