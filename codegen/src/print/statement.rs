//! One operation as one Rust statement, which calls the library's typed layers.

use super::text::{in_width, size};
use crate::lower::{
    FieldKind, Heads, Lowered, Named, Op, Placement, Reduction, Rows, Segment, Step, Type, Value,
    Width,
};
use models::decisions::AuxScope;
use models::program::Program;

/// Bytes of a copy's row number, expert and place.
const ROUTE_BYTES: u64 = 20;
/// Bytes of a received row's number in the order of arrival, and sorted by expert.
const SORTED_BYTES: u64 = 16;

/// Prints the statements of a segment.
pub struct Statements<'a> {
    lowered: &'a Lowered,
    segment: &'a Segment,
    /// Bytes of an element of activations.
    element_bytes: u64,
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
        match self.note(&step.op) {
            Some(note) => commented(code, &note, indent),
            None => broken(code, indent),
        }
    }

    /// Gathers the weights of the parameters in field `of`, if replicas share them.
    pub fn gathers(&self, of: &str, indent: usize) -> Vec<String> {
        match self.lowered.program.zero_stage {
            3 => commented(
                format!("let ctx = &ctx.gather(&self.{of})?;"),
                "dp: all-gather of weights",
                indent,
            ),
            _ => Vec::new(),
        }
    }

    /// Says that the gradients of the parameters in field `of`, and of those behind, are complete.
    pub fn completes(&self, of: &str, indent: usize) -> Vec<String> {
        let program = &self.lowered.program;
        let code = format!("gradients.complete_from(self.{of}.start)?;");
        match (program.mesh.dp * program.mesh.cp, program.zero_stage) {
            (1, _) => vec![code],
            (_, 0) => commented(code, "dp: all-reduce, once a step", indent),
            (_, 1) => commented(code, "dp: reduce-scatter, once a step", indent),
            _ => commented(code, "dp: reduce-scatter", indent),
        }
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
            Op::Max { field, logits, to } => {
                format!("let {} = self.{}.max(ctx, &{});", n(to), f(field), n(logits))
            }
            Op::Sums { field, logits, max, to, target } => format!(
                "let ({}, {}) = self.{}.sums(ctx, &{}, &{});",
                n(to),
                n(target),
                f(field),
                n(logits),
                n(max)
            ),
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
            Op::BlockSums { field, x, to, sum_exp, target } => format!(
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

    /// What a statement sends.
    fn note(&self, op: &Op) -> Option<String> {
        let ring = self.lowered.sizes.ring;
        let sent = |value| self.elements(value).map_or(0, |elements| elements * self.element_bytes);
        match *op {
            Op::Attention { k, v, .. } if ring > 1 => {
                Some(format!("cp: {} times {}", ring - 1, size(sent(k) + sent(v))))
            }
            Op::AttentionBackward { saved: [_, k, v, ..], .. } if ring > 1 => {
                let bytes = size(sent(k) + sent(v));
                Some(format!("cp: {} times {bytes}, and gradients", ring - 1))
            }
            Op::ToHeads { x, .. } | Op::ToTokens { x, .. } => {
                Some(format!("cp: all-to-all of {}", size(sent(x))))
            }
            Op::Route { .. } => self.among_experts("all-to-all of how many copies come"),
            Op::NoteLoad { .. } => self.of_micro_batch("all-reduce of each expert's load"),
            Op::Dispatch { x, .. } | Op::StartDispatch { x, .. } => {
                let bytes = size(self.copies_bytes(x));
                self.among_experts(&format!("all-to-all of {bytes}"))
            }
            Op::Combine { to, .. } | Op::StartCombine { to, .. } => {
                let bytes = size(self.copies_bytes(to));
                self.among_experts(&format!("all-to-all of {bytes}"))
            }
            _ => self.bytes(op).map(|bytes| format!("tp: {}", size(bytes))),
        }
    }

    /// What ranks exchange that have rows of the same micro-batch, if there are several.
    fn of_micro_batch(&self, what: &str) -> Option<String> {
        let Program { mesh, aux_scope, .. } = &self.lowered.program;
        let at_once = *aux_scope == AuxScope::MicroBatch;
        match (at_once, mesh.tp > 1, mesh.cp > 1) {
            (false, ..) | (true, false, false) => None,
            (true, true, false) => Some(format!("tp: {what}")),
            (true, false, true) => Some(format!("cp: {what}")),
            (true, true, true) => Some(format!("tp and cp: {what}")),
        }
    }

    /// What the experts' ranks exchange, if there are several.
    fn among_experts(&self, what: &str) -> Option<String> {
        let split = self.lowered.program.experts?;
        match (split.ep > 1, split.etp > 1) {
            (false, false) => None,
            (true, false) => Some(format!("ep: {what}")),
            (false, true) => Some(format!("etp: {what}")),
            (true, true) => Some(format!("ep and etp: {what}")),
        }
    }

    /// Bytes of a value of copies.
    fn copies_bytes(&self, value: Value) -> u64 {
        match self.segment.values[value].of {
            Type::Copies(width) | Type::Going(width) => {
                let sizes = &self.lowered.sizes;
                self.cut(value, sizes.copies() * sizes.columns(width) * self.element_bytes)
            }
            _ => 0,
        }
    }

    /// Of a number that grows with rows, the part of a value: a chunk's if it has a chunk's rows.
    fn cut(&self, value: Value, of_all_rows: u64) -> u64 {
        let chunked = self.segment.values[value].chunked;
        if chunked { of_all_rows / self.lowered.sizes.chunks } else { of_all_rows }
    }

    fn bytes(&self, op: &Op) -> Option<u64> {
        let of = match *op {
            Op::AllGather { to, .. } | Op::StartAllGather { to, .. } => to,
            Op::ReduceScatter { x, .. } | Op::StartReduceScatter { x, .. } => x,
            Op::AllReduce { x, .. } | Op::StartAllReduce { x, .. } => x,
            Op::AllReduceNumbers { .. } => return Some(4 * self.lowered.sizes.tokens),
            _ => return None,
        };
        self.elements(of).map(|elements| elements * self.element_bytes)
    }

    fn elements(&self, value: Value) -> Option<u64> {
        match self.segment.values[value].of {
            Type::Tensor(_, rows, width) | Type::InFlight(_, rows, width) => {
                Some(self.cut(value, self.lowered.sizes.elements(rows, width)))
            }
            _ => None,
        }
    }

    /// Bytes of some values.
    pub fn held_bytes(&self, values: &[Value]) -> u64 {
        let sizes = &self.lowered.sizes;
        let wide = self.element_bytes.max(4);
        let of = |&value: &Value| match self.segment.values[value].of {
            Type::Tensor(_, rows, width) => sizes.elements(rows, width) * self.element_bytes,
            Type::Statistics => {
                let layer_norm = sizes.norm.kind == models::model::NormKind::LayerNorm;
                sizes.rows * wide * if layer_norm { 2 } else { 1 }
            }
            Type::HeadStatistics(width) => {
                sizes.tokens * sizes.columns(width) / sizes.head_dim * wide
            }
            Type::TokenStatistics => sizes.tokens * wide,
            Type::LogSumExp => sizes.tokens * sizes.heads[1] * wide,
            Type::TokenNumbers => sizes.tokens * wide,
            Type::Copies(width) => sizes.copies() * sizes.columns(width) * self.element_bytes,
            // If every expert gets as many.
            Type::Received(width) => {
                let [ways, _] = sizes.expert_ffn.map(|ffn| ffn / sizes.expert_ffn[1].max(1));
                ways * sizes.copies() * sizes.columns(width) * self.element_bytes
            }
            Type::Route => {
                let scores = sizes.rows * (sizes.experts[0] + 1) * wide;
                let [ways, _] = sizes.expert_ffn.map(|ffn| ffn / sizes.expert_ffn[1].max(1));
                let several = sizes.experts[1] < sizes.experts[0] || ways > 1;
                let sorted = several && sizes.experts[1] > 1;
                let received = if sorted { ways * sizes.copies() * SORTED_BYTES } else { 0 };
                scores + sizes.copies() * (wide + ROUTE_BYTES) + received
            }
            Type::CopyNumbers => sizes.copies() * wide,
            Type::Stream | Type::InFlight(..) | Type::Going(_) | Type::AttentionSums => 0,
        };
        values.iter().map(|value| self.cut(*value, of(value))).sum()
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

/// A value's type in Rust: one of the names in the generated `plan.rs`, or the library's.
pub fn type_name(lowered: &Lowered, value: &Named) -> String {
    let split = lowered.sizes.sequence_parallel;
    let name = match value.of {
        Type::Tensor(placement, rows, width) | Type::InFlight(placement, rows, width) => {
            match (width, placement, rows) {
                (Width::Hidden, Placement::Partial, _) => "Part<D>",
                (Width::Hidden, Placement::Whole, Rows::Tokens) if split => "Full<D>",
                (Width::Hidden, ..) => "Rows<D>",
                (Width::Query, ..) => "Query<D>",
                (Width::KeyValue, ..) => "KeyValue<D>",
                (Width::QueryBehind, ..) => "QueryBehind<D>",
                (Width::KeyValueBehind, ..) => "KeyValueBehind<D>",
                (Width::Value, ..) => "ValueHeads<D>",
                (Width::ValueBehind, ..) => "ValueHeadsBehind<D>",
                (Width::QueryLatent, ..) => "QueryLatent<D>",
                (Width::KeyValueLatent, ..) => "KeyValueLatent<D>",
                (Width::Rotary, ..) => "SharedKey<D>",
                (Width::UpProjected, ..) => "UpProjected<D>",
                (Width::Ffn, ..) => "Inner<D>",
                (Width::Vocab, ..) => "Logits<D>",
                (Width::Experts, ..) => "Scores<D>",
                (Width::ExpertFfn, ..) => "ExpertInner<D>",
                (Width::SharedFfn, ..) => "SharedInner<D>",
            }
        }
        Type::Route => "Route<D>",
        Type::Copies(_) => "Copies<D, HIDDEN>",
        Type::Received(Width::ExpertFfn) => "Received<D, EXPERT_INNER>",
        Type::Received(_) => "Received<D, HIDDEN>",
        Type::CopyNumbers => "CopyNumbers<D>",
        Type::Stream => "Residual<D>",
        Type::Statistics | Type::HeadStatistics(_) | Type::TokenStatistics => "Statistics<D>",
        Type::LogSumExp => "LogSumExp<D>",
        Type::TokenNumbers => "Numbers<D, Whole, TOKENS>",
        Type::Going(_) => "Going<D, HIDDEN>",
        Type::AttentionSums => "AttentionSums<D>",
    };
    match (value.of, value.chunked) {
        (Type::Tensor(..), true) => name.replace("<D>", "Chunk<D>"),
        _ => name.to_owned(),
    }
}

/// A field's type in Rust, and what its shape means.
pub fn field_type(lowered: &Lowered, kind: &FieldKind) -> (String, String) {
    let sizes = &lowered.sizes;
    let tp = sizes.tp > 1;
    let stream = if sizes.sequence_parallel { "Split<Tp>" } else { "Whole" };
    let gradients = if tp { "Partial<Tp>" } else { "Whole" };
    let columns = |width| match width {
        Width::Hidden => "HIDDEN",
        Width::Query => "QUERY",
        Width::KeyValue => "KEY_VALUE",
        Width::QueryBehind => "QUERY_BEHIND",
        Width::KeyValueBehind => "KEY_VALUE_BEHIND",
        Width::Value => "VALUE",
        Width::ValueBehind => "VALUE_BEHIND",
        Width::QueryLatent => "QUERY_RANK",
        Width::KeyValueLatent => "KEY_VALUE_RANK",
        Width::Rotary => "ROTARY_DIM",
        Width::UpProjected => "UP",
        Width::Ffn => "INNER",
        Width::Vocab => "VOCAB_ROWS",
        Width::Experts => "EXPERTS",
        Width::ExpertFfn => "EXPERT_INNER",
        Width::SharedFfn => "SHARED_INNER",
    };
    let share = |width: Width| {
        let (whole, _) = sizes.whole(width);
        format!("{} of {whole}", sizes.columns(width))
    };
    let note = |what: &str, width| match tp {
        true => format!("{} {what}", share(width)),
        false => String::new(),
    };
    match kind {
        FieldKind::Norm { .. } => {
            let name = match sizes.norm.kind {
                models::model::NormKind::RmsNorm => "RmsNorm",
                models::model::NormKind::LayerNorm => "LayerNorm",
            };
            (format!("{name}<{stream}, HIDDEN>"), String::new())
        }
        FieldKind::Column { outputs, .. } | FieldKind::Up { outputs, .. } => {
            let from = match kind {
                FieldKind::Up { inputs, .. } => columns(*inputs),
                _ => "HIDDEN",
            };
            let to = columns(*outputs);
            let name = if tp {
                format!("ColumnLinear<Tp, {from}, {to}>")
            } else {
                format!("Linear<{from}, {to}>")
            };
            (name, note("rows", *outputs))
        }
        FieldKind::Down { outputs, .. } => {
            (format!("DownLinear<{gradients}, HIDDEN, {}>", columns(*outputs)), String::new())
        }
        FieldKind::LatentNorm { width, .. } => {
            (format!("LatentNorm<{gradients}, {}>", columns(*width)), String::new())
        }
        FieldKind::Row { inputs, .. } => {
            let from = columns(*inputs);
            let name = if tp {
                format!("RowLinear<Tp, {from}, HIDDEN>")
            } else {
                format!("Linear<{from}, HIDDEN>")
            };
            (name, note("columns", *inputs))
        }
        FieldKind::RowBias { .. } => (format!("RowBias<{stream}, HIDDEN>"), String::new()),
        FieldKind::HeadNorm { .. } => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            (format!("HeadNorm<{placement}, HEAD_DIM>"), String::new())
        }
        FieldKind::Attention | FieldKind::LatentAttention => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            let [all, own] = sizes.heads;
            let heads = if tp { format!("{own} of {all} heads") } else { String::new() };
            let name = match (kind, sizes.ulysses) {
                (FieldKind::Attention, 1) => "Attention<PLACEMENT, QUERY, KEY_VALUE>",
                (FieldKind::Attention, _) => "Attention<PLACEMENT, QUERY_BEHIND, KEY_VALUE_BEHIND>",
                (_, 1) => "LatentAttention<PLACEMENT, QUERY, VALUE>",
                (_, _) => "LatentAttention<PLACEMENT, QUERY_BEHIND, VALUE_BEHIND>",
            };
            (name.replace("PLACEMENT", placement), heads)
        }
        FieldKind::Router { .. } => (format!("Router<{stream}, HIDDEN, EXPERTS>"), String::new()),
        FieldKind::Experts { outputs, inputs, .. } => {
            let name = format!("Experts<{}, {}>", columns(*inputs), columns(*outputs));
            let [all, own] = sizes.experts;
            let note = if own < all { format!("{own} of {all} experts") } else { String::new() };
            (name, note)
        }
        FieldKind::Tokens => {
            let placement = if tp { "Partial<Tp>" } else { "Whole" };
            let name = format!("TokenEmbedding<{placement}, VOCAB_ROWS, HIDDEN>");
            (name, note("rows", Width::Vocab))
        }
        FieldKind::Positions(_) => {
            (format!("Positions<{stream}, POSITIONS, HIDDEN>"), String::new())
        }
        FieldKind::Output => {
            let name = if tp {
                "ColumnLinear<Tp, HIDDEN, VOCAB_ROWS>"
            } else {
                "Linear<HIDDEN, VOCAB_ROWS>"
            };
            (name.to_owned(), note("rows", Width::Vocab))
        }
        FieldKind::Loss => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            (format!("CrossEntropy<{placement}, VOCAB_ROWS>"), String::new())
        }
        FieldKind::FusedLoss(rows) => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            let name = format!("FusedLoss<{placement}, HIDDEN, VOCAB_ROWS>");
            (name, format!("logits of {rows} tokens at a time"))
        }
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
fn broken(code: String, indent: usize) -> Vec<String> {
    if indent + code.len() <= in_width(0) {
        return vec![code];
    }
    match code.split_once(" = ") {
        Some((name, value)) => vec![format!("{name} ="), format!("    {value}")],
        None => vec![code],
    }
}

/// A statement with a comment, behind it if the line has room.
fn commented(code: String, comment: &str, indent: usize) -> Vec<String> {
    let line = format!("{code} // {comment}");
    match indent + line.len() <= in_width(0) {
        true => vec![line],
        false => vec![format!("// {comment}"), code],
    }
}
