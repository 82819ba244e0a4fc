//! Answers: plans, reports, explanations, comparisons, and checks of existing plans.

pub mod changes;
pub mod compare;
pub mod contradictions;
pub mod explain;
pub mod explain_text;
pub mod recheck;
pub mod replan;
pub mod report;
pub mod shortage;
pub mod text;
pub mod unsearched;
pub mod verify;
