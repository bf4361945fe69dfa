//! The daemon's side of the helpers: who gets which packet, and what becomes of packets whose helper ends or does not answer.

use super::*;
use rustix::io::retry_on_intr;
use rustix::net::{RecvFlags as Flags, recv, send as send_bytes};
use std::collections::BTreeSet;

const USER: u32 = 1000;

kit::program! {
    fn an_honest_helper() {
        helper::run(helper::Args { user: USER }).unwrap();
    }
}

kit::program! {
    /// Takes its first request and never answers. It ends with its socket, like a helper that the daemon has not killed.
    fn a_silent_helper() {
        let mut request = [0; REQUEST];
        while receive(io::stdin().as_fd(), &mut request, 1, RecvFlags::empty()).is_ok_and(|got| got.len > 0) {}
    }
}

kit::program! {
    /// Ends at its first request.
    fn a_failing_helper() {
        let mut request = [0; REQUEST];
        receive(io::stdin().as_fd(), &mut request, 1, RecvFlags::empty()).unwrap();
    }
}

/// The connections of one user's programs, and the helpers for what they send.
struct World {
    poller: Poller,
    strangers: Strangers<usize>,
    /// The daemon's end of each connection, and the program's.
    connections: Vec<(OwnedFd, OwnedFd)>,
}

impl World {
    fn new(connections: usize, command: fn(u32) -> Command) -> Self {
        let pair = |_| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
        };
        Self {
            poller: Poller::new().unwrap(),
            strangers: Strangers::new(|number| number, command),
            connections: (0..connections).map(pair).collect(),
        }
    }

    /// A program sends a packet, which the daemon sees.
    fn give(&mut self, connection: usize) {
        send_bytes(&self.connections[connection].1, b"packet", rustix::net::SendFlags::empty()).unwrap();
        let fd_of = |id: usize| self.connections.get(id).map(|(near, _)| near.as_fd());
        self.strangers.give(&self.poller, USER, connection, Task::DISCARD, fd_of);
    }

    /// Handles events until so many packets have an outcome. Returns the connections that must end, and the others.
    fn outcomes(&mut self, count: usize) -> (Vec<usize>, Vec<usize>) {
        let (mut ended, mut others) = (Vec::new(), Vec::new());
        loop {
            for (connection, outcome) in self.strangers.take_outcomes() {
                match outcome {
                    Outcome::Ended(code, _) => {
                        assert_eq!(code, ErrorCode::LIMIT);
                        ended.push(connection);
                    }
                    Outcome::Discarded => others.push(connection),
                    Outcome::Found(..) => panic!("nothing was to be found"),
                }
            }
            if ended.len() + others.len() >= count {
                return (ended, others);
            }
            self.events();
        }
    }

    fn events(&mut self) {
        for event in self.poller.wait_until_ready() {
            let fd_of = |id: usize| self.connections.get(id).map(|(near, _)| near.as_fd());
            self.strangers.ready(&self.poller, event.token, fd_of);
        }
    }

    /// Lets the packet that a helper has be older than it may be.
    fn be_late(&mut self) {
        for helper in self.strangers.helpers.values_mut() {
            helper.given.front_mut().unwrap().since -= PATIENCE;
        }
        assert_eq!(self.strangers.until_stuck(), Some(Duration::ZERO));
        let fd_of = |id: usize| self.connections.get(id).map(|(near, _)| near.as_fd());
        self.strangers.end_stuck(&self.poller, fd_of);
    }

    /// Returns whether a packet lies in the queue of a connection.
    fn has_packet(&self, connection: usize) -> bool {
        retry_on_intr(|| recv(&self.connections[connection].0, &mut [0; 16], Flags::PEEK)).is_ok()
    }

    fn helpers(&self) -> BTreeSet<u32> {
        self.strangers.helpers.values().map(|helper| helper.process.id()).collect()
    }
}

#[test]
fn one_helper_takes_all_packets_of_a_user() {
    // Twice as many as it may have at a time.
    let all = 2 * WINDOW;
    let mut world = World::new(all, |_| kit::program::command(an_honest_helper));
    (0..all).for_each(|connection| world.give(connection));
    let (helper, waiting) = (world.helpers(), world.strangers.waiting[&USER].len());
    assert_eq!((helper.len(), waiting), (1, all - WINDOW));
    assert_eq!(world.outcomes(all), (vec![], (0..all).collect()));
    assert!((0..all).all(|connection| !world.has_packet(connection)));
    assert!(world.strangers.waiting.is_empty() && world.strangers.until_stuck().is_none());
    assert_eq!(world.helpers(), helper);
}

#[test]
fn only_the_connection_that_holds_up_a_helper_ends() {
    let mut world = World::new(3, |_| kit::program::command(a_silent_helper));
    (0..3).for_each(|connection| world.give(connection));
    let first = world.helpers();
    world.strangers.command = |_| kit::program::command(an_honest_helper);
    world.be_late();
    assert!(world.helpers().is_disjoint(&first));
    assert_eq!(world.outcomes(3), (vec![0], vec![1, 2]));
}

#[test]
fn only_the_connection_whose_packet_ends_a_helper_ends() {
    let mut world = World::new(2, |_| kit::program::command(a_failing_helper));
    (0..2).for_each(|connection| world.give(connection));
    // The next one ends, too.
    assert_eq!(world.outcomes(2), (vec![0, 1], vec![]));
}

#[test]
fn packets_of_connections_that_have_ended_have_no_outcome() {
    let mut world = World::new(3, |_| kit::program::command(a_silent_helper));
    (0..2).for_each(|connection| world.give(connection));
    world.strangers.hung_up(&world.poller, USER, 1, false);
    world.strangers.command = |_| kit::program::command(an_honest_helper);
    world.be_late();
    world.give(2);
    assert_eq!(world.outcomes(2), (vec![0], vec![2]));
}

#[test]
fn a_helper_ends_with_the_last_connection_of_its_user() {
    let mut world = World::new(1, |_| kit::program::command(a_silent_helper));
    world.give(0);
    world.strangers.hung_up(&world.poller, USER, 0, true);
    assert!(world.helpers().is_empty() && world.strangers.waiting.is_empty());
    while !world.strangers.ending.is_empty() {
        world.events();
    }
    assert!(world.strangers.take_outcomes().is_empty());
}

#[test]
fn a_user_with_stuck_helpers_gets_no_more_but_others_do() {
    let mut world = World::new(STUCK + 1, |_| kit::program::command(a_silent_helper));
    for connection in 0..STUCK {
        world.give(connection);
        world.be_late();
    }
    // They do not end, as far as the daemon has seen.
    world.strangers.ending.values_mut().for_each(|(_, since, _)| *since -= ENDING);
    assert!(world.strangers.is_held_up_by(USER) && !world.strangers.is_held_up_by(USER + 1));
    world.give(STUCK);
    assert!(world.helpers().is_empty());
    let (ended, others) = world.outcomes(STUCK + 1);
    assert_eq!((ended, others), ((0..=STUCK).collect(), vec![]));
    // When they have ended, there is one again.
    while !world.strangers.ending.is_empty() {
        world.events();
    }
    world.strangers.command = |_| kit::program::command(an_honest_helper);
    world.give(STUCK);
    assert_eq!(world.outcomes(1), (vec![], vec![STUCK]));
}
