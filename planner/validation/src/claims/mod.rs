//! Claims of papers that compare two ways to run something, checked with the cost model.
//!
//! Claims are orders and ratios rather than times: equal errors on both sides cancel.

mod ampipe;
mod megascale;
mod sc21;

use super::row::Reason;
use super::setup::Setup;
use models::cluster::{self, ClusterSpec};
use models::decisions::{
    AuxScope, CpStyle, Decisions, DpReduction, Dtype, MoeOverlap, Offload, RankOrder,
    RecomputePolicy, USUAL_BUCKET_MIB, Vocab,
};
use models::model::{self, ModelSpec, Positions};
use models::schedule::ScheduleName;
use planner::pricing::listed_cuts::even_counts;
use planner::pricing::priced::Priced;
use serde::Serialize;

/// A claim and the cost model's verdict.
#[derive(Clone, Debug, Serialize)]
pub struct Claim {
    /// Its id; for SC'21 as in `tests/papers/megatron_sc21_relative_claims.csv`.
    pub id: &'static str,
    /// Paper and section.
    pub source: &'static str,
    /// The claim in words.
    pub claim: &'static str,
    /// What the cost model predicts, in words.
    pub predicted: String,
    /// Whether prediction and claim agree.
    pub holds: bool,
}

/// What the cost model predicts in words, and whether the claim holds; or why it cannot be priced.
type Verdict = Result<(String, bool), Reason>;

/// All claims. A claim whose configuration cannot be priced does not hold, and states the reason.
pub fn claims() -> Vec<Claim> {
    sc21::claims().into_iter().chain(megascale::claims()).chain(ampipe::claims()).collect()
}

fn claim(
    id: &'static str,
    source: &'static str,
    claim: &'static str,
    verdict: impl FnOnce() -> Verdict,
) -> Claim {
    let (predicted, holds) = verdict().unwrap_or_else(|reason| (reason, false));
    Claim { id, source, claim, predicted, holds }
}

/// A configuration to be priced.
#[derive(Clone, Debug)]
struct Trial {
    model: ModelSpec,
    cluster: ClusterSpec,
    gpus: u64,
    decisions: Decisions,
}

impl Trial {
    /// A GPT on a shipped cluster with micro-batches of one sequence, 1F1B, no sharding and full
    /// recomputation.
    fn gpt(cluster: &str, shape: Gpt, degrees: Degrees) -> Result<Self, Reason> {
        let shipped = cluster::shipped(cluster).ok_or_else(|| format!("no cluster {cluster}"))?;
        let cluster = shipped.map_err(|error| error.to_string())?;
        let model = shape.model()?;
        let decisions = degrees.decisions();
        let gpus = degrees.tp * degrees.pp * degrees.dp;
        Ok(Self { model, cluster, gpus, decisions }.with_batch(degrees.batch))
    }

    /// The same with a batch of `batch` sequences.
    fn with_batch(mut self, batch: u64) -> Self {
        let d = &mut self.decisions;
        d.micro_batches = batch / (d.dp * d.micro_batch);
        self.model.global_batch = batch;
        self
    }

    /// The same with other decisions.
    fn with(mut self, change: impl FnOnce(&mut Decisions)) -> Self {
        change(&mut self.decisions);
        let batch = self.model.global_batch;
        self.with_batch(batch)
    }

    fn price(&self) -> Result<Priced, Reason> {
        let setup = Setup {
            model: self.model.clone(),
            cluster: self.cluster.clone(),
            gpus: self.gpus,
            decisions: self.decisions.clone(),
            generation: String::new(),
            counts: even_counts(self.model.layers, self.decisions.stages()),
            searched: None,
        };
        super::price(&setup)
    }

    /// Sequences per second.
    fn throughput(&self) -> Result<f64, Reason> {
        Ok(self.model.global_batch as f64 / self.price()?.iteration_s)
    }
}

/// A GPT as in SC'21: sequences of 2,048 tokens, a vocabulary of 51,200.
#[derive(Clone, Copy)]
struct Gpt {
    layers: usize,
    hidden: u64,
    heads: u64,
}

impl Gpt {
    fn model(self) -> Result<ModelSpec, Reason> {
        let shipped = model::shipped("gpt3_175b").ok_or("model gpt3_175b is not shipped")?;
        let mut model = shipped.map_err(|error| error.to_string())?;
        model.layers = self.layers;
        model.hidden = self.hidden;
        model.attention.heads = self.heads;
        model.attention.kv_heads = self.heads;
        model.attention.head_dim = self.hidden / self.heads;
        model.mlp.ffn = 4 * self.hidden;
        if let Positions::Learned { max } = &mut model.positions {
            *max = model.seq_len;
        }
        Ok(model)
    }
}

/// Parallel degrees and batch.
#[derive(Clone, Copy)]
struct Degrees {
    tp: u64,
    pp: u64,
    dp: u64,
    batch: u64,
}

impl Degrees {
    fn decisions(self) -> Decisions {
        Decisions {
            tp: self.tp,
            pp: self.pp,
            vpp: 1,
            cp: 1,
            cp_style: CpStyle::Zigzag,
            cp_ulysses: 1,
            dp: self.dp,
            dp_shard: 1,
            ep: 1,
            etp: 1,
            zero_stage: 0,
            sequence_parallel: false,
            fused_loss: false,
            micro_batch: 1,
            micro_batches: 1,
            schedule: ScheduleName::OneFOneB,
            recompute: RecomputePolicy::Full,
            vocab: Vocab::Tensor,
            moe_overlap: MoeOverlap::None,
            moe_overlap_degree: 1,
            capacity_factor: None,
            aux_scope: AuxScope::MicroBatch,
            dtype: Dtype::Fp16,
            offload: Offload::None,
            dp_reduction: DpReduction::Bucketed,
            dp_bucket_mib: USUAL_BUCKET_MIB,
            recompute_group: 1,
            rank_order: RankOrder::DpInner,
            post_validation: false,
            pass_times: None,
        }
    }
}

/// Interleaved 1F1B with `chunks` chunks per pipeline rank.
fn interleaved(d: &mut Decisions, chunks: u64) {
    d.vpp = chunks;
    d.schedule = if chunks > 1 { ScheduleName::Interleaved1F1B } else { ScheduleName::OneFOneB };
}

/// A ratio as a change in percent, such as `+12.3 %`.
fn percent(ratio: f64) -> String {
    format!("{:+.1} %", 100.0 * (ratio - 1.0))
}
