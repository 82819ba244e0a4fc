//! AdamW on a GPU, for many tensors in one launch. Weights, gradients and moments are f32. A copy
//! of the weights in the storage type, which the next step computes with, is written along with
//! them.

use super::AdamW;
use crate::cuda::launch::{THREADS, constant, int};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// A parameter and its state, or a shard of them. All views have the same length.
#[derive(Debug)]
pub struct Parameter<'a, S> {
    /// Weights, updated in place.
    pub w: ViewMut<'a, f32>,
    /// Gradient.
    pub g: View<'a, f32>,
    /// First moment, updated in place.
    pub m: ViewMut<'a, f32>,
    /// Second moment, updated in place.
    pub v: ViewMut<'a, f32>,
    /// Copy of the new weights in the storage type; `None` if the next step uses the weights
    /// themselves.
    pub copy: Option<ViewMut<'a, S>>,
    /// Weight decay of this parameter, 0 for none.
    pub decay: f64,
}

/// A parameter whose state stays unchanged while the step's weights are written elsewhere. All
/// views have the same length.
#[derive(Debug)]
pub struct Proposal<'a, S> {
    /// The weights after the step; written.
    pub to: ViewMut<'a, f32>,
    /// Weights.
    pub w: View<'a, f32>,
    /// Gradient.
    pub g: View<'a, f32>,
    /// First moment.
    pub m: View<'a, f32>,
    /// Second moment.
    pub v: View<'a, f32>,
    /// Copy of the weights after the step, in the storage type.
    pub copy: Option<ViewMut<'a, S>>,
    /// Weight decay of this parameter, 0 for none.
    pub decay: f64,
}

/// A row of the kernel's table: addresses of `to`, `w`, `g`, `m`, `v` and `copy`, the number of
/// elements, and the decay packed with two flags ([`last`]).
type Row = [u64; 8];

/// Elements of a chunk, which a block updates. On an H200 chunks of 4096 reach 0.97 of a copy's
/// bandwidth at 2^30 elements and 0.94 at 2^27; of 65,536, 0.91 and 0.88. Loading more than four
/// elements a thread before the first is stored gains nothing (docs/gpu/results.md).
const CHUNK: usize = 4096;

/// The module.
#[must_use]
pub fn module(storage: Storage) -> Module {
    Module::new("adamw", storage, 1, THREADS, vec![("CHUNK", constant(CHUNK))])
}

/// One step of every parameter.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If the views of a parameter differ in length, or the step is 0.
pub fn update<S: Stored>(
    gpu: &Gpu,
    adamw: &AdamW,
    parameters: &mut [Parameter<'_, S>],
) -> Result<(), GpuError> {
    let rows: Vec<Row> = parameters
        .iter()
        .map(|of| {
            let lengths = [("g", of.g.len()), ("m", of.m.len()), ("v", of.v.len())];
            let copy = check(of.w.len(), &lengths, of.copy.as_ref());
            let w = of.w.address();
            let [g, m, v] = [of.g.address(), of.m.address(), of.v.address()];
            [w, w, g, m, v, copy, of.w.len() as u64, last(of.decay, false)]
        })
        .collect();
    run::<S>(gpu, adamw, &rows)
}

/// The weights that [`update`] would give, with the same bits; the state stays unchanged.
///
/// # Errors
/// As [`update`].
///
/// # Panics
/// As [`update`].
pub fn proposal<S: Stored>(
    gpu: &Gpu,
    adamw: &AdamW,
    parameters: &mut [Proposal<'_, S>],
) -> Result<(), GpuError> {
    let rows: Vec<Row> = parameters
        .iter()
        .map(|of| {
            let lengths =
                [("w", of.w.len()), ("g", of.g.len()), ("m", of.m.len()), ("v", of.v.len())];
            let copy = check(of.to.len(), &lengths, of.copy.as_ref());
            let [to, w, g] = [of.to.address(), of.w.address(), of.g.address()];
            let [m, v] = [of.m.address(), of.v.address()];
            [to, w, g, m, v, copy, of.to.len() as u64, last(of.decay, true)]
        })
        .collect();
    run::<S>(gpu, adamw, &rows)
}

#[track_caller]
fn check<S: Stored>(
    elements: usize,
    lengths: &[(&str, usize)],
    copy: Option<&ViewMut<'_, S>>,
) -> u64 {
    for (name, got) in lengths {
        crate::check::length(name, *got, elements);
    }
    copy.map_or(0, |copy| {
        crate::check::length("copy", copy.len(), elements);
        copy.address()
    })
}

/// The last entry of a row: decay in the lower half, then whether moments stay unchanged, then
/// whether elements move in fours.
#[allow(clippy::cast_possible_truncation)] // a factor
fn last(decay: f64, keeps_moments: bool) -> u64 {
    u64::from((decay as f32).to_bits()) | u64::from(keeps_moments) << 32
}

/// Sets the last flag where all addresses of a row are multiples of four elements.
fn by_four(mut row: Row, copy_bytes: usize) -> Row {
    let [to, w, g, m, v, copy, _, last] = &mut row;
    let f32s = [*to, *w, *g, *m, *v].iter().all(|address| address.is_multiple_of(16));
    *last |= u64::from(f32s && copy.is_multiple_of(4 * copy_bytes as u64)) << 48;
    row
}

fn run<S: Stored>(gpu: &Gpu, adamw: &AdamW, rows: &[Row]) -> Result<(), GpuError> {
    let module = module(S::STORAGE);
    let factors = gpu.upload(&factors(adamw))?;
    let mut first_chunks = Vec::with_capacity(rows.len());
    let mut chunks = 0;
    for row in rows {
        first_chunks.push(chunks);
        chunks += u32::try_from(row[6].div_ceil(CHUNK as u64)).unwrap_or(u32::MAX);
    }
    let rows: Vec<Row> = rows.iter().map(|&row| by_four(row, S::STORAGE.bytes())).collect();
    let (table, first_chunks) = (gpu.upload(rows.as_flattened())?, gpu.upload(&first_chunks)?);
    let arguments = vec![
        table.view().argument(),
        first_chunks.view().argument(),
        int(rows.len()),
        factors.view().argument(),
    ];
    gpu.launch(&module.launch("adamw_update", [chunks as usize, 1], arguments))
}

/// The layout of the kernel's `Factors`.
#[allow(clippy::cast_possible_truncation)] // factors
fn factors(adamw: &AdamW) -> [f32; 9] {
    let factors = adamw.factors();
    [
        adamw.lr,
        factors.rate,
        1.0 / factors.root,
        adamw.gradient_scale,
        adamw.beta1,
        adamw.beta2,
        adamw.eps,
        1.0 - adamw.beta1,
        1.0 - adamw.beta2,
    ]
    .map(|factor| factor as f32)
}

/// Lower bound on the work of [`update`] for this many elements, with a copy in `storage` if there
/// is one.
#[must_use]
pub fn floor(elements: usize, copy: Option<Storage>) -> Floor {
    Floor::bytes(elements * (28 + copy.map_or(0, Storage::bytes)))
}
