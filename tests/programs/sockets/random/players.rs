//! The processes that make the calls.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// A call that ought to end has not ended after this time. It is far longer than any takes, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What a call has returned.
#[derive(Clone, Debug)]
pub struct Answer {
    pub result: i64,
    /// The error, if the result is negative.
    pub error: i32,
    pub more: Vec<i64>,
}

struct Player {
    stream: UnixStream,
    /// Bytes that are no whole line yet.
    part: Vec<u8>,
    /// Answers that nobody has asked for yet, by their numbers.
    early: BTreeMap<u64, Answer>,
}

impl Player {
    /// Reads one line, and returns false at the deadline and at the end.
    fn hear(&mut self, deadline: Instant) -> bool {
        loop {
            if let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.part.drain(..=end).collect();
                let numbers: Vec<i64> = std::str::from_utf8(&line)
                    .unwrap()
                    .split_whitespace()
                    .map(|number| number.parse().unwrap())
                    .collect();
                let answer =
                    Answer { result: numbers[1], error: numbers[2] as i32, more: numbers[3..].to_vec() };
                self.early.insert(numbers[0] as u64, answer);
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mut bytes = [0; 1000];
            self.stream.set_read_timeout(Some(left.max(Duration::from_micros(1)))).unwrap();
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(n) => self.part.extend(&bytes[..n]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        return false;
                    }
                }
                Err(_) => return false,
            }
        }
    }
}

/// Processes with numbers, that obey.
pub struct Players {
    listener: UnixListener,
    path: PathBuf,
    players: BTreeMap<u32, Player>,
    children: Vec<Child>,
    number: u64,
    /// The port at which process 0 listens.
    pub port: i64,
}

impl Players {
    /// Starts the processes 0 and 1. `start` executes the program with these arguments.
    pub fn start(path: &Path, start: impl Fn(&[&str]) -> Child) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let text = path.to_str().unwrap();
        let mut players = Self {
            listener,
            path: path.into(),
            players: BTreeMap::new(),
            children: Vec::new(),
            number: 0,
            port: 0,
        };
        for id in ["0", "1"] {
            players.children.push(start(&[text, id]));
            assert!(players.meet(), "a player does not start");
        }
        players.port = players.ask(0, "listen", &[]).expect("listen").result;
        players
    }

    /// Waits until a new process says who it is. Returns false if none does.
    pub fn meet(&mut self) -> bool {
        self.listener.set_nonblocking(true).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match self.listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(100));
                }
                Err(_) => return false,
            }
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut id = Vec::new();
        let mut byte = [0];
        while (&stream).read(&mut byte).is_ok_and(|n| n == 1) && byte[0] != b'\n' {
            id.push(byte[0]);
        }
        let Ok(id) = String::from_utf8(id).unwrap().parse() else { return false };
        self.players.insert(id, Player { stream, part: Vec::new(), early: BTreeMap::new() });
        true
    }

    /// Tells a process to make a call, perhaps in a thread of its own. Returns the call's number.
    pub fn tell(&mut self, id: u32, own_thread: bool, call: &str, arguments: &[i64]) -> u64 {
        self.number += 1;
        let mut line = format!("{} {} {call}", self.number, u8::from(own_thread));
        arguments.iter().for_each(|argument| line += &format!(" {argument}"));
        line += "\n";
        if let Some(player) = self.players.get_mut(&id) {
            let _ = player.stream.write_all(line.as_bytes());
        }
        self.number
    }

    /// Waits until a call returns, but not for ever.
    pub fn hear(&mut self, id: u32, number: u64, patience: Duration) -> Option<Answer> {
        let player = self.players.get_mut(&id)?;
        let deadline = Instant::now() + patience;
        while !player.early.contains_key(&number) && player.hear(deadline) {}
        player.early.remove(&number)
    }

    /// Has a process make a call, and waits until it returns.
    pub fn ask(&mut self, id: u32, call: &str, arguments: &[i64]) -> Option<Answer> {
        let number = self.tell(id, false, call, arguments);
        self.hear(id, number, PATIENCE)
    }

    /// Returns whether there is this process.
    pub fn has(&self, id: u32) -> bool {
        self.players.contains_key(&id)
    }

    /// Ends a process that another has made.
    pub fn dismiss(&mut self, id: u32) -> bool {
        self.tell(id, false, "exit", &[]);
        let Some(mut player) = self.players.remove(&id) else { return false };
        // The control connection ends when the process has ended.
        while player.hear(Instant::now() + PATIENCE) {}
        player.stream.read(&mut [0]).is_ok_and(|n| n == 0)
    }

    /// Has a process execute itself.
    pub fn replace(&mut self, id: u32) -> bool {
        self.tell(id, false, "exec", &[id.into()]);
        self.meet()
    }
}

impl Drop for Players {
    fn drop(&mut self) {
        // A process ends when its control connection does, unless it hangs.
        self.players.clear();
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}
