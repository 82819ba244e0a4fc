//! The plan's predictions against what ranks did: every rank's report of a run.

#[path = "rank_report/groups.rs"]
mod groups;
#[path = "rank_report/passes.rs"]
mod passes;
#[path = "rank_report/pipeline.rs"]
mod pipeline;
#[path = "rank_report/plans.rs"]
mod plans;
#[path = "rank_report/replicas.rs"]
mod replicas;
#[path = "rank_report/run.rs"]
mod run;
#[path = "rank_report/tensors.rs"]
mod tensors;
