//! The `ginnel` command with a real daemon. Each test has a daemon of its own.

mod cp;
mod farm;
mod liars;
mod measure;
mod operate;
mod readers;
mod run;
mod unplug;
mod volume;

kit::test_that_skips_are_seen!();
