//! Explanations as text.

use crate::answer::explain::{FAR, Part, Tried, WhyNot};
use crate::answer::report::fullest;
use crate::answer::shortage::{Shortage, most_gpus};
use crate::answer::text::{
    bytes, decisions, line, loss, seconds, shape, signed_percent, thousands, within,
};
use crate::request::Request;
use crate::search::Found;
use models::mesh::Mesh;
use models::placement::{RecomputeCounts, Stage, StageMemory};
use models::plan::{Breakdown, Objective, Plan};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Hosts of the rank grid that are drawn from the start.
const NODES_DRAWN: u64 = 4;

/// GPUs of a host that are drawn.
const GPUS_DRAWN: u64 = 8;

/// Stages listed before the table is cut in the middle.
const STAGES_LISTED: usize = 24;

/// The rank grid: one row a host, one cell a GPU. Axes of size one are left out.
pub fn grid(plan: &Plan) -> String {
    let (gpus, node) = (plan.inputs.gpus, plan.inputs.cluster.node_gpus);
    let nodes = gpus.div_ceil(node);
    let mesh = Mesh::new(&plan.decisions);
    let order = plan.decisions.rank_order.to_string();
    let first = order.split('-').next().unwrap_or_default();
    let mut text = format!("ranks in the order {order}, {first} fastest; a row is a node\n");
    for index in 0..nodes {
        if index == NODES_DRAWN && nodes > NODES_DRAWN + 1 {
            let left_out = nodes - NODES_DRAWN - 1;
            text += &format!("  ... {} more\n", thousands(left_out));
        }
        if index < NODES_DRAWN || index + 1 == nodes {
            text += &row(&mesh, index, index * node..((index + 1) * node).min(gpus));
        }
    }
    text
}

fn row(mesh: &Mesh, node: u64, ranks: std::ops::Range<u64>) -> String {
    let shown = ranks.clone().take(GPUS_DRAWN as usize);
    let cells: Vec<String> = shown.map(|rank| cell(mesh, rank)).collect();
    let more = if ranks.end - ranks.start > GPUS_DRAWN { "  ..." } else { "" };
    format!("  {:>5}  {}{more}\n", thousands(node), cells.join("  "))
}

fn cell(mesh: &Mesh, rank: u64) -> String {
    let at = mesh.coordinates(rank);
    let axes = [
        ('t', at.tp, mesh.tp),
        ('c', at.cp, mesh.cp),
        ('d', at.dp, mesh.dp),
        ('p', at.pp, mesh.pp),
    ];
    let split = axes.into_iter().filter(|(_, _, size)| *size > 1);
    let words: Vec<String> = split
        .map(|(name, index, size)| {
            let width = (size - 1).to_string().len();
            format!("{name}{index:<width$}")
        })
        .collect();
    if words.is_empty() { "all".to_owned() } else { words.join(" ") }
}

/// Stages with their layers, recomputation and memory.
pub fn stages(plan: &Plan) -> String {
    let mut text = format!(
        "{:>5} {:>6} {:>5}  {:>9} {:>6}  {:<23} {:>10} {:>9} {:>9} {:>11} {:>9} {:>9}\n",
        "stage",
        "rank",
        "chunk",
        "layers",
        "vocab",
        "recompute none/sel/full",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "workspace",
        "total"
    );
    let count = plan.stages.len();
    for (index, stage) in plan.stages.iter().enumerate() {
        if count > STAGES_LISTED && index == STAGES_LISTED / 2 {
            text += &format!("  ... {} more\n", count - STAGES_LISTED);
        }
        if count <= STAGES_LISTED || index < STAGES_LISTED / 2 || index + STAGES_LISTED / 2 >= count
        {
            for (copy, (rank, memory)) in stage.held().enumerate() {
                let chunk = if copy == 0 { stage.chunk } else { 1 };
                text += &stage_row(stage, (rank, chunk), &memory);
            }
        }
    }
    text
}

fn stage_row(stage: &Stage, (rank, chunk): (usize, usize), memory: &StageMemory) -> String {
    let end = stage.first_layer + stage.layers;
    let layers = match stage.layers {
        0 => "none".to_owned(),
        _ => format!("{}-{}", stage.first_layer, end - 1),
    };
    let share = stage.vocab_share.input.max(stage.vocab_share.output);
    let sum =
        stage.recompute.values().fold(RecomputeCounts::default(), |sum, more| RecomputeCounts {
            none: sum.none + more.none,
            selective: sum.selective + more.selective,
            full: sum.full + more.full,
        });
    format!(
        "{:>5} {:>6} {:>5}  {layers:>9} {share:>6.3}  {:<23} {:>10} {:>9} {:>9} {:>11} {:>9} {:>9}\n",
        stage.stage,
        rank,
        chunk,
        format!("{}/{}/{}", sum.none, sum.selective, sum.full),
        bytes(memory.parameters),
        bytes(memory.gradients),
        bytes(memory.optimizer),
        bytes(memory.activations),
        bytes(memory.workspace),
        bytes(memory.total),
    )
}

/// All parts of the iteration time.
pub fn spent(plan: &Plan) -> String {
    let whole_s = plan.predicted.iteration_s;
    let used = plan.predicted.breakdown.parts().into_iter().filter(|(_, part_s)| *part_s != 0.0);
    used.map(|(name, part_s)| {
        format!("  {name:<10} {:>8}  {:>5.1} %\n", seconds(part_s), 100.0 * part_s / whole_s)
    })
    .collect()
}

/// The least gain that is printed, which is shown as 0.01 %.
const LEAST_GAIN: f64 = 5e-5;

/// The binding constraint.
pub fn binds(plan: &Plan, bought: &[Tried]) -> String {
    let (rank, memory, _) = fullest(plan);
    let room = bytes(plan.inputs.room_bytes().saturating_sub(memory.total));
    let by_time = plan.inputs.objective == Objective::Time;
    let (more, left) = match by_time {
        true => (
            "1 GB more".to_owned(),
            format!("{room} left on the fullest rank (pipeline rank {rank})"),
        ),
        // The device has more, which such a plan is to leave.
        false => (
            format!("1 GB more than its {}", bytes(memory.total)),
            format!("the device has {room} more"),
        ),
    };
    let more_memory = bought.first();
    let gain = more_memory.and_then(|tried| tried.best.as_ref()).map_or(0.0, |best| -best.slower);
    let undecided = more_memory.is_some_and(|tried| tried.why_not == Some(WhyNot::Undecided));
    let words = match gain >= LEAST_GAIN {
        true => format!("memory: {more} would save {:.2} %", 100.0 * gain),
        false if undecided => format!("not decided in the time: whether {more} would save time"),
        false => format!("{more} of memory changes nothing"),
    };
    line("limit", &format!("{words}; {left}"))
}

/// The heading of a part of the explanation, whose searches take `each` at most.
pub fn heading(part: Part, plain: &str, each: Option<Duration>) -> String {
    let each = each.filter(|each| *each < Duration::from_secs(3600));
    let limit = each.map_or_else(String::new, |each| {
        format!(", for up to {} each", seconds(each.as_secs_f64()))
    });
    match part {
        Part::Considered => {
            format!("alternatives: one decision is set, all others are searched again{limit}\n")
        }
        Part::Bought => "effect of better hardware\n".to_owned(),
        Part::Later => {
            "better rows found since; they replace those of the same name above\n".to_owned()
        }
        Part::Plain => format!("the plain plan: {plain}\n"),
    }
}

/// A change that is faster than the plan, whose search was stopped before it looked there.
pub fn faster(tried: &Tried) -> String {
    let percent = -100.0 * tried.slower();
    let text = format!(
        "{} takes {percent:.2} % less than this plan: plan again with --time-limit 10, or with --set",
        tried.what
    );
    line("faster", &text)
}

/// The line of an alternative.
pub fn tried(plan: &Plan, part: Part, tried: &Tried) -> String {
    let own = &plan.predicted.breakdown;
    match part {
        Part::Considered | Part::Later => tried_row(own, tried),
        Part::Bought => bought_row(tried),
        Part::Plain => tried_row(own, &Tried { what: "1f1b".to_owned(), ..tried.clone() }),
    }
}

fn tried_row(own: &Breakdown, tried: &Tried) -> String {
    let what = format!("  {:<16}", tried.what);
    match &tried.best {
        None => format!("{what} {}\n", tried.why_not.map_or(String::new(), why_not)),
        Some(best) => format!(
            "{what} {:>10}  {:<52} {}{}\n",
            signed_percent(best.slower),
            format!("{} · {}", shape(&best.decisions), best.decisions.schedule),
            loss(own, best),
            within(best.gap)
        ),
    }
}

fn why_not(why: WhyNot) -> String {
    match why {
        WhyNot::Excluded => "--set excludes it".to_owned(),
        WhyNot::DoesNotExist => "not possible: no other decisions allow it".to_owned(),
        WhyNot::DoesNotFit => format!("nothing that fits takes less than {FAR:.0} times as long"),
        WhyNot::TooSlow => format!("takes over {FAR:.0} times as long"),
        WhyNot::Undecided => "not decided in the time; --prove continues".to_owned(),
    }
}

fn bought_row(tried: &Tried) -> String {
    let gain = tried.best.as_ref().map_or(0.0, |best| -best.slower);
    let words = match &tried.best {
        Some(best) if gain >= LEAST_GAIN => {
            format!("{:.2} % less time: {}", 100.0 * gain, decisions(&best.decisions))
        }
        _ if tried.why_not == Some(WhyNot::Undecided) => "nothing found in the time".to_owned(),
        _ => "nothing".to_owned(),
    };
    format!("  {:<30} {words}\n", tried.what)
}

/// The message where nothing fits: by how much, what takes the memory, and what would fit.
pub fn shortage(request: &Request, found: &Shortage) -> String {
    let Request { model, gpus, cluster, .. } = request;
    let device = &cluster.device;
    let mut text =
        format!("error: nothing fits: {} on {} x {}\n", model.name, thousands(*gpus), device.name);
    if let Some(leanest) = &found.leanest {
        let (at, need) = neediest(leanest);
        let has = available_bytes(request);
        let besides = match request.headroom {
            0.0 => String::new(),
            share => format!(" after {:.0} % headroom", 100.0 * share),
        };
        text += &line(
            "  limit",
            &format!(
                "memory of pipeline rank {at}: the least found is {} (to {:.0} %), {} more than there is{besides}",
                bytes(need as u64),
                100.0 * tolerance(found),
                bytes((need - has).max(0.0) as u64)
            ),
        );
        text += &line("  least", &decisions(&leanest.decisions));
        text += &line("  memory", &consumers(leanest, at));
    }
    if found.leanest.is_none() && found.complete {
        text += &line("  limit", "host memory, with what is offloaded to it");
    }
    for (index, (change, way)) in found.remedies.iter().enumerate() {
        let label = if index == 0 { "  fits" } else { "" };
        text += &line(label, &format!("{change}: {}", decisions(&way.decisions)));
    }
    if found.remedies.is_empty() {
        let tried = match found.complete {
            true => format!("nothing tried on up to {} GPUs", thousands(most_gpus(request))),
            false => "what would fit was not found in the time; --prove continues".to_owned(),
        };
        text += &line("  fits", &tried);
    }
    text
}

/// The same facts as JSON.
pub fn shortage_json(request: &Request, found: &Shortage) -> Value {
    let least = found.leanest.as_ref().map(|leanest| {
        let (rank, need) = neediest(leanest);
        let has = available_bytes(request);
        let parts = consumed(leanest, rank).map(|(part, bytes)| (part.to_owned(), bytes as u64));
        json!({
            "decisions": leanest.decisions,
            "pipeline_rank": rank,
            "needed_bytes": need as u64,
            "tolerance": tolerance(found),
            "available_bytes": has as u64,
            "missing_bytes": (need - has).max(0.0) as u64,
            "memory_bytes": parts.into_iter().collect::<BTreeMap<_, _>>(),
        })
    });
    let fits = |(change, way): &(String, Found)| {
        json!({
            "change": change,
            "decisions": way.decisions,
            "iteration_s": way.priced.iteration_s,
        })
    };
    json!({
        "least": least,
        "fits": found.remedies.iter().map(fits).collect::<Vec<_>>(),
        "complete": found.complete,
    })
}

/// The pipeline rank that needs most memory, and how much, bytes.
fn neediest(found: &Found) -> (usize, f64) {
    let all = found.priced.device_bytes.iter().enumerate();
    all.fold((0, 0.0), |most, (at, &need)| if need > most.1 { (at, need) } else { most })
}

/// What a plan may fill of a device, bytes.
fn available_bytes(request: &Request) -> f64 {
    request.cluster.device.hbm_bytes * (1.0 - request.headroom)
}

/// The share of the least memory found up to which less may do.
fn tolerance(found: &Shortage) -> f64 {
    (1.0 - found.leanest_to).max(0.01)
}

fn consumers(found: &Found, rank: usize) -> String {
    let parts = consumed(found, rank);
    let words: Vec<String> =
        parts.iter().map(|(name, size)| format!("{name} {}", bytes(*size as u64))).collect();
    words.join(" · ")
}

/// What takes the memory of a pipeline rank, bytes, largest first.
fn consumed(found: &Found, rank: usize) -> [(&'static str, f64); 5] {
    let held = found.priced.stages.iter().chain(&found.priced.copies);
    let stages = held.filter(|stage| stage.rank == rank);
    let mut parts = [
        ("parameters", 0.0),
        ("gradients", 0.0),
        ("optimizer", 0.0),
        ("activations", 0.0),
        ("workspace", 0.0),
    ];
    for stage in stages {
        let m = &stage.memory;
        let own = [m.parameters, m.gradients, m.optimizer, m.activations, m.workspace];
        for (part, bytes) in parts.iter_mut().zip(own) {
            part.1 += bytes;
        }
    }
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    parts
}
