//! A segment's fields on one rank: its parameters, declared, and what operations need besides.

use codegen::lower::{FieldKind, LATENT_EPS, Lowered, Matrix, Norm, Segment, TensorNames, Width};
use kernels::activation::Activation;
use kernels::routing::{Routing, Scoring};
use models::decisions::AuxScope;
use models::model::{self, AuxOver, ExpertChoice, Gelu, ModelSpec, Moe, NormKind, Router};
use models::program::Program;
use runtime::ops;
use runtime::state::params::{Inventory, ParameterSlice, RowBlock};

/// A field on one rank.
#[derive(Clone, Debug)]
pub enum Field {
    /// A norm.
    Norm(ops::Norm),
    /// A matrix.
    Linear(ops::Linear),
    /// A router.
    Router(ops::Router),
    /// A matrix of each of this rank's experts.
    Experts(ops::ExpertLinear),
    /// A bias.
    Bias(ops::RowBias),
    /// Attention's core.
    Attention(ops::Attention),
    /// The token table.
    Tokens(ops::TokenEmbedding),
    /// Learned positions.
    Positions(ops::Positions),
    /// The loss.
    Loss(ops::CrossEntropy),
    /// Output matrix and loss together.
    FusedLoss(ops::FusedLoss),
}

/// Which segment of the model is declared.
#[derive(Clone, Copy)]
pub enum Place {
    /// Before the first layer.
    First,
    /// This layer.
    Layer(usize),
    /// After the last layer. The table is the embedding, if this rank holds it.
    Last(Option<ParameterSlice>),
}

/// Declares the parameters of a segment.
pub fn declare(
    lowered: &Lowered,
    segment: &Segment,
    place: Place,
    inventory: &mut Inventory,
) -> Vec<Field> {
    let mut fields = Declared { lowered, place, blocks: Vec::new(), output: None };
    segment.fields.iter().map(|field| fields.declare(&field.kind, inventory)).collect()
}

struct Declared<'a> {
    lowered: &'a Lowered,
    place: Place,
    /// Blocks of the last tensor that has several.
    blocks: Vec<ops::Linear>,
    /// The output matrix.
    output: Option<ops::Linear>,
}

impl Declared<'_> {
    fn declare(&mut self, kind: &FieldKind, inventory: &mut Inventory) -> Field {
        let (sizes, model) = (&self.lowered.sizes, &self.lowered.program.model);
        let (hidden, split) = (sizes.hidden as usize, sizes.sequence_parallel);
        let loss = ops::CrossEntropy {
            columns: sizes.vocab_rows as usize,
            vocab: sizes.vocab as usize,
            soft_cap: model.final_soft_cap,
        };
        match kind {
            FieldKind::Norm { tensor } => {
                let name = match self.place {
                    Place::Layer(_) => self.name(tensor),
                    _ => self.lowered.names.final_norm().to_owned(),
                };
                let kind = norm_kind(&sizes.norm);
                Field::Norm(ops::Norm::declare(&name, hidden, kind, split, inventory))
            }
            FieldKind::Column { matrix, block, .. } | FieldKind::Down { matrix, block, .. } => {
                if *block == 0 {
                    let blocks: Vec<RowBlock> =
                        matrix.blocks.iter().map(|&width| self.block(width)).collect();
                    let matrix = self.matrix(matrix);
                    self.blocks = ops::declare_rows(&matrix, &blocks, hidden, inventory);
                }
                Field::Linear(self.blocks[*block])
            }
            FieldKind::Up { matrix, inputs, outputs } => {
                let (blocks, matrix) = ([self.block(*outputs)], self.matrix(matrix));
                let inputs = sizes.columns(*inputs) as usize;
                Field::Linear(ops::declare_rows(&matrix, &blocks, inputs, inventory)[0])
            }
            FieldKind::LatentNorm { tensor, width } => {
                let kind = ops::NormKind::Rms { eps: LATENT_EPS, unit_offset: false };
                let (name, columns) = (self.name(tensor), sizes.columns(*width) as usize);
                let partial = sizes.tp > 1;
                Field::Norm(ops::Norm::declare(&name, columns, kind, partial, inventory))
            }
            FieldKind::Row { matrix, inputs } => {
                let (inputs, _) = sizes.whole(*inputs);
                let (matrix, inputs) = (self.matrix(matrix), inputs as usize);
                Field::Linear(match matrix.bias {
                    true => {
                        let whole = [RowBlock { rows: hidden, ways: 1 }];
                        ops::declare_rows(&matrix, &whole, inputs, inventory)[0]
                    }
                    false => ops::declare_columns(&matrix, hidden, inputs, inventory),
                })
            }
            FieldKind::RowBias { tensor } => {
                Field::Bias(ops::RowBias::declare(&self.name(tensor), hidden, split, inventory))
            }
            FieldKind::Router { tensor, bias, by_load } => {
                let moe = model.moe.as_ref().expect("routers are of mixtures of experts");
                let (name, routing, layer) = (self.name(tensor), routing(moe), self.layer());
                let deviation = sizes.deviation;
                let router = ops::Router::declare(
                    &name, layer, hidden, routing, deviation, split, inventory,
                );
                let router = match bias {
                    true => router.with_bias(&name, split, inventory),
                    false => router,
                };
                let router = match by_load {
                    true => router.with_bias_updates(moe.bias_update_rate, inventory),
                    false => router,
                };
                Field::Router(ops::Router { capacity_factor: moe.capacity_factor, ..router })
            }
            FieldKind::Experts { tensor, bias, outputs, inputs } => {
                Field::Experts(self.experts(tensor, *bias, [*outputs, *inputs], inventory))
            }
            FieldKind::HeadNorm { tensor } => {
                let kind = ops::NormKind::Rms { eps: sizes.norm.eps, unit_offset: false };
                let (name, columns) = (self.name(tensor), sizes.head_dim as usize);
                let split = sizes.tp > 1;
                Field::Norm(ops::Norm::declare(&name, columns, kind, split, inventory))
            }
            FieldKind::Attention { sinks: Some(sinks) } => {
                let core = self.attention(model);
                Field::Attention(core.with_sinks(&self.name(sinks), inventory))
            }
            FieldKind::Attention { sinks: None } | FieldKind::LatentAttention => {
                Field::Attention(self.attention(model))
            }
            FieldKind::Tokens => {
                let table = table(self.lowered, self.lowered.names.embedding(), false);
                let scale = model.numerics.embedding_scale;
                let table = table.declare(self.vocab_rows(), inventory);
                Field::Tokens(ops::TokenEmbedding { table, hidden, scale })
            }
            FieldKind::Positions(rows) => Field::Positions(ops::Positions::declare(
                self.lowered.names.positions(),
                *rows as usize,
                hidden,
                sizes.deviation,
                split,
                inventory,
            )),
            FieldKind::Output => {
                let weight = self.output(inventory);
                let outputs = weight.len / hidden;
                let output = ops::Linear { weight, bias: None, inputs: hidden, outputs };
                self.output = Some(output);
                Field::Linear(output)
            }
            FieldKind::Loss => Field::Loss(loss),
            FieldKind::FusedLoss(rows) => {
                let output = self.output.expect("the output matrix comes before the loss");
                Field::FusedLoss(ops::FusedLoss { loss, output, rows: *rows as usize })
            }
        }
    }

    fn experts(
        &self,
        tensor: &str,
        bias: bool,
        [outputs, inputs]: [Width; 2],
        inventory: &mut Inventory,
    ) -> ops::ExpertLinear {
        let (sizes, model) = (&self.lowered.sizes, &self.lowered.program.model);
        let tensors = model.moe.as_ref().map(|moe| moe.tensors).unwrap_or_default();
        let prefix = self.name(TensorNames::experts(tensors));
        let of_stream = outputs == Width::Hidden;
        let deviation = if of_stream { sizes.stream_deviation } else { sizes.deviation };
        let matrix = |n: usize| {
            let plain = ops::Matrix::named(format!("{prefix}{n}.{tensor}"), deviation);
            ops::Matrix { bias, ..plain }
        };
        let shape = [outputs, inputs].map(|width| sizes.whole(width).0 as usize);
        let all = sizes.experts[0] as usize;
        match of_stream {
            true => ops::ExpertLinear::declare_columns(all, matrix, shape, inventory),
            false => ops::ExpertLinear::declare_rows(all, matrix, shape, inventory),
        }
    }

    /// The layer's number; 0 outside layers.
    fn layer(&self) -> usize {
        match self.place {
            Place::Layer(index) => index,
            _ => 0,
        }
    }

    fn name(&self, tensor: &str) -> String {
        match self.place {
            Place::Layer(index) => self.lowered.names.layer(index, tensor),
            _ => tensor.to_owned(),
        }
    }

    fn block(&self, width: Width) -> RowBlock {
        let (rows, ways) = self.lowered.sizes.whole(width);
        RowBlock { rows: rows as usize, ways: ways as usize }
    }

    fn matrix(&self, matrix: &Matrix) -> ops::Matrix {
        let sizes = &self.lowered.sizes;
        let deviation =
            if matrix.adds_to_stream { sizes.stream_deviation } else { sizes.deviation };
        ops::Matrix {
            name: self.name(matrix.tensor),
            transposed: matrix.transposed,
            bias: matrix.bias,
            deviation,
        }
    }

    fn attention(&self, model: &ModelSpec) -> ops::Attention {
        let (sizes, attention) = (&self.lowered.sizes, &model.attention);
        let index = self.layer();
        let windowed = model.layer_kind(index).windowed;
        let window = attention.window.filter(|_| windowed);
        ops::Attention {
            heads: sizes.heads[1] as usize,
            kv_heads: sizes.kv_heads[1] as usize,
            total_heads: sizes.heads[0] as usize,
            head_dim: sizes.head_dim as usize,
            latent: attention.mla.map(|mla| ops::Latent {
                rotary: mla.rope_dim as usize,
                value: mla.value_dim as usize,
            }),
            scale: model.numerics.score_scale(),
            window: window.map(|window| window.tokens as usize),
            soft_cap: attention.soft_cap,
            place: codegen::lower::dropout_place(index, 0),
            sinks: None,
        }
    }

    /// Rows of the vocabulary on this rank.
    fn vocab_rows(&self) -> usize {
        self.lowered.sizes.vocab_rows as usize
    }

    /// The output matrix: the embedding if they are tied and this rank holds it.
    fn output(&self, inventory: &mut Inventory) -> ParameterSlice {
        let (names, tied) = (self.lowered.names, self.lowered.program.model.tied_embeddings);
        match self.place {
            Place::Last(Some(table)) if tied => table,
            _ => {
                let name = if tied { names.embedding() } else { names.output() };
                table(self.lowered, name, tied).declare(self.vocab_rows(), inventory)
            }
        }
    }
}

/// What routers add to the loss.
pub fn router_losses(program: &Program) -> Option<ops::RouterLosses> {
    let moe = program.model.moe.as_ref().filter(|moe| moe.has_losses())?;
    Some(ops::RouterLosses {
        balance: moe.aux_loss,
        z: moe.losses.z_loss,
        over: match moe.losses.over {
            AuxOver::EachLayer => ops::BalanceOver::EachLayer,
            AuxOver::AllLayers => ops::BalanceOver::AllLayers,
        },
        scope: match program.aux_scope {
            AuxScope::MicroBatch => ops::BalanceScope::MicroBatch,
            AuxScope::GlobalBatch => ops::BalanceScope::GlobalBatch,
        },
        layers: program.model.layers,
        experts: moe.experts as usize,
    })
}

/// How a mixture's router chooses.
fn routing(moe: &Moe) -> Routing {
    let ExpertChoice { renormalised, groups, kept_groups, scale } = moe.choice;
    Routing {
        experts: moe.experts as usize,
        top_k: moe.top_k as usize,
        scoring: match moe.router {
            Router::Softmax => Scoring::Softmax,
            Router::SigmoidBias => {
                Scoring::Sigmoid { groups: groups as usize, kept: kept_groups as usize }
            }
        },
        renormalised,
        scale,
    }
}

fn norm_kind(norm: &Norm) -> ops::NormKind {
    let Norm { kind, eps, unit_offset } = *norm;
    match kind {
        NormKind::RmsNorm => ops::NormKind::Rms { eps, unit_offset },
        NormKind::LayerNorm => ops::NormKind::Layer { eps },
    }
}

fn table(lowered: &Lowered, name: &str, tied_copy: bool) -> ops::VocabTable {
    let sizes = &lowered.sizes;
    ops::VocabTable {
        name: name.to_owned(),
        vocab: sizes.vocab as usize,
        hidden: sizes.hidden as usize,
        deviation: sizes.deviation,
        tied_copy,
    }
}

/// A vocabulary that is split over the pipeline.
pub fn shard(lowered: &Lowered) -> Option<ops::ShardSpec> {
    let (shard, model) = (lowered.shard.as_ref()?, &lowered.program.model);
    let of = |name: &str| table(lowered, name, false);
    Some(ops::ShardSpec {
        input: of(shard.input.name),
        output: shard.output.as_ref().map(|output| of(output.name)),
        passes: shard.passes,
        rows: shard.rows as usize,
        scale: model.numerics.embedding_scale,
        soft_cap: model.final_soft_cap,
    })
}

/// The kernel's activation for a model.
pub fn activation(model: &ModelSpec) -> Activation {
    let gelu = match model.numerics.gelu {
        Gelu::Tanh => Activation::GeluTanh,
        Gelu::Erf => Activation::GeluErf,
    };
    match model.mlp.activation {
        model::Activation::Relu => Activation::Relu,
        model::Activation::SquaredRelu => Activation::SquaredRelu,
        model::Activation::Swiglu => Activation::Silu,
        model::Activation::ClampedGeglu => Activation::ClampedGelu,
        model::Activation::Gelu | model::Activation::Geglu => gelu,
    }
}
