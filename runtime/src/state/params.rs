//! Declarations of parameters, and the storage of their values, gradients and moments.
//!
//! Every tensor is declared once: its Hugging Face name and shape, and what each tensor-parallel
//! rank holds of it. Loading, initialisation, gradient reduction, the clip norm, dumps and the rank
//! report all follow from the declaration. Over its replicas a parameter's gradient is a partial
//! sum. Over the pipeline a parameter lies on its stage; one of a split vocabulary lies on all
//! pipeline ranks. An expert lies on one of the expert-parallel ranks, which alone declares it.

use crate::comm::Element;
use crate::device::Space;
use crate::state::buffer::Buffer;
use crate::state::shards::{Shards, Slice, Unit, Zero};
use std::ops::Range;
use std::rc::Rc;

/// A block of rows, cut into `ways` equal parts over the tensor-parallel ranks. Fewer ways than
/// ranks means copies: neighbouring ranks hold the same part (key/value heads).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlock {
    /// Rows of the whole block.
    pub rows: usize,
    /// Number of parts.
    pub ways: usize,
}

/// What tensor-parallel ranks hold of a tensor, which is stored as `[rows, columns]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank holds all of it.
    Replicated,
    /// Rows, block by block: column-parallel weights `[out, in]` and their biases.
    Rows(Vec<RowBlock>),
    /// Columns: row-parallel weights `[out, in]`.
    Columns,
    /// Rows of the vocabulary, padded at the end so that all ranks hold the same number.
    Vocabulary {
        /// Rows of each rank, padding included.
        rows: usize,
    },
    /// Rows of the vocabulary over the tensor-parallel ranks of all pipeline ranks, one pipeline
    /// rank after the other, padded at the end so that all hold the same number (Vocabulary
    /// Parallelism, arXiv 2411.05288, section 6.1).
    OverPipeline {
        /// The pipeline rank that declares it.
        pipeline_rank: usize,
        /// Rows of each rank, padding included.
        rows: usize,
    },
}

impl Placement {
    /// Whether it is that of a table of the vocabulary.
    fn is_table(&self) -> bool {
        matches!(self, Self::Vocabulary { .. } | Self::OverPipeline { .. })
    }
}

/// What a tensor-parallel rank has of the gradient of the elements it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// The whole gradient.
    Whole,
    /// A partial sum, to be summed over the ranks that hold the same elements.
    Partial,
    /// None: a selection bias. Its gradient is 0, and a vector does not decay; load may update it.
    /// The host reads it, exactly: no pass reads its place among the weights.
    None,
}

/// How load updates a selection bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BiasUpdate {
    /// Whose load.
    pub layer: usize,
    /// By how much a step moves it.
    pub rate: f64,
}

/// Which ranks divide a tensor, and so which hold the same of it: its replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Division {
    /// Tensor-parallel ranks divide it. Replicas lie along the context- and data-parallel axes.
    #[default]
    Dense,
    /// It is an expert's: the tensor-parallel ranks of an expert divide it. Replicas are the ranks
    /// that hold the same experts.
    Expert,
}

/// One value for each [`Division`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByDivision<T> {
    /// Of dense parameters.
    pub dense: T,
    /// Of the experts'.
    pub expert: T,
}

impl<T: Copy> ByDivision<T> {
    /// The value of a division.
    pub fn of(&self, division: Division) -> T {
        match division {
            Division::Dense => self.dense,
            Division::Expert => self.expert,
        }
    }
}

impl<T> ByDivision<T> {
    /// A value for each division.
    pub fn each(value: impl Fn(Division) -> T) -> Self {
        Self { dense: value(Division::Dense), expert: value(Division::Expert) }
    }
}

/// One of several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Which, 0-based.
    pub rank: usize,
    /// How many there are.
    pub of: usize,
}

impl Member {
    /// The only one.
    pub const ONLY: Self = Self { rank: 0, of: 1 };
}

impl Default for Member {
    fn default() -> Self {
        Self::ONLY
    }
}

/// One tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Hugging Face name.
    pub name: String,
    /// Hugging Face shape.
    pub shape: Vec<usize>,
    /// Stored transposed: `[out, in]`, where Hugging Face has `[in, out]` (GPT-2's Conv1D).
    pub transposed: bool,
    /// Which ranks divide it.
    pub division: Division,
    /// What each of those ranks holds.
    pub placement: Placement,
    /// What they have of its gradient.
    pub gradient: Gradient,
    /// Whether an earlier stage holds the same tensor. The gradient is summed with that stage's,
    /// and the tensor is not counted again.
    pub tied_copy: bool,
    /// How it is initialised.
    pub init: Init,
}

/// Initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All elements equal.
    Constant(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
}

impl Eq for Init {}

/// What one rank holds of a tensor, in rows and columns as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Ranges of global rows, one after the other.
    pub rows: Vec<Range<usize>>,
    /// Global columns.
    pub columns: Range<usize>,
    /// Rows of zeros after them, which belong to no tensor.
    pub padding: usize,
}

impl Extent {
    /// Local rows without padding.
    pub fn real_rows(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum()
    }

    /// Elements, padding included.
    pub fn elements(&self) -> usize {
        (self.real_rows() + self.padding) * self.columns.len()
    }
}

impl Declaration {
    /// Rows and columns as stored; a vector is one column.
    pub fn stored_shape(&self) -> (usize, usize) {
        match (self.shape.as_slice(), self.transposed) {
            ([rows, columns], false) | ([columns, rows], true) => (*rows, *columns),
            (shape, _) => (shape.iter().product(), 1),
        }
    }

    /// What rank `rank` of `tp` holds.
    pub fn extent(&self, rank: usize, tp: usize) -> Extent {
        let (rows, columns) = self.stored_shape();
        let part = |of: usize| rank * of / tp..(rank + 1) * of / tp;
        match &self.placement {
            Placement::Replicated => {
                Extent { rows: std::iter::once(0..rows).collect(), columns: 0..columns, padding: 0 }
            }
            Placement::Columns => Extent {
                rows: std::iter::once(0..rows).collect(),
                columns: part(columns),
                padding: 0,
            },
            Placement::Rows(blocks) => {
                let mut begin = 0;
                let cut = |block: &RowBlock| {
                    let (size, n) = (block.rows / block.ways, rank * block.ways / tp);
                    let range = begin + n * size..begin + (n + 1) * size;
                    begin += block.rows;
                    range
                };
                Extent { rows: blocks.iter().map(cut).collect(), columns: 0..columns, padding: 0 }
            }
            Placement::Vocabulary { rows: each } => vocabulary_rows(rows, *each, rank, columns),
            Placement::OverPipeline { pipeline_rank, rows: each } => {
                vocabulary_rows(rows, *each, pipeline_rank * tp + rank, columns)
            }
        }
    }

    /// Whether rank `rank` of `tp` is the first that holds these elements: summing over counted
    /// ranks counts every element once.
    pub fn counted(&self, rank: usize, tp: usize) -> bool {
        let mine = self.extent(rank, tp);
        !self.tied_copy && (0..rank).all(|other| self.extent(other, tp) != mine)
    }

    /// Extracts what `extent` covers from the whole tensor, which is in the checkpoint's layout.
    pub fn extract<T: Copy + Default>(&self, extent: &Extent, whole: &[T]) -> Vec<T> {
        let mut local = Vec::with_capacity(extent.elements());
        for row in extent.rows.iter().flat_map(Clone::clone) {
            local.extend(extent.columns.clone().map(|column| whole[self.index(row, column)]));
        }
        local.resize(extent.elements(), T::default());
        local
    }

    /// Inserts what `extent` covers into the whole tensor: `local`, which begins with element
    /// `first` of it.
    pub fn insert<T: Copy>(&self, extent: &Extent, first: usize, local: &[T], whole: &mut [T]) {
        let rows: Vec<usize> = extent.rows.iter().flat_map(Clone::clone).collect();
        let width = extent.columns.len();
        for (n, value) in (first..).zip(local) {
            // Behind the last row is padding.
            if let Some(&row) = rows.get(n / width) {
                whole[self.index(row, extent.columns.start + n % width)] = *value;
            }
        }
    }

    /// Elements of the whole tensor.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// What `extent` covers of the whole tensor as stored. For each run of elements: its beginning
    /// here, its beginning in the whole tensor, and its length.
    pub fn runs(&self, extent: &Extent) -> Vec<(usize, usize, usize)> {
        let (_, columns) = self.stored_shape();
        let (width, mut local) = (extent.columns.len(), 0);
        let mut runs = Vec::new();
        for rows in &extent.rows {
            // Whole rows are contiguous.
            let (count, len) = match width == columns {
                true => (1, rows.len() * width),
                false => (rows.len(), width),
            };
            for n in 0..count {
                runs.push((local, (rows.start + n) * columns + extent.columns.start, len));
                local += len;
            }
        }
        runs
    }

    /// Index of a stored row and column in the checkpoint's layout.
    fn index(&self, row: usize, column: usize) -> usize {
        let (rows, columns) = self.stored_shape();
        if self.transposed { column * rows + row } else { row * columns + column }
    }

    /// Whether weight decay applies: to matrices of the Hugging Face checkpoint.
    pub fn decays(&self) -> bool {
        self.shape.len() == 2
    }
}

/// The `n`-th shard of `each` rows.
fn vocabulary_rows(rows: usize, each: usize, n: usize, columns: usize) -> Extent {
    let range = (n * each).min(rows)..((n + 1) * each).min(rows);
    let padding = each - range.len();
    Extent { rows: vec![range], columns: 0..columns, padding }
}

/// One of a rank's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParameterId(usize);

/// Consecutive elements of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterSlice {
    /// The parameter.
    pub id: ParameterId,
    /// First element within all of the rank's parameters.
    pub begin: usize,
    /// Elements.
    pub len: usize,
    unit: usize,
}

impl ParameterSlice {
    /// Its elements within all of the rank's parameters.
    pub fn range(&self) -> Range<usize> {
        self.begin..self.begin + self.len
    }

    /// Index of its unit ([`super::shards::Unit`]).
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// Index of its parameter in the inventory.
    pub fn index(&self) -> usize {
        self.id.0
    }

    /// Rows `rows` of it, of `columns` elements each.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>, columns: usize) -> Self {
        Self { begin: self.begin + rows.start * columns, len: rows.len() * columns, ..*self }
    }
}

/// A parameter as one rank holds it.
#[derive(Clone, Debug)]
pub struct HeldParameter {
    /// The declaration.
    pub declaration: Declaration,
    /// What this rank holds.
    pub extent: Extent,
    /// Where it lies among the rank's parameters.
    pub part: ParameterSlice,
    /// The stage it belongs to.
    pub stage: usize,
    /// Whether this rank counts it.
    pub counted: bool,
    /// How load updates it, if it does.
    pub by_load: Option<BiasUpdate>,
}

/// All parameters of a rank, stage by stage and layer by layer.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    held: Vec<HeldParameter>,
    elements: usize,
    /// This rank among those that divide a tensor.
    members: ByDivision<Member>,
    /// This rank among those that have different experts.
    experts: Member,
    /// What replicas share, and how many share a copy or have one each.
    zero: Zero,
    replicas: ByDivision<usize>,
    stage: usize,
    copies: bool,
    /// Where units begin, and how they are divided.
    units: Vec<(usize, Division)>,
    /// Whether the next parameter begins a unit.
    begins_unit: bool,
}

impl Inventory {
    /// An empty inventory for rank `tp_rank` of `tp`.
    pub fn new(tp_rank: usize, tp: usize) -> Self {
        let dense = Member { rank: tp_rank, of: tp };
        let replicas = ByDivision::each(|_| 1);
        Self { members: ByDivision { dense, expert: Member::ONLY }, replicas, ..Self::default() }
    }

    /// The same where this rank is `experts` of the expert-parallel ranks, and `within` of the
    /// tensor-parallel ranks of its experts.
    #[must_use]
    pub fn with_experts(self, experts: Member, within: Member) -> Self {
        Self { members: ByDivision { expert: within, ..self.members }, experts, ..self }
    }

    /// The same where so many replicas share a copy of the state, or have one each.
    #[must_use]
    pub fn with_replicas(self, zero: Zero, replicas: ByDivision<usize>) -> Self {
        Self { zero, replicas, ..self }
    }

    /// What replicas share, and how many share a copy or have one each.
    pub fn replicas(&self) -> (Zero, ByDivision<usize>) {
        (self.zero, self.replicas)
    }

    /// This rank's experts of `all`.
    pub fn own_experts(&self, all: usize) -> Range<usize> {
        let each = all / self.experts.of;
        self.experts.rank * each..(self.experts.rank + 1) * each
    }

    /// Assigns later declarations to `stage`.
    pub fn enter_stage(&mut self, stage: usize) {
        self.stage = stage;
    }

    /// Begins a unit, whose state replicas share: a layer. A table of the vocabulary is always a
    /// unit of its own, and so are a layer's experts. Returns the first element of what follows.
    pub fn begin_unit(&mut self) -> usize {
        self.begins_unit = true;
        self.elements
    }

    /// Elements of each unit, and how they are divided.
    pub fn units(&self) -> impl Iterator<Item = (Range<usize>, Division)> + '_ {
        let ends = self.units.iter().skip(1).map(|(begin, _)| *begin);
        let ends = ends.chain(std::iter::once(self.elements));
        self.units.iter().zip(ends).map(|(&(begin, division), end)| (begin..end, division))
    }

    /// Marks later declarations as held and counted by another pipeline rank too.
    pub fn enter_copies(&mut self) {
        self.copies = true;
    }

    /// Tensor-parallel ranks.
    pub fn tp(&self) -> usize {
        self.members.dense.of
    }

    /// This rank among them.
    pub fn tp_rank(&self) -> usize {
        self.members.dense.rank
    }

    /// This rank among those that divide a tensor.
    pub fn member(&self, division: Division) -> Member {
        self.members.of(division)
    }

    /// Adds a parameter.
    pub fn declare(&mut self, declaration: Declaration) -> ParameterSlice {
        let division = declaration.division;
        let Member { rank, of } = self.members.of(division);
        let extent = declaration.extent(rank, of);
        let counted = !self.copies && declaration.counted(rank, of);
        let table = declaration.placement.is_table();
        let other = self.units.last().is_none_or(|(_, before)| *before != division);
        if other || self.begins_unit || table {
            self.units.push((self.elements, division));
        }
        self.begins_unit = table;
        let (id, unit) = (ParameterId(self.held.len()), self.units.len() - 1);
        let part = ParameterSlice { id, begin: self.elements, len: extent.elements(), unit };
        self.elements += part.len;
        let stage = self.stage;
        let held = HeldParameter { declaration, extent, part, stage, counted, by_load: None };
        self.held.push(held);
        part
    }

    /// Has load update a selection bias.
    pub fn update_by_load(&mut self, bias: ParameterSlice, update: BiasUpdate) {
        self.held[bias.index()].by_load = Some(update);
    }

    /// The parameters.
    pub fn all(&self) -> &[HeldParameter] {
        &self.held
    }

    /// Elements of all parameters.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// A name that two parameters have, apart from copies of a tied table.
    pub fn doubled(&self) -> Option<&str> {
        let own = self.held.iter().filter(|held| !held.declaration.tied_copy);
        let mut names: Vec<&str> = own.map(|held| held.declaration.name.as_str()).collect();
        names.sort_unstable();
        names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    }

    /// The parameter of that name, if this rank holds it.
    pub fn named(&self, name: &str) -> Option<&HeldParameter> {
        self.held.iter().find(|held| held.declaration.name == name)
    }
}

/// One number for each element of a rank's parameters, or of its pieces: moments, exact weights or
/// summed gradients unless the type says otherwise.
pub struct Store<D: Space, E: Element = <D as Space>::Wide> {
    memory: D::Memory<E>,
    pieces: bool,
}

impl<D: Space, E: Element> Store<D, E> {
    /// Zeros, for each element of an inventory.
    pub fn whole(device: &D, inventory: &Inventory) -> Self {
        Self { memory: device.zeros(inventory.elements()), pieces: false }
    }

    /// Zeros, for each element of the rank's pieces.
    pub fn pieces(device: &D, shards: &Shards) -> Self {
        Self { memory: device.zeros(shards.pieces()), pieces: true }
    }

    /// Zeros, for each element that the rank updates.
    pub fn updated(device: &D, shards: &Shards, inventory: &Inventory) -> Self {
        match shards.zero().shares_optimizer() {
            true => Self::pieces(device, shards),
            false => Self::whole(device, inventory),
        }
    }

    /// Where a slice lies here.
    pub fn place(&self, slice: &Slice) -> Range<usize> {
        if self.pieces { slice.piece.clone() } else { slice.whole.clone() }
    }

    /// Where this rank's piece of a unit lies here.
    pub fn place_of_piece(&self, unit: &Unit) -> Range<usize> {
        let (begin, end) = match self.pieces {
            true => (unit.begin, unit.begin + unit.piece),
            false => {
                let own = unit.own_of(unit.elements.len());
                (unit.elements.start + own.start, unit.elements.start + own.end)
            }
        };
        begin..end
    }

    /// The elements of a slice.
    pub fn get(&self, slice: &Slice) -> D::View<'_, E> {
        self.range(self.place(slice))
    }

    /// The elements of a slice.
    pub fn get_mut(&mut self, slice: &Slice) -> D::ViewMut<'_, E> {
        self.range_mut(self.place(slice))
    }

    /// The elements of each slice; slices are in ascending order.
    pub fn each_mut(&mut self, slices: &[Slice]) -> Vec<D::ViewMut<'_, E>> {
        let places: Vec<Range<usize>> = slices.iter().map(|slice| self.place(slice)).collect();
        parts_mut::<D, E>(self.all_mut(), 0, &places)
    }

    /// Consecutive elements.
    pub fn range(&self, range: Range<usize>) -> D::View<'_, E> {
        D::view(&self.memory, range)
    }

    /// Consecutive elements.
    pub fn range_mut(&mut self, range: Range<usize>) -> D::ViewMut<'_, E> {
        D::view_mut(&mut self.memory, range)
    }

    /// All elements.
    pub fn all(&self) -> D::View<'_, E> {
        self.range(0..D::len(&self.memory))
    }

    /// All elements.
    pub fn all_mut(&mut self) -> D::ViewMut<'_, E> {
        self.range_mut(0..D::len(&self.memory))
    }

    /// Elements held.
    pub fn len(&self) -> usize {
        D::len(&self.memory)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.len() * size_of::<E>()
    }
}

/// Parts of a view whose first element is number `at`; parts are in ascending order.
pub fn parts_mut<'a, D: Space, E: Element>(
    mut rest: D::ViewMut<'a, E>,
    mut at: usize,
    parts: &[Range<usize>],
) -> Vec<D::ViewMut<'a, E>> {
    let mut views = Vec::with_capacity(parts.len());
    for part in parts {
        let (_, behind) = D::split(rest, part.start - at);
        let (view, behind) = D::split(behind, part.len());
        views.push(view);
        (rest, at) = (behind, part.end);
    }
    views
}

/// A tensor that several pieces of deferred work read.
pub type SharedBuffer<D> = Rc<Buffer<D>>;
