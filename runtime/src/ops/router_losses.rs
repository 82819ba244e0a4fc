//! Losses of routers: how unevenly they load experts, and how large their logits are.
//!
//! Of `N` rows, expert `e` of `E` is chosen `c_e` times (`Σ c_e = k N`), and its shares of them
//! ([`Routing::shares`]) sum to `s_e`.
//!
//! | loss | value |
//! |---|---|
//! | balance of each layer, summed over layers | `E Σ c_e s_e / (k N²)`; 1 a layer if balanced (Switch Transformers, arXiv 2101.03961, equation 4) |
//! | balance of all layers, with counts, sums and rows of all of them | `E Σ c_e s_e / N²`; `k` if balanced (Hugging Face's Mixtral) |
//! | z, summed over layers | mean of each row's squared log-sum-exp of logits (ST-MoE, arXiv 2202.08906, equation 5) |
//!
//! A balance loss is that of the global batch, or the mean of those of micro-batches. No gradient
//! goes through counts. So a rank needs counts of all rows before its backward pass, and of sums
//! its own rows' alone.

use super::PassContext;
use super::router::{Route, Router};
use crate::comm::{CommError, Communicator, Op};
use crate::device::Device;
use kernels::Real;
use kernels::routing::Routing;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// What routers add to the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLosses {
    /// Weight of the balance loss.
    pub balance: f64,
    /// Weight of the z loss.
    pub z: f64,
    /// Of which layers' counts a balance loss is.
    pub over: BalanceOver,
    /// Of which rows it is.
    pub scope: BalanceScope,
    /// Layers of the model.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
}

/// Of which layers' counts a balance loss is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalanceOver {
    /// One for each layer; they are summed.
    EachLayer,
    /// One for all layers together. Counts must be of the global batch.
    AllLayers,
}

/// Of which rows a balance loss is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalanceScope {
    /// Those of a micro-batch of one replica.
    MicroBatch,
    /// Those of the global batch. Every forward pass must come before the first backward pass.
    GlobalBatch,
}

/// What a layer's router chose in a micro-batch.
struct Load {
    /// Choices of each expert: by all ranks that have rows of the micro-batch, or by this rank if
    /// the global batch's are counted.
    counts: Vec<i64>,
    /// Sums of each expert's shares, of this rank's rows.
    shares: Vec<f64>,
    /// Sum of squares of this rank's log-sums.
    squares: f64,
    /// Experts of a row.
    top_k: usize,
}

/// Layer, first sequence of the micro-batch, and chunk of its rows.
pub(super) type Place = (usize, usize, usize);

/// What the routers of one rank have chosen in a step.
pub struct RouterLog {
    losses: RouterLosses,
    /// Micro-batches of all replicas, and tokens.
    micro_batches: f64,
    tokens: f64,
    loads: RefCell<BTreeMap<Place, Load>>,
    /// Choices of the global batch, `[layers, E]`, once they are known.
    all: RefCell<Option<Vec<i64>>>,
}

impl RouterLog {
    /// An empty log for steps of so many micro-batches, of all replicas, and tokens.
    pub fn new(losses: RouterLosses, micro_batches: usize, tokens: usize) -> Self {
        Self {
            losses,
            micro_batches: micro_batches as f64,
            tokens: tokens as f64,
            loads: RefCell::default(),
            all: RefCell::default(),
        }
    }

    /// Forgets a step.
    pub fn clear(&self) {
        self.loads.borrow_mut().clear();
        *self.all.borrow_mut() = None;
    }

    /// Learns how often all ranks chose each expert in this step's forward passes, where a loss
    /// depends on it. Called on all ranks before their first backward pass.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn sum_over(&self, world: &dyn Communicator) -> Result<(), CommError> {
        let RouterLosses { scope, layers, experts, .. } = self.losses;
        if scope == BalanceScope::MicroBatch || self.all.borrow().is_some() {
            return Ok(());
        }
        let mut counts = vec![0; layers * experts];
        for ((layer, ..), load) in &*self.loads.borrow() {
            add(&mut counts[layer * experts..][..experts], &load.counts);
        }
        world.all_reduce(&mut counts, Op::Sum)?;
        *self.all.borrow_mut() = Some(counts);
        Ok(())
    }

    /// Choices of each expert on which a layer's balance loss depends, and the factor of `Σ c s`.
    fn counted(&self, (layer, sequence, _): Place, top_k: usize) -> (Vec<i64>, f64) {
        let RouterLosses { over, scope, experts, .. } = self.losses;
        let of_micro_batch = || {
            let mut counts = vec![0; experts];
            let chunks = (layer, sequence, 0)..(layer, sequence + 1, 0);
            self.loads.borrow().range(chunks).for_each(|(_, load)| add(&mut counts, &load.counts));
            counts
        };
        let all = self.all.borrow();
        let (counts, groups) = match (scope, &*all) {
            (BalanceScope::MicroBatch, _) => (of_micro_batch(), self.micro_batches),
            (BalanceScope::GlobalBatch, all) => {
                let all = all.as_ref().expect("a backward pass has come, and counts before it");
                let of_layer = |layer: usize| &all[layer * experts..][..experts];
                let mut counts = of_layer(layer).to_vec();
                if over == BalanceOver::AllLayers {
                    let others = (0..self.losses.layers).filter(|other| *other != layer);
                    others.for_each(|other| add(&mut counts, of_layer(other)));
                }
                (counts, 1.0)
            }
        };
        let rows = counts.iter().sum::<i64>() as f64 / top_k as f64;
        let each = match over {
            BalanceOver::EachLayer => top_k as f64,
            BalanceOver::AllLayers => 1.0,
        };
        (counts, experts as f64 / (groups * each * rows * rows))
    }

    /// The part of this rank's rows in the losses, by their weights; those of all ranks add up.
    pub fn value(&self) -> f64 {
        let RouterLosses { balance, z, .. } = self.losses;
        let of = |(&place, load): (&Place, &Load)| {
            let (counts, factor) = self.counted(place, load.top_k);
            let products = counts.iter().zip(&load.shares).map(|(&c, s)| c as f64 * s);
            balance * factor * products.sum::<f64>() + z * load.squares / self.tokens
        };
        self.loads.borrow().iter().map(of).sum()
    }
}

pub(super) fn add(to: &mut [i64], counts: &[i64]) {
    to.iter_mut().zip(counts).for_each(|(to, count)| *to += count);
}

/// Gradients of what a router's losses read of this rank's rows.
pub(super) struct LossGradients<T> {
    /// Of each expert's summed shares.
    pub shares: Option<Vec<T>>,
    /// Of each row's log-sum-exp.
    pub log_sums: Option<Vec<T>>,
}

impl Router {
    /// Notes how this rank's rows load experts, for losses of routers and updates of selection
    /// biases. Ranks that have other rows of the micro-batch tell each other their counts if a loss
    /// is the micro-batch's.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn note_load<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        route: &Route<D>,
    ) -> Result<(), CommError> {
        let Routing { experts, top_k, .. } = self.routing;
        let (mut counts, mut shares) = (vec![0; experts], vec![0.0; experts]);
        route.chosen().iter().for_each(|&expert| counts[expert as usize] += 1);
        if let Some(loads) = ctx.loads {
            loads.note(self.place(ctx, route), counts.clone());
        }
        let Some(log) = ctx.routers else { return Ok(()) };
        for row in route.scores().chunks_exact(experts) {
            shares.iter_mut().zip(self.routing.shares(row)).for_each(|(sum, share)| *sum += share);
        }
        if log.losses.scope == BalanceScope::MicroBatch {
            for group in [ctx.tp, ctx.cp.ring, ctx.cp.ulysses] {
                group.all_reduce(&mut counts, Op::Sum)?;
            }
        }
        let squares = route.log_sums().iter().map(|sum| sum.to_f64() * sum.to_f64()).sum();
        let load = Load { counts, shares, squares, top_k };
        log.loads.borrow_mut().insert(self.place(ctx, route), load);
        Ok(())
    }

    fn place<D: Device>(&self, ctx: &PassContext<'_, D>, route: &Route<D>) -> Place {
        (self.layer, ctx.batch.first_sequence, route.chunk().index)
    }

    /// Gradients of the losses, where there are any.
    pub(super) fn loss_gradients<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        route: &Route<D>,
    ) -> LossGradients<D::Wide> {
        let Some(log) = ctx.routers else { return LossGradients { shares: None, log_sums: None } };
        let RouterLosses { balance, z, .. } = log.losses;
        let shares = (balance > 0.0).then(|| {
            let (counts, factor) = log.counted(self.place(ctx, route), self.routing.top_k);
            let of = |count: i64| D::Wide::from_f64(balance * factor * count as f64);
            counts.into_iter().map(of).collect()
        });
        let of_sum = |sum: &D::Wide| D::Wide::from_f64(2.0 * z / log.tokens * sum.to_f64());
        let log_sums = (z > 0.0).then(|| route.log_sums().iter().map(of_sum).collect());
        LossGradients { shares, log_sums }
    }
}
