//! Threads that block all signals, as threads of many programs do, meet a truncated file in each operation of a ring. A
//! thread that was not prepared for this is killed, and the process with it; therefore the test runs in a child.
#![cfg(not(loom))]
#![allow(unsafe_code)] // Signals are blocked by hand.

use ginnel_layout::ring::footprint;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{message, stream};
use ginnel_shmem::{Mapping, Protection};

const CAPACITY: usize = 4096;

type MessageEnds = (message::Producer<Mapping>, message::Consumer<Mapping>);
type StreamEnds = (stream::Producer<Mapping>, stream::Consumer<Mapping>);

fn block_all_signals() {
    // SAFETY: plain calls with valid pointers.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        assert_eq!(libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()), 0);
    }
}

/// Runs `operation` as the first operation of a thread that blocks all signals, on a ring whose file has just been truncated.
/// A message and a byte have been sent and not received.
fn meet(operation: fn(&mut MessageEnds, &mut StreamEnds)) {
    let ring = |file: &std::fs::File| {
        file.set_len(footprint(CAPACITY) as u64).unwrap();
        Mapping::of_file(file, 0, footprint(CAPACITY), Protection::ReadWrite).unwrap()
    };
    let files = [0, 1].map(|_| tempfile::tempfile_in("/dev/shm").unwrap());
    let (a, b) = (ring(&files[0]), ring(&files[1]));
    let mut messages = (message::Producer::new(a.clone(), CAPACITY), message::Consumer::new(a, CAPACITY));
    let mut streams = (stream::Producer::new(b.clone(), CAPACITY), stream::Consumer::new(b, CAPACITY));
    let _ = messages.0.send(b"m").unwrap();
    streams.0.write(b"s", || {}).unwrap();
    files.iter().for_each(|file| file.set_len(0).unwrap());
    let thread = std::thread::spawn(move || {
        block_all_signals();
        operation(&mut messages, &mut streams);
    });
    thread.join().unwrap();
}

kit::program! {
    /// Runs each operation on rings whose files have been truncated.
    fn meets_broken_rings() {
        let operations: [fn(&mut MessageEnds, &mut StreamEnds); 14] = [
            |(p, _), _| assert!(p.send(b"m").is_err()),
            |(p, _), _| assert!(p.put(b"m").is_none()),
            |(p, _), _| assert!(p.claim(8).is_err()),
            |(p, _), _| assert!(p.ready()),
            |(p, _), _| _ = p.finish(),
            |(_, c), _| assert!(c.take(&mut [0; 8], 1).is_none()),
            |(_, c), _| assert!(c.recv(&mut [0; 8]).is_err()),
            |(_, c), _| assert!(c.ready()),
            |(_, c), _| _ = c.finish(),
            |_, (p, _)| assert!(p.write(b"s", || {}).is_err()),
            |_, (p, _)| assert!(p.ready()),
            |_, (_, c)| assert!(c.read(&mut [0; 8], || {}).is_err()),
            |_, (_, c)| assert!(c.poll().is_err()),
            |_, (_, c)| _ = c.finish(),
        ];
        operations.into_iter().for_each(meet);
    }
}

#[test]
fn every_operation_survives_in_a_thread_that_blocks_all_signals() {
    let output = kit::program::command(meets_broken_rings).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
