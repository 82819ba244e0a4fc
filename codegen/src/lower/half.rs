//! Half a layer: a norm, a sublayer, and what the stream gets of it.

use super::Type;
use super::builder::{Body, Builder};
use super::feed_forward::LaterWeights;
use super::op::{FieldIndex, Op, Value};

/// Fields of half a layer, apart from its sublayer's.
pub(super) struct Half {
    /// 1 for attention, 2 for the feed-forward block.
    pub number: u32,
    pub norm: FieldIndex,
    pub bias: Option<FieldIndex>,
    /// Norm after the sublayer (Gemma 2).
    pub post: Option<FieldIndex>,
    pub dropout: bool,
}

/// What the backward pass reads of half a layer.
#[derive(Clone, Copy)]
pub(super) struct HalfValues {
    pub x: Value,
    pub h: Value,
    pub statistics: Value,
    /// Output of the sublayer after the reduction, with the bias.
    pub sum: Value,
    pub post: Option<Value>,
}

impl Half {
    pub(super) fn name(&self, what: &str) -> String {
        format!("{what}_{}", self.number)
    }

    /// Norm of the stream.
    pub(super) fn enter(&self, b: &mut Builder<'_>, stream: Value) -> (HalfValues, Value) {
        let of = b.sizes.stream();
        let (x, h) = (b.value(self.name("x"), of), b.value(self.name("h"), of));
        let statistics = b.value(self.name("s"), Type::Statistics);
        b.push(Op::Norm { field: self.norm, stream, x, to: h, statistics });
        (HalfValues { x, h, statistics, sum: h, post: None }, h)
    }

    /// From the sublayer's output, after any reduction, to the stream.
    pub(super) fn leave(
        &self,
        b: &mut Builder<'_>,
        kept: HalfValues,
        output: Value,
    ) -> (HalfValues, Value) {
        let (kept, branch) = self.branch(b, kept, output);
        let x = kept.x;
        (kept, b.op("stream", Type::Stream, |to| Op::Sum { x, branch, to }))
    }

    /// From the sublayer's output, after any reduction, to what is added to the stream.
    pub(super) fn branch(
        &self,
        b: &mut Builder<'_>,
        kept: HalfValues,
        output: Value,
    ) -> (HalfValues, Value) {
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
        (HalfValues { sum, post, ..kept }, branch)
    }

    /// `sublayer` gets the gradient of its output, of the stream's rows, and returns that of its
    /// input.
    pub(super) fn backward(
        &self,
        b: &mut Builder<'_>,
        title: &'static str,
        kept: &HalfValues,
        sublayer: impl FnOnce(&mut Builder<'_>, &Self, Value) -> Value,
    ) -> Body {
        let dy = b.value("dy", b.sizes.stream());
        let dsum = self.backward_branch(b, kept, dy);
        let dh = sublayer(b, self, dsum);
        let dx = self.backward_norm(b, kept, dh, dy);
        b.body(title, Some(dy), Some(dx))
    }

    /// The gradient of the sublayer's output, from that of the stream.
    pub(super) fn backward_branch(
        &self,
        b: &mut Builder<'_>,
        kept: &HalfValues,
        dy: Value,
    ) -> Value {
        let of = b.sizes.stream();
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
        dsum
    }

    /// The gradient of the half's input: `dh` goes through the norm, `dy` past the sublayer.
    pub(super) fn backward_norm(
        &self,
        b: &mut Builder<'_>,
        kept: &HalfValues,
        dh: Value,
        dy: Value,
    ) -> Value {
        let (field, x, statistics) = (self.norm, kept.x, kept.statistics);
        let of = b.sizes.stream();
        let sum = Some(dy);
        let dx = b.op("dx", of, |to| Op::NormBackward { field, x, statistics, dy: dh, sum, to });
        b.push(Op::NormWeights { field, x, statistics, dy: dh });
        dx
    }

    /// The backward pass of a sublayer that tensor-parallel ranks divide. `sublayer` returns the
    /// gradient of its input, a partial sum, and the work on its weights; the sum is called `to`.
    pub(super) fn through_split(
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
        self.finish_split(b, to, again, dh, weights)
    }

    /// Reduces the gradient of a sublayer's input, which becomes `to`, while its weights' gradients
    /// are computed. `again` is the half's input for all tokens, on its way.
    pub(super) fn finish_split(
        &self,
        b: &mut Builder<'_>,
        to: String,
        again: Value,
        dh: Value,
        weights: Vec<LaterWeights>,
    ) -> Value {
        // Weight gradients are computed while the input gradient is being reduced.
        let leaving = b.start_leave("leaving", dh);
        let again = b.wait(self.name("full"), again);
        for LaterWeights { field, x, dy } in weights {
            b.push(Op::LinearWeights { field, x: x.unwrap_or(again), dy });
        }
        b.wait(to, leaving)
    }
}
