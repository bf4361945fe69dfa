//! The control socket. A thread of its own passes operators' requests to the volume, one after another.
//!
//! Whoever may connect may do everything, but cannot keep others out: an operator who sends no whole request in time, or does not take
//! the answer, is disconnected, and others are served meanwhile. After each answer, it is the turn of all other connections.

mod conversation;

use conversation::Conversation;
use ginnel_volume_control::{Answer, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

/// How long an operator may take to send a request, and to receive an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The most connections at a time.
const MOST: usize = 64;

/// The part of a volume that answers operators. Only the control thread calls it.
pub trait Handler: Send + Sync {
    /// Executes a request. May block for as long as a client waits for an answer (10 s).
    fn answer(&self, request: Request) -> Answer;
}

/// The listening socket of operators who are served.
#[derive(Debug)]
pub struct Served(UnixListener);

impl Served {
    /// Ends all conversations. The next process finds that nobody listens.
    pub fn end(self) {
        if let Err(error) = shutdown(&self.0, Shutdown::Both) {
            tracing::debug!("control socket: {error}");
        }
    }
}

/// Serves operators on a new thread, until the process or [`Served`] ends. The listener is already bound, so that the process
/// does not need the right to bind it.
pub fn serve(listener: UnixListener, handler: Arc<dyn Handler>) -> io::Result<Served> {
    listener.set_nonblocking(true)?;
    let served = Served(listener.try_clone()?);
    thread::Builder::new().name("control".into()).spawn(move || {
        let mut conversations = Vec::new();
        loop {
            let done = match wait(&listener, &conversations) {
                Ok(true) => accept(&listener, &mut conversations),
                Ok(false) => return,
                Err(errno) => Err(errno),
            };
            conversations.retain_mut(|conversation| {
                conversation.go_on(&*handler).unwrap_or_else(|error| {
                    // A client that disconnects or is too slow is not worth a warning.
                    tracing::debug!("control socket: {error}");
                    false
                })
            });
            if let Err(error) = done {
                // The process is out of descriptors or memory: wait until some are released.
                tracing::warn!("control socket: {error}");
                thread::sleep(PATIENCE);
            }
        }
    })?;
    Ok(served)
}

/// Waits until there is something to do. Returns false if that is to end.
fn wait(listener: &UnixListener, conversations: &[Conversation]) -> Result<bool, Errno> {
    let now = Instant::now();
    let left = conversations.iter().map(|c| c.until().map_or(Duration::ZERO, |until| until - now)).min();
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    let mut awaited = vec![PollFd::new(listener, PollFlags::IN)];
    awaited.extend(conversations.iter().map(Conversation::awaited));
    match poll(&mut awaited, left.as_ref()) {
        Ok(_) => Ok(!awaited[0].revents().contains(PollFlags::HUP)),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(errno),
    }
}

/// Accepts those who have connected. If there are too many connections, the user who has the most loses the oldest.
fn accept(listener: &UnixListener, conversations: &mut Vec<Conversation>) -> Result<(), Errno> {
    // Others get their turn, however fast somebody connects.
    for _ in 0..MOST {
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => conversations.push(Conversation::new(UnixStream::from(socket))),
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => return Err(errno),
        }
        if conversations.len() > MOST {
            let users: Vec<_> = conversations.iter().map(Conversation::user).collect();
            conversations.remove(oldest_of_the_most(&users));
        }
    }
    Ok(())
}

/// Returns the first place of the user who has the most places.
fn oldest_of_the_most<T: PartialEq>(users: &[T]) -> usize {
    let places = |at: usize| users.iter().filter(|&user| *user == users[at]).count();
    (0..users.len()).rev().max_by_key(|&at| places(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_config::Bytes;
    use ginnel_volume_control::{Client, Error, REQUEST_MAX};
    use kit::wait::WATCHDOG;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::sync::{Condvar, Mutex};

    struct Volume;

    impl Handler for Volume {
        fn answer(&self, request: Request) -> Answer {
            match request {
                Request::Resize { size: Some(size), .. } => Answer::Size(size.0),
                _ => Answer::Error("not here".into()),
            }
        }
    }

    fn served() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.ctl");
        serve(UnixListener::bind(&path).unwrap(), Arc::new(Volume)).unwrap();
        (folder, path)
    }

    #[test]
    fn several_questions_on_one_connection() {
        let (_folder, path) = served();
        let mut client = Client::connect("v", &path).unwrap();
        for size in [4096, 8192] {
            let asked = Request::Resize { disk: 0, size: Some(Bytes(size)) };
            assert_eq!(client.ask(&asked).unwrap(), Answer::Size(size));
        }
        assert!(matches!(client.ask(&Request::Dump), Err(Error::Refused(text)) if text == "not here"));
    }

    #[test]
    fn nonsense_is_answered_and_keeps_nobody_out() {
        let (_folder, path) = served();
        for bad in [&b"what?\n"[..], b"\xff\xfe\n", b"{\"op\":\"quit\"}\n", &[b' '; REQUEST_MAX + 1]] {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(bad).unwrap();
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer).unwrap();
            assert!(answer.starts_with("{\"error\":"), "{answer}");
        }
        // Many connect and say nothing; the next is served all the same.
        let _silent: Vec<_> = (0..3 * MOST / 2).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let asked = Request::Resize { disk: 0, size: Some(Bytes(512)) };
        assert_eq!(Client::connect("v", &path).unwrap().ask(&asked).unwrap(), Answer::Size(512));
    }

    #[test]
    fn nobody_listens_after_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.ctl");
        let served = serve(UnixListener::bind(&path).unwrap(), Arc::new(Volume)).unwrap();
        let mut connected = UnixStream::connect(&path).unwrap();
        served.end();
        let refused = UnixStream::connect(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        connected.set_read_timeout(Some(WATCHDOG)).unwrap();
        assert_ne!(connected.read(&mut [0]).map_err(|error| error.kind()), Err(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn a_request_must_end_in_time() {
        let (_folder, path) = served();
        let mut slow = UnixStream::connect(&path).unwrap();
        slow.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let begin = Instant::now();
        // A part comes again and again, and never all of it.
        while slow.write(b" ").is_ok() && !matches!(slow.read(&mut [0]), Ok(0)) {
            assert!(begin.elapsed() < WATCHDOG, "it waits for the rest");
        }
    }

    #[test]
    fn an_answer_must_be_taken_in_time() {
        let (_folder, path) = served();
        let mut deaf = UnixStream::connect(&path).unwrap();
        // The volume stops to listen when its answers are not taken, and hangs up later.
        deaf.set_write_timeout(Some(WATCHDOG)).unwrap();
        let error = loop {
            if let Err(error) = deaf.write_all(b"nonsense\n") {
                break error;
            }
        };
        assert!(
            [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset].contains(&error.kind()),
            "{error}"
        );
    }

    /// A volume that answers nothing until it may, and remembers what was asked.
    #[derive(Default)]
    struct Slow(Mutex<(bool, Vec<u64>)>, Condvar);

    impl Handler for Slow {
        fn answer(&self, request: Request) -> Answer {
            let Request::Resize { size: Some(size), .. } = request else { panic!("{request:?}") };
            let mut state = self.1.wait_while(self.0.lock().unwrap(), |state| !state.0).unwrap();
            state.1.push(size.0);
            Answer::Size(size.0)
        }
    }

    #[test]
    fn after_an_answer_it_is_the_turn_of_others() {
        let (folder, volume) = (tempfile::tempdir().unwrap(), Arc::new(Slow::default()));
        let path = folder.path().join("v.ctl");
        serve(UnixListener::bind(&path).unwrap(), volume.clone()).unwrap();
        let asks = |size: u64| {
            let request = Request::Resize { disk: 0, size: Some(Bytes(size)) };
            serde_json::to_string(&request).unwrap() + "\n"
        };
        let mut many = UnixStream::connect(&path).unwrap();
        many.write_all((1..=20).map(asks).collect::<String>().as_bytes()).unwrap();
        let mut one = UnixStream::connect(&path).unwrap();
        one.write_all(asks(512).as_bytes()).unwrap();
        volume.0.lock().unwrap().0 = true;
        volume.1.notify_all();
        BufReader::new(one).read_line(&mut String::new()).unwrap();
        let order = volume.0.lock().unwrap().1.clone();
        assert!(order.iter().take(3).any(|&size| size == 512), "{order:?}");
        let answers = BufReader::new(many).lines().take(20).map(Result::unwrap).count();
        assert_eq!(answers, 20);
    }

    #[test]
    fn who_has_the_most_connections_loses_one() {
        assert_eq!(oldest_of_the_most(&[1, 2, 3, 2]), 1);
        assert_eq!(oldest_of_the_most(&[1, 1, 2, 2]), 0);
        assert_eq!(oldest_of_the_most(&[7]), 0);
    }
}
