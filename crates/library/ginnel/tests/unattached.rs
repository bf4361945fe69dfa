//! A session with the daemon before a segment is chosen: requests without waiting, and the attach that follows.

use ginnel::{Answer, AttachOptions, Endpoint, Error, ErrorCode, MessageChannel, Opening};
use ginnel_daemon::packet;
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};
use rustix::net::SocketType;
use rustix::process::Signal;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::thread;

const TWO: &str =
    "[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n[segment.db]\nsize = \"8M\"\nmembers = [\"host\"]\n";

fn begin(daemon: &Daemon) -> Opening<ginnel::Daemon> {
    ginnel::Daemon::begin_connect(&daemon.socket()).unwrap()
}

/// Completes an opening by its descriptor, as a loop over poll(2) does.
fn finish<T>(mut opening: Opening<T>) -> Result<T, Error> {
    loop {
        if let Some(open) = opening.poll()? {
            return Ok(open);
        }
        assert!(readable(opening.poll_fd().unwrap(), WATCHDOG), "the daemon does not answer");
    }
}

/// Waits for the next answer by the session's descriptor.
fn next(session: &mut ginnel::Daemon) -> (ginnel::Question, Result<String, Error>) {
    loop {
        if let Some(Answer { question, answer }) = session.poll().unwrap() {
            return (question, answer);
        }
        assert!(readable(session.poll_fd().unwrap(), WATCHDOG), "the daemon does not answer");
    }
}

fn segments(status: &str) -> Vec<String> {
    let status: serde_json::Value = serde_json::from_str(status).unwrap();
    let name = |segment: &serde_json::Value| segment["name"].as_str().unwrap().to_owned();
    status["segments"].as_array().unwrap().iter().map(name).collect()
}

#[test]
fn a_segment_is_chosen_after_questions_over_the_same_connection() {
    let daemon = Daemon::start_new(TWO);
    // Only one connection to the daemon is possible at this path, so a second attempt to connect would fail.
    let path = daemon.run("between.sock");
    let listener = packet::listen_at(&path, SocketType::SEQPACKET).unwrap();
    let opening = ginnel::Daemon::begin_connect(&path).unwrap();
    let program = packet::accept(listener.as_fd()).unwrap().unwrap();
    drop(listener);
    let target = packet::connect_to(&daemon.socket()).unwrap();
    thread::spawn(move || forward_packets(program, target, |_| {}));

    let mut session = finish(opening).unwrap();
    assert_eq!((session.member(), session.member_name()), (0, "host"));
    // No endpoint exists so far.
    assert!(daemon.inspect()["endpoints"].as_array().unwrap().is_empty());
    let question = session.begin_inspect().unwrap();
    let (answered, status) = next(&mut session);
    assert_eq!(answered, question);
    let mut found = segments(&status.unwrap());
    found.sort();
    assert_eq!(found, ["db", "web"]);

    let options = AttachOptions { name: Some("late".into()), ..AttachOptions::default() };
    let endpoint = finish(session.attach(&found[0], &options).unwrap()).unwrap();
    let status = daemon.inspect();
    assert_eq!(status["endpoints"][0]["segment"], "db");
    assert_eq!(status["endpoints"][0]["name"], "late");
    // The endpoint works like any other.
    let listener = endpoint.listen::<MessageChannel>("x").unwrap();
    let mut near: MessageChannel = endpoint.connect("x").unwrap();
    let mut far = listener.accept_timeout(WATCHDOG).unwrap();
    near.send(b"ping").unwrap();
    far.set_timeout(Some(WATCHDOG));
    assert_eq!(far.recv().unwrap(), b"ping");
    assert!(endpoint.inspect().unwrap().starts_with('{'));
    drop((near, far, listener, endpoint));
    wait_for("its end", || daemon.inspect()["endpoints"].as_array().unwrap().is_empty().then_some(()));
}

#[test]
fn many_questions_are_under_way_at_once_and_each_is_answered_once() {
    let daemon = Daemon::start_new(TWO);
    let mut session = begin(&daemon).wait().unwrap();
    let mut under_way = HashMap::new();
    for i in 0..300 {
        match i % 3 {
            // Some of the requests are refused.
            0 => under_way.insert(session.begin_admin("nonsense").unwrap(), false),
            _ => under_way.insert(session.begin_inspect().unwrap(), true),
        };
    }
    // A call that waits for its answer does not take the answers to other requests.
    assert_eq!(segments(&session.inspect().unwrap()).len(), 2);
    while !under_way.is_empty() {
        let (question, answer) = next(&mut session);
        match (under_way.remove(&question), answer) {
            (Some(true), Ok(status)) => assert_eq!(segments(&status).len(), 2),
            (Some(false), Err(Error::Refused { .. })) => {}
            other => panic!("{question:?}: {other:?}"),
        }
    }
    assert!(session.poll().unwrap().is_none());
}

#[test]
fn no_begin_call_waits_for_a_stopped_daemon() {
    let daemon = Daemon::start_new(TWO);
    let mut greeted = begin(&daemon).wait().unwrap();
    let attaching = begin(&daemon).wait().unwrap();
    daemon.signal(Signal::STOP);
    // A call that waited for an answer would get none, and fail.
    let mut opening = begin(&daemon);
    assert!(opening.poll().unwrap().is_none());
    let question = greeted.begin_inspect().unwrap();
    assert!(greeted.poll().unwrap().is_none());
    let mut attaching = attaching.attach("web", &AttachOptions::default()).unwrap();
    assert!(attaching.poll().unwrap().is_none());
    let mut direct = Endpoint::begin_attach("web", &options(&daemon)).unwrap();
    assert!(direct.poll().unwrap().is_none());
    daemon.signal(Signal::CONT);
    finish(opening).unwrap();
    let (answered, status) = next(&mut greeted);
    assert_eq!((answered, segments(&status.unwrap()).len()), (question, 2));
    assert_ne!(finish(attaching).unwrap().number(), finish(direct).unwrap().number());
}

fn options(daemon: &Daemon) -> AttachOptions {
    AttachOptions { socket: daemon.socket(), ..AttachOptions::default() }
}

#[test]
fn refusals_of_the_daemon_are_reported() {
    let daemon = Daemon::start_new(TWO);
    let nowhere = daemon.run("nobody.sock");
    let nobody = finish(ginnel::Daemon::begin_connect(&nowhere).unwrap());
    assert!(matches!(nobody, Err(Error::NoDaemon { .. })), "there is none");
    let session = begin(&daemon).wait().unwrap();
    let unknown = finish(session.attach("unknown", &AttachOptions::default()).unwrap()).err().unwrap();
    assert!(unknown.code().is_some_and(|code| code != ErrorCode::UNAVAILABLE), "{unknown}");
    let session = begin(&daemon).wait().unwrap();
    assert!(matches!(session.attach("no/name", &AttachOptions::default()), Err(Error::Name { .. })));
    let mut opening = begin(&daemon);
    while opening.poll().unwrap().is_none() {
        assert!(readable(opening.poll_fd().unwrap(), WATCHDOG));
    }
    assert!(opening.poll().is_err() && opening.poll_fd().is_err(), "it is open already");
}

#[test]
fn questions_outlive_the_daemon() {
    let mut daemon = Daemon::start_new(TWO);
    let mut session = begin(&daemon).wait().unwrap();
    daemon.signal(Signal::STOP);
    let question = session.begin_inspect().unwrap();
    let order = session.begin_admin("nonsense").unwrap();
    daemon.restart();
    let mut answers = HashMap::from([next(&mut session), next(&mut session)]);
    assert_eq!(segments(&answers.remove(&question).unwrap().unwrap()).len(), 2);
    // The daemon may have executed the order, so it is not repeated.
    assert!(matches!(answers.remove(&order), Some(Err(Error::NoDaemon { .. }))));
    // An attach that is under way is also repeated to the next daemon.
    daemon.signal(Signal::STOP);
    let opening = session.attach("web", &AttachOptions::default()).unwrap();
    daemon.restart();
    let endpoint = finish(opening).unwrap();
    assert!(endpoint.inspect().unwrap().starts_with('{'));
}

#[test]
fn an_abandoned_attach_leaves_no_endpoint() {
    let daemon = Daemon::start_new(TWO);
    let session = begin(&daemon).wait().unwrap();
    daemon.signal(Signal::STOP);
    let over = session.attach("web", &AttachOptions::default()).unwrap();
    let direct = Endpoint::begin_attach("web", &options(&daemon)).unwrap();
    drop((over, direct));
    daemon.signal(Signal::CONT);
    // This endpoint attaches later, so the daemon has seen the earlier requests.
    let endpoint = Endpoint::attach_with("web", &options(&daemon)).unwrap();
    wait_for("the end of the others", || {
        let status = daemon.inspect();
        let endpoints = status["endpoints"].as_array().unwrap();
        (endpoints.len() == 1 && endpoints[0]["number"] == endpoint.number().0).then_some(())
    });
    // Both of the others were attached, and then ended.
    assert_eq!(daemon.log().matches("INFO endpoint endpoint=").count(), 3);
}
