//! Values for the templates: a plan's program as plain data.

use crate::RuntimeSource;
use crate::lower::{Block, LATENT_EPS, Sizes, Width};
use crate::print::{Kind, Printer, float, last_takes_table, shard};
use models::decisions::{AuxScope, CpStyle, DpReduction, Dtype, MoeOverlap, Offload, RankOrder};
use models::formulas::flops::training_flops;
use models::mesh::{Axis, Mesh};
use models::model::{Activation, ExpertChoice, Gelu, ModelSpec, Moe, Router, Window};
use models::plan::Plan;
use models::program::{Program, Recompute};
use models::schedule::{StageLayout, write_passes};
use models::shapes;
use serde_json::{Value, json};

/// Groups that the README lists, and ranks of each.
const GROUPS_SHOWN: usize = 8;

/// All values, by the names that the templates use.
pub fn context(plan: &Plan, printer: &Printer<'_>, hash: &str, runtime: &RuntimeSource) -> Value {
    let (d, lowered) = (&plan.decisions, printer.lowered);
    let (program, sizes) = (&lowered.program, &lowered.sizes);
    let spec = &program.model;
    let tokens = (program.global_batch() * program.seq_len()) as f64;
    json!({
        // Free texts; each needs the filter of the place where it stands.
        "text": {
            "tool": plan.tool,
            "model": spec.name,
            "package": package_name(&spec.name),
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
        "model": model(spec, sizes),
        "latent": latent(spec, sizes),
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
        "degrees": degrees(program),
        "has_dense": printer.blocks().contains(&Block::Dense),
        "groups": groups(&program.mesh),
        "end_of_step": end_of_step(program),
        "moe": moe(program),
        "sequence_parallel": sizes.sequence_parallel,
        "micro_batch": program.micro_batch,
        "micro_batches": program.micro_batches,
        "recompute_group": program.recompute_group,
        "tokens_a_micro_batch": sizes.tokens,
        "rows": sizes.rows,
        "hidden": sizes.hidden,
        "columns": if sizes.tp > 1 { "Columns<Tp>" } else { "Whole" },
        "positions": sizes.positions,
        "deviation": float(sizes.deviation),
        "stream_deviation": float(sizes.stream_deviation),
        "activation": activation(spec),
        "attention": attention(spec),
        "dropout": spec.dropout > 0.0,
        "paired": sizes.paired,
        "dropout_p": float(spec.dropout),
        "rope_theta": option(sizes.rotary.then(|| float(spec.numerics.rope_theta))),
        "yarn": yarn(spec),
        "tied_table": option(
            spec.tied_embeddings.then(|| format!("{:?}.to_owned()", lowered.names.embedding()))
        ),
        "training_flops": float(training_flops(models::layer::forward_flops(spec, tokens))),
        "over_pipeline": lowered.shard.is_some(),
        "layout": match program.layout {
            StageLayout::RoundRobin => "RoundRobin",
            StageLayout::V => "V",
            StageLayout::Bidirectional => "Bidirectional",
        },
        "layer": printer.layer(printer.blocks()[0]),
        "modules": modules(printer),
        "choose": printer.choose(),
        "last_table": last_takes_table(printer),
        "stages": stages(program),
        "rank_elements": shapes::rank_elements(program),
        "passes": program.passes.iter().map(write_passes).collect::<Vec<_>>(),
        "offloads_activations": program.offload == Offload::Activations,
        "has_pairs": program.passes.iter().any(|order| !order.pairs.is_empty()),
        "vocab": option(program.vocab.map(|vocab| format!("VocabPasses::{vocab:?}"))),
        "ulysses": sizes.ulysses,
        "key_value_behind": sizes.columns(Width::KeyValueBehind),
        "context": context_parallel(program),
        "zero_stage": program.zero_stage,
        "dp_shard": program.dp_shard,
        "reduction": match program.dp_reduction {
            DpReduction::Naive => "AtEnd".to_owned(),
            DpReduction::Overlapped => "PerParameter".to_owned(),
            DpReduction::Bucketed => {
                format!("Buckets {{ bytes: {} << 20 }}", program.dp_bucket_mib)
            }
        },
        "host_memory": match program.offload {
            Offload::None => "Nothing",
            Offload::Optimizer => "Optimizer",
            Offload::Activations => "Activations",
        },
        "post_validation": program.post_validation,
        "shard": shard(lowered, printer.element_bytes),
        "prediction": prediction(plan),
    })
}

/// Modules of the program, in the order of their names.
fn modules(printer: &Printer<'_>) -> Vec<&'static str> {
    let mut modules: Vec<&str> = printer.kinds().into_iter().map(Kind::module).collect();
    modules.extend(["layer", "passes", "plan"]);
    if printer.blocks().len() > 1 {
        modules.extend(["dense_layer", "expert_layer"]);
    }
    if !printer.has_loss() {
        modules.push("vocabulary");
    }
    modules.sort_unstable();
    modules
}

/// Numbers of a mixture of experts.
fn moe(program: &Program) -> Value {
    let (Some(moe), Some(split)) = (&program.model.moe, program.experts) else {
        return Value::Null;
    };
    let ExpertChoice { renormalised, groups, kept_groups, scale } = moe.choice;
    json!({
        "experts": moe.experts,
        "ep": split.ep,
        "etp": split.etp,
        "ffn": moe.ffn,
        "shared_ffn": moe.shared_ffn,
        "chunks": program.moe_chunks,
        "cuts_attention": program.moe_overlap == MoeOverlap::Ampipe,
        "top_k": moe.top_k,
        "scoring": match moe.router {
            Router::Softmax => "Scoring::Softmax".to_owned(),
            Router::SigmoidBias => {
                format!("Scoring::Sigmoid {{ groups: {groups}, kept: {kept_groups} }}")
            }
        },
        "renormalised": renormalised,
        "capacity_factor": option(moe.capacity_factor.map(float)),
        "losses": router_losses(program, moe),
        "bias_update_rate": moe.updates_biases().then(|| float(moe.bias_update_rate)),
        "has_experts": has_experts(moe),
        "scale": float(scale),
    })
}

/// What routers add to the loss.
fn router_losses(program: &Program, moe: &Moe) -> Value {
    if !moe.has_losses() {
        return Value::Null;
    }
    json!({
        "balance": float(moe.aux_loss),
        "z": float(moe.losses.z_loss),
        "over": format!("{:?}", moe.losses.over),
        "scope": match program.aux_scope {
            AuxScope::MicroBatch => "MicroBatch",
            AuxScope::GlobalBatch => "GlobalBatch",
        },
    })
}

/// Whether layer `number` has experts, in Rust.
fn has_experts(moe: &Moe) -> String {
    let (first, every) = (moe.first_dense, moe.every);
    match (first, every) {
        (_, 1) => format!("number >= {first}"),
        (0, _) => format!("number % {every} == {}", every - 1),
        _ => format!("number >= {first} && (number - {first}) % {every} == {}", every - 1),
    }
}

/// How context-parallel ranks divide a sequence, in Rust.
fn context_parallel(program: &Program) -> String {
    if program.mesh.cp == 1 {
        return "ContextParallel::NONE".to_owned();
    }
    let exchange = match program.cp_style {
        CpStyle::Ring | CpStyle::Ulysses => "Ring",
        CpStyle::Zigzag | CpStyle::Hybrid => "ZigZag",
        CpStyle::AllGather => "AllGather",
    };
    let ulysses = program.cp_ulysses;
    format!("ContextParallel {{ ranks: CP, ulysses: {ulysses}, exchange: Exchange::{exchange} }}")
}

/// How frequencies of rotary positions are stretched: fields of the library's `Yarn`.
fn yarn(model: &ModelSpec) -> Option<Value> {
    model.numerics.yarn.map(|yarn| {
        json!({
            "factor": float(yarn.factor),
            "original_positions": float(yarn.original_positions as f64),
            "beta_fast": float(yarn.beta_fast),
            "beta_slow": float(yarn.beta_slow),
            "truncate": yarn.truncate,
        })
    })
}

/// The kernel's activation, by its name in the library.
fn activation(model: &ModelSpec) -> &'static str {
    let gelu = match model.numerics.gelu {
        Gelu::Tanh => "GeluTanh",
        Gelu::Erf => "GeluErf",
    };
    match model.mlp.activation {
        Activation::Relu => "Relu",
        Activation::SquaredRelu => "SquaredRelu",
        Activation::Swiglu => "Silu",
        Activation::ClampedGeglu => "ClampedGelu",
        Activation::Gelu | Activation::Geglu => gelu,
    }
}

/// Numbers of attention, with the layer's number where they depend on it.
fn attention(model: &ModelSpec) -> Value {
    let attention = &model.attention;
    let window = attention.window.filter(|window| window.tokens < model.seq_len);
    let window = match window {
        None => "None".to_owned(),
        Some(Window { tokens, full_every: None }) => format!("Some({tokens})"),
        Some(Window { tokens, full_every: Some(every) }) => {
            format!("(!(number + 1).is_multiple_of({every})).then_some({tokens})")
        }
    };
    json!({
        "scale": float(model.numerics.score_scale()),
        "window": window,
        "soft_cap": option(attention.soft_cap.map(float)),
    })
}

/// The collectives of the end of a step, after the last pass, in their order. The library runs
/// them, and no line of the program.
fn end_of_step(program: &Program) -> Vec<String> {
    let Program { mesh, zero_stage, dp_shard, layout, model, .. } = program;
    let replicas = mesh.dp * mesh.cp;
    let groups = if *zero_stage > 0 { replicas / (*dp_shard as u64).min(replicas) } else { 1 };
    let apart = program.last_rank() != 0 && layout.copies() == 1 && program.vocab.is_none();
    let tied = model.tied_embeddings && apart;
    let axes = if mesh.cp > 1 { "dp and cp" } else { "dp" };
    let between = format!("{axes}: all-reduce of gradients between the {groups} groups of ranks");
    // Ranks that hold the same key/value heads, or the same latent vectors' matrices.
    let shares_parameters = model.attention.kv_heads < mesh.tp || model.attention.mla.is_some();
    let rows = [
        (groups > 1, between),
        (layout.copies() > 1, "pp: sum of the gradients of both copies of a stage".to_owned()),
        (
            mesh.tp > 1 && (program.sequence_parallel || shares_parameters),
            "tp: all-reduce of gradients that are partial sums, such as those of norms".to_owned(),
        ),
        (tied, "pp: sum of the gradients of the table that both ends hold".to_owned()),
        (program.world_size() > 1, "all ranks: loss and norm of the gradients".to_owned()),
    ];
    rows.into_iter().filter(|(runs, _)| *runs).map(|(_, what)| what).collect()
}

/// What the plan predicts, with the causes that a run can tell apart.
fn prediction(plan: &Plan) -> Value {
    let of = &plan.predicted;
    let b = &of.breakdown;
    let parts = [
        ("compute_s", b.compute_s + b.recompute_s),
        ("tp_s", b.tp_s),
        ("cp_s", b.cp_s),
        ("ep_s", b.ep_s),
        ("pp_s", b.pp_s + b.bubble_s),
        ("dp_s", b.dp_s),
        ("optimizer_s", b.optimizer_s),
        ("other_s", b.other_s),
    ];
    json!({
        "parts": parts.map(|(name, s)| format!("{name}: {}", float(s))),
        "peak_memory_bytes": of.peak_memory_bytes,
    })
}

/// `trainer-`, and the characters of the model's name that cargo allows.
fn package_name(model: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    format!("trainer-{}", model.chars().map(plain).collect::<String>().trim_matches('-'))
}

fn option(value: Option<String>) -> String {
    value.map_or_else(|| "None".to_owned(), |value| format!("Some({value})"))
}

/// Numbers of latent attention.
fn latent(model: &ModelSpec, sizes: &Sizes) -> Value {
    let Some(mla) = &model.attention.mla else { return Value::Null };
    json!({
        "q_rank": mla.q_rank,
        "kv_rank": mla.kv_rank,
        "rotary_dim": sizes.rotary_dim,
        "value_dim": sizes.value_dim,
        "eps": float(LATENT_EPS),
    })
}

fn model(model: &ModelSpec, sizes: &Sizes) -> Value {
    json!({
        "layers": model.layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "seq_len": model.seq_len,
        "heads": model.attention.heads,
        "kv_heads": model.attention.kv_heads,
        "head_dim": sizes.head_dim,
        "rotary_dim": model.attention.rotary_dim,
        "ffn": model.mlp.ffn,
        "norm_eps": float(model.numerics.norm_eps),
        "embedding_scale": float(model.numerics.embedding_scale),
        "final_soft_cap": option(model.final_soft_cap.map(float)),
    })
}

fn mesh(mesh: &Mesh) -> Value {
    let order = match mesh.order {
        RankOrder::DpInner => "DpInner",
        RankOrder::PpInner => "PpInner",
    };
    json!({ "tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "pp": mesh.pp, "order": order })
}

/// The degrees of a split, whose product is the number of ranks, and those of experts, which divide
/// the same ranks.
fn degrees(program: &Program) -> Vec<String> {
    let Mesh { tp, cp, pp, dp, .. } = program.mesh;
    let (ep, etp) = program.experts.map_or((1, 1), |split| (split.ep, split.etp));
    let over_one = |(name, n): (&str, u64)| (n > 1).then(|| format!("{name} {n}"));
    let mut all = vec![format!("tp {tp}")];
    all.extend(over_one(("cp", cp)));
    all.extend([format!("pp {pp}"), format!("dp {dp}")]);
    let experts: Vec<String> =
        [("ep", ep), ("etp", etp)].into_iter().filter_map(over_one).collect();
    if !experts.is_empty() {
        all.push(format!("experts: {} inside tp·cp·dp", experts.join(", ")));
    }
    all
}

/// Ranks of the first groups along each axis with more than one rank.
fn groups(mesh: &Mesh) -> Vec<Value> {
    let axes = [
        ("tensor", Axis::Tp, mesh.tp),
        ("context", Axis::Cp, mesh.cp),
        ("data", Axis::Dp, mesh.dp),
        ("pipeline", Axis::Pp, mesh.pp),
    ];
    let world = mesh.tp * mesh.cp * mesh.dp * mesh.pp;
    let of = |(name, axis, size): (&str, Axis, u64)| {
        let stride = mesh.stride(axis);
        let firsts = (0..world).filter(|rank| (rank / stride).is_multiple_of(size));
        let group = |first: u64| {
            let rank = |i: u64| (first + i * stride).to_string();
            match size <= GROUPS_SHOWN as u64 {
                true => (0..size).map(rank).collect::<Vec<_>>().join(" "),
                false => format!("{} {} ... {}", rank(0), rank(1), rank(size - 1)),
            }
        };
        let shown: Vec<String> = firsts.take(GROUPS_SHOWN).map(group).collect();
        let few = (0..size.min(GROUPS_SHOWN as u64)).map(|i| (i * stride).to_string());
        json!({
            "axis": name,
            "size": size,
            "stride": stride,
            "first": few.collect::<Vec<_>>().join(" "),
            "cut": size > GROUPS_SHOWN as u64,
            "ranks": shown,
            "more": world / size > GROUPS_SHOWN as u64,
        })
    };
    axes.into_iter().filter(|(_, _, size)| *size > 1).map(of).collect()
}

fn stages(program: &Program) -> Vec<Value> {
    let last = program.stages.len() - 1;
    let stage = |(index, stage): (usize, &models::program::StageProgram)| {
        json!({
            "input": index == 0,
            "first_layer": stage.first_layer,
            "layers": stage.recompute.len(),
            "output": index == last,
            "recompute": recompute(&stage.recompute),
        })
    };
    program.stages.iter().enumerate().map(stage).collect()
}

/// Consecutive layers with the same recomputation.
fn recompute(layers: &[Recompute]) -> Vec<Value> {
    let name = |what: Recompute| match what {
        Recompute::None => "Nothing",
        Recompute::Selective => "Selective",
        Recompute::Full => "Everything",
    };
    layers
        .chunk_by(|a, b| a == b)
        .map(|run| json!({ "what": name(run[0]), "layers": run.len() }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_groups_are_shortened() {
        let mesh = |dp| Mesh { tp: 1, cp: 1, dp, pp: 2, order: RankOrder::DpInner };
        let ranks = |dp| groups(&mesh(dp))[0]["ranks"].clone();
        assert_eq!(ranks(8), json!(["0 1 2 3 4 5 6 7", "8 9 10 11 12 13 14 15"]));
        assert_eq!(ranks(16), json!(["0 1 ... 15", "16 17 ... 31"]));
    }
}
