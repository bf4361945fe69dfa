use super::*;
use kit::mortal::Mortal;
use kit::wait::Watchdog;
use proptest::prelude::*;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

const BOOT: [u8; 16] = *b"boot identity 01";

fn memory() -> Mapping {
    Mapping::anonymous(SIZE).unwrap()
}

fn host(memory: &Mapping) -> HostLink {
    HostLink::new(memory.clone(), 3, 32, Name::new("vm-a").unwrap())
}

fn guest(memory: &Mapping) -> GuestLink {
    GuestLink::new(memory.clone(), BOOT, true)
}

/// Steps until `Idle`, and returns all events before it.
fn drain(mut step: impl FnMut() -> Event) -> Vec<Event> {
    let mut events = Vec::new();
    for _ in 0..10_000 {
        match step() {
            Event::Idle => return events,
            event => events.push(event),
        }
    }
    panic!("never idle: {:?}", &events[..10]);
}

/// Lets each end work whenever it has been rung, until neither has a ring pending.
fn settle(host: &mut HostLink, guest: &mut GuestLink) -> (Vec<Event>, Vec<Event>) {
    let (mut at_host, mut at_guest) = (Vec::new(), Vec::new());
    for _ in 0..100 {
        let (for_guest, for_host) = (host.take_ring(), guest.take_ring());
        if !for_guest && !for_host {
            return (at_host, at_guest);
        }
        if for_guest {
            at_guest.extend(drain(|| guest.step()));
        }
        if for_host {
            at_host.extend(drain(|| host.step()));
        }
    }
    panic!("the two ends never become idle");
}

fn up() -> Event {
    Event::Up(PeerInfo { boot_id: BOOT, interrupts: true })
}

fn message(client: u32, body: &[u8]) -> Event {
    Event::Message { kind: RelayKind::DATA, client, body: body.to_vec() }
}

/// Asserts that a session is up and carries messages both ways.
fn assert_works(host: &mut HostLink, guest: &mut GuestLink) {
    host.send(RelayKind::DATA, 7, b"to the guest").unwrap();
    guest.send(RelayKind::DATA, 8, b"").unwrap();
    guest.send(RelayKind::DATA, 9, &[5; wire::MAX_PACKET]).unwrap();
    let (at_host, at_guest) = settle(host, guest);
    assert_eq!(at_guest, [message(7, b"to the guest")]);
    assert_eq!(at_host, [message(8, b""), message(9, &[5; wire::MAX_PACKET])]);
}

#[test]
fn a_session_comes_up_with_rings_alone_whoever_starts_first() {
    let first = memory();
    let (mut h, mut g) = (host(&first), guest(&first));
    assert_eq!(settle(&mut h, &mut g), (vec![up()], vec![up()]));
    assert_works(&mut h, &mut g);

    let second = memory();
    let (mut g, mut h) = (guest(&second), host(&second));
    assert_eq!(settle(&mut h, &mut g), (vec![up()], vec![up()]));
    assert_works(&mut h, &mut g);
}

#[test]
fn nothing_is_sent_without_a_session() {
    let memory = memory();
    let (mut h, mut g) = (host(&memory), guest(&memory));
    assert_eq!(h.send(RelayKind::DATA, 1, b"x"), Err(SendRefused::Down));
    assert_eq!(g.send(RelayKind::DATA, 1, b"x"), Err(SendRefused::Down));
    settle(&mut h, &mut g);
    let long = vec![0; wire::MAX_PACKET + 1];
    assert_eq!(h.send(RelayKind::DATA, 1, &long), Err(SendRefused::TooLong(long.len())));
}

#[test]
fn identity_is_read_back() {
    let memory = memory();
    assert_eq!(Identity::read(&memory), None);
    let _h = host(&memory);
    let good = Identity { member: 3, vectors: 32, name: Name::new("vm-a").unwrap() };
    assert_eq!(Identity::read(&memory), Some(Ok(good)));
    memory.store_relaxed_u32(VERSION_AT, 0);
    assert_eq!(Identity::read(&memory), Some(Err(BadHeader::NotReady)));
    memory.store_relaxed_u32(VERSION_AT, 9);
    assert_eq!(Identity::read(&memory), Some(Err(BadHeader::Version(9))));
    memory.store_relaxed_u32(VERSION_AT, VERSION);
    memory.store_relaxed_u32(VERSION_AT + 4, 0);
    assert_eq!(Identity::read(&memory), Some(Err(BadHeader::Damaged("member number"))));
}

#[test]
fn a_full_ring_refuses_and_rings_when_there_is_room() {
    let memory = memory();
    let (mut h, mut g) = (host(&memory), guest(&memory));
    settle(&mut h, &mut g);
    let mut sent = 0u32;
    while g.send(RelayKind::DATA, sent, &[1; 1000]).is_ok() {
        sent += 1;
    }
    assert!(sent > 30 && g.take_ring() && !h.take_ring());
    for client in 0..sent {
        assert_eq!(h.step(), message(client, &[1; 1000]));
    }
    assert_eq!(h.step(), Event::Idle);
    assert!(h.take_ring(), "the guest waits for space");
    assert_eq!(g.step(), Event::Idle);
    assert_works(&mut h, &mut g);
}

#[test]
fn a_restarted_daemon_gets_a_new_session_without_old_messages() {
    for restart_host in [true, false] {
        let memory = memory();
        let (mut h, mut g) = (host(&memory), guest(&memory));
        settle(&mut h, &mut g);
        h.send(RelayKind::DATA, 1, b"lost").unwrap();
        g.send(RelayKind::DATA, 1, b"lost").unwrap();
        let (at_host, at_guest);
        if restart_host {
            h = host(&memory);
            (at_host, at_guest) = settle(&mut h, &mut g);
            assert_eq!(at_host, [up()]);
            assert_eq!(at_guest, [Event::Down, up()]);
        } else {
            g = guest(&memory);
            (at_host, at_guest) = settle(&mut h, &mut g);
            assert_eq!(at_host, [Event::Down, up()]);
            assert_eq!(at_guest, [up()]);
        }
        assert_works(&mut h, &mut g);
    }
}

#[test]
fn closing_the_link_ends_the_session() {
    let memory = memory();
    let (mut h, mut g) = (host(&memory), guest(&memory));
    settle(&mut h, &mut g);
    g.close();
    assert_eq!(drain(|| h.step()), [Event::Down]);
    let mut g = guest(&memory);
    settle(&mut h, &mut g);
    assert_works(&mut h, &mut g);
}

impl Parts for Mortal {
    fn ring(&self, at: usize, len: usize) -> Self {
        self.part(at, len).expect("inside")
    }
}

/// Runs one session in which the daemons may die, alternates between them, and lets them exchange a message.
fn mortal_session(host: &mut HostLink<Mortal>, guest: &mut GuestLink<Mortal>) {
    for _ in 0..4 {
        drain(|| host.step());
        drain(|| guest.step());
        let _ = host.send(RelayKind::DATA, 1, b"old");
        let _ = guest.send(RelayKind::DATA, 1, b"old");
    }
}

#[test]
fn the_host_may_die_at_each_store() {
    for stores in 0..40 {
        let memory = memory();
        let mut g = GuestLink::new(Mortal::new(&memory, u64::MAX), BOOT, true);
        let mut mortal = HostLink::new(Mortal::new(&memory, stores), 3, 32, Name::new("vm-a").unwrap());
        mortal_session(&mut mortal, &mut g);
        // The guest keeps running in the state in which the host's death left it.
        let mut h = HostLink::new(Mortal::new(&memory, u64::MAX), 3, 32, Name::new("vm-a").unwrap());
        for _ in 0..4 {
            drain(|| g.step());
            drain(|| h.step());
        }
        h.send(RelayKind::DATA, 2, b"new").unwrap_or_else(|e| panic!("died at store {stores}: {e}"));
        g.send(RelayKind::DATA, 2, b"new").unwrap_or_else(|e| panic!("died at store {stores}: {e}"));
        assert_eq!(drain(|| h.step()), [message(2, b"new")], "died at store {stores}");
        assert_eq!(drain(|| g.step()), [message(2, b"new")], "died at store {stores}");
    }
}

#[test]
fn the_guest_may_die_at_each_store() {
    for stores in 0..40 {
        let memory = memory();
        let mut h = HostLink::new(Mortal::new(&memory, u64::MAX), 3, 32, Name::new("vm-a").unwrap());
        let mut mortal = GuestLink::new(Mortal::new(&memory, stores), BOOT, true);
        mortal_session(&mut h, &mut mortal);
        let mut g = GuestLink::new(Mortal::new(&memory, u64::MAX), BOOT, true);
        for _ in 0..4 {
            drain(|| h.step());
            drain(|| g.step());
        }
        h.send(RelayKind::DATA, 2, b"new").unwrap_or_else(|e| panic!("died at store {stores}: {e}"));
        g.send(RelayKind::DATA, 2, b"new").unwrap_or_else(|e| panic!("died at store {stores}: {e}"));
        assert_eq!(drain(|| h.step()), [message(2, b"new")], "died at store {stores}");
        assert_eq!(drain(|| g.step()), [message(2, b"new")], "died at store {stores}");
    }
}

#[test]
fn a_message_too_short_for_its_envelope_ends_the_session() {
    let memory = memory();
    let (mut h, mut g) = (host(&memory), guest(&memory));
    settle(&mut h, &mut g);
    let (_, rings) = g.session.as_mut().unwrap();
    let _ = rings.output.send(b"short").unwrap();
    assert_eq!(drain(|| h.step()), [Event::Down]);
    settle(&mut h, &mut g);
    assert_works(&mut h, &mut g);
}

#[test]
fn a_message_longer_than_a_packet_ends_the_session() {
    let memory = memory();
    let (mut h, mut g) = (host(&memory), guest(&memory));
    settle(&mut h, &mut g);
    let (_, rings) = g.session.as_mut().unwrap();
    let _ = rings.output.send(&[0; MAX_MESSAGE + 1]).unwrap();
    assert_eq!(drain(|| h.step()), [Event::Down]);
    settle(&mut h, &mut g);
    assert_works(&mut h, &mut g);
}

/// The words that a hostile guest may write: every word of the header, and the relevant ones of both rings.
fn hostile_words() -> Vec<usize> {
    let ring = |at: usize| (0..ring::HEADER + 256).step_by(8).map(move |word| at + word);
    (0..256).step_by(8).chain(ring(TO_GUEST)).chain(ring(TO_HOST)).collect()
}

#[test]
fn any_value_of_any_word_is_survived() {
    for at in hostile_words() {
        for value in [0, 1, 3, u64::MAX, 1 << 63, 0x8000_0000_1000_0008, 0x8000_0000_2fff_fff8] {
            let memory = memory();
            let (mut h, mut g) = (host(&memory), guest(&memory));
            settle(&mut h, &mut g);
            memory.store_relaxed_u64(at, value);
            for _ in 0..50 {
                drain(|| h.step());
                let _ = h.send(RelayKind::DATA, 1, &[1; 4000]);
            }
            drain(|| g.step());
            // The guest is restarted and is honest now. The host is not restarted.
            let mut g = guest(&memory);
            drain(|| h.step());
            settle(&mut h, &mut g);
            let _ = g.take_ring();
            drain(|| h.step());
            drain(|| g.step());
            assert_works(&mut h, &mut g);
        }
    }
}

#[test]
fn two_threads_with_restarts_exchange_whole_messages_in_order() {
    let memory = memory();
    let stop = AtomicBool::new(false);
    /// Sends the numbered messages of a session and checks those of the peer. Returns how many it has received.
    fn run(
        mut make: impl FnMut() -> (Box<dyn FnMut() -> Event>, Box<dyn FnMut(u32, &[u8]) -> bool>),
        restarts: u32,
        going: impl Fn() -> bool,
    ) -> u32 {
        let mut received = 0;
        for _ in (0..restarts).take_while(|_| going()) {
            let (mut step, mut send) = make();
            let (mut up, mut next_in, mut next_out, mut this_time) = (false, 0, 0, 0);
            let mut watchdog = Watchdog::new("messages received in this session");
            while going() && this_time < 500 {
                watchdog.look(this_time);
                if up && send(next_out, &next_out.to_le_bytes().repeat(50)) {
                    next_out += 1;
                }
                match step() {
                    Event::Idle => std::thread::yield_now(),
                    Event::Up(_) => (up, next_in, next_out) = (true, 0, 0),
                    Event::Down => up = false,
                    Event::Message { client, body, .. } => {
                        assert_eq!(client, next_in, "in order, from the first of this session");
                        assert_eq!(body, client.to_le_bytes().repeat(50));
                        next_in += 1;
                        this_time += 1;
                        received += 1;
                    }
                }
            }
        }
        received
    }
    let going = || !stop.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let guest_side = scope.spawn(|| {
            run(
                || {
                    let link = Rc::new(std::cell::RefCell::new(guest(&memory)));
                    let other = link.clone();
                    (
                        Box::new(move || link.borrow_mut().step()),
                        Box::new(move |client, body| {
                            other.borrow_mut().send(RelayKind::DATA, client, body).is_ok()
                        }),
                    )
                },
                u32::MAX,
                going,
            )
        });
        let received = run(
            || {
                let link = Rc::new(std::cell::RefCell::new(host(&memory)));
                let other = link.clone();
                (
                    Box::new(move || link.borrow_mut().step()),
                    Box::new(move |client, body| {
                        other.borrow_mut().send(RelayKind::DATA, client, body).is_ok()
                    }),
                )
            },
            20,
            going,
        );
        stop.store(true, Ordering::Relaxed);
        assert_eq!(received, 20 * 500, "every host incarnation was served");
        guest_side.join().unwrap();
    });
}

#[derive(Clone, Copy, Debug)]
enum Act {
    HostStep,
    GuestStep,
    HostSend(u16),
    GuestSend(u16),
    HostRestart,
    GuestRestart,
    Scribble(usize, u64),
}

fn act() -> impl Strategy<Value = Act> {
    let words = hostile_words();
    prop_oneof![
        6 => Just(Act::HostStep),
        6 => Just(Act::GuestStep),
        3 => (0..2000u16).prop_map(Act::HostSend),
        3 => (0..2000u16).prop_map(Act::GuestSend),
        1 => Just(Act::HostRestart),
        1 => Just(Act::GuestRestart),
        1 => (0..words.len(), any::<u64>()).prop_map(move |(i, value)| Act::Scribble(words[i], value)),
    ]
}

/// One end's record of the conversation.
#[derive(Default)]
struct Book {
    up: bool,
    sent: u32,
    received: u32,
}

impl Book {
    fn note(&mut self, event: &Event) {
        match event {
            Event::Up(_) => *self = Self { up: true, sent: 0, received: 0 },
            Event::Down => {
                assert!(self.up, "Down comes only after Up");
                self.up = false;
            }
            Event::Message { client, body, .. } => {
                assert!(self.up);
                assert_eq!(*client, self.received, "in order, none lost, none of an earlier session");
                assert!(body.iter().all(|&b| b == *client as u8));
                self.received += 1;
            }
            Event::Idle => {}
        }
    }
}

fn converse(acts: &[Act], scribbling: bool) {
    let memory = memory();
    let (mut h, mut g) = (host(&memory), guest(&memory));
    let (mut hb, mut gb) = (Book::default(), Book::default());
    for &act in acts {
        match act {
            Act::HostStep => {
                let event = h.step();
                if !scribbling {
                    hb.note(&event);
                }
            }
            Act::GuestStep => {
                let event = g.step();
                if !scribbling {
                    gb.note(&event);
                }
            }
            Act::HostSend(len) => {
                if h.send(RelayKind::DATA, hb.sent, &vec![hb.sent as u8; len.into()]).is_ok() {
                    hb.sent += 1;
                }
            }
            Act::GuestSend(len) => {
                if g.send(RelayKind::DATA, gb.sent, &vec![gb.sent as u8; len.into()]).is_ok() {
                    gb.sent += 1;
                }
            }
            Act::HostRestart => (h, hb) = (host(&memory), Book::default()),
            Act::GuestRestart => (g, gb) = (guest(&memory), Book::default()),
            Act::Scribble(at, value) if scribbling => memory.store_relaxed_u64(at, value),
            Act::Scribble(..) => {}
        }
    }
    if scribbling {
        // Whatever was written, an honest guest gets a session.
        g = guest(&memory);
        drain(|| h.step());
    }
    // From here on each end works only when it is rung.
    let (at_host, at_guest) = settle(&mut h, &mut g);
    if scribbling {
        drain(|| h.step());
        drain(|| g.step());
        drain(|| h.step());
        return assert_works(&mut h, &mut g);
    }
    at_host.iter().for_each(|e| hb.note(e));
    at_guest.iter().for_each(|e| gb.note(e));
    assert!(hb.up && gb.up);
    assert_eq!((hb.received, gb.received), (gb.sent, hb.sent), "all that was sent has arrived");
    assert_works(&mut h, &mut g);
}

proptest! {
    #[test]
    fn any_order_of_steps_and_restarts_ends_in_a_session(acts in prop::collection::vec(act(), 0..80)) {
        converse(&acts, false);
    }

    #[test]
    fn any_random_writes_are_survived(acts in prop::collection::vec(act(), 0..80)) {
        converse(&acts, true);
    }
}
