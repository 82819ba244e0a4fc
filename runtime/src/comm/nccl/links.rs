//! Messages between two ranks with this crate's semantics: matched by tag in any order, and sent
//! without waiting for the receiver. NCCL receives messages in the order sent, and its sends block
//! their stream until then.
//!
//! So each direction between two ranks is a *link*: an NCCL group of the two, with a stream of its
//! own and, at the sending end, a thread. A sender announces each message over the control
//! communicator, in order. A receiver takes announced messages in order until it has the tag that
//! it wants, and keeps the others.

use super::watchdog::WatchedGroup;
use super::{Inner, NcclBuffer, World, numbers};
use crate::comm::liveness::lock;
use crate::comm::payload::DeviceBuffer;
use crate::comm::{Call, CommError, Communicator, Dtype, Kind, Payload, Pending, Tag};
use kernels::cuda::nccl::{Collective, ID_BYTES, Id, Transfer};
use kernels::cuda::{Gpu, Span};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Tags on the control communicator: a link's NCCL id, and announcements of messages.
const ID: Tag = 0;
const MESSAGE: Tag = 1;

/// How often to check for failures while a link settles.
const SETTLED: Duration = Duration::from_millis(10);

/// A rank's links with the members of a group.
pub(super) struct Links {
    /// A twin of the group's control for announcements, which are not counted as traffic.
    announcements: Option<Arc<dyn Communicator>>,
    outgoing: Mutex<HashMap<usize, Sender<Sent>>>,
    incoming: Mutex<HashMap<usize, Arc<Mutex<Incoming>>>>,
}

/// Work for a link's thread.
enum Sent {
    /// A message to send.
    Message(Call, Box<dyn DeviceBuffer>),
    /// To be answered once all earlier messages are queued.
    Settle(Sender<()>),
}

/// The receiving end of a link.
#[derive(Default)]
struct Incoming {
    open: Option<Open>,
    /// Messages received before they were asked for.
    early: HashMap<Tag, VecDeque<Box<dyn DeviceBuffer>>>,
}

/// A connected link and its stream.
struct Open {
    group: Arc<WatchedGroup>,
    stream: Gpu,
}

impl Links {
    pub fn new(control: &dyn Communicator) -> Self {
        let announcements = control.twin().map(Arc::from);
        Self { announcements, outgoing: Mutex::default(), incoming: Mutex::default() }
    }

    fn announcements(&self, call: &Call) -> Result<&Arc<dyn Communicator>, CommError> {
        self.announcements.as_ref().ok_or_else(|| CommError::Invalid {
            call: call.to_string(),
            reason: "what connects the ranks on the host carries no announcements".to_owned(),
        })
    }

    /// Announces a message and hands it to its link.
    pub fn send(
        &self,
        inner: &Arc<Inner>,
        [to, tag]: [usize; 2],
        call: Call,
        mut buffer: Box<dyn DeviceBuffer>,
    ) -> Result<(), CommError> {
        let announcements = self.announcements(&call)?;
        let Some(nccl_buffer) = buffer.nccl_buffer() else {
            return Err(inner.invalid(&call, "its memory is no GPU's"));
        };
        let mut outgoing = lock(&self.outgoing);
        let link = match outgoing.entry(to) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => {
                let id = inner.world.or_fail("a new link", inner.world.library.new_id())?;
                announcements.start_send(id.to_vec(), to, ID)?.wait()?;
                let stream =
                    inner.world.or_fail("a queue for transfers", nccl_buffer.gpu().fork())?;
                place.insert(open_outgoing(inner, announcements.clone(), stream, id))
            }
        };
        let dtype = Dtype::ALL.iter().position(|of| *of == call.dtype).unwrap_or_default();
        let announced = vec![tag as i64, call.count as i64, dtype as i64];
        announcements.start_send(announced, to, MESSAGE)?.wait()?;
        // A link that has ended has recorded a failure, which the next call returns.
        let _ended = link.send(Sent::Message(call, buffer));
        Ok(())
    }

    /// Waits until all messages are queued.
    pub fn settle(&self, inner: &Inner) -> Result<(), CommError> {
        let links: Vec<Sender<Sent>> = lock(&self.outgoing).values().cloned().collect();
        for link in links {
            let (announcements, settled) = channel();
            // A link that has ended has recorded a failure.
            let _ended = link.send(Sent::Settle(announcements));
            let polling = super::watchdog::Polling::new();
            while let Err(RecvTimeoutError::Timeout) = settled.recv_timeout(SETTLED) {
                inner.world.watchdog.health()?;
                let what = &"queuing messages";
                if let Some(error) = polling.given_up(&*inner.control, inner.world.options, what) {
                    return Err(inner.world.watchdog.fail(error));
                }
            }
        }
        inner.world.watchdog.health()
    }
}

/// Starts the sending end: a thread, so that nobody waits until the receiver connects.
fn open_outgoing(
    inner: &Arc<Inner>,
    announcements: Arc<dyn Communicator>,
    stream: Gpu,
    id: Id,
) -> Sender<Sent> {
    let (sender, given) = channel();
    let world = inner.world.clone();
    std::thread::spawn(move || {
        // A failure here has been recorded by the watchdog, which tells all ranks.
        let _told = carry(&world, &*announcements, &stream, &id, &given);
    });
    sender
}

fn carry(
    world: &Arc<World>,
    announcements: &dyn Communicator,
    stream: &Gpu,
    id: &Id,
    given: &Receiver<Sent>,
) -> Result<(), CommError> {
    let group = connect(world, announcements, stream, (id, 0))?;
    for sent in given {
        let (call, mut buffer) = match sent {
            Sent::Message(call, buffer) => (call, buffer),
            Sent::Settle(announcements) => {
                let _gone = announcements.send(());
                continue;
            }
        };
        let Some(nccl_buffer) = buffer.nccl_buffer() else { continue };
        let event = message(
            world,
            announcements,
            (&group, stream),
            &call,
            nccl_buffer,
            Collective::Send(1),
        )?;
        nccl_buffer.busy_until(event);
    }
    Ok(())
}

fn connect(
    world: &World,
    announcements: &dyn Communicator,
    stream: &Gpu,
    (id, end): (&Id, usize),
) -> Result<Arc<WatchedGroup>, CommError> {
    let group = world.or_fail("a link", world.library.join(stream, id, 2, end))?;
    let group = world.watchdog.add(group);
    world.until_ready(&group, announcements, &"connecting a link")?;
    Ok(group)
}

/// Queues one end of a message; returns the event of its completion.
fn message(
    world: &World,
    announcements: &dyn Communicator,
    (group, stream): (&WatchedGroup, &Gpu),
    call: &Call,
    nccl_buffer: &dyn NcclBuffer,
    moves: Collective,
) -> Result<kernels::cuda::Event, CommError> {
    let what = call.to_string();
    let span = nccl_buffer.span().unwrap_or_default();
    if span.len() != call.count {
        let reason = "the GPU has no memory left".to_owned();
        return Err(world.watchdog.fail(CommError::Invalid { call: what, reason }));
    }
    if let Some(event) = nccl_buffer.ready() {
        world.or_fail(&what, stream.wait(event))?;
    }
    if !span.is_empty() {
        let of = numbers(call.dtype);
        let transfer = match moves {
            Collective::Send(_) => Transfer { moves, of, from: span, to: Span::default() },
            _ => Transfer { moves, of, from: Span::default(), to: span },
        };
        world.or_fail(&what, group.queue(stream, &[transfer]))?;
        world.until_ready(group, announcements, call)?;
    }
    let event = world.or_fail(&what, stream.record())?;
    world.watchdog.note(super::Queued::of_link(event.clone(), what));
    Ok(event)
}

/// A receive in flight.
pub(super) struct Receipt {
    pub inner: Arc<Inner>,
    pub from: usize,
    pub tag: Tag,
    pub call: Call,
    /// An empty buffer of the device that receives.
    pub own: Box<dyn DeviceBuffer>,
}

impl Pending for Receipt {
    fn wait(mut self: Box<Self>) -> Result<Payload, CommError> {
        let incoming = lock(&self.inner.links.incoming).entry(self.from).or_default().clone();
        let mut incoming = lock(&incoming);
        loop {
            let kept = incoming.early.get_mut(&self.tag).and_then(VecDeque::pop_front);
            if let Some(buffer) = kept {
                return self.checked(buffer);
            }
            let (tag, buffer) = self.next(&mut incoming)?;
            incoming.early.entry(tag).or_default().push_back(buffer);
        }
    }
}

impl Receipt {
    /// Checks that both ends agree on length and type.
    fn checked(&self, buffer: Box<dyn DeviceBuffer>) -> Result<Payload, CommError> {
        let (len, dtype) = (buffer.len(), buffer.dtype());
        if len == self.call.count && dtype == self.call.dtype {
            return Ok(Payload::Device(buffer));
        }
        Err(self.mismatch(len, dtype.name()))
    }

    /// Reports ends that do not match to all ranks; returns the error.
    fn mismatch(&self, len: usize, dtype: &str) -> CommError {
        let control = &self.inner.control;
        let first = format!("{} sent {len} x {dtype}", control.peer(self.from));
        let second = format!("{} called {}", control.peer(control.rank()), self.call);
        let group = control.group().to_owned();
        self.inner.world.watchdog.fail(CommError::Mismatch { group, first, second })
    }

    /// Receives the next announced message, whatever its tag.
    fn next(&mut self, incoming: &mut Incoming) -> Result<(Tag, Box<dyn DeviceBuffer>), CommError> {
        let (inner, from) = (self.inner.clone(), self.from);
        let (world, announcements) = (&inner.world, inner.links.announcements(&self.call)?);
        world.watchdog.health()?;
        if incoming.open.is_none() {
            let id: Vec<u8> = self.receive_announced(&**announcements, Dtype::U8, ID_BYTES, ID)?;
            let id: Id = id.try_into().unwrap_or([0; ID_BYTES]);
            let not_ours = || inner.invalid(&self.call, "its memory is no GPU's");
            let nccl_buffer = self.own.nccl_buffer().ok_or_else(not_ours)?;
            let stream = world.or_fail("a queue for transfers", nccl_buffer.gpu().fork())?;
            let group = connect(world, &**announcements, &stream, (&id, 1))?;
            incoming.open = Some(Open { group, stream });
        }
        let announced: Vec<i64> =
            self.receive_announced(&**announcements, Dtype::I64, 3, MESSAGE)?;
        let [tag, count, dtype] = announced[..] else {
            return Err(inner.invalid(&self.call, "an announcement is garbled"));
        };
        let (tag, count) = (tag as Tag, count as usize);
        let dtype = Dtype::ALL.get(dtype as usize).copied();
        if dtype != Some(self.call.dtype) {
            return Err(self.mismatch(count, dtype.map_or("?", Dtype::name)));
        }
        let Some(Open { group, stream }) = &incoming.open else {
            return Err(inner.invalid(&self.call, "its link has ended"));
        };
        let Some(nccl_buffer) = self.own.nccl_buffer() else {
            return Err(inner.invalid(&self.call, "its memory is no GPU's"));
        };
        let mut buffer = nccl_buffer.like(stream, count);
        let call = Call { kind: Kind::Recv { from, tag }, count, ..self.call.clone() };
        if let Some(nccl_buffer) = buffer.nccl_buffer() {
            let done = message(
                world,
                &**announcements,
                (group, stream),
                &call,
                nccl_buffer,
                Collective::Receive(0),
            )?;
            nccl_buffer.set_ready(done);
        }
        Ok((tag, buffer))
    }

    /// Receives what the sender says of its link.
    fn receive_announced<T: crate::comm::Element>(
        &self,
        announcements: &dyn Communicator,
        dtype: Dtype,
        count: usize,
        tag: Tag,
    ) -> Result<Vec<T>, CommError> {
        let kind = Kind::Recv { from: self.from, tag };
        let call = Call { kind, dtype, count, site: self.call.site };
        let received = announcements.start(call.clone(), Payload::empty(dtype))?.wait();
        let payload = received.map_err(|error| self.inner.world.watchdog.fail(error))?;
        T::unwrap(payload).ok_or_else(|| self.inner.invalid(&call, "came back with another type"))
    }
}

/// For an all-to-all-v: number of elements from each rank.
pub(super) fn counts(links: &Links, call: &Call, size: usize) -> Result<Vec<usize>, CommError> {
    let Kind::AllToAllV { send_counts } = &call.kind else { return Ok(Vec::new()) };
    let announcements = links.announcements(call)?;
    let all: Vec<i64> = send_counts.iter().map(|&count| count as i64).collect();
    let counts = (**announcements).all_to_all(&all)?;
    debug_assert_eq!(counts.len(), size);
    Ok(counts.into_iter().map(|count| count as usize).collect())
}
