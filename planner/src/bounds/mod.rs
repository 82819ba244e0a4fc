//! Lower bounds on time, each admissible: none exceeds the time of any configuration it speaks for.
//!
//! From cheap to dear: [`closed`] knows degrees and loads, [`candidates`] the listed placements of several
//! chunks a device, [`cuts`] every cut of one chunk a device. All see the bubble, the transfers between
//! stages, the communication of parameter state ([`states`]) and the recomputation that memory makes
//! necessary ([`recompute_knapsack`]). [`workload`] holds what they are computed from.

pub mod candidates;
pub mod closed;
pub mod cuts;
pub mod recompute_knapsack;
pub mod states;
pub mod workload;
