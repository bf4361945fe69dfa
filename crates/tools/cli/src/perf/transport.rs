//! The transport of a measurement: a channel of either kind, or a TCP socket, with the same few operations.

use super::parameters::{Parameters, Test};
use anyhow::Result;
use ginnel::{Error, MessageChannel, StreamChannel};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// The longest time that a transfer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the timeout of a channel. Round trips have none, because with a timeout every wait reads the clock. The
/// death of the other side is reported anyway.
fn patience(parameters: &Parameters) -> Option<Duration> {
    match parameters.test {
        Test::Latency => None,
        Test::Bandwidth => Some(PATIENCE),
    }
}

/// A connection between the two sides.
pub trait Transport {
    /// Sets the transport up for a measurement.
    fn prepare(&mut self, parameters: &Parameters) -> Result<()>;
    /// Sends all bytes, as one message if the transport has messages.
    fn send(&mut self, bytes: &[u8]) -> Result<()>;
    /// Receives bytes until the buffer is full. Returns false if the peer has finished instead.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<bool>;
    /// Receives at most a buffer full of bytes. Returns 0 if the peer has finished.
    fn receive_some(&mut self, buffer: &mut [u8]) -> Result<usize>;
    /// Sends `len` bytes that are written in place: only the first eight bytes of each run are written; the rest keeps
    /// its content.
    fn send_in_place(&mut self, len: usize) -> Result<()>;
    /// Receives the next bytes without copying them: reads only the first eight. Returns 0 if the peer has finished.
    fn receive_in_place(&mut self) -> Result<usize>;
    /// Tells the peer that no more bytes come.
    fn finish(&mut self) -> Result<()>;
    /// Returns the size of the ring in bytes, if there is one.
    fn capacity(&self) -> Option<usize>;
}

/// Returns `None` instead of an error if the peer has finished.
fn unless_finished<T>(result: Result<T, Error>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::Finished) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Transport for MessageChannel {
    fn prepare(&mut self, parameters: &Parameters) -> Result<()> {
        self.set_mode(parameters.wait_mode());
        self.set_timeout(patience(parameters));
        Ok(())
    }

    #[inline]
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(MessageChannel::send(self, bytes)?)
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> Result<bool> {
        // The peer sends each buffer as one message.
        Ok(unless_finished(self.recv_into(buffer))?.is_some())
    }

    #[inline]
    fn receive_some(&mut self, buffer: &mut [u8]) -> Result<usize> {
        Ok(unless_finished(self.recv_into(buffer))?.unwrap_or(0))
    }

    #[inline]
    fn send_in_place(&mut self, len: usize) -> Result<()> {
        let claim = self.sender().claim(len)?;
        claim.slice().write(0, &len.to_le_bytes());
        Ok(claim.send(len)?)
    }

    #[inline]
    fn receive_in_place(&mut self) -> Result<usize> {
        let Some(message) = unless_finished(self.receiver().peek())? else { return Ok(0) };
        let len = message.len();
        message.slice().read(0, &mut [0; 8]);
        message.release()?;
        Ok(len)
    }

    fn finish(&mut self) -> Result<()> {
        self.sender().finish();
        Ok(())
    }

    fn capacity(&self) -> Option<usize> {
        Some(self.info().capacity)
    }
}

impl Transport for StreamChannel {
    fn prepare(&mut self, parameters: &Parameters) -> Result<()> {
        self.set_mode(parameters.wait_mode());
        self.set_timeout(patience(parameters));
        Ok(())
    }

    #[inline]
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.sender().send_all(bytes)?)
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> Result<bool> {
        let mut got = 0;
        while got < buffer.len() {
            match self.receiver().recv(&mut buffer[got..])? {
                0 => return Ok(false),
                n => got += n,
            }
        }
        Ok(true)
    }

    #[inline]
    fn receive_some(&mut self, buffer: &mut [u8]) -> Result<usize> {
        Ok(self.receiver().recv(buffer)?)
    }

    #[inline]
    fn send_in_place(&mut self, len: usize) -> Result<()> {
        let mut left = len;
        while left > 0 {
            let room = self.sender().claim(left)?;
            room.slice().write(0, &len.to_le_bytes());
            let n = room.slice().len();
            room.send(n)?;
            left -= n;
        }
        Ok(())
    }

    #[inline]
    fn receive_in_place(&mut self) -> Result<usize> {
        let Some(bytes) = unless_finished(self.receiver().peek())? else { return Ok(0) };
        let len = bytes.len();
        bytes.slice().read(0, &mut [0; 8]);
        bytes.release(len)?;
        Ok(len)
    }

    fn finish(&mut self) -> Result<()> {
        self.sender().finish();
        Ok(())
    }

    fn capacity(&self) -> Option<usize> {
        Some(self.info().capacity)
    }
}

impl Transport for TcpStream {
    fn prepare(&mut self, _: &Parameters) -> Result<()> {
        self.set_nodelay(true)?;
        self.set_read_timeout(Some(PATIENCE))?;
        self.set_write_timeout(Some(PATIENCE))?;
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.write_all(bytes)?)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<bool> {
        match self.read_exact(buffer) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn receive_some(&mut self, buffer: &mut [u8]) -> Result<usize> {
        Ok(self.read(buffer)?)
    }

    fn send_in_place(&mut self, _: usize) -> Result<()> {
        anyhow::bail!("a socket always copies")
    }

    fn receive_in_place(&mut self) -> Result<usize> {
        anyhow::bail!("a socket always copies")
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self.shutdown(Shutdown::Write)?)
    }

    fn capacity(&self) -> Option<usize> {
        None
    }
}
