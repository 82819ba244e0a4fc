//! What pipeline ranks send to one another.

use super::run::{F32, RUNS, handed};
use models::formulas::communication::LOSS_STATISTICS;
use models::schedule::{PassKind, VocabPasses};

#[test]
fn pipeline_transfers_send_what_was_planned() {
    for run in &*RUNS {
        let (tp, ranks) = (run.program.mesh.tp as f64, run.program.mesh.pp as usize);
        for rank in &run.ranks {
            // One transfer for each stage boundary between pipeline ranks.
            let pp_rank = run.pp_rank(rank);
            let (stages, layout) = (run.program.stages.len(), run.program.layout);
            let own = run.program.stages_of(pp_rank).into_iter().enumerate();
            let boundaries = own.map(|(chunk, stage)| {
                let from = if layout.copies() > 1 { chunk as u16 } else { 0 };
                let other = |stage| layout.holder(ranks, stage, from).0 != pp_rank;
                usize::from(stage + 1 < stages && other(stage + 1))
                    + usize::from(stage > 0 && other(stage - 1))
            });
            let boundaries = boundaries.sum::<usize>();
            // The copies of a stage exchange their gradients.
            let copied = run.copied_bytes(pp_rank);
            // Each tensor-parallel rank sends its share (SC'21, section 4.1).
            let each = run.activation() / tp;
            let planned = |transfers: usize| run.micro_batches() * transfers as f64 * each * F32;
            // An output layer split over all pipeline ranks gets its input from the last stage.
            let (told, heard) = match (&run.program.vocab, run.program.last_rank() == pp_rank) {
                (None, _) => (0, 0),
                (Some(_), true) => (ranks - 1, 0),
                (Some(_), false) => (0, 1),
            };
            let [sent, received] = [told, heard].map(|more| planned(boundaries + more) + copied);
            assert_eq!(handed(rank, "pp", "send"), sent, "{} pp_rank {pp_rank}", run.what);
            assert_eq!(handed(rank, "pp", "recv"), received, "{} pp_rank {pp_rank}", run.what);
        }
    }
}

/// The reductions of a vocabulary split over the pipeline: for every token the maximum, sum and
/// target (`C1`); for every micro-batch the output layer's input gradient (`C2`, or with `C1`), the
/// input layer's rows and their gradient (Vocabulary Parallelism, section 4 and appendix C).
#[test]
fn vocabulary_passes_reduce_what_was_planned() {
    for run in &*RUNS {
        let Some(vocab) = run.program.vocab else { continue };
        let (tokens, activation) = (run.tokens(), run.activation());
        let [first, middle, last] = match vocab {
            VocabPasses::Naive => [tokens, 2.0 * tokens, activation],
            VocabPasses::One | VocabPasses::Interlaced => {
                [LOSS_STATISTICS * tokens, 0.0, activation]
            }
            VocabPasses::Two => [LOSS_STATISTICS * tokens + activation, 0.0, 0.0],
        };
        let barriers = vocab.kinds().iter().filter(|&&kind| match kind {
            PassKind::S => first > 0.0,
            PassKind::S2 => middle > 0.0,
            _ => last > 0.0,
        });
        assert_eq!(barriers.count(), vocab.barriers(), "{}", run.what);
        for rank in &run.ranks {
            for (group, call, elements) in [
                ("vocab_s", "all_reduce", first),
                ("vocab_s2", "all_reduce", middle),
                ("vocab_t", "all_reduce", last),
                ("vocab_input", "all_reduce", activation),
                ("vocab_input_gradient", "broadcast", activation),
            ] {
                let planned = run.micro_batches() * elements * F32;
                assert_eq!(handed(rank, group, call), planned, "{} {group}", run.what);
            }
        }
    }
}
