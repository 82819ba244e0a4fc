//! Embedding on a GPU: the table and the output in the storage type, `dtable` f32.

use super::Embedding;
use crate::cuda::launch::{NULL, THREADS, blocks, constant, int, pack, row_threads};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Memory, Module, Storage, Stored, View, ViewMut};

/// The module for rows of this width, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, embedding: &Embedding, pack: usize) -> Module {
    let constants = vec![("COLUMNS", constant(embedding.columns)), ("SCALE", embedding.scale)];
    Module::new("embedding", storage, pack, row_threads(embedding.columns, pack), constants)
}

/// The module of the sort, whatever the width of a row.
fn sort_module(storage: Storage, embedding: &Embedding) -> Module {
    let constants = vec![("COLUMNS", constant(embedding.columns)), ("SCALE", embedding.scale)];
    Module::new("embedding", storage, 1, THREADS, constants)
}

/// As in `embedding.cu`: bits of a digit, tokens of a tile of the sort, tokens that a block sums.
const DIGIT_BITS: u32 = 9;
const TILE: usize = 4 * THREADS;
const RUN: usize = 32;

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

/// `dtable[ids - first_row] += scale dout`, summed in an order that depends on the ids alone, so
/// the bits are always the same.
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
    let &Embedding { tokens, columns, .. } = embedding;
    if tokens == 0 {
        return Ok(());
    }
    let orders = sorted::<S>(gpu, embedding, ids)?;
    let order = orders.slice(..tokens);
    let tensors = [(dout.address(), size_of::<S>()), (dtable.address(), 4)];
    let module = module(S::STORAGE, embedding, pack(S::STORAGE, columns, &tensors));
    let grid = [blocks(tokens, RUN), blocks(columns, module.threads() * module.constants().pack)];
    let partial = gpu.memory::<f32>(grid[0] * columns)?;
    let (partial, dtable) = (partial.view().argument(), dtable.argument());
    let read = [ids.argument(), order.argument()];
    let sizes = [range(embedding)[0], int(embedding.rows), int(tokens)];
    let of_runs = [dout.argument(), dtable, partial];
    let arguments = [&read[..], &of_runs, &sizes].concat();
    gpu.launch(&module.launch("embedding_backward", grid, arguments))?;
    let arguments = [&read[..], &[dtable, partial], &sizes].concat();
    gpu.launch(&module.launch("embedding_join", grid, arguments))
}

/// The tokens in the order of their rows; those of a row in their own order, those outside the
/// range last. Followed by as many entries of scratch memory.
fn sorted<S: Stored>(
    gpu: &Gpu,
    embedding: &Embedding,
    ids: View<'_, i64>,
) -> Result<Memory<u32>, GpuError> {
    let tokens = embedding.tokens;
    let tiles = blocks(tokens, TILE);
    let counts = gpu.memory::<u32>(tiles << DIGIT_BITS)?;
    let counts = counts.view();
    let orders = gpu.memory::<u32>(2 * tokens)?;
    let halves = [orders.slice(..tokens), orders.slice(tokens..)];
    let module = sort_module(S::STORAGE, embedding);
    let passes = (usize::BITS - embedding.rows.leading_zeros()).div_ceil(DIGIT_BITS).max(1);
    for pass in 0..passes {
        // The last pass writes the first half.
        let to = ((passes - 1 - pass) % 2) as usize;
        let from = if pass == 0 { NULL } else { halves[1 - to].argument() };
        let shift = int((pass * DIGIT_BITS) as usize);
        let sizes = [range(embedding)[0], int(embedding.rows), int(tokens), shift];
        let read = [ids.argument(), from, counts.argument()];
        let arguments = [&read[..], &sizes].concat();
        gpu.launch(&module.launch("embedding_count", [tiles, 1], arguments))?;
        let arguments = [&read[..], &[halves[to].argument()], &sizes].concat();
        gpu.launch(&module.launch("embedding_sort", [tiles, 1], arguments))?;
    }
    Ok(orders)
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
