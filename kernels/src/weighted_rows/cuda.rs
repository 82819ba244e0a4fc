//! Rows with one weight each on a GPU: rows in the storage type, weights f32.

use super::columns;
use crate::cuda::launch::{constant, pack, row_threads};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for rows of this width, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, columns: usize, pack: usize) -> Module {
    let constants = vec![("COLUMNS", constant(columns))];
    Module::new("weighted_rows", storage, pack, row_threads(columns, pack), constants)
}

fn module_of<S: Stored>(columns: usize, tensors: [u64; 2]) -> Module {
    let tensors = tensors.map(|at| (at, size_of::<S>()));
    module(S::STORAGE, columns, pack(S::STORAGE, columns, &tensors))
}

/// `y_ij = w_i x_ij`
///
/// # Errors
/// If the device fails; the same holds for the function below.
///
/// # Panics
/// If `x` has not one row for each weight, or `y` has another length.
pub fn scale<S: Stored>(
    gpu: &Gpu,
    w: View<'_, f32>,
    x: View<'_, S>,
    y: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    let columns = columns(x.len(), w.len());
    crate::check::length("y", y.len(), x.len());
    if columns == 0 {
        return Ok(());
    }
    let module = module_of::<S>(columns, [x.address(), y.address()]);
    let arguments = vec![w.argument(), x.argument(), y.argument()];
    gpu.launch(&module.launch("weighted_rows_scale", [w.len(), 1], arguments))
}

/// `w_i = sum over j of x_ij y_ij`
///
/// # Errors
/// As [`scale`].
///
/// # Panics
/// As [`scale`].
pub fn dot<S: Stored>(
    gpu: &Gpu,
    x: View<'_, S>,
    y: View<'_, S>,
    w: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let (rows, columns) = (w.len(), columns(x.len(), w.len()));
    crate::check::length("y", y.len(), x.len());
    if columns == 0 {
        return Ok(());
    }
    let module = module_of::<S>(columns, [x.address(), y.address()]);
    let arguments = vec![x.argument(), y.argument(), w.argument()];
    gpu.launch(&module.launch("weighted_rows_dot", [rows, 1], arguments))
}

/// Lower bound on the work of [`scale`] and of [`dot`].
#[must_use]
pub fn floor(rows: usize, columns: usize, storage: Storage) -> Floor {
    Floor::bytes(rows * (2 * columns * storage.bytes() + 4))
}
