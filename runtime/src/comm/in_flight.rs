//! The one place where a rank starts a call and waits for it, whatever the backend.

use super::{Call, CommError, Communicator, Payload, Pending, Stats};

/// A call in flight. The seconds that its rank spends starting it and waiting for it count for its
/// group ([`Stats::waited_s`]).
pub(crate) struct InFlight {
    pending: Box<dyn Pending>,
    group: String,
    stats: Stats,
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
        let pending = stats.timed(&group, || comm.start(call, payload))?;
        Ok(Self { pending, group, stats })
    }

    /// Waits for the call.
    ///
    /// # Errors
    /// Those of [`Pending::wait`].
    pub(crate) fn wait(self) -> Result<Payload, CommError> {
        let Self { pending, group, stats } = self;
        stats.timed(&group, || pending.wait())
    }
}
