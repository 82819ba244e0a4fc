//! Sums, scalings and biases on a GPU. Tensors are in the storage type; gradients of biases,
//! gradients summed over micro-batches and master weights are f32.

use super::check_rows;
use crate::Output;
use crate::cuda::launch::{ColumnSum, THREADS, blocks, constant, int, long, pack};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for rows of `columns` (of tensors with a bias), moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, columns: usize, pack: usize) -> Module {
    Module::new("elementwise", storage, pack, THREADS, vec![("COLUMNS", constant(columns))])
}

fn module_of<S: Stored>(row: usize, tensors: &[(u64, usize)]) -> Module {
    module(S::STORAGE, 1, pack(S::STORAGE, row, tensors))
}

/// `y = a + b`.
///
/// # Errors
/// If the device fails; the same holds for the functions below.
///
/// # Panics
/// If lengths differ; the same holds for the functions below.
pub fn add<S: Stored>(
    gpu: &Gpu,
    a: View<'_, S>,
    b: View<'_, S>,
    y: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length("b", b.len(), a.len());
    crate::check::length("y", y.len(), a.len());
    let tensors = [a.address(), b.address(), y.address()].map(|at| (at, size_of::<S>()));
    let arguments = vec![a.argument(), b.argument(), y.argument(), long(a.len())];
    gpu.launch(&module_of::<S>(a.len(), &tensors).over(a.len(), "elementwise_add", arguments))
}

/// `y += factor x`.
///
/// # Errors
/// As [`add`].
pub fn axpy<S: Stored>(
    gpu: &Gpu,
    factor: f32,
    x: View<'_, S>,
    y: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length("y", y.len(), x.len());
    let tensors = [x.address(), y.address()].map(|at| (at, size_of::<S>()));
    let arguments = vec![factor.into(), x.argument(), y.argument(), long(x.len())];
    gpu.launch(&module_of::<S>(x.len(), &tensors).over(x.len(), "elementwise_axpy", arguments))
}

/// `x *= factor`.
///
/// # Errors
/// As [`add`].
pub fn scale<S: Stored>(gpu: &Gpu, factor: f32, x: ViewMut<'_, S>) -> Result<(), GpuError> {
    let module = module_of::<S>(x.len(), &[(x.address(), size_of::<S>())]);
    let elements = x.len();
    let arguments = vec![factor.into(), x.argument(), long(elements)];
    gpu.launch(&module.over(elements, "elementwise_scale", arguments))
}

/// `y = max(x, y)`, element by element; `y` stays if either is NaN.
///
/// # Errors
/// As [`add`].
pub fn maximum<S: Stored>(gpu: &Gpu, x: View<'_, S>, y: ViewMut<'_, S>) -> Result<(), GpuError> {
    in_place(gpu, "elementwise_maximum", "y", x, y)
}

/// `x /= by`.
///
/// # Errors
/// As [`add`].
pub fn divide<S: Stored>(gpu: &Gpu, by: View<'_, S>, x: ViewMut<'_, S>) -> Result<(), GpuError> {
    in_place(gpu, "elementwise_divide", "x", by, x)
}

/// Launches a kernel that reads one tensor and updates another of the same length.
#[track_caller]
fn in_place<S: Stored>(
    gpu: &Gpu,
    kernel: &'static str,
    name: &str,
    read: View<'_, S>,
    changed: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length(name, changed.len(), read.len());
    let tensors = [read.address(), changed.address()].map(|at| (at, size_of::<S>()));
    let arguments = vec![read.argument(), changed.argument(), long(read.len())];
    gpu.launch(&module_of::<S>(read.len(), &tensors).over(read.len(), kernel, arguments))
}

/// `x[rows, columns] += bias[columns]`, for as many rows as `x` has.
///
/// # Errors
/// As [`add`].
///
/// # Panics
/// If the length of `x` is not a multiple of a row's.
pub fn add_bias<S: Stored>(
    gpu: &Gpu,
    bias: View<'_, S>,
    x: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    check_rows("x", x.len(), bias.len());
    let tensors = [bias.address(), x.address()].map(|at| (at, size_of::<S>()));
    let module = module(S::STORAGE, bias.len(), pack(S::STORAGE, bias.len(), &tensors));
    let elements = x.len();
    let arguments = vec![bias.argument(), x.argument(), long(elements)];
    gpu.launch(&module.over(elements, "elementwise_add_bias", arguments))
}

/// `dbias[columns] +=` the column sums of `dy`.
///
/// # Errors
/// As [`add`].
///
/// # Panics
/// If the length of `dy` is not a multiple of a row's.
pub fn bias_gradient<S: Stored>(
    gpu: &Gpu,
    dy: View<'_, S>,
    dbias: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let columns = dbias.len();
    check_rows("dy", dy.len(), columns);
    if dy.is_empty() {
        return Ok(());
    }
    let rows = dy.len() / columns;
    let pack = pack(S::STORAGE, columns, &[(dy.address(), size_of::<S>())]);
    let module = module(S::STORAGE, columns, pack);
    let ColumnSum { grid, parts, total } = ColumnSum::new(rows, columns, pack);
    let partial = gpu.memory::<f32>(parts * columns)?;
    let partial = partial.view();
    let arguments = vec![dy.argument(), partial.argument(), int(rows)];
    gpu.launch(&module.launch("elementwise_column_partials", grid, arguments).following())?;
    let arguments = vec![partial.argument(), dbias.argument(), int(parts)];
    gpu.launch(&module.launch("elementwise_column_sum", total, arguments).following())
}

/// `sum += x`: adds a micro-batch's gradient to the f32 sum.
///
/// # Errors
/// As [`add`].
pub fn accumulate<S: Stored>(
    gpu: &Gpu,
    x: View<'_, S>,
    sum: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    crate::check::length("sum", sum.len(), x.len());
    let tensors = [(x.address(), size_of::<S>()), (sum.address(), 4)];
    let arguments = vec![x.argument(), sum.argument(), long(x.len())];
    let module = module_of::<S>(x.len(), &tensors);
    gpu.launch(&module.over(x.len(), "elementwise_accumulate", arguments))
}

/// `to = x`, rounded: weights from master weights.
///
/// # Errors
/// As [`add`].
pub fn narrow<S: Stored>(gpu: &Gpu, x: View<'_, f32>, to: ViewMut<'_, S>) -> Result<(), GpuError> {
    crate::check::length("to", to.len(), x.len());
    let tensors = [(x.address(), 4), (to.address(), size_of::<S>())];
    let arguments = vec![x.argument(), to.argument(), long(x.len())];
    let module = module_of::<S>(x.len(), &tensors);
    gpu.launch(&module.over(x.len(), "elementwise_narrow", arguments))
}

/// `to = x`.
///
/// # Errors
/// As [`add`].
pub fn widen<S: Stored>(gpu: &Gpu, x: View<'_, S>, to: ViewMut<'_, f32>) -> Result<(), GpuError> {
    crate::check::length("to", to.len(), x.len());
    let tensors = [(x.address(), size_of::<S>()), (to.address(), 4)];
    let arguments = vec![x.argument(), to.argument(), long(x.len())];
    let module = module_of::<S>(x.len(), &tensors);
    gpu.launch(&module.over(x.len(), "elementwise_widen", arguments))
}

/// The sum of all elements, in f64. Waits for the device; [`sum_into`] does not.
///
/// # Errors
/// As [`add`].
pub fn sum<S: Stored>(gpu: &Gpu, x: View<'_, S>) -> Result<f64, GpuError> {
    let mut total = gpu.memory::<f64>(1)?;
    sum_into(gpu, x, total.view_mut(), Output::Overwrite)?;
    let mut value = [0.0];
    gpu.copy_out(total.view(), &mut value)?;
    Ok(value[0])
}

/// The sum of squares of all elements, in f64. Waits for the device; [`sum_of_squares_into`] does
/// not.
///
/// # Errors
/// As [`add`].
pub fn sum_of_squares<S: Stored>(gpu: &Gpu, x: View<'_, S>) -> Result<f64, GpuError> {
    let mut total = gpu.memory::<f64>(1)?;
    sum_of_squares_into(gpu, x, total.view_mut(), Output::Overwrite)?;
    let mut value = [0.0];
    gpu.copy_out(total.view(), &mut value)?;
    Ok(value[0])
}

/// Writes the sum of all elements to `total[1]` on the device.
///
/// # Errors
/// As [`add`].
pub fn sum_into<S: Stored>(
    gpu: &Gpu,
    x: View<'_, S>,
    total: ViewMut<'_, f64>,
    output: Output,
) -> Result<(), GpuError> {
    reduce(gpu, "elementwise_sum", x, total, output)
}

/// Writes the sum of squares of all elements to `total[1]` on the device, so that a norm over many
/// tensors needs one copy to the host.
///
/// # Errors
/// As [`add`].
pub fn sum_of_squares_into<S: Stored>(
    gpu: &Gpu,
    x: View<'_, S>,
    total: ViewMut<'_, f64>,
    output: Output,
) -> Result<(), GpuError> {
    reduce(gpu, "elementwise_squares", x, total, output)
}

/// Number of blocks of a sum. It depends on the length alone, so the bits do too.
fn sum_blocks(elements: usize, module: &Module) -> usize {
    blocks(elements, 8 * module.threads() * module.constants().pack).clamp(1, 1024)
}

fn reduce<S: Stored>(
    gpu: &Gpu,
    kernel: &'static str,
    x: View<'_, S>,
    total: ViewMut<'_, f64>,
    output: Output,
) -> Result<(), GpuError> {
    crate::check::length("total", total.len(), 1);
    let module = module_of::<S>(x.len(), &[(x.address(), size_of::<S>())]);
    let parts = sum_blocks(x.len(), &module);
    let partial = gpu.memory::<f64>(parts)?;
    let partial = partial.view();
    let arguments = vec![x.argument(), partial.argument(), long(x.len())];
    gpu.launch(&module.launch(kernel, [parts, 1], arguments))?;
    let arguments: Vec<Argument> =
        vec![partial.argument(), total.argument(), int(parts), output.into()];
    gpu.launch(&module.launch("elementwise_total", [1, 1], arguments))
}

/// Lower bound on the work of a function that reads and writes this many tensors of `elements`,
/// each in its storage type.
#[must_use]
pub fn floor(elements: usize, tensors: &[Storage]) -> Floor {
    Floor::bytes(tensors.iter().map(|storage| elements * storage.bytes()).sum())
}
