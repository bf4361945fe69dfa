//! A guest program that knows nothing of Ginnel: TCP streams whose bytes are checked. Prints lines that tests wait for.
// Uses the C library's `poll`, because crates that make system calls themselves would bypass a preloaded library.
#![allow(unsafe_code)]

use anyhow::{Context, Result, bail, ensure};
use std::ffi::{c_int, c_ulong};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;
use std::{env, thread};

const USAGE: &str =
    "stream serve ADDRESS | stream drive|brief|restless|poll ADDRESS FILE (it ends when there is that file)";
/// The timeout of one call of a driver that is restless or polls.
const SHORT: Duration = Duration::from_millis(20);
const LONGEST: usize = 40_000;
/// The most bytes of a piece that drivers other than `drive` send. Even the smallest ring has room for it, so their connections
/// do not go back to TCP.
const BRIEF: usize = 1_000;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let arg = |n: usize| args.get(n).map(String::as_str).context(USAGE);
    match arg(0)? {
        "serve" => {
            let listener = TcpListener::bind(arg(1)?)?;
            say(format_args!("listening"));
            loop {
                let socket = listener.accept()?.0;
                thread::spawn(move || match echo(&socket) {
                    Ok(line) => say(format_args!("{line}")),
                    Err(error) => say(format_args!("FAILED: {error:#}")),
                });
            }
        }
        role @ ("drive" | "brief" | "restless" | "poll") => {
            let socket = TcpStream::connect(arg(1)?)?;
            if role == "restless" {
                socket.set_read_timeout(Some(SHORT))?;
            }
            let longest = if role == "drive" { LONGEST } else { BRIEF };
            match drive(&socket, Path::new(arg(2)?), longest, role == "poll") {
                Ok(line) => say(format_args!("{line}")),
                Err(error) => bail!("FAILED: {error:#}"),
            }
        }
        _ => bail!(USAGE),
    }
    Ok(())
}

/// Prints a line. Does not panic when the test does not listen any more.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Returns the byte at this place of a stream.
fn byte_at(place: u64) -> u8 {
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn check(bytes: &[u8], place: u64) -> Result<()> {
    let wrong = bytes.iter().zip(place..).find(|(byte, place)| **byte != byte_at(*place));
    ensure!(wrong.is_none(), "a wrong byte at {}", wrong.map_or(0, |(_, place)| place));
    Ok(())
}

/// Describes how a connection has ended. Fails unless the error is one by which TCP reports that a peer is gone.
fn ended(error: &std::io::Error, place: u64) -> Result<String> {
    ensure!(
        matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof),
        "{error} after {place} bytes"
    );
    Ok(format!("ended after {place} bytes: {:?}", error.kind()))
}

/// Sends back all bytes that arrive, until the end.
fn echo(mut socket: &TcpStream) -> Result<String> {
    let mut bytes = vec![0; LONGEST];
    let mut place = 0;
    loop {
        let n = match socket.read(&mut bytes) {
            Ok(0) => return Ok(format!("ended after {place} bytes: EOF")),
            Ok(n) => n,
            Err(error) => return ended(&error, place),
        };
        check(&bytes[..n], place)?;
        if let Err(error) = socket.write_all(&bytes[..n]) {
            return ended(&error, place);
        }
        place += n as u64;
    }
}

#[repr(C)]
struct PollFd {
    fd: c_int,
    events: i16,
    revents: i16,
}

unsafe extern "C" {
    fn poll(fds: *mut PollFd, count: c_ulong, timeout_ms: c_int) -> c_int;
}

/// Waits until a socket is readable, with calls that each wait for a short time.
fn poll_until_readable(socket: &TcpStream) {
    const POLLIN: i16 = 1;
    let mut set = PollFd { fd: socket.as_raw_fd(), events: POLLIN, revents: 0 };
    // SAFETY: one structure, which outlives the call.
    while unsafe { poll(&raw mut set, 1, SHORT.as_millis() as c_int) } <= 0 {}
}

/// Fills the whole buffer, with as many calls as necessary.
fn receive(mut socket: &TcpStream, mut bytes: &mut [u8], polls: bool) -> std::io::Result<()> {
    while !bytes.is_empty() {
        if polls {
            poll_until_readable(socket);
        }
        match socket.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes = &mut bytes[n..],
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends pieces and receives each of them again, until the file exists.
fn drive(mut socket: &TcpStream, stop: &Path, longest: usize, polls: bool) -> Result<String> {
    let mut place = 0;
    for turn in 0u64.. {
        let len =
            1 + (turn.wrapping_mul(7919) % longest as u64) as usize / if turn % 5 == 0 { 1 } else { 100 };
        let sent: Vec<u8> = (place..).take(len).map(byte_at).collect();
        let mut back = vec![0; len];
        let result = socket.write_all(&sent).and_then(|()| receive(socket, &mut back, polls));
        if let Err(error) = result {
            return ended(&error, place);
        }
        check(&back, place)?;
        place += len as u64;
        if turn == 0 {
            say(format_args!("driving"));
        }
        if turn % 64 == 0 && stop.exists() {
            break;
        }
    }
    socket.shutdown(Shutdown::Write)?;
    match receive(socket, &mut [0], polls) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {}
        other => bail!("after the last byte there is no end: {other:?}"),
    }
    Ok(format!("done after {place} bytes"))
}
