//! With several chunks a pipeline rank and many cuts, the search covers only listed candidates and
//! then moves layers from the best. This measures the loss against every cut, and against every
//! recompute mix, on small models; `cargo test --test family_loss -- --nocapture` prints it.

use meshwright_tests::random::Random;
use meshwright_tests::{brute, instances, small};
use models::cluster::ClusterSpec;
use models::decisions::{Decisions, RecomputePolicy, Vocab};
use models::model::ModelSpec;
use planner::partition::Scratch;
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::listed_cuts::Ranges;
use planner::pricing::priced::Placed;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::partition_candidates::Limits;
use planner::search::search;

/// Largest improvement that one move may still bring: a smaller one is not worth an uneven cut, and
/// not every move is tried.
const MOST_LEFT: f64 = 5e-4;

/// Maximum number of placements of one configuration.
const MOST_PLACEMENTS: usize = 30_000;

/// The fastest placement that fits, with its iteration time in s.
fn best(
    case: &Configuration<'_>,
    placements: impl IntoIterator<Item = Placed>,
) -> Option<(Placed, f64)> {
    let scratch = &mut Scratch::default();
    let price = |placed: Placed| {
        let priced = case.price(&placed, scratch);
        priced.fits.then_some((placed, priced.iteration_s))
    };
    placements.into_iter().filter_map(price).min_by(|a, b| a.1.total_cmp(&b.1))
}

fn best_s(case: &Configuration<'_>, placements: impl IntoIterator<Item = Placed>) -> f64 {
    best(case, placements).map_or(f64::INFINITY, |(_, best_s)| best_s)
}

/// Time in s after moving layers from the best of a list.
fn moved_s(case: &Configuration<'_>, best: Option<(Placed, f64)>) -> f64 {
    let down = |(placed, iteration_s)| {
        let start = (placed, case.pipeline_s(iteration_s));
        case.with_overheads_s(
            case.hill_climb(start, Limits::below(f64::INFINITY), &mut Scratch::default()).1,
        )
    };
    best.map_or(f64::INFINITY, down)
}

/// A random configuration with several freely placed chunks, of a model with `layers` layers.
fn with_random_case<T>(
    seed: u64,
    layers: (usize, usize),
    recompute: RecomputePolicy,
    then: impl FnOnce(&Configuration<'_>) -> Option<T>,
) -> Option<T> {
    let random = &mut Random::new(seed);
    let layers = random.whole(layers.0, layers.1);
    let model = small::model_of(random, layers);
    let (cluster, gpus) = (small::cluster(random, &model), random.pick(&[2, 3, 4]));
    let restrictions = Restrictions::default();
    let task = Task::new(&model, &cluster, gpus, &restrictions);
    let mut several = brute::combinations(&task);
    several.retain(|d| d.vpp > 1 && d.vocab == Vocab::Tensor && d.recompute == recompute);
    if several.is_empty() {
        return None;
    }
    let decisions = several[random.whole(0, several.len() - 1)].clone();
    let cache = CostCache::new(&model, &cluster, gpus);
    then(&Configuration::new(&cache, decisions).ok()?)
}

struct Losses(Vec<f64>);

impl Losses {
    /// Ratios of the list's best to the best of all, where both fit.
    fn of(pairs: impl Iterator<Item = (f64, f64)>) -> Self {
        let both = pairs.filter(|(list_s, all_s)| list_s.is_finite() && all_s.is_finite());
        let mut losses: Vec<f64> = both.map(|(list_s, all_s)| list_s / all_s - 1.0).collect();
        losses.sort_by(f64::total_cmp);
        assert!(losses.len() > 10, "only {} configurations", losses.len());
        assert!(losses[0] > -1e-9, "the list is among all placements");
        Self(losses)
    }

    fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    fn print(&self, what: &str) {
        let at = |share: f64| 100.0 * self.0[((self.0.len() - 1) as f64 * share) as usize];
        println!(
            "{what}: {} configurations lose {:.2} % on average, median {:.2} %, 9 of 10 below {:.2} %, most {:.2} %",
            self.0.len(),
            100.0 * self.mean(),
            at(0.5),
            at(0.9),
            at(1.0)
        );
    }
}

#[test]
fn moved_layers_make_up_for_much_of_what_the_family_loses() {
    let of_seed = |seed| {
        with_random_case(seed + 5_000_000, (10, 12), RecomputePolicy::None, |case| {
            let every = brute::every_cut(case);
            if case.is_open() || every.len() > MOST_PLACEMENTS {
                return None;
            }
            let list = case.listed_ranges().unwrap_or_default();
            let of = |ranges: &[_]| {
                best(case, ranges.iter().flat_map(|cut| brute::at_every_level(case, cut)))
            };
            let (listed, all_s) = (of(&list), of(&every)?.1);
            let listed_s = listed.as_ref().map_or(f64::INFINITY, |(_, best_s)| *best_s);
            Some([(listed_s, all_s), (moved_s(case, listed), all_s)])
        })
    };
    let pairs: Vec<_> = (0..instances(150, 1000)).filter_map(of_seed).collect();
    let [family, moved] = [0, 1].map(|at| Losses::of(pairs.iter().map(|pair| pair[at])));
    family.print("cuts of the family");
    moved.print("with layers moved");
    assert!(family.mean() < 0.02, "{}", family.mean());
    assert!(moved.mean() < 0.5 * family.mean(), "{} of {}", moved.mean(), family.mean());
}

#[test]
fn one_level_a_device_loses_little() {
    let of_seed = |seed| {
        with_random_case(seed + 6_000_000, (3, 6), RecomputePolicy::PerLayer, |case| {
            let all = brute::all_placements(case, MOST_PLACEMENTS)?;
            let every = brute::every_cut(case);
            let ladder = every.iter().flat_map(|cut| brute::at_every_level(case, cut));
            Some((best_s(case, ladder), best_s(case, all)))
        })
    };
    let losses = Losses::of((0..instances(150, 1500)).filter_map(of_seed));
    losses.print("mixes");
    assert!(losses.mean() < 0.02, "{}", losses.mean());
}

/// Layer counts after moving one layer from a stage to another; inner stages keep at least one.
fn moved(counts: &[usize]) -> Vec<Vec<usize>> {
    let stages = counts.len();
    let spare = |stage: usize| counts[stage] > usize::from(stage > 0 && stage + 1 < stages);
    let pairs = (0..stages).flat_map(|from| (0..stages).map(move |to| (from, to)));
    let moves = pairs.filter(|&(from, to)| from != to && spare(from)).map(|(from, to)| {
        let mut counts = counts.to_vec();
        counts[from] -= 1;
        counts[to] += 1;
        counts
    });
    moves.collect()
}

#[test]
fn plans_of_large_models_do_not_get_faster_by_moving_a_layer() {
    // With a fused loss some plans would have one chunk per pipeline rank.
    let alone = ["fused_loss=false", "moe_overlap=none,tutel,ampipe"];
    for (model, gpus, cluster, settings) in [
        ("llama70b", 16_384, "dgx_h100", alone),
        ("gemma2_9b", 64, "a100_roce", alone),
        ("deepseek_v3", 2_048, "dgx_h100", alone),
        ("mixtral_8x22b", 512, "dgx_h100", alone),
    ] {
        let model =
            models::model::shipped(model).and_then(Result::ok).expect("shipped models read");
        let cluster =
            models::cluster::shipped(cluster).and_then(Result::ok).expect("shipped clusters read");
        gains_nothing_by_a_move(&model, &cluster, gpus, &settings);
    }
}

/// In pairs nearly all passes of a chain are parts of pairs. A large vocabulary makes the last
/// stage's layers move far.
#[test]
fn plans_in_pairs_do_not_get_faster_by_moving_a_layer() {
    let text = "name: wide\nlayers: 30\nhidden: 1024\nheads: 16\nkv_heads: 8\nffn: 3072\nvocab: 150000\n\
                seq_len: 4096\nglobal_batch: 2048\nmoe: {experts: 8, top_k: 2}\n";
    let model = small::read_model(text);
    let cluster = models::cluster::shipped("a800").and_then(Result::ok).expect("it is shipped");
    let settings = "schedule=overlapped_1f1b pp=2 vpp=4 ep=2 micro_batch=2 recompute=none vocab=tensor \
                    tp=1 cp=1 zero_stage=1";
    let settings: Vec<&str> = settings.split(' ').collect();
    gains_nothing_by_a_move(&model, &cluster, 16, &settings);
}

fn gains_nothing_by_a_move(model: &ModelSpec, cluster: &ClusterSpec, gpus: u64, settings: &[&str]) {
    let restrictions = Restrictions::parse(settings).expect("settings are valid");
    let task = Task::new(model, cluster, gpus, &restrictions);
    let found = search(&task, &mut |_| {}).best.expect("it fits");
    assert!(found.decisions.vpp > 1, "{} has one chunk per pipeline rank", model.name);
    let cache = CostCache::new(model, cluster, gpus);
    let decisions = Decisions { recompute: RecomputePolicy::PerLayer, ..found.decisions };
    let case = Configuration::new(&cache, decisions).expect("it was planned");
    let counts: Vec<usize> = found.placed.iter().map(|stage| stage.end - stage.start).collect();
    let moved: Vec<Ranges> = moved(&counts).iter().map(|counts| ranges(counts)).collect();
    let pipeline_s = case.pipeline_s(found.priced.iteration_s);
    let cutoff_s = pipeline_s * (1.0 - 1e-9);
    let better = case.best_listed(&moved, Limits::below(cutoff_s), &mut Scratch::default()).best;
    let gain = better.map_or(0.0, |(_, better_s)| 1.0 - better_s / pipeline_s);
    println!("{}: {} moves, the best gains {:.3} %", model.name, moved.len(), 100.0 * gain);
    assert!(gain <= MOST_LEFT, "{}: {counts:?} loses {gain}", model.name);
}

fn ranges(counts: &[usize]) -> Ranges {
    let ends = counts.iter().scan(0, |end, count| {
        *end += count;
        Some((*end - count, *end))
    });
    ends.collect()
}
