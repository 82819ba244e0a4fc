//! The fitted constants: those that no table measures, each of a software generation or a device.

use crate::row::Row;
use crate::setup::Setup;
use models::cluster::{AttentionKernel, ClusterSpec, software};
use std::collections::BTreeMap;

/// What a constant belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A generation of training software, by its name in software.yaml.
    Software(String),
    /// A device, by its name in the cluster files.
    Device(String),
    /// All generations together. What their runs say of a constant is what a generation is expected
    /// to have before any of its own runs is seen.
    AllSoftware,
    /// All devices together.
    AllDevices,
}

/// A generation and the one that it grew from, whose constants it is expected to have in place of
/// what all generations have. Each of the three predicts unseen groups of its own software better
/// so, averaged over six deals of the folds.
const GREW_FROM: [(&str, &str); 3] = [
    ("vocabulary_2024", "megatron_2023"),
    ("megatron_2025_hopper", "megatron_2024"),
    ("megatron_2026_blackwell", "megatron_2025_blackwell"),
];

impl Owner {
    /// Whose constants the owner is expected to have, if anybody's.
    fn like(&self) -> Option<Self> {
        match self {
            Self::Software(name) => {
                let grew = GREW_FROM.iter().find(|(child, _)| child == name);
                Some(grew.map_or(Self::AllSoftware, |(_, from)| Self::Software((*from).to_owned())))
            }
            Self::Device(_) => Some(Self::AllDevices),
            Self::AllSoftware | Self::AllDevices => None,
        }
    }

    fn fields(&self) -> &'static [Field] {
        match self {
            Self::Software(_) | Self::AllSoftware => &SOFTWARE,
            Self::Device(_) | Self::AllDevices => &DEVICE,
        }
    }
}

/// A constant, by its key in cluster and software files.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Key in the file.
    pub key: &'static str,
    /// Prior mean; see [`Knob::prior`] and [`Knob::expected_of`].
    pub prior: f64,
    /// Standard deviation of the logarithm from the prior mean: of what all owners together have
    /// from `prior`, and of an owner's value from that.
    pub spread: f64,
    at: fn(&mut ClusterSpec) -> &mut f64,
}

impl Field {
    /// The constant's place in a cluster.
    pub fn of<'a>(&self, cluster: &'a mut ClusterSpec) -> &'a mut f64 {
        (self.at)(cluster)
    }
}

/// Constants of software generations.
///
/// The prior of `permute_bytes` is for an implementation that sorts the copies of tokens before and
/// after the links in both directions, which reads and writes 16 bytes, and pads or weights them in
/// further kernels. The prior of `p2p_slowdown` comes from 200 Gb/s adapters that reached 18.3 GB/s
/// for sends and receives with the one channel per peer that NCCL uses among 32 ranks, and 24.2
/// with four (NVIDIA/nccl issue 1272).
pub const SOFTWARE: [Field; 18] = [
    Field { key: "gemm_slowdown", prior: 1.0, spread: 0.05, at: |c| &mut c.software.gemm_slowdown },
    Field { key: "fp8_slowdown", prior: 0.95, spread: 0.15, at: |c| &mut c.software.fp8_slowdown },
    Field {
        key: "attention_slowdown",
        prior: 1.0,
        spread: 0.15,
        at: |c| &mut c.software.attention_slowdown,
    },
    Field {
        key: "narrow_attention_slowdown",
        prior: 1.0,
        spread: 0.2,
        at: |c| &mut c.software.narrow_attention_slowdown,
    },
    Field {
        key: "sink_attention_slowdown",
        prior: 1.0,
        spread: 0.3,
        at: |c| &mut c.software.sink_attention_slowdown,
    },
    Field {
        key: "attention_backward_slowdown",
        prior: 1.0,
        spread: 0.15,
        at: |c| &mut c.software.attention_backward_slowdown,
    },
    Field {
        key: "stream_slowdown",
        prior: 1.3,
        spread: 0.3,
        at: |c| &mut c.software.stream_slowdown,
    },
    Field { key: "tp_exposed", prior: 0.85, spread: 0.3, at: |c| &mut c.software.tp_exposed },
    Field { key: "dp_slowdown", prior: 1.3, spread: 0.4, at: |c| &mut c.software.dp_slowdown },
    Field {
        key: "zero3_slowdown",
        prior: 1.3,
        spread: 0.6,
        at: |c| &mut c.software.zero3_slowdown,
    },
    Field {
        key: "expert_slowdown",
        prior: 1.1,
        spread: 0.25,
        at: |c| &mut c.software.expert_slowdown,
    },
    Field { key: "permute_bytes", prior: 24.0, spread: 0.5, at: |c| &mut c.software.permute_bytes },
    Field { key: "ep_exposed", prior: 0.6, spread: 0.4, at: |c| &mut c.software.ep_exposed },
    Field {
        key: "host_s_per_layer",
        prior: 0.3e-3,
        spread: 0.7,
        at: |c| &mut c.software.host_s_per_layer,
    },
    Field { key: "routing_s", prior: 0.5e-3, spread: 0.7, at: |c| &mut c.software.routing_s },
    Field { key: "p2p_slowdown", prior: 1.3, spread: 0.4, at: |c| &mut c.software.p2p_slowdown },
    Field { key: "pass_gap_s", prior: 0.3e-3, spread: 0.7, at: |c| &mut c.software.pass_gap_s },
    Field {
        key: "step_overhead_s",
        prior: 10e-3,
        spread: 0.7,
        at: |c| &mut c.software.step_overhead_s,
    },
];

/// Constants of devices.
pub const DEVICE: [Field; 1] = [Field {
    key: "sustained_slowdown",
    prior: 1.08,
    spread: 0.1,
    at: |c| &mut c.device.sustained_slowdown,
}];

/// A constant of one owner.
#[derive(Clone, Debug)]
pub struct Knob {
    /// The owner.
    pub owner: Owner,
    /// The constant.
    pub field: Field,
}

impl Knob {
    /// The prior mean.
    ///
    /// Megatron-DeepSpeed's host code takes 0.86 ms to launch a layer's forward pass on A100: its
    /// small models take no less.
    pub fn prior(&self) -> f64 {
        match &self.owner {
            Owner::Software(name)
                if name.starts_with("megatron_deepspeed")
                    && self.field.key == "host_s_per_layer" =>
            {
                0.86e-3
            }
            _ => self.field.prior,
        }
    }

    /// The owner whose value is the prior mean of this constant, in place of [`Knob::prior`].
    ///
    /// Not all constants mean the same for all generations. Attention that stores its scores is
    /// another kernel than flash attention. ZeRO 3 that gathers each matrix is more than ZeRO 3
    /// that gathers layers. How much of tensor parallelism's communication is exposed depends on
    /// what a generation overlaps: pooled, it predicts unseen runs worse. Where a generation has a
    /// prior of its own, that stays.
    pub fn expected_of(&self) -> Option<Owner> {
        let like = self.owner.like()?;
        let own = match &self.owner {
            Owner::Software(name) => software(name).ok().flatten(),
            _ => None,
        };
        let of_all = like == Owner::AllSoftware;
        let alike = match self.field.key {
            "zero3_slowdown" => own.is_some_and(|software| !software.zero3_by_matrix),
            "tp_exposed" => !of_all,
            key if key.contains("attention") => {
                !of_all || own.is_some_and(|own| own.attention == AttentionKernel::Flash)
            }
            _ => !of_all || self.prior().to_bits() == self.field.prior.to_bits(),
        };
        alike.then_some(like)
    }

    /// Whether a row may move the constant. The 720 rows of `vtrain_single` are composed from about
    /// 144 figures of models that keep a GPU half busy: they may move constants of their software
    /// only, not of the device.
    pub fn is_moved_by(&self, row: &Row) -> bool {
        row.file != "vtrain_single" || matches!(self.owner, Owner::Software(_))
    }

    /// Whether a configuration ran with this constant.
    pub fn concerns(&self, setup: &Setup) -> bool {
        match &self.owner {
            Owner::Software(name) => *name == setup.generation,
            Owner::Device(name) => *name == setup.cluster.device.name,
            Owner::AllSoftware | Owner::AllDevices => false,
        }
    }
}

/// The constants of some configurations and of all together, without repetition. A constant that is
/// 0 in its file is unused, and is not fitted.
pub fn knobs(setups: &[Setup]) -> Vec<Knob> {
    let mut owners: BTreeMap<Owner, &Setup> = BTreeMap::new();
    for setup in setups {
        owners.insert(Owner::Software(setup.generation.clone()), setup);
        owners.insert(Owner::Device(setup.cluster.device.name.clone()), setup);
    }
    let used = |(owner, setup): (Owner, &Setup)| {
        let mut cluster = setup.cluster.clone();
        let fields = owner.fields().iter().copied();
        let used: Vec<Field> = fields.filter(|field| *field.of(&mut cluster) > 0.0).collect();
        owned(&owner, &used)
    };
    let own = owners.into_iter().flat_map(used);
    let all = [Owner::AllSoftware, Owner::AllDevices];
    own.chain(all.iter().flat_map(|owner| owned(owner, owner.fields()))).collect()
}

fn owned(owner: &Owner, fields: &[Field]) -> Vec<Knob> {
    fields.iter().map(|&field| Knob { owner: owner.clone(), field }).collect()
}
