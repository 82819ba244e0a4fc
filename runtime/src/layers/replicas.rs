//! How replicas share a layer's parameters, in the type of what names them. A stage is given a
//! [`PassContext`], from which no layer can read weights: only [`Parameters`] make it a
//! [`Context`]. A layer's backward pass has to return [`Reduced`], which nothing else makes.
//!
//! | placement | the replicas hold | forward and backward | at the end of backward |
//! |---|---|---|---|
//! | [`Whole`] | there is one | [`Parameters::weights`] | [`Parameters::complete`] |
//! | [`Replicated`] | all of it each (ZeRO stage 0) | [`Parameters::weights`] | [`Parameters::all_reduce`] |
//! | [`Sharded`] | pieces (ZeRO stages 1 to 3) | [`Parameters::gather`] | [`Parameters::reduce_scatter`] |

use super::placement::Whole;
use crate::comm::CommError;
use crate::device::Device;
use crate::ops::{Context, Gradients, PassContext, Reduced};
use crate::state::params::{ByDivision, Division, Inventory};
use std::marker::PhantomData;
use std::ops::Range;

/// Each of `N` replicas holds all parameters, and sums for their gradients. Experts have `E`
/// replicas.
pub struct Replicated<const N: usize, const E: usize = N>;

/// `N` replicas share the state of parameters: each updates its piece, and may hold nothing else
/// (ZeRO, arXiv 1910.02054, section 5). Experts are shared by `E` replicas.
pub struct Sharded<const N: usize, const E: usize = N>;

/// How replicas hold parameters.
pub trait ReplicaPlacement {
    /// Replicas that share a copy, or that have one each.
    const REPLICAS: ByDivision<usize>;
    /// Whether they share it.
    const SHARED: bool;
}

impl ReplicaPlacement for Whole {
    const REPLICAS: ByDivision<usize> = ByDivision { dense: 1, expert: 1 };
    const SHARED: bool = false;
}

impl<const N: usize, const E: usize> ReplicaPlacement for Replicated<N, E> {
    const REPLICAS: ByDivision<usize> = ByDivision { dense: N, expert: E };
    const SHARED: bool = false;
}

impl<const N: usize, const E: usize> ReplicaPlacement for Sharded<N, E> {
    const REPLICAS: ByDivision<usize> = ByDivision { dense: N, expert: E };
    const SHARED: bool = true;
}

/// Placements of which each replica has all weights.
#[diagnostic::on_unimplemented(
    message = "replicas share these weights: `{Self}`",
    label = "`{Self}` has to be gathered",
    note = "gather them first: `let ctx = &self.parameters.gather(ctx)?;`"
)]
pub trait Unshared: ReplicaPlacement {}

impl Unshared for Whole {}
impl<const N: usize, const E: usize> Unshared for Replicated<N, E> {}

/// The placement of as many replicas as there are, held as those of `P`.
fn placement<P: ReplicaPlacement>(replicas: ByDivision<usize>, has_experts: bool) -> String {
    let ByDivision { dense, expert } = replicas;
    let of = match has_experts && dense != expert {
        true => format!("{dense}, {expert}"),
        false => dense.to_string(),
    };
    match P::SHARED {
        true => format!("Sharded<{of}>"),
        false if of == "1" => "Whole".to_owned(),
        false => format!("Replicated<{of}>"),
    }
}

/// A layer's parameters.
pub struct Parameters<P> {
    own: Range<usize>,
    /// What the layer reads besides, such as a tied table.
    read: Vec<Range<usize>>,
    placement: PhantomData<P>,
}

impl<P: ReplicaPlacement> Parameters<P> {
    /// Those that were declared from element `begin` on.
    ///
    /// # Panics
    /// The mesh has other replicas, or they share their state otherwise.
    #[track_caller]
    pub fn since(begin: usize, inventory: &Inventory) -> Self {
        let own = begin..inventory.elements();
        let (zero, replicas) = inventory.replicas();
        assert!(
            P::SHARED == zero.shares_optimizer(),
            "the spec's ZeRO stage is {}, the parameters are declared {}",
            zero.stage,
            if P::SHARED { "`Sharded`" } else { "as held by each replica" }
        );
        let inside = |(elements, _): &(Range<usize>, _)| own.contains(&elements.start);
        let divisions = || inventory.units().filter(inside).map(|(_, division)| division);
        let has_experts = divisions().any(|division| division == Division::Expert);
        for division in divisions() {
            let (compiled, found) = (P::REPLICAS.of(division), replicas.of(division));
            assert!(
                compiled == found,
                "the program is compiled for {compiled} replicas of these parameters, there are \
                 {found}; valid: `Parameters<{}>`",
                placement::<P>(replicas, has_experts)
            );
        }
        Self { read: vec![own.clone()], own, placement: PhantomData }
    }

    /// The same where the layer reads `elements` besides, which another declares: a tied table.
    #[must_use]
    pub fn reading(mut self, elements: Range<usize>) -> Self {
        self.read.push(elements);
        self
    }

    /// Their elements, among all that the rank holds.
    pub fn range(&self) -> Range<usize> {
        self.own.clone()
    }

    /// The pass with their weights, which this rank has.
    ///
    /// # Errors
    /// Those of any collective call, as of all methods below.
    pub fn weights<'a, D: Device>(
        &self,
        ctx: &PassContext<'a, D>,
    ) -> Result<Context<'a, D>, CommError>
    where
        P: Unshared,
    {
        ctx.gather(&self.read)
    }
}

#[allow(clippy::missing_errors_doc)]
impl Parameters<Whole> {
    /// Says that the gradients of these parameters, and of all that the stage declares behind them,
    /// are complete. There is nothing to sum.
    pub fn complete<D: Device>(
        &self,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Reduced, CommError> {
        gradients.complete_from(self.own.start)
    }
}

#[allow(clippy::missing_errors_doc)]
impl<const N: usize, const E: usize> Parameters<Replicated<N, E>> {
    /// Sums the gradients of these parameters, and of all that the stage declares behind them, over
    /// replicas once the step's last micro-batch is complete. It goes on while other layers
    /// compute.
    pub fn all_reduce<D: Device>(
        &self,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Reduced, CommError> {
        gradients.complete_from(self.own.start)
    }
}

#[allow(clippy::missing_errors_doc)]
impl<const N: usize, const E: usize> Parameters<Sharded<N, E>> {
    /// The pass with their weights. With stage 3 they are gathered from the replicas that share
    /// them, and freed with what this returns. With stages 1 and 2 each replica has all weights,
    /// and this waits for those that others have updated.
    pub fn gather<'a, D: Device>(
        &self,
        ctx: &PassContext<'a, D>,
    ) -> Result<Context<'a, D>, CommError> {
        ctx.gather(&self.read)
    }

    /// Sums the gradients of these parameters, and of all that the stage declares behind them, over
    /// replicas, each of which gets its piece: once a step with stage 1, else after each
    /// micro-batch. It goes on while other layers compute.
    pub fn reduce_scatter<D: Device>(
        &self,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Reduced, CommError> {
        gradients.complete_from(self.own.start)
    }
}
