//! Further programs and libraries that use RDMA verbs, as the distribution has them, over a segment.

mod pyverbs;
mod qperf;
mod ucx;
