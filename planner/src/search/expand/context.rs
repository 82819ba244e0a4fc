//! The search nodes with which the search begins.

use super::every_cut::EveryCutStage;
use super::group::Group;
use super::{SearchNode, Stage};
use crate::request::space::ExpertSplit;
use models::decisions::{CpStyle, Decisions, Dtype};
use std::sync::Arc;

/// Parallel degrees, context parallelism and micro-batch size: a search node before it is expanded.
/// There may be hundreds of thousands, and few are expanded.
#[derive(Clone, Debug)]
pub(in crate::search) struct Context {
    /// The decisions, without micro-batches and expert split.
    pub template: Arc<Decisions>,
    /// Sequences in a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches.
    pub micro_batches: u64,
    /// The expert splits.
    pub splits: Arc<[ExpertSplit]>,
    /// Combinations per expert split.
    pub each: u64,
}

/// Number format, degrees that split a micro-batch, sequence parallelism, and sequences in a
/// micro-batch.
type PricedBy = (Dtype, u64, u64, CpStyle, u64, bool, u64);

impl Context {
    /// Number of combinations.
    pub fn count(&self) -> u64 {
        self.each * self.splits.len() as u64
    }

    /// What the costs of layers depend on. Contexts that differ only in pipeline and replicas share
    /// it.
    pub fn priced_by(&self) -> PricedBy {
        let d = &self.template;
        let sequence_parallel = d.sequence_parallel;
        (d.dtype, d.tp, d.cp, d.cp_style, d.cp_ulysses, sequence_parallel, self.micro_batch)
    }

    /// The decisions, without the degrees of the experts.
    pub fn decisions(&self) -> Decisions {
        let Self { micro_batch, micro_batches, .. } = *self;
        let moe_overlap = self.splits[0].overlap;
        Decisions { micro_batch, micro_batches, moe_overlap, ..Decisions::clone(&self.template) }
    }

    /// The search node of this context. A dense model has one parallel layout per context.
    pub fn node(&self, bound_s: f64) -> SearchNode {
        let part = Self::part(&self.splits, bound_s, &self.decisions());
        SearchNode { count: self.count(), ..part }
    }

    /// The search node of a context with these decisions and expert splits, without combinations.
    pub(super) fn part(
        splits: &Arc<[ExpertSplit]>,
        bound_s: f64,
        decisions: &Decisions,
    ) -> SearchNode {
        let dense = splits[..] == [ExpertSplit::NONE];
        let splits = Arc::clone(splits);
        let stage =
            if dense { Stage::ParallelLayout(Group::new(splits)) } else { Stage::Context(splits) };
        SearchNode { bound_s, decisions: decisions.clone(), count: 0, stage }
    }

    /// The search node of this context as open over every cut.
    pub fn every_cut(&self, bound_s: f64) -> SearchNode {
        let stage = EveryCutStage::Context(Arc::clone(&self.splits));
        super::every_cut::node(bound_s, self.decisions(), stage)
    }
}
