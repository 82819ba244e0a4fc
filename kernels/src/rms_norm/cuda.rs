//! RMSNorm on a GPU. `x`, `y` and `w` are in the storage type, `inverse_rms` and `dw` f32.

use super::RmsNorm;
use crate::Output;
use crate::cuda::launch::{ColumnSum, NULL, THREADS, constant, int, pack, row_threads};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for rows of this width, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, norm: &RmsNorm, pack: usize) -> Module {
    with_threads(storage, norm, pack, row_threads(norm.columns, pack))
}

fn with_threads(storage: Storage, norm: &RmsNorm, pack: usize, threads: usize) -> Module {
    let constants =
        vec![("COLUMNS", constant(norm.columns)), ("EPS", norm.eps), ("OFFSET", norm.offset())];
    Module::new("rms_norm", storage, pack, threads, constants)
}

fn pack_of<S: Stored>(norm: &RmsNorm, addresses: &[u64]) -> usize {
    let tensors: Vec<(u64, usize)> =
        addresses.iter().map(|&address| (address, size_of::<S>())).collect();
    pack(S::STORAGE, norm.columns, &tensors)
}

fn module_of<S: Stored>(norm: &RmsNorm, addresses: &[u64]) -> Module {
    module(S::STORAGE, norm, pack_of::<S>(norm, addresses))
}

/// The module of gradients of weights, whose blocks have strips of columns instead of rows.
#[must_use]
pub fn module_of_weights(storage: Storage, norm: &RmsNorm, pack: usize) -> Module {
    with_threads(storage, norm, pack, THREADS)
}

/// Computes `y` and `inverse_rms` from `x`. Shapes: [`super`].
///
/// # Errors
/// If the device fails; the same holds for the functions below.
///
/// # Panics
/// If a view has the wrong length; the same holds for the functions below.
pub fn forward<S: Stored>(
    gpu: &Gpu,
    norm: &RmsNorm,
    x: View<'_, S>,
    w: View<'_, S>,
    y: ViewMut<'_, S>,
    inverse_rms: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    norm.check(&[("x", x.len()), ("y", y.len())], w.len(), inverse_rms.len());
    let module = module_of::<S>(norm, &[x.address(), w.address(), y.address()]);
    let arguments =
        vec![x.argument(), NULL, w.argument(), NULL, y.argument(), inverse_rms.argument()];
    gpu.launch(&module.launch("rms_norm_forward", [norm.rows, 1], arguments))
}

/// `sum = x + residual`, and `y` and `inverse_rms` of the stored, rounded `sum`: a residual
/// connection fused with the norm after it. Reads each input once.
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn forward_residual<S: Stored>(
    gpu: &Gpu,
    norm: &RmsNorm,
    x: View<'_, S>,
    residual: View<'_, S>,
    w: View<'_, S>,
    sum: ViewMut<'_, S>,
    y: ViewMut<'_, S>,
    inverse_rms: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let tensors =
        [("x", x.len()), ("residual", residual.len()), ("sum", sum.len()), ("y", y.len())];
    norm.check(&tensors, w.len(), inverse_rms.len());
    let addresses = [x.address(), residual.address(), w.address(), sum.address(), y.address()];
    let arguments = vec![
        x.argument(),
        residual.argument(),
        w.argument(),
        sum.argument(),
        y.argument(),
        inverse_rms.argument(),
    ];
    let module = module_of::<S>(norm, &addresses);
    gpu.launch(&module.launch("rms_norm_forward", [norm.rows, 1], arguments))
}

/// Computes `dx` from `dy`. Shapes: [`super`].
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn backward_input<S: Stored>(
    gpu: &Gpu,
    norm: &RmsNorm,
    x: View<'_, S>,
    w: View<'_, S>,
    inverse_rms: View<'_, f32>,
    dy: View<'_, S>,
    dx: ViewMut<'_, S>,
    output: Output,
) -> Result<(), GpuError> {
    let tensors = [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())];
    norm.check(&tensors, w.len(), inverse_rms.len());
    let module = module_of::<S>(norm, &[x.address(), w.address(), dy.address(), dx.address()]);
    let arguments = vec![
        x.argument(),
        w.argument(),
        inverse_rms.argument(),
        dy.argument(),
        dx.argument(),
        output.into(),
    ];
    gpu.launch(&module.launch("rms_norm_backward_input", [norm.rows, 1], arguments))
}

/// Adds the gradient to `dw`. Shapes: [`super`].
///
/// # Errors
/// As [`forward`].
pub fn backward_weight<S: Stored>(
    gpu: &Gpu,
    norm: &RmsNorm,
    x: View<'_, S>,
    inverse_rms: View<'_, f32>,
    dy: View<'_, S>,
    dw: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    norm.check(&[("x", x.len()), ("dy", dy.len())], dw.len(), inverse_rms.len());
    let pack = pack_of::<S>(norm, &[x.address(), dy.address()]);
    let module = module_of_weights(S::STORAGE, norm, pack);
    let ColumnSum { grid, parts, total } = ColumnSum::new(norm.rows, norm.columns, pack);
    let partial = gpu.memory::<f32>(parts * norm.columns)?;
    let partial = partial.view();
    let arguments = vec![
        x.argument(),
        inverse_rms.argument(),
        dy.argument(),
        partial.argument(),
        int(norm.rows),
    ];
    gpu.launch(&module.launch("rms_norm_backward_weight", grid, arguments))?;
    let arguments = vec![partial.argument(), dw.argument(), int(parts)];
    gpu.launch(&module.launch("rms_norm_column_sum", total, arguments).following())
}

/// Lower bound on the work of [`forward`].
#[must_use]
pub fn forward_floor(norm: &RmsNorm, storage: Storage) -> Floor {
    let elements = 2 * norm.rows * norm.columns + norm.columns;
    Floor::bytes(elements * storage.bytes() + 4 * norm.rows)
}

/// Lower bound on the work of [`forward_residual`].
#[must_use]
pub fn forward_residual_floor(norm: &RmsNorm, storage: Storage) -> Floor {
    forward_floor(norm, storage) + Floor::bytes(2 * norm.rows * norm.columns * storage.bytes())
}

/// Lower bound on the work of [`backward_input`].
#[must_use]
pub fn backward_input_floor(norm: &RmsNorm, storage: Storage, output: Output) -> Floor {
    let tensors = if output == Output::Accumulate { 4 } else { 3 };
    let elements = tensors * norm.rows * norm.columns + norm.columns;
    Floor::bytes(elements * storage.bytes() + 4 * norm.rows)
}

/// Lower bound on the work of [`backward_weight`].
#[must_use]
pub fn backward_weight_floor(norm: &RmsNorm, storage: Storage) -> Floor {
    Floor::bytes(2 * norm.rows * norm.columns * storage.bytes() + 4 * norm.rows + 8 * norm.columns)
}
