//! LayerNorm on a GPU. `x`, `y`, `w` and `bias` are in the storage type, `mean`, `inverse_std`,
//! `dw` and `dbias` f32.

use super::LayerNorm;
use crate::Output;
use crate::cuda::launch::{ColumnSum, NULL, THREADS, constant, int, pack, row_threads};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for rows of this width, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, norm: &LayerNorm, pack: usize) -> Module {
    with_threads(storage, norm, pack, row_threads(norm.columns, pack))
}

fn with_threads(storage: Storage, norm: &LayerNorm, pack: usize, threads: usize) -> Module {
    let constants = vec![("COLUMNS", constant(norm.columns)), ("EPS", norm.eps)];
    Module::new("layer_norm", storage, pack, threads, constants)
}

fn pack_of<S: Stored>(norm: &LayerNorm, addresses: &[u64]) -> usize {
    let tensors: Vec<(u64, usize)> =
        addresses.iter().map(|&address| (address, size_of::<S>())).collect();
    pack(S::STORAGE, norm.columns, &tensors)
}

fn module_of<S: Stored>(norm: &LayerNorm, addresses: &[u64]) -> Module {
    module(S::STORAGE, norm, pack_of::<S>(norm, addresses))
}

/// The module of gradients of weights, whose blocks have strips of columns instead of rows.
#[must_use]
pub fn module_of_weights(storage: Storage, norm: &LayerNorm, pack: usize) -> Module {
    with_threads(storage, norm, pack, THREADS)
}

/// Computes `y`, `mean` and `inverse_std` from `x`. Shapes: [`super`].
///
/// # Errors
/// If the device fails; the same holds for the functions below.
///
/// # Panics
/// If a view has the wrong length; the same holds for the functions below.
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn forward<S: Stored>(
    gpu: &Gpu,
    norm: &LayerNorm,
    x: View<'_, S>,
    w: View<'_, S>,
    bias: View<'_, S>,
    y: ViewMut<'_, S>,
    mean: ViewMut<'_, f32>,
    inverse_std: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let weights = [("w", w.len()), ("bias", bias.len())];
    norm.check(&[("x", x.len()), ("y", y.len())], &weights, [mean.len(), inverse_std.len()]);
    let addresses = [x.address(), w.address(), bias.address(), y.address()];
    let arguments = vec![
        x.argument(),
        NULL,
        w.argument(),
        bias.argument(),
        NULL,
        y.argument(),
        mean.argument(),
        inverse_std.argument(),
    ];
    let module = module_of::<S>(norm, &addresses);
    gpu.launch(&module.launch("layer_norm_forward", [norm.rows, 1], arguments))
}

/// `sum = x + residual`, and the norm of the stored, rounded `sum`; reads each input once.
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn forward_residual<S: Stored>(
    gpu: &Gpu,
    norm: &LayerNorm,
    x: View<'_, S>,
    residual: View<'_, S>,
    w: View<'_, S>,
    bias: View<'_, S>,
    sum: ViewMut<'_, S>,
    y: ViewMut<'_, S>,
    mean: ViewMut<'_, f32>,
    inverse_std: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let tensors =
        [("x", x.len()), ("residual", residual.len()), ("sum", sum.len()), ("y", y.len())];
    let weights = [("w", w.len()), ("bias", bias.len())];
    norm.check(&tensors, &weights, [mean.len(), inverse_std.len()]);
    let rows = [x.address(), residual.address(), sum.address(), y.address()];
    let addresses = [&rows[..], &[w.address(), bias.address()]].concat();
    let arguments = vec![
        x.argument(),
        residual.argument(),
        w.argument(),
        bias.argument(),
        sum.argument(),
        y.argument(),
        mean.argument(),
        inverse_std.argument(),
    ];
    let module = module_of::<S>(norm, &addresses);
    gpu.launch(&module.launch("layer_norm_forward", [norm.rows, 1], arguments))
}

/// Computes `dx` from `dy`. Shapes: [`super`].
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn backward_input<S: Stored>(
    gpu: &Gpu,
    norm: &LayerNorm,
    x: View<'_, S>,
    w: View<'_, S>,
    mean: View<'_, f32>,
    inverse_std: View<'_, f32>,
    dy: View<'_, S>,
    dx: ViewMut<'_, S>,
    output: Output,
) -> Result<(), GpuError> {
    let tensors = [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())];
    norm.check(&tensors, &[("w", w.len())], [mean.len(), inverse_std.len()]);
    let module = module_of::<S>(norm, &[x.address(), w.address(), dy.address(), dx.address()]);
    let arguments = vec![
        x.argument(),
        w.argument(),
        mean.argument(),
        inverse_std.argument(),
        dy.argument(),
        dx.argument(),
        output.into(),
    ];
    gpu.launch(&module.launch("layer_norm_backward_input", [norm.rows, 1], arguments))
}

/// Adds the gradients to `dw` and `dbias`. Shapes: [`super`].
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn backward_weight<S: Stored>(
    gpu: &Gpu,
    norm: &LayerNorm,
    x: View<'_, S>,
    mean: View<'_, f32>,
    inverse_std: View<'_, f32>,
    dy: View<'_, S>,
    dw: ViewMut<'_, f32>,
    dbias: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let weights = [("dw", dw.len()), ("dbias", dbias.len())];
    norm.check(&[("x", x.len()), ("dy", dy.len())], &weights, [mean.len(), inverse_std.len()]);
    let pack = pack_of::<S>(norm, &[x.address(), dy.address()]);
    let module = module_of_weights(S::STORAGE, norm, pack);
    let ColumnSum { grid, parts, total } = ColumnSum::new(norm.rows, norm.columns, pack);
    let partial = gpu.memory::<f32>(parts * 2 * norm.columns)?;
    let partial = partial.view();
    let arguments = vec![
        x.argument(),
        mean.argument(),
        inverse_std.argument(),
        dy.argument(),
        partial.argument(),
        int(norm.rows),
    ];
    gpu.launch(&module.launch("layer_norm_backward_weight", grid, arguments))?;
    let arguments = vec![partial.argument(), dw.argument(), dbias.argument(), int(parts)];
    gpu.launch(&module.launch("layer_norm_column_sum", total, arguments).following())
}

/// Lower bound on the work of [`forward`].
#[must_use]
pub fn forward_floor(norm: &LayerNorm, storage: Storage) -> Floor {
    let elements = 2 * norm.rows * norm.columns + 2 * norm.columns;
    Floor::bytes(elements * storage.bytes() + 8 * norm.rows)
}

/// Lower bound on the work of [`forward_residual`].
#[must_use]
pub fn forward_residual_floor(norm: &LayerNorm, storage: Storage) -> Floor {
    forward_floor(norm, storage) + Floor::bytes(2 * norm.rows * norm.columns * storage.bytes())
}

/// Lower bound on the work of [`backward_input`].
#[must_use]
pub fn backward_input_floor(norm: &LayerNorm, storage: Storage, output: Output) -> Floor {
    let tensors = if output == Output::Accumulate { 4 } else { 3 };
    let elements = tensors * norm.rows * norm.columns + norm.columns;
    Floor::bytes(elements * storage.bytes() + 8 * norm.rows)
}

/// Lower bound on the work of [`backward_weight`].
#[must_use]
pub fn backward_weight_floor(norm: &LayerNorm, storage: Storage) -> Floor {
    Floor::bytes(2 * norm.rows * norm.columns * storage.bytes() + 8 * norm.rows + 16 * norm.columns)
}
