//! One rank of a training run: its parameters, and what a step does with them.

mod batches;
mod biases;
mod gather;
mod host_optimizer;
mod state;
mod sums;

pub use state::Optimizer;

use crate::comm::{CommError, Communicator, Op};
use crate::data::Samples;
use crate::device::{Device, MemoryUse, Space};
use crate::error::Error;
use crate::groups::{ExpertGroups, Groups};
use crate::ops::{ContextRanks, DropoutDraws, ExpertLoads, RouterLog, VocabularyShard};
use crate::spec::Reduction;
use crate::spec::{HostMemory, TrainerSpec};
use crate::stages::{Stage, Stages};
use crate::state::buffer::Pools;
use crate::state::checkpoint::{Checkpoint, Tensors};
use crate::state::gradients::GradientStore;
use crate::state::params::{ByDivision, Declaration, Gradient, HeldParameter, Inventory, Member};
use crate::state::shards::Shards;
use crate::state::weights::Weights;
use crate::step::executor::{Executor, LossObserver, Outcome, PassInputs, VocabOverPipeline};
use crate::step::graph_replay::{CudaGraphs, GraphReplay, LaunchedStep, Replays};
use crate::step::reduce::{Reducer, ReductionSpan};
use crate::step_time::StepTime;
use batches::{Positions, StepInputs, positions};
use state::{PendingUpdate, TrainingState};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};
use sums::{Losses, root};

/// Result of a step's gradients, the same on all ranks.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// Mean cross-entropy of the iteration's tokens, before the update.
    pub loss: f64,
    /// What routers add to it, by weight.
    pub aux_loss: f64,
    /// Tokens with a label.
    pub valid_tokens: u64,
    /// Norm over all parameters, before clipping.
    pub norm: f64,
    /// How this rank's passes ran.
    pub outcome: Outcome,
    /// When the gradients of replicas were reduced.
    pub reductions: Vec<ReductionSpan>,
}

impl StepResult {
    /// Whether weights can be updated by it.
    fn is_finite(&self) -> bool {
        self.norm.is_finite() && self.loss.is_finite()
    }
}

/// What stays the same from step to step.
struct Fixed<'a, D: Space> {
    spec: TrainerSpec,
    declared_by: &'a dyn Stages<D>,
    groups: Groups,
    device: D,
    stages: Vec<Box<dyn Stage<D>>>,
    /// This rank's rows of a vocabulary split over the pipeline.
    shard: Option<VocabularyShard>,
    inventory: Inventory,
    /// What routers choose in a step, if any loss depends on it.
    routers: Option<RouterLog>,
    /// How often experts are chosen in a step, if selection biases are updated by it.
    loads: Option<ExpertLoads>,
    /// How replicas share this rank's state.
    shards: Rc<Shards>,
    reduction: Reduction,
    seed: u64,
    /// Positions of each sequence that this rank holds.
    held: Rc<[Range<usize>]>,
    /// Positions of a micro-batch's tokens, the same for all in which every sequence is one
    /// document.
    positions: Positions<D>,
    pools: Pools<D>,
    /// Time of optimizer updates so far.
    updated: Cell<Duration>,
}

/// One rank of a run.
pub struct Rank<'a, D: Space> {
    // First, so that it is dropped first: a recording uses libraries that must outlive it.
    graph_replay: GraphReplay<D>,
    inputs: StepInputs<D>,
    fixed: Fixed<'a, D>,
    state: TrainingState<D>,
    gradients: GradientStore<D>,
    pending: Option<PendingUpdate>,
}

impl<'a, D: Device> Rank<'a, D> {
    /// Declares this rank's parameters as `stages` says. Weights are zero until initialised or
    /// loaded.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn new(
        stages: &'a dyn Stages<D>,
        world: Box<dyn Communicator>,
        device: D,
        reduction: Reduction,
        seed: u64,
    ) -> Result<Self, CommError> {
        let (declared_by, spec) = (stages, stages.spec());
        let groups = Groups::new(world, &spec)?;
        let mut inventory = gather::inventory(&spec, groups.at);
        let (stages, shard) = declare(declared_by, &spec, groups.pp.rank(), &mut inventory);
        if let Some(name) = inventory.doubled() {
            let reason = format!("{name} is declared twice: each parameter has a name of its own");
            return Err(CommError::Invalid { call: "declaring parameters".to_owned(), reason });
        }
        let held: Rc<[_]> = spec.context.held(groups.at.cp as usize, spec.seq_len).into();
        let pools = Pools::default();
        let positions = positions(&device, &pools, &spec, groups.tp.rank(), &held);
        let sharing = groups.sharing();
        let member = |division| {
            let group = sharing.of(division);
            Member { rank: group.rank(), of: group.size() }
        };
        let shards = Shards::new(&inventory, spec.zero, ByDivision::each(member));
        let shards = Rc::new(shards);
        let state = TrainingState::new(&device, &shards, &inventory, &spec);
        let by_load = inventory.all().iter().any(|held| held.by_load.is_some());
        Ok(Self {
            graph_replay: GraphReplay::new(),
            inputs: StepInputs { batches: Vec::new(), step: 0, ahead: None },
            gradients: GradientStore::new(&device, &shards, &inventory),
            state,
            pending: None,
            fixed: Fixed {
                routers: spec.router_losses.map(|losses| {
                    let micro_batches = spec.micro_batches * spec.mesh.dp as usize;
                    RouterLog::new(losses, micro_batches, spec.tokens())
                }),
                loads: by_load.then(ExpertLoads::default),
                spec,
                declared_by,
                groups,
                stages,
                shard,
                inventory,
                shards,
                reduction,
                seed,
                held,
                positions,
                pools,
                device,
                updated: Cell::default(),
            },
        })
    }

    /// This rank's groups.
    pub fn groups(&self) -> &Groups {
        &self.fixed.groups
    }

    /// This rank's parameters.
    pub fn inventory(&self) -> &Inventory {
        &self.fixed.inventory
    }

    /// Bytes on the device of weights, gradients and optimizer state.
    pub fn state_bytes(&self) -> u64 {
        let StateBytes { parameters, gradients, optimizer, .. } = self.state_memory();
        parameters + gradients + optimizer
    }

    /// What this rank holds between steps.
    pub fn state_memory(&self) -> StateBytes {
        let optimizer = self.state.optimizer_bytes() as u64;
        let on_host = self.fixed.spec.host_memory == HostMemory::Optimizer;
        StateBytes {
            parameters: self.state.weights.bytes() as u64,
            gradients: self.gradients.sums().bytes() as u64,
            optimizer: if on_host { 0 } else { optimizer },
            host: if on_host { optimizer } else { 0 },
        }
    }

    /// Bytes of the whole model's weights, or of its gradients.
    pub fn model_bytes(&self) -> u64 {
        (self.fixed.elements_of_model() * size_of::<D::Wide>()) as u64
    }

    /// Ranks that together have the model's weights ([`Self::whole_weights`]).
    pub fn ranks_of_model(&self) -> usize {
        self.fixed.contributors()
    }

    /// Steps whose update is in [`Self::whole_weights`].
    pub fn completed_steps(&self) -> u64 {
        self.state.completed
    }

    /// Memory use of the device, if it is counted.
    pub fn memory_use(&self) -> Option<MemoryUse> {
        self.fixed.device.memory_use()
    }

    /// Time so far in calls to other ranks and in updates. Computation is in a step's [`Outcome`].
    pub fn time_spent(&self) -> StepTime {
        let Fixed { groups, updated, .. } = &self.fixed;
        let waited_s = |names: &[&str]| groups.world.stats().waited_s(names);
        // The sum of losses, over all ranks, waits for the last pass of the slowest pipeline rank.
        let pipeline: &[&str] = if groups.pp.size() > 1 { &["pp", "ends", "world"] } else { &[] };
        StepTime {
            tp_s: waited_s(&["tp"]),
            pp_s: waited_s(pipeline),
            cp_s: waited_s(&["cp_ring", "cp_ulysses"]),
            ep_s: waited_s(&["ep", "etp"]),
            dp_s: waited_s(&["dp", "dp_shard", "dp_across", "edp", "edp_shard", "edp_across"]),
            optimizer_s: updated.get().as_secs_f64(),
            ..StepTime::default()
        }
    }

    /// Replays steps as a CUDA graph if device, ranks and spec allow it and `refused` gives no
    /// reason against it. All ranks decide alike.
    pub fn replay_steps(&mut self, when: CudaGraphs, refused: Option<&'static str>) {
        let Fixed { spec, groups, device, .. } = &self.fixed;
        let chooses = "experts are chosen on the host";
        let decides = "optimizer post-validation decides on the host within a step";
        let waits = "activations go to host memory within a step";
        let moves = "replicas gather updated weights into new memory";
        let why_not = refused
            .or_else(|| device.not_recordable())
            .or(self.fixed.shards.gathers_updates().then_some(moves))
            .or_else(|| groups.world.not_recordable())
            .or(spec.post_validation.then_some(decides))
            .or((spec.host_memory == HostMemory::Activations).then_some(waits))
            .or(spec.experts.map(|_| chooses));
        self.graph_replay.set(when, why_not);
    }

    /// How many steps were replayed so far.
    pub fn replays(&self) -> Replays {
        self.graph_replay.replays()
    }

    /// The kernels that the device chose by measurement, if it does so.
    pub fn chosen_kernels(&self) -> BTreeMap<String, Vec<String>> {
        self.fixed.device.chosen_kernels()
    }

    /// Draws initial weights from seed, tensor name and global index: the same for every split.
    ///
    /// # Errors
    /// The device has failed.
    pub fn initialise(&mut self) -> Result<(), Error> {
        let Self { fixed, state, .. } = self;
        for unit in 0..fixed.shards.units().len() {
            let values = fixed.drawn(unit);
            state.set(fixed, unit, &values)?;
        }
        Ok(())
    }

    /// Loads weights from a checkpoint.
    ///
    /// # Errors
    /// Tensors that are missing or have other shapes.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let Self { fixed, state, .. } = self;
        for unit in 0..fixed.shards.units().len() {
            let mut values: Vec<D::Wide> = Vec::new();
            let inside = |held: &&HeldParameter| held.part.unit() == unit;
            for held in fixed.inventory.all().iter().filter(inside) {
                let declaration = &held.declaration;
                let whole: Vec<D::Wide> = checkpoint.read(&declaration.name, &declaration.shape)?;
                values.extend(declaration.extract(&held.extent, &whole));
            }
            let values = fixed.device.taken(values);
            state.set(fixed, unit, &values)?;
        }
        Ok(())
    }

    /// Reads the tokens of step `step` before it runs.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn read_ahead(&mut self, samples: &dyn Samples, step: u64) -> Result<(), Error> {
        self.inputs.read_ahead(&self.fixed, samples, step)
    }

    /// Loss and gradients of step `step` (0-based), summed over all ranks.
    ///
    /// # Errors
    /// Data that cannot be read, and those of any collective call.
    pub fn gradients(
        &mut self,
        samples: &dyn Samples,
        step: u64,
        observer: Option<LossObserver<'_, D::Wide>>,
    ) -> Result<StepResult, Error> {
        let Self { fixed, state, gradients, inputs, graph_replay, .. } = self;
        let begin = Instant::now();
        let valid_tokens = inputs.take(fixed, samples, step)?;
        let weights = &state.weights;
        let done = match observer {
            None => graph_replay.step(&fixed.device, &fixed.groups, || {
                fixed.passes(weights, inputs, gradients, None)
            })?,
            observer => {
                graph_replay.launch(|| fixed.passes(weights, inputs, gradients, observer))?
            }
        };
        let loss_sum = fixed.device.read(&done.loss).map_err(CommError::from)?;
        let losses = fixed.start_losses(loss_sum)?.wait(valid_tokens)?;
        let norm = root(fixed.start_norm(&done.squares)?)?;
        let outcome = Outcome { loss_sum, ..done.outcome.clone() };
        let (Losses { mean: loss, aux: aux_loss }, reductions) = (losses, done.reductions.clone());
        if let Some(share) = graph_replay.launch_share(begin.elapsed().as_secs_f64()) {
            let mut largest = [share];
            fixed.groups.world.all_reduce(&mut largest, Op::Max)?;
            graph_replay.decide(largest[0]);
        }
        Ok(StepResult { loss, aux_loss, valid_tokens, norm, outcome, reductions })
    }

    /// Runs step `step` and proposes its update without waiting for its gradient norm. The step's
    /// first forwards run while the previous step's norm is being summed, and run again if that
    /// step clips (optimizer post-validation, Zero Bubble, arXiv 2401.10241, section 4). The paper
    /// undoes a wrong update. Here the optimizer state is not changed until the norm is known,
    /// which costs a second copy of the weights; so all numbers equal those of [`Self::gradients`]
    /// and [`Self::update`], to the bit.
    ///
    /// Returns the previous step's result. If that is not finite, this step has not run.
    ///
    /// # Errors
    /// Data that cannot be read, and those of any collective call.
    pub fn step_ahead(
        &mut self,
        samples: &dyn Samples,
        step: u64,
        optimizer: &Optimizer,
        lr: f64,
    ) -> Result<Option<StepResult>, Error> {
        let valid_tokens = self.inputs.take(&self.fixed, samples, step)?;
        let mut before = None;
        let (outcome, reductions) = match self.run_ahead(false, &mut before)? {
            Some(ran) => ran,
            None => {
                self.state.take_exact(&self.fixed)?;
                if !before.as_ref().is_some_and(StepResult::is_finite) {
                    self.state.restore_biases();
                    return Ok(before);
                }
                let ran = self.run_ahead(true, &mut before)?;
                ran.ok_or_else(|| begun_twice(step))?
            }
        };
        let Self { fixed, state, gradients, .. } = self;
        fixed.sum_over_ranks(gradients.sums_mut())?;
        let losses = fixed.start_losses(outcome.loss_sum)?;
        let squares = fixed.start_norm(&fixed.squares(gradients.sums()))?;
        state.biases_before.clone_from(state.weights.biases());
        fixed.update_biases(state.weights.biases_mut())?;
        let adamw = state.next_step(optimizer, lr, 1.0);
        state.propose(fixed, optimizer, &adamw, gradients.sums())?;
        let optimizer = *optimizer;
        self.pending = Some(PendingUpdate {
            squares,
            losses,
            optimizer,
            adamw,
            valid_tokens,
            outcome,
            reductions,
        });
        Ok(before)
    }

    /// How the passes of the last step ran, whose result [`Self::step_ahead`] has not returned yet.
    pub fn pending_outcome(&self) -> Option<&Outcome> {
        self.pending.as_ref().map(|pending| &pending.outcome)
    }

    /// Waits for the last step of [`Self::step_ahead`] and returns its result.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn settle(&mut self) -> Result<Option<StepResult>, Error> {
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let (result, _) = {
            let TrainingState { optimizer, completed, .. } = &mut self.state;
            pending.settle(&self.fixed, self.gradients.sums(), optimizer, completed)?
        };
        self.state.take_exact(&self.fixed)?;
        if !result.is_finite() {
            self.state.restore_biases();
        }
        Ok(Some(result))
    }

    /// Runs the passes of a step and settles the previous step on the way. Returns `None` if the
    /// previous step's proposal was wrong.
    fn run_ahead(
        &mut self,
        again: bool,
        before: &mut Option<StepResult>,
    ) -> Result<Option<(Outcome, Vec<ReductionSpan>)>, Error> {
        let Self { fixed, state, gradients, pending, inputs, .. } = self;
        let TrainingState { weights, optimizer, completed, .. } = state;
        let mut gate = |gradients: &mut GradientStore<D>| {
            let mut right = true;
            if let Some(pending) = pending.take() {
                let (result, was_right) =
                    pending.settle(fixed, gradients.sums(), optimizer, completed)?;
                (*before, right) = (Some(result), was_right);
            }
            gradients.clear(&fixed.device);
            Ok(right)
        };
        let mut reducer = fixed.reducer();
        let given = fixed.given(weights, inputs);
        let ran = fixed.executor().run_gated(given, again, &mut gate, gradients, &mut reducer)?;
        let Some((mut outcome, loss)) = ran else { return Ok(None) };
        fixed.every_gradient(gradients)?;
        outcome.loss_sum = fixed.device.read(&loss).map_err(CommError::from)?;
        Ok(Some((outcome, reducer.finish(gradients)?)))
    }

    /// Updates the weights with gradients of norm `norm`.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn update(&mut self, optimizer: &Optimizer, lr: f64, norm: f64) -> Result<(), Error> {
        let Self { fixed, state, gradients, .. } = self;
        fixed.update_biases(state.weights.biases_mut())?;
        let adamw = state.next_step(optimizer, lr, optimizer.gradient_scale(norm));
        Ok(state.update(fixed, optimizer, &adamw, gradients.sums())?)
    }

    /// The whole gradients of what is trained, on world rank 0; `None` on the others.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn whole_gradients(&self) -> Result<Option<Tensors<D::Wide>>, CommError> {
        let sums = self.gradients.sums();
        let trained = |of: &Declaration| of.gradient != Gradient::None;
        self.fixed.whole(trained, |slice| Ok(self.fixed.device.download(sums.get(slice))?))
    }

    /// This rank's selection biases, by name.
    pub fn selection_biases(&self) -> impl Iterator<Item = (&str, &[D::Wide])> {
        let name = |held: usize| self.fixed.inventory.all()[held].declaration.name.as_str();
        self.state.weights.biases().iter().map(move |(&held, bias)| (name(held), bias.as_slice()))
    }

    /// The model's whole weights on world rank 0; `None` on the others.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn whole_weights(&self) -> Result<Option<Tensors<D::Wide>>, CommError> {
        self.fixed.whole(|_| true, |slice| self.state.read(&self.fixed, slice))
    }
}

/// Bytes that a rank holds between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBytes {
    /// Weights.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Exact weights and moments on the device.
    pub optimizer: u64,
    /// Exact weights and moments in host memory.
    pub host: u64,
}

impl<D: Device> Fixed<'_, D> {
    fn executor(&self) -> Executor<'_, D> {
        Executor {
            spec: &self.spec,
            device: &self.device,
            tp: &*self.groups.tp,
            cp: ContextRanks {
                parallel: self.spec.context,
                ring: &*self.groups.ring,
                ulysses: &*self.groups.ulysses,
            },
            pp: &*self.groups.pp,
            sharing: self.groups.sharing(),
            experts: self.groups.experts.as_ref().map(ExpertGroups::ranks),
            routers: self.routers.as_ref(),
            loads: self.loads.as_ref(),
            world: &*self.groups.world,
            prefetch: self.reduction != Reduction::AtEnd,
            stages: &self.stages,
            vocab: match (&self.shard, &self.groups.vocab) {
                (Some(shard), Some(groups)) => Some(VocabOverPipeline { shard, groups }),
                _ => None,
            },
            inventory: &self.inventory,
        }
    }

    fn reducer(&self) -> Reducer<'_, D> {
        Reducer::new(&self.device, &self.groups, self.reduction)
    }

    /// Input of a step's passes, which nothing of the step before outlives.
    fn given<'b>(
        &'b self,
        weights: &'b Weights<D>,
        inputs: &'b StepInputs<D>,
    ) -> PassInputs<'b, D> {
        if let Some(routers) = &self.routers {
            routers.clear();
        }
        if let Some(loads) = &self.loads {
            loads.clear();
        }
        self.pools.begin_step();
        let p = self.spec.dropout;
        let draws = (p > 0.0).then_some(DropoutDraws { p, seed: self.seed, step: inputs.step });
        PassInputs { weights, batches: &inputs.batches, draws, pools: &self.pools }
    }

    /// Checks that the backward passes have left out no parameter.
    fn every_gradient(&self, gradients: &GradientStore<D>) -> Result<(), Error> {
        match gradients.unwritten(&self.inventory) {
            None => Ok(()),
            Some(held) => Err(Error::NoGradient { name: held.declaration.name.clone() }),
        }
    }

    /// Runs a step's passes and sums. It never waits for the device, and only the contents of
    /// `inputs`' memory change from step to step, so that the step can be recorded.
    fn passes(
        &self,
        weights: &Weights<D>,
        inputs: &StepInputs<D>,
        gradients: &mut GradientStore<D>,
        observer: Option<LossObserver<'_, D::Wide>>,
    ) -> Result<LaunchedStep<D>, Error> {
        gradients.clear(&self.device);
        let mut reducer = self.reducer();
        let given = self.given(weights, inputs);
        let (outcome, loss) = self.executor().run(given, gradients, &mut reducer, observer)?;
        self.every_gradient(gradients)?;
        let reductions = reducer.finish(gradients)?;
        self.sum_over_ranks(gradients.sums_mut())?;
        let squares = self.squares(gradients.sums());
        Ok(LaunchedStep { outcome, loss, squares, reductions })
    }
}

/// The error of a step that is begun a third time: our bug, since what is settled cannot be wrong.
fn begun_twice(step: u64) -> CommError {
    let reason = "the step before was settled, and still the gate is closed".to_owned();
    CommError::Invalid { call: format!("step {step}"), reason }
}

/// Declares the stages of a pipeline rank, and its shard of a vocabulary split over the pipeline.
fn declare<D: Device>(
    by: &dyn Stages<D>,
    spec: &TrainerSpec,
    pipeline_rank: usize,
    inventory: &mut Inventory,
) -> (Vec<Box<dyn Stage<D>>>, Option<VocabularyShard>) {
    let (mut stages, mut table) = (Vec::new(), None);
    for (chunk, index) in spec.stages_of(pipeline_rank).into_iter().enumerate() {
        if chunk > 0 && spec.layout.copies() > 1 {
            inventory.enter_copies();
        }
        inventory.enter_stage(index);
        let stage = by.declare(index, table, inventory);
        // With two copies of each stage, every stage has a table of its own.
        if spec.layout.copies() == 1 {
            table = table.or(stage.table());
        }
        stages.push(stage);
    }
    inventory.enter_stage(pipeline_rank);
    (stages, by.declare_shard(pipeline_rank, inventory))
}
