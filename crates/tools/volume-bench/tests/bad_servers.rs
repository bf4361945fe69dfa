//! Servers that do not answer, or whose answers are invalid.

use ginnel_layout::vhost_user::{Header, Request, feature};
use ginnel_volume_bench::{Client, Error, Options};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use zerocopy::{FromZeros, IntoBytes};

/// Connects a client to a server that treats the connection this way, and returns the client's error.
fn connect(serve: impl FnOnce(UnixStream) + Send + 'static) -> Error {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || serve(listener.accept().unwrap().0));
    let begin = Instant::now();
    let options = Options { patience: Duration::from_millis(300), ..Options::new(&socket) };
    let error = Client::connect(options).err().expect("it cannot be connected to");
    assert!(begin.elapsed() < Duration::from_secs(10), "it took {:?}", begin.elapsed());
    server.join().unwrap();
    error
}

fn request(stream: &mut UnixStream) -> Header {
    let mut header = Header::new_zeroed();
    stream.read_exact(header.as_mut_bytes()).unwrap();
    let mut body = vec![0; header.size as usize];
    stream.read_exact(&mut body).unwrap();
    header
}

fn answer(stream: &mut UnixStream, request: u32, flags: u32, size: u32, body: &[u8]) {
    let header = Header { request, flags, size };
    stream.write_all(&[header.as_bytes(), body].concat()).unwrap();
}

/// Waits until the client has disconnected.
fn linger(mut stream: UnixStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

const ANSWER: u32 = Header::VERSION | Header::REPLY;

#[test]
fn no_server() {
    let error = Client::connect(Options::new("/nowhere/socket")).err().unwrap();
    assert!(matches!(error, Error::Connect { .. }));
    assert!(error.to_string().contains("/nowhere/socket"), "{error}");
}

#[test]
fn a_server_that_closes_the_connection() {
    assert!(matches!(connect(drop), Error::Gone));
    let error = connect(|mut stream| {
        request(&mut stream);
    });
    assert!(matches!(error, Error::Gone), "{error}");
}

#[test]
fn a_server_that_never_answers() {
    let error = connect(linger);
    assert!(matches!(error, Error::Silent { request: Request::GET_FEATURES, .. }), "{error}");
    assert!(error.to_string().contains("GET_FEATURES"), "{error}");
}

#[test]
fn a_server_that_stops_in_the_middle_of_an_answer() {
    let error = connect(|mut stream| {
        let header = request(&mut stream);
        answer(&mut stream, header.request, ANSWER, 8, &[0; 3]);
        linger(stream);
    });
    assert!(matches!(error, Error::Silent { .. }), "{error}");
}

#[test]
fn a_server_with_invalid_answers() {
    let wrong: [(u32, u32, u32, &[u8]); 5] = [
        (2, ANSWER, 8, &[0; 8]),          // Another request.
        (1, Header::VERSION, 8, &[0; 8]), // No answer.
        (1, ANSWER, 4, &[0; 4]),          // Too short.
        (1, Header::REPLY, 8, &[0; 8]),   // No version.
        (1, ANSWER, u32::MAX, &[0; 8]),   // Too long.
    ];
    for (number, flags, size, body) in wrong {
        let error = connect(move |mut stream| {
            request(&mut stream);
            answer(&mut stream, number, flags, size, body);
            linger(stream);
        });
        assert!(matches!(error, Error::Malformed { .. } | Error::Io { .. }), "{error}");
    }
}

#[test]
fn a_server_without_a_modern_device() {
    let error = connect(|mut stream| {
        let header = request(&mut stream);
        answer(&mut stream, header.request, ANSWER, 8, feature::LOG_ALL.as_bytes());
        linger(stream);
    });
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
}
