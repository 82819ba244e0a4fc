//! The fitted constants: those that no table measures, each of a software generation or a device.

use crate::row::Row;
use crate::setup::Setup;
use models::cluster::{ClusterSpec, software};
use std::collections::BTreeMap;

/// What a constant belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A generation of training software, by its name in software.yaml.
    Software(String),
    /// A device, by its name in the cluster files.
    Device(String),
}

/// A generation and its predecessor, whose constants are the prior mean of its own. Listed only
/// where that predicts unseen runs better: other generations changed too much.
const GREW_FROM: [(&str, &str); 7] = [
    ("megatron_2022", "megatron_2021"),
    ("vocabulary_2024", "megatron_2023"),
    ("zero_bubble_2024", "zero_bubble_2023"),
    ("megatron_2025_hopper", "megatron_2024"),
    ("megatron_2026_blackwell", "megatron_2025_blackwell"),
    ("torchtitan_eager_2024", "torchtitan_2024"),
    ("automodel_2025", "torchtitan_2024"),
];

impl Owner {
    /// The predecessor, if any.
    pub fn parent(&self) -> Option<Self> {
        let Self::Software(name) = self else { return None };
        let (_, parent) = GREW_FROM.iter().find(|(child, _)| child == name)?;
        Some(Self::Software((*parent).to_owned()))
    }
}

/// A constant, by its key in cluster and software files.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Key in the file.
    pub key: &'static str,
    /// Prior mean for most owners; see [`Knob::prior`].
    pub prior: f64,
    /// Prior standard deviation of the logarithm.
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

    /// Whether the same constant of another owner means the same: ZeRO 3 that gathers each matrix
    /// says nothing about ZeRO 3 that gathers layers.
    pub fn is_alike(&self, other: &Owner) -> bool {
        let by_matrix = |owner: &Owner| match owner {
            Owner::Software(name) => {
                software(name).ok().flatten().is_some_and(|software| software.zero3_by_matrix)
            }
            Owner::Device(_) => false,
        };
        self.field.key != "zero3_slowdown" || by_matrix(&self.owner) == by_matrix(other)
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
        }
    }
}

/// The constants of some configurations, without repetition. A constant that is 0 in its file is
/// unused, and is not fitted.
pub fn knobs(setups: &[Setup]) -> Vec<Knob> {
    let mut owners: BTreeMap<Owner, &Setup> = BTreeMap::new();
    for setup in setups {
        owners.insert(Owner::Software(setup.generation.clone()), setup);
        owners.insert(Owner::Device(setup.cluster.device.name.clone()), setup);
    }
    let of = |(owner, setup): (Owner, &Setup)| {
        let fields: &[Field] = match owner {
            Owner::Software(_) => &SOFTWARE,
            Owner::Device(_) => &DEVICE,
        };
        let mut cluster = setup.cluster.clone();
        let exist = fields.iter().copied().filter(|field| *field.of(&mut cluster) > 0.0);
        let exist: Vec<Field> = exist.collect();
        exist.into_iter().map(move |field| Knob { owner: owner.clone(), field })
    };
    owners.into_iter().flat_map(of).collect()
}
