//! Two steps of training with ranks as threads, as bits.

use runtime::comm::{Communicator, Options, run_ranks};
use runtime::stages::Stages;
use runtime::state::checkpoint::Checkpoint;
use runtime::{Host, LrSchedule, LrShape, Optimizer, Rank, data};
use std::path::Path;

const STEPS: u64 = 2;

/// Trains on a golden case's tokens, from its weights or from the seed. Returns the bits of each
/// step's losses and gradient norm, and a sum over those of the final weights.
pub fn bits(stages: &dyn Stages<Host<f64>>, golden: &Path, has_weights: bool) -> String {
    let ranks = stages.spec().world_size();
    let run = |world| of_rank(stages, golden, has_weights, world);
    let mut results = run_ranks(ranks, Options::default(), run);
    results.swap_remove(0).expect("rank 0 has the weights")
}

fn of_rank(
    stages: &dyn Stages<Host<f64>>,
    golden: &Path,
    has_weights: bool,
    world: Box<dyn Communicator>,
) -> Option<String> {
    let lr = LrSchedule { peak: 1e-3, shape: LrShape::Constant, warmup: 0, steps: STEPS };
    let samples = data::open(&golden.join("tokens.safetensors"), stages.spec().seq_len, 0)
        .expect("the tokens are there");
    let reduction = stages.spec().reduction;
    let mut rank =
        Rank::new(stages, world, Host::<f64>::serial(), reduction, 1234).expect("ranks meet");
    if has_weights {
        rank.load(&Checkpoint::open(golden).expect("the weights are there")).expect("they fit");
    } else {
        rank.initialise().expect("the device works");
    }
    let optimizer = Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
    let mut text = String::new();
    for step in 0..STEPS {
        let result = rank.gradients(&*samples, step, None).expect("the step runs");
        let loss = result.loss + result.aux_loss;
        text += &format!("{:016x} {:016x} ", loss.to_bits(), result.norm.to_bits());
        rank.update(&optimizer, lr.at(step), result.norm).unwrap();
    }
    let weights = rank.whole_weights().expect("ranks are there")?;
    let values = weights.values().flat_map(|(_, values)| values);
    let sum = values.fold(0_u64, |sum, value| sum.rotate_left(5) ^ value.to_bits());
    Some(format!("{text}{sum:016x}"))
}
