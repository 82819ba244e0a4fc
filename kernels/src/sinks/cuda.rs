//! Sinks on a GPU: outputs and sinks in the storage type, log-sum-exps and sums in f32.

use super::Sinks;
use crate::cuda::launch::{THREADS, constant, long, pack};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for heads of these dimensions, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, of: &Sinks, pack: usize) -> Module {
    let constants = vec![
        ("HEADS", constant(of.heads)),
        ("QUERIES", constant(of.queries)),
        ("WIDTH", constant(of.width)),
    ];
    Module::new("sinks", storage, pack, THREADS, constants)
}

/// Corrects `out` and computes `new`. Shapes: [`super`].
///
/// # Errors
/// If the device fails; the same holds for the function below.
///
/// # Panics
/// If a view has the wrong length.
pub fn apply<S: Stored>(
    gpu: &Gpu,
    of: &Sinks,
    sinks: View<'_, S>,
    lse: View<'_, f32>,
    new: ViewMut<'_, f32>,
    out: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    of.check(sinks.len(), lse.len(), new.len(), out.len());
    let elements = out.len();
    if elements == 0 {
        return Ok(());
    }
    let pack = pack(S::STORAGE, of.width, &[(out.address(), size_of::<S>())]);
    let module = module(S::STORAGE, of, pack);
    let tensors = [sinks.argument(), lse.argument(), new.argument(), out.argument()];
    let arguments = tensors.into_iter().chain([long(elements)]).collect();
    gpu.launch(&module.over(elements, "sinks_apply", arguments))
}

/// Turns each row's product of `dout` and `out` into its part of the gradient. Shapes: [`super`].
///
/// # Errors
/// As [`apply`].
///
/// # Panics
/// As [`apply`].
pub fn gradient<S: Stored>(
    gpu: &Gpu,
    of: &Sinks,
    sinks: View<'_, S>,
    new: View<'_, f32>,
    by_row: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    of.check_gradient(sinks.len(), new.len(), by_row.len());
    let rows = by_row.len();
    if rows == 0 {
        return Ok(());
    }
    let module = module(S::STORAGE, of, 1);
    let tensors = [sinks.argument(), new.argument(), by_row.argument()];
    let arguments = tensors.into_iter().chain([long(rows)]).collect();
    gpu.launch(&module.over(rows, "sinks_gradient", arguments))
}

/// Lower bound on the work of [`apply`].
#[must_use]
pub fn apply_floor(of: &Sinks, storage: Storage) -> Floor {
    Floor::bytes(of.rows() * (2 * of.width * storage.bytes() + 8))
}

/// Lower bound on the work of [`gradient`].
#[must_use]
pub fn gradient_floor(of: &Sinks) -> Floor {
    Floor::bytes(of.rows() * 12)
}
