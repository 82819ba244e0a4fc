//! The one list of decisions.
//!
//! `plan.yaml`, `--set` and its help, what users restrict, the ranges and divisions that
//! `plan check` demands, and the degrees in the search space follow from the rows below. A new
//! decision is a row here and the code that prices it.

use super::{
    AuxScope, CpStyle, DpReduction, Dtype, MoeOverlap, Offload, RankOrder, RecomputePolicy, Vocab,
};
use crate::model::ModelSpec;
use crate::schedule::{PassRatios, ScheduleName};
use serde::{Deserialize, Serialize};

/// Largest degree or count: products of a few of them do not overflow.
pub const MOST: u64 = 1 << 30;

/// Hands the list to a macro: `with_decisions!(name)` expands to `name! { rows }`.
///
/// A row is `name: type = kind, [what it divides], help`, perhaps with attributes. Kinds:
/// `number(least, most)`, `choice` (values of a closed set, several allowed), `switch` (true or
/// false, one allowed), `factor` (a positive number) and `derived` (follows from the others:
/// written in plans, not set by users).
#[macro_export]
macro_rules! with_decisions {
    ($rows:ident) => {
        $rows! {
            tp: u64 = number(1, MOST), [Heads, DenseFfn, SharedFfn],
                "Tensor-parallel degree, `t`.";
            pp: u64 = number(1, MOST), [], "Pipeline-parallel degree, `p`.";
            vpp: u64 = number(1, MOST), [], "Chunks (virtual stages) per pipeline rank, `v`.";
            cp: u64 = number(1, MOST), [], "Context-parallel degree, `c`.";
            cp_style: CpStyle = choice(), [],
                "How attention works over context-parallel ranks; no effect at `cp` 1.";
            cp_ulysses: u64 = number(1, MOST), [],
                "Ulysses degree inside `cp` for `hybrid` (`cp` for `ulysses`, 1 otherwise).";
            dp: u64 = number(1, MOST), [GlobalBatch], "Data-parallel degree, `d`.";
            dp_shard: u64 = number(1, MOST), [],
                "Number of ranks over which ZeRO shards the state, a divisor of dp·cp; 1 with `zero_stage` 0.";
            ep: u64 = number(1, MOST), [Experts], "Expert-parallel degree.";
            etp: u64 = number(1, MOST), [ExpertFfn], "Tensor-parallel degree inside an expert.";
            zero_stage: u8 = number(0, 3), [], "ZeRO stage.";
            sequence_parallel: bool = choice(), [],
                "Norms and residuals split along the sequence over tensor-parallel ranks.";
            micro_batch: u64 = number(1, MOST), [], "Sequences per micro-batch, `b`.";
            micro_batches: u64 = derived(1, MOST), [],
                "Micro-batches per iteration and replica, `m`.";
            schedule: ScheduleName = choice(), [], "Pipeline schedule.";
            recompute: RecomputePolicy = choice(), [], "Activation recomputation.";
            #[serde(default = "super::one")]
            recompute_group: u64 = number(1, MOST), [],
                "Consecutive layers of which full recomputation keeps one input; 1 unless set. Above 1 only with `recompute` full.";
            vocab: Vocab = choice(), [], "Placement of the vocabulary layers: input embedding and output layer.";
            #[serde(default)]
            fused_loss: bool = choice(), [],
                "Compute the loss block by block, so that the logits of all tokens never exist at once; they are recomputed in the backward pass.";
            moe_overlap: MoeOverlap = choice(), [], "Overlap of the expert all-to-all.";
            moe_overlap_degree: u64 = number(1, MOST), [], "Chunks of that overlap; 1 without overlap.";
            capacity_factor: Option<f64> = factor(), [],
                "Expert capacity as a multiple of the balanced share; absent where dropless or dense.";
            aux_scope: AuxScope = choice(), [], "Scope of the load-balancing loss.";
            dtype: Dtype = choice(), [], "Number format.";
            offload: Offload = choice(), [], "What is kept in host memory. `activations` is searched only when set.";
            #[serde(default = "super::bucketed")]
            dp_reduction: DpReduction = choice(), [],
                "When gradients are reduced across replicas. If several are allowed, the fastest is used: buckets before the others.";
            #[serde(default = "super::usual_bucket_mib")]
            dp_bucket_mib: u64 = number(1, MOST), [], "Bucket size for `dp_reduction` bucketed, MiB; 25 unless set.";
            rank_order: RankOrder = choice(), [], "Order of the mesh axes over ranks.";
            post_validation: bool = switch(), [], "Optimizer post-validation, for schedules with split backward passes. `true` is used only when set, and takes no second value.";
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pass_times: Option<PassRatios> = derived(0, 0), [],
                "Relative durations of passes for which the order of vocabulary passes was generated.";
        }
    };
}

/// What a decision can be.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// Whole numbers.
    Number {
        /// The least.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// Names of a closed set, in the order they are tried.
    Names(fn() -> Vec<&'static str>),
    /// A positive number.
    Factor,
}

impl Values {
    /// Whether a whole number is in range; false where no numbers are meant.
    pub fn contains(self, number: u64) -> bool {
        matches!(self, Self::Number { least, most } if (least..=most).contains(&number))
    }

    /// What is valid, in words.
    pub fn in_words(self) -> String {
        match self {
            Self::Number { least, most: MOST } => format!("whole numbers from {least}"),
            Self::Number { least, most } => {
                let all: Vec<String> = (least..most).map(|number| number.to_string()).collect();
                format!("{} or {most}", all.join(", "))
            }
            Self::Names(names) => names().join(", "),
            Self::Factor => "one positive number, such as 1.25".to_owned(),
        }
    }
}

/// A size of the model that some degree divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Query heads.
    Heads,
    /// Feed-forward width, where some layers are dense.
    DenseFfn,
    /// Feed-forward width of the shared experts.
    SharedFfn,
    /// Experts of a layer.
    Experts,
    /// Feed-forward width of an expert.
    ExpertFfn,
    /// Sequences of an iteration.
    GlobalBatch,
}

impl Size {
    /// The size; `None` where the model has nothing of the kind.
    pub fn of(self, model: &ModelSpec) -> Option<u64> {
        let moe = model.moe.as_ref();
        match self {
            Self::Heads => Some(model.attention.heads),
            Self::DenseFfn => {
                let dense = moe.is_none_or(|moe| moe.first_dense > 0 || moe.every > 1);
                dense.then_some(model.mlp.ffn)
            }
            Self::SharedFfn => moe.map(|moe| moe.shared_ffn).filter(|&ffn| ffn > 0),
            Self::Experts => moe.map(|moe| moe.experts),
            Self::ExpertFfn => moe.map(|moe| moe.ffn),
            Self::GlobalBatch => Some(model.global_batch),
        }
    }

    /// Its key in a model file.
    pub fn key(self) -> &'static str {
        match self {
            Self::Heads => "heads",
            Self::DenseFfn | Self::ExpertFfn => "ffn",
            Self::SharedFfn => "shared_ffn",
            Self::Experts => "experts",
            Self::GlobalBatch => "global_batch",
        }
    }

    /// What messages call it.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::SharedFfn => "the shared experts' ffn",
            Self::ExpertFfn => "the experts' ffn",
            _ => self.key(),
        }
    }
}

/// A row of the list.
#[derive(Clone, Copy, Debug)]
pub struct Decision {
    /// Its name in `--set` and in plan.yaml.
    pub name: &'static str,
    /// What it can be.
    pub values: Values,
    /// Sizes of the model that it must divide.
    pub divides: &'static [Size],
    /// One line of help.
    pub help: &'static str,
    /// Whether users set it; else it follows from the others.
    pub is_set: bool,
    /// Its value, where that is a whole number.
    pub number: fn(&Decisions) -> Option<u64>,
}

impl Decision {
    /// Every decision, in the order of plan.yaml.
    pub const ALL: &'static [Self] = ROWS;

    /// The decision of a name.
    ///
    /// # Panics
    /// There is none.
    pub fn named(name: &str) -> &'static Self {
        let found = Self::ALL.iter().find(|row| row.name == name);
        found.unwrap_or_else(|| panic!("there is no decision `{name}`"))
    }

    /// The first size of the model that a degree does not divide.
    pub fn undivided(&self, model: &ModelSpec, degree: u64) -> Option<(Size, u64)> {
        let sizes = self.divides.iter().filter_map(|&size| Some((size, size.of(model)?)));
        sizes.into_iter().find(|(_, whole)| !whole.is_multiple_of(degree))
    }

    /// Names of the decisions that users set.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::ALL.iter().filter(|row| row.is_set).map(|row| row.name)
    }
}

/// How a decision's value reads as a whole number, and which names its type has.
trait Value {
    fn names() -> Vec<&'static str> {
        vec![]
    }

    fn number(&self) -> Option<u64> {
        None
    }
}

impl Value for u64 {
    fn number(&self) -> Option<u64> {
        Some(*self)
    }
}

impl Value for u8 {
    fn number(&self) -> Option<u64> {
        Some((*self).into())
    }
}

impl Value for bool {
    fn names() -> Vec<&'static str> {
        vec!["false", "true"]
    }
}

impl<T> Value for Option<T> {}

macro_rules! named_values {
    ($($type:ty),+) => {
        $(impl Value for $type {
            fn names() -> Vec<&'static str> {
                <$type>::ALL.iter().map(|value| value.name()).collect()
            }
        })+
    };
}

named_values!(CpStyle, ScheduleName, RecomputePolicy, Vocab, MoeOverlap);
named_values!(AuxScope, DpReduction, Dtype, Offload, RankOrder);

macro_rules! values {
    ($type:ty, number, ($least:expr, $most:expr)) => {
        Values::Number { least: $least, most: $most }
    };
    ($type:ty, derived, ($least:expr, $most:expr)) => {
        Values::Number { least: $least, most: $most }
    };
    ($type:ty, factor, ()) => {
        Values::Factor
    };
    ($type:ty, $kind:ident, ()) => {
        Values::Names(<$type as Value>::names)
    };
}

macro_rules! is_set {
    (derived) => {
        false
    };
    ($kind:ident) => {
        true
    };
}

macro_rules! declare {
    ($($(#[$attribute:meta])* $name:ident: $type:ty = $kind:ident $range:tt, [$($size:ident),*], $help:literal;)+) => {
        /// A fully pinned way to train. The placement of layers is in the plan's stage map.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Decisions {
            $(#[doc = $help] $(#[$attribute])* pub $name: $type,)+
        }

        const ROWS: &[Decision] = &[$(Decision {
            name: stringify!($name),
            values: values!($type, $kind, $range),
            divides: &[$(Size::$size),*],
            help: $help,
            is_set: is_set!($kind),
            number: |decisions| decisions.$name.number(),
        }),+];
    };
}

with_decisions!(declare);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_says_what_is_valid() {
        for row in Decision::ALL.iter().filter(|row| row.is_set) {
            assert!(!row.values.in_words().is_empty(), "{}", row.name);
            assert_eq!(Decision::named(row.name).help, row.help);
        }
        assert_eq!(Decision::named("zero_stage").values.in_words(), "0, 1, 2 or 3");
        assert!(!Decision::named("zero_stage").values.contains(4));
        assert_eq!(Decision::named("sequence_parallel").values.in_words(), "false, true");
    }
}
