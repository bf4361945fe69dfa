//! The control socket. A thread of its own passes operators' requests to the volume, one after another.

use ginnel_volume_control::{Answer, REQUEST_MAX, Request};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// How long an operator may take to send a request or to receive an answer. Other operators wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);

/// The part of a volume that answers operators. Only the control thread calls it.
pub trait Handler: Send + Sync {
    /// Executes a request. May block for as long as a client waits for an answer (10 s).
    fn answer(&self, request: Request) -> Answer;
}

/// Serves operators on a new thread until the process ends. The listener is already bound, so that the process does not
/// need the right to bind it.
pub fn serve(listener: UnixListener, handler: Arc<dyn Handler>) -> io::Result<()> {
    thread::Builder::new().name("control".into()).spawn(move || {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    // A client that disconnects or is silent for too long is not worth a warning.
                    if let Err(error) = converse(stream, &*handler) {
                        tracing::debug!("control socket: {error}");
                    }
                }
                Err(error) => {
                    // The process is out of descriptors or memory: wait until some are released.
                    tracing::warn!("control socket: accept: {error}");
                    thread::sleep(PATIENCE);
                }
            }
        }
    })?;
    Ok(())
}

fn converse(stream: UnixStream, handler: &dyn Handler) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        (&mut stream).take(REQUEST_MAX as u64).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        let answer = match serde_json::from_slice::<Request>(&line) {
            _ if !whole => {
                Answer::Error(format!("a request is a line of JSON of at most {REQUEST_MAX} bytes"))
            }
            Ok(request) => handler.answer(request),
            Err(error) => Answer::Error(format!(
                "this volume does not know this request: {error}; use the `ginnel` of its version"
            )),
        };
        let mut text = serde_json::to_vec(&answer)?;
        text.push(b'\n');
        stream.get_mut().write_all(&text)?;
        if !whole {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_config::Bytes;
    use ginnel_volume_control::{Client, Error};

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
        // One client connects and says nothing; the next is served all the same.
        let _silent = UnixStream::connect(&path).unwrap();
        let asked = Request::Resize { disk: 0, size: Some(Bytes(512)) };
        assert_eq!(Client::connect("v", &path).unwrap().ask(&asked).unwrap(), Answer::Size(512));
    }
}
