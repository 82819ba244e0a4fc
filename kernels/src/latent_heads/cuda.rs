//! Keys and values of latent attention on a GPU, in the storage type; sums in f32.

use super::LatentHeads;
use crate::cuda::launch::{THREADS, constant, long, pack};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module for heads of these dimensions, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, of: &LatentHeads, pack: usize) -> Module {
    let constants = vec![
        ("HEADS", constant(of.heads)),
        ("CONTENT", constant(of.content)),
        ("ROTARY", constant(of.rotary)),
        ("VALUE", constant(of.value)),
    ];
    Module::new("latent_heads", storage, pack, THREADS, constants)
}

fn module_of<S: Stored>(of: &LatentHeads, tensors: [u64; 4]) -> Module {
    let tensors = tensors.map(|at| (at, size_of::<S>()));
    let row = [of.content, of.rotary, of.value].into_iter().fold(0, gcd);
    module(S::STORAGE, of, pack(S::STORAGE, row, &tensors))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Computes `k` and `v`. Shapes: [`super`].
///
/// # Errors
/// If the device fails; the same holds for the function below.
///
/// # Panics
/// If a view has the wrong length.
pub fn join<S: Stored>(
    gpu: &Gpu,
    of: &LatentHeads,
    up: View<'_, S>,
    rotary: View<'_, S>,
    k: ViewMut<'_, S>,
    v: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    of.check(up.len(), rotary.len(), k.len(), v.len());
    let elements = k.len() + v.len();
    if elements == 0 {
        return Ok(());
    }
    let module = module_of::<S>(of, [up.address(), rotary.address(), k.address(), v.address()]);
    let tensors = [up.argument(), rotary.argument(), k.argument(), v.argument()];
    let arguments = tensors.into_iter().chain([long(of.tokens)]).collect();
    gpu.launch(&module.over(elements, "latent_heads_join", arguments))
}

/// Computes `dup` and `drotary`. Shapes: [`super`].
///
/// # Errors
/// As [`join`].
///
/// # Panics
/// As [`join`].
pub fn split<S: Stored>(
    gpu: &Gpu,
    of: &LatentHeads,
    dk: View<'_, S>,
    dv: View<'_, S>,
    dup: ViewMut<'_, S>,
    drotary: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    of.check(dup.len(), drotary.len(), dk.len(), dv.len());
    let (elements, sums) = (dup.len(), drotary.len());
    if elements == 0 {
        return Ok(());
    }
    let addresses = [dk.address(), dv.address(), dup.address(), drotary.address()];
    let module = module_of::<S>(of, addresses);
    let tokens = long(of.tokens);
    let arguments = vec![dk.argument(), dv.argument(), dup.argument(), tokens];
    gpu.launch(&module.over(elements, "latent_heads_split", arguments))?;
    let arguments = vec![dk.argument(), drotary.argument(), tokens];
    gpu.launch(&module.over(sums, "latent_heads_sum", arguments))
}

/// Lower bound on the work of [`join`].
#[must_use]
pub fn join_floor(of: &LatentHeads, storage: Storage) -> Floor {
    let heads = of.tokens * of.heads;
    let elements = heads * (of.up() + of.key() + of.value) + of.tokens * of.rotary;
    Floor::bytes(elements * storage.bytes())
}

/// Lower bound on the work of the copies of [`split`].
#[must_use]
pub fn copies_floor(of: &LatentHeads, storage: Storage) -> Floor {
    Floor::bytes(2 * of.tokens * of.heads * of.up() * storage.bytes())
}

/// Lower bound on the work of the sums of [`split`].
#[must_use]
pub fn sums_floor(of: &LatentHeads, storage: Storage) -> Floor {
    Floor::bytes(of.tokens * (of.heads + 1) * of.rotary * storage.bytes())
}
