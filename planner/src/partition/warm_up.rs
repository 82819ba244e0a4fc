//! The warm-up of 1F1B, and the path of a micro-batch through the vocabulary passes.

use super::Problem;
use models::schedule::{LOOK_UPS_AHEAD, VocabPasses};

/// What a stage of 1F1B can run during the round trip of its first micro-batch to the last stage,
/// and by symmetry during that of its last.
///
/// In its order, `forwards` forwards come before the first backward. With vocabulary passes there
/// is one more for each barrier, and the round trip leads through the vocabulary layers. Of the
/// vocabulary passes, only those of micro-batches whose forwards come before the first backward can
/// run before it, and one more where a pass lags behind the barrier that the backward waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Warm {
    forwards: f64,
    vocab: VocabPath,
}

/// The vocabulary passes that every micro-batch goes through.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VocabPath {
    /// All vocabulary passes of one micro-batch on one rank, s.
    pub passes_s: f64,
    /// The same without passes of the input layer alone, s.
    pub output_s: f64,
    /// From the end of the last stage's forward to the start of its backward, s.
    pub path_s: f64,
    /// From the start of `IF` to that of the first stage's forward, and from the end of its
    /// backward to the end of `IB`, s; 0 where the input layer has no passes of its own.
    pub input_s: [f64; 2],
    /// Their algorithm, which determines how many micro-batches are in flight.
    pub passes: Option<VocabPasses>,
}

impl VocabPath {
    /// How much later the last micro-batch starts than the first, at least, s. `IF` follows an
    /// earlier forward of the first stage, and its sum is part of the path from that forward to its
    /// own ([`models::schedule::Schedule::with_input_passes`]).
    pub fn later_s(&self, micro_batches: usize) -> f64 {
        ((micro_batches - 1) / LOOK_UPS_AHEAD) as f64 * self.input_s[0]
    }
}

impl Warm {
    pub(crate) fn of(ranks: usize, micro_batches: usize, stage: usize, vocab: VocabPath) -> Self {
        let plain = ranks - stage;
        let forwards = vocab.passes.map_or(plain, |passes| passes.in_flight(plain));
        Self { forwards: forwards.min(micro_batches) as f64, vocab }
    }

    pub(super) fn new(problem: &Problem, stage: usize) -> Self {
        let pipeline = &problem.pipeline;
        Self::of(pipeline.ranks, pipeline.micro_batches, stage, problem.vocab)
    }

    /// Time by which the round trip through later stages (`below_s`) exceeds the stage's own passes
    /// in the meantime. `pass_s` is the duration of a forward (in cooldown, of a backward).
    pub(crate) fn wait_s(&self, pass_s: f64, below_s: f64) -> f64 {
        (below_s + self.vocab_s() - self.passes() * pass_s).max(0.0)
    }

    /// Forwards before the first backward.
    pub(super) fn forwards(&self) -> f64 {
        self.forwards
    }

    /// Forwards between the first micro-batch's own and its backward.
    pub(super) fn passes(&self) -> f64 {
        self.forwards - 1.0
    }

    /// Time through the vocabulary layers, less the most vocabulary passes that run meanwhile, s.
    pub(super) fn vocab_s(&self) -> f64 {
        let vocab = &self.vocab;
        let run_s = if vocab.output_s > 0.0 { (self.forwards + 1.0) * vocab.output_s } else { 0.0 };
        vocab.path_s - run_s
    }

    /// Whether the waits in warm-up and cooldown are distinct. With few micro-batches they may
    /// coincide.
    pub(super) fn apart(&self, micro_batches: usize) -> bool {
        micro_batches as f64 >= self.forwards + 1.0
    }

    /// Both waits together, or the longer where they may coincide.
    pub(crate) fn both_s(&self, micro_batches: usize, first_s: f64, last_s: f64) -> f64 {
        let apart = self.apart(micro_batches);
        if apart { first_s + last_s } else { first_s.max(last_s) }
    }
}
