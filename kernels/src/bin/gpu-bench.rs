//! `gpu-bench [--gpu N] [--json FILE] [--only GROUP,GROUP]`: speed of the kernels on a GPU, each
//! compared with the lower bound on its work. Needs only the GPU's driver and CUDA's libraries.
//! Writes JSON after each group, then prints a table; exits with 2 if there is no GPU.
//!
//! Bytes and operations are the floors of `<operation>::cuda`. A share is relative to the bytes
//! that a copy of 1 GiB moves (read plus written), to the fastest of cuBLASLt's algorithms, or to
//! the fastest of cuDNN's attention kernels, repeatable or not. The operations of a causal
//! attention are those of the visible pairs.

#[path = "gpu/report.rs"]
mod report;

use kernels::Output;
use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW};
use kernels::attention::fused::Kernel;
use kernels::attention::{self, Attention};
use kernels::cross_entropy::{self, Logits};
use kernels::cuda::{Floor, Gpu, GpuError, Memory, Storage, Stored, bf16};
use kernels::elementwise;
use kernels::embedding::{self, Embedding};
use kernels::gemm::{self, Shape};
use kernels::layer_norm::{self, LayerNorm};
use kernels::random::{self, GlobalIndices, Stream};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Rope};
use report::{Options, Value};
use std::process::ExitCode;

/// Launches of one measurement, after a warm-up; the minimum counts.
const LAUNCHES: u32 = 10;
const WARM: u32 = 3;
const TIMES: usize = 5;

type Row = [(&'static str, Value); 7];

fn main() -> ExitCode {
    let done = Options::read("gpu-bench.json").and_then(|options| {
        options.check(&GROUPS.map(|(name, _)| name))?;
        let gpu = options.open()?;
        let rows = measure(&gpu, &options)?;
        report::write(&options, gpu.properties(), "kernels", &rows)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

/// Rows of the table, and the time of the copy that they are compared with.
struct Bench<'a> {
    gpu: &'a Gpu,
    copy_bytes_per_s: f64,
    rows: Vec<Row>,
}

type Group = fn(&mut Bench<'_>) -> Result<(), GpuError>;

/// Groups of rows, by the names that `--only` takes. The copy is always measured.
const GROUPS: [(&str, Group); 8] = [
    ("norms", |bench| bench.norms()),
    ("activations", |bench| bench.activations()),
    ("rotations", |bench| bench.rotations()),
    ("embeddings", |bench| bench.embeddings()),
    ("losses", |bench| bench.losses()),
    ("optimizer", |bench| bench.optimizer()),
    ("products", |bench| bench.products()),
    ("attention", |bench| bench.attentions()),
];

/// All rows, kept in the file after each group. A group that fails is reported, and the next runs.
fn measure(gpu: &Gpu, options: &Options) -> Result<Vec<Row>, String> {
    let mut bench = Bench { gpu, copy_bytes_per_s: 0.0, rows: Vec::new() };
    bench.copy().map_err(|error| error.to_string())?;
    for (name, group) in GROUPS.iter().filter(|(name, _)| options.runs(name)) {
        if let Err(error) = group(&mut bench) {
            eprintln!("{name}: {error}");
        }
        report::keep(options, gpu.properties(), "kernels", &bench.rows)?;
    }
    Ok(bench.rows)
}

impl Bench<'_> {
    /// Seconds of one launch.
    fn seconds(&self, mut run: impl FnMut() -> Result<(), GpuError>) -> Result<f64, GpuError> {
        for _ in 0..WARM {
            run()?;
        }
        let mut least = f64::INFINITY;
        for _ in 0..TIMES {
            let start = self.gpu.record()?;
            for _ in 0..LAUNCHES {
                run()?;
            }
            let end = self.gpu.record()?;
            least = least.min(start.seconds_until(&end)?);
        }
        Ok(least / f64::from(LAUNCHES))
    }

    fn row(&mut self, kernel: &str, shape: String, seconds: f64, floor: Floor, share: Value) {
        eprintln!("{kernel} {shape}: {:.1} us", seconds * 1e6);
        let rate = |count: usize, unit: f64| match count {
            0 => Value::None,
            count => Value::Number(count as f64 / seconds / unit),
        };
        self.rows.push([
            ("kernel", Value::Text(kernel.to_owned())),
            ("shape", Value::Text(shape)),
            ("us", Value::Number(seconds * 1e6)),
            ("floor MB", Value::Number(floor.bytes as f64 / 1e6)),
            ("GB/s", rate(floor.bytes, 1e9)),
            ("TFLOP/s", rate(floor.flops, 1e12)),
            ("share", share),
        ]);
    }

    /// Measures a memory-bound kernel: its share is of a copy's rate.
    fn moves(
        &mut self,
        kernel: &str,
        shape: &str,
        floor: Floor,
        run: impl FnMut() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let seconds = self.seconds(run)?;
        let share = floor.bytes as f64 / seconds / self.copy_bytes_per_s;
        self.row(kernel, shape.to_owned(), seconds, floor, Value::Number(share));
        Ok(())
    }

    fn zeros<S: Stored>(&self, elements: usize) -> Result<Memory<S>, GpuError> {
        self.gpu.zeros(elements)
    }

    /// Varied numbers: products of zeros draw less power and run faster.
    fn numbers<S: Stored>(&self, elements: usize) -> Result<Memory<S>, GpuError> {
        let number = |i: usize| ((i * 7919) % 2003) as f32 / 1001.5 - 1.0;
        let period: Vec<S> = (0..2003 * 64).map(|i| S::narrowed(number(i))).collect();
        let mut memory = self.gpu.memory::<S>(elements)?;
        for start in (0..elements).step_by(period.len()) {
            let len = period.len().min(elements - start);
            self.gpu.copy_in(&period[..len], memory.slice_mut(start..start + len))?;
        }
        Ok(memory)
    }

    fn copy(&mut self) -> Result<(), GpuError> {
        let gpu = self.gpu;
        let bytes = 1 << 30;
        let (from, mut to) = (gpu.zeros::<u8>(bytes)?, gpu.memory::<u8>(bytes)?);
        let seconds = self.seconds(|| gpu.copy(from.view(), to.view_mut()))?;
        let floor = Floor::bytes(2 * bytes);
        self.copy_bytes_per_s = floor.bytes as f64 / seconds;
        self.row("copy", "1 GiB".to_owned(), seconds, floor, Value::Number(1.0));
        Ok(())
    }

    fn norms(&mut self) -> Result<(), GpuError> {
        let gpu = self.gpu;
        let (rows, columns, stored) = (16_384, 4096, Storage::Bf16);
        let shape = "16384 x 4096 bf16";
        let elements = rows * columns;
        let [x, more, dy] =
            [self.numbers::<bf16>(elements)?, self.numbers(elements)?, self.numbers(elements)?];
        let (w, bias) = (self.numbers::<bf16>(columns)?, self.numbers::<bf16>(columns)?);
        let (mut y, mut sum) = (self.zeros::<bf16>(elements)?, self.zeros::<bf16>(elements)?);
        let [mut r, mut m] = [self.zeros::<f32>(rows)?, self.zeros(rows)?];
        let [mut dw, mut dbias] = [self.zeros::<f32>(columns)?, self.zeros(columns)?];
        let norm = RmsNorm { rows, columns, eps: 1e-5, unit_offset: false };
        self.moves(
            "rms_norm forward",
            shape,
            rms_norm::cuda::forward_floor(&norm, stored),
            || rms_norm::cuda::forward(gpu, &norm, x.view(), w.view(), y.view_mut(), r.view_mut()),
        )?;
        let floor = rms_norm::cuda::forward_residual_floor(&norm, stored);
        self.moves("rms_norm forward with residual", shape, floor, || {
            let (sum, y) = (sum.view_mut(), y.view_mut());
            rms_norm::cuda::forward_residual(
                gpu,
                &norm,
                x.view(),
                more.view(),
                w.view(),
                sum,
                y,
                r.view_mut(),
            )
        })?;
        let floor = rms_norm::cuda::backward_input_floor(&norm, stored, Output::Accumulate);
        self.moves("rms_norm backward to input, added", shape, floor, || {
            let (dx, output) = (y.view_mut(), Output::Accumulate);
            rms_norm::cuda::backward_input(
                gpu,
                &norm,
                x.view(),
                w.view(),
                r.view(),
                dy.view(),
                dx,
                output,
            )
        })?;
        let floor = rms_norm::cuda::backward_weight_floor(&norm, stored);
        self.moves("rms_norm backward to weight", shape, floor, || {
            rms_norm::cuda::backward_weight(
                gpu,
                &norm,
                x.view(),
                r.view(),
                dy.view(),
                dw.view_mut(),
            )
        })?;
        let norm = LayerNorm { rows, columns, eps: 1e-5 };
        let floor = layer_norm::cuda::forward_residual_floor(&norm, stored);
        self.moves("layer_norm forward with residual", shape, floor, || {
            let (sum, y) = (sum.view_mut(), y.view_mut());
            let (m, r) = (m.view_mut(), r.view_mut());
            let (w, bias) = (w.view(), bias.view());
            layer_norm::cuda::forward_residual(
                gpu,
                &norm,
                x.view(),
                more.view(),
                w,
                bias,
                sum,
                y,
                m,
                r,
            )
        })?;
        let floor = layer_norm::cuda::backward_input_floor(&norm, stored, Output::Accumulate);
        self.moves("layer_norm backward to input, added", shape, floor, || {
            let (dx, output) = (y.view_mut(), Output::Accumulate);
            let (m, r) = (m.view(), r.view());
            layer_norm::cuda::backward_input(
                gpu,
                &norm,
                x.view(),
                w.view(),
                m,
                r,
                dy.view(),
                dx,
                output,
            )
        })?;
        let floor = layer_norm::cuda::backward_weight_floor(&norm, stored);
        self.moves("layer_norm backward to weights", shape, floor, || {
            let (dw, dbias) = (dw.view_mut(), dbias.view_mut());
            let (m, r) = (m.view(), r.view());
            layer_norm::cuda::backward_weight(gpu, &norm, x.view(), m, r, dy.view(), dw, dbias)
        })
    }

    fn activations(&mut self) -> Result<(), GpuError> {
        let gpu = self.gpu;
        let (elements, stored, shape) = (8192 * 14_336, Storage::Bf16, "8192 x 14336 bf16");
        let [gate, up, dy] =
            [self.numbers::<bf16>(elements)?, self.numbers(elements)?, self.numbers(elements)?];
        let [mut y, mut z] = [self.zeros::<bf16>(elements)?, self.zeros(elements)?];
        let kind = Activation::Silu;
        let floor = activation::cuda::backward_floor(elements, stored);
        self.moves("SwiGLU forward", shape, floor, || {
            activation::cuda::gated_forward(gpu, kind, gate.view(), up.view(), y.view_mut())
        })?;
        let floor = activation::cuda::gated_backward_floor(elements, stored);
        self.moves("SwiGLU backward", shape, floor, || {
            let (dgate, dup) = (y.view_mut(), z.view_mut());
            activation::cuda::gated_backward(
                gpu,
                kind,
                gate.view(),
                up.view(),
                dy.view(),
                dgate,
                dup,
            )
        })?;
        let floor = activation::cuda::forward_floor(elements, stored);
        self.moves("GELU forward", shape, floor, || {
            activation::cuda::forward(gpu, Activation::GeluTanh, gate.view(), y.view_mut())
        })?;
        let floor = activation::cuda::backward_floor(elements, stored);
        self.moves("GELU backward", shape, floor, || {
            activation::cuda::backward(
                gpu,
                Activation::GeluTanh,
                gate.view(),
                dy.view(),
                y.view_mut(),
            )
        })?;
        for (rows, columns) in [(8192, 14_336), (65_536, 768)] {
            let mut dbias = self.zeros::<f32>(columns)?;
            let floor = elementwise::cuda::floor(rows * columns, &[stored]);
            self.moves("bias gradient", &format!("{rows} x {columns} bf16"), floor, || {
                let dy = gate.slice(..rows * columns);
                elementwise::cuda::bias_gradient(gpu, dy, dbias.view_mut())
            })?;
        }
        let floor = elementwise::cuda::floor(elements, &[stored; 3]);
        self.moves("residual added", shape, floor, || {
            elementwise::cuda::add(gpu, gate.view(), up.view(), y.view_mut())
        })
    }

    fn rotations(&mut self) -> Result<(), GpuError> {
        let gpu = self.gpu;
        // Queries and keys of a packed projection.
        let rotated = Rope::half(16_384, 40, 128);
        let stride = 48 * 128;
        let mut x = self.numbers::<bf16>(rotated.tokens * stride)?;
        let table = self.numbers::<f32>(rotated.table_elements())?;
        let floor = rope::cuda::floor(&rotated, Storage::Bf16);
        self.moves("RoPE on packed q and k", "16384 x (32 + 8) x 128 bf16", floor, || {
            rope::cuda::forward_packed(gpu, &rotated, stride, table.view(), x.view_mut())
        })
    }

    /// Embedding. In the last case every tenth token is the same, as in text.
    fn embeddings(&mut self) -> Result<(), GpuError> {
        let (gpu, stored) = (self.gpu, Storage::Bf16);
        for (tokens, vocabulary, columns, often) in [
            (8192, 128_256, 4096, usize::MAX),
            (65_536, 50_304, 768, usize::MAX),
            (65_536, 50_304, 768, 10),
        ] {
            let id = |i: usize| if i % often == 1 { 11 } else { i * 7919 % vocabulary };
            let mut ids: Vec<i64> = (0..tokens).map(|i| id(i) as i64).collect();
            let (on_gpu, order) = (gpu.upload(&ids)?, gpu.upload(&embedding::by_row(&ids))?);
            ids.sort_unstable();
            ids.dedup();
            let embedding =
                Embedding { tokens, columns, rows: vocabulary, first_row: 0, scale: 1.0 };
            let table = self.numbers::<bf16>(vocabulary * columns)?;
            let mut out = self.zeros::<bf16>(tokens * columns)?;
            let mut dtable = self.zeros::<f32>(vocabulary * columns)?;
            let same = if often < tokens { ", a tenth of one id" } else { "" };
            let shape = format!("{tokens} of {vocabulary} x {columns} bf16{same}");
            let floor = embedding::cuda::forward_floor(&embedding, stored);
            self.moves("embedding forward", &shape, floor, || {
                let (table, out) = (table.view(), out.view_mut());
                embedding::cuda::forward(gpu, &embedding, on_gpu.view(), table, out)
            })?;
            let floor = embedding::cuda::backward_floor(&embedding, stored, ids.len());
            self.moves("embedding backward", &shape, floor, || {
                let (dout, dtable) = (out.view(), dtable.view_mut());
                embedding::cuda::backward(gpu, &embedding, order.view(), dout, dtable)
            })?;
        }
        Ok(())
    }

    /// Cross-entropy.
    fn losses(&mut self) -> Result<(), GpuError> {
        let gpu = self.gpu;
        let (tokens, vocabulary, columns, stored) = (8192, 128_256, 4096, Storage::Bf16);
        let ids: Vec<i64> = (0..tokens as i64).map(|i| i * 7919 % vocabulary as i64).collect();
        let ids = gpu.upload(&ids)?;
        let mut out = self.zeros::<bf16>(tokens * columns)?;
        let logits = Logits::whole(tokens, vocabulary);
        let mut z = self.numbers::<bf16>(tokens * vocabulary)?;
        let [mut max, mut sum, mut target] =
            [self.zeros::<f32>(tokens)?, self.zeros(tokens)?, self.zeros(tokens)?];
        let shape = "8192 x 128256 bf16";
        let floor = cross_entropy::cuda::read_floor(&logits, stored);
        self.moves("cross-entropy statistics", shape, floor, || {
            let (max, sum, target) = (max.view_mut(), sum.view_mut(), target.view_mut());
            cross_entropy::cuda::statistics(gpu, &logits, z.view(), ids.view(), max, sum, target)
        })?;
        let floor = cross_entropy::cuda::gradient_floor(&logits, stored);
        self.moves("cross-entropy gradient in place", shape, floor, || {
            let (max, sum) = (max.view(), sum.view());
            cross_entropy::cuda::gradient_in_place(
                gpu,
                &logits,
                z.view_mut(),
                ids.view(),
                max,
                sum,
                1e-4,
            )
        })?;
        let floor = cross_entropy::cuda::softmax_to_gradient_floor(&logits, stored);
        self.moves("softmax to gradient, of a split vocabulary", shape, floor, || {
            let (z, factor, target) = (z.view_mut(), sum.view(), target.view());
            cross_entropy::cuda::softmax_to_gradient(
                gpu,
                &logits,
                z,
                ids.view(),
                factor,
                target,
                1e-4,
            )
        })?;
        let hits = self.numbers::<bf16>(tokens * columns)?;
        let floor = cross_entropy::cuda::join_gradient_floor(tokens, columns, stored);
        self.moves(
            "input gradient joined, of a split vocabulary",
            "8192 x 4096 bf16",
            floor,
            || {
                cross_entropy::cuda::join_gradient(
                    gpu,
                    out.view_mut(),
                    hits.view(),
                    sum.view(),
                    1e-4,
                )
            },
        )
    }

    fn optimizer(&mut self) -> Result<(), GpuError> {
        let gpu = self.gpu;
        let (elements, tensors) = (1 << 24, 8);
        let mut w = self.numbers::<f32>(elements * tensors)?;
        let g = self.numbers::<f32>(elements * tensors)?;
        let [mut m, mut v] =
            [self.zeros::<f32>(elements * tensors)?, self.zeros(elements * tensors)?];
        let mut copy = self.zeros::<bf16>(elements * tensors)?;
        let step =
            AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, step: 10, gradient_scale: 1.0 };
        let floor = adamw::cuda::floor(elements * tensors, Some(Storage::Bf16));
        self.moves("AdamW with bf16 copies", "8 tensors of 2^24", floor, || {
            let (mut ws, mut ms, mut vs) = (w.view_mut(), m.view_mut(), v.view_mut());
            let mut copies = copy.view_mut();
            let mut parameters = Vec::with_capacity(tensors);
            for number in 0..tensors {
                let (w, rest) = ws.split_at(elements);
                ws = rest;
                let (m, rest) = ms.split_at(elements);
                ms = rest;
                let (v, rest) = vs.split_at(elements);
                vs = rest;
                let (copy, rest) = copies.split_at(elements);
                copies = rest;
                let g = g.slice(number * elements..(number + 1) * elements);
                parameters.push(adamw::cuda::Parameter {
                    w,
                    g,
                    m,
                    v,
                    copy: Some(copy),
                    decay: 0.1,
                });
            }
            adamw::cuda::update(gpu, &step, &mut parameters)
        })?;
        drop((w, m, v, copy));
        // As large as a model, so that no page's address is known from the launch before.
        let large = 1 << 30;
        let [mut w, g, mut m, mut v] =
            [self.zeros::<f32>(large)?, self.zeros(large)?, self.zeros(large)?, self.zeros(large)?];
        let mut copy = self.zeros::<bf16>(large)?;
        let floor = adamw::cuda::floor(large, Some(Storage::Bf16));
        self.moves("AdamW with bf16 copies", "one tensor of 2^30", floor, || {
            let parameter = adamw::cuda::Parameter {
                w: w.view_mut(),
                g: g.view(),
                m: m.view_mut(),
                v: v.view_mut(),
                copy: Some(copy.view_mut()),
                decay: 0.1,
            };
            adamw::cuda::update(gpu, &step, &mut [parameter])
        })?;
        let floor = elementwise::cuda::floor(large, &[Storage::F32]);
        let mut total = gpu.zeros::<f64>(1)?;
        self.moves("sum of squares", "2^30 f32", floor, || {
            let total = total.view_mut();
            elementwise::cuda::sum_of_squares_into(gpu, g.view(), total, Output::Overwrite)
        })?;
        drop((w, g, m, v, copy));
        let mut w = self.numbers::<f32>(elements * tensors)?;
        let g = self.numbers::<f32>(elements * tensors)?;
        let copy = self.zeros::<bf16>(elements * tensors)?;
        let floor = elementwise::cuda::floor(elements * tensors, &[Storage::F32]);
        let mut total = gpu.zeros::<f64>(1)?;
        self.moves("sum of squares", "2^27 f32", floor, || {
            elementwise::cuda::sum_of_squares_into(
                gpu,
                g.view(),
                total.view_mut(),
                Output::Overwrite,
            )
        })?;
        // The same memory as a rank's part of a reduction by maximum, and as randomly initialised
        // weights.
        let floor = elementwise::cuda::floor(elements * tensors, &[Storage::F32; 3]);
        self.moves("maximum over ranks", "2^27 f32", floor, || {
            elementwise::cuda::maximum(gpu, g.view(), w.view_mut())
        })?;
        let stream = Stream { seed: 1, tensor: 2, step: 0 };
        let drawn = GlobalIndices::contiguous(0, elements * tensors);
        // Bound by logarithms and cosines in f64, not by memory.
        let drawn_s =
            self.seconds(|| random::cuda::fill_normal(gpu, w.view_mut(), &drawn, stream, 0.02))?;
        let floor = random::cuda::floor(drawn.len());
        self.row("weights drawn", "2^27 f32".to_owned(), drawn_s, floor, Value::None);
        let mut gradients = self.zeros::<f32>(elements * tensors)?;
        let stored = [Storage::Bf16, Storage::F32, Storage::F32];
        let floor = elementwise::cuda::floor(elements * tensors, &stored);
        self.moves("gradient accumulated", "2^27 bf16 to f32", floor, || {
            elementwise::cuda::accumulate(gpu, copy.view(), gradients.view_mut())
        })
    }

    /// The products of a layer: forward, to inputs and to weights. Their share is of the fastest
    /// algorithm.
    fn products(&mut self) -> Result<(), GpuError> {
        let layers = [
            ("GPT-2 124M", 8192, 768, 3072),
            ("GPT-2 1.5B", 8192, 1600, 6400),
            ("Llama 3 8B", 8192, 4096, 14_336),
            ("square", 8192, 8192, 8192),
        ];
        for (name, tokens, inputs, outputs) in layers {
            self.product::<bf16>(
                &format!("{name} forward NT"),
                Shape::nt(tokens, outputs, inputs),
            )?;
            self.product::<bf16>(
                &format!("{name} to inputs NN"),
                Shape::nn(tokens, inputs, outputs),
            )?;
            self.product::<f32>(
                &format!("{name} to weights TN"),
                Shape::tn(outputs, inputs, tokens),
            )?;
        }
        Ok(())
    }

    fn product<O: Stored>(&mut self, name: &str, shape: Shape) -> Result<(), GpuError> {
        let gpu = self.gpu;
        let Shape { m, n, k, .. } = shape;
        let (a, b) = (self.numbers::<bf16>(m * k)?, self.numbers::<bf16>(k * n)?);
        let mut c = self.zeros::<O>(m * n)?;
        // Gradients of weights accumulate.
        let beta = if O::STORAGE == Storage::F32 { 1.0 } else { 0.0 };
        let seconds = self.seconds(|| {
            gemm::cuda::gemm(gpu, &shape, 1.0, a.view(), b.view(), beta, c.view_mut())
        })?;
        let survey = gemm::cuda::survey(gpu, &shape, a.view(), b.view(), c.view_mut())?;
        let best = survey.iter().copied().fold(f64::INFINITY, f64::min);
        let share = survey.first().map_or(Value::None, |chosen| Value::Number(best / chosen));
        let floor = gemm::cuda::floor(&shape, Storage::Bf16, O::STORAGE, beta);
        self.row(&format!("product, {name}"), format!("{m} x {n} x {k}"), seconds, floor, share);
        Ok(())
    }

    fn attentions(&mut self) -> Result<(), GpuError> {
        for (batch, len, q_heads, kv_heads, dim) in [
            (8, 1024, 12, 12, 64),
            (8, 2048, 64, 8, 128),
            (4, 4096, 64, 8, 128),
            (2, 8192, 64, 8, 128),
            (1, 16_384, 64, 8, 128),
            (2, 8192, 32, 8, 128),
            (2, 8192, 16, 8, 256),
        ] {
            self.attention(&Attention::causal(batch, len, q_heads, kv_heads, dim))?;
        }
        Ok(())
    }

    fn attention(&mut self, a: &Attention) -> Result<(), GpuError> {
        let gpu = self.gpu;
        let (q, k, v) = (
            self.numbers::<bf16>(a.q_elements())?,
            self.numbers::<bf16>(a.k_elements())?,
            self.numbers::<bf16>(a.v_elements())?,
        );
        let dout = self.numbers::<bf16>(a.out_elements())?;
        let mut out = self.zeros::<bf16>(a.out_elements())?;
        let mut lse = self.zeros::<f32>(a.lse_elements())?;
        let [mut dq, mut dk, mut dv] = [
            self.zeros::<bf16>(a.q_elements())?,
            self.zeros(a.k_elements())?,
            self.zeros(a.v_elements())?,
        ];
        let shape = format!(
            "{} x {}, {}/{} heads of {}, causal",
            a.batch, a.q_len, a.q_heads, a.kv_heads, a.qk_dim
        );
        let run_forward = |kernel, out: &mut Memory<bf16>, lse: &mut Memory<f32>| {
            let (q, k, v) = (q.view(), k.view(), v.view());
            attention::cuda::forward_by(gpu, kernel, a, q, k, v, out.view_mut(), lse.view_mut())
        };
        let floor = attention::cuda::forward_floor(a, Storage::Bf16);
        let kernels = attention::cuda::forward_kernels(gpu, a);
        let forward = self.compared("forward", &shape, floor, kernels, |kernel| {
            run_forward(kernel, &mut out, &mut lse)
        })?;
        let saved = attention::cuda::Saved {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            out: out.view(),
            lse: lse.view(),
        };
        let backward_floor = attention::cuda::backward_floor(a, Storage::Bf16);
        let kernels = attention::cuda::backward_kernels(gpu, a);
        let backward = self.compared("backward", &shape, backward_floor, kernels, |kernel| {
            let mut gradients = attention::cuda::Gradients {
                dq: dq.view_mut(),
                dk: dk.view_mut(),
                dv: dv.view_mut(),
            };
            let (dout, output) = (dout.view(), Output::Overwrite);
            attention::cuda::backward_by(gpu, kernel, a, &saved, dout, &mut gradients, output)
        })?;
        let share = forward.of_library(&backward);
        let both = floor + backward_floor;
        self.row("attention both", shape, forward.chosen_s + backward.chosen_s, both, share);
        Ok(())
    }

    /// A row for each kernel, and one for the chosen kernel, which is what programs run. A share is
    /// of the library's fastest.
    fn compared(
        &mut self,
        pass: &str,
        shape: &str,
        floor: Floor,
        kernels: Result<Vec<(Kernel, String)>, GpuError>,
        mut run: impl FnMut(Option<Kernel>) -> Result<(), GpuError>,
    ) -> Result<Compared, GpuError> {
        let kernels = kernels.unwrap_or_else(|error| {
            eprintln!("attention {pass} {shape}: {error}");
            vec![(Kernel::Own, "own".to_owned())]
        });
        let mut timed = Vec::new();
        for (kernel, name) in kernels {
            match self.seconds(|| run(Some(kernel))) {
                Ok(seconds) => timed.push((kernel, name, seconds)),
                Err(error) => eprintln!("attention {pass} {shape} by {name}: {error}"),
            }
        }
        let chosen_s = self.seconds(|| run(None))?;
        let library = timed.iter().filter(|(kernel, ..)| *kernel != Kernel::Own);
        let library_s = library.map(|(.., seconds)| *seconds).min_by(f64::total_cmp);
        let compared = Compared { chosen_s, library_s };
        for (_, name, seconds) in timed {
            let share = library_s.map_or(Value::None, |least| Value::Number(least / seconds));
            let name = format!("attention {pass} by {name}");
            self.row(&name, shape.to_owned(), seconds, floor, share);
        }
        let share = library_s.map_or(Value::None, |least| Value::Number(least / chosen_s));
        self.row(&format!("attention {pass}"), shape.to_owned(), chosen_s, floor, share);
        Ok(compared)
    }
}

/// Seconds of the chosen kernel, and of the library's fastest.
struct Compared {
    chosen_s: f64,
    library_s: Option<f64>,
}

impl Compared {
    /// The library's time divided by that of the chosen kernels, summed with another pass.
    fn of_library(&self, other: &Self) -> Value {
        match (self.library_s, other.library_s) {
            (Some(a), Some(b)) => Value::Number((a + b) / (self.chosen_s + other.chosen_s)),
            _ => Value::None,
        }
    }
}
