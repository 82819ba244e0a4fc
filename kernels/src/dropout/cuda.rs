//! Dropout on a GPU: both tensors in the storage type, the CPU's draws.

use super::Dropout;
use crate::cuda::launch::{THREADS, long, pack};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};
use crate::random;

/// The module, for packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, pack: usize) -> Module {
    Module::new("dropout", storage, pack, THREADS, vec![])
}

/// `y = x mask / (1 - p)`; the backward pass is the same with `dy` for `x` and `dx` for `y`.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If the length of `x` or `y` differs from the view's, or `p` is outside `[0, 1)`.
#[allow(clippy::cast_possible_truncation)] // a factor
pub fn apply<S: Stored>(
    gpu: &Gpu,
    dropout: &Dropout,
    view: &random::GlobalIndices,
    x: View<'_, S>,
    y: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length("x", x.len(), view.len());
    crate::check::length("y", y.len(), view.len());
    let tensors = [x.address(), y.address()].map(|at| (at, size_of::<S>()));
    let [_, middle, columns] = view.sizes;
    let module = module(S::STORAGE, pack(S::STORAGE, columns, &tensors));
    let [stride0, stride1, stride2] = view.strides.map(Argument::U64);
    let arguments = vec![
        x.argument(),
        y.argument(),
        long(view.len()),
        long(middle),
        long(columns),
        view.offset.into(),
        stride0,
        stride1,
        stride2,
        dropout.stream.seed.into(),
        dropout.stream.tensor.into(),
        dropout.stream.step.into(),
        gpu.step_numbers(),
        dropout.threshold().into(),
        Argument::F32(dropout.scale() as f32),
    ];
    gpu.launch(&module.over(view.len(), "dropout_apply", arguments))
}

/// Lower bound on the work of [`apply`].
#[must_use]
pub fn floor(elements: usize, storage: Storage) -> Floor {
    Floor::bytes(2 * elements * storage.bytes())
}
