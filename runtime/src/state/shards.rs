//! How replicas share the state of the parameters that they hold alike (ZeRO, arXiv 1910.02054).
//!
//! The parameters of a rank are divided unit by unit. A layer is a unit, and so is each table of
//! the vocabulary; a layer's experts are a second one, as they have other replicas. A unit is
//! padded at its end and cut into equal pieces, one for each replica that shares it. A parameter
//! may lie in several pieces, and a piece may hold several parameters.

use super::params::{ByDivision, Division, Inventory, Member, ParameterSlice};
use std::ops::Range;

/// What replicas share (ZeRO, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zero {
    /// 0: nothing. 1: exact weights and moments. 2: gradients too. 3: weights too.
    pub stage: u8,
    /// Replicas that share one copy; 1 with stage 0. Fewer than all means hybrid sharding. Where
    /// experts have fewer replicas than this, all of them share one copy.
    pub ways: usize,
}

impl Zero {
    /// Every replica has everything.
    pub const NONE: Self = Self { stage: 0, ways: 1 };

    /// Whether each replica updates its piece only.
    pub const fn shares_optimizer(self) -> bool {
        self.stage >= 1
    }

    /// Whether each replica sums the gradients of its piece only.
    pub const fn shares_gradients(self) -> bool {
        self.stage >= 2
    }

    /// Whether each replica holds the weights of its piece only, between uses.
    pub const fn shares_weights(self) -> bool {
        self.stage >= 3
    }

    /// Replicas that divide the sum of squares of one copy's gradients: those that share a copy, or
    /// all `replicas`.
    pub fn group(self, replicas: usize) -> usize {
        if self.shares_optimizer() { self.ways.min(replicas) } else { replicas }
    }
}

impl Default for Zero {
    fn default() -> Self {
        Self::NONE
    }
}

/// A unit, as one rank holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its elements among all of the rank's parameters.
    pub elements: Range<usize>,
    /// Whose they are.
    pub division: Division,
    /// Elements of a piece, padding included.
    pub piece: usize,
    /// Where this rank's piece lies among its pieces of all units.
    pub begin: usize,
    /// Elements of the unit before this rank's piece.
    first: usize,
    /// Pieces.
    ways: usize,
}

impl Unit {
    /// Pieces.
    pub fn ways(&self) -> usize {
        self.ways
    }

    /// Elements of all pieces, padding included.
    pub fn padded(&self) -> usize {
        self.piece * self.ways
    }

    /// This rank's piece, within the padded unit.
    pub fn own(&self) -> Range<usize> {
        self.first..self.first + self.piece
    }

    /// This rank's piece without the padding, which begins at element `len` of the unit.
    pub fn own_of(&self, len: usize) -> Range<usize> {
        let own = self.own();
        own.start.min(len)..own.end.min(len)
    }
}

/// Elements of one parameter in one rank's piece of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Index of the parameter in the inventory.
    pub held: usize,
    /// Index of the unit.
    pub unit: usize,
    /// The elements among all of the rank's parameters.
    pub whole: Range<usize>,
    /// The same elements among the rank's pieces.
    pub piece: Range<usize>,
}

/// How a rank's parameters are divided.
#[derive(Clone, Debug)]
pub struct Shards {
    zero: Zero,
    units: Vec<Unit>,
    counted: Vec<Slice>,
    updated: Vec<Slice>,
    pieces: usize,
}

impl Shards {
    /// Divides an inventory over the replicas of which this rank is one.
    pub fn new(inventory: &Inventory, zero: Zero, sharing: ByDivision<Member>) -> Self {
        let mut units = Vec::new();
        let mut pieces = 0;
        for (elements, division) in inventory.units() {
            let Member { rank, of: ways } = sharing.of(division);
            let piece = elements.len().div_ceil(ways);
            let first = rank * piece;
            units.push(Unit { elements, division, piece, begin: pieces, first, ways });
            pieces += piece;
        }
        let held = |unit: usize| {
            let inside = inventory.all().iter().enumerate();
            inside.filter(move |(_, held)| held.part.unit() == unit)
        };
        let counted: Vec<Slice> = (units.iter().enumerate())
            .flat_map(|(n, unit)| {
                held(n).filter_map(move |(index, held)| slice(unit, n, index, held.part))
            })
            .collect();
        let all = inventory.all().iter().enumerate().map(|(held, parameter)| {
            let whole = parameter.part.range();
            Slice { held, unit: parameter.part.unit(), piece: whole.clone(), whole }
        });
        let updated = if zero.shares_optimizer() { counted.clone() } else { all.collect() };
        Self { zero, units, counted, updated, pieces }
    }

    /// What is shared.
    pub fn zero(&self) -> Zero {
        self.zero
    }

    /// The units, in the order of their elements.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Indices of the units that lie in `elements`.
    pub fn within(&self, elements: &Range<usize>) -> Range<usize> {
        let begins = |at: usize| self.units.partition_point(|unit| unit.elements.start < at);
        begins(elements.start)..begins(elements.end)
    }

    /// The parts of a range of elements that are divided so, adjacent ones together.
    pub fn parts(&self, range: &Range<usize>, division: Division) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        for unit in self.units.iter().filter(|unit| unit.division == division) {
            let part = unit.elements.start.max(range.start)..unit.elements.end.min(range.end);
            match parts.last_mut() {
                _ if part.is_empty() => {}
                Some(last) if last.end == part.start => last.end = part.end,
                _ => parts.push(part),
            }
        }
        parts
    }

    /// What this rank's pieces hold. Over all replicas of a copy, each element is in one piece.
    pub fn counted(&self) -> &[Slice] {
        &self.counted
    }

    /// What this rank updates: its pieces, or everything if the optimizer is not shared.
    pub fn updated(&self) -> &[Slice] {
        &self.updated
    }

    /// Whether replicas gather what each has updated, to hold all weights until the next update
    /// (stages 1 and 2).
    pub fn gathers_updates(&self) -> bool {
        let shared = self.units.iter().any(|unit| unit.ways > 1);
        self.zero.shares_optimizer() && !self.zero.shares_weights() && shared
    }

    /// Whether there are units of experts.
    pub fn has_experts(&self) -> bool {
        self.units.iter().any(|unit| unit.division == Division::Expert)
    }

    /// Elements of this rank's pieces, padding included.
    pub fn pieces(&self) -> usize {
        self.pieces
    }
}

/// What rank's piece of a unit has of a parameter.
fn slice(unit: &Unit, index: usize, held: usize, part: ParameterSlice) -> Option<Slice> {
    let own = unit.elements.start + unit.first;
    let (from, to) = (part.range().start.max(own), part.range().end.min(own + unit.piece));
    let moved = |at: usize| unit.begin + at - own;
    (from < to).then(|| Slice { held, unit: index, whole: from..to, piece: moved(from)..moved(to) })
}
