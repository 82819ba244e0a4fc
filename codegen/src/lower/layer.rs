//! A transformer layer: two halves of the same form,
//! `y = x + dropout(post_norm(sublayer(norm(x)) + bias))`.
//!
//! Attention and dense feed-forward blocks are split over tensor-parallel ranks: they gather the
//! stream's rows, and reduce their output. A mixture of experts takes and gives the stream's rows.

use super::attention::Attention;
use super::builder::{Body, Builder, Survivors};
use super::expert_layer::{self, ExpertLayer};
use super::feed_forward::Mlp;
use super::half::Half;
use super::moe::Moe;
use super::op::Value;
use super::{Block, FieldKind, Segment, Sizes, TensorNames, Type};
use models::program::{Program, Recompute};

/// A layer's passes, and what recomputation may do without.
pub(super) struct Layer {
    pub forward: Body,
    /// Parts of the backward pass.
    pub backward: Vec<Body>,
    /// Values that are large and quickly computed again.
    pub cheap: Vec<Value>,
    /// What full recomputation keeps, if the backward pass reads it.
    pub kept_by_full: Vec<Value>,
}

/// Lowers a layer of a program.
pub(super) fn layer(program: &Program, sizes: &Sizes, names: TensorNames, block: Block) -> Segment {
    let model = &program.model;
    let mut b = Builder::new(sizes);
    let after = model.norm.per_layer == 4;
    let [before_attention, after_attention, before_mlp, after_mlp] = names.norms(after);
    let dropout = model.dropout > 0.0;
    let norm_1 = b.field("norm_1", FieldKind::Norm { tensor: before_attention });
    let attention = Attention::fields(&mut b, model, names);
    let [_, _, _, out] = names.attention();
    let out_bias = FieldKind::RowBias { tensor: out };
    // Where there is nothing to sum before a bias, it belongs to its matrix.
    let apart = sizes.tp > 1;
    let bias = (apart && model.attention.out_bias).then(|| b.field("out_bias", out_bias));
    let post = FieldKind::Norm { tensor: after_attention };
    let post = after.then(|| b.field("post_norm_1", post));
    let first = Half { number: 1, norm: norm_1, bias, post, dropout };
    let norm_2 = b.field("norm_2", FieldKind::Norm { tensor: before_mlp });
    let post_2 = FieldKind::Norm { tensor: after_mlp };
    let layer = match block {
        Block::Dense => {
            let mlp = Mlp::fields(&mut b, model, names);
            let [_, _, down] = names.mlp();
            let of = FieldKind::RowBias { tensor: down };
            let bias = (apart && model.mlp.bias).then(|| b.field("down_bias", of));
            let post = after.then(|| b.field("post_norm_2", post_2));
            let second = Half { number: 2, norm: norm_2, bias, post, dropout };
            dense(&mut b, &first, &attention, &second, &mlp)
        }
        Block::Experts => {
            let post = after.then(|| b.field("post_norm_2", post_2));
            let second = Half { number: 2, norm: norm_2, bias: None, post, dropout };
            let moe = Moe::fields(&mut b, model);
            let shared = Mlp::shared(&mut b, model);
            let of = ExpertLayer { first, attention, second, moe, shared };
            expert_layer::lower(&mut b, &of, program.moe_overlap)
        }
    };
    let mut used: Vec<Recompute> =
        program.stages.iter().flat_map(|stage| stage.recompute.clone()).collect();
    if program.recompute_group > 1 {
        // The stage runs its groups again; a layer keeps everything meanwhile.
        used = vec![Recompute::None];
    }
    let Layer { forward, backward, cheap, kept_by_full } = layer;
    let survivors: Survivors = [
        (Recompute::None, Box::new(|_| true) as Box<_>),
        (Recompute::Selective, Box::new(move |value| !cheap.contains(&value)) as Box<_>),
        (Recompute::Full, Box::new(move |value| kept_by_full.contains(&value)) as Box<_>),
    ]
    .into_iter()
    .filter(|(how, _)| used.contains(how))
    .collect();
    b.finish(forward, backward, &survivors)
}

fn dense(
    b: &mut Builder<'_>,
    first: &Half,
    attention: &Attention,
    second: &Half,
    mlp: &Mlp,
) -> Layer {
    let input = b.value("stream", Type::Stream);
    let (kept_1, h) = first.enter(b, input);
    let entered = b.enter(first.name("full"), h);
    let of = attention.project(b, entered);
    let (part, attended) = attention.attend(b, &of);
    let sum = b.leave(first.name("sum"), part);
    let (kept_1, middle) = first.leave(b, kept_1, sum);
    let (kept_2, h) = second.enter(b, middle);
    let entered = b.enter(second.name("full"), h);
    let (part, inner) = mlp.forward(b, entered);
    let sum = b.leave(second.name("sum"), part);
    let (kept_2, output) = second.leave(b, kept_2, sum);
    let forward = b.body("forward", Some(input), Some(output));
    let of_block = second.backward(b, "feed-forward block", &kept_2, |b, half, dy| {
        let to = half.name("dh");
        half.through_split(b, &kept_2, dy, to, |b, dy| mlp.backward(b, &inner, dy))
    });
    let of_attention = first.backward(b, "attention", &kept_1, |b, half, dy| {
        let to = half.name("dh");
        half.through_split(b, &kept_1, dy, to, |b, dy| attention.backward(b, &of, &attended, dy))
    });
    // Repeating a reduction would cost more than keeping its result.
    let sums = if b.sizes.tp > 1 { vec![kept_1.sum, kept_2.sum] } else { Vec::new() };
    Layer {
        forward,
        backward: vec![of_block, of_attention],
        cheap: [vec![kept_1.h, kept_2.h, inner.product], of.norms()].concat(),
        kept_by_full: [vec![kept_1.x], sums].concat(),
    }
}
