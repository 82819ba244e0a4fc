//! Work that is recorded instead of done, to be replayed as often as is liked: CUDA graphs.
//!
//! Every queue of the device's that is used meanwhile joins by itself, behind the beginning, and is joined at the end: what
//! a rank asks of its GPU between the two is recorded, whichever of its threads asks. Memory that is recorded with stays the
//! recorded work's own, so that nothing else is written where it writes; which memory that is follows from the order of the
//! calls of each queue alone. No event is asked whether it is reached.

use super::driver::{Driver, GpuError, Recording};
use super::memory::Gpu;
use super::queue::{RecordedMemory, RecordingSession};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Recorded work, and the memory and queues that it needs. Replayed, it reads and writes the same addresses with the same
/// arguments as when it was recorded; what shall be other must have been written to that memory before.
#[derive(Debug)]
pub struct Graph {
    // In this order: memory is given back when there is nothing left to replay.
    recording: Box<dyn Recording>,
    _memory: Arc<RecordedMemory>,
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
        arena.begin(RecordingSession::new(number, begun, arena, origin), origin);
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
        let joined = session.take_joined();
        let back = joined.iter().try_for_each(|queue| origin.wait(&queue.record()?));
        // Ends what the device records, whatever came of it.
        let recording = origin.finish_recording();
        back?;
        Ok(Graph { recording: recording?, _memory: session.memory().clone(), _joined: joined })
    }
}
