//! Orders of passes made for one plan's own times, after the search.

pub mod choice;
pub mod ilp;
pub mod vocab;
