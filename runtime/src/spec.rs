//! What a trainer tells the library: how ranks are arranged, which passes they run, and the sizes
//! that data and transfers need. Layers describe themselves ([`crate::Stages`]).

use crate::context_parallel::ContextParallel;
use crate::ops::{BalanceOver, BalanceScope, RouterLosses};
use crate::passes::Passes;
use crate::state::shards::Zero;
use crate::step_time::StepTime;
use models::mesh::{ExpertSplit, Mesh};
use models::schedule::{PassOrder, StageLayout, VocabPasses, forwards_come_first};

/// A trainer, apart from its layers.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerSpec {
    /// Where ranks lie.
    pub mesh: Mesh,
    /// How experts lie over the ranks of a pipeline rank; `None` if there are none.
    pub experts: Option<ExpertSplit>,
    /// What routers add to the loss, if anything.
    pub router_losses: Option<RouterLosses>,
    /// Norms and residuals split over tensor-parallel ranks.
    pub sequence_parallel: bool,
    /// How context-parallel ranks divide sequences.
    pub context: ContextParallel,
    /// Sequences a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches an iteration and replica.
    pub micro_batches: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// Which pipeline rank holds which stage.
    pub layout: StageLayout,
    /// For each pipeline rank, its passes in order.
    pub passes: Passes,
    /// How the vocabulary layers are split over the pipeline, if they are.
    pub vocab: Option<VocabPasses>,
    /// What replicas share of weights, gradients and optimizer state.
    pub zero: Zero,
    /// When replicas sum gradients.
    pub reduction: Reduction,
    /// What host memory holds.
    pub host_memory: HostMemory,
    /// Pipeline ranks begin a step before the gradient norm of the previous one is known, and
    /// repeat it where that norm clips (Zero Bubble, arXiv 2401.10241, section 4).
    pub post_validation: bool,
    /// Tokens a sequence.
    pub seq_len: usize,
    /// Columns of the residual stream.
    pub hidden: usize,
    /// Size of the vocabulary: valid tokens are below it.
    pub vocab_size: usize,
    /// Columns of an attention head of queries and keys.
    pub head_dim: usize,
    /// Columns of an attention head of values.
    pub value_dim: usize,
    /// Columns of a head that are rotated, if positions are rotary.
    pub rotary_dim: usize,
    /// Base of the rotary embedding's frequencies, if positions are rotary.
    pub rope_theta: Option<f64>,
    /// How they are stretched for longer sequences, if they are.
    pub yarn: Option<kernels::rope::Yarn>,
    /// Dropout probability, 0 for none.
    pub dropout: f64,
    /// Name of the table that input and output layer share, if they share one.
    pub tied_table: Option<String>,
    /// Model FLOPs of an iteration, forward and backward, all ranks together.
    pub training_flops: f64,
    /// What the plan predicts; `None` if there is no plan.
    pub prediction: Option<Prediction>,
    /// What distinguishes the trainer from others with the same fields: its layers, or the hash of
    /// its plan. Ranks compare it before they train.
    pub identity: String,
}

/// When the gradients of replicas are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// All at once, after the last pass.
    AtEnd,
    /// Each parameter as soon as its gradient is complete; each unit if replicas share its state.
    PerParameter,
    /// As soon as this many bytes are complete.
    Buckets {
        /// Bytes.
        bytes: usize,
    },
}

impl Default for Reduction {
    /// Buckets of 25 MB (PyTorch DDP; Li et al. 2020, section 5.3).
    fn default() -> Self {
        Self::Buckets { bytes: 25 << 20 }
    }
}

/// What host memory holds; everything else lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMemory {
    /// Nothing.
    Nothing,
    /// Exact weights and moments, which the CPU updates.
    Optimizer,
    /// What layers keep for their backward pass.
    Activations,
}

/// What a plan predicts of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// A step; `None` if it is not known.
    pub step: Option<StepTime>,
    /// Memory of the fullest rank, bytes.
    pub peak_memory_bytes: u64,
}

impl TrainerSpec {
    /// Memory that the plan predicts of the fullest rank, bytes; 0 if there is no plan.
    pub fn planned_memory_bytes(&self) -> u64 {
        self.prediction.map_or(0, |prediction| prediction.peak_memory_bytes)
    }

    /// Why replicas cannot share their state, or ranks divide a sequence, as the spec says; `None`
    /// if they can.
    pub(crate) fn wrong_division(&self) -> Option<String> {
        let Self { context, zero, seq_len, .. } = self;
        let (cp, replicas) = (self.mesh.cp as usize, (self.mesh.cp * self.mesh.dp) as usize);
        let divides = |n: usize, of: usize| n > 0 && of.is_multiple_of(n);
        if context.ranks != cp || !divides(context.ulysses, cp) {
            let (ranks, ulysses) = (context.ranks, context.ulysses);
            return Some(format!(
                "context parallelism over {ranks} ranks with Ulysses groups of {ulysses}; valid: the \
                 mesh's {cp} ranks, and a divisor of them"
            ));
        }
        if !divides(context.parts(), *seq_len) {
            let parts = context.parts();
            return Some(format!(
                "{seq_len} tokens a sequence; valid: a multiple of the {parts} parts that {cp} \
                 context-parallel ranks divide it into"
            ));
        }
        if zero.stage > 3 || !divides(zero.ways, replicas) {
            return Some(format!(
                "ZeRO stage {} over {} replicas; valid: stages 0 to 3, over a divisor of the \
                 {replicas} replicas",
                zero.stage, zero.ways
            ));
        }
        if let Some(reason) = self.wrong_experts() {
            return Some(reason);
        }
        let ahead_on_host = self.post_validation && self.host_memory == HostMemory::Optimizer;
        ahead_on_host.then(|| {
            "optimizer post-validation with the optimizer in host memory; valid: one of them"
                .to_owned()
        })
    }

    /// Why experts cannot lie as the spec says; `None` if they can.
    fn wrong_experts(&self) -> Option<String> {
        let ExpertSplit { ep, etp } = self.experts?;
        let ranks = self.mesh.folded_ranks();
        if etp == 0
            || ep == 0
            || !self.mesh.tp.is_multiple_of(etp)
            || !ranks.is_multiple_of(etp * ep)
        {
            return Some(format!(
                "experts over {ep} ranks of {etp} tensor-parallel ranks each; valid: a divisor of \
                 the {ranks} ranks of a pipeline rank, and of its tensor-parallel ranks"
            ));
        }
        if let Some(reason) = self.wrong_router_losses() {
            return Some(reason);
        }
        let (replicas, ways) = ((ranks / (etp * ep)) as usize, self.zero.ways);
        if !replicas.is_multiple_of(ways.min(replicas)) {
            return Some(format!(
                "ZeRO over {ways} of the {replicas} ranks with the same experts; valid: a divisor"
            ));
        }
        let alike = self.mesh.tp > 1 && !self.sequence_parallel;
        alike.then(|| {
            "experts with tensor parallelism but without sequence parallelism; valid: with it"
                .to_owned()
        })
    }

    /// Why a loss cannot count what the spec says; `None` if it can.
    fn wrong_router_losses(&self) -> Option<String> {
        let RouterLosses { over, scope, .. } = self.router_losses?;
        let global = scope == BalanceScope::GlobalBatch;
        if over == BalanceOver::AllLayers && !global {
            return Some(
                "a balance loss of all layers and of a micro-batch; valid: of the global batch"
                    .to_owned(),
            );
        }
        let waits = |order: &PassOrder| forwards_come_first(&order.passes);
        (global && !self.passes.iter().all(waits)).then(|| {
            "a balance loss of the global batch, with a schedule whose backward passes begin \
             before its last forward pass; valid: all forward passes first"
                .to_owned()
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

    /// Tokens an iteration.
    pub fn tokens(&self) -> usize {
        self.global_batch() * self.seq_len
    }

    /// The pipeline rank of the last stage; the first stage's is 0.
    pub fn last_rank(&self) -> usize {
        self.layout.rank_of(self.mesh.pp as usize, self.stages.saturating_sub(1))
    }

    /// Whether pipeline rank `rank` holds a tied embedding and output layer as one tensor in two
    /// of its chunks.
    pub fn shares_table(&self, rank: usize) -> bool {
        let ends = rank == 0 && self.last_rank() == 0;
        self.tied_table.is_some() && self.vocab.is_none() && ends && self.stages > 1
    }

    /// The stages of pipeline rank `rank`, in the order of its chunks.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        let ranks = self.mesh.pp as usize;
        let chunks = self.stages * self.layout.copies() / ranks;
        (0..chunks).map(|chunk| self.layout.stage_of(ranks, rank, chunk)).collect()
    }
}
