//! How much of a slow link training hides: gathers and reductions of ZeRO under layers, keys and
//! values under attention, and copies of rows for experts under other chunks' work or under the
//! other pass of a pair (`cargo bench -p meshwright-runtime --bench hidden`).
//!
//! Every call of the group is on its way for so long that all of a step's calls together take half
//! of the step's computation. What ranks wait for, as the trace shows it (`--trace` of a trainer),
//! is exposed, less what they wait for each other without a delay; the rest is hidden. Every token
//! goes to all experts, so that ranks have equal work. For experts the planner's formulas say how
//! much should be hidden.

use direct::Direct;
use models::decisions::{
    AuxScope, CpStyle, DpReduction, MoeOverlap, Offload, RankOrder, USUAL_BUCKET_MIB,
};
use models::formulas::ampipe::{self, Chunk, Interference};
use models::formulas::pairs::{PairedLayer, hidden_s};
use models::input::Source;
use models::mesh::{ExpertSplit, Mesh};
use models::model::read;
use models::program::{Program, Recompute, StageProgram};
use models::schedule::{dualpipe_v, one_f_one_b};
use runtime::comm::{Options, SlowLink, run_ranks, since};
use runtime::data::{Sample, Samples};
use runtime::{Error, Host, Optimizer, Rank, Reduction, Trace};
use std::time::{Duration, Instant};

const LAYERS: usize = 8;
const STEPS: u64 = 4;
const OPTIMIZER: Optimizer =
    Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip: None };

struct Noise(usize);

impl Samples for Noise {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn repeats(&self) -> bool {
        true
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |i: usize| ((index * 7919 + i as u64 * 104_729) % 131) as i64;
        Ok(Sample::of_tokens((0..=self.0).map(token).collect()))
    }
}

/// The program of AMPipe over two ranks with different experts.
fn in_chunks(sizes: &str, chunks: usize) -> Program {
    let program = program(sizes, 1, 2, 0);
    let experts = Some(ExpertSplit { ep: 2, etp: 1 });
    Program { experts, moe_overlap: MoeOverlap::Ampipe, moe_chunks: chunks, ..program }
}

/// The program of pairs over two ranks with different experts.
fn in_pairs(sizes: &str) -> Program {
    let micro_batches = 8;
    let schedule = dualpipe_v(1, micro_batches).expect("one rank has a schedule");
    let experts = Some(ExpertSplit { ep: 2, etp: 1 });
    let stage =
        |first_layer| StageProgram { first_layer, recompute: vec![Recompute::None; LAYERS / 2] };
    Program {
        experts,
        moe_overlap: MoeOverlap::Pair,
        micro_batches,
        layout: schedule.layout,
        passes: schedule.by_rank(),
        stages: vec![stage(0), stage(LAYERS / 2)],
        ..program(sizes, 1, 2, 0)
    }
}

fn program(sizes: &str, cp: u64, dp: u64, zero_stage: u8) -> Program {
    let text = format!("name: hidden\nlayers: {LAYERS}\nvocab: 131\nglobal_batch: 2\n{sizes}");
    let source = Source::from_bytes("hidden.yaml", text.into_bytes()).expect("it is text");
    let schedule = one_f_one_b(1, 1).expect("one rank has a schedule");
    let recompute = vec![Recompute::None; LAYERS];
    Program {
        model: read(&source).expect("a model"),
        mesh: Mesh { tp: 1, cp, dp, pp: 1, order: RankOrder::DpInner },
        experts: None,
        aux_scope: AuxScope::MicroBatch,
        moe_overlap: MoeOverlap::None,
        moe_chunks: 1,
        sequence_parallel: false,
        fused_loss: false,
        cp_style: CpStyle::Zigzag,
        cp_ulysses: 1,
        micro_batch: 2 / dp as usize,
        micro_batches: 1,
        layout: schedule.layout,
        vocab: None,
        zero_stage,
        dp_shard: if zero_stage > 0 { (cp * dp) as usize } else { 1 },
        offload: Offload::None,
        dp_reduction: DpReduction::Bucketed,
        dp_bucket_mib: USUAL_BUCKET_MIB,
        post_validation: false,
        recompute_group: 1,
        stages: vec![StageProgram { first_layer: 0, recompute }],
        passes: schedule.by_rank(),
        planned_memory_bytes: 0,
    }
}

/// Seconds that a trace's rank waits for calls of a group.
fn waited_s(trace: &Trace, group: &str) -> f64 {
    let events = trace
        .lines()
        .into_iter()
        .map(|line| -> serde_json::Value { serde_json::from_str(&line).expect("events are JSON") });
    let of_group = |event: &serde_json::Value| {
        let name = event["name"].as_str().unwrap_or_default();
        event["cat"] == "wait" && name.rsplit(' ').next() == Some(group)
    };
    let micros = events.filter(of_group).filter_map(|event| event["dur"].as_f64());
    micros.sum::<f64>() / 1e6
}

/// A step of rank 0.
struct Measured {
    computing_s: f64,
    waited_s: f64,
    /// Calls of the group that have to be waited for.
    calls: u64,
}

/// The fastest of some steps.
fn measure(program: &Program, group: &str, slow_link: Option<SlowLink>) -> Measured {
    let options = Options { slow_link, ..Options::default() };
    let stages = Direct::new(program);
    let run = |world| {
        let device = Host::<f32>::serial();
        let mut rank =
            Rank::new(&stages, world, device, Reduction::default(), 1).expect("ranks meet");
        rank.initialise().expect("weights are drawn");
        rank.groups().world.stats().keep_spans();
        let samples = Noise(program.seq_len());
        let (mut computing_s, mut least_waited_s) = (f64::INFINITY, f64::INFINITY);
        let mut sent = rank.groups().world.stats().traffic();
        for step in 0..=STEPS {
            if step == STEPS {
                sent = rank.groups().world.stats().traffic();
            }
            let mut trace = Trace::new(Instant::now(), 0);
            let result = rank.gradients(&samples, step, None).expect("the step runs");
            trace.calls(rank.groups().world.stats().take_spans());
            // What replicas gather of it is on its way under the next step's layers.
            rank.update(&OPTIMIZER, 1e-4, result.norm).expect("the step ends");
            if step > 0 {
                computing_s = computing_s.min(result.outcome.computing_s);
                least_waited_s = least_waited_s.min(waited_s(&trace, group));
            }
        }
        let traffic = since(&sent, &rank.groups().world.stats().traffic());
        let of_group = traffic.iter().filter(|((of, call), _)| of == group && *call != "send");
        let calls = of_group.map(|(_, counted)| counted.calls).sum();
        Measured { computing_s, waited_s: least_waited_s, calls }
    };
    run_ranks(program.world_size(), options, run).swap_remove(0)
}

/// What the planner's formulas say that all-to-alls of a step add, s; `None` without experts.
/// Layers compute by their FLOPs.
fn predicted_exposed_s(program: &Program, computing_s: f64, transit_s: f64) -> Option<f64> {
    let moe = program.model.moe.as_ref()?;
    let [rows, hidden] = [program.model.seq_len, program.model.hidden].map(|size| size as f64);
    let (h2, sent) = (hidden * hidden, (moe.top_k * moe.ffn) as f64);
    // Products of queries, keys and values; attention and its output; experts of three matrices.
    let inputs = 6.0 * rows * h2;
    let [core, out] = [2.0 * rows * rows * hidden, 2.0 * rows * h2];
    let experts = 6.0 * rows * hidden * sent;
    let layers = (LAYERS * program.micro_batches) as f64;
    // A backward pass computes twice as much as a forward pass.
    let second = computing_s / (3.0 * layers * (inputs + core + out + experts));
    let chunk = |attention: f64, experts: f64| Chunk {
        attention_s: second * attention,
        dispatch_s: transit_s,
        experts_s: second * experts,
        combine_s: transit_s,
    };
    if program.moe_overlap == MoeOverlap::Pair {
        let attention = inputs + core + out;
        let forward = chunk(attention, experts);
        let backward = chunk(2.0 * attention, 2.0 * experts);
        let layer = PairedLayer { forward, backward, beside_s: [0.0; 2] };
        let hidden_s: f64 = hidden_s(&layer, 1.0).iter().sum();
        let pairs = program.passes[0].pairs.len() * LAYERS / program.stages.len();
        return Some(4.0 * transit_s * layers - hidden_s * pairs as f64);
    }
    let of = program.moe_chunks;
    let chunks = |times: f64| -> Vec<Chunk> {
        // The last queries see the most keys.
        let core = |n: usize| core * (2 * n + 1) as f64 / (of * of) as f64;
        let attention = |n| core(n) + out / of as f64;
        (0..of).map(|n| chunk(times * attention(n), times * experts / of as f64)).collect()
    };
    // Here a call neither takes cores from the computation nor waits for some.
    let how = Interference { slowdown: 1.0, late: false };
    let exposed = |chunks: &[Chunk], total_s: f64| {
        total_s - chunks.iter().map(Chunk::computed_s).sum::<f64>()
    };
    let (forward, backward) = (chunks(1.0), chunks(2.0));
    let backward_s = ampipe::backward_s(&backward, how);
    let layer_s =
        exposed(&forward, ampipe::forward_s(&forward, how)) + exposed(&backward, backward_s);
    Some(layers * layer_s)
}

fn main() {
    // Attention of long sequences; and layers of few tokens and many weights.
    let long = "seq_len: 2048\nhidden: 128\nheads: 4\nkv_heads: 4\nffn: 128\n";
    let wide = "seq_len: 256\nhidden: 512\nheads: 8\nkv_heads: 4\nffn: 1408\n";
    let experts = "seq_len: 1024\nhidden: 256\nheads: 8\nkv_heads: 8\nffn: 512\n\
                   moe: {experts: 4, top_k: 4, ffn: 256}\n";
    let cases = [
        ("AMPipe in 4 chunks over 2 ranks", "ep", in_chunks(experts, 4)),
        ("overlapped pairs over 2 ranks", "ep", in_pairs(experts)),
        ("ring attention over 2 ranks", "cp_ring", program(long, 2, 1, 0)),
        ("ZeRO stage 1 over 2 replicas", "dp", program(wide, 1, 2, 1)),
        ("ZeRO stage 3 over 2 replicas", "dp", program(wide, 1, 2, 3)),
    ];
    for (name, group, program) in cases {
        let Measured { computing_s, calls, waited_s: at_once_s } = measure(&program, group, None);
        let transit_s = computing_s / 2.0 / calls as f64;
        let link = SlowLink { group, transit: Duration::from_secs_f64(transit_s) };
        let Measured { waited_s, .. } = measure(&program, group, Some(link));
        let hidden = 1.0 - (waited_s - at_once_s).max(0.0) / (computing_s / 2.0);
        let predicted = predicted_exposed_s(&program, computing_s, transit_s)
            .map(|exposed_s| 1.0 - exposed_s / (computing_s / 2.0));
        let says = predicted
            .map_or_else(String::new, |share| format!(" ({:.0} % by formula)", 100.0 * share));
        println!(
            "{name}: {:.0} ms of computation, {calls} calls of {:.1} ms: {:.0} % hidden{says}",
            1e3 * computing_s,
            1e3 * transit_s,
            100.0 * hidden
        );
    }
}
