//! A graph of operations on tensors of four dimensions, as data: what a library that fuses graphs is asked for.
//!
//! Dimensions are `[batch, heads, rows, columns]`; where two tensors meet, a dimension of 1 is that of the other. Heads of a
//! product's factor, or of a sum, that are fewer by a factor stand for groups of heads that lie side by side.

/// How elements are stored.
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

/// What a tensor in memory is to an attention.
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
    /// Sums over rows of `out dout`: nobody's but the graph's.
    Delta,
    /// Sums that become the gradient of the queries: nobody's but the graph's.
    DqSums,
}

impl Role {
    /// Its number in a library's terms, from 1 on.
    #[must_use]
    pub const fn number(self) -> i64 {
        self as i64 + 1
    }

    /// Whether the graph needs it for a while only.
    #[must_use]
    pub const fn is_scratch(self) -> bool {
        matches!(self, Self::Delta | Self::DqSums)
    }
}

/// A number that comes with the graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Constant {
    /// Of [`Kind::F32`].
    F32(f32),
    /// Of [`Kind::I32`].
    I32(i32),
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// Nowhere: it only leads from one operation to others.
    Virtual,
    /// In device memory, at the caller's.
    Memory(Role),
    /// With the graph.
    Constant(Constant),
}

/// A tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// `[batch, heads, rows, columns]`.
    pub dims: [usize; 4],
    /// Elements from one to the next along each dimension.
    pub strides: [usize; 4],
    /// How elements are stored.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
}

impl Tensor {
    /// A tensor without gaps.
    #[must_use]
    pub const fn packed(dims: [usize; 4], kind: Kind, place: Place) -> Self {
        let [_, heads, rows, columns] = dims;
        let strides = [heads * rows * columns, rows * columns, columns, 1];
        Self { dims, strides, kind, place }
    }

    /// `[batch, rows, heads, columns]` in memory without gaps: the layout of queries, keys, values and their like.
    #[must_use]
    pub const fn by_token(dims: [usize; 4], kind: Kind, place: Place) -> Self {
        let [_, heads, rows, columns] = dims;
        let strides = [rows * heads * columns, columns, heads * columns, 1];
        Self { dims, strides, kind, place }
    }

    /// The same memory with rows for columns.
    #[must_use]
    pub const fn transposed(self) -> Self {
        let ([b, h, r, c], [sb, sh, sr, sc]) = (self.dims, self.strides);
        Self { dims: [b, h, c, r], strides: [sb, sh, sc, sr], kind: self.kind, place: self.place }
    }

    /// The same as another kind.
    #[must_use]
    pub const fn stored(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// Its elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }
}

/// A tensor's place in [`Graph::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(pub usize);

/// What is done element by element.
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
    /// The element's own index along that dimension.
    Index(usize),
    /// `x >= y`
    AtLeast,
    /// `x` where the third is true, else `y`.
    Select,
}

/// How a dimension becomes less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The largest.
    Max,
    /// The sum.
    Sum,
}

/// One operation. All arithmetic is in f32.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// `to = a b`, matrices of rows and columns.
    Product {
        /// `[.., m, k]`
        a: Id,
        /// `[.., k, n]`
        b: Id,
        /// `[.., m, n]`
        to: Id,
    },
    /// Element by element.
    Pointwise {
        /// What.
        how: Pointwise,
        /// `x`, `y`, and what selects.
        from: Vec<Id>,
        /// The result.
        to: Id,
    },
    /// Over the dimensions in which `to` has less than `from`.
    Reduce {
        /// How.
        how: Reduction,
        /// What.
        from: Id,
        /// The result.
        to: Id,
    },
    /// The same elements in the same places, with `to`'s dimensions and strides.
    Reshape {
        /// What.
        from: Id,
        /// The result.
        to: Id,
    },
}

/// Tensors, and operations in an order in which each finds what it reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Those that operations name.
    pub tensors: Vec<Tensor>,
    /// What is done.
    pub operations: Vec<Operation>,
}

impl Graph {
    /// Adds a tensor.
    pub fn tensor(&mut self, tensor: Tensor) -> Id {
        self.tensors.push(tensor);
        Id(self.tensors.len() - 1)
    }

    /// Adds a number.
    pub fn constant(&mut self, constant: Constant) -> Id {
        let kind = match constant {
            Constant::F32(_) => Kind::F32,
            Constant::I32(_) => Kind::I32,
        };
        self.tensor(Tensor::packed([1; 4], kind, Place::Constant(constant)))
    }

    /// Adds an operation element by element, with the dimensions of the first of `from`, and its result.
    pub fn each(&mut self, how: Pointwise, from: &[Id], kind: Kind) -> Id {
        let dims = from.first().map_or([1; 4], |first| self.tensors[first.0].dims);
        let to = self.tensor(Tensor::packed(dims, kind, Place::Virtual));
        self.each_into(how, from, to)
    }

    /// Adds an operation element by element.
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

    /// Adds another way to look at a tensor.
    pub fn reshape(&mut self, from: Id, to: Tensor) -> Id {
        let to = self.tensor(to);
        self.operations.push(Operation::Reshape { from, to });
        to
    }

    /// What it needs memory for that nobody else does, and how many bytes.
    pub fn scratch(&self) -> impl Iterator<Item = (Role, usize)> + '_ {
        self.tensors.iter().filter_map(|tensor| match tensor.place {
            Place::Memory(role) if role.is_scratch() => {
                Some((role, tensor.elements() * tensor.kind.bytes()))
            }
            _ => None,
        })
    }
}
