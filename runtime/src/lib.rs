//! What a generated trainer calls: communicators, parallel layers, the pass executor, optimizer,
//! data and metrics.
//!
//! ```text
//! trainer::main(&program)          flags, files, steps
//!   Rank                           one rank's parameters; a step: gradients, clip, update
//!     Executor                     the rank's list of passes, transfers between stages
//!       Stage > Block > Linear ..  serial layers; what tensor-parallel ranks share in `layers`
//!     Reducer                      gradients of replicas, in buckets
//!   Device                         where tensors lie, and who computes on them
//!   Communicator                   one trait; ranks as threads, or one rank
//! ```
//!
//! A [`program::Program`] holds everything that was planned. Nothing here reads a plan or decides
//! anything that a plan should have decided.

mod ahead;
mod buffer;
pub mod calibration;
pub mod checkpoint;
pub mod comm;
pub mod data;
pub mod device;
mod error;
mod executor;
mod groups;
mod interrupt;
mod lanes;
pub mod launched;
pub mod layers;
pub mod params;
mod rank;
mod reduce;
mod report;
mod resident;
mod scalar;
mod schedule;
mod stage;
mod steady;
mod trace;
pub mod trainer;

pub use buffer::{Buffer, Pool, Pools, WideBuffer};
pub use device::{Device, Gpu, Host};
pub use error::Error;
pub use executor::{Outcome, Ran};
pub use groups::Groups;
pub use interrupt::Interrupt;
pub use kernels;
pub use kernels::cuda::bf16;
pub use models;
pub use models::program;
pub use rank::{Gradients, Optimizer, Rank};
pub use reduce::{Reduction, Span};
pub use report::{At, Piece, RankReport, Sent};
pub use scalar::{Number, Scalar};
pub use schedule::{LrSchedule, Shape};
pub use steady::Replays;
