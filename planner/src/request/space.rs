//! The space of combinations: which decisions go together.
//!
//! A [`ParallelLayout`] fixes the decisions that the cost of a layer depends on. The remaining
//! decisions, its [`super::pipeline_choices`], are independent of one another, so combinations are
//! counted without being visited.

use crate::request::restrictions::{Numbers, Restrictions};
use crate::request::rules::{Rule, Waived};
use models::cluster::ClusterSpec;
use models::decisions::{
    AuxScope, CpStyle, Decision, Decisions, Dtype, MoeOverlap, RankOrder, RecomputePolicy, Vocab,
};
use models::model::ModelSpec;
use models::program::{unsupported_decisions, unsupported_model};
use models::schedule::ScheduleName;
use std::collections::HashSet;

/// What defines the combinations.
#[derive(Clone, Copy, Debug)]
pub struct Space<'a> {
    /// The model.
    pub model: &'a ModelSpec,
    /// The cluster.
    pub cluster: &'a ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// The user's restrictions.
    pub restrictions: &'a Restrictions,
    /// Rules that do not hold: none, unless it is asked why a space is empty.
    pub waived: Waived,
}

/// The decisions that the cost of a layer depends on: degrees, context-parallel style, sequence
/// parallelism, split of the experts, micro-batch, number format.
#[derive(Clone, Debug, PartialEq)]
pub struct ParallelLayout {
    /// The decisions; schedule, chunks, vocabulary, loss, recompute, ZeRO, offload and rank order
    /// are placeholders.
    pub decisions: Decisions,
}

/// How experts are split over ranks and how their all-to-all is overlapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertSplit {
    /// Expert parallel degree.
    pub ep: u64,
    /// Tensor parallel degree inside an expert.
    pub etp: u64,
    /// Overlap of the all-to-all.
    pub overlap: MoeOverlap,
    /// Chunks of that overlap.
    pub degree: u64,
}

impl ExpertSplit {
    /// Every expert whole on every rank, no overlap: the only split of a dense model.
    pub const NONE: Self = Self { ep: 1, etp: 1, overlap: MoeOverlap::None, degree: 1 };

    /// Whether its all-to-alls lie under the other pass of a pair.
    pub fn is_paired(&self) -> bool {
        self.overlap == MoeOverlap::Pair
    }

    /// Decisions with this split.
    pub fn of(self, d: &Decisions) -> Decisions {
        Decisions {
            ep: self.ep,
            etp: self.etp,
            moe_overlap: self.overlap,
            moe_overlap_degree: self.degree,
            ..d.clone()
        }
    }
}

/// Divisors of `n`, ascending.
pub fn divisors(n: u64) -> Vec<u64> {
    let mut small: Vec<u64> =
        (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let large: Vec<u64> = small.iter().rev().map(|d| n / d).filter(|d| d * d > n).collect();
    small.extend(large);
    small
}

impl<'a> Space<'a> {
    /// Whether a rule's condition holds, or need not.
    pub(super) fn obeys(&self, rule: Rule, condition: bool) -> bool {
        condition || self.waived.contains(rule)
    }

    /// The numbers among `usual` that are allowed; where their rule is waived, those asked for,
    /// too.
    pub(super) fn numbers(&self, rule: Rule, usual: Vec<u64>, allowed: &Numbers) -> Vec<u64> {
        let mut all = usual;
        if self.waived.contains(rule) {
            all.extend(allowed.given());
            all.sort_unstable();
            all.dedup();
        }
        all.retain(|&number| allowed.allows(number));
        all
    }

    /// All parallel layouts.
    pub fn layouts(&self) -> Vec<ParallelLayout> {
        self.contexts().iter().flat_map(|context| self.split_experts(context)).collect()
    }

    /// A context's layouts, one for each way to split experts.
    fn split_experts(&self, context: &ParallelLayout) -> Vec<ParallelLayout> {
        let d = &context.decisions;
        let splits = self.expert_splits(d).into_iter();
        splits.map(|split| ParallelLayout { decisions: split.of(d) }).collect()
    }

    /// Parallel layouts before experts are split ([`Self::expert_splits`]).
    pub fn contexts(&self) -> Vec<ParallelLayout> {
        self.open_degrees().iter().flat_map(|degrees| self.contexts_of(degrees)).collect()
    }

    /// The degrees of all contexts.
    pub fn open_degrees(&self) -> Vec<Decisions> {
        if self.has_no_trainer() { vec![] } else { self.degrees() }
    }

    /// Contexts with given degrees.
    pub fn contexts_of(&self, degrees: &Decisions) -> Vec<ParallelLayout> {
        let mut contexts = vec![];
        for template in self.context_styles(degrees) {
            let all = self.micro_batches(&template).into_iter();
            let of = |(micro_batch, micro_batches)| ParallelLayout {
                decisions: Decisions { micro_batch, micro_batches, ..template.clone() },
            };
            contexts.extend(all.map(of));
        }
        contexts
    }

    /// Whether the trainer was asked for and cannot run the model at all.
    fn has_no_trainer(&self) -> bool {
        let runs = !self.restrictions.runnable || unsupported_model(self.model).is_empty();
        !self.obeys(Rule::Trainer, runs)
    }

    /// One layout for every way to split experts. Contexts that offer the same splits count once,
    /// so every value of the decisions about experts is among the layouts.
    pub fn expert_layouts(&self) -> Vec<ParallelLayout> {
        let mut seen = HashSet::new();
        let mut contexts = self.contexts();
        contexts.retain(|context| {
            let d = &context.decisions;
            seen.insert((d.tp, d.cp, d.dp, d.sequence_parallel))
        });
        contexts.iter().flat_map(|context| self.split_experts(context)).collect()
    }

    /// Whether our trainer can run this, or does not have to.
    pub fn runs(&self, d: &Decisions) -> bool {
        !self.restrictions.runnable
            || self.waived.contains(Rule::Trainer)
            || unsupported_decisions(self.model, d).is_empty()
    }

    /// Number formats to try: the user's, else the cluster's usual one.
    pub fn dtypes(&self) -> Vec<Dtype> {
        let restriction = &self.restrictions.dtype;
        if restriction.is_restricted() {
            return restriction.among(&Dtype::ALL);
        }
        vec![default_dtype(self.cluster)]
    }

    /// Tensor-, pipeline-, context- and data-parallel degrees whose product is the number of GPUs.
    fn degrees(&self) -> Vec<Decisions> {
        let r = self.restrictions;
        let mut found = vec![];
        for tp in
            divisors(self.gpus).into_iter().filter(|&tp| r.tp.allows(tp) && self.tp_divides(tp))
        {
            for pp in divisors(self.gpus / tp).into_iter().filter(|&pp| self.pp_possible(pp)) {
                for cp in divisors(self.gpus / tp / pp).into_iter().filter(|&cp| r.cp.allows(cp)) {
                    let dp = self.gpus / tp / pp / cp;
                    if r.dp.allows(dp) && self.obeys(Rule::Batch, self.divides("dp", dp)) {
                        found.extend(
                            self.dtypes()
                                .into_iter()
                                .map(|dtype| self.template(tp, pp, cp, dp, dtype)),
                        );
                    }
                }
            }
        }
        found
    }

    /// Whether a degree divides the sizes of the model that its decision must divide.
    fn divides(&self, name: &str, degree: u64) -> bool {
        Decision::named(name).undivided(self.model, degree).is_none()
    }

    fn tp_divides(&self, tp: u64) -> bool {
        self.obeys(Rule::Width, self.divides("tp", tp))
    }

    fn pp_possible(&self, pp: u64) -> bool {
        self.restrictions.pp.allows(pp) && self.obeys(Rule::Layers, pp <= self.model.layers as u64)
    }

    fn template(&self, tp: u64, pp: u64, cp: u64, dp: u64, dtype: Dtype) -> Decisions {
        let own = self.model.moe.as_ref().and_then(|moe| moe.capacity_factor);
        let unsearched = self.restrictions.unsearched();
        let capacity = self.restrictions.capacity_factor.or(own);
        Decisions {
            tp,
            pp,
            vpp: 1,
            cp,
            cp_style: CpStyle::Ring,
            cp_ulysses: 1,
            dp,
            dp_shard: 1,
            ep: 1,
            etp: 1,
            zero_stage: 0,
            sequence_parallel: false,
            fused_loss: false,
            micro_batch: 1,
            micro_batches: 1,
            schedule: ScheduleName::OneFOneB,
            recompute: RecomputePolicy::PerLayer,
            recompute_group: unsearched.recompute_group,
            vocab: Vocab::Tensor,
            moe_overlap: MoeOverlap::None,
            moe_overlap_degree: 1,
            capacity_factor: capacity,
            aux_scope: self.aux_scope(),
            dtype,
            offload: unsearched.offload,
            dp_reduction: unsearched.dp_reduction,
            dp_bucket_mib: unsearched.dp_bucket_mib,
            rank_order: RankOrder::DpInner,
            post_validation: self.restrictions.wants_post_validation(),
            pass_times: None,
        }
    }

    fn aux_scope(&self) -> AuxScope {
        self.restrictions.aux_scope.pinned().unwrap_or_else(|| AuxScope::usual(self.model))
    }

    /// Contexts with given degrees, whose micro-batch size is open: context-parallel styles,
    /// sequence parallelism on and off.
    pub fn context_styles(&self, d: &Decisions) -> Vec<Decisions> {
        let mut found = vec![];
        for (cp_style, cp_ulysses) in self.styles(d) {
            for sequence_parallel in self.sequence_parallel(d) {
                found.push(Decisions { cp_style, cp_ulysses, sequence_parallel, ..d.clone() });
            }
        }
        found
    }

    fn styles(&self, d: &Decisions) -> Vec<(CpStyle, u64)> {
        let r = self.restrictions;
        if d.cp == 1 {
            // The style has no effect: count one combination, of a style that is allowed.
            let style = CpStyle::ALL.iter().copied().find(|&style| r.cp_style.allows(style));
            let style = style.filter(|_| self.obeys(Rule::Ulysses, r.cp_ulysses.allows(1)));
            return style.map(|style| (style, 1)).into_iter().collect();
        }
        let of_style = |style: CpStyle| -> Vec<(CpStyle, u64)> {
            let ulysses = match style {
                _ if self.waived.contains(Rule::Ulysses) => {
                    self.numbers(Rule::Ulysses, divisors(d.cp), &r.cp_ulysses)
                }
                CpStyle::Ulysses => vec![d.cp],
                CpStyle::Hybrid => {
                    divisors(d.cp).into_iter().filter(|&u| u > 1 && u < d.cp).collect()
                }
                _ => vec![1],
            };
            ulysses.into_iter().map(|u| (style, u)).collect()
        };
        r.cp_style
            .among(CpStyle::ALL)
            .into_iter()
            .flat_map(of_style)
            .filter(|&(style, ulysses)| self.style_divides(d, style, ulysses))
            .collect()
    }

    fn style_divides(&self, d: &Decisions, style: CpStyle, ulysses: u64) -> bool {
        let s = self.model.seq_len;
        let pieces = match style {
            CpStyle::Ring | CpStyle::Ulysses => d.cp,
            CpStyle::Zigzag | CpStyle::AllGather => 2 * d.cp,
            CpStyle::Hybrid => 2 * d.cp / ulysses * ulysses,
        };
        let restricted = &self.restrictions.cp_ulysses;
        let heads = self.model.attention.heads;
        self.obeys(Rule::Pieces, s.is_multiple_of(pieces))
            && self.obeys(Rule::UlyssesHeads, heads.is_multiple_of(d.tp * ulysses))
            && (!restricted.is_restricted() || restricted.allows(ulysses))
    }

    fn sequence_parallel(&self, d: &Decisions) -> Vec<bool> {
        let available = d.tp > 1
            && self.cluster.software.sequence_parallel
            && (self.model.seq_len / d.cp).is_multiple_of(d.tp);
        let available = self.obeys(Rule::SequenceParallel, available);
        let all: &[bool] = if available { &[true, false] } else { &[false] };
        self.restrictions.sequence_parallel.among(all)
    }

    /// Expert-parallel degrees and overlaps open to a context. Tensor-parallel ranks that hold the
    /// same tokens would send them to experts twice, so expert parallelism with tensor parallelism
    /// requires sequence parallelism.
    pub fn expert_splits(&self, d: &Decisions) -> Vec<ExpertSplit> {
        let r = self.restrictions;
        let Some(moe) = &self.model.moe else {
            let dense = r.ep.allows(1)
                && r.etp.allows(1)
                && r.moe_overlap.allows(MoeOverlap::None)
                && r.moe_overlap_degree.allows(1);
            let dense = self.obeys(Rule::Dense, dense);
            return if dense { vec![ExpertSplit::NONE] } else { vec![] };
        };
        let world = d.tp * d.cp * d.dp;
        let mut found = vec![];
        let mut etps = self.numbers(Rule::ExpertTp, divisors(d.tp), &r.etp);
        etps.retain(|&etp| self.obeys(Rule::ExpertFfn, self.divides("etp", etp)));
        for etp in etps {
            for ep in self.numbers(Rule::Experts, divisors(moe.experts), &r.ep) {
                let folds = self.obeys(Rule::ExpertRanks, world.is_multiple_of(etp * ep));
                let once = ep == 1 || d.tp == 1 || d.sequence_parallel;
                if folds && self.obeys(Rule::ExpertTokens, once) {
                    let overlaps = self.overlaps(d, ep).into_iter();
                    found.extend(overlaps.map(|(overlap, degree)| ExpertSplit {
                        ep,
                        etp,
                        overlap,
                        degree,
                    }));
                }
            }
        }
        found.retain(|split| self.runs(&split.of(d)));
        found
    }

    fn overlaps(&self, d: &Decisions, ep: u64) -> Vec<(MoeOverlap, u64)> {
        let r = self.restrictions;
        let mut found = vec![];
        let spread = self.obeys(Rule::OverlapExperts, ep > 1);
        let alone = self.obeys(Rule::PairGroup, d.recompute_group == 1);
        for overlap in r.moe_overlap.among(MoeOverlap::ALL) {
            let degrees: &[u64] = match overlap {
                MoeOverlap::None => &[1],
                MoeOverlap::Pair if spread && alone => &[1],
                MoeOverlap::Pair => &[],
                _ if spread => &[2, 4, 8],
                _ => &[],
            };
            let mut degrees =
                self.numbers(Rule::OverlapDegree, degrees.to_vec(), &r.moe_overlap_degree);
            degrees.retain(|&degree| {
                let divides = (self.model.seq_len / d.cp).is_multiple_of(degree);
                self.obeys(Rule::OverlapPieces, divides)
            });
            found.extend(degrees.into_iter().map(|degree| (overlap, degree)));
        }
        found
    }

    /// Micro-batch sizes and numbers of micro-batches that contexts like `d` may have.
    pub fn micro_batches(&self, d: &Decisions) -> Vec<(u64, u64)> {
        // Where rules are waived there may be less than one for each.
        let sequences = (self.model.global_batch / d.dp).max(1);
        let allowed = &self.restrictions.micro_batch;
        let sizes = self.numbers(Rule::MicroBatch, divisors(sequences), allowed).into_iter();
        let mut all: Vec<_> = sizes.map(|size| (size, (sequences / size).max(1))).collect();
        all.retain(|&(micro_batch, micro_batches)| {
            !self.restrictions.runnable
                || self.runs(&Decisions { micro_batch, micro_batches, ..d.clone() })
        });
        all
    }
}

/// The number format a cluster usually trains in: bf16, else fp16, else f32.
pub fn default_dtype(cluster: &ClusterSpec) -> Dtype {
    let has = |dtype: &Dtype| cluster.device.peak_flops.contains_key(dtype);
    [Dtype::Bf16, Dtype::Fp16, Dtype::F32].into_iter().find(has).unwrap_or(Dtype::F32)
}
