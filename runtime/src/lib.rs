//! What a generated trainer calls.

pub mod checkpoint;
pub mod comm;
pub mod data;
mod error;
mod executor;
mod groups;
pub mod layers;
pub mod params;
pub mod program;
mod rank;
mod reduce;
mod scalar;
mod schedule;
mod stage;

pub use error::Error;
pub use executor::{Outcome, Ran};
pub use groups::Groups;
pub use kernels;
pub use models;
pub use rank::{Gradients, Optimizer, Rank};
pub use reduce::Reduction;
pub use scalar::Scalar;
pub use schedule::{LrSchedule, Shape};
