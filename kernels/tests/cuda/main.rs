//! The CUDA sources against the reference kernels, with no GPU: compiled as C++ and run by a machine of one thread
//! (`machine.h`), at small shapes of every kind, in f32 and bf16. That the sources compile for GPUs is checked by
//! `cuda_compiles`; how fast they are, only a GPU tells.

mod machine;
mod operations;
