//! One operation as one Rust statement, which calls the library's typed layers.

use super::replicas::Replicas;
use super::text::in_width;
use super::types::type_name;
use crate::lower::{Heads, Lowered, Op, Reduction, Segment, Step, Type, Value, Width};

/// Prints the statements of a segment.
pub struct Statements<'a> {
    pub(super) lowered: &'a Lowered,
    pub(super) segment: &'a Segment,
    /// Bytes of an element of activations.
    pub(super) element_bytes: u64,
}

impl<'a> Statements<'a> {
    /// Statements of one segment.
    pub fn new(lowered: &'a Lowered, segment: &'a Segment, element_bytes: u64) -> Self {
        Self { lowered, segment, element_bytes }
    }

    /// The statements of some operations, at `indent`.
    pub fn of(&self, steps: &[Step], indent: usize) -> Vec<String> {
        steps.iter().flat_map(|step| self.lines(step, indent)).collect()
    }

    fn lines(&self, step: &Step, indent: usize) -> Vec<String> {
        let code = self.code(step);
        let lines = match self.note(&step.op) {
            Some(note) => commented(code, &note, indent),
            None => broken(code, indent),
        };
        let waits = matches!(step.op, Op::FinishDispatch { .. } | Op::FinishCombine { .. });
        let before = (waits && self.lowered.sizes.paired).then(|| "other_pass().await;".to_owned());
        before.into_iter().chain(lines).collect()
    }

    /// Whether passes can be those of pairs.
    pub fn paired(&self) -> bool {
        self.lowered.sizes.paired
    }

    /// The replicas of the segment's parameters.
    pub fn replicas(&self) -> Replicas {
        Replicas::of(self.lowered, self.segment)
    }

    /// A value's name.
    pub fn name(&self, value: Value) -> &str {
        &self.segment.values[value].name
    }

    fn field(&self, index: usize) -> &str {
        self.segment.fields[index].name
    }

    /// A value that the operation takes: moved where it is used last, else another handle of it.
    fn taken(&self, step: &Step, value: Value) -> String {
        match step.ends(value) {
            true => self.name(value).to_owned(),
            false => format!("{}.share()", self.name(value)),
        }
    }

    /// The name of a value with its type.
    fn typed(&self, value: Value) -> String {
        format!("{}: {}", self.name(value), type_name(self.lowered, &self.segment.values[value]))
    }

    fn code(&self, step: &Step) -> String {
        // What nothing reads has no name.
        let n = |value| {
            let unread = step.op.makes().contains(&value) && step.ends(value);
            if unread { "_" } else { self.name(value) }
        };
        let f = |index| self.field(index);
        match step.op {
            Op::Norm { field, stream, x, to, statistics } => format!(
                "let ({}, {}, {}) = self.{}.forward(ctx, {});",
                n(x),
                n(to),
                n(statistics),
                f(field),
                n(stream)
            ),
            Op::NormOf { field, x, to, statistics: Some(s) } => {
                format!("let ({}, {}) = self.{}.of(ctx, &{});", n(to), n(s), f(field), n(x))
            }
            Op::NormOf { field, x, to, statistics: None } => {
                format!("let {} = self.{}.again(ctx, &{});", n(to), f(field), n(x))
            }
            Op::AllGather { x, to } => {
                format!("let {} = tp.all_gather(&{})?;", self.typed(to), n(x))
            }
            Op::ReduceScatter { x, to } => {
                format!("let {} = tp.reduce_scatter({})?;", self.typed(to), self.taken(step, x))
            }
            Op::AllReduce { x, to } => {
                format!("let {} = tp.all_reduce({})?;", self.typed(to), self.taken(step, x))
            }
            Op::StartAllGather { x, to } => {
                format!("let {} = tp.start_all_gather(&{})?;", n(to), n(x))
            }
            Op::StartReduceScatter { x, to } => {
                format!("let {} = tp.start_reduce_scatter({})?;", n(to), self.taken(step, x))
            }
            Op::StartAllReduce { x, to } => {
                format!("let {} = tp.start_all_reduce({})?;", n(to), self.taken(step, x))
            }
            Op::Wait { x, to } => format!("let {} = {}.wait()?;", self.typed(to), n(x)),
            Op::AllReduceNumbers { x, reduction, to } => {
                let how = match reduction {
                    Reduction::Sum => "sum",
                    Reduction::Max => "max",
                };
                format!("let {} = tp.{how}({})?;", n(to), self.taken(step, x))
            }
            Op::Linear { field, x, to } | Op::ExpertLinear { field, x, to } => {
                format!("let {} = self.{}.forward(ctx, &{});", n(to), f(field), n(x))
            }
            Op::AddBias { field, x, to } | Op::AddPositions { field, x, to } => {
                let x = self.taken(step, x);
                format!("let {} = self.{}.add(ctx, {x});", n(to), f(field))
            }
            Op::Add { x, y, to } => {
                format!("let {} = {}.add(ctx, &{});", n(to), self.taken(step, x), n(y))
            }
            Op::Rotate { field, x, to } => {
                let (shared, x) = (self.shared(x), self.taken(step, x));
                format!("let {} = self.{}.rotate{shared}(ctx, {x});", n(to), f(field))
            }
            Op::RotateBack { field, x, to } => {
                let (shared, x) = (self.shared(x), self.taken(step, x));
                format!("let {} = self.{}.rotate{shared}_back(ctx, {x});", n(to), f(field))
            }
            Op::Attention { field, q, k, v, chunk: Some(chunk), to, lse } => {
                let of = type_name(self.lowered, &self.segment.values[to]);
                let (to, lse, field, q, k, v) = (n(to), n(lse), f(field), n(q), n(k), n(v));
                format!(
                    "let ({to}, {lse}): ({of}, _) = self.{field}.forward_chunk(ctx, CHUNK[{chunk}], \
                     &{q}, &{k}, &{v});"
                )
            }
            Op::Attention { field, q, k, v, chunk: None, to, lse } => {
                let (call, wait) = self.around("forward");
                let (to, lse, field) = (n(to), n(lse), f(field));
                format!(
                    "let ({to}, {lse}) = self.{field}.{call}(ctx, &{}, &{}, &{}){wait};",
                    n(q),
                    n(k),
                    n(v)
                )
            }
            Op::ToHeads { field, x, to, heads } => {
                let what = named(heads);
                let (to, field, x) = (self.typed(to), f(field), n(x));
                format!("let {to} = self.{field}.{what}_to_heads(ctx, &{x})?;")
            }
            Op::ToTokens { field, x, to, heads } => {
                let what = named(heads);
                let (to, field, x) = (self.typed(to), f(field), n(x));
                format!("let {to} = self.{field}.{what}_to_tokens(ctx, &{x})?;")
            }
            Op::JoinHeads { field, up, rotary, to: [k, v] } => {
                let of = |value: Value| type_name(self.lowered, &self.segment.values[value]);
                format!(
                    "let ({}, {}): ({}, {}) = self.{}.join(ctx, &{}, &{});",
                    n(k),
                    n(v),
                    of(k),
                    of(v),
                    f(field),
                    n(up),
                    n(rotary)
                )
            }
            Op::SplitHeads { field, dk, dv, to } => {
                let to = to.map(n).join(", ");
                format!("let ({to}) = self.{}.split(ctx, &{}, &{});", f(field), n(dk), n(dv))
            }
            Op::Chunk { x, chunk, to } => {
                format!("let {} = {}.chunk(ctx, CHUNK[{chunk}]);", self.typed(to), n(x))
            }
            Op::Join { ref parts, to } => {
                let parts: Vec<String> =
                    parts.iter().map(|&part| format!("&{}", n(part))).collect();
                format!("let {} = Tensor::joined(ctx, &[{}]);", self.typed(to), parts.join(", "))
            }
            Op::BeginSums { field, saved, to } => {
                let saved = saved.map(|value| format!("&{}", n(value))).join(", ");
                format!("let {} = self.{}.begin_sums(ctx, {saved});", n(to), f(field))
            }
            Op::AddToSums { field, chunk, saved, dy, sums, to } => {
                let saved = saved.map(|value| format!("&{}", n(value))).join(", ");
                let (to, field, dy, sums) = (n(to), f(field), n(dy), n(sums));
                format!(
                    "let {to} = self.{field}.add_to_sums(ctx, CHUNK[{chunk}], ({saved}), &{dy}, \
                     {sums});"
                )
            }
            Op::FinishSums { field, sums, to } => {
                let to = to.map(n).join(", ");
                format!("let ({to}) = self.{}.finish_sums(ctx, {});", f(field), n(sums))
            }
            Op::StartDispatch { route, x, to } => {
                let x = self.taken(step, x);
                format!("let {} = {}.start_dispatch(ctx, {x})?;", n(to), n(route))
            }
            Op::FinishDispatch { route, x, to } => {
                format!("let {} = {}.finish_dispatch(ctx, {})?;", n(to), n(route), n(x))
            }
            Op::StartCombine { route, x, to } => {
                let x = self.taken(step, x);
                format!("let {} = {}.start_combine(ctx, {x})?;", n(to), n(route))
            }
            Op::FinishCombine { route, x, to } => {
                format!("let {} = {}.finish_combine(ctx, {})?;", n(to), n(route), n(x))
            }
            Op::Route { field, x, chunk: None, to } => {
                format!("let {} = self.{}.route(ctx, &{})?;", n(to), f(field), n(x))
            }
            Op::Route { field, x, chunk: Some(chunk), to } => {
                let (to, field, x) = (n(to), f(field), n(x));
                format!("let {to} = self.{field}.route_chunk(ctx, CHUNK[{chunk}], &{x})?;")
            }
            Op::NoteLoad { field, route } => {
                format!("self.{}.note_load(ctx, &{})?;", f(field), n(route))
            }
            Op::Copies { route, x, to } => {
                format!("let {} = {}.copies(ctx, &{});", n(to), n(route), n(x))
            }
            Op::SumCopies { route, x, to } => {
                format!("let {} = {}.sum(ctx, &{});", self.typed(to), n(route), n(x))
            }
            Op::Dispatch { route, x, to } => {
                format!("let {} = {}.dispatch(ctx, {})?;", n(to), n(route), self.taken(step, x))
            }
            Op::Combine { route, x, to } => {
                format!("let {} = {}.combine(ctx, {})?;", n(to), n(route), self.taken(step, x))
            }
            Op::WeightedSum { route, x, to } => {
                format!("let {} = {}.weighted_sum(ctx, &{});", self.typed(to), n(route), n(x))
            }
            Op::WeightedSumBackward { route, x, dy, to, weights } => format!(
                "let ({}, {}) = {}.weighted_sum_backward(ctx, &{}, &{});",
                n(to),
                n(weights),
                n(route),
                n(x),
                n(dy)
            ),
            Op::RouteBackward { field, route, weights, to } => {
                let (to, route, weights) = (self.typed(to), n(route), n(weights));
                format!("let {to} = self.{}.backward(ctx, &{route}, &{weights})?;", f(field))
            }
            Op::Activate { x, to } if self.is_received(x) => {
                format!("let {} = Received::activate(ctx, ACTIVATION, &{});", n(to), n(x))
            }
            Op::Gate { gate, up, to } if self.is_received(up) => format!(
                "let {} = Received::gated(ctx, ACTIVATION, &{}, &{});",
                n(to),
                n(gate),
                n(up)
            ),
            Op::Activate { x, to } => {
                format!("let {} = activate(ctx, ACTIVATION, &{});", n(to), n(x))
            }
            Op::Gate { gate, up, to } => {
                format!("let {} = gated(ctx, ACTIVATION, &{}, &{});", n(to), n(gate), n(up))
            }
            Op::Dropout { place, x, to } => {
                let x = self.taken(step, x);
                let place = match place {
                    Some(within) => format!("self.dropout + {within}"),
                    None => "u32::MAX".to_owned(),
                };
                format!("let {} = dropout(ctx, {place}, {x});", n(to))
            }
            Op::Sum { x, branch, to } => {
                format!("let {} = Stream::sum(&{}, {});", n(to), n(x), self.taken(step, branch))
            }
            Op::Begin { x, to } => format!("let {} = Stream::begin({});", n(to), n(x)),
            Op::Embed { field, to } => {
                format!("let {} = self.{}.forward(ctx);", self.typed(to), f(field))
            }
            Op::Loss { field, max, sum_exp, target, to } => format!(
                "let {} = self.{}.loss(ctx, &{}, &{}, &{});",
                n(to),
                f(field),
                n(max),
                n(sum_exp),
                n(target)
            ),
            Op::LossGradient { field, logits, max, sum_exp, to } => format!(
                "let {} = self.{}.gradient(ctx, {}, &{}, &{});",
                n(to),
                f(field),
                self.taken(step, logits),
                n(max),
                n(sum_exp)
            ),
            Op::Sums { field, x, to, sum_exp, target } => format!(
                "let ({}, {}, {}) = self.{}.sums(ctx, &{});",
                n(to),
                n(sum_exp),
                n(target),
                f(field),
                n(x)
            ),
            Op::Around { field, own_sum, own, max, to } => format!(
                "let {} = self.{}.around(ctx, {}, &{}, &{});",
                n(to),
                f(field),
                self.taken(step, own_sum),
                n(own),
                n(max)
            ),
            Op::BlockBackward { field, x, max, sum_exp, to } => format!(
                "let {} = self.{}.backward(ctx, &{}, &{}, &{}, gradients);",
                n(to),
                f(field),
                n(x),
                n(max),
                n(sum_exp)
            ),
            Op::BackwardInput { field, dy, to } | Op::ExpertBackward { field, dy, to } => {
                format!("let {} = self.{}.backward(ctx, &{});", n(to), f(field), n(dy))
            }
            Op::AddBackwardInput { field, dy, x, to }
            | Op::AddExpertBackward { field, dy, x, to } => {
                let x = self.taken(step, x);
                format!("let {} = self.{}.add_backward(ctx, &{}, {x});", n(to), f(field), n(dy))
            }
            Op::AttentionBackward { field, saved, dy, to } => {
                let saved = saved.map(|value| format!("&{}", n(value))).join(", ");
                let to = to.map(n).join(", ");
                let (call, wait) = self.around("backward");
                format!("let ({to}) = self.{}.{call}(ctx, ({saved}), &{}){wait};", f(field), n(dy))
            }
            Op::SinkWeights { field, chunk, a, lse, dy } => {
                let chunk = chunk.map_or("None".to_owned(), |of| format!("Some(CHUNK[{of}])"));
                let (field, a, lse, dy) = (f(field), n(a), n(lse), n(dy));
                format!(
                    "gradients.add(self.{field}.sink_weights(ctx, {chunk}, (&{a}, &{lse}), &{dy}));"
                )
            }
            Op::ActivateBackward { x, dy, to } if self.is_received(x) => format!(
                "let {} = Received::activate_backward(ctx, ACTIVATION, &{}, &{});",
                n(to),
                n(x),
                n(dy)
            ),
            Op::GateBackward { gate, up, dy, to } if self.is_received(up) => format!(
                "let ({}) = Received::gated_backward(ctx, ACTIVATION, &{}, &{}, &{});",
                to.map(n).join(", "),
                n(gate),
                n(up),
                n(dy)
            ),
            Op::ActivateBackward { x, dy, to } => format!(
                "let {} = activate_backward(ctx, ACTIVATION, &{}, &{});",
                n(to),
                n(x),
                n(dy)
            ),
            Op::GateBackward { gate, up, dy, to } => format!(
                "let ({}) = gated_backward(ctx, ACTIVATION, &{}, &{}, &{});",
                to.map(n).join(", "),
                n(gate),
                n(up),
                n(dy)
            ),
            Op::NormBackward { field, x, statistics, dy, sum, to } => {
                let given = format!("ctx, &{}, &{}, &{}", n(x), n(statistics), n(dy));
                match sum {
                    None => format!("let {} = self.{}.backward({given});", n(to), f(field)),
                    Some(sum) => {
                        let sum = self.taken(step, sum);
                        format!("let {} = self.{}.backward_onto({given}, {sum});", n(to), f(field))
                    }
                }
            }
            Op::LinearWeights { field, x, dy } | Op::ExpertWeights { field, x, dy } => {
                format!("gradients.add(self.{}.weights(&{}, &{}));", f(field), n(x), n(dy))
            }
            Op::BiasWeights { field, dy } => {
                format!("gradients.add(self.{}.weights(&{}));", f(field), n(dy))
            }
            Op::NormWeights { field, x, statistics, dy } => format!(
                "gradients.add(self.{}.weights(&{}, &{}, &{}));",
                f(field),
                n(x),
                n(statistics),
                n(dy)
            ),
            Op::TokenWeights { field, dy } | Op::PositionWeights { field, dy } => {
                format!("gradients.add(self.{}.weights(ctx, &{}));", f(field), n(dy))
            }
        }
    }

    /// What the name of a rotation says of the part of keys that all heads share.
    fn shared(&self, value: Value) -> &'static str {
        match self.segment.values[value].of {
            Type::Tensor(_, _, Width::Rotary) => "_shared",
            _ => "",
        }
    }

    fn is_received(&self, value: Value) -> bool {
        matches!(self.segment.values[value].of, Type::Received(_))
    }

    /// The call of attention, and what handles its errors.
    fn around(&self, call: &str) -> (String, &'static str) {
        match self.lowered.sizes.ring {
            1 => (call.to_owned(), ""),
            _ => (format!("{call}_around"), "?"),
        }
    }

    /// The fields of a struct that holds some values.
    pub fn held_fields(&self, values: &[Value]) -> Vec<String> {
        values.iter().map(|&value| self.typed(value)).collect()
    }

    /// Whether any operation is a collective of the tensor-parallel ranks.
    pub fn uses_tp(steps: &[Step]) -> bool {
        steps.iter().any(|step| {
            matches!(
                step.op,
                Op::AllGather { .. }
                    | Op::ReduceScatter { .. }
                    | Op::AllReduce { .. }
                    | Op::StartAllGather { .. }
                    | Op::StartReduceScatter { .. }
                    | Op::StartAllReduce { .. }
                    | Op::AllReduceNumbers { .. }
            )
        })
    }
}

/// What an exchange moves, in the names of methods.
fn named(heads: Heads) -> &'static str {
    match heads {
        Heads::Queries => "queries",
        Heads::Keys => "keys",
        Heads::Values => "values",
    }
}

/// A statement: what is assigned goes to the next line if the line has no room.
pub(super) fn broken(code: String, indent: usize) -> Vec<String> {
    if indent + code.len() <= in_width(0) {
        return vec![code];
    }
    match code.split_once(" = ") {
        Some((name, value)) => vec![format!("{name} ="), format!("    {value}")],
        None => vec![code],
    }
}

/// A statement with a comment, behind it if the line has room.
pub fn commented(code: String, comment: &str, indent: usize) -> Vec<String> {
    let line = format!("{code} // {comment}");
    match indent + line.len() <= in_width(0) {
        true => vec![line],
        false => vec![format!("// {comment}"), code],
    }
}
