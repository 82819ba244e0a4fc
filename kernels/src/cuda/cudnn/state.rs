//! The state of cuDNN shared by a GPU's queues, and the queue's [`Fuser`].

use super::{CudnnPlans, Library};
use crate::cuda::GpuError;
use crate::cuda::device::StreamQueue;
use crate::cuda::driver::{Driver, Streamed};
use crate::cuda::fused::{FusedPlan, Fuser, Pass, Preference, Role, Sdpa};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// cuDNN on a GPU, if available, and the choices made.
#[derive(Debug)]
pub(in crate::cuda) struct CudnnState {
    preference: Preference,
    name: String,
    fusion: Option<Mutex<CudnnPlans>>,
    /// Choices of kernels, by what they were made for.
    settled: Mutex<BTreeMap<String, Arc<str>>>,
}

impl CudnnState {
    /// Opens cuDNN if the user allows it and it is installed.
    pub(in crate::cuda) fn open() -> Result<Self, GpuError> {
        let word = std::env::var("MESHWRIGHT_ATTENTION").unwrap_or_default();
        let preference = Preference::read(&word);
        let preference = preference.map_err(|what| GpuError::Call { call: "attention", what })?;
        let library = match preference {
            Preference::Own => Err("cuDNN not asked for".to_owned()),
            Preference::Repeatable | Preference::Fastest => {
                Library::open().map_err(|error| match error {
                    GpuError::Library { library, .. } => {
                        format!("no cuDNN ({library} is not here)")
                    }
                    error => format!("no cuDNN ({error})"),
                })
            }
        };
        let name = library.as_ref().map_or_else(Clone::clone, |library| format!("{library:?}"));
        let fusion = library.ok().map(|library| Mutex::new(CudnnPlans::new(library)));
        Ok(Self { preference, name, fusion, settled: Mutex::default() })
    }

    /// Name and version, or why there is none.
    pub(in crate::cuda) fn name(&self) -> &str {
        &self.name
    }

    pub(in crate::cuda) fn is_open(&self) -> bool {
        self.fusion.is_some()
    }

    /// Releases what is kept for a stream that is being destroyed.
    pub(in crate::cuda) fn forget(&self, stream: *mut c_void) {
        if let Ok(mut fusion) = self.fusion() {
            fusion.forget(stream);
        }
    }

    fn fusion(&self) -> Result<MutexGuard<'_, CudnnPlans>, GpuError> {
        let none = || GpuError::Call { call: "attention", what: self.name.clone() };
        let fusion = self.fusion.as_ref().ok_or_else(none)?;
        Ok(fusion.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn settled(&self) -> MutexGuard<'_, BTreeMap<String, Arc<str>>> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fuser for StreamQueue {
    fn preference(&self) -> Preference {
        self.cudnn().preference
    }

    fn name(&self) -> String {
        format!("{} on {}", self.cudnn().name, self.properties().name)
    }

    fn plans(&self, sdpa: &Sdpa, pass: Pass) -> Result<Vec<FusedPlan>, GpuError> {
        self.bind()?;
        self.cudnn().fusion()?.plans(sdpa, pass)
    }

    fn run(
        &self,
        plan: (&Sdpa, Pass, usize),
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<(), GpuError> {
        self.bind()?;
        self.cudnn().fusion()?.run(self.stream_handle(), plan, tensors, workspace)
    }

    fn recall(&self, what: &str) -> Option<Arc<str>> {
        let mut settled = self.cudnn().settled();
        if let Some(found) = settled.get(what) {
            return Some(found.clone());
        }
        let kept = String::from_utf8(self.cache().get(what)?).ok()?;
        Some(settled.entry(what.to_owned()).or_insert(kept.into()).clone())
    }

    fn settle(&self, what: &str, found: &str) -> Arc<str> {
        let mut settled = self.cudnn().settled();
        let held = settled.entry(what.to_owned()).or_insert_with(|| {
            self.cache().put(what, found.as_bytes());
            found.into()
        });
        held.clone()
    }

    fn settled(&self) -> Vec<(String, Arc<str>)> {
        let settled = self.cudnn().settled();
        settled.iter().map(|(what, found)| (what.clone(), found.clone())).collect()
    }
}
