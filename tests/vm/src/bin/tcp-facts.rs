//! A guest program that is one end of a few TCP connections that carry random pieces both ways. It prints what its kernel
//! reports about each connection as JSON, compares the kernel's counts with its own after each call, and then stays.

use anyhow::{Context, Result, bail, ensure};
use ginnel_tcp::{Clock, Counts, Identity, Role, SynTime, save_syn};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

const USAGE: &str = "tcp-facts accept|connect ADDRESS CONNECTIONS";
const CALLS: u32 = 3_000;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [role, address, connections] = &args[..] else { bail!(USAGE) };
    let address: SocketAddr = address.parse().context(USAGE)?;
    let connections: usize = connections.parse().context(USAGE)?;
    let mut sockets = Vec::new();
    match role.as_str() {
        "accept" => {
            let listener = TcpListener::bind(address)?;
            save_syn(&listener)?;
            println!("listening");
            for _ in 0..connections {
                let socket = listener.accept()?.0;
                let syn = SynTime::of(&socket)?.context("no SYN with a timestamp")?;
                ensure!(SynTime::of(&socket)?.is_none(), "the SYN is told twice");
                println!("{}", facts(&socket, json!({ "syn": syn.0 }))?);
                sockets.push((socket, Role::Acceptor));
            }
        }
        "connect" => {
            for _ in 0..connections {
                let before = ginnel_clock::monotonic();
                let socket = TcpStream::connect(address)?;
                let after = ginnel_clock::monotonic();
                // Long enough after the SYN that the timestamp clock has moved on.
                std::thread::sleep(Duration::from_millis(50));
                let clock = Clock::of(&socket)?.context("no timestamps")?;
                let times = json!({
                    "clock": clock.value,
                    "read": [nanos(clock.before), nanos(clock.after)],
                    "connecting": [nanos(before), nanos(after)],
                });
                println!("{}", facts(&socket, times)?);
                sockets.push((socket, Role::Connector));
            }
        }
        _ => bail!(USAGE),
    }
    for (number, (socket, role)) in sockets.iter().enumerate() {
        let (received, sent, moved) = carry(socket, *role, number as u64)?;
        println!("counted {received} received, {sent} sent; {moved} looks while the counts moved");
    }
    println!("done");
    loop {
        std::thread::park();
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn facts(socket: &TcpStream, mut more: Value) -> Result<Value> {
    let identity = Identity::of(socket)?;
    more["local"] = identity.local.to_string().into();
    more["remote"] = identity.remote.to_string().into();
    more["cookie"] = identity.cookie.into();
    more["namespace"] = identity.namespace.into();
    Ok(more)
}

/// Writes and reads pieces of random length, so that sometimes much is under way and sometimes little.
fn carry(mut socket: &TcpStream, role: Role, seed: u64) -> Result<(u64, u64, u64)> {
    socket.set_nonblocking(true)?;
    let mut bytes = vec![7; 1 << 20];
    let mut random = seed + 1;
    let (mut received, mut sent, mut moved) = (0, 0, 0);
    for call in 0..CALLS {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let len = 1 + (random >> 16) as usize % if call % 7 == 0 { 1 << 20 } else { 3_000 };
        let result = match (random >> 42).is_multiple_of(2) {
            true => socket.write(&bytes[..len]).map(|n| sent += n as u64),
            false => socket.read(&mut bytes[..len]).map(|n| received += n as u64),
        };
        match result {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        let counts = loop {
            match Counts::of(socket, role)? {
                Some(counts) => break counts,
                None => moved += 1,
            }
        };
        ensure!(
            counts == Counts { received, sent },
            "{counts:?}, not {received} and {sent}, after {call} calls"
        );
    }
    Ok((received, sent, moved))
}
