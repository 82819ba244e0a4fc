//! What the threads of a search share: values that do not depend on which thread computes them.

use super::StatesKey;
use crate::bounds::states::States;
use crate::bounds::workload::MicroBatchCost;
use crate::pricing::cost_cache::LayerCostsKey;
use crate::pricing::pipelines::Pipelines;
use rustc_hash::FxHashMap as HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

/// Entries kept of [`Shared::least_works`], half a kilobyte each.
const MOST_LEAST_WORKS: usize = 1 << 16;

/// Caches of all threads. A thread's own caches need no lock, and keep what is asked for more often
/// or takes less to compute.
#[derive(Default)]
pub(in crate::search) struct Shared {
    /// Orders of passes.
    pub pipelines: Arc<Pipelines>,
    /// Choices of parameter state.
    pub(super) states: Known<StatesKey, States>,
    /// The least costs of layouts that differ in the overlap of the all-to-all: by cost key of the
    /// first split, number of splits and whether there are several stages.
    pub(super) least_works: Known<(LayerCostsKey, usize, bool), MicroBatchCost>,
}

/// Values by what they depend on.
pub(super) struct Known<K, V>(Mutex<HashMap<K, Arc<V>>>);

impl<K, V> Default for Known<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V> Known<K, V> {
    /// The value of a key, which `make` gives where it is not known. Two threads that ask at the
    /// same time both make it: neither waits for the other.
    pub fn get(&self, key: K, most: usize, make: impl FnOnce() -> V) -> Arc<V> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key) {
            return Arc::clone(known);
        }
        let made = Arc::new(make());
        let mut known = lock();
        if known.len() >= most {
            known.clear();
        }
        known.insert(key, Arc::clone(&made));
        made
    }
}

impl Shared {
    /// The least cost of a key's layouts.
    pub(super) fn least_work(
        &self,
        key: (LayerCostsKey, usize, bool),
        make: impl FnOnce() -> MicroBatchCost,
    ) -> Arc<MicroBatchCost> {
        self.least_works.get(key, MOST_LEAST_WORKS, make)
    }
}
