//! Self-attention over this rank's heads, from the normed stream to partial sums of the output.

use super::linear::Linear;
use super::sublayer::{KeptActivations, Sublayer};
use super::{Context, TensorNames, WeightWork};
use crate::device::{Device, Gradients, Saved, Space};
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::{
    Declaration, Gradient, Init, Inventory, Placement, RowBlock, SharedBuffer,
};
use kernels::attention::{Attention as Shape, ProbabilityDropout};
use kernels::{Output, rope};
use models::model::{ModelSpec, Positions};
use std::rc::Rc;

/// One rank's heads of one layer's attention.
#[derive(Clone, Debug)]
pub struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: usize,
    kv_heads: usize,
    total_heads: usize,
    head_dim: usize,
    scale: f64,
    window: Option<usize>,
    soft_cap: Option<f64>,
    rotary: bool,
    /// Which dropout this is in the model.
    place: u32,
}

/// What the backward pass of a micro-batch needs.
pub struct AttentionKept<D: Space> {
    q: Buffer<D>,
    k: Buffer<D>,
    v: Buffer<D>,
    out: SharedBuffer<D>,
    lse: WideBuffer<D>,
}

impl<D: Space> KeptActivations for AttentionKept<D> {
    fn bytes(&self) -> usize {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(Buffer::bytes);
        q + k + v + self.out.bytes() + self.lse.bytes()
    }

    // The scores, which selective recomputation is about, are never kept.
    fn drop_cheap(&mut self) {}
}

/// Layout of the three input projections.
struct Projections {
    q: Linear,
    k: Linear,
    v: Linear,
}

impl Attention {
    /// Declares layer `index`'s projections. Query heads are split evenly. Each rank holds the
    /// key/value heads that its query heads use. With fewer key/value heads than ranks these are
    /// copies, whose gradients are partial sums.
    pub fn declare(model: &ModelSpec, index: usize, inventory: &mut Inventory) -> Self {
        let (names, spec, tp) = (TensorNames::of(model), &model.attention, inventory.tp());
        let (hidden, head_dim) = (model.hidden as usize, spec.head_dim as usize);
        let (total_heads, total_kv) = (spec.heads as usize, spec.kv_heads as usize);
        let (heads, kv_heads) = (total_heads / tp, (total_kv / tp).max(1));
        let widths = Widths {
            hidden,
            q: RowBlock { rows: total_heads * head_dim, ways: tp },
            kv: RowBlock { rows: total_kv * head_dim, ways: tp.min(total_kv) },
        };
        let Projections { q, k, v } = match names.is_gpt2() {
            true => widths.fused(model, &names.attention(index, "qkv"), inventory),
            false => widths.separate(model, |part| names.attention(index, part), inventory),
        };
        let o = inventory.declare(Declaration {
            name: format!("{}.weight", names.attention(index, "o")),
            shape: oriented(names, hidden, total_heads * head_dim),
            transposed: names.is_gpt2(),
            placement: Placement::Columns,
            gradient: Gradient::Whole,
            tied_copy: false,
            init: Init::Normal(super::output_deviation(model)),
        });
        let o = Linear { weight: o, bias: None, inputs: heads * head_dim, outputs: hidden };
        let windowed = model.layer_kind(index).windowed;
        let window = spec.window.filter(|_| windowed).map(|window| window.tokens as usize);
        Self {
            q,
            k,
            v,
            o,
            heads,
            kv_heads,
            total_heads,
            head_dim,
            scale: model.numerics.query_pre_attn_scalar.powf(-0.5),
            window,
            soft_cap: spec.soft_cap,
            rotary: model.positions == Positions::Rope,
            place: super::place(index, 0),
        }
    }

    fn shape<D: Device>(&self, ctx: &Context<'_, D>) -> Shape {
        let batch = ctx.batch;
        let (b, s) = (batch.sequences, batch.seq_len);
        let draws = ctx.draws.map(|draws| ProbabilityDropout {
            dropout: draws.at(self.place),
            batch_offset: batch.first_sequence as u64,
            head_offset: (ctx.tp.rank() * self.heads) as u64,
            total_heads: self.total_heads as u64,
            total_len: s as u64,
        });
        Shape {
            scale: self.scale,
            window: self.window,
            soft_cap: self.soft_cap,
            dropout: draws,
            ..Shape::causal(b, s, self.heads, self.kv_heads, self.head_dim)
        }
    }

    fn rope(&self, tokens: usize, heads: usize) -> rope::Rope {
        rope::Rope::half(tokens, heads, self.head_dim)
    }
}

impl<D: Device> Sublayer<D> for Attention {
    type Kept = AttentionKept<D>;
    type Work = AttentionWeightWork<D>;

    fn forward(&self, ctx: &Context<'_, D>, h: &Buffer<D>) -> AttentionKept<D> {
        let (device, n) = (ctx.device, ctx.tokens());
        let mut q = self.q.forward(ctx, h);
        let mut k = self.k.forward(ctx, h);
        let v = self.v.forward(ctx, h);
        if self.rotary {
            let table = ctx.batch.rope.view();
            device.rope(&self.rope(n, self.heads), table, q.view_mut());
            device.rope(&self.rope(n, self.kv_heads), table, k.view_mut());
        }
        let shape = self.shape(ctx);
        let mut out = ctx.buffer(shape.out_elements());
        let mut lse = ctx.wide(shape.lse_elements());
        let (to, statistics) = (out.view_mut(), lse.view_mut());
        device.attention(&shape, q.view(), k.view(), v.view(), to, statistics);
        AttentionKept { q, k, v, out: Rc::new(out), lse }
    }

    fn project(&self, ctx: &Context<'_, D>, kept: &AttentionKept<D>) -> Buffer<D> {
        self.o.forward(ctx, &kept.out)
    }

    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: &AttentionKept<D>,
        dy: &SharedBuffer<D>,
    ) -> (Buffer<D>, AttentionWeightWork<D>) {
        let (device, n) = (ctx.device, ctx.tokens());
        let mut dout = ctx.buffer(kept.out.len());
        self.o.backward_input(ctx, dy, &mut dout, Output::Overwrite);
        let (mut dq, mut dk) = (ctx.buffer(kept.q.len()), ctx.buffer(kept.k.len()));
        let mut dv = ctx.buffer(kept.v.len());
        let AttentionKept { q, k, v, out, lse } = kept;
        let (q, k, v) = (q.view(), k.view(), v.view());
        let saved = Saved { q, k, v, out: out.view(), lse: lse.view() };
        let gradients = Gradients { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
        device.attention_backward(&self.shape(ctx), saved, dout.view(), gradients);
        if self.rotary {
            let table = ctx.batch.rope.view();
            device.rope_backward(&self.rope(n, self.heads), table, dq.view_mut());
            device.rope_backward(&self.rope(n, self.kv_heads), table, dk.view_mut());
        }
        let mut dh = ctx.buffer(n * self.q.inputs);
        self.q.backward_input(ctx, &dq, &mut dh, Output::Overwrite);
        self.k.backward_input(ctx, &dk, &mut dh, Output::Accumulate);
        self.v.backward_input(ctx, &dv, &mut dh, Output::Accumulate);
        let work = AttentionWeightWork { out: kept.out.clone(), dy: dy.clone(), dq, dk, dv };
        (dh, work)
    }

    fn weights(&self, work: AttentionWeightWork<D>, h: &SharedBuffer<D>) -> Vec<WeightWork<D>> {
        let AttentionWeightWork { out, dy, dq, dk, dv } = work;
        let of = |linear: Linear, x: &SharedBuffer<D>, dy: SharedBuffer<D>| WeightWork::Linear {
            linear,
            x: x.clone(),
            dy,
        };
        vec![
            of(self.o, &out, dy),
            of(self.q, h, Rc::new(dq)),
            of(self.k, h, Rc::new(dk)),
            of(self.v, h, Rc::new(dv)),
        ]
    }
}

/// Input of the weight gradients, apart from the layer's input.
pub struct AttentionWeightWork<D: Space> {
    out: SharedBuffer<D>,
    dy: SharedBuffer<D>,
    dq: Buffer<D>,
    dk: Buffer<D>,
    dv: Buffer<D>,
}

/// Shape of a matrix in its checkpoint.
pub(super) fn oriented(names: TensorNames, outputs: usize, inputs: usize) -> Vec<usize> {
    if names.is_gpt2() { vec![inputs, outputs] } else { vec![outputs, inputs] }
}

/// Widths of the input projections.
struct Widths {
    hidden: usize,
    q: RowBlock,
    kv: RowBlock,
}

impl Widths {
    fn gradient(&self, tp: usize) -> Gradient {
        if self.kv.ways < tp { Gradient::Partial } else { Gradient::Whole }
    }

    fn linear(
        &self,
        weight: crate::state::params::ParameterSlice,
        bias: Option<crate::state::params::ParameterSlice>,
    ) -> Linear {
        let outputs = weight.len / self.hidden;
        Linear { weight, bias, inputs: self.hidden, outputs }
    }

    /// One tensor for each projection.
    fn separate(
        &self,
        model: &ModelSpec,
        name: impl Fn(&str) -> String,
        inventory: &mut Inventory,
    ) -> Projections {
        let tp = inventory.tp();
        let mut project = |part: &str, block: RowBlock, gradient| {
            let mut declare = |kind: &str, shape: Vec<usize>, init| {
                inventory.declare(Declaration {
                    name: format!("{}.{kind}", name(part)),
                    shape,
                    transposed: false,
                    placement: Placement::Rows(vec![block]),
                    gradient,
                    tied_copy: false,
                    init,
                })
            };
            let init = Init::Normal(super::DEVIATION);
            let weight = declare("weight", vec![block.rows, self.hidden], init);
            let biased = model.attention.qkv_bias;
            let bias = biased.then(|| declare("bias", vec![block.rows], Init::Constant(0.0)));
            self.linear(weight, bias)
        };
        Projections {
            q: project("q", self.q, Gradient::Whole),
            k: project("k", self.kv, self.gradient(tp)),
            v: project("v", self.kv, self.gradient(tp)),
        }
    }

    /// One tensor for all three: rows of queries, then keys, then values.
    fn fused(&self, model: &ModelSpec, name: &str, inventory: &mut Inventory) -> Projections {
        let tp = inventory.tp();
        let blocks = vec![self.q, self.kv, self.kv];
        let total = self.q.rows + 2 * self.kv.rows;
        let mut declare = |kind: &str, shape: Vec<usize>, init| {
            inventory.declare(Declaration {
                name: format!("{name}.{kind}"),
                transposed: shape.len() == 2,
                shape,
                placement: Placement::Rows(blocks.clone()),
                gradient: self.gradient(tp),
                tied_copy: false,
                init,
            })
        };
        let weight = declare("weight", vec![self.hidden, total], Init::Normal(super::DEVIATION));
        let biased = model.attention.qkv_bias;
        let bias = biased.then(|| declare("bias", vec![total], Init::Constant(0.0)));
        let (q, kv) = (self.q.rows / self.q.ways, self.kv.rows / self.kv.ways);
        let rows = |begin: usize, count: usize| {
            let rows = begin..begin + count;
            let bias = bias.map(|bias| bias.rows(rows.clone(), 1));
            self.linear(weight.rows(rows, self.hidden), bias)
        };
        Projections { q: rows(0, q), k: rows(q, kv), v: rows(q + kv, kv) }
    }
}
