//! "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21, arXiv
//! 2104.04473).
//!
//! What the paper leaves open (shape of the 91B model, chunks, batches) is taken from its scripts
//! in Megatron-LM, `examples/sc21/run_figure_*.sh`.

use super::{Claim, Degrees, Gpt, Reason, Trial, Verdict, claim, interleaved, percent};
use models::decisions::RecomputePolicy;

const GPT_175B: Gpt = Gpt { layers: 96, hidden: 12288, heads: 96 };
const GPT_530B: Gpt = Gpt { layers: 105, hidden: 20480, heads: 128 };
const GPT_145B: Gpt = Gpt { layers: 80, hidden: 12288, heads: 96 };
/// Section 5.5 prints the size alone; the shape is that of Megatron-LM's script for figure 16.
const GPT_91B: Gpt = Gpt { layers: 32, hidden: 15360, heads: 128 };
const GPT_162B: Gpt = Gpt { layers: 32, hidden: 20480, heads: 128 };
const GPT_5_9B: Gpt = Gpt { layers: 32, hidden: 3840, heads: 32 };

/// A quantity is reproduced if it lies within this factor of the printed one.
const WITHIN: f64 = 2.0;

pub(super) fn claims() -> Vec<Claim> {
    vec![
        claim(
            "sc21rel-01",
            "SC'21 5.2",
            "175B on 384 GPUs: PTD-P is 6 % faster than ZeRO-3",
            || against_zero_3(GPT_175B, 12, 384, 4, 1.06),
        ),
        claim(
            "sc21rel-02",
            "SC'21 5.2",
            "530B on 560 GPUs (ZeRO-3: 640): PTD-P is 24 % faster per GPU",
            || against_zero_3(GPT_530B, 35, 560, 4, 1.24),
        ),
        claim(
            "sc21rel-03",
            "SC'21 5.2",
            "on twice the GPUs with the same batch PTD-P is 70 % faster, both models",
            || {
                let (small, holds) = against_zero_3(GPT_175B, 12, 768, 2, 1.7)?;
                let (large, too) = against_zero_3(GPT_530B, 35, 1120, 2, 1.7)?;
                Ok((format!("{small}, {large}"), holds && too))
            },
        ),
        claim(
            "sc21rel-04",
            "SC'21 5.6, fig. 17",
            "145B, (t, p) = (8, 16): recomputation costs up to 33 % of throughput at small batches",
            recomputation_costs,
        ),
        claim(
            "sc21rel-05",
            "SC'21 5.6, fig. 17",
            "the same: large batches with recomputation are up to twice as fast as the best without",
            recomputation_pays,
        ),
        claim(
            "sc21rel-06",
            "SC'21 5.7, fig. 18",
            "175B on 96 GPUs, interleaved: scatter/gather is up to 11 % faster",
            scatter_gather,
        ),
        claim(
            "sc21rel-07",
            "SC'21 5.5, fig. 16",
            "91B, (t, p) = (8, 8): best micro-batch is 2",
            best_micro_batch,
        ),
        claim(
            "sc21rel-08",
            "SC'21 5.4.1, fig. 13",
            "162B on 64 GPUs: best tensor-parallel size is the node's, 8",
            best_tensor_size,
        ),
        claim(
            "sc21rel-09",
            "SC'21 5.4.2, fig. 14",
            "5.9B on 64 GPUs: the more pipeline in place of data parallelism, the slower",
            pipeline_against_data,
        ),
        claim(
            "sc21rel-10",
            "SC'21 5.3.1, fig. 11",
            "weak scaling of the pipeline: larger batches scale better",
            weak_scaling,
        ),
        claim(
            "sc21-fig12",
            "SC'21 5.3.2, fig. 12",
            "175B on 96 GPUs: interleaving is faster, and the gap closes with the batch",
            interleaving,
        ),
        claim(
            "sc21-fig15",
            "SC'21 5.4.3, fig. 15",
            "5.9B on 64 GPUs: the more tensor in place of data parallelism, the slower",
            tensor_against_data,
        ),
        claim("sc21-fusion", "SC'21 5.8", "fused operators: 175B 19 % faster, 530B 11 %", fusion),
    ]
}

fn selene(gpt: Gpt, tp: u64, pp: u64, dp: u64, batch: u64) -> Result<Trial, Reason> {
    Trial::gpt("selene", gpt, Degrees { tp, pp, dp, batch })
}

/// Whether a ratio above one is reproduced: in direction, and in gain within [`WITHIN`].
fn met(ratio: f64, printed: f64) -> bool {
    let gain = (ratio - 1.0) / (printed - 1.0);
    gain > WITHIN.recip() && gain < WITHIN
}

/// Throughput per GPU of PTD-P over that of ZeRO-3. For 530B, PTD-P ran on 560 GPUs and ZeRO-3 on
/// 640.
fn against_zero_3(gpt: Gpt, pp: u64, gpus: u64, micro_batch: u64, printed: f64) -> Verdict {
    let batch = if pp == 12 { 1536 } else { 2240 };
    let ours = selene(gpt, 8, pp, gpus / (8 * pp), batch)?;
    let (zero_gpus, zero_batch) = if gpus == 560 { (640, 2560) } else { (gpus, batch) };
    let theirs = selene(gpt, 1, 1, zero_gpus, zero_batch)?.with(|d| {
        d.micro_batch = micro_batch;
        d.zero_stage = 3;
        d.dp_shard = zero_gpus;
    });
    let ratio = ours.throughput()? / gpus as f64 / (theirs.throughput()? / zero_gpus as f64);
    Ok((percent(ratio), met(ratio, printed)))
}

/// Batches of figure 17.
const BATCHES: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Throughput of 145B by batch, with recomputation, and without it where that fits.
fn with_and_without() -> Result<(Vec<f64>, Vec<f64>), Reason> {
    let (mut with, mut without) = (vec![], vec![]);
    for batch in BATCHES {
        let trial = selene(GPT_145B, 8, 16, 1, batch)?;
        with.push(trial.throughput()?);
        let kept = trial.with(|d| d.recompute = RecomputePolicy::None);
        if kept.price()?.fits {
            without.push(kept.throughput()?);
        }
    }
    Ok((with, without))
}

fn recomputation_costs() -> Verdict {
    let (with, without) = with_and_without()?;
    let lost = with.iter().zip(&without).map(|(with, without)| 1.0 - with / without);
    let lost = lost.fold(0.0, f64::max);
    Ok((format!("-{:.0} %", 100.0 * lost), (0.2..=0.34).contains(&lost)))
}

fn recomputation_pays() -> Verdict {
    let (with, without) = with_and_without()?;
    let best = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let ratio = best(&with) / best(&without);
    let largest = without.len().checked_sub(1).map_or(0, |last| BATCHES[last]);
    Ok((format!("{ratio:.2} times (without, batches to {largest} fit)"), met(ratio, 2.0)))
}

/// 175B with interleaving, at the figure's batches of 12 to 60.
fn scatter_gather() -> Verdict {
    let mut best: f64 = 0.0;
    for batch in [12, 24, 36, 48, 60] {
        let on = selene(GPT_175B, 8, 12, 1, batch)?.with(|d| interleaved(d, 4));
        let mut off = on.clone();
        off.cluster.software.scatter_gather = false;
        best = best.max(on.throughput()? / off.throughput()?);
    }
    Ok((percent(best), met(best, 1.11)))
}

fn best_micro_batch() -> Verdict {
    let mut best = vec![];
    for batch in [128, 512] {
        let mut speeds = vec![];
        for micro_batch in [1, 2, 4, 8] {
            let trial = selene(GPT_91B, 8, 8, 1, batch)?.with(|d| d.micro_batch = micro_batch);
            speeds.push((trial.throughput()?, micro_batch));
        }
        let of_two = speeds[1].0;
        speeds.sort_by(|a, b| b.0.total_cmp(&a.0));
        best.push((speeds[0].1, percent(of_two / speeds[0].0)));
    }
    let text: Vec<String> =
        best.iter().map(|(size, two)| format!("{size} (2 does {two})")).collect();
    let holds = best.iter().all(|(size, _)| *size == 2);
    Ok((format!("{} at batches of 128 and 512", text.join(", ")), holds))
}

fn best_tensor_size() -> Verdict {
    let mut best = vec![];
    for batch in [32, 128] {
        let mut speeds = vec![];
        for tp in [2, 4, 8, 16, 32] {
            speeds.push((selene(GPT_162B, tp, 64 / tp, 1, batch)?.throughput()?, tp));
        }
        speeds.sort_by(|a, b| b.0.total_cmp(&a.0));
        best.push(speeds[0].1);
    }
    Ok((format!("{} at batch 32, {} at 128", best[0], best[1]), best == [8, 8]))
}

/// Throughput of 5.9B on 64 GPUs by model-parallel size, with data parallelism for the rest, at the
/// figure's batches.
fn ordered(sizes: &[u64], tensor: bool) -> Verdict {
    let (mut holds, mut text) = (true, vec![]);
    let batches: &[u64] = if tensor { &[32, 128, 512] } else { &[32, 512] };
    for &batch in batches {
        let mut speeds = vec![];
        for &size in sizes.iter().filter(|&&size| batch % (64 / size) == 0) {
            let (tp, pp) = if tensor { (size, 1) } else { (1, size) };
            speeds.push(selene(GPT_5_9B, tp, pp, 64 / size, batch)?.throughput()?);
        }
        holds &= speeds.windows(2).all(|pair| pair[0] > pair[1]);
        let list: Vec<String> = speeds.iter().map(|speed| format!("{speed:.1}")).collect();
        text.push(list.join(" > "));
    }
    Ok((format!("{} seq/s", text.join("; ")), holds))
}

fn pipeline_against_data() -> Verdict {
    ordered(&[2, 4, 8, 16, 32], false)
}

fn tensor_against_data() -> Verdict {
    ordered(&[2, 4, 8, 16, 32], true)
}

/// Throughput per GPU with eight stages relative to one, at batches of 8 and 128.
fn weak_scaling() -> Verdict {
    let mut kept = vec![];
    for batch in [8, 128] {
        let speed = |pp: u64| {
            let gpt = Gpt { layers: 3 * pp as usize, hidden: 20480, heads: 128 };
            let trial = selene(gpt, 8, pp, 1, batch)?;
            Ok::<f64, Reason>(trial.throughput()? * pp as f64)
        };
        // The model grows with the stages, and so do the GPUs: compare sequences times stages per
        // second and stage.
        kept.push(speed(8)? / 8.0 / speed(1)?);
    }
    let text = format!("{:.2} at batch 8, {:.2} at 128 of one stage's", kept[0], kept[1]);
    // The bubble alone leaves 8/15 and 128/135. A stage without the vocabulary is faster than one
    // with it.
    Ok((text, kept[0] < 0.65 && kept[1] > 0.85))
}

fn interleaving() -> Verdict {
    let mut gaps = vec![];
    for batch in [12, 24, 36, 48, 60] {
        let plain = selene(GPT_175B, 8, 12, 1, batch)?;
        let chunks = plain.clone().with(|d| interleaved(d, 4));
        gaps.push(chunks.throughput()? / plain.throughput()?);
    }
    let text: Vec<String> = gaps.iter().map(|gap| percent(*gap)).collect();
    let closing = gaps.windows(2).all(|pair| pair[0] > pair[1]);
    Ok((
        format!("{} at batches of 12 to 60", text.join(", ")),
        closing && gaps.iter().all(|gap| *gap > 1.0),
    ))
}

/// Bytes that elementwise kernels move without the fusions of section 4.2, relative to those with
/// them. Scale, mask, softmax and dropout of the scores are four kernels instead of two (21 bytes
/// per score instead of 9); bias and GeLU, and bias, dropout and addition, are five instead of two
/// (23 bytes per element instead of 11).
const UNFUSED_STREAMS: f64 = 2.2;

fn fusion() -> Verdict {
    let gain = |gpt: Gpt, pp: u64| {
        let fused = selene(gpt, 8, pp, 1, 12 * pp)?;
        let mut apart = fused.clone();
        apart.cluster.software.stream_slowdown *= UNFUSED_STREAMS;
        Ok::<f64, Reason>(fused.throughput()? / apart.throughput()?)
    };
    let (small, large) = (gain(GPT_175B, 12)?, gain(GPT_530B, 35)?);
    let holds = met(small, 1.19) && met(large, 1.11) && small > large;
    Ok((format!("175B {}, 530B {}", percent(small), percent(large)), holds))
}
