//! The papers' formulas as plain functions that the cost model, the memory model and the runtime
//! call: no state, no traits, one file a subject.
//!
//! Names end in their unit (`_s`, `_bytes`, `_flops`, `_elements`). A count that only enters
//! arithmetic is an `f64`, so that a line reads like the equation it states; a count that indexes
//! or is searched over is an integer. The symbols are those of the [crate's table](crate).
//!
//! Sources, as the docs below cite them:
//!
//! - SC'21: Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
//!   Megatron-LM*, arXiv 2104.04473
//! - Korthikanti: *Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198
//! - ZeRO: Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter
//!   Models*, arXiv 1910.02054
//! - FlashAttention: Dao et al., arXiv 2205.14135
//! - Vocabulary Parallelism: Yeung et al., *Balancing Pipeline Parallelism with Vocabulary
//!   Parallelism*, arXiv 2411.05288
//! - AMPipe: *AMPipe: Accelerating MoE Model Training with Intra-Block Pipelining*
//! - Overview: *Overview of Parallelism*
//!
//! A formula that only a test would call belongs to that test: `formulas_are_called` finds those.
//! Closed forms that a paper prints and the planner does not use are in `models/tests/papers/`,
//! where they are compared with what the planner uses.

pub mod activation;
pub mod ampipe;
pub mod attention;
pub mod communication;
pub mod flops;
pub mod pairs;
pub mod state;
pub mod vocabulary;
