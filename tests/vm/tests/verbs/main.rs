//! RDMA verbs between two VMs and the host: a segment that they share is their RDMA device, and the only one that they have.

mod programs;
mod stage;
mod survive;
