//! The client of a volume's control socket.

use crate::{Answer, Request};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// How long a volume may take for an answer. A resize drains queues; everything else takes microseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest accepted answer, in bytes.
const ANSWER_MAX: u64 = 64 << 20;

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum Error {
    /// No process listens at the socket.
    #[error("volume {0} is not running (no process listens at {1}): start it with `ginnel volume serve {0}`")]
    NotRunning(String, PathBuf),
    /// The user may not connect to the socket.
    #[error("no permission for {0}: become root, or a member of the volume's control-group")]
    NoRight(PathBuf),
    /// The volume does not answer, or its answer is not understood.
    #[error("{path}: {cause}")]
    Broken {
        /// Path of the control socket.
        path: PathBuf,
        /// The error.
        cause: io::Error,
    },
    /// The volume has refused the request.
    #[error("{0}")]
    Refused(String),
}

/// A connection to a volume's control socket. Each call blocks until there is an answer, for at most some seconds.
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to a volume. `name` appears in messages.
    pub fn connect(name: &str, path: &Path) -> Result<Self, Error> {
        let broken = |cause| Error::Broken { path: path.into(), cause };
        let stream = UnixStream::connect(path).map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                Error::NotRunning(name.into(), path.into())
            }
            io::ErrorKind::PermissionDenied => Error::NoRight(path.into()),
            _ => broken(cause),
        })?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(broken)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(broken)?;
        Ok(Self { path: path.into(), stream: BufReader::new(stream) })
    }

    /// Sends a request, and waits for the answer. [`Answer::Error`] becomes [`Error::Refused`].
    pub fn ask(&mut self, request: &Request) -> Result<Answer, Error> {
        match self.exchange(request) {
            Ok(Answer::Error(text)) => Err(Error::Refused(text)),
            Ok(answer) => Ok(answer),
            Err(cause) => Err(Error::Broken { path: self.path.clone(), cause }),
        }
    }

    fn exchange(&mut self, request: &Request) -> io::Result<Answer> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        let mut answer = String::new();
        let read =
            (&mut self.stream).take(ANSWER_MAX).read_line(&mut answer).map_err(|e| match e.kind() {
                io::ErrorKind::WouldBlock => io::Error::new(
                    e.kind(),
                    "the volume does not answer; see its log, or kill and restart it",
                ),
                _ => e,
            })?;
        if read == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the volume has ended the connection"));
        }
        Ok(serde_json::from_str(&answer)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Runs a server that reads a line and answers `answer`. Returns the client's result.
    fn served(answer: &'static str) -> (tempfile::TempDir, Result<Answer, Error>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.ctl");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut stream = BufReader::new(stream);
            stream.read_line(&mut String::new()).unwrap();
            stream.get_mut().write_all(answer.as_bytes()).unwrap();
        });
        let answer = Client::connect("v", &path).unwrap().ask(&Request::Stat);
        server.join().unwrap();
        (folder, answer)
    }

    #[test]
    fn answers_come_back() {
        assert_eq!(served("{\"size\":4096}\n").1.unwrap(), Answer::Size(4096));
        assert!(matches!(served("{\"error\":\"no\"}\n").1, Err(Error::Refused(text)) if text == "no"));
    }

    #[test]
    fn nonsense_and_silence_are_errors() {
        assert!(matches!(served("what?\n").1, Err(Error::Broken { .. })));
        assert!(matches!(served("").1, Err(Error::Broken { .. })));
        let folder = tempfile::tempdir().unwrap();
        let error = Client::connect("v", &folder.path().join("v.ctl")).err().unwrap();
        assert!(error.to_string().contains("ginnel volume serve v"), "{error}");
    }
}
