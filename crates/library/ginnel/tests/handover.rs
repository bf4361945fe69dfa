//! Endpoints and channels that are handed over: to the program that a process executes, or to another process.

use ginnel::{
    AttachOptions, Daemon as Session, Endpoint, Error, ErrorCode, Listener, MessageChannel, ReadySet,
    SavedChannel, StreamChannel, Token,
};
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

/// So long that no hold expires during a test.
const LONG: Duration = Duration::from_secs(600);
const WEB: &str = "[limits]\nmax_hold = \"600s\"\n[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n";
/// The number of messages, and how many of them a program answers before it executes itself.
const MESSAGES: u64 = 1000;
const EACH: u64 = 90;

fn options(socket: PathBuf, name: &str) -> AttachOptions {
    AttachOptions { socket, name: Some(name.into()), ..AttachOptions::default() }
}

fn attach(daemon: &Daemon, name: &str) -> Endpoint {
    Endpoint::attach_with("web", &options(daemon.socket(), name)).unwrap()
}

fn adopt(daemon: &Daemon, token: &Token) -> Result<Endpoint, Error> {
    Endpoint::adopt_with(token, &options(daemon.socket(), "heir"))
}

fn code<T>(result: Result<T, Error>) -> Option<ErrorCode> {
    result.err().and_then(|error| error.code())
}

/// Opens a channel and returns both of its ends.
fn pair(from: &Endpoint, to: &Endpoint, name: &str) -> (MessageChannel, MessageChannel) {
    let listener = to.listen::<MessageChannel>(name).unwrap();
    let mut near: MessageChannel = from.connect(name).unwrap();
    let mut far = listener.accept_timeout(WATCHDOG).unwrap();
    near.set_timeout(Some(WATCHDOG));
    far.set_timeout(Some(WATCHDOG));
    (near, far)
}

/// Returns what the status shows about the endpoint of this name.
fn endpoint(daemon: &Daemon, name: &str) -> Option<Value> {
    let status = daemon.inspect();
    status["endpoints"].as_array()?.iter().find(|e| e["name"] == name).cloned()
}

fn program_options() -> AttachOptions {
    options(program_socket(), "program")
}

fn start<F: Fn()>(daemon: &Daemon, program: F) -> Child {
    daemon.program(program).stdout(Stdio::piped()).spawn().unwrap()
}

/// Returns the next line that the program prints.
fn says(lines: &mut impl BufRead) -> String {
    let mut line = String::new();
    assert_ne!(lines.read_line(&mut line).unwrap(), 0, "the program has ended");
    line.trim().to_owned()
}

kit::program! {
    /// Answers messages and bytes. Executes itself again and again in between.
    fn execute_itself() {
        let begun = std::env::var("TEST_PROGRAM_STATE").ok();
        let (endpoint, mut messages, mut bytes, first): (_, MessageChannel, StreamChannel, u64) = match &begun {
            None => {
                let endpoint = Endpoint::attach_with("web", &program_options()).unwrap();
                let (messages, bytes) =
                    (endpoint.connect("messages").unwrap(), endpoint.connect("bytes").unwrap());
                (endpoint, messages, bytes, 0)
            }
            Some(state) => {
                let [token, messages, bytes, first] = state.split(' ').collect::<Vec<_>>().try_into().unwrap();
                let endpoint = Endpoint::adopt_with(&token.parse().unwrap(), &program_options()).unwrap();
                let saved = |text: &str| text.parse::<SavedChannel>().unwrap();
                let resumed =
                    (endpoint.resume(&saved(messages)).unwrap(), endpoint.resume(&saved(bytes)).unwrap());
                (endpoint, resumed.0, resumed.1, first.parse().unwrap())
            }
        };
        messages.set_timeout(Some(WATCHDOG));
        bytes.set_timeout(Some(WATCHDOG));
        let last = MESSAGES.min(first + EACH);
        for number in first..last {
            assert_eq!(messages.recv().unwrap(), number.to_ne_bytes());
            messages.send(&number.to_ne_bytes()).unwrap();
            let mut eight = [0; 8];
            bytes.receiver().read_exact(&mut eight).unwrap();
            assert_eq!(u64::from_ne_bytes(eight), number);
            bytes.sender().send_all(&eight).unwrap();
        }
        if last == MESSAGES {
            return;
        }
        // Each of the executed programs takes a readiness board for its set. There are more of them than an endpoint may have
        // boards.
        let set = ReadySet::new().unwrap();
        messages.receiver().register(&set, 1).unwrap();
        let token = endpoint.hold(LONG).unwrap();
        let state = format!("{} {} {} {last}", token.reveal(), messages.save(), bytes.save());
        panic!("{}", kit::program::command(execute_itself).env("TEST_PROGRAM_STATE", state).exec());
    }
}

kit::program! {
    /// Holds its endpoint for a successor, and ends before anybody adopts it.
    fn give() {
        let endpoint = Endpoint::attach_with("web", &program_options()).unwrap();
        let listener = endpoint.listen::<MessageChannel>("program").unwrap();
        let mut channel = listener.accept().unwrap();
        assert_eq!(channel.recv().unwrap(), b"1");
        channel.send(b"1").unwrap();
        // Another message is left for the successor.
        assert!(!channel.receiver().peek().unwrap().is_empty());
        let token = endpoint.hold(LONG).unwrap();
        println!("{} {}", token.reveal(), channel.save());
        let _ = std::io::stdin().read_line(&mut String::new());
        // Connections that wait at the listener are not refused.
        listener.leave();
    }
}

kit::program! {
    /// Adopts the endpoint that its standard input names.
    fn take() {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        let (token, saved) = line.trim().split_once(' ').unwrap();
        let endpoint = Endpoint::adopt_with(&token.parse().unwrap(), &program_options()).unwrap();
        let mut channel: MessageChannel = endpoint.resume(&saved.parse().unwrap()).unwrap();
        assert_eq!(channel.recv().unwrap(), b"2");
        channel.send(b"2").unwrap();
        // It also accepts the connection that was made meanwhile.
        let listener = endpoint.listen::<MessageChannel>("program").unwrap();
        let mut other = listener.accept().unwrap();
        assert!(matches!(listener.try_accept(), Err(Error::WouldBlock)), "the resumed one does not come again");
        other.send(b"3").unwrap();
        println!("done");
        let _ = std::io::stdin().read_line(&mut String::new());
        // Forgetting them means that no destructor tells the peers anything.
        std::mem::forget((endpoint, channel, listener, other));
    }
}

#[test]
fn a_program_executes_itself_in_the_middle_of_a_conversation() {
    let mut daemon = Daemon::start_new(WEB);
    let own = attach(&daemon, "own");
    let messages: Listener<MessageChannel> = own.listen("messages").unwrap();
    let bytes: Listener<StreamChannel> = own.listen("bytes").unwrap();
    let mut program = start(&daemon, execute_itself);
    let (mut to, mut from) = messages.accept_timeout(WATCHDOG).unwrap().split();
    let (mut bytes_to, mut bytes_from) = bytes.accept_timeout(WATCHDOG).unwrap().split();
    from.set_timeout(Some(WATCHDOG));
    bytes_from.set_timeout(Some(WATCHDOG));
    // The sender is as far ahead as the rings allow, so there are always messages under way.
    let sender = std::thread::spawn(move || {
        for number in 0..MESSAGES {
            to.send(&number.to_ne_bytes()).unwrap();
            bytes_to.send_all(&number.to_ne_bytes()).unwrap();
        }
        (to, bytes_to)
    });
    for number in 0..MESSAGES {
        assert_eq!(from.recv().unwrap(), number.to_ne_bytes());
        let mut eight = [0; 8];
        bytes_from.read_exact(&mut eight).unwrap();
        assert_eq!(u64::from_ne_bytes(eight), number);
        // The daemon is replaced in the middle.
        if number == MESSAGES / 2 {
            daemon.restart();
        }
    }
    assert!(matches!(from.recv(), Err(Error::Finished)));
    drop(sender.join().unwrap());
    assert!(program.wait().unwrap().success());
    wait_for("the end of its endpoint", || endpoint(&daemon, "program").is_none().then_some(()));
}

#[test]
fn a_process_hands_its_connections_to_another_and_exits() {
    let daemon = Daemon::start_new(WEB);
    let own = attach(&daemon, "own");
    let mut giver = start(&daemon, give);
    let mut channel: MessageChannel = wait_for("its listener", || own.connect("program").ok());
    channel.set_timeout(Some(WATCHDOG));
    channel.send(b"1").unwrap();
    channel.send(b"2").unwrap();
    let mut lines = BufReader::new(giver.stdout.take().unwrap());
    let said = says(&mut lines);
    drop(giver.stdin.take());
    assert!(giver.wait().unwrap().success());
    wait_for("its end", || (endpoint(&daemon, "program")?["pids"] == json!([])).then_some(()));
    assert_eq!(channel.recv().unwrap(), b"1");
    // Somebody connects while no process owns the endpoint.
    let mut other: MessageChannel = own.connect("program").unwrap();
    other.set_timeout(Some(WATCHDOG));
    let mut heir = start(&daemon, take);
    let mut stdin = heir.stdin.take().unwrap();
    writeln!(stdin, "{said}").unwrap();
    assert_eq!(channel.recv().unwrap(), b"2");
    assert_eq!(other.recv().unwrap(), b"3");
    let mut lines = BufReader::new(heir.stdout.take().unwrap());
    assert_eq!(says(&mut lines), "done");
    assert_eq!(endpoint(&daemon, "program").unwrap()["pids"], json!([heir.id()]));
    // The token has been used by a process other than this one.
    let token: Token = said.split_once(' ').unwrap().0.parse().unwrap();
    assert_eq!(code(adopt(&daemon, &token)), Some(ErrorCode::STALE));
    heir.kill().unwrap();
    heir.wait().unwrap();
    assert!(matches!(channel.recv(), Err(Error::PeerDead)));
    assert!(matches!(other.recv(), Err(Error::PeerDead)));
}

#[test]
fn a_hold_that_nobody_adopts_ends() {
    let daemon = Daemon::start_new(WEB);
    let (own, program) = (attach(&daemon, "own"), attach(&daemon, "program"));
    let (mut near, far) = pair(&own, &program, "x");
    let token = program.hold(Duration::from_millis(1)).unwrap();
    let saved = far.save();
    drop(program);
    assert!(matches!(near.recv(), Err(Error::PeerDead)));
    assert_eq!(code(adopt(&daemon, &token)), Some(ErrorCode::STALE));
    assert_eq!(code(own.resume::<MessageChannel>(&saved)), Some(ErrorCode::NOT_FOUND));
    // A hold that is released ends too.
    let program = attach(&daemon, "program");
    let (mut near, far) = pair(&own, &program, "x");
    let token = program.hold(LONG).unwrap();
    far.save();
    program.release(&token);
    drop(program);
    assert!(matches!(near.recv(), Err(Error::PeerDead)));
    assert!(endpoint(&daemon, "program").is_none());
}

#[test]
fn a_hold_outlives_the_daemon() {
    let mut daemon = Daemon::start_new(WEB);
    let (own, program) = (attach(&daemon, "own"), attach(&daemon, "program"));
    let (mut near, mut far) = pair(&own, &program, "x");
    near.send(b"before").unwrap();
    far.send(b"before").unwrap();
    let token = program.hold(LONG).unwrap();
    let saved = far.save();
    drop(program);
    wait_for("its end", || (endpoint(&daemon, "program")?["pids"] == json!([])).then_some(()));
    daemon.restart();
    let held = endpoint(&daemon, "program").unwrap();
    assert_eq!((&held["pids"], &held["held"], &held["attached"]), (&json!([]), &json!(true), &json!(false)));
    near.send(b"between").unwrap();
    // Adopt over a session that has not chosen a segment.
    let session = Session::connect_to(&daemon.socket()).unwrap();
    let heir = session.adopt(&token, &AttachOptions::default()).unwrap().wait().unwrap();
    daemon.restart();
    let mut far: MessageChannel = heir.resume(&saved).unwrap();
    far.set_timeout(Some(WATCHDOG));
    assert_eq!(far.recv().unwrap(), b"before");
    assert_eq!(far.recv().unwrap(), b"between");
    far.send(b"after").unwrap();
    assert_eq!(near.recv().unwrap(), b"before");
    assert_eq!(near.recv().unwrap(), b"after");
    let adopted = endpoint(&daemon, "program").unwrap();
    assert_eq!((&adopted["pids"], &adopted["held"]), (&json!([std::process::id()]), &json!(false)));
    // The new owner is like any other: the endpoint ends with it.
    drop(far);
    assert!(matches!(near.recv(), Err(Error::Finished)));
    drop(heir);
    wait_for("the end of the endpoint", || endpoint(&daemon, "program").is_none().then_some(()));
}

#[test]
fn a_saved_channel_can_be_resumed_in_the_same_process() {
    let daemon = Daemon::start_new(WEB);
    let (own, program) = (attach(&daemon, "own"), attach(&daemon, "program"));
    let (mut near, mut far) = pair(&own, &program, "x");
    let mut set = ReadySet::new().unwrap();
    for round in 0..20u32 {
        // A sleeper of the former process is woken in the next one.
        far.receiver().register(&set, 7).unwrap();
        set.wait(&mut Vec::new(), Some(WATCHDOG)).unwrap();
        assert!(matches!(far.recv(), Err(Error::WouldBlock)));
        let claim = far.sender().claim(4).unwrap();
        claim.slice().write(0, &round.to_ne_bytes());
        claim.commit(4);
        if round % 2 == 0 {
            near.send(b"early").unwrap();
        }
        let saved = far.save();
        if round % 2 == 1 {
            near.send(b"early").unwrap();
        }
        assert_eq!((saved.id(), saved), (near.info().id, saved.to_string().parse().unwrap()));
        far = program.resume(&saved).unwrap();
        far.set_timeout(Some(WATCHDOG));
        assert_eq!(far.recv().unwrap(), b"early");
        assert_eq!(near.recv().unwrap(), round.to_ne_bytes());
        let (sender, receiver) = far.split();
        far = MessageChannel::reunite(sender, receiver).ok().unwrap();
    }
    // A saved channel of the wrong kind or of another endpoint is refused, and nothing else ends.
    let saved = far.save();
    assert_eq!(code(program.resume::<StreamChannel>(&saved)), Some(ErrorCode::KIND));
    assert_eq!(code(own.resume::<MessageChannel>(&saved)), Some(ErrorCode::NOT_FOUND));
    far = program.resume(&saved).unwrap();
    near.send(b"still there").unwrap();
    assert_eq!(far.recv().unwrap(), b"still there");
    // Resuming the same state again fails when the ring has moved on.
    for _ in 0..1000 {
        near.send(&[1; 4096]).unwrap();
        far.recv().unwrap();
    }
    far.save();
    assert!(matches!(program.resume::<MessageChannel>(&saved), Err(Error::Corrupt(_))));
    assert!(matches!(near.recv(), Err(Error::Finished)));
}

#[test]
fn connections_that_wait_at_a_left_listener_are_accepted_by_the_next_owner() {
    let daemon = Daemon::start_new(WEB);
    let (own, program) = (attach(&daemon, "own"), attach(&daemon, "program"));
    let connect = || own.connect::<MessageChannel>("x").unwrap();
    let listener = program.listen::<MessageChannel>("x").unwrap();
    let mut early = connect();
    let mut late = connect();
    let mut first = listener.accept_timeout(WATCHDOG).unwrap();
    first.send(b"first").unwrap();
    assert_eq!(early.recv().unwrap(), b"first");
    listener.leave();
    let token = program.hold(LONG).unwrap();
    let saved = first.save();
    drop(program);
    let heir = adopt(&daemon, &token).unwrap();
    let listener = heir.listen::<MessageChannel>("x").unwrap();
    let mut second = listener.accept_timeout(WATCHDOG).unwrap();
    second.send(b"second").unwrap();
    assert_eq!(late.recv().unwrap(), b"second");
    // Only the new owner has the name.
    assert_eq!(code(own.listen::<MessageChannel>("x")), Some(ErrorCode::IN_USE));
    assert!(matches!(listener.try_accept(), Err(Error::WouldBlock)));
    let mut first: MessageChannel = heir.resume(&saved).unwrap();
    first.send(b"again").unwrap();
    assert_eq!(early.recv().unwrap(), b"again");
    // Dropping the listener frees the name.
    drop(listener);
    assert_eq!(code(own.connect::<MessageChannel>("x")), Some(ErrorCode::REFUSED));
}

#[test]
fn a_hold_that_is_longer_than_the_daemon_allows_is_refused() {
    let daemon = Daemon::start_new("[segment.web]\nsize = \"8M\"\nmembers = [\"host\"]\n");
    let program = attach(&daemon, "program");
    let refused = program.hold(Duration::from_millis(5001));
    assert!(refused.as_ref().is_err_and(|error| error.to_string().contains("max_hold")), "{refused:?}");
    assert_eq!(code(program.hold(Duration::MAX)), Some(ErrorCode::LIMIT));
    // The refused requests have left nothing behind, and a permitted hold still works.
    program.hold(Duration::from_secs(5)).unwrap();
}
