//! The fastest plan of every shipped model that can be trained, on 8, 64 and 512 GPUs of
//! `dgx_h100`, is generated and compiles; and shrunk to 16 ranks at most, it trains to one rank's
//! losses (`make programs`, or `MODELS="llama8b tiny" make programs`).
#![cfg(feature = "programs")]

use codegen::{RuntimeSource, render};
use direct::Direct;
use meshwright_tests::crates::{build, first_error, manifest, module, runtime, write_all};
use models::decisions::{CpStyle, Decisions, DpReduction, MoeOverlap, USUAL_BUCKET_MIB};
use models::mesh::{ExpertSplit, Mesh};
use models::model::{Mla, ModelSpec, Positions, Window};
use models::plan::Plan;
use models::program::{Program, Recompute, StageProgram};
use models::schedule::{Schedule, ScheduleName};
use planner::answer::report::plan as make_plan;
use planner::request::Request;
use planner::request::flags::Flags;
use planner::search::search;
use runtime::comm::{Communicator, Options, run_ranks};
use runtime::data::{Sample, Samples};
use runtime::{Error, Host, Optimizer, Rank, Reduction};
use std::collections::BTreeMap;
use std::path::PathBuf;

const GPUS: [u64; 3] = [8, 64, 512];

/// A plan and what it is of.
struct Case {
    name: String,
    plan: Plan,
}

fn trained(name: &str) -> bool {
    let model = models::model::shipped(name).and_then(Result::ok).expect("shipped models read");
    models::program::unsupported_model(&model).is_empty()
}

/// The fastest plan; `None` if nothing fits.
fn planned(model: &str, gpus: u64) -> Option<Case> {
    let request = Request::new(&Flags {
        model: model.to_owned(),
        cluster: Some("dgx_h100".to_owned()),
        gpus,
        global_batch: None,
        seq_len: None,
        headroom: None,
        tokens: None,
        expert_imbalance: None,
        runnable: false,
        settings: Vec::new(),
    })
    .expect("the request is valid");
    let outcome = search(&request.task(), &mut |_| {});
    let plan = make_plan(&request, &outcome.best?, &outcome.proof);
    Some(Case { name: format!("{model} on {gpus}"), plan })
}

/// The models in the environment variable `MODELS`; all, if it is not set.
fn is_wanted(name: &str) -> bool {
    match std::env::var("MODELS") {
        Ok(names) => names.split_whitespace().any(|wanted| wanted == name),
        Err(_) => true,
    }
}

fn cases() -> Vec<Case> {
    let names = models::model::shipped_names().filter(|name| is_wanted(name) && trained(name));
    let mut cases: Vec<Case> =
        names.flat_map(|name| GPUS.map(|gpus| planned(name, gpus))).flatten().collect();
    let larger = [("llama70b", 16384), ("deepseek_v3", 2048)];
    let larger = larger.into_iter().filter(|(name, _)| is_wanted(name));
    cases.extend(larger.flat_map(|(name, gpus)| planned(name, gpus)));
    cases
}

fn program(case: &Case) -> Program {
    Program::of(&case.plan).unwrap_or_else(|error| panic!("{}: {error}", case.name))
}

#[test]
fn every_default_plan_is_generated_and_compiles() {
    let cases = cases();
    let source = RuntimeSource::Path(runtime());
    let mut files = vec![("Cargo.toml".to_owned(), manifest())];
    let mut main = "#![allow(warnings)]\n".to_owned();
    let mut lines = String::new();
    for (n, case) in cases.iter().enumerate() {
        let rendered =
            render(&case.plan, &program(case), "", &source).expect("templates are whole");
        if n == 0 {
            files.push(("Cargo.lock".to_owned(), rendered["Cargo.lock"].clone()));
        }
        files.extend(module(&format!("p{n}"), rendered));
        main += &format!("mod p{n}; // {}\n", case.name);
        // Constants are evaluated, and types are checked, for a device.
        lines += &format!("    each.push(Box::new(p{n}::Trainer));\n");
    }
    main += &format!(
        "fn main() {{\n    let mut each: Vec<Box<dyn runtime::stages::Stages<runtime::Host<f32>>>> \
         = Vec::new();\n{lines}    println!(\"{{}}\", each.len());\n}}\n"
    );
    files.push(("src/main.rs".to_owned(), main));
    let temporary = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let folder = temporary.join("default-plans");
    if folder.join("Cargo.lock").exists() {
        files.retain(|(path, _)| path != "Cargo.lock");
    }
    write_all(&folder, files.iter().map(|(path, text)| (path.as_str(), text.as_str())));
    let output = build(&folder, &temporary.join("unoptimized"));
    let error = first_error(&output).unwrap_or_default().concat();
    assert!(output.status.success(), "{error}{}", String::from_utf8_lossy(&output.stderr));
    println!("{} plans generated and built", cases.len());
    // All models that can be trained on three numbers of GPUs, but for those that are too large for
    // 8 or 64, and two on more.
    let all = std::env::var("MODELS").is_err();
    assert!(!all || cases.len() == 110, "{}", cases.len());
}

/// Degrees of at most 16 ranks: the largest are halved first, and a degree above 1 stays above it
/// as long as others can be halved.
fn shrunk_degrees(d: &Decisions) -> Decisions {
    let mut d = d.clone();
    let ulysses = d.cp_ulysses;
    while d.gpus() > 16 {
        let degrees = [d.dp, d.tp, d.cp, d.pp];
        let largest = (0..4).max_by_key(|&n| degrees[n]).expect("there are four");
        let least = degrees[largest] > 2;
        let which = if least { largest } else { degrees.iter().position(|&n| n > 1).unwrap() };
        let half = |degree: u64| if degree.is_multiple_of(2) { degree / 2 } else { degree - 1 };
        match which {
            0 => d.dp = half(d.dp),
            1 => d.tp = half(d.tp),
            2 => d.cp = half(d.cp),
            _ => d.pp = half(d.pp),
        }
    }
    d.cp_ulysses = match d.cp_style {
        CpStyle::Ulysses => d.cp,
        CpStyle::Hybrid => ulysses.min((d.cp / 2).max(1)),
        _ => 1,
    };
    d.dp_shard = match (d.zero_stage, d.dp * d.cp) {
        (0, _) => 1,
        (_, replicas) if d.dp_shard >= replicas || !replicas.is_multiple_of(d.dp_shard) => replicas,
        _ => d.dp_shard,
    };
    if d.dp * d.cp == 1 {
        (d.zero_stage, d.dp_shard) = (0, 1);
    }
    d.micro_batch = 1;
    d.pass_times = None;
    shrink_experts(&mut d);
    d
}

/// Degrees of experts that fit the others.
fn shrink_experts(d: &mut Decisions) {
    if !d.tp.is_multiple_of(d.etp) {
        d.etp = d.tp;
    }
    let ranks = d.tp * d.cp * d.dp / d.etp;
    while !ranks.is_multiple_of(d.ep) {
        d.ep -= 1;
    }
    // Replicas that share a copy of the state must be whole groups of those with the same experts.
    let replicas = ranks / d.ep;
    if d.zero_stage > 0 && !replicas.is_multiple_of(d.dp_shard.min(replicas)) {
        d.dp_shard = d.dp * d.cp;
    }
    d.moe_overlap_degree = d.moe_overlap_degree.min(4);
}

/// A schedule of the same name with as few micro-batches as it takes.
fn shrunk_schedule(d: &mut Decisions) -> Schedule {
    let counts = [2, 1, 3, 4, 6, 8].map(|times| times * d.pp);
    for micro_batches in counts {
        d.micro_batches = micro_batches;
        if let Ok(schedule) = d.build_schedule() {
            return schedule;
        }
    }
    panic!("{} with pp {} and vpp {}", d.schedule, d.pp, d.vpp);
}

/// The model with 64 columns, `layers` layers and heads for every rank.
fn shrunk_model(model: &ModelSpec, d: &Decisions, layers: usize) -> ModelSpec {
    let mut model = model.clone();
    let heads = (d.tp * d.cp_ulysses).max(4).next_power_of_two();
    let grouped = model.attention.kv_heads < model.attention.heads;
    (model.layers, model.hidden, model.vocab) = (layers, 64, 131);
    model.seq_len = 64;
    model.attention.heads = heads;
    model.attention.kv_heads = if grouped { heads / 2 } else { heads };
    model.attention.head_dim = 64 / heads.min(16);
    model.numerics.query_pre_attn_scalar = model.attention.head_dim as f64;
    model.attention.window = model.attention.window.map(|window| Window { tokens: 16, ..window });
    model.mlp.ffn = 96.max(d.tp * 8).next_multiple_of(d.tp);
    if let Positions::Learned { .. } = model.positions {
        model.positions = Positions::Learned { max: 64 };
    }
    if let Some(mla) = &mut model.attention.mla {
        model.attention.kv_heads = heads;
        *mla = Mla { q_rank: mla.q_rank.map(|_| 24), kv_rank: 16, rope_dim: 4, value_dim: 8 };
    }
    if let Some(moe) = &mut model.moe {
        moe.experts = 8.max(2 * d.ep);
        moe.top_k = moe.top_k.min(2);
        moe.ffn = 24 * d.etp;
        moe.shared_ffn = if moe.shared_ffn > 0 { 16 * d.tp } else { 0 };
        moe.first_dense = moe.first_dense.min(1);
        if d.moe_overlap != MoeOverlap::None {
            // Each chunk has a capacity of its own.
            moe.capacity_factor = None;
        }
        let groups = moe.choice.groups.min(4);
        (moe.choice.groups, moe.choice.kept_groups) = (groups, moe.choice.kept_groups.min(groups));
    }
    model
}

/// The plan's program, shrunk: a layer a stage (none where the plan has none), recomputed as the
/// first of the plan's stage.
fn shrunk(case: &Case) -> Program {
    let whole = program(case);
    let mut d = shrunk_degrees(&case.plan.decisions);
    let schedule = shrunk_schedule(&mut d);
    let count = schedule.stages();
    let mut first_layer = 0;
    let stage = |n: usize| {
        let of = &whole.stages[n * (whole.stages.len() - 1) / count.saturating_sub(1).max(1)];
        let recompute: Vec<Recompute> = of.recompute.iter().copied().take(1).collect();
        first_layer += recompute.len();
        StageProgram { first_layer: first_layer - recompute.len(), recompute }
    };
    let stages: Vec<StageProgram> = (0..count).map(stage).collect();
    let layers = stages.iter().map(|stage| stage.recompute.len()).sum();
    Program {
        model: shrunk_model(&whole.model, &d, layers),
        mesh: Mesh::new(&d),
        experts: whole.experts.map(|_| ExpertSplit { ep: d.ep, etp: d.etp }),
        aux_scope: d.aux_scope,
        moe_overlap: d.moe_overlap,
        moe_chunks: whole.moe_chunks.min(d.moe_overlap_degree as usize),
        sequence_parallel: whole.sequence_parallel && d.tp > 1,
        fused_loss: whole.fused_loss,
        cp_style: d.cp_style,
        cp_ulysses: d.cp_ulysses as usize,
        micro_batch: 1,
        micro_batches: d.micro_batches as usize,
        layout: schedule.layout,
        vocab: schedule.vocab,
        zero_stage: d.zero_stage,
        dp_shard: d.dp_shard as usize,
        offload: d.offload,
        dp_reduction: whole.dp_reduction,
        dp_bucket_mib: whole.dp_bucket_mib,
        post_validation: d.post_validation,
        recompute_group: whole.recompute_group,
        stages,
        passes: schedule.by_rank(),
        planned_memory_bytes: 0,
    }
}

/// The same model on one rank, in the same micro-batches: capacities and losses of routers count
/// them.
fn alone(of: &Program) -> Program {
    let schedule = ScheduleName::GPipe.build(1, of.global_batch(), 1);
    let schedule = schedule.expect("one rank has a schedule");
    let recompute = vec![Recompute::None; of.model.layers];
    Program {
        model: of.model.clone(),
        mesh: Mesh { tp: 1, cp: 1, dp: 1, pp: 1, ..of.mesh },
        experts: of.experts.map(|_| ExpertSplit { ep: 1, etp: 1 }),
        moe_overlap: MoeOverlap::None,
        moe_chunks: 1,
        sequence_parallel: false,
        fused_loss: false,
        cp_ulysses: 1,
        micro_batch: 1,
        micro_batches: of.global_batch(),
        layout: schedule.layout,
        vocab: None,
        zero_stage: 0,
        dp_shard: 1,
        offload: models::decisions::Offload::None,
        dp_reduction: DpReduction::Bucketed,
        dp_bucket_mib: USUAL_BUCKET_MIB,
        post_validation: false,
        recompute_group: 1,
        stages: vec![StageProgram { first_layer: 0, recompute }],
        passes: schedule.by_rank(),
        ..of.clone()
    }
}

/// Tokens by a formula; some have no label.
struct Made;

impl Samples for Made {
    fn len(&self) -> u64 {
        1 << 20
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |n: u64| ((index * 7919 + n * n * 31 + n * 17) % 131) as i64;
        let mut sample = Sample::of_tokens((0..65).map(token).collect());
        if index % 3 == 1 {
            sample.labels[..11].fill(-1);
        }
        Ok(sample)
    }
}

/// Losses of three steps.
fn losses(of: &Program) -> Vec<f64> {
    let stages = Direct::new(of);
    let optimizer = Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
    let run = |world: Box<dyn Communicator>| -> Result<Vec<f64>, Error> {
        let device = Host::<f64>::serial();
        let mut rank = Rank::new(&stages, world, device, Reduction::default(), 1234)?;
        rank.initialise()?;
        let mut losses = Vec::new();
        for step in 0..3 {
            if of.post_validation {
                let before = rank.step_ahead(&Made, step, &optimizer, 1e-3)?;
                losses.extend(before.map(|result| result.loss));
                continue;
            }
            let result = rank.gradients(&Made, step, None)?;
            losses.push(result.loss);
            rank.update(&optimizer, 1e-3, result.norm)?;
        }
        losses.extend(rank.settle()?.map(|result| result.loss));
        Ok(losses)
    };
    run_ranks(of.world_size(), Options::default(), run).swap_remove(0).expect("the steps run")
}

#[test]
fn every_default_plan_trains_like_one_rank_when_shrunk() {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for case in cases() {
        let of = shrunk(&case);
        let Program { mesh, .. } = &of;
        let what = format!(
            "{}: tp {} cp {} {} pp {} dp {}, zero {} over {}, {}, {:?}",
            case.name,
            mesh.tp,
            mesh.cp,
            of.cp_style,
            mesh.pp,
            mesh.dp,
            of.zero_stage,
            of.dp_shard,
            case.plan.decisions.schedule,
            of.vocab
        );
        println!("{what}");
        for (step, (ours, theirs)) in losses(&of).iter().zip(losses(&alone(&of))).enumerate() {
            let off = (ours - theirs).abs();
            assert!(off <= 1e-11, "{what}: loss of step {step} is {ours}, not {theirs}");
        }
        *kinds.entry(format!("zero {}", of.zero_stage)).or_default() += 1;
    }
    println!("{kinds:?}");
}
