//! Lowering of a graph to cuDNN: a descriptor for each tensor and operation.

use super::descriptor::{Descriptor, Kind as Descriptors, Name, Of};
use super::library::Library;
use crate::cuda::GpuError;
use crate::cuda::fused::{Graph, Id, Kind, Operation, Place, Pointwise, Reduction, Tensor};
use std::ffi::c_int;
use std::sync::Arc;

/// First number of tensors that are not in memory; those of roles come before.
const FIRST_FREE: i64 = 1000;

/// The number by which cuDNN identifies a tensor.
pub(super) fn number(id: Id, tensor: &Tensor) -> i64 {
    match tensor.place {
        Place::Memory(role) => role.number(),
        Place::Virtual | Place::Constant(_) => FIRST_FREE + i64::try_from(id.0).unwrap_or(0),
    }
}

/// `cudnnDataType_t`
const fn data_type(kind: Kind) -> c_int {
    match kind {
        Kind::F32 => 0,
        Kind::I32 => 4,
        Kind::Bf16 => 9,
        Kind::Bool => 11,
    }
}

/// `cudnnPointwiseMode_t`
const fn mode(how: Pointwise) -> c_int {
    match how {
        Pointwise::Add => 0,
        Pointwise::Multiply => 1,
        Pointwise::Divide => 6,
        Pointwise::Subtract => 9,
        Pointwise::Exp => 13,
        Pointwise::Log => 15,
        Pointwise::Identity => 21,
        Pointwise::AtLeast => 303,
        Pointwise::Index(_) => 501,
        Pointwise::Select => 601,
    }
}

/// `cudnnReduceTensorOp_t`
const fn operator(how: Reduction) -> c_int {
    match how {
        Reduction::Sum => 0,
        Reduction::Max => 3,
    }
}

/// Descriptors of a graph's tensors and operations.
pub(super) struct Lowered {
    library: Arc<Library>,
    tensors: Vec<Arc<Descriptor>>,
    pub(super) operations: Vec<Arc<Descriptor>>,
}

impl Lowered {
    pub(super) fn new(library: &Arc<Library>, graph: &Graph) -> Result<Self, GpuError> {
        let tensors = graph.tensors.iter().enumerate();
        let tensors = tensors.map(|(at, tensor)| described(library, Id(at), tensor));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        let mut lowered = Self { library: library.clone(), tensors, operations: Vec::new() };
        for operation in &graph.operations {
            let operation = match operation {
                Operation::Product { a, b, to } => lowered.product(*a, *b, *to)?,
                Operation::Pointwise { how, from, to } => {
                    let kind = graph.tensors[to.0].kind;
                    lowered.pointwise(*how, from, *to, kind)?
                }
                Operation::Reduce { how, from, to } => lowered.reduction(*how, *from, *to)?,
                Operation::Reshape { from, to } => lowered.reshape(*from, *to)?,
            };
            lowered.operations.push(operation);
        }
        Ok(lowered)
    }

    fn new_descriptor(&self, kind: Descriptors) -> Result<Descriptor, GpuError> {
        Descriptor::new(&self.library, kind)
    }

    fn of(&self, id: Id) -> &Arc<Descriptor> {
        &self.tensors[id.0]
    }

    fn product(&self, a: Id, b: Id, to: Id) -> Result<Arc<Descriptor>, GpuError> {
        let how = self.new_descriptor(Descriptors::Matmul)?;
        let how = how.value(Name::MatmulType, Of::DataType, data_type(Kind::F32))?.finalised()?;
        self.new_descriptor(Descriptors::MatmulOperation)?
            .named(Name::MatmulA, &[self.of(a)])?
            .named(Name::MatmulB, &[self.of(b)])?
            .named(Name::MatmulC, &[self.of(to)])?
            .named(Name::MatmulDescription, &[&how])?
            .finalised()
    }

    /// Comparisons are computed as booleans, sums of indices as integers, all else in f32.
    fn pointwise(
        &self,
        how: Pointwise,
        from: &[Id],
        to: Id,
        kind: Kind,
    ) -> Result<Arc<Descriptor>, GpuError> {
        let precision = match (how, kind) {
            (Pointwise::AtLeast, _) => Kind::Bool,
            (Pointwise::Add, Kind::I32) => Kind::I32,
            _ => Kind::F32,
        };
        let mut what = self
            .new_descriptor(Descriptors::Pointwise)?
            .value(Name::PointwiseMode, Of::PointwiseMode, mode(how))?
            .value(Name::PointwisePrecision, Of::DataType, data_type(precision))?;
        if let Pointwise::Index(axis) = how {
            let axis = i64::try_from(axis).unwrap_or(0);
            what = what.numbers(Name::PointwiseAxis, &[axis])?;
        }
        let what = what.finalised()?;
        let mut operation = self
            .new_descriptor(Descriptors::PointwiseOperation)?
            .named(Name::PointwiseDescription, &[&what])?;
        for (name, id) in
            [Name::PointwiseX, Name::PointwiseB, Name::PointwiseT].into_iter().zip(from)
        {
            operation = operation.named(name, &[self.of(*id)])?;
        }
        operation.named(Name::PointwiseY, &[self.of(to)])?.finalised()
    }

    fn reduction(&self, how: Reduction, from: Id, to: Id) -> Result<Arc<Descriptor>, GpuError> {
        let how = self
            .new_descriptor(Descriptors::Reduction)?
            .value(Name::ReductionOperator, Of::ReductionOperator, operator(how))?
            .value(Name::ReductionType, Of::DataType, data_type(Kind::F32))?
            .finalised()?;
        self.new_descriptor(Descriptors::ReductionOperation)?
            .named(Name::ReductionX, &[self.of(from)])?
            .named(Name::ReductionY, &[self.of(to)])?
            .named(Name::ReductionDescription, &[&how])?
            .finalised()
    }

    fn reshape(&self, from: Id, to: Id) -> Result<Arc<Descriptor>, GpuError> {
        self.new_descriptor(Descriptors::ReshapeOperation)?
            .named(Name::ReshapeX, &[self.of(from)])?
            .named(Name::ReshapeY, &[self.of(to)])?
            .finalised()
    }
}

fn described(library: &Arc<Library>, id: Id, tensor: &Tensor) -> Result<Arc<Descriptor>, GpuError> {
    let counts = |counts: [usize; 4]| counts.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
    let described = Descriptor::new(library, Descriptors::Tensor)?
        .value(Name::TensorType, Of::DataType, data_type(tensor.kind))?
        .numbers(Name::TensorDimensions, &counts(tensor.dims))?
        .numbers(Name::TensorStrides, &counts(tensor.strides))?
        .numbers(Name::TensorId, &[number(id, tensor)])?
        .numbers(Name::TensorAlignment, &[16])?
        .flag(Name::TensorIsVirtual, tensor.place == Place::Virtual)?;
    let by_value = matches!(tensor.place, Place::Constant(_));
    described.flag(Name::TensorIsByValue, by_value)?.finalised()
}
