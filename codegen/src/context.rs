//! Values for the templates: a plan's program as plain data.

use crate::RuntimeSource;
use models::decisions::{Dtype, RankOrder};
use models::mesh::{Axis, Mesh};
use models::model::{Activation, Gelu, ModelSpec, NormKind, Positions};
use models::plan::Plan;
use models::program::{Program, Recompute};
use models::schedule::{Pass, PassKind, StageLayout};
use models::shapes::{self, Held};
use serde_json::{Value, json};

/// Passes on one line of a table.
const PASSES_A_LINE: usize = 10;
/// Ranks of a group that the README lists.
const GROUPS_SHOWN: usize = 8;

/// All values, by the names that the templates use.
pub fn context(plan: &Plan, program: &Program, hash: &str, runtime: &RuntimeSource) -> Value {
    let d = &plan.decisions;
    json!({
        // Free texts; each needs the filter of the place where it stands.
        "text": {
            "tool": plan.tool,
            "model": program.model.name,
            "package": package_name(&program.model.name),
            "runtime": match runtime {
                RuntimeSource::Path(path) => path,
                RuntimeSource::Git(url) => url,
            },
        },
        "runtime_key": match runtime {
            RuntimeSource::Path(_) => "path",
            RuntimeSource::Git(_) => "git",
        },
        "hash": hash,
        // Programs of one name may share a target directory, where cargo distinguishes them by
        // version.
        "version": format!("0.1.0+{}", hash.get(..12).unwrap_or(hash)),
        "model": model(&program.model),
        "decisions": d,
        "element": match d.dtype {
            Dtype::F64 => "f64",
            Dtype::Bf16 => "bf16",
            _ => "f32",
        },
        "world_size": program.world_size(),
        "tokens": program.global_batch() * program.seq_len(),
        "global_batch": program.global_batch(),
        "mesh": mesh(&program.mesh),
        "groups": groups(&program.mesh),
        "sequence_parallel": program.sequence_parallel,
        "micro_batch": program.micro_batch,
        "micro_batches": program.micro_batches,
        "layout": match program.layout {
            StageLayout::RoundRobin => "RoundRobin",
            StageLayout::V => "V",
            StageLayout::Bidirectional => "Bidirectional",
        },
        "layer": described(&shapes::layer(&program.model, program.mesh.tp)),
        "stages": stages(program),
        "rank_elements": shapes::rank_elements(program),
        "passes": program.passes.iter().map(|passes| pass_lines(passes)).collect::<Vec<_>>(),
        "kinds": kinds(program),
        "vocab": option(program.vocab.map(|vocab| format!("VocabPasses::{vocab:?}"))),
        "post_validation": program.post_validation,
        "vocab_shard": match program.vocab {
            Some(_) => described(&shapes::vocabulary_shard(&program.model, program.mesh.tp * program.mesh.pp)),
            None => String::new(),
        },
        "planned_memory_bytes": program.planned_memory_bytes,
    })
}

/// `trainer-`, and the characters of the model's name that cargo allows.
fn package_name(model: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    format!("trainer-{}", model.chars().map(plain).collect::<String>().trim_matches('-'))
}

/// A float in Rust syntax.
fn float(value: f64) -> String {
    format!("{value:?}")
}

fn option(value: Option<String>) -> String {
    value.map_or_else(|| "None".to_owned(), |value| format!("Some({value})"))
}

fn model(model: &ModelSpec) -> Value {
    let attention = &model.attention;
    json!({
        "layers": model.layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "seq_len": model.seq_len,
        "global_batch": model.global_batch,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "qkv_bias": attention.qkv_bias,
        "out_bias": attention.out_bias,
        "qk_norm": attention.qk_norm,
        "soft_cap": option(attention.soft_cap.map(float)),
        "window": option(attention.window.map(|window| format!(
            "Window {{\n{indent}    tokens: {},\n{indent}    full_every: {},\n{indent}}}",
            window.tokens,
            option(window.full_every.map(|every| every.to_string())),
            indent = " ".repeat(12)
        ))),
        "ffn": model.mlp.ffn,
        "activation": match model.mlp.activation {
            Activation::Relu => "Relu",
            Activation::SquaredRelu => "SquaredRelu",
            Activation::Gelu => "Gelu",
            Activation::Swiglu => "Swiglu",
            Activation::Geglu => "Geglu",
        },
        "mlp_bias": model.mlp.bias,
        "norm": match model.norm.kind {
            NormKind::LayerNorm => "LayerNorm",
            NormKind::RmsNorm => "RmsNorm",
        },
        "norms_per_layer": model.norm.per_layer,
        "positions": match model.positions {
            Positions::Rope => "Positions::Rope".to_owned(),
            Positions::Learned { max } => format!("Positions::Learned {{ max: {max} }}"),
        },
        "tied_embeddings": model.tied_embeddings,
        "final_soft_cap": option(model.final_soft_cap.map(float)),
        "dropout": float(model.dropout),
        "norm_eps": float(model.numerics.norm_eps),
        "norm_unit_offset": model.numerics.norm_unit_offset,
        "rope_theta": float(model.numerics.rope_theta),
        "query_pre_attn_scalar": float(model.numerics.query_pre_attn_scalar),
        "embedding_scale": float(model.numerics.embedding_scale),
        "gelu": match model.numerics.gelu {
            Gelu::Tanh => "Tanh",
            Gelu::Erf => "Erf",
        },
    })
}

fn mesh(mesh: &Mesh) -> Value {
    let order = match mesh.order {
        RankOrder::DpInner => "DpInner",
        RankOrder::PpInner => "PpInner",
    };
    json!({ "tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "pp": mesh.pp, "order": order })
}

/// Ranks of the first groups along each axis with more than one rank.
fn groups(mesh: &Mesh) -> Vec<Value> {
    let axes = [
        ("tensor", Axis::Tp, mesh.tp),
        ("data", Axis::Dp, mesh.dp),
        ("pipeline", Axis::Pp, mesh.pp),
    ];
    let world = mesh.tp * mesh.cp * mesh.dp * mesh.pp;
    let of = |(name, axis, size): (&str, Axis, u64)| {
        let stride = mesh.stride(axis);
        let firsts = (0..world).filter(|rank| (rank / stride).is_multiple_of(size));
        let group = |first: u64| {
            (0..size).map(|i| (first + i * stride).to_string()).collect::<Vec<_>>().join(" ")
        };
        let shown: Vec<String> = firsts.take(GROUPS_SHOWN).map(group).collect();
        json!({ "axis": name, "size": size, "ranks": shown, "more": world / size > GROUPS_SHOWN as u64 })
    };
    axes.into_iter().filter(|(_, _, size)| *size > 1).map(of).collect()
}

/// The pipeline ranks that hold a stage, in words.
fn holders_of(program: &Program, stage: usize) -> String {
    let (layout, ranks) = (program.layout, program.mesh.pp as usize);
    let first = layout.rank_of(ranks, stage);
    match layout.copies() {
        1 => format!("pipeline rank {first}"),
        _ => format!("pipeline ranks {first} and {}", layout.holder(ranks, stage, 1).0),
    }
}

fn stages(program: &Program) -> Vec<Value> {
    let stage = |(index, stage): (usize, &models::program::StageProgram)| {
        let [before, behind] = shapes::ends(program, index);
        json!({
            "index": index,
            "pipeline_ranks": holders_of(program, index),
            "first_layer": stage.first_layer,
            "last_layer": stage.layers().end.saturating_sub(1),
            "empty": stage.recompute.is_empty(),
            "before": described(&before),
            "behind": described(&behind),
            "recompute": recompute(&stage.recompute),
        })
    };
    program.stages.iter().enumerate().map(stage).collect()
}

/// Consecutive layers with the same recomputation, as arguments of `stage`.
fn recompute(layers: &[Recompute]) -> Vec<Value> {
    layers
        .chunk_by(|a, b| a == b)
        .map(|run| json!({ "what": format!("{:?}", run[0]), "layers": run.len() }))
        .collect()
}

fn described(tensors: &[Held]) -> String {
    let one = |tensor: &Held| format!("{} {:?}", tensor.name, tensor.shape);
    tensors.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Name of each kind of pass in the table.
fn short(kind: PassKind) -> &'static str {
    match kind {
        PassKind::F => "f",
        PassKind::B => "b",
        PassKind::W => "w",
        PassKind::BW => "bw",
        PassKind::S => "s",
        PassKind::S2 => "s2",
        PassKind::T => "t",
        PassKind::IF => "i",
        PassKind::IB => "ib",
    }
}

/// The kinds of pass that occur, as functions of the table.
fn kinds(program: &Program) -> Vec<Value> {
    let all = [
        (PassKind::F, "Forward."),
        (PassKind::B, "Backward with respect to inputs."),
        (PassKind::W, "Backward with respect to weights."),
        (PassKind::BW, "Backward."),
        (PassKind::S, "Output layer: logits, and their maxima and sums."),
        (PassKind::S2, "Output layer: sums around the common maximum."),
        (PassKind::T, "Output layer: gradients."),
        (PassKind::IF, "Input layer: embedding rows that are on this rank."),
        (PassKind::IB, "Input layer: gradients of those rows."),
    ];
    let runs = |kind| program.passes.iter().flatten().any(|pass| pass.kind == kind);
    let value = |(kind, doc): (PassKind, &str)| json!({ "name": short(kind), "kind": format!("{kind:?}"), "doc": doc });
    all.into_iter().filter(|&(kind, _)| runs(kind)).map(value).collect()
}

fn pass_lines(passes: &[Pass]) -> Vec<String> {
    let one = |pass: &Pass| format!("{}({}, {})", short(pass.kind), pass.micro_batch, pass.chunk);
    passes
        .chunks(PASSES_A_LINE)
        .map(|line| line.iter().map(one).collect::<Vec<_>>().join(", "))
        .collect()
}
