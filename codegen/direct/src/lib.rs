//! Runs a lowered program in this process, without printing it.
//!
//! A generated trainer and [`Direct`] come from the same [`Lowered`] and call the same operations,
//! so they compute the same bits. Tests try thousands of splits so, without compiling thousands of
//! programs.

mod parameters;
mod run;
mod stage;

use codegen::lower::{Lowered, lower};
use models::decisions::{CpStyle, DpReduction, Offload};
use models::formulas::flops::training_flops;
use models::model::Positions;
use models::program::Program;
use runtime::kernels::rope::Yarn;
use runtime::ops::VocabularyShard;
use runtime::stages::{Stage, Stages};
use runtime::state::params::{Inventory, ParameterSlice};
use runtime::{
    ContextParallel, Device, Exchange, HostMemory, Prediction, Reduction, TrainerSpec, Zero,
};
use stage::DirectStage;
use std::sync::Arc;

/// A lowered program, ready to run.
#[derive(Clone, Debug)]
pub struct Direct {
    lowered: Arc<Lowered>,
    prediction: Option<Prediction>,
}

impl Direct {
    /// Lowers a program.
    pub fn new(program: &Program) -> Self {
        let peak_memory_bytes = program.planned_memory_bytes;
        let prediction =
            (peak_memory_bytes > 0).then_some(Prediction { step: None, peak_memory_bytes });
        Self { lowered: Arc::new(lower(program)), prediction }
    }

    /// The same, with what a plan predicts.
    #[must_use]
    pub fn predicted(self, prediction: Prediction) -> Self {
        Self { prediction: Some(prediction), ..self }
    }
}

impl<D: Device> Stages<D> for Direct {
    fn spec(&self) -> TrainerSpec {
        let (program, model) = (&self.lowered.program, &self.lowered.program.model);
        let tokens = (program.global_batch() * program.seq_len()) as f64;
        TrainerSpec {
            mesh: program.mesh,
            experts: program.experts,
            router_losses: parameters::router_losses(program),
            sequence_parallel: program.sequence_parallel,
            context: ContextParallel {
                ranks: program.mesh.cp as usize,
                ulysses: program.cp_ulysses,
                exchange: match program.cp_style {
                    CpStyle::Ring | CpStyle::Ulysses => Exchange::Ring,
                    CpStyle::Zigzag | CpStyle::Hybrid => Exchange::ZigZag,
                    CpStyle::AllGather => Exchange::AllGather,
                },
            },
            micro_batch: program.micro_batch,
            micro_batches: program.micro_batches,
            stages: program.stages.len(),
            layout: program.layout,
            passes: program.passes.clone().into(),
            vocab: program.vocab,
            zero: Zero { stage: program.zero_stage, ways: program.dp_shard },
            reduction: match program.dp_reduction {
                DpReduction::Naive => Reduction::AtEnd,
                DpReduction::Overlapped => Reduction::PerParameter,
                DpReduction::Bucketed => {
                    Reduction::Buckets { bytes: (program.dp_bucket_mib as usize) << 20 }
                }
            },
            host_memory: match program.offload {
                Offload::None => HostMemory::Nothing,
                Offload::Optimizer => HostMemory::Optimizer,
                Offload::Activations => HostMemory::Activations,
            },
            post_validation: program.post_validation,
            seq_len: program.seq_len(),
            hidden: model.hidden as usize,
            vocab_size: model.vocab as usize,
            head_dim: self.lowered.sizes.head_dim as usize,
            value_dim: self.lowered.sizes.value_dim as usize,
            rotary_dim: self.lowered.sizes.rotary_dim as usize,
            rope_theta: (model.positions == Positions::Rope).then_some(model.numerics.rope_theta),
            yarn: model.numerics.yarn.map(|yarn| Yarn {
                factor: yarn.factor,
                original_positions: yarn.original_positions as f64,
                beta_fast: yarn.beta_fast,
                beta_slow: yarn.beta_slow,
                truncate: yarn.truncate,
            }),
            dropout: model.dropout,
            tied_table: model.tied_embeddings.then(|| self.lowered.names.embedding().to_owned()),
            training_flops: training_flops(models::layer::forward_flops(model, tokens)),
            prediction: self.prediction,
            identity: format!("{model:?} {:?}", program.stages),
        }
    }

    fn declare(
        &self,
        index: usize,
        table: Option<ParameterSlice>,
        inventory: &mut Inventory,
    ) -> Box<dyn Stage<D>> {
        Box::new(DirectStage::declare(&self.lowered, index, table, inventory))
    }

    fn declare_shard(
        &self,
        pipeline_rank: usize,
        inventory: &mut Inventory,
    ) -> Option<VocabularyShard> {
        let spec = parameters::shard(&self.lowered)?;
        Some(VocabularyShard::declare(&spec, pipeline_rank, inventory))
    }
}
