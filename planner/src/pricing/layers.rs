//! The layers of a model by kind, with counts over any range in constant time.

use models::model::{LayerKind, ModelSpec};

/// Layers grouped by kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers {
    /// Distinct kinds, in order of first appearance.
    pub kinds: Vec<LayerKind>,
    /// `before[i][k]`: layers of kind `k` among the first `i`.
    before: Vec<Vec<usize>>,
    /// Kind of each layer, as an index into `kinds`.
    kind_of: Vec<usize>,
}

/// Layers of each kind; there are at most four kinds, windowed or not and experts or not.
pub type Counts = [usize; 4];

impl Layers {
    /// Groups a model's layers.
    pub fn new(model: &ModelSpec) -> Self {
        let mut kinds: Vec<LayerKind> = vec![];
        let (mut before, mut kind_of) = (vec![vec![]], vec![]);
        for index in 0..model.layers {
            let kind = model.layer_kind(index);
            let position = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            });
            let mut counts = before[index].clone();
            counts.resize(kinds.len(), 0);
            counts[position] += 1;
            kind_of.push(position);
            before.push(counts);
        }
        for counts in &mut before {
            counts.resize(kinds.len(), 0);
        }
        Self { kinds, before, kind_of }
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.before.len() - 1
    }

    /// Whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether all layers are of one kind.
    pub fn is_uniform(&self) -> bool {
        self.kinds.len() <= 1
    }

    /// Kind of a layer, as an index into `kinds`.
    pub fn kind_of(&self, layer: usize) -> usize {
        self.kind_of[layer]
    }

    /// Layers of each kind in `start..end`, without allocation.
    pub fn between(&self, start: usize, end: usize) -> Counts {
        let mut counts = Counts::default();
        for (count, (to, from)) in
            counts.iter_mut().zip(self.before[end].iter().zip(&self.before[start]))
        {
            *count = to - from;
        }
        counts
    }

    /// Layers of each kind in `start..end`.
    pub fn counts(&self, start: usize, end: usize) -> Vec<usize> {
        self.before[end].iter().zip(&self.before[start]).map(|(to, from)| to - from).collect()
    }
}
