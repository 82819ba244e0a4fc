//! The library that a generated trainer calls: one training run of one program, from the command
//! line to the files it writes.
//!
//! ```text
//! trainer::main(&program)          command line, output files, the loop over steps
//!   launch                         who started this process; Ctrl-C and SIGTERM
//!   Rank                           one rank's weights and optimizer state; one step of them
//!     step                         executes the rank's list of passes
//!       Executor                   runs passes, transfers activations between stages
//!       Stage > Block > Linear ..  `layers`: serial code, and how each tensor is split
//!       Reducer                    sums gradients over data-parallel replicas, in buckets
//!       VocabCollectives           collectives of a vocabulary split over the pipeline
//!       GraphReplay                records a step as a CUDA graph and replays it
//!     state                        parameters, pooled buffers, checkpoints
//!   report                         rank report, trace, resident memory
//! Device                           where tensors lie and what computes on them: CPU or GPU
//! Communicator                     ranks as threads, as processes (TCP, MPI), or on GPUs (NCCL)
//! ```
//!
//! A [`program::Program`] holds everything that was planned. The runtime reads no plan and takes no
//! decision that belongs in a plan.

pub mod comm;
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

pub use device::{Device, Gpu, Host};
pub use error::Error;
pub use groups::Groups;
pub use kernels;
pub use kernels::cuda::bf16;
pub use launch::interrupt::Interrupt;
pub use models;
pub use passes::{PassTable, Passes, check_passes};
pub use rank::{Optimizer, Rank, StepResult};
pub use report::{CallTraffic, MeshPosition, RankReport, TensorPiece};
pub use scalar::{Number, Scalar};
pub use spec::{Prediction, TrainerSpec};
pub use state::buffer::{Buffer, Pool, Pools, WideBuffer};
pub use step::executor::{Outcome, PassTiming};
pub use step::graph_replay::Replays;
pub use step::reduce::{Reduction, ReductionSpan};
pub use step_time::StepTime;
pub use trainer::lr_schedule::{LrSchedule, LrShape};
