//! Measures Ginnel beside its alternatives, in the same run on the same machine.
//!
//! - `bench-peer` is one end of one measurement: it runs on the host and in guests, and prints one JSON line.
//! - `bench-channel` sets up the daemon and the VMs, runs the peers in pairs, and writes the table and
//!   `target/bench/channel.json`.
//! - `bench-volume` starts disk servers and a VM, and drives them with the poll-mode client and with fio.
//! - `bench-farm-peer` and `bench-farm` do the same for the farm.
//! - `bench-ready` starts servers that have many channels.
//! - `bench-sockets` runs programs of the distribution over TCP and over the sockets preload library.
//! - `bench-beside-tcp` runs programs that must not be slower with that library than without it.
//! - `bench-verbs` runs RDMA programs over a segment.
//! - `bench-mpi` runs MPI programs over a segment.
//! - `bench-cache` sends the same requests to a cache and to memcached.

pub mod allocate;
pub mod beside_tcp;
pub mod cache;
pub mod farm;
pub mod guest_disks;
pub mod guest_nvme;
pub mod interrupts;
pub mod joining;
pub mod measure;
pub mod mpi;
pub mod nvme_volume;
pub mod own_driver;
pub mod readiness;
pub mod relayed;
pub mod report;
pub mod restarting;
pub mod sockets;
pub mod stalls;
pub mod verbs;
pub mod volume;
pub mod world;
