//! Placement against brute force: the integer program and the dynamic program on random problems of
//! up to four stages and twelve layers.

use meshwright_tests::random::Random;
use meshwright_tests::{close, examined, instances, stages};
use models::decisions::Vocab;
use models::schedule::ScheduleName;
use planner::partition::{Problem, Scratch, dynamic_program, ilp, relaxation};
use planner::request::task::SOLVER_WORK;
use planner::simulate::{Durations, Workspace};
use planner::until::Until;

fn program(problem: &Problem, cutoff_s: f64, paths: bool) -> ilp::Report {
    let limits = ilp::Limits { paths, work: SOLVER_WORK, until: Until::default() };
    ilp::solve(problem, cutoff_s, limits, &mut Scratch::default())
}

fn describe(seed: u64, problem: &Problem) -> String {
    let p = &problem.pipeline;
    format!(
        "seed {seed}: {} ranks, {} stages (bidirectional {}, pairs {}, split {}), m {}, {} layers, \
         uniform {}, 1f1b {}, vocab {}",
        p.ranks,
        problem.stages(),
        p.bidirectional,
        p.has_pairs(),
        p.splits_backward,
        p.micro_batches,
        problem.layers,
        problem.is_uniform(),
        p.one_f_one_b,
        problem.vocab.passes_s
    )
}

/// Compares the integer program with brute force; returns whether the problem has an answer.
fn has_answer(seed: u64) -> bool {
    let problem = stages::problem(&mut Random::new(seed));
    let what = describe(seed, &problem);
    let oracle = stages::best(&problem, &mut Scratch::default());
    let report = program(&problem, f64::INFINITY, true);
    assert!(report.proven, "{what}: not proven");
    match (&oracle, &report.best) {
        (None, None) => false,
        (Some((_, best_s)), Some((choice, found_s))) => {
            assert!(close(*best_s, *found_s), "{what}: brute {best_s}, program {found_s}");
            assert!(problem.fits(choice), "{what}: does not fit");
            true
        }
        _ => panic!("{what}: brute {oracle:?}, program {report:?}"),
    }
}

#[test]
fn the_integer_program_equals_brute_force() {
    let all = examined(0, instances(300, 2000), |seed| Some(has_answer(seed)));
    let feasible = all.iter().filter(|feasible| **feasible).count();
    assert!(feasible * 3 > all.len(), "only {feasible} problems have an answer");
}

/// Compares the linear program with brute force; `None` where layers differ, returns whether it
/// rules out what takes a tenth less.
fn is_tight(seed: u64) -> Option<bool> {
    let problem = stages::problem(&mut Random::new(seed));
    let scratch = &mut Scratch::default();
    let (_, best_s) = stages::best(&problem, scratch).filter(|_| problem.is_uniform())?;
    let what = describe(seed, &problem);
    let limits = ilp::Limits { paths: true, work: SOLVER_WORK, until: Until::default() };
    // With a cut-off just above, columns are left out that might have replaced others.
    for cutoff_s in [best_s * 1.5, best_s * 1.1, best_s * (1.0 + 1e-6)] {
        let found = relaxation::solve(&problem, vec![], cutoff_s, limits, scratch);
        let holds = !found.nothing_below && found.bound_s <= best_s * (1.0 + 1e-6);
        assert!(holds, "{what}: {} above {best_s}, below {cutoff_s}", found.bound_s);
    }
    Some(relaxation::solve(&problem, vec![], 0.9 * best_s, limits, scratch).nothing_below)
}

#[test]
fn the_linear_program_bounds_brute_force() {
    let all = examined(20_000, instances(600, 3000), is_tight);
    let tight = all.iter().filter(|tight| **tight).count();
    println!("{tight} of {} tight", all.len());
    assert!(all.len() > 50 && tight * 2 > all.len(), "{tight} of {}", all.len());
}

#[test]
fn a_cut_off_hides_nothing_below_it_and_nothing_lies_below_the_best() {
    for seed in 0..instances(60, 300) {
        let problem = stages::problem(&mut Random::new(seed));
        let Some((_, best_s)) = stages::best(&problem, &mut Scratch::default()) else { continue };
        let what = describe(seed, &problem);
        let above = program(&problem, best_s * 1.01, true);
        let found_s = above.best.map(|(_, value_s)| value_s);
        assert!(found_s.is_some_and(|found_s| close(found_s, best_s)), "{what}: {found_s:?}");
        let below = program(&problem, best_s * 0.999, true);
        assert!(below.proven && below.best.is_none(), "{what}: {:?}", below.best);
    }
}

#[test]
fn the_dynamic_program_bounds_brute_force_and_its_choice_fits() {
    let mut tighter = 0;
    for seed in 0..instances(1000, 5000) {
        let problem = stages::problem(&mut Random::new(seed));
        let pipeline = &problem.pipeline;
        let closed = pipeline.one_f_one_b || pipeline.forwards_first;
        if !closed && pipeline.milestones.len() != problem.stages() {
            continue;
        }
        let what = describe(seed, &problem);
        let oracle = stages::best(&problem, &mut Scratch::default());
        let bounded = dynamic_program::solve(&problem, f64::INFINITY);
        let with_vocab = dynamic_program::solve_with_vocab(&problem, f64::INFINITY);
        match (oracle, bounded, with_vocab) {
            (None, None, None) => {}
            (Some((_, best_s)), Some(found), Some(with_vocab)) => {
                assert!(problem.fits(&found.choice), "{what}: does not fit");
                assert!(problem.fits(&with_vocab.choice), "{what}: does not fit");
                let (first_s, bound_s) = (found.bound_s, with_vocab.bound_s);
                assert!(first_s <= bound_s * (1.0 + 1e-9), "{what}: {first_s} above {bound_s}");
                assert!(bound_s <= best_s * (1.0 + 1e-9), "{what}: {bound_s} above {best_s}");
                tighter += usize::from(bound_s > first_s * (1.0 + 1e-6));
            }
            all => panic!("{what}: brute, dynamic, with vocabulary {all:?}"),
        }
    }
    assert!(tighter > 0, "{tighter}");
}

/// If all forward passes come first, the closed form equals the simulation, and no integer program
/// is needed.
#[test]
fn the_dynamic_program_is_exact_where_all_forwards_come_first() {
    let mut compared = 0;
    for seed in 0..instances(2400, 12_000) {
        let problem = stages::problem(&mut Random::new(seed));
        if !problem.pipeline.forwards_first {
            continue;
        }
        let what = describe(seed, &problem);
        let best_s = stages::best(&problem, &mut Scratch::default()).map(|(_, best_s)| best_s);
        let found = dynamic_program::solve(&problem, f64::INFINITY);
        assert_eq!(best_s.is_some(), found.is_some(), "{what}");
        let (Some(best_s), Some(found)) = (best_s, found) else { continue };
        let value_s = problem.iteration_s(&found.choice, &mut Scratch::default());
        assert!(close(found.bound_s, best_s), "{what}: {} beside {best_s}", found.bound_s);
        assert!(close(value_s, best_s), "{what}: its choice takes {value_s}");
        compared += 1;
    }
    assert!(compared >= instances(40, 200), "{compared}");
}

/// The bound of an integer program that ran out of work is valid: at most the optimum.
#[test]
fn a_program_without_work_left_keeps_its_bound() {
    let mut unfinished = 0;
    for seed in 0..instances(150, 1000) {
        let problem = stages::problem(&mut Random::new(seed));
        let Some((_, best_s)) = stages::best(&problem, &mut Scratch::default()) else { continue };
        let limits = ilp::Limits { work: 1, paths: true, until: Until::default() };
        let scratch = &mut Scratch::default();
        let report = ilp::solve(&problem, f64::INFINITY, limits, scratch);
        let what = describe(seed, &problem);
        assert!(report.bound_s <= best_s * (1.0 + 1e-6), "{what}: {} {best_s}", report.bound_s);
        if !report.proven {
            assert!(report.bound_s > 0.0, "{what}: the bound is forgotten");
            unfinished += 1;
        }
    }
    assert!(unfinished > 10, "{unfinished}");
}

#[test]
fn the_dynamic_program_equals_the_closed_form_as_an_integer_program() {
    for seed in 0..instances(150, 1000) {
        let problem = stages::problem(&mut Random::new(seed));
        if !problem.pipeline.one_f_one_b {
            continue;
        }
        let what = describe(seed, &problem);
        let closed = without_other_tails(problem);
        let report = program(&closed, f64::INFINITY, false);
        let program_s = report.best.map(|(_, value_s)| value_s);
        let dynamic_s = dynamic_program::solve(&closed, f64::INFINITY).map(|found| found.bound_s);
        match (program_s, dynamic_s) {
            (Some(a), Some(b)) => assert!(close(a, b), "{what}: program {a}, dynamic {b}"),
            (None, None) => {}
            _ => panic!("{what}: program {program_s:?}, dynamic {dynamic_s:?}"),
        }
    }
}

/// The integer program has rows for the tail of every pipeline rank, the dynamic program only for
/// the first one's.
fn without_other_tails(mut problem: Problem) -> Problem {
    for column in problem.columns.iter_mut().skip(1).flatten() {
        column.tail_s = 0.0;
    }
    problem
}

fn durations(random: &mut Random, stages: usize, link_s: f64) -> Durations {
    let mut times = |most: f64| (0..stages).map(|_| random.between(0.0, most)).collect();
    let (forward, backward) = (times(1.0), times(2.0));
    Durations { forward, backward, link_s: vec![link_s; stages - 1], ..Durations::default() }
}

/// The search drops `gpipe` because 1F1B ends no later if transfers take no time.
#[test]
fn gpipe_never_ends_before_one_f_one_b() {
    let mut workspace = Workspace::default();
    for seed in 0..instances(1000, 5000) {
        let random = &mut Random::new(seed);
        let plain = stages::pipeline(&mut random.clone(), Vocab::Tensor, ScheduleName::OneFOneB);
        let gpipe = stages::pipeline(random, Vocab::Tensor, ScheduleName::GPipe);
        let durations = durations(random, plain.rank_of.len(), 0.0);
        let plain_s = plain.prepared.makespan(&durations, &mut workspace);
        let gpipe_s = gpipe.prepared.makespan(&durations, &mut workspace);
        assert!(plain_s <= gpipe_s * (1.0 + 1e-9), "seed {seed}: {plain_s} after {gpipe_s}");
    }
}
