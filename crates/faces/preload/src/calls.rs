//! The program's calls: what they do, in the order in which the kernel would do it.

pub mod descriptors;
pub mod exec;
pub mod poll;
pub mod receive;
pub mod send;
#[cfg(test)]
mod served_tests;
pub mod splice;
