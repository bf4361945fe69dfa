//! Processes, told apart from their successors.
