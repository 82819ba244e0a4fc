//! Axes of the mesh, and how their ranks share a matrix.

use std::marker::PhantomData;

mod sealed {
    pub trait Sealed {}
}
use sealed::Sealed;

/// An axis of the mesh.
pub trait Axis: Sealed {
    /// Ranks along it.
    const SIZE: usize;
    /// Its name in plans.
    const NAME: &'static str;
}

/// `N` tensor-parallel ranks.
pub struct Tp<const N: usize>;
/// `N` context-parallel ranks.
pub struct Cp<const N: usize>;

impl<const N: usize> Axis for Tp<N> {
    const SIZE: usize = N;
    const NAME: &'static str = "tp";
}
impl<const N: usize> Axis for Cp<N> {
    const SIZE: usize = N;
    const NAME: &'static str = "cp";
}

/// All ranks hold the same matrix.
pub struct Whole;
/// Each rank of the axis holds consecutive rows.
pub struct Split<A>(PhantomData<A>);
/// Each rank of the axis holds consecutive columns.
pub struct Columns<A>(PhantomData<A>);
/// Each rank of the axis holds a summand of the whole shape.
pub struct Partial<A>(PhantomData<A>);
/// Each rank of the axis holds the maximum of its own columns.
pub struct PartialMax<A>(PhantomData<A>);

impl<const N: usize> Sealed for Tp<N> {}
impl<const N: usize> Sealed for Cp<N> {}
impl Sealed for Whole {}
impl<A: Axis> Sealed for Split<A> {}
impl<A: Axis> Sealed for Columns<A> {}
impl<A: Axis> Sealed for Partial<A> {}

/// Placements of the residual stream: a rank has whole rows.
#[diagnostic::on_unimplemented(
    message = "a norm takes whole rows of the residual stream, not `{Self}`",
    label = "`{Self}` is not a placement of the residual stream",
    note = "partial sums must be reduced first: `all_reduce` or `reduce_scatter`",
    note = "biases, dropout and positions of the stream take whole rows too"
)]
pub trait StreamPlacement: Sealed {
    /// Whether ranks have different rows. Then gradients of parameters that all ranks hold are
    /// partial sums.
    const SPLIT: bool;
}

impl StreamPlacement for Whole {
    const SPLIT: bool = false;
}
impl<A: Axis> StreamPlacement for Split<A> {
    const SPLIT: bool = A::SIZE > 1;
}

/// Placements of values that are final, element by element.
#[diagnostic::on_unimplemented(
    message = "an activation takes final values, not `{Self}`",
    label = "`{Self}` still has to be summed over ranks",
    note = "f(a + b) is not f(a) + f(b): reduce first with `all_reduce` or `reduce_scatter`"
)]
pub trait Elementwise: Sealed {}

impl Elementwise for Whole {}
impl<A: Axis> Elementwise for Split<A> {}
impl<A: Axis> Elementwise for Columns<A> {}

/// Placements of queries, keys and values: a rank has whole heads of all tokens.
#[diagnostic::on_unimplemented(
    message = "attention takes whole heads of all tokens, not `{Self}`",
    label = "`{Self}` lacks tokens or still has to be summed",
    note = "gather rows with `all_gather` before the projections"
)]
pub trait HeadPlacement: Sealed {
    /// Placement of sums over a rank's heads.
    type Sum: GradientPlacement;
}

impl HeadPlacement for Whole {
    type Sum = Self;
}
impl<A: Axis> HeadPlacement for Columns<A> {
    type Sum = Partial<A>;
}

/// Where the tokens of the sequences are that attention works on: all on this rank, or in blocks on
/// context-parallel ranks, which exchange keys and values.
#[diagnostic::on_unimplemented(
    message = "attention has all tokens (`Whole`) or blocks of them (`Split<Cp<N>>`), not `{Self}`",
    label = "`{Self}` says nothing of the tokens of a sequence"
)]
pub trait TokenPlacement: Sealed {}

impl TokenPlacement for Whole {}
impl<const N: usize> TokenPlacement for Split<Cp<N>> {}

/// Placements of gradients of what every rank has whole, such as the latent vectors from which it
/// computes its own heads.
#[diagnostic::on_unimplemented(
    message = "gradients of what every rank has whole are `Whole` or `Partial`, not `{Self}`",
    label = "`{Self}` is no placement of such gradients"
)]
pub trait GradientPlacement: Sealed {
    /// Ranks over which they are sums.
    const RANKS: usize;
}

impl GradientPlacement for Whole {
    const RANKS: usize = 1;
}
impl<A: Axis> GradientPlacement for Partial<A> {
    const RANKS: usize = A::SIZE;
}

/// Placements of the logits.
#[diagnostic::on_unimplemented(
    message = "the loss takes logits of all tokens, not `{Self}`",
    label = "`{Self}` lacks tokens or still has to be summed",
    note = "gather rows with `all_gather` before the output layer"
)]
pub trait VocabPlacement: Sealed {
    /// Placement of the maxima of a rank's columns.
    type Max;
    /// Placement of the sums over a rank's columns.
    type Sum;
}

impl VocabPlacement for Whole {
    type Max = Self;
    type Sum = Self;
}
impl<A: Axis> VocabPlacement for Columns<A> {
    type Max = PartialMax<A>;
    type Sum = Partial<A>;
}

/// Placements of looked-up rows of the token table. A rank has zeros for another's rows, so that
/// the sum is whole.
#[diagnostic::on_unimplemented(
    message = "a lookup in the token table gives `Whole` rows or a `Partial` sum, not `{Self}`",
    label = "`{Self}` is not what a lookup gives",
    note = "`reduce_scatter` makes `Split` of `Partial`, `all_reduce` makes `Whole`"
)]
pub trait TablePlacement: Sealed {
    /// Parts of the table.
    const PARTS: usize;
}

impl TablePlacement for Whole {
    const PARTS: usize = 1;
}
impl<A: Axis> TablePlacement for Partial<A> {
    const PARTS: usize = A::SIZE;
}
