//! Layers that the trainers share: a feed-forward block on one rank, and the output layer on any
//! number of tensor-parallel ranks.

#![allow(dead_code)] // no trainer uses all of them

use super::{HIDDEN, TOKENS, VOCAB, WIDTH, matrix, table};
use runtime::comm::CommError;
use runtime::layers::*;
use runtime::stages::{self, Held};
use runtime::state::params::Inventory;
use runtime::{Device, WideBuffer, kept};

type Full<D, const C: usize = HIDDEN> = Tensor<D, Whole, TOKENS, C>;
type Rows<D, const N: usize, const R: usize> = Tensor<D, Split<Tp<N>>, R, HIDDEN>;
type Logits<D, const N: usize, const V: usize> = Tensor<D, Columns<Tp<N>>, TOKENS, V>;

/// Norm and feed-forward block on one rank.
pub struct FeedForward {
    parameters: Parameters<Whole>,
    norm: RmsNorm<Whole, HIDDEN>,
    gate: Linear<HIDDEN, WIDTH>,
    up: Linear<HIDDEN, WIDTH>,
    down: Linear<WIDTH, HIDDEN>,
}

kept! {
    /// What [`FeedForward`] keeps of a micro-batch.
    pub struct BlockKept<D> {
        x: Full<D>,
        s: Statistics<D>,
        h: Full<D>,
        gate: Full<D, WIDTH>,
        up: Full<D, WIDTH>,
        a: Full<D, WIDTH>,
    }
}

impl FeedForward {
    pub fn declare(inventory: &mut Inventory) -> Self {
        let begin = inventory.begin_unit();
        Self {
            norm: RmsNorm::declare("norm", 1e-6, false, inventory),
            gate: Linear::declare(matrix("gate"), inventory),
            up: Linear::declare(matrix("up"), inventory),
            down: Linear::declare(matrix("down"), inventory),
            parameters: Parameters::since(begin, inventory),
        }
    }
}

impl<D: Device> stages::Layer<D> for FeedForward {
    type Stream = Stream<D, Whole, TOKENS, HIDDEN>;
    type Gradient = Full<D>;
    type Kept = BlockKept<D>;

    fn forward(
        &self,
        ctx: &PassContext<'_, D>,
        stream: Self::Stream,
    ) -> Result<(Self::Stream, BlockKept<D>), CommError> {
        let ctx = &self.parameters.weights(ctx)?;
        let (x, h, s) = self.norm.forward(ctx, stream);
        let (gate, up) = (self.gate.forward(ctx, &h), self.up.forward(ctx, &h));
        let a = gated(ctx, Activation::Silu, &gate, &up);
        let stream = Stream::sum(&x, self.down.forward(ctx, &a));
        Ok((stream, BlockKept { x, s, h, gate, up, a }))
    }

    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: BlockKept<D>,
        dy: Full<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<(Full<D>, Reduced), CommError> {
        let ctx = &self.parameters.weights(ctx)?;
        let BlockKept { x, s, h, gate, up, a } = kept;
        gradients.add(self.down.weights(&a, &dy));
        let da = self.down.backward(ctx, &dy);
        let (dgate, dup) = gated_backward(ctx, Activation::Silu, &gate, &up, &da);
        gradients.add(self.gate.weights(&h, &dgate));
        gradients.add(self.up.weights(&h, &dup));
        let dh = self.up.add_backward(ctx, &dup, self.gate.backward(ctx, &dgate));
        gradients.add(self.norm.weights(&x, &s, &dh));
        let dx = self.norm.backward_onto(ctx, &x, &s, &dh, dy);
        Ok((dx, self.parameters.complete(gradients)?))
    }
}

/// Norm, output matrix and loss on `N` tensor-parallel ranks. Each has `R` rows of the stream and
/// `V` columns of the logits.
pub struct Output<const N: usize, const R: usize, const V: usize> {
    parameters: Parameters<Whole>,
    norm: RmsNorm<Split<Tp<N>>, HIDDEN>,
    matrix: ColumnLinear<Tp<N>, HIDDEN, V>,
    loss: CrossEntropy<Columns<Tp<N>>, V>,
}

/// What [`Output`] keeps of a micro-batch beside the logits.
pub struct OutputKept<D: Device, const N: usize, const R: usize> {
    x: Rows<D, N, R>,
    s: Statistics<D>,
    h: Full<D>,
    max: Numbers<D, Whole, TOKENS>,
    sum: Numbers<D, Whole, TOKENS>,
}

impl<D: Device, const N: usize, const R: usize> Held for OutputKept<D, N, R> {
    fn bytes(&self) -> usize {
        let numbers = self.max.bytes() + self.sum.bytes();
        self.x.bytes() + self.s.bytes() + self.h.bytes() + numbers
    }
}

/// The losses of the tokens, and what is kept.
type Out<D, const N: usize, const R: usize, const V: usize> =
    (WideBuffer<D>, Logits<D, N, V>, OutputKept<D, N, R>);

impl<const N: usize, const R: usize, const V: usize> Output<N, R, V> {
    pub fn declare(inventory: &mut Inventory) -> Self {
        let begin = inventory.begin_unit();
        let norm = RmsNorm::declare("last_norm", 1e-6, false, inventory);
        let matrix = ColumnLinear::from_table(table("output.weight").declare(V, inventory));
        let parameters = Parameters::since(begin, inventory);
        Self { parameters, norm, matrix, loss: CrossEntropy::new(VOCAB, None) }
    }

    pub fn forward<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        stream: Stream<D, Split<Tp<N>>, R, HIDDEN>,
    ) -> Result<Out<D, N, R, V>, CommError> {
        let ctx = &self.parameters.weights(ctx)?;
        let tp = Group::<D, Tp<N>>::tp(ctx);
        let (x, h, s) = self.norm.forward(ctx, stream);
        let h: Full<D> = tp.all_gather(&h)?;
        let logits = self.matrix.forward(ctx, &h);
        // Ranks exchange three numbers a token, and no logits.
        let (own_max, sum, target) = self.loss.sums(ctx, &logits);
        let max = tp.max(own_max.share())?;
        let sum = self.loss.around(ctx, sum, &own_max, &max);
        let (sum, target) = (tp.sum(sum)?, tp.sum(target)?);
        let losses = self.loss.loss(ctx, &max, &sum, &target).into_losses(ctx);
        Ok((losses, logits, OutputKept { x, s, h, max, sum }))
    }

    /// The gradient of the stream.
    pub fn backward<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        logits: Logits<D, N, V>,
        kept: OutputKept<D, N, R>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Rows<D, N, R>, CommError> {
        let ctx = &self.parameters.weights(ctx)?;
        let tp = Group::<D, Tp<N>>::tp(ctx);
        let OutputKept { x, s, h, max, sum } = kept;
        let dlogits = self.loss.gradient(ctx, logits, &max, &sum);
        gradients.add(self.matrix.weights(&h, &dlogits));
        let dh = tp.reduce_scatter(self.matrix.backward(ctx, &dlogits))?;
        gradients.add(self.norm.weights(&x, &s, &dh));
        self.parameters.complete(gradients)?;
        Ok(self.norm.backward(ctx, &x, &s, &dh))
    }
}
