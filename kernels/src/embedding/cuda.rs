//! Embedding on a GPU: the table and the output in the storage type, `dtable` f32.

use super::Embedding;
use crate::cuda::launch::{blocks, constant, int, pack, row_threads};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for rows of this width, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, embedding: &Embedding, pack: usize) -> Module {
    let threads = row_threads(embedding.columns, pack);
    let (group, joined) = in_flight(threads);
    let constants = vec![
        ("COLUMNS", constant(embedding.columns)),
        ("SCALE", embedding.scale),
        ("RUN", constant(RUN)),
        ("GROUP", constant(group)),
        ("JOINED", constant(joined)),
    ];
    Module::new("embedding", storage, pack, threads, constants)
}

/// Lookups that a block of the backward pass sums. On an H200, 128 take as long, 256 up to a fifth
/// longer.
const RUN: usize = 64;

/// Lookups whose loads are in flight together, and sums of blocks, as far as registers allow.
fn in_flight(threads: usize) -> (usize, usize) {
    if threads > 256 { (2, 8) } else { (4, 16) }
}

#[allow(clippy::cast_possible_wrap)]
fn range(embedding: &Embedding) -> [Argument; 2] {
    [Argument::I64(embedding.first_row as i64), Argument::I64(embedding.rows as i64)]
}

/// `out[tokens, columns] = scale table[ids - first_row]`, 0 for ids outside the range.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If a view has the wrong length.
pub fn forward<S: Stored>(
    gpu: &Gpu,
    embedding: &Embedding,
    ids: View<'_, i64>,
    table: View<'_, S>,
    out: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    embedding.check(ids.len(), table.len(), out.len());
    let tensors = [table.address(), out.address()].map(|at| (at, size_of::<S>()));
    let module = module(S::STORAGE, embedding, pack(S::STORAGE, embedding.columns, &tensors));
    let [first, rows] = range(embedding);
    let arguments = vec![ids.argument(), table.argument(), out.argument(), first, rows];
    gpu.launch(&module.launch("embedding_forward", [embedding.tokens, 1], arguments))
}

/// `dtable[ids - first_row] += scale dout`, in the order of [`by_row`](super::by_row), so the bits
/// are always the same.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If a view has the wrong length.
pub fn backward<S: Stored>(
    gpu: &Gpu,
    embedding: &Embedding,
    by_row: View<'_, i64>,
    dout: View<'_, S>,
    dtable: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    embedding.check_backward(by_row.len(), dout.len(), dtable.len());
    assert!(by_row.address().is_multiple_of(16), "by_row: a lookup's 16 bytes are loaded at once");
    let &Embedding { tokens, columns, .. } = embedding;
    let tensors = [(dout.address(), size_of::<S>()), (dtable.address(), 4)];
    let module = module(S::STORAGE, embedding, pack(S::STORAGE, columns, &tensors));
    let grid = [blocks(tokens, RUN), blocks(columns, module.threads() * module.constants().pack)];
    let partial = gpu.memory::<f32>(grid[0] * columns)?;
    let (partial, dtable) = (partial.view().argument(), dtable.argument());
    let [first_row, _] = range(embedding);
    let (by_row, rows, tokens) = (by_row.argument(), int(embedding.rows), int(tokens));
    let arguments = vec![by_row, dout.argument(), dtable, partial, first_row, rows, tokens];
    gpu.launch(&module.launch("embedding_backward", grid, arguments).following())?;
    let arguments = vec![by_row, dtable, partial, first_row, rows, tokens];
    gpu.launch(&module.launch("embedding_join", grid, arguments).following())
}

/// Lower bound on the work of [`forward`].
#[must_use]
pub fn forward_floor(embedding: &Embedding, storage: Storage) -> Floor {
    Floor::bytes(embedding.tokens * (2 * embedding.columns * storage.bytes() + 8))
}

/// Lower bound on the work of [`backward`] for `distinct` different ids.
#[must_use]
pub fn backward_floor(embedding: &Embedding, storage: Storage, distinct: usize) -> Floor {
    let read = embedding.tokens * (embedding.columns * storage.bytes() + 16);
    Floor::bytes(read + distinct * 8 * embedding.columns)
}
