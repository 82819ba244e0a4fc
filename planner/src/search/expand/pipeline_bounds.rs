//! Lower bounds on the time of the pipelines of a parallel layout, the cheap ones first.

use super::layout::{AnyOrder, FittingKey, FittingState, LayoutView, recompute_choices};
use super::{AnyOrderKey, Worker, copies_may_pair};
use crate::bounds::candidates::{ListedBound, ListedCuts, Shapes};
use crate::bounds::closed;
use crate::bounds::cuts::PartitionBound;
use crate::bounds::pipeline_spec::PipelineSpec;
use crate::bounds::recompute_knapsack::RecomputeKnapsack;
use crate::bounds::state_overheads::StateOverhead;
use crate::bounds::states::{StateView, States};
use crate::bounds::workload::{MicroBatchCost, VocabEnd};
use crate::partition::VocabPath;
use crate::pricing::listed_cuts::CutList;
use models::decisions::{Decisions, Offload, RecomputePolicy};
use models::schedule::ScheduleName;
use std::rc::Rc;
use std::sync::Arc;

/// Lower bound on a pipeline, with overheads, s.
#[derive(Clone, Copy, Debug)]
pub(super) struct PipelineBound {
    pub(super) bound_s: f64,
    pub(super) source: BoundSource,
}

/// What a bound of a pipeline comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::search) enum BoundSource {
    /// A bound for a group of layouts.
    Others,
    /// Degrees and load, or a tighter bound that stopped early at its limit.
    Degrees,
    /// What holds for any order of passes: a tighter bound needs the order, which takes long to
    /// generate.
    AnyOrder,
    /// The recomputation that memory makes necessary: the tightest bound before parameter state is
    /// chosen.
    Memory,
}

/// A pipeline with its micro-batch cost, and its candidate partitions where these are known.
#[derive(Clone, Copy)]
struct PipelineInputs<'a> {
    spec: &'a PipelineSpec,
    work: &'a MicroBatchCost,
    candidates: Option<&'a ListedCuts>,
    /// See [`Worker::slack`].
    slack: f64,
}

impl PipelineInputs<'_> {
    /// Lower bound on the recomputation of one micro-batch in the whole model, s.
    fn recompute_s(self, knapsack: &RecomputeKnapsack, state: &StateView, budget: f64) -> f64 {
        match self.candidates {
            Some(candidates) => {
                candidates.recompute_s(self.spec, self.work, knapsack, state, budget)
            }
            None => closed::least_recompute_s(self.spec, self.work, knapsack, state, budget),
        }
    }
}

impl Worker<'_> {
    /// Bound of a parallel layout over all its pipelines, with overheads, s: without vocabulary
    /// layers and transfers. Breadth-first loops are bounded apart, because they alone gather and
    /// reduce once for all micro-batches; of the others those with a split backward have the least
    /// bound.
    pub(super) fn layout_s(
        &mut self,
        parallel: &mut LayoutView,
        d: &Decisions,
        enough_s: f64,
    ) -> f64 {
        let looped = ScheduleName::LoopedBfs;
        let is_open = parallel.choices.schedules.iter().any(|(name, ..)| *name == looped);
        let looped_s =
            if is_open { self.like_s(parallel, d, looped, enough_s) } else { f64::INFINITY };
        looped_s.min(self.like_s(parallel, d, ScheduleName::ZbV, enough_s))
    }

    /// Bound of a layout over the pipelines that cost no less than one of this schedule, with
    /// overheads, s.
    fn like_s(
        &mut self,
        parallel: &mut LayoutView,
        d: &Decisions,
        schedule: ScheduleName,
        enough_s: f64,
    ) -> f64 {
        let mut policies = recompute_choices(&parallel.choices);
        if d.offload != Offload::Activations {
            // The first recomputes least. With activations on the host it moves most, too.
            policies.truncate(1);
        }
        let like = |recompute| self.like_with_s(parallel, d, (schedule, recompute), enough_s);
        policies.into_iter().map(like).fold(f64::INFINITY, f64::min)
    }

    /// The same with this way to recompute alone.
    fn like_with_s(
        &mut self,
        parallel: &mut LayoutView,
        d: &Decisions,
        (schedule, recompute): (ScheduleName, RecomputePolicy),
        enough_s: f64,
    ) -> f64 {
        // Some schedules have no gaps between passes.
        let bare = self.bare_spec(&self.no_transfer, d);
        let spec = PipelineSpec { schedule, chunks: 2, recompute, gap_s: 0.0, ..bare };
        let (embedding, head) = (VocabEnd::default(), VocabEnd::default());
        let work = MicroBatchCost { embedding, head, ..MicroBatchCost::clone(&parallel.work) };
        let work =
            &if copies_may_pair(d.pp, d.micro_batches) { work.always_paired() } else { work };
        let inputs = PipelineInputs { spec: &spec, work, candidates: None, slack: 1.0 };
        let budget = self.budget_bytes(&spec, work, &parallel.states.least);
        self.cheapest_state_s(parallel, inputs, (budget, enough_s))
    }

    /// Bound of a pipeline from its degrees and load, with the least cost of parameter state, with
    /// overheads, s. Stops early once the bound reaches `enough_s`.
    pub(super) fn quick_s(
        &mut self,
        parallel: &mut LayoutView,
        d: &Decisions,
        enough_s: f64,
    ) -> f64 {
        if d.vocab.over_pipeline() {
            // Layers and their bubble alone: pricing vocabulary passes takes longer.
            let bare = self.bare_spec(&self.no_transfer, d);
            let spec = PipelineSpec { passes: Some(VocabPath::default()), ..bare };
            let work = parallel.work.beside_passes(&self.cache, d);
            let layers_s = self.with_overheads_s(closed::passes_s(&spec, &work, 0.0));
            if layers_s >= enough_s {
                return layers_s;
            }
        }
        let (spec, work) = self.spec(parallel, d);
        // Orders of passes that would have to be generated are left out here.
        let list =
            CutList::of(d.vocab, d.vpp).filter(|_| d.vpp > 1 && spec.is_known_without_order());
        let slack = list.map_or(1.0, |list| self.slack(list, &spec));
        let candidates = list.map(|list| self.candidates(list, &spec));
        let inputs =
            PipelineInputs { spec: &spec, work: &work, candidates: candidates.as_deref(), slack };
        self.degrees_s(parallel, inputs, enough_s)
    }

    /// Bound of a pipeline over every partition, recompute split and choice of parameter state,
    /// with overheads, s.
    pub(super) fn any_cut_s(&mut self, parallel: &mut LayoutView, d: &Decisions) -> f64 {
        let (spec, work) = self.spec(parallel, d);
        let inputs = PipelineInputs { spec: &spec, work: &work, candidates: None, slack: 1.0 };
        self.degrees_s(parallel, inputs, f64::INFINITY)
    }

    /// Bound of a pipeline from the recomputation that the leanest parameter state makes
    /// necessary, and from the cheapest parameter state, with overheads, s. Stops early once the
    /// bound reaches `enough_s`.
    fn degrees_s(
        &self,
        parallel: &mut LayoutView,
        inputs: PipelineInputs<'_>,
        enough_s: f64,
    ) -> f64 {
        let PipelineInputs { spec, work, slack, .. } = inputs;
        let (knapsack, least) = (parallel.knapsack(spec.recompute), &parallel.states.least);
        let budget = self.budget_bytes(spec, work, least);
        let spent_s = inputs.recompute_s(&knapsack, least, budget);
        let passes_s = self.with_overheads_s(closed::passes_s(spec, work, spent_s) / slack);
        if passes_s >= enough_s {
            return passes_s;
        }
        passes_s.max(self.cheapest_state_s(parallel, inputs, (budget, enough_s)))
    }

    /// Bound of a pipeline with the cheapest parameter state, from the mean load and bytes of all
    /// ranks or from the layers of one kind that some rank must hold, with overheads, s; infinite
    /// where nothing fits. Stops early once the bound reaches `enough_s`.
    fn cheapest_state_s(
        &self,
        parallel: &mut LayoutView,
        inputs: PipelineInputs<'_>,
        (budget, enough_s): (f64, f64),
    ) -> f64 {
        let PipelineInputs { spec, work, slack, .. } = inputs;
        let states = Arc::clone(&parallel.states);
        let knapsack = parallel.knapsack(spec.recompute);
        let key = FittingKey {
            is_looped: spec.schedule == ScheduleName::LoopedBfs,
            passes: spec.passes.map(|_| spec.vocab),
            recompute: spec.recompute,
            copies: spec.copies(),
            ends_meet: spec.ends_meet(),
            has_vocabulary: work.embedding.params > 0.0,
        };
        let vocab_s = spec.m() * spec.passes_s();
        let fitting = match parallel.fitting.get(&key) {
            Some(known) => Rc::clone(known),
            None => {
                let overheads = states.overheads(work, spec);
                let added_s = overheads.first().map_or(f64::INFINITY, |least| least.added_s);
                let load_s = load_s(spec, work, 0.0) / spec.ranks as f64;
                let least_s = self.with_overheads_s((load_s + added_s + vocab_s) / slack);
                if least_s >= enough_s {
                    return least_s;
                }
                let fitting = fitting(&states, &overheads, (spec, work), &knapsack, budget);
                parallel.fitting.insert(key, Rc::clone(&fitting));
                fitting
            }
        };
        let all_s = fitting.first().map_or(f64::INFINITY, |state| state.least_s + vocab_s);
        let all_s = self.with_overheads_s(all_s / slack);
        if all_s >= enough_s {
            return all_s;
        }
        let mut least_s = f64::INFINITY;
        for state in fitting.iter() {
            if state.least_s + vocab_s >= least_s {
                break;
            }
            let view = &states.undominated[state.at];
            let spent_s = inputs.recompute_s(&knapsack, view, budget);
            let with_state = view.added_to(work, spec);
            let state_s = closed::with_state_s(spec, &with_state, view, spent_s);
            least_s = least_s.min(state_s.max(state.least_s + vocab_s));
        }
        self.with_overheads_s(least_s / slack)
    }

    /// Bound of a pipeline with the recomputation that the leanest parameter state makes necessary,
    /// with overheads, s; infinite where it does not fit. A value of `far_s` or more only proves
    /// that the time is `far_s` or more. The order of passes is not generated where that is
    /// `put_off`, nor where the bound for any order reaches `near_s`.
    pub(super) fn checked_s(
        &mut self,
        parallel: &mut LayoutView,
        d: &Decisions,
        (near_s, far_s): (f64, f64),
        put_off: bool,
    ) -> PipelineBound {
        let (spec, work) = self.spec(parallel, d);
        let states = Arc::clone(&parallel.states);
        if !spec.is_known_without_order() {
            let bound_s = self.any_order_s(parallel, (&spec, d.fused_loss), &work, near_s);
            if bound_s >= near_s || put_off {
                let source =
                    if bound_s < near_s { BoundSource::AnyOrder } else { BoundSource::Degrees };
                return PipelineBound { bound_s, source };
            }
        }
        let pipeline_s = self.placed_s(&spec, &work, &states.least, far_s);
        let bound_s = self.with_overheads_s(pipeline_s);
        PipelineBound {
            bound_s,
            source: if bound_s < far_s { BoundSource::Memory } else { BoundSource::Degrees },
        }
    }

    /// Bound of a pipeline under any order of passes, with overheads, s. It prunes most pipelines
    /// before their order is generated. Schedules that split the backward share it.
    fn any_order_s(
        &mut self,
        parallel: &mut LayoutView,
        (spec, fused_loss): (&PipelineSpec, bool),
        work: &MicroBatchCost,
        limit_s: f64,
    ) -> f64 {
        let state = &Arc::clone(&parallel.states).least;
        let budget_bytes = self.budget_bytes(spec, work, state);
        let Some(list) = CutList::of(spec.vocab, spec.chunks as u64) else {
            let bound = PartitionBound::new(spec, work, state, &self.cache.layers, budget_bytes);
            return self.with_overheads_s(bound.least_s(self.pipeline_s(limit_s)));
        };
        let candidates = self.any_order_candidates(list, spec);
        let key = AnyOrder {
            list,
            layout: spec.layout(),
            chunks: spec.chunks,
            vocab: (spec.vocab, fused_loss),
            recompute: spec.recompute,
            splits_backward: spec.splits_backward(),
            has_pairs: spec.schedule.has_pairs(),
        };
        if let Some(&(known_s, looked_s)) = parallel.any_order_s.get(&key)
            && (known_s < looked_s || known_s >= limit_s)
        {
            return known_s;
        }
        let (listed_bound, slack) =
            (ListedBound { spec, work, state, budget_bytes }, self.slack(list, spec));
        let pipeline_s = listed_bound.bound_s(&candidates, self.pipeline_s(limit_s) * slack);
        let bound_s = self.with_overheads_s(pipeline_s / slack);
        parallel.any_order_s.insert(key, (bound_s, limit_s));
        bound_s
    }

    /// Lower bound on the passes of any placement with the parameter state `state`, s; infinite
    /// where none fits. A value that reaches `best_s` only proves that none is faster. `work`
    /// includes what the parameter state adds to passes.
    pub(super) fn placed_s(
        &mut self,
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        state: &StateView,
        best_s: f64,
    ) -> f64 {
        let limit_s = self.pipeline_s(best_s);
        let budget_bytes = self.budget_bytes(spec, work, state);
        match CutList::of(spec.vocab, spec.chunks as u64) {
            Some(list) => {
                let (listed_bound, slack) =
                    (ListedBound { spec, work, state, budget_bytes }, self.slack(list, spec));
                listed_bound.bound_s(&self.candidates(list, spec), limit_s * slack) / slack
            }
            None => {
                let partition_bound =
                    PartitionBound::new(spec, work, state, &self.cache.layers, budget_bytes);
                partition_bound.with_generated_order(&self.cache).least_s(limit_s)
            }
        }
    }

    /// Candidate partitions under any order of passes, for pipelines whose own order has to be
    /// generated. Whether this thread has generated it already is not asked: the proof must not
    /// depend on that.
    fn any_order_candidates(&mut self, list: CutList, spec: &PipelineSpec) -> Rc<ListedCuts> {
        let key = AnyOrderKey {
            list,
            layout: spec.layout(),
            ranks: spec.ranks,
            micro_batches: spec.micro_batches,
            chunks: spec.chunks,
            over_pipeline: spec.vocab.over_pipeline(),
            has_pairs: spec.schedule.has_pairs(),
        };
        if let Some(known) = self.any_order_candidates.get(&key) {
            return Rc::clone(known);
        }
        let candidates = Rc::new(ListedCuts::of_any(spec, self.shapes(list, spec)));
        self.any_order_candidates.insert(key, Rc::clone(&candidates));
        candidates
    }

    pub(super) fn candidates(&mut self, list: CutList, spec: &PipelineSpec) -> Rc<ListedCuts> {
        let key = (list, spec.vocab.over_pipeline(), ListedCuts::key(spec));
        if let Some(known) = self.candidates.get(&key) {
            return Rc::clone(known);
        }
        let shapes = self.shapes(list, spec);
        let pipeline = || self.cache.pipeline_of(spec.key());
        let candidates = Rc::new(ListedCuts::new(spec, shapes, pipeline));
        self.candidates.insert(key, Rc::clone(&candidates));
        candidates
    }

    fn shapes(&mut self, list: CutList, spec: &PipelineSpec) -> Rc<Shapes> {
        let PipelineSpec { ranks, chunks, vocab, .. } = *spec;
        let cache = &self.cache;
        let key = (list, ranks, chunks, spec.layout(), vocab.over_pipeline());
        let shapes = self.shapes.entry(key).or_insert_with(|| {
            let ranges = cache.listed_ranges(list, spec.stages(), vocab);
            Rc::new(Shapes::new(&cache.layers, spec, ranges))
        });
        Rc::clone(shapes)
    }
}

/// The choices of parameter state that fit on a pipeline, the least bound first.
fn fitting(
    states: &States,
    overheads: &[StateOverhead],
    (spec, work): (&PipelineSpec, &MicroBatchCost),
    knapsack: &RecomputeKnapsack,
    budget: f64,
) -> Rc<[FittingState]> {
    let bounded = |overhead: &StateOverhead| {
        let view = &states.undominated[overhead.at];
        let spent_s = closed::least_recompute_s(spec, work, knapsack, view, budget);
        let passes_s = load_s(spec, work, spent_s) / spec.ranks as f64;
        let StateOverhead { at, added_s, fullest_s } = *overhead;
        let fits = closed::least_bytes(spec, work, view) <= budget * (1.0 + 1e-9);
        fits.then_some(FittingState { at, least_s: fullest_s.max(passes_s + added_s) })
    };
    let mut all: Vec<_> = overheads.iter().filter_map(bounded).collect();
    all.sort_by(|a, b| a.least_s.total_cmp(&b.least_s));
    Rc::from(all)
}

/// The passes of all layers on all ranks, s, with `spent_s` more for each micro-batch.
fn load_s(spec: &PipelineSpec, work: &MicroBatchCost, spent_s: f64) -> f64 {
    spec.m() * (work.load_s() + spent_s) + spec.least_unpaired() * work.unpaired_s()
}
