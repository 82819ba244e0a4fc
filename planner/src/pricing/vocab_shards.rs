//! Vocabulary layers that are split over ranks.

use super::cost_cache::{CostCache, LayerCostsKey};
use crate::cost::layer::LayerPricer;
use crate::cost::vocabulary::VocabCost;
use models::decisions::Decisions;
use models::model::params;
use models::shapes::{vocabulary_rows, vocabulary_shard_rows};

impl CostCache<'_> {
    /// Vocabulary layers split over tensor-parallel and pipeline ranks.
    pub fn vocabulary_over_pipeline(&self, d: &Decisions) -> VocabCost {
        let shape = self.shape(d);
        let key = (LayerCostsKey::new(&shape), d.pp);
        if let Some(known) = self.vocab_shards.borrow().get(&key) {
            return *known;
        }
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        let rows = vocabulary_shard_rows(self.model.vocab, d.tp * d.pp);
        let cost = pricer.vocabulary(&shape, rows, &shape.tp_group);
        self.vocab_shards.borrow_mut().insert(key, cost);
        cost
    }

    /// Parameters of one of `tp` shards: of the embedding with its learned positions, and of the
    /// output matrix.
    pub fn vocab_params(&self, tp: u64) -> (f64, f64) {
        self.params_of_rows(vocabulary_rows(self.model.vocab, tp))
    }

    /// The same of a shard over tensor-parallel and pipeline ranks.
    pub fn vocab_shard_params(&self, d: &Decisions) -> (f64, f64) {
        self.params_of_rows(vocabulary_shard_rows(self.model.vocab, d.tp * d.pp))
    }

    fn params_of_rows(&self, rows: u64) -> (f64, f64) {
        let matrix = (rows * self.model.hidden) as f64;
        let positions = params::positions(self.model) as f64;
        (matrix + positions, matrix)
    }
}
