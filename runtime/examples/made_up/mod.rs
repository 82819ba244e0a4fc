//! What the trainers written by hand share: sizes of a small model, two of its layers, data made up
//! for it, and a training loop.

pub mod layers;

use models::mesh::Mesh;
use models::mesh::RankOrder;
use models::schedule::one_f_one_b;
use runtime::comm::{Options, run_ranks};
use runtime::data::{Sample, Samples};
use runtime::layers::{Matrix, VocabTable};
use runtime::stages::Stages;
use runtime::{
    ContextParallel, Error, Host, HostMemory, Optimizer, Rank, Reduction, TrainerSpec, Zero,
};

pub const HIDDEN: usize = 16;
/// Columns between the two matrices of the feed-forward block.
pub const WIDTH: usize = 32;
pub const VOCAB: usize = 32;
const SEQUENCES: usize = 2;
const SEQ_LEN: usize = 8;
/// Tokens of a micro-batch.
pub const TOKENS: usize = SEQUENCES * SEQ_LEN;
const MICRO_BATCHES: usize = 4;

/// `tp * pp` ranks, with one stage on each pipeline rank.
pub fn spec(tp: usize, pp: usize, sequence_parallel: bool) -> TrainerSpec {
    let schedule = one_f_one_b(pp, MICRO_BATCHES).expect("a pipeline and micro-batches");
    TrainerSpec {
        experts: None,
        router_losses: None,
        mesh: Mesh { tp: tp as u64, cp: 1, dp: 1, pp: pp as u64, order: RankOrder::DpInner },
        sequence_parallel,
        context: ContextParallel::NONE,
        micro_batch: SEQUENCES,
        micro_batches: MICRO_BATCHES,
        stages: pp,
        layout: schedule.layout,
        passes: schedule.by_rank().into(),
        vocab: None,
        zero: Zero::NONE,
        reduction: Reduction::default(),
        host_memory: HostMemory::Nothing,
        post_validation: false,
        seq_len: SEQ_LEN,
        hidden: HIDDEN,
        vocab_size: VOCAB,
        head_dim: HIDDEN,
        value_dim: HIDDEN,
        rotary_dim: HIDDEN,
        rope_theta: None,
        yarn: None,
        dropout: 0.0,
        tied_table: None,
        training_flops: 0.0,
        prediction: None,
        identity: "made up".to_owned(),
    }
}

/// A matrix of this name.
pub fn matrix(name: &str) -> Matrix {
    Matrix::named(name, 0.1)
}

/// A table of the vocabulary.
pub fn table(name: &str) -> VocabTable {
    let (name, vocab, hidden) = (name.to_owned(), VOCAB, HIDDEN);
    VocabTable { name, vocab, hidden, deviation: 0.1, tied_copy: false }
}

/// Sequences that count with different steps.
struct Counting;

impl Samples for Counting {
    fn len(&self) -> u64 {
        VOCAB as u64
    }

    fn repeats(&self) -> bool {
        true
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |position| (index as i64 * 5 + position * 3) % VOCAB as i64;
        Ok(Sample::of_tokens((0..=SEQ_LEN as i64).map(token).collect()))
    }
}

/// Trains `steps` steps, with ranks as threads. Returns each step's loss.
///
/// # Errors
/// Those of any collective call.
pub fn train(stages: &dyn Stages<Host<f64>>, steps: u64) -> Result<Vec<f64>, Error> {
    let optimizer = Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.0, clip: Some(1.0) };
    let run = |world| {
        let mut rank = Rank::new(stages, world, Host::serial(), Reduction::default(), 1234)?;
        rank.initialise()?;
        let step = |step| {
            let result = rank.gradients(&Counting, step, None)?;
            rank.update(&optimizer, 1e-2, result.norm)?;
            Ok(result.loss)
        };
        (0..steps).map(step).collect()
    };
    run_ranks(stages.spec().world_size(), Options::default(), run).swap_remove(0)
}

/// Trains ten steps and prints their losses.
///
/// # Errors
/// Those of any collective call.
#[allow(dead_code)] // tests train by themselves
pub fn print_losses(stages: &dyn Stages<Host<f64>>) -> Result<(), Error> {
    for (step, loss) in train(stages, 10)?.iter().enumerate() {
        println!("step {step} loss {loss:.4}");
    }
    Ok(())
}
