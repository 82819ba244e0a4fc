//! The router of a mixture of experts, and what goes to the experts and back.
//!
//! Each rank routes its own rows of the residual stream. A row is copied for each of its `k`
//! experts; copies are sorted by expert. `dispatch` brings copies to the ranks that hold their
//! experts, and `combine` brings results back, so that a rank's copies are in the same order
//! before and after. Every backward pass uses the same two.
//!
//! | letter | meaning |
//! |---|---|
//! | `r` | rows of the residual stream on this rank |
//! | `m` | copies of them: `r k`, less those above an expert's capacity |
//! | `q` | copies that this rank's experts get, from all ranks; differs between micro-batches |
//! | `E`, `e` | experts of the layer, and of this rank |
//!
//! Experts are chosen on the host: logits come down, and row numbers go up.

use super::chunks::Chunk;
use super::experts::{ExpertRanks, Received};
use super::{Context, Linear, Matrix, TokenIds};
use crate::comm::{CommError, Request};
use crate::device::{Device, DeviceGroup, DeviceRequest, Space, Stored};
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::{
    BiasUpdate, Declaration, Division, Gradient, Init, Inventory, ParameterSlice, Placement,
};
use kernels::Real;
use kernels::embedding::{self, Embedding};
use kernels::routing::{self, Chosen, LossGradients, Routing, Scoring};
use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// A layer's router. Every rank has all of it.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// Its matrix, `[E, h]`.
    pub linear: Linear,
    /// Its layer's number.
    pub layer: usize,
    /// Added to scores for the choice alone, `[E]`.
    pub bias: Option<ParameterSlice>,
    /// How experts are chosen.
    pub routing: Routing,
    /// The most copies that an expert takes of a micro-batch, as a multiple of the balanced share
    /// ([`super::capacity`]); `None` takes all.
    pub capacity_factor: Option<f64>,
}

impl Router {
    /// Declares a router. With sequence parallelism (`split`) each rank routes other rows, so its
    /// gradient is a partial sum. Sigmoid scores have a selection bias (DeepSeek-V3, arXiv
    /// 2412.19437, section 2.1.2).
    pub fn declare(
        name: &str,
        layer: usize,
        hidden: usize,
        routing: Routing,
        deviation: f64,
        split: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let (matrix, shape) = (Matrix::named(name, deviation), vec![routing.experts, hidden]);
        let gradient = if split { Gradient::Partial } else { Gradient::Whole };
        let weight = inventory.declare(matrix.weight(shape, Placement::Replicated, gradient));
        let linear = Linear { weight, bias: None, inputs: hidden, outputs: routing.experts };
        let has_bias = matches!(routing.scoring, Scoring::Sigmoid { .. });
        let bias = has_bias.then(|| {
            inventory.declare(Declaration {
                name: format!("{name}.e_score_correction_bias"),
                shape: vec![routing.experts],
                transposed: false,
                division: Division::Dense,
                placement: Placement::Replicated,
                gradient: Gradient::None,
                tied_copy: false,
                init: Init::Constant(0.0),
            })
        });
        Self { linear, layer, bias, routing, capacity_factor: None }
    }

    /// The same with a bias of the logits; `name` and `split` as in [`Self::declare`].
    #[must_use]
    pub fn with_bias(mut self, name: &str, split: bool, inventory: &mut Inventory) -> Self {
        let gradient = if split { Gradient::Partial } else { Gradient::Whole };
        let whole = Matrix::named(name, 0.0);
        let whole = whole.bias(self.routing.experts, Placement::Replicated, gradient);
        self.linear.bias = Some(inventory.declare(whole));
        self
    }

    /// The same where load moves the selection bias by `rate` a step.
    ///
    /// # Panics
    /// It has none.
    #[must_use]
    #[track_caller]
    pub fn with_bias_updates(self, rate: f64, inventory: &mut Inventory) -> Self {
        let bias = self.bias.expect("sigmoid scores have a selection bias, others have none");
        inventory.update_by_load(bias, BiasUpdate { layer: self.layer, rate });
        self
    }
}

/// Where the copies of a rank's rows go, and with which weights.
pub struct Route<D: Space> {
    /// Scores of all experts, `[r, E]`.
    scores: Vec<D::Wide>,
    /// Experts of each row, `[r, k]`.
    chosen: Vec<u32>,
    /// The log-sum-exp of each row's logits.
    log_sums: Vec<D::Wide>,
    /// The row of each copy, in the order of copies.
    rows: TokenIds<D>,
    /// The copies by row ([`kernels::embedding::by_row`]).
    by_row: TokenIds<D>,
    /// The weight of each copy, in the order of copies.
    weights: WideBuffer<D>,
    /// For each copy, its place in `[r, k]`.
    places: Vec<usize>,
    /// Copies for each rank.
    sent: Vec<usize>,
    /// Columns of a copy.
    columns: usize,
    /// Which of the rank's rows these are.
    chunk: Chunk,
    /// Copies of each expert for its ranks, on their way there until they are needed.
    told: RefCell<Option<Request<i64>>>,
    arrivals: OnceCell<Arrivals<D>>,
}

/// The copies that this rank's experts get.
struct Arrivals<D: Space> {
    /// From each rank that has other experts, for each tensor-parallel rank of these experts.
    from: Vec<Vec<usize>>,
    /// For each copy sorted by expert, its number in the order of arrival, and the inverse; `None`
    /// if they arrive sorted.
    sorted: Option<[TokenIds<D>; 2]>,
    /// Copies of each of this rank's experts.
    of_expert: Rc<[usize]>,
}

impl<D: Device> Route<D> {
    /// Bytes held, on the device and on the host.
    pub fn bytes(&self) -> usize {
        let of_copy = size_of::<u32>() + 3 * size_of::<i64>() + size_of::<usize>();
        let known = self.arrivals.get().and_then(|arrivals| arrivals.sorted.as_ref());
        let sorted = known.into_iter().flatten().map(TokenIds::len).sum::<usize>();
        (self.scores.len() + self.log_sums.len()) * size_of::<D::Wide>()
            + self.weights.bytes()
            + self.copies() * of_copy
            + sorted * size_of::<i64>()
    }

    /// Experts of each row, `[r, k]`.
    pub(super) fn chosen(&self) -> &[u32] {
        &self.chosen
    }

    /// Scores of all experts, `[r, E]`.
    pub(super) fn scores(&self) -> &[D::Wide] {
        &self.scores
    }

    /// The log-sum-exp of each row's logits, `[r]`.
    pub(super) fn log_sums(&self) -> &[D::Wide] {
        &self.log_sums
    }

    /// Which of the rank's rows these are.
    pub(super) fn chunk(&self) -> Chunk {
        self.chunk
    }

    /// Copies of this rank's rows, `m`.
    pub fn copies(&self) -> usize {
        self.rows.len()
    }
}

impl Router {
    /// Chooses the experts of the rows `h[r, h]` of a chunk, and starts to tell the ranks that have
    /// them how many copies come.
    ///
    /// # Errors
    /// Those of any collective call, and a device that failed.
    pub fn route<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        h: &Buffer<D>,
        chunk: Chunk,
    ) -> Result<Route<D>, CommError> {
        let (device, routing) = (ctx.device, &self.routing);
        let logits = self.linear.forward(ctx, h);
        let logits = ctx.widened(logits.view(), logits.len())?;
        let rows = logits.len() / routing.experts;
        let mut scores = vec![D::Wide::ZERO; logits.len()];
        let mut chosen = vec![0; rows * routing.top_k];
        let mut weights = vec![D::Wide::ZERO; chosen.len()];
        let mut log_sums = vec![D::Wide::ZERO; rows];
        let to = Chosen {
            scores: &mut scores,
            chosen: &mut chosen,
            weights: &mut weights,
            log_sums: &mut log_sums,
        };
        let bias = self.bias.map(|bias| ctx.units.all.biases()[&bias.index()].as_slice());
        routing::forward(device.host(), routing, &logits, bias, to);
        let mut places: Vec<usize> = self.within_capacity(ctx, chunk, &chosen, &weights)?;
        // Stable: the copies of an expert stay in the order of rows.
        places.sort_by_key(|&place| chosen[place]);
        let mut counts = vec![0_usize; routing.experts];
        places.iter().for_each(|&place| counts[chosen[place] as usize] += 1);
        let row = |&place: &usize| (place / routing.top_k) as i64;
        let in_order = places.iter().map(|&place| weights[place]).collect();
        let ep = ctx.expert_ranks().ep;
        let each = routing.experts / ep.size();
        let told = ep.start_all_to_all(counts.iter().map(|&count| count as i64).collect())?;
        let rows: Vec<i64> = places.iter().map(row).collect();
        Ok(Route {
            by_row: TokenIds::new(device, embedding::by_row(&rows)),
            rows: TokenIds::new(device, rows),
            weights: Buffer::apart(device.taken(in_order)),
            sent: counts.chunks(each).map(|counts| counts.iter().sum()).collect(),
            columns: self.linear.inputs,
            chunk,
            told: RefCell::new(Some(told)),
            arrivals: OnceCell::new(),
            scores,
            chosen,
            log_sums,
            places,
        })
    }

    /// The gradient of the logits, from that of each copy's weight and those of the router's
    /// losses. The host computes it.
    ///
    /// # Errors
    /// A device that failed.
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        route: &Route<D>,
        dweights: &WideBuffer<D>,
    ) -> Result<Buffer<D>, CommError> {
        let device = ctx.device;
        let of_copies = device.download(dweights.view())?;
        let mut dweights = vec![D::Wide::ZERO; route.chosen.len()];
        for (&place, dweight) in route.places.iter().zip(of_copies) {
            dweights[place] = dweight;
        }
        let mut dlogits = vec![D::Wide::ZERO; route.scores.len()];
        let (scores, chosen) = (&route.scores, &route.chosen);
        let (host, routing) = (device.host(), &self.routing);
        let of_losses = self.loss_gradients(ctx, route);
        let losses = LossGradients {
            shares: of_losses.shares.as_deref(),
            log_sums: of_losses.log_sums.as_deref(),
        };
        routing::backward(host, routing, scores, chosen, &dweights, losses, &mut dlogits);
        let mut rounded = ctx.buffer(dlogits.len());
        let wide = device.taken(dlogits);
        device.round(D::view(&wide, 0..rounded.len()), rounded.view_mut());
        Ok(rounded)
    }
}

impl<D: Device> Arrivals<D> {
    /// Learns from all ranks how many copies come for each expert: `told` is what ranks with other
    /// experts say, `[ep rank, expert]`.
    fn of(ctx: &Context<'_, D>, told: &[i64]) -> Result<Self, CommError> {
        let ExpertRanks { ep, etp } = ctx.expert_ranks();
        let experts = told.len() / ep.size();
        // Of every tensor-parallel rank of these experts.
        let told = etp.all_gather(told)?;
        let count = |at: usize| told[at] as usize;
        let sources = etp.size() * ep.size();
        let from_source = |source: usize| -> usize {
            (0..experts).map(|expert| count(source * experts + expert)).sum()
        };
        let from: Vec<usize> = (0..sources).map(from_source).collect();
        let of_expert: Rc<[usize]> = (0..experts)
            .map(|expert| (0..sources).map(|source| count(source * experts + expert)).sum())
            .collect();
        let sorted = (sources > 1 && experts > 1).then(|| {
            let mut begin = 0;
            let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
            for source in 0..sources {
                for expert in 0..experts {
                    let end = begin + count(source * experts + expert);
                    runs.push((expert, begin..end));
                    begin = end;
                }
            }
            runs.sort_by_key(|(expert, _)| *expert);
            let order: Vec<usize> = runs.into_iter().flat_map(|(_, run)| run).collect();
            let mut inverse = vec![0; order.len()];
            order.iter().enumerate().for_each(|(to, &from)| inverse[from] = to as i64);
            let order = order.into_iter().map(|from| from as i64).collect();
            [order, inverse].map(|ids| TokenIds::new(ctx.device, ids))
        });
        Ok(Self {
            from: from.chunks(ep.size()).map(<[usize]>::to_vec).collect(),
            sorted,
            of_expert,
        })
    }

    /// Copies for this rank's experts from one tensor-parallel rank.
    fn of_member(&self, member: usize) -> usize {
        self.from[member].iter().sum()
    }
}

/// Rows of `x[.., c]` by number.
fn rows_of<D: Device>(
    ctx: &Context<'_, D>,
    x: Stored<'_, D>,
    elements: usize,
    columns: usize,
    ids: &TokenIds<D>,
) -> Buffer<D> {
    let mut y = Buffer::apart(ctx.device.zeros(ids.len() * columns));
    if !y.is_empty() {
        let shape = numbered(ids.len(), columns, elements / columns);
        ctx.device.embedding(&shape, ids.view(), x, y.view_mut());
    }
    y
}

fn numbered(tokens: usize, columns: usize, rows: usize) -> Embedding {
    Embedding { tokens, columns, rows, first_row: 0, scale: 1.0 }
}

impl<D: Device> Route<D> {
    /// Each row of `x[r, c]` as often as it has experts: `[m, c]`.
    pub fn copied(&self, ctx: &Context<'_, D>, x: &Buffer<D>) -> Buffer<D> {
        rows_of(ctx, x.view(), x.len(), self.columns, &self.rows)
    }

    /// The sum of each row's copies, `[m, c] -> [r, c]`: the backward pass of [`Self::copied`]. It
    /// is taken in f32 or wider, in the order of experts.
    pub fn summed(&self, ctx: &Context<'_, D>, copies: &Buffer<D>) -> Buffer<D> {
        let (device, rows, columns) = (ctx.device, self.log_sums.len(), self.columns);
        let mut sums = ctx.wide(rows * columns);
        device.fill(sums.view_mut(), D::Wide::ZERO);
        if !copies.is_empty() {
            let shape = numbered(self.copies(), columns, rows);
            let by_row = self.by_row.view();
            device.embedding_backward(&shape, by_row, copies.view(), sums.view_mut());
        }
        let mut y = ctx.buffer(sums.len());
        device.round(sums.view(), y.view_mut());
        y
    }

    /// Each copy times its weight.
    pub fn weighted(&self, ctx: &Context<'_, D>, copies: &Buffer<D>) -> Buffer<D> {
        let mut y = ctx.buffer(copies.len());
        ctx.device.scale_rows(self.weights.view(), copies.view(), y.view_mut());
        y
    }

    /// The sum of a row's copies, each times its weight: `[m, h] -> [r, h]`.
    pub fn weighted_sum(&self, ctx: &Context<'_, D>, copies: &Buffer<D>) -> Buffer<D> {
        self.summed(ctx, &self.weighted(ctx, copies))
    }

    /// The gradients of [`Self::weighted_sum`]: of the copies, and of their weights.
    pub fn weighted_sum_backward(
        &self,
        ctx: &Context<'_, D>,
        copies: &Buffer<D>,
        dy: &Buffer<D>,
    ) -> (Buffer<D>, WideBuffer<D>) {
        let dy = self.copied(ctx, dy);
        let mut dweights = ctx.wide(self.copies());
        ctx.device.dot_rows(copies.view(), dy.view(), dweights.view_mut());
        (self.weighted(ctx, &dy), dweights)
    }

    /// What comes for this rank's experts; waits for what other ranks say.
    fn arrivals(&self, ctx: &Context<'_, D>) -> Result<&Arrivals<D>, CommError> {
        if let Some(told) = self.told.take() {
            let arrivals = Arrivals::of(ctx, &told.wait()?)?;
            return Ok(self.arrivals.get_or_init(|| arrivals));
        }
        Ok(self.arrivals.get().expect("other ranks said so once"))
    }

    /// Brings copies to the ranks of their experts: `[m, c] -> [q, c]`.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn dispatch(
        &self,
        ctx: &Context<'_, D>,
        copies: Buffer<D>,
    ) -> Result<Received<D>, CommError> {
        self.finish_dispatch(ctx, self.start_dispatch(ctx, copies)?)
    }

    /// Starts [`Self::dispatch`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start_dispatch(
        &self,
        ctx: &Context<'_, D>,
        copies: Buffer<D>,
    ) -> Result<CopiesInFlight<D>, CommError> {
        let counts = self.sent.iter().map(|count| count * self.columns).collect();
        CopiesInFlight::start(ctx, copies.into_memory(), counts)
    }

    /// What came of [`Self::start_dispatch`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn finish_dispatch(
        &self,
        ctx: &Context<'_, D>,
        in_flight: CopiesInFlight<D>,
    ) -> Result<Received<D>, CommError> {
        let (device, arrivals, columns) = (ctx.device, self.arrivals(ctx)?, self.columns);
        let etp = ctx.expert_ranks().etp;
        let mut memory = in_flight.wait(ctx)?;
        if etp.size() > 1 {
            let len = D::len(&memory);
            let mut to_all = device.zeros(len * etp.size());
            for member in 0..etp.size() {
                let to = D::view_mut(&mut to_all, member * len..(member + 1) * len);
                device.copy(D::view(&memory, 0..len), to);
            }
            let counts = vec![len; etp.size()];
            memory = DeviceGroup::new(device, etp).all_to_all_v(to_all, counts)?;
        }
        let rows = match &arrivals.sorted {
            None => Buffer::apart(memory),
            Some([order, _]) => {
                let len = D::len(&memory);
                rows_of(ctx, D::view(&memory, 0..len), len, columns, order)
            }
        };
        Ok(Received { rows: Rc::new(rows), of_expert: arrivals.of_expert.clone() })
    }

    /// Brings what experts made of copies back: `[q, c] -> [m, c]`. Tensor-parallel ranks of an
    /// expert have summands of it, which are added up in the order of ranks.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn combine(&self, ctx: &Context<'_, D>, made: Received<D>) -> Result<Buffer<D>, CommError> {
        self.finish_combine(ctx, self.start_combine(ctx, made)?)
    }

    /// Starts [`Self::combine`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start_combine(
        &self,
        ctx: &Context<'_, D>,
        made: Received<D>,
    ) -> Result<CopiesInFlight<D>, CommError> {
        let (device, arrivals) = (ctx.device, self.arrivals(ctx)?);
        let etp = ctx.expert_ranks().etp;
        let (columns, rows) = (self.columns, made.rows);
        let arrived = match &arrivals.sorted {
            None => ctx.own(rows),
            Some([_, inverse]) => rows_of(ctx, rows.view(), rows.len(), columns, inverse),
        };
        let mut memory = arrived.into_memory();
        if etp.size() > 1 {
            let of = |member| arrivals.of_member(member) * columns;
            let counts = (0..etp.size()).map(of).collect();
            let parts = DeviceGroup::new(device, etp).all_to_all_v(memory, counts)?;
            let len = of(etp.rank());
            let mut sums = Buffer::<D, D::Wide>::apart(device.zeros(len));
            for member in 0..etp.size() {
                let part = D::view(&parts, member * len..(member + 1) * len);
                device.accumulate(part, sums.view_mut());
            }
            memory = device.zeros(len);
            device.round(sums.view(), D::view_mut(&mut memory, 0..len));
        }
        let from = &arrivals.from[etp.rank()];
        CopiesInFlight::start(ctx, memory, from.iter().map(|count| count * columns).collect())
    }

    /// What came of [`Self::start_combine`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn finish_combine(
        &self,
        ctx: &Context<'_, D>,
        in_flight: CopiesInFlight<D>,
    ) -> Result<Buffer<D>, CommError> {
        in_flight.wait(ctx).map(Buffer::apart)
    }
}

/// Copies on their way between ranks with different experts.
#[must_use = "an exchange that nobody waits for may never finish"]
pub struct CopiesInFlight<D: Device>(On<D>);

enum On<D: Device> {
    /// There is no other rank.
    Here(D::Memory<D::Stored>),
    Moving(DeviceRequest<D, D::Stored>),
}

impl<D: Device> CopiesInFlight<D> {
    fn start(
        ctx: &Context<'_, D>,
        memory: D::Memory<D::Stored>,
        counts: Vec<usize>,
    ) -> Result<Self, CommError> {
        let ep = ctx.expert_ranks().ep;
        if ep.size() == 1 {
            return Ok(Self(On::Here(memory)));
        }
        let group = DeviceGroup::new(ctx.device, ep);
        group.start_all_to_all_v(memory, counts).map(|moving| Self(On::Moving(moving)))
    }

    fn wait(self, ctx: &Context<'_, D>) -> Result<D::Memory<D::Stored>, CommError> {
        match self.0 {
            On::Here(memory) => Ok(memory),
            On::Moving(moving) => moving.wait(ctx.device),
        }
    }
}
