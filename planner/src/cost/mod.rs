//! Costs of single parts of a step: computation, communication and memory.

pub mod attention;
mod chunks;
pub mod collective;
pub mod experts;
pub mod gemm;
pub mod layer;
pub mod memory_bound;
mod pairs;
pub mod parts;
pub mod state;
pub mod vocabulary;
