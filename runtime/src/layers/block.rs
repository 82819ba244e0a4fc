//! A transformer layer: two halves of the same form,
//! `y = x + dropout(post_norm(leave(sublayer(enter(norm(x)))) + bias))`.

use super::attention::{Attention, AttentionKept};
use super::mlp::{Mlp, MlpKept};
use super::norm::{Norm, Residual, Statistics};
use super::sublayer::{KeptActivations, Sublayer};
use super::{Context, TensorNames, WeightGradients, WeightWork};
use crate::comm::CommError;
use crate::device::{Device, Space};
use crate::program::Recompute;
use crate::state::buffer::Buffer;
use crate::state::params::{
    Declaration, Gradient, Init, Inventory, ParameterSlice, Placement, SharedBuffer,
};
use kernels::Output;
use models::model::ModelSpec;
use std::rc::Rc;

/// One transformer layer, as one rank holds it.
#[derive(Clone, Debug)]
pub struct Block {
    attention: Half<Attention>,
    mlp: Half<Mlp>,
    recompute: Recompute,
}

/// What a layer keeps of a micro-batch for its backward pass.
pub struct BlockKept<D: Space>(BlockActivations<D>);

type Halves<D> = (HalfKept<D, AttentionKept<D>>, HalfKept<D, MlpKept<D>>);

enum BlockActivations<D: Space> {
    /// Of each half.
    Halves(Box<Halves<D>>),
    /// Its input `[r, h]`, and each half's reduced output unless recomputation repeats the
    /// reduction.
    Input(SharedBuffer<D>, [Option<SharedBuffer<D>>; 2]),
}

impl<D: Space> BlockKept<D> {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            BlockActivations::Halves(halves) => halves.0.bytes() + halves.1.bytes(),
            BlockActivations::Input(x, reduced) => {
                x.bytes() + reduced.iter().flatten().map(|reduced| reduced.bytes()).sum::<usize>()
            }
        }
    }
}

impl Block {
    /// Declares layer `index`.
    pub fn declare(
        model: &ModelSpec,
        index: usize,
        recompute: Recompute,
        sequence_parallel: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let names = TensorNames::of(model);
        let after = model.norm.per_layer == 4;
        let [before_attention, after_attention, before_mlp, after_mlp] = names.norms(index, after);
        let attention = Half::declare(
            model,
            &HalfNames {
                norm: &before_attention,
                post: after.then_some(&after_attention),
                bias: model.attention.out_bias.then(|| names.attention(index, "o")),
                place: super::place(index, 1),
                sequence_parallel,
            },
            |inventory| Attention::declare(model, index, inventory),
            inventory,
        );
        let mlp = Half::declare(
            model,
            &HalfNames {
                norm: &before_mlp,
                post: after.then_some(&after_mlp),
                bias: model.mlp.bias.then(|| names.mlp(index, "down")),
                place: super::place(index, 2),
                sequence_parallel,
            },
            |inventory| Mlp::declare(model, index, inventory),
            inventory,
        );
        Self { attention, mlp, recompute }
    }

    /// `x[r, h] -> y[r, h]`
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: Residual<D>,
    ) -> Result<(Residual<D>, BlockKept<D>), CommError> {
        let full = self.recompute == Recompute::Full;
        // Repeating the reduction would cost more than keeping its result.
        let keep = full && ctx.tp.size() > 1;
        let (x1, mut first) = self.attention.forward(ctx, x, None, keep)?;
        let (y, mut second) = self.mlp.forward(ctx, x1, None, false)?;
        if full {
            let reduced = [first.reduced.filter(|_| keep), second.reduced.filter(|_| keep)];
            return Ok((y, BlockKept(BlockActivations::Input(first.x, reduced))));
        }
        if self.recompute == Recompute::Selective {
            first.drop_cheap();
            second.drop_cheap();
        }
        Ok((y, BlockKept(BlockActivations::Halves(Box::new((first, second))))))
    }

    /// `dy[r, h] -> dx[r, h]`
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        kept: BlockKept<D>,
        dy: Buffer<D>,
        weights: &mut WeightGradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let (first, second) = match kept.0 {
            BlockActivations::Halves(halves) => *halves,
            BlockActivations::Input(x, [attention, mlp]) => {
                let x = Residual::Whole(x);
                let (x1, first) = self.attention.forward(ctx, x, attention, false)?;
                (first, self.mlp.forward_without_output(ctx, x1, mlp)?)
            }
        };
        let dx1 = self.mlp.backward(ctx, second, dy, weights)?;
        self.attention.backward(ctx, first, dx1, weights)
    }
}

/// Half a layer.
#[derive(Clone, Debug)]
struct Half<I> {
    norm: Norm,
    sublayer: I,
    /// Bias of the row-parallel matrix, added once, after the reduction.
    bias: Option<ParameterSlice>,
    /// Norm after the sublayer (Gemma 2).
    post: Option<Norm>,
    width: usize,
    /// Which dropout this is in the model.
    place: u32,
}

/// What half a layer keeps of a micro-batch.
struct HalfKept<D: Space, K> {
    /// Input, `[r, h]`.
    x: SharedBuffer<D>,
    statistics: Rc<Statistics<D>>,
    /// Norm output, `[r, h]`, unless it is recomputed.
    h: Option<SharedBuffer<D>>,
    sublayer: K,
    /// Output of the sublayer after the reduction, `[r, h]`, if the norm after it or recomputation
    /// needs it.
    reduced: Option<SharedBuffer<D>>,
    post: Option<Rc<Statistics<D>>>,
}

impl<D: Space, K: KeptActivations> HalfKept<D, K> {
    fn bytes(&self) -> usize {
        let shared = [&self.h, &self.reduced].into_iter().flatten();
        let statistics = self.post.as_ref().map_or(0, |post| post.bytes());
        self.x.bytes()
            + self.statistics.bytes()
            + self.sublayer.bytes()
            + statistics
            + shared.map(|shared| shared.bytes()).sum::<usize>()
    }

    fn drop_cheap(&mut self) {
        self.h = None;
        self.sublayer.drop_cheap();
    }
}

/// A half's output, `[r, h]`, and what it keeps.
type Forward<D, I> = (Residual<D>, HalfKept<D, <I as Sublayer<D>>::Kept>);

/// Names of half a layer's tensors, and what else distinguishes it.
struct HalfNames<'a> {
    norm: &'a str,
    post: Option<&'a String>,
    /// The matrix whose bias is added after the reduction.
    bias: Option<String>,
    place: u32,
    sequence_parallel: bool,
}

impl<I> Half<I> {
    fn declare(
        model: &ModelSpec,
        names: &HalfNames<'_>,
        sublayer: impl FnOnce(&mut Inventory) -> I,
        inventory: &mut Inventory,
    ) -> Self {
        let width = model.hidden as usize;
        let norm = Norm::declare(model, names.norm, names.sequence_parallel, inventory);
        let sublayer = sublayer(inventory);
        let partial = if names.sequence_parallel { Gradient::Partial } else { Gradient::Whole };
        let bias = names.bias.as_ref().map(|matrix| {
            inventory.declare(Declaration {
                name: format!("{matrix}.bias"),
                shape: vec![width],
                transposed: false,
                placement: Placement::Replicated,
                gradient: partial,
                tied_copy: false,
                init: Init::Constant(0.0),
            })
        });
        let post =
            names.post.map(|name| Norm::declare(model, name, names.sequence_parallel, inventory));
        Self { norm, sublayer, bias, post, width, place: names.place }
    }

    /// `x[r, h] -> y[r, h]`. Uses `reduced` from an earlier forward instead of reducing again;
    /// `keep` asks to keep it.
    fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: Residual<D>,
        reduced: Option<SharedBuffer<D>>,
        keep: bool,
    ) -> Result<Forward<D, I>, CommError>
    where
        I: Sublayer<D>,
    {
        let mut kept = self.before_projection(ctx, x)?;
        let reduced = match reduced {
            Some(reduced) => reduced,
            None => self.project(ctx, &kept.sublayer)?,
        };
        kept.reduced = (keep || self.post.is_some()).then(|| reduced.clone());
        let mut y = match self.post {
            None => ctx.own(reduced),
            Some(post) => {
                let (y, statistics) = post.forward(ctx, &reduced);
                kept.post = Some(Rc::new(statistics));
                y
            }
        };
        ctx.drop_stream(self.place, self.width, &mut y);
        Ok((Residual::Split(kept.x.clone(), y), kept))
    }

    /// Recomputes what [`Self::forward`] keeps; computes the output only if that needs it.
    fn forward_without_output<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: Residual<D>,
        reduced: Option<SharedBuffer<D>>,
    ) -> Result<HalfKept<D, I::Kept>, CommError>
    where
        I: Sublayer<D>,
    {
        if self.post.is_some() {
            return self.forward(ctx, x, reduced, false).map(|(_, kept)| kept);
        }
        self.before_projection(ctx, x)
    }

    fn before_projection<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: Residual<D>,
    ) -> Result<HalfKept<D, I::Kept>, CommError>
    where
        I: Sublayer<D>,
    {
        let (x, h, statistics) = self.norm.of(ctx, x);
        let (h, statistics) = (Rc::new(h), Rc::new(statistics));
        let entered = ctx.enter(&h)?;
        let sublayer = self.sublayer.forward(ctx, &entered);
        Ok(HalfKept { x, statistics, h: Some(h), sublayer, reduced: None, post: None })
    }

    fn project<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        kept: &I::Kept,
    ) -> Result<SharedBuffer<D>, CommError>
    where
        I: Sublayer<D>,
    {
        let mut reduced = ctx.leave(self.sublayer.project(ctx, kept))?;
        if let Some(bias) = self.bias {
            ctx.device.add_bias(ctx.weights.get(bias), reduced.view_mut());
        }
        Ok(Rc::new(reduced))
    }

    /// `dy[r, h] -> dx[r, h]`
    fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        kept: HalfKept<D, I::Kept>,
        dy: Buffer<D>,
        weights: &mut WeightGradients<'_, D>,
    ) -> Result<Buffer<D>, CommError>
    where
        I: Sublayer<D>,
    {
        let device = ctx.device;
        let dreduced = self.backward_post(ctx, &kept, &dy, weights);
        weights.take(device, self.bias.map(|bias| WeightWork::Bias { bias, dy: dreduced.clone() }));
        let dprojected = ctx.enter(&dreduced)?;
        let again = || Rc::new(self.norm.forward(ctx, &kept.x).0);
        let h = kept.h.clone().unwrap_or_else(again);
        let entering = ctx.start_enter(&h)?;
        let (dh, work) = self.sublayer.backward(ctx, &kept.sublayer, &dprojected);
        // Weight gradients are computed while the input gradient is being reduced.
        let leaving = ctx.start_leave(dh)?;
        weights.take(device, self.sublayer.weights(work, &entering.wait(ctx)?));
        let dh = Rc::new(leaving.wait(ctx)?);
        let HalfKept { x, statistics, .. } = kept;
        let mut dx = dy;
        let output = Output::Accumulate;
        self.norm.backward_input(ctx, &x, &statistics, &dh, &mut dx, output);
        weights.take(device, [WeightWork::Norm { norm: self.norm, x, statistics, dy: dh }]);
        Ok(dx)
    }

    /// Backward pass through dropout and the norm after the sublayer.
    fn backward_post<D: Device, K>(
        &self,
        ctx: &Context<'_, D>,
        kept: &HalfKept<D, K>,
        dy: &Buffer<D>,
        weights: &mut WeightGradients<'_, D>,
    ) -> SharedBuffer<D> {
        let mut dropped = ctx.copy_of(dy);
        ctx.drop_stream(self.place, self.width, &mut dropped);
        let dropped = Rc::new(dropped);
        let (Some(norm), Some(x), Some(statistics)) = (self.post, &kept.reduced, &kept.post) else {
            return dropped;
        };
        let mut dx = ctx.buffer(x.len());
        let output = Output::Overwrite;
        norm.backward_input(ctx, x, statistics, &dropped, &mut dx, output);
        let (x, statistics) = (x.clone(), statistics.clone());
        weights.take(ctx.device, [WeightWork::Norm { norm, x, statistics, dy: dropped }]);
        Rc::new(dx)
    }
}
