//! How the library sees a trainer's layers: as stages that it declares, runs forward and backward,
//! and whose parameters it updates.

pub mod pair;

use crate::comm::{CommError, Element};
use crate::device::{Device, Space};
use crate::device_error::DeviceError;
use crate::ops::{Gradients, PassContext, Reduced, Statistics, VocabularyShard};
use crate::spec::TrainerSpec;
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::{Inventory, ParameterSlice};
use pair::Running;
use std::any::Any;
use std::ops::Range;
use std::rc::Rc;

/// What a stage holds: consecutive layers, and maybe what comes before the first and after the
/// last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageShape {
    /// Whether it begins with the input layer.
    pub input: bool,
    /// Its first layer.
    pub first_layer: usize,
    /// How many layers it has.
    pub layers: usize,
    /// Whether it ends with the output layer.
    pub output: bool,
}

impl StageShape {
    /// The layer behind its last.
    pub const fn end(&self) -> usize {
        self.first_layer + self.layers
    }
}

/// Checks that stages follow one another, from the input layer over all `layers` to the output
/// layer. Called in a constant, it keeps a trainer with another table from compiling.
///
/// # Panics
/// They do not.
pub const fn check_stages(stages: &[StageShape], layers: usize) {
    let (mut index, mut next) = (0, 0);
    while index < stages.len() {
        let stage = &stages[index];
        assert!(stage.input == (index == 0), "the first stage, and no other, has the input layer");
        assert!(
            stage.output == (index + 1 == stages.len()),
            "the last stage, and no other, has the output layer"
        );
        assert!(
            stage.first_layer == next,
            "a stage must begin with the layer behind the last of the stage before it"
        );
        next = stage.end();
        index += 1;
    }
    assert!(next == layers, "the stages must hold all layers");
}

/// What is trained, on devices of one type.
pub trait Stages<D: Device>: Sync {
    /// The trainer apart from its layers.
    fn spec(&self) -> TrainerSpec;

    /// Declares stage `index`. `table` is the token table, if an earlier stage of this rank holds
    /// one.
    fn declare(
        &self,
        index: usize,
        table: Option<ParameterSlice>,
        inventory: &mut Inventory,
    ) -> Box<dyn Stage<D>>;

    /// Declares a pipeline rank's rows of a vocabulary split over the pipeline; `None` if stages
    /// hold the vocabulary.
    fn declare_shard(
        &self,
        _pipeline_rank: usize,
        _inventory: &mut Inventory,
    ) -> Option<VocabularyShard> {
        None
    }
}

/// One stage as one rank holds it.
pub trait Stage<D: Device> {
    /// Its parameters, as elements of all that the rank holds.
    fn parameters(&self) -> Range<usize>;

    /// Those whose weights its backward pass reads. The input layer's does not read its table.
    fn read_backward(&self) -> Range<usize> {
        self.parameters()
    }

    /// The token table, if this stage has one.
    fn table(&self) -> Option<ParameterSlice> {
        None
    }

    /// Forward pass. `x[r, h]` comes from the previous stage. The first stage gets an empty buffer,
    /// or the embedding rows of its tokens if all pipeline ranks look them up.
    ///
    /// # Errors
    /// Those of any collective call.
    fn forward(&self, ctx: &PassContext<'_, D>, x: Buffer<D>) -> StageResult<D>;

    /// Backward pass. `dy[r, h]` comes from the next stage or from an output layer that all
    /// pipeline ranks share; it is empty for a last stage with its own output layer. Returns the
    /// gradient for the previous stage. For the first stage that is the gradient of the shared
    /// input layer, or empty if it has its own.
    ///
    /// # Errors
    /// Those of any collective call.
    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError>;

    /// Begins [`Self::forward`] as one of a pair. Unless a stage has its own way, nothing else runs
    /// until it ends.
    fn start_forward<'a>(
        &'a self,
        ctx: &'a PassContext<'_, D>,
        x: Buffer<D>,
    ) -> Running<'a, StageResult<D>> {
        Box::pin(async move { self.forward(ctx, x) })
    }

    /// Begins [`Self::backward`] likewise.
    fn start_backward<'a>(
        &'a self,
        ctx: &'a PassContext<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        gradients: &'a mut Gradients<'_, D>,
    ) -> Running<'a, Result<Buffer<D>, CommError>> {
        Box::pin(async move { self.backward(ctx, kept, dy, gradients) })
    }
}

/// Output of a stage.
pub enum StageOutput<D: Space> {
    /// The residual stream, `[r, h]`, for the next stage; normed if all pipeline ranks share the
    /// output layer.
    Stream(Buffer<D>),
    /// The losses of the tokens, `[n]`.
    Losses(WideBuffer<D>),
}

/// A stage's output, and what it keeps of the micro-batch for the backward pass.
pub type StageResult<D> = Result<(StageOutput<D>, Box<dyn Kept<D>>), CommError>;

/// What a stage keeps of a micro-batch for the backward pass.
pub trait Kept<D: Space>: Any {
    /// Bytes held.
    fn bytes(&self) -> usize;

    /// This rank's columns of the logits, `[n, V/t]`, padding included, if the stage has them.
    fn logits(&self) -> Option<&Buffer<D>> {
        None
    }
}

/// What is kept for a backward pass.
pub trait Held {
    /// Bytes held.
    fn bytes(&self) -> usize;
}

impl<T: Held> Held for Vec<T> {
    fn bytes(&self) -> usize {
        self.iter().map(Held::bytes).sum()
    }
}

/// What can lie in host memory between a forward and a backward pass. What others hold too stays
/// where it is.
pub trait Offloaded<D: Space> {
    /// Moves it to host memory; waits for it.
    ///
    /// # Errors
    /// The device has failed.
    fn offload(&mut self, device: &D) -> Result<(), DeviceError>;

    /// Moves it back.
    fn reload(&mut self, device: &D);
}

impl<D: Space, T: Offloaded<D>> Offloaded<D> for Vec<T> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.iter_mut().try_for_each(|each| each.offload(device))
    }

    fn reload(&mut self, device: &D) {
        self.iter_mut().for_each(|each| each.reload(device));
    }
}

impl<D: Space, E: Element> Offloaded<D> for Rc<Buffer<D, E>> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        Rc::get_mut(self).map_or(Ok(()), |buffer| buffer.offload(device))
    }

    fn reload(&mut self, device: &D) {
        if let Some(buffer) = Rc::get_mut(self) {
            buffer.reload(device);
        }
    }
}

impl<D: Space> Offloaded<D> for Rc<Statistics<D>> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        Rc::get_mut(self).map_or(Ok(()), |statistics| statistics.offload(device))
    }

    fn reload(&mut self, device: &D) {
        if let Some(statistics) = Rc::get_mut(self) {
            statistics.reload(device);
        }
    }
}

/// Declares a struct of what is kept for a backward pass: its bytes are those of its fields. With
/// `logits in FIELD` that field is the logits; with `offloaded` it can lie in host memory.
#[macro_export]
macro_rules! kept {
    ($(#[$doc:meta])* $seen:vis struct $name:ident<$d:ident> {
        $($(#[$of:meta])* $field:ident: $type:ty,)*
    } offloaded) => {
        $crate::kept! {
            $(#[$doc])*
            $seen struct $name<$d> {
                $($(#[$of])* $field: $type,)*
            }
        }

        impl<$d: $crate::Device> $crate::stages::Offloaded<$d> for $name<$d> {
            fn offload(&mut self, device: &$d) -> Result<(), $crate::DeviceError> {
                $($crate::stages::Offloaded::offload(&mut self.$field, device)?;)*
                Ok(())
            }

            fn reload(&mut self, device: &$d) {
                $($crate::stages::Offloaded::reload(&mut self.$field, device);)*
            }
        }
    };
    ($(#[$doc:meta])* $seen:vis struct $name:ident<$d:ident> {
        $($(#[$of:meta])* $field:ident: $type:ty,)*
    } $(logits in $logits:ident)?) => {
        $(#[$doc])*
        $seen struct $name<$d: $crate::Device> {
            $($(#[$of])* $field: $type,)*
        }

        impl<$d: $crate::Device> $crate::stages::Held for $name<$d> {
            fn bytes(&self) -> usize {
                0 $(+ $crate::stages::Held::bytes(&self.$field))*
            }
        }

        impl<$d: $crate::Device> $crate::stages::Kept<$d> for $name<$d> {
            fn bytes(&self) -> usize {
                $crate::stages::Held::bytes(self)
            }

            $(fn logits(&self) -> Option<&$crate::Buffer<$d>> {
                Some(self.$logits.buffer())
            })?
        }
    };
}

/// A layer that a stage repeats.
pub trait Layer<D: Device> {
    /// The residual stream.
    type Stream;
    /// Its gradient.
    type Gradient;
    /// What the layer keeps of a micro-batch.
    type Kept: Held;

    /// From stream to stream.
    ///
    /// # Errors
    /// Those of any collective call.
    fn forward(
        &self,
        ctx: &PassContext<'_, D>,
        stream: Self::Stream,
    ) -> Result<(Self::Stream, Self::Kept), CommError>;

    /// From the output's gradient to the input's. At its end it hands its gradients to whatever
    /// sums them over replicas ([`crate::layers::Parameters`]).
    ///
    /// # Errors
    /// Those of any collective call.
    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Self::Kept,
        dy: Self::Gradient,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<(Self::Gradient, Reduced), CommError>;
}

/// Forward through layers.
///
/// # Errors
/// Those of any collective call.
pub fn forward_all<D: Device, L: Layer<D>>(
    layers: &[L],
    ctx: &PassContext<'_, D>,
    mut stream: L::Stream,
) -> Result<(L::Stream, Vec<L::Kept>), CommError> {
    let mut all = Vec::with_capacity(layers.len());
    for layer in layers {
        let (next, kept) = layer.forward(ctx, stream)?;
        all.push(kept);
        stream = next;
    }
    Ok((stream, all))
}

/// Backward through layers.
///
/// # Errors
/// Those of any collective call.
pub fn backward_all<D: Device, L: Layer<D>>(
    layers: &[L],
    ctx: &PassContext<'_, D>,
    kept: Vec<L::Kept>,
    mut dy: L::Gradient,
    gradients: &mut Gradients<'_, D>,
) -> Result<L::Gradient, CommError> {
    for (layer, kept) in layers.iter().zip(kept).rev() {
        (dy, _) = layer.backward(ctx, kept, dy, gradients)?;
    }
    Ok(dy)
}

/// Forward through layers; what each keeps goes to host memory once the next one has run, which
/// reads part of it.
///
/// # Errors
/// Those of any collective call, and a device that failed.
pub fn forward_offloading<D: Device, L: Layer<D>>(
    layers: &[L],
    ctx: &PassContext<'_, D>,
    mut stream: L::Stream,
) -> Result<(L::Stream, Vec<L::Kept>), CommError>
where
    L::Stream: Shared<D>,
    L::Kept: Offloaded<D>,
{
    let mut all: Vec<L::Kept> = Vec::with_capacity(layers.len());
    for layer in layers {
        let (next, kept) = layer.forward(ctx, stream)?;
        if let Some(before) = all.last_mut() {
            before.offload(ctx.device)?;
        }
        all.push(kept);
        stream = next;
    }
    // As one tensor the stream no longer has part of what the last layer keeps.
    let [stream, _] = stream.twice(ctx);
    if let Some(last) = all.last_mut() {
        last.offload(ctx.device)?;
    }
    Ok((stream, all))
}

/// Backward through layers of which host memory holds what they kept.
///
/// # Errors
/// Those of any collective call.
pub fn backward_reloading<D: Device, L: Layer<D>>(
    layers: &[L],
    ctx: &PassContext<'_, D>,
    kept: Vec<L::Kept>,
    mut dy: L::Gradient,
    gradients: &mut Gradients<'_, D>,
) -> Result<L::Gradient, CommError>
where
    L::Kept: Offloaded<D>,
{
    for (layer, mut kept) in layers.iter().zip(kept).rev() {
        kept.reload(ctx.device);
        (dy, _) = layer.backward(ctx, kept, dy, gradients)?;
    }
    Ok(dy)
}

/// A residual stream that can be kept.
pub trait Shared<D: Device>: Sized {
    /// Two handles of it.
    fn twice(self, ctx: &PassContext<'_, D>) -> [Self; 2];
}

/// Forward through layers, of which each `group` keeps its input alone: the backward pass runs the
/// group again (Chen et al. 2016, arXiv 1604.06174, section 4).
///
/// # Errors
/// Those of any collective call.
pub fn forward_in_groups<D: Device, L: Layer<D>>(
    layers: &[L],
    group: usize,
    ctx: &PassContext<'_, D>,
    mut stream: L::Stream,
) -> Result<(L::Stream, Vec<L::Stream>), CommError>
where
    L::Stream: Shared<D>,
{
    let mut inputs = Vec::with_capacity(layers.len().div_ceil(group));
    for layers in layers.chunks(group) {
        let [input, mut next] = stream.twice(ctx);
        inputs.push(input);
        for layer in layers {
            (next, _) = layer.forward(ctx, next)?;
        }
        stream = next;
    }
    Ok((stream, inputs))
}

/// Backward through such groups.
///
/// # Errors
/// Those of any collective call.
pub fn backward_in_groups<D: Device, L: Layer<D>>(
    layers: &[L],
    group: usize,
    ctx: &PassContext<'_, D>,
    inputs: Vec<L::Stream>,
    mut dy: L::Gradient,
    gradients: &mut Gradients<'_, D>,
) -> Result<L::Gradient, CommError> {
    let again = ctx.without_prefetch();
    for (layers, input) in layers.chunks(group).zip(inputs).rev() {
        let (_, kept) = forward_all(layers, &again, input)?;
        dy = backward_all(layers, ctx, kept, dy, gradients)?;
    }
    Ok(dy)
}

/// What [`Stage::forward`] of the same stage kept.
///
/// # Panics
/// It is another stage's: the executor mixed them up, which is a bug.
pub fn own<D: Space, K: 'static>(kept: Box<dyn Kept<D>>) -> K {
    let kept: Box<dyn Any> = kept;
    *kept.downcast::<K>().expect("a stage gets back what it kept")
}
