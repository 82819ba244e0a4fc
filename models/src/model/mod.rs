//! Models to train: the spec, its readers and its parameter counts.

mod spec;

pub use spec::*;
