//! How ranks talk: one [`Communicator`] trait, passed to whoever needs it.
//!
//! A backend implements a handful of untyped methods; the typed operations that everybody calls are
//! written once, on `dyn Communicator`. A buffer that is under way belongs to its [`Request`] and
//! comes back from [`Request::wait`], so that touching it early does not compile:
//!
//! ```compile_fail
//! use runtime::comm::{Communicator, Op, Solo};
//! let comm: Box<dyn Communicator> = Box::new(Solo::new());
//! let gradients = vec![1.0_f32];
//! let request = comm.start_all_reduce(gradients, Op::Sum).unwrap();
//! println!("{}", gradients[0]); // moved into the request
//! request.wait().unwrap();
//! ```
//!
//! Every call remembers where it was made. Two ranks that make different calls where they should
//! make the same one both get an error that names both places; a rank that is gone, or is not heard
//! of within the time limit, is an error on those that wait for it.

mod call;
mod combine;
mod error;
mod host_name;
mod liveness;
mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
mod options;
mod payload;
mod solo;
mod stats;
pub mod tcp;
mod typed;
pub mod wire;

pub use call::{Call, Kind, Op, Tag};
pub use error::{CommError, Peer};
pub(crate) use host_name::host_name;
pub use local::{LocalComm, run_ranks, world};
pub use nccl::{NcclBuffer, NcclComm};
pub use options::{Delays, Options};
pub use payload::{DeviceBuffer, Dtype, Element, Payload};
pub use solo::Solo;
pub use stats::{Counted, Stats, Traffic, since};
pub use typed::Request;

use kernels::cuda::Event;

/// A group of ranks that can exchange data, as one of its ranks sees it.
pub trait Communicator: Send + Sync {
    /// This rank within the group, 0-based.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize;

    /// Name of the group in reports and errors, for example `tp`.
    fn group(&self) -> &str;

    /// What this rank has sent so far, over all its groups.
    fn stats(&self) -> &Stats;

    /// Whether it carries memory of devices as it is; else it is given copies on the host.
    fn carries_devices(&self) -> bool {
        false
    }

    /// Why steps in which ranks talk over this cannot be recorded and replayed; nothing where they can.
    fn not_recordable(&self) -> Option<&'static str> {
        Some("what goes between ranks goes by way of the host")
    }

    /// Waits until all that was started is queued on the device, whoever queues it.
    ///
    /// # Errors
    /// What went wrong meanwhile.
    fn settle(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Recorded work is on its way in which ranks of this group talk, and done at `_event`.
    fn replayed(&self, _event: Event) {}

    /// Starts a call. What it takes and gives back is said at the typed operation.
    ///
    /// # Errors
    /// A call that cannot be, or that differs from what another rank of the group calls.
    fn start(&self, call: Call, payload: Payload) -> Result<Box<dyn Pending>, CommError>;

    /// The group of all ranks that give the same `color`, in the order of `key` (then of rank).
    /// All ranks of this group must call it. The group gets the name `name`.
    ///
    /// # Errors
    /// Those of any collective call.
    fn split(
        &self,
        name: &str,
        color: usize,
        key: usize,
    ) -> Result<Box<dyn Communicator>, CommError>;

    /// Ends everybody's calls with an error that says this rank gave up, and why.
    fn abort(&self, reason: &str);

    /// The same group once more, with messages of its own, which are not counted; nothing where there are none.
    fn twin(&self) -> Option<Box<dyn Communicator>> {
        None
    }

    /// Whether nobody gave up, as far as is known.
    ///
    /// # Errors
    /// Who did, and why.
    fn health(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// The error of a rank of the group that has ended, as far as is known, in a call that waits for it.
    fn lost(&self, _call: &str) -> Option<CommError> {
        None
    }

    /// How errors name a rank of the group.
    fn peer(&self, rank: usize) -> Peer {
        Peer { rank, process: None }
    }

    /// Takes up where each world rank runs, for example `host a, pid 123`: errors say so from now on.
    fn introduce(&self, _processes: Vec<String>) {}
}

/// A call under way.
pub trait Pending: Send {
    /// Waits for it and takes what came back.
    ///
    /// # Errors
    /// A call of another rank that does not match, a lost rank, or the time limit.
    fn wait(self: Box<Self>) -> Result<Payload, CommError>;
}
