//! RDMA verbs over shared memory.
//!
//! A segment is an RDMA device for those who share it. What the verbs specification gives to an adapter, the CPU that posts a request does
//! itself: it copies straight between its program's memory and the peer's registered pages, which lie in the segment, and writes the peer's
//! completion. No daemon, kernel or third party takes part. `ginnel_layout::verbs` says what lies in the segment.
//!
//! ```text
//! device        a segment as an adapter: tables, arenas, peers
//! queue_pair    states, requests that wait, flushing
//! completion_queue
//! notifier      a thread that attends to completion queues while the program sleeps
//! remote        the executor: what a poster does with its peer's queue pair
//! receive       the receive queue, by its owner
//! shared_receive_queue   one for several queue pairs
//! peer          a peer's tables and regions, as a poster sees them
//! regions       own regions
//! shadow        those whose memory cannot lie in the segment
//! shared_copy   long copies, in which a peer that polls helps
//! work          requests and completions
//! counters      what queue pairs have executed and wait for
//! inspect       what stands in the tables, for people
//! cm            the connection manager
//! ```
//!
//! # Whom it protects from whom
//!
//! Keys, bounds and rights are checked by the poster, which catches mistakes. A hostile member of the segment can read and change all registered
//! pages, and everything else in the segment, whatever the keys say: the wall is the segment. It cannot make this process access anything
//! else: what it writes is loaded once, checked against what lies in its own arenas, and used.

pub mod cm;
pub mod completion_queue;
mod counters;
pub mod device;
pub mod inspect;
pub mod lock;
mod notifier;
pub mod peer;
pub mod program;
pub mod queue_pair;
pub mod receive;
pub mod regions;
pub mod remote;
pub mod runs;
pub mod shadow;
pub mod shared_copy;
pub mod shared_receive_queue;
pub mod work;
