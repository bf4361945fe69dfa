//! `ginnel cp` with a peer that lies or breaks off. Frames are written byte by byte, as `cp/frame.rs` describes them.

use ginnel::{AttachOptions, Endpoint, Listener, MessageChannel};
use kit::process::signal;
use kit::wait::wait_until;
use kit::world::World;
use rustix::process::Signal;
use std::fs;
use std::process::{Child, Stdio};

const GET: u32 = 2;
const TOP: u32 = 4;
const FOLDER: u32 = 5;
const FILE: u32 = 7;
const DATA: u32 = 9;
const END: u32 = 10;
const LINK: u32 = 12;
const DONE: u32 = 14;
const ERROR: u32 = 16;

/// XXH64 of `data`.
const SUM_OF_DATA: u64 = xxhash_rust::const_xxh64::xxh64(b"data", 0);

fn frame(kind: u32, size: u64, checksum: u64, extra: u32, tail: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(0o644u32.to_le_bytes());
    bytes.extend(size.to_le_bytes());
    bytes.extend(checksum.to_le_bytes());
    bytes.extend(1_000_000_000u64.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(extra.to_le_bytes());
    bytes.extend(tail);
    bytes
}

fn simple(kind: u32, tail: &str) -> Vec<u8> {
    frame(kind, 0, 0, 0, tail.as_bytes())
}

/// Listens at the name at which a server would listen.
fn listen(world: &World) -> Listener<MessageChannel> {
    let options = AttachOptions { socket: world.socket(), ..AttachOptions::default() };
    Endpoint::attach_with("web", &options).unwrap().listen("cp@host").unwrap()
}

/// Starts a client that copies `line`, and accepts the channel that it opens.
fn client(world: &World, listener: &Listener<MessageChannel>, line: &str) -> (Child, MessageChannel) {
    let child = world.command(line).stderr(Stdio::piped()).spawn().unwrap();
    let mut channel = listener.accept().unwrap();
    let request = channel.recv().unwrap();
    assert_eq!(request[..4], GET.to_le_bytes());
    (child, channel)
}

/// Sends frames to a client that has asked for `-r f`. Returns its error output, and the files that it has left.
fn tell(world: &World, listener: &Listener<MessageChannel>, frames: &[Vec<u8>]) -> (String, Vec<String>) {
    let into = world.files().join("into");
    fs::create_dir(&into).unwrap();
    let (child, mut channel) = client(world, listener, "cp -r host:f into");
    for frame in frames {
        // A client that has given up has closed the channel, so sending may fail.
        if channel.send(frame).is_err() {
            break;
        }
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{frames:?}");
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.starts_with("ginnel: ") && err.lines().count() == 1, "{err}");
    let left = fs::read_dir(&into).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    fs::remove_dir_all(&into).unwrap();
    (err, left)
}

#[test]
fn an_honest_sender_is_believed() {
    let world = World::new();
    let listener = listen(&world);
    let (child, mut channel) = client(&world, &listener, "cp host:f g");
    for frame in [
        simple(TOP, "f"),
        frame(FILE, 4, 0, 0, b""),
        frame(DATA, 0, SUM_OF_DATA, 0, b"data"),
        frame(END, 4, SUM_OF_DATA, 0, b""),
        simple(DONE, ""),
    ] {
        channel.send(&frame).unwrap();
    }
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(fs::read(world.files().join("g")).unwrap(), b"data");
}

#[test]
fn lies_are_refused_and_leave_nothing() {
    let world = World::new();
    let listener = listen(&world);
    let file = || [simple(TOP, "f"), frame(FILE, 4, 0, 0, b"")];
    let after = |more: &[Vec<u8>]| [file().as_slice(), more].concat();
    let lies: [(&str, Vec<Vec<u8>>); 19] = [
        ("corrupted during the transfer", after(&[frame(DATA, 0, SUM_OF_DATA, 0, b"dAta")])),
        (
            "corrupted during the transfer",
            after(&[frame(DATA, 0, SUM_OF_DATA, 0, b"data"), frame(END, 4, 1, 0, b"")]),
        ),
        (
            "bytes came instead",
            after(&[frame(DATA, 0, SUM_OF_DATA, 0, b"data"), frame(END, 5, SUM_OF_DATA, 0, b"")]),
        ),
        ("skipped", after(&[frame(DATA, 32, SUM_OF_DATA, 0, b"data")])),
        (
            "skipped",
            after(&[frame(DATA, 0, SUM_OF_DATA, 0, b"data"), frame(DATA, 0, SUM_OF_DATA, 0, b"data")]),
        ),
        ("middle of a file", after(&[simple(DONE, "")])),
        ("middle of another", after(&[frame(FILE, 4, 0, 0, b"")])),
        ("data without a file", vec![simple(TOP, "f"), frame(DATA, 0, SUM_OF_DATA, 0, b"data")]),
        ("without a source", vec![frame(FILE, 4, 0, 0, b"")]),
        ("was not requested", vec![simple(TOP, ".bashrc")]),
        ("was not requested", vec![simple(TOP, "f"), simple(TOP, "f")]),
        ("without a source", vec![simple(TOP, "f"), frame(FILE, 4, 0, 0, b"x")]),
        (
            "not the name of a directory entry",
            vec![simple(TOP, "f"), simple(FOLDER, ""), frame(FILE, 4, 0, 0, b"../x")],
        ),
        ("bad path", vec![simple(TOP, "f"), simple(FOLDER, ""), frame(FILE, 4, 0, 0, b"/x")]),
        ("impossible target", vec![simple(TOP, "f"), simple(FOLDER, ""), frame(LINK, 0, 0, 1, b"x")]),
        // A link that leads out of the folder, and then a file behind it.
        (
            "symbolic link is in the way",
            vec![
                simple(TOP, "f"),
                simple(FOLDER, ""),
                frame(LINK, 0, 0, 1, b"x/tmp"),
                frame(FILE, 4, 0, 0, b"x/y"),
            ],
        ),
        ("kind 77", vec![simple(77, "")]),
        ("too short", vec![b"short".to_vec()]),
        ("sorry\\nginnel: all is well", vec![simple(ERROR, "sorry\nginnel: all is well")]),
    ];
    for (expected, frames) in lies {
        let (err, left) = tell(&world, &listener, &frames);
        assert!(err.contains(expected), "{expected:?} is not in {err:?}");
        assert!(
            left.is_empty() || left == ["f"] && frames.iter().any(|f| f[..4] == FOLDER.to_le_bytes()),
            "{left:?}"
        );
    }
}

#[test]
fn a_signal_removes_a_short_part() {
    let world = World::new();
    let listener = listen(&world);
    for number in [Signal::INT, Signal::TERM, Signal::HUP] {
        let (mut child, mut channel) = client(&world, &listener, "cp host:f g");
        for frame in [simple(TOP, "f"), frame(FILE, 400, 0, 0, b""), frame(DATA, 0, SUM_OF_DATA, 0, b"data")]
        {
            channel.send(&frame).unwrap();
        }
        let part = world.files().join(".g.ginnel-part");
        wait_until("a part", || fs::metadata(&part).is_ok_and(|meta| meta.len() == 4));
        signal(&child, number);
        assert!(!child.wait().unwrap().success());
        assert_eq!(fs::read_dir(world.files()).unwrap().count(), 0, "{number:?}");
    }
}

#[test]
fn a_server_survives_clients_that_lie() {
    let world = World::new();
    fs::create_dir(world.files().join("far")).unwrap();
    let _server = world.server("cp --serve --segment web --root far --write");
    let options = AttachOptions { socket: world.socket(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with("web", &options).unwrap();
    let put = |tail: &[u8]| {
        let mut put = frame(1, 0, 0, 1, tail);
        put[4..8].copy_from_slice(&1u32.to_le_bytes());
        put
    };
    let talks: [Vec<Vec<u8>>; 7] = [
        vec![vec![]],
        vec![frame(1, 0, 0, 99, b"x")],
        vec![frame(99, 0, 0, 1, b"x")],
        vec![put(b"../x")],
        vec![put(b""), simple(TOP, ".."), simple(FOLDER, "")],
        vec![put(b""), simple(TOP, "../x"), frame(FILE, 4, 0, 0, b"")],
        vec![put(&[0xff; 12000])],
    ];
    for talk in talks {
        let mut channel: MessageChannel = endpoint.connect("cp@host").unwrap();
        for frame in &talk {
            let _ = channel.send(frame);
        }
        channel.sender().finish();
        let mut last = Vec::new();
        while let Ok(answer) = channel.recv() {
            last = answer;
        }
        assert_eq!(last.get(..4), Some(ERROR.to_le_bytes().as_slice()), "{talk:?}");
    }
    // The server still serves others.
    fs::write(world.files().join("good"), "good").unwrap();
    world.good("cp good host:");
    assert_eq!(fs::read_dir(world.files().join("far")).unwrap().count(), 1);
}
