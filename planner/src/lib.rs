//! Costs, the schedule simulator, the search and its ILPs, and explanations.

pub mod case;
pub mod cost;
pub mod placement;
pub mod restrict;
pub mod search;
pub mod simulate;
pub mod space;
