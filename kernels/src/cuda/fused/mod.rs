//! Attention as a graph of operations, and the interface of a library that fuses such graphs.
//!
//! The log-sum-exp (natural logarithm, `[batch, q_heads, q_len]` in f32) is the same for every
//! kernel, so the forward and the backward kernel are chosen independently.

mod graph;
mod sdpa;

pub use graph::{Constant, Graph, Id, Kind, Operation, Place, Pointwise, Reduction, Role, Tensor};
pub use sdpa::{Pass, Sdpa};

use crate::cuda::GpuError;
use std::fmt::Debug;
use std::sync::Arc;

/// One of a library's plans for a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedPlan {
    /// The library's name for it.
    pub name: String,
    /// Bytes of device memory needed while it runs.
    pub workspace_bytes: usize,
}

/// Which kernels attention may use (`MESHWRIGHT_ATTENTION`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// `own`: only this crate's.
    Own,
    /// `repeatable`: the fastest of those that always give the same bits.
    Repeatable,
    /// `fastest`: the fastest of all. The default, as in other frameworks: before cuDNN 9.25 the
    /// repeatable backward pass takes a workspace that is quadratic in the sequence.
    #[default]
    Fastest,
}

impl Preference {
    /// Parses the value of the variable.
    ///
    /// # Errors
    /// If it is not one of the three words.
    pub fn read(word: &str) -> Result<Self, String> {
        match word {
            "own" => Ok(Self::Own),
            "repeatable" => Ok(Self::Repeatable),
            "fastest" | "" => Ok(Self::Fastest),
            _ => Err(format!("MESHWRIGHT_ATTENTION={word}: valid: own, repeatable, fastest")),
        }
    }
}

/// A library that fuses graphs on a device, with the choices made there.
pub trait Fuser: Debug + Send + Sync {
    /// The kernels that may be used.
    fn preference(&self) -> Preference;

    /// Name and version of the library, and the device.
    fn name(&self) -> String;

    /// The library's plans for a pass, the fastest by its own estimate first.
    ///
    /// # Errors
    /// If no engine takes the graph; the library's message.
    fn plans(&self, sdpa: &Sdpa, pass: Pass) -> Result<Vec<FusedPlan>, GpuError>;

    /// Queues one of [`Fuser::plans`], by index. `tensors` are addresses of live memory, at
    /// multiples of 16, for every role of the graph that is not scratch.
    ///
    /// # Errors
    /// If the device fails.
    fn run(
        &self,
        plan: (&Sdpa, Pass, usize),
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<(), GpuError>;

    /// The choice recorded under a name, by this process or an earlier one.
    fn recall(&self, what: &str) -> Option<Arc<str>>;

    /// Records a choice unless there is one already, and returns the one that holds.
    fn settle(&self, what: &str, found: &str) -> Arc<str>;

    /// All choices that this process looked up or made.
    fn settled(&self) -> Vec<(String, Arc<str>)>;
}

#[cfg(test)]
mod tests {
    use super::Preference;

    #[test]
    fn preferences_are_words() {
        assert_eq!(Preference::read("own"), Ok(Preference::Own));
        assert_eq!(Preference::read("repeatable"), Ok(Preference::Repeatable));
        assert_eq!(Preference::read("fastest"), Ok(Preference::Fastest));
        assert_eq!(Preference::read(""), Ok(Preference::default()));
        let error = Preference::read("Fastest").unwrap_err();
        assert_eq!(error, "MESHWRIGHT_ATTENTION=Fastest: valid: own, repeatable, fastest");
    }
}
