//! Two steps of training with ranks as threads, as bits.

use runtime::comm::{Communicator, Options, run_ranks};
use runtime::stages::Stages;
use runtime::state::checkpoint::Checkpoint;
use runtime::{Host, LrSchedule, LrShape, Optimizer, Rank, data};
use std::path::Path;

const STEPS: u64 = 2;

/// Trains on a golden case's tokens from its weights, or from a seed if it has none. Returns the
/// bits of each step's loss and gradient norm, and a sum over those of the final weights.
pub fn bits(stages: &dyn Stages<Host<f64>>, golden: &Path) -> String {
    let ranks = stages.spec().world_size();
    let run = |world| of_rank(stages, golden, world);
    let mut results = run_ranks(ranks, Options::default(), run);
    results.swap_remove(0).expect("rank 0 has the weights")
}

fn of_rank(
    stages: &dyn Stages<Host<f64>>,
    golden: &Path,
    world: Box<dyn Communicator>,
) -> Option<String> {
    let lr = LrSchedule { peak: 1e-3, shape: LrShape::Constant, warmup: 0, steps: STEPS };
    let samples = data::open(&golden.join("tokens.safetensors"), stages.spec().seq_len, 0)
        .expect("the tokens are there");
    let reduction = stages.spec().reduction;
    let mut rank =
        Rank::new(stages, world, Host::<f64>::serial(), reduction, 1234).expect("ranks meet");
    match golden.join("model.safetensors").exists() {
        true => rank.load(&Checkpoint::open(golden).expect("it is there")).expect("they fit"),
        false => rank.initialise().expect("ranks are there"),
    }
    let optimizer = Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
    let mut text = String::new();
    for step in 0..STEPS {
        let result = rank.gradients(&*samples, step, None).expect("the step runs");
        text += &format!("{:016x} {:016x} ", result.loss.to_bits(), result.norm.to_bits());
        rank.update(&optimizer, lr.at(step), result.norm).unwrap();
    }
    let weights = rank.whole_weights().expect("ranks are there")?;
    let values = weights.values().flat_map(|(_, values)| values);
    let sum = values.fold(0_u64, |sum, value| sum.rotate_left(5) ^ value.to_bits());
    Some(format!("{text}{sum:016x}"))
}
