//! memory_bound
