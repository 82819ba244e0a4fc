//! Attention by a library that fuses graphs, where it is there and faster: measured once for each shape and pass, then
//! remembered.
//!
//! The log-sum-exp is the same either way (natural logarithm, `[batch, q_heads, q_len]` in f32), so the forward and the
//! backward pass are chosen apart: each takes what the other's kernel wrote.

mod graph;
mod sdpa;

pub use graph::{Constant, Graph, Id, Kind, Operation, Place, Pointwise, Reduction, Role, Tensor};
pub use sdpa::{Pass, Sdpa};

use crate::cuda::GpuError;
use std::fmt::Debug;
use std::sync::Arc;

/// A library's way to run a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fused {
    /// The library's name for it.
    pub name: String,
    /// Device memory that it needs while it runs.
    pub workspace_bytes: usize,
}

/// Which kernels attention may use (`MESHWRIGHT_ATTENTION`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// Our own alone: `own`.
    Own,
    /// The fastest of those that give the same bits every time: `repeatable`.
    #[default]
    Repeatable,
    /// The fastest: `fastest`.
    Fastest,
}

impl Preference {
    /// By its word.
    ///
    /// # Errors
    /// Where it is none of these.
    pub fn read(word: &str) -> Result<Self, String> {
        match word {
            "own" => Ok(Self::Own),
            "repeatable" | "" => Ok(Self::Repeatable),
            "fastest" => Ok(Self::Fastest),
            _ => Err(format!("MESHWRIGHT_ATTENTION={word}: valid: own, repeatable, fastest")),
        }
    }
}

/// A library that fuses graphs on a device, and what was chosen there.
pub trait Fuser: Debug + Send + Sync {
    /// What may be used.
    fn preference(&self) -> Preference;

    /// The library, its version, and the device.
    fn name(&self) -> String;

    /// Ways to run a pass, those first that the library reckons fastest.
    ///
    /// # Errors
    /// Where it takes none, in its own words.
    fn plans(&self, sdpa: &Sdpa, pass: Pass) -> Result<Vec<Fused>, GpuError>;

    /// Queues one of them, by its place among [`Fuser::plans`]. `tensors` are addresses of live memory, at multiples of 16,
    /// for every role of the graph that is no scratch.
    ///
    /// # Errors
    /// As the device has it.
    fn run(
        &self,
        plan: (&Sdpa, Pass, usize),
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<(), GpuError>;

    /// What was settled under a name, here or in an earlier process.
    fn recall(&self, what: &str) -> Option<Arc<str>>;

    /// Keeps what was measured; who comes first is heard, and what holds is given back.
    fn settle(&self, what: &str, found: &str) -> Arc<str>;

    /// All that this process recalled or settled.
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
