//! Embedding on a GPU: the table and the output in the storage type, `dtable` f32.

use super::Embedding;
use crate::cuda::launch::{THREADS, blocks, constant, int, pack, row_threads};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for rows of this width, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, embedding: &Embedding, pack: usize) -> Module {
    let constants = vec![("COLUMNS", constant(embedding.columns)), ("SCALE", embedding.scale)];
    Module::new("embedding", storage, pack, row_threads(embedding.columns, pack), constants)
}

/// The module of what compares tokens, whatever the width of a row.
fn of_tokens(storage: Storage, embedding: &Embedding) -> Module {
    let constants = vec![("COLUMNS", constant(embedding.columns)), ("SCALE", embedding.scale)];
    Module::new("embedding", storage, 1, THREADS, constants)
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

/// `dtable[ids - first_row] += scale dout`, in token order, so the bits are always the same.
///
/// Each token's id is compared with all ids: `tokens^2` comparisons, little beside the memory
/// traffic up to some 64 Ki tokens. An id that most tokens share is slow, because its row's tokens
/// are added one after the other.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If a view has the wrong length.
pub fn backward<S: Stored>(
    gpu: &Gpu,
    embedding: &Embedding,
    ids: View<'_, i64>,
    dout: View<'_, S>,
    dtable: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    embedding.check(ids.len(), dtable.len(), dout.len());
    let tensors = [(dout.address(), size_of::<S>()), (dtable.address(), 4)];
    let module = module(S::STORAGE, embedding, pack(S::STORAGE, embedding.columns, &tensors));
    let [first, rows] = range(embedding);
    let tokens = embedding.tokens;
    let mut both = gpu.memory::<u32>(2 * tokens)?;
    gpu.ones(both.view_mut())?;
    let (next, first_of_id) = (both.slice(..tokens), both.slice(tokens..));
    // Parts of the tokens, so that few tokens keep a large GPU busy too.
    const PARTS: usize = 16;
    let chain = vec![ids.argument(), next.argument(), first_of_id.argument(), int(tokens)];
    let grid = [blocks(tokens, THREADS), PARTS];
    gpu.launch(&of_tokens(S::STORAGE, embedding).launch("embedding_chain", grid, chain))?;
    let across = blocks(embedding.columns, module.threads() * module.constants().pack);
    let arguments = vec![
        ids.argument(),
        next.argument(),
        first_of_id.argument(),
        dout.argument(),
        dtable.argument(),
        first,
        rows,
    ];
    gpu.launch(&module.launch("embedding_backward", [tokens, across], arguments))
}

/// Lower bound on the work of [`forward`].
#[must_use]
pub fn forward_floor(embedding: &Embedding, storage: Storage) -> Floor {
    Floor::bytes(embedding.tokens * (2 * embedding.columns * storage.bytes() + 8))
}

/// Lower bound on the work of [`backward`] for `distinct` different ids.
#[must_use]
pub fn backward_floor(embedding: &Embedding, storage: Storage, distinct: usize) -> Floor {
    let read = embedding.tokens * (embedding.columns * storage.bytes() + 8);
    Floor::bytes(read + distinct * 8 * embedding.columns)
}
