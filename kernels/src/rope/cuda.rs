//! Rotary embedding on a GPU: `x` in the storage type, positions as on the CPU, the table in f32.

use super::{Pairing, Rope};
use crate::cuda::launch::{THREADS, blocks, constant, long, pack};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for heads whose tokens are `token_stride` elements apart, moved in packs of `pack`
/// elements.
#[must_use]
pub fn module(storage: Storage, rope: &Rope, token_stride: usize, pack: usize) -> Module {
    let interleaved = f64::from(u8::from(rope.pairing == Pairing::Interleaved));
    let constants = vec![
        ("HEADS", constant(rope.heads)),
        ("HEAD_DIM", constant(rope.head_dim)),
        ("ROTARY_START", constant(rope.rotary_start)),
        ("ROTARY_DIM", constant(rope.rotary_dim)),
        ("INTERLEAVED", interleaved),
        ("TOKEN_STRIDE", constant(token_stride)),
    ];
    Module::new("rope", storage, pack, THREADS, constants)
}

/// The pack size: a divisor of half the rotated dimensions that keeps to the alignment.
fn pack_of<S: Stored>(rope: &Rope, token_stride: usize, x: u64, table: u64) -> usize {
    let starts = [rope.rotary_dim / 2, rope.rotary_start, rope.head_dim, token_stride];
    let row = starts.into_iter().fold(0, gcd);
    pack(S::STORAGE, row, &[(x, size_of::<S>()), (table, size_of::<f32>())])
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Fills `table[tokens, 2, frequencies]` with the cosines and the sines of `position frequency`,
/// computed in f64.
///
/// # Errors
/// If the device fails; the same holds for the functions below.
///
/// # Panics
/// If `table` does not have `2 positions frequencies` elements.
pub fn fill_table(
    gpu: &Gpu,
    inverse_frequencies: &[f64],
    positions: View<'_, u32>,
    table: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    let frequencies = inverse_frequencies.len();
    crate::check::length("table", table.len(), 2 * positions.len() * frequencies);
    let rope = Rope::half(positions.len(), 1, 2 * frequencies);
    let module = module(Storage::F32, &rope, rope.head_dim, 1);
    let inverse_frequencies = gpu.upload(inverse_frequencies)?;
    let arguments = vec![
        inverse_frequencies.view().argument(),
        positions.argument(),
        table.argument(),
        long(positions.len()),
    ];
    let angles = positions.len() * frequencies;
    let grid = [blocks(angles, module.threads()), 1];
    gpu.launch(&module.launch("rope_table", grid, arguments))
}

/// Rotates `x` in place. Shapes: [`super`].
///
/// # Errors
/// As [`fill_table`].
///
/// # Panics
/// If a view has the wrong length, or the rotated part does not fit a head or is odd.
pub fn forward<S: Stored>(
    gpu: &Gpu,
    rope: &Rope,
    table: View<'_, f32>,
    x: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    rope.check(x.len(), table.len());
    rotate(gpu, rope, rope.heads * rope.head_dim, table, x, 1.0)
}

/// Rotates the gradient `dx` back, in place. Shapes: [`super`].
///
/// # Errors
/// As [`fill_table`].
///
/// # Panics
/// As [`forward`].
pub fn backward<S: Stored>(
    gpu: &Gpu,
    rope: &Rope,
    table: View<'_, f32>,
    dx: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    rope.check(dx.len(), table.len());
    rotate(gpu, rope, rope.heads * rope.head_dim, table, dx, -1.0)
}

/// [`forward`] on the first `heads` heads of each row of a packed tensor `[tokens, token_stride]`:
/// one launch for queries and keys, which are adjacent in a fused projection.
///
/// # Errors
/// As [`fill_table`].
///
/// # Panics
/// As [`forward`], and if the heads do not fit a row.
pub fn forward_packed<S: Stored>(
    gpu: &Gpu,
    rope: &Rope,
    token_stride: usize,
    table: View<'_, f32>,
    x: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    check_packed(rope, token_stride, x.len(), table.len());
    rotate(gpu, rope, token_stride, table, x, 1.0)
}

/// [`backward`] on the first `heads` heads of each row of a packed gradient.
///
/// # Errors
/// As [`fill_table`].
///
/// # Panics
/// As [`forward_packed`].
pub fn backward_packed<S: Stored>(
    gpu: &Gpu,
    rope: &Rope,
    token_stride: usize,
    table: View<'_, f32>,
    dx: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    check_packed(rope, token_stride, dx.len(), table.len());
    rotate(gpu, rope, token_stride, table, dx, -1.0)
}

#[track_caller]
fn check_packed(rope: &Rope, token_stride: usize, x: usize, table: usize) {
    let width = rope.heads * rope.head_dim;
    assert!(width <= token_stride, "{width} elements of heads in rows of {token_stride}");
    crate::check::length("x", x, rope.tokens * token_stride);
    rope.check(rope.tokens * width, table);
}

fn rotate<S: Stored>(
    gpu: &Gpu,
    rope: &Rope,
    token_stride: usize,
    table: View<'_, f32>,
    x: ViewMut<'_, S>,
    sign: f32,
) -> Result<(), GpuError> {
    if x.is_empty() || table.is_empty() {
        return Ok(());
    }
    let pack = pack_of::<S>(rope, token_stride, x.address(), table.address());
    let module = module(S::STORAGE, rope, token_stride, pack);
    let pairs = rope.tokens * rope.heads * rope.rotary_dim / 2;
    let arguments = vec![table.argument(), x.argument(), sign.into(), long(rope.tokens)];
    gpu.launch(&module.over(pairs, "rope_rotate", arguments))
}

/// Lower bound on the work of [`forward`] and [`backward`].
#[must_use]
pub fn floor(rope: &Rope, storage: Storage) -> Floor {
    let rotated = rope.tokens * rope.heads * rope.rotary_dim;
    Floor::bytes(2 * rotated * storage.bytes() + 4 * rope.table_elements())
}
