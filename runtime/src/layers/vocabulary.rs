//! Input and output layer of a vocabulary that is split over all pipeline devices and their tensor-parallel
//! ranks: what one rank computes in the passes `S`, `S2` and `T`, and what is reduced between them
//! (Vocabulary Parallelism, Yeung et al. 2024, arXiv 2411.05288, sections 4 and 6.1).
//!
//! | | naive | algorithm 1 | algorithm 2 |
//! |---|---|---|---|
//! | `S` | logits, maximum | and sums around it | and the two parts of the input gradient |
//! | reduced | maximum | maximum, sums | maximum, sums, input gradient |
//! | `S2` | sums | | |
//! | reduced | sums | | |
//! | `T` | both gradients | both gradients | weight gradient |
//! | reduced | input gradient | input gradient | |
//!
//! Reductions are all-reduces, as in the paper's implementation. They run on lanes of their own
//! (`crate::lanes`), so that passes go on meanwhile.

use super::embedding::table;
use super::linear::Linear;
use super::{Context, Names, WeightWork};
use crate::buffer::Buffer;
use crate::comm::{CommError, Communicator, Op};
use crate::params::{Declaration, Inventory, Part, Placement, Shared, Store};
use crate::program::Program;
use crate::scalar::Scalar;
use kernels::cross_entropy::{self, IGNORED, Logits};
use kernels::embedding::{self, Embedding};
use kernels::{Cpu, Output};
use models::schedule::VocabPasses;
use std::rc::Rc;

/// One rank's rows of input and output matrix, which are one tensor where they are tied.
#[derive(Clone, Copy, Debug)]
pub struct VocabularyShard {
    input: Part,
    output: Linear,
    passes: VocabPasses,
    /// Its number among the shards, device after device.
    number: usize,
    rows: usize,
    vocab: usize,
    scale: f64,
    soft_cap: Option<f64>,
    begin: usize,
    end: usize,
}

/// What a rank keeps of a micro-batch from `S` to `T`.
pub struct ShardKept<T> {
    /// Input of the output layer, `[r, h]`.
    h: Shared<T>,
    /// Its columns of the logits, `[n, V/(pt)]`; with algorithm 2 their softmax around its own maximum.
    columns: Buffer<T>,
}

impl<T> ShardKept<T> {
    /// Elements held.
    pub fn elements(&self) -> usize {
        self.h.len() + self.columns.len()
    }
}

/// Maximum, sum of exponentials around it, and the target's logit of each row, `[n]`.
#[derive(Clone, Debug, Default)]
pub struct Sums<T> {
    max: Vec<T>,
    sum_exp: Vec<T>,
    target: Vec<T>,
}

/// What a pass leaves to be reduced over all shards.
pub enum Local<T> {
    /// Naive `S`: the shard's maximum, `[n]`.
    Max(Vec<T>),
    /// Naive `S2`: sums around the common maximum.
    Common(Sums<T>),
    /// Algorithm 1's `S`: sums around the shard's own maximum.
    Own(Sums<T>),
    /// Algorithm 2's `S`: these, and the parts of the input gradient.
    WithGradient(Sums<T>, Parts<T>),
    /// `T`: the shard's part of the input gradient, `[n, h]`.
    Gradient(Vec<T>),
}

/// The parts of algorithm 2's input gradient, `[n, h]` each (section 4.3).
pub struct Parts<T> {
    /// Rows of the output matrix weighted with the softmax around the shard's own maximum.
    weighted: Vec<T>,
    /// The target's row, 0 where another shard has it.
    hits: Vec<T>,
    /// What each token's loss counts for.
    scale: f64,
}

/// What a reduction came to.
#[derive(Default)]
pub struct Reduced<T> {
    sums: Sums<T>,
    /// Algorithm 2: what takes the shard's softmax to the common one, `[n]`.
    factor: Vec<T>,
    /// Of the output layer's input, `[n, h]`, where it was reduced.
    gradient: Vec<T>,
}

impl<T> Reduced<T> {
    /// The input gradient, `[n, h]`, taken out; `None` where there was none.
    pub fn take_gradient(&mut self) -> Option<Vec<T>> {
        Some(std::mem::take(&mut self.gradient)).filter(|gradient| !gradient.is_empty())
    }

    /// Whether it is about rows' maxima and sums.
    pub fn has_sums(&self) -> bool {
        !self.sums.max.is_empty()
    }
}

impl VocabularyShard {
    /// Declares the tables' rows on a rank of pipeline device `device`; `None` where stages hold them.
    pub fn declare(program: &Program, device: usize, inventory: &mut Inventory) -> Option<Self> {
        let (model, passes) = (&program.model, program.vocab?);
        let (names, hidden) = (Names::of(model), model.hidden as usize);
        let placement = Placement::OverPipeline { device, devices: program.mesh.pp as usize };
        let begin = inventory.elements();
        inventory.enter_stage(device);
        let mut declare = |name: &str| {
            let placement = placement.clone();
            inventory.declare(Declaration { placement, ..table(model, name, false) })
        };
        let input = declare(names.embedding());
        let weight = if model.tied_embeddings { input } else { declare("lm_head.weight") };
        let rows = input.len / hidden;
        Some(Self {
            input,
            output: Linear { weight, bias: None, inputs: hidden, outputs: rows },
            passes,
            number: device * inventory.tp() + inventory.tp_rank(),
            rows,
            vocab: model.vocab as usize,
            scale: model.numerics.embedding_scale,
            soft_cap: model.final_soft_cap,
            begin,
            end: inventory.elements(),
        })
    }

    /// First element of its parameters.
    pub fn begin(&self) -> usize {
        self.begin
    }

    /// End of its parameters.
    pub fn end(&self) -> usize {
        self.end
    }

    /// The passes that it runs.
    pub fn passes(&self) -> VocabPasses {
        self.passes
    }

    /// Elements of the input table here.
    pub fn input_elements(&self) -> usize {
        self.input.len
    }

    fn rows_of(&self, tokens: usize, scale: f64) -> Embedding {
        let first_row = self.number * self.rows;
        Embedding { tokens, columns: self.output.inputs, rows: self.rows, first_row, scale }
    }

    /// Rows of tokens, `[n, h]`, 0 where another shard has them.
    pub fn look_up<T: Scalar>(&self, cpu: &Cpu, weights: &Store<T>, tokens: &[i64]) -> Vec<T> {
        let mut rows = vec![T::ZERO; tokens.len() * self.output.inputs];
        let shape = self.rows_of(tokens.len(), self.scale);
        embedding::forward(cpu, &shape, tokens, weights.get(self.input), &mut rows);
        rows
    }

    /// Adds the gradient of tokens' rows, `dx[n, h]`, to that of the input table, `sum`.
    pub fn scatter<T: Scalar>(&self, cpu: &Cpu, tokens: &[i64], dx: &[T], sum: &mut [T]) {
        let shape = self.rows_of(tokens.len(), self.scale);
        embedding::backward(cpu, &shape, tokens, dx, sum);
    }

    /// Adds what was scattered to the gradients.
    pub fn add_scattered<T: Scalar>(&self, sum: &[T], gradients: &mut Store<T>) {
        let own = gradients.get_mut(self.input);
        own.iter_mut().zip(sum).for_each(|(own, &sum)| *own += sum);
    }

    fn shape<T: Scalar>(&self, ctx: &Context<'_, T>) -> Logits {
        let first_column = (self.number * self.rows).min(self.vocab);
        Logits {
            rows: ctx.tokens(),
            columns: self.rows,
            real_columns: self.rows.min(self.vocab - first_column),
            first_column,
            soft_cap: self.soft_cap,
        }
    }

    /// `S`: logits of the output layer's input, `h[r, h]`, and what is known of them here.
    ///
    /// # Errors
    /// As any collective call.
    pub fn first<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        h: Buffer<T>,
    ) -> Result<(ShardKept<T>, Local<T>), CommError> {
        let h = Rc::new(h);
        let mut columns = self.output.forward(ctx, &ctx.enter(&h)?);
        let shape = self.shape(ctx);
        let mut max = vec![T::ZERO; shape.rows];
        cross_entropy::local_max(ctx.cpu, &shape, &columns, &mut max);
        let local = match self.passes {
            VocabPasses::Naive => Local::Max(max),
            VocabPasses::One => Local::Own(sums(ctx, &shape, &columns, max)),
            VocabPasses::Two => {
                let sums = sums(ctx, &shape, &columns, max);
                let parts = self.parts(ctx, &shape, &mut columns, &sums);
                Local::WithGradient(sums, parts)
            }
        };
        Ok((ShardKept { h, columns }, local))
    }

    /// `S2`: sums around the common maximum.
    pub fn middle<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        kept: &ShardKept<T>,
        reduced: Reduced<T>,
    ) -> Local<T> {
        Local::Common(sums(ctx, &self.shape(ctx), &kept.columns, reduced.sums.max))
    }

    /// Softmax around the shard's own maximum in place of the logits, and what it and the targets make of the
    /// output matrix.
    fn parts<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        shape: &Logits,
        columns: &mut [T],
        sums: &Sums<T>,
    ) -> Parts<T> {
        let labels = &ctx.batch.labels;
        // Rows that count, but with their target elsewhere.
        let elsewhere = |&label: &i64| if label == IGNORED { IGNORED } else { i64::MAX };
        let others: Vec<i64> = labels.iter().map(elsewhere).collect();
        let Sums { max, sum_exp, target } = sums;
        cross_entropy::gradient_in_place(ctx.cpu, shape, columns, &others, max, sum_exp, 1.0);
        let width = self.output.inputs;
        let mut weighted = vec![T::ZERO; shape.rows * width];
        self.output.backward_input(ctx, columns, &mut weighted, Output::Overwrite);
        let mut hits = vec![T::ZERO; shape.rows * width];
        let table = ctx.weights.get(self.output.weight);
        embedding::forward(ctx.cpu, &self.rows_of(shape.rows, 1.0), labels, table, &mut hits);
        for (row, &target) in hits.chunks_exact_mut(width).zip(target) {
            let slope = self.slope(target);
            row.iter_mut().for_each(|hit| *hit *= slope);
        }
        Parts { weighted, hits, scale: ctx.batch.loss_scale }
    }

    /// Derivative of the capped logit `z` by the logit.
    fn slope<T: Scalar>(&self, z: T) -> T {
        let slope = |cap: f64| 1.0 - (z.to_f64() / cap).powi(2);
        T::from_f64(self.soft_cap.map_or(1.0, slope))
    }

    /// `T`: adds to the output matrix's gradient. Gives what is left to be reduced.
    ///
    /// # Errors
    /// As any collective call.
    pub fn last<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        kept: ShardKept<T>,
        reduced: &Reduced<T>,
        gradients: &mut Store<T>,
    ) -> Result<Option<Local<T>>, CommError> {
        let (shape, ShardKept { h, mut columns }) = (self.shape(ctx), kept);
        let Sums { max, sum_exp, .. } = &reduced.sums;
        let (labels, scale) = (&ctx.batch.labels, ctx.batch.loss_scale);
        let two = self.passes == VocabPasses::Two;
        if two {
            self.rescale(&shape, labels, scale, reduced, &mut columns);
        } else {
            let cpu = ctx.cpu;
            cross_entropy::gradient_in_place(
                cpu,
                &shape,
                &mut columns,
                labels,
                max,
                sum_exp,
                scale,
            );
        }
        let (entering, dy) = (ctx.start_enter(&h)?, Rc::new(columns));
        let gradient = (!two).then(|| {
            let mut dh = vec![T::ZERO; shape.rows * self.output.inputs];
            self.output.backward_input(ctx, &dy, &mut dh, Output::Overwrite);
            Local::Gradient(dh)
        });
        let (linear, x) = (self.output, entering.wait()?);
        WeightWork::Linear { linear, x, dy }.run(ctx.cpu, gradients);
        Ok(gradient)
    }

    /// From the softmax around the shard's own maximum to the gradient of the logits (section 4.3).
    fn rescale<T: Scalar>(
        &self,
        shape: &Logits,
        labels: &[i64],
        scale: f64,
        reduced: &Reduced<T>,
        columns: &mut [T],
    ) {
        let scale = T::from_f64(scale);
        let rows = columns.chunks_exact_mut(shape.columns).zip(labels);
        for ((row, &label), (&factor, &target)) in
            rows.zip(reduced.factor.iter().zip(&reduced.sums.target))
        {
            let by = scale * factor;
            row.iter_mut().for_each(|column| *column *= by);
            let local =
                usize::try_from(label).ok().and_then(|label| label.checked_sub(shape.first_column));
            if let Some(column) = local.filter(|&column| column < shape.real_columns) {
                row[column] += -(scale * self.slope(target));
            }
        }
    }

    /// Sum of the micro-batch's losses.
    pub fn loss_sum<T: Scalar>(&self, ctx: &Context<'_, T>, reduced: &Reduced<T>) -> f64 {
        let (labels, Sums { max, sum_exp, target }) = (&ctx.batch.labels, &reduced.sums);
        let mut losses = ctx.buffer(labels.len());
        cross_entropy::loss(ctx.cpu, labels, max, sum_exp, target, &mut losses);
        losses.iter().map(|loss| loss.to_f64()).sum()
    }
}

/// Sums around `max`.
fn sums<T: Scalar>(ctx: &Context<'_, T>, shape: &Logits, columns: &[T], max: Vec<T>) -> Sums<T> {
    let [mut sum_exp, mut target] = [vec![T::ZERO; shape.rows], vec![T::ZERO; shape.rows]];
    let labels = &ctx.batch.labels;
    cross_entropy::local_sum_exp(ctx.cpu, shape, columns, labels, &max, &mut sum_exp, &mut target);
    Sums { max, sum_exp, target }
}

impl<T: Scalar> Local<T> {
    /// Reduces it over all shards.
    ///
    /// # Errors
    /// As any collective call.
    pub fn reduce(self, comm: &dyn Communicator, cpu: &Cpu) -> Result<Reduced<T>, CommError> {
        let empty = Reduced::default();
        match self {
            Self::Max(max) => {
                let max = comm.start_all_reduce(max, Op::Max)?.wait()?;
                Ok(Reduced { sums: Sums { max, ..Sums::default() }, ..empty })
            }
            Self::Common(sums) => Ok(Reduced { sums: sums.add_up(comm)?, ..empty }),
            Self::Own(sums) => {
                Ok(Reduced { sums: sums.around_common(comm, cpu)?.add_up(comm)?, ..empty })
            }
            Self::WithGradient(sums, parts) => {
                let own = sums.around_common(comm, cpu)?;
                let mut factor = own.sum_exp.clone();
                let sums = own.add_up(comm)?;
                factor.iter_mut().zip(&sums.sum_exp).for_each(|(own, &all)| *own = *own / all);
                let gradient = comm.start_all_reduce(parts.joined(&factor), Op::Sum)?.wait()?;
                Ok(Reduced { sums, factor, gradient })
            }
            Self::Gradient(gradient) => {
                let gradient = comm.start_all_reduce(gradient, Op::Sum)?.wait()?;
                Ok(Reduced { gradient, ..empty })
            }
        }
    }
}

impl<T: Scalar> Sums<T> {
    /// From the shard's own maximum to the common one (section 4.2).
    fn around_common(mut self, comm: &dyn Communicator, cpu: &Cpu) -> Result<Self, CommError> {
        let max = comm.start_all_reduce(self.max.clone(), Op::Max)?.wait()?;
        cross_entropy::rescale_sum_exp(cpu, &self.max, &max, &mut self.sum_exp);
        Ok(Self { max, ..self })
    }

    /// Sums and targets of all shards, in one call.
    fn add_up(self, comm: &dyn Communicator) -> Result<Self, CommError> {
        let Self { max, sum_exp, target } = self;
        let rows = sum_exp.len();
        let mut both = sum_exp;
        both.extend(target);
        let mut sum_exp = comm.start_all_reduce(both, Op::Sum)?.wait()?;
        let target = sum_exp.split_off(rows);
        Ok(Self { max, sum_exp, target })
    }
}

impl<T: Scalar> Parts<T> {
    /// The shard's part of the input gradient, once it is known what takes its softmax to the common one.
    fn joined(self, factor: &[T]) -> Vec<T> {
        let (mut gradient, scale) = (self.weighted, T::from_f64(self.scale));
        let width = gradient.len() / factor.len().max(1);
        let rows =
            gradient.chunks_exact_mut(width.max(1)).zip(self.hits.chunks_exact(width.max(1)));
        for ((row, hits), &factor) in rows.zip(factor) {
            row.iter_mut().zip(hits).for_each(|(own, &hit)| *own = scale * (factor * *own - hit));
        }
        gradient
    }
}
