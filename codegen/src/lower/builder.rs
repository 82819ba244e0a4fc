//! Collects the fields, values and operations of a segment.

use super::op::{FieldIndex, Op, Step, Value};
use super::recompute::{self, Restore};
use super::{Field, FieldKind, Function, Named, Segment, Sizes, Type};
use models::program::Recompute;
use std::collections::BTreeMap;

/// A segment in the making.
pub(super) struct Builder<'a> {
    pub sizes: &'a Sizes,
    /// The chunk whose rows operations work on; `None` for all rows.
    pub chunk: Option<u64>,
    fields: Vec<Field>,
    values: Vec<Named>,
    ops: Vec<Op>,
}

/// Operations with what goes in and out, before anybody knows what else reads their values.
pub(super) struct Body {
    pub title: &'static str,
    pub input: Option<Value>,
    pub ops: Vec<Op>,
    pub output: Option<Value>,
}

impl<'a> Builder<'a> {
    pub fn new(sizes: &'a Sizes) -> Self {
        Self { sizes, chunk: None, fields: Vec::new(), values: Vec::new(), ops: Vec::new() }
    }

    pub fn field(&mut self, name: &'static str, kind: FieldKind) -> FieldIndex {
        self.fields.push(Field { name, kind });
        self.fields.len() - 1
    }

    /// Whether a field is an attention with sinks.
    pub fn has_sinks(&self, field: FieldIndex) -> bool {
        matches!(self.fields[field].kind, FieldKind::Attention { sinks: Some(_) })
    }

    /// A value of all rows, or of the chunk that is open, whose number ends its name.
    pub fn value(&mut self, name: impl Into<String>, of: Type) -> Value {
        let name = match self.chunk {
            Some(chunk) => format!("{}_{chunk}", name.into()),
            None => name.into(),
        };
        self.values.push(Named { name, of, chunked: self.chunk.is_some() });
        self.values.len() - 1
    }

    /// Adds an operation whose result is of all rows, whatever chunk is open.
    pub fn whole(&mut self, name: &str, of: Type, op: impl FnOnce(Value) -> Op) -> Value {
        let chunk = self.chunk.take();
        let to = self.op(name, of, op);
        self.chunk = chunk;
        to
    }

    /// Calls `work` with each chunk open, and its place among them.
    pub fn each<T>(
        &mut self,
        chunks: &[Option<u64>],
        mut work: impl FnMut(&mut Self, usize) -> T,
    ) -> Vec<T> {
        let mut of_chunk = |(n, &chunk): (usize, &Option<u64>)| {
            self.chunk = chunk;
            work(self, n)
        };
        let all = chunks.iter().enumerate().map(&mut of_chunk).collect();
        self.chunk = None;
        all
    }

    /// The open chunk's rows of a tensor of the stream's rows; all of them if no chunk is open.
    pub fn chunk_of(&mut self, name: impl Into<String>, x: Value) -> Value {
        let of = self.sizes.stream();
        match self.chunk {
            None => x,
            Some(chunk) => self.op(name, of, |to| Op::Chunk { x, chunk, to }),
        }
    }

    /// The rows of all chunks, one chunk after the other.
    pub fn joined(&mut self, name: impl Into<String>, parts: &[Value]) -> Value {
        let of = self.sizes.stream();
        match parts {
            [only] => *only,
            _ => self.op(name, of, |to| Op::Join { parts: parts.to_vec(), to }),
        }
    }

    pub fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Adds an operation with one result.
    pub fn op(&mut self, name: impl Into<String>, of: Type, op: impl FnOnce(Value) -> Op) -> Value {
        let to = self.value(name, of);
        self.ops.push(op(to));
        to
    }

    /// Ends a function.
    pub fn body(
        &mut self,
        title: &'static str,
        input: Option<Value>,
        output: Option<Value>,
    ) -> Body {
        Body { title, input, ops: std::mem::take(&mut self.ops), output }
    }

    /// The stream's rows for all tokens: gathered with sequence parallelism.
    pub fn enter(&mut self, name: impl Into<String>, x: Value) -> Value {
        match self.sizes.sequence_parallel {
            true => self.op(name, self.sizes.full(), |to| Op::AllGather { x, to }),
            false => x,
        }
    }

    /// The same, in flight until [`Self::wait`].
    pub fn start_enter(&mut self, name: impl Into<String>, x: Value) -> Value {
        match self.sizes.sequence_parallel {
            true => {
                let of = in_flight(self.sizes.full());
                self.op(name, of, |to| Op::StartAllGather { x, to })
            }
            false => x,
        }
    }

    /// The stream's rows of a sum over ranks.
    pub fn leave(&mut self, name: impl Into<String>, x: Value) -> Value {
        let of = self.sizes.stream();
        match (self.sizes.tp, self.sizes.sequence_parallel) {
            (1, _) => x,
            (_, true) => self.op(name, of, |to| Op::ReduceScatter { x, to }),
            (_, false) => self.op(name, of, |to| Op::AllReduce { x, to }),
        }
    }

    /// The same, in flight until [`Self::wait`].
    pub fn start_leave(&mut self, name: impl Into<String>, x: Value) -> Value {
        let of = in_flight(self.sizes.stream());
        match (self.sizes.tp, self.sizes.sequence_parallel) {
            (1, _) => x,
            (_, true) => self.op(name, of, |to| Op::StartReduceScatter { x, to }),
            (_, false) => self.op(name, of, |to| Op::StartAllReduce { x, to }),
        }
    }

    /// Waits for what is in flight.
    pub fn wait(&mut self, name: impl Into<String>, x: Value) -> Value {
        match self.values[x].of {
            Type::InFlight(placement, rows, width) => {
                self.op(name, Type::Tensor(placement, rows, width), |to| Op::Wait { x, to })
            }
            _ => x,
        }
    }

    /// The segment. `survivors` are what each way to recompute may keep of what is read.
    pub fn finish(self, forward: Body, backward: Vec<Body>, survivors: &Survivors) -> Segment {
        let made: Vec<Value> = forward.ops.iter().flat_map(Op::makes).collect();
        let reads = backward.iter().flat_map(|body| &body.ops).flat_map(Op::reads);
        let mut read: Vec<Value> = reads.filter(|value| made.contains(value)).collect();
        read.sort_unstable();
        read.dedup();
        let restores = survivors
            .iter()
            .map(|(&how, keep)| (how, recompute::restore(&forward.ops, &read, keep)))
            .collect();
        let restores: BTreeMap<Recompute, Restore> = restores;
        let kept: Vec<Value> =
            restores.values().flat_map(|restore| &restore.kept).copied().collect();
        let mut later: Vec<Value> = Vec::new();
        let mut parts: Vec<Function> = Vec::new();
        for body in backward.into_iter().rev() {
            let reads: Vec<Value> = body.ops.iter().flat_map(Op::reads).collect();
            parts.push(function(body, &later));
            later.extend(reads);
        }
        parts.reverse();
        let forward = function(forward, &kept);
        let (fields, values) = (self.fields, self.values);
        Segment { fields, values, forward, backward: parts, read, restores }
    }
}

/// What a segment may keep, by what it recomputes.
pub(super) type Survivors = BTreeMap<Recompute, Box<dyn Fn(Value) -> bool>>;

fn in_flight(of: Type) -> Type {
    match of {
        Type::Tensor(placement, rows, width) => Type::InFlight(placement, rows, width),
        other => other,
    }
}

/// Notes the last use of each value that does not outlive the function.
fn function(body: Body, outlives: &[Value]) -> Function {
    let Body { title, input, ops, output } = body;
    let steps = steps(ops, |value| outlives.contains(&value) || output == Some(value));
    Function { title, input, steps, output }
}

/// Operations with the last uses of all values that are not `needed` later.
pub(super) fn steps(ops: Vec<Op>, needed: impl Fn(Value) -> bool) -> Vec<Step> {
    let mut seen = Vec::new();
    let mut steps: Vec<Step> = ops
        .into_iter()
        .rev()
        .map(|op| {
            let mut last_uses = Vec::new();
            for value in op.reads().into_iter().chain(op.makes()) {
                if !seen.contains(&value) {
                    seen.push(value);
                    if !needed(value) {
                        last_uses.push(value);
                    }
                }
            }
            Step { op, last_uses }
        })
        .collect();
    steps.reverse();
    steps
}
