//! Runs a schedule against pass durations.
