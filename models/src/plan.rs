//! A plan, the file `plan.yaml`: the request, the decisions and the prediction.
//!
//! It holds everything that a later reader needs: the resolved model, the figures of the cluster
//! that a check needs, every decision, the stage map and the proof. It has no time stamp and no
//! wall time: where no time limit ends the search, the same question gives the same bytes.

use crate::cluster::{AttentionKernel, ClusterSpec, Runs};
use crate::decisions::Decisions;
use crate::formulas::flops;
use crate::input::{InputError, Source, parse_yaml, place_of_field};
use crate::layer::{self, Gemm, Split};
use crate::model::{LayerKind, ModelSpec};
use crate::placement::{RecomputeCounts, Stage, device_memory, kind_name};
use crate::schedule::{Schedule, ScheduleError};
use crate::text::{self, Fault};
use serde::{Deserialize, Serialize};

/// The version of plans that this crate reads and writes.
pub const VERSION: u32 = 1;

/// A complete plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of the format, [`VERSION`].
    pub version: u32,
    /// The tool that wrote it, with its version.
    pub tool: String,
    /// The request.
    pub inputs: Inputs,
    /// What was decided.
    pub decisions: Decisions,
    /// What it is expected to do.
    pub predicted: Predicted,
    /// How the decision was reached.
    pub proof: Proof,
    /// Which layers lie where.
    pub stages: Vec<Stage>,
    /// The order of passes where it is no named schedule's: a line for each pipeline rank, in the
    /// words of `plan schedule --orders`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<String>,
}

/// Largest share of a device's memory that can be left free.
pub const MOST_HEADROOM: f64 = 0.9;

/// The request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    /// GPUs.
    pub gpus: u64,
    /// Sequences an iteration.
    pub global_batch: u64,
    /// Tokens a sequence.
    pub seq_len: u64,
    /// Tokens to train on, if the user said.
    pub tokens: Option<u64>,
    /// What the user pinned or narrowed, as typed after `--set`.
    pub settings: Vec<String>,
    /// Whether only what our own trainer can run was searched.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub runnable: bool,
    /// What the plan makes least.
    #[serde(default, skip_serializing_if = "Objective::is_time")]
    pub objective: Objective,
    /// Share of each device's memory that was to be left free, 0 to [`MOST_HEADROOM`].
    #[serde(default)]
    pub headroom: f64,
    /// The cluster's figures.
    pub cluster: ClusterFigures,
    /// The model, resolved.
    pub model: ModelSpec,
}

/// What a plan makes least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// The iteration's time.
    #[default]
    Time,
    /// The device memory that anything fits into, to 1 %; then time.
    Memory,
}

impl Objective {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
    fn is_time(&self) -> bool {
        *self == Self::Time
    }
}

impl Inputs {
    /// Memory of a device without the headroom, bytes.
    pub fn room_bytes(&self) -> u64 {
        ((1.0 - self.headroom) * self.cluster.hbm_bytes as f64).ceil() as u64
    }
}

/// The figures of a cluster that a check of a plan needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFigures {
    /// Name, for example `dgx_h100`.
    pub name: String,
    /// The accelerator.
    pub device: String,
    /// Its peak in the plan's number format, FLOP/s.
    pub peak_flops: f64,
    /// Its memory, bytes.
    pub hbm_bytes: u64,
    /// Part of it that tensors cannot use, bytes.
    pub reserved_bytes: u64,
    /// Host memory a GPU, bytes.
    pub host_bytes: u64,
    /// GPUs in a full node.
    pub node_gpus: u64,
    /// GPUs in a domain of each link level, innermost first.
    pub level_gpus: Vec<u64>,
    /// How attention is computed.
    pub attention: AttentionKernel,
}

impl ClusterFigures {
    /// Figures of `cluster` for a plan with these decisions.
    pub fn new(cluster: &ClusterSpec, d: &Decisions) -> Self {
        Self {
            name: cluster.name.clone(),
            device: cluster.device.name.clone(),
            peak_flops: cluster.device.peak_flops(d.dtype),
            hbm_bytes: cluster.device.hbm_bytes as u64,
            reserved_bytes: cluster.reserved_bytes() as u64,
            host_bytes: cluster.host.memory_bytes as u64,
            node_gpus: cluster.node_gpus(),
            level_gpus: cluster.level_sizes(d.gpus()),
            attention: cluster.software.attention,
        }
    }
}

/// What a plan is expected to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// One iteration, s.
    pub iteration_s: f64,
    /// Tokens a second and GPU.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs ([`layer::forward_flops`] and twice as many backward; no recomputation), TFLOP/s
    /// and GPU.
    pub model_tflops_per_gpu: f64,
    /// FLOPs as executed, recomputation included, TFLOP/s and GPU.
    pub hardware_tflops_per_gpu: f64,
    /// Model FLOPs over the device's peak.
    pub mfu: f64,
    /// Waiting for other stages, part of the iteration.
    pub bubble_fraction: f64,
    /// How far the truth may lie from it.
    pub error_band: ErrorBand,
    /// Days for the tokens the user named.
    pub training_days: Option<f64>,
    /// On the fullest rank, bytes.
    pub peak_memory_bytes: u64,
    /// Where an iteration goes.
    pub breakdown: Breakdown,
}

/// How far the truth may lie from a prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorBand {
    /// Half width, as a part of the iteration's time.
    pub relative: f64,
    /// Where that comes from.
    pub basis: Basis,
    /// What the plan has that no measured run of its software had.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<String>,
}

/// Where an error band comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// A prior: the cost model has not been compared with measured runs of this kind.
    Uncalibrated,
    /// Measured runs of this software.
    Validated,
    /// The band of software without measured runs: the plan has a feature that no run of its own
    /// software had.
    Unseen,
}

impl ErrorBand {
    /// Half width of the error band without any measured run, as a part of the iteration's time.
    pub const UNCALIBRATED: f64 = 0.15;

    /// The error band of a configuration on a cluster: what four in five published runs of its
    /// software lay within when its constants were fitted without them. Where the configuration has
    /// a feature that no such run had, the wider band of unseen software; without any compared run,
    /// a round prior.
    pub fn new(cluster: &ClusterSpec, model: &ModelSpec, gpus: u64, d: &Decisions) -> Self {
        let Some(relative) = cluster.software.error_band else {
            return Self {
                relative: Self::UNCALIBRATED,
                basis: Basis::Uncalibrated,
                unseen: vec![],
            };
        };
        let own = Runs::of(&cluster.device.name, model, gpus, d);
        match &cluster.seen {
            Some(seen) if !seen.runs.lack(&own).is_empty() => {
                let (relative, unseen) = (relative.max(seen.unseen_band), seen.runs.lack(&own));
                Self { relative, basis: Basis::Unseen, unseen }
            }
            _ => Self { relative, basis: Basis::Validated, unseen: vec![] },
        }
    }
}

/// Seconds of an iteration by cause on the busiest pipeline rank: exposed time, adding up to the
/// iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Breakdown {
    /// Kernels of forward and backward passes.
    pub compute_s: f64,
    /// Tensor-parallel collectives.
    pub tp_s: f64,
    /// Context-parallel transfers.
    pub cp_s: f64,
    /// Expert all-to-all.
    pub ep_s: f64,
    /// Pipeline transfers.
    pub pp_s: f64,
    /// Data-parallel reductions and gathers.
    pub dp_s: f64,
    /// Activations to and from host memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_s: f64,
    /// Waiting for other stages.
    pub bubble_s: f64,
    /// Recomputed work.
    pub recompute_s: f64,
    /// Optimizer update.
    pub optimizer_s: f64,
    /// Fixed work of a step and stragglers.
    pub other_s: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

impl Breakdown {
    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, f64); 11] {
        [
            ("compute", self.compute_s),
            ("tp", self.tp_s),
            ("cp", self.cp_s),
            ("ep", self.ep_s),
            ("pp", self.pp_s),
            ("dp", self.dp_s),
            ("host", self.host_s),
            ("bubble", self.bubble_s),
            ("recompute", self.recompute_s),
            ("optimizer", self.optimizer_s),
            ("other", self.other_s),
        ]
    }

    /// All of it, s.
    pub fn total_s(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }

    /// To the digits that plans have ([`significant`]). A bubble below 1e-12 s is what rounding
    /// leaves of a subtraction, and becomes 0.
    #[must_use]
    pub fn rounded(&self) -> Self {
        Self {
            compute_s: significant(self.compute_s),
            tp_s: significant(self.tp_s),
            cp_s: significant(self.cp_s),
            ep_s: significant(self.ep_s),
            pp_s: significant(self.pp_s),
            dp_s: significant(self.dp_s),
            host_s: significant(self.host_s),
            bubble_s: if self.bubble_s < 1e-12 { 0.0 } else { significant(self.bubble_s) },
            recompute_s: significant(self.recompute_s),
            optimizer_s: significant(self.optimizer_s),
            other_s: significant(self.other_s),
        }
    }
}

/// How the decision was reached. Wall times are left out: they differ from run to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proof {
    /// Combinations that satisfy every divisibility rule.
    pub candidates: u64,
    /// Cut by a bound on time, or left undecided where the search was stopped.
    pub cut_by_time: u64,
    /// Cut by a bound on memory.
    pub cut_by_memory: u64,
    /// Cut because another combination is as good in every respect.
    pub cut_by_dominance: u64,
    /// Partition problems solved.
    pub placed: u64,
    /// Integer programs solved.
    pub ilps: u64,
    /// Whether nothing in the space is faster by this cost model: `gap` is 0.
    pub proven_optimal: bool,
    /// Largest share of the plan's time that another configuration may save, (time − bound) / time.
    /// Covers every cut of the layers, every mix of recomputation, and vocabulary passes in every
    /// schedule.
    pub gap: f64,
    /// The same gap over the combinations and cuts that were searched.
    #[serde(default)]
    pub searched_gap: f64,
    /// Whether some combinations with several chunks had too many cuts to try all. `searched_gap`
    /// then covers the cuts tried, `gap` every cut.
    #[serde(default)]
    pub family: bool,
}

impl Proof {
    /// To the digits that plans have ([`significant`]).
    #[must_use]
    pub fn rounded(&self) -> Self {
        let (gap, searched_gap) = (significant(self.gap), significant(self.searched_gap));
        Self { gap, searched_gap, ..*self }
    }
}

/// Seconds of an iteration, before anything is derived from them.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// One iteration, s.
    pub iteration_s: f64,
    /// Where it goes.
    pub breakdown: Breakdown,
    /// How far the truth may lie from it.
    pub error_band: ErrorBand,
}

impl Predicted {
    /// Derives all rates from an iteration's time; the only place where they are computed.
    pub fn new(inputs: &Inputs, d: &Decisions, stages: &[Stage], timing: Timing) -> Self {
        let Timing { iteration_s, breakdown, error_band } = timing;
        let tokens = inputs.global_batch as f64 * inputs.seq_len as f64;
        let gpu_s = iteration_s * inputs.gpus as f64;
        let model = flops::training_flops(layer::forward_flops(&inputs.model, tokens));
        let recomputed = recomputed_flops(inputs, d, stages);
        let memory = device_memory(stages, d.pp as usize);
        Self {
            iteration_s,
            tokens_per_s_per_gpu: significant(tokens / gpu_s),
            model_tflops_per_gpu: significant(model / gpu_s / 1e12),
            hardware_tflops_per_gpu: significant((model + recomputed) / gpu_s / 1e12),
            mfu: significant(flops::utilisation(model, gpu_s, inputs.cluster.peak_flops)),
            bubble_fraction: significant(breakdown.bubble_s / iteration_s),
            error_band,
            training_days: inputs
                .tokens
                .map(|all| significant(flops::training_days(all as f64, tokens, iteration_s))),
            peak_memory_bytes: memory.iter().map(|rank| rank.total).max().unwrap_or(0),
            breakdown,
        }
    }
}

/// Nine significant digits: more than any prediction deserves, few enough that the last bits of an
/// addition do not show.
pub fn significant(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    format!("{value:.8e}").parse().unwrap_or(value)
}

/// FLOPs that recomputation repeats in an iteration: whole forward passes of `full` layers; for
/// `selective` ones the attention core where it is not fused (Korthikanti §5); the output matrix's
/// product with a fused loss.
fn recomputed_flops(inputs: &Inputs, d: &Decisions, stages: &[Stage]) -> f64 {
    let model = &inputs.model;
    let selective = |kind| match inputs.cluster.attention {
        AttentionKernel::Unfused => layer::core_flops(model, kind),
        AttentionKernel::Flash => 0.0,
    };
    let of_stage = |(name, counts): (&String, &RecomputeCounts)| {
        let mut kinds = (0..model.layers).map(|index| model.layer_kind(index));
        let Some(kind) = kinds.find(|&kind| kind_name(kind) == name) else {
            return 0.0;
        };
        counts.full as f64 * layer_flops(model, kind) + counts.selective as f64 * selective(kind)
    };
    let per_sequence: f64 = stages.iter().flat_map(|stage| &stage.recompute).map(of_stage).sum();
    let logits = match d.fused_loss {
        true => Gemm::new(model.seq_len, model.vocab, model.hidden).flops(),
        false => 0.0,
    };
    (per_sequence + logits) * inputs.global_batch as f64
}

/// Forward pass of one layer over one sequence as executed.
fn layer_flops(model: &ModelSpec, kind: LayerKind) -> f64 {
    let split = Split::WHOLE;
    let experts = if kind.moe { layer::expert_gemms(model, &split) } else { vec![] };
    let gemms = layer::attention_gemms(model, &split)
        .into_iter()
        .chain(layer::dense_gemms(model, kind, &split))
        .chain(experts);
    layer::core_flops(model, kind) + gemms.map(|gemm| gemm.flops()).sum::<f64>()
}

/// An invalid text of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFault {
    /// Its field, as in plan.yaml.
    pub field: String,
    /// What is wrong with it.
    pub fault: Fault,
    /// What would be valid, in words.
    pub valid: &'static str,
}

/// The version, which is read before anything else.
#[derive(Deserialize)]
struct Head {
    version: Option<serde_yaml::Spanned<u32>>,
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    /// Anything wrong with the text, at its place; a hidden character ([`text::is_hidden`])
    /// anywhere in it; a version this crate does not know; a text that is no name or line
    /// ([`Self::text_faults`]).
    pub fn read(source: &Source) -> Result<Self, InputError> {
        source.without(text::is_hidden)?;
        let head: Head = parse_yaml(source)?;
        let Some(version) = head.version else {
            let help = "a plan is what `plan --model ... --gpus N -o plan.yaml` writes";
            return Err(InputError::new(format!(
                "{} is no plan: it has no `version`",
                source.name()
            ))
            .help(help));
        };
        if version.value != VERSION {
            let message = format!("`version` cannot be {}", version.value);
            let help = format!("this tool reads version {VERSION}; plan again to get one");
            return Err(source.error_at(version.referenced, message).help(help));
        }
        let plan: Self = parse_yaml(source)?;
        let Some(TextFault { field, fault, valid }) = plan.text_faults().into_iter().next() else {
            return Ok(plan);
        };
        let error = InputError::new(format!("`{field}` {fault}")).help(format!("valid: {valid}"));
        let place = place_of_field(source, &field).unwrap_or_else(|| source.place(1, 1, 1));
        Err(error.at(place))
    }

    /// Invalid texts of the plan. They are checked whoever made the plan: they are printed, and
    /// some become part of a program.
    pub fn text_faults(&self) -> Vec<TextFault> {
        let name = |field: String, text: &str| {
            text::name_fault(text).map(|fault| TextFault { field, fault, valid: text::VALID_NAME })
        };
        let lines = |field: &str, texts: &[String]| {
            let fault = |(index, line): (usize, &String)| {
                let fault = text::line_fault(line)?;
                Some(TextFault {
                    field: format!("{field}[{index}]"),
                    fault,
                    valid: text::VALID_LINE,
                })
            };
            texts.iter().enumerate().filter_map(fault).collect::<Vec<_>>()
        };
        let (inputs, model) = (&self.inputs, &self.inputs.model);
        let names = [
            ("tool", &self.tool),
            ("inputs.cluster.name", &inputs.cluster.name),
            ("inputs.cluster.device", &inputs.cluster.device),
            ("inputs.model.name", &model.name),
        ];
        let names = names.into_iter().filter_map(|(field, text)| name(field.to_owned(), text));
        let kinds = self.stages.iter().enumerate().flat_map(|(index, stage)| {
            let field = format!("stages[{index}].recompute");
            stage.recompute.keys().filter_map(move |kind| name(field.clone(), kind))
        });
        names
            .chain(lines("inputs.settings", &inputs.settings))
            .chain(lines("inputs.model.assumptions", &model.assumptions))
            .chain(lines("inputs.model.numerics.unknown", &model.numerics.unknown))
            .chain(lines("order", &self.order))
            .chain(kinds)
            .collect()
    }

    /// The text of `plan.yaml`.
    ///
    /// # Errors
    /// Our bug: a plan that YAML cannot hold.
    pub fn to_yaml(&self) -> Result<String, serde_yaml::ser::Error> {
        let body = serde_yaml::to_string(self)?;
        Ok(format!("# Written by {}. To read it: plan explain plan.yaml\n{body}", self.tool))
    }

    /// The plan's own order of passes; `None` where the schedule's name determines it.
    ///
    /// # Errors
    /// The order has words that are no passes, or passes that cannot run.
    pub fn own_order(&self) -> Result<Option<Schedule>, ScheduleError> {
        let d = &self.decisions;
        if self.order.is_empty() {
            return Ok(None);
        }
        let schedule = Schedule {
            ranks: d.pp as usize,
            chunks: d.vpp as usize,
            micro_batches: d.micro_batches as usize,
            layout: d.schedule.layout(d.vpp as usize),
            vocab: None,
            passes: vec![],
            pairs: vec![],
        };
        let schedule = schedule.with_orders(&self.order)?;
        schedule.validate()?;
        Ok(Some(schedule))
    }

    /// Memory of each pipeline rank.
    pub fn device_memory(&self) -> Vec<crate::placement::StageMemory> {
        device_memory(&self.stages, self.decisions.pp as usize)
    }
}
