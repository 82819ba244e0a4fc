//! Decides how a model should be trained on a cluster.
//!
//! What turns into what, each room using only those before it:
//!
//! | room | turns |
//! |---|---|
//! | [`request`] | flags into a finished request: restrictions, space, conflicts |
//! | [`cost`] | one kernel, collective, layer or state into seconds and bytes |
//! | [`simulate`] | a schedule and the durations of its passes into a timeline |
//! | [`partition`] | columns of seconds and bytes into layers by stage, knowing no model |
//! | [`pricing`] | one pinned configuration into its iteration time and memory |
//! | [`bounds`] | a part of the space into a time that nothing in it undercuts |
//! | [`search`] | a task into the fastest configuration that fits, with its proof |
//! | [`order`] | a plan found into the order of passes that its own times would have |
//! | [`answer`] | what was found into plans, reports, explanations and checks |

pub mod answer;
pub mod bounds;
pub mod cost;
pub mod order;
pub mod partition;
pub mod pricing;
pub mod request;
pub mod search;
pub mod simulate;
