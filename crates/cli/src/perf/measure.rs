//! The two measurements, on the client and on the server.

use super::line::Line;
use super::order::{Order, Test};
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
pub fn ask(line: &mut impl Line, order: &Order) -> Result<Outcome> {
    line.prepare(order)?;
    line.send(&order.to_bytes())?;
    let mut answer = [0; Order::LEN];
    ensure!(
        line.receive(&mut answer)?,
        "the server refuses the request; do both sides have the same version?"
    );
    match order.test {
        Test::Latency => Ok(Outcome::Latency(time_round_trips(line, order)?)),
        Test::Bandwidth if order.reverse => {
            let begun = Instant::now();
            let bytes = drain(line, order)?;
            Ok(Outcome::Bandwidth(bandwidth(bytes, order, begun.elapsed())))
        }
        Test::Bandwidth => {
            let begun = Instant::now();
            fill(line, order)?;
            let mut count = [0; Order::LEN];
            ensure!(line.receive(&mut count)?, "the server ended without a count");
            let bytes = u64::from_le_bytes(*count.first_chunk().context("a count")?);
            Ok(Outcome::Bandwidth(bandwidth(bytes, order, begun.elapsed())))
        }
    }
}

/// Executes the server's part of a measurement.
pub fn answer(line: &mut impl Line) -> Result<()> {
    let mut bytes = [0; Order::LEN];
    if !line.receive(&mut bytes)? {
        return Ok(());
    }
    let order = Order::from_bytes(bytes)?;
    line.prepare(&order)?;
    line.send(&bytes)?;
    match order.test {
        Test::Latency => {
            let mut buffer = vec![0; order.size];
            while line.receive(&mut buffer)? {
                line.send(&buffer)?;
            }
            Ok(())
        }
        Test::Bandwidth if order.reverse => fill(line, &order),
        Test::Bandwidth => {
            let mut count = [0; Order::LEN];
            count[..8].copy_from_slice(&drain(line, &order)?.to_le_bytes());
            line.send(&count)
        }
    }
}

fn time_round_trips(line: &mut impl Line, order: &Order) -> Result<Latency> {
    let message = vec![0x5a; order.size];
    let mut buffer = vec![0; order.size];
    let mut trip = || -> Result<()> {
        line.send(&message)?;
        ensure!(line.receive(&mut buffer)?, "the server ended in the middle of a measurement");
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
    while last - begun < order.duration {
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
    line.finish()?;
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
fn fill(line: &mut impl Line, order: &Order) -> Result<()> {
    let bytes = vec![0x5a; order.size];
    let sends_per_look = (CLOCK_BYTES / order.size).clamp(1, 1024);
    let begun = Instant::now();
    while begun.elapsed() < order.duration {
        for _ in 0..sends_per_look {
            if order.in_place { line.send_in_place(order.size)? } else { line.send(&bytes)? }
        }
    }
    line.finish()
}

/// Receives until the other side has finished. Returns the number of bytes.
fn drain(line: &mut impl Line, order: &Order) -> Result<u64> {
    let mut buffer = vec![0; order.size];
    let mut bytes = 0;
    loop {
        let n = if order.in_place { line.receive_in_place()? } else { line.receive_some(&mut buffer)? };
        if n == 0 {
            return Ok(bytes);
        }
        bytes += n as u64;
    }
}

fn bandwidth(bytes: u64, order: &Order, time: Duration) -> Bandwidth {
    let seconds = time.as_secs_f64().max(1e-9);
    let operations = bytes / order.size as u64;
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
    fn run(order: Order) -> Outcome {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || answer(&mut listener.accept().unwrap().0));
        let outcome = ask(&mut TcpStream::connect(address).unwrap(), &order).unwrap();
        server.join().unwrap().unwrap();
        outcome
    }

    const ORDER: Order = Order {
        test: Test::Latency,
        in_place: false,
        reverse: false,
        mode: None,
        size: 100,
        duration: Duration::from_millis(20),
    };

    #[test]
    fn round_trips_are_counted_and_ordered() {
        let Outcome::Latency(latency) = run(ORDER) else { panic!("latency was ordered") };
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
            let order = Order { test: Test::Bandwidth, size: 10_000, reverse, ..ORDER };
            let Outcome::Bandwidth(bandwidth) = run(order) else { panic!("bandwidth was ordered") };
            assert!(
                bandwidth.operations > 0 && bandwidth.bytes == bandwidth.operations * 10_000,
                "{bandwidth:?}"
            );
        }
    }
}
