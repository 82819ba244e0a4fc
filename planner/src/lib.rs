//! Decides how a model should be trained on a cluster.
//!
//! What each module does. Each uses only those before it:
//!
//! | module | turns |
//! |---|---|
//! | [`until`] | a deadline and an interrupt into whether to answer now |
//! | [`request`] | flags into a finished request: restrictions, space, conflicts |
//! | [`cost`] | one kernel, collective, layer or state into seconds and bytes |
//! | [`simulate`] | a schedule and the durations of its passes into a timeline |
//! | [`partition`] | columns (possible contents of a stage, as seconds and bytes) into layers by stage; knows no model |
//! | [`pricing`] | one pinned configuration into its iteration time and memory |
//! | [`bounds`] | a part of the space into a time that nothing in it undercuts |
//! | [`search`] | a [`request::Task`] into the fastest configuration that fits, with its proof |
//! | [`order`] | a plan that was found into an order of passes made for its own times |
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
pub mod until;
