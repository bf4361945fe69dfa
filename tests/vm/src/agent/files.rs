//! Files that are written for the harness or sent to it.

use crate::Outbox;
use crate::protocol::{Frame, MAX_PAYLOAD};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Files that the harness is sending. A file that fails is reported once and forgotten; its later pieces are ignored.
#[derive(Default)]
pub struct Incoming(HashMap<u32, Put>);

struct Put {
    file: File,
    mode: u32,
    total: u64,
}

impl Incoming {
    pub fn begin(&mut self, id: u32, mode: u32, path: &str) -> io::Result<()> {
        if let Some(parent) = Path::new(path).parent() {
            fs::create_dir_all(parent)?;
        }
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        self.0.insert(id, Put { file, mode, total: 0 });
        Ok(())
    }

    pub fn data(&mut self, id: u32, bytes: &[u8]) -> io::Result<()> {
        let Some(put) = self.0.get_mut(&id) else { return Ok(()) };
        put.total += bytes.len() as u64;
        put.file.write_all(bytes).inspect_err(|_| {
            self.0.remove(&id);
        })
    }

    /// Completes the file and returns its length, or `None` for a file that has failed before.
    pub fn end(&mut self, id: u32) -> io::Result<Option<u64>> {
        let Some(put) = self.0.remove(&id) else { return Ok(None) };
        put.file.set_permissions(fs::Permissions::from_mode(put.mode))?;
        Ok(Some(put.total))
    }
}

/// Sends a file of the guest in pieces.
pub fn send(id: u32, path: &str, outbox: &Outbox) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; MAX_PAYLOAD];
    let mut total = 0;
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return outbox.send(&Frame::End { id, total });
        }
        total += n as u64;
        outbox.send(&Frame::Data { id, bytes: buffer[..n].to_vec() })?;
    }
}
