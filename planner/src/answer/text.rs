//! Answers on one screen: aligned, without colour, units on every number.

use crate::answer::report::{Alternative, Answer, Idle, fullest, warnings};
use crate::answer::unsearched::FasterWith;
use crate::request::restrictions::decision_of;
use models::decisions::{
    AuxScope, Decisions, DpReduction, MoeOverlap, Offload, RankOrder, RecomputePolicy,
    USUAL_BUCKET_MIB,
};
use models::model::{ModelSpec, params};
use models::placement::StageMemory;
use models::plan::{Basis, Breakdown, ErrorBand, Plan, Predicted};

/// A labelled line of the screen.
pub fn line(label: &str, text: &str) -> String {
    format!("{label:<11}{text}").trim_end().to_owned() + "\n"
}

/// A text in lines of at most so many columns, broken at blanks.
pub fn wrapped(text: &str, columns: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        let used = line.chars().count();
        if used > 0 && used + 1 + word.chars().count() > columns {
            lines.push(word.to_owned());
        } else {
            *line = if used == 0 { word.to_owned() } else { format!("{line} {word}") };
        }
    }
    lines.join("\n") + "\n"
}

/// A share as signed percent. A value that rounds to zero has no minus sign.
pub fn signed_percent(share: f64) -> String {
    let percent = 100.0 * share;
    format!("{:+.2} %", if percent.abs() < 0.005 { 0.0 } else { percent })
}

/// The screen of `plan` and `estimate`.
pub fn screen(answer: &Answer) -> String {
    let (rank, _, short) = fullest(&answer.plan);
    let mut text = summary(&answer.plan);
    if let Some(worst) = answer.worst_case_bytes {
        text += &line("worst", &worst_case(&answer.plan, worst));
    }
    if !answer.feasible {
        text += &line("fits", &does_not_fit(rank, short));
    }
    text + &line("proven", &proven(answer)) + &line("searched", &searched(answer))
}

/// The part of the screen that follows from the plan alone.
pub fn summary(plan: &Plan) -> String {
    let (rank, memory, _) = fullest(plan);
    let warnings: String = warnings(plan).iter().map(|warning| line("warning", warning)).collect();
    heading(plan)
        + "\n"
        + &line("plan", &parallel_decisions(&plan.decisions))
        + &line("", &state_decisions(&plan.decisions))
        + &line("time", &time(&plan.predicted))
        + &unseen_software(&plan.predicted.error_band)
        + &counted_attention(&plan.inputs.model)
        + &line("memory", &memory_line(plan, rank, &memory))
        + &warnings
        + &line("breakdown", &spent(plan))
}

/// The model, the cluster and the batch.
pub fn heading(plan: &Plan) -> String {
    let inputs = &plan.inputs;
    let (model, cluster) = (&inputs.model, &inputs.cluster);
    let nodes = inputs.gpus.div_ceil(cluster.node_gpus);
    let on_node = cluster.node_gpus.min(inputs.gpus);
    let what =
        format!("{} parameters, {} layers", count(params::total(model) as f64), model.layers);
    let plural = if nodes == 1 { "node" } else { "nodes" };
    let place = format!(
        "{}   {} {} on {} {plural} of {on_node}",
        cluster.name,
        thousands(inputs.gpus),
        cluster.device,
        thousands(nodes)
    );
    let tokens = inputs.global_batch * inputs.seq_len;
    let mut text = line(&format!("{:<10} ", model.name), &format!("{what}      {place}"));
    text += &line(
        "batch",
        &format!(
            "{} sequence{} x {} tokens    {} tokens a step",
            thousands(inputs.global_batch),
            if inputs.global_batch == 1 { "" } else { "s" },
            thousands(inputs.seq_len),
            count(tokens as f64)
        ),
    );
    for assumption in &model.assumptions {
        text += &line("assumed", assumption);
    }
    text + &auxiliary_loss(plan)
}

/// The auxiliary loss is a mean over micro-batches. Where their size was chosen, so was the loss.
fn auxiliary_loss(plan: &Plan) -> String {
    let has_one = plan.inputs.model.moe.as_ref().is_some_and(|moe| moe.aux_loss > 0.0);
    let of_each = plan.decisions.aux_scope == AuxScope::MicroBatch;
    let asked = |setting: &String| decision_of(setting) == "micro_batch";
    if !has_one || !of_each || plan.inputs.settings.iter().any(asked) {
        return String::new();
    }
    let size = plan.decisions.micro_batch;
    let plural = if size == 1 { "" } else { "s" };
    let words = format!("auxiliary loss of micro-batches of {size} sequence{plural}");
    line("assumed", &format!("{words}; --set micro_batch=N or aux_scope=global_batch changes it"))
}

/// Decisions in one line, without those that have no effect.
pub fn decisions(d: &Decisions) -> String {
    format!("{}    {}", parallel_decisions(d), state_decisions(d))
}

/// Degrees, micro-batches and schedule.
fn parallel_decisions(d: &Decisions) -> String {
    let plural = if d.micro_batches == 1 { "" } else { "es" };
    let micro_batches =
        format!("{} micro-batch{plural} of {}", thousands(d.micro_batches), d.micro_batch);
    format!("{}    {micro_batches}    {}", shape(d), d.schedule)
}

/// The decisions about state, memory and number format.
fn state_decisions(d: &Decisions) -> String {
    let loss = if d.fused_loss { ", fused loss" } else { "" };
    let mut parts = vec![format!("vocab {}{loss}", d.vocab), zero(d)];
    if d.recompute != RecomputePolicy::None {
        let group = match d.recompute_group {
            1 => String::new(),
            layers => format!(" by {layers} layers"),
        };
        parts.push(format!("recompute {}{group}", d.recompute));
    }
    match d.dp_reduction {
        DpReduction::Bucketed if d.dp_bucket_mib == USUAL_BUCKET_MIB => {}
        DpReduction::Bucketed => parts.push(format!("buckets of {} MiB", d.dp_bucket_mib)),
        other => parts.push(format!("{other} reduction")),
    }
    if d.offload != Offload::None {
        parts.push(format!("offload {}", d.offload));
    }
    if d.post_validation {
        parts.push("post-validation".to_owned());
    }
    match d.moe_overlap {
        MoeOverlap::None => {}
        MoeOverlap::Pair => parts.push("overlapped pairs".to_owned()),
        chunks => parts.push(format!("{chunks} {}", d.moe_overlap_degree)),
    }
    if let Some(factor) = d.capacity_factor {
        parts.push(format!("capacity factor {factor}"));
    }
    if d.rank_order != RankOrder::DpInner {
        parts.push(format!("ranks {}", d.rank_order));
    }
    parts.push(d.dtype.to_string());
    parts.join("    ")
}

/// Parallel degrees in one line.
pub fn shape(d: &Decisions) -> String {
    let chunks = match (d.layout().copies(), d.vpp) {
        (1, 1) => String::new(),
        (1, chunks) => format!(" ({chunks} chunks)"),
        (copies, _) => format!(" ({copies} copies)"),
    };
    let sequence = if d.sequence_parallel { " +sp" } else { "" };
    let mut parts = vec![format!("tp {}{sequence}", d.tp), format!("pp {}{chunks}", d.pp)];
    if d.cp > 1 {
        parts.push(format!("cp {} {}", d.cp, d.cp_style));
    }
    parts.push(format!("dp {}", d.dp));
    if d.ep > 1 || d.etp > 1 {
        parts.push(format!("ep {} etp {}", d.ep, d.etp));
    }
    parts.join(" · ")
}

fn zero(d: &Decisions) -> String {
    if d.zero_stage == 0 || d.dp_shard == d.dp * d.cp {
        format!("zero {}", d.zero_stage)
    } else {
        format!("zero {} over {} ranks", d.zero_stage, d.dp_shard)
    }
}

fn time(predicted: &Predicted) -> String {
    let days =
        predicted.training_days.map_or_else(String::new, |days| format!("    {days:.1} days"));
    format!(
        "{} a step {}    {} tokens/s/GPU    {:.1} % MFU{days}",
        seconds(predicted.iteration_s),
        band(&predicted.error_band),
        thousands(predicted.tokens_per_s_per_gpu.round() as u64),
        100.0 * predicted.mfu,
    )
}

/// Why the error band is wider: software features that no measured run has.
fn unseen_software(band: &ErrorBand) -> String {
    if band.unseen.is_empty() {
        return String::new();
    }
    let percent = 100.0 * band.relative;
    let lacking = band.unseen.join(", or ");
    let software = "no measured run of its software generation has";
    line("", &format!("±{percent:.0} %: {software} {lacking}"))
}

/// Attention that MFU counts, where that is less than all of it.
fn counted_attention(model: &ModelSpec) -> String {
    let kinds = (0..model.layers).map(|index| model.layer_kind(index));
    let windowed = kinds.filter(|kind| kind.windowed).count();
    let Some(window) = model.attention.window.filter(|_| windowed > 0) else {
        return String::new();
    };
    let [keys, all] = [window.tokens, model.seq_len].map(thousands);
    let layers = model.layers;
    line("", &format!("MFU counts {keys} of {all} keys a query in {windowed} of {layers} layers"))
}

fn band(band: &ErrorBand) -> String {
    let words = match band.basis {
        Basis::Uncalibrated => " (not yet validated)",
        Basis::Validated | Basis::Unseen => "",
    };
    format!("±{:.0} %{words}", 100.0 * band.relative)
}

fn memory_line(plan: &Plan, rank: usize, memory: &StageMemory) -> String {
    let (part, most) = largest_part(memory);
    let has_headroom = plan.inputs.headroom > 0.0 && memory.total <= plan.inputs.room_bytes();
    let headroom = if has_headroom { headroom(plan) } else { String::new() };
    format!(
        "{} of {} on pipeline rank {rank}, the fullest{headroom}; largest part: {part}, {}",
        bytes(memory.total),
        bytes(plan.inputs.cluster.hbm_bytes),
        bytes(most)
    )
}

/// What the fullest rank needs when the router sends it everything.
fn worst_case(plan: &Plan, worst: u64) -> String {
    let room = plan.inputs.cluster.hbm_bytes;
    let fits = if worst > room { "more than there is" } else { "which fits" };
    format!("{} if all tokens went to the experts of one rank, {fits}", bytes(worst))
}

fn headroom(plan: &Plan) -> String {
    let percent = (1000.0 * plan.inputs.headroom).round() / 10.0;
    format!(" ({percent} % kept free)")
}

fn largest_part(memory: &StageMemory) -> (&'static str, u64) {
    memory.parts().into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or(("parameters", 0))
}

fn does_not_fit(rank: usize, short: i64) -> String {
    if short > 0 {
        format!("no: pipeline rank {rank} needs {} more than there is", bytes(short as u64))
    } else {
        "no: host memory does not hold what is offloaded".to_owned()
    }
}

/// Parts of the iteration time, largest first, without those below half a percent.
fn spent(plan: &Plan) -> String {
    let predicted = &plan.predicted;
    let mut parts = predicted.breakdown.parts();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let percent = |seconds: f64| 100.0 * seconds / predicted.iteration_s;
    let shown = parts.into_iter().filter(|(_, seconds)| percent(*seconds) >= 0.5);
    let words = shown.map(|(name, seconds)| format!("{name} {:.0} %", percent(seconds)));
    words.collect::<Vec<_>>().join(" · ")
}

fn proven(answer: &Answer) -> String {
    let proof = &answer.proof;
    if answer.plan.decisions.post_validation && !proof.proven_optimal {
        return format!("within {:.1} % of what layers alone take", 100.0 * proof.gap);
    }
    let percent = |gap: f64| format!("within {:.1} % of the best", 100.0 * gap);
    let tried = match proof.searched_gap {
        0.0 => "the best".to_owned(),
        gap => percent(gap),
    };
    let verdict = match proof.gap {
        _ if proof.proven_optimal => "optimal by this cost model".to_owned(),
        gap if gap >= 1.0 => format!("{tried} of the placements tried, nothing of others"),
        gap => format!("{tried} of the cuts tried, {} of all cuts", percent(gap)),
    };
    let why = match (proof.searched_gap, answer.effort.limited) {
        (0.0, _) => "",
        (_, true) => "; --prove continues",
        (_, false) => "; integer programs may do no more work",
    };
    format!("{verdict}{why}")
}

/// What the search did.
fn searched(answer: &Answer) -> String {
    let (candidates, ilps) = (answer.proof.candidates, answer.proof.ilps);
    let plural = |count: u64| if count == 1 { "" } else { "s" };
    format!(
        "{} combination{}, {} integer program{}, {:.2} s",
        thousands(candidates),
        plural(candidates),
        thousands(ilps),
        plural(ilps),
        answer.effort.elapsed_s
    )
}

/// The lines of alternatives, and why there are fewer than were asked for.
pub fn close(answer: &Answer, asked: usize) -> String {
    let mut text = String::new();
    let own = &answer.plan.predicted.breakdown;
    for (index, other) in answer.alternatives.iter().enumerate() {
        let label = if index == 0 { "others" } else { "" };
        let shape = format!("{} · {}", shape(&other.decisions), other.decisions.schedule);
        let slower = signed_percent(other.slower);
        let within = within(other.gap);
        let words = format!("{shape:<52} {slower}   {}{within}", loss(own, other));
        text += &line(label, &words);
    }
    let found = answer.alternatives.len();
    let label = if found == 0 { "others" } else { "" };
    if found < asked {
        text += &line(
            label,
            &match answer.all_alternatives {
                true => {
                    "no others: every other pair of tp and pp, and every other schedule with this \
                     pair, takes over 25 % longer"
                        .to_owned()
                }
                false => {
                    format!("{found} of {asked}: the search ended before it had looked for more")
                }
            },
        );
    }
    text
}

/// How far an alternative may be from the best of its kind.
pub fn within(gap: f64) -> String {
    match gap {
        gap if gap < 5e-4 => String::new(),
        gap if gap < 1.0 => format!("  gap {:.1} %", 100.0 * gap),
        _ => "  nothing proven".to_owned(),
    }
}

/// How far from the least memory a plan may be that was to need the least.
pub fn least_memory(answer: &Answer) -> String {
    let Some(least_bytes) = answer.least_memory_bytes else { return String::new() };
    let needs_bytes = answer.plan.predicted.peak_memory_bytes;
    let text = match needs_bytes as f64 > 1.02 * least_bytes as f64 {
        false => "no plan fits in 2 % less memory".to_owned(),
        true => format!(
            "no plan fits in less than {}; what lies in between was not decided in the time: --prove continues",
            bytes(least_bytes)
        ),
    };
    line("least", &text)
}

/// GPUs that a plan made from another leaves idle.
pub fn idle(answer: &Answer) -> String {
    let Some(Idle { gpus, why }) = answer.idle else { return String::new() };
    let used = answer.plan.inputs.gpus;
    let [idle, used, all] = [gpus, used, used + gpus].map(thousands);
    line("idle", &format!("{idle} of {all} GPUs: {}; the gap is over plans on {used}", why.words()))
}

/// What a setting that was not searched would save.
pub fn faster_with(answer: &Answer) -> String {
    let own_s = answer.plan.predicted.iteration_s;
    let words = |with: &FasterWith| {
        let percent = 100.0 * (1.0 - with.iteration_s / own_s);
        let FasterWith { setting, iteration_s, idle } = with;
        let time = seconds(*iteration_s);
        let why = match idle {
            0 => "not searched unless set".to_owned(),
            1 => "1 GPU idle".to_owned(),
            idle => format!("{} GPUs idle", thousands(*idle)),
        };
        line("faster", &format!("{setting}: {time} a step, {percent:.1} % less; {why}"))
    };
    answer.faster_with.iter().map(words).collect()
}

/// What `--runnable` costs.
pub fn runnable(answer: &Answer) -> String {
    let text = match &answer.not_runnable {
        None if answer.not_runnable_gap > 0.0 => format!(
            "no faster plan was found without --runnable; one may take up to {:.1} % less, --prove continues",
            100.0 * answer.not_runnable_gap,
        ),
        None => "--runnable costs nothing: no plan is faster without it".to_owned(),
        Some(other) => format!(
            "--runnable costs {}: {} takes {}, but {}",
            signed_percent(other.costs),
            shape(&other.decisions),
            seconds(other.iteration_s),
            other.reasons.join("; "),
        ),
    };
    line("runnable", &text)
}

/// Seconds with a fitting unit, three significant digits.
pub fn seconds(value_s: f64) -> String {
    let (value, unit) = match value_s.abs() {
        x if x >= 1.0 || x == 0.0 => (value_s, "s"),
        x if x >= 1e-3 => (value_s * 1e3, "ms"),
        _ => (value_s * 1e6, "µs"),
    };
    format!("{} {unit}", three_digits(value))
}

/// Bytes in GB (or MB).
pub fn bytes(value: u64) -> String {
    let gb = value as f64 / 1e9;
    if gb >= 0.1 { format!("{gb:.1} GB") } else { format!("{:.1} MB", value as f64 / 1e6) }
}

/// A count with K, M, B or T, three significant digits.
pub fn count(value: f64) -> String {
    let units = [(1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")];
    let unit = units.into_iter().find(|(size, _)| value >= *size);
    unit.map_or_else(|| format!("{value:.0}"), |(size, name)| three_digits(value / size) + name)
}

fn three_digits(value: f64) -> String {
    let digits = match value.abs() {
        x if x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

/// A whole number with thousands separators.
pub fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The part of the iteration that grew most; and the one that shrank most, where that is no small
/// part of it: an alternative may be cut otherwise, and its busiest rank be another one.
pub fn loss(own: &Breakdown, other: &Alternative) -> String {
    let both = own.parts().into_iter().zip(other.breakdown.parts());
    let mut grown: Vec<_> = both.map(|(own, other)| (own.0, other.1 - own.1)).collect();
    grown.sort_by(|a, b| b.1.total_cmp(&a.1));
    let (Some((most, more_s)), Some((least, less_s))) = (grown.first(), grown.last()) else {
        return String::new();
    };
    if *more_s <= 0.0 || other.slower <= 0.0 {
        return String::new();
    }
    let loses = format!("{most} +{}", seconds(*more_s));
    match -less_s > NO_SMALL_PART * more_s {
        true => format!("{loses}, {least} {}", seconds(*less_s)),
        false => loses,
    }
}

/// What an alternative gains is shown from this part of its loss on.
const NO_SMALL_PART: f64 = 0.25;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(thousands(81_204_112), "81,204,112");
        assert_eq!(thousands(999), "999");
        assert_eq!(count(70.6e9), "70.6 B");
        assert_eq!(count(8.03e9), "8.03 B");
        assert_eq!(seconds(1.1849), "1.18 s");
        assert_eq!(seconds(0.0321), "32.1 ms");
        assert_eq!(bytes(61_300_000_000), "61.3 GB");
    }
}
