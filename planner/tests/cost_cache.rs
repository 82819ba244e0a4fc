//! What a cache returns does not depend on what was asked for before.

use planner::pricing::cost_cache::CostCache;
use planner::request::Request;
use planner::request::flags::Flags;

/// Splits of unevenly loaded experts share some costs, and others follow from the number of ranks.
#[test]
fn costs_do_not_depend_on_what_was_priced_before() {
    for imbalance in [None, Some(3.0)] {
        let flags = Flags {
            model: "mixtral_8x7b".to_owned(),
            gpus: 32,
            expert_imbalance: imbalance,
            ..Flags::default()
        };
        let request = Request::new(&flags).expect("it is shipped");
        let layouts = request.task().space().expert_layouts();
        let new = || CostCache::new(&request.model, &request.cluster, request.gpus);
        let (forwards, backwards) = (new(), new());
        let of = |cache: &CostCache<'_>, index: usize| {
            let d = &layouts[index].decisions;
            let costs = cache.layer_costs(d);
            format!("{:?} {:?} {:?}", costs.layer, costs.params, costs.transient_bytes)
        };
        let last = layouts.len() - 1;
        let first: Vec<String> = (0..=last).map(|index| of(&forwards, index)).collect();
        let second: Vec<String> = (0..=last).rev().map(|index| of(&backwards, index)).collect();
        for (index, layout) in layouts.iter().enumerate() {
            assert_eq!(first[index], second[last - index], "{:?}", layout.decisions);
        }
        let eps: std::collections::BTreeSet<u64> =
            layouts.iter().map(|layout| layout.decisions.ep).collect();
        assert!(eps.len() > 3, "no test: {eps:?}");
    }
}
