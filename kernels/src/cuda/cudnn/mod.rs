//! Attention by cuDNN's fused graphs: which engines take a graph, plans that are made once, runs.
#![allow(unsafe_code)] // a C library

mod descriptor;
mod library;
mod lower;
mod plan;

pub(super) use library::Library;

use super::GpuError;
use crate::attention::fused::{Fused, Graph, Pass, Role, Sdpa};
use descriptor::{Descriptor, Kind, Name};
use library::Handle;
use plan::{Plan, Target, plans};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::Arc;

/// Plans of a GPU.
#[derive(Debug)]
pub(super) struct Fusion {
    library: Arc<Library>,
    handle: Option<Handle>,
    plans: HashMap<String, Vec<Plan>>,
}

impl Fusion {
    pub(super) fn new(library: Arc<Library>) -> Self {
        Self { library, handle: None, plans: HashMap::new() }
    }

    /// The library, and its version.
    pub(super) fn name(&self) -> String {
        format!("{:?}", self.library)
    }

    fn of(&mut self, sdpa: &Sdpa, pass: Pass) -> Result<(&mut Handle, &[Plan]), GpuError> {
        let handle = match &mut self.handle {
            Some(handle) => handle,
            none => none.insert(Handle::new(&self.library)?),
        };
        let plans = match self.plans.entry(format!("{pass:?} {sdpa:?}")) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => {
                let repeatable = pass != (Pass::Backward { repeatable: false });
                let (target, graph) = (Target::Handle(handle), sdpa.graph(pass));
                place.insert(plans(&self.library, target, &graph, repeatable)?)
            }
        };
        Ok((handle, plans))
    }

    /// What there is for a pass, those first that cuDNN reckons fastest. The context is the calling thread's.
    pub(super) fn plans(&mut self, sdpa: &Sdpa, pass: Pass) -> Result<Vec<Fused>, GpuError> {
        let (_, plans) = self.of(sdpa, pass)?;
        Ok(plans.iter().map(|plan| plan.fused.clone()).collect())
    }

    /// Queues one of them on a stream.
    pub(super) fn run(
        &mut self,
        stream: *mut c_void,
        (sdpa, pass, number): (&Sdpa, Pass, usize),
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<(), GpuError> {
        let library = self.library.clone();
        let (handle, plans) = self.of(sdpa, pass)?;
        let Some(plan) = plans.get(number) else {
            let what = format!("plan {number} of {} for {pass:?} of {sdpa:?}", plans.len());
            return Err(library::failed("cudnnBackendExecute", what));
        };
        handle.queue_on(stream)?;
        plan.run(&library, handle, tensors, workspace)
    }
}

/// Plans that cuDNN makes of a graph for a GPU that is not here, those first that it reckons fastest. `device` are its
/// properties, in the JSON of `CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION` (cuDNN 9.8).
///
/// # Errors
/// Where cuDNN is missing, or takes neither the device nor the graph.
pub fn plans_without_gpu(device: &str, graph: &Graph) -> Result<Vec<Fused>, GpuError> {
    let library = Library::open()?;
    let described = Descriptor::new(&library, Kind::DeviceProperties)?;
    let described = described.text(Name::DeviceJson, device)?.finalised()?;
    let made = plans(&library, Target::Described(&described), graph, false)?;
    Ok(made.into_iter().map(|plan| plan.fused).collect())
}

/// cuDNN's version, where it is installed.
#[must_use]
pub fn version() -> Option<String> {
    Library::open().ok().map(|library| format!("{library:?}"))
}
