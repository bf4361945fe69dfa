//! What one end of a measurement does. Each transport has two functions or types: one for the end that measures time, and one
//! for the end that echoes, drains or fills.

pub mod bare;
pub mod doorbell;
pub mod ends;
pub mod locks;
pub mod pingpong;
pub mod posix;
pub mod shared_block;
pub mod transfer;

use serde::{Deserialize, Serialize};

/// The result that the timing end prints as one JSON line.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Timing {
    /// The median, in nanoseconds one way or gigabytes per second.
    pub median: f64,
    /// First quartile.
    pub low: f64,
    /// Third quartile.
    pub high: f64,
    /// CPU time of this process divided by wall time: 0 to 1 for one thread.
    pub cpu: f64,
    /// The time in which neither side copied, if that was measured.
    #[serde(default)]
    pub handing: Option<Handing>,
}

/// The cost of handing a block over and back, again and again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Handing {
    /// The part of the whole time in which neither side copied, from 0 to 1.
    pub share: f64,
    /// The median time of one block, over and back, in nanoseconds.
    pub median: f64,
    /// The longest time of one block, over and back, in nanoseconds.
    pub longest: f64,
}

impl Timing {
    /// Summarises samples.
    pub fn of(mut samples: Vec<f64>, cpu: f64) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |part: f64| {
            samples.get(((samples.len() as f64 - 1.0) * part) as usize).copied().unwrap_or(f64::NAN)
        };
        Self { median: at(0.5), low: at(0.25), high: at(0.75), cpu, handing: None }
    }
}

/// Returns the CPU time in seconds that this process has used.
pub fn cpu_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// Tries to keep this thread on one CPU, so that two busy ends do not share one. Does nothing if that fails, because a guest
/// may have only one CPU.
pub fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}
