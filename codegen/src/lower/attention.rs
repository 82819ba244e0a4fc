//! Attention: queries, keys and values from the stream's rows, and their output.

use super::builder::Builder;
use super::feed_forward::LaterWeights;
use super::latent::{Latent, LatentMade};
use super::op::{FieldIndex, Heads, Op, Value};
use super::{FieldKind, Matrix, TensorNames, Type, Width};
use models::model::ModelSpec;

/// A layer's attention.
pub(super) struct Attention {
    how: How,
    core: FieldIndex,
    out: FieldIndex,
}

/// How queries, keys and values are made.
enum How {
    Projected(Projections),
    Latent(Latent),
}

/// Fields of queries, keys and values that are projected from the input.
struct Projections {
    q: FieldIndex,
    k: FieldIndex,
    v: FieldIndex,
    /// Norms of the heads of queries and of keys.
    norms: Option<[FieldIndex; 2]>,
}

/// What the backward pass reads of how queries, keys and values were made.
enum Made {
    /// Queries and keys before their norms, and statistics of their heads.
    Projected(Option<[(Value, Value); 2]>),
    Latent(LatentMade),
}

/// Queries, keys and values.
pub(super) struct Projected {
    /// As attention reads them: behind an exchange of tokens for heads, if there is one.
    heads: [Value; 3],
    made: Made,
}

/// What the backward pass reads of the output.
pub(super) struct Attended {
    /// As attention makes it, and the log-sum-exp of scores.
    behind: [Value; 2],
    /// Of this rank's tokens.
    a: Value,
}

impl Projected {
    /// Norms inside attention that selective recomputation repeats.
    pub(super) fn norms(&self) -> Vec<Value> {
        match &self.made {
            Made::Projected(_) => Vec::new(),
            Made::Latent(made) => made.norms(),
        }
    }
}

impl Attention {
    pub(super) fn fields(b: &mut Builder<'_>, model: &ModelSpec, names: TensorNames) -> Self {
        if let Some(mla) = model.attention.mla {
            let (latent, core, out) = Latent::fields(b, model, mla, names);
            return Self { how: How::Latent(latent), core, out };
        }
        let [q, k, v, out] = names.attention();
        let widths = [Width::Query, Width::KeyValue, Width::KeyValue];
        let mut block = |name, n: usize, tensor| {
            // GPT-2 stores the three as one tensor: rows of queries, then keys, then values.
            let (blocks, block) =
                if names.is_gpt2() { (widths.to_vec(), n) } else { (vec![widths[n]], 0) };
            let of = Matrix::plain(tensor, names, model.attention.qkv_bias);
            let matrix = Matrix { blocks, transposed: names.is_gpt2(), ..of };
            b.field(name, FieldKind::Column { matrix, block, outputs: widths[n] })
        };
        let (q, k, v) = (block("q", 0, q), block("k", 1, k), block("v", 2, v));
        let [q_norm, k_norm] = names.head_norms().map(|tensor| FieldKind::HeadNorm { tensor });
        let norms = model.attention.qk_norm.then_some([("q_norm", q_norm), ("k_norm", k_norm)]);
        let norms = norms.map(|both| both.map(|(name, kind)| b.field(name, kind)));
        let with_bias = model.attention.out_bias && b.sizes.tp == 1;
        let of = Matrix { adds_to_stream: true, ..Matrix::plain(out, names, with_bias) };
        let out = b.field("out", FieldKind::Row { matrix: of, inputs: Width::Query });
        let sinks = model.attention.sinks.then(|| names.sinks());
        let core = b.field("attention", FieldKind::Attention { sinks });
        Self { how: How::Projected(Projections { q, k, v, norms }), core, out }
    }

    /// Widths of queries, keys and values.
    fn widths(&self) -> [Width; 3] {
        match self.how {
            How::Projected(_) => [Width::Query, Width::KeyValue, Width::KeyValue],
            How::Latent(_) => [Width::Query, Width::Query, Width::Value],
        }
    }

    /// Width of the output.
    fn output(&self) -> Width {
        match self.how {
            How::Projected(_) => Width::Query,
            How::Latent(_) => Width::Value,
        }
    }

    /// Queries, keys and values of all tokens.
    pub(super) fn project(&self, b: &mut Builder<'_>, x: Value) -> Projected {
        let (of_tokens, made) = match &self.how {
            How::Projected(by) => {
                let (of_tokens, normed) = by.project(b, self.core, x);
                (of_tokens, Made::Projected(normed))
            }
            How::Latent(latent) => {
                let (of_tokens, made) = latent.project(b, self.core, x);
                (of_tokens, Made::Latent(made))
            }
        };
        let mut each = of_tokens.into_iter().zip(["q", "k", "v"]).zip(self.widths());
        let heads = std::array::from_fn(|_| {
            let ((x, name), width) = each.next().expect("three of each");
            to_heads(b, self.core, name, x, width)
        });
        Projected { heads, made }
    }

    /// Partial sums of the block's output: of all tokens, or of a chunk's.
    pub(super) fn attend(&self, b: &mut Builder<'_>, of: &Projected) -> (Value, Attended) {
        let (field, width, [q, k, v]) = (self.core, self.output(), of.heads);
        let behind = b.value("a", b.sizes.behind(width));
        let lse = b.value("lse", Type::LogSumExp);
        let chunk = b.chunk;
        b.push(Op::Attention { field, q, k, v, chunk, to: behind, lse });
        let a = to_tokens(b, field, "a_tokens", behind, width);
        let part = b.sizes.part();
        let part = b.op("part_1", part, |to| Op::Linear { field: self.out, x: a, to });
        (part, Attended { behind: [behind, lse], a })
    }

    /// The gradient of the block's input, a partial sum, and the work on weights.
    pub(super) fn backward(
        &self,
        b: &mut Builder<'_>,
        of: &Projected,
        attended: &Attended,
        dy: Value,
    ) -> (Value, Vec<LaterWeights>) {
        let field = self.core;
        let da = self.backward_output(b, dy);
        let [q, k, v] = of.heads;
        let [a, lse] = attended.behind;
        let names = ["dq", "dk", "dv"];
        let mut each = names.into_iter().zip(self.widths());
        let to = std::array::from_fn(|_| {
            let (name, width) = each.next().expect("three gradients");
            b.value(name, b.sizes.behind(width))
        });
        self.backward_sinks(b, [a, lse], da);
        b.push(Op::AttentionBackward { field, saved: [q, k, v, a, lse], dy: da, to });
        let mut each = to.into_iter().zip(names).zip(self.widths());
        let to = std::array::from_fn(|_| {
            let ((x, name), width) = each.next().expect("three gradients");
            to_tokens(b, field, name, x, width)
        });
        let (dh, mut weights) = self.backward_projections(b, of, to);
        weights.insert(0, LaterWeights { field: self.out, x: Some(attended.a), dy });
        (dh, weights)
    }

    /// The gradient of the sinks, if there are any, from that of attention's output.
    fn backward_sinks(&self, b: &mut Builder<'_>, [a, lse]: [Value; 2], dy: Value) {
        let (field, chunk) = (self.core, b.chunk);
        if b.has_sinks(field) {
            b.push(Op::SinkWeights { field, chunk, a, lse, dy });
        }
    }

    /// The gradient of attention's output, from that of the block's.
    fn backward_output(&self, b: &mut Builder<'_>, dy: Value) -> Value {
        let (width, field) = (self.output(), self.out);
        let of = b.sizes.split(width);
        let da = b.op("da", of, |to| Op::BackwardInput { field, dy, to });
        to_heads(b, self.core, "da", da, width)
    }

    fn backward_projections(
        &self,
        b: &mut Builder<'_>,
        of: &Projected,
        gradients: [Value; 3],
    ) -> (Value, Vec<LaterWeights>) {
        match (&self.how, &of.made) {
            (How::Projected(by), Made::Projected(normed)) => {
                by.backward(b, self.core, normed.as_ref(), gradients)
            }
            (How::Latent(latent), Made::Latent(made)) => {
                latent.backward(b, self.core, made, gradients)
            }
            _ => unreachable!("each kind of attention reads what it made"),
        }
    }

    /// Sums of the gradients of queries, keys and values, 0 so far.
    pub(super) fn begin_sums(&self, b: &mut Builder<'_>, of: &Projected) -> Value {
        let (field, saved) = (self.core, of.heads);
        b.op("sums", Type::AttentionSums, |to| Op::BeginSums { field, saved, to })
    }

    /// Adds a chunk's part to the sums.
    pub(super) fn backward_chunk(
        &self,
        b: &mut Builder<'_>,
        of: &Projected,
        attended: &Attended,
        dy: Value,
        sums: Value,
    ) -> Value {
        let chunk = b.chunk.expect("a chunk is open");
        let dy_of_core = self.backward_output(b, dy);
        b.push(Op::LinearWeights { field: self.out, x: attended.a, dy });
        let [q, k, v] = of.heads;
        let [a, lse] = attended.behind;
        self.backward_sinks(b, [a, lse], dy_of_core);
        let (field, saved, dy) = (self.core, [q, k, v, a, lse], dy_of_core);
        let of = Type::AttentionSums;
        b.whole("sums", of, |to| Op::AddToSums { field, chunk, saved, dy, sums, to })
    }

    /// The gradient of the block's input, from the sums of all chunks.
    pub(super) fn backward_sums(
        &self,
        b: &mut Builder<'_>,
        of: &Projected,
        sums: Value,
    ) -> (Value, Vec<LaterWeights>) {
        let (field, widths) = (self.core, self.widths());
        let mut each = ["dq", "dk", "dv"].into_iter().zip(widths);
        let to = std::array::from_fn(|_| {
            let (name, width) = each.next().expect("three gradients");
            b.value(name, b.sizes.split(width))
        });
        b.push(Op::FinishSums { field, sums, to });
        self.backward_projections(b, of, to)
    }
}

/// The norm of each head, and statistics.
fn head_norm(
    b: &mut Builder<'_>,
    name: &str,
    field: FieldIndex,
    x: Value,
    width: Width,
) -> (Value, Value) {
    let of = b.sizes.split(width);
    let (to, statistics) =
        (b.value(name, of), b.value(format!("{name}_s"), Type::HeadStatistics(width)));
    b.push(Op::NormOf { field, x, to, statistics: Some(statistics) });
    (to, statistics)
}

/// `x` behind an exchange of tokens for heads, if there is one. `field` is attention's core.
fn to_heads(b: &mut Builder<'_>, field: FieldIndex, name: &str, x: Value, width: Width) -> Value {
    let (sizes, heads) = (b.sizes, heads_of(width));
    match sizes.ulysses {
        1 => x,
        _ => b.op(name, sizes.behind(width), |to| Op::ToHeads { field, x, to, heads }),
    }
}

/// `x` before such an exchange.
fn to_tokens(b: &mut Builder<'_>, field: FieldIndex, name: &str, x: Value, width: Width) -> Value {
    let (sizes, heads) = (b.sizes, heads_of(width));
    match sizes.ulysses {
        1 => x,
        _ => b.op(name, sizes.split(width), |to| Op::ToTokens { field, x, to, heads }),
    }
}

fn heads_of(width: Width) -> Heads {
    match width {
        Width::KeyValue => Heads::Keys,
        Width::Value => Heads::Values,
        _ => Heads::Queries,
    }
}

impl Projections {
    fn project(
        &self,
        b: &mut Builder<'_>,
        field: FieldIndex,
        x: Value,
    ) -> ([Value; 3], Option<[(Value, Value); 2]>) {
        let sizes = b.sizes;
        let (query, key_value) = (sizes.split(Width::Query), sizes.split(Width::KeyValue));
        let project = |b: &mut Builder<'_>, name: &str, matrix, of| {
            b.op(name, of, |to| Op::Linear { field: matrix, x, to })
        };
        let rotate = |b: &mut Builder<'_>, name: &str, x, of| match sizes.rotary {
            true => b.op(name, of, |to| Op::Rotate { field, x, to }),
            false => x,
        };
        let mut normed = None;
        let (q, k) = match self.norms {
            None => {
                let q = project(b, "q", self.q, query);
                let q = rotate(b, "q", q, query);
                (q, project(b, "k", self.k, key_value))
            }
            Some([q_norm, k_norm]) => {
                let q_whole = project(b, "q_whole", self.q, query);
                let (q, q_of) = head_norm(b, "q", q_norm, q_whole, Width::Query);
                let q = rotate(b, "q", q, query);
                let k_whole = project(b, "k_whole", self.k, key_value);
                let (k, k_of) = head_norm(b, "k", k_norm, k_whole, Width::KeyValue);
                normed = Some([(q_whole, q_of), (k_whole, k_of)]);
                (q, k)
            }
        };
        let k = rotate(b, "k", k, key_value);
        ([q, k, project(b, "v", self.v, key_value)], normed)
    }

    fn backward(
        &self,
        b: &mut Builder<'_>,
        field: FieldIndex,
        normed: Option<&[(Value, Value); 2]>,
        mut to: [Value; 3],
    ) -> (Value, Vec<LaterWeights>) {
        let sizes = b.sizes;
        let (query, key_value) = (sizes.split(Width::Query), sizes.split(Width::KeyValue));
        if sizes.rotary {
            for (n, (name, of)) in [("dq", query), ("dk", key_value)].into_iter().enumerate() {
                let x = to[n];
                to[n] = b.op(name, of, |to| Op::RotateBack { field, x, to });
            }
        }
        if let (Some(norms), Some(normed)) = (self.norms, normed) {
            let each = norms.into_iter().zip(normed).zip([("dq", query), ("dk", key_value)]);
            for (n, ((field, &(x, statistics)), (name, of))) in each.enumerate() {
                let dy = to[n];
                b.push(Op::NormWeights { field, x, statistics, dy });
                let sum = None;
                to[n] = b.op(name, of, |to| Op::NormBackward { field, x, statistics, dy, sum, to });
            }
        }
        let [dq, dk, dv] = to;
        let part = sizes.part();
        let dh = b.op("dpart", part, |to| Op::BackwardInput { field: self.q, dy: dq, to });
        let mut add =
            |x, field, dy| b.op("dpart", part, |to| Op::AddBackwardInput { field, dy, x, to });
        let dh = add(dh, self.k, dk);
        let dh = add(dh, self.v, dv);
        let of = |field, dy| LaterWeights { field, x: None, dy };
        (dh, vec![of(self.q, dq), of(self.k, dk), of(self.v, dv)])
    }
}
