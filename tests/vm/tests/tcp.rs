//! What the kernels of two VMs report about the TCP connections between them. Matching two sockets depends on it.

use anyhow::{Context, Result, ensure};
use ginnel_tcp::{Clock, Connecting, SynTime};
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use vmtest::installation::program;
use vmtest::{Job, TestBed};

const PROMPT: Duration = Duration::from_secs(120);
const CONNECTIONS: usize = 8;
/// Almost all of the time that a proof may take; the rest is for reading the clock.
const SLOW: Duration = Duration::from_millis(ginnel_tcp::MAX_WINDOW as u64 / 2);

/// Returns the lines of JSON that a program has printed.
fn facts(job: &Job) -> Result<Vec<Value>> {
    let said = job.said().0;
    said.lines().filter(|line| line.starts_with('{')).map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn address(facts: &Value, end: &str) -> Result<SocketAddr> {
    Ok(facts[end].as_str().context("no address")?.parse()?)
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("no number: {value}"))
}

fn times(value: &Value) -> Result<(Duration, Duration)> {
    Ok((Duration::from_nanos(number(&value[0])?), Duration::from_nanos(number(&value[1])?)))
}

#[test]
fn two_kernels_prove_which_sockets_belong_together() -> Result<()> {
    let bed = TestBed::new("tcp-facts")?;
    let vm = |name| bed.vm(name).network().program(program("tcp-facts")?).start();
    let (a, b) = (vm("a")?, vm("b")?);
    a.wait_ready()?;
    b.wait_ready()?;
    let acceptor = b.spawn(&format!("exec tcp-facts accept {}:7000 {CONNECTIONS}", b.address()?))?;
    acceptor.wait_for_line("listening", PROMPT)?;
    let connector = a.spawn(&format!("exec tcp-facts connect {}:7000 {CONNECTIONS}", b.address()?))?;
    for job in [&connector, &acceptor] {
        job.wait_for_line("done", PROMPT)?;
        println!("{}", job.said().0);
    }
    let (connected, accepted) = (facts(&connector)?, facts(&acceptor)?);
    ensure!(connected.len() == CONNECTIONS && accepted.len() == CONNECTIONS);
    let mut proven = 0;
    for one in &connected {
        let (read, connecting) = (times(&one["read"])?, times(&one["connecting"])?);
        let value = u32::try_from(number(&one["clock"])?)?;
        let clock = Clock { value, before: read.0, after: read.1 };
        let connecting = Connecting { before: connecting.0, after: connecting.1 };
        ensure!(clock.is_secret(), "the clock is no secret");
        for other in &accepted {
            let is_its = address(one, "local")? == address(other, "remote")?;
            let mirrors = is_its && address(one, "remote")? == address(other, "local")?;
            ensure!(is_its == mirrors, "{one} and {other}");
            let syn = SynTime(u32::try_from(number(&other["syn"])?)?);
            // A connect that takes too long on a busy machine cannot be proven, even if it is genuine.
            let is_slow = connecting.after - connecting.before > SLOW;
            let proves = clock.proves(connecting, syn);
            ensure!(proves == is_its || (is_slow && !proves), "{one} and {other}: its own is {is_its}");
            proven += usize::from(proves);
        }
    }
    println!("{proven} of {CONNECTIONS} connections proven");
    ensure!(proven > 0, "no connect took less than {SLOW:?}");
    Ok(())
}
