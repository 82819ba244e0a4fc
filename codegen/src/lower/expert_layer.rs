//! A layer with a mixture of experts.
//!
//! Its all-to-alls can run under the work of other rows: the rows are cut into chunks, and the
//! copies of one chunk are on their way while another is attended to or goes through its experts.
//! AMPipe cuts attention and experts (section 3 of the paper); Tutel the experts alone. Queries are
//! cut; keys and values are computed for all rows before. Every rank cuts its own rows of the
//! stream, so a chunk's queries are one run on each tensor-parallel rank.

use super::Type;
use super::attention::{Attended, Attention};
use super::builder::Builder;
use super::feed_forward::{Inner, Mlp};
use super::half::{Half, HalfValues};
use super::layer::Layer;
use super::moe::{Computed, Moe, Routed, Sent};
use super::op::{Op, Value};
use models::decisions::MoeOverlap;

/// Fields of a layer with experts.
pub(super) struct ExpertLayer {
    pub first: Half,
    pub attention: Attention,
    pub second: Half,
    pub moe: Moe,
    /// The experts of every token, if there are any.
    pub shared: Option<Mlp>,
}

/// What the backward pass reads of some rows' experts.
struct Block {
    kept: HalfValues,
    routed: Routed,
    shared: Option<Inner>,
}

impl Block {
    /// What activations make.
    fn products(&self) -> Vec<Value> {
        self.shared.iter().map(|inner| inner.product).chain([self.routed.product]).collect()
    }
}

/// Lowers the layer.
pub(super) fn lower(b: &mut Builder<'_>, of: &ExpertLayer, overlap: MoeOverlap) -> Layer {
    match overlap {
        MoeOverlap::Ampipe => of.in_chunks(b),
        MoeOverlap::None | MoeOverlap::Tutel | MoeOverlap::Pair => of.behind_attention(b),
    }
}

/// The chunks of rows: one, of all rows, if nothing is cut.
fn chunks(b: &Builder<'_>) -> Vec<Option<u64>> {
    match b.sizes.chunks {
        1 => vec![None],
        chunks => (0..chunks).map(Some).collect(),
    }
}

impl ExpertLayer {
    /// From the results of routed experts to what the stream gets of all. Shared experts compute
    /// while the results are on their way.
    fn collect(
        &self,
        b: &mut Builder<'_>,
        kept: HalfValues,
        sent: Sent,
        computed: Computed,
    ) -> (Value, Block) {
        let shared = self.shared.as_ref().map(|shared| {
            let entered = b.enter(self.second.name("full"), kept.h);
            let (part, inner) = shared.forward(b, entered);
            (b.leave("shared", part), inner)
        });
        let (mut sum, routed) = self.moe.collect(b, sent, computed);
        let shared = shared.map(|(y, inner)| {
            let (x, of) = (sum, b.sizes.stream());
            sum = b.op(self.second.name("sum"), of, |to| Op::Add { x, y, to });
            inner
        });
        let (kept, branch) = self.second.branch(b, kept, sum);
        (branch, Block { kept, routed, shared })
    }

    /// Attention of all rows, then experts: of all rows, or chunk by chunk.
    fn behind_attention(&self, b: &mut Builder<'_>) -> Layer {
        let Self { first, attention, second, moe, .. } = self;
        let input = b.value("stream", Type::Stream);
        let (kept_1, h) = first.enter(b, input);
        let entered = b.enter(first.name("full"), h);
        let of = attention.project(b, entered);
        let (part, attended) = attention.attend(b, &of);
        let sum = b.leave(first.name("sum"), part);
        let (kept_1, middle) = first.leave(b, kept_1, sum);
        let (kept_2, _) = second.enter(b, middle);
        let chunks = chunks(b);
        let sent: Vec<_> = b.each(&chunks, |b, _| {
            let h = b.chunk_of(second.name("h"), kept_2.h);
            (h, moe.send(b, h))
        });
        let computed: Vec<_> = b.each(&chunks, |b, n| moe.compute(b, &sent[n].1));
        let mut branches = Vec::new();
        let mut rest = sent.into_iter().zip(computed);
        let blocks: Vec<Block> = b.each(&chunks, |b, _| {
            let ((h, sent), computed) = rest.next().expect("one for each chunk");
            let kept = HalfValues { h, ..kept_2 };
            let (branch, block) = self.collect(b, kept, sent, computed);
            branches.push(branch);
            block
        });
        let (x, branch) = (kept_2.x, b.joined(second.name("branch"), &branches));
        let output = b.op("stream", Type::Stream, |to| Op::Sum { x, branch, to });
        let forward = b.body("forward", Some(input), Some(output));

        let dy = b.value("dy", b.sizes.stream());
        let dh = self.backward_blocks(b, &chunks, &blocks, dy, |_, _, dh, _| dh);
        let dh = b.joined(second.name("dh"), &dh);
        let dx = second.backward_norm(b, &kept_2, dh, dy);
        let of_experts = b.body("mixture of experts", Some(dy), Some(dx));
        let of_attention = first.backward(b, "attention", &kept_1, |b, half, dy| {
            let to = half.name("dh");
            half.through_split(b, &kept_1, dy, to, |b, dy| {
                attention.backward(b, &of, &attended, dy)
            })
        });
        let products = blocks.iter().flat_map(Block::products).collect();
        Layer {
            forward,
            backward: vec![of_experts, of_attention],
            cheap: [vec![kept_1.h, kept_2.h], products, of.norms()].concat(),
            kept_by_full: vec![kept_1.x],
        }
    }

    /// The backward pass of experts, chunk by chunk. `leave` gets a chunk's block, the gradient of
    /// its input, and that of the stream.
    fn backward_blocks(
        &self,
        b: &mut Builder<'_>,
        chunks: &[Option<u64>],
        blocks: &[Block],
        dy: Value,
        mut leave: impl FnMut(&mut Builder<'_>, usize, Value, Value) -> Value,
    ) -> Vec<Value> {
        let Self { second, moe, .. } = self;
        let sent: Vec<_> = b.each(chunks, |b, n| {
            let dy = b.chunk_of("dy", dy);
            let dsum = second.backward_branch(b, &blocks[n].kept, dy);
            (dy, dsum, moe.send_back(b, &blocks[n].routed, dsum))
        });
        let coming: Vec<Value> = b.each(chunks, |b, n| {
            let (_, _, back) = &sent[n];
            moe.compute_back(b, &blocks[n].routed, back)
        });
        b.each(chunks, |b, n| {
            let (dy, dsum, back) = &sent[n];
            let through_shared = self.backward_shared(b, &blocks[n], *dsum);
            let x = moe.collect_back(b, &blocks[n].routed, back, coming[n]);
            let of = b.sizes.stream();
            let sum = |y| b.op(second.name("dh"), of, |to| Op::Add { x, y, to });
            let dh = through_shared.map_or(x, sum);
            leave(b, n, dh, *dy)
        })
    }

    fn backward_shared(&self, b: &mut Builder<'_>, block: &Block, dy: Value) -> Option<Value> {
        let (shared, inner) = self.shared.as_ref().zip(block.shared.as_ref())?;
        let to = "dshared".to_owned();
        let through = |b: &mut Builder<'_>, dy| shared.backward(b, inner, dy);
        Some(self.second.through_split(b, &block.kept, dy, to, through))
    }

    /// Attention and experts, chunk by chunk.
    fn in_chunks(&self, b: &mut Builder<'_>) -> Layer {
        let Self { first, attention, second, moe, .. } = self;
        let input = b.value("stream", Type::Stream);
        let (kept_1, h) = first.enter(b, input);
        let entered = b.enter(first.name("full"), h);
        let of = attention.project(b, entered);
        let chunks = chunks(b);
        let entered: Vec<_> = b.each(&chunks, |b, _| {
            let (part, attended) = attention.attend(b, &of);
            let sum = b.leave(first.name("sum"), part);
            let x = b.chunk_of(first.name("x"), kept_1.x);
            let (of_attention, middle) = first.leave(b, HalfValues { x, ..kept_1 }, sum);
            let (kept, h) = second.enter(b, middle);
            (attended, of_attention, kept, moe.send(b, h))
        });
        let computed: Vec<_> = b.each(&chunks, |b, n| moe.compute(b, &entered[n].3));
        let (mut attended, mut of_attention) = (Vec::new(), Vec::new());
        let (mut xs, mut branches) = (Vec::new(), Vec::new());
        let mut rest = entered.into_iter().zip(computed);
        let blocks: Vec<Block> = b.each(&chunks, |b, _| {
            let ((of_chunk, half, kept, sent), computed) = rest.next().expect("one for each");
            let (branch, block) = self.collect(b, kept, sent, computed);
            attended.push(of_chunk);
            of_attention.push(half);
            xs.push(kept.x);
            branches.push(branch);
            block
        });
        let x = b.joined(second.name("x"), &xs);
        let branch = b.joined(second.name("branch"), &branches);
        let output = b.op("stream", Type::Stream, |to| Op::Sum { x, branch, to });
        let forward = b.body("forward", Some(input), Some(output));

        let dy = b.value("dy", b.sizes.stream());
        let mut sums = attention.begin_sums(b, &of);
        let dx = self.backward_blocks(b, &chunks, &blocks, dy, |b, n, dh, dy| {
            let dx = second.backward_norm(b, &blocks[n].kept, dh, dy);
            let dsum = first.backward_branch(b, &of_attention[n], dx);
            let dfull = b.enter(first.name("dfull"), dsum);
            let chunk: &Attended = &attended[n];
            sums = attention.backward_chunk(b, &of, chunk, dfull, sums);
            dx
        });
        let past = b.joined("dx", &dx);
        let again = b.start_enter("again", kept_1.h);
        let (dpart, weights) = attention.backward_sums(b, &of, sums);
        let dh = first.finish_split(b, first.name("dh"), again, dpart, weights);
        let dx = first.backward_norm(b, &kept_1, dh, past);
        let backward = b.body("experts and attention, chunk by chunk", Some(dy), Some(dx));
        let norms: Vec<Value> = blocks.iter().map(|block| block.kept.h).collect();
        let products = blocks.iter().flat_map(Block::products).collect();
        Layer {
            forward,
            backward: vec![backward],
            cheap: [vec![kept_1.h], norms, products, of.norms()].concat(),
            kept_by_full: vec![kept_1.x],
        }
    }
}
