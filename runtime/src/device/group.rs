//! A communicator for device memory: the same calls as [`Communicator`]'s, on memory of a device.

use super::{Device, Space};
use crate::comm::{Call, CommError, Communicator, Element, InFlight, Kind, Op, Tag};
use std::marker::PhantomData;
use std::panic::Location;

/// A group of ranks, with this rank's device.
pub struct DeviceGroup<'a, D> {
    device: &'a D,
    comm: &'a dyn Communicator,
}

/// A call in flight that returns device memory. Its input cannot be touched until then.
#[must_use = "a call that nobody waits for may never finish"]
pub struct DeviceRequest<D, E> {
    in_flight: InFlight,
    call: Call,
    element: PhantomData<fn() -> (D, E)>,
}

impl<D: Space, E: Element> DeviceRequest<D, E> {
    /// Waits for the call on the host and returns its result, on which the device may still be
    /// working.
    ///
    /// # Errors
    /// Those of [`crate::comm::Request::wait`].
    pub fn wait(self, device: &D) -> Result<D::Memory<E>, CommError> {
        let payload = self.in_flight.wait()?;
        let wrong = || CommError::Invalid {
            call: self.call.to_string(),
            reason: "came back with another type".to_owned(),
        };
        device.unwrap(payload).ok_or_else(wrong)
    }
}

/// Errors of all operations are those of [`DeviceRequest::wait`] and [`Communicator::start`].
#[allow(clippy::missing_errors_doc)]
impl<'a, D: Device> DeviceGroup<'a, D> {
    /// The group of a communicator.
    pub fn new(device: &'a D, comm: &'a dyn Communicator) -> Self {
        Self { device, comm }
    }

    #[track_caller]
    fn ask<E: Element>(
        &self,
        kind: Kind,
        count: usize,
        memory: D::Memory<E>,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        let call = Call { kind, dtype: E::DTYPE, count, site: Location::caller() };
        let payload = self.device.wrap(memory, self.comm)?;
        let in_flight = InFlight::start(self.comm, call.clone(), payload)?;
        Ok(DeviceRequest { in_flight, call, element: PhantomData })
    }

    /// Starts sending to a rank.
    #[track_caller]
    pub fn start_send<E: Element>(
        &self,
        memory: D::Memory<E>,
        to: usize,
        tag: Tag,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        self.ask(Kind::Send { to, tag }, D::len(&memory), memory)
    }

    /// Receives `count` elements from a rank.
    #[track_caller]
    pub fn recv<E: Element>(
        &self,
        count: usize,
        from: usize,
        tag: Tag,
    ) -> Result<D::Memory<E>, CommError> {
        self.start_recv(count, from, tag)?.wait(self.device)
    }

    /// Starts receiving `count` elements from a rank.
    #[track_caller]
    pub fn start_recv<E: Element>(
        &self,
        count: usize,
        from: usize,
        tag: Tag,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        self.ask(Kind::Recv { from, tag }, count, D::empty())
    }

    /// Sends the `j`-th of `size` equal pieces to rank `j`; returns what arrived, in the order of
    /// ranks.
    #[track_caller]
    pub fn all_to_all<E: Element>(&self, memory: D::Memory<E>) -> Result<D::Memory<E>, CommError> {
        self.ask(Kind::AllToAll, D::len(&memory), memory)?.wait(self.device)
    }

    /// Sends the next `send_counts[j]` elements to rank `j`; returns what arrived, in the order of
    /// ranks.
    #[track_caller]
    pub fn all_to_all_v<E: Element>(
        &self,
        memory: D::Memory<E>,
        send_counts: Vec<usize>,
    ) -> Result<D::Memory<E>, CommError> {
        self.start_all_to_all_v(memory, send_counts)?.wait(self.device)
    }

    /// The same, started.
    #[track_caller]
    pub fn start_all_to_all_v<E: Element>(
        &self,
        memory: D::Memory<E>,
        send_counts: Vec<usize>,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        self.ask(Kind::AllToAllV { send_counts }, 0, memory)
    }

    /// Starts broadcasting `root`'s memory.
    #[track_caller]
    pub fn start_broadcast<E: Element>(
        &self,
        memory: D::Memory<E>,
        root: usize,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        self.ask(Kind::Broadcast { root }, D::len(&memory), memory)
    }

    /// Starts reducing over all ranks.
    #[track_caller]
    pub fn start_all_reduce<E: Element>(
        &self,
        memory: D::Memory<E>,
        op: Op,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        self.ask(Kind::AllReduce { op }, D::len(&memory), memory)
    }

    /// Reduces over all ranks.
    #[track_caller]
    pub fn all_reduce<E: Element>(
        &self,
        memory: D::Memory<E>,
        op: Op,
    ) -> Result<D::Memory<E>, CommError> {
        self.start_all_reduce(memory, op)?.wait(self.device)
    }

    /// Starts gathering all ranks' memory, in the order of ranks.
    #[track_caller]
    pub fn start_all_gather<E: Element>(
        &self,
        memory: D::Memory<E>,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        self.ask(Kind::AllGather, D::len(&memory), memory)
    }

    /// Gathers all ranks' memory, in the order of ranks.
    #[track_caller]
    pub fn all_gather<E: Element>(&self, memory: D::Memory<E>) -> Result<D::Memory<E>, CommError> {
        self.start_all_gather(memory)?.wait(self.device)
    }

    /// Starts reducing over all ranks; rank `i` gets the `i`-th of `size` equal pieces.
    #[track_caller]
    pub fn start_reduce_scatter<E: Element>(
        &self,
        memory: D::Memory<E>,
        op: Op,
    ) -> Result<DeviceRequest<D, E>, CommError> {
        let (count, size) = (D::len(&memory), self.comm.size());
        let kind = Kind::ReduceScatter { op };
        if !count.is_multiple_of(size) {
            let call = Call { kind, dtype: E::DTYPE, count, site: Location::caller() };
            let reason = format!("not divisible by the {size} ranks");
            return Err(CommError::Invalid { call: call.to_string(), reason });
        }
        self.ask(kind, count, memory)
    }
}
