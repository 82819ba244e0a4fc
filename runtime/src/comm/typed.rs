//! Typed operations, written once for all backends.
//!
//! `start_*` return at once; the others are `start` and `wait`. A buffer is passed by value and
//! comes back from the wait; blocking forms that borrow it copy it.

use super::{Call, CommError, Communicator, Element, InFlight, Kind, Op, Tag};
use std::marker::PhantomData;
use std::panic::Location;

/// A call in flight that returns a vector of `T`.
#[must_use = "a call that nobody waits for may never finish"]
pub struct Request<T> {
    in_flight: InFlight,
    call: Call,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> Request<T> {
    /// Waits for the call and returns its result.
    ///
    /// # Errors
    /// Another rank's call does not match, a rank is lost, or the time limit has passed.
    pub fn wait(self) -> Result<Vec<T>, CommError> {
        let payload = self.in_flight.wait()?;
        T::unwrap(payload).ok_or_else(|| invalid(&self.call, "came back with another type"))
    }
}

fn invalid(call: &Call, reason: &str) -> CommError {
    CommError::Invalid { call: call.to_string(), reason: reason.to_owned() }
}

/// Errors of all operations are those of [`Request::wait`] and [`Communicator::start`].
#[allow(clippy::missing_errors_doc)]
impl dyn Communicator + '_ {
    #[track_caller]
    fn ask<T: Element>(
        &self,
        kind: Kind,
        count: usize,
        data: Vec<T>,
    ) -> Result<Request<T>, CommError> {
        let call = Call { kind, dtype: T::DTYPE, count, site: Location::caller() };
        let in_flight = InFlight::start(self, call.clone(), T::wrap(data))?;
        Ok(Request { in_flight, call, element: PhantomData })
    }

    /// Length of one of `size` equal pieces of `data`.
    #[track_caller]
    fn piece<T: Element>(&self, kind: &Kind, data: &[T]) -> Result<usize, CommError> {
        if data.len().is_multiple_of(self.size()) {
            return Ok(data.len() / self.size());
        }
        let count = data.len();
        let call = Call { kind: kind.clone(), dtype: T::DTYPE, count, site: Location::caller() };
        Err(invalid(&call, &format!("not divisible by the {} ranks", self.size())))
    }

    /// For [`Communicator::split`]: the ranks of a colour, in the order of their keys.
    #[track_caller]
    pub(super) fn members_of_color(
        &self,
        color: usize,
        key: usize,
    ) -> Result<Vec<usize>, CommError> {
        let told = self.all_gather(&[color as i64, key as i64])?;
        let said = told.chunks_exact(2).enumerate();
        let mut members: Vec<(i64, usize)> = said
            .filter(|(_, said)| said[0] == color as i64)
            .map(|(rank, said)| (said[1], rank))
            .collect();
        members.sort_unstable();
        Ok(members.into_iter().map(|(_, rank)| rank).collect())
    }

    /// Starts sending `data` to rank `to`.
    #[track_caller]
    pub fn start_send<T: Element>(
        &self,
        data: Vec<T>,
        to: usize,
        tag: Tag,
    ) -> Result<Request<T>, CommError> {
        self.ask(Kind::Send { to, tag }, data.len(), data)
    }

    /// Sends `data` to rank `to`. On return the buffer may be reused; it need not have arrived.
    #[track_caller]
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: Tag) -> Result<(), CommError> {
        self.start_send(data.to_vec(), to, tag)?.wait().map(drop)
    }

    /// Starts receiving `count` elements from rank `from`.
    #[track_caller]
    pub fn start_recv<T: Element>(
        &self,
        count: usize,
        from: usize,
        tag: Tag,
    ) -> Result<Request<T>, CommError> {
        self.ask(Kind::Recv { from, tag }, count, Vec::new())
    }

    /// Receives `count` elements from rank `from`.
    #[track_caller]
    pub fn recv<T: Element>(
        &self,
        count: usize,
        from: usize,
        tag: Tag,
    ) -> Result<Vec<T>, CommError> {
        self.start_recv(count, from, tag)?.wait()
    }

    /// Returns once every rank has called it.
    #[track_caller]
    pub fn barrier(&self) -> Result<(), CommError> {
        self.ask::<u8>(Kind::Barrier, 0, Vec::new())?.wait().map(drop)
    }

    /// Starts overwriting every rank's `data` with rank `root`'s.
    #[track_caller]
    pub fn start_broadcast<T: Element>(
        &self,
        data: Vec<T>,
        root: usize,
    ) -> Result<Request<T>, CommError> {
        self.ask(Kind::Broadcast { root }, data.len(), data)
    }

    /// Overwrites every rank's `data` with rank `root`'s.
    #[track_caller]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), CommError> {
        let sent = self.start_broadcast(data.to_vec(), root)?;
        data.copy_from_slice(&sent.wait()?);
        Ok(())
    }

    /// Scatters rank `root`'s `size · count` elements, `count` to each rank; what other ranks pass
    /// is ignored.
    #[track_caller]
    pub fn scatter<T: Element>(
        &self,
        data: &[T],
        count: usize,
        root: usize,
    ) -> Result<Vec<T>, CommError> {
        let kind = Kind::Scatter { root };
        let mine = self.rank() == root;
        let given = if mine { data.to_vec() } else { Vec::new() };
        if mine && given.len() != count * self.size() {
            let call = Call { kind, dtype: T::DTYPE, count, site: Location::caller() };
            return Err(invalid(&call, &format!("the root gives {} elements", given.len())));
        }
        self.ask(kind, count, given)?.wait()
    }

    /// Gathers all ranks' `data` on rank `root`, in the order of ranks; other ranks get nothing.
    #[track_caller]
    pub fn gather<T: Element>(&self, data: &[T], root: usize) -> Result<Vec<T>, CommError> {
        self.ask(Kind::Gather { root }, data.len(), data.to_vec())?.wait()
    }

    /// Reduces all ranks' `data` onto rank `root`; other ranks get nothing.
    #[track_caller]
    pub fn reduce<T: Element>(&self, data: &[T], op: Op, root: usize) -> Result<Vec<T>, CommError> {
        self.ask(Kind::Reduce { root, op }, data.len(), data.to_vec())?.wait()
    }

    /// Starts reducing `data` over all ranks.
    #[track_caller]
    pub fn start_all_reduce<T: Element>(
        &self,
        data: Vec<T>,
        op: Op,
    ) -> Result<Request<T>, CommError> {
        self.ask(Kind::AllReduce { op }, data.len(), data)
    }

    /// Reduces `data` over all ranks, in place.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: Op) -> Result<(), CommError> {
        let reduced = self.start_all_reduce(data.to_vec(), op)?;
        data.copy_from_slice(&reduced.wait()?);
        Ok(())
    }

    /// Starts gathering all ranks' `data`, in the order of ranks.
    #[track_caller]
    pub fn start_all_gather<T: Element>(&self, data: Vec<T>) -> Result<Request<T>, CommError> {
        self.ask(Kind::AllGather, data.len(), data)
    }

    /// Gathers all ranks' `data`, in the order of ranks.
    #[track_caller]
    pub fn all_gather<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CommError> {
        self.start_all_gather(data.to_vec())?.wait()
    }

    /// Starts reducing `data` over all ranks; rank `i` gets the `i`-th of `size` equal pieces.
    #[track_caller]
    pub fn start_reduce_scatter<T: Element>(
        &self,
        data: Vec<T>,
        op: Op,
    ) -> Result<Request<T>, CommError> {
        let kind = Kind::ReduceScatter { op };
        self.piece(&kind, &data)?;
        self.ask(kind, data.len(), data)
    }

    /// Reduces `data` over all ranks; rank `i` gets the `i`-th of `size` equal pieces.
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, data: &[T], op: Op) -> Result<Vec<T>, CommError> {
        self.start_reduce_scatter(data.to_vec(), op)?.wait()
    }

    /// Sends the `j`-th of `size` equal pieces to rank `j`; returns what arrived, in the order of
    /// ranks.
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CommError> {
        self.start_all_to_all(data.to_vec())?.wait()
    }

    /// The same, started.
    #[track_caller]
    pub fn start_all_to_all<T: Element>(&self, data: Vec<T>) -> Result<Request<T>, CommError> {
        self.piece(&Kind::AllToAll, &data)?;
        self.ask(Kind::AllToAll, data.len(), data)
    }

    /// Sends the next `send_counts[j]` elements of `data` to rank `j`; returns what arrived, in the
    /// order of ranks. The senders decide how much each sent: exchange counts first if they are not
    /// known.
    #[track_caller]
    pub fn all_to_all_v<T: Element>(
        &self,
        data: &[T],
        send_counts: &[usize],
    ) -> Result<Vec<T>, CommError> {
        let kind = Kind::AllToAllV { send_counts: send_counts.to_vec() };
        let fits =
            send_counts.len() == self.size() && send_counts.iter().sum::<usize>() == data.len();
        if !fits {
            let site = Location::caller();
            let call = Call { kind, dtype: T::DTYPE, count: data.len(), site };
            return Err(invalid(&call, &format!("counts {send_counts:?} do not add up")));
        }
        self.ask(kind, 0, data.to_vec())?.wait()
    }
}
