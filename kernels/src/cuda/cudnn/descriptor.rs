//! cuDNN's backend descriptors: creation, attributes, finalisation.

use super::library::Library;
use crate::cuda::GpuError;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// `cudnnBackendDescriptorType_t` of cudnn_graph.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Kind {
    Pointwise = 0,
    Engine = 2,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    PointwiseOperation = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    MatmulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
    DeviceProperties = 38,
}

/// `cudnnBackendAttributeType_t` of cudnn_graph.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Of {
    Handle = 0,
    DataType = 1,
    Boolean = 2,
    Int64 = 3,
    Pointer = 6,
    HeuristicMode = 8,
    NumericalNote = 11,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
    Char = 24,
}

/// `cudnnBackendAttributeName_t` of cudnn_graph.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Name {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    HeuristicsDevice = 204,
    ConfigEngine = 300,
    PlanHandle = 400,
    PlanConfig = 401,
    PlanWorkspace = 402,
    PlanDevice = 407,
    PointwiseDescription = 750,
    PointwiseX = 751,
    PointwiseB = 752,
    PointwiseY = 753,
    PointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    EngineIndex = 1301,
    EngineNumericalNotes = 1303,
    MatmulType = 1500,
    MatmulA = 1520,
    MatmulB = 1521,
    MatmulC = 1522,
    MatmulDescription = 1523,
    ReductionOperator = 1600,
    ReductionType = 1601,
    ReductionX = 1610,
    ReductionY = 1611,
    ReductionDescription = 1612,
    ReshapeX = 2200,
    ReshapeY = 2201,
    DeviceJson = 2702,
}

/// A descriptor, and those that it refers to.
#[derive(Debug)]
pub(super) struct Descriptor {
    library: Arc<Library>,
    pub(super) raw: *mut c_void,
    kept: Vec<Arc<Descriptor>>,
}

// SAFETY: any thread may use a descriptor, one at a time; those that threads share are finalised
// and only read.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed here, before those it refers to.
        let _ = unsafe { (self.library.functions.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}

impl Descriptor {
    pub(super) fn new(library: &Arc<Library>, kind: Kind) -> Result<Self, GpuError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one descriptor.
        let status = unsafe {
            (library.functions.cudnnBackendCreateDescriptor)(kind as c_int, &raw mut raw)
        };
        library.check("cudnnBackendCreateDescriptor", status)?;
        Ok(Self { library: library.clone(), raw, kept: Vec::new() })
    }

    fn put<T>(self, name: Name, of: Of, values: &[T]) -> Result<Self, GpuError> {
        let count = i64::try_from(values.len()).unwrap_or(i64::MAX);
        // SAFETY: the descriptor is live; `count` values have the attribute's type and are read
        // during the call.
        let status = unsafe {
            let from = values.as_ptr().cast();
            (self.library.functions.cudnnBackendSetAttribute)(
                self.raw,
                name as c_int,
                of as c_int,
                count,
                from,
            )
        };
        self.library.check("cudnnBackendSetAttribute", status)?;
        Ok(self)
    }

    pub(super) fn numbers(self, name: Name, values: &[i64]) -> Result<Self, GpuError> {
        self.put(name, Of::Int64, values)
    }

    pub(super) fn flag(self, name: Name, value: bool) -> Result<Self, GpuError> {
        self.put(name, Of::Boolean, &[value])
    }

    /// A value of one of cuDNN's enumerations.
    pub(super) fn value(self, name: Name, of: Of, value: c_int) -> Result<Self, GpuError> {
        self.put(name, of, &[value])
    }

    pub(super) fn text(self, name: Name, text: &str) -> Result<Self, GpuError> {
        // C strings end with a zero.
        let bytes: Vec<u8> = text.bytes().chain([0]).collect();
        self.put(name, Of::Char, &bytes)
    }

    pub(super) fn pointers(
        self,
        name: Name,
        of: Of,
        pointers: &[*mut c_void],
    ) -> Result<Self, GpuError> {
        self.put(name, of, pointers)
    }

    /// Sets an attribute to finalised descriptors, which live as long as this one.
    pub(super) fn named(self, name: Name, others: &[&Arc<Descriptor>]) -> Result<Self, GpuError> {
        let raw: Vec<*mut c_void> = others.iter().map(|other| other.raw).collect();
        let mut this = self.put(name, Of::Descriptor, &raw)?;
        this.kept.extend(others.iter().map(|other| Arc::clone(other)));
        Ok(this)
    }

    pub(super) fn finalised(self) -> Result<Arc<Self>, GpuError> {
        // SAFETY: the descriptor is live.
        let status = unsafe { (self.library.functions.cudnnBackendFinalize)(self.raw) };
        self.library.check("cudnnBackendFinalize", status)?;
        Ok(Arc::new(self))
    }

    /// Reads an attribute into `to` and returns the number of values, which may exceed `to`.
    fn get<T>(&self, name: Name, of: Of, to: &mut [T]) -> Result<usize, GpuError> {
        let (room, mut count) = (i64::try_from(to.len()).unwrap_or(0), 0);
        let place = if to.is_empty() { std::ptr::null_mut() } else { to.as_mut_ptr().cast() };
        // SAFETY: the descriptor is live, and there is room for as many as are asked for.
        let status = unsafe {
            (self.library.functions.cudnnBackendGetAttribute)(
                self.raw,
                name as c_int,
                of as c_int,
                room,
                &raw mut count,
                place,
            )
        };
        self.library.check("cudnnBackendGetAttribute", status)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(super) fn number(&self, name: Name) -> Result<i64, GpuError> {
        let mut value = [0_i64];
        self.get(name, Of::Int64, &mut value)?;
        Ok(value[0])
    }

    /// Up to 16 values of an enumeration.
    pub(super) fn values(&self, name: Name, of: Of) -> Result<Vec<c_int>, GpuError> {
        let mut values = [0; 16];
        let count = self.get(name, of, &mut values)?;
        Ok(values[..count.min(values.len())].to_vec())
    }

    /// Descriptors that cuDNN fills in, as many as it has.
    pub(super) fn filled(&self, name: Name, kind: Kind) -> Result<Vec<Arc<Self>>, GpuError> {
        let most = match name {
            Name::ConfigEngine => 1,
            _ => self.get::<*mut c_void>(name, Of::Descriptor, &mut [])?,
        };
        let made = (0..most).map(|_| Self::new(&self.library, kind));
        let made = made.collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<*mut c_void> = made.iter().map(|one| one.raw).collect();
        let count = self.get(name, Of::Descriptor, &mut raw)?;
        Ok(made.into_iter().take(count).map(Arc::new).collect())
    }
}
