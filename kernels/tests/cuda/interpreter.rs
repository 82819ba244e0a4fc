//! Interpreter of graphs, operation by operation in f64: the expected result of a library that
//! fuses them.

use kernels::cuda::fused::{
    Constant, Graph, Id, Operation, Place, Pointwise, Reduction, Role, Tensor,
};
use std::collections::BTreeMap;

/// Elements of tensors in memory, in memory order.
pub type Memory = BTreeMap<Role, Vec<f64>>;

type Index = [usize; 4];

/// Interprets a graph. Panics if dimensions do not match, or something is read before it is
/// written.
pub fn run(graph: &Graph, memory: &mut Memory) {
    let mut state = State { graph, memory, virtuals: BTreeMap::new() };
    graph.operations.iter().for_each(|operation| state.carry_out(operation));
}

struct State<'a> {
    graph: &'a Graph,
    memory: &'a mut Memory,
    virtuals: BTreeMap<usize, Vec<f64>>,
}

fn indices(dims: Index) -> impl Iterator<Item = Index> {
    let [_, h, r, c] = dims;
    (0..dims.iter().product())
        .map(move |at| [at / (h * r * c), at / (r * c) % h, at / c % r, at % c])
}

fn offset(tensor: &Tensor, index: Index) -> usize {
    index.iter().zip(&tensor.strides).map(|(at, stride)| at * stride).sum()
}

/// The index of an element of a `whole` tensor in a smaller one: dimensions of 1 broadcast, and
/// heads are in groups.
fn within(tensor: &Tensor, whole: Index, index: Index, grouped: bool) -> Index {
    std::array::from_fn(|d| match (tensor.dims[d], whole[d]) {
        (have, want) if have == want => index[d],
        (1, _) => 0,
        (have, want) if grouped && d == 1 && want % have == 0 => index[d] / (want / have),
        (have, want) => panic!("dimension {d} is {have} where {want} is needed"),
    })
}

impl State<'_> {
    fn tensor(&self, id: Id) -> &Tensor {
        &self.graph.tensors[id.0]
    }

    /// The elements in a tensor's memory.
    fn elements(&self, id: Id) -> Vec<f64> {
        match self.tensor(id).place {
            Place::Constant(Constant::F32(x)) => vec![f64::from(x)],
            Place::Constant(Constant::I32(x)) => vec![f64::from(x)],
            Place::Memory(role) => {
                self.memory.get(&role).unwrap_or_else(|| panic!("{role:?}")).clone()
            }
            Place::Virtual => self.virtuals.get(&id.0).expect("not written yet").clone(),
        }
    }

    fn put(&mut self, id: Id, elements: Vec<f64>) {
        assert_eq!(elements.len(), self.tensor(id).elements());
        let before = match self.tensor(id).place {
            Place::Virtual => self.virtuals.insert(id.0, elements),
            Place::Memory(role) => self.memory.insert(role, elements),
            Place::Constant(_) => panic!("a constant is written"),
        };
        assert!(before.is_none(), "tensor {} is written twice", id.0);
    }

    /// Writes every element of a tensor.
    fn fill(&mut self, to: Id, value: impl Fn(Index) -> f64) {
        let tensor = self.tensor(to);
        let mut elements = vec![f64::NAN; tensor.elements()];
        for index in indices(tensor.dims) {
            elements[offset(tensor, index)] = value(index);
        }
        self.put(to, elements);
    }

    fn carry_out(&mut self, operation: &Operation) {
        match operation {
            Operation::Product { a, b, to } => self.product(*a, *b, *to),
            Operation::Pointwise { how, from, to } => self.pointwise(*how, from, *to),
            Operation::Reduce { how, from, to } => self.reduce(*how, *from, *to),
            Operation::Reshape { from, to } => {
                let elements = self.elements(*from);
                self.put(*to, elements);
            }
        }
    }

    fn product(&mut self, a: Id, b: Id, to: Id) {
        let [left, right] = [a, b].map(|id| (self.tensor(id).clone(), self.elements(id)));
        let [batch, heads, m, n] = self.tensor(to).dims;
        let k = left.0.dims[3];
        assert_eq!((left.0.dims[2], right.0.dims[2], right.0.dims[3]), (m, k, n));
        let at = |(tensor, elements): &(Tensor, Vec<f64>), whole, index| {
            elements[offset(tensor, within(tensor, whole, index, true))]
        };
        self.fill(to, |[b, h, i, j]| {
            let terms = (0..k).map(|l| {
                at(&left, [batch, heads, m, k], [b, h, i, l])
                    * at(&right, [batch, heads, k, n], [b, h, l, j])
            });
            terms.sum()
        });
    }

    fn pointwise(&mut self, how: Pointwise, from: &[Id], to: Id) {
        let whole = self.tensor(to).dims;
        let from: Vec<_> =
            from.iter().map(|&id| (self.tensor(id).clone(), self.elements(id))).collect();
        self.fill(to, |index| {
            let at = |n: usize| {
                let (tensor, elements) = &from[n];
                elements[offset(tensor, within(tensor, whole, index, false))]
            };
            match how {
                Pointwise::Add => at(0) + at(1),
                Pointwise::Subtract => at(0) - at(1),
                Pointwise::Multiply => at(0) * at(1),
                Pointwise::Divide => at(0) / at(1),
                Pointwise::Exp => at(0).exp(),
                Pointwise::Log => at(0).ln(),
                Pointwise::Identity => at(0),
                Pointwise::Index(axis) => index[axis] as f64,
                Pointwise::AtLeast => f64::from(at(0) >= at(1)),
                Pointwise::Select => at(if at(2) == 0.0 { 1 } else { 0 }),
            }
        });
    }

    fn reduce(&mut self, how: Reduction, from: Id, to: Id) {
        let (start, combine): (f64, fn(f64, f64) -> f64) = match how {
            Reduction::Max => (f64::NEG_INFINITY, f64::max),
            Reduction::Sum => (0.0, |a, b| a + b),
        };
        let (source, elements, tensor) =
            (self.tensor(from).clone(), self.elements(from), self.tensor(to).clone());
        let mut results = vec![start; tensor.elements()];
        for index in indices(source.dims) {
            let result = &mut results[offset(&tensor, within(&tensor, source.dims, index, true))];
            *result = combine(*result, elements[offset(&source, index)]);
        }
        self.put(to, results);
    }
}
