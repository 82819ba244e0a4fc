//! With several chunks a device only a family of placements is searched: how much that loses against every
//! cut and every mix, on small models. `cargo test --test family_loss -- --nocapture` prints it.

use meshwright_tests::random::Random;
use meshwright_tests::small::Instance;
use meshwright_tests::{brute, instances};
use planner::case::Case;
use planner::case::ground::Ground;
use planner::case::priced::Placed;
use planner::placement::Scratch;
use planner::search::Task;

/// Placements that one configuration may take to look through.
const MOST_PLACEMENTS: usize = 30_000;

fn best_s(case: &Case<'_>, placements: &[Placed]) -> f64 {
    let scratch = &mut Scratch::default();
    let prices = placements.iter().map(|placed| case.price(placed, scratch));
    prices.filter(|p| p.fits).map(|p| p.iteration_s).fold(f64::INFINITY, f64::min)
}

#[test]
fn the_family_of_several_chunks_loses_little() {
    let mut losses = vec![];
    let mut missed = 0;
    for seed in 0..instances(300, 3000) {
        let random = &mut Random::new(seed + 5_000_000);
        let instance = Instance::random(random);
        let restrictions = instance.restrictions();
        let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
        let ground = Ground::new(&instance.model, &instance.cluster, instance.gpus);
        let mut several = brute::combinations(&task);
        several.retain(|d| d.vpp > 1 && !d.vocab.over_pipeline());
        if several.is_empty() {
            continue;
        }
        let d = several[random.whole(0, several.len() - 1)].clone();
        let Ok(case) = Case::new(&ground, d) else { continue };
        let Some(all) = brute::all_placements(&case, MOST_PLACEMENTS) else { continue };
        let (family_s, all_s) = (best_s(&case, &brute::placements(&case)), best_s(&case, &all));
        match (family_s.is_finite(), all_s.is_finite()) {
            (true, true) => losses.push(family_s / all_s - 1.0),
            (false, true) => missed += 1,
            _ => {}
        }
    }
    losses.sort_by(f64::total_cmp);
    let percent = |loss: f64| 100.0 * loss;
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    let at = |share: f64| percent(losses[((losses.len() - 1) as f64 * share) as usize]);
    println!(
        "{} configurations: loses {:.2} % on average, median {:.2} %, 9 of 10 below {:.2} %, most {:.2} %; \
         {missed} where only others fit",
        losses.len(),
        percent(mean),
        at(0.5),
        at(0.9),
        at(1.0)
    );
    assert!(losses.iter().all(|&loss| loss > -1e-9), "the family is among all placements");
    assert!(mean < 0.05, "{mean}");
}
