//! What a generated trainer calls.

pub mod comm;
