//! The interface of a device queue, which carries out launches, and its errors.

use super::Launch;
use super::product::Product;
use crate::cuda::fused::Fuser;
#[cfg(feature = "cpu_emulator")]
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Why a GPU operation failed.
#[derive(Debug, Error)]
pub enum GpuError {
    /// This build has no code for GPUs.
    #[error(
        "a GPU was asked for, and this program was built without them: build it with the feature `cuda`"
    )]
    CpuOnly,
    /// A library is not installed or not found.
    #[error("{library} is not here ({needed_for}): {advice}, or put its folder on LD_LIBRARY_PATH")]
    Library {
        /// File name.
        library: &'static str,
        /// What it does.
        needed_for: &'static str,
        /// Where it comes from.
        advice: &'static str,
    },
    /// There is no such GPU.
    #[error(
        "there is no GPU {ordinal}: the driver sees {found} (CUDA_VISIBLE_DEVICES hides others)"
    )]
    NoSuchGpu {
        /// Requested index.
        ordinal: usize,
        /// Number of GPUs.
        found: usize,
    },
    /// The GPU's generation is older than the kernels support.
    #[error(
        "{name} has compute capability {major}.{minor}: the kernels need 8.0 (Ampere) or later"
    )]
    TooOld {
        /// Name of the GPU.
        name: String,
        /// Major compute capability.
        major: i32,
        /// Minor compute capability.
        minor: i32,
    },
    /// Device memory is full.
    #[error("no {bytes} bytes of device memory are free ({what})")]
    OutOfMemory {
        /// Bytes requested.
        bytes: usize,
        /// The driver's message.
        what: String,
    },
    /// A source does not compile.
    #[error("{0}")]
    Compile(String),
    /// A call of the driver or of a library failed. An earlier kernel's error may surface here.
    #[error("{call}: {what}")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Its message.
        what: String,
    },
}

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The vendor's name for it.
    pub name: String,
    /// Such as `sm_90a`; `c++` where there is no GPU.
    pub architecture: String,
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of device memory.
    pub memory_bytes: usize,
    /// Versions of the driver and libraries, for people to read.
    pub versions: String,
}

/// A point in a queue's order.
#[derive(Clone, Debug)]
pub struct Event {
    pub(super) inner: EventKind,
    recorded: bool,
}

#[derive(Clone, Debug)]
pub(super) enum EventKind {
    /// Of a queue that never runs behind the host.
    #[cfg_attr(not(feature = "cpu_emulator"), allow(dead_code))]
    Host(Instant),
    /// Of an emulated queue that runs later.
    #[cfg(feature = "cpu_emulator")]
    Emulated(Arc<dyn EventState>),
    /// Of a CUDA stream.
    #[cfg(feature = "cuda")]
    Device(Arc<cudarc::driver::CudaEvent>),
}

/// A point in the order of an emulated queue that runs later.
#[cfg(feature = "cpu_emulator")]
pub(super) trait EventState: Any + Debug + Send + Sync {
    /// The time at which it was reached.
    fn reached(&self) -> Option<Instant>;

    /// Waits until it is reached.
    ///
    /// # Errors
    /// If the point cannot be waited for.
    fn wait(&self) -> Result<(), GpuError>;
}

impl Event {
    #[cfg(any(feature = "cuda", feature = "cpu_emulator"))]
    pub(super) const fn new(inner: EventKind) -> Self {
        Self { inner, recorded: false }
    }

    /// The same event, marked as part of a recording.
    pub(super) fn in_recording(self) -> Self {
        Self { recorded: true, ..self }
    }

    /// Whether it belongs to a recorded step
    /// ([`Gpu::start_recording`](super::Gpu::start_recording)). Work of the same recording may wait
    /// for it; it cannot be queried.
    #[must_use]
    pub const fn is_recorded(&self) -> bool {
        self.recorded
    }

    /// Whether all work before it is done.
    ///
    /// # Errors
    /// If any of that work failed.
    pub fn try_is_complete(&self) -> Result<bool, GpuError> {
        match &self.inner {
            EventKind::Host(_) => Ok(true),
            #[cfg(feature = "cpu_emulator")]
            EventKind::Emulated(point) => Ok(point.reached().is_some()),
            #[cfg(feature = "cuda")]
            EventKind::Device(event) => {
                // Any thread may ask, also one that has not used the device.
                let bound = event.context().bind_to_thread();
                bound.and_then(|()| event.try_is_complete()).map_err(|error| GpuError::Call {
                    call: "cuEventQuery",
                    what: error.to_string(),
                })
            }
        }
    }

    /// Whether all work before it is done. `false` if any of it failed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.try_is_complete().unwrap_or(false)
    }

    /// Waits until all work before it is done.
    ///
    /// # Errors
    /// If any of that work failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        match &self.inner {
            EventKind::Host(_) => Ok(()),
            #[cfg(feature = "cpu_emulator")]
            EventKind::Emulated(point) => point.wait(),
            #[cfg(feature = "cuda")]
            EventKind::Device(event) => event.synchronize().map_err(|error| GpuError::Call {
                call: "cuEventSynchronize",
                what: error.to_string(),
            }),
        }
    }

    /// Seconds from this event to a later one. Both must have been waited for.
    ///
    /// # Errors
    /// If the events are of different devices, or work between them failed.
    pub fn seconds_until(&self, end: &Self) -> Result<f64, GpuError> {
        match (&self.inner, &end.inner) {
            (EventKind::Host(start), EventKind::Host(end)) => {
                Ok(end.saturating_duration_since(*start).as_secs_f64())
            }
            #[cfg(feature = "cuda")]
            (EventKind::Device(start), EventKind::Device(end)) => match start.elapsed_ms(end) {
                Ok(ms) => Ok(f64::from(ms) / 1e3),
                Err(error) => {
                    Err(GpuError::Call { call: "cuEventElapsedTime", what: error.to_string() })
                }
            },
            #[cfg(feature = "cpu_emulator")]
            (EventKind::Emulated(start), EventKind::Emulated(end)) => {
                let both = start.reached().zip(end.reached());
                let seconds = |(start, end): (Instant, Instant)| {
                    end.saturating_duration_since(start).as_secs_f64()
                };
                Ok(both.map_or(0.0, seconds))
            }
            #[cfg(any(feature = "cuda", feature = "cpu_emulator"))]
            _ => Err(GpuError::Call {
                call: "seconds_until",
                what: "events of different devices".to_owned(),
            }),
        }
    }
}

/// A host function in a queue's order. A recorded one runs at every replay.
pub type Job = Arc<dyn Fn() + Send + Sync>;

/// Recorded work, with the addresses and arguments of its recording.
pub trait Recording: Debug + Send + Sync {
    /// Queues the work on the queue that recorded it.
    ///
    /// # Errors
    /// If the device fails.
    fn replay(&self) -> Result<(), GpuError>;
}

/// The error of a call that cannot be recorded.
#[cfg(any(feature = "cuda", feature = "cpu_emulator"))]
pub(super) fn not_while_recording(call: &'static str) -> GpuError {
    let what = "a step is being recorded: nothing may wait for the device, nor be copied to or from the host";
    GpuError::Call { call, what: what.to_owned() }
}

/// A queue of a device. Work runs in order; [`Driver::copy_out`] and [`Driver::synchronize`] wait
/// for it.
///
/// Callers pass addresses of live memory. [`super::Gpu`] and its views ensure that; use them.
pub trait Driver: Debug + Send + Sync {
    /// The properties of the device.
    fn properties(&self) -> &Properties;

    /// Allocates uninitialised memory at a multiple of 256 bytes.
    ///
    /// # Errors
    /// If the device has too little free memory.
    fn allocate(&self, bytes: usize) -> Result<u64, GpuError>;

    /// Frees memory once all queued work is done.
    fn free(&self, address: u64);

    /// Copies from the host. The slice may change as soon as this returns.
    ///
    /// # Errors
    /// If the device fails. The same holds for the methods below.
    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError>;

    /// Copies to the host after all queued work.
    ///
    /// # Errors
    /// As above.
    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError>;

    /// Copies within the device.
    ///
    /// # Errors
    /// As above.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError>;

    /// Sets every byte to `byte`.
    ///
    /// # Errors
    /// As above.
    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError>;

    /// Sets every word of 4 bytes to `word`.
    ///
    /// # Errors
    /// As above.
    fn fill_words(&self, to: u64, word: u32, words: usize) -> Result<(), GpuError>;

    /// Launches a kernel.
    ///
    /// # Errors
    /// As above, and if its source does not compile.
    fn launch(&self, launch: &Launch) -> Result<(), GpuError>;

    /// Queues a matrix product.
    ///
    /// # Errors
    /// As above.
    fn product(&self, product: &Product) -> Result<(), GpuError>;

    /// Seconds that each of the library's algorithms takes for a product, the one in use first.
    /// Empty if there is only one. Leaves the product's result in memory unchanged.
    ///
    /// # Errors
    /// As above.
    fn survey(&self, _product: &Product) -> Result<Vec<f64>, GpuError> {
        Ok(Vec::new())
    }

    /// Waits for all queued work.
    ///
    /// # Errors
    /// As above, for any of the work.
    fn synchronize(&self) -> Result<(), GpuError>;

    /// Records an event after all work queued so far.
    ///
    /// # Errors
    /// As above.
    fn record(&self) -> Result<Event, GpuError>;

    /// Makes work queued from now on wait for `event`.
    ///
    /// # Errors
    /// As above.
    fn wait(&self, event: &Event) -> Result<(), GpuError>;

    /// Makes the device current on the calling thread and returns the address of its stream, for
    /// libraries that queue work there.
    ///
    /// # Errors
    /// As above, and if there is no such stream.
    fn stream(&self) -> Result<u64, GpuError> {
        Err(GpuError::Call { call: "stream", what: "this is no GPU".to_owned() })
    }

    /// The library that runs attention as a fused graph, if there is one.
    fn fuser(&self) -> Option<&dyn Fuser> {
        None
    }

    /// Runs a host function in this queue's order.
    ///
    /// # Errors
    /// As above, and if the device does not support it.
    fn run(&self, _job: Job) -> Result<(), GpuError> {
        Err(GpuError::Call { call: "run", what: "a GPU runs nothing of the host's".to_owned() })
    }

    /// Waits for all queues of the device.
    ///
    /// # Errors
    /// If any of their work failed.
    fn quiesce(&self) -> Result<(), GpuError>;

    /// Whether the device can record work instead of running it.
    fn records(&self) -> bool {
        false
    }

    /// Records work of this queue from now on instead of running it. Another queue joins by waiting
    /// for an event of a recorded queue. Until the recording ends, no queue may wait for the device
    /// or copy to or from the host.
    ///
    /// # Errors
    /// If it is recording already, or cannot record.
    fn start_recording(&self) -> Result<(), GpuError> {
        Err(GpuError::Call { call: "record", what: "this device records nothing".to_owned() })
    }

    /// Ends [`Driver::start_recording`]. This queue must by then have waited for everything that
    /// other queues recorded.
    ///
    /// # Errors
    /// If a call meanwhile cannot be recorded.
    fn finish_recording(&self) -> Result<Box<dyn Recording>, GpuError> {
        Err(GpuError::Call { call: "record", what: "nothing is being recorded".to_owned() })
    }

    /// Another queue of the same device, sharing its compiled sources.
    ///
    /// # Errors
    /// As above.
    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError>;
}

/// A queue that is a CUDA stream.
#[cfg(feature = "cuda")]
pub(super) trait Streamed: Driver {
    /// The stream as C libraries take it.
    fn stream_handle(&self) -> *mut std::ffi::c_void;

    /// Fails during a recording: for calls that would invalidate it, or record a value that the
    /// host only has now.
    fn not_while_recording(&self, call: &'static str) -> Result<(), GpuError>;
}
