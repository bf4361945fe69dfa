//! The command against a real daemon, each test with one of its own.

mod closing;
mod cp;
mod cpython;
mod daemons;
mod epoll;
mod exports;
mod farm;
mod farm_library;
mod full;
mod growth;
mod liars;
mod load;
mod measure;
mod operate;
mod passing;
mod programs;
mod readers;
mod returning;
mod run;
mod settling;
mod stage;
mod traps;
mod volume;
mod waking;
mod world;
