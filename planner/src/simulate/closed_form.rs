//! Iteration times without simulation: bounds for the search and checks for the simulator.
