//! RDMA verbs over shared memory.
//!
//! A segment with `verbs = true` is an RDMA device for its members. There is no adapter hardware: the CPU that posts a request executes
//! it. It copies directly between the memory of its program and the peer's registered pages, which lie in the segment, and writes the
//! peer's completion. No daemon, kernel or third process takes part. `ginnel_layout::verbs` defines what lies in the segment.
//!
//! ```text
//! device        a segment as an adapter: tables, arenas, links to peers
//! queue_pair    states of queue pairs, requests that wait, flushing
//! completion_queue
//! notifier      a thread that handles completion queues while the program sleeps
//! remote        the executor: how a poster works on the queue pair of its peer
//! receive       the receive queue, as its owner uses it
//! shared_receive_queue   one receive queue for several queue pairs
//! peer          a peer's tables and regions, as a poster sees them
//! regions       the memory regions of this endpoint
//! shadow        shadow regions, whose memory cannot lie in the segment
//! shared_copy   long copies, in which a peer that polls takes part
//! work          work requests and work completions
//! counters      what each queue pair has executed, and what it waits for
//! inspect       a summary of the tables for an administrator
//! cm            the connection manager
//! ```
//!
//! # Protection
//!
//! The poster checks keys, bounds and access rights, which catches mistakes. This does not protect against a hostile member: it can
//! read and change everything in the segment, including all registered pages, whatever the keys say. The trust boundary is the
//! segment. A hostile member cannot make this process access anything else: this crate loads each word that a peer can write once,
//! checks it against its own arenas, and uses only the checked value.

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
pub mod range_allocator;
pub mod receive;
pub mod regions;
pub mod remote;
pub mod shadow;
pub mod shared_copy;
pub mod shared_receive_queue;
pub mod work;
