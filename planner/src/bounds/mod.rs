//! Lower bounds on time, each admissible: none exceeds the time of any configuration it speaks for.
//!
//! From cheap to dear: [`closed`] knows degrees and loads, [`listed`] the listed placements of several
//! chunks a device, [`cuts`] every cut of one chunk a device. All see the bubble, the transfers between
//! stages, the communication of parameter state ([`states`]) and the recomputation that memory makes
//! necessary ([`trade`]). [`work`] holds what they are computed from.

pub mod closed;
pub mod cuts;
pub mod listed;
pub mod states;
pub mod trade;
pub mod work;
