//! Timings of a GPU, and of ranks that share it.

use super::{Bench, LayerSize, program_of, training};
use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW};
use kernels::attention::{self, Attention};
use kernels::cuda::{Gpu, GpuError, Memory, Stored, bf16};
use kernels::gemm::{self, Shape};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Rope};
use kernels::{Output, elementwise};
use models::cluster::{CollectiveKind, Dtype, Moved};
use runtime::comm::{CommError, Op, Options, Solo, run_ranks};
use runtime::device::{DeviceError, DeviceGroup, Gpu as Device, Space};
use runtime::{CudaGraphs, Error};
use std::time::Instant;

/// Measures a GPU.
pub struct GpuBench {
    /// Opens the GPU anew, which frees the memory of an earlier training.
    open: Box<dyn Fn() -> Result<Gpu, GpuError>>,
    gpu: Gpu,
    /// Shortest time of a round, seconds; work is repeated to reach it.
    round_s: f64,
    /// Number of rounds, of which the fastest counts.
    rounds: usize,
    /// Timed steps of each training, after two warm-up steps.
    steps: usize,
    /// When steps are replayed.
    graphs: CudaGraphs,
    /// Duration of sustained load, seconds.
    load_s: f64,
    bf16: Option<Operands<bf16>>,
    f32: Option<Operands<f32>>,
}

/// Memory shared by all products of a format; separate memory for each size would not fit.
struct Operands<S: Stored> {
    a: Memory<S>,
    b: Memory<S>,
    c: Memory<S>,
}

fn failed(error: GpuError) -> Error {
    CommError::Device(DeviceError::from(error)).into()
}

impl GpuBench {
    /// A bench of the GPU that `open` opens.
    ///
    /// # Errors
    /// The GPU cannot be opened.
    pub fn new(open: impl Fn() -> Result<Gpu, GpuError> + 'static) -> Result<Self, GpuError> {
        let gpu = open()?;
        let (round_s, rounds, steps, load_s) = (2e-3, 5, 10, 2.0);
        Ok(Self {
            open: Box::new(open),
            gpu,
            round_s,
            rounds,
            steps,
            graphs: CudaGraphs::default(),
            load_s,
            bf16: None,
            f32: None,
        })
    }

    /// The same bench with few and short rounds, for a dry run whose figures mean little.
    #[must_use]
    pub fn hasty(self) -> Self {
        Self { round_s: 0.0, rounds: 1, steps: 1, load_s: 0.0, ..self }
    }

    /// The same bench with steps replayed as CUDA graphs when this says so.
    #[must_use]
    pub fn with_graphs(self, graphs: CudaGraphs) -> Self {
        Self { graphs, ..self }
    }

    /// Time of one `work` in the fastest round.
    fn best_s(&self, mut work: impl FnMut(&Gpu) -> Result<(), GpuError>) -> Result<f64, Error> {
        let gpu = &self.gpu;
        let mut timed = |repeats: usize| {
            let start = gpu.record()?;
            for _ in 0..repeats {
                work(gpu)?;
            }
            let end = gpu.record()?;
            end.synchronize()?;
            start.seconds_until(&end).map(|s| (s / repeats as f64).max(1e-9))
        };
        // Once to compile and to choose an algorithm, once to estimate the time.
        timed(1).map_err(failed)?;
        let once = timed(1).map_err(failed)?;
        let repeats = (self.round_s / once).ceil().clamp(1.0, 1e4) as usize;
        let mut best = f64::INFINITY;
        for _ in 0..self.rounds {
            best = best.min(timed(repeats).map_err(failed)?);
        }
        Ok(best)
    }

    /// Varied numbers: products of zeros draw less power and run faster.
    fn numbers<S: Stored>(&self, elements: usize) -> Result<Memory<S>, Error> {
        let number = |i: usize| ((i * 7919) % 2003) as f32 / 1001.5 - 1.0;
        let period: Vec<S> = (0..2003 * 64).map(|i| S::narrowed(number(i))).collect();
        let mut memory = self.gpu.memory::<S>(elements).map_err(failed)?;
        for start in (0..elements).step_by(period.len()) {
            let len = period.len().min(elements - start);
            let to = memory.slice_mut(start..start + len);
            self.gpu.copy_in(&period[..len], to).map_err(failed)?;
        }
        Ok(memory)
    }

    /// Operands of at least these lengths.
    fn operands<S: Stored>(
        &self,
        kept: Option<Operands<S>>,
        [a, b, c]: [usize; 3],
    ) -> Result<Operands<S>, Error> {
        if let Some(kept) = kept
            && kept.a.len() >= a
            && kept.b.len() >= b
            && kept.c.len() >= c
        {
            return Ok(kept);
        }
        // Rounded up, because later sizes are larger.
        let len = a.max(b).max(c).next_power_of_two();
        Ok(Operands { a: self.numbers(len)?, b: self.numbers(len)?, c: self.numbers(len)? })
    }

    fn product<S: Stored>(
        &self,
        operands: &mut Operands<S>,
        [m, n, k]: [usize; 3],
    ) -> Result<f64, Error> {
        let Operands { a, b, c } = operands;
        self.best_s(|gpu| {
            let (a, b, c) = (a.slice(..m * k), b.slice(..k * n), c.slice_mut(..m * n));
            gemm::cuda::gemm(gpu, &Shape::nt(m, n, k), 1.0, a, b, 0.0, c)
        })
    }
}

impl Bench for GpuBench {
    fn launch_s(&mut self) -> Result<f64, Error> {
        let mut x = self.numbers::<f32>(64)?;
        let s = self.best_s(|gpu| {
            (0..64).try_for_each(|_| elementwise::cuda::scale(gpu, 1.0, x.view_mut()))
        })?;
        Ok(s / 64.0)
    }

    fn copy_s(&mut self, bytes: usize) -> Result<f64, Error> {
        let half = bytes / 2;
        let from = self.gpu.zeros::<u8>(half).map_err(failed)?;
        let mut to = self.gpu.memory::<u8>(half).map_err(failed)?;
        self.best_s(|gpu| gpu.copy(from.view(), to.view_mut()))
    }

    fn elementwise(&mut self, layer: LayerSize) -> Result<Vec<Moved>, Error> {
        let LayerSize { tokens, hidden, ffn } = layer;
        let n = tokens * hidden;
        let (x, dy, w) =
            (self.numbers::<bf16>(n)?, self.numbers::<bf16>(n)?, self.numbers::<bf16>(hidden)?);
        let mut y = self.numbers::<bf16>(n)?;
        let (mut r, mut dw) = (self.numbers::<f32>(tokens)?, self.numbers::<f32>(hidden)?);
        let norm = RmsNorm { rows: tokens, columns: hidden, eps: 1e-5, unit_offset: false };
        // Two copies of the residual stream forward and three backward, in bf16, as `models::layer`
        // counts them; also below.
        let moved =
            |streams: f64, elements: usize, s| Moved { bytes: 2.0 * streams * elements as f64, s };
        let norms = self.best_s(|gpu| {
            rms_norm::cuda::forward(gpu, &norm, x.view(), w.view(), y.view_mut(), r.view_mut())?;
            let (x, w, r, dy) = (x.view(), w.view(), r.view(), dy.view());
            let added = Output::Accumulate;
            rms_norm::cuda::backward_input(gpu, &norm, x, w, r, dy, y.view_mut(), added)?;
            rms_norm::cuda::backward_weight(gpu, &norm, x, r, dy, dw.view_mut())
        })?;
        let added =
            self.best_s(|gpu| elementwise::cuda::add(gpu, x.view(), dy.view(), y.view_mut()))?;
        let rope = Rope::half(tokens, hidden / 64, 64);
        let table = self.numbers::<f32>(rope.table_elements())?;
        let rotated =
            self.best_s(|gpu| rope::cuda::forward(gpu, &rope, table.view(), y.view_mut()))?;
        let wide = tokens * ffn;
        let [gate, up, above] =
            [self.numbers::<bf16>(wide)?, self.numbers(wide)?, self.numbers(wide)?];
        let [mut a, mut b] = [self.numbers::<bf16>(wide)?, self.numbers(wide)?];
        let activated = self.best_s(|gpu| {
            let (gate, up) = (gate.view(), up.view());
            activation::cuda::gated_forward(gpu, Activation::Silu, gate, up, a.view_mut())?;
            let (dgate, dup) = (a.view_mut(), b.view_mut());
            activation::cuda::gated_backward(
                gpu,
                Activation::Silu,
                gate,
                up,
                above.view(),
                dgate,
                dup,
            )
        })?;
        Ok(vec![
            moved(5.0, n, norms),
            moved(3.0, n, added),
            moved(2.0, n, rotated),
            moved(8.0, wide, activated),
        ])
    }

    fn adamw_s(&mut self, parameters: usize) -> Result<f64, Error> {
        let (mut w, g) = (self.numbers::<f32>(parameters)?, self.numbers::<f32>(parameters)?);
        let zeros = || self.gpu.zeros::<f32>(parameters).map_err(failed);
        let (mut m, mut v) = (zeros()?, zeros()?);
        let mut copy = self.numbers::<bf16>(parameters)?;
        let mut total = self.gpu.zeros::<f64>(1).map_err(failed)?;
        let adamw =
            AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, step: 10, gradient_scale: 1.0 };
        self.best_s(|gpu| {
            let (total, output) = (total.view_mut(), Output::Overwrite);
            elementwise::cuda::sum_of_squares_into(gpu, g.view(), total, output)?;
            let parameter = adamw::cuda::Parameter {
                w: w.view_mut(),
                g: g.view(),
                m: m.view_mut(),
                v: v.view_mut(),
                copy: Some(copy.view_mut()),
                decay: 0.1,
            };
            adamw::cuda::update(gpu, &adamw, &mut [parameter])
        })
    }

    fn product_s(&mut self, dtype: Dtype, size: [usize; 3]) -> Result<f64, Error> {
        let [m, n, k] = size;
        let lengths = [m * k, k * n, m * n];
        if dtype == Dtype::F32 {
            let kept = self.f32.take();
            let mut operands = self.operands(kept, lengths)?;
            let s = self.product(&mut operands, size)?;
            self.f32 = Some(operands);
            return Ok(s);
        }
        let kept = self.bf16.take();
        let mut operands = self.operands(kept, lengths)?;
        let s = self.product(&mut operands, size)?;
        self.bf16 = Some(operands);
        Ok(s)
    }

    fn sustained_s(&mut self, size: [usize; 3]) -> Result<f64, Error> {
        let start = Instant::now();
        let mut warm = self.product_s(Dtype::Bf16, size)?;
        while start.elapsed().as_secs_f64() < self.load_s {
            warm = self.product_s(Dtype::Bf16, size)?;
        }
        Ok(warm)
    }

    fn attention_s(&mut self, shape: &Attention) -> Result<[f64; 2], Error> {
        let (q, k, v) = (
            self.numbers::<bf16>(shape.q_elements())?,
            self.numbers::<bf16>(shape.k_elements())?,
            self.numbers::<bf16>(shape.v_elements())?,
        );
        let dout = self.numbers::<bf16>(shape.out_elements())?;
        let mut out = self.numbers::<bf16>(shape.out_elements())?;
        let mut lse = self.numbers::<f32>(shape.lse_elements())?;
        let (mut dq, mut dk, mut dv) = (
            self.numbers::<bf16>(shape.q_elements())?,
            self.numbers::<bf16>(shape.k_elements())?,
            self.numbers::<bf16>(shape.v_elements())?,
        );
        let forward = self.best_s(|gpu| {
            let (out, lse) = (out.view_mut(), lse.view_mut());
            attention::cuda::forward(gpu, shape, q.view(), k.view(), v.view(), out, lse)
        })?;
        let (out, lse) = (out.view(), lse.view());
        let saved = attention::cuda::Saved { q: q.view(), k: k.view(), v: v.view(), out, lse };
        let backward = self.best_s(|gpu| {
            let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
            let mut gradients = attention::cuda::Gradients { dq, dk, dv };
            let output = Output::Overwrite;
            attention::cuda::backward(gpu, shape, &saved, dout.view(), &mut gradients, output)
        })?;
        Ok([forward, backward])
    }

    fn collective_s(
        &mut self,
        kind: CollectiveKind,
        ranks: usize,
        bytes: usize,
    ) -> Result<Option<f64>, Error> {
        if kind == CollectiveKind::AllToAll {
            return Ok(None);
        }
        let (gpu, rounds) = (&self.gpu, self.rounds);
        let run = |world: Box<dyn runtime::comm::Communicator>| -> Result<f64, Error> {
            let queue = gpu.fork().map_err(failed)?;
            let device = Device::<f32>::new(queue.clone());
            let group = DeviceGroup::new(&device, world.as_ref());
            let len = bytes / 4;
            let one = || -> Result<(), Error> {
                let memory = device.zeros::<f32>(match kind {
                    CollectiveKind::AllGather => len / ranks,
                    _ => len,
                });
                match kind {
                    CollectiveKind::AllReduce => drop(group.all_reduce(memory, Op::Sum)?),
                    CollectiveKind::AllGather => drop(group.all_gather(memory)?),
                    CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => {
                        drop(group.start_reduce_scatter(memory, Op::Sum)?.wait(&device)?);
                    }
                }
                Ok(())
            };
            let timed = |repeats: usize| -> Result<f64, Error> {
                queue.synchronize().map_err(failed)?;
                world.barrier()?;
                let begin = Instant::now();
                (0..repeats).try_for_each(|_| one())?;
                queue.synchronize().map_err(failed)?;
                Ok(begin.elapsed().as_secs_f64() / repeats as f64)
            };
            timed(1)?;
            let mut best = f64::INFINITY;
            for _ in 0..rounds {
                let mut slowest = [timed(10)?];
                world.all_reduce(&mut slowest, Op::Max)?;
                best = best.min(slowest[0]);
            }
            Ok(best)
        };
        run_ranks(ranks, Options::default(), run).into_iter().next().transpose()
    }

    fn step_s(&mut self, model: &str, global_batch: u64) -> Result<f64, Error> {
        let program = program_of(model, global_batch, 1, 1)?;
        let queue = (self.open)().map_err(failed)?;
        let device = Device::<bf16>::new(queue.clone());
        let mut step = training(&program, Box::new(Solo::new()), device, self.graphs)?;
        let mut timed = || -> Result<f64, Error> {
            queue.synchronize().map_err(failed)?;
            let begin = Instant::now();
            step()?;
            queue.synchronize().map_err(failed)?;
            Ok(begin.elapsed().as_secs_f64())
        };
        // Two steps are launched, and the third is recorded.
        for _ in 0..3 {
            timed()?;
        }
        let mut found = (0..self.steps).map(|_| timed()).collect::<Result<Vec<f64>, Error>>()?;
        found.sort_by(f64::total_cmp);
        Ok(found[found.len() / 2])
    }
}
