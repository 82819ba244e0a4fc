//! Softmax cross-entropy on a GPU: logits in the storage type, numbers per row in f32. The softmax
//! is never stored.

use super::Logits;
use crate::cuda::launch::{THREADS, blocks, constant, int, pack};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for rows of this width, moved in packs of `pack` elements.
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

/// The module of kernels over numbers per row, which do not depend on the columns.
fn module_of_rows() -> Module {
    module(Storage::F32, &Logits::whole(0, 1), 1)
}

#[allow(clippy::cast_possible_wrap)]
fn range(shape: &Logits) -> [Argument; 2] {
    [Argument::I64(shape.first_column as i64), int(shape.real_columns)]
}

/// `max[rows]` over the real columns; minus infinity if there are none.
///
/// # Errors
/// If the device fails; the same holds for the functions below.
///
/// # Panics
/// If a view has the wrong length; the same holds for the functions below.
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

/// `sum_exp[rows]` relative to `max`, and `target_logit[rows]`, 0 if the target is not on this
/// shard.
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
    let max = (max.len(), max.argument());
    let arguments = statistics_arguments(shape, logits, targets, max, sum_exp, target_logit);
    let module = module_of::<S>(shape, logits.address());
    gpu.launch(&module.launch("cross_entropy_sum_exp", [shape.rows, 1], arguments))
}

/// [`local_max`] and [`local_sum_exp`] relative to it, reading the logits once.
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
    let max = (max.len(), max.argument());
    let arguments = statistics_arguments(shape, logits, targets, max, sum_exp, target_logit);
    let module = module_of::<S>(shape, logits.address());
    gpu.launch(&module.launch("cross_entropy_statistics", [shape.rows, 1], arguments))
}

/// Arguments of both kernels. One of them reads `max` and the other writes it.
#[track_caller]
fn statistics_arguments<S: Stored>(
    shape: &Logits,
    logits: View<'_, S>,
    targets: View<'_, i64>,
    (max_len, max): (usize, Argument),
    sum_exp: ViewMut<'_, f32>,
    target_logit: ViewMut<'_, f32>,
) -> Vec<Argument> {
    let per_row = [
        ("targets", targets.len()),
        ("max", max_len),
        ("sum_exp", sum_exp.len()),
        ("target_logit", target_logit.len()),
    ];
    shape.check(logits.len(), &per_row);
    let [first, real] = range(shape);
    let (sum_exp, target_logit) = (sum_exp.argument(), target_logit.argument());
    vec![logits.argument(), targets.argument(), max, sum_exp, target_logit, first, real]
}

/// Converts sums relative to a shard's own maximum to sums relative to the global one.
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

/// Replaces the logits by `scale` times the gradient of each row's loss. Here and below,
/// [`crate::cuda::OF_STEP`] means the scale in the step numbers.
///
/// # Errors
/// As [`local_max`].
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
    let [factor_of_loss, numbers] = gpu.loss_factor(scale);
    let arguments = vec![
        logits.argument(),
        targets.argument(),
        max.argument(),
        sum_exp.argument(),
        factor_of_loss,
        numbers,
        first,
        real,
    ];
    let rows = if shape.columns == 0 { 0 } else { shape.rows };
    gpu.launch(&module.launch("cross_entropy_gradient", [rows, 1], arguments))
}

/// Multiplies `rows[rows, columns]` by the slope of the cap at each row's target, given the
/// target's capped logit.
///
/// # Errors
/// As [`local_max`].
pub fn scale_by_slope<S: Stored>(
    gpu: &Gpu,
    soft_cap: Option<f64>,
    target_logit: View<'_, f32>,
    rows: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    let columns = super::columns_of("rows", rows.len(), target_logit.len());
    if soft_cap.is_none() || columns == 0 {
        return Ok(());
    }
    let shape = Logits { soft_cap, ..Logits::whole(target_logit.len(), columns) };
    let module = module_of::<S>(&shape, rows.address());
    let arguments = vec![target_logit.argument(), rows.argument()];
    gpu.launch(&module.launch("cross_entropy_scale_by_slope", [shape.rows, 1], arguments))
}

/// Turns a shard's softmax relative to its own maximum into the gradient of its logits, as on the
/// CPU ([`super::softmax_to_gradient`]).
///
/// # Errors
/// As [`local_max`].
pub fn softmax_to_gradient<S: Stored>(
    gpu: &Gpu,
    shape: &Logits,
    softmax: ViewMut<'_, S>,
    targets: View<'_, i64>,
    factor: View<'_, f32>,
    target_logit: View<'_, f32>,
    scale: f64,
) -> Result<(), GpuError> {
    let per_row = [
        ("targets", targets.len()),
        ("factor", factor.len()),
        ("target_logit", target_logit.len()),
    ];
    shape.check(softmax.len(), &per_row);
    let module = module_of::<S>(shape, softmax.address());
    let [first, real] = range(shape);
    let [factor_of_loss, numbers] = gpu.loss_factor(scale);
    let arguments = vec![
        softmax.argument(),
        targets.argument(),
        factor.argument(),
        target_logit.argument(),
        factor_of_loss,
        numbers,
        first,
        real,
    ];
    let rows = if shape.columns == 0 { 0 } else { shape.rows };
    gpu.launch(&module.launch("cross_entropy_softmax_to_gradient", [rows, 1], arguments))
}

/// `weighted = scale (factor weighted - hits)`, row by row.
///
/// # Errors
/// As [`local_max`].
pub fn join_gradient<S: Stored>(
    gpu: &Gpu,
    weighted: ViewMut<'_, S>,
    hits: View<'_, S>,
    factor: View<'_, f32>,
    scale: f64,
) -> Result<(), GpuError> {
    let (rows, columns) =
        (factor.len(), super::columns_of("weighted", weighted.len(), factor.len()));
    crate::check::length("hits", hits.len(), weighted.len());
    if columns == 0 {
        return Ok(());
    }
    let tensors = [weighted.address(), hits.address()].map(|at| (at, size_of::<S>()));
    let shape = Logits::whole(rows, columns);
    let module = module(S::STORAGE, &shape, pack(S::STORAGE, columns, &tensors));
    let [factor_of_loss, numbers] = gpu.loss_factor(scale);
    let read = [hits.argument(), factor.argument(), factor_of_loss, numbers];
    let arguments = [&[weighted.argument()], &read[..]].concat();
    gpu.launch(&module.launch("cross_entropy_join_gradient", [rows, 1], arguments))
}

/// Lower bound on the work of [`local_max`], [`local_sum_exp`] or [`statistics`]: reading the
/// logits once.
#[must_use]
pub fn read_floor(shape: &Logits, storage: Storage) -> Floor {
    Floor::bytes(shape.rows * (shape.real_columns * storage.bytes() + 20))
}

/// Lower bound on the work of [`gradient_in_place`].
#[must_use]
pub fn gradient_floor(shape: &Logits, storage: Storage) -> Floor {
    Floor::bytes(shape.rows * (2 * shape.columns * storage.bytes() + 16))
}

/// Lower bound on the work of [`softmax_to_gradient`].
#[must_use]
pub fn softmax_to_gradient_floor(shape: &Logits, storage: Storage) -> Floor {
    Floor::bytes(shape.rows * (2 * shape.columns * storage.bytes() + 16))
}

/// Lower bound on the work of [`scale_by_slope`] for rows of `columns`, if there is a cap.
#[must_use]
pub fn scale_by_slope_floor(rows: usize, columns: usize, storage: Storage) -> Floor {
    Floor::bytes(rows * (2 * columns * storage.bytes() + 4))
}

/// Lower bound on the work of [`join_gradient`] for rows of `columns`.
#[must_use]
pub fn join_gradient_floor(rows: usize, columns: usize, storage: Storage) -> Floor {
    Floor::bytes(rows * (3 * columns * storage.bytes() + 4))
}
