//! Communication between ranks: one [`Communicator`] trait, implemented by several backends.
//!
//! A backend implements a few untyped methods; the typed operations are written once, on `dyn
//! Communicator`. A buffer in flight belongs to its [`Request`] and comes back from
//! [`Request::wait`], so that touching it early does not compile:
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
//! Every call records where in the program it was made. If two ranks make different calls where
//! they should make the same, both get an error that names both places. A rank that has ended, or
//! is not heard of within the time limit, is an error on the ranks that wait for it.

mod call;
mod combine;
mod error;
mod host_name;
mod in_flight;
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
pub(crate) use in_flight::InFlight;
pub use local::{LocalComm, run_ranks, world};
pub use nccl::{NcclBuffer, NcclComm};
pub use options::{Delays, Options, SlowLink};
pub use payload::{DeviceBuffer, Dtype, Element, Payload};
pub use solo::Solo;
pub use stats::{CallSpan, Counted, Stats, Traffic, since};
pub use typed::Request;

use kernels::cuda::Event;

/// One rank's handle to a group of ranks that exchange data.
pub trait Communicator: Send + Sync {
    /// This rank within the group, 0-based.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// Name of the group in reports and errors, for example `tp`.
    fn group(&self) -> &str;

    /// This rank's counters, over all its groups.
    fn stats(&self) -> &Stats;

    /// Whether it transfers device memory as it is; otherwise it is given copies on the host.
    fn carries_devices(&self) -> bool {
        false
    }

    /// Why steps that use this communicator cannot be recorded and replayed; `None` if they can.
    fn not_recordable(&self) -> Option<&'static str> {
        Some("what goes between ranks goes by way of the host")
    }

    /// Waits until everything that was started is queued on the device, by whichever thread.
    ///
    /// # Errors
    /// What went wrong meanwhile.
    fn settle(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Notes that a recorded step with calls of this group has been launched and is done at
    /// `_event`.
    fn replayed(&self, _event: Event) {}

    /// Starts a call. The typed operations define what it takes and returns.
    ///
    /// # Errors
    /// An invalid call, or one that differs from another rank's.
    fn start(&self, call: Call, payload: Payload) -> Result<Box<dyn Pending>, CommError>;

    /// Splits off the group of all ranks that pass the same `color`, ordered by `key`, then rank.
    /// All ranks of this group must call it. The new group is called `name`.
    ///
    /// # Errors
    /// Those of any collective call.
    fn split(
        &self,
        name: &str,
        color: usize,
        key: usize,
    ) -> Result<Box<dyn Communicator>, CommError>;

    /// Ends all ranks' calls with an error that says that this rank gave up, and why.
    fn abort(&self, reason: &str);

    /// A second group of the same ranks with separate messages, whose traffic is not counted;
    /// `None` if the backend has none.
    fn twin(&self) -> Option<Box<dyn Communicator>> {
        None
    }

    /// Whether no rank has given up, as far as is known.
    ///
    /// # Errors
    /// The rank that gave up, and its reason.
    fn health(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// The error of a call that waits for a rank of the group that has ended, if one is known to
    /// have.
    fn lost(&self, _call: &str) -> Option<CommError> {
        None
    }

    /// How errors name a rank of the group.
    fn peer(&self, rank: usize) -> Peer {
        Peer { rank, process: None }
    }

    /// Records where each world rank runs, for example `host a, pid 123`, for later errors.
    fn introduce(&self, _processes: Vec<String>) {}
}

/// A call in flight.
#[must_use = "a call that nobody waits for may never finish"]
pub trait Pending: Send {
    /// Waits for the call and returns its result.
    ///
    /// # Errors
    /// A call of another rank that does not match, a lost rank, or the time limit.
    fn wait(self: Box<Self>) -> Result<Payload, CommError>;
}
