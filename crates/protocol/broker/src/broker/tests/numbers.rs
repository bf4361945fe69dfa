//! Numbers are used again, so they do not run out, and no endpoint is mistaken for an earlier one with its number.

use super::*;

/// Returns a broker that continues with the books of a journal with these records.
fn resumed(records: &[&str]) -> Bench {
    let mut text = Vec::new();
    for record in records {
        let json = record.split_whitespace().collect::<String>();
        text.extend(format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes())).into_bytes());
    }
    let replayed = lines::replay(&text);
    assert_eq!((replayed.records, replayed.dropped, replayed.invalid_records), (records.len(), 0, 0));
    let journal = lines::snapshot(&replayed.books, Hex16::default(), 0).flatten().collect();
    let broker = Broker::new(replayed.books, Limits::default(), 4, 0);
    let mut bench = Bench { broker, world: TestWorld::default(), journal, next: 0, timers: BTreeMap::new() };
    assert!(bench.broker.note(Record::Vectors { segment: Text(name("web")), member: 0, vectors: vec![1] }));
    bench.effects();
    bench
}

const HOST: &str = r#"{"member":{"number":0,"name":"host","runtime":null,"retired":false}}"#;
const WEB: &str = r#"{"segment":{"name":"web","uuid":"07070707070707070707070707070707","size":4194304,"members":[0],
    "memory":"dax","page":4096,"runtime":null}}"#;
/// A journal of a release that had one counter of epochs for all numbers; the counter has reached its end.
const USED_UP: &str = r#"{"start":{"boot_id":"01010101010101010101010101010101","generation":7,"next_epoch":4294967295,
    "next_listener":4294967295,"next_channel":5,"next_object":20}}"#;

#[test]
fn a_journal_with_used_up_epochs_can_be_continued() {
    let mut bench = resumed(&[USED_UP, HOST, WEB]);
    let mut seen = BTreeSet::new();
    for _ in 0..5 {
        let (a, attached) = bench.attach(0, "web");
        assert!(seen.insert((attached.endpoint, attached.epoch)));
        let mut listeners = BTreeSet::new();
        for at in ["x", "y", "z"] {
            let (kind, body, _) = bench.ask_all(a, Kind::LISTEN, listen(at).as_bytes());
            assert_eq!(kind, Kind::LISTENING);
            let listening = wire::body::<wire::Listening>(&body).unwrap();
            assert!(listening.listener != 0 && listeners.insert(listening.listener));
        }
        bench.check();
        bench.ends(a);
        bench.effects();
        bench.check();
    }
}

#[test]
fn a_listener_number_is_reused_only_when_it_is_free() {
    let mut bench = resumed(&[
        &USED_UP.replace("\"next_listener\":4294967295", "\"next_listener\":4294967294"),
        HOST,
        WEB,
    ]);
    let (a, _) = bench.attach(0, "web");
    let mut number = |at: &str| {
        let (_, body, _) = bench.ask_all(a, Kind::LISTEN, listen(at).as_bytes());
        wire::body::<wire::Listening>(&body).unwrap().listener
    };
    assert_eq!([number("a"), number("b"), number("c")], [u32::MAX - 1, u32::MAX, 1]);
    // The next daemon does not start again with 1, which is taken.
    let dump: Vec<u8> = lines::snapshot(bench.broker.books(), Hex16::default(), 0).flatten().collect();
    let books = lines::replay(&dump).books;
    assert_eq!(books.free_listener(), 2);
}

#[test]
fn a_number_whose_epochs_are_used_up_is_not_given_out() {
    let start = USED_UP.replace("\"next_object\":20", "\"next_object\":20,\"epochs\":[[1,4294967293],[2,9]]");
    let mut bench = resumed(&[&start, HOST, WEB]);
    let mut got = Vec::new();
    for _ in 0..4 {
        let (id, attached) = bench.attach(0, "web");
        got.push((attached.endpoint, attached.epoch));
        bench.check();
        bench.ends(id);
        bench.effects();
        bench.check();
    }
    assert_eq!(got, [(1, u32::MAX - 2), (1, u32::MAX - 1), (2, 9), (2, 10)]);
}

/// What an endpoint has left is not given to the endpoint that has its number next, even if the daemon that gave out the number
/// did not count epochs for each number separately.
#[test]
fn an_endpoint_is_not_confused_with_its_predecessor() {
    let block = r#"{"block":{"number":20,"segment":"web","name":"left","owner":1,"owner_epoch":41,"member":0,"uid":1000,
        "offset":2162688,"size":4096,"span":4096,"persistent":true,"made":1,"others":0,
        "grants":[{"member":0,"epoch":55,"rights":2},{"member":0,"epoch":56,"rights":1}],"handles":[]}}"#;
    let living = r#"{"attach":{"endpoint":3,"epoch":56,"token":"01010101010101010101010101010101","member":0,"segment":"web",
        "name":"n","vector":1,"process":{"pid":77,"started":1},"uid":1001}}"#;
    let mut bench = resumed(&[USED_UP, HOST, WEB, living, block]);
    let grants = &bench.broker.books().blocks[&20].grants;
    assert_eq!(
        grants.iter().map(|g| (g.endpoint, g.epoch)).collect::<Vec<_>>(),
        [(3, 56)],
        "of the living endpoints"
    );
    bench.broker.set_access(
        name("web"),
        Access { users: [1001].into(), groups: [].into(), sockets: None, verbs: false },
    );
    for _ in 0..3 {
        let id = bench.client(0, 1001);
        let (kind, body, _) = bench.ask_all(id, Kind::ATTACH, attach("web").as_bytes());
        assert_eq!(kind, Kind::ATTACHED);
        let attached: wire::Attached = wire::body(&body).unwrap();
        assert!(attached.endpoint != 1 || attached.epoch > 41, "{} {}", attached.endpoint, attached.epoch);
        assert_eq!(bench.block(id, &block_open("left", Rights::READ, 1)).unwrap_err(), ErrorCode::DENIED);
        bench.check();
    }
}

/// The daemon is killed when a listener has ended and the connection that waited there has not.
#[test]
fn a_connection_waiting_at_an_ended_listener_is_closed_at_the_start() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    let channel = bench.connect(b, "x", 1).unwrap();
    assert!(bench.broker.note(channel::Change::Unlisten { listener: channel.listener }.into()));
    bench.broker.close_unheard();
    assert!(bench.broker.books().channels[&channel.channel].acceptor.closed);
    assert!(!bench.broker.books().channels[&channel.channel].initiator.closed, "it hears of it by itself");
    let effects = bench.effects();
    assert!(effects.iter().any(|e| matches!(e, Effect::Mark { state: SideState::FINISHED, .. })));
    bench.check();
    bench.ask(a, Kind::LISTEN, listen("y").as_bytes());
    bench.connect(b, "y", 2).unwrap();
    bench.broker.close_unheard();
    assert!(!bench.broker.books().channels[&2].acceptor.closed, "somebody listens there");
}
