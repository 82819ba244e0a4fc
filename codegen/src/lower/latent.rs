//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and
//! values of each head are projected up from latent vectors.
//!
//! Every tensor-parallel rank computes the latent vectors of all tokens, and from them its own
//! heads. What lies before a latent vector is linear in the vector's gradient, so the partial sums
//! of the ranks go back through norm and down-projection to the layer's input gradient, which is
//! reduced as in any attention. Gradients of these norms and matrices are partial sums too.

use super::builder::Builder;
use super::feed_forward::LaterWeights;
use super::op::{FieldIndex, Op, Value};
use super::{FieldKind, LatentNames, Matrix, Placement, Rows, TensorNames, Type, Width};
use models::model::{Mla, ModelSpec};

/// Fields of latent attention.
pub(super) struct Latent {
    /// From the input to queries, through a latent vector or at once.
    query: Query,
    /// From the input to the latent vector of keys and values.
    kv: Down,
    /// From the input to the part of keys that all heads share, which is rotated.
    k_rotary: FieldIndex,
    kv_up: FieldIndex,
}

#[derive(Clone, Copy)]
enum Query {
    Direct(FieldIndex),
    Latent { down: Down, up: FieldIndex },
}

/// A latent vector before and behind its norm, and the norm's statistics.
#[derive(Clone, Copy)]
struct Normed {
    down: Value,
    latent: Value,
    statistics: Value,
}

/// What the backward pass reads of how queries, keys and values were made.
pub(super) struct LatentMade {
    q: Option<Normed>,
    kv: Normed,
}

impl LatentMade {
    /// Norms of latent vectors, which are quickly computed again.
    pub(super) fn norms(&self) -> Vec<Value> {
        self.q.into_iter().chain([self.kv]).map(|normed| normed.latent).collect()
    }
}

/// What makes a latent vector.
#[derive(Clone, Copy)]
struct Down {
    /// What the names of its values begin with.
    name: &'static str,
    width: Width,
    matrix: FieldIndex,
    norm: FieldIndex,
}

/// Declares the fields of latent attention.
struct Fields<'a, 'b> {
    b: &'a mut Builder<'b>,
    /// Whether checkpoints store matrices `[in, out]`.
    transposed: bool,
    /// Whether down-projections have biases.
    bias: bool,
}

impl Fields<'_, '_> {
    fn matrix(&self, tensor: &'static str, blocks: &[Width]) -> Matrix {
        let (blocks, transposed) = (blocks.to_vec(), self.transposed);
        Matrix { tensor, blocks, transposed, bias: false, adds_to_stream: false }
    }

    /// A block of a down-projection.
    fn down(
        &mut self,
        name: &'static str,
        tensor: &'static str,
        blocks: &[Width],
        block: usize,
    ) -> FieldIndex {
        let matrix = Matrix { bias: self.bias, ..self.matrix(tensor, blocks) };
        self.b.field(name, FieldKind::Down { matrix, block, outputs: blocks[block] })
    }

    fn norm(&mut self, name: &'static str, tensor: &'static str, width: Width) -> FieldIndex {
        self.b.field(name, FieldKind::LatentNorm { tensor, width })
    }

    fn up(
        &mut self,
        name: &'static str,
        tensor: &'static str,
        inputs: Width,
        outputs: Width,
    ) -> FieldIndex {
        let matrix = self.matrix(tensor, &[outputs]);
        self.b.field(name, FieldKind::Up { matrix, inputs, outputs })
    }

    fn query(&mut self, mla: Mla, tensors: LatentNames) -> Query {
        let (width, outputs) = (Width::QueryLatent, Width::Query);
        if mla.q_rank.is_none() {
            let matrix = self.matrix(tensors.q, &[outputs]);
            let field = FieldKind::Column { matrix, block: 0, outputs };
            return Query::Direct(self.b.field("q", field));
        }
        let matrix = self.down("q_down", tensors.q_down, &[width], 0);
        let norm = self.norm("q_norm", tensors.q_norm, width);
        let down = Down { name: "q", width, matrix, norm };
        Query::Latent { down, up: self.up("q_up", tensors.q_up, width, outputs) }
    }
}

impl Latent {
    /// The fields, attention's core, and its output matrix.
    pub(super) fn fields(
        b: &mut Builder<'_>,
        model: &ModelSpec,
        mla: Mla,
        names: TensorNames,
    ) -> (Self, FieldIndex, FieldIndex) {
        let tensors = TensorNames::latent();
        let bias = model.attention.qkv_bias;
        let mut fields = Fields { b, transposed: names.is_gpt2(), bias };
        let query = fields.query(mla, tensors);
        let (width, blocks) = (Width::KeyValueLatent, [Width::KeyValueLatent, Width::Rotary]);
        let matrix = fields.down("kv_down", tensors.kv_down, &blocks, 0);
        let k_rotary = fields.down("k_rotary", tensors.kv_down, &blocks, 1);
        let norm = fields.norm("kv_norm", tensors.kv_norm, width);
        let kv = Down { name: "kv", width, matrix, norm };
        let kv_up = fields.up("kv_up", tensors.kv_up, width, Width::UpProjected);
        let [_, _, _, out] = names.attention();
        let matrix = fields.matrix(out, &[]);
        let bias = model.attention.out_bias && b.sizes.tp == 1;
        let matrix = Matrix { adds_to_stream: true, bias, ..matrix };
        let out = b.field("out", FieldKind::Row { matrix, inputs: Width::Value });
        let core = b.field("attention", FieldKind::LatentAttention);
        (Self { query, kv, k_rotary, kv_up }, core, out)
    }

    /// Queries, keys and values. `core` is attention's core.
    pub(super) fn project(
        &self,
        b: &mut Builder<'_>,
        core: FieldIndex,
        x: Value,
    ) -> ([Value; 3], LatentMade) {
        let (sizes, field) = (b.sizes, core);
        let query = sizes.split(Width::Query);
        let (q, q_latent) = match self.query {
            Query::Direct(field) => (b.op("q", query, |to| Op::Linear { field, x, to }), None),
            Query::Latent { down, up: field } => {
                let normed = down.forward(b, x);
                let x = normed.latent;
                (b.op("q", query, |to| Op::Linear { field, x, to }), Some(normed))
            }
        };
        let q = rotated(b, field, "q", q, query);
        let kv = self.kv.forward(b, x);
        let shared = whole(Width::Rotary);
        let make = |to| Op::Linear { field: self.k_rotary, x, to };
        let k_rotary = b.op("k_rotary", shared, make);
        let k_rotary = rotated(b, field, "k_rotary", k_rotary, shared);
        let make = |to| Op::Linear { field: self.kv_up, x: kv.latent, to };
        let up = b.op("kv", sizes.split(Width::UpProjected), make);
        let k = b.value("k", query);
        let v = b.value("v", sizes.split(Width::Value));
        b.push(Op::JoinHeads { field, up, rotary: k_rotary, to: [k, v] });
        ([q, k, v], LatentMade { q: q_latent, kv })
    }

    /// The gradient of the input, a partial sum, and the work on weights, from the gradients of
    /// queries, keys and values.
    pub(super) fn backward(
        &self,
        b: &mut Builder<'_>,
        core: FieldIndex,
        made: &LatentMade,
        gradients: [Value; 3],
    ) -> (Value, Vec<LaterWeights>) {
        let part = b.sizes.part();
        let [dq, dkv, drotary] = Self::backward_heads(b, core, gradients);
        let later = |field, x, dy| LaterWeights { field, x, dy };
        let mut weights = Vec::new();
        let (field, dy) = match (self.query, made.q) {
            (Query::Direct(field), _) => (field, dq),
            (Query::Latent { down, up }, normed) => {
                let normed = normed.expect("the forward pass made it");
                weights.push(later(up, Some(normed.latent), dq));
                (down.matrix, down.backward(b, normed, up, dq))
            }
        };
        weights.push(later(field, None, dy));
        let dh = b.op("dpart", part, |to| Op::BackwardInput { field, dy, to });
        weights.push(later(self.kv_up, Some(made.kv.latent), dkv));
        let dkv_down = self.kv.backward(b, made.kv, self.kv_up, dkv);
        weights.push(later(self.kv.matrix, None, dkv_down));
        weights.push(later(self.k_rotary, None, drotary));
        let mut add =
            |x, field, dy| b.op("dpart", part, |to| Op::AddBackwardInput { field, dy, x, to });
        let dh = add(dh, self.kv.matrix, dkv_down);
        (add(dh, self.k_rotary, drotary), weights)
    }

    /// Gradients of queries, of what keys and values are made from, and of the shared part of
    /// keys.
    fn backward_heads(
        b: &mut Builder<'_>,
        field: FieldIndex,
        [dq, dk, dv]: [Value; 3],
    ) -> [Value; 3] {
        let sizes = b.sizes;
        let dq = rotated_back(b, field, "dq", dq, sizes.split(Width::Query));
        let shared = sum(b, Width::Rotary);
        let dkv = b.value("dkv", sizes.split(Width::UpProjected));
        let drotary = b.value("dk_rotary", shared);
        b.push(Op::SplitHeads { field, dk, dv, to: [dkv, drotary] });
        [dq, dkv, rotated_back(b, field, "dk_rotary", drotary, shared)]
    }
}

impl Down {
    fn forward(&self, b: &mut Builder<'_>, x: Value) -> Normed {
        let (of, name) = (whole(self.width), self.name);
        let make = |to| Op::Linear { field: self.matrix, x, to };
        let down = b.op(format!("{name}_down"), of, make);
        let latent = b.value(format!("{name}_latent"), of);
        let statistics = b.value(format!("{name}_s"), Type::TokenStatistics);
        let (field, to) = (self.norm, latent);
        b.push(Op::NormOf { field, x: down, to, statistics: Some(statistics) });
        Normed { down, latent, statistics }
    }

    /// The gradient of what the norm takes, from that of what is projected up.
    fn backward(&self, b: &mut Builder<'_>, of: Normed, up: FieldIndex, dy: Value) -> Value {
        let (partial, name) = (sum(b, self.width), self.name);
        let make = |to| Op::BackwardInput { field: up, dy, to };
        let dy = b.op(format!("d{name}_latent"), partial, make);
        let (field, x, statistics) = (self.norm, of.down, of.statistics);
        b.push(Op::NormWeights { field, x, statistics, dy });
        let make = |to| Op::NormBackward { field, x, statistics, dy, sum: None, to };
        b.op(format!("d{name}_down"), partial, make)
    }
}

/// A tensor of all tokens that every rank has.
fn whole(width: Width) -> Type {
    Type::Tensor(Placement::Whole, Rows::Tokens, width)
}

/// A sum over the ranks' heads.
fn sum(b: &Builder<'_>, width: Width) -> Type {
    let placement = if b.sizes.tp > 1 { Placement::Partial } else { Placement::Whole };
    Type::Tensor(placement, Rows::Tokens, width)
}

fn rotated(b: &mut Builder<'_>, field: FieldIndex, name: &str, x: Value, of: Type) -> Value {
    match b.sizes.rotary {
        true => b.op(name, of, |to| Op::Rotate { field, x, to }),
        false => x,
    }
}

fn rotated_back(b: &mut Builder<'_>, field: FieldIndex, name: &str, x: Value, of: Type) -> Value {
    match b.sizes.rotary {
        true => b.op(name, of, |to| Op::RotateBack { field, x, to }),
        false => x,
    }
}
