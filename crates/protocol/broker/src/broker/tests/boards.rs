//! Readiness boards: who has them, and for how long.

use super::*;
use ginnel_layout::ring;

fn open(bench: &mut Bench, id: ClientId, nonce: u64) -> Option<u64> {
    let (kind, body, _) = bench.ask_all(id, Kind::BOARD_OPEN, wire::BoardOpen { nonce }.as_bytes());
    (kind == Kind::BOARD).then(|| wire::body::<wire::Board>(&body).unwrap().offset)
}

#[test]
fn a_repeated_request_gets_the_same_board() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let first = open(&mut bench, a, 7).unwrap();
    assert_eq!(open(&mut bench, a, 7), Some(first));
    assert_ne!(open(&mut bench, a, 8), Some(first));
    let process = bench.process_of(a);
    bench.broker.lost(a);
    let again = bench.client_as(process, 0);
    assert_eq!(bench.ask(again, Kind::ATTACH, back(&attached).as_bytes()), Kind::ATTACHED);
    assert_eq!(open(&mut bench, again, 7), Some(first));
    bench.check();
}

#[test]
fn an_endpoint_has_no_more_boards_than_it_needs() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let boards = (0..100).filter(|nonce| open(&mut bench, a, *nonce).is_some()).count();
    assert_eq!(boards, crate::limits::MAX_BOARDS);
    bench.check();
}

#[test]
fn a_board_outlives_its_endpoint_until_nobody_can_write_to_it() {
    let mut bench = Bench::new(Limits::default());
    let ((a, _), (b, _)) = (bench.attach(0, "web"), bench.attach(VM, "web"));
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    let (_, body, _) = bench.ask_all(b, Kind::CONNECT, connect("x", 0, 1).as_bytes());
    let first = wire::body::<wire::Channel>(&body).unwrap().channel;
    let (_, body, _) = bench.ask_all(b, Kind::CONNECT, connect("x", 0, 2).as_bytes());
    let second = wire::body::<wire::Channel>(&body).unwrap().channel;
    open(&mut bench, a, 1).unwrap();
    // The endpoint itself closes one channel, but its peer may still be in the middle of a send.
    bench.ask(a, Kind::CLOSE, reference(first).as_bytes());
    bench.ends(a);
    bench.effects();
    let boards = |bench: &Bench| bench.broker.books.boards.all().count();
    for channel in [second, first] {
        assert_eq!(boards(&bench), 1);
        bench.check();
        assert_eq!(bench.ask(b, Kind::CLOSE, reference(channel).as_bytes()), Kind::OK);
    }
    assert_eq!(boards(&bench), 0);
    bench.check();
    assert_eq!(bench.broker.books.segments[&name("web")].arena.used(), 0);
}

#[test]
fn the_survivor_of_a_channel_is_woken_through_its_boards() {
    let mut bench = Bench::new(Limits::default());
    let ((a, _), (b, _)) = (bench.attach(0, "web"), bench.attach(0, "web"));
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    let (_, body, _) = bench.ask_all(b, Kind::CONNECT, connect("x", 4096, 1).as_bytes());
    let channel = wire::body::<wire::Channel>(&body).unwrap();
    let board = open(&mut bench, a, 1).unwrap();
    bench.ends(b);
    let posts: Vec<_> = bench
        .effects()
        .into_iter()
        .filter_map(|effect| match effect {
            Effect::Post { words, boards, .. } => Some((words, boards)),
            _ => None,
        })
        .collect();
    // The survivor is the acceptor: it consumes from the first ring and produces into the second.
    let second = ginnel_layout::channel::ring_stride(4096);
    let words = [ring::DATA_ARMED, second + ring::SPACE_ARMED].map(|word| channel.offset + word as u64);
    assert_eq!(posts, [(words, vec![board])]);
}

#[test]
fn boards_that_a_process_has_left_are_given_to_the_next_process() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let process = bench.process_of(a);
    let child = Process { pid: 50, started: 7 };
    bench.broker.packet_from(&mut bench.world, a, child, &reply::packet(Kind::JOIN, 9, &[]));
    let packet = reply::packet(Kind::BOARD_OPEN, 9, wire::BoardOpen { nonce: 99 }.as_bytes());
    bench.broker.packet_from(&mut bench.world, a, child, &packet);
    bench.effects();
    let mut boards: BTreeSet<u64> = (1..8).map(|nonce| open(&mut bench, a, nonce).unwrap()).collect();
    assert_eq!(open(&mut bench, a, 8), None);
    // The process executes another program, again and again.
    let mut id = a;
    for round in 1..20u8 {
        let hold = wire::Hold { token: [round; 16], millis: 10, reserved: 0 };
        assert_eq!(bench.ask(id, Kind::HOLD, hold.as_bytes()), Kind::OK);
        id = bench.client_as(process, 0);
        let adopt = wire::Attach { token: [round; 16], ..back(&attached) };
        assert_eq!(bench.ask(id, Kind::ATTACH, adopt.as_bytes()), Kind::ATTACHED);
        let nonce = u64::from(round) << 32;
        for n in 0..7 {
            let board = open(&mut bench, id, nonce + n).unwrap();
            assert!(boards.remove(&board), "one of its own, once");
            assert_eq!(open(&mut bench, id, nonce + n), Some(board));
        }
        assert_eq!(open(&mut bench, id, nonce + 7), None, "its child has the last one");
        boards = bench.broker.books.boards.all().filter(|b| b.nonce != 99).map(|b| b.offset).collect();
        bench.check();
    }
    bench.broker.owner_ended(attached.endpoint, attached.epoch, child);
    assert!(open(&mut bench, id, 1).is_some());
    assert_eq!(open(&mut bench, id, 2), None);
    bench.effects();
    bench.check();
}

#[test]
fn a_board_of_an_older_journal_has_no_process() {
    let old = r#"{"endpoint":1,"epoch":1,"segment":"web","member":0,"uid":0,"offset":4096,"nonce":3}"#;
    let board: crate::objects::board::Board = serde_json::from_str(old).unwrap();
    assert_eq!((board.process, board.is_left), (None, false));
    let text = serde_json::to_string(&board).unwrap();
    assert_eq!(text, old, "an older daemon reads it too");
}
