//! Attention sinks: a logit of each head that every softmax counts beside its keys' ([`kernels::
//! sinks`]). Attention is computed without them and corrected.

use super::attention::Attention;
use super::chunks::Chunk;
use super::context::Context;
use super::tiles::{Tile, scaled};
use super::weights::WeightWork;
use crate::device::Device;
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::{
    Declaration, Division, Gradient, Init, Inventory, ParameterSlice, Placement, RowBlock,
};
use kernels::sinks::Sinks;
use std::ops::Range;
use std::rc::Rc;

impl Attention {
    /// The same attention with sinks, declared as a tensor of this name: those of this rank's
    /// heads.
    #[must_use]
    pub fn with_sinks(self, name: &str, inventory: &mut Inventory) -> Self {
        let (heads, ways) = (self.total_heads, inventory.tp());
        let sinks = inventory.declare(Declaration {
            name: name.to_owned(),
            shape: vec![heads],
            transposed: false,
            division: Division::Dense,
            placement: Placement::Rows(vec![RowBlock { rows: heads, ways }]),
            gradient: Gradient::Whole,
            tied_copy: false,
            init: Init::Constant(0.0),
        });
        Self { sinks: Some(sinks), ..self }
    }

    /// The sinks of the heads that this rank has behind an exchange of tokens for heads.
    fn sinks_behind<D: Device>(&self, ctx: &Context<'_, D>) -> Option<ParameterSlice> {
        let [heads, _] = self.heads_behind(ctx.cp.parallel.ulysses);
        let first = ctx.cp.ulysses.rank() * heads;
        self.sinks.map(|sinks| sinks.rows(first..first + heads, 1))
    }

    /// The output, and the log-sum-exp of its scores, with the sinks if there are any.
    pub(super) fn corrected<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Option<Chunk>,
        (mut out, lse): (Buffer<D>, WideBuffer<D>),
    ) -> (Buffer<D>, WideBuffer<D>) {
        let Some(sinks) = self.sinks_behind(ctx) else { return (out, lse) };
        let mut new = ctx.wide(lse.len());
        for (of, rows) in self.runs_of_queries(ctx, chunk) {
            let at = scaled(&rows, of.heads);
            let to = out.part_mut(scaled(&at, of.width));
            let (lse, new) = (lse.part(at.clone()), new.part_mut(at));
            ctx.device.sinks(&of, ctx.weights.get(sinks), lse, new, to);
        }
        (out, new)
    }

    /// The gradient of the sinks, from the corrected output, its log-sum-exp, and its gradient: of
    /// all queries, or of a chunk's.
    ///
    /// # Panics
    /// There are no sinks.
    #[track_caller]
    pub fn sink_weights<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Option<Chunk>,
        (out, lse): (&Buffer<D>, &WideBuffer<D>),
        dout: &Buffer<D>,
    ) -> WeightWork<D> {
        let sinks = self.sinks_behind(ctx).expect("the attention has sinks");
        let mut by_row = ctx.wide(lse.len());
        ctx.device.dot_rows(out.view(), dout.view(), by_row.view_mut());
        for (of, rows) in self.runs_of_queries(ctx, chunk) {
            let at = scaled(&rows, of.heads);
            let (lse, to) = (lse.part(at.clone()), by_row.part_mut(at));
            ctx.device.sinks_gradient(&of, ctx.weights.get(sinks), lse, to);
        }
        WeightWork::Rows { vector: sinks, rows: Rc::new(by_row) }
    }

    /// Runs of this rank's queries, or of a chunk's: shape, and rows. The log-sum-exp of each run
    /// lies head by head.
    fn runs_of_queries<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Option<Chunk>,
    ) -> Vec<(Sinks, Range<usize>)> {
        let heads = self.heads_behind(ctx.cp.parallel.ulysses);
        let run = |tile: &Tile, rows: Range<usize>| {
            let (batch, queries) = (tile.shape.batch, tile.shape.q_len);
            (Sinks { batch, heads: heads[0], queries, width: self.value_dim() }, rows)
        };
        if let Some(chunk) = chunk {
            let tiles = self.tiles_of(ctx, heads, chunk);
            return tiles.into_iter().map(|(tile, rows)| run(&tile, rows)).collect();
        }
        // Every query sees itself, so none is missing; with gaps it is in several tiles.
        let own = ctx.cp.parallel.attended(ctx.cp.ring.rank(), ctx.batch.seq_len);
        let tiles = self.tiles(ctx, heads, &own, &own);
        let mut runs: Vec<_> = tiles.iter().map(|tile| run(tile, tile.queries.clone())).collect();
        runs.dedup();
        runs
    }
}
