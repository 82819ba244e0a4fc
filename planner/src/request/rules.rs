//! The rules between decisions, by name: where a request leaves no combination, those without which
//! there would be one are found by waiving them, and say what they ask for.

use super::Request;
use super::restrictions::Restrictions;
use super::space::{ParallelLayout, Space};
use models::decisions::{CpStyle, Decisions, MoeOverlap};
use models::program::{unsupported_decisions, unsupported_model};
use models::schedule::ScheduleName;

/// Combinations that are looked at to say what a rule asks for.
const MOST_LOOKED_AT: usize = 4096;
/// Causes of one rule that a message names.
const MOST_NAMED: usize = 3;

macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// A rule between decisions, or between them and the model.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Rule { $($(#[$doc])* $name,)+ }

        impl Rule {
            /// Every rule, in the order in which they are blamed.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];
        }
    };
}

rules! {
    /// Decisions about experts need experts.
    Dense,
    /// Our trainer can run it.
    Trainer,
    /// `tp` divides widths of the model.
    Width,
    /// Each pipeline rank has a layer.
    Layers,
    /// `dp` divides the batch.
    Batch,
    /// A micro-batch divides a replica's batch.
    MicroBatch,
    /// Sequence parallelism needs tensor-parallel ranks with equal pieces, and software.
    SequenceParallel,
    /// A style of context parallelism has its Ulysses degree.
    Ulysses,
    /// Context-parallel ranks have equal pieces of a sequence.
    Pieces,
    /// Ulysses splits heads evenly.
    UlyssesHeads,
    /// `etp` divides `tp`.
    ExpertTp,
    /// `etp` divides the experts' width.
    ExpertFfn,
    /// `ep` divides the experts.
    Experts,
    /// Experts are split over the ranks of a pipeline rank.
    ExpertRanks,
    /// Tensor-parallel ranks do not send the same tokens to experts.
    ExpertTokens,
    /// Overlap needs an all-to-all.
    OverlapExperts,
    /// An overlap has its numbers of chunks.
    OverlapDegree,
    /// Chunks of an overlap divide a rank's piece of a sequence.
    OverlapPieces,
    /// Pairs go with each layer's own input kept.
    PairGroup,
    /// Pairs need a schedule that has them.
    Pairs,
    /// The schedule of pairs needs an overlap in pairs.
    Overlapped,
    /// A loss over the whole batch needs a schedule that runs forwards first.
    AuxScope,
    /// Post-validation needs split backward passes.
    PostValidation,
    /// Offloading needs memory of the host.
    HostMemory,
    /// Activations in host memory need whole backward passes.
    HostWhole,
    /// Activations in host memory go with the same recomputation in all layers.
    HostAlike,
    /// Groups of layers recompute fully.
    GroupFull,
    /// A vocabulary over the pipeline needs the loss as it is.
    VocabLoss,
    /// `first_last` needs equal chunks.
    VocabEqual,
    /// Vocabulary passes need a schedule with a place for them.
    VocabSchedule,
    /// ZeRO needs replicas to share among.
    Shards,
    /// The schedule exists for these counts.
    Counts,
}

/// A set of rules that need not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waived(u64);

impl Waived {
    /// Whether it has a rule.
    pub fn contains(self, rule: Rule) -> bool {
        self.0 >> rule as u32 & 1 == 1
    }

    fn of(rules: &[Rule]) -> Self {
        Self(rules.iter().fold(0, |set, rule| set | 1 << *rule as u32))
    }
}

/// What excludes every combination: what is asked for by a smallest set of rules without which one
/// would be left. `None` where none would be without any rule.
pub fn causes(request: &Request, restrictions: &Restrictions) -> Option<String> {
    let Request { model, cluster, gpus, .. } = request;
    let without = |rules: &[Rule]| {
        let waived = Waived::of(rules);
        Space { model, cluster, gpus: *gpus, restrictions, waived }
    };
    let mut blamed = Rule::ALL.to_vec();
    if without(&blamed).is_empty() {
        return None;
    }
    // A space that is not empty is told quickly, an empty one is looked through: so all rules but
    // the guilty ones are put back.
    for rule in Rule::ALL.iter().rev() {
        let others: Vec<Rule> = blamed.iter().copied().filter(|other| other != rule).collect();
        if !without(&others).is_empty() {
            blamed = others;
        }
    }
    let space = without(&blamed);
    let all: Vec<String> = blamed.iter().map(|rule| asked_for(*rule, &space)).collect();
    Some(all.join("; and "))
}

/// What a rule asks for, as combinations break it that are possible without it.
fn asked_for(rule: Rule, space: &Space<'_>) -> String {
    let mut found: Vec<(u8, String)> = vec![];
    for d in combinations(space).take(MOST_LOOKED_AT) {
        let Some((cause, words)) = broken(rule, space, &d) else { continue };
        if found.iter().all(|(known, _)| *known != cause) {
            found.push((cause, words));
        }
    }
    let words: Vec<String> = found.into_iter().take(MOST_NAMED).map(|(_, words)| words).collect();
    words.join("; or ")
}

/// Combinations of a space, without their offloading and rank order.
fn combinations<'a>(space: &'a Space<'a>) -> impl Iterator<Item = Decisions> + 'a {
    let contexts = space.open_degrees().into_iter().flat_map(|d| space.contexts_of(&d));
    let layouts = contexts.flat_map(|context| {
        let splits = space.expert_splits(&context.decisions).into_iter();
        splits.map(move |split| split.of(&context.decisions))
    });
    layouts.flat_map(|decisions| {
        let choices = space.choices(&ParallelLayout { decisions: decisions.clone() });
        let recompute = choices.recompute.first().copied();
        let offload = choices.offload.first().copied();
        let with = |(zero_stage, dp_shard): &(u8, u64)| {
            let of = |d| {
                Some(Decisions {
                    recompute: recompute?,
                    offload: offload?,
                    zero_stage: *zero_stage,
                    dp_shard: *dp_shard,
                    ..d
                })
            };
            choices.pipelines(&decisions).filter_map(of).collect::<Vec<_>>()
        };
        choices.shards.iter().flat_map(with).collect::<Vec<_>>()
    })
}

/// How a combination breaks a rule: a number for each cause, and what it asks for.
fn broken(rule: Rule, space: &Space<'_>, d: &Decisions) -> Option<(u8, String)> {
    let model = space.model;
    let words = match rule {
        Rule::Dense => format!(
            "{} has no experts: ep, etp and moe_overlap_degree are 1, moe_overlap is none",
            model.name
        ),
        Rule::Trainer => return trainer(space, d),
        Rule::Width => {
            let (size, width) = models::decisions::Decision::named("tp").undivided(model, d.tp)?;
            format!("tp must divide {} ({width}), and {} does not", size.in_words(), d.tp)
        }
        Rule::Layers => {
            format!("pp is at most the number of layers ({}), and here {}", model.layers, d.pp)
        }
        Rule::Batch => {
            format!("dp must divide global_batch ({}), and {} does not", model.global_batch, d.dp)
        }
        Rule::MicroBatch => {
            let own = model.global_batch / d.dp;
            format!(
                "micro_batch must divide a replica's batch ({own} with dp {}), and {} does not",
                d.dp, d.micro_batch
            )
        }
        Rule::Ulysses => return Some(ulysses(d)),
        Rule::Pieces => format!(
            "{} with cp {} cannot cut a sequence of {} tokens into equal pieces",
            d.cp_style, d.cp, model.seq_len
        ),
        Rule::UlyssesHeads => format!(
            "tp · cp_ulysses ({}) must divide heads ({})",
            d.tp * d.cp_ulysses,
            model.attention.heads
        ),
        Rule::SequenceParallel => return Some(sequence_parallel(space, d)),
        Rule::ExpertTp => format!("etp must divide tp ({}), and {} does not", d.tp, d.etp),
        Rule::ExpertFfn => {
            let (size, width) =
                models::decisions::Decision::named("etp").undivided(model, d.etp)?;
            format!("etp must divide {} ({width}), and {} does not", size.in_words(), d.etp)
        }
        Rule::Experts => {
            let experts = model.moe.as_ref()?.experts;
            format!("ep must divide the number of experts ({experts}), and {} does not", d.ep)
        }
        Rule::ExpertRanks => {
            format!("etp · ep ({}) must divide tp · cp · dp ({})", d.etp * d.ep, d.tp * d.cp * d.dp)
        }
        Rule::ExpertTokens => format!(
            "ep above 1 with tp above 1 needs sequence_parallel, or {} tensor-parallel ranks send \
             the same tokens",
            d.tp
        ),
        Rule::OverlapExperts => {
            format!("moe_overlap {} hides an all-to-all: it needs ep above 1", d.moe_overlap)
        }
        Rule::OverlapDegree => return Some(overlap_degree(d)),
        Rule::OverlapPieces => format!(
            "moe_overlap_degree must divide a rank's piece of a sequence ({} tokens), and {} does \
             not",
            model.seq_len / d.cp,
            d.moe_overlap_degree
        ),
        Rule::PairGroup => {
            format!("moe_overlap pair goes with recompute_group 1, not {}", d.recompute_group)
        }
        Rule::Pairs => format!(
            "moe_overlap pair needs a schedule with pairs: {}",
            those(ScheduleName::has_pairs)
        ),
        Rule::Overlapped => "overlapped_1f1b is for moe_overlap pair".to_owned(),
        Rule::AuxScope => format!(
            "aux_scope global_batch needs all forward passes before the first backward pass: \
             schedule {}",
            those(ScheduleName::runs_forwards_first)
        ),
        Rule::PostValidation => format!(
            "post_validation needs a schedule with split backward passes: {}",
            those(ScheduleName::splits_backward)
        ),
        Rule::HostMemory => format!(
            "offload {} needs host memory, and {} has none beside its devices'",
            d.offload, space.cluster.name
        ),
        Rule::HostWhole => format!(
            "offload activations needs a schedule with whole backward passes: {}",
            those(|schedule| !schedule.splits_backward())
        ),
        Rule::HostAlike => "offload activations goes with recompute none, selective or full, and \
                            recompute_group 1"
            .to_owned(),
        Rule::GroupFull => {
            format!("recompute_group {} needs recompute full", d.recompute_group)
        }
        Rule::VocabLoss => {
            let by = if d.fused_loss { "fused_loss" } else { "post_validation" };
            format!("vocab {} is split over the pipeline, and goes with {by} false", d.vocab)
        }
        Rule::VocabEqual => format!(
            "vocab first_last needs equal chunks: {} layers over {} stages",
            model.layers,
            d.stages()
        ),
        Rule::VocabSchedule => return Some(vocab_schedule(d)),
        Rule::Shards => return Some(shards(d)),
        Rule::Counts => return counts(space, d),
    };
    Some((0, words))
}

/// Names of the schedules that have a property.
fn those(fit: impl Fn(ScheduleName) -> bool) -> String {
    let names = ScheduleName::ALL.into_iter().filter(|schedule| fit(*schedule));
    names.map(ScheduleName::name).collect::<Vec<_>>().join(", ")
}

fn trainer(space: &Space<'_>, d: &Decisions) -> Option<(u8, String)> {
    let reasons = [unsupported_model(space.model), unsupported_decisions(space.model, d)].concat();
    let first = reasons.first()?;
    let cluster = &space.cluster.name;
    let why = match space.cluster.any_gpu_count {
        true => format!("{cluster} plans only what the trainer can run"),
        false => "--runnable plans only what the trainer can run".to_owned(),
    };
    // Reasons are told apart by the decision they are about.
    let cause = first.decision.bytes().fold(0u8, |sum, byte| sum.wrapping_mul(31) ^ byte);
    Some((cause, format!("{why}, and {first}")))
}

fn ulysses(d: &Decisions) -> (u8, String) {
    let cp = d.cp;
    match d.cp_style {
        _ if cp == 1 => (0, "cp_ulysses is 1 where cp is 1".to_owned()),
        CpStyle::Ulysses => (1, format!("cp_ulysses of cp_style ulysses is cp ({cp})")),
        CpStyle::Hybrid => {
            let words = "cp_ulysses of cp_style hybrid is a divisor of cp other than 1 and cp";
            (2, format!("{words} ({cp})"))
        }
        style => (3, format!("cp_ulysses of cp_style {style} is 1")),
    }
}

fn sequence_parallel(space: &Space<'_>, d: &Decisions) -> (u8, String) {
    let piece = space.model.seq_len / d.cp;
    if !space.cluster.software.sequence_parallel {
        let name = &space.cluster.name;
        return (0, format!("the software of {name} has no sequence_parallel"));
    }
    match d.tp {
        1 => (1, "sequence_parallel needs tp above 1".to_owned()),
        tp => {
            (2, format!("sequence_parallel needs a tp that divides {piece} tokens; {tp} does not"))
        }
    }
}

fn overlap_degree(d: &Decisions) -> (u8, String) {
    match d.moe_overlap {
        overlap @ (MoeOverlap::None | MoeOverlap::Pair) => {
            (0, format!("moe_overlap_degree of moe_overlap {overlap} is 1"))
        }
        overlap => (1, format!("moe_overlap_degree of moe_overlap {overlap} is 2, 4 or 8")),
    }
}

fn vocab_schedule(d: &Decisions) -> (u8, String) {
    let hosts = |name: ScheduleName| match d.vocab {
        models::decisions::Vocab::Interlaced => name == ScheduleName::OneFOneB,
        _ => name == ScheduleName::OneFOneB || !name.is_whole() && name.takes_vocab(),
    };
    if hosts(d.schedule) && d.pp == 1 {
        return (0, format!("vocab {} is split over the pipeline: it needs pp above 1", d.vocab));
    }
    let hosts = those(hosts);
    (1, format!("vocab {} needs a schedule with a place for its passes: {hosts}", d.vocab))
}

fn shards(d: &Decisions) -> (u8, String) {
    let ranks = d.dp * d.cp;
    match d.zero_stage {
        0 => (0, "dp_shard is 1 with zero_stage 0".to_owned()),
        stage if ranks == 1 => {
            (1, format!("zero_stage {stage} shares state among dp · cp ranks, and here that is 1"))
        }
        stage => {
            (2, format!("dp_shard of zero_stage {stage} is a divisor of dp · cp ({ranks}) above 1"))
        }
    }
}

fn counts(space: &Space<'_>, d: &Decisions) -> Option<(u8, String)> {
    let (schedule, layers) = (d.schedule, space.model.layers as u64);
    let stages = d.stages() as u64;
    if schedule == ScheduleName::Naive && d.micro_batches > 1 {
        let words = format!(
            "naive runs one micro-batch: micro_batch is a replica's batch ({})",
            space.model.global_batch / d.dp
        );
        return Some((0, words));
    }
    if d.pp == 1 && !matches!(schedule, ScheduleName::Overlapped1F1B) && d.vpp > 1 {
        return Some((1, format!("{schedule} with {} chunks needs pp above 1", d.vpp)));
    }
    if schedule == ScheduleName::LoopedBfs && d.vpp == 1 {
        let words = format!("{schedule} needs at least 2 chunks per pipeline rank: 1 is gpipe");
        return Some((5, words));
    }
    let counts = (d.pp as usize, d.micro_batches as usize, d.vpp as usize);
    if let Err(error) = schedule.check(counts.0, counts.1, counts.2) {
        return Some((2, error.to_string()));
    }
    if stages > layers {
        let words = format!(
            "{schedule} with pp {} and {} chunks has {stages} stages, and the model has {layers} \
             layers",
            d.pp, d.vpp
        );
        return Some((3, words));
    }
    let words = match d.pp {
        1 => format!("{schedule} needs pp above 1"),
        _ => format!("{schedule} needs another number of chunks than {}", d.vpp),
    };
    Some((4, words))
}
