//! The two measurements, on the client and on the server.

use super::parameters::{Parameters, Test};
use super::transport::Transport;
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::time::{Duration, Instant};

/// The largest share of a sample that may be clock overhead. If a round trip is not much longer than reading the clock,
/// several round trips are timed together.
const CLOCK_SHARE: f64 = 0.05;
const MAX_BATCH: u64 = 1024;
/// Number of round trips before the first that counts.
const WARM_UP: u64 = 32;
/// A sender reads the clock at least after this many bytes.
const CLOCK_BYTES: usize = 256 << 10;

/// The result of one measurement.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Outcome {
    Latency(Latency),
    Bandwidth(Bandwidth),
}

#[derive(Debug, Serialize)]
pub struct Latency {
    /// Half of the median round trip.
    pub one_way_ns: f64,
    pub round_trips: u64,
    /// Number of round trips that were timed together; the percentiles are of their means.
    pub batch: u64,
    pub rtt_ns: Percentiles,
}

#[derive(Debug, Serialize)]
pub struct Percentiles {
    pub min: f64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

#[derive(Debug, Serialize)]
pub struct Bandwidth {
    pub bytes: u64,
    /// Number of sends, each of the given size.
    pub operations: u64,
    pub seconds: f64,
    pub bytes_per_s: f64,
    pub operations_per_s: f64,
}

/// Returns the time that reading the clock takes, in nanoseconds.
pub fn clock_ns() -> f64 {
    const LOOKS: u32 = 1000;
    let begun = Instant::now();
    for _ in 0..LOOKS {
        std::hint::black_box(Instant::now());
    }
    begun.elapsed().as_nanos() as f64 / f64::from(LOOKS)
}

/// Executes the client's part of a measurement.
pub fn ask(transport: &mut impl Transport, parameters: &Parameters) -> Result<Outcome> {
    transport.prepare(parameters)?;
    transport.send(&parameters.to_bytes())?;
    let mut answer = [0; Parameters::LEN];
    ensure!(
        transport.receive(&mut answer)?,
        "the server refuses the request; do both sides have the same version?"
    );
    match parameters.test {
        Test::Latency => Ok(Outcome::Latency(time_round_trips(transport, parameters)?)),
        Test::Bandwidth if parameters.reverse => {
            let begun = Instant::now();
            let bytes = drain(transport, parameters)?;
            Ok(Outcome::Bandwidth(bandwidth(bytes, parameters, begun.elapsed())))
        }
        Test::Bandwidth => {
            let begun = Instant::now();
            fill(transport, parameters)?;
            let mut count = [0; Parameters::LEN];
            ensure!(transport.receive(&mut count)?, "the server ended without a count");
            let bytes = u64::from_le_bytes(*count.first_chunk().context("a count")?);
            Ok(Outcome::Bandwidth(bandwidth(bytes, parameters, begun.elapsed())))
        }
    }
}

/// Executes the server's part of a measurement.
pub fn answer(transport: &mut impl Transport) -> Result<()> {
    let mut bytes = [0; Parameters::LEN];
    if !transport.receive(&mut bytes)? {
        return Ok(());
    }
    let parameters = Parameters::from_bytes(bytes)?;
    transport.prepare(&parameters)?;
    transport.send(&bytes)?;
    match parameters.test {
        Test::Latency => {
            let mut buffer = vec![0; parameters.size];
            while transport.receive(&mut buffer)? {
                transport.send(&buffer)?;
            }
            Ok(())
        }
        Test::Bandwidth if parameters.reverse => fill(transport, &parameters),
        Test::Bandwidth => {
            let mut count = [0; Parameters::LEN];
            count[..8].copy_from_slice(&drain(transport, &parameters)?.to_le_bytes());
            transport.send(&count)
        }
    }
}

fn time_round_trips(transport: &mut impl Transport, parameters: &Parameters) -> Result<Latency> {
    let message = vec![0x5a; parameters.size];
    let mut buffer = vec![0; parameters.size];
    let mut trip = || -> Result<()> {
        transport.send(&message)?;
        ensure!(transport.receive(&mut buffer)?, "the server ended in the middle of a measurement");
        Ok(())
    };
    for _ in 0..WARM_UP {
        trip()?;
    }
    // The first round trips were slow, because the other side was still getting ready; they would make the batch too
    // small.
    let begun = Instant::now();
    for _ in 0..WARM_UP {
        trip()?;
    }
    let estimate = begun.elapsed().as_nanos() as f64 / WARM_UP as f64;
    let batch = ((clock_ns() / CLOCK_SHARE / estimate).ceil() as u64).clamp(1, MAX_BATCH);
    let mut histogram = Histogram::<u64>::new(3).context("making a histogram")?;
    let begun = Instant::now();
    let mut last = begun;
    while last - begun < parameters.duration {
        for _ in 0..batch {
            trip()?;
        }
        let now = Instant::now();
        // In tenths of nanoseconds, because a mean has more digits than the clock.
        histogram
            .record((now - last).as_nanos() as u64 * 10 / batch)
            .context("a time that is too long for the histogram")?;
        last = now;
    }
    transport.finish()?;
    let round_trips = histogram.len() * batch;
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 10.0;
    let rtt_ns = Percentiles {
        min: histogram.min() as f64 / 10.0,
        mean: (last - begun).as_nanos() as f64 / round_trips as f64,
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: histogram.max() as f64 / 10.0,
    };
    Ok(Latency { one_way_ns: rtt_ns.p50 / 2.0, round_trips, batch, rtt_ns })
}

/// Sends for the duration of the measurement.
fn fill(transport: &mut impl Transport, parameters: &Parameters) -> Result<()> {
    let bytes = vec![0x5a; parameters.size];
    let sends_per_look = (CLOCK_BYTES / parameters.size).clamp(1, 1024);
    let begun = Instant::now();
    while begun.elapsed() < parameters.duration {
        for _ in 0..sends_per_look {
            if parameters.in_place {
                transport.send_in_place(parameters.size)?
            } else {
                transport.send(&bytes)?
            }
        }
    }
    transport.finish()
}

/// Receives until the other side has finished. Returns the number of bytes.
fn drain(transport: &mut impl Transport, parameters: &Parameters) -> Result<u64> {
    let mut buffer = vec![0; parameters.size];
    let mut bytes = 0;
    loop {
        let n = if parameters.in_place {
            transport.receive_in_place()?
        } else {
            transport.receive_some(&mut buffer)?
        };
        if n == 0 {
            return Ok(bytes);
        }
        bytes += n as u64;
    }
}

fn bandwidth(bytes: u64, parameters: &Parameters, time: Duration) -> Bandwidth {
    let seconds = time.as_secs_f64().max(1e-9);
    let operations = bytes / parameters.size as u64;
    Bandwidth {
        bytes,
        operations,
        seconds,
        bytes_per_s: bytes as f64 / seconds,
        operations_per_s: operations as f64 / seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    /// Runs both parts over a real socket.
    fn run(parameters: Parameters) -> Outcome {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || answer(&mut listener.accept().unwrap().0));
        let outcome = ask(&mut TcpStream::connect(address).unwrap(), &parameters).unwrap();
        server.join().unwrap().unwrap();
        outcome
    }

    const PARAMETERS: Parameters = Parameters {
        test: Test::Latency,
        in_place: false,
        reverse: false,
        mode: None,
        size: 100,
        duration: Duration::from_millis(20),
    };

    #[test]
    fn round_trips_are_counted_and_ordered() {
        let Outcome::Latency(latency) = run(PARAMETERS) else { panic!("latency was ordered") };
        let p = &latency.rtt_ns;
        assert!(latency.round_trips > 0 && latency.round_trips.is_multiple_of(latency.batch));
        assert!(p.min > 0.0 && p.min <= p.p50 && p.p50 <= p.p99 && p.p99 <= p.max, "{latency:?}");
        assert!((latency.one_way_ns - p.p50 / 2.0).abs() < 1e-9);
        let all = latency.round_trips as f64 * p.mean;
        assert!(p.min <= p.mean && p.mean <= p.max && all >= 20e6, "{latency:?}");
    }

    #[test]
    fn every_byte_counts_in_both_directions() {
        for reverse in [false, true] {
            let parameters = Parameters { test: Test::Bandwidth, size: 10_000, reverse, ..PARAMETERS };
            let Outcome::Bandwidth(bandwidth) = run(parameters) else { panic!("bandwidth was ordered") };
            assert!(
                bandwidth.operations > 0 && bandwidth.bytes == bandwidth.operations * 10_000,
                "{bandwidth:?}"
            );
        }
    }
}
