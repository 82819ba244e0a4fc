//! Attention over a sequence that context-parallel ranks divide.
//!
//! A ring member has queries, keys and values of its part of each sequence. Its queries meet the
//! keys and values of one member after the other. Results over different keys are merged by their
//! log-sum-exp, in f32 or wider (online softmax). In the backward pass, a member's gradients of
//! keys and values collect every other member's contribution on their way home.

use super::attention::{Attention, AttentionSaved, Columns};
use super::context::Context;
use super::tiles::{Tile, scaled};
use crate::comm::{CommError, Communicator, Op, Tag};
use crate::context_parallel::{ContextParallel, Exchange};
use crate::device::{Device, DeviceGroup, DeviceRequest, Gradients, Saved, Space, Stored};
use crate::state::buffer::{Buffer, WideBuffer};
use kernels::Real;
use std::ops::Range;

/// The context-parallel ranks that a rank communicates with.
#[derive(Clone, Copy)]
pub struct ContextRanks<'a> {
    /// How they divide a sequence.
    pub parallel: ContextParallel,
    /// The members of its ring.
    pub ring: &'a dyn Communicator,
    /// Its Ulysses group.
    pub ulysses: &'a dyn Communicator,
}

/// Keys, then values, of all sequences of one ring member.
type KeyValues<D> = <D as Space>::Memory<<D as Space>::Stored>;
/// Their gradients, f32 or wider.
type Sums<D> = <D as Space>::Memory<<D as Space>::Wide>;

/// The members of a ring around one layer's attention.
struct Ring<'a, D: Device> {
    attention: &'a Attention,
    ctx: &'a Context<'a, D>,
    ranks: ContextRanks<'a>,
    group: DeviceGroup<'a, D>,
    /// Query heads, and key/value heads, of this rank behind Ulysses.
    heads: [usize; 2],
}

const KEYS: Tag = 0;
const SUMS: Tag = 1;

impl<'a, D: Device> Ring<'a, D> {
    fn new(attention: &'a Attention, ctx: &'a Context<'a, D>) -> Self {
        let ranks = ctx.cp;
        let group = DeviceGroup::new(ctx.device, ranks.ring);
        let heads = attention.heads_behind(ranks.parallel.ulysses);
        Self { attention, ctx, ranks, group, heads }
    }

    fn members(&self) -> usize {
        self.ranks.ring.size()
    }

    /// The member whose keys this rank meets in step `step`.
    fn owner(&self, step: usize) -> usize {
        (self.ranks.ring.rank() + self.members() - step) % self.members()
    }

    fn next(&self) -> usize {
        (self.ranks.ring.rank() + 1) % self.members()
    }

    fn previous(&self) -> usize {
        self.owner(1)
    }

    fn columns(&self) -> Columns {
        self.attention.columns(self.heads)
    }

    /// The tiles in which a query sees a key of member `owner`.
    fn tiles(&self, owner: usize) -> Vec<Tile> {
        let of = |member| self.ranks.parallel.attended(member, self.ctx.batch.seq_len);
        self.attention.tiles(self.ctx, self.heads, &of(self.ranks.ring.rank()), &of(owner))
    }

    /// Elements of the log-sum-exp of some queries: `[heads, queries]`, run by run.
    fn statistics(&self, queries: &Range<usize>) -> Range<usize> {
        queries.start * self.heads[0]..queries.end * self.heads[0]
    }

    fn packed(&self, k: &Buffer<D>, v: &Buffer<D>) -> KeyValues<D> {
        let mut both = self.ctx.device.zeros(k.len() + v.len());
        self.ctx.device.copy(k.view(), D::view_mut(&mut both, 0..k.len()));
        self.ctx.device.copy(v.view(), D::view_mut(&mut both, k.len()..k.len() + v.len()));
        both
    }

    /// Calls `meet` with each member's keys and values and its number, own first. Those that come
    /// next are on their way meanwhile.
    fn around(
        &self,
        own: KeyValues<D>,
        mut meet: impl FnMut(&KeyValues<D>, Range<usize>, usize) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let (device, len) = (self.ctx.device, D::len(&own));
        if self.ranks.parallel.exchange == Exchange::AllGather {
            let all = self.group.all_gather(own)?;
            return (0..self.members()).try_for_each(|step| {
                let owner = self.owner(step);
                meet(&all, owner * len..(owner + 1) * len, owner)
            });
        }
        let mut held = own;
        for step in 0..self.members() {
            let more = step + 1 < self.members();
            let moving = more.then(|| {
                let copy = device.copied(D::view(&held, 0..len));
                let send = self.group.start_send(copy, self.next(), KEYS)?;
                let receive = self.group.start_recv(len, self.previous(), KEYS)?;
                Ok::<_, CommError>((send, receive))
            });
            let moving = moving.transpose()?;
            meet(&held, 0..len, self.owner(step))?;
            if let Some((send, receive)) = moving {
                held = receive.wait(device)?;
                send.wait(device)?;
            }
        }
        Ok(())
    }

    fn forward(
        &self,
        q: &Buffer<D>,
        k: &Buffer<D>,
        v: &Buffer<D>,
    ) -> Result<(Buffer<D>, WideBuffer<D>), CommError> {
        let (ctx, device) = (self.ctx, self.ctx.device);
        let columns = self.columns();
        let rows = q.len() / columns.q;
        let mut sums = ctx.wide(rows * columns.out);
        let mut lse = ctx.wide(rows * self.heads[0]);
        device.fill(sums.view_mut(), D::Wide::ZERO);
        device.fill(lse.view_mut(), D::Wide::from_f64(f64::NEG_INFINITY));
        self.around(self.packed(k, v), |both, at, owner| {
            for Tile { shape, queries, keys } in self.tiles(owner) {
                let [k, v] = parts::<D>(both, &at, &keys, columns);
                let q = q.part(scaled(&queries, columns.q));
                let mut out = ctx.buffer(shape.out_elements());
                let mut part = ctx.wide(shape.lse_elements());
                device.attention(&shape, q, k, v, out.view_mut(), part.view_mut());
                let to = sums.part_mut(scaled(&queries, columns.out));
                let statistics = lse.part_mut(self.statistics(&queries));
                device.merge_attention(&shape, to, statistics, out.view(), part.view());
            }
            Ok(())
        })?;
        let mut out = ctx.buffer(sums.len());
        device.round(sums.view(), out.view_mut());
        Ok((out, lse))
    }

    fn backward(
        &self,
        saved: &AttentionSaved<'_, D>,
        dout: &Buffer<D>,
    ) -> Result<[Buffer<D>; 3], CommError> {
        let (ctx, device) = (self.ctx, self.ctx.device);
        let AttentionSaved { q, k, v, out, lse } = saved;
        let columns = self.columns();
        let mut dq = ctx.wide(q.len());
        device.fill(dq.view_mut(), D::Wide::ZERO);
        let len = k.len() + v.len();
        let gathers = self.ranks.parallel.exchange == Exchange::AllGather;
        let members = if gathers { self.members() } else { 1 };
        let mut all: Sums<D> = device.zeros(if gathers { members * len } else { 0 });
        let mut travelling: Option<Moving<D>> = None;
        self.around(self.packed(k, v), |both, at, owner| {
            let mut own: Sums<D> = device.zeros(if gathers { 0 } else { len });
            let (sums, begin) = if gathers { (&mut all, owner * len) } else { (&mut own, 0) };
            for Tile { shape, queries, keys } in self.tiles(owner) {
                let [k, v] = parts::<D>(both, &at, &keys, columns);
                let q = q.part(scaled(&queries, columns.q));
                let [mut q_part, mut k_part, mut v_part] =
                    [shape.q_elements(), shape.k_elements(), shape.v_elements()]
                        .map(|len| ctx.buffer(len));
                let gradients = Gradients {
                    dq: q_part.view_mut(),
                    dk: k_part.view_mut(),
                    dv: v_part.view_mut(),
                };
                let out = out.part(scaled(&queries, columns.out));
                let lse = lse.part(self.statistics(&queries));
                let dout = dout.part(scaled(&queries, columns.out));
                device.attention_backward(&shape, Saved { q, k, v, out, lse }, dout, gradients);
                device.accumulate(q_part.view(), dq.part_mut(scaled(&queries, columns.q)));
                let [to_k, to_v] = places(&(begin..begin + len), &keys, columns);
                device.accumulate(k_part.view(), D::view_mut(sums, to_k));
                device.accumulate(v_part.view(), D::view_mut(sums, to_v));
            }
            if gathers {
                return Ok(());
            }
            if let Some(moving) = travelling.take() {
                let theirs = moving.wait(device)?;
                device.add_wide(D::view(&theirs, 0..len), D::view_mut(&mut own, 0..len));
            }
            let send = self.group.start_send(own, self.next(), SUMS)?;
            let receive = self.group.start_recv(len, self.previous(), SUMS)?;
            travelling = Some(Moving { send, receive });
            Ok(())
        })?;
        let home = match travelling {
            Some(moving) => moving.wait(device)?,
            None => self.group.start_reduce_scatter(all, Op::Sum)?.wait(device)?,
        };
        let [mut to_q, mut dk, mut dv] = [q, k, v].map(|x| ctx.buffer(x.len()));
        device.round(dq.view(), to_q.view_mut());
        device.round(D::view(&home, 0..k.len()), dk.view_mut());
        device.round(D::view(&home, k.len()..len), dv.view_mut());
        Ok([to_q, dk, dv])
    }
}

/// Gradients of keys and values between two members.
struct Moving<D: Space> {
    send: DeviceRequest<D, D::Wide>,
    receive: DeviceRequest<D, D::Wide>,
}

impl<D: Device> Moving<D> {
    fn wait(self, device: &D) -> Result<Sums<D>, CommError> {
        let arrived = self.receive.wait(device)?;
        self.send.wait(device)?;
        Ok(arrived)
    }
}

/// Where the keys and the values of some rows lie in memory that holds both.
fn places(at: &Range<usize>, rows: &Range<usize>, columns: Columns) -> [Range<usize>; 2] {
    let values = at.start + at.len() / (columns.k + columns.v) * columns.k;
    [(at.start, columns.k), (values, columns.v)]
        .map(|(begin, width)| begin + rows.start * width..begin + rows.end * width)
}

fn parts<'a, D: Device>(
    both: &'a KeyValues<D>,
    at: &Range<usize>,
    rows: &Range<usize>,
    columns: Columns,
) -> [Stored<'a, D>; 2] {
    places(at, rows, columns).map(|range| D::view(both, range))
}

impl Attention {
    /// Query heads and key/value heads of this rank behind Ulysses over `ulysses` ranks. A
    /// key/value head is copied if there are fewer heads than ranks.
    pub(super) fn heads_behind(&self, ulysses: usize) -> [usize; 2] {
        [self.heads / ulysses, (self.kv_heads / ulysses).max(1)]
    }

    /// [`Self::forward`], where the ring's members have other parts of the sequences.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn forward_around<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        q: &Buffer<D>,
        k: &Buffer<D>,
        v: &Buffer<D>,
    ) -> Result<(Buffer<D>, WideBuffer<D>), CommError> {
        Ok(self.corrected(ctx, None, Ring::new(self, ctx).forward(q, k, v)?))
    }

    /// The backward pass of [`Self::forward_around`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn backward_around<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        saved: &AttentionSaved<'_, D>,
        dout: &Buffer<D>,
    ) -> Result<[Buffer<D>; 3], CommError> {
        Ring::new(self, ctx).backward(saved, dout)
    }

    /// Exchanges tokens for heads over the Ulysses group: `[n, w] -> [n u, w / u]`. `heads` are
    /// those of `x`, of queries and keys or of values; if there are fewer heads than ranks,
    /// neighbouring ranks get copies.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn to_heads<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Buffer<D>,
        heads: usize,
    ) -> Result<Buffer<D>, CommError> {
        HeadExchange::new(ctx, heads, x.len() / heads).to_heads(x)
    }

    /// The backward pass of [`Self::to_heads`]: `[n u, w / u] -> [n, w]`. Copies are summed.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn to_tokens<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Buffer<D>,
        heads: usize,
    ) -> Result<Buffer<D>, CommError> {
        let ranks = ctx.cp.ulysses.size();
        let own = (heads / ranks).max(1);
        HeadExchange::new(ctx, heads, x.len() / own / ranks).to_tokens(x)
    }
}

/// An exchange of tokens for heads.
struct HeadExchange<'a, D: Device> {
    ctx: &'a Context<'a, D>,
    /// Ranks, `u`.
    ranks: usize,
    sequences: usize,
    /// Tokens of a sequence on this rank.
    tokens: usize,
    /// Heads of this rank's tokens.
    heads: usize,
    /// Heads of a rank behind the exchange.
    own: usize,
    /// Columns of a head.
    dim: usize,
}

impl<'a, D: Device> HeadExchange<'a, D> {
    /// `elements`: those of one head of this rank's tokens.
    fn new(ctx: &'a Context<'a, D>, heads: usize, elements: usize) -> Self {
        let (ranks, sequences) = (ctx.cp.ulysses.size(), ctx.batch.sequences);
        let (tokens, own) = (ctx.tokens() / sequences, (heads / ranks).max(1));
        let dim = elements / ctx.tokens();
        Self { ctx, ranks, sequences, tokens, heads, own, dim }
    }

    /// Ranks that get copies of the same heads.
    fn copies(&self) -> usize {
        self.own * self.ranks / self.heads
    }

    fn swapped(&self, [a, b, inner]: [usize; 3], x: Stored<'_, D>) -> Buffer<D> {
        let mut y = self.ctx.buffer(a * b * inner);
        self.ctx.device.swap_leading([a, b, inner], x, y.view_mut());
        y
    }

    fn to_heads(&self, x: &Buffer<D>) -> Result<Buffer<D>, CommError> {
        let (device, rows) = (self.ctx.device, self.sequences * self.tokens);
        // [rows, group, own] -> [group, rows, own], then each group for its copies.
        let groups = self.heads / self.own;
        let width = self.own * self.dim;
        let by_group = self.swapped([rows, groups, width], x.view());
        let mut sent = device.zeros(self.ranks * rows * width);
        for rank in 0..self.ranks {
            let group = rank / self.copies();
            let from = by_group.part(group * rows * width..(group + 1) * rows * width);
            device
                .copy(from, D::view_mut(&mut sent, rank * rows * width..(rank + 1) * rows * width));
        }
        let arrived = DeviceGroup::new(device, self.ctx.cp.ulysses).all_to_all(sent)?;
        // [rank, sequence, tokens] -> [sequence, rank, tokens]
        let whole = D::view(&arrived, 0..D::len(&arrived));
        Ok(self.swapped([self.ranks, self.sequences, self.tokens * width], whole))
    }

    fn to_tokens(&self, x: &Buffer<D>) -> Result<Buffer<D>, CommError> {
        let (device, rows) = (self.ctx.device, self.sequences * self.tokens);
        let (groups, width) = (self.heads / self.own, self.own * self.dim);
        let by_rank = self.swapped([self.sequences, self.ranks, self.tokens * width], x.view());
        let arrived =
            DeviceGroup::new(device, self.ctx.cp.ulysses).all_to_all(by_rank.into_memory())?;
        let part = |rank: usize| D::view(&arrived, rank * rows * width..(rank + 1) * rows * width);
        if self.copies() == 1 {
            let whole = D::view(&arrived, 0..D::len(&arrived));
            return Ok(self.swapped([groups, rows, width], whole));
        }
        let mut sums = self.ctx.wide(groups * rows * width);
        device.fill(sums.view_mut(), D::Wide::ZERO);
        for rank in 0..self.ranks {
            let group = rank / self.copies();
            let to = sums.part_mut(group * rows * width..(group + 1) * rows * width);
            device.accumulate(part(rank), to);
        }
        let mut rounded = self.ctx.buffer(sums.len());
        device.round(sums.view(), rounded.view_mut());
        Ok(self.swapped([groups, rows, width], rounded.view()))
    }
}
