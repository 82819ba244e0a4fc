//! A fake NCCL for tests without a GPU: collectives between queues of one emulator.
//!
//! A call holds its queue until the queues of all members have reached it, and a send until it is
//! received. A new group is ready only after a few polls. An aborted call leaves whatever is in
//! memory. Sums are taken in the order of members; bf16 is summed in f32 and rounded once.

use super::cpu_emulator::CpuEmulator;
use super::driver::{Driver, GpuError};
use super::nccl::{Collective, DataType, Group, ID_BYTES, Id, Library, ReduceOp, Transfer};
use super::{Gpu, Span};
use half::bf16;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Number of polls for which a call is reported as pending.
const PENDING_POLLS: usize = 2;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The fake library. Clones share their groups.
#[derive(Clone, Debug)]
pub struct FakeNccl {
    emulator: CpuEmulator,
    groups: Arc<Mutex<HashMap<Id, Arc<FakeGroup>>>>,
    ids: Arc<AtomicU64>,
    failing: Arc<AtomicUsize>,
}

impl FakeNccl {
    /// A library for the queues of `emulator`.
    #[must_use]
    pub fn new(emulator: CpuEmulator) -> Self {
        let failing = Arc::new(AtomicUsize::new(usize::MAX));
        Self { emulator, groups: Arc::default(), ids: Arc::default(), failing }
    }

    /// Makes member `rank` of every group see an error from now on.
    pub fn fail(&self, rank: usize) {
        self.failing.store(rank, Ordering::Release);
    }
}

impl Library for FakeNccl {
    fn version(&self) -> String {
        "fake NCCL".to_owned()
    }

    fn new_id(&self) -> Result<Id, GpuError> {
        let mut id = [0; ID_BYTES];
        id[..8].copy_from_slice(&self.ids.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(id)
    }

    fn join(
        &self,
        _gpu: &Gpu,
        id: &Id,
        size: usize,
        rank: usize,
    ) -> Result<Box<dyn Group>, GpuError> {
        let group = lock(&self.groups).entry(*id).or_insert_with(|| FakeGroup::new(size)).clone();
        lock(&group.state).joined += 1;
        Ok(Box::new(Member::new(self, Entry::Made(group), rank)))
    }
}

/// A group, shared by its members.
#[derive(Debug)]
struct FakeGroup {
    size: usize,
    state: Mutex<GroupState>,
    changed: Condvar,
}

/// Members' bytes, and how many members have taken the result.
type Contributions = (Vec<Option<Vec<u8>>>, usize);
/// A member's colour, if any, and its key.
type SplitRequest = (Option<usize>, usize);

#[derive(Debug, Default)]
struct GroupState {
    joined: usize,
    /// Members that aborted.
    aborted: BTreeSet<usize>,
    /// Collectives that some member has not yet reached or left.
    calls: HashMap<u64, Contributions>,
    /// Undelivered messages, by sender and receiver.
    messages: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// Number of messages received, by sender and receiver.
    taken: HashMap<(usize, usize), u64>,
    /// Requests of each split so far, by member.
    splits: HashMap<u64, Vec<Option<SplitRequest>>>,
    children: HashMap<(u64, usize), Arc<FakeGroup>>,
}

impl FakeGroup {
    fn new(size: usize) -> Arc<Self> {
        Arc::new(Self { size, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Waits until `there` returns something; `None` if this member aborts.
    fn wait<R>(
        &self,
        rank: usize,
        mut there: impl FnMut(&mut GroupState) -> Option<R>,
    ) -> Option<R> {
        let mut state = lock(&self.state);
        loop {
            if let Some(found) = there(&mut state) {
                return Some(found);
            }
            if state.aborted.contains(&rank) {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn change<R>(&self, change: impl FnOnce(&mut GroupState) -> R) -> R {
        let result = change(&mut lock(&self.state));
        self.changed.notify_all();
        result
    }

    /// All members' bytes, once every member has given its own.
    fn exchange(&self, number: u64, rank: usize, own: Vec<u8>) -> Option<Vec<Vec<u8>>> {
        self.change(|state| {
            let call = state.calls.entry(number).or_insert_with(|| (vec![None; self.size], 0));
            call.0[rank] = Some(own);
        });
        let size = self.size;
        self.wait(rank, |state| {
            let (given, taken) = state.calls.get_mut(&number)?;
            let all: Option<Vec<Vec<u8>>> = given.iter().cloned().collect();
            let all = all?;
            *taken += 1;
            if *taken == size {
                state.calls.remove(&number);
            }
            Some(all)
        })
    }
}

/// A group, or one that is being split off.
#[derive(Debug)]
enum Entry {
    Made(Arc<FakeGroup>),
    Split { parent: Arc<FakeGroup>, number: u64, color: usize },
}

/// One member's view of a group.
#[derive(Debug)]
struct Member {
    library: FakeNccl,
    entry: Entry,
    /// Rank in the parent group, if split off.
    parent_rank: usize,
    calls: Arc<AtomicU64>,
    splits: AtomicU64,
    polls: AtomicUsize,
}

impl Member {
    fn new(library: &FakeNccl, entry: Entry, rank: usize) -> Self {
        Self {
            library: library.clone(),
            entry,
            parent_rank: rank,
            calls: Arc::default(),
            splits: AtomicU64::new(0),
            polls: AtomicUsize::new(PENDING_POLLS),
        }
    }

    /// The group and this member's rank in it; `None` until the split is complete.
    fn group(&self) -> Option<(Arc<FakeGroup>, usize)> {
        match &self.entry {
            Entry::Made(group) => Some((group.clone(), self.parent_rank)),
            Entry::Split { parent, number, color } => {
                let mut state = lock(&parent.state);
                let said: Option<Vec<_>> = state.splits.get(number)?.iter().copied().collect();
                let mut members: Vec<(usize, usize)> = said?
                    .into_iter()
                    .enumerate()
                    .filter(|(_, (of, _))| *of == Some(*color))
                    .map(|(rank, (_, key))| (key, rank))
                    .collect();
                members.sort_unstable();
                let rank = members.iter().position(|&(_, rank)| rank == self.parent_rank)?;
                let size = members.len();
                let child = state.children.entry((*number, *color)).or_insert_with(|| {
                    let group = FakeGroup::new(size);
                    lock(&group.state).joined = size;
                    group
                });
                Some((child.clone(), rank))
            }
        }
    }
}

impl Group for Member {
    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Box<dyn Group>>, GpuError> {
        let Some((group, rank)) = self.group() else { return Err(failed("split", "not made yet")) };
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        group.change(|state| {
            let said = state.splits.entry(number).or_insert_with(|| vec![None; group.size]);
            said[rank] = Some((color, key));
        });
        self.polls.store(PENDING_POLLS, Ordering::Release);
        Ok(color.map(|color| {
            let entry = Entry::Split { parent: group, number, color };
            Box::new(Self::new(&self.library, entry, rank)) as Box<dyn Group>
        }))
    }

    fn is_ready(&self) -> Result<bool, GpuError> {
        let Some((group, rank)) = self.group() else { return Ok(false) };
        if self.library.failing.load(Ordering::Acquire) == rank {
            return Err(failed("fake NCCL", "a cable was pulled"));
        }
        let state = lock(&group.state);
        if !state.aborted.is_empty() {
            return Err(failed("fake NCCL", "a member gave up"));
        }
        let splits = self.splits.load(Ordering::Acquire);
        let split =
            |number| state.splits.get(&number).is_none_or(|said| said.iter().all(Option::is_some));
        if state.joined < group.size || !(0..splits).all(split) {
            return Ok(false);
        }
        let look = |left: usize| left.checked_sub(1);
        Ok(self.polls.fetch_update(Ordering::AcqRel, Ordering::Acquire, look).is_err())
    }

    fn queue(&self, gpu: &Gpu, transfers: &[Transfer]) -> Result<(), GpuError> {
        let Some((group, rank)) = self.group() else { return Err(failed("queue", "not made yet")) };
        self.polls.store(PENDING_POLLS, Ordering::Release);
        let (transfers, emulator) = (transfers.to_vec(), self.library.emulator.clone());
        let calls = self.calls.clone();
        // Numbered when the queue reaches it, so that each replay of a recording is a new call.
        gpu.run(Arc::new(move || {
            let number = calls.fetch_add(1, Ordering::Relaxed);
            let batch = TransferBatch { group: &group, rank, emulator: &emulator };
            // After an abort the memory holds anything.
            let _given_up = batch.run(number, &transfers);
        }))
    }

    fn abort(&self) {
        let (group, rank) = match (self.group(), &self.entry) {
            (Some(made), _) => made,
            (None, Entry::Split { parent, .. }) => (parent.clone(), self.parent_rank),
            (None, Entry::Made(_)) => return,
        };
        group.change(|state| state.aborted.insert(rank));
    }
}

fn failed(call: &'static str, what: &str) -> GpuError {
    GpuError::Call { call, what: what.to_owned() }
}

/// Transfers in progress.
struct TransferBatch<'a> {
    group: &'a FakeGroup,
    rank: usize,
    emulator: &'a CpuEmulator,
}

impl TransferBatch<'_> {
    fn run(&self, number: u64, transfers: &[Transfer]) -> Option<()> {
        let mut sent = Vec::new();
        for transfer in transfers {
            if let Collective::Send(to) = transfer.moves {
                let (pair, bytes) = ((self.rank, to), self.read(transfer.from, transfer.of)?);
                sent.push(self.group.change(|state| {
                    let waiting = state.messages.entry(pair).or_default();
                    waiting.push_back(bytes);
                    let before = waiting.len() as u64;
                    (pair, before + state.taken.get(&pair).copied().unwrap_or(0))
                }));
            }
        }
        for (n, transfer) in transfers.iter().enumerate() {
            match transfer.moves {
                Collective::Send(_) => {}
                Collective::Receive(from) => self.receive(from, transfer)?,
                _ => self.collective((number << 16) + n as u64, transfer)?,
            }
        }
        for (pair, count) in sent {
            self.group
                .wait(self.rank, |state| (state.taken.get(&pair)? >= &count).then_some(()))?;
        }
        Some(())
    }

    fn receive(&self, from: usize, transfer: &Transfer) -> Option<()> {
        let pair = (from, self.rank);
        let bytes = self.group.wait(self.rank, |state| {
            let bytes = state.messages.get_mut(&pair)?.pop_front()?;
            *state.taken.entry(pair).or_default() += 1;
            Some(bytes)
        })?;
        self.group.changed.notify_all();
        self.write(transfer.to, transfer.of, &bytes)
    }

    fn collective(&self, number: u64, transfer: &Transfer) -> Option<()> {
        let Transfer { moves, of, from, to } = *transfer;
        let given = self.group.exchange(number, self.rank, self.read(from, of)?)?;
        let bytes = match moves {
            Collective::AllReduce(how) => combined(&given, of, how),
            Collective::Reduce(how, root) if root == self.rank => combined(&given, of, how),
            Collective::Broadcast(root) => given.get(root)?.clone(),
            Collective::ReduceScatter(how) => {
                let piece = to.len * of.bytes();
                combined(&given, of, how)[self.rank * piece..(self.rank + 1) * piece].to_vec()
            }
            Collective::AllGather => given.concat(),
            Collective::Reduce(..) | Collective::Send(_) | Collective::Receive(_) => {
                return Some(());
            }
        };
        self.write(to, of, &bytes)
    }

    fn read(&self, span: Span, of: DataType) -> Option<Vec<u8>> {
        let mut bytes = vec![0; span.len * of.bytes()];
        if !bytes.is_empty() {
            self.emulator.copy_out(span.address, &mut bytes).ok()?;
        }
        Some(bytes)
    }

    fn write(&self, span: Span, of: DataType, bytes: &[u8]) -> Option<()> {
        // Where NCCL would write out of bounds or leave a part unwritten, write NaN.
        let fits = bytes.len() == span.len * of.bytes();
        let nothing = vec![0xff; span.len * of.bytes()];
        let bytes = if fits { bytes } else { &nothing };
        if bytes.is_empty() { Some(()) } else { self.emulator.copy_in(bytes, span.address).ok() }
    }
}

/// Reduces members' elements in the order of members.
fn combined(given: &[Vec<u8>], of: DataType, how: ReduceOp) -> Vec<u8> {
    macro_rules! each {
        ($type:ty, $wide:ty, $widened:expr, $narrowed:expr, $add:expr) => {{
            const BYTES: usize = size_of::<$type>();
            let read = |bytes: &Vec<u8>| -> Vec<$wide> {
                let chunks = bytes.as_chunks::<BYTES>().0.iter();
                chunks.map(|chunk| $widened(<$type>::from_le_bytes(*chunk))).collect()
            };
            let mut all = given.iter().map(read);
            let mut result = all.next().unwrap_or_default();
            for next in all {
                for (so_far, next) in result.iter_mut().zip(next) {
                    *so_far = match how {
                        ReduceOp::Sum => $add(*so_far, next),
                        ReduceOp::Max if next > *so_far => next,
                        ReduceOp::Max => *so_far,
                    };
                }
            }
            result.into_iter().flat_map(|x| <$type>::to_le_bytes($narrowed(x))).collect()
        }};
    }
    match of {
        DataType::F32 => each!(f32, f32, |x| x, |x| x, |a: f32, b: f32| a + b),
        DataType::F64 => each!(f64, f64, |x| x, |x| x, |a: f64, b: f64| a + b),
        DataType::Bf16 => each!(bf16, f32, bf16::to_f32, bf16::from_f32, |a: f32, b: f32| a + b),
        DataType::I64 => each!(i64, i64, |x| x, |x| x, i64::wrapping_add),
        DataType::U8 => each!(u8, u8, |x| x, |x| x, u8::wrapping_add),
    }
}
