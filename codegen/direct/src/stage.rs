//! A stage: the segments that one rank runs one after the other.

use crate::parameters::{Field, Place, activation, declare};
use crate::run::{Run, Slot, bytes};
use codegen::lower::{Lowered, Segment, Value};
use kernels::activation::Activation;
use models::program::Recompute;
use runtime::Buffer;
use runtime::Device;
use runtime::comm::CommError;
use runtime::ops::{Context, Gradients, Residual};
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
    /// The table that it reads besides, if an earlier segment declared it.
    table: Option<Range<usize>>,
}

impl Part {
    /// `ctx` with the segment's weights.
    fn gathered<'a, D: Device>(&self, ctx: &Context<'a, D>) -> Result<Context<'a, D>, CommError> {
        let ctx = ctx.gather(&self.parameters)?;
        match &self.table {
            Some(table) => ctx.gather(table),
            None => Ok(ctx),
        }
    }
}

/// What a stage keeps of a micro-batch: values of each segment.
struct StageKept<D: Device> {
    parts: Vec<Vec<(Value, Slot<D>)>>,
    /// The logits' value of the last segment.
    logits: Option<Value>,
}

impl<D: Device> Kept<D> for StageKept<D> {
    fn bytes(&self) -> usize {
        self.parts.iter().flatten().map(|(_, slot)| bytes(slot)).sum()
    }

    fn logits(&self) -> Option<&Buffer<D>> {
        let wanted = self.logits?;
        let found = self.parts.last()?.iter().find(|(value, _)| *value == wanted);
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
            parts.push(Part { place, fields, recompute, parameters, table });
            tokens
        };
        let own = (index == 0).then(|| add(Place::First, Recompute::None)).flatten();
        let stage = &program.stages[index];
        for (layer, &recompute) in stage.layers().zip(&stage.recompute) {
            add(Place::Layer(layer), recompute);
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

    fn run<'a, D: Device>(&'a self, ctx: &'a Context<'a, D>, part: &'a Part) -> Run<'a, D> {
        let segment = segment(&self.lowered, part.place);
        let layer = match part.place {
            Place::Layer(layer) => layer,
            _ => 0,
        };
        Run::new(ctx, segment, &part.fields, self.activation, layer)
    }
}

fn segment(lowered: &Lowered, place: Place) -> &Segment {
    match place {
        Place::First => &lowered.first,
        Place::Layer(_) => &lowered.layer,
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

    fn forward(&self, ctx: &Context<'_, D>, x: Buffer<D>) -> StageResult<D> {
        let begins = matches!(self.parts.first(), Some(Part { place: Place::First, .. }));
        let x = Rc::new(x);
        let mut passed = match begins {
            true => Slot::Tensor(x),
            false => Slot::Stream(Residual::Whole(x)),
        };
        let mut kept = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let ctx = part.gathered(ctx)?;
            let mut run = self.run(&ctx, part);
            passed = run.forward(passed)?;
            kept.push(run.keep(part.recompute));
        }
        let logits = self.parts.last().and_then(|part| {
            segment(&self.lowered, part.place).values.iter().position(|of| of.name == "logits")
        });
        let output = match passed {
            Slot::Stream(stream) => StageOutput::Stream(stream.whole(ctx)),
            Slot::Tensor(x) => StageOutput::Stream(ctx.own(x)),
            Slot::Wide(losses) => StageOutput::Losses(losses),
            Slot::Statistics(_) | Slot::InFlight(_) => unreachable!("no segment returns these"),
        };
        Ok((output, Box::new(StageKept { parts: kept, logits })))
    }

    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let kept: StageKept<D> = own(kept);
        let mut passed = Rc::new(dy);
        for (part, kept) in self.parts.iter().zip(kept.parts).rev() {
            // The input layer's backward pass reads no weights.
            let reads_none = matches!(part.place, Place::First);
            let gathered = (!reads_none).then(|| part.gathered(ctx)).transpose()?;
            let mut run = self.run(gathered.as_ref().unwrap_or(ctx), part);
            run.restore(part.recompute, kept)?;
            passed = run.backward(passed, gradients)?;
            gradients.complete_from(part.parameters.start)?;
        }
        Ok(ctx.own(passed))
    }
}
