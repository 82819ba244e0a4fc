//! Where a search was stopped, an alternative may be faster than its plan. It then is the plan.

use planner::answer::explain::Asker;
use planner::answer::report::Answer;
use planner::request::flags::Flags;
use planner::request::{Request, Task};
use planner::search::{Outcome, search};

fn request(model: &str, cluster: &str, gpus: u64, settings: &[&str]) -> Request {
    Request::new(&Flags {
        model: model.to_owned(),
        cluster: Some(cluster.to_owned()),
        gpus,
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
    let on_16 = |settings: &[&str]| request("llama8b", "dgx_h100", 16, settings);
    let (all, slow) = (on_16(&["cp=1"]), on_16(&["cp=1", "tp=8", "pp=2"]));
    let outcome = search(&slow.task(), &mut |_| {});
    let slow_s = outcome.best.as_ref().expect("it fits").priced.iteration_s;
    // As if the search over all had been stopped, with a bound far below.
    let proof =
        models::plan::Proof { gap: 0.5, searched_gap: 0.4, proven_optimal: false, ..outcome.proof };
    let mut answer = Answer::new(&all, Outcome { proof, ..outcome }).expect("something was found");
    let mut show = |_| {};
    let mut asker = Asker::new(&all, (slow_s, 0.0), None, &mut show, vec![]);
    (answer.alternatives, _) = asker.alternatives(&answer.plan.decisions, 2);
    // Every search was complete.
    assert!(answer.alternatives.iter().all(|other| other.gap == 0.0), "{:?}", answer.alternatives);
    let [first, second] = [0, 1].map(|n| answer.alternatives[n].iteration_s);
    assert!(first < slow_s, "{first} {slow_s}");
    let better = answer.or_faster(&all);
    let best_s = better.plan.predicted.iteration_s;
    assert!((best_s / first - 1.0).abs() < 1e-6, "{best_s} {first}");
    let (gap, searched_gap) = (better.proof.gap, better.proof.searched_gap);
    assert!((best_s * (1.0 - gap) / (slow_s * 0.5) - 1.0).abs() < 1e-6, "{gap}");
    assert!((best_s * (1.0 - searched_gap) / (slow_s * 0.6) - 1.0).abs() < 1e-6, "{searched_gap}");
    assert_eq!(models::check::check(&better.plan), []);
    // The plan that it was comes among them.
    let [other, slow] = &better.alternatives[..] else { panic!("{:?}", better.alternatives) };
    assert!((slow.iteration_s / slow_s - 1.0).abs() < 1e-6, "{slow:?}");
    assert!((other.slower - (second / best_s - 1.0)).abs() < 1e-6, "{other:?}");
    // Nothing changes where the plan is the fastest.
    let again = better.clone().or_faster(&all);
    assert_eq!(again.plan, better.plan);
}

/// The first configuration that a search finds proves nothing of others: not of other cuts, and not
/// of what local search would have found.
#[test]
fn what_is_found_first_is_no_optimum() {
    // One configuration, whose layers are of several kinds: its cuts differ.
    let degrees = ["tp=1", "pp=7", "vpp=2", "cp=1", "ep=8", "etp=1", "zero_stage=1", "dp_shard=8"];
    let others = [
        "micro_batch=1",
        "schedule=zb_v",
        "recompute=none",
        "vocab=tensor",
        "fused_loss=false",
        "moe_overlap=none",
        "offload=optimizer",
        "rank_order=tp-cp-dp-pp",
    ];
    let pins = [&degrees[..], &others].concat();
    let request = request("llama4_maverick", "dgx_h200", 56, &pins);
    let task = request.task();
    assert!(task.space().is_single(), "{}", task.space().count());
    let [best, first] = [false, true].map(|any| search(&Task { any, ..task.clone() }, &mut |_| {}));
    let time_s = |of: &Outcome| of.best.as_ref().expect("it fits").priced.iteration_s;
    let (best_s, first_s) = (time_s(&best), time_s(&first));
    let least_s = first_s * (1.0 - first.proof.gap);
    assert!(!first.proof.proven_optimal && least_s <= best_s, "{least_s} {best_s}");
}
