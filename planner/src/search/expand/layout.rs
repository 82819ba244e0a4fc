//! A parallel layout: what its pipelines share, and which pipelines it has.

use super::Worker;
use crate::bounds::pipeline_spec::PipelineSpec;
use crate::bounds::recompute_knapsack::RecomputeKnapsack;
use crate::bounds::states::States;
use crate::bounds::workload::MicroBatchCost;
use crate::partition::VocabPath;
use crate::pricing::cost_cache::{CostCache, LayerCosts};
use crate::pricing::listed_cuts::CutList;
use crate::pricing::recompute_split::options;
use crate::pricing::stage_transfers::{self, P2pTransfer};
use crate::pricing::vocab_times::placed_by_times;
use crate::request::pipeline_choices::{PipelineChoices, PipelineChoicesKey, VocabChoice};
use crate::request::space::ParallelLayout;
use models::decisions::{CpStyle, Decisions, Dtype, MoeOverlap, RecomputePolicy, Vocab};
use models::schedule::{ScheduleName, StageLayout};
use rustc_hash::FxHashMap as HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// A parallel layout with the inputs of its pipelines' bounds.
pub(super) struct LayoutView {
    pub(super) choices: Rc<PipelineChoices>,
    pub(super) layer_costs: Rc<LayerCosts>,
    /// One micro-batch whose loss is not fused with the output layer.
    pub(super) work: Arc<MicroBatchCost>,
    /// The same with a fused loss.
    fused: Option<Arc<MicroBatchCost>>,
    pub(super) states: Arc<States>,
    /// Lower bounds on the transfers between neighbouring ranks over all rank orders.
    pub(super) transfers: Rc<P2pTransfer>,
    /// Upper bound on these transfers without vocabulary passes, s.
    pub(super) most_transfer_s: f64,
    /// By vocabulary placement over the pipeline, and whether its passes are placed by own times,
    /// the micro-batch cost and a lower bound on the vocabulary passes.
    pub(super) passes: HashMap<(Vocab, bool), (Arc<MicroBatchCost>, VocabPath)>,
    /// The choices of parameter state that fit, the least first.
    pub(super) fitting: HashMap<FittingKey, Rc<[FittingState]>>,
    pub(super) knapsacks: HashMap<RecomputePolicy, Rc<RecomputeKnapsack>>,
    /// A bound for any order of passes, and the limit up to which it was computed, with overheads,
    /// s.
    pub(super) any_order_s: HashMap<AnyOrder, (f64, f64)>,
}

/// What a bound for any order of passes depends on within a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AnyOrder {
    pub(super) list: CutList,
    pub(super) layout: StageLayout,
    pub(super) chunks: usize,
    pub(super) vocab: VocabChoice,
    pub(super) recompute: RecomputePolicy,
    pub(super) splits_backward: bool,
    pub(super) has_pairs: bool,
}

/// What the bounds of [`FittingState`] depend on within a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FittingKey {
    /// Whether all micro-batches share one communication.
    pub(super) is_looped: bool,
    /// The vocabulary passes beside which layers are slower.
    pub(super) passes: Option<Vocab>,
    pub(super) recompute: RecomputePolicy,
    pub(super) copies: usize,
    pub(super) ends_meet: bool,
    /// Whether vocabulary layers count.
    pub(super) has_vocabulary: bool,
}

/// A choice of parameter state that fits, with a lower bound on a rank's time.
#[derive(Clone, Copy)]
pub(super) struct FittingState {
    /// Index into the undominated choices.
    pub(super) at: usize,
    /// The longer of two: the mean of all ranks, with the recomputation that memory makes
    /// necessary, and a rank that holds only as many layers of a kind as some rank must, s.
    pub(super) least_s: f64,
}

/// Key of a parallel layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LayoutKey {
    degrees: [u64; 8],
    micro_batch: u64,
    cp_style: CpStyle,
    sequence_parallel: bool,
    dtype: Dtype,
    overlap: (MoeOverlap, u64),
}

impl LayoutKey {
    fn new(d: &Decisions) -> Self {
        Self {
            degrees: [d.tp, d.pp, d.cp, d.cp_ulysses, d.dp, d.ep, d.etp, d.micro_batches],
            micro_batch: d.micro_batch,
            cp_style: d.cp_style,
            sequence_parallel: d.sequence_parallel,
            dtype: d.dtype,
            overlap: (d.moe_overlap, d.moe_overlap_degree),
        }
    }
}

/// Parallel layouts kept in the cache, a few kilobytes each.
const MAX_LAYOUTS: usize = 1 << 10;

impl LayoutView {
    /// One micro-batch of a pipeline without vocabulary passes.
    pub(super) fn work_of(&mut self, cache: &CostCache<'_>, d: &Decisions) -> Arc<MicroBatchCost> {
        if !d.fused_loss {
            return Arc::clone(&self.work);
        }
        let of = || Arc::new(self.work.with_vocabulary(&cache.vocabulary(d)));
        Arc::clone(self.fused.get_or_insert_with(of))
    }

    /// The knapsack of what `recompute` allows.
    pub(super) fn knapsack(&mut self, recompute: RecomputePolicy) -> Rc<RecomputeKnapsack> {
        let kinds = &self.work.kinds;
        let knapsack = self.knapsacks.entry(recompute);
        Rc::clone(
            knapsack.or_insert_with(|| Rc::new(RecomputeKnapsack::new(kinds, options(recompute)))),
        )
    }
}

impl Worker<'_> {
    /// Runs `work` on the cached view of a layout, whose pipelines come one after another.
    pub(super) fn with_layout<R>(
        &mut self,
        d: &Decisions,
        work: impl FnOnce(&mut Self, &mut LayoutView) -> R,
    ) -> R {
        let key = LayoutKey::new(d);
        let mut parallel = self.layouts.remove(&key).unwrap_or_else(|| self.view(d));
        let result = work(self, &mut parallel);
        if self.layouts.len() >= MAX_LAYOUTS {
            self.layouts.clear();
        }
        self.layouts.insert(key, parallel);
        result
    }

    pub(super) fn view(&mut self, d: &Decisions) -> LayoutView {
        let d = &Decisions { fused_loss: false, ..d.clone() };
        let choices = self.choices(d);
        let layer_costs = self.cache.layer_costs(d);
        let work = Arc::new(MicroBatchCost::new(&self.cache, d, &layer_costs));
        let key = (d.tp, d.pp, d.cp, d.ep, d.etp, d.dtype);
        let make = || States::new(&self.cache, d, &choices, &layer_costs.params);
        let states = self.shared.states.get(key, usize::MAX, make);
        let transfers = choices.rank_order.iter().map(|&rank_order| {
            // Any pipeline of the layout will do: vocabulary passes beside a transfer only make it
            // longer.
            let d = Decisions { rank_order, vocab: Vocab::Tensor, ..d.clone() };
            stage_transfers::p2p_transfer(&self.cache, &d, &layer_costs)
        });
        let transfers: Vec<_> = transfers.collect();
        let most_transfer_s = transfers.iter().map(P2pTransfer::most_s).fold(0.0, f64::max);
        let least = transfers.into_iter().reduce(|a, b| a.least(&b));
        let transfers = Rc::new(least.unwrap_or_else(P2pTransfer::none));
        LayoutView {
            choices,
            layer_costs,
            work,
            fused: None,
            states,
            transfers,
            most_transfer_s,
            passes: HashMap::default(),
            fitting: HashMap::default(),
            knapsacks: HashMap::default(),
            any_order_s: HashMap::default(),
        }
    }

    pub(super) fn choices(&mut self, d: &Decisions) -> Rc<PipelineChoices> {
        let space = self.space;
        let of = || Rc::new(space.choices(&ParallelLayout { decisions: d.clone() }));
        Rc::clone(self.choices.entry(PipelineChoicesKey::new(d)).or_insert_with(of))
    }

    /// A pipeline without vocabulary passes.
    pub(super) fn bare_spec(&self, transfers: &Rc<P2pTransfer>, d: &Decisions) -> PipelineSpec {
        PipelineSpec::bare(&self.cache, d, Rc::clone(transfers))
    }

    /// Lower bounds on the pipeline and its micro-batch cost over all rank orders.
    pub(super) fn spec(
        &self,
        parallel: &mut LayoutView,
        d: &Decisions,
    ) -> (PipelineSpec, Arc<MicroBatchCost>) {
        let mut spec = self.bare_spec(&parallel.transfers, d);
        // Beside all-reduces of vocabulary passes twice as many ranks send at the same time.
        let senders = if d.vocab.over_pipeline() { 2.0 } else { 1.0 };
        spec.most_transfer_s = senders * parallel.most_transfer_s;
        if !d.vocab.over_pipeline() {
            return (spec, parallel.work_of(&self.cache, d));
        }
        let (cache, layer_costs, choices) = (&self.cache, &parallel.layer_costs, &parallel.choices);
        let key = (d.vocab, placed_by_times(d));
        let (work, path) = parallel.passes.entry(key).or_insert_with(|| {
            let paths = choices.rank_order.iter().filter_map(|&rank_order| {
                PipelineSpec::new(cache, &Decisions { rank_order, ..d.clone() }, layer_costs).passes
            });
            let least = paths.reduce(|a, b| VocabPath {
                passes_s: a.passes_s.min(b.passes_s),
                output_s: a.output_s.min(b.output_s),
                path_s: a.path_s.min(b.path_s),
                input_s: [0, 1].map(|end: usize| a.input_s[end].min(b.input_s[end])),
                passes: a.passes,
            });
            (Arc::new(parallel.work.with_passes(cache, d, layer_costs)), least.unwrap_or_default())
        });
        spec.passes = Some(*path);
        (spec, Arc::clone(work))
    }

    /// The pipelines of the layout `d` that are not dominated.
    pub(super) fn pipeline_choices(
        &self,
        choices: &PipelineChoices,
        d: &Decisions,
    ) -> Vec<Decisions> {
        let mut pipelines = vec![];
        let (p, m) = (d.pp as usize, d.micro_batches as usize);
        for (schedule, vpp, vocabs) in &choices.schedules {
            let same = schedule.made_by_hand(p, m, *vpp as usize);
            let is_open = |vocab: &&VocabChoice| {
                !is_dominated(choices, *schedule, **vocab)
                    && !is_named_otherwise(choices, same, **vocab)
            };
            for &vocab in vocabs.iter().filter(is_open) {
                let (vocab, fused_loss) = vocab;
                let of = |recompute| Decisions {
                    schedule: *schedule,
                    vpp: *vpp,
                    vocab,
                    fused_loss,
                    recompute,
                    ..d.clone()
                };
                pipelines.extend(recompute_choices(choices).into_iter().map(of));
            }
        }
        pipelines
    }
}

/// The recompute choices that are not dominated: uniform recomputation is a special case of
/// `per_layer`.
pub(super) fn recompute_choices(choices: &PipelineChoices) -> Vec<RecomputePolicy> {
    let all = &choices.recompute;
    if all.contains(&RecomputePolicy::PerLayer) {
        vec![RecomputePolicy::PerLayer]
    } else {
        all.clone()
    }
}

/// Whether another vocabulary placement or schedule does as well: see
/// docs/design/search.md, "Dominance".
fn is_dominated(choices: &PipelineChoices, schedule: ScheduleName, vocab: VocabChoice) -> bool {
    let vocabs = |name: ScheduleName| {
        choices.schedules.iter().find(|(s, ..)| *s == name).map(|(.., vocabs)| vocabs)
    };
    let here = vocabs(schedule);
    let freer = here.is_some_and(|vocabs| vocabs.contains(&(Vocab::Tensor, vocab.1)));
    if freer && matches!(vocab.0, Vocab::FirstLast | Vocab::Redistribute) {
        return true;
    }
    let plain = matches!(schedule, ScheduleName::GPipe | ScheduleName::Naive);
    plain && vocabs(ScheduleName::OneFOneB).is_some_and(|vocabs| vocabs.contains(&vocab))
}

/// Whether another schedule in the space has the same order of passes: see
/// docs/design/search.md, "Dominance".
fn is_named_otherwise(
    choices: &PipelineChoices,
    same: Option<ScheduleName>,
    vocab: VocabChoice,
) -> bool {
    let has = |name| choices.schedules.iter().any(|(s, _, all)| *s == name && all.contains(&vocab));
    !vocab.0.over_pipeline() && same.is_some_and(has)
}
