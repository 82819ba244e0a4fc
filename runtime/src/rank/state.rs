//! Weights and optimizer state, and how a step changes them.

use super::sums::{mean, root};
use super::{Fixed, StepResult};
use crate::comm::{CommError, Request};
use crate::device::{Device, Parameter, Proposal, Space, Target, WideMut};
use crate::scalar::Number;
use crate::state::params::{HeldParameter, ParameterSlice, Store, WeightStore};
use crate::step::executor::Outcome;
use crate::step::reduce::ReductionSpan;
use kernels::adamw::AdamW;
use kernels::random::{GlobalIndices, Stream};
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
    pub(super) loss_sum: Request<f64>,
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
    pub(super) weights: WeightStore<D>,
    /// Exact weights, if those that passes read are rounded (bf16) or proposals (post-validation).
    pub(super) exact: Option<Store<D>>,
    pub(super) moments: [Store<D>; 2],
    /// Number of updates made or proposed.
    pub(super) updates: u32,
    /// Number of steps whose update is in the exact weights.
    pub(super) completed: u64,
}

impl<D: Device> Fixed<'_, D> {
    /// Updates weights and moments.
    pub(super) fn update<'b>(
        &'b self,
        adamw: &AdamW,
        optimizer: &Optimizer,
        targets: Vec<Target<'b, D>>,
        gradients: &'b Store<D>,
        [m, v]: &'b mut [Store<D>; 2],
    ) {
        let inventory = &self.inventory;
        let moments = m.each_mut(inventory).into_iter().zip(v.each_mut(inventory));
        let state = inventory.all().iter().zip(targets).zip(moments);
        let update = |((held, w), (m, v)): ((&HeldParameter, _), _)| {
            let g = gradients.get(held.part);
            Parameter { w, g, m, v, decay: optimizer.decay_of(held) }
        };
        self.updating(|| self.device.adamw(adamw, state.map(update).collect()));
    }

    /// Runs an update, and counts its time.
    fn updating(&self, update: impl FnOnce()) {
        let begin = Instant::now();
        update();
        self.updated.set(self.updated.get() + begin.elapsed());
    }
}

impl<D: Device> TrainingState<D> {
    /// Sets a parameter's weights.
    pub(super) fn set(&mut self, device: &D, part: ParameterSlice, values: &[D::Wide]) {
        match &mut self.exact {
            Some(exact) => {
                device.upload(values, exact.get_mut(part));
                device.round(exact.get(part), self.weights.get_mut(part));
            }
            None => {
                let stored: Vec<D::Stored> =
                    values.iter().map(|value| D::Stored::nearest(value.value())).collect();
                device.upload(&stored, self.weights.get_mut(part));
            }
        }
    }

    /// Sets a parameter's weights to what `fill` writes.
    pub(super) fn fill(
        &mut self,
        device: &D,
        part: ParameterSlice,
        fill: impl FnOnce(WideMut<'_, D>),
    ) {
        let weights = self.weights.get_mut(part);
        if let Some(exact) = &mut self.exact {
            fill(exact.get_mut(part));
            return device.round(exact.get(part), weights);
        }
        let mut values = device.zeros(part.len);
        fill(D::view_mut(&mut values, 0..part.len));
        device.round(D::view(&values, 0..part.len), weights);
    }

    /// Sets the weights that passes read to the exact ones.
    pub(super) fn take_exact(&mut self, fixed: &Fixed<'_, D>) {
        if let Some(exact) = &self.exact {
            fixed.device.round(exact.all(), self.weights.all_mut());
        }
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

    /// Sets the weights that passes read as if the step were not clipped; the exact state stays.
    pub(super) fn propose(
        &mut self,
        fixed: &Fixed<'_, D>,
        optimizer: &Optimizer,
        adamw: &AdamW,
        gradients: &Store<D>,
    ) {
        let (Some(exact), [m, v]) = (&self.exact, &self.moments) else { return };
        let weights = self.weights.each_mut(&fixed.inventory);
        let proposal = |(held, to): (&HeldParameter, _)| {
            let [w, g, m, v] = [exact, gradients, m, v].map(|store| store.get(held.part));
            Proposal { to, w, g, m, v, decay: optimizer.decay_of(held) }
        };
        let proposals = fixed.inventory.all().iter().zip(weights).map(proposal).collect();
        fixed.updating(|| fixed.device.adamw_proposal(adamw, proposals));
    }
}

impl PendingUpdate {
    /// Waits for the norm and updates the exact weights if loss and norm are finite. Returns the
    /// step's result, and whether its proposal was right.
    pub(super) fn settle<D: Device>(
        self,
        fixed: &Fixed<'_, D>,
        gradients: &Store<D>,
        exact: &mut Store<D>,
        moments: &mut [Store<D>; 2],
        completed: &mut u64,
    ) -> Result<(StepResult, bool), CommError> {
        let Self { valid_tokens, outcome, reductions, optimizer, adamw, .. } = self;
        let (loss, norm) = (mean(self.loss_sum, valid_tokens)?, root(self.squares)?);
        let gradient_scale = optimizer.gradient_scale(norm);
        let finite = norm.is_finite() && loss.is_finite();
        if finite {
            let adamw = AdamW { gradient_scale, ..adamw };
            let targets = exact.each_mut(&fixed.inventory).into_iter().map(Target::Exact).collect();
            fixed.update(&adamw, &optimizer, targets, gradients, moments);
            *completed += 1;
        }
        let right = finite && gradient_scale == adamw.gradient_scale;
        Ok((StepResult { loss, valid_tokens, norm, outcome, reductions }, right))
    }
}

/// Fills a rank's part of a parameter with normal numbers, each drawn by its index in the whole
/// tensor as stored.
pub(super) fn draw_normal<D: Device>(
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
