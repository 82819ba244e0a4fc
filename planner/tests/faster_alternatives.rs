//! Where a search was stopped, an alternative may be faster than its plan. It then is the plan.

use planner::answer::explain::Asker;
use planner::answer::report::Answer;
use planner::request::{Request, Task};
use planner::request::flags::Flags;
use planner::search::{Outcome, search};

fn request(settings: &[&str]) -> Request {
    Request::new(&Flags {
        model: "llama8b".to_owned(),
        cluster: Some("dgx_h100".to_owned()),
        gpus: 16,
        global_batch: None,
        seq_len: None,
        headroom: None,
        tokens: None,
        expert_imbalance: None,
        runnable: false,
        settings: settings.iter().map(|&setting| setting.to_owned()).collect(),
    })
    .expect("the request is valid")
}

#[test]
fn a_faster_alternative_is_the_plan() {
    let (all, slow) = (request(&["cp=1"]), request(&["cp=1", "tp=8", "pp=2"]));
    let outcome = search(&slow.task(), &mut |_| {});
    let slow_s = outcome.best.as_ref().expect("it fits").priced.iteration_s;
    // As if the search over all had been stopped, with a bound far below.
    let proof = models::plan::Proof {
        gap: 0.5,
        searched_gap: 0.4,
        proven_optimal: false,
        ..outcome.proof.clone()
    };
    let mut answer = Answer::new(&all, Outcome { proof, ..outcome }).expect("something was found");
    let mut show = |_| {};
    let mut asker = Asker::new(&all, slow_s, None, &mut show);
    answer.alternatives = asker.alternatives(&answer.plan.decisions, 2);
    let [first, second] = [0, 1].map(|n| answer.alternatives[n].iteration_s);
    assert!(first < slow_s, "{first} {slow_s}");
    let better = answer.or_faster(&all);
    let best_s = better.plan.predicted.iteration_s;
    assert!((best_s / first - 1.0).abs() < 1e-6, "{best_s} {first}");
    let (gap, searched_gap) = (better.proof.gap, better.proof.searched_gap);
    assert!((best_s * (1.0 - gap) / (slow_s * 0.5) - 1.0).abs() < 1e-6, "{gap}");
    assert!((best_s * (1.0 - searched_gap) / (slow_s * 0.6) - 1.0).abs() < 1e-6, "{searched_gap}");
    assert_eq!(models::check::check(&better.plan), []);
    let [other] = &better.alternatives[..] else { panic!("{:?}", better.alternatives) };
    assert!((other.slower - (second / best_s - 1.0)).abs() < 1e-6, "{other:?}");
    // Nothing changes where the plan is the fastest.
    let again = better.clone().or_faster(&all);
    assert_eq!(again.plan, better.plan);
}

/// The first configuration that a search finds proves nothing of others: not of other cuts, and not
/// of what local search would have found.
#[test]
fn what_is_found_first_is_no_optimum() {
    let pins = ["tp=2", "cp=1", "pp=4", "vpp=3", "schedule=interleaved_1f1b", "micro_batch=1"];
    let more = ["zero_stage=1", "recompute=none", "vocab=tensor", "sequence_parallel=true"];
    let request = request(&[&pins[..], &more].concat());
    let task = request.task();
    let [best, first] = [false, true].map(|any| search(&Task { any, ..task.clone() }, &mut |_| {}));
    let time_s = |of: &Outcome| of.best.as_ref().expect("it fits").priced.iteration_s;
    let (best_s, first_s) = (time_s(&best), time_s(&first));
    assert!(best_s < first_s * (1.0 - 1e-6), "the first is the best: {first_s}");
    let least_s = first_s * (1.0 - first.proof.gap);
    assert!(!first.proof.proven_optimal && least_s <= best_s, "{least_s} {best_s}");
}
