//! Admissible lower bounds on time: no configuration that a bound covers is faster.
//!
//! From cheap to expensive: [`closed`] uses degrees and total load, [`candidates`] the candidate
//! partitions with several chunks per pipeline rank, [`cuts`] every partition with one chunk. All
//! of them include the bubble, the transfers between stages, the communication of parameter state
//! ([`states`]) and the recomputation that memory makes necessary ([`recompute_knapsack`]).
//! Their inputs are a [`pipeline_spec`] and a [`workload`].

pub mod candidates;
pub mod closed;
pub mod cuts;
pub mod pipeline_spec;
pub mod recompute_knapsack;
mod stage_view;
pub mod state_overheads;
pub mod states;
pub mod whole_layers;
pub mod workload;
