//! The program that is killed: a child that executes one order at a time, and is stopped at each of its system calls.

use crate::end::{Connection, Side};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use kit::stepper::{self, Stepper, leave};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The orders.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// Send this many bytes.
    Send(u32),
    /// Receive at most this many bytes that are there.
    Receive(u32),
    /// Receive until the end.
    ReceiveAll,
    /// End the sending direction.
    Finish,
    /// Close the connection.
    Close,
}

impl Order {
    fn word(self) -> u64 {
        let (code, len) = match self {
            Self::Send(len) => (1, len),
            Self::Receive(len) => (2, len),
            Self::ReceiveAll => (3, 0),
            Self::Finish => (4, 0),
            Self::Close => (5, 0),
        };
        code << 32 | u64::from(len)
    }
}

// These words are in a page that both processes share.
const ORDER: usize = 0;
/// 1 means that the child waits for an order.
const WAITS: usize = 8;
const PORT: usize = 16;
/// The number of bytes that calls have sent or may have sent; for the call that is in progress, the maximum.
const SENT: usize = 24;
const TRIED: usize = 32;
const RECEIVED: usize = 40;

pub struct Victim {
    process: Stepper,
    page: Mapping,
    /// The number of stops that are left until it is killed.
    left: usize,
}

fn obey(page: &Mapping, stream: TcpStream, side: Side) {
    let mut connection = Some(Connection::new(stream, side));
    loop {
        page.store_release_u64(WAITS, 1);
        // The child is stopped at a system call.
        // SAFETY: it cannot fail.
        unsafe { libc::getppid() };
        let order = page.load_acquire_u64(ORDER);
        let len = order as u32;
        let Some(connected) = &mut connection else { return };
        match order >> 32 {
            1 => {
                page.store_release_u64(TRIED, connected.sent + u64::from(len));
                connected.send(len as usize);
                page.store_release_u64(SENT, connected.sent);
                page.store_release_u64(TRIED, connected.sent);
            }
            2 => drop(connected.receive(len as usize)),
            3 => while !connected.receive(usize::MAX) {},
            4 => connected.finish(),
            _ => connection = None,
        }
        if let Some(connected) = &connection {
            page.store_release_u64(RECEIVED, connected.received);
        }
    }
}

impl Victim {
    /// Starts a victim with a connection. Returns it with the other end.
    pub fn begin(side: Side, kill: usize) -> (Self, TcpStream) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(4096).unwrap();
        let page = Mapping::of_file(&file, 0, 4096, Protection::ReadWrite).unwrap();
        let far = page.clone();
        let listener = (side == Side::Acceptor).then(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        // The listener is in the child, or in its parent.
        let (process, stream) = match listener {
            Some(listener) => {
                let address = listener.local_addr().unwrap();
                // The connection waits in the queue until the child accepts it.
                let stream = TcpStream::connect(address).unwrap();
                let process = Stepper::fork(|| {
                    // As long as two processes have a connection, it does not change over.
                    // SAFETY: the parent's end, which nothing here uses.
                    drop(unsafe { OwnedFd::from_raw_fd(stream.as_raw_fd()) });
                    stepper::start();
                    let stream = listener.accept().unwrap().0;
                    obey(&far, stream, side);
                    leave(0);
                });
                (process, stream)
            }
            None => {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
                page.store_relaxed_u64(PORT, u64::from(listener.local_addr().unwrap().port()));
                let process = Stepper::fork(|| {
                    let stream =
                        TcpStream::connect((Ipv4Addr::LOCALHOST, far.load_relaxed_u64(PORT) as u16)).unwrap();
                    stepper::start();
                    obey(&far, stream, side);
                    leave(0);
                });
                (process, listener.accept().unwrap().0)
            }
        };
        let mut victim = Self { process, page, left: usize::MAX };
        assert!(victim.goes_on().is_some());
        victim.left = kill;
        (victim, stream)
    }

    /// Waits until the child waits for an order. Returns `None` if it was killed before that.
    fn goes_on(&mut self) -> Option<()> {
        loop {
            if self.left == 0 {
                self.process.kill();
                return None;
            }
            self.left -= 1;
            if !self.process.step_to_syscall() {
                assert_eq!(self.process.ended, Some(0), "the victim has failed");
                return Some(());
            }
            if self.page.load_acquire_u64(WAITS) == 1 {
                return Some(());
            }
        }
    }

    /// Executes an order. Returns `None` if the child was killed meanwhile.
    pub fn does(&mut self, order: Order) -> Option<()> {
        self.page.store_release_u64(ORDER, order.word());
        self.page.store_release_u64(WAITS, 0);
        self.goes_on()
    }

    /// Returns the least and the greatest number of bytes that the child may have sent.
    pub fn sent(&self) -> (u64, u64) {
        let [sent, tried] = [SENT, TRIED].map(|word| self.page.load_acquire_u64(word));
        (sent, tried)
    }

    pub fn received(&self) -> u64 {
        self.page.load_acquire_u64(RECEIVED)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.process.kill();
    }
}
