//! A hostile guest reports connections of others as its own.

use super::*;
use kit::random::Random;

/// The number of attempts. Half of them are complete reports with forged fields, the others have random bytes.
const TRIES: u64 = 1_000_000;
/// The number of wrong proofs after which a guest is not believed for a while. The test starts a new bench before that, so that
/// each attempt is judged by its proof.
const BELIEVED: u64 = 7;
/// The number of attempts in one session, fewer than it may make at once.
const OF_A_SESSION: u64 = 1_500;

const HOSTILE: u32 = 2;
const SERVER: u32 = 3;

/// The facts that the kernels at both ends of the connection from `VM` to `SERVER` know.
const CLOCK: u32 = 0x5eca_e700;

/// Returns a report that is correct, except for the facts that only the reporter knows. These are random, or at the limit of
/// the possible values.
fn forged(random: &mut Random) -> SocketFacts {
    let role = random.one_of([SocketRole::CONNECTOR, SocketRole::ACCEPTOR]);
    let second = 1_000_000_000;
    let clock = random.next() as u32;
    let mut claim = facts(role, random.next() % 8, clock);
    let (numbers, bits) = ([0; 4].map(|_: u8| random.next()), random.next() as u32 % 16);
    claim.syn = random.one_of([clock, numbers[0] as u32]);
    claim.cookie = random.one_of([1, claim.cookie, u64::from(claim.remote_port) + 1, numbers[1]]);
    claim.namespace = random.one_of([1, 2, numbers[2]]);
    claim.flags = random.one_of([SocketFacts::CLOCK | SocketFacts::SYN, bits]);
    // These times would make many values right, if they were believed.
    let times = [0, second, 2 * second, second + 255_000_000, u64::MAX, numbers[3]];
    let [before, after, earlier, later] = [0; 4].map(|_: u8| random.one_of(times));
    claim.report.before = before;
    claim.report.after = random.one_of([before, after]);
    claim.clock_before = random.one_of([claim.report.after, earlier]);
    claim.clock_after = random.one_of([claim.clock_before, later]);
    if random.one_of([true, false, false, false]) {
        std::mem::swap(&mut claim.local, &mut claim.remote);
        std::mem::swap(&mut claim.local_port, &mut claim.remote_port);
    }
    claim
}

/// Returns a report with some random bytes, of any length.
fn garbled(random: &mut Random) -> Vec<u8> {
    let mut bytes = forged(random).as_bytes().to_vec();
    for _ in 0..=random.next() % 4 {
        let at = (random.next() >> 20) as usize % bytes.len();
        bytes[at] = random.next() as u8;
    }
    if random.one_of([true, false, false, false, false, false, false, false]) {
        let len = (random.next() >> 20) as usize % (2 * bytes.len());
        bytes.resize(len, random.next() as u8);
    }
    bytes
}

#[test]
fn a_million_forged_reports_join_no_connection() {
    let mut bench = Bench::new(Limits::default());
    for (number, member) in [(HOSTILE, "hostile"), (SERVER, "server")] {
        let name = Text(name(member));
        assert!(bench.broker.note(Record::Member { number, name, runtime: None, retired: false }));
    }
    bench.effects();
    let mut random = Random::new(0x9e37_79b9_7f4a_7c15);
    let mut refused = 0_u64;
    let tries = if std::env::var_os("GINNEL_QUICK").is_some() { TRIES / 10 } else { TRIES };
    for role in [SocketRole::CONNECTOR, SocketRole::ACCEPTOR] {
        // One end of a connection waits for the other one.
        let (genuine, other) = match role {
            SocketRole::CONNECTOR => (VM, SERVER),
            _ => (SERVER, VM),
        };
        let victim = bench.client(genuine, 0);
        assert_eq!(bench.relay(victim, &facts(role, 1, CLOCK)), []);
        let mut hostile = bench.client(HOSTILE, 0);
        for number in 0..tries / 2 {
            if number % BELIEVED == 0 {
                bench.broker.member_died(HOSTILE);
                bench.effects();
            }
            if number % OF_A_SESSION == 0 {
                // Otherwise most of the reports would not be examined.
                bench.broker.sockets.allow_more();
                bench.ends(hostile);
                hostile = bench.client(HOSTILE, 0);
            }
            let packet = match number % 2 {
                0 => reply::packet(Kind::SOCK_REPORT, 0, forged(&mut random).as_bytes()),
                _ => reply::packet(Kind::SOCK_REPORT, 0, &garbled(&mut random)),
            };
            bench.broker.packet(&mut bench.world, hostile, &packet);
            for (client, told) in bench.told() {
                assert_eq!(client, hostile, "{told:?}, after {number} tries");
                refused += u64::from(matches!(told, Told::Refused(_)));
            }
        }
        bench.ends(hostile);
        // The real other end is believed all the same.
        let server = bench.client(other, 0);
        let opposite = match role {
            SocketRole::CONNECTOR => SocketRole::ACCEPTOR,
            _ => SocketRole::CONNECTOR,
        };
        let told = bench.relay(server, &facts(opposite, 2, CLOCK));
        // The two share no segment in this bench.
        let matched = [(server, 2), (victim, 1)]
            .map(|(client, key)| (client, Told::Stays(key, StaysReason::NO_SEGMENT)));
        assert_eq!(told, matched);
    }
    assert!((1..tries / 2).contains(&refused), "{refused} could not be read at all");
}
