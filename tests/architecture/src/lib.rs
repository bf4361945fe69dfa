//! Tests of how the tree is made: who depends on whom, where crates lie, and what no source file contains
//! (docs/architecture.md).
//!
//! | module | what it tests |
//! |---|---|
//! | [`dependencies`] | the crates and what they use, against docs/pictures/architecture.floors |
//! | [`inside`] | what the files of a crate with floors of its own use, against the same list |
//! | [`circles`] | that files of some crates do not use each other in a circle, except those of the same list |
//! | [`msrv`] | that all dependencies compile with the oldest Rust that the workspace promises |
//! | [`sources`] | that there is one way to skip a test, and none to hide one or to borrow its modules |
//!
//! Each check is a function that takes what it checks, and returns a line for each fault. So it has two kinds of tests: one with the
//! tree, and one with something made up in which it must find the fault.
#![cfg(test)]

mod circles;
mod dependencies;
mod floors;
mod inside;
mod msrv;
mod packages;
mod sources;
mod tree;
mod uses;

/// Fails with the faults, one on each line.
fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}
