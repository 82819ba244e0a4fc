//! Weights and optimizer state, and how a step changes them.

use super::host_optimizer::HostOptimizer;
use super::sums::{Losses, PendingLosses, root};
use super::{Fixed, StepResult};
use crate::comm::{CommError, Request};
use crate::device::{Device, Parameter, Proposal, Space, Target, WideMut};
use crate::scalar::Number;
use crate::spec::{HostMemory, TrainerSpec};
use crate::state::params::{HeldParameter, Init, Inventory, Store};
use crate::state::shards::{Shards, Slice};
use crate::state::weights::{Biases, Weights};
use crate::step::executor::Outcome;
use crate::step::reduce::ReductionSpan;
use kernels::Real;
use kernels::adamw::AdamW;
use kernels::random::{GlobalIndices, Stream};
use std::rc::Rc;
use std::time::Instant;

/// AdamW's settings, and clipping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    /// Decay rates of the moments.
    pub betas: (f64, f64),
    /// AdamW's epsilon, added to the root of the second moment.
    pub eps: f64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Largest gradient norm; `None` for no clipping.
    pub clip: Option<f64>,
}

impl Optimizer {
    /// Factor that clips gradients of norm `norm`.
    pub(super) fn gradient_scale(&self, norm: f64) -> f64 {
        self.clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0))
    }

    pub(super) fn decay_of(&self, held: &HeldParameter) -> f64 {
        if held.declaration.decays() { self.weight_decay } else { 0.0 }
    }
}

/// A step whose gradients are complete, and whose norm is still being summed.
pub(super) struct PendingUpdate {
    /// The squared norm, summed over the tensor-parallel group, in flight over the pipeline.
    pub(super) squares: Request<f64>,
    pub(super) losses: PendingLosses,
    pub(super) optimizer: Optimizer,
    /// The proposed update, without clipping.
    pub(super) adamw: AdamW,
    pub(super) valid_tokens: u64,
    pub(super) outcome: Outcome,
    pub(super) reductions: Vec<ReductionSpan>,
}

/// Weights and optimizer state.
pub(super) struct TrainingState<D: Space> {
    /// Weights as passes read them.
    pub(super) weights: Weights<D>,
    pub(super) optimizer: OptimizerState<D>,
    /// Number of updates made or proposed.
    pub(super) updates: u32,
    /// Number of steps whose update is in the exact weights.
    pub(super) completed: u64,
    /// Selection biases without the update of the last step whose norm was not awaited.
    pub(super) biases_before: Biases<D::Wide>,
}

/// Exact weights, if those that passes read are rounded (bf16) or proposals (post-validation), and
/// both moments.
pub(super) enum OptimizerState<D: Space> {
    OnDevice { exact: Option<Store<D>>, moments: [Store<D>; 2] },
    OnHost(HostOptimizer<D::Wide>),
}

impl<D: Device> TrainingState<D> {
    /// Zeros.
    pub(super) fn new(
        device: &D,
        shards: &Rc<Shards>,
        inventory: &Inventory,
        spec: &TrainerSpec,
    ) -> Self {
        let exact = D::MASTERS || spec.post_validation;
        let zeros = || Store::updated(device, shards, inventory);
        let optimizer = match spec.host_memory {
            HostMemory::Nothing | HostMemory::Activations => {
                OptimizerState::OnDevice { exact: exact.then(zeros), moments: [zeros(), zeros()] }
            }
            HostMemory::Optimizer => OptimizerState::OnHost(HostOptimizer::new(shards.updated())),
        };
        let weights = Weights::new(device, shards, inventory);
        Self { weights, optimizer, updates: 0, completed: 0, biases_before: Biases::new() }
    }

    /// Bytes of exact weights and moments.
    pub(super) fn optimizer_bytes(&self) -> usize {
        match &self.optimizer {
            OptimizerState::OnDevice { exact, moments } => {
                exact.iter().chain(moments).map(Store::bytes).sum()
            }
            OptimizerState::OnHost(host) => host.bytes(),
        }
    }

    /// Sets the weights of a unit.
    pub(super) fn set(
        &mut self,
        fixed: &Fixed<'_, D>,
        unit: usize,
        values: &D::Memory<D::Wide>,
    ) -> Result<(), CommError> {
        let Fixed { device, shards, inventory, .. } = fixed;
        let len = D::len(values);
        let mut stored = device.zeros(len);
        device.round(D::view(values, 0..len), D::view_mut(&mut stored, 0..len));
        self.weights.set(device, unit, &stored)?;
        let begin = shards.units()[unit].elements.start;
        for (held, bias) in self.weights.biases_mut() {
            let part = inventory.all()[*held].part;
            if part.unit() == unit {
                let of = D::view(values, part.begin - begin..part.range().end - begin);
                *bias = device.download(of)?;
            }
        }
        let inside = shards.updated().iter().filter(|slice| slice.unit == unit);
        for slice in inside {
            let of = D::view(values, slice.whole.start - begin..slice.whole.end - begin);
            match &mut self.optimizer {
                OptimizerState::OnDevice { exact: Some(exact), .. } => {
                    device.copy(of, exact.get_mut(slice));
                }
                OptimizerState::OnHost(host) => {
                    host.set(slice, device.download(of)?);
                }
                OptimizerState::OnDevice { exact: None, .. } => {}
            }
        }
        Ok(())
    }

    /// Reads the weights of a slice that this rank updates, exactly.
    pub(super) fn read(
        &self,
        fixed: &Fixed<'_, D>,
        slice: &Slice,
    ) -> Result<Vec<D::Wide>, CommError> {
        if let Some(bias) = self.weights.biases().get(&slice.held) {
            let begin = fixed.inventory.all()[slice.held].part.begin;
            return Ok(bias[slice.whole.start - begin..slice.whole.end - begin].to_vec());
        }
        let device = &fixed.device;
        match &self.optimizer {
            OptimizerState::OnDevice { exact: Some(exact), .. } => {
                Ok(device.download(exact.get(slice))?)
            }
            OptimizerState::OnHost(host) => Ok(host.exact(slice).to_vec()),
            OptimizerState::OnDevice { exact: None, .. } => {
                let values = self.weights.read(device, slice)?;
                Ok(values.into_iter().map(|value| D::Wide::nearest(value.value())).collect())
            }
        }
    }

    /// Sets the weights that passes read to the exact ones.
    pub(super) fn take_exact(&mut self, fixed: &Fixed<'_, D>) -> Result<(), CommError> {
        let OptimizerState::OnDevice { exact: Some(exact), .. } = &self.optimizer else {
            return Ok(());
        };
        let slices = fixed.shards.updated();
        let weights = self.weights.each_mut(&fixed.device, slices)?;
        for (slice, to) in slices.iter().zip(weights) {
            fixed.device.round(exact.get(slice), to);
        }
        self.weights.start_gathers(&fixed.device, fixed.groups.sharing())
    }

    /// Takes back the update of selection biases by a step whose loss or norm was not finite.
    pub(super) fn restore_biases(&mut self) {
        self.weights.biases_mut().clone_from(&self.biases_before);
    }

    /// Arguments of the next update.
    pub(super) fn next_step(
        &mut self,
        optimizer: &Optimizer,
        lr: f64,
        gradient_scale: f64,
    ) -> AdamW {
        self.updates += 1;
        AdamW {
            lr,
            beta1: optimizer.betas.0,
            beta2: optimizer.betas.1,
            eps: optimizer.eps,
            step: self.updates,
            gradient_scale,
        }
    }

    /// Updates weights and moments, and starts to gather what other replicas update.
    pub(super) fn update(
        &mut self,
        fixed: &Fixed<'_, D>,
        optimizer: &Optimizer,
        adamw: &AdamW,
        gradients: &Store<D>,
    ) -> Result<(), CommError> {
        let (device, slices) = (&fixed.device, fixed.shards.updated());
        let read = self.weights.each_mut(device, slices)?;
        match &mut self.optimizer {
            OptimizerState::OnDevice { exact: None, moments } => {
                let targets = read.into_iter().map(Target::Read).collect();
                fixed.update(adamw, optimizer, targets, gradients, moments);
            }
            OptimizerState::OnDevice { exact: Some(exact), moments } => {
                let both = exact.each_mut(slices).into_iter().zip(read);
                let targets = both.map(|(exact, read)| Target::Both(exact, read)).collect();
                fixed.update(adamw, optimizer, targets, gradients, moments);
            }
            OptimizerState::OnHost(host) => {
                let decays = fixed.decays(optimizer);
                let weights = slices.iter().zip(read).zip(decays);
                let begin = Instant::now();
                for ((slice, to), decay) in weights {
                    host.update(device, adamw, slice, gradients.get(slice), to, decay)?;
                }
                fixed.count_update(begin);
            }
        }
        self.completed += 1;
        self.weights.start_gathers(device, fixed.groups.sharing())
    }

    /// Sets the weights that passes read as if the step were not clipped; the exact state stays.
    pub(super) fn propose(
        &mut self,
        fixed: &Fixed<'_, D>,
        optimizer: &Optimizer,
        adamw: &AdamW,
        gradients: &Store<D>,
    ) -> Result<(), CommError> {
        let OptimizerState::OnDevice { exact: Some(exact), moments: [m, v] } = &self.optimizer
        else {
            return Ok(());
        };
        let slices = fixed.shards.updated();
        let weights = self.weights.each_mut(&fixed.device, slices)?;
        let proposal = |((slice, to), decay)| {
            let [w, g, m, v] = [exact, gradients, m, v].map(|store| store.get(slice));
            Proposal { to, w, g, m, v, decay }
        };
        let each = slices.iter().zip(weights).zip(fixed.decays(optimizer));
        let proposals = each.map(proposal).collect();
        let begin = Instant::now();
        fixed.device.adamw_proposal(adamw, proposals);
        fixed.count_update(begin);
        self.weights.start_gathers(&fixed.device, fixed.groups.sharing())
    }
}

impl<D: Device> Fixed<'_, D> {
    /// Weight decay of each slice that this rank updates.
    fn decays(&self, optimizer: &Optimizer) -> impl Iterator<Item = f64> {
        let held = self.shards.updated().iter().map(|slice| &self.inventory.all()[slice.held]);
        held.map(|held| optimizer.decay_of(held))
    }

    /// Updates weights and moments on the device.
    fn update<'b>(
        &'b self,
        adamw: &AdamW,
        optimizer: &Optimizer,
        targets: Vec<Target<'b, D>>,
        gradients: &'b Store<D>,
        [m, v]: &'b mut [Store<D>; 2],
    ) {
        let slices = self.shards.updated();
        let moments = m.each_mut(slices).into_iter().zip(v.each_mut(slices));
        let state = slices.iter().zip(self.decays(optimizer)).zip(targets).zip(moments);
        let update = |(((slice, decay), w), (m, v)): (((&Slice, f64), _), _)| Parameter {
            w,
            g: gradients.get(slice),
            m,
            v,
            decay,
        };
        let parameters = state.map(update).collect();
        let begin = Instant::now();
        self.device.adamw(adamw, parameters);
        self.count_update(begin);
    }

    /// Counts the time of an update.
    fn count_update(&self, begin: Instant) {
        self.updated.set(self.updated.get() + begin.elapsed());
    }

    /// Initial weights of a unit.
    pub(super) fn drawn(&self, unit: usize) -> D::Memory<D::Wide> {
        let device = &self.device;
        let inside = self.inventory.all().iter().filter(|held| held.part.unit() == unit);
        let mut values = device.zeros(self.shards.units()[unit].elements.len());
        let begin = self.shards.units()[unit].elements.start;
        for held in inside {
            let at = held.part.begin - begin..held.part.range().end - begin;
            let to = D::view_mut(&mut values, at);
            match held.declaration.init {
                Init::Constant(value) => device.fill(to, D::Wide::from_f64(value)),
                Init::Normal(deviation) => draw_normal(device, held, to, self.seed, deviation),
            }
        }
        values
    }
}

impl PendingUpdate {
    /// Waits for the norm and updates the exact weights if loss and norm are finite. Returns the
    /// step's result, and whether its proposal was right.
    pub(super) fn settle<D: Device>(
        self,
        fixed: &Fixed<'_, D>,
        gradients: &Store<D>,
        state: &mut OptimizerState<D>,
        completed: &mut u64,
    ) -> Result<(StepResult, bool), CommError> {
        let Self { valid_tokens, outcome, reductions, optimizer, adamw, .. } = self;
        let (losses, norm) = (self.losses.wait(valid_tokens)?, root(self.squares)?);
        let Losses { mean: loss, aux: aux_loss } = losses;
        let gradient_scale = optimizer.gradient_scale(norm);
        let finite = norm.is_finite() && loss.is_finite();
        if let (true, OptimizerState::OnDevice { exact: Some(exact), moments }) = (finite, state) {
            let adamw = AdamW { gradient_scale, ..adamw };
            let exact = exact.each_mut(fixed.shards.updated());
            let targets = exact.into_iter().map(Target::Exact).collect();
            fixed.update(&adamw, &optimizer, targets, gradients, moments);
            *completed += 1;
        }
        let right = finite && gradient_scale == adamw.gradient_scale;
        Ok((StepResult { loss, aux_loss, valid_tokens, norm, outcome, reductions }, right))
    }
}

/// Fills a rank's part of a parameter with normal numbers, each drawn by its index in the whole
/// tensor as stored.
fn draw_normal<D: Device>(
    device: &D,
    held: &HeldParameter,
    mut rest: WideMut<'_, D>,
    seed: u64,
    deviation: f64,
) {
    let (_, columns) = held.declaration.stored_shape();
    let stream = Stream { seed, tensor: name_hash(&held.declaration.name), step: 0 };
    let extent = &held.extent;
    for rows in &extent.rows {
        let (first, width) = (extent.columns.start as u64, extent.columns.len());
        let view =
            GlobalIndices::matrix(rows.start as u64, rows.len(), first, width, columns as u64);
        let (now, behind) = D::split(rest, view.len());
        device.fill_normal(now, &view, stream, deviation);
        rest = behind;
    }
}

/// FNV-1a, 32 bits: selects the random numbers that a tensor draws.
fn name_hash(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
