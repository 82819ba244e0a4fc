//! The plan checker: refuses a plan whose split, stages, schedule, memory or figures contradict one
//! another. It reads the cluster from the plan itself and changes nothing.

use crate::decisions::{
    CpStyle, Decision, Decisions, MOST, MoeOverlap, Offload, RecomputePolicy, Values, Vocab,
};
use crate::model::{MAX_IMBALANCE, MIN_BIAS_UPDATE_RATE, ModelSpec, Positions, Router};
use crate::placement::{RecomputeCounts, Stage, VocabShare, kinds_in, may_be_empty};
use crate::plan::{Basis, ErrorBand, MOST_HEADROOM, Plan, Predicted, TextFault, Timing, VERSION};
use crate::schedule::{Schedule, ScheduleError, ScheduleName};
use crate::text::quotable;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Display};

/// A field of a plan with an impossible value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The field, as in plan.yaml.
    pub field: String,
    /// What it says.
    pub found: String,
    /// What would be valid.
    pub valid: String,
}

impl Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, found, valid } = self;
        write!(f, "{field} cannot be {found}; valid: {valid}")
    }
}

/// Longest schedule, in passes, that is run to its end.
const MOST_PASSES: u64 = 50_000_000;

/// All violations of a plan; empty for a valid one.
pub fn check(plan: &Plan) -> Vec<Violation> {
    let mut found = Checks::default();
    texts(plan, &mut found);
    sizes(plan, &mut found);
    if !found.list.is_empty() {
        // The checks below divide and multiply by these.
        return found.list;
    }
    inputs(plan, &mut found);
    model(&plan.inputs.model, &mut found);
    degrees(plan, &mut found);
    batch(plan, &mut found);
    context(plan, &mut found);
    experts(plan, &mut found);
    state(plan, &mut found);
    let schedule = schedule(plan, &mut found);
    stage_map(plan, schedule.as_ref(), &mut found);
    memory(plan, &mut found);
    predicted(plan, &mut found);
    proof(plan, &mut found);
    found.list
}

#[derive(Default)]
struct Checks {
    list: Vec<Violation>,
}

impl Checks {
    /// Notes a field unless it holds.
    fn that(&mut self, holds: bool, field: &str, found: impl Display, valid: impl Display) {
        if !holds {
            let (found, valid) = (found.to_string(), valid.to_string());
            self.list.push(Violation { field: field.to_owned(), found, valid });
        }
    }

    fn divides(&mut self, field: &str, degree: u64, what: &str, whole: u64) {
        let valid = || format!("a divisor of {what} ({whole})");
        self.that(whole.is_multiple_of(degree), field, degree, valid());
    }

    fn equals<T: PartialEq + Display + Copy>(&mut self, field: &str, found: T, valid: T) {
        self.that(found == valid, field, found, valid);
    }
}

/// Texts that are printed or become part of a program are one line; the tool's name is ours.
fn texts(plan: &Plan, checks: &mut Checks) {
    for TextFault { field, fault, valid } in plan.text_faults() {
        checks.that(false, &field, format!("a text that {fault}"), valid);
    }
    let version = plan.tool.strip_prefix("meshwright ").unwrap_or_default();
    let digit = |part: &str| part.starts_with(|c: char| c.is_ascii_digit());
    let plain = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let valid =
        version.split('.').filter(|part| digit(part)).count() >= 3 && version.chars().all(plain);
    let found = format!("`{}`", quotable(&plan.tool));
    checks.that(valid, "tool", found, "meshwright and its version, for example meshwright 0.1.0");
}

/// Counts are at least one and no product of them overflows.
fn sizes(plan: &Plan, checks: &mut Checks) {
    let (d, i) = (&plan.decisions, &plan.inputs);
    checks.that(plan.version == VERSION, "version", plan.version, VERSION);
    for row in Decision::ALL {
        let Some(number) = (row.number)(d) else { continue };
        let (field, valid) = (format!("decisions.{}", row.name), range_in_words(row.values));
        checks.that(row.values.contains(number), &field, number, valid);
    }
    let counts = [
        ("inputs.gpus", i.gpus),
        ("inputs.global_batch", i.global_batch),
        ("inputs.seq_len", i.seq_len),
        ("inputs.cluster.node_gpus", i.cluster.node_gpus),
        ("inputs.model.layers", i.model.layers as u64),
        ("inputs.model.hidden", i.model.hidden),
        ("inputs.model.vocab", i.model.vocab),
        ("inputs.model.attention.heads", i.model.attention.heads),
        ("inputs.model.attention.kv_heads", i.model.attention.kv_heads),
        ("inputs.model.attention.head_dim", i.model.attention.head_dim),
        ("inputs.model.mlp.ffn", i.model.mlp.ffn),
    ];
    let moe = i.model.moe.iter().flat_map(|moe| {
        [
            ("experts", moe.experts),
            ("top_k", moe.top_k),
            ("ffn", moe.ffn),
            ("every", moe.every as u64),
        ]
        .map(|(name, value)| (format!("inputs.model.moe.{name}"), value))
    });
    let counts = counts.map(|(name, value)| (name.to_owned(), value));
    for (field, value) in counts.into_iter().chain(moe) {
        checks.that((1..=MOST).contains(&value), &field, value, format!("1 to {MOST}"));
    }
    let world =
        [d.tp, d.pp, d.cp, d.dp].iter().try_fold(1u64, |product, &n| product.checked_mul(n));
    let fits = world.is_some_and(|world| world <= MOST) && d.pp.saturating_mul(d.vpp) <= MOST;
    checks.that(fits, "decisions.tp · pp · cp · dp", "so many", format!("at most {MOST} ranks"));
}

/// What a number may be, with the limit that keeps products from overflowing.
fn range_in_words(values: Values) -> String {
    match values {
        Values::Number { least, most: MOST } => format!("{least} to {MOST}"),
        other => other.in_words(),
    }
}

/// Values that a plan states twice are equal.
fn inputs(plan: &Plan, checks: &mut Checks) {
    let i = &plan.inputs;
    checks.equals("inputs.model.seq_len", i.model.seq_len, i.seq_len);
    checks.equals("inputs.model.global_batch", i.model.global_batch, i.global_batch);
    let attention = &i.model.attention;
    let (heads, kv_heads) = (attention.heads, attention.kv_heads);
    checks.divides("inputs.model.attention.kv_heads", kv_heads, "heads", heads);
    if let Some(moe) = &i.model.moe {
        let range = format!("1 to experts ({})", moe.experts);
        checks.that(moe.top_k <= moe.experts, "inputs.model.moe.top_k", moe.top_k, range);
    }
    let (reserved, hbm) = (i.cluster.reserved_bytes, i.cluster.hbm_bytes);
    let room = format!("less than hbm_bytes ({hbm})");
    checks.that(reserved < hbm, "inputs.cluster.reserved_bytes", reserved, room);
    let kept = (0.0..=MOST_HEADROOM).contains(&i.headroom);
    checks.that(kept, "inputs.headroom", i.headroom, format!("0 to {MOST_HEADROOM}"));
    let peak = i.cluster.peak_flops;
    let positive = peak.is_finite() && peak > 0.0;
    checks.that(positive, "inputs.cluster.peak_flops", peak, "above 0");
    levels(plan, checks);
}

/// Figures of the model that are neither sizes nor counts are within the limits that its reader
/// has.
fn model(model: &ModelSpec, checks: &mut Checks) {
    let numerics = &model.numerics;
    let some = |cap: Option<f64>| cap.unwrap_or(1.0);
    let (moe, window) = (model.moe.as_ref(), model.attention.window);
    let yarn = numerics.yarn.as_ref();
    let reals = [
        ("numerics.norm_eps", numerics.norm_eps, f64::MIN_POSITIVE, 1.0),
        ("numerics.rope_theta", numerics.rope_theta, 1.0, 1e12),
        ("numerics.query_pre_attn_scalar", numerics.query_pre_attn_scalar, f64::MIN_POSITIVE, 1e12),
        ("numerics.embedding_scale", numerics.embedding_scale, f64::MIN_POSITIVE, 1e12),
        ("numerics.yarn.factor", yarn.map_or(1.0, |yarn| yarn.factor), 1.0, 1e6),
        ("numerics.yarn.beta_fast", some(yarn.map(|yarn| yarn.beta_fast)), f64::MIN_POSITIVE, 1e6),
        ("numerics.yarn.beta_slow", some(yarn.map(|yarn| yarn.beta_slow)), f64::MIN_POSITIVE, 1e6),
        ("attention.soft_cap", some(model.attention.soft_cap), f64::MIN_POSITIVE, 1e9),
        ("final_soft_cap", some(model.final_soft_cap), f64::MIN_POSITIVE, 1e9),
        ("dropout", model.dropout, 0.0, 1.0 - f64::EPSILON),
        ("moe.aux_loss", moe.map_or(0.0, |moe| moe.aux_loss), 0.0, 1e6),
        ("moe.losses.z_loss", moe.map_or(0.0, |moe| moe.losses.z_loss), 0.0, 1e6),
        ("moe.imbalance", moe.map_or(1.0, |moe| moe.imbalance), 1.0, MAX_IMBALANCE),
        (
            "moe.capacity_factor",
            some(moe.and_then(|moe| moe.capacity_factor)),
            f64::MIN_POSITIVE,
            1e6,
        ),
    ];
    for (name, value, least, most) in reals {
        let least_in_words =
            if least == f64::MIN_POSITIVE { "above 0".to_owned() } else { least.to_string() };
        let valid = format!("{least_in_words} to {most}");
        checks.that((least..=most).contains(&value), &format!("inputs.model.{name}"), value, valid);
    }
    let positions = yarn.map_or(1, |yarn| yarn.original_positions);
    let rises = yarn.is_none_or(|yarn| yarn.beta_slow < yarn.beta_fast);
    let slow = yarn.map_or(1.0, |yarn| yarn.beta_slow);
    checks.that(rises, "inputs.model.numerics.yarn.beta_slow", slow, "below beta_fast");
    let turns = yarn.is_none() || model.positions == Positions::Rope && numerics.rope_theta > 1.0;
    let theta = numerics.rope_theta;
    checks.that(turns, "inputs.model.numerics.rope_theta", theta, "above 1, with rope, for yarn");
    let name = "inputs.model.numerics.yarn.original_positions";
    checks.that(positions > 0, name, positions, "1 or more");
    let (head_dim, rotary) = (model.attention.head_dim, model.attention.rotary_dim);
    let part = |width: u64| width > 0 && width.is_multiple_of(2) && width < head_dim;
    let whole_heads = model.attention.mla.is_none() && model.positions == Positions::Rope;
    checks.that(
        rotary.is_none_or(|width| part(width) && whole_heads),
        "inputs.model.attention.rotary_dim",
        rotary.unwrap_or(head_dim),
        format!("with rope and without mla, an even number below head_dim ({head_dim})"),
    );
    let norms = model.norm.per_layer;
    checks.that([2, 4].contains(&norms), "inputs.model.norm.per_layer", norms, "2 or 4");
    let tokens = window.map_or(1, |window| window.tokens);
    checks.that(tokens > 0, "inputs.model.attention.window.tokens", tokens, "1 or more");
    let every = window.and_then(|window| window.full_every).unwrap_or(2);
    checks.that(every >= 2, "inputs.model.attention.window.full_every", every, "2 or more");
    if let Positions::Learned { max } = model.positions {
        let valid = format!("at least seq_len ({})", model.seq_len);
        checks.that(max >= model.seq_len, "inputs.model.positions.learned.max", max, valid);
    }
}

/// Link domains nest: innermost first, the last holds all ranks.
fn levels(plan: &Plan, checks: &mut Checks) {
    let levels = &plan.inputs.cluster.level_gpus;
    let grows = levels.windows(2).all(|pair| pair[0] <= pair[1]);
    let whole = levels.last() == Some(&plan.inputs.gpus);
    let positive = levels.iter().all(|&gpus| gpus > 0);
    let valid = format!("rising domain sizes that end with gpus ({})", plan.inputs.gpus);
    let words = format!("{levels:?}");
    checks.that(grows && whole && positive, "inputs.cluster.level_gpus", words, valid);
}

fn degrees(plan: &Plan, checks: &mut Checks) {
    let (d, model) = (&plan.decisions, &plan.inputs.model);
    checks.equals("decisions.tp · pp · cp · dp", d.gpus(), plan.inputs.gpus);
    for row in Decision::ALL {
        let number = (row.number)(d).unwrap_or(1);
        for size in row.divides {
            let Some(whole) = size.of(model) else { continue };
            checks.divides(&format!("decisions.{}", row.name), number, size.in_words(), whole);
        }
    }
    let (stages, layers) = (d.stages() as u64, model.layers as u64);
    let most = format!("a number of stages of at most layers ({layers})");
    checks.that(d.vpp == 1 || stages <= layers, "decisions.vpp", d.vpp, &most);
    checks.that(d.pp <= layers, "decisions.pp", d.pp, &most);
    let splits = (model.seq_len / d.cp).is_multiple_of(d.tp) && d.tp > 1;
    let valid = "false, or tp above 1 that divides a rank's tokens";
    checks.that(
        !d.sequence_parallel || splits,
        "decisions.sequence_parallel",
        d.sequence_parallel,
        valid,
    );
}

fn batch(plan: &Plan, checks: &mut Checks) {
    let (d, batch) = (&plan.decisions, plan.inputs.global_batch);
    let run = d.micro_batch.saturating_mul(d.micro_batches).saturating_mul(d.dp);
    let valid = format!("global_batch / dp / micro_batch ({batch} / {} / {})", d.dp, d.micro_batch);
    checks.that(run == batch, "decisions.micro_batches", d.micro_batches, valid);
}

fn context(plan: &Plan, checks: &mut Checks) {
    let (d, model) = (&plan.decisions, &plan.inputs.model);
    let pieces = match d.cp_style {
        _ if d.cp == 1 => 1,
        CpStyle::Zigzag | CpStyle::AllGather => 2 * d.cp,
        CpStyle::Hybrid => 2 * d.cp / d.cp_ulysses * d.cp_ulysses,
        CpStyle::Ring | CpStyle::Ulysses => d.cp,
    };
    let cuts = format!("one that cuts seq_len ({}) into whole pieces", model.seq_len);
    checks.that(model.seq_len.is_multiple_of(pieces), "decisions.cp", d.cp, cuts);
    let (ulysses, valid) = match d.cp_style {
        _ if d.cp == 1 => (d.cp_ulysses == 1, "1 with cp 1".to_owned()),
        CpStyle::Ulysses => (d.cp_ulysses == d.cp, format!("cp ({}) with ulysses", d.cp)),
        CpStyle::Hybrid => (
            d.cp_ulysses > 1 && d.cp_ulysses < d.cp && d.cp.is_multiple_of(d.cp_ulysses),
            format!("a divisor of cp ({}) between 1 and it", d.cp),
        ),
        _ => (d.cp_ulysses == 1, format!("1 with {}", d.cp_style)),
    };
    checks.that(ulysses, "decisions.cp_ulysses", d.cp_ulysses, valid);
    let ways = d.tp.saturating_mul(d.cp_ulysses);
    checks.divides("decisions.tp · cp_ulysses", ways, "heads", model.attention.heads);
}

fn experts(plan: &Plan, checks: &mut Checks) {
    let (d, model) = (&plan.decisions, &plan.inputs.model);
    let world = d.tp * d.cp * d.dp;
    let Some(moe) = &model.moe else {
        let named = [("ep", d.ep), ("etp", d.etp), ("moe_overlap_degree", d.moe_overlap_degree)];
        for (name, degree) in named {
            let valid = "1: the model has no experts";
            checks.that(degree == 1, &format!("decisions.{name}"), degree, valid);
        }
        let overlap = d.moe_overlap == MoeOverlap::None;
        checks.that(overlap, "decisions.moe_overlap", d.moe_overlap, "none: no experts");
        let no_factor = d.capacity_factor.is_none();
        checks.that(no_factor, "decisions.capacity_factor", "given", "absent: no experts");
        return;
    };
    let waits = d.aux_scope.needs_all_forwards(model);
    let valid = "gpipe, looped_bfs or naive: the load-balancing loss of the global batch needs \
                 every forward pass before the first backward pass";
    let known = !waits || d.schedule.runs_forwards_first();
    checks.that(known, "decisions.schedule", d.schedule, valid);
    let (z_loss, has_sums) = (moe.losses.z_loss, moe.router == Router::Softmax);
    let valid = "0: sigmoid scores have no log-sum-exp";
    checks.that(z_loss == 0.0 || has_sums, "inputs.model.moe.losses.z_loss", z_loss, valid);
    let (rate, has_bias) = (moe.bias_update_rate, moe.router == Router::SigmoidBias);
    let valid = "0: softmax scores have no selection bias";
    checks.that(rate == 0.0 || has_bias, "inputs.model.moe.bias_update_rate", rate, valid);
    let moves = rate == 0.0 || (MIN_BIAS_UPDATE_RATE..=1e6).contains(&rate);
    let valid = "0, or 0.000001 to 1000000";
    checks.that(moves, "inputs.model.moe.bias_update_rate", rate, valid);
    checks.divides("decisions.etp", d.etp, "tp", d.tp);
    checks.divides("decisions.etp · ep", d.etp.saturating_mul(d.ep), "tp·cp·dp", world);
    let apart = d.ep == 1 || d.tp == 1 || d.sequence_parallel;
    let valid = "true: with ep and tp above 1 ranks must hold different tokens";
    checks.that(apart, "decisions.sequence_parallel", d.sequence_parallel, valid);
    let chunks = match d.moe_overlap {
        MoeOverlap::None | MoeOverlap::Pair => d.moe_overlap_degree == 1,
        MoeOverlap::Tutel | MoeOverlap::Ampipe => d.moe_overlap_degree > 1,
    };
    let valid = "above 1 with ampipe or tutel, else 1";
    checks.that(chunks, "decisions.moe_overlap_degree", d.moe_overlap_degree, valid);
    let overlaps = d.moe_overlap == MoeOverlap::None || d.ep > 1;
    checks.that(overlaps, "decisions.moe_overlap", d.moe_overlap, "none with ep 1");
    let pairs = d.moe_overlap != MoeOverlap::Pair || d.schedule.has_pairs();
    let valid = "overlapped_1f1b, dualpipe or dualpipe_v: moe_overlap pair needs a schedule with \
                 pairs";
    checks.that(pairs, "decisions.schedule", d.schedule, valid);
    let word =
        |factor: Option<f64>| factor.map_or("absent".to_owned(), |factor| factor.to_string());
    let (found, model) = (d.capacity_factor, moe.capacity_factor);
    let valid = format!("inputs.model.moe.capacity_factor ({})", word(model));
    checks.that(found == model, "decisions.capacity_factor", word(found), valid);
}

fn state(plan: &Plan, checks: &mut Checks) {
    let d = &plan.decisions;
    let replicas = d.dp * d.cp;
    let (holds, valid) = if d.zero_stage == 0 {
        (d.dp_shard == 1, "1 with zero_stage 0".to_owned())
    } else {
        let valid = format!("a divisor of dp·cp ({replicas}) above 1");
        (d.dp_shard > 1 && replicas.is_multiple_of(d.dp_shard), valid)
    };
    checks.that(holds, "decisions.dp_shard", d.dp_shard, valid);
    if d.offload == Offload::Activations {
        let whole = !d.schedule.splits_backward();
        let valid = "none or optimizer: the schedule splits backward";
        checks.that(whole, "decisions.offload", d.offload, valid);
        let alike = d.recompute != RecomputePolicy::PerLayer && d.recompute_group == 1;
        let valid = "none or optimizer: layers recompute per_layer or in groups";
        checks.that(alike, "decisions.offload", d.offload, valid);
    }
    let useful = d.pp > 1 && d.schedule.splits_backward() && !d.vocab.over_pipeline();
    let valid = "false; true only with pp above 1, a schedule that splits backward, and no vocabulary passes";
    let field = "decisions.post_validation";
    checks.that(!d.post_validation || useful, field, d.post_validation, valid);
}

/// The schedule exists for these counts and runs to its end.
fn schedule(plan: &Plan, checks: &mut Checks) -> Option<Schedule> {
    let d = &plan.decisions;
    let wanted = d.schedule != ScheduleName::Overlapped1F1B || d.moe_overlap == MoeOverlap::Pair;
    let valid = "interleaved_1f1b or 1f1b: overlapped_1f1b is for moe_overlap pair";
    checks.that(wanted, "decisions.schedule", d.schedule, valid);
    let apart = d.pp > 1 || d.vpp == 1;
    checks.that(apart, "decisions.vpp", d.vpp, "1: several chunks need pp above 1");
    let hosts = d.schedule.takes_vocab() && d.pp > 1;
    let valid = "first_last, redistribute or tensor; the others need pp above 1 and a schedule with \
                 vocabulary passes, such as 1f1b";
    checks.that(!d.vocab.over_pipeline() || hosts, "decisions.vocab", d.vocab, valid);
    let grouped = d.recompute_group == 1 || d.recompute == RecomputePolicy::Full;
    let valid = "1; more only where recompute is full";
    checks.that(grouped, "decisions.recompute_group", d.recompute_group, valid);
    let whole = !d.fused_loss || !d.vocab.over_pipeline();
    let valid = "false with vocabulary passes, whose logits wait for all ranks";
    checks.that(whole, "decisions.fused_loss", d.fused_loss, valid);
    let placed = d.pass_times.is_none() || d.vocab.over_pipeline();
    checks.that(placed, "decisions.pass_times", "given", "absent without vocabulary passes");
    let run = d.schedule.micro_batches_run(d.micro_batches as usize) as u64;
    let one = run == d.micro_batches;
    checks.that(one, "decisions.schedule", d.schedule, "another: naive runs one micro-batch");
    if d.pp.saturating_mul(d.vpp).saturating_mul(d.micro_batches) > MOST_PASSES {
        return None;
    }
    let searched = plan.order.is_empty() || d.schedule == ScheduleName::ZbAuto;
    checks.that(searched, "order", "an order", "none: only zb_auto has an order of its own");
    let ends = plan.order.is_empty() || !d.vocab.over_pipeline();
    checks.that(ends, "order", "an order", "none with vocabulary passes");
    let own = match plan.own_order() {
        Ok(own) => own,
        Err(error) => {
            checks.that(false, "order", "an order", error);
            return None;
        }
    };
    match own.map_or_else(|| built(d), Ok) {
        Ok(schedule) => Some(schedule),
        Err(error) => {
            checks.that(false, "decisions.schedule", d.schedule, error);
            None
        }
    }
}

fn built(d: &Decisions) -> Result<Schedule, ScheduleError> {
    let (p, m, v) = (d.pp as usize, d.micro_batches as usize, d.vpp as usize);
    d.schedule.check(p, m, v)?;
    let schedule = d.build_schedule()?;
    schedule.validate()?;
    Ok(schedule)
}

/// Stages follow one another through all layers, each on the pipeline rank the schedule gives it.
fn stage_map(plan: &Plan, schedule: Option<&Schedule>, checks: &mut Checks) {
    let (d, model) = (&plan.decisions, &plan.inputs.model);
    let stages = d.stages();
    checks.that(
        plan.stages.len() == stages,
        "stages",
        plan.stages.len(),
        format!("as many as the schedule has over pp·vpp chunks ({stages})"),
    );
    let mut next = 0;
    for (index, stage) in plan.stages.iter().enumerate() {
        let field = |name: &str| format!("stages[{index}].{name}");
        checks.equals(&field("stage"), stage.stage, index);
        checks.equals(&field("first_layer"), stage.first_layer, next);
        next = stage.first_layer.saturating_add(stage.layers);
        checks.that(
            stage.layers > 0 || may_be_empty(d.vocab, index, stages),
            &field("layers"),
            stage.layers,
            "1 or more",
        );
        if let Some(schedule) = schedule.filter(|schedule| index < schedule.stages()) {
            checks.equals(&field("device"), stage.device, schedule.rank_of(index));
            checks.equals(&field("chunk"), stage.chunk, schedule.chunk_of(index));
            copy(stage, schedule, index, checks);
        }
        shares(d, stage, index, checks);
        recompute(d.recompute, model, stage, index, checks);
    }
    let valid = format!("layers that end at {}", model.layers);
    checks.that(next == model.layers, "stages", format!("layers that end at {next}"), valid);
    even(plan, checks);
}

/// The second copy is on the pipeline rank that the schedule's other direction gives it.
fn copy(stage: &Stage, schedule: &Schedule, index: usize, checks: &mut Checks) {
    let twice = schedule.layout.copies() > 1;
    let valid = twice.then(|| {
        let (rank, chunk) = schedule.layout.holder(schedule.ranks, index, 1);
        (rank, usize::from(chunk))
    });
    let found = stage.copy.as_ref().map(|copy| (copy.device, copy.chunk));
    let word = |at: Option<(usize, usize)>| match at {
        Some((rank, chunk)) => format!("on pipeline rank {rank}, chunk {chunk}"),
        None => "absent".to_owned(),
    };
    checks.that(found == valid, &format!("stages[{index}].copy"), word(found), word(valid));
}

/// `first_last` means equal chunks of layers.
fn even(plan: &Plan, checks: &mut Checks) {
    if plan.decisions.vocab != Vocab::FirstLast {
        return;
    }
    let counts = plan.stages.iter().map(|stage| stage.layers);
    let (least, most) = (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0));
    let valid = "first_last only with even layers: at most one more on a stage than on another, with \
                 several chunks per pipeline rank none";
    let uneven = if plan.decisions.vpp == 1 { 1 } else { 0 };
    checks.that(most <= least + uneven, "decisions.vocab", plan.decisions.vocab, valid);
}

fn shares(d: &Decisions, stage: &Stage, index: usize, checks: &mut Checks) {
    let valid = VocabShare::new(d, index);
    let pairs = [
        ("input", stage.vocab_share.input, valid.input),
        ("output", stage.vocab_share.output, valid.output),
    ];
    for (name, found, valid) in pairs {
        let field = format!("stages[{index}].vocab_share.{name}");
        checks.that((found - valid).abs() < 1e-9, &field, found, valid);
    }
}

/// Recompute counts add up to the stage's layers of each kind and match the decision.
fn recompute(
    decision: RecomputePolicy,
    model: &ModelSpec,
    stage: &Stage,
    index: usize,
    checks: &mut Checks,
) {
    let field = format!("stages[{index}].recompute");
    let kinds = kinds_in(model, stage.first_layer, stage.layers);
    let named: BTreeMap<&str, usize> =
        stage.recompute.iter().map(|(kind, counts)| (kind.as_str(), counts.total())).collect();
    let valid = format!("counts that add up to the stage's layers: {kinds:?}");
    checks.that(named == kinds, &field, format!("{named:?}"), valid);
    for (kind, counts) in &stage.recompute {
        let RecomputeCounts { none, selective, full } = *counts;
        let uniform = match decision {
            RecomputePolicy::None => selective + full == 0,
            RecomputePolicy::Selective => none + full == 0,
            RecomputePolicy::Full => none + selective == 0,
            RecomputePolicy::PerLayer => true,
        };
        let words = format!("none {none}, selective {selective}, full {full}");
        let valid = format!("{decision} alone, as decisions.recompute says");
        checks.that(uniform, &format!("{field}.{kind}"), words, valid);
    }
}

/// Totals add up, and the stages of every pipeline rank fit into memory together.
fn memory(plan: &Plan, checks: &mut Checks) {
    for (index, stage) in plan.stages.iter().enumerate() {
        let field = format!("stages[{index}].memory.total");
        checks.equals(&field, stage.memory.total, stage.memory.sum());
        if let Some(copy) = &stage.copy {
            let field = format!("stages[{index}].copy.memory.total");
            checks.equals(&field, copy.memory.total, copy.memory.sum());
        }
    }
    let room = plan.inputs.room_bytes();
    for (rank, memory) in plan.device_memory().iter().enumerate() {
        let field = format!("stages on pipeline rank {rank}: memory.total together");
        checks.that(
            memory.total <= room,
            &field,
            memory.total,
            format!("at most hbm_bytes without inputs.headroom ({room})"),
        );
    }
}

/// Rates and shares that follow from the iteration's time are what the plan states.
fn predicted(plan: &Plan, checks: &mut Checks) {
    let found = &plan.predicted;
    let positive = found.iteration_s.is_finite() && found.iteration_s > 0.0;
    checks.that(positive, "predicted.iteration_s", found.iteration_s, "above 0");
    let total_s = found.breakdown.total_s();
    checks.that(
        close(total_s, found.iteration_s),
        "predicted.breakdown",
        format!("parts that add up to {total_s} s"),
        format!("parts that add up to iteration_s ({})", found.iteration_s),
    );
    for (name, seconds) in found.breakdown.parts() {
        let least = if name == "bubble" { -1e-6 * found.iteration_s } else { 0.0 };
        let field = format!("predicted.breakdown.{name}_s");
        checks.that(seconds >= least, &field, seconds, "0 or more");
    }
    let timing = Timing {
        iteration_s: found.iteration_s,
        breakdown: found.breakdown,
        error_band: found.error_band.clone(),
    };
    let derived = Predicted::new(&plan.inputs, &plan.decisions, &plan.stages, timing);
    for ((name, found), (_, derived)) in rates(found).into_iter().zip(rates(&derived)) {
        checks.that(close(found, derived), &format!("predicted.{name}"), found, derived);
    }
    checks.equals(
        "predicted.peak_memory_bytes",
        found.peak_memory_bytes,
        derived.peak_memory_bytes,
    );
    checks.that(found.mfu <= 1.0, "predicted.mfu", found.mfu, "at most 1");
    let band = found.error_band.relative;
    checks.that((0.0..1.0).contains(&band), "predicted.error_band.relative", band, "0 up to 1");
    let guess = found.error_band.basis == Basis::Uncalibrated;
    let prior = ErrorBand::UNCALIBRATED;
    let valid = format!("{prior} where it is uncalibrated");
    checks.that(!guess || band == prior, "predicted.error_band.relative", band, valid);
    let days = (found.training_days, derived.training_days);
    let same = match days {
        (Some(found), Some(derived)) => close(found, derived),
        (found, derived) => found == derived,
    };
    let word = |days: Option<f64>| days.map_or("absent".to_owned(), |days| days.to_string());
    checks.that(same, "predicted.training_days", word(days.0), word(days.1));
}

fn rates(predicted: &Predicted) -> [(&'static str, f64); 5] {
    [
        ("tokens_per_s_per_gpu", predicted.tokens_per_s_per_gpu),
        ("model_tflops_per_gpu", predicted.model_tflops_per_gpu),
        ("hardware_tflops_per_gpu", predicted.hardware_tflops_per_gpu),
        ("mfu", predicted.mfu),
        ("bubble_fraction", predicted.bubble_fraction),
    ]
}

fn proof(plan: &Plan, checks: &mut Checks) {
    let proof = &plan.proof;
    let cut = [proof.cut_by_time, proof.cut_by_memory, proof.cut_by_dominance];
    let cut = cut.into_iter().fold(0u64, u64::saturating_add);
    let settled = cut.saturating_add(proof.placed);
    let (holds, valid) = if proof.proven_optimal {
        (
            settled == proof.candidates,
            format!("those cut and placed ({settled}), as all are settled"),
        )
    } else {
        (settled <= proof.candidates, format!("no less than those cut and placed ({settled})"))
    };
    checks.that(holds && proof.candidates > 0, "proof.candidates", proof.candidates, valid);
    let gap =
        if proof.proven_optimal { proof.gap == 0.0 } else { (0.0..=1.0).contains(&proof.gap) };
    checks.that(gap, "proof.gap", proof.gap, "0 where proven_optimal, else 0 to 1");
    let said = proof.proven_optimal || proof.gap > 0.0;
    checks.that(said, "proof.proven_optimal", proof.proven_optimal, "true where proof.gap is 0");
    let searched = (0.0..=proof.gap).contains(&proof.searched_gap);
    checks.that(searched, "proof.searched_gap", proof.searched_gap, "0 to proof.gap");
}

/// Equal to as many digits as plans keep.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs())
}
