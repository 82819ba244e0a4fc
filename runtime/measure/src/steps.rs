//! Training steps on arbitrary data, to be timed.

use direct::Direct;
use models::decisions::{
    AuxScope, CpStyle, DpReduction, MoeOverlap, Offload, RankOrder, USUAL_BUCKET_MIB,
};
use models::input::Source;
use models::mesh::Mesh;
use models::model::{ModelSpec, read};
use models::program::{Program, Recompute, StageProgram};
use models::schedule::one_f_one_b;
use runtime::Error;
use runtime::comm::Communicator;
use runtime::data::{Sample, Samples};
use runtime::device::Device;
use runtime::stages::Stages;
use runtime::{CudaGraphs, Optimizer, Rank, Reduction};
use std::fmt::Display;

/// Arbitrary tokens.
pub struct Noise {
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Size of the vocabulary.
    pub vocab: u64,
}

impl Samples for Noise {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn repeats(&self) -> bool {
        true
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |i: usize| ((index * 7919 + i as u64 * 104_729) % self.vocab) as i64;
        Ok(Sample::of_tokens((0..=self.seq_len).map(token).collect()))
    }
}

fn wrong(problem: &dyn Display) -> Error {
    Error::World { problem: problem.to_string() }
}

/// The layers of a model file: one stage, one micro-batch, no recomputation.
///
/// # Errors
/// A file that describes no model.
pub fn program_of(model: &str, global_batch: u64, tp: usize, dp: usize) -> Result<Direct, Error> {
    let model = Source::from_bytes("probe.yaml", model.as_bytes().to_vec())
        .and_then(|source| read(&source)?.with_run(None, Some(global_batch)))
        .map_err(|error| wrong(&error))?;
    Ok(Direct::new(&program(&model, tp, dp)?))
}

fn program(model: &ModelSpec, tp: usize, dp: usize) -> Result<Program, Error> {
    let schedule = one_f_one_b(1, 1).map_err(|error| wrong(&error))?;
    Ok(Program {
        model: model.clone(),
        mesh: Mesh { tp: tp as u64, cp: 1, dp: dp as u64, pp: 1, order: RankOrder::DpInner },
        experts: None,
        aux_scope: AuxScope::MicroBatch,
        moe_overlap: MoeOverlap::None,
        moe_chunks: 1,
        sequence_parallel: false,
        fused_loss: false,
        cp_style: CpStyle::Zigzag,
        cp_ulysses: 1,
        micro_batch: (model.global_batch as usize / dp).max(1),
        micro_batches: 1,
        layout: schedule.layout,
        vocab: schedule.vocab,
        zero_stage: 0,
        dp_shard: 1,
        offload: Offload::None,
        dp_reduction: DpReduction::Bucketed,
        dp_bucket_mib: USUAL_BUCKET_MIB,
        post_validation: false,
        recompute_group: 1,
        stages: vec![StageProgram {
            first_layer: 0,
            recompute: vec![Recompute::None; model.layers],
        }],
        passes: schedule.by_rank(),
        planned_memory_bytes: 0,
    })
}

/// A rank that trains one step a call, replayed where [`Rank::replay_steps`] allows it.
///
/// # Errors
/// Those of [`Rank::new`]; each step returns its own.
pub fn training<'a, D: Device + 'a>(
    trained: &'a Direct,
    world: Box<dyn Communicator>,
    device: D,
    when: CudaGraphs,
) -> Result<impl FnMut() -> Result<(), Error> + 'a, Error> {
    let mut rank = Rank::new(trained, world, device, Reduction::default(), 1)?;
    rank.replay_steps(when, None);
    rank.initialise()?;
    let spec = Stages::<D>::spec(trained);
    let samples = Noise { seq_len: spec.seq_len, vocab: spec.vocab_size as u64 };
    let optimizer = Optimizer { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
    let mut number = 0;
    Ok(move || {
        let result = rank.gradients(&samples, number, None)?;
        rank.update(&optimizer, 1e-4, result.norm)?;
        number += 1;
        Ok(())
    })
}
