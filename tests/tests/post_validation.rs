//! Iterations without a barrier at their end. No bound covers them, so the search prices what is
//! best with a barrier; its answers are compared with brute force and with iterations with a
//! barrier.

use meshwright_tests::random::Random;
use meshwright_tests::small::Instance;
use meshwright_tests::{brute, instances};
use planner::request::Task;
use planner::search::search;

const ROUNDING: f64 = 1e-9;
/// The placement is that of an iteration with a barrier, and so not always the best without one:
/// 6 % slower at most in these instances.
const NEAR: f64 = 1.1;

/// Random instances in which `asked` replaces their own restrictions of the same decisions.
fn each(asked: &[&str], wanted: u64, mut check: impl FnMut(&Instance, &str)) {
    let (mut checked, mut seed) = (0, 0);
    while checked < wanted {
        let mut instance = Instance::random(&mut Random::new(seed));
        let what = format!("seed {seed}, {asked:?}");
        seed += 1;
        let names = ["schedule", "vocab"];
        instance.settings.retain(|setting| !names.iter().any(|name| setting.starts_with(name)));
        instance.settings.extend(asked.iter().map(|&setting| setting.to_owned()));
        let restrictions = instance.restrictions();
        let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
        if task.space().count() > 0 {
            check(&instance, &what);
            checked += 1;
        }
    }
}

/// No placement is faster than the plan by more than its gap.
#[test]
fn the_gap_covers_what_is_missed() {
    for asked in [
        &["schedule=zb_h1", "post_validation=true"][..],
        &["schedule=zb_v,v_half", "post_validation=true"],
        &["schedule=dualpipe", "post_validation=true"],
        &["schedule=zb_auto", "post_validation=true"],
    ] {
        let (mut compared, mut equal, mut slowest) = (0, 0, 1.0_f64);
        each(asked, instances(40, 120), |instance, what| {
            let restrictions = instance.restrictions();
            let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
            let Some(answer) = brute::best(&task, 20_000) else { return };
            let outcome = search(&task, &mut |_| {});
            let proof = &outcome.proof;
            assert_eq!(proof.candidates, answer.combinations, "{what}");
            let cut = proof.cut_by_time + proof.cut_by_memory + proof.cut_by_dominance;
            assert_eq!(proof.placed + cut, proof.candidates, "{what}: as `plan check` wants it");
            let Some((.., best)) = answer.best else {
                assert!(outcome.best.is_none(), "{what}");
                return;
            };
            // All listed placements may be too large where another fits.
            let Some(found) = outcome.best else { return };
            let (best_s, found_s) = (best.iteration_s, found.priced.iteration_s);
            let least_s = found_s * (1.0 - outcome.proof.gap) * (1.0 - ROUNDING);
            assert!(found.priced.fits && best_s >= least_s, "{what}: {best_s} below {least_s}");
            // With several chunks a pipeline rank, brute force tries only the listed cuts, while
            // the search also moves layers.
            let brute = outcome.proof.family || found_s >= best_s * (1.0 - ROUNDING);
            assert!(brute, "{what}: {found_s} below {best_s}");
            compared += 1;
            equal += u64::from(found_s <= best_s * (1.0 + ROUNDING));
            slowest = slowest.max(found_s / best_s);
        });
        println!("{asked:?}: {compared} compared, {equal} equal, slowest {slowest}");
        assert!(compared >= 3 && slowest < NEAR, "{asked:?}: {equal} of {compared}, {slowest}");
    }
}

/// No barrier-free iteration takes longer than the one with a barrier.
#[test]
fn post_validation_is_never_slower() {
    let mut faster = 0;
    each(
        &["schedule=zb_h1,zb_h2,interleaved_zb,zb_v", "pp=2,4"],
        instances(25, 200),
        |instance, what| {
            let iteration_s = |more: &[&str]| {
                let mut instance = instance.clone();
                instance.settings.extend(more.iter().map(|&setting| setting.to_owned()));
                let restrictions = instance.restrictions();
                let task =
                    Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
                let found = search(&task, &mut |_| {}).best?;
                assert_eq!(found.decisions.post_validation, !more[0].ends_with("false"), "{what}");
                assert!(found.decisions.schedule.splits_backward(), "{what}");
                Some(found.priced.iteration_s)
            };
            // What is not combined with post-validation unless asked for.
            let plain = [
                "post_validation=false",
                "vocab=first_last,redistribute,tensor",
                "fused_loss=false",
            ];
            let (with, without) = (iteration_s(&["post_validation=true"]), iteration_s(&plain));
            match (with, without) {
                (Some(with), Some(without)) => {
                    assert!(with <= without * (1.0 + ROUNDING), "{what}: {with} after {without}");
                    faster += u64::from(with < without * (1.0 - ROUNDING));
                }
                (with, without) => assert!(without.is_none(), "{what}: {with:?} {without:?}"),
            }
        },
    );
    assert!(faster > 2, "post-validation never gains");
}
