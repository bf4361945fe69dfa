//! Jobs: shell commands that run side by side. Their output is forwarded as it appears.

use crate::protocol::{Exit, Frame};
use crate::{Outbox, Running, sys};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;

/// Starts `command`, and reports about it until all its output has ended.
pub fn spawn(id: u32, command: &str, running: &Running, outbox: &Outbox) -> io::Result<()> {
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LD_LIBRARY_PATH", "/usr/local/lib")
        .current_dir("/root")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let pid = child.id();
    running.lock().unwrap().insert(id, pid as i32);
    outbox.send(&Frame::Started { id, pid })?;
    let (running, outbox) = (running.clone(), outbox.clone());
    thread::spawn(move || {
        if let Err(e) = forward(id, &mut child, &running, &outbox) {
            let _ = outbox.send(&Frame::Failed { id, message: format!("the job's output broke off: {e}") });
        }
    });
    Ok(())
}

fn forward(id: u32, child: &mut Child, running: &Running, outbox: &Outbox) -> io::Result<()> {
    let mut stdout = child.stdout.take();
    let mut stderr = child.stderr.take();
    for fd in [stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)].into_iter().flatten() {
        sys::set_nonblocking(fd)?;
    }
    thread::scope(|scope| {
        // A pipe becomes readable when the process ends, so that one poll waits for that and for the output.
        let (exit_seen, mut exit_tell) = io::pipe()?;
        let (tell, exited) = mpsc::channel();
        scope.spawn(move || {
            let _ = tell.send(child.wait());
            let _ = exit_tell.write_all(b"x");
        });
        let mut alive = true;
        while alive || stdout.is_some() || stderr.is_some() {
            let [_, _, ended] = sys::wait_readable([
                stdout.as_ref().map(AsFd::as_fd),
                stderr.as_ref().map(AsFd::as_fd),
                alive.then(|| exit_seen.as_fd()),
            ])?;
            // What the process wrote is in the pipes before its end is seen: empty the pipes, then report the end.
            drain(&mut stdout, |bytes| outbox.send(&Frame::Stdout { id, bytes }))?;
            drain(&mut stderr, |bytes| outbox.send(&Frame::Stderr { id, bytes }))?;
            if ended {
                alive = false;
                running.lock().unwrap().remove(&id);
                let status = exited.recv().map_err(io::Error::other)??;
                outbox.send(&Frame::Exited { id, exit: exit_of(status) })?;
            }
        }
        Ok(())
    })
}

/// Forwards what a pipe contains now. Sets `pipe` to `None` when it has ended.
///
/// Reads at most 128 KiB. A pipe can contain 64 KiB, so this is everything that was in it, and a flood in one pipe does not
/// starve the other.
fn drain(pipe: &mut Option<impl Read>, mut send: impl FnMut(Vec<u8>) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = [0; 16 * 1024];
    for _ in 0..8 {
        let Some(source) = pipe else { break };
        match source.read(&mut buffer) {
            Ok(0) => *pipe = None,
            Ok(n) => send(buffer[..n].to_vec())?,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn exit_of(status: ExitStatus) -> Exit {
    match status.signal() {
        Some(signal) => Exit::Signal(signal),
        None => Exit::Code(status.code().unwrap_or(-1)),
    }
}
