//! The library of a trainer, generated or written by hand: one training run, from the command line
//! to the files it writes.
//!
//! ```text
//! trainer::main(&stages)           command line, output files, the loop over steps
//!   launch                         who started this process; Ctrl-C and SIGTERM
//!   Rank                           one rank's weights and optimizer state; one step of them
//!     step                         executes the rank's list of passes
//!       Executor                   runs passes, transfers activations between stages
//!         Stage                    the trainer's code: `layers`, which call `ops`
//!       Reducer                    sums gradients over data-parallel replicas, in buckets
//!       VocabCollectives           collectives of a vocabulary split over the pipeline
//!       GraphReplay                records a step as a CUDA graph and replays it
//!     state                        parameters, pooled buffers, checkpoints
//!   report                         rank report, trace, resident memory
//! layers                           typed tensors and layers: a wrong split does not compile
//! ops                              the same operations on buffers without types
//! Device                           where tensors lie and what computes on them: CPU or GPU
//! Communicator                     ranks as threads, as processes (TCP, MPI), or on GPUs (NCCL)
//! ```
//!
//! # A trainer
//!
//! 1. [`stages::Stages::spec`] returns a [`TrainerSpec`]: the mesh, sizes, and the passes of each
//!    pipeline rank ([`PassTable`], or a schedule of [`models::schedule`]).
//! 2. [`stages::Stages::declare`] returns stage `index` as a [`stages::Stage`]. It declares the
//!    stage's parameters in an [`state::params::Inventory`], in model order.
//! 3. [`stages::Stage::forward`] computes on [`layers`] and returns what it keeps for the backward
//!    pass, a struct of the macro [`kept!`]. [`stages::Stage::backward`] gets it back
//!    ([`stages::own`]), and leaves gradients of weights with [`ops::Gradients::add`].
//! 4. Layers that repeat implement [`stages::Layer`]; [`stages::forward_all`] and
//!    [`stages::backward_all`] run them.
//! 5. `main` calls [`trainer::main`] with an element type: `f32`, `f64` or [`bf16`].
//!
//! In `runtime/examples`, `tensor_parallel_mlp.rs` and `two_stage_pipeline.rs` do this by hand.
//!
//! The library knows no model and reads no plan. It takes no decision that belongs in a plan.

pub mod comm;
mod context_parallel;
pub mod data;
pub mod device;
mod device_error;
mod error;
mod groups;
mod launch;
pub mod layers;
pub mod ops;
mod passes;
mod rank;
mod report;
mod scalar;
mod spec;
pub mod stages;
pub mod state;
mod step;
mod step_time;
pub mod trainer;

pub use context_parallel::{ContextParallel, Exchange};
pub use device::{Device, Gpu, Host};
pub use device_error::DeviceError;
pub use error::Error;
pub use groups::Groups;
pub use kernels;
pub use kernels::cuda::bf16;
pub use launch::interrupt::Interrupt;
pub use models;
pub use passes::{PassTable, Passes};
pub use rank::{Optimizer, Rank, StateBytes, StepResult};
pub use report::{CallTraffic, MeshPosition, RankReport, TensorPiece, Trace};
pub use scalar::{Number, Scalar};
pub use spec::{HostMemory, Prediction, Reduction, TrainerSpec};
pub use state::buffer::{Buffer, Pool, Pools, WideBuffer};
pub use state::shards::Zero;
pub use step::executor::{Outcome, PassTiming};
pub use step::graph_replay::{CudaGraphs, Replays};
pub use step::reduce::ReductionSpan;
pub use step_time::StepTime;
pub use trainer::lr_schedule::{LrSchedule, LrShape};
