//! Runs the operations of one segment.

use crate::parameters::Field;
use codegen::lower::{self, Function, Op, Segment, Sizes, Step, Value, dropout_place};
use kernels::Output;
use kernels::activation::Activation;
use models::program::Recompute;
use runtime::comm::{self, CommError};
use runtime::ops::{
    self, AttentionSaved, AttentionSums, Chunk, Context, CopiesInFlight, Gradients, InFlight,
    Received, Residual, Route, Softmax, Statistics, activation,
};
use runtime::stages::Offloaded;
use runtime::stages::pair::other_pass;
use runtime::{Buffer, Device, DeviceError, WideBuffer};
use std::rc::Rc;

/// A value.
pub enum Slot<D: Device> {
    /// Activations or gradients.
    Tensor(Rc<Buffer<D>>),
    /// The residual stream.
    Stream(Residual<D>),
    /// A norm's statistics.
    Statistics(Rc<Statistics<D>>),
    /// A number of each token, or attention's log-sum-exp.
    Wide(WideBuffer<D>),
    /// What a collective is making.
    InFlight(InFlight<D>),
    /// Where copies go.
    Route(Rc<Route<D>>),
    /// Rows for this rank's experts.
    Received(Received<D>),
    /// Copies on their way.
    CopiesInFlight(CopiesInFlight<D>),
    /// Sums of the gradients of queries, keys and values.
    Sums(AttentionSums<D>),
}

impl<D: Device> Slot<D> {
    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<&Buffer<D>> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }
}

/// Bytes held.
pub fn bytes<D: Device>(slot: &Slot<D>) -> usize {
    match slot {
        Slot::Tensor(tensor) => tensor.bytes(),
        Slot::Statistics(statistics) => statistics.bytes(),
        Slot::Wide(wide) => wide.bytes(),
        Slot::Route(route) => route.bytes(),
        Slot::Received(received) => received.rows.bytes(),
        Slot::Stream(_) | Slot::InFlight(_) | Slot::CopiesInFlight(_) | Slot::Sums(_) => 0,
    }
}

/// Moves what is held to host memory.
///
/// # Errors
/// The device has failed.
pub fn offload<D: Device>(slot: &mut Slot<D>, device: &D) -> Result<(), DeviceError> {
    match slot {
        Slot::Tensor(tensor) => tensor.offload(device),
        Slot::Statistics(statistics) => statistics.offload(device),
        Slot::Wide(wide) => wide.offload(device),
        Slot::Received(received) => received.rows.offload(device),
        Slot::Route(_)
        | Slot::Stream(_)
        | Slot::InFlight(_)
        | Slot::CopiesInFlight(_)
        | Slot::Sums(_) => Ok(()),
    }
}

/// Moves it back.
pub fn reload<D: Device>(slot: &mut Slot<D>, device: &D) {
    match slot {
        Slot::Tensor(tensor) => tensor.reload(device),
        Slot::Statistics(statistics) => statistics.reload(device),
        Slot::Wide(wide) => wide.reload(device),
        Slot::Received(received) => received.rows.reload(device),
        Slot::Route(_)
        | Slot::Stream(_)
        | Slot::InFlight(_)
        | Slot::CopiesInFlight(_)
        | Slot::Sums(_) => {}
    }
}

/// One segment while it runs.
pub struct Run<'a, D: Device> {
    ctx: &'a Context<'a, D>,
    segment: &'a Segment,
    fields: &'a [Field],
    activation: Activation,
    layer: usize,
    sizes: &'a Sizes,
    slots: Vec<Option<Slot<D>>>,
}

/// The message of a value that is missing or of another type, which the lowering excludes.
const LOWERED: &str = "the lowering makes each value before it is read";

impl<'a, D: Device> Run<'a, D> {
    /// A segment without values.
    pub fn new(
        ctx: &'a Context<'a, D>,
        segment: &'a Segment,
        fields: &'a [Field],
        activation: Activation,
        layer: usize,
        sizes: &'a Sizes,
    ) -> Self {
        let slots = segment.values.iter().map(|_| None).collect();
        Self { ctx, segment, fields, activation, layer, sizes, slots }
    }

    /// Runs the forward pass.
    ///
    /// # Errors
    /// Those of any collective call.
    pub async fn forward(&mut self, given: Slot<D>) -> Result<Slot<D>, CommError> {
        let Function { input, steps, output, .. } = &self.segment.forward;
        if let Some(input) = input {
            self.slots[*input] = Some(given);
        }
        self.steps(steps, None).await?;
        Ok(self.slots[output.expect(LOWERED)].take().expect(LOWERED))
    }

    /// Takes out what is kept for the backward pass.
    pub fn keep(mut self, recompute: Recompute) -> Vec<(Value, Slot<D>)> {
        let kept = self.segment.kept(recompute);
        kept.iter().map(|&value| (value, self.slots[value].take().expect(LOWERED))).collect()
    }

    /// Puts back what was kept, and computes the rest again.
    ///
    /// # Errors
    /// Those of any collective call.
    pub async fn restore(
        &mut self,
        recompute: Recompute,
        kept: Vec<(Value, Slot<D>)>,
    ) -> Result<(), CommError> {
        for (value, slot) in kept {
            self.slots[value] = Some(slot);
        }
        match self.segment.restores.get(&recompute) {
            Some(restore) => self.steps(&restore.steps, None).await,
            None => Ok(()),
        }
    }

    /// Runs the backward pass. Returns an empty buffer if nothing is left to pass on.
    ///
    /// # Errors
    /// Those of any collective call.
    pub async fn backward(
        &mut self,
        dy: Rc<Buffer<D>>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Rc<Buffer<D>>, CommError> {
        let mut passed = dy;
        for Function { input, steps, output, .. } in &self.segment.backward {
            if let Some(input) = input {
                self.slots[*input] = Some(Slot::Tensor(passed));
            }
            self.steps(steps, Some(gradients)).await?;
            passed = match output {
                Some(output) => self.take(*output),
                None => Rc::new(Buffer::empty()),
            };
        }
        Ok(passed)
    }

    async fn steps(
        &mut self,
        steps: &[Step],
        mut gradients: Option<&mut Gradients<'_, D>>,
    ) -> Result<(), CommError> {
        for step in steps {
            let waits = matches!(step.op, Op::FinishDispatch { .. } | Op::FinishCombine { .. });
            if waits && self.sizes.paired {
                other_pass().await;
            }
            self.step(step, &mut gradients)?;
            for &value in &step.last_uses {
                self.slots[value] = None;
            }
        }
        Ok(())
    }

    fn set(&mut self, value: Value, tensor: Buffer<D>) {
        self.slots[value] = Some(Slot::Tensor(Rc::new(tensor)));
    }

    fn get(&self, value: Value) -> &Rc<Buffer<D>> {
        match &self.slots[value] {
            Some(Slot::Tensor(tensor)) => tensor,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn take(&mut self, value: Value) -> Rc<Buffer<D>> {
        match self.slots[value].take() {
            Some(Slot::Tensor(tensor)) => tensor,
            _ => unreachable!("{LOWERED}"),
        }
    }

    /// The tensor, to be written: moved if this is its last use, else a copy.
    fn own(&mut self, step: &Step, value: Value) -> Buffer<D> {
        let shared = match step.ends(value) {
            true => self.take(value),
            false => self.get(value).clone(),
        };
        self.ctx.own(shared)
    }

    fn statistics(&self, value: Value) -> &Rc<Statistics<D>> {
        match &self.slots[value] {
            Some(Slot::Statistics(statistics)) => statistics,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn wide(&self, value: Value) -> &WideBuffer<D> {
        match &self.slots[value] {
            Some(Slot::Wide(wide)) => wide,
            _ => unreachable!("{LOWERED}"),
        }
    }

    /// The numbers, to be written: moved if this is their last use, else a copy.
    fn own_wide(&mut self, step: &Step, value: Value) -> WideBuffer<D> {
        if !step.ends(value) {
            return self.ctx.pools.wide.copy_of(self.ctx.device, self.wide(value));
        }
        match self.slots[value].take() {
            Some(Slot::Wide(wide)) => wide,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn route(&self, value: Value) -> &Rc<Route<D>> {
        match &self.slots[value] {
            Some(Slot::Route(route)) => route,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn received(&self, value: Value) -> &Received<D> {
        match &self.slots[value] {
            Some(Slot::Received(received)) => received,
            _ => unreachable!("{LOWERED}"),
        }
    }

    /// One of the chunks in which rows pass through experts; all rows if `None`.
    fn chunk(&self, index: Option<u64>) -> Chunk {
        index.map_or(Chunk::WHOLE, |index| Chunk {
            index: index as usize,
            of: self.sizes.chunks as usize,
        })
    }

    fn take_sums(&mut self, value: Value) -> AttentionSums<D> {
        match self.slots[value].take() {
            Some(Slot::Sums(sums)) => sums,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn take_in_flight(&mut self, value: Value) -> CopiesInFlight<D> {
        match self.slots[value].take() {
            Some(Slot::CopiesInFlight(in_flight)) => in_flight,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn is_received(&self, value: Value) -> bool {
        matches!(self.slots[value], Some(Slot::Received(_)))
    }

    /// The rows: moved if this is their last use, else another handle.
    fn taken(&mut self, step: &Step, value: Value) -> Received<D> {
        if !step.ends(value) {
            return self.received(value).clone();
        }
        match self.slots[value].take() {
            Some(Slot::Received(received)) => received,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn set_received(&mut self, value: Value, received: Received<D>) {
        self.slots[value] = Some(Slot::Received(received));
    }

    fn router(&self, field: usize) -> ops::Router {
        match self.fields[field] {
            Field::Router(router) => router,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn experts(&self, field: usize) -> &ops::ExpertLinear {
        match &self.fields[field] {
            Field::Experts(experts) => experts,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn norm(&self, field: usize) -> ops::Norm {
        match self.fields[field] {
            Field::Norm(norm) => norm,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn linear(&self, field: usize) -> ops::Linear {
        match self.fields[field] {
            Field::Linear(linear) => linear,
            Field::Router(router) => router.linear,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn attention(&self, field: usize) -> ops::Attention {
        match self.fields[field] {
            Field::Attention(attention) => attention,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn loss(&self, field: usize) -> ops::CrossEntropy {
        match self.fields[field] {
            Field::Loss(loss) => loss,
            Field::FusedLoss(fused) => fused.loss,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn fused_loss(&self, field: usize) -> ops::FusedLoss {
        match self.fields[field] {
            Field::FusedLoss(fused) => fused,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn bias(&self, field: usize) -> ops::RowBias {
        match self.fields[field] {
            Field::Bias(bias) => bias,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn tokens(&self, field: usize) -> ops::TokenEmbedding {
        match self.fields[field] {
            Field::Tokens(tokens) => tokens,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn positions(&self, field: usize) -> ops::Positions {
        match self.fields[field] {
            Field::Positions(positions) => positions,
            _ => unreachable!("{LOWERED}"),
        }
    }

    fn step(
        &mut self,
        step: &Step,
        gradients: &mut Option<&mut Gradients<'_, D>>,
    ) -> Result<(), CommError> {
        let ctx = self.ctx;
        match step.op {
            Op::Norm { field, stream, x, to, statistics } => {
                let Some(Slot::Stream(stream)) = self.slots[stream].take() else {
                    unreachable!("{LOWERED}")
                };
                let (whole, h, s) = self.norm(field).of(ctx, stream);
                self.slots[x] = Some(Slot::Tensor(whole));
                self.set(to, h);
                self.slots[statistics] = Some(Slot::Statistics(Rc::new(s)));
            }
            Op::NormOf { field, x, to, statistics } => {
                let (h, s) = self.norm(field).forward(ctx, self.get(x));
                self.set(to, h);
                if let Some(statistics) = statistics {
                    self.slots[statistics] = Some(Slot::Statistics(Rc::new(s)));
                }
            }
            Op::AllGather { x, to } => self.set(to, ctx.all_gather(self.get(x))?),
            Op::ReduceScatter { x, to } => {
                let part = self.own(step, x);
                self.set(to, ctx.reduce_scatter(part)?);
            }
            Op::AllReduce { x, to } => {
                let part = self.own(step, x);
                self.set(to, ctx.all_reduce(part)?);
            }
            Op::StartAllGather { x, to } => {
                let moving = ctx.start_all_gather(self.get(x))?;
                self.slots[to] = Some(Slot::InFlight(moving));
            }
            Op::StartReduceScatter { x, to } => {
                let part = self.own(step, x);
                self.slots[to] = Some(Slot::InFlight(ctx.start_reduce_scatter(part)?));
            }
            Op::StartAllReduce { x, to } => {
                let part = self.own(step, x);
                self.slots[to] = Some(Slot::InFlight(ctx.start_all_reduce(part)?));
            }
            Op::Wait { x, to } => {
                let Some(Slot::InFlight(moving)) = self.slots[x].take() else {
                    unreachable!("{LOWERED}")
                };
                self.set(to, moving.wait(ctx)?);
            }
            Op::AllReduceNumbers { x, reduction, to } => {
                let part = self.own_wide(step, x);
                let op = match reduction {
                    lower::Reduction::Sum => comm::Op::Sum,
                    lower::Reduction::Max => comm::Op::Max,
                };
                self.slots[to] = Some(Slot::Wide(ctx.all_reduce_rows(part, op)?));
            }
            Op::Linear { field, x, to } => {
                let y = self.linear(field).forward(ctx, self.get(x));
                self.set(to, y);
            }
            Op::AddBias { field, x, to } => {
                let mut sum = self.own(step, x);
                self.bias(field).add(ctx, &mut sum);
                self.set(to, sum);
            }
            Op::Add { x, y, to } => {
                let mut sum = self.own(step, x);
                ctx.device.add(self.get(y).view(), sum.view_mut());
                self.set(to, sum);
            }
            Op::Rotate { field, x, to } => {
                let mut rotated = self.own(step, x);
                self.attention(field).rotate(ctx, &mut rotated);
                self.set(to, rotated);
            }
            Op::ToHeads { field, x, to, heads } => {
                let core = self.attention(field);
                let heads = count(&core, heads);
                let y = core.to_heads(ctx, self.get(x), heads)?;
                self.set(to, y);
            }
            Op::ToTokens { field, x, to, heads } => {
                let core = self.attention(field);
                let heads = count(&core, heads);
                let y = core.to_tokens(ctx, self.get(x), heads)?;
                self.set(to, y);
            }
            Op::RotateBack { field, x, to } => {
                let mut rotated = self.own(step, x);
                self.attention(field).rotate_back(ctx, &mut rotated);
                self.set(to, rotated);
            }
            Op::JoinHeads { field, up, rotary, to: [to_k, to_v] } => {
                let [k, v] = self.attention(field).join(ctx, self.get(up), self.get(rotary));
                self.set(to_k, k);
                self.set(to_v, v);
            }
            Op::SplitHeads { field, dk, dv, to: [to_up, to_rotary] } => {
                let core = self.attention(field);
                let [dup, drotary] = core.split(ctx, self.get(dk), self.get(dv));
                self.set(to_up, dup);
                self.set(to_rotary, drotary);
            }
            Op::Attention { field, q, k, v, chunk, to, lse } => {
                let [q, k, v] = [q, k, v].map(|value| self.get(value));
                let core = self.attention(field);
                let (out, rows) = match (chunk, ctx.cp.parallel.ring()) {
                    (Some(_), _) => core.forward_chunk(ctx, self.chunk(chunk), q, k, v),
                    (None, 1) => core.forward(ctx, q, k, v),
                    (None, _) => core.forward_around(ctx, q, k, v)?,
                };
                self.set(to, out);
                self.slots[lse] = Some(Slot::Wide(rows));
            }
            Op::Chunk { x, chunk, to } => {
                let part = ctx.chunk_of(self.get(x), self.chunk(Some(chunk)));
                self.set(to, part);
            }
            Op::Join { ref parts, to } => {
                let parts: Vec<&Buffer<D>> = parts.iter().map(|&part| &**self.get(part)).collect();
                let joined = ctx.joined(&parts);
                self.set(to, joined);
            }
            Op::BeginSums { field, saved, to } => {
                let [q, k, v] = saved.map(|value| self.get(value));
                let sums = self.attention(field).begin_sums(ctx, q, k, v);
                self.slots[to] = Some(Slot::Sums(sums));
            }
            Op::AddToSums { field, chunk, saved: [q, k, v, out, lse], dy, sums, to } => {
                let sums = self.take_sums(sums);
                let [q, k, v, out] = [q, k, v, out].map(|value| &**self.get(value));
                let saved = AttentionSaved { q, k, v, out, lse: self.wide(lse) };
                let (core, chunk) = (self.attention(field), self.chunk(Some(chunk)));
                let sums = core.add_to_sums(ctx, chunk, &saved, self.get(dy), sums);
                self.slots[to] = Some(Slot::Sums(sums));
            }
            Op::FinishSums { field, sums, to } => {
                let sums = self.take_sums(sums);
                let gradients = self.attention(field).finish_sums(ctx, sums);
                for (to, gradient) in to.into_iter().zip(gradients) {
                    self.set(to, gradient);
                }
            }
            Op::StartDispatch { route, x, to } => {
                let copies = self.own(step, x);
                let in_flight = self.route(route).start_dispatch(ctx, copies)?;
                self.slots[to] = Some(Slot::CopiesInFlight(in_flight));
            }
            Op::FinishDispatch { route, x, to } => {
                let in_flight = self.take_in_flight(x);
                let received = self.route(route).finish_dispatch(ctx, in_flight)?;
                self.set_received(to, received);
            }
            Op::StartCombine { route, x, to } => {
                let made = self.taken(step, x);
                let in_flight = self.route(route).start_combine(ctx, made)?;
                self.slots[to] = Some(Slot::CopiesInFlight(in_flight));
            }
            Op::FinishCombine { route, x, to } => {
                let in_flight = self.take_in_flight(x);
                let copies = self.route(route).finish_combine(ctx, in_flight)?;
                self.set(to, copies);
            }
            Op::Route { field, x, chunk, to } => {
                let route = self.router(field).route(ctx, self.get(x), self.chunk(chunk))?;
                self.slots[to] = Some(Slot::Route(Rc::new(route)));
            }
            Op::NoteLoad { field, route } => {
                self.router(field).note_load(ctx, self.route(route))?;
            }
            Op::Copies { route, x, to } => {
                let copies = self.route(route).copied(ctx, self.get(x));
                self.set(to, copies);
            }
            Op::SumCopies { route, x, to } => {
                let sums = self.route(route).summed(ctx, self.get(x));
                self.set(to, sums);
            }
            Op::Dispatch { route, x, to } => {
                let copies = self.own(step, x);
                let received = self.route(route).dispatch(ctx, copies)?;
                self.set_received(to, received);
            }
            Op::Combine { route, x, to } => {
                let made = self.taken(step, x);
                let copies = self.route(route).combine(ctx, made)?;
                self.set(to, copies);
            }
            Op::ExpertLinear { field, x, to } => {
                let y = self.experts(field).forward(ctx, self.received(x));
                self.set_received(to, y);
            }
            Op::WeightedSum { route, x, to } => {
                let sums = self.route(route).weighted_sum(ctx, self.get(x));
                self.set(to, sums);
            }
            Op::WeightedSumBackward { route, x, dy, to, weights } => {
                let (copies, dy) = (self.get(x), self.get(dy));
                let (dcopies, dweights) = self.route(route).weighted_sum_backward(ctx, copies, dy);
                self.set(to, dcopies);
                self.slots[weights] = Some(Slot::Wide(dweights));
            }
            Op::ExpertBackward { field, dy, to } => {
                let dx = self.experts(field).backward_input(ctx, self.received(dy), None);
                self.set_received(to, dx);
            }
            Op::AddExpertBackward { field, dy, x, to } => {
                let dx = ctx.own(self.taken(step, x).rows);
                let dx = self.experts(field).backward_input(ctx, self.received(dy), Some(dx));
                self.set_received(to, dx);
            }
            Op::RouteBackward { field, route, weights, to } => {
                let dweights = self.wide(weights);
                let dlogits = self.router(field).backward(ctx, self.route(route), dweights)?;
                self.set(to, dlogits);
            }
            Op::Activate { x, to } if self.is_received(x) => {
                let x = self.received(x);
                let y = x.with(activation::activate(ctx, self.activation, &x.rows));
                self.set_received(to, y);
            }
            Op::Gate { gate, up, to } if self.is_received(up) => {
                let (gate, up) = (self.received(gate), self.received(up));
                let y = activation::gate(ctx, self.activation, &gate.rows, &up.rows);
                let y = up.with(y);
                self.set_received(to, y);
            }
            Op::ActivateBackward { x, dy, to } if self.is_received(x) => {
                let (x, dy) = (self.received(x), self.received(dy));
                let dx = activation::activate_backward(ctx, self.activation, &x.rows, &dy.rows);
                let dx = x.with(dx);
                self.set_received(to, dx);
            }
            Op::GateBackward { gate, up, dy, to: [to_gate, to_up] } if self.is_received(up) => {
                let [gate, up, dy] = [gate, up, dy].map(|value| self.received(value));
                let (f, rows) = (self.activation, &up.rows);
                let made = activation::gate_backward(ctx, f, &gate.rows, rows, &dy.rows);
                let [dgate, dup] = made.map(|rows| up.with(rows));
                self.set_received(to_gate, dgate);
                self.set_received(to_up, dup);
            }
            Op::Activate { x, to } => {
                let y = activation::activate(ctx, self.activation, self.get(x));
                self.set(to, y);
            }
            Op::Gate { gate, up, to } => {
                let y = activation::gate(ctx, self.activation, self.get(gate), self.get(up));
                self.set(to, y);
            }
            Op::Dropout { place, x, to } => {
                let mut dropped = self.own(step, x);
                let place = place
                    .map_or(lower::EMBEDDING_PLACE, |within| dropout_place(self.layer, within));
                ctx.dropout(place, &mut dropped);
                self.set(to, dropped);
            }
            Op::Sum { x, branch, to } => {
                let branch = match step.ends(branch) {
                    true => self.take(branch),
                    false => self.get(branch).clone(),
                };
                let stream = Residual::Split(self.get(x).clone(), branch);
                self.slots[to] = Some(Slot::Stream(stream));
            }
            Op::Begin { x, to } => {
                let x = self.take(x);
                self.slots[to] = Some(Slot::Stream(Residual::Whole(x)));
            }
            Op::Embed { field, to } => {
                let rows = self.tokens(field).forward(ctx);
                self.set(to, rows);
            }
            Op::AddPositions { field, x, to } => {
                let mut sum = self.own(step, x);
                self.positions(field).add(ctx, &mut sum);
                self.set(to, sum);
            }
            Op::Loss { field, max, sum_exp, target, to } => {
                let softmax = Softmax { max: self.wide(max), sum_exp: self.wide(sum_exp) };
                let losses = self.loss(field).loss(ctx, &softmax, self.wide(target));
                self.slots[to] = Some(Slot::Wide(losses));
            }
            Op::LossGradient { field, logits, max, sum_exp, to } => {
                let mut dlogits = self.own(step, logits);
                let softmax = Softmax { max: self.wide(max), sum_exp: self.wide(sum_exp) };
                self.loss(field).gradient(ctx, &mut dlogits, &softmax);
                self.set(to, dlogits);
            }
            Op::Sums { field, x, to, sum_exp, target } => {
                let x = self.get(x);
                let own = match &self.fields[field] {
                    Field::FusedLoss(fused) => fused.sums(ctx, x),
                    _ => self.loss(field).sums(ctx, x),
                };
                self.slots[to] = Some(Slot::Wide(own.max));
                self.slots[sum_exp] = Some(Slot::Wide(own.sum_exp));
                self.slots[target] = Some(Slot::Wide(own.target));
            }
            Op::Around { field, own_sum, own, max, to } => {
                let sum_exp = self.own_wide(step, own_sum);
                let loss = self.loss(field);
                let around = loss.around(ctx, sum_exp, self.wide(own), self.wide(max));
                self.slots[to] = Some(Slot::Wide(around));
            }
            Op::BlockBackward { field, x, max, sum_exp, to } => {
                let softmax = Softmax { max: self.wide(max), sum_exp: self.wide(sum_exp) };
                let gradients = gradients.as_mut().expect(LOWERED);
                let dx = self.fused_loss(field).backward(ctx, self.get(x), &softmax, gradients);
                self.set(to, dx);
            }
            Op::BackwardInput { field, dy, to } => {
                let dx = self.linear(field).backward_input(ctx, self.get(dy));
                self.set(to, dx);
            }
            Op::AddBackwardInput { field, dy, x, to } => {
                let mut dx = self.own(step, x);
                let (linear, dy) = (self.linear(field), self.get(dy));
                linear.backward_input_to(ctx, dy, &mut dx, Output::Accumulate);
                self.set(to, dx);
            }
            Op::AttentionBackward { field, saved: [q, k, v, out, lse], dy, to } => {
                let [q, k, v, out] = [q, k, v, out].map(|value| &**self.get(value));
                let saved = AttentionSaved { q, k, v, out, lse: self.wide(lse) };
                let core = self.attention(field);
                let gradients = match ctx.cp.parallel.ring() {
                    1 => core.backward(ctx, &saved, self.get(dy)),
                    _ => core.backward_around(ctx, &saved, self.get(dy))?,
                };
                for (to, gradient) in to.into_iter().zip(gradients) {
                    self.set(to, gradient);
                }
            }
            Op::ActivateBackward { x, dy, to } => {
                let (x, dy) = (self.get(x), self.get(dy));
                let dx = activation::activate_backward(ctx, self.activation, x, dy);
                self.set(to, dx);
            }
            Op::GateBackward { gate, up, dy, to } => {
                let [gate, up, dy] = [gate, up, dy].map(|value| self.get(value));
                let both = activation::gate_backward(ctx, self.activation, gate, up, dy);
                for (to, gradient) in to.into_iter().zip(both) {
                    self.set(to, gradient);
                }
            }
            Op::NormBackward { field, x, statistics, dy, sum, to } => {
                let (mut dx, output) = match sum {
                    Some(sum) => (self.own(step, sum), Output::Accumulate),
                    None => (ctx.buffer(self.get(x).len()), Output::Overwrite),
                };
                let (s, dy) = (self.statistics(statistics), self.get(dy));
                self.norm(field).backward_input(ctx, self.get(x), s, dy, &mut dx, output);
                self.set(to, dx);
            }
            Op::LinearWeights { .. }
            | Op::ExpertWeights { .. }
            | Op::SinkWeights { .. }
            | Op::BiasWeights { .. }
            | Op::NormWeights { .. }
            | Op::TokenWeights { .. }
            | Op::PositionWeights { .. } => {
                if let Some(gradients) = gradients {
                    gradients.add(self.weights(&step.op));
                }
            }
        }
        Ok(())
    }

    fn weights(&self, op: &Op) -> ops::WeightWork<D> {
        match *op {
            Op::LinearWeights { field, x, dy } => {
                self.linear(field).weights(self.get(x), self.get(dy))
            }
            Op::ExpertWeights { field, x, dy } => {
                self.experts(field).weights(self.received(x), self.received(dy))
            }
            Op::SinkWeights { field, chunk, a, lse, dy } => {
                let chunk = chunk.map(|_| self.chunk(chunk));
                let made = (&**self.get(a), self.wide(lse));
                self.attention(field).sink_weights(self.ctx, chunk, made, self.get(dy))
            }
            Op::BiasWeights { field, dy } => self.bias(field).weights(self.get(dy)),
            Op::NormWeights { field, x, statistics, dy } => {
                self.norm(field).weights(self.get(x), self.statistics(statistics), self.get(dy))
            }
            Op::TokenWeights { field, dy } => self.tokens(field).weights(self.ctx, self.get(dy)),
            Op::PositionWeights { field, dy } => {
                self.positions(field).weights(self.ctx, self.get(dy))
            }
            _ => unreachable!("{LOWERED}"),
        }
    }
}

/// Heads that an exchange moves.
fn count(core: &ops::Attention, heads: lower::Heads) -> usize {
    match heads {
        lower::Heads::Queries => core.heads,
        lower::Heads::Keys | lower::Heads::Values => core.kv_heads,
    }
}
