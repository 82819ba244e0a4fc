//! How much of a slow link training hides: gathers and reductions of ZeRO stage 3 under layers, and
//! keys and values under attention (`cargo bench -p meshwright-runtime --bench hidden`).
//!
//! Every call of the group is on its way for so long that all of a step's calls together take half
//! of the step's computation. What ranks wait for is exposed; the rest is hidden. Ends with 1 if
//! less than 70 % is.

use direct::Direct;
use models::decisions::{CpStyle, Offload, RankOrder};
use models::input::Source;
use models::mesh::Mesh;
use models::model::read;
use models::program::{Program, Recompute, StageProgram};
use models::schedule::one_f_one_b;
use runtime::comm::{Options, SlowLink, run_ranks};
use runtime::data::{Sample, Samples};
use runtime::{Error, Host, Rank, Reduction};
use std::process::ExitCode;
use std::time::Duration;

const LAYERS: usize = 8;
const STEPS: u64 = 4;

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

fn program(sizes: &str, cp: u64, dp: u64, zero_stage: u8) -> Program {
    let text = format!("name: hidden\nlayers: {LAYERS}\nvocab: 131\nglobal_batch: 2\n{sizes}");
    let source = Source::from_bytes("hidden.yaml", text.into_bytes()).expect("it is text");
    let schedule = one_f_one_b(1, 1).expect("one rank has a schedule");
    let recompute = vec![Recompute::None; LAYERS];
    Program {
        model: read(&source).expect("a model"),
        mesh: Mesh { tp: 1, cp, dp, pp: 1, order: RankOrder::DpInner },
        sequence_parallel: false,
        cp_style: CpStyle::Zigzag,
        cp_ulysses: 1,
        micro_batch: 2 / dp as usize,
        micro_batches: 1,
        layout: schedule.layout,
        vocab: None,
        zero_stage,
        dp_shard: if zero_stage > 0 { (cp * dp) as usize } else { 1 },
        offload: Offload::None,
        post_validation: false,
        stages: vec![StageProgram { first_layer: 0, recompute }],
        passes: schedule.passes,
        planned_memory_bytes: 0,
    }
}

/// Seconds of computation of a step, and seconds that it waited for the group: of the slowest step
/// of rank 0.
fn measure(program: &Program, slow_link: Option<SlowLink>, reduction: Reduction) -> (f64, f64) {
    let options = Options { slow_link, ..Options::default() };
    let stages = Direct::new(program);
    let run = |world| {
        let device = Host::<f32>::serial();
        let mut rank = Rank::new(&stages, world, device, reduction, 1).expect("ranks meet");
        rank.initialise().expect("weights are drawn");
        let samples = Noise(program.seq_len());
        let (mut computing_s, mut waited_s) = (f64::INFINITY, f64::INFINITY);
        for step in 0..=STEPS {
            let before = rank.time_spent();
            let result = rank.gradients(&samples, step, None).expect("the step runs");
            let after = rank.time_spent();
            let waited = after.cp_s + after.dp_s - before.cp_s - before.dp_s;
            if step > 0 {
                computing_s = computing_s.min(result.outcome.computing_s);
                waited_s = waited_s.min(waited);
            }
        }
        (computing_s, waited_s)
    };
    run_ranks(program.world_size(), options, run).swap_remove(0)
}

fn main() -> ExitCode {
    // Attention of long sequences; and layers of few tokens and many weights.
    let long = "seq_len: 2048\nhidden: 128\nheads: 4\nkv_heads: 4\nffn: 128\n";
    let wide = "seq_len: 256\nhidden: 512\nheads: 8\nkv_heads: 4\nffn: 1408\n";
    // Calls of a layer on the slow link: one hop of keys forward, one backward, two of their
    // gradients; two gathers and a reduction.
    let cases = [
        ("ring attention over 2 ranks", "cp_ring", program(long, 2, 1, 0), 4),
        ("ZeRO stage 3 over 2 replicas", "dp", program(wide, 1, 2, 3), 3),
    ];
    let mut enough = true;
    for (name, group, program, calls) in cases {
        let prefetching = Reduction::default();
        let (computing_s, _) = measure(&program, None, prefetching);
        let transit_s = computing_s / 2.0 / (calls * LAYERS) as f64;
        let link = SlowLink { group, transit: Duration::from_secs_f64(transit_s) };
        let (_, exposed_s) = measure(&program, Some(link), prefetching);
        let hidden = 1.0 - exposed_s / (computing_s / 2.0);
        println!(
            "{name}: {:.0} ms of computation, {:.1} ms on the link a call: {:.0} % hidden",
            1e3 * computing_s,
            1e3 * transit_s,
            100.0 * hidden
        );
        enough &= hidden >= 0.7;
    }
    if enough { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
