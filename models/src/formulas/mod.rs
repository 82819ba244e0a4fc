//! The papers' formulas as plain functions.
