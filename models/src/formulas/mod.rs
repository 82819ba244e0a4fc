//! The papers' formulas as plain functions: no state, no traits, one file a subject.
//!
//! Names end in their unit (`_s`, `_bytes`, `_flops`, `_elements`). A count that only enters
//! arithmetic is an `f64`, so that a line reads like the equation it states; a count that indexes or
//! is searched over is an integer. Volumes in elements become bytes when multiplied by the width of
//! the data type. The symbols are those of the [crate's table](crate).
//!
//! Sources, as the docs below cite them:
//!
//! | name | paper |
//! |---|---|
//! | SC'21 | Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (PTD-P) |
//! | Vocabulary Parallelism | Yeung et al., *Balancing Pipeline Parallelism with Vocabulary Parallelism* |
//! | AMPipe | *AMPipe: Accelerating MoE Model Training with Intra-Block Pipelining* |
//! | TP write-up | Weitkamp, *Tensor Parallelism* |
//! | Overview | *Overview of Parallelism* |
//! | Korthikanti | *Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198 |
//! | ZeRO | Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* |
//!
//! Where a paper's own formula is wrong or loose, the doc of the function says what differs, and the
//! tests `papers_*.rs` hold both numbers.

pub mod activation;
pub mod ampipe;
pub mod attention;
pub mod communication;
pub mod goodput;
pub mod gpt;
pub mod pipeline;
pub mod recompute;
pub mod state;
pub mod vocabulary;
