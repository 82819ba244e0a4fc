//! The read-only plan checker.
