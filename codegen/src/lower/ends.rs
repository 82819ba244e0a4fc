//! The input layer of the first stage, the output layer of the last, and a vocabulary that is split
//! over the pipeline in their place.

use super::builder::{Body, Builder, Survivors};
use super::op::{FieldIndex, Op, Reduction, Value};
use super::{FieldKind, Segment, Sizes, TensorNames, Type, Width};
use models::layer::loss_rows;
use models::program::{Program, Recompute};
use models::schedule::VocabPasses;
use models::shapes;

/// A table of the vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Name in checkpoints.
    pub name: &'static str,
}

/// A vocabulary that is split over the pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// The input table.
    pub input: Table,
    /// The output matrix, unless it is the input table.
    pub output: Option<Table>,
    /// Rows of each rank, padding included.
    pub rows: u64,
    /// The algorithm's passes.
    pub passes: VocabPasses,
}

/// The split vocabulary of a program, if it has one.
pub(super) fn shard(program: &Program, names: TensorNames) -> Option<Shard> {
    let passes = program.vocab?;
    let output = (!program.model.tied_embeddings).then(|| Table { name: names.output() });
    let shards = program.mesh.pp * program.mesh.tp;
    let rows = shapes::vocabulary_shard_rows(program.model.vocab, shards);
    Some(Shard { input: Table { name: names.embedding() }, output, rows, passes })
}

/// Before the first layer. Where the vocabulary is split over the pipeline it is given the tokens'
/// rows, and returns their gradient.
pub(super) fn first(program: &Program, sizes: &Sizes) -> Segment {
    let (mut b, of) = (Builder::new(sizes), sizes.stream());
    let tokens = program.vocab.is_none().then(|| b.field("tokens", FieldKind::Tokens));
    let positions = sizes.positions.map(|rows| b.field("positions", FieldKind::Positions(rows)));
    let dropout = program.model.dropout > 0.0;
    let looked_up = b.value("x", of);
    let mut x = match tokens {
        Some(field) => {
            let part = b.op("part", sizes.part(), |to| Op::Embed { field, to });
            b.leave("x", part)
        }
        None => looked_up,
    };
    if let Some(field) = positions {
        let before = x;
        x = b.op("x", of, |to| Op::AddPositions { field, x: before, to });
    }
    if dropout {
        let before = x;
        x = b.op("x", of, |to| Op::Dropout { place: None, x: before, to });
    }
    let stream = b.op("stream", Type::Stream, |to| Op::Begin { x, to });
    let given = tokens.is_none().then_some(looked_up);
    let forward = b.body("forward", given, Some(stream));

    let dy = b.value("dx", of);
    let mut dx = dy;
    if dropout {
        dx = b.op("dx", of, |to| Op::Dropout { place: None, x: dy, to });
    }
    if let Some(field) = positions {
        b.push(Op::PositionWeights { field, dy: dx });
    }
    if let Some(field) = tokens {
        let dfull = b.enter("dfull", dx);
        b.push(Op::TokenWeights { field, dy: dfull });
    }
    let left = tokens.is_none().then_some(dx);
    let backward = b.body("input layer", Some(dy), left);
    b.finish(forward, vec![backward], &everything())
}

/// After the last layer: norm, output matrix and loss; where the vocabulary is split over the
/// pipeline, the norm alone.
pub(super) fn last(program: &Program, sizes: &Sizes) -> Segment {
    let (mut b, of) = (Builder::new(sizes), sizes.stream());
    let norm = b.field("norm", FieldKind::Norm { tensor: "" });
    let stream = b.value("stream", Type::Stream);
    let (x, h) = (b.value("x", of), b.value("h", of));
    let statistics = b.value("s", Type::Statistics);
    b.push(Op::Norm { field: norm, stream, x, to: h, statistics });
    let norm_backward = |b: &mut Builder<'_>, dh| {
        let dx = b.op("dx", of, |to| Op::NormBackward {
            field: norm,
            x,
            statistics,
            dy: dh,
            sum: None,
            to,
        });
        b.push(Op::NormWeights { field: norm, x, statistics, dy: dh });
        dx
    };
    if program.vocab.is_some() {
        let forward = b.body("forward", Some(stream), Some(h));
        let dh = b.value("dh", of);
        let dx = norm_backward(&mut b, dh);
        let backward = b.body("final norm", Some(dh), Some(dx));
        return b.finish(forward, vec![backward], &everything());
    }
    let output = b.field("output", FieldKind::Output);
    let (forward, backward) = match program.fused_loss {
        true => fused_loss(&mut b, [stream, h], norm_backward),
        false => stored_logits(&mut b, output, [stream, h], norm_backward),
    };
    b.finish(forward, vec![backward], &everything())
}

/// A number of each token, combined over ranks.
fn reduced(b: &mut Builder<'_>, name: &str, x: Value, reduction: Reduction) -> Value {
    match b.sizes.tp {
        1 => x,
        _ => b.op(name, Type::TokenNumbers, |to| Op::AllReduceNumbers { x, reduction, to }),
    }
}

/// Maxima, sums of exponentials and targets' logits, over all ranks.
fn softmax_sums(b: &mut Builder<'_>, loss: FieldIndex, x: Value) -> [Value; 3] {
    let numbers = Type::TokenNumbers;
    let own_name = if b.sizes.tp > 1 { "own_max" } else { "max" };
    let [own, sum_exp, target] = [own_name, "sum_exp", "target"].map(|name| b.value(name, numbers));
    b.push(Op::Sums { field: loss, x, to: own, sum_exp, target });
    let max = reduced(b, "max", own, Reduction::Max);
    let around = match b.sizes.tp {
        1 => sum_exp,
        _ => b.op("sum_exp", numbers, |to| Op::Around {
            field: loss,
            own_sum: sum_exp,
            own,
            max,
            to,
        }),
    };
    let sum_exp = reduced(b, "sum_exp", around, Reduction::Sum);
    let target = reduced(b, "target", target, Reduction::Sum);
    [max, sum_exp, target]
}

/// Output matrix and loss of the final norm's output `h`. The logits are kept for the backward
/// pass.
fn stored_logits(
    b: &mut Builder<'_>,
    output: FieldIndex,
    [stream, h]: [Value; 2],
    norm_backward: impl Fn(&mut Builder<'_>, Value) -> Value,
) -> (Body, Body) {
    let (numbers, columns) = (Type::TokenNumbers, b.sizes.split(Width::Vocab));
    let loss = b.field("loss", FieldKind::Loss);
    let full = b.enter("full", h);
    let logits = b.op("logits", columns, |to| Op::Linear { field: output, x: full, to });
    let [max, sum_exp, target] = softmax_sums(b, loss, logits);
    let losses = b.op("losses", numbers, |to| Op::Loss { field: loss, max, sum_exp, target, to });
    let forward = b.body("forward", Some(stream), Some(losses));

    let dlogits =
        b.op("dlogits", columns, |to| Op::LossGradient { field: loss, logits, max, sum_exp, to });
    let again = b.start_enter("again", h);
    let part = b.sizes.part();
    let dpart = b.op("dpart", part, |to| Op::BackwardInput { field: output, dy: dlogits, to });
    let leaving = b.start_leave("leaving", dpart);
    let full = b.wait("full", again);
    b.push(Op::LinearWeights { field: output, x: full, dy: dlogits });
    let dh = b.wait("dh", leaving);
    let dx = norm_backward(b, dh);
    (forward, b.body("output layer", None, Some(dx)))
}

/// The same, with logits of a block of tokens at a time.
fn fused_loss(
    b: &mut Builder<'_>,
    [stream, h]: [Value; 2],
    norm_backward: impl Fn(&mut Builder<'_>, Value) -> Value,
) -> (Body, Body) {
    let (numbers, sizes) = (Type::TokenNumbers, b.sizes);
    let rows = loss_rows(sizes.tokens, sizes.hidden, sizes.vocab_rows);
    let loss = b.field("loss", FieldKind::FusedLoss(rows));
    let full = b.enter("full", h);
    let [max, sum_exp, target] = softmax_sums(b, loss, full);
    let losses = b.op("losses", numbers, |to| Op::Loss { field: loss, max, sum_exp, target, to });
    let forward = b.body("forward", Some(stream), Some(losses));

    let full = b.enter("full", h);
    let part = sizes.part();
    let dpart =
        b.op("dpart", part, |to| Op::BlockBackward { field: loss, x: full, max, sum_exp, to });
    let dh = b.leave("dh", dpart);
    let dx = norm_backward(b, dh);
    (forward, b.body("output layer", None, Some(dx)))
}

/// The ends recompute nothing.
fn everything() -> Survivors {
    Survivors::from([(Recompute::None, Box::new(|_| true) as Box<_>)])
}
