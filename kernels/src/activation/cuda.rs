//! Activations on a GPU: all tensors in the storage type.

use super::{Activation, check_gated};
use crate::cuda::launch::{THREADS, long, pack};
use crate::cuda::{Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// The module of an activation, moved in packs of `pack` elements.
#[must_use]
pub fn module(storage: Storage, activation: Activation, pack: usize) -> Module {
    let kind = match activation {
        Activation::Relu => 0.0,
        Activation::SquaredRelu => 1.0,
        Activation::GeluTanh => 2.0,
        Activation::GeluErf => 3.0,
        Activation::Silu => 4.0,
        Activation::ClampedGelu => 5.0,
    };
    Module::new("activation", storage, pack, THREADS, vec![("KIND", kind)])
}

fn module_of<S: Stored>(activation: Activation, elements: usize, addresses: &[u64]) -> Module {
    let tensors: Vec<(u64, usize)> =
        addresses.iter().map(|&address| (address, size_of::<S>())).collect();
    module(S::STORAGE, activation, pack(S::STORAGE, elements, &tensors))
}

/// `y = f(x)`.
///
/// # Errors
/// If the device fails; the same holds for the functions below.
///
/// # Panics
/// If lengths differ; the same holds for the functions below.
pub fn forward<S: Stored>(
    gpu: &Gpu,
    activation: Activation,
    x: View<'_, S>,
    y: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length("y", y.len(), x.len());
    let module = module_of::<S>(activation, x.len(), &[x.address(), y.address()]);
    let arguments = vec![x.argument(), y.argument(), long(x.len())];
    gpu.launch(&module.over(x.len(), "activation_forward", arguments))
}

/// `dx = dy f'(x)`.
///
/// # Errors
/// As [`forward`].
pub fn backward<S: Stored>(
    gpu: &Gpu,
    activation: Activation,
    x: View<'_, S>,
    dy: View<'_, S>,
    dx: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length("dy", dy.len(), x.len());
    crate::check::length("dx", dx.len(), x.len());
    let module = module_of::<S>(activation, x.len(), &[x.address(), dy.address(), dx.address()]);
    let arguments = vec![x.argument(), dy.argument(), dx.argument(), long(x.len())];
    gpu.launch(&module.over(x.len(), "activation_backward", arguments))
}

/// `y = f(gate) g(up)`.
///
/// # Errors
/// As [`forward`].
pub fn gated_forward<S: Stored>(
    gpu: &Gpu,
    activation: Activation,
    gate: View<'_, S>,
    up: View<'_, S>,
    y: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    crate::check::length("up", up.len(), gate.len());
    crate::check::length("y", y.len(), gate.len());
    let addresses = [gate.address(), up.address(), y.address()];
    let module = module_of::<S>(activation, gate.len(), &addresses);
    let arguments = vec![gate.argument(), up.argument(), y.argument(), long(gate.len())];
    gpu.launch(&module.over(gate.len(), "activation_gated_forward", arguments))
}

/// `dgate = dy g(up) f'(gate)`, `dup = dy f(gate) g'(up)`.
///
/// # Errors
/// As [`forward`].
pub fn gated_backward<S: Stored>(
    gpu: &Gpu,
    activation: Activation,
    gate: View<'_, S>,
    up: View<'_, S>,
    dy: View<'_, S>,
    dgate: ViewMut<'_, S>,
    dup: ViewMut<'_, S>,
) -> Result<(), GpuError> {
    check_gated(gate.len(), [up.len(), dy.len(), dgate.len(), dup.len()]);
    let addresses = [gate.address(), up.address(), dy.address(), dgate.address(), dup.address()];
    let module = module_of::<S>(activation, gate.len(), &addresses);
    let arguments = vec![
        gate.argument(),
        up.argument(),
        dy.argument(),
        dgate.argument(),
        dup.argument(),
        long(gate.len()),
    ];
    gpu.launch(&module.over(gate.len(), "activation_gated_backward", arguments))
}

/// Lower bound on the work of [`forward`].
#[must_use]
pub fn forward_floor(elements: usize, storage: Storage) -> Floor {
    Floor::bytes(2 * elements * storage.bytes())
}

/// Lower bound on the work of [`backward`] and [`gated_forward`].
#[must_use]
pub fn backward_floor(elements: usize, storage: Storage) -> Floor {
    Floor::bytes(3 * elements * storage.bytes())
}

/// Lower bound on the work of [`gated_backward`].
#[must_use]
pub fn gated_backward_floor(elements: usize, storage: Storage) -> Floor {
    Floor::bytes(5 * elements * storage.bytes())
}
