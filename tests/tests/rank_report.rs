//! The plan's predictions against what ranks did: every rank's report of a run.

use clap::Parser;
use direct::Direct;
use meshwright_tests::golden::{folder, has_weights, planned, planned_on};
use models::decisions::CpStyle;
use models::formulas::communication::{
    LOSS_STATISTICS, REDUCTIONS_A_PASS, all_gather_volume, all_reduce_volume,
};
use models::formulas::state::{StateBytes, zero_bytes};
use models::layer::LocalHeads;
use models::mesh::Mesh;
use models::plan::Plan;
use models::program::Program;
use models::schedule::{PassKind, Release, Schedule, VocabPasses};
use models::shapes::{self, Held};
use planner::simulate::{Durations, VocabDurations, simulate};
use runtime::Interrupt;
use runtime::trainer::{Flags, train};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

const STEPS: f64 = 2.0;
/// Bytes of an element: golden cases train in f32.
const F32: f64 = 4.0;

/// Golden case, number of GPUs, and pinned settings.
const PLANS: [(&str, u64, &[&str]); 29] = [
    (
        "llama_gqa",
        8,
        &[
            "tp=2",
            "pp=2",
            "dp=2",
            "zero_stage=0",
            "schedule=1f1b",
            "micro_batch=1",
            "sequence_parallel=false",
        ],
    ),
    (
        "llama_gqa",
        8,
        &[
            "tp=2",
            "pp=2",
            "dp=2",
            "zero_stage=0",
            "schedule=1f1b",
            "micro_batch=1",
            "sequence_parallel=true",
        ],
    ),
    (
        "gpt2",
        4,
        &[
            "tp=2",
            "pp=2",
            "vpp=2",
            "schedule=interleaved_1f1b",
            "micro_batch=1",
            "sequence_parallel=false",
            "recompute=full",
        ],
    ),
    (
        "qwen2",
        8,
        &["tp=4", "pp=1", "dp=2", "zero_stage=0", "micro_batch=2", "sequence_parallel=false"],
    ),
    (
        "gemma2",
        4,
        &[
            "tp=2",
            "pp=2",
            "dp=1",
            "schedule=gpipe",
            "micro_batch=2",
            "sequence_parallel=true",
            "recompute=selective",
        ],
    ),
    (
        "llama_tied",
        4,
        &["tp=1", "pp=2", "vpp=2", "dp=2", "zero_stage=0", "schedule=looped_bfs", "micro_batch=1"],
    ),
    (
        "llama_tied",
        4,
        &["tp=2", "pp=2", "dp=1", "schedule=naive", "micro_batch=8", "sequence_parallel=false"],
    ),
    (
        "llama_tied",
        8,
        &[
            "tp=2",
            "pp=2",
            "dp=2",
            "zero_stage=0",
            "schedule=1f1b",
            "vocab=parallel_1",
            "micro_batch=1",
            "sequence_parallel=false",
        ],
    ),
    (
        "llama_gqa",
        8,
        &[
            "tp=2",
            "pp=4",
            "dp=1",
            "schedule=1f1b",
            "vocab=parallel_2",
            "micro_batch=1",
            "sequence_parallel=true",
        ],
    ),
    ("gpt2", 2, &["tp=1", "pp=2", "schedule=1f1b", "vocab=parallel_naive", "micro_batch=2"]),
    (
        "llama_gqa",
        2,
        &["tp=1", "pp=2", "vpp=2", "schedule=v_half", "vocab=parallel_1", "micro_batch=1"],
    ),
    ("llama_tied", 4, &["tp=1", "pp=4", "schedule=1f1b", "vocab=interlaced", "micro_batch=1"]),
    ("llama_gqa", 4, &["tp=1", "pp=4", "schedule=zb_h1", "vocab=tensor", "micro_batch=1"]),
    ("gpt2", 2, &["tp=1", "pp=2", "vpp=2", "schedule=dualpipe_v", "vocab=tensor", "micro_batch=1"]),
    ("llama_gqa", 4, &["tp=1", "pp=4", "schedule=dualpipe", "micro_batch=1"]),
    (
        "llama_gqa",
        8,
        &[
            "tp=2",
            "pp=2",
            "dp=2",
            "zero_stage=0",
            "schedule=chimera",
            "micro_batch=1",
            "sequence_parallel=false",
            "recompute=selective",
        ],
    ),
    (
        "llama_gqa",
        4,
        &["tp=2", "pp=2", "schedule=dualpipe", "micro_batch=1", "sequence_parallel=true"],
    ),
    (
        "llama_gqa",
        8,
        &[
            "tp=2",
            "pp=2",
            "dp=2",
            "zero_stage=1",
            "schedule=1f1b",
            "micro_batch=1",
            "sequence_parallel=true",
        ],
    ),
    ("gpt2", 4, &["pp=1", "tp=1", "dp=4", "zero_stage=2", "micro_batch=1"]),
    ("qwen2", 4, &["tp=1", "pp=2", "dp=2", "zero_stage=3", "schedule=zb_h1", "micro_batch=1"]),
    (
        "llama_gqa",
        4,
        &[
            "tp=1",
            "pp=1",
            "cp=2",
            "cp_style=zigzag",
            "dp=2",
            "zero_stage=3",
            "dp_shard=4",
            "micro_batch=2",
        ],
    ),
    ("gemma2", 4, &["tp=1", "pp=1", "cp=4", "cp_style=hybrid", "cp_ulysses=2", "zero_stage=0"]),
    (
        "llama_gqa",
        8,
        &[
            "tp=2",
            "pp=2",
            "cp=2",
            "cp_style=ring",
            "zero_stage=0",
            "schedule=1f1b",
            "micro_batch=1",
            "sequence_parallel=true",
        ],
    ),
    ("llama_gqa", 2, &["cp=2", "cp_style=all_gather", "zero_stage=0", "micro_batch=2"]),
    (
        "llama_tied",
        4,
        &[
            "tp=2",
            "pp=2",
            "schedule=1f1b",
            "micro_batch=2",
            "sequence_parallel=true",
            "fused_loss=true",
        ],
    ),
    (
        "qwen2",
        4,
        &[
            "tp=2",
            "pp=2",
            "schedule=1f1b",
            "micro_batch=1",
            "sequence_parallel=true",
            "recompute=full",
            "recompute_group=2",
        ],
    ),
    (
        "latent",
        8,
        &[
            "tp=2",
            "pp=2",
            "dp=2",
            "zero_stage=0",
            "schedule=1f1b",
            "micro_batch=1",
            "sequence_parallel=true",
        ],
    ),
    (
        "latent",
        4,
        &[
            "tp=2",
            "pp=1",
            "cp=2",
            "cp_style=zigzag",
            "zero_stage=0",
            "micro_batch=2",
            "sequence_parallel=false",
            "recompute=selective",
        ],
    ),
    (
        "latent",
        4,
        &[
            "tp=1",
            "pp=1",
            "cp=4",
            "cp_style=hybrid",
            "cp_ulysses=2",
            "zero_stage=0",
            "micro_batch=2",
        ],
    ),
];

struct Ran {
    what: String,
    /// Predicted bytes of activations of each pipeline rank.
    planned_activations: Vec<u64>,
    program: Program,
    schedule: Schedule,
    ranks: Vec<Value>,
}

impl Ran {
    fn new(test: &str, case: &str, gpus: u64, settings: &[&str]) -> Self {
        Self::of(&planned(case, gpus, settings), test, case, settings)
    }

    fn of(plan: &Plan, test: &str, case: &str, settings: &[&str]) -> Self {
        let gpus = plan.inputs.gpus;
        let program = Program::new(&plan.inputs.model, &plan.decisions, &plan.stages);
        let program = program.expect("it can be trained");
        let what = format!("{case} {}", settings.join(" "));
        let ranks = report(case, &program, &format!("{test} {what}"));
        assert_eq!(ranks.len() as u64, gpus, "{what}");
        let planned_activations =
            plan.device_memory().iter().map(|memory| memory.activations).collect();
        Self { what, planned_activations, schedule: schedule(plan), program, ranks }
    }

    /// Runs every plan. Tests run concurrently, so each has its own files.
    fn all(test: &str) -> impl Iterator<Item = Self> {
        PLANS.iter().map(move |(case, gpus, settings)| Self::new(test, case, *gpus, settings))
    }

    fn pp_rank(&self, rank: &Value) -> usize {
        number(&rank["at"]["pp"]) as usize
    }

    /// Elements of a micro-batch's hidden states on a rank, b·s·h / c.
    fn activation(&self) -> f64 {
        self.tokens() * self.program.model.hidden as f64
    }

    fn tokens(&self) -> f64 {
        (self.program.micro_batch * self.program.seq_len()) as f64 / self.program.mesh.cp as f64
    }

    /// Bytes of a rank's part of a micro-batch's logits, with three statistics of each token.
    fn logits_bytes(&self) -> f64 {
        let columns = shapes::vocabulary_rows(self.program.model.vocab, self.program.mesh.tp) + 3;
        self.tokens() * columns as f64 * F32
    }

    /// Micro-batches of all steps that one copy of a stage runs.
    fn micro_batches(&self) -> f64 {
        STEPS * self.program.micro_batches as f64 / self.copies()
    }

    /// Number of copies of each stage.
    fn copies(&self) -> f64 {
        self.program.layout.copies() as f64
    }
}

/// The schedule as the planner simulates it.
fn schedule(plan: &Plan) -> Schedule {
    plan.decisions.build_schedule().expect("it was planned")
}

fn report(case: &str, program: &Program, what: &str) -> Vec<Value> {
    let file = format!("ranks-{}.jsonl", what.replace([' ', '='], "-"));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(file);
    let data = folder(case).join("tokens.safetensors");
    let mut words = vec!["trainer".into(), "--steps".into(), "2".into()];
    if has_weights(case) {
        words.extend(["--init-from".into(), folder(case).into_os_string()]);
    }
    words.extend(["--data".into(), data.into(), "--rank-report".into(), path.clone().into()]);
    let stages = Direct::new(program);
    train::<f32, _>(&stages, &Flags::parse_from(words), &Interrupt::default()).expect("it trains");
    let text = std::fs::read_to_string(path).expect("the run wrote it");
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a whole number")
}

fn sizes(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(number).collect()
}

/// Bytes that a rank passed to a kind of call of a group.
fn handed(rank: &Value, group: &str, call: &str) -> f64 {
    rank["traffic"][group][call]["bytes"].as_f64().unwrap_or(0.0)
}

/// Bytes that it sent in a group's ring collectives, as the formulas count them.
fn sent_in_rings(rank: &Value, group: &str, ways: f64) -> f64 {
    all_reduce_volume(handed(rank, group, "all_reduce"), ways)
        + all_gather_volume(handed(rank, group, "all_gather") * ways, ways)
        + all_gather_volume(handed(rank, group, "reduce_scatter"), ways)
}

#[test]
fn local_shapes_are_those_of_the_program() {
    for run in Ran::all("shapes") {
        let (model, tp) = (&run.program.model, run.program.mesh.tp);
        for rank in &run.ranks {
            let mut planned = Vec::new();
            for index in run.program.stages_of(run.pp_rank(rank)) {
                let layers = run.program.stages[index].layers();
                let [before, behind] = shapes::ends(&run.program, index);
                let layers = layers.flat_map(|layer| shapes::layer(&run.program, layer));
                planned.extend(before.into_iter().chain(layers).chain(behind).map(of_plan));
            }
            if run.program.vocab.is_some() {
                let shard = shapes::vocabulary_shard(model, tp * run.program.mesh.pp);
                planned.extend(shard.into_iter().map(of_plan));
            }
            let mut held: Vec<Vec<u64>> =
                rank["tensors"].as_array().expect("a list").iter().map(of_report).collect();
            planned.sort();
            held.sort();
            assert_eq!(held, planned, "{} rank {}", run.what, rank["rank"]);
        }
    }
}

/// Sizes as plans list them, without padding rows, in either orientation of the checkpoint.
fn of_plan(held: Held) -> Vec<u64> {
    let mut shape = held.shape;
    shape.sort_unstable();
    shape
}

/// The same of a piece. Padding is rows of the vocabulary, a tensor's first dimension.
fn of_report(piece: &Value) -> Vec<u64> {
    let mut shape = sizes(&piece["local_shape"]);
    shape[0] += number(&piece["padding_rows"]);
    shape.sort_unstable();
    shape
}

#[test]
fn pieces_cover_every_tensor_of_the_checkpoint_once() {
    for run in Ran::all("pieces") {
        let Mesh { cp, dp, .. } = run.program.mesh;
        let replicas = cp * dp;
        let mut covered: BTreeMap<(u64, String), Vec<u8>> = BTreeMap::new();
        for rank in &run.ranks {
            for piece in rank["tensors"].as_array().expect("a list") {
                if piece["copy"] == false {
                    let [cp_index, dp_index] = ["cp", "dp"].map(|axis| number(&rank["at"][axis]));
                    cover(&mut covered, dp_index * cp + cp_index, piece);
                }
            }
        }
        for (key, counts) in &covered {
            assert!(counts.iter().all(|&count| count == 1), "{} {key:?}", run.what);
        }
        let case = run.what.split(' ').next().unwrap_or_default();
        if !has_weights(case) {
            continue;
        }
        let file =
            runtime::state::checkpoint::TensorFile::open(&folder(case).join("model.safetensors"));
        let mut names = file.expect("the case has it").names();
        names.sort();
        let of = |replica| names.iter().map(move |name| (replica, name.clone()));
        let expected: Vec<(u64, String)> = (0..replicas).flat_map(of).collect();
        assert!(covered.keys().eq(expected.iter()), "{}", run.what);
    }
}

/// Adds one to every element of a piece.
fn cover(covered: &mut BTreeMap<(u64, String), Vec<u8>>, replica: u64, piece: &Value) {
    let [whole, offset, local] =
        ["global_shape", "global_offset", "local_shape"].map(|key| sizes(&piece[key]));
    let name = piece["name"].as_str().expect("a name").to_owned();
    let all = whole.iter().product::<u64>() as usize;
    let counts = covered.entry((replica, name)).or_insert_with(|| vec![0; all]);
    let width = whole.get(1).copied().unwrap_or(1);
    let (first, columns) = if whole.len() == 1 { (0, 1) } else { (offset[1], local[1]) };
    for row in offset[0]..offset[0] + local[0] {
        for column in first..first + columns {
            counts[(row * width + column) as usize] += 1;
        }
    }
}

#[test]
fn passes_run_in_the_simulators_order_with_as_many_in_flight() {
    for run in Ran::all("passes") {
        let vocab = VocabDurations::uniform(run.schedule.ranks, 0.2, 0.3);
        let durations =
            Durations { vocab, ..Durations::uniform(&run.schedule, 1.0, 1.1, 0.9, 0.1) };
        let timeline = simulate(&run.schedule, &durations).expect("it was planned");
        for rank in &run.ranks {
            let pp_rank = run.pp_rank(rank);
            let simulated: Vec<String> = timeline.spans[pp_rank]
                .iter()
                .map(|span| &span.pass)
                .map(|pass| format!("{:?}{}.{}", pass.kind, pass.micro_batch, pass.chunk))
                .collect();
            let ran = rank["passes"].as_array().expect("a list").iter();
            let ran: Vec<&str> = ran.map(|pass| pass.as_str().expect("a name")).collect();
            assert_eq!(ran, simulated, "{} pp_rank {pp_rank}", run.what);
            // With a split backward pass, what is held for `W` no longer counts as a micro-batch in
            // flight.
            let vectors = run.schedule.max_in_flight(pp_rank, Release::AtB);
            let most = vectors.iter().map(|counts| counts.iter().sum::<u32>()).max();
            assert_eq!(
                number(&rank["peak_in_flight"]),
                u64::from(most.unwrap_or(0)),
                "{}",
                run.what
            );
            // The simulator counts whole shares of a pipeline rank; a chunk is one part of a share.
            let chunks = run.schedule.share_chunks() as f64;
            let simulated = timeline.peak_activations[pp_rank] * chunks;
            assert_eq!(number(&rank["peak_in_flight"]) as f64, simulated, "{}", run.what);
        }
    }
}

#[test]
fn pipeline_transfers_send_what_was_planned() {
    for run in Ran::all("transfers") {
        let (tp, ranks) = (run.program.mesh.tp as f64, run.program.mesh.pp as usize);
        for rank in &run.ranks {
            // One transfer for each stage boundary between pipeline ranks.
            let pp_rank = run.pp_rank(rank);
            let (stages, layout) = (run.program.stages.len(), run.program.layout);
            let own = run.program.stages_of(pp_rank).into_iter().enumerate();
            let boundaries = own.map(|(chunk, stage)| {
                let from = if layout.copies() > 1 { chunk as u16 } else { 0 };
                let other = |stage| layout.holder(ranks, stage, from).0 != pp_rank;
                usize::from(stage + 1 < stages && other(stage + 1))
                    + usize::from(stage > 0 && other(stage - 1))
            });
            let boundaries = boundaries.sum::<usize>();
            // The copies of a stage exchange their gradients.
            let copied = match layout.copies() {
                1 => 0.0,
                _ => STEPS * shapes::rank_elements(&run.program)[pp_rank] as f64 * F32,
            };
            // Each tensor-parallel rank sends its share (SC'21, section 4.1).
            let each = run.activation() / tp;
            let planned = |transfers: usize| run.micro_batches() * transfers as f64 * each * F32;
            // An output layer split over all pipeline ranks gets its input from the last stage.
            let (told, heard) = match (&run.program.vocab, run.program.last_rank() == pp_rank) {
                (None, _) => (0, 0),
                (Some(_), true) => (ranks - 1, 0),
                (Some(_), false) => (0, 1),
            };
            let [sent, received] = [told, heard].map(|more| planned(boundaries + more) + copied);
            assert_eq!(handed(rank, "pp", "send"), sent, "{} pp_rank {pp_rank}", run.what);
            assert_eq!(handed(rank, "pp", "recv"), received, "{} pp_rank {pp_rank}", run.what);
        }
    }
}

/// Gradients are reduced once a step, or once a micro-batch if replicas share them; weights are
/// gathered once a step, or by each pass that reads them (ZeRO, section 7).
#[test]
fn replicas_send_what_was_planned() {
    for run in Ran::all("replicas") {
        let Program { mesh, zero_stage, .. } = &run.program;
        let replicas = (mesh.cp * mesh.dp) as f64;
        let elements = shapes::rank_elements(&run.program);
        for rank in run.ranks.iter().filter(|_| replicas > 1.0) {
            let pp_rank = run.pp_rank(rank);
            let held = elements[pp_rank] as f64 * F32;
            // A reduce-scatter sends as much as an all-gather.
            let gathered = all_gather_volume(held, replicas);
            let passes = run.micro_batches();
            let state = match zero_stage {
                0 => STEPS * all_reduce_volume(held, replicas),
                1 => STEPS * 2.0 * gathered,
                2 => passes * gathered + STEPS * gathered,
                _ => {
                    // The input layer's backward pass reads no weights.
                    let stages = run.program.stages_of(pp_rank).into_iter();
                    let input = stages.map(|stage| {
                        let [input, _] = shapes::ends(&run.program, stage);
                        let sizes =
                            input.into_iter().map(|held| held.shape.iter().product::<u64>());
                        if stage == 0 { sizes.sum::<u64>() } else { 0 }
                    });
                    let input = all_gather_volume(input.sum::<u64>() as f64 * F32, replicas);
                    passes * (3.0 * gathered - input)
                }
            };
            // And the count of valid tokens and the sum of squares, 8 bytes each.
            let planned = state + STEPS * 2.0 * all_reduce_volume(8.0, replicas);
            assert_eq!(sent_in_rings(rank, "dp", replicas), planned, "{}", run.what);
        }
    }
}

/// Golden cases train in f32, without exact weights of their own (ZeRO, section 5).
#[test]
fn replicas_hold_what_was_planned() {
    let each = StateBytes { weights: F32, gradients: F32, optimizer: 2.0 * F32 };
    for run in Ran::all("state") {
        let Program { zero_stage, dp_shard, .. } = run.program;
        let elements = shapes::rank_elements(&run.program);
        for rank in &run.ranks {
            let held = elements[run.pp_rank(rank)] as f64;
            let planned = zero_bytes(&each, zero_stage, held, dp_shard as f64);
            for (what, planned) in [
                ("parameter_bytes", planned.weights),
                ("gradient_bytes", planned.gradients),
                ("optimizer_bytes", planned.optimizer),
            ] {
                let seen = number(&rank[what]) as f64;
                assert!((seen / planned - 1.0).abs() < 0.03, "{}: {what} {seen}", run.what);
            }
        }
    }
}

/// Keys and values go round the ring, or are gathered, in both passes; their gradients one hop
/// further, in f32; Ulysses exchanges queries, keys, values and the output, and their gradients.
#[test]
fn context_parallel_ranks_send_what_was_planned() {
    for run in Ran::all("context").filter(|run| run.program.mesh.cp > 1) {
        let program = &run.program;
        let (tokens, ulysses) = (run.tokens(), program.cp_ulysses as f64);
        let ring = program.mesh.cp as f64 / ulysses;
        let heads = LocalHeads::new(&program.model, program.mesh.tp);
        let kv = tokens * heads.kv_width() as f64 * F32;
        for rank in &run.ranks {
            let stages = program.stages_of(run.pp_rank(rank)).into_iter();
            let layers: usize = stages.map(|stage| program.stages[stage].recompute.len()).sum();
            let times = run.micro_batches() * layers as f64;
            let sent =
                ["send", "all_gather", "reduce_scatter"].map(|call| handed(rank, "cp_ring", call));
            let planned = match (program.cp_style, ring) {
                (_, 1.0) => [0.0; 3],
                (CpStyle::AllGather, _) => [0.0, 2.0 * times * kv, times * kv * ring],
                _ => [times * kv * (2.0 * (ring - 1.0) + ring), 0.0, 0.0],
            };
            assert_eq!(sent, planned, "{}", run.what);
            if ulysses > 1.0 {
                let widths = heads.q_width() + heads.kv_width() + heads.out_width();
                let exchanged = times * 2.0 * tokens * widths as f64 * F32;
                let exchanged = (exchanged, handed(rank, "cp_ulysses", "all_to_all"));
                assert_eq!(exchanged.0, exchanged.1, "{}", run.what);
            }
        }
    }
}

#[test]
fn tensor_parallel_ranks_send_what_was_planned() {
    for run in Ran::all("tensor").filter(|run| run.program.mesh.tp > 1) {
        let tp = run.program.mesh.tp as f64;
        for rank in &run.ranks {
            let found = sent_in_rings(rank, "tp", tp);
            let planned = planned_in_tensor_groups(&run, rank, tp);
            // Replicas that share state sum partial gradients of their pieces alone.
            let fewer =
                if run.program.zero_stage > 0 { STEPS * partial_gradients(rank) } else { 0.0 };
            let least = planned - all_reduce_volume(fewer, tp);
            assert!((least..=planned).contains(&found), "{} rank {}", run.what, rank["rank"]);
        }
    }
}

fn planned_in_tensor_groups(run: &Ran, rank: &Value, tp: f64) -> f64 {
    let program = &run.program;
    let stages = program.stages_of(run.pp_rank(rank));
    let layers: usize = stages.iter().map(|&stage| program.stages[stage].recompute.len()).sum();
    let activation = run.activation();
    let both_passes = 2.0 * REDUCTIONS_A_PASS * all_reduce_volume(activation, tp);
    // Inputs of linear layers are stored sharded and gathered again backward.
    let again = if program.sequence_parallel { REDUCTIONS_A_PASS } else { 0.0 };
    // Layers that run again in groups repeat their reductions.
    let repeated = if program.recompute_group > 1 { REDUCTIONS_A_PASS } else { 0.0 };
    let each_layer = both_passes
        + again * all_gather_volume(activation, tp)
        + repeated * all_reduce_volume(activation, tp);
    let mut micro_batch = layers as f64 * each_layer;
    if program.vocab.is_some() {
        if program.sequence_parallel {
            // The output layer's input, for logits and for weight gradients; and the input layer's
            // gradient.
            let gathers = 2.0 + if stages.contains(&0) { 1.0 } else { 0.0 };
            micro_batch += gathers * all_gather_volume(activation, tp);
        }
    } else {
        micro_batch += vocabulary_in_tensor_groups(run, &stages, tp);
    }
    // If tensor-parallel ranks hold the whole stream, what they receive in parts is gathered.
    if !program.sequence_parallel {
        let copied =
            if run.copies() > 1.0 { shapes::rank_elements(program)[run.pp_rank(rank)] } else { 0 };
        let parts = handed(rank, "pp", "recv") / F32 - STEPS * copied as f64;
        let parts = parts / run.micro_batches();
        micro_batch += all_gather_volume(parts * tp, tp);
    }
    let step = all_reduce_volume(partial_gradients(rank) + 8.0, tp);
    run.micro_batches() * micro_batch * F32 + STEPS * step
}

/// Bytes of the whole tensors whose gradients are partial sums.
fn partial_gradients(rank: &Value) -> f64 {
    let partial = rank["tensors"].as_array().expect("a list").iter();
    let partial = partial.filter(|piece| piece["partial_gradient"] == true);
    let mut whole: BTreeMap<&str, u64> = BTreeMap::new();
    for piece in partial {
        let name = piece["name"].as_str().expect("a name");
        whole.insert(name, sizes(&piece["global_shape"]).iter().product());
    }
    whole.values().sum::<u64>() as f64 * F32
}

/// Elements of a micro-batch in stages that hold the embedding and the output layer.
fn vocabulary_in_tensor_groups(run: &Ran, stages: &[usize], tp: f64) -> f64 {
    let program = &run.program;
    let hidden_states = all_reduce_volume(run.activation(), tp);
    let mut micro_batch = 0.0;
    if stages.contains(&0) {
        micro_batch += hidden_states;
    }
    if stages.contains(&(program.stages.len() - 1)) {
        let statistics = all_reduce_volume(LOSS_STATISTICS * run.tokens(), tp);
        micro_batch += hidden_states + statistics;
        if program.sequence_parallel {
            // The output layer's input is stored sharded, as those of layers are.
            micro_batch += all_gather_volume(run.activation(), tp);
        }
    }
    micro_batch
}

/// The reductions of a vocabulary split over the pipeline: for every token the maximum, sum and
/// target (`C1`); for every micro-batch the output layer's input gradient (`C2`, or with `C1`), the
/// input layer's rows and their gradient (Vocabulary Parallelism, section 4 and appendix C).
#[test]
fn vocabulary_passes_reduce_what_was_planned() {
    for run in Ran::all("vocabulary") {
        let Some(vocab) = run.program.vocab else { continue };
        let (tokens, activation) = (run.tokens(), run.activation());
        let [first, middle, last] = match vocab {
            VocabPasses::Naive => [tokens, 2.0 * tokens, activation],
            VocabPasses::One | VocabPasses::Interlaced => {
                [LOSS_STATISTICS * tokens, 0.0, activation]
            }
            VocabPasses::Two => [LOSS_STATISTICS * tokens + activation, 0.0, 0.0],
        };
        let barriers = vocab.kinds().iter().filter(|&&kind| match kind {
            PassKind::S => first > 0.0,
            PassKind::S2 => middle > 0.0,
            _ => last > 0.0,
        });
        assert_eq!(barriers.count(), vocab.barriers(), "{}", run.what);
        for rank in &run.ranks {
            for (group, call, elements) in [
                ("vocab_s", "all_reduce", first),
                ("vocab_s2", "all_reduce", middle),
                ("vocab_t", "all_reduce", last),
                ("vocab_input", "all_reduce", activation),
                ("vocab_input_gradient", "broadcast", activation),
            ] {
                let planned = run.micro_batches() * elements * F32;
                assert_eq!(handed(rank, group, call), planned, "{} {group}", run.what);
            }
        }
    }
}

/// Only what comes before and after the layers is left on the device.
#[test]
fn activations_in_host_memory_leave_the_device() {
    for case in ["llama_gqa", "mixtral"] {
        let settings = [
            "tp=2",
            "pp=2",
            "schedule=1f1b",
            "micro_batch=1",
            "fused_loss=true",
            "sequence_parallel=true",
        ];
        let bytes = |offload: &str| {
            let settings: Vec<&str> = settings.into_iter().chain([offload]).collect();
            let plan = planned_on("dgx_h100", case, 4, &settings);
            let ran = Ran::of(&plan, "host", case, &settings);
            let bytes = |rank: &Value| number(&rank["peak_activation_bytes"]);
            ran.ranks.iter().map(bytes).collect::<Vec<u64>>()
        };
        let (device, host) = (bytes("offload=none"), bytes("offload=activations"));
        for (device, host) in device.iter().zip(&host) {
            assert!(10 * host < *device, "{case}: {host} of {device} bytes");
        }
    }
}

#[test]
fn activations_take_the_bytes_that_were_planned() {
    for run in Ran::all("activations") {
        let program = &run.program;
        for rank in &run.ranks {
            let pp_rank = run.pp_rank(rank);
            let planned = run.planned_activations[pp_rank] as f64;
            // Plans count logits as workspace; here they belong to what a micro-batch keeps, as do
            // the statistics of norms and softmax, which plans omit.
            let ends = program.stages_of(pp_rank).contains(&(program.stages.len() - 1));
            let holds = (ends || program.vocab.is_some()) && !program.fused_loss;
            let head = if holds { run.logits_bytes() } else { 0.0 };
            let seen = number(&rank["peak_activation_bytes"]) as f64;
            // A split backward pass leaves about as much for `W` as it frees.
            let (less, more) =
                if run.schedule.splits_backward() { (0.97, 1.03) } else { (1.0, 1.01) };
            let (least, most) = (less * planned, more * planned);
            // The gradient of logits is held for `W`, too.
            let held = run.schedule.max_in_flight(pp_rank, Release::AtW);
            let held = held.iter().map(|counts| counts.iter().sum::<u32>()).max().unwrap_or(0);
            let most = most + f64::from(held) * head;
            assert!(
                (least..=most).contains(&seen),
                "{} pp_rank {pp_rank}: {seen}, not {least} to {most}",
                run.what
            );
        }
    }
}
