//! Random numbers on a GPU: the processor's draws, in f32.

use super::{GlobalIndices, Stream};
use crate::cuda::launch::{THREADS, blocks, long};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, ViewMut};

/// What is compiled.
#[must_use]
pub fn module() -> Module {
    Module::new("random", Storage::F32, 1, THREADS, vec![])
}

/// Normal numbers with mean 0 and standard deviation `std` by global index: the processor's, but for the last bit of what
/// the device's logarithm, sine and cosine make of the same integers.
///
/// # Errors
/// Where the device fails.
///
/// # Panics
/// Where `out` has not as many elements as the view.
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

/// The least that [`fill_normal`] has to do.
#[must_use]
pub fn floor(elements: usize) -> Floor {
    Floor::bytes(4 * elements)
}
