//! How often to save, how much time failures cost, how many nodes to hold in reserve.
//!
//! `interval_s` is the useful time between two saves, `save_s` what a save stalls training,
//! `restart_s` from a failure until training runs again, `mtbf_s` the mean time between failures of
//! the whole job.

/// Mean seconds between failures of a job on `nodes` that each fail
/// `failures_per_1000_node_days`.
pub fn mtbf_s(nodes: f64, failures_per_1000_node_days: f64) -> f64 {
    86_400.0 * 1000.0 / (nodes * failures_per_1000_node_days)
}

/// Seconds of work between saves, `√(2CM)` (Young, 1974).
pub fn young_interval_s(save_s: f64, mtbf_s: f64) -> f64 {
    (2.0 * save_s * mtbf_s).sqrt()
}

/// Share of time that moves training forward, to first order,
/// `1 − C/τ − τ/(2M) − R/M`: where all three are small against the mean time between failures.
pub fn goodput_first_order(interval_s: f64, save_s: f64, restart_s: f64, mtbf_s: f64) -> f64 {
    1.0 - save_s / interval_s - (interval_s / 2.0 + restart_s) / mtbf_s
}

/// Share of time that moves training forward, `τ/(M·e^{R/M}(e^{(τ+C)/M} − 1))` (exponential failures;
/// Daly, 2006).
pub fn goodput(interval_s: f64, save_s: f64, restart_s: f64, mtbf_s: f64) -> f64 {
    let attempt = ((interval_s + save_s) / mtbf_s).exp_m1();
    interval_s / (mtbf_s * (restart_s / mtbf_s).exp() * attempt)
}

/// Nodes expected under repair at once: failures a second times repair time.
pub fn nodes_in_repair(mtbf_s: f64, repair_s: f64) -> f64 {
    repair_s / mtbf_s
}

/// The fewest spare nodes that cover all repairs with at least `probability`, the number under repair
/// being Poisson with mean `nodes_in_repair`.
pub fn spare_nodes(nodes_in_repair: f64, probability: f64) -> u64 {
    // A certainty of 1 is never reached: stop where the tail is below rounding.
    let limit = (nodes_in_repair + 40.0 * nodes_in_repair.sqrt() + 40.0) as u64;
    let (mut ln_term, mut covered) = (-nodes_in_repair, 0.0);
    for spares in 0..limit {
        covered += ln_term.exp();
        if covered >= probability {
            return spares;
        }
        ln_term += (nodes_in_repair / (spares + 1) as f64).ln();
    }
    limit
}
