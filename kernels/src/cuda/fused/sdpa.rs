//! Attention's forward and backward passes as the graphs that cuDNN's fused kernels recognise.
//!
//! cuDNN matches operations, their order and their virtual tensors against fixed patterns. The
//! patterns are those of NVIDIA's cuDNN documentation (developer guide, "Fused Attention fprop" and
//! "Fused Attention bprop") and of `CompositeSDPABackwardNode`, `CompositeSoftmaxNode` and
//! `CompositeDiagonalBandMaskNode` in cudnn-frontend 1.23 (NVIDIA/cudnn-frontend,
//! `include/cudnn_frontend/node`), which hold for all of cuDNN 9.

use super::graph::{Constant, Graph, Id, Kind, Place, Pointwise, Reduction, Role, Tensor};

/// An attention that the graphs can express: every query sees at least one key, by position alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sdpa {
    /// Number of sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub q_len: usize,
    /// Keys of a sequence.
    pub kv_len: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Dimension of queries and keys.
    pub qk_dim: usize,
    /// Dimension of values.
    pub v_dim: usize,
    /// Factor of the scores (softmax scale).
    pub scale: f32,
    /// Query `i` sees key `j` iff `i + shift >= j`; without it, every key.
    pub shift: Option<i32>,
}

/// Which of the graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Computes output and log-sum-exp.
    Forward,
    /// Computes the gradients.
    Backward {
        /// Whether the bits are always the same, at the price of memory for a matrix of scores in
        /// bf16. Otherwise partial sums of the queries' gradient are added with atomics, in no
        /// fixed order.
        repeatable: bool,
    },
}

impl Sdpa {
    /// The graph of a pass.
    #[must_use]
    pub fn graph(&self, pass: Pass) -> Graph {
        let mut graph = Graph::default();
        match pass {
            Pass::Forward => self.forward(&mut graph),
            Pass::Backward { repeatable } => self.backward(&mut graph, repeatable),
        }
        graph
    }

    fn queries(&self, dim: usize, role: Role) -> Tensor {
        let dims = [self.batch, self.q_heads, self.q_len, dim];
        Tensor::by_token(dims, Kind::Bf16, Place::Memory(role))
    }

    fn keys(&self, dim: usize, role: Role) -> Tensor {
        let dims = [self.batch, self.kv_heads, self.kv_len, dim];
        Tensor::by_token(dims, Kind::Bf16, Place::Memory(role))
    }

    /// One number for each query: `[batch, q_heads, q_len, 1]`.
    fn statistics(&self, place: Place) -> Tensor {
        Tensor::packed([self.batch, self.q_heads, self.q_len, 1], Kind::F32, place)
    }

    fn scores(&self) -> Tensor {
        let dims = [self.batch, self.q_heads, self.q_len, self.kv_len];
        Tensor::packed(dims, Kind::F32, Place::Virtual)
    }

    /// A virtual tensor with a row for each key of every query head.
    fn by_key(&self, dim: usize) -> Tensor {
        let dims = [self.batch, self.q_heads, self.kv_len, dim];
        Tensor::packed(dims, Kind::Bf16, Place::Virtual)
    }

    /// `scale q k^T`, where `k` is stored as columns.
    fn scaled_scores(&self, graph: &mut Graph, q: Id, k: Id, scale: Id) -> Id {
        let scores = graph.tensor(self.scores());
        graph.product(q, k, scores);
        graph.each(Pointwise::Multiply, &[scores, scale], Kind::F32)
    }

    /// Scores with minus infinity where a query does not see the key.
    fn masked(&self, graph: &mut Graph, scores: Id) -> Id {
        let Some(shift) = self.shift else { return scores };
        let mut row = graph.each(Pointwise::Index(2), &[scores], Kind::I32);
        let column = graph.each(Pointwise::Index(3), &[scores], Kind::I32);
        if shift > 0 {
            let shift = graph.constant(Constant::I32(shift));
            row = graph.each(Pointwise::Add, &[row, shift], Kind::I32);
        }
        let seen = graph.each(Pointwise::AtLeast, &[row, column], Kind::Bool);
        let hidden = graph.constant(Constant::F32(f32::NEG_INFINITY));
        graph.each(Pointwise::Select, &[scores, hidden, seen], Kind::F32)
    }

    fn forward(&self, graph: &mut Graph) {
        let q = graph.tensor(self.queries(self.qk_dim, Role::Q));
        let k = graph.tensor(self.keys(self.qk_dim, Role::K).transposed());
        let v = graph.tensor(self.keys(self.v_dim, Role::V));
        let out = graph.tensor(self.queries(self.v_dim, Role::Out));
        let lse = graph.tensor(self.statistics(Place::Memory(Role::Lse)));

        let scale = graph.constant(Constant::F32(self.scale));
        let scores = self.scaled_scores(graph, q, k, scale);
        let scores = self.masked(graph, scores);
        let max = graph.tensor(self.statistics(Place::Virtual));
        graph.reduce(Reduction::Max, scores, max);
        let less = graph.each(Pointwise::Subtract, &[scores, max], Kind::F32);
        let weights = graph.each(Pointwise::Exp, &[less], Kind::F32);
        let sum = graph.tensor(self.statistics(Place::Virtual));
        graph.reduce(Reduction::Sum, weights, sum);
        let log = graph.each(Pointwise::Log, &[sum], Kind::F32);
        graph.each_into(Pointwise::Add, &[max, log], lse);
        let probabilities = graph.each(Pointwise::Divide, &[weights, sum], Kind::Bf16);
        graph.product(probabilities, v, out);
    }

    fn backward(&self, graph: &mut Graph, repeatable: bool) {
        let q = graph.tensor(self.queries(self.qk_dim, Role::Q));
        let k = graph.tensor(self.keys(self.qk_dim, Role::K).transposed());
        let v = graph.tensor(self.keys(self.v_dim, Role::V).transposed());
        let out = graph.tensor(self.queries(self.v_dim, Role::Out));
        let lse = graph.tensor(self.statistics(Place::Memory(Role::Lse)));
        let dout = graph.tensor(self.queries(self.v_dim, Role::Dout));

        let delta = self.delta(graph, out, dout);
        let scale = graph.constant(Constant::F32(self.scale));
        let scores = self.scaled_scores(graph, q, k, scale);
        let scores = graph.each(Pointwise::Subtract, &[scores, lse], Kind::F32);
        let scores = self.masked(graph, scores);
        let probabilities = graph.each(Pointwise::Exp, &[scores], Kind::F32);
        self.by_key_sums(graph, probabilities, dout, self.keys(self.v_dim, Role::Dv));

        let dp = graph.tensor(self.scores());
        graph.product(dout, v, dp);
        let less = graph.each(Pointwise::Subtract, &[dp, delta], Kind::F32);
        let ds = graph.each(Pointwise::Multiply, &[less, probabilities], Kind::F32);
        let ds = graph.each(Pointwise::Multiply, &[ds, scale], Kind::F32);
        self.by_key_sums(graph, ds, q, self.keys(self.qk_dim, Role::Dk));
        self.dq(graph, ds, k, repeatable);
    }

    /// Sums over rows of `out dout`. The factor of 1 stands where the pattern has dropout's.
    fn delta(&self, graph: &mut Graph, out: Id, dout: Id) -> Id {
        let products = graph.each(Pointwise::Multiply, &[dout, out], Kind::F32);
        let sums = graph.tensor(self.statistics(Place::Virtual));
        graph.reduce(Reduction::Sum, products, sums);
        let one = graph.constant(Constant::F32(1.0));
        let delta = graph.tensor(self.statistics(Place::Memory(Role::Delta)));
        graph.each_into(Pointwise::Multiply, &[sums, one], delta)
    }

    /// `scores^T rows`, summed over the query heads that share a key-value head.
    fn by_key_sums(&self, graph: &mut Graph, scores: Id, rows: Id, gradient: Tensor) {
        let columns = graph.reshape(scores, self.scores().transposed().stored(Kind::Bf16));
        let dim = gradient.dims[3];
        let gradient = graph.tensor(gradient);
        if self.q_heads == self.kv_heads {
            graph.product(columns, rows, gradient);
            return;
        }
        let all_heads = graph.tensor(self.by_key(dim));
        graph.product(columns, rows, all_heads);
        graph.reduce(Reduction::Sum, all_heads, gradient);
    }

    fn dq(&self, graph: &mut Graph, ds: Id, k: Id, repeatable: bool) {
        let rows = Tensor { place: Place::Virtual, ..self.keys(self.qk_dim, Role::K) };
        let k = graph.reshape(k, rows.stored(Kind::F32));
        let dq = graph.tensor(self.queries(self.qk_dim, Role::Dq));
        if repeatable {
            graph.product(ds, k, dq);
            return;
        }
        let dims = [self.batch, self.q_heads, self.q_len, self.qk_dim];
        let sums = Tensor::packed(dims, Kind::F32, Place::Memory(Role::DqSums));
        let sums = graph.tensor(sums);
        graph.product(ds, k, sums);
        graph.each_into(Pointwise::Identity, &[sums], dq);
    }
}
