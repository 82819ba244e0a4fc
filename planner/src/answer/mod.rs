//! Answers: plans, reports, explanations, comparisons, and checks of plans that were written.

pub mod changes;
pub mod compare;
pub mod contradictions;
pub mod explain;
pub mod explain_text;
pub mod recheck;
pub mod report;
pub mod text;
