//! A connection to the control socket. None of its functions waits for the operator.

use super::{Handler, PATIENCE};
use ginnel_volume_control::{Answer, REQUEST_MAX};
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::socket_peercred;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// A connection, and how far its operator and the volume have come.
pub struct Conversation {
    stream: UnixStream,
    user: Option<u32>,
    /// What the operator has said and the volume has not answered.
    heard: Vec<u8>,
    /// What the volume has answered and the operator has not taken.
    answer: Vec<u8>,
    /// The operator says nothing more, or nothing that could be understood.
    is_over: bool,
    /// When the operator must have sent a request, or have taken the answer.
    until: Instant,
}

impl Conversation {
    /// Begins a conversation over this connection, which must not block.
    pub fn new(stream: UnixStream) -> Self {
        let user = socket_peercred(&stream).ok().map(|peer| peer.uid.as_raw());
        let (heard, answer, until) = (Vec::new(), Vec::new(), Instant::now() + PATIENCE);
        Self { stream, user, heard, answer, is_over: false, until }
    }

    /// Returns the user who has connected.
    pub fn user(&self) -> Option<u32> {
        self.user
    }

    /// Returns until when nothing is to be done unless the operator does something; `None` if there is something to do.
    pub fn until(&self) -> Option<Instant> {
        (!self.answer.is_empty() || self.end_of_request().is_none()).then_some(self.until)
    }

    /// Returns what to wait for.
    pub fn awaited(&self) -> PollFd<'_> {
        let flags = if self.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT };
        PollFd::new(&self.stream, flags)
    }

    /// Does what can be done now, and answers one request at most. Returns whether the conversation goes on.
    pub fn go_on(&mut self, handler: &dyn Handler) -> io::Result<bool> {
        if self.answer.is_empty() {
            self.hear()?;
            self.answer_one(handler)?;
        }
        if self.say()? {
            return Ok(false);
        }
        // What has come while others were answered is in time.
        if self.until().is_some_and(|until| until <= Instant::now()) {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(true)
    }

    /// Receives the next part of a request, unless all of it is there.
    fn hear(&mut self) -> io::Result<()> {
        if self.end_of_request().is_some() || self.is_over {
            return Ok(());
        }
        let mut bytes = [0; REQUEST_MAX];
        match self.stream.read(&mut bytes[self.heard.len()..]) {
            Ok(0) => self.is_over = true,
            Ok(n) => self.heard.extend(&bytes[self.heard.len()..][..n]),
            Err(error) if is_later(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Lets the volume answer a request, if one is there.
    fn answer_one(&mut self, handler: &dyn Handler) -> io::Result<()> {
        let answer = match self.end_of_request() {
            Some(end) => {
                let line: Vec<u8> = self.heard.drain(..end).collect();
                match serde_json::from_slice(&line) {
                    Ok(request) => handler.answer(request),
                    Err(error) => Answer::Error(format!(
                        "this volume does not know this request: {error}; use the `ginnel` of its version"
                    )),
                }
            }
            None if self.heard.len() == REQUEST_MAX || (self.is_over && !self.heard.is_empty()) => {
                self.heard.clear();
                self.is_over = true;
                Answer::Error(format!("a request is a line of JSON of at most {REQUEST_MAX} bytes"))
            }
            None => return Ok(()),
        };
        self.answer = serde_json::to_vec(&answer)?;
        self.answer.push(b'\n');
        self.until = Instant::now() + PATIENCE;
        Ok(())
    }

    /// Sends what the operator takes of the answer. Returns whether that was the last one.
    fn say(&mut self) -> io::Result<bool> {
        while !self.answer.is_empty() {
            match self.stream.write(&self.answer) {
                Ok(n) => drop(self.answer.drain(..n)),
                Err(error) if is_later(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
            if self.answer.is_empty() {
                self.until = Instant::now() + PATIENCE;
            }
        }
        Ok(self.is_over && self.heard.is_empty())
    }

    /// Returns the length of the request that is there.
    fn end_of_request(&self) -> Option<usize> {
        self.heard.iter().position(|&byte| byte == b'\n').map(|at| at + 1)
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
