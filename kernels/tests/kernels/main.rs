//! Tests of every operation: fast against reference at random shapes, backward against finite
//! differences, shards against the whole, and equal bits for any number of threads.

mod attention;
mod cross_entropy;
mod gemm;
mod implementations;
mod memory_bound;
mod optimizer;
mod philox;
mod support;
mod threads;
