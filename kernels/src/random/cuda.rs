//! Random numbers on a GPU: the CPU's draws, in f32.

use super::{GlobalIndices, Stream};
use crate::cuda::launch::{THREADS, blocks, long};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, ViewMut};

/// The module.
#[must_use]
pub fn module() -> Module {
    Module::new("random", Storage::F32, 1, THREADS, vec![])
}

/// Normal numbers with mean 0 and standard deviation `std` by global index. They are the CPU's up
/// to the last bit of the device's logarithm, sine and cosine.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If the lengths of `out` and the view differ.
pub fn fill_normal(
    gpu: &Gpu,
    out: ViewMut<'_, f32>,
    view: &GlobalIndices,
    stream: Stream,
    std: f64,
) -> Result<(), GpuError> {
    crate::check::length("out", out.len(), view.len());
    let module = module();
    let [_, middle, columns] = view.sizes;
    let [stride0, stride1, stride2] = view.strides.map(Argument::U64);
    let arguments = vec![
        out.argument(),
        long(view.len()),
        long(middle),
        long(columns),
        view.offset.into(),
        stride0,
        stride1,
        stride2,
        stream.seed.into(),
        stream.tensor.into(),
        stream.step.into(),
        Argument::F64(std),
    ];
    let grid = [blocks(view.len(), module.threads()), 1];
    gpu.launch(&module.launch("random_normal", grid, arguments))
}

/// Lower bound on the work of [`fill_normal`].
#[must_use]
pub fn floor(elements: usize) -> Floor {
    Floor::bytes(4 * elements)
}
