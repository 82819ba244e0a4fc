//! The ordering program against proven optima (`data/oracles.csv`, rows `zb-ilp-optimal`).

use models::schedule::AutoCosts;
use planner::order::ilp::{Objective, Ordering};
use planner::until::Until;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const ORACLES: &str = include_str!("data/oracles.csv");

/// The rows: each a pipeline to order and its proven optimum.
fn rows() -> Vec<(Ordering, f64)> {
    let rows = ORACLES.lines().filter(|line| line.starts_with("zb-ilp-optimal"));
    rows.map(|line| {
        let columns: Vec<&str> = line.split(',').collect();
        let number = |n: usize| columns[n].parse::<f64>().unwrap();
        let by_stage = columns[1].ends_with("obj=stage");
        let limit = columns[20].split("limit=").nth(1).unwrap().split(' ').next().unwrap();
        let costs = AutoCosts {
            forward: number(5),
            backward: number(6),
            weight: number(7),
            latency: number(8),
            freed_by_b: 0.0,
            freed_by_w: 1.0,
            limit: limit.parse().unwrap(),
        };
        let ordering = Ordering {
            ranks: number(2) as usize,
            micro_batches: number(3) as usize,
            costs,
            objective: if by_stage { Objective::LongestStage } else { Objective::Makespan },
        };
        (ordering, if by_stage { number(12) } else { number(9) })
    })
    .collect()
}

fn check(rows: Vec<(Ordering, f64)>) {
    for (ordering, optimum) in rows {
        let begun = Instant::now();
        let found = ordering.solve(Until::default()).unwrap();
        println!("{ordering:?} {} {optimum} {:?}", found.value, begun.elapsed());
        assert!((found.value - optimum).abs() < 1e-3, "{ordering:?}: {} {optimum}", found.value);
        assert!(found.proven, "{ordering:?}");
        assert_eq!(found.schedule.validate(), Ok(()));
    }
}

#[test]
fn small_pipelines_reach_the_proven_optima() {
    let small = |row: &(Ordering, f64)| row.0.ranks * row.0.micro_batches <= 8;
    let rows: Vec<_> = rows().into_iter().filter(small).collect();
    assert!(rows.len() >= 10, "{}", rows.len());
    check(rows);
}

/// Takes minutes: `cargo test --release --test schedule_optimal -- --ignored --nocapture`.
#[test]
#[ignore = "minutes"]
fn all_pipelines_reach_the_proven_optima() {
    let rows = rows();
    assert_eq!(rows.len(), 56);
    check(rows);
}

#[test]
fn without_time_the_best_known_order_comes_with_its_gap() {
    let row = rows().into_iter().find(|(row, _)| row.ranks == 4).unwrap().0;
    let interrupt = AtomicBool::new(true);
    for until in [
        Until { deadline: Some(Instant::now()), ..Until::default() },
        Until { interrupt: Some(&interrupt), ..Until::default() },
    ] {
        let found = row.solve(until).unwrap();
        assert!(!found.proven && found.gap > 0.0, "{found:?}");
    }
}
