//! What a generated trainer knows at compile time: the model, its split, and the passes of each
//! pipeline rank.
//!
//! Made from a checked plan. `codegen` lowers it to layers, which are printed or run directly.

pub use crate::decisions::Recompute;

use crate::decisions::{AuxScope, CpStyle, Decisions, DpReduction, Dtype, MoeOverlap, Offload};
use crate::mesh::{ExpertSplit, Mesh};
use crate::model::{AuxOver, ModelSpec, Moe};
use crate::placement::{RecomputeCounts, Stage, kind_name};
use crate::plan::Plan;
use crate::schedule::{PassOrder, ScheduleError, StageLayout, VocabPasses};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;
use thiserror::Error;

/// One (virtual) pipeline stage. The first also holds the embedding and the last the output layer.
/// Where the vocabulary is split over the pipeline they hold only the rest: positions and the final
/// norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageProgram {
    /// First layer, 0-based.
    pub first_layer: usize,
    /// What each of its layers keeps.
    pub recompute: Vec<Recompute>,
}

impl StageProgram {
    /// Its layers.
    pub fn layers(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.recompute.len()
    }
}

/// A whole training program. Nothing here is validated again.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The model.
    pub model: ModelSpec,
    /// Where ranks lie.
    pub mesh: Mesh,
    /// How experts lie over the ranks of a pipeline rank; `None` if there are none.
    pub experts: Option<ExpertSplit>,
    /// What hides the all-to-alls of experts.
    pub moe_overlap: MoeOverlap,
    /// Chunks in which rows pass through experts; 1 if nothing is hidden.
    pub moe_chunks: usize,
    /// Over which rows the load-balancing loss is taken.
    pub aux_scope: AuxScope,
    /// Norms and residuals split over tensor-parallel ranks.
    pub sequence_parallel: bool,
    /// Logits exist for a block of tokens at a time.
    pub fused_loss: bool,
    /// How attention works over context-parallel ranks.
    pub cp_style: CpStyle,
    /// Ulysses degree inside `mesh.cp`.
    pub cp_ulysses: usize,
    /// Sequences a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches an iteration and replica.
    pub micro_batches: usize,
    /// Which pipeline rank holds which stage.
    pub layout: StageLayout,
    /// How the vocabulary layers are split over the pipeline, if they are.
    pub vocab: Option<VocabPasses>,
    /// ZeRO stage: what replicas share.
    pub zero_stage: u8,
    /// Replicas that share one copy of the state; 1 with stage 0.
    pub dp_shard: usize,
    /// What host memory holds.
    pub offload: Offload,
    /// When replicas sum gradients.
    pub dp_reduction: DpReduction,
    /// Size of a bucket, MiB.
    pub dp_bucket_mib: u64,
    /// Pipeline ranks begin a step before the gradient norm of the previous one is known, and
    /// repeat it where that norm clips (Zero Bubble, arXiv 2401.10241, section 4).
    pub post_validation: bool,
    /// Layers that full recomputation keeps one input of; 1 unless all layers recompute fully.
    pub recompute_group: usize,
    /// Stages, in model order.
    pub stages: Vec<StageProgram>,
    /// For each pipeline rank, its passes in order.
    pub passes: Vec<PassOrder>,
    /// What the plan expects on the fullest rank, bytes.
    pub planned_memory_bytes: u64,
}

/// A decision or a property of the model that the runtime does not support yet.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{decision} cannot be {value} in training yet; valid: {valid}")]
pub struct Unsupported {
    /// The decision, by its name in plans, or the model's property.
    pub decision: String,
    /// What the plan says.
    pub value: String,
    /// What would be supported.
    pub valid: String,
}

/// Why a plan cannot be run.
#[derive(Debug, Error)]
pub enum ProgramError {
    /// What the runtime does not support yet: every reason, a line each.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Unsupported(Vec<Unsupported>),
    /// The schedule does not exist for these counts.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}

impl Program {
    /// The program of a plan that [`crate::check`] has accepted, in its own order where it has one.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of(plan: &Plan) -> Result<Self, ProgramError> {
        let program = Self::new(&plan.inputs.model, &plan.decisions, &plan.stages)?;
        Ok(match plan.own_order()? {
            Some(schedule) => Self { passes: schedule.by_rank(), ..program },
            None => program,
        })
    }

    /// The program of a plan that [`crate::check`] has accepted.
    ///
    /// # Errors
    /// Decisions and models that the runtime cannot carry out yet, by name.
    pub fn new(model: &ModelSpec, d: &Decisions, stages: &[Stage]) -> Result<Self, ProgramError> {
        let unsupported = unsupported(model, d);
        if !unsupported.is_empty() {
            return Err(ProgramError::Unsupported(unsupported));
        }
        // `naive` runs a replica's whole share of the batch as one micro-batch.
        let micro_batches = d.schedule.micro_batches_run(d.micro_batches as usize);
        let micro_batch = (d.micro_batch * d.micro_batches) as usize / micro_batches;
        let schedule = d.build_schedule()?;
        let memory = crate::placement::device_memory(stages, schedule.ranks);
        Ok(Self {
            model: model.clone(),
            mesh: Mesh::new(d),
            experts: model.moe.as_ref().map(|_| ExpertSplit { ep: d.ep, etp: d.etp }),
            moe_overlap: d.moe_overlap,
            moe_chunks: match d.moe_overlap {
                MoeOverlap::None | MoeOverlap::Pair => 1,
                MoeOverlap::Tutel | MoeOverlap::Ampipe => d.moe_overlap_degree as usize,
            },
            aux_scope: d.aux_scope,
            sequence_parallel: d.sequence_parallel && d.tp > 1,
            fused_loss: d.fused_loss,
            cp_style: d.cp_style,
            cp_ulysses: d.cp_ulysses as usize,
            micro_batch,
            micro_batches,
            layout: schedule.layout,
            vocab: schedule.vocab,
            zero_stage: d.zero_stage,
            dp_shard: d.dp_shard as usize,
            offload: d.offload,
            dp_reduction: d.dp_reduction,
            dp_bucket_mib: d.dp_bucket_mib,
            post_validation: d.post_validation,
            recompute_group: d.recompute_group as usize,
            stages: stages.iter().map(|stage| stage_program(model, stage)).collect(),
            passes: schedule.by_rank(),
            planned_memory_bytes: memory.iter().map(|rank| rank.total).max().unwrap_or(0),
        })
    }

    /// Ranks.
    pub fn world_size(&self) -> usize {
        (self.mesh.tp * self.mesh.cp * self.mesh.dp * self.mesh.pp) as usize
    }

    /// Sequences an iteration.
    pub fn global_batch(&self) -> usize {
        self.micro_batch * self.micro_batches * self.mesh.dp as usize
    }

    /// Tokens a sequence.
    pub fn seq_len(&self) -> usize {
        self.model.seq_len as usize
    }

    /// The pipeline rank of the last stage; the first stage's is 0.
    pub fn last_rank(&self) -> usize {
        self.layout.rank_of(self.mesh.pp as usize, self.stages.len().saturating_sub(1))
    }

    /// The stages of pipeline rank `rank`, in the order of its chunks.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        let ranks = self.mesh.pp as usize;
        let chunks = self.stages.len() * self.layout.copies() / ranks;
        (0..chunks).map(|chunk| self.layout.stage_of(ranks, rank, chunk)).collect()
    }
}

/// Of the layers of a kind, those that recompute most come first.
fn stage_program(model: &ModelSpec, stage: &Stage) -> StageProgram {
    let mut left: BTreeMap<&str, RecomputeCounts> =
        stage.recompute.iter().map(|(kind, counts)| (kind.as_str(), *counts)).collect();
    let layers = stage.first_layer..stage.first_layer + stage.layers;
    let mut next = |layer: usize| {
        let Some(counts) = left.get_mut(kind_name(model.layer_kind(layer))) else {
            return Recompute::None;
        };
        let take = |count: &mut usize| {
            let any = *count > 0;
            *count = count.saturating_sub(1);
            any
        };
        if take(&mut counts.full) {
            Recompute::Full
        } else if take(&mut counts.selective) {
            Recompute::Selective
        } else {
            Recompute::None
        }
    };
    let recompute = layers.map(&mut next).collect();
    StageProgram { first_layer: stage.first_layer, recompute }
}

/// Everything about a plan that the runtime does not support yet.
pub fn unsupported(model: &ModelSpec, d: &Decisions) -> Vec<Unsupported> {
    let mut refused = unsupported_model(model);
    refused.extend(unsupported_decisions(model, d));
    refused
}

/// Everything about a model that the runtime does not support yet, whatever is decided.
pub fn unsupported_model(model: &ModelSpec) -> Vec<Unsupported> {
    let mut refused = Refused::default();
    let attention = &model.attention;
    let normed_heads = attention.mla.is_some() && attention.qk_norm;
    refused.unless(!normed_heads, "model.qk_norm", "true with latent attention", "false");
    let sinks = attention.mla.is_some() && attention.sinks;
    refused.unless(!sinks, "model.sinks", "true with latent attention", "false");
    let stretched = attention.mla.is_some() && model.numerics.yarn.is_some();
    refused.unless(!stretched, "model.yarn", "given with latent attention", "none");
    let unknown = &model.numerics.unknown;
    let described = format!("described with {}", unknown.join(", "));
    refused.unless(unknown.is_empty(), "model", described, "a description without them");
    refused.0
}

/// Everything about decisions that the runtime does not support yet. The search asks for each
/// layout, with placeholders for the schedule, the vocabulary and what replicas share.
pub fn unsupported_decisions(model: &ModelSpec, d: &Decisions) -> Vec<Unsupported> {
    let mut refused = Refused::default();
    refused.unless(
        !(d.post_validation && d.vocab.over_pipeline()),
        "post_validation",
        true,
        "false with a vocabulary split over the pipeline",
    );
    let on_host = d.offload != Offload::None;
    refused.unless(
        !(d.post_validation && on_host),
        "post_validation",
        true,
        "false, or offload=none",
    );
    let known = matches!(d.dtype, Dtype::F32 | Dtype::F64 | Dtype::Bf16);
    refused.unless(known, "dtype", d.dtype, "f32, f64, bf16");
    refuse_splits(model, d, &mut refused);
    match &model.moe {
        Some(moe) => refuse_expert_splits(model, moe, d, &mut refused),
        None => refused.unless(d.ep == 1, "ep", d.ep, "1 for a dense model"),
    }
    refused.0
}

/// Splits of experts that leave ranks unequal parts, or the same tokens on several.
fn refuse_expert_splits(model: &ModelSpec, moe: &Moe, d: &Decisions, refused: &mut Refused) {
    let different = d.tp == 1 || d.sequence_parallel;
    refused.unless(different, "sequence_parallel", false, "true, or tp=1, with experts");
    let together = moe.aux_loss > 0.0 && moe.losses.over == AuxOver::AllLayers;
    let scope = !together || d.aux_scope == AuxScope::GlobalBatch;
    let valid = "global_batch for a load-balancing loss of all layers";
    refused.unless(scope, "aux_scope", d.aux_scope, valid);
    refuse_chunks(model, d, refused);
    let (experts, ffn) = (moe.experts.is_multiple_of(d.ep), moe.ffn.is_multiple_of(d.etp));
    let shared = moe.shared_ffn.is_multiple_of(d.tp);
    refused.unless(shared, "tp", d.tp, "a divisor of the shared experts' ffn width");
    refused.unless(experts, "ep", d.ep, "a divisor of the experts");
    refused.unless(ffn, "etp", d.etp, "a divisor of the experts' ffn width");
    let replicas = d.expert_dp();
    let shares = d.zero_stage == 0 || replicas.is_multiple_of(d.dp_shard.min(replicas));
    let valid = format!("a divisor of the {replicas} ranks with the same experts, or more");
    refused.unless(shares, "dp_shard", d.dp_shard, &valid);
}

/// Chunks of rows that ranks cannot cut.
fn refuse_chunks(model: &ModelSpec, d: &Decisions, refused: &mut Refused) {
    match d.moe_overlap {
        MoeOverlap::None => return,
        MoeOverlap::Pair => {
            let valid = "1 with moe_overlap pair";
            refused.unless(d.recompute_group == 1, "recompute_group", d.recompute_group, valid);
            return;
        }
        MoeOverlap::Tutel | MoeOverlap::Ampipe => {}
    }
    let ranks = d.cp * if d.sequence_parallel { d.tp } else { 1 };
    let rows = d.micro_batch * model.seq_len / ranks;
    let even = rows.is_multiple_of(d.moe_overlap_degree);
    let valid = format!("a divisor of the {rows} rows that a rank has of a micro-batch");
    refused.unless(even, "moe_overlap_degree", d.moe_overlap_degree, &valid);
    let alone = d.cp == 1 || d.moe_overlap != MoeOverlap::Ampipe;
    refused.unless(alone, "moe_overlap", d.moe_overlap, "none or tutel with cp above 1");
    let without_dropout = model.dropout == 0.0;
    refused.unless(without_dropout, "moe_overlap", d.moe_overlap, "none for a model with dropout");
}

/// Splits that leave ranks unequal parts.
fn refuse_splits(model: &ModelSpec, d: &Decisions, refused: &mut Refused) {
    let (heads, kv) = (model.attention.heads, model.attention.kv_heads);
    let divisor = |of: u64, what: &str| format!("a divisor of the {of} {what}");
    refused.unless(heads.is_multiple_of(d.tp), "tp", d.tp, &divisor(heads, "query heads"));
    let ffn = model.mlp.ffn;
    refused.unless(ffn.is_multiple_of(d.tp), "tp", d.tp, &divisor(ffn, "columns of ffn"));
    let even = kv.is_multiple_of(d.tp) || d.tp.is_multiple_of(kv);
    let valid = format!("a divisor or multiple of the {kv} key/value heads");
    refused.unless(even, "tp", d.tp, &valid);
    let parts = match d.cp_style {
        CpStyle::Zigzag | CpStyle::AllGather | CpStyle::Hybrid if d.cp > d.cp_ulysses => 2 * d.cp,
        _ => d.cp,
    };
    let equal = model.seq_len.is_multiple_of(parts);
    let valid =
        format!("a degree that cuts a sequence's {} tokens into equal parts", model.seq_len);
    refused.unless(equal, "cp", d.cp, &valid);
    let local = crate::layer::LocalHeads::new(model, d.tp);
    let even = (heads / d.tp).is_multiple_of(d.cp_ulysses)
        && (local.kv_heads.is_multiple_of(d.cp_ulysses)
            || d.cp_ulysses.is_multiple_of(local.kv_heads));
    let valid =
        "a divisor of a rank's query heads, and a divisor or multiple of its key/value heads";
    refused.unless(even, "cp_ulysses", d.cp_ulysses, valid);
    let rows = d.micro_batch * model.seq_len / d.cp;
    let even = !d.sequence_parallel || rows.is_multiple_of(d.tp);
    let valid = "false, or a tp that divides micro_batch · seq_len / cp";
    refused.unless(even, "sequence_parallel", true, valid);
}

/// What was refused so far.
#[derive(Default)]
struct Refused(Vec<Unsupported>);

impl Refused {
    fn unless(&mut self, holds: bool, decision: &str, value: impl Display, valid: &str) {
        if !holds {
            let (decision, value, valid) =
                (decision.to_owned(), value.to_string(), valid.to_owned());
            self.0.push(Unsupported { decision, value, valid });
        }
    }
}
