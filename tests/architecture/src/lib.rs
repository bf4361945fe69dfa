//! Tests of how the tree is made: who depends on whom, and where crates lie (docs/architecture.md).
//!
//! | module | what it tests |
//! |---|---|
//! | [`dependencies`] | the crates and what they use, against docs/pictures/architecture.floors |
//!
//! Each check is a function that takes what it checks, and returns a line for each fault. So it has two kinds of tests: one with the
//! tree, and one with something made up in which it must find the fault.
#![cfg(test)]

mod dependencies;
mod floors;
mod packages;
mod tree;

/// Fails with the faults, one on each line.
fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}
