//! Megatron-LM at SC'21 (arXiv 2104.04473): the planner, restricted to the options of that time,
//! against the paper's configurations and measurements.

use models::cluster::ClusterSpec;
use models::model::ModelSpec;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::{Found, search};

/// A row of Table 1: model, GPUs, batch, tensor and pipeline parallel sizes.
type Row = (&'static str, u64, u64, u64, u64);

const TABLE_1: [Row; 10] = [
    ("gpt_1.7b", 32, 512, 1, 1),
    ("gpt_3.6b", 64, 512, 2, 1),
    ("gpt_7.5b", 128, 512, 4, 1),
    ("gpt_18b", 256, 1024, 8, 1),
    ("gpt_39b", 512, 1536, 8, 2),
    ("gpt_76b", 1024, 1792, 8, 4),
    ("gpt_145b", 1536, 2304, 8, 8),
    ("gpt_310b", 1920, 2160, 8, 16),
    ("gpt_530b", 2520, 2520, 8, 35),
    ("gpt_1t", 3072, 3072, 8, 64),
];

/// Options that existed at SC'21.
const THEN: [&str; 4] = [
    "schedule=1f1b,interleaved_1f1b",
    "zero_stage=0",
    "sequence_parallel=false",
    "vocab=first_last",
];

/// Further options of the paper's own runs, in Table 2.
const HABITS: [&str; 4] = ["rank_order=tp-cp-dp-pp", "recompute=full", "cp=1", "offload=none"];

fn selene() -> ClusterSpec {
    models::cluster::shipped("selene").and_then(Result::ok).expect("shipped clusters read")
}

fn model(name: &str, batch: u64) -> ModelSpec {
    let shipped = models::model::shipped(name).and_then(Result::ok).expect("shipped models read");
    shipped.with_run(None, Some(batch)).expect("the batch is valid")
}

fn plan(model: &ModelSpec, gpus: u64, settings: &[String]) -> Option<Found> {
    let restrictions = Restrictions::parse(settings).expect("the settings are valid");
    search(&Task::new(model, &selene(), gpus, &restrictions), &mut |_| {}).best
}

fn settings(habits: &[&str], more: &[String]) -> Vec<String> {
    THEN.iter().chain(habits).map(|&set| set.to_owned()).chain(more.iter().cloned()).collect()
}

/// The degrees of Table 1 follow the paper's rules of thumb (section 3), and published runs show
/// that they are not the fastest (docs/sc21.md). So this tests what can hold: the planner is never
/// slower than the table, agrees with it for large models, and gains no more on small models than
/// measurements have shown.
#[test]
fn the_planner_meets_or_beats_the_degrees_of_table_1() {
    let (mut same, mut near, mut report) = (0, 0, String::new());
    for (name, gpus, batch, tp, pp) in TABLE_1 {
        let model = model(name, batch);
        let free = plan(&model, gpus, &settings(&HABITS, &[])).expect("something fits");
        let degrees = [format!("tp={tp}"), format!("pp={pp}")];
        let paper = plan(&model, gpus, &settings(&HABITS, &degrees));
        let paper = paper.expect("the paper's configuration fits");
        let loss = paper.priced.iteration_s / free.priced.iteration_s - 1.0;
        let d = &free.decisions;
        report += &format!(
            "{name}: tp {} pp {} v {} b {} in {:.2} s; paper tp {tp} pp {pp} in {:.2} s, {:+.1} %\n",
            d.tp,
            d.pp,
            d.vpp,
            d.micro_batch,
            free.priced.iteration_s,
            paper.priced.iteration_s,
            100.0 * loss
        );
        assert!(loss >= -1e-12, "a pinned search beats a free one\n{report}");
        same += u64::from((d.tp, d.pp) == (tp, pp));
        near += u64::from(loss < 0.03);
    }
    println!("{report}");
    assert!(same >= 3 && near >= 5, "{same} rows agree, {near} within 3 %\n{report}");
}

/// GPT 3.6B on 64 A100 with a batch of 512 was measured at tensor-parallel size 1 and, as in Table
/// 1, 2 (vTrain's runs with Megatron-DeepSpeed, rows vtm-001 and vtm-005): 3.57 s against 3.94 s.
#[test]
fn table_1_is_measured_not_to_be_the_fastest() {
    let rows = validation::row::read(std::path::Path::new(MEASURED)).expect("it is shipped");
    let predicted = validation::predict_all(&rows);
    let seconds = |id: &str| {
        let at = rows.iter().position(|row| row.id == id).expect("the row exists");
        let measured_s = rows[at].measured_s().expect("it has a time");
        (measured_s, predicted[at].predicted_s.expect("it can be expressed"))
    };
    let ((unpaired_s, alone_model_s), (table_s, table_model_s)) =
        (seconds("vtm-001"), seconds("vtm-005"));
    assert!(table_s / unpaired_s > 1.10, "measured: {table_s} s, {unpaired_s} s");
    let (measured, model) = (table_s / unpaired_s, table_model_s / alone_model_s);
    // 6 % is the error of this source's rows.
    assert!((measured / model - 1.0).abs() < 0.06, "measured {measured:.3}, model {model:.3}");
}

/// Cargo runs a package's tests in its own folder, so the path is absolute.
const MEASURED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/papers/measured.csv");

/// Table 2: PTD-P against ZeRO-3 without model parallelism, same batch.
#[test]
fn tensor_and_pipeline_parallelism_beat_zero_3_by_more_on_more_gpus() {
    let rows = [
        ("gpt3_175b", 1536, [384, 768, 1536], [4, 2, 1], 12),
        ("gpt_530b", 2240, [560, 1120, 2240], [4, 2, 1], 35),
    ];
    let mut found = vec![];
    for (name, batch, gpus, micro_batches, pp) in rows {
        let model = model(name, batch);
        let mut ratios = vec![];
        for (gpus, micro_batch) in gpus.into_iter().zip(micro_batches) {
            let ptdp = ["tp=8".to_owned(), format!("pp={pp}"), "micro_batch=1".to_owned()];
            let ptdp_s = time_s(&model, gpus, &settings(&HABITS, &ptdp));
            let ratio = zero_3_s(&model, gpus, micro_batch) / ptdp_s;
            println!(
                "{name} on {gpus} GPUs: PTD-P {ptdp_s:.1} s, ZeRO-3 takes {ratio:.2} times that"
            );
            ratios.push(ratio);
        }
        found.push((name, ratios));
    }
    for (name, ratios) in found {
        assert!(ratios.iter().all(|&ratio| ratio > 1.0), "{name}: {ratios:?}");
        assert!(ratios.is_sorted(), "{name}: {ratios:?}");
    }
}

fn zero_3_s(model: &ModelSpec, gpus: u64, micro_batch: u64) -> f64 {
    let micro_batch = format!("micro_batch={micro_batch}");
    let shards = format!("dp_shard={gpus}");
    let zero = [
        "tp=1",
        "pp=1",
        "cp=1",
        "zero_stage=3",
        "recompute=full",
        "offload=none",
        "vocab=first_last",
    ];
    let settings: Vec<String> =
        zero.iter().map(|&set| set.to_owned()).chain([micro_batch, shards]).collect();
    time_s(model, gpus, &settings)
}

/// Time of the best plan, whether or not it fits, because the paper's memory model differs in
/// detail.
fn time_s(model: &ModelSpec, gpus: u64, settings: &[String]) -> f64 {
    let restrictions = Restrictions::parse(settings).expect("the settings are valid");
    let selene = selene();
    let mut task = Task::new(model, &selene, gpus, &restrictions);
    task.ignore_memory = true;
    search(&task, &mut |_| {}).best.expect("some configuration exists").priced.iteration_s
}
