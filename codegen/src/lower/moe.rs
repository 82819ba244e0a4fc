//! A mixture of experts: from the stream's normed rows to their weighted sums of experts' results.

use super::builder::Builder;
use super::op::{FieldIndex, Op, Value};
use super::{FieldKind, TensorNames, Type, Width};
use models::model::ModelSpec;

/// Fields of a mixture.
pub(super) struct Moe {
    router: FieldIndex,
    gate: Option<FieldIndex>,
    up: FieldIndex,
    down: FieldIndex,
    /// Whether its load counts: in losses, or for its selection bias.
    notes_load: bool,
}

/// Rows on their way to experts.
pub(super) struct Sent {
    h: Value,
    route: Value,
    /// Their copies: received, or in flight.
    in_flight: Value,
}

/// What this rank's experts make of the rows that they receive.
pub(super) struct Computed {
    received: Value,
    gate: Option<Value>,
    up: Value,
    product: Value,
    /// The results: home again, or in flight.
    coming: Value,
}

/// What the backward pass reads.
pub(super) struct Routed {
    h: Value,
    route: Value,
    received: Value,
    gate: Option<Value>,
    up: Value,
    /// What the activation makes.
    pub product: Value,
    /// Results of the experts, home again.
    results: Value,
}

/// Gradients of results on their way to experts.
pub(super) struct SentBack {
    weights: Value,
    in_flight: Value,
}

const INNER: Type = Type::Received(Width::ExpertFfn);
const RECEIVED: Type = Type::Received(Width::Hidden);
const COPIES: Type = Type::Copies(Width::Hidden);
const IN_FLIGHT: Type = Type::CopiesInFlight(Width::Hidden);

impl Moe {
    pub(super) fn fields(b: &mut Builder<'_>, model: &ModelSpec) -> Self {
        let tensors = model.moe.as_ref().map(|moe| moe.tensors).unwrap_or_default();
        let [gate, up, down] = TensorNames::expert(tensors);
        let moe = model.moe.as_ref();
        let bias = moe.is_some_and(|moe| moe.biased);
        let by_load = moe.is_some_and(models::model::Moe::updates_biases);
        let router = FieldKind::Router { tensor: TensorNames::router(tensors), bias, by_load };
        let router = b.field("router", router);
        let (inner, hidden) = (Width::ExpertFfn, Width::Hidden);
        let bias = model.expert_bias();
        let into = |tensor| FieldKind::Experts { tensor, bias, outputs: inner, inputs: hidden };
        let gated = model.mlp.activation.is_gated();
        let gate = gated.then(|| b.field("expert_gate", into(gate)));
        let up = b.field("expert_up", into(up));
        let out = FieldKind::Experts { tensor: down, bias, outputs: hidden, inputs: inner };
        let down = b.field("expert_down", out);
        let notes_load = by_load || moe.is_some_and(models::model::Moe::has_losses);
        Self { router, gate, up, down, notes_load }
    }

    /// Sends rows to their experts.
    pub(super) fn send(&self, b: &mut Builder<'_>, h: Value) -> Sent {
        let (field, chunk) = (self.router, b.chunk);
        let route = b.op("route", Type::Route, |to| Op::Route { field, x: h, chunk, to });
        if self.notes_load {
            b.push(Op::NoteLoad { field, route });
        }
        let copies = b.op("copies", COPIES, |to| Op::Copies { route, x: h, to });
        Sent { h, route, in_flight: dispatch(b, "received", route, copies) }
    }

    /// What experts make of the rows that they receive.
    pub(super) fn compute(&self, b: &mut Builder<'_>, sent: &Sent) -> Computed {
        let route = sent.route;
        let received = arrived(b, "received", route, sent.in_flight);
        let x = received;
        let gate =
            self.gate.map(|field| b.op("gate", INNER, |to| Op::ExpertLinear { field, x, to }));
        let up = b.op("up", INNER, |to| Op::ExpertLinear { field: self.up, x, to });
        let product = match gate {
            Some(gate) => b.op("inner", INNER, |to| Op::Gate { gate, up, to }),
            None => b.op("inner", INNER, |to| Op::Activate { x: up, to }),
        };
        let field = self.down;
        let made = b.op("made", RECEIVED, |to| Op::ExpertLinear { field, x: product, to });
        let coming = combine(b, "results", route, made);
        Computed { received, gate, up, product, coming }
    }

    /// The weighted sums, rows of the stream.
    pub(super) fn collect(
        &self,
        b: &mut Builder<'_>,
        Sent { h, route, .. }: Sent,
        Computed { received, gate, up, product, coming }: Computed,
    ) -> (Value, Routed) {
        let results = home(b, "results", route, coming);
        let of = b.sizes.stream();
        let sum = b.op("sum_2", of, |to| Op::WeightedSum { route, x: results, to });
        (sum, Routed { h, route, received, gate, up, product, results })
    }

    /// Sends the gradients of results to the experts, from that of the sums.
    pub(super) fn send_back(&self, b: &mut Builder<'_>, of: &Routed, dy: Value) -> SentBack {
        let &Routed { route, results, .. } = of;
        let [to, weights] = [b.value("dresults", COPIES), b.value("dweights", Type::CopyNumbers)];
        b.push(Op::WeightedSumBackward { route, x: results, dy, to, weights });
        SentBack { weights, in_flight: dispatch(b, "dmade", route, to) }
    }

    /// The gradients of what experts received, on their way back.
    pub(super) fn compute_back(&self, b: &mut Builder<'_>, of: &Routed, back: &SentBack) -> Value {
        let &Routed { route, received, gate, up, product, .. } = of;
        let dmade = arrived(b, "dmade", route, back.in_flight);
        let field = self.down;
        let dinner = b.op("dinner", INNER, |to| Op::ExpertBackward { field, dy: dmade, to });
        b.push(Op::ExpertWeights { field, x: product, dy: dmade });
        let dx = self.backward_inner(b, [received, up], gate, dinner);
        combine(b, "dcopies", route, dx)
    }

    /// The gradient of the rows.
    pub(super) fn collect_back(
        &self,
        b: &mut Builder<'_>,
        of: &Routed,
        back: &SentBack,
        coming: Value,
    ) -> Value {
        let (&Routed { h, route, .. }, weights) = (of, back.weights);
        let dcopies = home(b, "dcopies", route, coming);
        let stream = b.sizes.stream();
        let dh = b.op("dh_2", stream, |to| Op::SumCopies { route, x: dcopies, to });
        let (of, field) = (b.sizes.logits_of_experts(), self.router);
        let dlogits = b.op("dlogits", of, |to| Op::RouteBackward { field, route, weights, to });
        b.push(Op::LinearWeights { field, x: h, dy: dlogits });
        b.op("dh_2", stream, |to| Op::AddBackwardInput { field, dy: dlogits, x: dh, to })
    }

    /// The gradient of the experts' input, from that of what the activation makes.
    fn backward_inner(
        &self,
        b: &mut Builder<'_>,
        [received, up]: [Value; 2],
        gate: Option<Value>,
        dy: Value,
    ) -> Value {
        let (Some(field), Some(gate)) = (self.gate, gate) else {
            let dup = b.op("dup", INNER, |to| Op::ActivateBackward { x: up, dy, to });
            b.push(Op::ExpertWeights { field: self.up, x: received, dy: dup });
            return b.op("dreceived", RECEIVED, |to| Op::ExpertBackward {
                field: self.up,
                dy: dup,
                to,
            });
        };
        let [dgate, dup] = [b.value("dgate", INNER), b.value("dup", INNER)];
        b.push(Op::GateBackward { gate, up, dy, to: [dgate, dup] });
        b.push(Op::ExpertWeights { field, x: received, dy: dgate });
        b.push(Op::ExpertWeights { field: self.up, x: received, dy: dup });
        let x = b.op("dreceived", RECEIVED, |to| Op::ExpertBackward { field, dy: dgate, to });
        let add = |to| Op::AddExpertBackward { field: self.up, dy: dup, x, to };
        b.op("dreceived", RECEIVED, add)
    }
}

/// Whether something runs while rows are on their way: another chunk, or the other pass of a pair.
fn overlaps(b: &Builder<'_>) -> bool {
    b.chunk.is_some() || b.sizes.paired
}

/// Copies to the ranks of their experts: at once, or on their way if something runs meanwhile.
fn dispatch(b: &mut Builder<'_>, name: &str, route: Value, x: Value) -> Value {
    match overlaps(b) {
        false => b.op(name, RECEIVED, |to| Op::Dispatch { route, x, to }),
        true => b.op(in_flight_name(name), IN_FLIGHT, |to| Op::StartDispatch { route, x, to }),
    }
}

/// What came of [`dispatch`].
fn arrived(b: &mut Builder<'_>, name: &str, route: Value, x: Value) -> Value {
    match overlaps(b) {
        false => x,
        true => b.op(name, RECEIVED, |to| Op::FinishDispatch { route, x, to }),
    }
}

/// What experts made back to the ranks of the copies, at once or on its way.
fn combine(b: &mut Builder<'_>, name: &str, route: Value, x: Value) -> Value {
    match overlaps(b) {
        false => b.op(name, COPIES, |to| Op::Combine { route, x, to }),
        true => b.op(in_flight_name(name), IN_FLIGHT, |to| Op::StartCombine { route, x, to }),
    }
}

/// What came of [`combine`].
fn home(b: &mut Builder<'_>, name: &str, route: Value, x: Value) -> Value {
    match overlaps(b) {
        false => x,
        true => b.op(name, COPIES, |to| Op::FinishCombine { route, x, to }),
    }
}

fn in_flight_name(name: &str) -> String {
    format!("{name}_in_flight")
}
