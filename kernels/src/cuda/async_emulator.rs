//! The emulator with asynchronous queues: each has a thread of its own ([`super::queue_thread`]),
//! which lags behind the host at random. Work that does not wait as it should reads old contents,
//! so events between queues and the reuse of memory are tested without a GPU. Recordings are held
//! in a [`super::capture`].

use super::Launch;
use super::capture::lock;
use super::captured_graph::CapturePosition;
use super::cpu_emulator::CpuEmulator;
use super::driver::{Driver, Event, EventKind, EventState, GpuError, Job, Properties, Recording};
use super::product::Product;
use super::queue_thread::{EmulatedEvent, EmulatorState, QueueThread};
use std::any::Any;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// One of the emulator's queues.
pub struct AsyncEmulator {
    thread: QueueThread,
    /// Where it is in a capture, if it records.
    position: Mutex<Option<CapturePosition>>,
}

impl Debug for AsyncEmulator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a queue of {:?} that lags", self.thread.shared.emulator)
    }
}

impl AsyncEmulator {
    /// A queue that now and then lags by up to `longest`.
    #[must_use]
    pub fn new(emulator: CpuEmulator, longest: Duration) -> Self {
        Self::on(QueueThread::first(emulator, longest))
    }

    fn on(thread: QueueThread) -> Self {
        Self { thread, position: Mutex::default() }
    }

    fn shared(&self) -> &EmulatorState {
        &self.thread.shared
    }

    /// Where it is in a capture; `None` if it runs its work.
    fn position(&self) -> MutexGuard<'_, Option<CapturePosition>> {
        let mut position = lock(&self.position);
        if position.as_ref().is_some_and(|position| position.capture().has_ended()) {
            *position = None;
        }
        position
    }

    /// Queues the work, or records it.
    fn run_or_capture(
        &self,
        work: impl Fn(&CpuEmulator) -> Result<(), GpuError> + Send + Sync + 'static,
    ) -> Result<(), GpuError> {
        match self.position().as_mut() {
            Some(position) => position.add(Arc::new(work)),
            None => self.thread.submit(work),
        }
        self.thread.health()
    }
}

impl Driver for AsyncEmulator {
    fn properties(&self) -> &Properties {
        self.shared().emulator.properties()
    }

    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        self.shared().emulator.allocate(bytes)
    }

    fn free(&self, address: u64) {
        self.shared().record_failure(self.shared().not_while_recording("free"));
        // Waits for all queues, as `cuMemFree` does.
        self.shared().pending.wait_for_none();
        self.shared().emulator.free(address);
    }

    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError> {
        self.shared().not_while_recording("copy_in")?;
        let from = from.to_vec();
        self.run_or_capture(move |emulator| emulator.copy_in(&from, to))
    }

    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.shared().not_while_recording("copy_out")?;
        self.synchronize()?;
        self.shared().emulator.copy_out(from, to)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.run_or_capture(move |emulator| emulator.copy(from, to, bytes))
    }

    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.run_or_capture(move |emulator| emulator.fill(to, byte, bytes))
    }

    fn fill_words(&self, to: u64, word: u32, words: usize) -> Result<(), GpuError> {
        self.run_or_capture(move |emulator| emulator.fill_words(to, word, words))
    }

    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        let launch = launch.clone();
        self.run_or_capture(move |emulator| emulator.launch(&launch))
    }

    fn product(&self, product: &Product) -> Result<(), GpuError> {
        let product = *product;
        self.run_or_capture(move |emulator| emulator.product(&product))
    }

    fn run(&self, job: Job) -> Result<(), GpuError> {
        self.run_or_capture(move |_| {
            job();
            Ok(())
        })
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.shared().not_while_recording("synchronize")?;
        self.thread.record_event().wait()?;
        self.thread.health()
    }

    fn quiesce(&self) -> Result<(), GpuError> {
        self.shared().not_while_recording("quiesce")?;
        self.shared().pending.wait_for_none();
        self.thread.health()
    }

    fn record(&self) -> Result<Event, GpuError> {
        let event = self.position().as_ref().map(CapturePosition::event);
        Ok(Event::new(EventKind::Emulated(Arc::new(
            event.unwrap_or_else(|| self.thread.record_event()),
        ))))
    }

    fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let EventKind::Emulated(point) = &event.inner else { return Ok(()) };
        let point: &dyn Any = &**point;
        let Some(event) = point.downcast_ref::<EmulatedEvent>() else { return Ok(()) };
        let mut position = self.position();
        match (event, position.as_mut()) {
            (EmulatedEvent::Running(_), None) => {
                let event = event.clone();
                self.thread.submit(move |_| event.wait());
            }
            (EmulatedEvent::Captured(capture, after), None) if !capture.has_ended() => {
                *position = Some(CapturePosition::new(capture.clone(), after.clone()));
            }
            (EmulatedEvent::Captured(capture, after), Some(position))
                if Arc::ptr_eq(capture, position.capture()) =>
            {
                position.wait(after);
            }
            (_, Some(position)) => {
                return Err(position.capture().refuse("wait for an event from before"));
            }
            (EmulatedEvent::Captured(..), None) => {
                let what = "the event is of a recording that has ended".to_owned();
                return Err(GpuError::Call { call: "wait", what });
            }
        }
        self.thread.health()
    }

    fn records(&self) -> bool {
        true
    }

    fn start_recording(&self) -> Result<(), GpuError> {
        let mut capture = lock(&self.shared().capture);
        if let Some(capture) = &*capture {
            return Err(capture.refuse("start_recording"));
        }
        let new = capture.insert(Arc::default());
        *lock(&self.position) = Some(CapturePosition::new(new.clone(), Vec::new()));
        Ok(())
    }

    fn finish_recording(&self) -> Result<Box<dyn Recording>, GpuError> {
        *lock(&self.shared().capture) = None;
        let none =
            || GpuError::Call { call: "record", what: "nothing is recorded here".to_owned() };
        let position = self.position().take().ok_or_else(none)?;
        Ok(Box::new(position.end(self.thread.clone())?))
    }

    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError> {
        Ok(Arc::new(Self::on(self.thread.fork())))
    }
}
