//! Costs, the schedule simulator, the search and its ILPs, and explanations.

pub mod bounds;
pub mod calibrate;
pub mod case;
pub mod changes;
pub mod compare;
pub mod contradictions;
pub mod cost;
pub mod explain;
pub mod explain_text;
pub mod flags;
pub mod ordered;
pub mod ordering;
pub mod placement;
pub mod report;
pub mod report_text;
pub mod repriced;
pub mod request;
pub mod request_conflicts;
pub mod restrict;
pub mod search;
pub mod simulate;
pub mod space;
pub mod timed;
pub mod validate;
