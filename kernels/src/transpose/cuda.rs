//! The transpose on a GPU.

use crate::cuda::launch::{THREADS, blocks, long, pack};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// Rows and columns of a tile of single elements.
const TILE: usize = 32;

/// The module, for packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, pack: usize) -> Module {
    Module::new("transpose", storage, pack, THREADS, vec![])
}

/// `y[j, i, l] = x[i, j, l]` for `x` of `[a, b, inner]`.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If a view does not have `a b inner` elements.
pub fn swap_leading<S: Stored>(
    gpu: &Gpu,
    [a, b, inner]: [usize; 3],
    x: View<'_, S>,
    y: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length("x", x.len(), a * b * inner);
    crate::check::length("y", y.len(), a * b * inner);
    if inner == 1 {
        let module = module(S::STORAGE, 1);
        let tiles = blocks(b, TILE) * blocks(a, TILE);
        let arguments = vec![x.argument(), y.argument(), long(a), long(b)];
        return gpu.launch(&module.launch("transpose_matrix", [tiles, 1], arguments));
    }
    let tensors = [(x.address(), size_of::<S>()), (y.address(), size_of::<S>())];
    let module = module(S::STORAGE, pack(S::STORAGE, inner, &tensors));
    let arguments = vec![x.argument(), y.argument(), long(a), long(b), long(inner)];
    gpu.launch(&module.over(x.len(), "transpose_rows", arguments))
}

/// Lower bound on the work of [`swap_leading`].
#[must_use]
pub fn floor(elements: usize, storage: Storage) -> Floor {
    Floor::bytes(2 * elements * storage.bytes())
}
