//! Measures this machine for `plan calibrate`: products, copies, elementwise kernels, attention,
//! AdamW, collectives, messages, and whole training steps. Prints [`Measured`] as JSON.
//!
//! All ranks do the same at the same time, as in training. A kernel's time is the minimum of many,
//! because other programs disturb the mean. A training step's time is the median, which does not
//! fall with the number of steps: other load on the machine is part of what a run will see.

use clap::Parser;
use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW, Parameter};
use kernels::attention::{self, Attention, Gradients, Saved};
use kernels::gemm::{Shape, gemm};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Rope};
use kernels::{Cpu, Output, Real, elementwise};
use measure::{program_of, training};
use models::cluster::{Core, Dtype, Exchange, Measured, Moved, Product, Step, Updated};
use runtime::comm::{CommError, Communicator, Op, Options, run_ranks};
use runtime::{CudaGraphs, Error, Host, kernels, models};
use std::process::ExitCode;
use std::time::Instant;

/// Measures this machine, with as many ranks at a time as are said.
#[derive(Parser)]
struct Flags {
    /// Ranks at a time
    #[arg(long)]
    ranks: usize,
}

/// A layer of a small model: tokens, widths, heads.
const SEQUENCES: usize = 4;
const SEQUENCE: usize = 256;
const TOKENS: usize = SEQUENCES * SEQUENCE;
const HIDDEN: usize = 512;
const FFN: usize = 1408;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 64;

/// Models whose steps are timed: one dominated by products, one by fixed overhead.
const MODEL: &str = "name: probe\nlayers: 2\nhidden: 384\nheads: 6\nkv_heads: 2\nffn: 1024\n\
    vocab: 1000\nseq_len: 128\nglobal_batch: 4\n";
/// Sequences of a replica: few, so that gradient reduction dominates, and many, so that computation
/// does.
const REPLICA: [u64; 2] = [2, 8];
const TINY: &str = "name: tiny\nlayers: 1\nhidden: 32\nheads: 2\nffn: 64\nvocab: 64\nseq_len: 16\nglobal_batch: 4\n";

/// Shortest time of one round, seconds; work is repeated to reach it.
const ROUND_S: f64 = 0.004;
/// Time of all rounds of a kernel and of a training step, seconds, and their least number.
const ALL_S: f64 = 1.0;
const STEPS_S: f64 = 1.5;
const ROUNDS: usize = 8;
/// How often all steps are timed in turn, so that a slow period of the machine does not hit one of
/// them alone.
const SWEEPS: usize = 3;
/// Bytes of exchanged tensors: one dominated by latency, two by bandwidth.
const EXCHANGED: [usize; 3] = [1 << 12, 1 << 20, 1 << 22];

fn main() -> ExitCode {
    let ranks = Flags::parse().ranks.max(1);
    let results = run_ranks(ranks, Options::default(), |world| measure(world.as_ref()));
    match results.into_iter().next() {
        Some(Ok(measured)) => {
            println!("{}", serde_json::to_string(&measured).unwrap_or_default());
            ExitCode::SUCCESS
        }
        Some(Err(error)) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
        None => ExitCode::FAILURE,
    }
}

/// One rank's measurements, in step with the other ranks.
fn measure(world: &dyn Communicator) -> Result<Measured, Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let clock = Clock { world, cpu: Cpu::new((cores / world.size()).max(1))?, all_s: ALL_S };
    Ok(Measured {
        ranks: world.size() as u64,
        cores: cores as u64,
        memory_bytes: memory_bytes(),
        products: products(&clock)?,
        copy: copy(&clock)?,
        elementwise: elementwise_of_a_layer(&clock)?,
        attention: attention_core(&clock)?,
        adamw: update(&clock)?,
        collectives: exchanges(&clock, &|data| world.all_reduce(data, Op::Sum))?,
        messages: exchanges(&clock, &|data| pass_on(world, data))?,
        steps: steps(&Clock { all_s: STEPS_S, ..clock })?,
    })
}

/// Times work that all ranks do.
struct Clock<'a> {
    world: &'a dyn Communicator,
    cpu: Cpu,
    /// Time of all rounds, seconds.
    all_s: f64,
}

impl Clock<'_> {
    /// Time of one `work` in the fastest round, on the slowest rank.
    fn best_s<E: Into<Error>>(&self, work: impl FnMut() -> Result<(), E>) -> Result<f64, Error> {
        Ok(self.rounds_s(work)?.first().copied().unwrap_or(f64::INFINITY))
    }

    /// Time of one `work` in the median round, on the slowest rank.
    fn middle_s<E: Into<Error>>(&self, work: impl FnMut() -> Result<(), E>) -> Result<f64, Error> {
        let rounds_s = self.rounds_s(work)?;
        Ok(rounds_s[rounds_s.len() / 2])
    }

    /// Time of one `work` in every round, on the slowest rank, fastest first.
    fn rounds_s<E: Into<Error>>(
        &self,
        mut work: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<f64>, Error> {
        let mut timed = |repeats: usize| -> Result<f64, Error> {
            self.world.barrier()?;
            let begin = Instant::now();
            for _ in 0..repeats {
                work().map_err(Into::into)?;
            }
            Ok(self.slowest(begin.elapsed().as_secs_f64() / repeats as f64)?)
        };
        timed(1)?;
        // All ranks use the slowest rank's time, and so repeat the work equally often; otherwise
        // collectives would not match.
        let best = timed(1)?;
        let repeats = (ROUND_S / best).ceil().clamp(1.0, 1e4) as usize;
        let rounds =
            (self.all_s / (best * repeats as f64)).ceil().clamp(ROUNDS as f64, 1e3) as usize;
        let mut found = (0..rounds).map(|_| timed(repeats)).collect::<Result<Vec<f64>, Error>>()?;
        found.sort_by(f64::total_cmp);
        Ok(found)
    }

    fn slowest(&self, s: f64) -> Result<f64, CommError> {
        let mut s = [s];
        self.world.all_reduce(&mut s, Op::Max)?;
        Ok(s[0].max(1e-9))
    }

    /// Time of work that cannot fail.
    fn time_s(&self, mut work: impl FnMut(&Cpu)) -> Result<f64, Error> {
        self.best_s(|| -> Result<(), Error> {
            work(&self.cpu);
            Ok(())
        })
    }
}

fn numbers<T: Real>(len: usize) -> Vec<T> {
    (0..len).map(|i| T::from_f64((i * 7919 % 1000) as f64 / 1000.0 - 0.5)).collect()
}

fn products(clock: &Clock<'_>) -> Result<Vec<Product>, Error> {
    let shapes = [
        [TOKENS, 1024, HIDDEN],
        [TOKENS, 2 * FFN, HIDDEN],
        [TOKENS, HIDDEN, FFN],
        [HIDDEN, FFN, TOKENS],
        [256, 384, 384],
    ];
    let mut found = Vec::new();
    for shape in shapes {
        found.push(product::<f32>(clock, Dtype::F32, shape)?);
    }
    found.push(product::<f64>(clock, Dtype::F64, shapes[0])?);
    Ok(found)
}

fn product<T: Real>(
    clock: &Clock<'_>,
    dtype: Dtype,
    [m, n, k]: [usize; 3],
) -> Result<Product, Error> {
    let (a, b, mut c) = (numbers::<T>(m * k), numbers::<T>(k * n), numbers::<T>(m * n));
    let (one, zero) = (T::from_f64(1.0), T::from_f64(0.0));
    let s = clock.time_s(|cpu| gemm(cpu, &Shape::nt(m, n, k), one, &a, &b, zero, &mut c))?;
    Ok(Product { dtype, m: m as u64, n: n as u64, k: k as u64, s })
}

/// Copies of memory far larger than the caches.
fn copy(clock: &Clock<'_>) -> Result<Moved, Error> {
    let from = numbers::<f32>(8 << 20);
    let mut to = from.clone();
    let s = clock.time_s(|_| {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
    })?;
    Ok(Moved { bytes: (8 * from.len()) as f64, s })
}

/// Elementwise kernels of a layer, forward and backward, with the bytes that
/// `models::layer::streams` counts.
fn elementwise_of_a_layer(clock: &Clock<'_>) -> Result<Moved, Error> {
    let n = TOKENS * HIDDEN;
    let (x, w) = (numbers::<f32>(n), numbers::<f32>(HIDDEN));
    let (mut y, mut r, mut dw) = (x.clone(), vec![0.0; TOKENS], w.clone());
    let norm = RmsNorm { rows: TOKENS, columns: HIDDEN, eps: 1e-5, unit_offset: false };
    let (q, k) = (Rope::half(TOKENS, HEADS, HEAD_DIM), Rope::half(TOKENS, KV_HEADS, HEAD_DIM));
    let mut table = vec![0.0; q.table_elements()];
    let positions: Vec<u32> = (0..TOKENS).map(|t| (t % SEQUENCE) as u32).collect();
    rope::fill_table(&clock.cpu, &rope::inverse_frequencies(1e4, HEAD_DIM), &positions, &mut table);
    let wide = TOKENS * FFN;
    let (gate, up, dy) = (numbers::<f32>(wide), numbers::<f32>(wide), numbers::<f32>(wide));
    let (mut a, mut b, mut keys) = (gate.clone(), up.clone(), numbers::<f32>(n / 2));
    let s = clock.time_s(|cpu| {
        for _ in 0..2 {
            rms_norm::forward(cpu, &norm, &x, &w, &mut y, &mut r);
            rms_norm::backward_input(cpu, &norm, &x, &w, &r, &x, &mut y, Output::Accumulate);
            rms_norm::backward_weight(cpu, &norm, &x, &r, &x, &mut dw);
            elementwise::add(cpu, &x, &x, &mut y);
            elementwise::add(cpu, &x, &x, &mut y);
            rope::forward(cpu, &q, &table, &mut y);
            rope::forward(cpu, &k, &table, &mut keys);
        }
        activation::gated_forward(cpu, Activation::Silu, &gate, &up, &mut a);
        activation::gated_backward(cpu, Activation::Silu, &gate, &up, &dy, &mut a, &mut b);
    })?;
    // Two norms (2 and 3 streams), two residuals (3 and 3), rotations of queries and keys, the
    // activation.
    let elements = n as f64 * (2.0 * 5.0 + 2.0 * 6.0 + 2.0 * 1.5 * 2.0) + wide as f64 * 8.0;
    Ok(Moved { bytes: 4.0 * elements, s })
}

fn attention_core(clock: &Clock<'_>) -> Result<Core, Error> {
    let shape = Attention::causal(SEQUENCES, SEQUENCE, HEADS, KV_HEADS, HEAD_DIM);
    let (queries, keys) = (TOKENS * HEADS * HEAD_DIM, TOKENS * KV_HEADS * HEAD_DIM);
    let (q, k, v) = (numbers::<f32>(queries), numbers::<f32>(keys), numbers::<f32>(keys));
    let (mut out, mut lse) = (q.clone(), vec![0.0; TOKENS * HEADS]);
    let forward_s =
        clock.time_s(|cpu| attention::forward(cpu, &shape, &q, &k, &v, &mut out, &mut lse))?;
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let backward_s = clock.time_s(|cpu| {
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        attention::backward(cpu, &shape, &saved, &q, &mut gradients, Output::Overwrite);
    })?;
    Ok(Core {
        batch: SEQUENCES as u64,
        seq_len: SEQUENCE as u64,
        heads: HEADS as u64,
        kv_heads: KV_HEADS as u64,
        head_dim: HEAD_DIM as u64,
        forward_s,
        backward_s,
    })
}

fn update(clock: &Clock<'_>) -> Result<Updated, Error> {
    let n = 4 << 20;
    let (mut w, g, mut m, mut v) =
        (numbers::<f32>(n), numbers::<f32>(n), vec![0.0; n], vec![0.0; n]);
    let adamw =
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, step: 10, gradient_scale: 1.0 };
    let s = clock.time_s(|cpu| {
        // Every update also clears the gradients and takes their norm.
        std::hint::black_box(elementwise::sum_of_squares(cpu, &g));
        let parameter = Parameter { w: &mut w, g: &g, m: &mut m, v: &mut v, decay: 0.1 };
        adamw::update(cpu, &adamw, &mut [parameter]);
    })?;
    Ok(Updated { parameters: n as f64, s })
}

fn exchanges(
    clock: &Clock<'_>,
    exchange: &dyn Fn(&mut [f32]) -> Result<(), CommError>,
) -> Result<Vec<Exchange>, Error> {
    if clock.world.size() == 1 {
        return Ok(vec![]);
    }
    let mut found = Vec::new();
    for bytes in EXCHANGED {
        let mut data = vec![0.0_f32; bytes / 4];
        let s = clock.best_s(|| exchange(&mut data))?;
        found.push(Exchange { bytes: bytes as f64, s });
    }
    Ok(found)
}

/// Sends to the next rank, and receives from the previous one.
fn pass_on(world: &dyn Communicator, data: &mut [f32]) -> Result<(), CommError> {
    const TAG: u64 = 7;
    let (rank, size) = (world.rank(), world.size());
    world.send(data, (rank + 1) % size, TAG)?;
    let got: Vec<f32> = world.recv(data.len(), (rank + size - 1) % size, TAG)?;
    data.copy_from_slice(&got);
    Ok(())
}

fn steps(clock: &Clock<'_>) -> Result<Vec<Step>, Error> {
    let ranks = clock.world.size() as u64;
    let step = |model: &str, global_batch, ranks, tp, dp| {
        let model = model.to_owned();
        Step { model, global_batch, ranks, tp, dp, s: 0.0 }
    };
    let mut steps = vec![step(TINY, 4, ranks, 1, 1), step(MODEL, 4, ranks, 1, 1)];
    if ranks > 1 {
        steps.push(step(MODEL, 8, 1, 1, 1));
        steps.extend(REPLICA.map(|each| step(MODEL, each * ranks, ranks, 1, ranks)));
    }
    if ranks.is_multiple_of(2) {
        steps.push(step(MODEL, 8, ranks, 2, 1));
    }
    let mut sweeps = Vec::new();
    for _ in 0..SWEEPS {
        sweeps.push(steps.iter().map(|step| step_s(clock, step)).collect::<Result<Vec<_>, _>>()?);
    }
    for (n, step) in steps.iter_mut().enumerate() {
        let mut found: Vec<f64> = sweeps.iter().map(|sweep| sweep[n]).collect();
        found.sort_by(f64::total_cmp);
        step.s = found[SWEEPS / 2];
    }
    Ok(steps)
}

/// Seconds of a step. Each group of `tp * dp` ranks trains its own copy. If the step uses one rank,
/// the others wait for it.
fn step_s(clock: &Clock<'_>, step: &Step) -> Result<f64, Error> {
    let (tp, dp) = (step.tp as usize, step.dp as usize);
    let program = program_of(&step.model, step.global_batch, tp, dp)?;
    let group = clock.world.split("copy", clock.world.rank() / (tp * dp), clock.world.rank())?;
    if clock.world.rank() as u64 >= step.ranks {
        return clock.middle_s(|| Ok::<(), Error>(()));
    }
    let cpu = Cpu::new(clock.cpu.threads() * clock.world.size() / step.ranks as usize)?;
    clock.middle_s(training(&program, group, Host::<f32>::new(cpu), CudaGraphs::Never)?)
}

/// Total memory, from Linux's /proc/meminfo.
fn memory_bytes() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024.0)
}
