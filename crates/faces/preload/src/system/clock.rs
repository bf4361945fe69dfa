//! The clock by which this library measures patience.

/// Returns the time of CLOCK_MONOTONIC in microseconds.
pub fn now() -> u64 {
    ginnel_clock::monotonic().as_micros() as u64
}
