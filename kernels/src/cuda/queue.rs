//! A queue of a device, its memory, and the handling of both while a step is recorded.

use super::driver::{Driver, Event, GpuError};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The largest block that serves a request of so many bytes. Sizes that differ from step to step,
/// as the rows of an expert, would otherwise each get a block of their own.
fn large_enough(bytes: usize) -> usize {
    bytes + bytes / 4
}

/// Free blocks by size, the oldest of a size first.
type FreeBlocks = BTreeMap<usize, VecDeque<FreeBlock>>;

/// Takes a free block: the smallest of those that hold `bytes` and not more than `most`.
fn smallest(free: &mut FreeBlocks, bytes: usize, most: usize) -> Option<FreeBlock> {
    let (&size, blocks) = free.range_mut(bytes..=most).next()?;
    let block = blocks.pop_front();
    if blocks.is_empty() {
        free.remove(&size);
    }
    block
}

fn put(free: &mut FreeBlocks, block: FreeBlock) {
    free.entry(block.bytes).or_default().push_back(block);
}

/// A queue, and the memory returned to it. Returned memory is handed out again without waiting on
/// the host: the queue's later work runs after the events up to which other queues use the memory.
#[derive(Debug)]
pub(super) struct Queue {
    // Field order: memory is released before its device.
    free: Mutex<FreeBlocks>,
    pub arena: Arc<Arena>,
    pub driver: Arc<dyn Driver>,
    /// Number of the queue; unique on its device.
    pub number: u64,
    /// Number of the last recording that it was part of.
    pub recorded_in: AtomicU64,
}

/// A returned block of memory.
#[derive(Debug)]
pub(super) struct FreeBlock {
    pub address: u64,
    pub bytes: usize,
    /// Events after which other queues no longer use it.
    pub after: Vec<Event>,
}

/// One large allocation that buffers are cut from; requests beyond it are allocated one by one.
#[derive(Debug)]
pub(super) struct Arena {
    // Blocks returned by queues that no longer exist.
    spare: Mutex<FreeBlocks>,
    driver: Arc<dyn Driver>,
    space: Mutex<ArenaSpace>,
    /// Next number of a queue or recording.
    numbers: AtomicU64,
    /// The recording in progress, and whether there is one.
    session: Mutex<Option<Arc<RecordingSession>>>,
    records: AtomicBool,
    /// The queue on which recorded work is replayed.
    replays: Mutex<Option<Arc<dyn Driver>>>,
}

/// State of the arena.
#[derive(Debug, Default)]
pub(super) struct ArenaSpace {
    start: u64,
    pub used: usize,
    pub size: usize,
    /// Addresses of separate allocations made when the arena had no room.
    beyond: Vec<u64>,
    pub beyond_bytes: usize,
}

impl ArenaSpace {
    /// Adds the arena's state to an out-of-memory error.
    fn explain(&self, error: GpuError) -> GpuError {
        let Self { used, size, beyond_bytes, .. } = self;
        match error {
            GpuError::OutOfMemory { bytes, what } if *size > 0 => {
                let what = format!(
                    "{what}; {used} of {size} reserved are used, {beyond_bytes} beyond them"
                );
                GpuError::OutOfMemory { bytes, what }
            }
            other => other,
        }
    }
}

impl Arena {
    /// An empty arena of a device.
    pub fn of(driver: Arc<dyn Driver>) -> Self {
        Self {
            spare: Mutex::default(),
            driver,
            space: Mutex::default(),
            numbers: AtomicU64::new(1),
            session: Mutex::default(),
            records: AtomicBool::new(false),
            replays: Mutex::default(),
        }
    }

    /// Allocates `bytes` from the device.
    pub fn reserve(&self, bytes: usize) -> Result<(), GpuError> {
        let start = self.driver.allocate(bytes)?;
        let mut space = self.space();
        if space.size > 0 {
            // Keep the first arena; count this one as memory beyond it.
            space.beyond.push(start);
            space.beyond_bytes += bytes;
        } else {
            (space.start, space.size) = (start, bytes);
        }
        Ok(())
    }

    pub fn space(&self) -> MutexGuard<'_, ArenaSpace> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new unique number.
    pub fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The recording in progress.
    pub fn session(&self) -> Option<Arc<RecordingSession>> {
        match self.records.load(Ordering::Acquire) {
            true => self.session.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            false => None,
        }
    }

    pub fn begin(&self, session: RecordingSession, origin: &Arc<dyn Driver>) {
        *self.session.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(session));
        *self.replays.lock().unwrap_or_else(PoisonError::into_inner) = Some(origin.clone());
        self.records.store(true, Ordering::Release);
    }

    pub fn end(&self) -> Option<Arc<RecordingSession>> {
        self.records.store(false, Ordering::Release);
        self.session.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Adds a block that any queue may take.
    pub fn spare(&self, block: FreeBlock) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        put(&mut spare, block);
    }

    /// An event after all replays so far.
    fn replayed(&self) -> Result<Option<Event>, GpuError> {
        let origin = self.replays.lock().unwrap_or_else(PoisonError::into_inner).clone();
        origin.map(|origin| origin.record()).transpose()
    }

    /// Memory of the arena that no block was cut from yet.
    fn cut(&self, bytes: usize) -> Option<u64> {
        let mut space = self.space();
        let at = space.start + space.used as u64;
        let fits = space.used + bytes <= space.size;
        space.used += if fits { bytes } else { 0 };
        fits.then_some(at)
    }

    /// Memory beyond the arena.
    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        let mut space = self.space();
        let at = self.driver.allocate(bytes).map_err(|error| space.explain(error))?;
        space.beyond.push(at);
        space.beyond_bytes += bytes;
        Ok(at)
    }

    /// Whether a block lies in the arena.
    fn holds(&self, block: &FreeBlock) -> bool {
        let space = self.space();
        (space.start..space.start + space.size as u64).contains(&block.address)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let space = self.space.get_mut().unwrap_or_else(PoisonError::into_inner);
        space.beyond.drain(..).for_each(|address| self.driver.free(address));
        if space.size > 0 {
            self.driver.free(space.start);
        }
    }
}

impl Queue {
    pub fn new(driver: Arc<dyn Driver>, arena: Arc<Arena>) -> Self {
        let number = arena.number();
        Self { free: Mutex::default(), arena, driver, number, recorded_in: AtomicU64::new(0) }
    }

    /// The driver; during a recording the queue joins it first.
    pub fn driver(&self) -> Result<&dyn Driver, GpuError> {
        if let Some(session) = self.arena.session() {
            session.join(self)?;
        }
        Ok(&*self.driver)
    }

    /// A free block for `bytes`, of this queue or of queues that no longer exist.
    fn first_free(&self, bytes: usize, most: usize) -> Option<FreeBlock> {
        let of = |free: &Mutex<FreeBlocks>| {
            smallest(&mut free.lock().unwrap_or_else(PoisonError::into_inner), bytes, most)
        };
        of(&self.free).or_else(|| of(&self.arena.spare))
    }

    /// A free block of about the size, or new memory of the arena. Once the arena is full: a part
    /// of a larger free block, or of neighbours that are free; memory beyond the arena; and if
    /// the device has none left, any free block that is large enough.
    fn block(&self, bytes: usize) -> Result<FreeBlock, GpuError> {
        if let Some(block) = self.first_free(bytes, large_enough(bytes)) {
            return Ok(block);
        }
        if let Some(address) = self.arena.cut(bytes) {
            return Ok(FreeBlock { address, bytes, after: Vec::new() });
        }
        if let Some(block) = self.part_of_arena(bytes) {
            return Ok(block);
        }
        match self.arena.allocate(bytes) {
            Ok(address) => Ok(FreeBlock { address, bytes, after: Vec::new() }),
            Err(error) => self.first_free(bytes, usize::MAX).ok_or(error),
        }
    }

    /// Part of the smallest free block of the arena that is large enough, after joining neighbours
    /// if there is none.
    fn part_of_arena(&self, bytes: usize) -> Option<FreeBlock> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let large = |free: &FreeBlocks| {
            let mut sizes = free.range(bytes..);
            sizes
                .find(|(_, blocks)| blocks.iter().any(|block| self.arena.holds(block)))
                .map(|(&size, _)| size)
        };
        let size = large(&free).or_else(|| {
            let mut spare = self.arena.spare.lock().unwrap_or_else(PoisonError::into_inner);
            self.join_neighbours(&mut free, &mut spare);
            large(&free)
        })?;
        let blocks = free.get_mut(&size)?;
        let place = blocks.iter().position(|block| self.arena.holds(block))?;
        let block = blocks.remove(place)?;
        if blocks.is_empty() {
            free.remove(&size);
        }
        let FreeBlock { address, after, .. } = block;
        if size > bytes {
            let rest = address + bytes as u64;
            put(&mut free, FreeBlock { address: rest, bytes: size - bytes, after: after.clone() });
        }
        Some(FreeBlock { address, bytes, after })
    }

    /// Joins free blocks of the arena that lie side by side; spare ones become this queue's.
    fn join_neighbours(&self, free: &mut FreeBlocks, spare: &mut FreeBlocks) {
        let mut of_arena: Vec<FreeBlock> = Vec::new();
        for blocks in free.values_mut().chain(spare.values_mut()) {
            let (inside, outside): (Vec<_>, Vec<_>) =
                blocks.drain(..).partition(|block| self.arena.holds(block));
            *blocks = outside.into();
            of_arena.extend(inside);
        }
        free.retain(|_, blocks| !blocks.is_empty());
        spare.retain(|_, blocks| !blocks.is_empty());
        of_arena.sort_by_key(|block| block.address);
        let joined =
            of_arena.into_iter().fold(Vec::new(), |mut joined: Vec<FreeBlock>, mut next| {
                next.after.retain(|event| event.is_recorded() || !event.is_complete());
                match joined.last_mut() {
                    Some(last) if last.address + last.bytes as u64 == next.address => {
                        last.bytes += next.bytes;
                        last.after.append(&mut next.after);
                    }
                    _ => joined.push(next),
                }
                joined
            });
        joined.into_iter().for_each(|block| put(free, block));
    }

    pub fn give(&self, block: FreeBlock) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        put(&mut free, block);
    }

    /// Memory for `bytes`, ready for this queue's next work: its address and size.
    pub fn take(&self, bytes: usize) -> Result<(u64, usize), GpuError> {
        if let Some(session) = self.arena.session() {
            session.join(self)?;
            return session.take(self, bytes);
        }
        let FreeBlock { address, bytes, after } = self.block(bytes)?;
        if after.iter().any(Event::is_recorded)
            && let Some(replayed) = self.arena.replayed()?
        {
            self.driver.wait(&replayed)?;
        }
        let waited = |event: &&Event| !event.is_recorded() && !event.is_complete();
        after.iter().filter(waited).try_for_each(|event| self.driver.wait(event))?;
        Ok((address, bytes))
    }
}

impl Drop for Queue {
    /// Passes its free blocks to the arena, to be used after all of this queue's work.
    fn drop(&mut self) {
        let free = std::mem::take(self.free.get_mut().unwrap_or_else(PoisonError::into_inner));
        // A recording starts on an idle device, so blocks that were free before it are free of all
        // work.
        let last = match self.arena.session() {
            Some(_) => None,
            None => self.driver.record().ok(),
        };
        let mut spare = self.arena.spare.lock().unwrap_or_else(PoisonError::into_inner);
        for (bytes, blocks) in free {
            let behind = |mut block: FreeBlock| {
                block.after.extend(last.clone());
                block
            };
            spare.entry(bytes).or_default().extend(blocks.into_iter().map(behind));
        }
    }
}

/// A recording in progress.
#[derive(Debug)]
pub(super) struct RecordingSession {
    number: u64,
    begun: Event,
    /// Queues that joined the first.
    joined: Mutex<Vec<Arc<dyn Driver>>>,
    memory: Arc<RecordedMemory>,
}

/// Memory reserved for a recording as long as it may be replayed.
#[derive(Debug)]
pub(super) struct RecordedMemory {
    /// Blocks returned during the recording, by queue.
    free: Mutex<HashMap<u64, FreeBlocks>>,
    /// All blocks: size and address.
    blocks: Mutex<Vec<(usize, u64)>>,
    /// Events until which queues use blocks besides the replays.
    used: Mutex<Vec<Event>>,
    arena: Weak<Arena>,
    origin: Arc<dyn Driver>,
}

impl Drop for RecordedMemory {
    /// Returns all blocks to the arena, to be used after the last replay.
    fn drop(&mut self) {
        let Some(arena) = self.arena.upgrade() else { return };
        let mut after = std::mem::take(self.used.get_mut().unwrap_or_else(PoisonError::into_inner));
        // Another recording began on an idle device, after the last replay.
        if arena.session().is_none() {
            after.extend(self.origin.record());
        }
        let blocks = self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (bytes, address) in blocks.drain(..) {
            arena.spare(FreeBlock { address, bytes, after: after.clone() });
        }
    }
}

impl RecordingSession {
    /// A recording that began on queue `origin` of the device of `arena`.
    pub fn new(number: u64, begun: Event, arena: &Arc<Arena>, origin: &Arc<dyn Driver>) -> Self {
        let memory = RecordedMemory {
            free: Mutex::default(),
            blocks: Mutex::default(),
            used: Mutex::default(),
            arena: Arc::downgrade(arena),
            origin: origin.clone(),
        };
        Self { number, begun, joined: Mutex::default(), memory: Arc::new(memory) }
    }

    /// Takes the queues that joined.
    pub fn take_joined(&self) -> Vec<Arc<dyn Driver>> {
        std::mem::take(&mut *self.joined.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes a queue part of the recording at its first use.
    pub fn join(&self, queue: &Queue) -> Result<(), GpuError> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.recorded_in.swap(self.number, Ordering::AcqRel) != self.number {
            queue.driver.wait(&self.begun)?;
            joined.push(queue.driver.clone());
        }
        Ok(())
    }

    /// A block for a queue: one that it returned during the recording, otherwise a free or new one.
    pub fn take(&self, queue: &Queue, bytes: usize) -> Result<(u64, usize), GpuError> {
        let mut free = self.memory.free.lock().unwrap_or_else(PoisonError::into_inner);
        let of_queue = free.entry(queue.number).or_default();
        let first = smallest(of_queue, bytes, large_enough(bytes));
        drop(free);
        if let Some(FreeBlock { address, bytes, after }) = first {
            // Events from before the recording are complete.
            let recorded = after.iter().filter(|event| event.is_recorded());
            recorded.into_iter().try_for_each(|event| queue.driver.wait(event))?;
            return Ok((address, bytes));
        }
        let FreeBlock { address, bytes, .. } = queue.block(bytes)?;
        self.memory.add(bytes, address);
        Ok((address, bytes))
    }

    /// Takes a block back into the recording's memory. `of` is the recording that it belonged to so
    /// far.
    pub fn take_back(&self, queue: &Queue, block: FreeBlock, of: Option<&Arc<RecordedMemory>>) {
        match of {
            None => self.memory.add(block.bytes, block.address),
            Some(memory) if Arc::ptr_eq(memory, &self.memory) => {}
            // It belongs to another recording, which may still be replayed.
            Some(_) => return,
        }
        let mut free = self.memory.free.lock().unwrap_or_else(PoisonError::into_inner);
        put(free.entry(queue.number).or_default(), block);
    }

    pub fn memory(&self) -> &Arc<RecordedMemory> {
        &self.memory
    }
}

impl RecordedMemory {
    /// Notes that queues use blocks until these events.
    pub fn until(&self, events: Vec<Event>) {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).extend(events);
    }

    fn add(&self, bytes: usize, address: u64) {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).push((bytes, address));
    }
}
