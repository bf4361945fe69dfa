//! What one end of a measurement does. Each transport has two functions or types: the end that times, and the end that
//! echoes, drains or fills.

pub mod bare;
pub mod doorbell;
pub mod ends;
pub mod locks;
pub mod pingpong;
pub mod posix;
pub mod shared_block;
pub mod transfer;

use serde::{Deserialize, Serialize};

/// What the timing end prints, as one JSON line.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Timing {
    /// Median, in nanoseconds one way or gigabytes a second.
    pub median: f64,
    /// First quartile.
    pub low: f64,
    /// Third quartile.
    pub high: f64,
    /// CPU time of this process over wall time, 0 to 1 for one thread.
    pub cpu: f64,
    /// The time in which nobody copied, where that was measured.
    #[serde(default)]
    pub handing: Option<Handing>,
}

/// What it cost to hand a block there and back, again and again.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Handing {
    /// The part of all time in which neither side copied.
    pub share: f64,
    /// The median of what it took for one block, there and back, in nanoseconds.
    pub median: f64,
    /// The longest.
    pub longest: f64,
}

impl Timing {
    /// Sums up samples.
    pub fn of(mut samples: Vec<f64>, cpu: f64) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |part: f64| {
            samples.get(((samples.len() as f64 - 1.0) * part) as usize).copied().unwrap_or(f64::NAN)
        };
        Self { median: at(0.5), low: at(0.25), high: at(0.75), cpu, handing: None }
    }
}

/// CPU seconds that this process has used.
pub fn cpu_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// Keeps this thread on one CPU, so that two busy ends do not share one. A wish: a guest may have one CPU only.
pub fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}
