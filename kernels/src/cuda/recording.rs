//! Work that is recorded instead of done, to be replayed as often as is liked: CUDA graphs.
//!
//! Every queue of the device's that is used meanwhile joins by itself, behind the beginning, and is joined at the end: what
//! a rank asks of its GPU between the two is recorded, whichever of its threads asks. Memory that is recorded with stays the
//! recorded work's own, so that nothing else is written where it writes; which memory that is follows from the order of the
//! calls of each queue alone. No event is asked whether it is reached.

use super::driver::{Driver, Event, GpuError, Recording};
use super::memory::{Arena, Free, Gpu, Queue};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A recording under way.
#[derive(Debug)]
pub(super) struct Session {
    number: u64,
    begun: Event,
    /// Other queues than the first.
    joined: Mutex<Vec<Arc<dyn Driver>>>,
    kept: Arc<Kept>,
}

/// Memory that recorded work has for as long as it may be replayed.
#[derive(Debug)]
pub(super) struct Kept {
    /// What has come back while it was recorded, by queue and bytes.
    free: Mutex<HashMap<(u64, usize), VecDeque<Free>>>,
    /// All of it: bytes and address.
    blocks: Mutex<Vec<(usize, u64)>>,
    arena: Weak<Arena>,
    origin: Arc<dyn Driver>,
}

impl Drop for Kept {
    /// Anybody's, behind the last replay.
    fn drop(&mut self) {
        let Some(arena) = self.arena.upgrade() else { return };
        let after: Vec<Event> = self.origin.record().into_iter().collect();
        let blocks = self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (bytes, address) in blocks.drain(..) {
            arena.spare(bytes, Free { address, after: after.clone() });
        }
    }
}

impl Session {
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
        let mut free = self.kept.free.lock().unwrap_or_else(PoisonError::into_inner);
        let first = free.get_mut(&(queue.number, bytes)).and_then(VecDeque::pop_front);
        drop(free);
        if let Some(Free { address, after }) = first {
            // What is not recorded was done before.
            let recorded = after.iter().filter(|event| event.is_recorded());
            recorded.into_iter().try_for_each(|event| queue.driver.wait(event))?;
            return Ok(address);
        }
        let address = match queue.first_free(bytes) {
            Some(Free { address, .. }) => address,
            None => queue.arena.cut(bytes)?,
        };
        self.kept.add(bytes, address);
        Ok(address)
    }

    /// Takes memory back while recording, whose own it is from then on: `of` says of which recording it was until now.
    pub fn take_back(&self, queue: &Queue, bytes: usize, block: Free, of: Option<&Arc<Kept>>) {
        match of {
            None => self.kept.add(bytes, block.address),
            Some(kept) if Arc::ptr_eq(kept, &self.kept) => {}
            // Another one's, which may be replayed yet.
            Some(_) => return,
        }
        let mut free = self.kept.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry((queue.number, bytes)).or_default().push_back(block);
    }

    pub fn kept(&self) -> &Arc<Kept> {
        &self.kept
    }
}

impl Kept {
    fn add(&self, bytes: usize, address: u64) {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).push((bytes, address));
    }
}

/// Recorded work, and the memory and queues that it needs. Replayed, it reads and writes the same addresses with the same
/// arguments as when it was recorded; what shall be other must have been written to that memory before.
#[derive(Debug)]
pub struct Graph {
    // In this order: memory is given back when there is nothing left to replay.
    recording: Box<dyn Recording>,
    _kept: Arc<Kept>,
    /// Their libraries' workspaces are addresses of the recording, too.
    _joined: Vec<Arc<dyn Driver>>,
}

impl Graph {
    /// Queues all of it where it was recorded.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn replay(&self) -> Result<(), GpuError> {
        self.recording.replay()
    }
}

impl Gpu {
    /// Whether the device can record work.
    #[must_use]
    pub fn records(&self) -> bool {
        self.queue.driver.records()
    }

    /// Waits for the device, and from then on records what this queue and others of its device are asked, until
    /// [`Gpu::finish_recording`]; none of it is done. Kernels and products must have run before, so that they are
    /// compiled and chosen. Nothing may wait for the device meanwhile, or be copied to or from the host.
    ///
    /// # Errors
    /// Where the device fails, cannot record, or is recording already.
    pub fn start_recording(&self) -> Result<(), GpuError> {
        let (arena, origin) = (&self.queue.arena, &self.queue.driver);
        if arena.session().is_some() {
            let what = "another queue of the device is being recorded".to_owned();
            return Err(GpuError::Call { call: "start_recording", what });
        }
        origin.quiesce()?;
        origin.start_recording()?;
        let begun = origin.record()?.in_recording();
        let number = arena.number();
        self.queue.recorded_in.store(number, Ordering::Release);
        let kept = Arc::new(Kept {
            free: Mutex::default(),
            blocks: Mutex::default(),
            arena: Arc::downgrade(arena),
            origin: origin.clone(),
        });
        arena.begin(Session { number, begun, joined: Mutex::default(), kept }, origin);
        Ok(())
    }

    /// Ends [`Gpu::start_recording`]. No other thread may be asking anything of the device.
    ///
    /// # Errors
    /// What was asked meanwhile and cannot be recorded, or where nothing was being recorded here.
    pub fn finish_recording(&self) -> Result<Graph, GpuError> {
        let Some(session) = self.queue.arena.end() else {
            let what = "nothing is being recorded".to_owned();
            return Err(GpuError::Call { call: "finish_recording", what });
        };
        let origin = &self.queue.driver;
        let joined =
            std::mem::take(&mut *session.joined.lock().unwrap_or_else(PoisonError::into_inner));
        let back = joined.iter().try_for_each(|queue| origin.wait(&queue.record()?));
        // Ends what the device records, whatever came of it.
        let recording = origin.finish_recording();
        back?;
        Ok(Graph { recording: recording?, _kept: session.kept.clone(), _joined: joined })
    }
}
