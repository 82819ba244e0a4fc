//! Runs a [`Program`] that is described as data, layer by layer.

mod stage;

use crate::device::Device;
use crate::layers::{TensorNames, VocabularyShard};
use crate::spec::{Prediction, TrainerSpec};
use crate::stages::Stages;
use crate::state::params::{Inventory, ParameterSlice};
use models::formulas::flops::training_flops;
use models::model::Positions;
use models::program::Program;
use stage::Stage;

impl<D: Device> Stages<D> for Program {
    fn spec(&self) -> TrainerSpec {
        let model = &self.model;
        let tokens = (self.global_batch() * self.seq_len()) as f64;
        TrainerSpec {
            mesh: self.mesh,
            sequence_parallel: self.sequence_parallel,
            micro_batch: self.micro_batch,
            micro_batches: self.micro_batches,
            stages: self.stages.len(),
            layout: self.layout,
            passes: self.passes.clone(),
            vocab: self.vocab,
            post_validation: self.post_validation,
            seq_len: self.seq_len(),
            hidden: model.hidden as usize,
            vocab_size: model.vocab as usize,
            head_dim: model.attention.head_dim as usize,
            rope_theta: (model.positions == Positions::Rope).then_some(model.numerics.rope_theta),
            dropout: model.dropout,
            tied_table: model
                .tied_embeddings
                .then(|| TensorNames::of(model).embedding().to_owned()),
            training_flops: training_flops(models::layer::forward_flops(model, tokens)),
            prediction: (self.planned_memory_bytes > 0)
                .then_some(Prediction { step: None, peak_memory_bytes: self.planned_memory_bytes }),
            identity: format!("{model:?} {:?}", self.stages),
        }
    }

    fn declare(
        &self,
        index: usize,
        table: Option<ParameterSlice>,
        inventory: &mut Inventory,
    ) -> Box<dyn crate::stages::Stage<D>> {
        Box::new(Stage::declare(self, index, table, inventory))
    }

    fn declare_shard(
        &self,
        pipeline_rank: usize,
        inventory: &mut Inventory,
    ) -> Option<VocabularyShard> {
        VocabularyShard::declare(self, pipeline_rank, inventory)
    }
}
