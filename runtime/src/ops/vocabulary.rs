//! Input and output layer of a vocabulary split over all pipeline ranks and their tensor-parallel
//! ranks: what one rank computes in the passes `S`, `S2` and `T`, and what is reduced between them
//! (Vocabulary Parallelism, Yeung et al. 2024, arXiv 2411.05288, sections 4 and 6.1).
//!
//! | | naive | algorithm 1 | algorithm 2 |
//! |---|---|---|---|
//! | `S` | logits, maximum | and sums around it | and the two parts of the input gradient |
//! | reduced | maximum | maximum, sums | maximum, sums, input gradient |
//! | `S2` | sums | | |
//! | reduced | sums | | |
//! | `T` | both gradients | both gradients | weight gradient |
//! | reduced | input gradient | input gradient | |
//!
//! Reductions are all-reduces, as in the paper's implementation. They run on threads of their own
//! (`crate::step::vocab_collectives`), so that passes go on meanwhile.

use super::embedding::VocabTable;
use super::linear::Linear;
use super::{Context, InFlight, PassContext, WeightWork};
use crate::comm::{CommError, Communicator, Op};
use crate::device::{Device, DeviceGroup, Ids, RowSums, Space, Wide, WideMut};
use crate::state::buffer::Buffer;
use crate::state::gradients::{GradientSink, GradientStore};
use crate::state::params::{Inventory, ParameterSlice, Placement, SharedBuffer};
use crate::state::weights::WeightView;
use kernels::Output;
use kernels::cross_entropy::Logits;
use kernels::embedding::Embedding;
use models::schedule::VocabPasses;
use std::rc::Rc;

/// One rank's rows of the input and output matrix, which are one tensor if they are tied.
#[derive(Clone, Copy, Debug)]
pub struct VocabularyShard {
    input: ParameterSlice,
    output: Linear,
    passes: VocabPasses,
    /// Index of the shard, counted over pipeline ranks and their tensor-parallel ranks.
    number: usize,
    rows: usize,
    vocab: usize,
    scale: f64,
    soft_cap: Option<f64>,
    begin: usize,
    end: usize,
}

/// A vocabulary that is split over the pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardSpec {
    /// The input table.
    pub input: VocabTable,
    /// The output matrix; `None` if it is the input table.
    pub output: Option<VocabTable>,
    /// The algorithm's passes.
    pub passes: VocabPasses,
    /// Rows of each rank, padding included.
    pub rows: usize,
    /// Factor of the embedding rows.
    pub scale: f64,
    /// Bound of the logits (Gemma 2).
    pub soft_cap: Option<f64>,
}

/// Memory of activations. It belongs to no pool, because other threads take it.
type Activations<D> = <D as Space>::Memory<<D as Space>::Stored>;
/// Memory of numbers for each row. It belongs to no pool, because other threads take it.
type RowStats<D> = <D as Space>::Memory<<D as Space>::Wide>;

/// What a rank keeps of a micro-batch from `S` to `T`.
pub struct ShardKept<D: Space> {
    /// Input of the output layer, `[r, h]`.
    h: SharedBuffer<D>,
    /// Its columns of the logits, `[n, V/(pt)]`; with algorithm 2, their softmax around the shard's
    /// own maximum.
    columns: Buffer<D>,
}

impl<D: Space> ShardKept<D> {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.h.bytes() + self.columns.bytes()
    }
}

/// For each row: the maximum, the sum of exponentials around it, and the target's logit.
pub struct SoftmaxSums<D: Space> {
    /// `[n]`
    max: RowStats<D>,
    /// Sums of exponentials, then target logits, which are reduced together, `[2, n]`.
    both: RowStats<D>,
}

impl<D: Space> SoftmaxSums<D> {
    fn adopt(&self, device: &D) {
        device.adopt(&self.max);
        device.adopt(&self.both);
    }

    fn rows(&self) -> usize {
        D::len(&self.both) / 2
    }

    fn sum_exp(&self) -> Wide<'_, D> {
        D::view(&self.both, 0..self.rows())
    }

    fn target(&self) -> Wide<'_, D> {
        D::view(&self.both, self.rows()..2 * self.rows())
    }

    fn around(&self) -> RowSums<'_, D> {
        RowSums { max: all::<D>(&self.max), sum_exp: self.sum_exp() }
    }
}

fn all<D: Space>(rows: &RowStats<D>) -> Wide<'_, D> {
    D::view(rows, 0..D::len(rows))
}

fn all_mut<D: Space>(rows: &mut RowStats<D>) -> WideMut<'_, D> {
    let len = D::len(rows);
    D::view_mut(rows, 0..len)
}

/// What a pass leaves to be reduced over all shards.
#[must_use = "what the other shards wait for"]
pub enum ShardLocal<D: Space> {
    /// Naive `S`: the shard's maximum, `[n]`.
    Max(RowStats<D>),
    /// Naive `S2`: sums around the common maximum.
    Common(SoftmaxSums<D>),
    /// Algorithm 1's `S`: sums around the shard's own maximum.
    Own(SoftmaxSums<D>),
    /// Algorithm 2's `S`: the sums, and the parts of the input gradient.
    WithGradient(SoftmaxSums<D>, GradientParts<D>),
    /// `T`: the shard's part of the input gradient, `[n, h]`.
    Gradient(Activations<D>),
}

/// The parts of algorithm 2's input gradient, `[n, h]` each (section 4.3).
pub struct GradientParts<D: Space> {
    /// Rows of the output matrix, weighted with the softmax around the shard's own maximum.
    weighted: Activations<D>,
    /// The target's row; 0 if another shard has it.
    hits: Activations<D>,
    /// Weight of each token's loss.
    scale: f64,
}

/// Result of a reduction.
pub struct ShardReduced<D: Space> {
    known: KnownLogits<D>,
    /// Gradient of the output layer's input, `[n, h]`, if it was reduced.
    gradient: Option<Activations<D>>,
}

impl<D: Space> ShardLocal<D> {
    /// Notes that it is used on this queue too ([`Space::adopt`]).
    pub fn adopt(&self, device: &D) {
        match self {
            Self::Max(max) => device.adopt(max),
            Self::Common(sums) | Self::Own(sums) => sums.adopt(device),
            Self::WithGradient(sums, GradientParts { weighted, hits, .. }) => {
                sums.adopt(device);
                device.adopt(weighted);
                device.adopt(hits);
            }
            Self::Gradient(gradient) => device.adopt(gradient),
        }
    }
}

/// What the reductions have found out about the logits.
enum KnownLogits<D: Space> {
    Nothing,
    /// The common maximum.
    Max(RowStats<D>),
    Sums(SoftmaxSums<D>),
    /// Algorithm 2: also the factor from the shard's softmax to the common softmax, `[n]`.
    Factor(SoftmaxSums<D>, RowStats<D>),
}

impl<D: Space> ShardReduced<D> {
    /// Notes that it is used on this queue too ([`Space::adopt`]).
    pub fn adopt(&self, device: &D) {
        match &self.known {
            KnownLogits::Nothing => {}
            KnownLogits::Max(max) => device.adopt(max),
            KnownLogits::Sums(sums) => sums.adopt(device),
            KnownLogits::Factor(sums, factor) => {
                sums.adopt(device);
                device.adopt(factor);
            }
        }
        if let Some(gradient) = &self.gradient {
            device.adopt(gradient);
        }
    }

    /// Takes out the input gradient, `[n, h]`; `None` if there is none.
    pub fn take_gradient(&mut self) -> Option<Activations<D>> {
        self.gradient.take()
    }

    /// Whether it has rows' maxima and sums.
    pub fn has_sums(&self) -> bool {
        !matches!(self.known, KnownLogits::Nothing)
    }

    fn sums(&self) -> Result<&SoftmaxSums<D>, CommError> {
        match &self.known {
            KnownLogits::Sums(sums) | KnownLogits::Factor(sums, _) => Ok(sums),
            KnownLogits::Nothing | KnownLogits::Max(_) => Err(unknown("the logits' sums")),
        }
    }
}

/// The error of a pass that needs another reduction's result: our bug.
fn unknown(what: &str) -> CommError {
    CommError::Invalid { call: what.to_owned(), reason: "no reduction made them".to_owned() }
}

impl VocabularyShard {
    /// Declares this rank's rows of the tables.
    pub fn declare(spec: &ShardSpec, pipeline_rank: usize, inventory: &mut Inventory) -> Self {
        let placement = Placement::OverPipeline { pipeline_rank, rows: spec.rows };
        let begin = inventory.elements();
        let mut declare =
            |table: &VocabTable| inventory.declare(table.declaration(placement.clone()));
        let input = declare(&spec.input);
        let weight = spec.output.as_ref().map_or(input, declare);
        let hidden = spec.input.hidden;
        let rows = input.len / hidden;
        Self {
            input,
            output: Linear { weight, bias: None, inputs: hidden, outputs: rows },
            passes: spec.passes,
            number: pipeline_rank * inventory.tp() + inventory.tp_rank(),
            rows,
            vocab: spec.input.vocab,
            scale: spec.scale,
            soft_cap: spec.soft_cap,
            begin,
            end: inventory.elements(),
        }
    }

    /// First element of its parameters.
    pub fn begin(&self) -> usize {
        self.begin
    }

    /// End of its parameters.
    pub fn end(&self) -> usize {
        self.end
    }

    /// The algorithm's passes.
    pub fn passes(&self) -> VocabPasses {
        self.passes
    }

    fn rows_of(&self, tokens: usize, scale: f64) -> Embedding {
        let first_row = self.number * self.rows;
        Embedding { tokens, columns: self.output.inputs, rows: self.rows, first_row, scale }
    }

    /// Embedding rows of tokens, `[n, h]`, 0 if another shard has them.
    pub fn look_up<D: Device>(
        &self,
        device: &D,
        weights: &WeightView<D>,
        tokens: Ids<'_, D>,
        count: usize,
    ) -> Activations<D> {
        let elements = count * self.output.inputs;
        let (mut rows, shape) = (device.zeros(elements), self.rows_of(count, self.scale));
        let to = D::view_mut(&mut rows, 0..elements);
        device.embedding(&shape, tokens, weights.get(self.input), to);
        rows
    }

    /// Adds the gradient of `count` looked-up rows, `dx[n, h]`, to that of the input table.
    pub fn scatter<D: Device>(
        &self,
        device: &D,
        (by_row, count): (Ids<'_, D>, usize),
        dx: &Activations<D>,
        gradients: &mut GradientStore<D>,
    ) {
        let shape = self.rows_of(count, self.scale);
        let dx = D::view(dx, 0..count * self.output.inputs);
        let dtable = gradients.get_mut(device, self.input);
        device.embedding_backward(&shape, by_row, dx, dtable);
    }

    fn shape<D: Device>(&self, ctx: &PassContext<'_, D>) -> Logits {
        let first_column = (self.number * self.rows).min(self.vocab);
        Logits {
            rows: ctx.tokens(),
            columns: self.rows,
            real_columns: self.rows.min(self.vocab - first_column),
            first_column,
            soft_cap: self.soft_cap,
        }
    }

    /// `S`: computes logits of the output layer's input `h[r, h]`, and the shard's maxima and sums.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn first<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        h: Buffer<D>,
    ) -> Result<(ShardKept<D>, ShardLocal<D>), CommError> {
        let h = Rc::new(h);
        let entered = gathered(ctx, &h)?.wait(ctx)?;
        let mut columns = self.output.forward(ctx, &entered);
        let shape = self.shape(ctx);
        let local = match self.passes {
            VocabPasses::Naive => {
                let mut max = ctx.device.zeros(shape.rows);
                ctx.device.local_max(&shape, columns.view(), all_mut::<D>(&mut max));
                ShardLocal::Max(max)
            }
            VocabPasses::One | VocabPasses::Interlaced => {
                ShardLocal::Own(own_sums(ctx, &shape, &columns))
            }
            VocabPasses::Two => {
                let sums = own_sums(ctx, &shape, &columns);
                let parts = self.parts(ctx, &shape, &mut columns, &sums)?;
                ShardLocal::WithGradient(sums, parts)
            }
        };
        Ok((ShardKept { h, columns }, local))
    }

    /// `S2`: sums around the common maximum.
    ///
    /// # Errors
    /// The reduction did not return a maximum: our bug.
    pub fn middle<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        kept: &ShardKept<D>,
        reduced: ShardReduced<D>,
    ) -> Result<ShardLocal<D>, CommError> {
        let KnownLogits::Max(max) = reduced.known else {
            return Err(unknown("the logits' maxima"));
        };
        Ok(ShardLocal::Common(sums(ctx, &self.shape(ctx), &kept.columns, max)))
    }

    /// Algorithm 2: replaces the logits by their softmax around the shard's own maximum, and
    /// computes the two parts of the input gradient.
    fn parts<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        shape: &Logits,
        columns: &mut Buffer<D>,
        sums: &SoftmaxSums<D>,
    ) -> Result<GradientParts<D>, CommError> {
        let (device, batch) = (ctx.device, ctx.batch);
        let elsewhere = batch.elsewhere.as_ref().ok_or_else(|| unknown("targets elsewhere"))?;
        let around = sums.around();
        device.cross_entropy_gradient(shape, columns.view_mut(), elsewhere.view(), around, 1.0);
        let elements = shape.rows * self.output.inputs;
        let mut weighted = ctx.buffer(elements);
        self.output.backward_input_to(ctx, columns, &mut weighted, Output::Overwrite);
        let mut hits = ctx.buffer(elements);
        let (rows, table) = (self.rows_of(shape.rows, 1.0), ctx.weights.get(self.output.weight));
        device.embedding(&rows, batch.labels.view(), table, hits.view_mut());
        device.scale_by_slope(self.soft_cap, sums.target(), hits.view_mut());
        let (weighted, hits) = (weighted.into_memory(), hits.into_memory());
        Ok(GradientParts { weighted, hits, scale: batch.loss_scale })
    }

    /// `T`: adds to the output matrix's gradient. Returns what remains to be reduced.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn last<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        kept: ShardKept<D>,
        reduced: &ShardReduced<D>,
        gradients: &mut GradientStore<D>,
    ) -> Result<Option<ShardLocal<D>>, CommError> {
        let (device, shape, ShardKept { h, mut columns }) = (ctx.device, self.shape(ctx), kept);
        let (labels, scale) = (ctx.batch.labels.view(), ctx.batch.loss_scale);
        let to = columns.view_mut();
        let two = match &reduced.known {
            // From the softmax around the shard's own maximum (section 4.3).
            KnownLogits::Factor(sums, factor) => {
                let (factor, target) = (all::<D>(factor), sums.target());
                device.softmax_to_gradient(&shape, to, labels, factor, target, scale);
                true
            }
            _ => {
                let around = reduced.sums()?.around();
                device.cross_entropy_gradient(&shape, to, labels, around, scale);
                false
            }
        };
        let (entering, dy) = (gathered(ctx, &h)?, Rc::new(columns));
        let gradient = (!two).then(|| {
            let mut dh = ctx.buffer(shape.rows * self.output.inputs);
            self.output.backward_input_to(ctx, &dy, &mut dh, Output::Overwrite);
            ShardLocal::Gradient(dh.into_memory())
        });
        let (linear, x) = (self.output, entering.wait(ctx)?);
        WeightWork::Linear { linear, x, dy }.run(device, gradients);
        Ok(gradient)
    }

    /// Adds the micro-batch's losses to a total.
    ///
    /// # Errors
    /// The reduction did not return sums: our bug.
    pub fn add_loss<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        reduced: &ShardReduced<D>,
        total: &mut D::Total,
    ) -> Result<(), CommError> {
        let (labels, sums) = (ctx.batch.labels.view(), reduced.sums()?);
        let mut losses = ctx.wide(sums.rows());
        ctx.device.loss(labels, sums.around(), sums.target(), losses.view_mut());
        ctx.device.add_sum(losses.view(), total);
        Ok(())
    }
}

/// The input of the output layer for all tokens, `[n, h]`, maybe in flight.
#[must_use = "a call that nobody waits for may never finish"]
enum Gathered<D: Device> {
    /// This rank has all rows.
    Here(SharedBuffer<D>),
    /// From all tensor-parallel ranks.
    InFlight(InFlight<D>),
}

fn gathered<D: Device>(
    ctx: &PassContext<'_, D>,
    h: &SharedBuffer<D>,
) -> Result<Gathered<D>, CommError> {
    match ctx.rows() == ctx.tokens() {
        true => Ok(Gathered::Here(h.clone())),
        false => ctx.start_all_gather(h).map(Gathered::InFlight),
    }
}

impl<D: Device> Gathered<D> {
    fn wait(self, ctx: &PassContext<'_, D>) -> Result<SharedBuffer<D>, CommError> {
        match self {
            Self::Here(h) => Ok(h),
            Self::InFlight(moving) => moving.wait(ctx).map(Rc::new),
        }
    }
}

/// Sums around the shard's own maximum.
fn own_sums<D: Device>(
    ctx: &PassContext<'_, D>,
    shape: &Logits,
    columns: &Buffer<D>,
) -> SoftmaxSums<D> {
    let (mut max, mut both) = (ctx.device.zeros(shape.rows), ctx.device.zeros(2 * shape.rows));
    let (sum_exp, target) = D::split(all_mut::<D>(&mut both), shape.rows);
    let (logits, labels) = (columns.view(), ctx.batch.labels.view());
    ctx.device.local_sums(shape, logits, labels, all_mut::<D>(&mut max), sum_exp, target);
    SoftmaxSums { max, both }
}

/// Sums around `max`.
fn sums<D: Device>(
    ctx: &PassContext<'_, D>,
    shape: &Logits,
    columns: &Buffer<D>,
    max: RowStats<D>,
) -> SoftmaxSums<D> {
    let mut both = ctx.device.zeros(2 * shape.rows);
    let (sum_exp, target) = D::split(all_mut::<D>(&mut both), shape.rows);
    let (logits, labels) = (columns.view(), ctx.batch.labels.view());
    ctx.device.local_sum_exp(shape, logits, labels, all::<D>(&max), sum_exp, target);
    SoftmaxSums { max, both }
}

impl<D: Device> ShardLocal<D> {
    /// Reduces it over all shards.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn reduce(self, comm: &dyn Communicator, device: &D) -> Result<ShardReduced<D>, CommError> {
        let group = DeviceGroup::new(device, comm);
        let (known, gradient) = match self {
            Self::Max(max) => (KnownLogits::Max(group.all_reduce(max, Op::Max)?), None),
            Self::Common(sums) => (KnownLogits::Sums(sums.add_up(&group)?), None),
            Self::Own(sums) => {
                (KnownLogits::Sums(sums.around_common(&group, device)?.add_up(&group)?), None)
            }
            Self::WithGradient(sums, parts) => {
                let own = sums.around_common(&group, device)?;
                let mut factor = device.copied(own.sum_exp());
                let sums = own.add_up(&group)?;
                device.divide(sums.sum_exp(), all_mut::<D>(&mut factor));
                let gradient = group.all_reduce(parts.joined(device, &factor), Op::Sum)?;
                (KnownLogits::Factor(sums, factor), Some(gradient))
            }
            Self::Gradient(gradient) => {
                (KnownLogits::Nothing, Some(group.all_reduce(gradient, Op::Sum)?))
            }
        };
        Ok(ShardReduced { known, gradient })
    }
}

impl<D: Device> SoftmaxSums<D> {
    /// Rescales sums from the shard's own maximum to the common one (section 4.2).
    fn around_common(mut self, group: &DeviceGroup<'_, D>, device: &D) -> Result<Self, CommError> {
        let max = group.all_reduce(device.copied(all::<D>(&self.max)), Op::Max)?;
        let rows = self.rows();
        let (sum_exp, _) = D::split(all_mut::<D>(&mut self.both), rows);
        device.rescale_sum_exp(all::<D>(&self.max), all::<D>(&max), sum_exp);
        Ok(Self { max, ..self })
    }

    /// Adds up sums and target logits of all shards, in one call.
    fn add_up(self, group: &DeviceGroup<'_, D>) -> Result<Self, CommError> {
        let Self { max, both } = self;
        Ok(Self { max, both: group.all_reduce(both, Op::Sum)? })
    }
}

impl<D: Device> GradientParts<D> {
    /// The shard's part of the input gradient, given the factor from its softmax to the common one.
    fn joined(self, device: &D, factor: &RowStats<D>) -> Activations<D> {
        let Self { mut weighted, hits, scale } = self;
        let elements = D::len(&hits);
        let (to, hits) = (D::view_mut(&mut weighted, 0..elements), D::view(&hits, 0..elements));
        device.join_gradient(to, hits, all::<D>(factor), scale);
        weighted
    }
}
