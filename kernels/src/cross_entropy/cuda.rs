//! Softmax cross-entropy on a GPU: logits in the storage type, all that is per row f32. The softmax is never stored.

use super::Logits;
use crate::cuda::launch::{THREADS, blocks, constant, int, pack};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// What is compiled for rows of these columns, moved in packs of `pack`.
#[must_use]
pub fn module(storage: Storage, shape: &Logits, pack: usize) -> Module {
    let soft_cap = shape.soft_cap.unwrap_or(0.0);
    let constants = vec![("COLUMNS", constant(shape.columns)), ("SOFT_CAP", soft_cap)];
    let threads = if shape.columns > 8192 { 2 * THREADS } else { THREADS };
    Module::new("cross_entropy", storage, pack, threads, constants)
}

fn module_of<S: Stored>(shape: &Logits, logits: u64) -> Module {
    module(S::STORAGE, shape, pack(S::STORAGE, shape.columns, &[(logits, size_of::<S>())]))
}

/// Of what is per row and knows no columns.
fn module_of_rows() -> Module {
    module(Storage::F32, &Logits::whole(0, 1), 1)
}

#[allow(clippy::cast_possible_wrap)]
fn range(shape: &Logits) -> [Argument; 2] {
    [Argument::I64(shape.first_column as i64), int(shape.real_columns)]
}

/// `max[rows]` over the real columns, minus infinity where there are none.
///
/// # Errors
/// Where the device fails; so everywhere here.
///
/// # Panics
/// Where a view has the wrong length; so everywhere here.
pub fn local_max<S: Stored>(
    gpu: &Gpu,
    shape: &Logits,
    logits: View<'_, S>,
    max: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    shape.check(logits.len(), &[("max", max.len())]);
    let module = module_of::<S>(shape, logits.address());
    let arguments = vec![logits.argument(), max.argument(), int(shape.real_columns)];
    gpu.launch(&module.launch("cross_entropy_max", [shape.rows, 1], arguments))
}

/// `sum_exp[rows]` around `max`, and `target_logit[rows]`, 0 where the target is not on this shard.
///
/// # Errors
/// As [`local_max`].
pub fn local_sum_exp<S: Stored>(
    gpu: &Gpu,
    shape: &Logits,
    logits: View<'_, S>,
    targets: View<'_, i64>,
    max: View<'_, f32>,
    sum_exp: ViewMut<'_, f32>,
    target_logit: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let per_row = [("targets", targets.len()), ("max", max.len()), ("sum_exp", sum_exp.len())];
    shape.check(logits.len(), &per_row);
    shape.check(logits.len(), &[("target_logit", target_logit.len())]);
    let module = module_of::<S>(shape, logits.address());
    let [first, real] = range(shape);
    let arguments = vec![
        logits.argument(),
        targets.argument(),
        max.argument(),
        sum_exp.argument(),
        target_logit.argument(),
        first,
        real,
    ];
    gpu.launch(&module.launch("cross_entropy_sum_exp", [shape.rows, 1], arguments))
}

/// [`local_max`] and [`local_sum_exp`] around it, with one reading of the logits.
///
/// # Errors
/// As [`local_max`].
pub fn statistics<S: Stored>(
    gpu: &Gpu,
    shape: &Logits,
    logits: View<'_, S>,
    targets: View<'_, i64>,
    max: ViewMut<'_, f32>,
    sum_exp: ViewMut<'_, f32>,
    target_logit: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let per_row = [("targets", targets.len()), ("max", max.len()), ("sum_exp", sum_exp.len())];
    shape.check(logits.len(), &per_row);
    shape.check(logits.len(), &[("target_logit", target_logit.len())]);
    let module = module_of::<S>(shape, logits.address());
    let [first, real] = range(shape);
    let arguments = vec![
        logits.argument(),
        targets.argument(),
        max.argument(),
        sum_exp.argument(),
        target_logit.argument(),
        first,
        real,
    ];
    gpu.launch(&module.launch("cross_entropy_statistics", [shape.rows, 1], arguments))
}

/// From sums around a shard's own maximum to sums around the common one.
///
/// # Errors
/// As [`local_max`].
pub fn rescale_sum_exp(
    gpu: &Gpu,
    local_max: View<'_, f32>,
    max: View<'_, f32>,
    sum_exp: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let rows = local_max.len();
    crate::check::length("max", max.len(), rows);
    crate::check::length("sum_exp", sum_exp.len(), rows);
    let module = module_of_rows();
    let grid = [blocks(rows, module.threads()), 1];
    let arguments = vec![local_max.argument(), max.argument(), sum_exp.argument(), int(rows)];
    gpu.launch(&module.launch("cross_entropy_rescale", grid, arguments))
}

/// `loss[rows] = ln sum_exp + max - target_logit`, 0 where the target is [`super::IGNORED`].
///
/// # Errors
/// As [`local_max`].
pub fn loss(
    gpu: &Gpu,
    targets: View<'_, i64>,
    max: View<'_, f32>,
    sum_exp: View<'_, f32>,
    target_logit: View<'_, f32>,
    loss: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let rows = targets.len();
    let lengths = [
        ("max", max.len()),
        ("sum_exp", sum_exp.len()),
        ("target_logit", target_logit.len()),
        ("loss", loss.len()),
    ];
    for (name, got) in lengths {
        crate::check::length(name, got, rows);
    }
    let module = module_of_rows();
    let grid = [blocks(rows, module.threads()), 1];
    let arguments = vec![
        targets.argument(),
        max.argument(),
        sum_exp.argument(),
        target_logit.argument(),
        loss.argument(),
        int(rows),
    ];
    gpu.launch(&module.launch("cross_entropy_loss", grid, arguments))
}

/// Replaces the logits by `scale` times the gradient of each row's loss.
///
/// # Errors
/// As [`local_max`].
#[allow(clippy::cast_possible_truncation)] // a factor
pub fn gradient_in_place<S: Stored>(
    gpu: &Gpu,
    shape: &Logits,
    logits: ViewMut<'_, S>,
    targets: View<'_, i64>,
    max: View<'_, f32>,
    sum_exp: View<'_, f32>,
    scale: f64,
) -> Result<(), GpuError> {
    let per_row = [("targets", targets.len()), ("max", max.len()), ("sum_exp", sum_exp.len())];
    shape.check(logits.len(), &per_row);
    let module = module_of::<S>(shape, logits.address());
    let [first, real] = range(shape);
    let arguments = vec![
        logits.argument(),
        targets.argument(),
        max.argument(),
        sum_exp.argument(),
        Argument::F32(scale as f32),
        first,
        real,
    ];
    let rows = if shape.columns == 0 { 0 } else { shape.rows };
    gpu.launch(&module.launch("cross_entropy_gradient", [rows, 1], arguments))
}

/// The least that [`local_max`], [`local_sum_exp`] or [`statistics`] has to do: one reading of the logits.
#[must_use]
pub fn read_floor(shape: &Logits, storage: Storage) -> Floor {
    Floor::bytes(shape.rows * (shape.real_columns * storage.bytes() + 20))
}

/// The least that [`gradient_in_place`] has to do.
#[must_use]
pub fn gradient_floor(shape: &Logits, storage: Storage) -> Floor {
    Floor::bytes(shape.rows * (2 * shape.columns * storage.bytes() + 16))
}
