//! Vocabulary Parallelism (arXiv 2411.05288): as the vocabulary grows, splitting it over the
//! pipeline beats moving layers.

use models::cluster::ClusterSpec;
use models::model::ModelSpec;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::search;

fn time_s(model: &ModelSpec, cluster: &ClusterSpec, gpus: u64, vocab: &str) -> f64 {
    let mut settings: Vec<String> = [
        "tp=1",
        "cp=1",
        "dp=1",
        "micro_batch=1",
        "schedule=1f1b",
        "recompute=none",
        "offload=none",
    ]
    .map(str::to_owned)
    .into();
    settings.push(format!("pp={gpus}"));
    settings.push(format!("vocab={vocab}"));
    let restrictions = Restrictions::parse(&settings).expect("the settings are valid");
    let mut task = Task::new(model, cluster, gpus, &restrictions);
    task.ignore_memory = true;
    search(&task, &mut |_| {}).best.expect("the configuration exists").priced.iteration_s
}

#[test]
fn vocabulary_parallelism_pulls_ahead_as_the_vocabulary_grows() {
    let a800 =
        models::cluster::shipped("a800").and_then(Result::ok).expect("shipped clusters read");
    let mut found = vec![];
    for (name, gpus) in [("vocab_4b", 8), ("vocab_10b", 16), ("vocab_21b", 32)] {
        let shipped =
            models::model::shipped(name).and_then(Result::ok).expect("shipped models read");
        let model = shipped.with_run(Some(2048), Some(128)).expect("valid");
        let mut ratios = vec![];
        for vocab in [32_000, 64_000, 128_000, 256_000] {
            let model = ModelSpec { vocab, ..model.clone() };
            let redis_s = time_s(&model, &a800, gpus, "redistribute");
            let ratio = redis_s
                / time_s(&model, &a800, gpus, "parallel_2").min(time_s(
                    &model,
                    &a800,
                    gpus,
                    "parallel_1",
                ));
            println!(
                "{name} on {gpus} GPUs, vocabulary {vocab}: redistribution takes {ratio:.3} times"
            );
            ratios.push(ratio);
        }
        found.push((name, ratios));
    }
    for (name, ratios) in found {
        // Only whole layers can move, so redistribution fits some sizes better than others:
        // measured, it takes 1.096, 1.084, 1.129, 1.288 times as long on 4B (the paper's runs,
        // vocp-005 to vocp-012). So two sizes together are compared with the next two.
        let (first, last) = (ratios[0] + ratios[1], ratios[2] + ratios[3]);
        assert!(last > first && ratios[3] > ratios[0] + 0.1, "{name}: {ratios:?}");
        assert!(ratios.iter().all(|&ratio| ratio > 1.0), "{name}: {ratios:?}");
    }
}
