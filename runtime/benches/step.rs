//! Tokens a second of the anchor model (hidden 512, ffn 1408, 8 layers, 8 heads, 4 key/value heads,
//! 256 tokens, batch 8, 24.1M parameters, f32) under a few splits of the same threads.
//!
//! `cargo bench -p meshwright-runtime --bench step -- [--json] [threads] [steps] [split..]`;
//! tools/side_by_side.py runs it beside PyTorch.

use direct::Direct;
use models::decisions::{
    AuxScope, CpStyle, DpReduction, MoeOverlap, Offload, RankOrder, USUAL_BUCKET_MIB,
};
use models::input::Source;
use models::mesh::Mesh;
use models::model::{ModelSpec, read};
use models::program::{Program, Recompute, StageProgram};
use models::schedule::one_f_one_b;
use runtime::comm::{Communicator, Options, run_ranks};
use runtime::data::{Sample, Samples};
use runtime::kernels::Cpu;
use runtime::kernels::gemm::{Shape, gemm};
use runtime::{Error, Host, Optimizer, Rank, Reduction};
use std::time::Instant;

const ANCHOR: &str = "name: anchor\nlayers: 8\nhidden: 512\nheads: 8\nkv_heads: 4\nffn: 1408\n\
    vocab: 515\nseq_len: 256\nglobal_batch: 8\n";

/// Arbitrary tokens.
struct Noise {
    seq_len: usize,
}

impl Samples for Noise {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn repeats(&self) -> bool {
        true
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |i: usize| ((index * 7919 + i as u64 * 104_729) % 515) as i64;
        Ok(Sample::of_tokens((0..=self.seq_len).map(token).collect()))
    }
}

fn program(model: &ModelSpec, tp: u64, pp: u64, dp: u64, sequence_parallel: bool) -> Program {
    let micro_batches = if pp > 1 { 4 } else { 1 };
    let schedule = one_f_one_b(pp as usize, micro_batches).unwrap();
    let each = model.layers / pp as usize;
    let stage =
        |stage| StageProgram { first_layer: stage * each, recompute: vec![Recompute::None; each] };
    Program {
        model: model.clone(),
        mesh: Mesh { tp, cp: 1, dp, pp, order: RankOrder::DpInner },
        experts: None,
        aux_scope: AuxScope::MicroBatch,
        moe_overlap: MoeOverlap::None,
        moe_chunks: 1,
        sequence_parallel,
        fused_loss: false,
        cp_style: CpStyle::Zigzag,
        cp_ulysses: 1,
        micro_batch: 8 / dp as usize / micro_batches,
        micro_batches,
        layout: schedule.layout,
        vocab: schedule.vocab,
        zero_stage: 0,
        dp_shard: 1,
        offload: Offload::None,
        dp_reduction: DpReduction::Bucketed,
        dp_bucket_mib: USUAL_BUCKET_MIB,
        post_validation: false,
        recompute_group: 1,
        stages: (0..pp as usize).map(stage).collect(),
        passes: schedule.by_rank(),
        planned_memory_bytes: 0,
    }
}

/// Seconds of a run's steps, without the first, which allocates.
fn measure(program: &Program, threads: usize, steps: u64) -> Vec<f64> {
    let size = program.world_size();
    let run = |world: Box<dyn Communicator>| {
        let device = Host::<f32>::new(Cpu::new((threads / size).max(1)).unwrap());
        let stages = Direct::new(program);
        let mut rank = Rank::new(&stages, world, device, Reduction::default(), 1).unwrap();
        rank.initialise().unwrap();
        let optimizer =
            Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
        let samples = Noise { seq_len: program.seq_len() };
        let mut seconds = Vec::new();
        for step in 0..=steps {
            let begin = Instant::now();
            let result = rank.gradients(&samples, step, None).unwrap();
            rank.update(&optimizer, 1e-3, result.norm).unwrap();
            rank.groups().world.barrier().unwrap();
            seconds.push(begin.elapsed().as_secs_f64());
        }
        seconds.split_off(1)
    };
    run_ranks(size, Options::default(), run).swap_remove(0)
}

/// FLOP/s of a product of 2048 x 2048 matrices, the fastest of a few.
fn gemm_flops_per_s(threads: usize) -> f64 {
    const N: usize = 2048;
    let cpu = Cpu::new(threads).unwrap();
    let (a, b, mut c) = (vec![0.5_f32; N * N], vec![0.25_f32; N * N], vec![0.0_f32; N * N]);
    let mut once = || {
        let begin = Instant::now();
        gemm(&cpu, &Shape::nn(N, N, N), 1.0, &a, &b, 0.0, &mut c);
        begin.elapsed().as_secs_f64()
    };
    let best = (0..8).map(|_| once()).fold(f64::INFINITY, f64::min);
    2.0 * (N * N * N) as f64 / best
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let json = words.iter().any(|word| word == "--json");
    let words: Vec<String> = words.into_iter().filter(|word| word != "--json").collect();
    let number = |n: usize, default| words.get(n).and_then(|w| w.parse().ok()).unwrap_or(default);
    let (threads, steps) = (number(0, 2), number(1, 5));
    let wanted = words.get(2..).unwrap_or_default();
    let source = Source::from_bytes("anchor.yaml", ANCHOR.as_bytes().to_vec()).unwrap();
    let model = read(&source).unwrap();
    let gemm = gemm_flops_per_s(threads);
    let mut measured = serde_json::Map::new();
    for (name, tp, pp, dp, sp) in [
        ("one", 1, 1, 1, false),
        ("tp2", 2, 1, 1, false),
        ("tp2sp", 2, 1, 1, true),
        ("pp2", 1, 2, 1, false),
        ("dp2", 1, 1, 2, false),
    ] {
        if wanted.is_empty() || wanted.iter().any(|word| word == name) {
            let program = program(&model, tp, pp, dp, sp);
            let seconds = measure(&program, threads, steps as u64);
            let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
            let rate = (program.global_batch() * program.seq_len()) as f64 / best;
            let flops = 3.0 * models::layer::forward_flops(&model, rate);
            if !json {
                println!(
                    "{name:6} {threads} threads  {rate:7.0} tokens/s  {:6.1} model GFLOP/s  {:3.0} % of a large product's",
                    flops / 1e9,
                    100.0 * flops / gemm
                );
            }
            measured.insert(name.to_owned(), seconds.into());
        }
    }
    if json {
        println!("{}", serde_json::json!({ "gemm_flops_per_s": gemm, "step_s": measured }));
    }
}
