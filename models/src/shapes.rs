//! Shapes of the tensors on one rank, `[rows, columns]`, with weights as `[out, in]`.
//!
//! Column-parallel weights have `out/t` rows and row-parallel ones `in/t` columns (SC'21 §2.3).
//! Key/value heads are copied where tensor-parallel ranks outnumber them. The vocabulary is padded
//! until all ranks hold equally many rows; over the pipeline, an even number of rows (Vocabulary
//! Parallelism §6.1).

use crate::layer::LocalHeads;
use crate::mesh::ExpertSplit;
use crate::model::{Mla, ModelSpec, Moe, NormKind, Positions, Router};
use crate::program::Program;

/// A tensor's part on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// What it is.
    pub name: &'static str,
    /// Its shape here.
    pub shape: Vec<u64>,
}

fn held(name: &'static str, shape: &[u64]) -> Held {
    Held { name, shape: shape.to_vec() }
}

/// Tensors of layer `index` on one rank.
pub fn layer(program: &Program, index: usize) -> Vec<Held> {
    let (model, tp) = (&program.model, program.mesh.tp);
    let h = model.hidden;
    let heads = LocalHeads::new(model, tp);
    let mut tensors = match model.attention.mla {
        Some(mla) => latent(model, mla, &heads),
        None => projections(model, &heads),
    };
    tensors.push(held("out", &[h, heads.out_width()]));
    if model.attention.out_bias {
        tensors.push(held("out bias", &[h]));
    }
    if model.attention.sinks {
        tensors.push(held("sinks", &[heads.heads]));
    }
    if model.attention.qk_norm {
        tensors.extend(["q norm", "k norm"].map(|name| held(name, &[heads.qk_dim])));
    }
    tensors.extend(match (&model.moe, model.layer_kind(index).moe) {
        (Some(moe), true) => experts(program, moe),
        _ => dense(model, model.mlp.ffn / tp, model.mlp.bias),
    });
    for _ in 0..model.norm.per_layer {
        tensors.extend(norm(model));
    }
    tensors
}

/// Queries, keys and values from the layer's input.
fn projections(model: &ModelSpec, heads: &LocalHeads) -> Vec<Held> {
    let h = model.hidden;
    let (q, k, v) = (heads.q_width(), heads.kv_heads * heads.qk_dim, heads.kv_heads * heads.v_dim);
    let mut tensors = vec![held("q", &[q, h]), held("k", &[k, h]), held("v", &[v, h])];
    if model.attention.qkv_bias {
        tensors.extend([held("q bias", &[q]), held("k bias", &[k]), held("v bias", &[v])]);
    }
    tensors
}

/// The same of latent attention: down-projections and norms whole, up-projections by heads.
fn latent(model: &ModelSpec, mla: Mla, heads: &LocalHeads) -> Vec<Held> {
    let (h, q) = (model.hidden, heads.q_width());
    let down = |name, bias, width: u64| {
        let biases = model.attention.qkv_bias.then(|| held(bias, &[width]));
        std::iter::once(held(name, &[width, h])).chain(biases)
    };
    let mut tensors = match mla.q_rank {
        None => vec![held("q", &[q, h])],
        Some(rank) => {
            let up = [held("q latent norm", &[rank]), held("q up", &[q, rank])];
            down("q down", "q down bias", rank).chain(up).collect()
        }
    };
    tensors.extend(down("kv down", "kv down bias", mla.kv_rank));
    tensors.extend(down("k rotary", "k rotary bias", mla.rope_dim));
    let up = heads.heads * (model.attention.head_dim + heads.v_dim);
    tensors.extend([held("kv latent norm", &[mla.kv_rank]), held("kv up", &[up, mla.kv_rank])]);
    tensors
}

/// A feed-forward block.
fn dense(model: &ModelSpec, f: u64, bias: bool) -> Vec<Held> {
    let mut tensors = matrices(model, f);
    if bias {
        let gate = model.mlp.activation.is_gated().then(|| held("gate bias", &[f]));
        tensors.extend(gate);
        tensors.extend([held("up bias", &[f]), held("down bias", &[model.hidden])]);
    }
    tensors
}

fn matrices(model: &ModelSpec, f: u64) -> Vec<Held> {
    let h = model.hidden;
    let gate = model.mlp.activation.is_gated().then(|| held("gate", &[f, h]));
    gate.into_iter().chain([held("up", &[f, h]), held("down", &[h, f])]).collect()
}

/// A router, this rank's experts, and its part of those that every token goes to.
fn experts(program: &Program, moe: &Moe) -> Vec<Held> {
    let ExpertSplit { ep, etp } = program.experts.unwrap_or(ExpertSplit { ep: 1, etp: 1 });
    let mut tensors = vec![held("router", &[moe.experts, program.model.hidden])];
    if moe.biased {
        tensors.push(held("router bias", &[moe.experts]));
    }
    if moe.router == Router::SigmoidBias {
        tensors.push(held("selection bias", &[moe.experts]));
    }
    for _ in 0..moe.experts / ep {
        tensors.extend(dense(&program.model, moe.ffn / etp, program.model.expert_bias()));
    }
    if moe.shared_ffn > 0 {
        tensors.extend(matrices(&program.model, moe.shared_ffn / program.mesh.tp));
    }
    tensors
}

fn norm(model: &ModelSpec) -> Vec<Held> {
    let mut tensors = vec![held("norm", &[model.hidden])];
    if model.norm.kind == NormKind::LayerNorm {
        tensors.push(held("norm bias", &[model.hidden]));
    }
    tensors
}

/// Rows of a shard of the vocabulary are a multiple of this: logits in 16 bits then have rows of
/// whole 16 bytes, which fast matrix products need (cuBLAS, "Tensor Core Usage").
const ROWS: u64 = 8;

/// Rows of the vocabulary on one of `tp` ranks, padding included. The last ranks of a small
/// vocabulary may hold padding alone.
pub fn vocabulary_rows(vocab: u64, tp: u64) -> u64 {
    vocab.div_ceil(tp).next_multiple_of(ROWS)
}

/// Tensors before the first layer.
pub fn embedding(model: &ModelSpec, tp: u64) -> Vec<Held> {
    let table = held("embedding", &[vocabulary_rows(model.vocab, tp), model.hidden]);
    std::iter::once(table).chain(positions(model)).collect()
}

/// Learned positions, where there are any.
fn positions(model: &ModelSpec) -> Option<Held> {
    match model.positions {
        Positions::Learned { max } => Some(held("positions", &[max, model.hidden])),
        Positions::Rope => None,
    }
}

/// Tensors after the last layer. A tied output matrix is the embedding itself where one pipeline
/// rank holds both.
pub fn head(model: &ModelSpec, tp: u64, has_embedding: bool) -> Vec<Held> {
    let mut tensors = norm(model);
    if !(model.tied_embeddings && has_embedding) {
        tensors.push(held("output", &[vocabulary_rows(model.vocab, tp), model.hidden]));
    }
    tensors
}

/// Rows of a vocabulary split over `shards` ranks, those of all pipeline ranks.
pub fn vocabulary_shard_rows(vocab: u64, shards: u64) -> u64 {
    let rows = crate::formulas::vocabulary::padded_vocab(vocab, shards, 1) / shards;
    rows.next_multiple_of(ROWS)
}

/// Tensors of a vocabulary split over `shards` ranks, on each of them. Tied tensors are one.
pub fn vocabulary_shard(model: &ModelSpec, shards: u64) -> Vec<Held> {
    let shape = [vocabulary_shard_rows(model.vocab, shards), model.hidden];
    let output = (!model.tied_embeddings).then(|| held("output", &shape));
    std::iter::once(held("embedding", &shape)).chain(output).collect()
}

/// Tensors of a stage before its first layer and after its last.
pub fn ends(program: &Program, index: usize) -> [Vec<Held>; 2] {
    let (model, tp) = (&program.model, program.mesh.tp);
    let over_pipeline = program.vocab.is_some();
    let first = || {
        if over_pipeline { positions(model).into_iter().collect() } else { embedding(model, tp) }
    };
    let last =
        || if over_pipeline { norm(model) } else { head(model, tp, program.last_rank() == 0) };
    let at = |holds: bool, tensors: &dyn Fn() -> Vec<Held>| if holds { tensors() } else { vec![] };
    [at(index == 0, &first), at(index + 1 == program.stages.len(), &last)]
}

/// Elements of some tensors.
pub fn elements(tensors: &[Held]) -> u64 {
    tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum()
}

/// Elements on one rank of each pipeline rank.
pub fn rank_elements(program: &Program) -> Vec<u64> {
    let (model, tp) = (&program.model, program.mesh.tp);
    let ranks = program.mesh.pp;
    let shard = match program.vocab {
        Some(_) => elements(&vocabulary_shard(model, ranks * tp)),
        None => 0,
    };
    let stage = |index: usize| {
        let layers = program.stages[index].layers();
        let layers: u64 = layers.map(|index| elements(&layer(program, index))).sum();
        let [before, behind] = ends(program, index);
        layers + elements(&before) + elements(&behind)
    };
    let rank = |rank: u64| -> u64 {
        shard + program.stages_of(rank as usize).into_iter().map(stage).sum::<u64>()
    };
    (0..ranks).map(rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_a_vocabulary_hold_it_in_rows_of_whole_16_bytes() {
        assert_eq!(vocabulary_rows(50_257, 1), 50_264);
        assert_eq!(vocabulary_rows(50_257, 8), 6288);
        assert_eq!(vocabulary_rows(128_256, 8), 16_032);
        for (vocab, shards) in [(131, 4), (7, 2), (256_000, 3), (515, 16)] {
            for rows in [vocabulary_rows(vocab, shards), vocabulary_shard_rows(vocab, shards)] {
                assert!(rows % 8 == 0 && rows * shards >= vocab, "{vocab} over {shards}: {rows}");
                assert!(rows * shards < vocab + 9 * shards, "{vocab} over {shards}: {rows}");
            }
        }
    }
}
