//! Collectives between threads: all ranks' buffers in one place, and what each rank takes from
//! them.

use crate::comm::combine::{for_rank, range_for_rank, reduced};
use crate::comm::liveness::{Liveness, Members, Waiter, lock};
use crate::comm::{Call, CommError, DeviceBuffer, Dtype, Element, Kind, Op, Payload, Pending};
use crate::device_error::DeviceError;
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

/// Elements of an all-reduce that one rank sums at a time, so that waiting ranks share the work.
const CHUNK: usize = 1 << 14;

/// One collective call of a group.
pub(super) struct Slot {
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
    complete: OnceLock<Complete>,
}

struct Arrivals {
    first: Option<(usize, Call)>,
    given: Vec<Option<(Payload, Kind)>>,
    missing: usize,
}

/// All ranks' buffers, in the order of ranks.
struct Complete {
    given: Vec<(Payload, Kind)>,
    sums: Sums,
    /// The reduction on a shared device, computed by the first rank that waits.
    on_device: OnceLock<Result<Box<dyn DeviceBuffer>, DeviceError>>,
}

/// Pieces of an all-reduce, each summed by the first rank that reaches it.
enum Sums {
    F32(Vec<OnceLock<Vec<f32>>>),
    F64(Vec<OnceLock<Vec<f64>>>),
    I64(Vec<OnceLock<Vec<i64>>>),
    U8(Vec<OnceLock<Vec<u8>>>),
    Bf16(Vec<OnceLock<Vec<bf16>>>),
}

impl Slot {
    pub fn new(size: usize) -> Self {
        let arrivals =
            Arrivals { first: None, given: (0..size).map(|_| None).collect(), missing: size };
        let (arrivals, changed) = (Mutex::new(arrivals), Condvar::new());
        Self { arrivals, changed, complete: OnceLock::new() }
    }

    /// Posts a rank's buffer; returns whether it was the last.
    pub fn post(
        &self,
        liveness: &Liveness,
        members: &Members,
        rank: usize,
        call: &Call,
        payload: Payload,
    ) -> Result<bool, CommError> {
        let mut arrivals = lock(&self.arrivals);
        let (first_rank, first) = arrivals.first.get_or_insert_with(|| (rank, call.clone()));
        if !first.matches(call) {
            let waiter = Waiter { members, rank, call };
            return Err(liveness.fail(liveness.mismatch(&waiter, *first_rank, first)));
        }
        arrivals.given[rank] = Some((payload, call.kind.clone()));
        arrivals.missing -= 1;
        if arrivals.missing > 0 {
            return Ok(false);
        }
        let given: Vec<_> = arrivals.given.drain(..).flatten().collect();
        let sums = Sums::new(call);
        let _first_time = self.complete.set(Complete { given, sums, on_device: OnceLock::new() });
        self.changed.notify_all();
        Ok(true)
    }
}

impl Sums {
    fn new(call: &Call) -> Self {
        fn empty<T>(count: usize) -> Vec<OnceLock<Vec<T>>> {
            (0..count.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect()
        }
        match call.dtype {
            Dtype::F32 => Self::F32(empty(call.count)),
            Dtype::F64 => Self::F64(empty(call.count)),
            Dtype::I64 => Self::I64(empty(call.count)),
            Dtype::U8 => Self::U8(empty(call.count)),
            Dtype::Bf16 => Self::Bf16(empty(call.count)),
        }
    }
}

/// One rank's side of a collective.
pub(super) struct Collective {
    pub slot: Arc<Slot>,
    pub call: Call,
    pub rank: usize,
    pub members: Arc<Members>,
    pub liveness: Arc<Liveness>,
}

impl Pending for Collective {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        if self.slot.complete.get().is_none() {
            self.sleep()?;
        }
        let Some(complete) = self.slot.complete.get() else {
            return Err(self.invalid("ended early"));
        };
        if complete.given.iter().any(|(payload, _)| matches!(payload, Payload::Device(_))) {
            return self.take_on_device(complete);
        }
        match &complete.sums {
            Sums::F32(sums) => self.take(complete, sums),
            Sums::F64(sums) => self.take(complete, sums),
            Sums::I64(sums) => self.take(complete, sums),
            Sums::U8(sums) => self.take(complete, sums),
            Sums::Bf16(sums) => self.take(complete, sums),
        }
    }
}

impl Collective {
    fn invalid(&self, reason: &str) -> CommError {
        CommError::Invalid { call: self.call.to_string(), reason: reason.to_owned() }
    }

    fn sleep(&self) -> Result<(), CommError> {
        let absent = |arrivals: &Arrivals| {
            let given = arrivals.given.iter().enumerate();
            given.filter(|(_, given)| given.is_none()).map(|(rank, _)| rank).collect()
        };
        self.liveness.wait(
            lock(&self.slot.arrivals),
            &self.slot.changed,
            |arrivals| (arrivals.missing == 0).then_some(()),
            absent,
            &Waiter { members: &self.members, rank: self.rank, call: &self.call },
        )
    }

    /// Computes this rank's result from all ranks' buffers.
    fn take<T: Element>(
        &self,
        complete: &Complete,
        sums: &[OnceLock<Vec<T>>],
    ) -> Result<Payload, CommError> {
        let typed: Option<Vec<&[T]>> =
            complete.given.iter().map(|(payload, _)| T::peek(payload)).collect();
        let given = typed.ok_or_else(|| self.invalid("mixed element types"))?;
        let (rank, size) = (self.rank, given.len());
        let piece = |of: &[T], n: usize, count: usize| of[n * count..(n + 1) * count].to_vec();
        let only = |root: usize, take: &dyn Fn() -> Vec<T>| match rank == root {
            true => take(),
            false => Vec::new(),
        };
        Ok(T::wrap(match self.call.kind {
            Kind::Barrier | Kind::Send { .. } | Kind::Recv { .. } => Vec::new(),
            Kind::Broadcast { root } => given[root].to_vec(),
            Kind::Scatter { root } => piece(given[root], rank, self.call.count),
            Kind::Gather { root } => only(root, &|| given.concat()),
            Kind::Reduce { root, op } => only(root, &|| reduced(&given, 0..self.call.count, op)),
            Kind::AllReduce { op } => self.all_reduced(&given, op, sums),
            Kind::AllGather => given.concat(),
            Kind::ReduceScatter { op } => {
                let count = self.call.count / size;
                reduced(&given, rank * count..(rank + 1) * count, op)
            }
            Kind::AllToAll => {
                let count = self.call.count / size;
                given.iter().flat_map(|of| piece(of, rank, count)).collect()
            }
            Kind::AllToAllV { .. } => {
                let kinds = complete.given.iter().map(|(_, kind)| kind);
                let from = |(of, kind): (&&[T], &Kind)| for_rank(of, kind, rank).to_vec();
                given.iter().zip(kinds).flat_map(from).collect()
            }
        }))
    }

    /// Computes this rank's result from all ranks' buffers on a shared device, on the stream of
    /// this rank's own buffer.
    fn take_on_device(&self, complete: &Complete) -> Result<Payload, CommError> {
        let mut given: Vec<&dyn DeviceBuffer> = Vec::with_capacity(complete.given.len());
        for (payload, _) in &complete.given {
            let Payload::Device(buffer) = payload else {
                return Err(self.invalid("some ranks gave memory of a device, others of the host"));
            };
            given.push(&**buffer);
        }
        let (rank, size, own) = (self.rank, given.len(), given[self.rank]);
        let piece = |n: usize, count: usize| n * count..(n + 1) * count;
        let whole = |of: &&'_ dyn DeviceBuffer| 0..of.len();
        let everything = || given.iter().map(|of| (*of, whole(of))).collect::<Vec<_>>();
        let reduced = |range: Range<usize>, op: Op| own.reduced(&given, range, op);
        let taken = match &self.call.kind {
            Kind::Barrier | Kind::Send { .. } | Kind::Recv { .. } => own.joined(&[]),
            &Kind::Broadcast { root } => own.joined(&[(given[root], whole(&given[root]))]),
            &Kind::Scatter { root } => own.joined(&[(given[root], piece(rank, self.call.count))]),
            &Kind::Gather { root } | &Kind::Reduce { root, .. } if rank != root => own.joined(&[]),
            Kind::Gather { .. } | Kind::AllGather => own.joined(&everything()),
            &Kind::Reduce { op, .. } => reduced(0..self.call.count, op),
            &Kind::AllReduce { op } => {
                let sum = complete.on_device.get_or_init(|| reduced(0..self.call.count, op));
                let sum = sum.as_ref().map_err(Clone::clone)?;
                own.joined(&[(&**sum, 0..self.call.count)])
            }
            &Kind::ReduceScatter { op } => reduced(piece(rank, self.call.count / size), op),
            Kind::AllToAll => {
                let piece = piece(rank, self.call.count / size);
                let parts: Vec<_> = given.iter().map(|of| (*of, piece.clone())).collect();
                own.joined(&parts)
            }
            Kind::AllToAllV { .. } => {
                let parts = given.iter().zip(&complete.given);
                let parts: Vec<_> =
                    parts.map(|(of, (_, kind))| (*of, range_for_rank(kind, rank))).collect();
                own.joined(&parts)
            }
        };
        Ok(Payload::Device(taken?))
    }

    /// Sums the pieces that no rank has summed yet, beginning at this rank's share, and copies the
    /// others.
    fn all_reduced<T: Element>(&self, given: &[&[T]], op: Op, sums: &[OnceLock<Vec<T>>]) -> Vec<T> {
        let count = self.call.count;
        let sum = |n: usize| {
            let range = n * CHUNK..((n + 1) * CHUNK).min(count);
            sums[n].get_or_init(|| reduced(given, range, op))
        };
        let begin = self.rank * sums.len() / given.len();
        for n in (begin..sums.len()).chain(0..begin) {
            sum(n);
        }
        let mut all = Vec::with_capacity(count);
        (0..sums.len()).for_each(|n| all.extend_from_slice(sum(n)));
        all
    }
}
