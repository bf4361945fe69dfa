//! Both ends of the transports that have a file descriptor, and of message channels.

use super::pingpong::Echo;
use anyhow::{Context, Result};
use ginnel::MessageChannel;
use std::io::{Read, Write};

/// Any transport that reads and writes: a Unix socket, a TCP connection, a pair of pipes.
pub struct Bytes<R, W> {
    /// The reader for the answers.
    pub input: R,
    /// The writer for the messages.
    pub output: W,
}

impl<R: Read, W: Write> Echo for Bytes<R, W> {
    fn exchange(&mut self, message: &mut [u8]) -> Result<()> {
        self.output.write_all(message)?;
        self.output.flush()?;
        self.input.read_exact(message).context("the other end has gone")
    }
}

impl<R: Read, W: Write> Bytes<R, W> {
    /// Echoes messages of `size` bytes until the other end closes.
    pub fn serve(mut self, size: usize) -> Result<()> {
        let mut message = vec![0; size];
        while self.input.read_exact(&mut message).is_ok() {
            self.output.write_all(&message)?;
            self.output.flush()?;
        }
        Ok(())
    }
}

/// A message channel, through the public API.
pub struct Channel(pub MessageChannel);

impl Echo for Channel {
    fn exchange(&mut self, message: &mut [u8]) -> Result<()> {
        self.0.send(message)?;
        self.0.recv_into(message)?;
        Ok(())
    }
}

/// Echoes messages until the other end finishes.
pub fn serve_messages(mut channel: MessageChannel) -> Result<()> {
    let mut message = vec![0; channel.max_message()];
    loop {
        match channel.recv_into(&mut message) {
            Ok(len) => channel.send(&message[..len])?,
            Err(ginnel::Error::Finished) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
