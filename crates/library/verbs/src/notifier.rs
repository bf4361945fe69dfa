//! The notifier: a thread that handles completion queues while the program sleeps.
//!
//! It sleeps until a peer has written a completion that the program wants to be told of, a request has to wait, or a peer has died. A
//! program that polls needs no notifier, because the polling thread does all of this work.

use crate::device::{LOOK, Shared};
use crate::program::ProgramMemory;
use ginnel::{Error, Mapping, ReadySet, WaitMode};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two attempts of a request that waits for its peer. It is the delay that an adapter would use if the peer had asked for
/// this RNR timer value (InfiniBand Architecture Specification 1.2.1, table 45).
const RETRY: Duration = Duration::from_micros(480);

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// Wakes the notifier.
pub(crate) struct Waker(UnixStream);

impl Waker {
    /// Returns a waker that writes to this socket, which must be non-blocking.
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self(socket)
    }

    pub(crate) fn wake(&self) {
        // If the socket is full, the notifier is about to wake up anyway.
        let _ = (&self.0).write(&[0]);
    }
}

/// The notifier's thread. Dropping this value ends the thread.
pub(crate) struct Notifier {
    shared: Arc<Shared>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// The process that started the thread. After a fork, the child does not have the thread.
    process: u32,
}

impl Notifier {
    pub(crate) fn start(
        shared: Arc<Shared>,
        program: impl ProgramMemory<Mapping> + Send + 'static,
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> std::io::Result<JoinHandle<()>>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::System { what: "starting a thread for completion events", source };
        let mut set = ReadySet::new()?;
        set.set_mode(WaitMode::Interrupt);
        let (waker, wake_socket) = UnixStream::pair().map_err(failed)?;
        waker.set_nonblocking(true).map_err(failed)?;
        wake_socket.set_nonblocking(true).map_err(failed)?;
        set.watch(shared.listener(), LISTENER)?;
        set.watch(&wake_socket, WAKE)?;
        let is_over = Arc::<AtomicBool>::default();
        let thread = {
            let (shared, is_over) = (shared.clone(), is_over.clone());
            spawn(Box::new(move || run(&shared, set, wake_socket, &program, &is_over))).map_err(failed)?
        };
        // A device has one notifier, so this is set once.
        let _ = shared.waker().set(Waker::new(waker));
        Ok(Self { shared, is_over, thread: Some(thread), process: process::id() })
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.process != process::id() {
            std::mem::forget(thread);
            return;
        }
        self.is_over.store(true, Ordering::Release);
        if let Some(waker) = self.shared.waker().get() {
            waker.wake();
        }
        let _ = thread.join();
    }
}

fn run(
    shared: &Shared,
    mut set: ReadySet,
    mut wake_socket: UnixStream,
    program: &impl ProgramMemory<Mapping>,
    is_over: &AtomicBool,
) {
    let (mut keys, mut is_lost, mut looked) = (Vec::new(), false, Instant::now());
    while !is_over.load(Ordering::Acquire) {
        let of_channels = shared.hear(&set, &keys);
        // Checking for each completion would cost too much. A message of the daemon makes the listener readable.
        let is_due = keys.contains(&LISTENER) || looked.elapsed() >= LOOK;
        if is_due && !is_lost {
            (is_lost, looked) = (shared.is_lost(), Instant::now());
            if is_lost {
                // The listener of a lost device stays readable and would wake this thread again and again, and no peer connects to it
                // any more.
                let _ = set.unwatch(shared.listener());
            }
        }
        let of_requests = shared.attend_queues(program).then_some(RETRY);
        let timeout = [of_channels, of_requests].into_iter().flatten().min();
        if set.wait(&mut keys, timeout).is_err() {
            // The ready set does not work any more, so nothing wakes this thread and it has to poll.
            std::thread::sleep(Duration::from_millis(1));
        }
        if keys.contains(&WAKE) {
            drain(&mut wake_socket);
        }
    }
}

/// Reads and drops the bytes that were written to wake the reader.
pub(crate) fn drain(wake_socket: &mut UnixStream) {
    let mut bytes = [0; 64];
    loop {
        match wake_socket.read(&mut bytes) {
            Ok(n) if n == bytes.len() => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}
