//! A transformer layer: two halves of the same form,
//! `y = x + dropout(post_norm(sublayer(norm(x)) + bias))`.
//!
//! Attention and dense feed-forward blocks are split over tensor-parallel ranks: they gather the
//! stream's rows, and reduce their output. A mixture of experts takes and gives the stream's rows.

use super::builder::{Body, Builder, Survivors};
use super::feed_forward::{LaterWeights, Mlp};
use super::latent::{Latent, LatentCore};
use super::moe::Moe;
use super::op::{FieldIndex, Heads, Op, Value};
use super::{Block, FieldKind, Matrix, Segment, Sizes, TensorNames, Type, Width};
use models::model::ModelSpec;
use models::program::{Program, Recompute};

/// Fields of half a layer, apart from its sublayer's.
struct Half {
    /// 1 for attention, 2 for the feed-forward block.
    number: u32,
    norm: FieldIndex,
    bias: Option<FieldIndex>,
    /// Norm after the sublayer (Gemma 2).
    post: Option<FieldIndex>,
    dropout: bool,
}

/// What the backward pass reads of half a layer.
#[derive(Clone, Copy)]
struct HalfValues {
    x: Value,
    h: Value,
    statistics: Value,
    /// Output of the sublayer after the reduction, with the bias.
    sum: Value,
    post: Option<Value>,
}

/// Attention, by how queries, keys and values are made.
enum SelfAttention {
    Projected(Attention),
    Latent(Latent),
}

/// What the backward pass of either reads.
enum AttentionCore {
    Projected(Core),
    Latent(LatentCore),
}

/// Fields of attention whose queries, keys and values are projected from its input.
struct Attention {
    q: FieldIndex,
    k: FieldIndex,
    v: FieldIndex,
    /// Norms of the heads of queries and of keys.
    norms: Option<[FieldIndex; 2]>,
    core: FieldIndex,
    out: FieldIndex,
}

/// Lowers a layer of a program.
pub(super) fn layer(program: &Program, sizes: &Sizes, names: TensorNames, block: Block) -> Segment {
    let model = &program.model;
    let mut b = Builder::new(sizes);
    let after = model.norm.per_layer == 4;
    let [before_attention, after_attention, before_mlp, after_mlp] = names.norms(after);
    let dropout = model.dropout > 0.0;
    let norm_1 = b.field("norm_1", FieldKind::Norm { tensor: before_attention });
    let attention = SelfAttention::fields(&mut b, model, names);
    let [_, _, _, out] = names.attention();
    let out_bias = FieldKind::RowBias { tensor: out };
    let bias = model.attention.out_bias.then(|| b.field("out_bias", out_bias));
    let post = FieldKind::Norm { tensor: after_attention };
    let post = after.then(|| b.field("post_norm_1", post));
    let first = Half { number: 1, norm: norm_1, bias, post, dropout };
    let norm_2 = b.field("norm_2", FieldKind::Norm { tensor: before_mlp });
    let post_2 = FieldKind::Norm { tensor: after_mlp };

    let input = b.value("stream", Type::Stream);
    let (kept_1, h) = first.enter(&mut b, input);
    let entered = b.enter(first.name("full"), h);
    let (part, core) = attention.forward(&mut b, entered);
    let sum = b.leave(first.name("sum"), part);
    let (kept_1, middle) = first.leave(&mut b, kept_1, sum);
    let feed = match block {
        Block::Dense => {
            let mlp = Mlp::fields(&mut b, model, names);
            let [_, _, down] = names.mlp();
            let of = FieldKind::RowBias { tensor: down };
            let bias = model.mlp.bias.then(|| b.field("down_bias", of));
            let post = after.then(|| b.field("post_norm_2", post_2));
            let second = Half { number: 2, norm: norm_2, bias, post, dropout };
            let (kept, h) = second.enter(&mut b, middle);
            let entered = b.enter(second.name("full"), h);
            let (part, inner) = mlp.forward(&mut b, entered);
            let sum = b.leave(second.name("sum"), part);
            let (kept, output) = second.leave(&mut b, kept, sum);
            let forward = b.body("forward", Some(input), Some(output));
            let backward = second.backward(&mut b, "feed-forward block", &kept, |b, half, dy| {
                let to = half.name("dh");
                half.through_split(b, &kept, dy, to, |b, dy| mlp.backward(b, &inner, dy))
            });
            Feed { kept, products: vec![inner.product], forward, backward }
        }
        Block::Experts => {
            let post = after.then(|| b.field("post_norm_2", post_2));
            let second = Half { number: 2, norm: norm_2, bias: None, post, dropout };
            let moe = Moe::fields(&mut b, model);
            let (kept, h) = second.enter(&mut b, middle);
            let shared = Mlp::shared(&mut b, model);
            let (mut sum, routed) = moe.forward(&mut b, h);
            let mut products = vec![routed.product];
            let inner = shared.as_ref().map(|shared| {
                let entered = b.enter(second.name("full"), h);
                let (part, inner) = shared.forward(&mut b, entered);
                let of_all = b.leave("shared", part);
                let (x, of) = (sum, b.sizes.stream());
                sum = b.op(second.name("sum"), of, |to| Op::Add { x, y: of_all, to });
                products.push(inner.product);
                inner
            });
            let (kept, output) = second.leave(&mut b, kept, sum);
            let forward = b.body("forward", Some(input), Some(output));
            let backward = second.backward(&mut b, "mixture of experts", &kept, |b, half, dy| {
                let through_shared = shared.as_ref().zip(inner.as_ref()).map(|(shared, inner)| {
                    let to = "dshared".to_owned();
                    half.through_split(b, &kept, dy, to, |b, dy| shared.backward(b, inner, dy))
                });
                let x = moe.backward(b, &routed, dy);
                let of = b.sizes.stream();
                let sum = |y| b.op(half.name("dh"), of, |to| Op::Add { x, y, to });
                through_shared.map_or(x, sum)
            });
            Feed { kept, products, forward, backward }
        }
    };
    let Feed { kept: kept_2, products, forward, backward } = feed;
    let of_attention = first.backward(&mut b, "attention", &kept_1, |b, half, dy| {
        let to = half.name("dh");
        half.through_split(b, &kept_1, dy, to, |b, dy| attention.backward(b, &core, dy))
    });
    let mut used: Vec<Recompute> =
        program.stages.iter().flat_map(|stage| stage.recompute.clone()).collect();
    if program.recompute_group > 1 {
        // The stage runs its groups again; a layer keeps everything meanwhile.
        used = vec![Recompute::None];
    }
    let cheap = [vec![kept_1.h, kept_2.h], products, core.norms()].concat();
    // Repeating a reduction would cost more than keeping its result.
    let split = sizes.tp > 1 && block == Block::Dense;
    let kept_by_full = [Some(kept_1.x), split.then_some(kept_1.sum), split.then_some(kept_2.sum)];
    let survivors: Survivors = [
        (Recompute::None, Box::new(|_| true) as Box<_>),
        (Recompute::Selective, Box::new(move |value| !cheap.contains(&value)) as Box<_>),
        (Recompute::Full, Box::new(move |value| kept_by_full.contains(&Some(value))) as Box<_>),
    ]
    .into_iter()
    .filter(|(how, _)| used.contains(how))
    .collect();
    b.finish(forward, vec![backward, of_attention], &survivors)
}

/// The second half of a layer.
struct Feed {
    kept: HalfValues,
    /// What activations make.
    products: Vec<Value>,
    forward: Body,
    backward: Body,
}

fn attention_fields(b: &mut Builder<'_>, model: &ModelSpec, names: TensorNames) -> Attention {
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
    let of = Matrix { adds_to_stream: true, ..Matrix::plain(out, names, false) };
    let out = b.field("out", FieldKind::Row { matrix: of, inputs: Width::Query });
    Attention { q, k, v, norms, core: b.field("attention", FieldKind::Attention), out }
}

impl SelfAttention {
    fn fields(b: &mut Builder<'_>, model: &ModelSpec, names: TensorNames) -> Self {
        match model.attention.mla {
            Some(mla) => Self::Latent(Latent::fields(b, model, mla, names)),
            None => Self::Projected(attention_fields(b, model, names)),
        }
    }

    /// Partial sums of the output.
    fn forward(&self, b: &mut Builder<'_>, x: Value) -> (Value, AttentionCore) {
        match self {
            Self::Projected(attention) => {
                let (part, core) = attention.forward(b, x);
                (part, AttentionCore::Projected(core))
            }
            Self::Latent(latent) => {
                let (part, core) = latent.forward(b, x);
                (part, AttentionCore::Latent(core))
            }
        }
    }

    fn backward(
        &self,
        b: &mut Builder<'_>,
        core: &AttentionCore,
        dy: Value,
    ) -> (Value, Vec<LaterWeights>) {
        match (self, core) {
            (Self::Projected(attention), AttentionCore::Projected(core)) => {
                attention.backward(b, core, dy)
            }
            (Self::Latent(latent), AttentionCore::Latent(core)) => latent.backward(b, core, dy),
            _ => unreachable!("each kind of attention reads what it made"),
        }
    }
}

impl AttentionCore {
    /// Norms inside attention that selective recomputation repeats.
    fn norms(&self) -> Vec<Value> {
        match self {
            Self::Projected(_) => Vec::new(),
            Self::Latent(core) => core.norms(),
        }
    }
}

impl Half {
    fn name(&self, what: &str) -> String {
        format!("{what}_{}", self.number)
    }

    /// Norm of the stream.
    fn enter(&self, b: &mut Builder<'_>, stream: Value) -> (HalfValues, Value) {
        let of = b.sizes.stream();
        let (x, h) = (b.value(self.name("x"), of), b.value(self.name("h"), of));
        let statistics = b.value(self.name("s"), Type::Statistics);
        b.push(Op::Norm { field: self.norm, stream, x, to: h, statistics });
        (HalfValues { x, h, statistics, sum: h, post: None }, h)
    }

    /// From the sublayer's output, after any reduction, to the stream.
    fn leave(&self, b: &mut Builder<'_>, kept: HalfValues, output: Value) -> (HalfValues, Value) {
        let of = b.sizes.stream();
        let mut sum = output;
        if let Some(field) = self.bias {
            let x = sum;
            sum = b.op(self.name("sum"), of, |to| Op::AddBias { field, x, to });
        }
        let mut branch = sum;
        let mut post = None;
        if let Some(field) = self.post {
            let statistics = b.value(self.name("t"), Type::Statistics);
            post = Some(statistics);
            branch = b.op(self.name("branch"), of, |to| Op::NormOf {
                field,
                x: sum,
                to,
                statistics: post,
            });
        }
        if self.dropout {
            let (x, place) = (branch, Some(self.number));
            branch = b.op(self.name("branch"), of, |to| Op::Dropout { place, x, to });
        }
        let x = kept.x;
        let stream = b.op("stream", Type::Stream, |to| Op::Sum { x, branch, to });
        (HalfValues { sum, post, ..kept }, stream)
    }

    /// `sublayer` gets the gradient of its output, of the stream's rows, and returns that of its
    /// input.
    fn backward(
        &self,
        b: &mut Builder<'_>,
        title: &'static str,
        kept: &HalfValues,
        sublayer: impl FnOnce(&mut Builder<'_>, &Self, Value) -> Value,
    ) -> Body {
        let of = b.sizes.stream();
        let dy = b.value("dy", of);
        let mut dsum = dy;
        if self.dropout {
            let place = Some(self.number);
            dsum = b.op(self.name("dbranch"), of, |to| Op::Dropout { place, x: dy, to });
        }
        if let (Some(field), Some(statistics)) = (self.post, kept.post) {
            let (x, dbranch) = (kept.sum, dsum);
            dsum = b.op(self.name("dsum"), of, |to| Op::NormBackward {
                field,
                x,
                statistics,
                dy: dbranch,
                sum: None,
                to,
            });
            b.push(Op::NormWeights { field, x, statistics, dy: dbranch });
        }
        if let Some(field) = self.bias {
            b.push(Op::BiasWeights { field, dy: dsum });
        }
        let dh = sublayer(b, self, dsum);
        let (field, x, statistics) = (self.norm, kept.x, kept.statistics);
        let dx = b.op("dx", of, |to| Op::NormBackward {
            field,
            x,
            statistics,
            dy: dh,
            sum: Some(dy),
            to,
        });
        b.push(Op::NormWeights { field, x, statistics, dy: dh });
        b.body(title, Some(dy), Some(dx))
    }

    /// The backward pass of a sublayer that tensor-parallel ranks divide. `sublayer` returns the
    /// gradient of its input, a partial sum, and the work on its weights; the sum is called `to`.
    fn through_split(
        &self,
        b: &mut Builder<'_>,
        kept: &HalfValues,
        dy: Value,
        to: String,
        sublayer: impl FnOnce(&mut Builder<'_>, Value) -> (Value, Vec<LaterWeights>),
    ) -> Value {
        let entered = b.enter(self.name("dfull"), dy);
        let again = b.start_enter("again", kept.h);
        let (dh, weights) = sublayer(b, entered);
        // Weight gradients are computed while the input gradient is being reduced.
        let leaving = b.start_leave("leaving", dh);
        let again = b.wait(self.name("full"), again);
        for LaterWeights { field, x, dy } in weights {
            b.push(Op::LinearWeights { field, x: x.unwrap_or(again), dy });
        }
        b.wait(to, leaving)
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
pub(super) fn to_heads(
    b: &mut Builder<'_>,
    field: FieldIndex,
    name: &str,
    x: Value,
    width: Width,
) -> Value {
    let (sizes, heads) = (b.sizes, heads_of(width));
    match sizes.ulysses {
        1 => x,
        _ => b.op(name, sizes.behind(width), |to| Op::ToHeads { field, x, to, heads }),
    }
}

/// `x` before such an exchange.
pub(super) fn to_tokens(
    b: &mut Builder<'_>,
    field: FieldIndex,
    name: &str,
    x: Value,
    width: Width,
) -> Value {
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

/// What attention's backward pass reads.
struct Core {
    /// Queries, keys, values, output, log-sum-exp.
    saved: [Value; 5],
    /// The output, of this rank's tokens.
    a: Value,
    /// Queries and keys before their norms, and statistics of their heads.
    normed: Option<[(Value, Value); 2]>,
}

impl Attention {
    /// Partial sums of the output.
    fn forward(&self, b: &mut Builder<'_>, x: Value) -> (Value, Core) {
        let sizes = b.sizes;
        let (query, key_value) = (sizes.split(Width::Query), sizes.split(Width::KeyValue));
        let field = self.core;
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
        let v = project(b, "v", self.v, key_value);
        let q = to_heads(b, field, "q", q, Width::Query);
        let k = to_heads(b, field, "k", k, Width::KeyValue);
        let v = to_heads(b, field, "v", v, Width::KeyValue);
        let behind = b.value("a", sizes.behind(Width::Query));
        let lse = b.value("lse", Type::LogSumExp);
        b.push(Op::Attention { field, q, k, v, to: behind, lse });
        let a = to_tokens(b, field, "a_tokens", behind, Width::Query);
        let part = b.op("part_1", sizes.part(), |to| Op::Linear { field: self.out, x: a, to });
        (part, Core { saved: [q, k, v, behind, lse], a, normed })
    }

    fn backward(&self, b: &mut Builder<'_>, core: &Core, dy: Value) -> (Value, Vec<LaterWeights>) {
        let sizes = b.sizes;
        let (query, key_value) = (sizes.split(Width::Query), sizes.split(Width::KeyValue));
        let (field, Core { saved, a, normed }) = (self.core, core);
        let da = b.op("da", query, |to| Op::BackwardInput { field: self.out, dy, to });
        let da = to_heads(b, field, "da", da, Width::Query);
        let widths = [("dq", Width::Query), ("dk", Width::KeyValue), ("dv", Width::KeyValue)];
        let mut to = widths.map(|(name, width)| b.value(name, sizes.behind(width)));
        b.push(Op::AttentionBackward { field, saved: *saved, dy: da, to });
        for (to, (name, width)) in to.iter_mut().zip(widths) {
            *to = to_tokens(b, field, name, *to, width);
        }
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
        let out = LaterWeights { field: self.out, x: Some(*a), dy };
        let of = |field, dy| LaterWeights { field, x: None, dy };
        (dh, vec![out, of(self.q, dq), of(self.k, dk), of(self.v, dv)])
    }
}
