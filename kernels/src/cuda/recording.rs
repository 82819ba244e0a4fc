//! Recording of work, to be replayed any number of times: CUDA graphs.
//!
//! From start to end, work that any thread asks of the device is recorded. Every queue used
//! meanwhile joins the recording by itself, after its start, and is joined back at its end. Memory
//! allocated while recording stays reserved for the recording, so nothing else writes where a
//! replay writes; which addresses it gets depends only on the order of calls in each queue. Events
//! of a recording cannot be queried.

use super::driver::{Driver, GpuError, Recording};
use super::memory::Gpu;
use super::queue::{RecordedMemory, RecordingSession};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Recorded work, with the memory and queues it needs. A replay reads and writes the same addresses
/// with the same arguments as the recording; inputs that change must be written to that memory
/// first.
#[derive(Debug)]
pub struct Graph {
    // Field order: the memory is released after the recording.
    recording: Box<dyn Recording>,
    _memory: Arc<RecordedMemory>,
    /// The recording also holds addresses of these queues' library workspaces.
    _joined: Vec<Arc<dyn Driver>>,
}

impl Graph {
    /// Queues all of it on the queue that recorded it.
    ///
    /// # Errors
    /// If the device fails.
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

    /// Waits for the device, then records the work of this queue and of the device's other queues
    /// until [`Gpu::finish_recording`], without running it. Kernels and products must have run
    /// before, so that they are compiled and their algorithms chosen. Until the end nothing may
    /// wait for the device or copy to or from the host.
    ///
    /// # Errors
    /// If the device fails, cannot record, or is recording already.
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
        arena.begin(RecordingSession::new(number, begun, arena, origin), origin);
        Ok(())
    }

    /// Ends [`Gpu::start_recording`]. No other thread may use the device meanwhile.
    ///
    /// # Errors
    /// If a call meanwhile cannot be recorded, or this queue is not recording.
    pub fn finish_recording(&self) -> Result<Graph, GpuError> {
        let Some(session) = self.queue.arena.end() else {
            let what = "nothing is being recorded".to_owned();
            return Err(GpuError::Call { call: "finish_recording", what });
        };
        let origin = &self.queue.driver;
        let joined = session.take_joined();
        let back = joined.iter().try_for_each(|queue| origin.wait(&queue.record()?));
        // Ends the device's recording even if it failed.
        let recording = origin.finish_recording();
        back?;
        Ok(Graph { recording: recording?, _memory: session.memory().clone(), _joined: joined })
    }
}
