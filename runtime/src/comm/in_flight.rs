//! The one place where a rank starts a call and waits for it, whatever the backend.

use super::stats::{CallSpan, bytes_of};
use super::{Call, CommError, Communicator, Payload, Pending, Stats};
use std::time::Instant;

/// A call in flight. The seconds that its rank spends starting it and waiting for it count for its
/// group ([`Stats::waited_s`]).
#[must_use = "a call that nobody waits for may never finish"]
pub(crate) struct InFlight {
    pending: Box<dyn Pending>,
    group: String,
    stats: Stats,
    call: &'static str,
    bytes: u64,
    started: Instant,
}

impl InFlight {
    /// Starts a call.
    ///
    /// # Errors
    /// Those of [`Communicator::start`].
    pub(crate) fn start(
        comm: &dyn Communicator,
        call: Call,
        payload: Payload,
    ) -> Result<Self, CommError> {
        let (group, stats) = (comm.group().to_owned(), comm.stats().clone());
        let (name, bytes) = (call.kind.name(), bytes_of(&call, payload.len()));
        let started = Instant::now();
        let pending = stats.timed(&group, || comm.start(call, payload))?;
        Ok(Self { pending, group, stats, call: name, bytes, started })
    }

    /// Waits for the call.
    ///
    /// # Errors
    /// Those of [`Pending::wait`].
    pub(crate) fn wait(self) -> Result<Payload, CommError> {
        let Self { pending, group, stats, call, bytes, started } = self;
        let waited_from = Instant::now();
        let payload = stats.timed(&group, || pending.wait())?;
        let ended = Instant::now();
        stats.span(|| CallSpan { group, call, bytes, started, waited_from, ended });
        Ok(payload)
    }
}
