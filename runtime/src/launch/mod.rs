//! How a process starts and stops: the launcher that started it, and the signals that end it.

pub mod interrupt;
pub mod launcher;
