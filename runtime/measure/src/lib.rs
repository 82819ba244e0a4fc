//! What `plan calibrate --gpu` measures, and in which order; the program `measure-gpu` runs it.
//!
//! A [`Sweep`] lists the shapes, a [`Bench`] takes the times: [`GpuBench`] on a GPU, tests by
//! formula. Parts can be measured one at a time, on a machine that is available for minutes only.

mod gpu;
mod steps;

pub use gpu::GpuBench;
pub use steps::{Noise, program_of, training};

use kernels::attention::Attention;
use models::cluster::{
    Collective, CollectiveKind, Core, Dtype, MeasuredGpu, Moved, Product, Step, Updated,
};
use runtime::Error;

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchPart {
    /// Launches, copies, elementwise kernels, the optimizer.
    Memory,
    /// Matrix products.
    Products,
    /// The attention core.
    Attention,
    /// Collectives of ranks that share the GPU.
    Collectives,
    /// Whole training steps.
    Steps,
}

/// Tokens, hidden width and feed-forward width of the layer whose elementwise kernels are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSize {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Hidden width.
    pub hidden: usize,
    /// Width inside the activation.
    pub ffn: usize,
}

/// Shapes to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// Bytes of copies, read and written together.
    pub copies: Vec<usize>,
    /// The layer whose elementwise kernels are timed.
    pub layer: LayerSize,
    /// Parameters that AdamW updates.
    pub parameters: usize,
    /// Sizes of products in each format; rows, columns and depth each take all of them.
    pub products: Vec<(Dtype, Vec<usize>)>,
    /// The product that is repeated for a second.
    pub sustained: [usize; 3],
    /// Head width, and query heads for each key/value head.
    pub widths: Vec<(usize, usize)>,
    /// Tokens of a sequence.
    pub sequences: Vec<usize>,
    /// Query heads of all sequences.
    pub heads: Vec<usize>,
    /// Numbers of ranks in collectives; empty if only one rank uses the GPU.
    pub ranks: Vec<usize>,
    /// Bytes of the whole tensor.
    pub exchanged: Vec<usize>,
    /// Model files, and sequences of a step.
    pub steps: Vec<(&'static str, u64)>,
}

/// A tiny step, whose time is the overhead of a step beside its passes.
const TINY: &str = "name: tiny\nlayers: 1\nhidden: 64\nheads: 4\nffn: 128\nvocab: 64\nseq_len: 16\nglobal_batch: 4\n";
const GPT2_124M: &str = "name: GPT-2 124M\nlayers: 12\nhidden: 768\nheads: 12\nffn: 3072\nvocab: 50304\n\
    activation: gelu\nnorm: layer_norm\npositions: learned\nmax_positions: 1024\ntied_embeddings: true\n\
    bias: true\nseq_len: 1024\nglobal_batch: 16\n";
const GPT2_1_5B: &str = "name: GPT-2 1.5B\nlayers: 48\nhidden: 1600\nheads: 25\nffn: 6400\nvocab: 50304\n\
    activation: gelu\nnorm: layer_norm\npositions: learned\nmax_positions: 1024\ntied_embeddings: true\n\
    bias: true\nseq_len: 1024\nglobal_batch: 8\n";
const LLAMA3_8B_SLICE: &str = "name: Llama 3 8B, 4 layers\nlayers: 4\nhidden: 4096\nheads: 32\nkv_heads: 8\n\
    ffn: 14336\nvocab: 128256\nmax_positions: 8192\nrope_theta: 500000\nseq_len: 8192\nglobal_batch: 1\n";

impl Sweep {
    /// Everything that a cluster file has tables for, and the steps that predictions are compared
    /// with.
    #[must_use]
    pub fn full(ranks: usize) -> Self {
        let sizes = vec![512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384];
        Self {
            copies: (0..12).map(|n| 1 << (20 + n)).collect(),
            layer: LayerSize { tokens: 8192, hidden: 4096, ffn: 14_336 },
            parameters: 1 << 27,
            products: vec![(Dtype::Bf16, sizes), (Dtype::F32, vec![512, 1024, 2048, 4096, 8192])],
            sustained: [8192; 3],
            widths: vec![(64, 1), (128, 4)],
            sequences: vec![512, 1024, 2048, 4096, 8192, 16_384],
            heads: vec![8, 32, 128],
            ranks: (1..4).map(|n| 1 << n).filter(|&n| n <= ranks).collect(),
            exchanged: (0..8).map(|n| 1 << (10 + 2 * n)).collect(),
            steps: vec![(TINY, 4), (GPT2_124M, 16), (GPT2_1_5B, 8), (LLAMA3_8B_SLICE, 1)],
        }
    }

    /// The same with fewer sizes, for a GPU that is at hand for a minute.
    #[must_use]
    pub fn coarse(ranks: usize) -> Self {
        let sizes = (9..15).map(|n| 1 << n).collect();
        Self {
            products: vec![(Dtype::Bf16, sizes), (Dtype::F32, vec![1024, 4096])],
            sequences: vec![1024, 4096, 16_384],
            ..Self::full(ranks)
        }
    }

    /// The same with products of more sizes in 16 bits, such as the widths of a model: between
    /// sizes a table knows nothing of how tiles fit.
    #[must_use]
    pub fn with_sizes(mut self, more: &[usize]) -> Self {
        for (dtype, sizes) in &mut self.products {
            if *dtype == Dtype::Bf16 {
                sizes.extend(more);
                sizes.sort_unstable();
                sizes.dedup();
            }
        }
        self
    }

    /// A tiny sweep of each part, for a dry run.
    #[must_use]
    pub fn small(ranks: usize) -> Self {
        Self {
            copies: vec![1 << 12, 1 << 14],
            layer: LayerSize { tokens: 8, hidden: 64, ffn: 128 },
            parameters: 1 << 10,
            products: vec![(Dtype::Bf16, vec![16, 32]), (Dtype::F32, vec![16, 32])],
            sustained: [16; 3],
            widths: vec![(16, 1), (32, 2)],
            sequences: vec![32, 64],
            heads: vec![2, 4],
            ranks: (ranks > 1).then_some(ranks).into_iter().collect(),
            exchanged: vec![1 << 8, 1 << 10],
            steps: vec![(TINY, 4)],
        }
    }
}

/// Takes times, in seconds.
pub trait Bench {
    /// Time between two launches of a tiny kernel.
    ///
    /// # Errors
    /// The device failed or has no memory left; so for all methods.
    fn launch_s(&mut self) -> Result<f64, Error>;

    /// A copy that reads and writes `bytes` in total.
    ///
    /// # Errors
    /// As above.
    fn copy_s(&mut self, bytes: usize) -> Result<f64, Error>;

    /// Elementwise kernels of a layer in 16 bits, forward and backward, by kind.
    ///
    /// # Errors
    /// As above.
    fn elementwise(&mut self, layer: LayerSize) -> Result<Vec<Moved>, Error>;

    /// AdamW, including the gradient norm.
    ///
    /// # Errors
    /// As above.
    fn adamw_s(&mut self, parameters: usize) -> Result<f64, Error>;

    /// The product `[m, k] x [k, n]`.
    ///
    /// # Errors
    /// As above.
    fn product_s(&mut self, dtype: Dtype, size: [usize; 3]) -> Result<f64, Error>;

    /// A product's time in 16 bits after seconds of load.
    ///
    /// # Errors
    /// As above.
    fn sustained_s(&mut self, size: [usize; 3]) -> Result<f64, Error>;

    /// Attention forward and backward, in 16 bits.
    ///
    /// # Errors
    /// As above.
    fn attention_s(&mut self, shape: &Attention) -> Result<[f64; 2], Error>;

    /// A collective of ranks that share the GPU; `None` if the GPU has none of that kind.
    ///
    /// # Errors
    /// As above.
    fn collective_s(
        &mut self,
        kind: CollectiveKind,
        ranks: usize,
        bytes: usize,
    ) -> Result<Option<f64>, Error>;

    /// A training step of one rank in 16 bits.
    ///
    /// # Errors
    /// As above.
    fn step_s(&mut self, model: &str, global_batch: u64) -> Result<f64, Error>;
}

/// Called with the figures so far, to keep them.
pub type Keep<'a> = &'a mut dyn FnMut(&MeasuredGpu) -> Result<(), Error>;

/// Measures one part. Long parts keep what they have now and then.
///
/// # Errors
/// Those of the bench and of `keep`.
pub fn measure(
    bench: &mut dyn Bench,
    sweep: &Sweep,
    part: BenchPart,
    measured: &mut MeasuredGpu,
    keep: Keep<'_>,
) -> Result<(), Error> {
    match part {
        BenchPart::Memory => memory(bench, sweep, measured),
        BenchPart::Products => products(bench, sweep, measured, keep),
        BenchPart::Attention => attention(bench, sweep, measured, keep),
        BenchPart::Collectives => collectives(bench, sweep, measured),
        BenchPart::Steps => steps(bench, sweep, measured),
    }
}

fn memory(bench: &mut dyn Bench, sweep: &Sweep, found: &mut MeasuredGpu) -> Result<(), Error> {
    found.launch_s = Some(bench.launch_s()?);
    found.copies.clear();
    for &bytes in &sweep.copies {
        found.copies.push(Moved { bytes: bytes as f64, s: bench.copy_s(bytes)? });
    }
    found.elementwise = bench.elementwise(sweep.layer)?;
    let s = bench.adamw_s(sweep.parameters)?;
    found.adamw = Some(Updated { parameters: sweep.parameters as f64, s });
    Ok(())
}

fn products(
    bench: &mut dyn Bench,
    sweep: &Sweep,
    found: &mut MeasuredGpu,
    keep: Keep<'_>,
) -> Result<(), Error> {
    found.products.clear();
    for (dtype, sizes) in &sweep.products {
        let dtype = *dtype;
        for &m in sizes {
            for &n in sizes {
                for &k in sizes {
                    let s = bench.product_s(dtype, [m, n, k])?;
                    let [m, n, k] = [m, n, k].map(|size| size as u64);
                    found.products.push(Product { dtype, m, n, k, s });
                }
            }
            keep(found)?;
        }
    }
    // Relative to what the table holds, which was itself measured under some load: relative to a
    // cold GPU the load of the table's own measurement would be charged again.
    let [m, n, k] = sweep.sustained.map(|size| size as u64);
    let here = |of: &&Product| (of.dtype, of.m, of.n, of.k) == (Dtype::Bf16, m, n, k);
    let alone_s = match found.products.iter().find(here) {
        Some(of) => of.s,
        None => bench.product_s(Dtype::Bf16, sweep.sustained)?,
    };
    let sustained_s = bench.sustained_s(sweep.sustained)?;
    found.sustained_slowdown = Some((sustained_s / alone_s).max(1.0));
    Ok(())
}

fn attention(
    bench: &mut dyn Bench,
    sweep: &Sweep,
    found: &mut MeasuredGpu,
    keep: Keep<'_>,
) -> Result<(), Error> {
    found.attention.clear();
    for &(width, shared) in &sweep.widths {
        for &sequence in &sweep.sequences {
            for &heads in &sweep.heads {
                let kv_heads = (heads / shared).max(1);
                let shape = Attention::causal(1, sequence, heads, kv_heads, width);
                let [forward_s, backward_s] = bench.attention_s(&shape)?;
                found.attention.push(Core {
                    batch: 1,
                    seq_len: sequence as u64,
                    heads: heads as u64,
                    kv_heads: kv_heads as u64,
                    head_dim: width as u64,
                    forward_s,
                    backward_s,
                });
            }
            keep(found)?;
        }
    }
    Ok(())
}

fn collectives(bench: &mut dyn Bench, sweep: &Sweep, found: &mut MeasuredGpu) -> Result<(), Error> {
    found.collectives.clear();
    for kind in CollectiveKind::ALL {
        for &ranks in &sweep.ranks {
            for &bytes in &sweep.exchanged {
                let Some(s) = bench.collective_s(kind, ranks, bytes)? else { continue };
                let (ranks, bytes) = (ranks as u64, bytes as f64);
                found.collectives.push(Collective { kind, ranks, bytes, s });
            }
        }
    }
    Ok(())
}

fn steps(bench: &mut dyn Bench, sweep: &Sweep, found: &mut MeasuredGpu) -> Result<(), Error> {
    found.steps.clear();
    for &(model, global_batch) in &sweep.steps {
        let s = bench.step_s(model, global_batch)?;
        let model = model.to_owned();
        found.steps.push(Step { model, global_batch, ranks: 1, tp: 1, dp: 1, s });
    }
    Ok(())
}
