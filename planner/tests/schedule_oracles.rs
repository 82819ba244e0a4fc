//! Simulated schedules against the numbers that public reference generators give.

use models::schedule::{Schedule, ScheduleName, one_f_one_b};
use planner::simulate::{Durations, Prepared, Workspace, simulate};

#[test]
fn one_f_one_b_takes_33_units() {
    let schedule = one_f_one_b(4, 8).unwrap();
    let timeline = simulate(&schedule, &Durations::uniform(&schedule, 1.0, 1.0, 1.0, 0.0)).unwrap();
    assert_eq!(timeline.makespan_s, 33.0);
    assert_eq!(timeline.peak_activations, [4.0, 3.0, 2.0, 1.0]);
}

/// Run by hand in release: `cargo test --release --test schedule_oracles -- --ignored --nocapture`.
#[test]
#[ignore = "prints a timing"]
fn timing_of_16384_passes() {
    let schedule = ScheduleName::Interleaved1F1B.build(32, 128, 2).unwrap();
    let started = std::time::Instant::now();
    let prepared = Prepared::new(&schedule).unwrap();
    println!("prepared in {:?}", started.elapsed());
    let durations = Durations::uniform(&schedule, 1.0, 1.0, 1.0, 0.1);
    let mut workspace = Workspace::default();
    let started = std::time::Instant::now();
    let total: f64 = (0..1000).map(|_| prepared.makespan(&durations, &mut workspace)).sum();
    println!("priced {} passes in {:?}", passes(&schedule), started.elapsed() / 1000);
    let started = std::time::Instant::now();
    let path = prepared.critical_path(&durations, &mut workspace);
    println!("critical path in {:?}: {} {}", started.elapsed(), path.length_s(&durations), total);
}

fn passes(schedule: &Schedule) -> usize {
    schedule.passes.iter().map(Vec::len).sum()
}
