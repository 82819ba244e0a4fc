//! MegaScale (NSDI '24, arXiv 2402.15627): the ablation of table 3.

use super::{Claim, Degrees, Gpt, Reason, Trial, Verdict, claim, interleaved};
use models::cluster::{self, Software};
use models::model::Window;

pub(super) fn claims() -> Vec<Claim> {
    vec![claim(
        "msabl",
        "MegaScale table 3",
        "175B on 256 GPUs, batch 256: each of eight changes is faster than the one before (47.7 to 65.3 % MFU)",
        ablation,
    )]
}

fn software(name: &str) -> Result<Software, Reason> {
    let found = cluster::software(name).map_err(|error| error.to_string())?;
    found.ok_or_else(|| format!("software {name} is not shipped"))
}

/// The paper's baseline: t = 8, p = 8 and six chunks (table 1), on Megatron-LM of that time.
fn baseline() -> Result<Trial, Reason> {
    let gpt = Gpt { layers: 96, hidden: 12288, heads: 96 };
    let degrees = Degrees { tp: 8, pp: 8, dp: 4, batch: 256 };
    let mut trial = Trial::gpt("selene", gpt, degrees)?.with(|d| {
        interleaved(d, 6);
        d.sequence_parallel = true;
        d.recompute = models::decisions::RecomputePolicy::None;
        d.zero_stage = 1;
        d.dp_shard = 4;
    });
    trial.cluster.software = software("megatron_2023")?;
    Ok(trial)
}

type Change = Box<dyn Fn(&mut Trial)>;

/// The changes in the paper's order. A change in software alone sets a constant to the value fitted
/// to MegaScale's own runs, or keeps it where that is worse.
fn changes(then: Software) -> [(&'static str, Change); 8] {
    let least = |own: f64, then: f64| own.min(then);
    [
        // Parallel transformer block: one norm and one pair of collectives per direction for both
        // halves.
        (
            "parallel block",
            Box::new(|t| {
                t.model.norm.per_layer = 1;
                t.cluster.software.tp_exposed /= 2.0;
            }),
        ),
        (
            "sliding window",
            Box::new(|t| {
                t.model.attention.window = Some(Window { tokens: 512, full_every: None });
            }),
        ),
        (
            "TP overlap",
            Box::new(move |t| {
                t.cluster.software.tp_exposed =
                    least(t.cluster.software.tp_exposed, then.tp_exposed / 2.0);
            }),
        ),
        (
            "PP overlap",
            Box::new(move |t| {
                let own = &mut t.cluster.software;
                own.p2p_overlap = then.p2p_overlap;
                own.p2p_slowdown = least(own.p2p_slowdown, then.p2p_slowdown);
                own.pass_gap_s = least(own.pass_gap_s, then.pass_gap_s);
            }),
        ),
        (
            "DP overlap",
            Box::new(move |t| {
                let own = &mut t.cluster.software;
                own.dp_overlap = then.dp_overlap;
                own.dp_slowdown = least(own.dp_slowdown, then.dp_slowdown);
            }),
        ),
        (
            "operators",
            Box::new(move |t| {
                let own = &mut t.cluster.software;
                own.gemm_slowdown = least(own.gemm_slowdown, then.gemm_slowdown);
                own.attention_slowdown = least(own.attention_slowdown, then.attention_slowdown);
                own.stream_slowdown = least(own.stream_slowdown, then.stream_slowdown);
            }),
        ),
        (
            "data pipeline and stragglers",
            Box::new(|t| {
                t.cluster.software.step_overhead_s = 0.0;
                t.cluster.software.slowdown_per_doubling = 0.0;
            }),
        ),
        (
            "LAMB",
            Box::new(|t| {
                *t = t.clone().with_batch(768);
            }),
        ),
    ]
}

fn ablation() -> Verdict {
    let mut trial = baseline()?;
    let mut speeds = vec![trial.throughput()?];
    for (_, change) in changes(software("megascale_2024")?) {
        change(&mut trial);
        speeds.push(trial.throughput()?);
    }
    let gains: Vec<String> =
        speeds.iter().map(|speed| format!("{:.3}", speed / speeds[0])).collect();
    let rising = speeds.windows(2).all(|pair| pair[1] > pair[0]);
    Ok((format!("throughput over the first: {}", gains.join(" ")), rising))
}
