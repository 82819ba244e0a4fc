//! Everything a plan decides, by the names users type in `--set` and read in plan.yaml.

mod list;

pub use crate::cluster::Dtype;
use crate::model::{AuxOver, ModelSpec, Moe};
use crate::schedule::{PassRatios, Schedule, ScheduleError, StageLayout, VocabPasses};
pub use list::{Decision, Decisions, MOST, Size, Values};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A closed set of names: parses from and prints as what users type.
macro_rules! names {
    ($(#[$doc:meta])* $type:ident { $($(#[$variant_doc:meta])* $variant:ident = $name:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $type { $($(#[$variant_doc])* #[serde(rename = $name)] $variant),+ }

        impl $type {
            /// Every value, in the order they are tried.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name users type.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// The value of that name.
            pub fn parse(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.name() == name)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.pad(self.name()) }
        }
    };
}

names! {
    /// How attention works when the sequence is split over context-parallel ranks.
    CpStyle {
        /// K and V travel round a ring; sequence in contiguous pieces, so causal work is uneven.
        Ring = "ring",
        /// Ring over `2c` chunks, rank `i` holding `i` and `2c − 1 − i`: even causal work.
        Zigzag = "zigzag",
        /// K and V all-gathered before attention (Llama 3), zig-zag chunks.
        AllGather = "all_gather",
        /// All-to-all from sequence split to head split and back (DeepSpeed Ulysses).
        Ulysses = "ulysses",
        /// Ulysses inside, zig-zag ring across.
        Hybrid = "hybrid",
    }
}

/// What one layer recomputes in its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing: all activations are kept.
    None,
    /// Cheap but large activations: attention scores where they are stored, norm outputs and the
    /// activation function's product.
    Selective,
    /// Everything from its input. With tensor parallelism the trainer also keeps what was reduced
    /// over ranks, so that the second forward pass reduces nothing.
    Full,
}

impl Recompute {
    /// Every value, cheapest first.
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];
}

names! {
    /// Which layers recompute what: all alike, or chosen layer by layer.
    RecomputePolicy {
        /// Every layer [`Recompute::None`].
        None = "none",
        /// Every layer [`Recompute::Selective`].
        Selective = "selective",
        /// Every layer [`Recompute::Full`].
        Full = "full",
        /// Chosen layer by layer.
        PerLayer = "per_layer",
    }
}

names! {
    /// Where the input and output vocabulary layers live. See docs/design/vocabulary.md.
    Vocab {
        /// First and last stage, split over their tensor-parallel ranks; equal chunks of layers
        /// (Megatron's baseline).
        FirstLast = "first_last",
        /// As `first_last`, with layers moved by the min–max rule of layer redistribution (Redis).
        Redistribute = "redistribute",
        /// First and last stage, split over tensor-parallel ranks only; layers placed by the
        /// solver.
        Tensor = "tensor",
        /// Split over all pipeline ranks, three barriers.
        ParallelNaive = "parallel_naive",
        /// Split over all pipeline ranks, two barriers (Vocabulary Parallelism, algorithm 1).
        Parallel1 = "parallel_1",
        /// Split over all pipeline ranks, one barrier (Vocabulary Parallelism, algorithm 2).
        Parallel2 = "parallel_2",
        /// Split over all pipeline ranks, synchronous as in tensor parallelism (nnScaler).
        Interlaced = "interlaced",
    }
}

impl Vocab {
    /// Whether every pipeline rank holds a slice of the vocabulary.
    pub fn over_pipeline(self) -> bool {
        self.passes().is_some()
    }

    /// The passes of a vocabulary split over the pipeline.
    pub fn passes(self) -> Option<VocabPasses> {
        match self {
            Self::ParallelNaive => Some(VocabPasses::Naive),
            Self::Parallel1 => Some(VocabPasses::One),
            Self::Parallel2 => Some(VocabPasses::Two),
            Self::Interlaced => Some(VocabPasses::Interlaced),
            Self::FirstLast | Self::Redistribute | Self::Tensor => None,
        }
    }
}

names! {
    /// How a mixture-of-experts layer overlaps its all-to-all with computation.
    MoeOverlap {
        /// Not at all.
        None = "none",
        /// Chunks of the expert block only (Tutel).
        Tutel = "tutel",
        /// Attention and expert block chunked together along the sequence (AMPipe).
        Ampipe = "ampipe",
        /// Under another micro-batch's pass: a forward and a backward run
        /// together (overlapped 1F1B, DualPipe).
        Pair = "pair",
    }
}

names! {
    /// Tokens over which the load-balancing loss counts.
    AuxScope {
        /// One micro-batch.
        MicroBatch = "micro_batch",
        /// The whole iteration.
        GlobalBatch = "global_batch",
    }
}

impl AuxScope {
    /// The scope unless it is asked for: the micro-batch where that is possible, since any schedule
    /// can train with it.
    pub fn usual(model: &ModelSpec) -> Self {
        let of_micro_batch =
            |moe: &Moe| moe.aux_loss > 0.0 && moe.losses.over == AuxOver::EachLayer;
        match model.moe.as_ref().is_some_and(of_micro_batch) {
            true => Self::MicroBatch,
            false => Self::GlobalBatch,
        }
    }

    /// Whether gradients need what routers choose in all of a step's forward passes.
    pub fn needs_all_forwards(self, model: &ModelSpec) -> bool {
        self == Self::GlobalBatch && model.moe.as_ref().is_some_and(|moe| moe.aux_loss > 0.0)
    }
}

impl Dtype {
    /// Bytes of one weight or activation as stored between operations (8- and 4-bit formats keep
    /// bf16 storage and cast at the GEMM).
    pub fn storage_bytes(self) -> f64 {
        self.bytes().max(2.0)
    }

    /// The format of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

names! {
    /// What is kept in host memory.
    Offload {
        /// Nothing.
        None = "none",
        /// Master weights and Adam moments.
        Optimizer = "optimizer",
        /// What transformer layers keep for their backward pass. It is copied there after the next
        /// layer's forward pass, and back before it is read; docs/design/sharding.md says what
        /// hides the copies.
        Activations = "activations",
    }
}

impl Offload {
    /// The values that a search tries by itself. Activations go to the host where that is asked
    /// for.
    pub const SEARCHED: [Self; 2] = [Self::None, Self::Optimizer];

    /// What of it concerns layers and not the optimizer: the same for all ways to share parameters.
    #[must_use]
    pub fn of_layers(self) -> Self {
        if self == Self::Activations { self } else { Self::None }
    }
}

names! {
    /// When the gradients of replicas are summed (Li et al. 2020, arXiv 2006.15704, section 3.2).
    DpReduction {
        /// As soon as a bucket of them is complete.
        Bucketed = "bucketed",
        /// Each parameter's as soon as it is complete.
        Overlapped = "overlapped",
        /// After the last backward pass.
        Naive = "naive",
    }
}

/// The usual size of a bucket, MiB (PyTorch DDP; Li et al. 2020, section 5.3).
pub const USUAL_BUCKET_MIB: u64 = 25;

const fn usual_bucket_mib() -> u64 {
    USUAL_BUCKET_MIB
}

const fn one() -> u64 {
    1
}

const fn bucketed() -> DpReduction {
    DpReduction::Bucketed
}

names! {
    /// Order of the mesh axes over ranks, fastest-varying first.
    RankOrder {
        /// Pipeline outermost (Megatron's default).
        DpInner = "tp-cp-dp-pp",
        /// Data outermost: pipeline neighbours lie closer than data-parallel replicas.
        PpInner = "tp-cp-pp-dp",
    }
}

impl Decisions {
    /// GPUs used: t·p·c·d.
    pub fn gpus(&self) -> u64 {
        self.tp * self.pp * self.cp * self.dp
    }

    /// Which pipeline rank holds which stage.
    pub fn layout(&self) -> StageLayout {
        self.schedule.layout(self.vpp as usize)
    }

    /// Pipeline stages: p·v, or half as many where the schedule is bidirectional.
    pub fn stages(&self) -> usize {
        self.layout().stages(self.pp as usize, self.vpp as usize)
    }

    /// The passes of every pipeline rank, in order. Where the vocabulary is split over the pipeline
    /// they include those of the input layer. `naive` runs a replica's whole share of the batch as
    /// one micro-batch.
    ///
    /// # Errors
    /// The schedule does not exist for these counts.
    pub fn build_schedule(&self) -> Result<Schedule, ScheduleError> {
        let (ranks, chunks) = (self.pp as usize, self.vpp as usize);
        let micro_batches = self.schedule.micro_batches_run(self.micro_batches as usize);
        match self.vocab.passes() {
            Some(passes) => {
                let (name, times) = (self.schedule, self.pass_times.map(PassRatios::times));
                let schedule =
                    name.build_with_vocab(ranks, micro_batches, chunks, passes, times)?;
                schedule.with_input_passes(times.unwrap_or_default())
            }
            None => self.schedule.build(ranks, micro_batches, chunks),
        }
    }

    /// Replicas of an expert's shard: etp·ep·edp = tp·cp·dp.
    pub fn expert_dp(&self) -> u64 {
        self.tp * self.cp * self.dp / (self.etp * self.ep)
    }
}
