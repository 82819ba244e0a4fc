//! What carries launches out, and why it may fail.

use super::Launch;
use super::product::Product;
use crate::cuda::fused::Fuser;
#[cfg(feature = "cpu_emulator")]
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Why a GPU did not do what was asked.
#[derive(Debug, Error)]
pub enum GpuError {
    /// This build has no code for GPUs.
    #[error(
        "a GPU was asked for, and this program was built without them: build it with the feature `cuda`"
    )]
    CpuOnly,
    /// A library is not installed, or not found.
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
        /// Asked for.
        ordinal: usize,
        /// How many there are.
        found: usize,
    },
    /// The GPU is of a generation that the kernels are not written for.
    #[error(
        "{name} has compute capability {major}.{minor}: the kernels need 8.0 (Ampere) or later"
    )]
    TooOld {
        /// The GPU.
        name: String,
        /// Its generation.
        major: i32,
        /// Its variant.
        minor: i32,
    },
    /// Device memory is full.
    #[error("no {bytes} bytes of device memory are free ({what})")]
    OutOfMemory {
        /// Asked for.
        bytes: usize,
        /// What the driver says.
        what: String,
    },
    /// A source does not compile.
    #[error("{0}")]
    Compile(String),
    /// A call of the driver or of a library failed; also what an earlier kernel did wrong.
    #[error("{call}: {what}")]
    Call {
        /// Which.
        call: &'static str,
        /// What it says.
        what: String,
    },
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// As its maker calls it.
    pub name: String,
    /// Such as `sm_90a`; `c++` where there is no GPU.
    pub architecture: String,
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Of the device.
    pub memory_bytes: usize,
    /// Driver and libraries, in words.
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
    /// Of a queue that never lags behind the host.
    #[cfg_attr(not(feature = "cpu_emulator"), allow(dead_code))]
    Host(Instant),
    /// Of a queue of the host's that runs later.
    #[cfg(feature = "cpu_emulator")]
    Emulated(Arc<dyn EventState>),
    /// Of a GPU's stream.
    #[cfg(feature = "cuda")]
    Device(Arc<cudarc::driver::CudaEvent>),
}

/// A point in the order of a queue of the host's that runs later.
#[cfg(feature = "cpu_emulator")]
pub(super) trait EventState: Any + Debug + Send + Sync {
    /// When it was reached.
    fn reached(&self) -> Option<Instant>;

    /// Waits until it is.
    ///
    /// # Errors
    /// It cannot be waited for.
    fn wait(&self) -> Result<(), GpuError>;
}

impl Event {
    #[cfg(any(feature = "cuda", feature = "cpu_emulator"))]
    pub(super) const fn new(inner: EventKind) -> Self {
        Self { inner, recorded: false }
    }

    /// The same, of a step that is being recorded.
    pub(super) fn in_recording(self) -> Self {
        Self { recorded: true, ..self }
    }

    /// Whether it is a point in a recorded step ([`Gpu::start_recording`](super::Gpu::start_recording)): work of the same
    /// recording may come behind it, and nobody may ask it whether it is reached.
    #[must_use]
    pub const fn is_recorded(&self) -> bool {
        self.recorded
    }

    /// Whether all before it is done.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match &self.inner {
            EventKind::Host(_) => true,
            #[cfg(feature = "cpu_emulator")]
            EventKind::Emulated(point) => point.reached().is_some(),
            #[cfg(feature = "cuda")]
            EventKind::Device(event) => event.is_complete(),
        }
    }

    /// Waits until all before it is done.
    ///
    /// # Errors
    /// Where that failed.
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

    /// Seconds from this to a later one, both waited for.
    ///
    /// # Errors
    /// Where they are of different devices, or work between them failed.
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

/// Something of the host's in a queue's order, as often as the queue comes to it.
pub type Job = Arc<dyn Fn() + Send + Sync>;

/// Recorded work, with the addresses and arguments that it was recorded with.
pub trait Recording: Debug + Send + Sync {
    /// Queues it, on the queue that recorded it.
    ///
    /// # Errors
    /// Where the device fails.
    fn replay(&self) -> Result<(), GpuError>;
}

/// The error of a call that cannot be part of recorded work.
#[cfg(any(feature = "cuda", feature = "cpu_emulator"))]
pub(super) fn not_while_recording(call: &'static str) -> GpuError {
    let what = "a step is being recorded: nothing may wait for the device, nor be copied to or from the host";
    GpuError::Call { call, what: what.to_owned() }
}

/// A queue of a device. What is queued is done in order; [`Driver::copy_out`] and [`Driver::synchronize`] wait for it.
///
/// Addresses are those of live memory: [`super::Gpu`] and its views see to that, and are what to use.
pub trait Driver: Debug + Send + Sync {
    /// The device.
    fn properties(&self) -> &Properties;

    /// Memory with anything in it, at a multiple of 256.
    ///
    /// # Errors
    /// Where there is none left.
    fn allocate(&self, bytes: usize) -> Result<u64, GpuError>;

    /// Gives memory back, when all that is queued is done.
    fn free(&self, address: u64);

    /// From the host; the slice may change as soon as this returns.
    ///
    /// # Errors
    /// As the device has it; so below.
    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError>;

    /// To the host, after all that is queued.
    ///
    /// # Errors
    /// As above.
    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError>;

    /// On the device.
    ///
    /// # Errors
    /// As above.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError>;

    /// The same byte everywhere.
    ///
    /// # Errors
    /// As above.
    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError>;

    /// A kernel.
    ///
    /// # Errors
    /// As above, and where its source does not compile.
    fn launch(&self, launch: &Launch) -> Result<(), GpuError>;

    /// A matrix product.
    ///
    /// # Errors
    /// As above.
    fn product(&self, product: &Product) -> Result<(), GpuError>;

    /// Seconds that each of a library's algorithms takes for a product, the one in use first; none where there is but one
    /// way. The result's memory stays as it is.
    ///
    /// # Errors
    /// As above.
    fn survey(&self, _product: &Product) -> Result<Vec<f64>, GpuError> {
        Ok(Vec::new())
    }

    /// Waits for all that is queued.
    ///
    /// # Errors
    /// As above, for any of it.
    fn synchronize(&self) -> Result<(), GpuError>;

    /// The point after all that is queued so far.
    ///
    /// # Errors
    /// As above.
    fn record(&self) -> Result<Event, GpuError>;

    /// What is queued from now on begins after `event`.
    ///
    /// # Errors
    /// As above.
    fn wait(&self, event: &Event) -> Result<(), GpuError>;

    /// Makes the device the calling thread's, and gives the address of its stream, for libraries that queue there.
    ///
    /// # Errors
    /// As above, and where there is no such stream.
    fn stream(&self) -> Result<u64, GpuError> {
        Err(GpuError::Call { call: "stream", what: "this is no GPU".to_owned() })
    }

    /// A library that fuses graphs of operations, where attention may use one.
    fn fuser(&self) -> Option<&dyn Fuser> {
        None
    }

    /// Something of the host's, in this queue's order.
    ///
    /// # Errors
    /// As above, and where the device cannot.
    fn run(&self, _job: Job) -> Result<(), GpuError> {
        Err(GpuError::Call { call: "run", what: "a GPU runs nothing of the host's".to_owned() })
    }

    /// Waits for all queues of the device.
    ///
    /// # Errors
    /// Where any of what they did failed.
    fn quiesce(&self) -> Result<(), GpuError>;

    /// Whether it can record work instead of doing it.
    fn records(&self) -> bool {
        false
    }

    /// From now on what is asked of this queue is recorded and not done. Another queue joins where it waits for an event of
    /// a recorded one. Meanwhile nothing may wait for the device or be copied to or from the host, on any queue.
    ///
    /// # Errors
    /// Where it is recording already, or cannot.
    fn start_recording(&self) -> Result<(), GpuError> {
        Err(GpuError::Call { call: "record", what: "this device records nothing".to_owned() })
    }

    /// Ends [`Driver::start_recording`]. What this queue was asked must come behind all that others have recorded.
    ///
    /// # Errors
    /// What was asked meanwhile and cannot be recorded.
    fn finish_recording(&self) -> Result<Box<dyn Recording>, GpuError> {
        Err(GpuError::Call { call: "record", what: "nothing is being recorded".to_owned() })
    }

    /// Another queue of the same device, with the same compiled sources.
    ///
    /// # Errors
    /// As above.
    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError>;
}

/// A queue that is a stream of CUDA's.
#[cfg(feature = "cuda")]
pub(super) trait Streamed: Driver {
    /// As libraries take it.
    fn stream_handle(&self) -> *mut std::ffi::c_void;

    /// Refuses what would make a recording invalid, or be recorded with what the host has now.
    fn not_while_recording(&self, call: &'static str) -> Result<(), GpuError>;
}
