//! A graph of operations on four-dimensional tensors, as data: the request to a library that fuses
//! graphs.
//!
//! Dimensions are `[batch, heads, rows, columns]`. Dimensions of 1 broadcast. If one operand has
//! fewer heads by an integer factor, each of its heads stands for a group of adjacent heads of the
//! other.

/// Type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two bytes.
    Bf16,
    /// Four bytes.
    F32,
    /// Four bytes.
    I32,
    /// True or false.
    Bool,
}

impl Kind {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bool => 1,
            Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
        }
    }
}

/// The part that a tensor in memory plays in attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output.
    Out,
    /// Log-sum-exp.
    Lse,
    /// Gradient of the output.
    Dout,
    /// Gradient of the queries.
    Dq,
    /// Gradient of the keys.
    Dk,
    /// Gradient of the values.
    Dv,
    /// Sums over rows of `out dout`; scratch of the graph.
    Delta,
    /// Sums that become the gradient of the queries; scratch of the graph.
    DqSums,
}

impl Role {
    /// Its tensor number for the library, from 1.
    #[must_use]
    pub const fn number(self) -> i64 {
        self as i64 + 1
    }

    /// Whether it is scratch memory of the graph.
    #[must_use]
    pub const fn is_scratch(self) -> bool {
        matches!(self, Self::Delta | Self::DqSums)
    }
}

/// A scalar stored in the graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Constant {
    /// A scalar of [`Kind::F32`].
    F32(f32),
    /// A scalar of [`Kind::I32`].
    I32(i32),
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// Not in memory: an intermediate between operations.
    Virtual,
    /// In the caller's device memory.
    Memory(Role),
    /// In the graph.
    Constant(Constant),
}

/// A tensor of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// `[batch, heads, rows, columns]`.
    pub dims: [usize; 4],
    /// Elements from one index to the next in each dimension.
    pub strides: [usize; 4],
    /// Type of elements.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
}

impl Tensor {
    /// A row-major tensor without gaps.
    #[must_use]
    pub const fn packed(dims: [usize; 4], kind: Kind, place: Place) -> Self {
        let [_, heads, rows, columns] = dims;
        let strides = [heads * rows * columns, rows * columns, columns, 1];
        Self { dims, strides, kind, place }
    }

    /// A tensor stored as `[batch, rows, heads, columns]` without gaps: the layout of queries,
    /// keys, values and their gradients.
    #[must_use]
    pub const fn by_token(dims: [usize; 4], kind: Kind, place: Place) -> Self {
        let [_, heads, rows, columns] = dims;
        let strides = [rows * heads * columns, columns, heads * columns, 1];
        Self { dims, strides, kind, place }
    }

    /// The same memory with rows and columns swapped.
    #[must_use]
    pub const fn transposed(self) -> Self {
        let ([b, h, r, c], [sb, sh, sr, sc]) = (self.dims, self.strides);
        Self { dims: [b, h, c, r], strides: [sb, sh, sc, sr], kind: self.kind, place: self.place }
    }

    /// The same tensor with another element type.
    #[must_use]
    pub const fn stored(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }
}

/// Index of a tensor in [`Graph::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(pub usize);

/// An elementwise operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointwise {
    /// `x + y`
    Add,
    /// `x - y`
    Subtract,
    /// `x y`
    Multiply,
    /// `x / y`
    Divide,
    /// `e^x`
    Exp,
    /// `ln x`
    Log,
    /// `x`
    Identity,
    /// The element's own index in that dimension.
    Index(usize),
    /// `x >= y`
    AtLeast,
    /// `x` where the third operand is true, else `y`.
    Select,
}

/// A reduction of dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The maximum.
    Max,
    /// The sum.
    Sum,
}

/// One operation. All arithmetic is in f32.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Matrix product `to = a b`.
    Product {
        /// `[.., m, k]`
        a: Id,
        /// `[.., k, n]`
        b: Id,
        /// `[.., m, n]`
        to: Id,
    },
    /// An elementwise operation.
    Pointwise {
        /// Which one.
        how: Pointwise,
        /// `x`, `y` and the condition of a selection.
        from: Vec<Id>,
        /// The result.
        to: Id,
    },
    /// A reduction over the dimensions in which `to` is smaller than `from`.
    Reduce {
        /// Which one.
        how: Reduction,
        /// The operand.
        from: Id,
        /// The result.
        to: Id,
    },
    /// The same elements in the same order, with `to`'s dimensions and strides.
    Reshape {
        /// The operand.
        from: Id,
        /// The result.
        to: Id,
    },
}

/// Tensors and operations; each operation comes after those whose results it reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// The tensors that operations refer to.
    pub tensors: Vec<Tensor>,
    /// The operations.
    pub operations: Vec<Operation>,
}

impl Graph {
    /// Adds a tensor.
    pub fn tensor(&mut self, tensor: Tensor) -> Id {
        self.tensors.push(tensor);
        Id(self.tensors.len() - 1)
    }

    /// Adds a scalar.
    pub fn constant(&mut self, constant: Constant) -> Id {
        let kind = match constant {
            Constant::F32(_) => Kind::F32,
            Constant::I32(_) => Kind::I32,
        };
        self.tensor(Tensor::packed([1; 4], kind, Place::Constant(constant)))
    }

    /// Adds an elementwise operation and its result, which has the dimensions of the first operand.
    pub fn each(&mut self, how: Pointwise, from: &[Id], kind: Kind) -> Id {
        let dims = from.first().map_or([1; 4], |first| self.tensors[first.0].dims);
        let to = self.tensor(Tensor::packed(dims, kind, Place::Virtual));
        self.each_into(how, from, to)
    }

    /// Adds an elementwise operation with a given result.
    pub fn each_into(&mut self, how: Pointwise, from: &[Id], to: Id) -> Id {
        self.operations.push(Operation::Pointwise { how, from: from.to_vec(), to });
        to
    }

    /// Adds a product.
    pub fn product(&mut self, a: Id, b: Id, to: Id) -> Id {
        self.operations.push(Operation::Product { a, b, to });
        to
    }

    /// Adds a reduction.
    pub fn reduce(&mut self, how: Reduction, from: Id, to: Id) -> Id {
        self.operations.push(Operation::Reduce { how, from, to });
        to
    }

    /// Adds a tensor that reinterprets another.
    pub fn reshape(&mut self, from: Id, to: Tensor) -> Id {
        let to = self.tensor(to);
        self.operations.push(Operation::Reshape { from, to });
        to
    }

    /// The scratch tensors and their bytes.
    pub fn scratch(&self) -> impl Iterator<Item = (Role, usize)> + '_ {
        self.tensors.iter().filter_map(|tensor| match tensor.place {
            Place::Memory(role) if role.is_scratch() => {
                Some((role, tensor.elements() * tensor.kind.bytes()))
            }
            _ => None,
        })
    }
}
