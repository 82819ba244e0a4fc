//! Attention by cuDNN's fused graphs: choice of engines, plans (each made once), execution.
#![allow(unsafe_code)] // a C library

mod descriptor;
mod library;
mod lower;
mod plan;
mod state;

pub(super) use state::CudnnState;

use super::GpuError;
use crate::cuda::fused::{FusedPlan, Graph, Pass, Role, Sdpa};
use descriptor::{Descriptor, Kind, Name};
use library::{Handle, Library};
use plan::{Plan, Target, plans};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::Arc;

/// The plans of a GPU.
#[derive(Debug)]
struct CudnnPlans {
    library: Arc<Library>,
    // Field order: plans may refer to the handle they were made with.
    plans: HashMap<String, Vec<Plan>>,
    maker: Option<Handle>,
    /// One handle for each stream: a handle that changes streams makes one wait for the other.
    runners: HashMap<u64, Handle>,
}

impl CudnnPlans {
    fn new(library: Arc<Library>) -> Self {
        Self { library, plans: HashMap::new(), maker: None, runners: HashMap::new() }
    }

    fn made(&mut self, sdpa: &Sdpa, pass: Pass) -> Result<&[Plan], GpuError> {
        let maker = match &self.maker {
            Some(maker) => maker,
            None => self.maker.insert(Handle::new(&self.library)?),
        };
        Ok(match self.plans.entry(format!("{pass:?} {sdpa:?}")) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => {
                let repeatable = pass != (Pass::Backward { repeatable: false });
                let (target, graph) = (Target::Handle(maker), sdpa.graph(pass));
                place.insert(plans(&self.library, target, &graph, repeatable)?)
            }
        })
    }

    /// Plans of a pass, the fastest by cuDNN's estimate first. The GPU's context must be current.
    fn plans(&mut self, sdpa: &Sdpa, pass: Pass) -> Result<Vec<FusedPlan>, GpuError> {
        Ok(self.made(sdpa, pass)?.iter().map(|plan| plan.fused.clone()).collect())
    }

    /// Queues a plan on a stream.
    fn run(
        &mut self,
        stream: *mut c_void,
        (sdpa, pass, number): (&Sdpa, Pass, usize),
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<(), GpuError> {
        self.made(sdpa, pass)?;
        let runner = match self.runners.entry(stream as u64) {
            Entry::Occupied(runner) => runner.into_mut(),
            Entry::Vacant(place) => {
                let runner = Handle::new(&self.library)?;
                runner.queue_on(stream)?;
                place.insert(runner)
            }
        };
        let made = self.plans.get(&format!("{pass:?} {sdpa:?}"));
        let Some(plan) = made.and_then(|plans| plans.get(number)) else {
            let what = format!("there is no plan {number} for {pass:?} of {sdpa:?}");
            return Err(library::failed("cudnnBackendExecute", what));
        };
        plan.run(&self.library, runner, tensors, workspace)
    }

    /// Destroys the handle of a stream that is being destroyed.
    fn forget(&mut self, stream: *mut c_void) {
        self.runners.remove(&(stream as u64));
    }
}

/// Plans for a GPU that is not present, the fastest by cuDNN's estimate first. For each plan the
/// addresses of a call are put together, but nothing runs. `device` holds the GPU's properties, in
/// the JSON of `CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION` (cuDNN 9.8).
///
/// # Errors
/// If cuDNN is missing, or takes neither the device nor the graph.
pub fn plans_without_gpu(device: &str, graph: &Graph) -> Result<Vec<FusedPlan>, GpuError> {
    let library = Library::open()?;
    let described = Descriptor::new(&library, Kind::DeviceProperties)?;
    let described = described.text(Name::DeviceJson, device)?.finalised()?;
    let made = plans(&library, Target::Described(&described), graph, false)?;
    for plan in &made {
        plan.rehearse(&library)?;
    }
    Ok(made.into_iter().map(|plan| plan.fused).collect())
}

/// cuDNN's version.
///
/// # Errors
/// If it is missing, too old, or lacks a library it needs.
pub fn version() -> Result<String, GpuError> {
    Ok(format!("{:?}", Library::open()?))
}
