//! The decisions that a parallel layout leaves open: schedule, chunks, vocabulary placement,
//! recomputation and parameter state.

use super::rules::Rule;
use super::space::{ParallelLayout, Space, divisors};
use models::decisions::{Decisions, MoeOverlap, Offload, RankOrder, RecomputePolicy, Vocab};
use models::schedule::ScheduleName;
use rustc_hash::FxHashMap as HashMap;

/// Where the vocabulary lives, and whether the loss is fused with the output layer.
pub type VocabChoice = (Vocab, bool);

/// Values of the decisions that a parallel layout leaves open.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineChoices {
    /// Schedules with their chunks, and the vocabulary placements each allows.
    pub schedules: Vec<(ScheduleName, u64, Vec<VocabChoice>)>,
    /// Recomputation.
    pub recompute: Vec<RecomputePolicy>,
    /// ZeRO stages with shard group sizes.
    pub shards: Vec<(u8, u64)>,
    /// Offloading.
    pub offload: Vec<Offload>,
    /// Rank orders.
    pub rank_order: Vec<RankOrder>,
}

impl PipelineChoices {
    /// Number of combinations.
    pub fn count(&self) -> u64 {
        let pipelines: usize = self.schedules.iter().map(|(_, _, vocabs)| vocabs.len()).sum();
        (pipelines * self.per_pipeline()) as u64
    }

    /// `d` with each combination of schedule, chunks, vocabulary placement and loss.
    pub fn pipelines<'a>(&'a self, d: &'a Decisions) -> impl Iterator<Item = Decisions> + 'a {
        self.schedules.iter().flat_map(move |(schedule, vpp, vocabs)| {
            let of = |&(vocab, fused_loss): &VocabChoice| {
                let (schedule, vpp) = (*schedule, *vpp);
                Decisions { schedule, vpp, vocab, fused_loss, ..d.clone() }
            };
            vocabs.iter().map(of)
        })
    }

    /// Combinations for one schedule, chunk count, vocabulary placement and loss.
    pub fn per_pipeline(&self) -> usize {
        self.recompute.len() * self.shards.len() * self.offload.len() * self.rank_order.len()
    }
}

/// What [`PipelineChoices`] depend on: layouts with equal keys leave the same choices open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PipelineChoicesKey {
    pp: u64,
    replicas: u64,
    one_replica: bool,
    one_micro_batch: bool,
    /// Whether the pipeline divides the micro-batches.
    divides: bool,
    /// Whether there are at least twice as many micro-batches as pipeline ranks.
    fills: bool,
    /// Whether the micro-batches divide evenly between two directions.
    halves: bool,
    /// Whether the schedule must have pairs.
    pairs: bool,
}

impl PipelineChoicesKey {
    /// The key of decisions.
    pub fn new(d: &Decisions) -> Self {
        Self {
            pp: d.pp,
            replicas: d.cp * d.dp,
            one_replica: d.dp == 1,
            one_micro_batch: d.micro_batches == 1,
            divides: d.micro_batches.is_multiple_of(d.pp),
            fills: d.micro_batches >= 2 * d.pp,
            halves: d.micro_batches.is_multiple_of(2),
            pairs: d.moe_overlap == MoeOverlap::Pair,
        }
    }
}

/// Counts the choices of layouts, remembering each key's count.
#[derive(Debug)]
pub struct Counter<'a> {
    space: Space<'a>,
    known: HashMap<PipelineChoicesKey, u64>,
}

impl Counter<'_> {
    /// Combinations of a layout whose experts are split.
    pub fn count(&mut self, d: &Decisions) -> u64 {
        let space = self.space;
        let count = || space.choices(&ParallelLayout { decisions: d.clone() }).count();
        *self.known.entry(PipelineChoicesKey::new(d)).or_insert_with(count)
    }
}

impl<'a> Space<'a> {
    /// A counter of the choices that layouts leave open.
    pub fn counter(&self) -> Counter<'a> {
        Counter { space: *self, known: HashMap::default() }
    }

    /// Whether there is no combination.
    pub fn is_empty(&self) -> bool {
        let mut counter = self.counter();
        let mut open = |ParallelLayout { decisions: d }: &ParallelLayout| {
            self.expert_splits(d).iter().any(|split| counter.count(&split.of(d)) > 0)
        };
        // Degree by degree: mostly the first ones are open.
        let degrees = self.open_degrees();
        !degrees.iter().any(|degrees| self.contexts_of(degrees).iter().any(&mut open))
    }

    /// Whether there is a single combination.
    pub fn is_single(&self) -> bool {
        self.count() == 1
    }

    /// Number of combinations in the space.
    pub fn count(&self) -> u64 {
        let mut counter = self.counter();
        let mut of = |ParallelLayout { decisions: d }: &ParallelLayout| {
            let splits = self.expert_splits(d);
            // Layouts with pairs leave fewer choices open; all others the same.
            let alike = splits.chunk_by(|a, b| a.is_paired() == b.is_paired());
            alike.map(|alike| counter.count(&alike[0].of(d)) * alike.len() as u64).sum::<u64>()
        };
        self.contexts().iter().map(&mut of).sum()
    }

    /// Whether these decisions are a combination of the space.
    pub fn contains(&self, d: &Decisions) -> bool {
        let of_degrees = |d: &Decisions| (d.tp, d.pp, d.cp, d.dp, d.dtype);
        let of_context = |d: &Decisions| {
            let sizes = (d.micro_batch, d.micro_batches, d.cp_style, d.cp_ulysses);
            let unsearched = (d.recompute_group, d.dp_reduction, d.dp_bucket_mib, d.aux_scope);
            (sizes, unsearched, d.sequence_parallel, d.post_validation)
        };
        let of_experts = |d: &Decisions| (d.ep, d.etp, d.moe_overlap, d.moe_overlap_degree);
        let mut degrees = self.open_degrees();
        degrees.retain(|other| of_degrees(other) == of_degrees(d));
        let contexts = degrees.iter().flat_map(|degrees| self.contexts_of(degrees));
        let contexts = contexts.filter(|context| of_context(&context.decisions) == of_context(d));
        let splits = contexts.flat_map(|context| {
            let splits = self.expert_splits(&context.decisions).into_iter();
            splits.map(|split| split.of(&context.decisions)).collect::<Vec<_>>()
        });
        let mut layouts = splits.filter(|layout| of_experts(layout) == of_experts(d));
        layouts.any(|decisions| {
            let choices = self.choices(&ParallelLayout { decisions });
            let has_schedule = |(schedule, vpp, all): &(ScheduleName, u64, Vec<VocabChoice>)| {
                let same = (*schedule, *vpp) == (d.schedule, d.vpp);
                same && all.contains(&(d.vocab, d.fused_loss))
            };
            // A plan with uniform recomputation may have been found as a split of layers.
            let has_recompute = choices.recompute.contains(&d.recompute)
                || choices.recompute.contains(&RecomputePolicy::PerLayer);
            has_recompute
                && choices.schedules.iter().any(has_schedule)
                && choices.shards.contains(&(d.zero_stage, d.dp_shard))
                && choices.offload.contains(&d.offload)
                && choices.rank_order.contains(&d.rank_order)
        })
    }

    /// The choices that a parallel layout leaves open.
    pub fn choices(&self, parallel: &ParallelLayout) -> PipelineChoices {
        let d = &parallel.decisions;
        let r = self.restrictions;
        let orders: &[RankOrder] =
            if d.pp > 1 && d.dp > 1 { RankOrder::ALL } else { &[RankOrder::DpInner] };
        let orders = if orders.len() == 1 && !r.rank_order.allows(RankOrder::DpInner) {
            vec![RankOrder::PpInner]
        } else {
            r.rank_order.among(orders)
        };
        let mut offload = match d.offload {
            Offload::Activations => vec![Offload::Activations],
            _ => r.offload.among(&Offload::SEARCHED),
        };
        let has_host = self.cluster.host.memory_bytes > 0.0;
        offload.retain(|&to| self.obeys(Rule::HostMemory, has_host || to == Offload::None));
        offload.retain(|&offload| self.runs(&Decisions { offload, ..d.clone() }));
        let mut recompute = r.recompute.among(RecomputePolicy::ALL);
        recompute.retain(|&policy| {
            let whole = d.recompute_group == 1 || policy == RecomputePolicy::Full;
            self.obeys(Rule::GroupFull, whole)
        });
        // On the device nothing is kept, so a mixture saves nothing.
        let alike = d.offload == Offload::Activations;
        recompute.retain(|&policy| {
            let all = !alike || policy != RecomputePolicy::PerLayer && d.recompute_group == 1;
            self.obeys(Rule::HostAlike, all)
        });
        PipelineChoices {
            schedules: self.schedules(d),
            recompute,
            shards: self.shards(d),
            offload,
            rank_order: orders,
        }
    }

    fn schedules(&self, d: &Decisions) -> Vec<(ScheduleName, u64, Vec<VocabChoice>)> {
        let r = self.restrictions;
        let mut found = vec![];
        let mut known = r.schedule.among(&ScheduleName::ALL);
        // Post-validation has nothing to overlap with where backward is not split.
        let mut keep = |rule, holds: &dyn Fn(ScheduleName) -> bool| {
            known.retain(|&schedule| self.obeys(rule, holds(schedule)));
        };
        keep(Rule::PostValidation, &|name| !d.post_validation || name.splits_backward());
        let waits = d.aux_scope.needs_all_forwards(self.model);
        keep(Rule::AuxScope, &|name| !waits || name.runs_forwards_first());
        // Gradients of weights that wait would read what has come back from the host.
        let on_host = d.offload == Offload::Activations;
        keep(Rule::HostWhole, &|name| !on_host || !name.splits_backward());
        let paired = d.moe_overlap == MoeOverlap::Pair;
        keep(Rule::Pairs, &|name| !paired || name.has_pairs());
        // Without pairs its passes would wait for one another for nothing.
        keep(Rule::Overlapped, &|name| paired || name != ScheduleName::Overlapped1F1B);
        for schedule in known {
            let mut chunks = self.chunks(schedule, d);
            if self.waived.contains(Rule::Counts) {
                chunks.push(schedule.chunk_rule().nearest(1) as u64);
            }
            for vpp in self.numbers(Rule::Counts, chunks, &r.vpp) {
                let vocabs = self.vocabs(schedule, vpp, d);
                if !vocabs.is_empty() {
                    found.push((schedule, vpp, vocabs));
                }
            }
        }
        found
    }

    /// Chunk counts of a schedule. Several chunks need several pipeline ranks, and a layer each.
    fn chunks(&self, schedule: ScheduleName, d: &Decisions) -> Vec<u64> {
        let most = self.model.layers as u64 / d.pp;
        match schedule {
            ScheduleName::Naive if d.micro_batches > 1 => vec![],
            ScheduleName::Naive | ScheduleName::GPipe | ScheduleName::OneFOneB => vec![1],
            ScheduleName::Overlapped1F1B if d.pp == 1 => vec![1],
            ScheduleName::Interleaved1F1B if !d.micro_batches.is_multiple_of(d.pp) => vec![],
            ScheduleName::Interleaved1F1B | ScheduleName::LoopedBfs if d.pp > 1 => {
                (2..=most).collect()
            }
            other => {
                let (p, m) = (d.pp as usize, d.micro_batches as usize);
                let exists = |&v: &u64| other.check(p, m, v as usize).is_ok();
                // Bidirectional schedules hold each stage twice: two chunks, one stage's layers.
                let copies = |v: u64| other.layout(v as usize).copies() as u64;
                let filled = |&v: &u64| v <= most * copies(v);
                (1..=2 * most).filter(filled).filter(exists).filter(|_| p > 1).collect()
            }
        }
    }

    /// Vocabulary placements of a schedule, with the loss fused or not. `first_last`, Megatron's
    /// baseline, needs equal chunks.
    fn vocabs(&self, schedule: ScheduleName, vpp: u64, d: &Decisions) -> Vec<VocabChoice> {
        let plain = schedule == ScheduleName::OneFOneB;
        let hosts_passes = (plain || !schedule.is_whole() && schedule.takes_vocab()) && d.pp > 1;
        let layout = schedule.layout(vpp as usize);
        let stages = layout.stages(d.pp as usize, vpp as usize);
        let equal = vpp == 1 || self.model.layers.is_multiple_of(stages);
        let possible = |(vocab, fused_loss): &VocabChoice| {
            let over = vocab.over_pipeline();
            let hosts = if *vocab == Vocab::Interlaced { plain && d.pp > 1 } else { hosts_passes };
            self.obeys(Rule::VocabLoss, !over || !(d.post_validation || *fused_loss))
                && self.obeys(Rule::VocabEqual, *vocab != Vocab::FirstLast || equal)
                && self.obeys(Rule::VocabSchedule, !over || hosts)
        };
        let losses = self.restrictions.fused_loss.among(&[false, true]);
        let all = self.restrictions.vocab.among(Vocab::ALL).into_iter();
        let all = all.flat_map(|vocab| losses.iter().map(move |&fused_loss| (vocab, fused_loss)));
        all.filter(possible).collect()
    }

    /// ZeRO stages with the sizes of their shard groups: 1 for stage 0, for the others any divisor
    /// above 1 of dp·cp (less than all of it is hybrid sharding).
    fn shards(&self, d: &Decisions) -> Vec<(u8, u64)> {
        let r = self.restrictions;
        let mut found = vec![];
        let mut groups = divisors(d.dp * d.cp);
        if !self.waived.contains(Rule::Shards) {
            groups.retain(|&size| size > 1);
        }
        for stage in (0..=3u8).filter(|&stage| r.zero_stage.allows(u64::from(stage))) {
            let sizes = if stage == 0 { vec![1] } else { groups.clone() };
            let sizes = self.numbers(Rule::Shards, sizes, &r.dp_shard).into_iter();
            found.extend(sizes.map(|size| (stage, size)));
        }
        found
    }
}
