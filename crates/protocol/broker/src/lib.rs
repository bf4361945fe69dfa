//! What the daemon decides: who may attach, listen and connect, and who has which bytes of a segment.
//!
//! It is a state machine without system calls, descriptors and clocks. Requests go in, and [`broker::Effect`]s come out, which the
//! daemon performs. So it can be tested and fuzzed as it is.
//!
//! | part | what it is |
//! |---|---|
//! | [`broker`], [`caller`], `packets`, `session`, `owners`, `holds`, `endings` | the state machine of the attach protocol |
//! | [`effects`] | what it is told, and what it wants to be done |
//! | [`programs`], [`relayed`] | programs in VMs, for which the VMs' daemons speak; rings that the daemon relays |
//! | [`sockets`], [`allowance`] | TCP connections that may leave TCP, and how often programs may report them |
//! | [`objects`], [`service`] | the things that endpoints make, such as channels and blocks, each kind in its own module; and how they are served |
//! | [`books`], [`record`], [`arena`], [`vectors`], `number_set`, `account`, `numbers` | the state, and the changes that lead to it |
//! | [`lines`], [`trust`], [`text`] | these changes as lines of a journal, whether a journal has all of them, and names in it |
//! | [`declared`], [`limits`], [`memory`] | what an administrator declares, and the memory of segments |
//! | [`recipients`] | who was given the memory of a segment |

pub mod account;
pub mod allowance;
pub mod arena;
pub mod books;
pub mod broker;
pub mod caller;
pub mod declared;
pub mod effects;
mod endings;
mod hold;
mod holds;
pub mod limits;
pub mod lines;
pub mod memory;
mod number_set;
mod numbers;
pub mod objects;
mod owners;
mod packets;
pub mod process;
pub mod programs;
pub mod recipients;
pub mod record;
pub mod relayed;
pub mod reply;
pub mod service;
mod session;
pub mod sockets;
pub mod text;
mod told;
pub mod trust;
pub mod vectors;
