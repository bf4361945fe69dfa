//! Limits apply to each user of the host, and to each VM, in each segment: the use by one does not reduce the share of another.

use super::*;

const OTHER: u32 = 1001;
const GREEDY: u32 = 1000;

/// Returns a bench in which two users may attach to both segments of the host.
fn bench(limits: Limits) -> Bench {
    let mut bench = Bench::new(limits);
    for segment in ["web", "own"] {
        bench.broker.set_access(
            name(segment),
            Access { users: [GREEDY, OTHER].into(), groups: [].into(), sockets: None, verbs: false },
        );
    }
    bench
}

fn attached(
    bench: &mut Bench,
    member: u32,
    uid: u32,
    segment: &str,
) -> Result<ClientId, (ErrorCode, String)> {
    let id = bench.client(member, uid);
    let (kind, body, _) = bench.ask_all(id, Kind::ATTACH, attach(segment).as_bytes());
    match kind {
        Kind::ATTACHED => Ok(id),
        _ => Err((
            wire::body::<wire::Error>(&body[..8]).unwrap().code,
            String::from_utf8(body[8..].into()).unwrap(),
        )),
    }
}

#[test]
fn endpoints_of_one_user_leave_room_for_others_and_elsewhere() {
    let mut limits = Limits::default();
    limits.member.endpoints_per_member = 3;
    let mut bench = bench(limits);
    for (member, uid, whom) in
        [(0, GREEDY, "user 1000 of the host in segment web"), (VM, GREEDY, "member 1 in segment web")]
    {
        for _ in 0..3 {
            attached(&mut bench, member, uid, "web").unwrap();
        }
        let (code, text) = attached(&mut bench, member, uid, "web").unwrap_err();
        assert_eq!(code, ErrorCode::LIMIT);
        assert!(text.contains(whom) && text.contains("endpoints_per_member"), "{text}");
    }
    attached(&mut bench, 0, OTHER, "web").unwrap();
    attached(&mut bench, 0, 0, "web").unwrap();
    let own = attached(&mut bench, 0, GREEDY, "own").unwrap();
    // Whatever users a guest claims to have, it counts as one VM.
    assert_eq!(attached(&mut bench, VM, OTHER, "web").unwrap_err().0, ErrorCode::LIMIT);
    bench.check();
    bench.ends(own);
    bench.effects();
    bench.check();
}

#[test]
fn channels_blocks_and_locks_of_one_user_leave_room_for_others() {
    let mut limits = Limits::default();
    limits.member.channels_per_member = 2;
    limits.member.blocks_per_member = 2;
    limits.member.block_bytes_per_member = 3 * 4096;
    let mut bench = bench(limits);
    let server = attached(&mut bench, 0, 0, "web").unwrap();
    assert_eq!(bench.ask(server, Kind::LISTEN, listen("x").as_bytes()), Kind::LISTENING);
    let greedy = attached(&mut bench, 0, GREEDY, "web").unwrap();
    let second = attached(&mut bench, 0, GREEDY, "web").unwrap();
    let other = attached(&mut bench, 0, OTHER, "web").unwrap();
    bench.connect(greedy, "x", 1).unwrap();
    let channel = bench.connect(second, "x", 1).unwrap().channel;
    assert_eq!(bench.connect(greedy, "x", 2).unwrap_err(), ErrorCode::LIMIT);
    bench.connect(other, "x", 1).unwrap();
    // A channel is charged to the endpoint that opened it, as long as its memory is taken.
    bench.ends(second);
    bench.effects();
    assert_eq!(bench.connect(greedy, "x", 2).unwrap_err(), ErrorCode::LIMIT);
    bench.check();
    assert_eq!(bench.ask(server, Kind::CLOSE, reference(channel).as_bytes()), Kind::OK);
    bench.connect(greedy, "x", 2).unwrap();

    let lock = sync_open("l", 1, 0, 11);
    assert_eq!(bench.ask(greedy, Kind::SYNC_OPEN, lock.as_bytes()), Kind::SYNC);
    let block = bench.block(greedy, &block_create("b", 4096, Rights::NONE, 10)).unwrap();
    assert_eq!(
        bench.block(greedy, &block_create("c", 4096, Rights::NONE, 12)).unwrap_err(),
        ErrorCode::QUOTA
    );
    assert_eq!(
        bench.code(greedy, Kind::SYNC_OPEN, sync_open("m", 1, 0, 13).as_bytes()),
        Some(ErrorCode::QUOTA)
    );
    let longer = |size| wire::BlockResize { handle: block.handle, size };
    assert_eq!(bench.block(greedy, &longer(3 * 4096)).unwrap_err(), ErrorCode::QUOTA);
    bench.block(greedy, &longer(2 * 4096)).unwrap();
    bench.block(other, &block_create("d", 2 * 4096, Rights::NONE, 10)).unwrap();
    assert_eq!(bench.ask(other, Kind::SYNC_OPEN, sync_open("n", 1, 0, 13).as_bytes()), Kind::SYNC);
    bench.check();
    // Both use the object, and its maker ends: the object stays, and so does the charge.
    assert_eq!(bench.ask(other, Kind::SYNC_OPEN, sync_open("l", 1, 0, 14).as_bytes()), Kind::SYNC);
    bench.ends(greedy);
    bench.effects();
    bench.check();
    assert_eq!(bench.broker.books().tally(Account::new(0, name("web"), GREEDY)).blocks, 1);
}

#[test]
fn objects_of_an_older_journal_are_charged_to_root() {
    let old = r#"{"number":3,"segment":"web","name":"l","kind":1,"limit":0,"offset":4194304,"persistent":true,"member":0,
        "next_epoch":2,"users":[]}"#;
    let object: crate::objects::sync::SyncObject = serde_json::from_str(old).unwrap();
    assert_eq!(object.uid, 0);
}
