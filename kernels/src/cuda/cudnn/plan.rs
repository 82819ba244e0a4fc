//! Plans: a graph, an engine that takes it, and what it needs to run.

use super::descriptor::{Descriptor, Kind, Name, Of};
use super::library::{Handle, Library};
use super::lower::{Lowered, number};
use crate::cuda::GpuError;
use crate::cuda::fused::{Constant, FusedPlan, Graph, Id, Place, Role};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// `CUDNN_HEUR_MODE_A`: cuDNN's own performance heuristic.
const MODE_A: c_int = 3;

/// `CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC`
const NONDETERMINISTIC: c_int = 4;

/// Alignment of scratch tensors in a workspace, in bytes.
const ALIGNMENT: usize = 256;

/// The GPU that plans are made for.
#[derive(Clone, Copy)]
pub(super) enum Target<'a> {
    /// A GPU that is present.
    Handle(&'a Handle),
    /// A GPU that is only described.
    Described(&'a Arc<Descriptor>),
}

/// A tensor's number, and the source of its value.
#[derive(Debug)]
enum Given {
    Memory(Role),
    /// Offset of a scratch tensor in the workspace.
    Scratch(usize),
    Constant(Constant),
}

/// An execution plan.
#[derive(Debug)]
pub(super) struct Plan {
    descriptor: Arc<Descriptor>,
    given: Vec<(i64, Given)>,
    /// Offset of cuDNN's own part of the workspace.
    own: usize,
    pub(super) fused: FusedPlan,
}

/// Plans for a graph, the fastest by cuDNN's estimate first. If `repeatable`, only those that cuDNN
/// does not declare nondeterministic. Empty, or an error, if no engine takes the graph.
pub(super) fn plans(
    library: &Arc<Library>,
    target: Target,
    graph: &Graph,
    repeatable: bool,
) -> Result<Vec<Plan>, GpuError> {
    let lowered = Lowered::new(library, graph)?;
    let operations: Vec<&Arc<Descriptor>> = lowered.operations.iter().collect();
    let mut whole = Descriptor::new(library, Kind::OperationGraph)?;
    if let Target::Handle(handle) = target {
        whole = whole.pointers(Name::GraphHandle, Of::Handle, &[handle.raw])?;
    }
    let whole = whole.named(Name::GraphOperations, &operations)?.finalised()?;
    let mut asked = Descriptor::new(library, Kind::EngineHeuristics)?
        .named(Name::HeuristicsGraph, &[&whole])?
        .value(Name::HeuristicsMode, Of::HeuristicMode, MODE_A)?;
    if let Target::Described(device) = target {
        asked = asked.named(Name::HeuristicsDevice, &[device])?;
    }
    let configs = asked.finalised()?.filled(Name::HeuristicsResults, Kind::EngineConfig)?;
    let (mut plans, mut refused) = (Vec::new(), None);
    for config in &configs {
        match plan(library, target, graph, config, repeatable) {
            Ok(plan) => plans.extend(plan),
            Err(error) => refused = Some(error),
        }
    }
    match refused {
        Some(error) if plans.is_empty() => Err(error),
        _ => Ok(plans),
    }
}

fn plan(
    library: &Arc<Library>,
    target: Target,
    graph: &Graph,
    config: &Arc<Descriptor>,
    repeatable: bool,
) -> Result<Option<Plan>, GpuError> {
    let engine = config.filled(Name::ConfigEngine, Kind::Engine)?;
    let (mut index, mut varies) = (-1, false);
    for engine in &engine {
        index = engine.number(Name::EngineIndex)?;
        let notes = engine.values(Name::EngineNumericalNotes, Of::NumericalNote)?;
        varies |= notes.contains(&NONDETERMINISTIC);
    }
    if repeatable && varies {
        return Ok(None);
    }
    let made = Descriptor::new(library, Kind::ExecutionPlan)?;
    let made = match target {
        Target::Handle(handle) => made.pointers(Name::PlanHandle, Of::Handle, &[handle.raw])?,
        Target::Described(device) => made.named(Name::PlanDevice, &[device])?,
    };
    let descriptor = made.named(Name::PlanConfig, &[config])?.finalised()?;
    let bytes = usize::try_from(descriptor.number(Name::PlanWorkspace)?).unwrap_or(usize::MAX);
    let (given, own) = given(graph);
    let fused =
        FusedPlan { name: format!("engine {index}"), workspace_bytes: own.saturating_add(bytes) };
    Ok(Some(Plan { descriptor, given, own, fused }))
}

/// The source of each non-virtual tensor's value, and the bytes of scratch in the workspace.
fn given(graph: &Graph) -> (Vec<(i64, Given)>, usize) {
    let (mut given, mut used) = (Vec::new(), 0);
    for (at, tensor) in graph.tensors.iter().enumerate() {
        let what = match tensor.place {
            Place::Virtual => continue,
            Place::Constant(constant) => Given::Constant(constant),
            Place::Memory(role) if role.is_scratch() => {
                let start = used;
                used += (tensor.elements() * tensor.kind.bytes()).next_multiple_of(ALIGNMENT);
                Given::Scratch(start)
            }
            Place::Memory(role) => Given::Memory(role),
        };
        given.push((number(Id(at), tensor), what));
    }
    (given, used)
}

impl Plan {
    /// Queues the plan. `tensors` are addresses by role; `workspace` has as many bytes as
    /// requested.
    pub(super) fn run(
        &self,
        library: &Arc<Library>,
        handle: &Handle,
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<(), GpuError> {
        // Constants are passed by host address, which stays valid during the call.
        let bits: Vec<u32> = self.given.iter().map(|(_, given)| given.bits()).collect();
        let pack = self.pack(library, &bits, tensors, workspace)?;
        // SAFETY: all three are live, and the pack holds addresses of live memory of the sizes in
        // the graph.
        let status = unsafe {
            (library.functions.cudnnBackendExecute)(handle.raw, self.descriptor.raw, pack.raw)
        };
        library.check("cudnnBackendExecute", status)
    }

    /// Puts a call together without running it.
    pub(super) fn rehearse(&self, library: &Arc<Library>) -> Result<(), GpuError> {
        let bits: Vec<u32> = self.given.iter().map(|(_, given)| given.bits()).collect();
        let roles = self.given.iter().filter_map(|(_, given)| match given {
            Given::Memory(role) => Some((*role, 1 << 20)),
            _ => None,
        });
        self.pack(library, &bits, &roles.collect::<Vec<_>>(), 1 << 30).map(|_| ())
    }

    fn pack(
        &self,
        library: &Arc<Library>,
        bits: &[u32],
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<Arc<Descriptor>, GpuError> {
        let (mut ids, mut pointers) = (Vec::new(), Vec::<*mut c_void>::new());
        for ((id, given), bits) in self.given.iter().zip(bits) {
            ids.push(*id);
            pointers.push(match given {
                Given::Constant(_) => std::ptr::from_ref(bits).cast_mut().cast(),
                Given::Scratch(start) => (workspace + *start as u64) as *mut c_void,
                Given::Memory(role) => address(tensors, *role)? as *mut c_void,
            });
        }
        let own = (workspace + self.own as u64) as *mut c_void;
        Descriptor::new(library, Kind::VariantPack)?
            .numbers(Name::PackIds, &ids)?
            .pointers(Name::PackPointers, Of::Pointer, &pointers)?
            .pointers(Name::PackWorkspace, Of::Pointer, &[own])?
            .finalised()
    }
}

impl Given {
    fn bits(&self) -> u32 {
        match *self {
            Self::Constant(Constant::F32(x)) => x.to_bits(),
            Self::Constant(Constant::I32(x)) => u32::from_ne_bytes(x.to_ne_bytes()),
            Self::Memory(_) | Self::Scratch(_) => 0,
        }
    }
}

fn address(tensors: &[(Role, u64)], role: Role) -> Result<u64, GpuError> {
    let found = tensors.iter().find(|(given, _)| *given == role);
    found.map(|(_, address)| *address).ok_or_else(|| GpuError::Call {
        call: "cudnnBackendExecute",
        what: format!("no memory is given for {role:?}"),
    })
}
