//! A stage: the segments that one rank runs one after the other.

use crate::parameters::{Field, Place, activation, declare};
use crate::run::{Run, Slot, bytes, offload, reload};
use codegen::lower::{Lowered, Segment, Value};
use kernels::activation::Activation;
use models::decisions::Offload;
use models::program::Recompute;
use runtime::Buffer;
use runtime::Device;
use runtime::comm::CommError;
use runtime::ops::{Context, Gradients, PassContext, Residual};
use runtime::stages::pair::{Running, alone};
use runtime::stages::{Kept, Stage, StageOutput, StageResult, own};
use runtime::state::params::{Inventory, ParameterSlice};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// A stage as one rank holds it.
pub struct DirectStage {
    lowered: Arc<Lowered>,
    parts: Vec<Part>,
    parameters: Range<usize>,
    table: Option<ParameterSlice>,
    activation: Activation,
}

/// A segment of the stage.
struct Part {
    place: Place,
    fields: Vec<Field>,
    recompute: Recompute,
    /// Its parameters.
    parameters: Range<usize>,
    /// What its passes read: these, and a table that an earlier segment declared.
    reads: Vec<Range<usize>>,
}

/// What a segment keeps of a micro-batch.
enum PartKept<D: Device> {
    /// Values that its backward pass reads.
    Values(Vec<(Value, Slot<D>)>),
    /// The stream with which a group of layers runs again.
    Input(Rc<Buffer<D>>),
    /// Nothing: it runs again with the layer before it.
    Nothing,
}

impl<D: Device> PartKept<D> {
    fn bytes(&self) -> usize {
        match self {
            Self::Values(values) => values.iter().map(|(_, slot)| bytes(slot)).sum(),
            Self::Input(stream) => stream.bytes(),
            Self::Nothing => 0,
        }
    }
}

/// What a stage keeps of a micro-batch.
struct StageKept<D: Device> {
    parts: Vec<PartKept<D>>,
    /// The logits' value of the last segment.
    logits: Option<Value>,
}

impl<D: Device> Kept<D> for StageKept<D> {
    fn bytes(&self) -> usize {
        self.parts.iter().map(PartKept::bytes).sum()
    }

    fn logits(&self) -> Option<&Buffer<D>> {
        let wanted = self.logits?;
        let PartKept::Values(values) = self.parts.last()? else { return None };
        let found = values.iter().find(|(value, _)| *value == wanted);
        found.and_then(|(_, slot)| slot.tensor())
    }
}

impl DirectStage {
    /// Declares stage `index`. `table` is the embedding, if this rank already holds it.
    pub fn declare(
        lowered: &Arc<Lowered>,
        index: usize,
        table: Option<ParameterSlice>,
        inventory: &mut Inventory,
    ) -> Self {
        let (program, start) = (&lowered.program, inventory.elements());
        let mut parts = Vec::new();
        let mut add = |place: Place, recompute: Recompute| {
            let begin = inventory.begin_unit();
            let fields = declare(lowered, segment(lowered, place), place, inventory);
            let tokens = fields.iter().find_map(|field| match field {
                Field::Tokens(tokens) => Some(tokens.table),
                _ => None,
            });
            let parameters = begin..inventory.elements();
            let table = match place {
                Place::Last(table) if program.model.tied_embeddings => table,
                _ => None,
            };
            let table = table.map(|table| table.range());
            let reads = std::iter::once(parameters.clone()).chain(table).collect();
            parts.push(Part { place, fields, recompute, parameters, reads });
            tokens
        };
        let own = (index == 0).then(|| add(Place::First, Recompute::None)).flatten();
        let stage = &program.stages[index];
        for (layer, &recompute) in stage.layers().zip(&stage.recompute) {
            // A group runs again as a whole; its layers keep everything meanwhile.
            let grouped = program.recompute_group > 1;
            add(Place::Layer(layer), if grouped { Recompute::None } else { recompute });
        }
        if index + 1 == program.stages.len() {
            add(Place::Last(own.or(table)), Recompute::None);
        }
        Self {
            lowered: lowered.clone(),
            parts,
            parameters: start..inventory.elements(),
            table: own,
            activation: activation(&program.model),
        }
    }

    /// Where layers run again in groups: whether a group begins with this part. `None` for parts of
    /// no group.
    fn group_from(&self, index: usize) -> Option<bool> {
        let group = self.lowered.program.recompute_group;
        let first = self.parts.iter().position(|part| matches!(part.place, Place::Layer(_)))?;
        let of_group = group > 1 && matches!(self.parts[index].place, Place::Layer(_));
        of_group.then(|| (index - first).is_multiple_of(group))
    }

    /// Runs the group that begins with part `first` again, then its backward passes.
    async fn group_backward<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        first: usize,
        stream: Rc<Buffer<D>>,
        dy: Rc<Buffer<D>>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Rc<Buffer<D>>, CommError> {
        let end = (first + 1..self.parts.len()).find(|&n| self.group_from(n) != Some(false));
        let parts = &self.parts[first..end.unwrap_or(self.parts.len())];
        let mut passed = Slot::Stream(Residual::Whole(stream));
        let mut all = Vec::with_capacity(parts.len());
        for part in parts {
            let ctx = ctx.without_prefetch().gather(&part.reads)?;
            let mut run = self.run(&ctx, part);
            passed = run.forward(passed).await?;
            all.push(run.keep(part.recompute));
        }
        let mut dy = dy;
        for (part, values) in parts.iter().zip(all).rev() {
            dy = self.part_backward(ctx, part, values, dy, gradients).await?;
        }
        Ok(dy)
    }

    async fn part_backward<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        part: &Part,
        kept: Vec<(Value, Slot<D>)>,
        dy: Rc<Buffer<D>>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Rc<Buffer<D>>, CommError> {
        // The input layer's backward pass reads no weights.
        let reads: &[_] = if matches!(part.place, Place::First) { &[] } else { &part.reads };
        let ctx = &ctx.gather(reads)?;
        let mut run = self.run(ctx, part);
        let mut kept = kept;
        if self.offloads(part) {
            kept.iter_mut().for_each(|(_, slot)| reload(slot, ctx.device));
        }
        run.restore(part.recompute, kept).await?;
        let passed = run.backward(dy, gradients).await?;
        gradients.complete_from(part.parameters.start)?;
        Ok(passed)
    }

    /// Moves what layers have kept to host memory: what the layer before part `index` has, and, of
    /// the stage's last layer, what it has itself. As one tensor its output has no part of that.
    fn offload<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        index: usize,
        passed: Slot<D>,
        kept: &mut [PartKept<D>],
    ) -> Result<Slot<D>, CommError> {
        let next = self.parts.get(index + 1);
        let is_last = !next.is_some_and(|next| self.offloads(next));
        let passed = match passed {
            Slot::Stream(stream @ Residual::Split(..)) if is_last => {
                Slot::Stream(Residual::Whole(Rc::new(stream.whole(ctx))))
            }
            passed => passed,
        };
        let of_layer = |n: &usize| self.offloads(&self.parts[*n]);
        let before = index.checked_sub(1).filter(of_layer);
        for n in before.into_iter().chain(is_last.then_some(index)) {
            let PartKept::Values(values) = &mut kept[n] else { continue };
            values.iter_mut().try_for_each(|(_, slot)| offload(slot, ctx.device))?;
        }
        Ok(passed)
    }

    /// Whether what the part keeps lies in host memory.
    fn offloads(&self, part: &Part) -> bool {
        let activations = self.lowered.program.offload == Offload::Activations;
        activations && matches!(part.place, Place::Layer(_))
    }

    fn run<'a, D: Device>(&'a self, ctx: &'a Context<'a, D>, part: &'a Part) -> Run<'a, D> {
        let segment = segment(&self.lowered, part.place);
        let layer = match part.place {
            Place::Layer(layer) => layer,
            _ => 0,
        };
        Run::new(ctx, segment, &part.fields, self.activation, layer, &self.lowered.sizes)
    }

    async fn run_forward<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        x: Buffer<D>,
    ) -> StageResult<D> {
        let begins = matches!(self.parts.first(), Some(Part { place: Place::First, .. }));
        let x = Rc::new(x);
        let mut passed = match begins {
            true => Slot::Tensor(x),
            false => Slot::Stream(Residual::Whole(x)),
        };
        let mut kept = Vec::with_capacity(self.parts.len());
        for (index, part) in self.parts.iter().enumerate() {
            let group = self.group_from(index);
            let mut input = None;
            passed = match (group, passed) {
                (Some(true), Slot::Stream(stream)) => {
                    let whole = match stream {
                        Residual::Whole(x) => x,
                        sum @ Residual::Split(..) => Rc::new(sum.whole(ctx)),
                    };
                    input = Some(whole.clone());
                    Slot::Stream(Residual::Whole(whole))
                }
                (_, passed) => passed,
            };
            let ctx = ctx.gather(&part.reads)?;
            let mut run = self.run(&ctx, part);
            passed = run.forward(passed).await?;
            kept.push(match (group, input) {
                (None, _) => PartKept::Values(run.keep(part.recompute)),
                (Some(_), Some(input)) => PartKept::Input(input),
                (Some(_), None) => PartKept::Nothing,
            });
            if self.offloads(part) {
                passed = self.offload(&ctx, index, passed, &mut kept)?;
            }
        }
        let logits = self.parts.last().and_then(|part| {
            segment(&self.lowered, part.place).values.iter().position(|of| of.name == "logits")
        });
        let output = match passed {
            Slot::Stream(stream) => StageOutput::Stream(stream.whole(ctx)),
            Slot::Tensor(x) => StageOutput::Stream(ctx.own(x)),
            Slot::Wide(losses) => StageOutput::Losses(losses),
            _ => unreachable!("segments return streams, tensors or losses"),
        };
        Ok((output, Box::new(StageKept { parts: kept, logits })))
    }

    async fn run_backward<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let kept: StageKept<D> = own(kept);
        let mut passed = Rc::new(dy);
        for (index, kept) in kept.parts.into_iter().enumerate().rev() {
            let part = &self.parts[index];
            let values = match kept {
                PartKept::Values(values) => values,
                // It runs again with the first layer of its group.
                PartKept::Nothing => continue,
                PartKept::Input(stream) => {
                    passed = self.group_backward(ctx, index, stream, passed, gradients).await?;
                    continue;
                }
            };
            passed = self.part_backward(ctx, part, values, passed, gradients).await?;
        }
        Ok(ctx.own(passed))
    }
}

fn segment(lowered: &Lowered, place: Place) -> &Segment {
    match place {
        Place::First => &lowered.first,
        Place::Layer(index) => lowered.layer(index),
        Place::Last(_) => &lowered.last,
    }
}

impl<D: Device> Stage<D> for DirectStage {
    fn parameters(&self) -> Range<usize> {
        self.parameters.clone()
    }

    fn read_backward(&self) -> Range<usize> {
        let input = self.parts.first().filter(|part| matches!(part.place, Place::First));
        input.map_or(self.parameters.start, |part| part.parameters.end)..self.parameters.end
    }

    fn table(&self) -> Option<ParameterSlice> {
        self.table
    }

    fn forward(&self, ctx: &PassContext<'_, D>, x: Buffer<D>) -> StageResult<D> {
        alone(self.run_forward(ctx, x))
    }

    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        alone(self.run_backward(ctx, kept, dy, gradients))
    }

    fn start_forward<'a>(
        &'a self,
        ctx: &'a PassContext<'_, D>,
        x: Buffer<D>,
    ) -> Running<'a, StageResult<D>> {
        Box::pin(self.run_forward(ctx, x))
    }

    fn start_backward<'a>(
        &'a self,
        ctx: &'a PassContext<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        gradients: &'a mut Gradients<'_, D>,
    ) -> Running<'a, Result<Buffer<D>, CommError>> {
        Box::pin(self.run_backward(ctx, kept, dy, gradients))
    }
}
