//! One rank's part of a training run: its parameters, and what a step does with them.

mod batches;
mod gather;
mod state;
mod sums;

pub use state::Optimizer;

use crate::comm::{CommError, Communicator};
use crate::data::Samples;
use crate::device::{Device, MemoryUse, Space, Target};
use crate::error::Error;
use crate::groups::Groups;
use crate::layers::{DropoutDraws, TokenIds, VocabularyShard};
use crate::program::Program;
use crate::scalar::Number;
use crate::state::buffer::{Pools, WideBuffer};
use crate::state::checkpoint::{Checkpoint, Tensors};
use crate::state::params::{Init, Inventory, Store, WeightStore};
use crate::step::executor::{Executor, LossObserver, Outcome, PassInputs, VocabOverPipeline};
use crate::step::graph_replay::{GraphReplay, LaunchedStep, Replays};
use crate::step::reduce::{Reducer, Reduction, ReductionSpan};
use crate::step::stage::Stage;
use batches::{StepInputs, positions, rope_table};
use kernels::Real;
use state::{PendingUpdate, TrainingState, draw_normal};
use std::collections::BTreeMap;
use std::rc::Rc;
use sums::{mean, root};

/// What a step's gradients came to, the same on all ranks.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// Mean cross-entropy of the iteration's tokens, before the update.
    pub loss: f64,
    /// Tokens that counted.
    pub valid_tokens: u64,
    /// Norm over all parameters, before clipping.
    pub norm: f64,
    /// How this rank's passes ran.
    pub outcome: Outcome,
    /// How its replicas' gradients were summed.
    pub reductions: Vec<ReductionSpan>,
}

/// What does not change from step to step.
struct Fixed<'a, D: Space> {
    program: &'a Program,
    groups: Groups,
    device: D,
    stages: Vec<Stage>,
    /// Its rows of a vocabulary split over the pipeline.
    shard: Option<VocabularyShard>,
    inventory: Inventory,
    reduction: Reduction,
    seed: u64,
    /// Positions and their table, the same for every micro-batch of whole sequences.
    positions: TokenIds<D>,
    rope: Rc<WideBuffer<D>>,
    pools: Pools<D>,
}

/// One rank of a run.
pub struct Rank<'a, D: Space> {
    // First: a library that is part of what was recorded must outlive it.
    graph_replay: GraphReplay<D>,
    inputs: StepInputs<D>,
    fixed: Fixed<'a, D>,
    state: TrainingState<D>,
    gradients: Store<D>,
    pending: Option<PendingUpdate>,
}

impl<'a, D: Device> Rank<'a, D> {
    /// Takes this rank's place in the program. WeightGradients are zero until initialised or loaded.
    ///
    /// # Errors
    /// As any collective call.
    pub fn new(
        program: &'a Program,
        world: Box<dyn Communicator>,
        device: D,
        reduction: Reduction,
        seed: u64,
    ) -> Result<Self, CommError> {
        let groups = Groups::new(world, program)?;
        let mut inventory = Inventory::new(groups.tp.rank(), groups.tp.size());
        let (stages, shard) = declare(program, groups.pp.rank(), &mut inventory);
        let (positions, pools) = (positions(program), Pools::default());
        let table = device.taken(rope_table(program, device.host(), &positions));
        let rope = Rc::new(pools.wide.adopt(table));
        let positions = positions.into_iter().map(i64::from).collect();
        let positions = TokenIds::new(&device, positions);
        let zeros = || Store::new(&device, &inventory);
        let exact = (D::MASTERS || program.post_validation).then(zeros);
        let state = TrainingState {
            weights: Store::new(&device, &inventory),
            exact,
            moments: [zeros(), zeros()],
            updates: 0,
            completed: 0,
        };
        Ok(Self {
            graph_replay: GraphReplay::new(),
            inputs: StepInputs { batches: Vec::new(), step: 0, ahead: None },
            gradients: zeros(),
            state,
            pending: None,
            fixed: Fixed {
                program,
                groups,
                stages,
                shard,
                inventory,
                reduction,
                seed,
                positions,
                rope,
                pools,
                device,
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

    /// Bytes of weights, gradients and both moments; and of exact weights where those that passes read are others.
    pub fn state_bytes(&self) -> u64 {
        let wide = 3 + usize::from(self.state.exact.is_some());
        let element = size_of::<D::Stored>() + wide * size_of::<D::Wide>();
        (self.fixed.inventory.elements() * element) as u64
    }

    /// Bytes of the model's weights, or of its gradients, whole.
    pub fn model_bytes(&self) -> u64 {
        (self.fixed.elements_of_model() * size_of::<D::Wide>()) as u64
    }

    /// Ranks over which the model's weights are split: those of a replica.
    pub fn ranks_of_model(&self) -> usize {
        self.fixed.groups.tp.size() * self.fixed.groups.pp.size()
    }

    /// Steps whose update the weights of [`Self::whole_weights`] have.
    pub fn completed_steps(&self) -> u64 {
        self.state.completed
    }

    /// What its device's memory came to so far, where that is counted.
    pub fn memory_use(&self) -> Option<MemoryUse> {
        self.fixed.device.memory_use()
    }

    /// Replays graph_replay steps as recorded work, where device, ranks and program allow it and nobody refuses it; the same on
    /// all ranks.
    pub fn replay_steps(&mut self, refused: Option<&'static str>) {
        let Fixed { program, groups, device, .. } = &self.fixed;
        let decides = "optimizer post-validation decides on the host within a step";
        let why_not = refused
            .or_else(|| device.not_recordable())
            .or_else(|| groups.world.not_recordable())
            .or(program.post_validation.then_some(decides));
        self.graph_replay.set(why_not);
    }

    /// What was replayed so far.
    pub fn replays(&self) -> Replays {
        self.graph_replay.replays()
    }

    /// The kernels that its device chose by measurement, where it does.
    pub fn chosen_kernels(&self) -> BTreeMap<String, Vec<String>> {
        self.fixed.device.chosen_kernels()
    }

    /// DropoutDraws initial weights by seed, name and global index: the same ones for every split.
    pub fn initialise(&mut self) {
        let Fixed { inventory, device, seed, .. } = &self.fixed;
        for held in inventory.all() {
            self.state.fill(device, held.part, |to| match held.declaration.init {
                Init::Constant(value) => device.fill(to, D::Wide::from_f64(value)),
                Init::Normal(deviation) => draw_normal(device, held, to, *seed, deviation),
            });
        }
    }

    /// Takes weights from a checkpoint.
    ///
    /// # Errors
    /// Tensors that are missing or have other shapes.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        for held in self.fixed.inventory.all() {
            let declaration = &held.declaration;
            let whole: Vec<D::Wide> = checkpoint.read(&declaration.name, &declaration.shape)?;
            let local = declaration.extract(&held.extent, &whole);
            self.state.set(&self.fixed.device, held.part, &local);
        }
        Ok(())
    }

    /// Reads what step `step` trains on, to be used when it runs.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn read_ahead(&mut self, samples: &dyn Samples, step: u64) -> Result<(), Error> {
        self.inputs.read_ahead(&self.fixed, samples, step)
    }

    /// Loss and gradients of step `step` (0-based), summed over all ranks.
    ///
    /// # Errors
    /// Data that cannot be read, and as any collective call.
    pub fn gradients(
        &mut self,
        samples: &dyn Samples,
        step: u64,
        observer: Option<LossObserver<'_, D::Wide>>,
    ) -> Result<StepResult, Error> {
        let Self { fixed, state, gradients, inputs, graph_replay, .. } = self;
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
        let loss = mean(fixed.start_loss(loss_sum)?, valid_tokens)?;
        let norm = root(fixed.start_norm(&done.squares)?)?;
        let outcome = Outcome { loss_sum, ..done.outcome.clone() };
        Ok(StepResult { loss, valid_tokens, norm, outcome, reductions: done.reductions.clone() })
    }

    /// Runs step `step` and proposes its update, without waiting for its gradient norm: the first forwards run
    /// while that of the step before is summed, and again where it clips (optimizer post-validation,
    /// Zero Bubble, arXiv 2401.10241, section 4). Where the paper undoes an update, the state stays as it is here
    /// until the norm is known, at the price of a second copy of the weights; so all numbers are those of
    /// [`Self::gradients`] and [`Self::update`], to the bit.
    ///
    /// Gives what the step before came to. Where that is not finite, nothing has been run.
    ///
    /// # Errors
    /// Data that cannot be read, and as any collective call.
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
                self.state.take_exact(&self.fixed);
                let finite =
                    |before: &StepResult| before.norm.is_finite() && before.loss.is_finite();
                if !before.as_ref().is_some_and(finite) {
                    return Ok(before);
                }
                let ran = self.run_ahead(true, &mut before)?;
                ran.ok_or_else(|| begun_twice(step))?
            }
        };
        let Self { fixed, state, gradients, .. } = self;
        fixed.sum_partial_gradients(gradients)?;
        fixed.sum_tied_gradients(gradients)?;
        let loss_sum = fixed.start_loss(outcome.loss_sum)?;
        let squares = fixed.start_norm(&fixed.squares(gradients))?;
        let adamw = state.next_step(optimizer, lr, 1.0);
        state.propose(fixed, optimizer, &adamw, gradients);
        let optimizer = *optimizer;
        self.pending = Some(PendingUpdate {
            squares,
            loss_sum,
            optimizer,
            adamw,
            valid_tokens,
            outcome,
            reductions,
        });
        Ok(before)
    }

    /// How the last step's passes ran, of which [`Self::step_ahead`] has not told yet.
    pub fn pending_outcome(&self) -> Option<&Outcome> {
        self.pending.as_ref().map(|pending| &pending.outcome)
    }

    /// Waits for the last step of [`Self::step_ahead`] and gives what it came to.
    ///
    /// # Errors
    /// As any collective call.
    pub fn settle(&mut self) -> Result<Option<StepResult>, Error> {
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let TrainingState { exact: Some(exact), moments, completed, .. } = &mut self.state else {
            return Ok(None);
        };
        let (result, _) =
            pending.settle(&self.fixed, &self.gradients, exact, moments, completed)?;
        self.state.take_exact(&self.fixed);
        Ok(Some(result))
    }

    /// Runs the passes of a step, and settles the one before on the way; `None` where its proposal was wrong.
    fn run_ahead(
        &mut self,
        again: bool,
        before: &mut Option<StepResult>,
    ) -> Result<Option<(Outcome, Vec<ReductionSpan>)>, Error> {
        let Self { fixed, state, gradients, pending, inputs, .. } = self;
        let TrainingState { weights, exact, moments, completed, .. } = state;
        let mut gate = |gradients: &mut Store<D>| {
            let mut right = true;
            if let (Some(pending), Some(exact)) = (pending.take(), exact.as_mut()) {
                let (result, was_right) =
                    pending.settle(fixed, gradients, exact, moments, completed)?;
                (*before, right) = (Some(result), was_right);
            }
            fixed.device.fill(gradients.all_mut(), D::Wide::ZERO);
            Ok(right)
        };
        let mut reducer = fixed.reducer();
        let given = fixed.given(weights, inputs);
        let ran = fixed.executor().run_gated(given, again, &mut gate, gradients, &mut reducer)?;
        let Some((mut outcome, loss)) = ran else { return Ok(None) };
        outcome.loss_sum = fixed.device.read(&loss).map_err(CommError::from)?;
        Ok(Some((outcome, reducer.finish(gradients)?)))
    }

    /// Updates the weights with gradients of norm `norm`.
    pub fn update(&mut self, optimizer: &Optimizer, lr: f64, norm: f64) {
        let Self { fixed, state, gradients, .. } = self;
        let adamw = state.next_step(optimizer, lr, optimizer.gradient_scale(norm));
        let inventory = &fixed.inventory;
        let read = state.weights.each_mut(inventory);
        let targets: Vec<_> = match &mut state.exact {
            None => read.into_iter().map(Target::Read).collect(),
            Some(exact) => {
                let both = exact.each_mut(inventory).into_iter().zip(read);
                both.map(|(exact, read)| Target::Both(exact, read)).collect()
            }
        };
        fixed.update(&adamw, optimizer, targets, gradients, &mut state.moments);
        state.completed += 1;
    }

    /// The model's gradients, whole, on rank 0 of the world; nothing on the others.
    ///
    /// # Errors
    /// As any collective call.
    pub fn whole_gradients(&self) -> Result<Option<Tensors<D::Wide>>, CommError> {
        self.fixed.whole(|part| self.fixed.device.download(self.gradients.get(part)))
    }

    /// The model's weights, whole, on rank 0 of the world; nothing on the others.
    ///
    /// # Errors
    /// As any collective call.
    pub fn whole_weights(&self) -> Result<Option<Tensors<D::Wide>>, CommError> {
        let (device, state) = (&self.fixed.device, &self.state);
        self.fixed.whole(|part| match &state.exact {
            Some(exact) => device.download(exact.get(part)),
            None => {
                let values = device.download(state.weights.get(part))?;
                Ok(values.into_iter().map(|value| D::Wide::nearest(value.value())).collect())
            }
        })
    }
}

impl<D: Device> Fixed<'_, D> {
    fn executor(&self) -> Executor<'_, D> {
        Executor {
            program: self.program,
            device: &self.device,
            tp: &*self.groups.tp,
            pp: &*self.groups.pp,
            stages: &self.stages,
            vocab: match (&self.shard, &self.groups.vocab) {
                (Some(shard), Some(groups)) => Some(VocabOverPipeline { shard, groups }),
                _ => None,
            },
            inventory: &self.inventory,
        }
    }

    fn reducer(&self) -> Reducer<'_, D> {
        Reducer::new(&self.device, &*self.groups.dp, self.reduction)
    }

    /// What a step's passes read.
    fn given<'b>(
        &'b self,
        weights: &'b WeightStore<D>,
        inputs: &'b StepInputs<D>,
    ) -> PassInputs<'b, D> {
        let p = self.program.model.dropout;
        let draws = (p > 0.0).then_some(DropoutDraws { p, seed: self.seed, step: inputs.step });
        PassInputs { weights, batches: &inputs.batches, draws, pools: &self.pools }
    }

    /// A step's passes and sums: nothing here waits for the device, and no number is other than in the step before but what
    /// is in `inputs`' memory, so that it can be recorded.
    fn passes(
        &self,
        weights: &WeightStore<D>,
        inputs: &StepInputs<D>,
        gradients: &mut Store<D>,
        observer: Option<LossObserver<'_, D::Wide>>,
    ) -> Result<LaunchedStep<D>, Error> {
        self.device.fill(gradients.all_mut(), D::Wide::ZERO);
        let mut reducer = self.reducer();
        let given = self.given(weights, inputs);
        let (outcome, loss) = self.executor().run(given, gradients, &mut reducer, observer)?;
        let reductions = reducer.finish(gradients)?;
        self.sum_partial_gradients(gradients)?;
        self.sum_tied_gradients(gradients)?;
        Ok(LaunchedStep { outcome, loss, squares: self.squares(gradients), reductions })
    }
}

/// What is settled once cannot be wrong again: our bug.
fn begun_twice(step: u64) -> CommError {
    let reason = "the step before was settled, and still the gate is closed".to_owned();
    CommError::Invalid { call: format!("step {step}"), reason }
}

/// Declares the stages of pipeline device `device`, and its part of a vocabulary split over all.
fn declare(
    program: &Program,
    device: usize,
    inventory: &mut Inventory,
) -> (Vec<Stage>, Option<VocabularyShard>) {
    let (mut stages, mut table) = (Vec::new(), None);
    for (chunk, index) in program.stages_of(device).into_iter().enumerate() {
        if chunk > 0 && program.layout.copies() > 1 {
            inventory.enter_copies();
        }
        let stage = Stage::declare(program, index, table, inventory);
        // Copies mirror each other, tables and all: none is shared between a device's stages.
        if program.layout.copies() == 1 {
            table = table.or(stage.table());
        }
        stages.push(stage);
    }
    (stages, VocabularyShard::declare(program, device, inventory))
}
