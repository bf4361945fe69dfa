//! The two ends of the connection, with each other and with somebody who sends nonsense.

use super::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::socketpair;
use std::os::unix::fs::PermissionsExt;

fn pair() -> (EngineEnd, HolderEnd) {
    let (engine, holder) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    (EngineEnd(engine), HolderEnd(holder))
}

fn eventfds(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect()
}

fn file() -> OwnedFd {
    memfd_create("file", MemfdFlags::CLOEXEC).unwrap()
}

const TERMS: Terms = Terms { queues: 3, slots: 128, mapped: true, vectors: 4 };
const RANGE: Range = Range { iova: 0x10_0000, len: 0x2000, offset: 0x1000, writable: true };

#[test]
fn an_engine_attaches() {
    let (engine, holder) = pair();
    assert!(holder.receive().unwrap().is_none());
    engine.hello(file().as_fd(), &eventfds(4)).unwrap();
    let Some(FromEngine::Hello { version: VERSION, turn: Some(_), kicks }) = holder.receive().unwrap() else {
        panic!("no hello")
    };
    assert_eq!(kicks.len(), 4);
    assert!(engine.receive(false).unwrap().is_none());

    let (state, doorbells, vector) = (file(), file(), file());
    let (state, doorbells) = (state.as_fd(), doorbells.as_fd());
    for message in [
        ToEngine::Welcome { terms: TERMS, state, doorbells },
        ToEngine::Map { range: RANGE, file: state },
        ToEngine::Vector { number: 2, eventfd: Some(vector.as_fd()) },
        ToEngine::Vector { number: 3, eventfd: None },
        ToEngine::Control { id: 0 },
        ToEngine::Unmap { id: 9, iova: RANGE.iova, len: RANGE.len },
    ] {
        assert_eq!(holder.send(message).unwrap(), Sent::Yes);
    }
    let next = || engine.receive(true).unwrap().unwrap();
    assert!(matches!(next(), FromHolder::Welcome { terms: TERMS, .. }));
    assert!(matches!(next(), FromHolder::Map { range: RANGE, .. }));
    assert!(matches!(next(), FromHolder::Vector { number: 2, eventfd: Some(_) }));
    assert!(matches!(next(), FromHolder::Vector { number: 3, eventfd: None }));
    assert!(matches!(next(), FromHolder::Control { id: 0 }));
    assert!(matches!(next(), FromHolder::Unmap { id: 9, iova: 0x10_0000, len: 0x2000 }));
    engine.done(9).unwrap();
    assert!(matches!(holder.receive().unwrap(), Some(FromEngine::Done(9))));
    drop(engine);
    assert!(matches!(holder.receive(), Err(Gone::Closed)));
    assert!(matches!(holder.send(ToEngine::Control { id: 0 }), Err(Gone::Closed)));
}

#[test]
fn an_engine_is_refused() {
    let (engine, holder) = pair();
    let _ = holder.send(ToEngine::Refused { reason: Reason::QUEUES, have: 8 }).unwrap();
    drop(holder);
    let refused = engine.receive(true).unwrap().unwrap();
    assert!(matches!(refused, FromHolder::Refused { reason: Reason::QUEUES, have: 8 }), "{refused:?}");
    assert!(matches!(engine.receive(true), Err(Gone::Closed)));
    let (engine, _holder) = pair();
    engine.hello::<OwnedFd>(file().as_fd(), &[]).unwrap_err();
}

#[test]
fn all_kick_eventfds_fit_into_one_packet() {
    let (engine, holder) = pair();
    let one = eventfds(1);
    let most = vec![one[0].as_fd(); MAX_QUEUES as usize + 1];
    engine.hello(one[0].as_fd(), &most).unwrap();
    let hello = holder.receive().unwrap();
    assert!(matches!(hello, Some(FromEngine::Hello { kicks, .. }) if kicks.len() == most.len()));
    engine.hello(one[0].as_fd(), &[&most[..], &most[..1]].concat()).unwrap_err();
}

#[test]
fn an_engine_that_does_not_read_holds_nobody_up() {
    let (_engine, holder) = pair();
    let file = file();
    let later = (0..100_000)
        .find(|_| holder.send(ToEngine::Map { range: RANGE, file: file.as_fd() }).unwrap() == Sent::Later);
    assert!(later.is_some());
}

/// Sends raw bytes and descriptors from one end, and returns what the other end makes of them.
fn as_engine(bytes: &[u8], fds: usize) -> Result<Option<FromEngine>, Gone> {
    let (engine, holder) = pair();
    fdpass::send(engine.as_fd(), bytes, &eventfds(fds), SendFlags::empty()).unwrap();
    holder.receive()
}

fn as_holder(bytes: &[u8], fds: usize) -> Result<Option<FromHolder>, Gone> {
    let (engine, holder) = pair();
    fdpass::send(holder.as_fd(), bytes, &eventfds(fds), SendFlags::empty()).unwrap();
    engine.receive(false)
}

fn refused<T: std::fmt::Debug>(result: Result<T, Gone>) {
    assert!(matches!(result, Err(Gone::Refused(_))), "{result:?}");
}

#[test]
fn lies_of_an_engine() {
    let hello = Hello { kind: Kind::HELLO, version: VERSION, queues: 1, reserved: 0 };
    as_engine(hello.as_bytes(), 3).unwrap();
    refused(as_engine(hello.as_bytes(), 2));
    refused(as_engine(hello.as_bytes(), 4));
    refused(as_engine(Hello { queues: u32::MAX - 1, ..hello }.as_bytes(), 1));
    refused(as_engine(&hello.as_bytes()[..12], 3));
    refused(as_engine(&[1], 0));
    refused(as_engine(&[1; 400], 0));
    // Nothing is known about the rest of a future hello.
    let future = as_engine(Hello { version: 2, queues: 7, ..hello }.as_bytes(), 2).unwrap();
    assert!(matches!(future, Some(FromEngine::Hello { version: 2, .. })));
    let done = Done { kind: Kind::DONE, reserved: 0, id: 1 };
    as_engine(done.as_bytes(), 0).unwrap();
    refused(as_engine(done.as_bytes(), 1));
    refused(as_engine(Done { id: 0, ..done }.as_bytes(), 0));
    refused(as_engine(Control { kind: Kind::CONTROL, reserved: 0, id: 1 }.as_bytes(), 0));
}

#[test]
fn lies_of_a_holder() {
    let welcome =
        Welcome { kind: Kind::WELCOME, version: VERSION, queues: 1, slots: 64, mapped: 0, vectors: 2 };
    as_holder(welcome.as_bytes(), 2).unwrap();
    refused(as_holder(welcome.as_bytes(), 1));
    refused(as_holder(Welcome { version: 2, ..welcome }.as_bytes(), 2));
    refused(as_holder(Welcome { slots: 65, ..welcome }.as_bytes(), 2));
    refused(as_holder(Welcome { slots: 0, ..welcome }.as_bytes(), 2));
    refused(as_holder(Welcome { queues: MAX_QUEUES + 1, ..welcome }.as_bytes(), 2));
    refused(as_holder(Welcome { mapped: 2, ..welcome }.as_bytes(), 2));
    let map = Map { kind: Kind::MAP, flags: 0, iova: 0x1000, len: 0x1000, offset: 0, reserved: 0 };
    as_holder(map.as_bytes(), 1).unwrap();
    as_holder(Map { iova: u64::MAX - 0xfff, ..map }.as_bytes(), 1).unwrap();
    refused(as_holder(map.as_bytes(), 0));
    refused(as_holder(map.as_bytes(), 2));
    refused(as_holder(Map { len: 0, ..map }.as_bytes(), 1));
    refused(as_holder(Map { iova: u64::MAX - 0xffe, ..map }.as_bytes(), 1));
    refused(as_holder(Map { offset: u64::MAX, ..map }.as_bytes(), 1));
    refused(as_holder(Map { flags: 2, ..map }.as_bytes(), 1));
    let vector = Vector { kind: Kind::VECTOR, number: 0 };
    as_holder(vector.as_bytes(), 0).unwrap();
    refused(as_holder(vector.as_bytes(), 2));
    refused(as_holder(Hello { kind: Kind::HELLO, version: 1, queues: 0, reserved: 0 }.as_bytes(), 1));
}

#[test]
fn nobody_listens_where_there_is_no_holder() {
    let folder = tempfile::tempdir().unwrap();
    let nobody = EngineEnd::connect(&folder.path().join("v.sock.engine")).unwrap_err();
    assert_eq!(nobody.kind(), io::ErrorKind::NotFound);
}

#[test]
fn one_holder_listens() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("v.sock.engine");
    let first = listen(&place, None).unwrap();
    assert_eq!(std::fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o600);
    let error = listen(&place, None).unwrap_err().to_string();
    assert!(error.contains("another holder"), "{error}");
    let engine = EngineEnd::connect(&place).unwrap();
    // The look of the second one is in the queue too.
    let holders: Vec<_> = (0..3).filter_map(|_| HolderEnd::accept(first.as_fd()).unwrap()).collect();
    assert_eq!(holders.len(), 2);
    engine.hello(file().as_fd(), &eventfds(1)).unwrap();
    drop((first, holders));
    let refused = EngineEnd::connect(&place).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    drop(listen(&place, None).unwrap());
    std::fs::remove_file(&place).unwrap();
    std::fs::write(&place, "precious").unwrap();
    listen(&place, None).unwrap_err();
    assert_eq!(std::fs::read_to_string(&place).unwrap(), "precious");
}
