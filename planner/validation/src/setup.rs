//! A row as a pinned configuration on the cluster it ran on.
//!
//! Only the configuration is read, never results: the columns, what [`RunFlags`] reads from the
//! notes, and what a [`Preset`] sets.

use super::recipe::{Recipe, recipe};
use super::row::{Reason, Row, required};
use super::run_flags::{Preset, RunFlags};
use super::searched::Searched;
use super::{architecture, machine};
use models::cluster::ClusterSpec;
use models::decisions::{
    AuxScope, CpStyle, Decisions, DpReduction, Dtype, MoeOverlap, Offload, RankOrder,
    RecomputePolicy, USUAL_BUCKET_MIB, Vocab,
};
use models::formulas::vocabulary::output_compute_ratio;
use models::model::ModelSpec;
use models::schedule::{ScheduleName, StageLayout};
use planner::pricing::cost_cache::CostCache;
use planner::pricing::listed_cuts::even_counts;
use planner::pricing::priced::{Placed, PlacedStage};

/// Most stages times micro-batches of a row: several times those of any published run. More would
/// take minutes.
const MAX_PASSES: u64 = 400_000;

/// The configuration of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The model, with sequence length and global batch.
    pub model: ModelSpec,
    /// The cluster and its software.
    pub cluster: ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// The pinned decisions.
    pub decisions: Decisions,
    /// Name of the software generation.
    pub generation: String,
    /// Layers per stage; if empty, those of the first candidate partition.
    pub counts: Vec<usize>,
    /// The order of passes, if it was searched for this run.
    pub searched: Option<Searched>,
}

/// The configuration of a row.
///
/// # Errors
/// A required cell is empty, or the run used a feature that the planner does not have.
pub fn setup(row: &Row) -> Result<Setup, Reason> {
    if RunFlags::of(&row.notes).fine_tuning {
        return Err("fine-tuning is not planned".to_owned());
    }
    let recipe = recipe(row);
    let (cluster, generation) = machine::cluster(row, &recipe)?;
    let mut model = architecture::model(row)?;
    model.layers += recipe.predicted_ahead;
    let gpus = required(row.n_gpus, "n_gpus")?;
    let etp = expert_split(row, &generation);
    let mut decisions = decisions(row, &recipe, &model, &cluster, gpus, etp)?;
    if let Some((recompute, _)) = recipe.recompute {
        decisions.recompute = recompute;
    }
    let counts = layer_counts(row, &recipe, &model, &decisions);
    let searched = None;
    let setup = Setup { model, cluster, gpus, decisions, generation, counts, searched };
    Ok(Setup { searched: setup.searched_for(row)?, ..setup })
}

impl Setup {
    fn searched_for(&self, row: &Row) -> Result<Option<Searched>, Reason> {
        let cache = CostCache::new(&self.model, &self.cluster, self.gpus);
        Searched::of(row, &cache, &self.decisions, &self.placed())
    }

    /// The layers of each stage, all with the row's recomputation.
    pub fn placed(&self) -> Placed {
        let option = match self.decisions.recompute {
            RecomputePolicy::None | RecomputePolicy::PerLayer => 0,
            RecomputePolicy::Selective => 1,
            RecomputePolicy::Full => 2,
        };
        let layers = planner::pricing::layers::Layers::new(&self.model);
        let mut start = 0;
        let stage = |&count: &usize| {
            let end = start + count;
            let recompute = layers.counts(start, end).into_iter().map(|count| {
                let mut split = [0; 3];
                split[option] = count;
                split
            });
            let placed = PlacedStage { start, end, recompute: recompute.collect() };
            start = end;
            placed
        };
        self.counts.iter().map(stage).collect()
    }
}

fn decisions(
    row: &Row,
    recipe: &Recipe,
    model: &ModelSpec,
    cluster: &ClusterSpec,
    gpus: u64,
    etp: u64,
) -> Result<Decisions, Reason> {
    let (tp, pp) = (required(row.tp, "tp")?, required(row.pp, "pp")?);
    let cp = row.cp.unwrap_or(1).max(1);
    let dp = gpus / (tp * pp * cp);
    if dp == 0 || dp * tp * pp * cp != gpus {
        return Err(format!("tp {tp}, pp {pp} and cp {cp} do not divide {gpus} GPUs"));
    }
    let micro_batch = required(row.micro_batch, "micro_batch")?;
    let sequences = micro_batch * dp;
    if sequences == 0 || !model.global_batch.is_multiple_of(sequences) {
        return Err(format!("the batch of {} is no multiple of {sequences}", model.global_batch));
    }
    let ep = row.ep.unwrap_or(1).max(1);
    if !(tp * cp * dp).is_multiple_of(ep * etp) {
        return Err(format!("ep {ep} and etp {etp} do not divide tp·cp·dp"));
    }
    let zero_stage = zero_stage(row);
    let mut vpp = row.vpp.or(recipe.chunks).unwrap_or(1).max(1);
    let paired = recipe.under_passes && ep > 1;
    let schedule = match schedule(row, pp, vpp)? {
        ScheduleName::OneFOneB | ScheduleName::Interleaved1F1B if paired => {
            ScheduleName::Overlapped1F1B
        }
        other => other,
    };
    if schedule.layout(2) == StageLayout::V && schedule != ScheduleName::ZbAuto {
        // A V has two chunks per pipeline rank, whether or not the source says so.
        vpp = 2;
    }
    let micro_batches = model.global_batch / sequences;
    let stages = pp * vpp;
    // Some recipes count the embedding and the output layer as layers of the first and the last
    // stage.
    if stages > model.layers as u64 + 2 {
        return Err(format!("{} layers cannot be cut into {stages} stages", model.layers));
    }
    if stages * micro_batches > MAX_PASSES {
        return Err(format!(
            "{stages} stages of {micro_batches} micro-batches are too many passes"
        ));
    }
    Ok(Decisions {
        tp,
        pp,
        vpp,
        cp,
        cp_style: CpStyle::Zigzag,
        cp_ulysses: 1,
        dp,
        dp_shard: shard(row, zero_stage, dp * cp),
        ep,
        etp,
        zero_stage,
        sequence_parallel: sequence_parallel(row, cluster, tp),
        fused_loss: false,
        micro_batch,
        micro_batches,
        schedule,
        recompute: recompute(row)?,
        vocab: vocab(row)?,
        moe_overlap: if paired { MoeOverlap::Pair } else { MoeOverlap::None },
        moe_overlap_degree: 1,
        capacity_factor: None,
        aux_scope: AuxScope::MicroBatch,
        dtype: dtype(row)?,
        offload: Offload::None,
        dp_reduction: DpReduction::Bucketed,
        dp_bucket_mib: USUAL_BUCKET_MIB,
        recompute_group: 1,
        rank_order: RankOrder::DpInner,
        post_validation: row.schedule.starts_with("ZB-")
            && !RunFlags::of(&row.notes).synchronous_step,
        pass_times: None,
    })
}

/// Ranks that split an expert. By default Megatron-LM splits experts like all other layers
/// (`megatron/training/arguments.py`: an unset `expert_tensor_parallel_size` is the tensor-parallel
/// degree). Recipes since 2025 set it to one rank per expert.
fn expert_split(row: &Row, generation: &str) -> u64 {
    let before = generation.starts_with("megatron_2024") && row.n_experts.is_some_and(|n| n > 1);
    let as_tensors = if before { row.tp } else { None };
    let preset = row.preset.as_ref().and_then(|preset| preset.etp);
    row.etp.or(preset).or(as_tensors).unwrap_or(1).max(1)
}

/// MegaScale's stage 2 reduces gradients once per iteration, which is stage 1 here.
fn zero_stage(row: &Row) -> u8 {
    let sharded = row.preset.as_ref().is_some_and(Preset::fully_sharded);
    let stage = row.zero_stage.unwrap_or(if sharded { 3 } else { 0 });
    if stage == 2 && row.software.starts_with("megascale") { 1 } else { stage }
}

/// Ranks that share one sharded copy: all, unless the row limits it to a host.
fn shard(row: &Row, zero_stage: u8, replicas: u64) -> u64 {
    let flags = RunFlags::of(&row.notes);
    match zero_stage {
        0 => 1,
        3 if flags.hybrid_shard => replicas.min(8),
        _ => flags.sharded_ways.map_or(replicas, |ways| ways.clamp(1, replicas)),
    }
}

fn sequence_parallel(row: &Row, cluster: &ClusterSpec, tp: u64) -> bool {
    match row.sequence_parallel.as_str() {
        "True" => tp > 1,
        "False" => false,
        _ => tp > 1 && cluster.software.sequence_parallel,
    }
}

fn schedule(row: &Row, pp: u64, vpp: u64) -> Result<ScheduleName, Reason> {
    match row.schedule.as_str() {
        ""
        | "none"
        | "1F1B"
        | "1F1B (DeepSpeed PP)"
        | "1F1B-I"
        | "1F1B-interleaved"
        | "Interleaved1F1B" => Ok(if pp > 1 && vpp > 1 {
            ScheduleName::Interleaved1F1B
        } else {
            ScheduleName::OneFOneB
        }),
        "interlaced-1F1B" | "interlaced (nnScaler) 1F1B" => Ok(ScheduleName::OneFOneB),
        "ZB-1p" => Ok(ScheduleName::ZbH1),
        "ZB-2p" => Ok(ScheduleName::ZbAuto),
        "ZB-V" => Ok(ScheduleName::ZbV),
        "V-Half" => Ok(ScheduleName::VHalf),
        other => Err(format!("schedule {other} is not planned yet")),
    }
}

/// Recomputation; none where the source states nothing. Assuming the least that fits instead
/// predicts runs of 2025 worse.
fn recompute(row: &Row) -> Result<RecomputePolicy, Reason> {
    match row.recompute.as_str() {
        "" | "none" => Ok(RecomputePolicy::None),
        // In FMS this recomputes an unstated fraction of the blocks: as many as memory requires.
        "selective" if row.software.starts_with("fms") => Ok(RecomputePolicy::PerLayer),
        "selective" => Ok(RecomputePolicy::Selective),
        "full" => Ok(RecomputePolicy::Full),
        other => Err(format!("recompute `{other}` is unknown")),
    }
}

fn vocab(row: &Row) -> Result<Vocab, Reason> {
    match row.vocab_strategy.as_str() {
        "redis" => Ok(Vocab::Redistribute),
        "vocab-1" => Ok(Vocab::Parallel1),
        "vocab-2" => Ok(Vocab::Parallel2),
        "interlaced" => Ok(Vocab::Interlaced),
        name if name.is_empty() || name.starts_with("baseline") => Ok(Vocab::Tensor),
        other => Err(format!("vocabulary strategy {other} is unknown")),
    }
}

fn dtype(row: &Row) -> Result<Dtype, Reason> {
    Dtype::parse(&row.precision).ok_or_else(|| format!("precision `{}` is unknown", row.precision))
}

/// Layers per stage, as even as possible. The ends are lighter where embedding and output layer
/// count as layers, or two layers are left out (Zero Bubble; Llama 3, section 3.3.2).
fn layer_counts(row: &Row, recipe: &Recipe, model: &ModelSpec, d: &Decisions) -> Vec<usize> {
    let (layers, stages) = (model.layers, d.stages());
    if let Some(counts) = deepseek_counts(recipe, layers, stages) {
        return counts;
    }
    if row.vocab_strategy == "redis" && stages > 1 {
        return redistributed(model, stages);
    }
    if stages > 1 && !layers.is_multiple_of(stages) && (layers + 2).is_multiple_of(stages) {
        let mut counts = vec![(layers + 2) / stages; stages];
        counts[0] -= 1;
        counts[stages - 1] -= 1;
        return counts;
    }
    even_counts(layers, stages)
}

/// Layer redistribution as the authors of Vocabulary Parallelism ran it. The last stage gets its
/// even share of all work minus the output layer, rounded up (column `layers_last` of
/// `artifact/exp_one_host.csv`); the others share the rest evenly, later ones one more
/// (`get_num_layers_to_build`, both sail-sg/VocabularyParallelism). The planner's own
/// redistribution follows the paper's text; its longest stage is never longer, and often shorter.
fn redistributed(model: &ModelSpec, stages: usize) -> Vec<usize> {
    let (vocab, hidden) = (model.vocab as f64, model.hidden as f64);
    let output = output_compute_ratio(vocab, hidden, model.seq_len as f64);
    let even = (model.layers as f64 + output) / stages as f64;
    let last = (even - output).max(0.0).ceil() as usize;
    let others = stages - 1;
    let (each, more) = ((model.layers - last) / others, (model.layers - last) % others);
    let mut counts = vec![each; others];
    counts.iter_mut().rev().take(more).for_each(|count| *count += 1);
    counts.push(last);
    counts
}

/// DeepSeek-V3's layout in Megatron-Bridge (`set_deepseek_v3_pipeline_model_parallel_layout`): as
/// for 64 layers, without the missing ones on the last stage. Multi-token prediction layers come
/// last.
fn deepseek_counts(recipe: &Recipe, layers: usize, stages: usize) -> Option<Vec<usize>> {
    let each = 64_usize.checked_div(stages).filter(|_| recipe.deepseek_layout && stages > 1)?;
    let before = each * (stages - 1);
    let decoders = layers - recipe.predicted_ahead;
    let mut counts = vec![each; stages];
    if decoders >= before {
        counts[stages - 1] = layers - before;
    } else {
        counts[0] -= before - decoders;
        counts[stages - 1] = recipe.predicted_ahead;
    }
    counts.iter().all(|&count| count > 0).then_some(counts)
}

#[cfg(test)]
mod tests {
    use super::{Recipe, deepseek_counts, redistributed};

    #[test]
    fn deepseek_stages_are_as_its_layout_says() {
        let ahead = |predicted_ahead| Recipe {
            predicted_ahead,
            deepseek_layout: true,
            ..Recipe::default()
        };
        let counts = |layers, stages, recipe: &Recipe| deepseek_counts(recipe, layers, stages);
        assert_eq!(counts(62, 16, &ahead(1)), Some([vec![4; 15], vec![2]].concat()));
        assert_eq!(counts(61, 8, &ahead(0)), Some([vec![8; 7], vec![5]].concat()));
        assert_eq!(counts(62, 32, &ahead(1)), Some([vec![1], vec![2; 30], vec![1]].concat()));
        assert_eq!(counts(62, 16, &Recipe::default()), None);
    }

    /// Column `layers_last` of `artifact/exp_one_host.csv` (sail-sg/VocabularyParallelism).
    #[test]
    fn layers_are_redistributed_as_the_authors_of_vocabulary_parallelism_did() {
        let mut model = models::model::shipped("vocab_4b").unwrap().unwrap();
        for seq_len in [2048, 4096] {
            model.seq_len = seq_len;
            for (vocab, last) in [(32_000, 4), (64_000, 3), (128_000, 2), (256_000, 0)] {
                model.vocab = vocab;
                let counts = redistributed(&model, 8);
                assert_eq!((counts.len(), counts.iter().sum::<usize>()), (8, 32));
                assert_eq!(counts[7], last, "{vocab} words, {seq_len} tokens");
                assert!(counts[0] <= counts[6] && counts[6] <= counts[0] + 1);
            }
        }
    }
}
