//! A queue of a device, the memory that is used in its order, and what becomes of both while a step is recorded.

use super::driver::{Driver, Event, GpuError};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A queue and the memory that came back to it, by bytes. Memory handed back is handed out again, what came back first
/// first, and the host does not wait: what is queued later runs later, behind what other queues did with it.
#[derive(Debug)]
pub(super) struct Queue {
    // In this order: memory is given back before its device goes.
    free: Mutex<HashMap<usize, VecDeque<FreeBlock>>>,
    pub arena: Arc<Arena>,
    pub driver: Arc<dyn Driver>,
    /// Among the queues of its device.
    pub number: u64,
    /// The last recording that it was part of.
    pub recorded_in: AtomicU64,
}

/// Memory that came back.
#[derive(Debug)]
pub(super) struct FreeBlock {
    pub address: u64,
    /// When other queues are through with it.
    pub after: Vec<Event>,
}

/// One allocation that buffers are cut from, the first time that each is asked for, and what did not fit.
#[derive(Debug)]
pub(super) struct Arena {
    // What has come back of queues that are gone, by bytes.
    spare: Mutex<HashMap<usize, VecDeque<FreeBlock>>>,
    driver: Arc<dyn Driver>,
    space: Mutex<ArenaSpace>,
    /// Queues and recordings so far.
    numbers: AtomicU64,
    /// What is being recorded, and whether anything is.
    session: Mutex<Option<Arc<RecordingSession>>>,
    records: AtomicBool,
    /// Where recorded work is replayed.
    replays: Mutex<Option<Arc<dyn Driver>>>,
}

/// What the arena has.
#[derive(Debug, Default)]
pub(super) struct ArenaSpace {
    start: u64,
    pub used: usize,
    pub size: usize,
    /// Allocations of their own, where the arena had no room.
    beyond: Vec<u64>,
    pub beyond_bytes: usize,
}

impl ArenaSpace {
    /// What was asked for before there was nothing left.
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
    /// Of a device, with nothing reserved.
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

    /// Takes so many bytes from the device at once.
    pub fn reserve(&self, bytes: usize) -> Result<(), GpuError> {
        let start = self.driver.allocate(bytes)?;
        let mut space = self.space();
        if space.size > 0 {
            // The first stays as it is, and this one is used up by pieces of its own.
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

    /// Another one's than all before.
    pub fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The recording under way.
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

    /// Memory that is any queue's.
    pub fn spare(&self, bytes: usize, block: FreeBlock) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.entry(bytes).or_default().push_back(block);
    }

    /// The point behind all that was replayed so far.
    fn replayed(&self) -> Result<Option<Event>, GpuError> {
        let origin = self.replays.lock().unwrap_or_else(PoisonError::into_inner).clone();
        origin.map(|origin| origin.record()).transpose()
    }

    pub fn cut(&self, bytes: usize) -> Result<u64, GpuError> {
        let mut space = self.space();
        if space.used + bytes <= space.size {
            let at = space.start + space.used as u64;
            space.used += bytes;
            return Ok(at);
        }
        let at = self.driver.allocate(bytes).map_err(|error| space.explain(error))?;
        space.beyond.push(at);
        space.beyond_bytes += bytes;
        Ok(at)
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

    /// What does the work; where a recording is under way, part of it.
    pub fn driver(&self) -> Result<&dyn Driver, GpuError> {
        if let Some(session) = self.arena.session() {
            session.join(self)?;
        }
        Ok(&*self.driver)
    }

    /// What came back first, here or of queues that are gone.
    pub fn first_free(&self, bytes: usize) -> Option<FreeBlock> {
        let first = |of: &Mutex<HashMap<usize, VecDeque<FreeBlock>>>| {
            let mut free = of.lock().unwrap_or_else(PoisonError::into_inner);
            free.get_mut(&bytes).and_then(VecDeque::pop_front)
        };
        first(&self.free).or_else(|| first(&self.arena.spare))
    }

    pub fn give(&self, bytes: usize, block: FreeBlock) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(bytes).or_default().push_back(block);
    }

    pub fn take(&self, bytes: usize) -> Result<u64, GpuError> {
        if let Some(session) = self.arena.session() {
            session.join(self)?;
            return session.take(self, bytes);
        }
        let Some(FreeBlock { address, after }) = self.first_free(bytes) else {
            return self.arena.cut(bytes);
        };
        if after.iter().any(Event::is_recorded)
            && let Some(replayed) = self.arena.replayed()?
        {
            self.driver.wait(&replayed)?;
        }
        let waited = |event: &&Event| !event.is_recorded() && !event.is_complete();
        after.iter().filter(waited).try_for_each(|event| self.driver.wait(event))?;
        Ok(address)
    }
}

impl Drop for Queue {
    /// What came back to it is any other queue's, behind all that this one was asked.
    fn drop(&mut self) {
        let free = std::mem::take(self.free.get_mut().unwrap_or_else(PoisonError::into_inner));
        // While a step is recorded, what was free before is free of all work.
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

/// A recording under way.
#[derive(Debug)]
pub(super) struct RecordingSession {
    number: u64,
    begun: Event,
    /// Other queues than the first.
    joined: Mutex<Vec<Arc<dyn Driver>>>,
    memory: Arc<RecordedMemory>,
}

/// Memory that recorded work has for as long as it may be replayed.
#[derive(Debug)]
pub(super) struct RecordedMemory {
    /// What has come back while it was recorded, by queue and bytes.
    free: Mutex<HashMap<(u64, usize), VecDeque<FreeBlock>>>,
    /// All of it: bytes and address.
    blocks: Mutex<Vec<(usize, u64)>>,
    arena: Weak<Arena>,
    origin: Arc<dyn Driver>,
}

impl Drop for RecordedMemory {
    /// Anybody's, behind the last replay.
    fn drop(&mut self) {
        let Some(arena) = self.arena.upgrade() else { return };
        let after: Vec<Event> = self.origin.record().into_iter().collect();
        let blocks = self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (bytes, address) in blocks.drain(..) {
            arena.spare(bytes, FreeBlock { address, after: after.clone() });
        }
    }
}

impl RecordingSession {
    /// Of the device of `arena`, on its queue `origin`, begun there.
    pub fn new(number: u64, begun: Event, arena: &Arc<Arena>, origin: &Arc<dyn Driver>) -> Self {
        let memory = RecordedMemory {
            free: Mutex::default(),
            blocks: Mutex::default(),
            arena: Arc::downgrade(arena),
            origin: origin.clone(),
        };
        Self { number, begun, joined: Mutex::default(), memory: Arc::new(memory) }
    }

    /// The queues that have joined, which are nobody's from now on.
    pub fn take_joined(&self) -> Vec<Arc<dyn Driver>> {
        std::mem::take(&mut *self.joined.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A queue that is used records from now on.
    pub fn join(&self, queue: &Queue) -> Result<(), GpuError> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.recorded_in.swap(self.number, Ordering::AcqRel) != self.number {
            queue.driver.wait(&self.begun)?;
            joined.push(queue.driver.clone());
        }
        Ok(())
    }

    /// Memory of a queue: what came back to it first, else what is nobody's.
    pub fn take(&self, queue: &Queue, bytes: usize) -> Result<u64, GpuError> {
        let mut free = self.memory.free.lock().unwrap_or_else(PoisonError::into_inner);
        let first = free.get_mut(&(queue.number, bytes)).and_then(VecDeque::pop_front);
        drop(free);
        if let Some(FreeBlock { address, after }) = first {
            // What is not recorded was done before.
            let recorded = after.iter().filter(|event| event.is_recorded());
            recorded.into_iter().try_for_each(|event| queue.driver.wait(event))?;
            return Ok(address);
        }
        let address = match queue.first_free(bytes) {
            Some(FreeBlock { address, .. }) => address,
            None => queue.arena.cut(bytes)?,
        };
        self.memory.add(bytes, address);
        Ok(address)
    }

    /// Takes memory back while recording, whose own it is from then on: `of` says of which recording it was until now.
    pub fn take_back(
        &self,
        queue: &Queue,
        bytes: usize,
        block: FreeBlock,
        of: Option<&Arc<RecordedMemory>>,
    ) {
        match of {
            None => self.memory.add(bytes, block.address),
            Some(memory) if Arc::ptr_eq(memory, &self.memory) => {}
            // Another one's, which may be replayed yet.
            Some(_) => return,
        }
        let mut free = self.memory.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry((queue.number, bytes)).or_default().push_back(block);
    }

    pub fn memory(&self) -> &Arc<RecordedMemory> {
        &self.memory
    }
}

impl RecordedMemory {
    fn add(&self, bytes: usize, address: u64) {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).push((bytes, address));
    }
}
