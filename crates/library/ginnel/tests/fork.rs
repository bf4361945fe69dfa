//! Programs that fork: parent and child share one endpoint, and if one of them ends, the other continues. This test program
//! forks, so it has only one thread.
#![allow(unsafe_code)] // fork, waitpid, _exit.

use ginnel::{AttachOptions, BlockOptions, Endpoint, Error, MessageChannel};
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const WEB: &str = "[segment.web]\nsize = \"8M\"\npage = \"4K\"\nmembers = [\"host\"]\n";

fn attach(daemon: &Daemon, name: &str) -> Endpoint {
    let options =
        AttachOptions { socket: daemon.socket(), name: Some(name.into()), ..AttachOptions::default() };
    Endpoint::attach_with("web", &options).unwrap()
}

/// Runs `body` in a child, which ends without running destructors. Returns the child's process id.
fn fork(body: impl FnOnce()) -> i32 {
    // SAFETY: the program has one thread.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the process, and nothing else.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    pid
}

fn reap(pid: i32) {
    let mut status = 0;
    // SAFETY: `status` is there for the call.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child has failed");
}

fn echo(channel: &mut MessageChannel, times: usize) {
    channel.set_timeout(Some(WATCHDOG));
    for _ in 0..times {
        let message = channel.recv().unwrap();
        channel.send(&message).unwrap();
    }
}

fn ping(channel: &mut MessageChannel) {
    channel.set_timeout(Some(WATCHDOG));
    channel.send(b"ping").unwrap();
    assert_eq!(channel.recv().unwrap(), b"ping");
}

fn endpoints(daemon: &Daemon) -> usize {
    daemon.inspect()["endpoints"].as_array().unwrap().len()
}

/// A program forks `forks` times, and each parent ends, as for a daemon in the background. Its peer notices nothing, not even
/// when `ginneld` is restarted.
fn a_parent_ends_and_its_child_goes_on(forks: usize) {
    let mut daemon = Daemon::start_new(WEB);
    let peer = attach(&daemon, "peer");
    let listener = peer.listen::<MessageChannel>("peer").unwrap();
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(WATCHDOG)).unwrap();
    let first = fork(|| {
        let program = attach(&daemon, "program");
        let mut channel: MessageChannel = program.connect("peer").unwrap();
        echo(&mut channel, 1);
        for _ in 0..forks {
            // SAFETY: one thread.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0);
            if pid > 0 {
                // SAFETY: ends the process.
                unsafe { libc::_exit(0) };
            }
        }
        echo(&mut channel, 1);
        // With two forks, this process has not needed the daemon before the restart.
        program.create_block("", 4096, &BlockOptions::default()).unwrap().close().unwrap();
        theirs.write_all(b"1").unwrap();
        theirs.read_exact(&mut [0]).unwrap();
        program.create_block("", 4096, &BlockOptions::default()).unwrap().close().unwrap();
        echo(&mut channel, 1);
        // The parent has ended, so the child may close the channel.
        drop(channel);
        theirs.write_all(b"2").unwrap();
        theirs.read_exact(&mut [0]).unwrap();
    });
    let mut channel = listener.accept_timeout(WATCHDOG).unwrap();
    ping(&mut channel);
    reap(first);
    ping(&mut channel);
    ours.read_exact(&mut [0]).unwrap();
    assert_eq!(endpoints(&daemon), 2);
    daemon.restart();
    ours.write_all(b"1").unwrap();
    ping(&mut channel);
    ours.read_exact(&mut [0]).unwrap();
    assert!(matches!(channel.recv(), Err(Error::Finished)));
    assert_eq!(endpoints(&daemon), 2);
    ours.write_all(b"2").unwrap();
    wait_for("the endpoint's end with its last process", || (endpoints(&daemon) == 1).then_some(()));
}

/// A child drops everything that it has inherited, with or without using the endpoint first.
fn a_child_ends_and_its_parent_goes_on(uses: bool) {
    let daemon = Daemon::start_new(WEB);
    let (program, peer) = (attach(&daemon, "program"), attach(&daemon, "peer"));
    let listener = peer.listen::<MessageChannel>("peer").unwrap();
    let own = program.listen::<MessageChannel>("own").unwrap();
    let mut near: MessageChannel = program.connect("peer").unwrap();
    let mut far = listener.accept_timeout(WATCHDOG).unwrap();
    let block = program.create_block("", 4096, &BlockOptions::default()).unwrap();
    let mut mutex = program.mutex("mutex").unwrap();
    let mut other = peer.mutex("mutex").unwrap();
    let guard = mutex.lock().unwrap();
    // As at the end of a program, destructors run, but only in the child.
    let child = fork(|| {
        if uses {
            assert!(matches!(own.try_accept(), Err(Error::System { .. })), "its parent accepts");
            program.create_block("", 4096, &BlockOptions::default()).unwrap();
        }
        // SAFETY: each is dropped once in this process, which ends without another destructor.
        unsafe {
            std::ptr::drop_in_place((&raw const guard).cast_mut());
            std::ptr::drop_in_place((&raw const near).cast_mut());
            std::ptr::drop_in_place((&raw const own).cast_mut());
            std::ptr::drop_in_place((&raw const block).cast_mut());
            std::ptr::drop_in_place((&raw const program).cast_mut());
        }
    });
    reap(child);
    other.set_timeout(Some(Duration::from_millis(100)));
    assert!(matches!(other.lock().err(), Some(Error::TimedOut)), "the parent has it");
    drop(guard);
    other.set_timeout(Some(WATCHDOG));
    drop(other.lock().unwrap());
    far.set_timeout(Some(WATCHDOG));
    near.send(b"still here").unwrap();
    assert_eq!(far.recv().unwrap(), b"still here");
    block.write(0, b"still here").unwrap();
    let mut back: MessageChannel = peer.connect("own").unwrap();
    let mut accepted = own.accept_timeout(WATCHDOG).unwrap();
    back.send(b"and here").unwrap();
    assert_eq!(accepted.recv().unwrap(), b"and here");
    wait_for("only the parent's block", || {
        program.process_events();
        (daemon.inspect()["blocks"].as_array().unwrap().len() == 1).then_some(())
    });
    assert_eq!(endpoints(&daemon), 2);
}

fn main() {
    let tests: [(&str, fn()); 4] = [
        ("a parent ends and its child goes on", || a_parent_ends_and_its_child_goes_on(1)),
        ("a program forks twice and its parents end", || a_parent_ends_and_its_child_goes_on(2)),
        ("a child that uses nothing ends and its parent goes on", || {
            a_child_ends_and_its_parent_goes_on(false)
        }),
        ("a child that attaches ends and its parent goes on", || a_child_ends_and_its_parent_goes_on(true)),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
}
