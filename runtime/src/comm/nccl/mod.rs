//! Ranks on GPUs of their own. NCCL transfers the GPUs' memory. Another communicator, the
//! *control*, transfers what lies on the host, carries the ids of new groups, and reports ranks
//! that have ended or given up.
//!
//! - Every group has a CUDA stream of its own for transfers. An input is read after the event that
//!   came with it, a result carries an event, and memory is reused only after its transfer. Nothing
//!   here blocks the rank's own stream.
//! - Collectives are queued by the thread that starts them, in the order in which all members call
//!   them. Only the first of a group waits on the host for the other ranks, because NCCL connects
//!   then.
//! - Messages go over *links*, groups of two for each direction: NCCL's sends block their stream
//!   until they are received, and this crate's do not ([`links`]).
//! - A thread watches queued work ([`watchdog`]). Errors of NCCL, ranks that end or give up, and
//!   the time limit abort all groups of the rank. Its streams then go on with arbitrary data in
//!   memory, and its next call returns the reason. Every step ends with such calls before anything
//!   is updated.
//!
//! A step may be recorded: its calls are queued as usual, by whichever thread, and become part of
//! the recording. The watchdog then watches each replay as a whole instead of single calls.
//!
//! Sums are NCCL's: in f32 for f32, rounded after every addition for bf16, in an order that is the
//! same every time on the same machines. NCCL does not notice calls that differ: they end at the
//! time limit, and every rank reports where it was.

mod links;
mod watchdog;

use super::{
    Call, CommError, Communicator, Dtype, Kind, Op, Options, Payload, Peer, Pending, Stats,
};
use crate::comm::payload::DeviceBuffer;
use kernels::cuda::nccl::{Collective, DataType, ID_BYTES, Library, ReduceOp, Transfer};
use kernels::cuda::{Event, Gpu, GpuError, Span};
use links::Links;
use std::sync::{Arc, Mutex, PoisonError};
use watchdog::{Queued, Watchdog, WatchedGroup};

/// Memory of a GPU, as NCCL takes it.
pub trait NcclBuffer {
    /// All of the memory; `None` if the GPU had none left.
    fn span(&self) -> Option<Span>;

    /// The stream of the rank that gave it.
    fn gpu(&self) -> &Gpu;

    /// The event after which its contents are ready.
    fn ready(&self) -> Option<&Event>;

    /// Its contents are ready at `event`, and its memory is in use until then.
    fn set_ready(&mut self, event: Event);

    /// Its memory is in use until `event`.
    fn busy_until(&self, event: Event);

    /// New memory for `len` elements of this type, allocated on `stream`.
    fn like(&self, stream: &Gpu, len: usize) -> Box<dyn DeviceBuffer>;
}

/// State shared by a rank's groups.
struct World {
    library: Arc<dyn Library>,
    watchdog: Watchdog,
    options: Options,
}

/// One rank's handle to a group.
pub struct NcclComm {
    inner: Arc<Inner>,
}

struct Inner {
    control: Arc<dyn Communicator>,
    world: Arc<World>,
    /// NCCL's group; `None` if the rank is alone.
    group: Option<Arc<WatchedGroup>>,
    /// The group's stream, from its first use on.
    stream: Mutex<Option<Gpu>>,
    links: Links,
}

impl NcclComm {
    /// The world of a control communicator, on the GPUs of the ranks' streams.
    ///
    /// # Errors
    /// NCCL's errors, and those of any collective call.
    pub fn new(
        control: Box<dyn Communicator>,
        library: Arc<dyn Library>,
        gpu: &Gpu,
        options: Options,
    ) -> Result<Self, CommError> {
        let control: Arc<dyn Communicator> = Arc::from(control);
        let watchdog = Watchdog::new(control.clone(), options);
        let world = Arc::new(World { library, watchdog, options });
        let group = match control.size() {
            1 => None,
            _ => Some(world.join(&*control, gpu)?),
        };
        Self::of(control, world, group)
    }

    fn of(
        control: Arc<dyn Communicator>,
        world: Arc<World>,
        group: Option<Arc<WatchedGroup>>,
    ) -> Result<Self, CommError> {
        let links = Links::new(&*control);
        Ok(Self {
            inner: Arc::new(Inner { control, world, group, stream: Mutex::default(), links }),
        })
    }
}

impl World {
    fn join(&self, control: &dyn Communicator, gpu: &Gpu) -> Result<Arc<WatchedGroup>, CommError> {
        let (rank, size) = (control.rank(), control.size());
        let mut id = [0; ID_BYTES];
        if rank == 0 {
            id = self.or_fail("a new group", self.library.new_id())?;
        }
        control.broadcast(&mut id, 0)?;
        let group = self.library.join(gpu, &id, size, rank);
        let group = self.watchdog.add(self.or_fail("joining the world", group)?);
        self.until_ready(&group, control, &"joining the world")?;
        Ok(group)
    }

    /// Turns an NCCL error into one that ends all ranks.
    fn or_fail<R>(&self, what: &str, result: Result<R, GpuError>) -> Result<R, CommError> {
        result.map_err(|error| self.watchdog.broke(what, &error))
    }

    /// Polls until a group is ready.
    fn until_ready(
        &self,
        group: &WatchedGroup,
        control: &dyn Communicator,
        call: &dyn std::fmt::Display,
    ) -> Result<(), CommError> {
        let mut polling = watchdog::Polling::new();
        while !self.or_fail(&call.to_string(), group.is_ready())? {
            self.watchdog.health()?;
            if let Some(error) = polling.given_up(control, self.options, call) {
                return Err(self.watchdog.fail(error));
            }
            polling.rest();
        }
        Ok(())
    }
}

impl Inner {
    /// The stream of this group's transfers, on the device of `gpu`.
    fn transfer_stream(&self, gpu: &Gpu) -> Result<Gpu, CommError> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        match &*stream {
            Some(stream) => Ok(stream.clone()),
            None => {
                let forked = self.world.or_fail("a queue for transfers", gpu.fork())?;
                Ok(stream.insert(forked).clone())
            }
        }
    }

    fn invalid(&self, call: &Call, reason: &str) -> CommError {
        CommError::Invalid { call: call.to_string(), reason: reason.to_owned() }
    }

    /// Queues a collective of all members; returns its result, still in flight.
    fn collective(
        &self,
        group: &WatchedGroup,
        call: &Call,
        mut own: Box<dyn DeviceBuffer>,
    ) -> Result<Box<dyn DeviceBuffer>, CommError> {
        let (rank, size) = (self.control.rank(), self.control.size());
        let not_ours = || self.invalid(call, "its memory is no GPU's");
        let nccl_buffer = own.nccl_buffer().ok_or_else(not_ours)?;
        let stream = self.transfer_stream(nccl_buffer.gpu())?;
        let counts = links::counts(&self.links, call, size)?;
        let (ours, len) =
            (nccl_buffer.span().unwrap_or_default(), nccl_buffer.span().map_or(0, |s| s.len()));
        let in_place = matches!(call.kind, Kind::AllReduce { .. } | Kind::Broadcast { .. });
        let mut made = match in_place {
            true => None,
            false => Some(
                nccl_buffer.like(&stream, received(&call.kind, call.count, &counts, [rank, size])),
            ),
        };
        let theirs = match &mut made {
            None => ours,
            Some(made) => made.nccl_buffer().and_then(|made| made.span()).unwrap_or_default(),
        };
        let needed = sent(&call.kind, call.count, [rank, size]).unwrap_or(len);
        if len != needed {
            let reason =
                format!("{len} elements are there for {needed}: the GPU has no memory left");
            return Err(self.invalid(call, &reason));
        }
        let transfers = transfers(call, [ours, theirs], &counts, [rank, size]);
        if let Some(event) = nccl_buffer.ready() {
            self.world.or_fail(&call.to_string(), stream.wait(event))?;
        }
        self.queue(group, &stream, call, &transfers)?;
        let done = self.done(&stream, call)?;
        match made {
            None => nccl_buffer.set_ready(done),
            Some(mut made) => {
                nccl_buffer.busy_until(done.clone());
                if let Some(made) = made.nccl_buffer() {
                    made.set_ready(done);
                }
                return Ok(made);
            }
        }
        Ok(own)
    }

    fn queue(
        &self,
        group: &WatchedGroup,
        stream: &Gpu,
        call: &Call,
        transfers: &[Transfer],
    ) -> Result<(), CommError> {
        if transfers.is_empty() {
            return Ok(());
        }
        self.world.or_fail(&call.to_string(), group.queue(stream, transfers))?;
        self.world.until_ready(group, &*self.control, call)
    }

    /// The event after everything queued so far, watched from now on.
    fn done(&self, stream: &Gpu, call: &Call) -> Result<Event, CommError> {
        let event = self.world.or_fail(&call.to_string(), stream.record())?;
        let (control, call) = (self.control.clone(), call.to_string());
        self.world.watchdog.note(Queued::new(event.clone(), control, call));
        Ok(event)
    }
}

fn numbers(dtype: Dtype) -> DataType {
    match dtype {
        Dtype::F32 => DataType::F32,
        Dtype::F64 => DataType::F64,
        Dtype::I64 => DataType::I64,
        Dtype::U8 => DataType::U8,
        Dtype::Bf16 => DataType::Bf16,
    }
}

fn combine(op: Op) -> ReduceOp {
    match op {
        Op::Sum => ReduceOp::Sum,
        Op::Max => ReduceOp::Max,
    }
}

/// Number of elements that a rank must hand in; `None` if the call does not say.
fn sent(kind: &Kind, count: usize, [rank, size]: [usize; 2]) -> Option<usize> {
    match kind {
        Kind::AllToAllV { send_counts } => Some(send_counts.iter().sum()),
        Kind::Scatter { root } => Some(if *root == rank { count * size } else { 0 }),
        Kind::Barrier => None,
        _ => Some(count),
    }
}

/// Number of elements that a rank receives.
fn received(kind: &Kind, count: usize, counts: &[usize], [rank, size]: [usize; 2]) -> usize {
    match kind {
        Kind::AllReduce { .. } | Kind::Broadcast { .. } | Kind::Scatter { .. } | Kind::AllToAll => {
            count
        }
        Kind::Gather { root } if *root == rank => count * size,
        Kind::Reduce { root, .. } if *root == rank => count,
        Kind::AllGather => count * size,
        Kind::ReduceScatter { .. } => count / size,
        Kind::AllToAllV { .. } => counts.iter().sum(),
        _ => 0,
    }
}

/// A collective as NCCL calls, to be queued as one group. `counts`: elements from each rank, for an
/// all-to-all-v.
fn transfers(
    call: &Call,
    [from, to]: [Span; 2],
    counts: &[usize],
    [rank, size]: [usize; 2],
) -> Vec<Transfer> {
    let of = numbers(call.dtype);
    let one = |moves| vec![Transfer { moves, of, from, to }];
    let none = Span::default();
    let piece = |span: Span, n: usize, len: usize| span.part(n * len..(n + 1) * len, of);
    let send = |to: usize, from: Span| Transfer { moves: Collective::Send(to), of, from, to: none };
    let receive =
        |from: usize, to: Span| Transfer { moves: Collective::Receive(from), of, from: none, to };
    let count = call.count;
    if count == 0 && !matches!(call.kind, Kind::AllToAllV { .. }) {
        return Vec::new();
    }
    match &call.kind {
        Kind::Barrier | Kind::Send { .. } | Kind::Recv { .. } => Vec::new(),
        &Kind::AllReduce { op } => one(Collective::AllReduce(combine(op))),
        &Kind::Reduce { op, root } => one(Collective::Reduce(combine(op), root)),
        &Kind::Broadcast { root } => one(Collective::Broadcast(root)),
        &Kind::ReduceScatter { op } => one(Collective::ReduceScatter(combine(op))),
        Kind::AllGather => one(Collective::AllGather),
        &Kind::Scatter { root } => {
            let sends =
                (0..if rank == root { size } else { 0 }).map(|n| send(n, piece(from, n, count)));
            sends.chain([receive(root, to)]).collect()
        }
        &Kind::Gather { root } => {
            let receives =
                (0..if rank == root { size } else { 0 }).map(|n| receive(n, piece(to, n, count)));
            std::iter::once(send(root, from)).chain(receives).collect()
        }
        Kind::AllToAll => {
            let len = count / size;
            let pair = |n| [send(n, piece(from, n, len)), receive(n, piece(to, n, len))];
            (0..size).flat_map(pair).collect()
        }
        Kind::AllToAllV { send_counts } => {
            let runs = |counts: &[usize]| {
                let end = |end: &mut usize, &len: &usize| {
                    *end += len;
                    Some(*end - len..*end)
                };
                counts.iter().scan(0, end).enumerate().collect::<Vec<_>>()
            };
            let kept = |transfer: &Transfer| !(transfer.from.is_empty() && transfer.to.is_empty());
            let sends = runs(send_counts).into_iter().map(|(n, run)| send(n, from.part(run, of)));
            let receives = runs(counts).into_iter().map(|(n, run)| receive(n, to.part(run, of)));
            sends.chain(receives).filter(kept).collect()
        }
    }
}

/// A call that has been queued.
struct Done {
    world: Arc<World>,
    payload: Payload,
}

impl Pending for Done {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        self.world.watchdog.health()?;
        Ok(self.payload)
    }
}

impl Communicator for NcclComm {
    fn rank(&self) -> usize {
        self.inner.control.rank()
    }

    fn size(&self) -> usize {
        self.inner.control.size()
    }

    fn group(&self) -> &str {
        self.inner.control.group()
    }

    fn stats(&self) -> &Stats {
        self.inner.control.stats()
    }

    fn carries_devices(&self) -> bool {
        true
    }

    fn not_recordable(&self) -> Option<&'static str> {
        None
    }

    fn settle(&self) -> Result<(), CommError> {
        self.inner.links.settle(&self.inner)
    }

    fn replayed(&self, event: Event) {
        let (control, call) = (self.inner.control.clone(), "a recorded step".to_owned());
        self.inner.world.watchdog.note(Queued::new(event, control, call));
    }

    fn start(&self, call: Call, payload: Payload) -> Result<Box<dyn Pending>, CommError> {
        let inner = &self.inner;
        inner.world.watchdog.health()?;
        let Payload::Device(own) = payload else {
            return inner.control.start(call, payload);
        };
        call.check_ranks(self.size())?;
        inner.control.health()?;
        self.stats().count(self.group(), &call, own.len());
        if let Some(delays) = inner.world.options.delays {
            std::thread::sleep(delays.before(self.rank(), inner.world.watchdog.next()));
        }
        let (world, dtype) = (inner.world.clone(), call.dtype);
        match (call.kind.clone(), &inner.group) {
            (Kind::Send { .. } | Kind::Recv { .. }, None) => {
                Err(inner.invalid(&call, "there is only one rank"))
            }
            (Kind::Send { to, tag }, Some(_)) => {
                inner.links.send(inner, [to, tag as usize], call, own)?;
                Ok(Box::new(Done { world, payload: Payload::empty(dtype) }))
            }
            (Kind::Recv { from, tag }, Some(_)) => {
                Ok(Box::new(links::Receipt { inner: inner.clone(), from, tag, call, own }))
            }
            (_, None) => Ok(Box::new(Done { world, payload: Payload::Device(own) })),
            (_, Some(group)) => {
                let buffer = inner.collective(group, &call, own)?;
                Ok(Box::new(Done { world, payload: Payload::Device(buffer) }))
            }
        }
    }

    #[track_caller]
    fn split(
        &self,
        name: &str,
        color: usize,
        key: usize,
    ) -> Result<Box<dyn Communicator>, CommError> {
        let (inner, world) = (&self.inner, &self.inner.world);
        world.watchdog.health()?;
        let control: Arc<dyn Communicator> = Arc::from(inner.control.split(name, color, key)?);
        let Some(group) = &inner.group else {
            return Ok(Box::new(Self::of(control, world.clone(), None)?));
        };
        // A rank that is alone needs no group, but all ranks must call split.
        let call = format!("split `{name}` off `{}`", inner.control.group());
        let mine = (control.size() > 1).then_some(color);
        let made = world.or_fail(&call, group.split(mine, control.rank()))?;
        let made = made.map(|made| world.watchdog.add(made));
        world.until_ready(group, &*inner.control, &call)?;
        if let Some(made) = &made {
            world.until_ready(made, &*control, &call)?;
        }
        Ok(Box::new(Self::of(control, world.clone(), made)?))
    }

    fn abort(&self, reason: &str) {
        self.inner.control.abort(reason);
        let peer = self.inner.control.peer(self.inner.control.rank());
        self.inner.world.watchdog.fail(CommError::Aborted { peer, reason: reason.to_owned() });
    }

    fn health(&self) -> Result<(), CommError> {
        self.inner.world.watchdog.health()?;
        self.inner.control.health()
    }

    fn lost(&self, call: &str) -> Option<CommError> {
        self.inner.control.lost(call)
    }

    fn peer(&self, rank: usize) -> Peer {
        self.inner.control.peer(rank)
    }
}
