//! Random programs over TCP and under `ginnel run`: what each call returns must be what TCP could have returned. A model of the connection
//! says what that is: which bytes may come, which events must come, and which calls end. The same program is executed over TCP first, so
//! that a mistake of the model is not taken for one of the library.
//!
//! The test tells up to four processes ([`players`]) what to call, one call after the other, so that the model knows what has happened.
//! Calls that wait have threads of their own, and must return once there is a reason.

mod model;
mod players;

use model::{ERR, HUP, IN, Model, OUT, RDHUP, Reset, Watch};
use players::{Answer, PATIENCE, Players};
use programs::stage::{Stage, changed};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SIZES: [i64; 12] = [1, 2, 64, 1000, 4096, 5000, 16384, 16385, 20000, 70000, 200_000, 0];
/// A message of this size is taken whole if nothing is under way.
const SMALL: i64 = 4096;
const PLACES: i64 = 32;
/// The largest number of a process.
const LAST_PROCESS: u32 = 3;
/// How much a test does.
struct Length {
    /// How long it executes programs.
    time: Duration,
    /// It ends after so many programs that fail.
    failures: u32,
    /// How long it may shrink each of them.
    shrinking: Duration,
}

/// What `make test` does in each test. A failure must not take the time of the other tests.
const SHORT: Length =
    Length { time: Duration::from_secs(30), failures: 1, shrinking: Duration::from_secs(30) };
/// What `make soak-sockets` does. One failure says nothing of those behind it.
const LONG: Length =
    Length { time: Duration::from_secs(3600), failures: 5, shrinking: Duration::from_secs(120) };
/// Files with programs that have failed. They are executed before all others.
const FOUND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/sockets/random/found");
/// How often each of them is executed, because some fail now and then only.
const REPEATS: u32 = 10;
/// What a failure over TCP begins with.
const MODEL: &str = "over TCP, so the model is wrong: ";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Do {
    Send,
    Receive,
    Peek,
    Poll,
    Watch,
    Unwatch,
    Wait,
    Sleep,
    Shutdown,
    Close,
    Dup,
    Fork,
    Exec,
    Exit,
    Pass,
    Set,
    Count,
}

/// A call. The numbers choose among what is there.
#[derive(Clone, Copy, Debug)]
struct Step {
    what: Do,
    who: u8,
    how: u8,
    size: u8,
}

/// The calls, and how often each is made beside the others.
const CALLS: [(u32, Do); 17] = [
    (24, Do::Send),
    (24, Do::Receive),
    (4, Do::Peek),
    (8, Do::Poll),
    (8, Do::Watch),
    (1, Do::Unwatch),
    (12, Do::Wait),
    (8, Do::Sleep),
    (2, Do::Shutdown),
    (2, Do::Close),
    (3, Do::Dup),
    (4, Do::Set),
    (3, Do::Count),
    (2, Do::Fork),
    (1, Do::Exec),
    (1, Do::Exit),
    (1, Do::Pass),
];

fn step() -> impl Strategy<Value = Step> {
    let what: Vec<Do> = CALLS.iter().flat_map(|(weight, what)| (0..*weight).map(|_| *what)).collect();
    (prop::sample::select(what), any::<u8>(), any::<u8>(), any::<u8>())
        .prop_map(|(what, who, how, size)| Step { what, who, how, size })
}

/// A call that waits in a thread of its own.
struct Pending {
    process: u32,
    number: u64,
    call: Waiting,
}

enum Waiting {
    Receive {
        end: usize,
        size: i64,
    },
    /// `seen`: all events that could be reported at some time since the call.
    Poll {
        end: usize,
        events: i16,
        seen: i16,
    },
    Epoll {
        seen: BTreeMap<i64, i16>,
    },
}

/// One run of a program.
struct Run<'a> {
    players: &'a mut Players,
    model: Model,
    pending: Vec<Pending>,
    log: Vec<String>,
    /// Connections have changed over before the first call.
    is_settled: bool,
}

type Outcome = Result<(), String>;

fn fail<T>(text: impl Into<String>) -> Result<T, String> {
    Err(text.into())
}

/// A call has not said everything yet. Waits longer the longer that goes on.
fn pause(begun: Instant) {
    std::thread::sleep(begun.elapsed() / 8);
}

impl Run<'_> {
    /// Notes what has happened. What happens again and again is noted once.
    fn note(&mut self, text: String) {
        if self.log.last() != Some(&text) {
            self.log.push(text);
        }
    }

    fn ask(&mut self, process: u32, call: &str, arguments: &[i64]) -> Result<Answer, String> {
        let answer = self.players.ask(process, call, arguments);
        let told =
            answer.as_ref().map_or("hangs".into(), |a| format!("{} {} {:?}", a.result, a.error, a.more));
        self.note(format!("process {process}: {call} {arguments:?} -> {told}"));
        answer.ok_or_else(|| format!("{call} does not return"))
    }

    /// Connects process 1 to process 0.
    fn connect(&mut self, turns: i64) -> Outcome {
        let port = self.players.port;
        if self.ask(1, "connect", &[0, port])?.result != 0 {
            return fail("connect");
        }
        // A call may wait until the connection has changed over, for which both ends must do something.
        let accept = self.players.tell(0, false, "accept", &[0]);
        let numbers = [(0, 0), (1, 1)]
            .map(|(id, first)| (id, self.players.tell(id, false, "exchange", &[0, turns, first])));
        for (id, number) in [(0, accept)].into_iter().chain(numbers) {
            if self.players.hear(id, number, PATIENCE).is_none_or(|answer| answer.result != 0) {
                return fail("the first bytes do not come");
            }
        }
        self.model.open = BTreeMap::from([((0, 0), 0), ((1, 0), 1)]);
        Ok(())
    }

    /// Chooses an open descriptor.
    fn choose(&self, step: &Step) -> Option<(u32, i64, usize)> {
        let open: Vec<_> =
            self.model.open.iter().map(|((process, place), end)| (*process, *place, *end)).collect();
        open.get(usize::from(step.who) % open.len().max(1)).copied()
    }

    fn free_place(&self, process: u32) -> Option<i64> {
        (0..PLACES).find(|place| !self.model.open.contains_key(&(process, *place)))
    }

    fn has_later(&self, process: u32) -> bool {
        self.model.open.keys().any(|(owner, _)| *owner > process)
    }

    fn is_waiting(&self, process: u32) -> bool {
        self.pending.iter().any(|pending| pending.process == process)
    }

    fn someone_receives(&self, end: usize) -> bool {
        self.pending.iter().any(|p| matches!(p.call, Waiting::Receive { end: e, .. } if e == end))
    }

    fn step(&mut self, step: &Step) -> Outcome {
        let Some((process, place, end)) = self.choose(step) else { return Ok(()) };
        let size = SIZES[usize::from(step.size) % SIZES.len()];
        match step.what {
            Do::Send => self.send(process, place, end, i64::from(step.how % 7), size)?,
            Do::Receive if !self.someone_receives(end) => {
                self.receive(process, place, end, i64::from(step.how % 6), size, 0)?;
            }
            Do::Peek if !self.someone_receives(end) => {
                self.receive(process, place, end, i64::from(step.how % 4), size.max(1), libc::MSG_PEEK)?;
            }
            Do::Poll => {
                let events = [IN, OUT, IN | OUT, IN | RDHUP, 0, RDHUP][usize::from(step.size % 6)];
                self.poll(process, place, end, i64::from(step.how % 3), events)?;
            }
            Do::Watch => self.watch(process, place, end, step)?,
            Do::Unwatch => {
                if self.model.watches.contains_key(&(process, place)) {
                    self.unwatch(process, place)?;
                }
            }
            Do::Wait => self.wait(process)?,
            Do::Sleep => self.sleep(process, place, end, step)?,
            Do::Shutdown => self.shutdown(process, place, end, i64::from(step.how % 3))?,
            Do::Close => self.close(process, place)?,
            Do::Dup => {
                if let Some(to) = self.free_place(process) {
                    if self.ask(process, "dup", &[place, to])?.result != 0 {
                        return fail("dup");
                    }
                    self.model.open.insert((process, to), end);
                }
            }
            Do::Fork => self.fork(process)?,
            Do::Exec => self.exec(process)?,
            // A process ends with the one that has made it.
            Do::Exit if process > 1 && !self.is_waiting(process) && !self.has_later(process) => {
                self.exit(process)?;
            }
            Do::Pass => self.pass(process, place, end, step)?,
            Do::Set => self.set(process, place, end, step)?,
            Do::Count => self.count(process, place, end, step)?,
            Do::Receive | Do::Peek | Do::Exit => {}
        }
        self.collect()
    }

    fn send(&mut self, process: u32, place: i64, end: usize, form: i64, size: i64) -> Outcome {
        let own = &self.model.ends[end];
        let outstanding = self.model.outstanding(end);
        let must_not_wait = outstanding > 0 || size > SMALL;
        // `write`, `writev` and `sendfile` have no flags.
        let form = if must_not_wait && !own.is_nonblocking { form % 4 } else { form };
        let flags = if must_not_wait { libc::MSG_DONTWAIT } else { 0 };
        let position = own.sent as i64;
        let (has_ended, reset, peer_is_deaf) = (
            own.has_ended,
            own.reset,
            self.model.ends[1 - end].is_deaf || self.model.ends[1 - end].is_closed,
        );
        let answer = self.ask(process, "send", &[place, form, flags.into(), size, end as i64, position])?;
        let signals = i64::from(answer.result == -1 && answer.error == libc::EPIPE && form >= 4);
        // `sendfile` sends in parts, and returns how much it has sent before the one that has failed.
        let is_cut = form == 6 && answer.result > 0 && answer.result < size && peer_is_deaf;
        if answer.more != [signals] && !(is_cut && answer.more == [1]) {
            return fail(format!("{:?} SIGPIPE have come", answer.more));
        }
        match (answer.result, answer.error) {
            (0, _) if size == 0 => {}
            (n, _) if n > 0 && n <= size && !has_ended => {
                if outstanding == 0 && size <= SMALL && n != size && !peer_is_deaf {
                    return fail(format!("a small message is cut: {n} of {size}"));
                }
                self.model.sent(end, n as u64);
            }
            (-1, libc::EPIPE) if has_ended || reset != Reset::No => {}
            (-1, libc::ECONNRESET) if reset != Reset::No => {}
            (-1, libc::EAGAIN) if outstanding > 0 => self.model.found_full(end),
            other => return fail(format!("send: {other:?}")),
        }
        Ok(())
    }

    fn receive(&mut self, process: u32, place: i64, end: usize, form: i64, size: i64, more: i32) -> Outcome {
        if size == 0 {
            return Ok(());
        }
        let is_readable = self.model.is_readable(end);
        let form = if is_readable || self.model.ends[end].is_nonblocking { form } else { form % 4 };
        let flags = if is_readable { more } else { libc::MSG_DONTWAIT | more };
        let position = self.model.ends[end].received as i64;
        let stream = 1 - end as i64;
        let arguments = [place, form, flags.into(), size, stream, position];
        let mut answer = self.ask(process, "receive", &arguments)?;
        if (answer.result, answer.error) == (-1, libc::EAGAIN) && is_readable {
            // What was sent may still be on its way.
            self.poll(process, place, end, 0, IN)?;
            answer = self.ask(process, "receive", &arguments)?;
        }
        self.has_received(end, size, &answer, flags & libc::MSG_PEEK != 0)
    }

    fn has_received(&mut self, end: usize, size: i64, answer: &Answer, peeks: bool) -> Outcome {
        let available = self.model.available(end);
        let own = &self.model.ends[end];
        let (is_deaf, reset, fin) = (own.is_deaf, own.reset, self.model.peer_has_ended(end));
        match (answer.result, answer.error) {
            (n, _) if n > 0 && n <= size && n as u64 <= available => {
                if answer.more[0] != n {
                    return fail(format!("byte {} of {n} is wrong", answer.more[0]));
                }
                if !peeks {
                    self.model.received(end, n as u64);
                }
            }
            // Bytes may still be on their way, and a deaf end does not wait for them.
            (0, _) if available == 0 && fin || is_deaf || reset != Reset::No => {}
            (-1, libc::EAGAIN) if !self.model.is_readable(end) => {}
            (-1, libc::ECONNRESET | libc::EPIPE) if reset != Reset::No => {}
            other => return fail(format!("receive, with {available} bytes there: {other:?}")),
        }
        Ok(())
    }

    fn poll(&mut self, process: u32, place: i64, end: usize, form: i64, events: i16) -> Outcome {
        let asked = if form == 2 { IN | OUT } else { HUP | ERR } | events;
        let (mut must, may) = (self.model.must(end) & asked, self.model.may(end));
        if form == 2 {
            must &= events & (IN | OUT);
        }
        let begun = Instant::now();
        loop {
            // If something must come, the call waits for it. Otherwise it returns at once.
            let time = if must == 0 { 0 } else { PATIENCE.as_millis() as i64 };
            let answer = self.ask(process, "poll", &[place, form, events.into(), time])?;
            let found = *answer.more.first().unwrap_or(&0) as i16;
            if answer.result < 0 {
                return fail(format!("poll: {answer:?}"));
            }
            // `select` reports the end, and what is broken, as input and room.
            let may = if form == 2 && may & (HUP | ERR) != 0 { may | IN | OUT } else { may };
            if found & !may != 0 {
                return fail(format!("poll says {found:#x}, but at most {may:#x} may be"));
            }
            if must & !found == 0 {
                return Ok(());
            }
            pause(begun);
            if begun.elapsed() > PATIENCE {
                return fail(format!("poll says {found:#x}, and {must:#x} must be"));
            }
        }
    }

    fn watch(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let interest = [IN, OUT, IN | OUT, IN | RDHUP, IN | OUT | RDHUP, RDHUP][usize::from(step.size % 6)];
        let (is_edge_triggered, is_once) = (step.how % 4 > 1, step.how % 8 == 1);
        let mut events = i64::from(interest as u16);
        if is_edge_triggered {
            events |= libc::EPOLLET as u32 as i64;
        }
        if is_once {
            events |= i64::from(libc::EPOLLONESHOT);
        }
        let known = self.model.watches.contains_key(&(process, place));
        let operation = if known { libc::EPOLL_CTL_MOD } else { libc::EPOLL_CTL_ADD };
        let answer = self.ask(process, "control", &[operation.into(), place, events])?;
        if answer.result != 0 {
            return fail(format!("epoll_ctl: {answer:?}"));
        }
        let (is_spent, edges, was_full, is_old) = (false, !0, false, self.someone_waits(process));
        let watch = Watch { end, interest, is_edge_triggered, is_once, is_spent, edges, was_full, is_old };
        self.model.watches.insert((process, place), watch);
        Ok(())
    }

    fn unwatch(&mut self, process: u32, place: i64) -> Outcome {
        let answer = self.ask(process, "control", &[libc::EPOLL_CTL_DEL.into(), place, 0])?;
        self.model.watches.remove(&(process, place));
        if answer.result == 0 { Ok(()) } else { fail(format!("epoll_ctl: {answer:?}")) }
    }

    /// Returns the events that a process's epoll instance must report.
    fn expected(&self, process: u32) -> BTreeMap<i64, i16> {
        let own = self.model.watches.iter().filter(|((owner, _), _)| *owner == process);
        let must = own.map(|((_, place), watch)| (*place, self.model.watch_must(watch)));
        must.filter(|(_, events)| *events != 0).collect()
    }

    fn wait(&mut self, process: u32) -> Outcome {
        if self.model.watches.keys().all(|(owner, _)| *owner != process) || self.someone_waits(process) {
            return Ok(());
        }
        let mut must = self.expected(process);
        let begun = Instant::now();
        loop {
            let time = if must.is_empty() { 0 } else { PATIENCE.as_millis() as i64 };
            let answer = self.ask(process, "wait", &[time])?;
            self.was_told(process, &answer, &BTreeMap::new(), &mut must)?;
            must.retain(|_, events| *events != 0);
            if must.is_empty() {
                return Ok(());
            }
            pause(begun);
            if begun.elapsed() > PATIENCE {
                return fail(format!("epoll_wait does not say {must:x?}"));
            }
        }
    }

    /// An epoll instance has reported events. `seen` are events that were true while it waited. Removes what it has reported from
    /// `must`.
    fn was_told(
        &mut self,
        process: u32,
        answer: &Answer,
        seen: &BTreeMap<i64, i16>,
        must: &mut BTreeMap<i64, i16>,
    ) -> Outcome {
        if answer.result < 0 || answer.more.len() != 2 * answer.result as usize {
            return fail(format!("epoll_wait: {answer:?}"));
        }
        for pair in answer.more.chunks(2) {
            let (place, events) = (pair[0], pair[1] as i16);
            let was = *seen.get(&place).unwrap_or(&0);
            let Some(watch) = self.model.watches.get(&(process, place)).cloned() else {
                // It may have been told before the watch was removed.
                if events & !was == 0 {
                    continue;
                }
                return fail(format!("epoll_wait names place {place}, which it does not watch"));
            };
            let may = self.model.may(watch.end) & (watch.interest | HUP | ERR) | was;
            if events == 0 || events & !may != 0 || watch.is_spent {
                return fail(format!(
                    "epoll_wait says {events:#x} of place {place}, of {watch:?}: may be {may:#x}"
                ));
            }
            let watch = self.model.watches.get_mut(&(process, place)).unwrap();
            watch.edges &= !events;
            watch.was_full &= events & OUT == 0;
            watch.is_spent = watch.is_once && !watch.is_old;
            if watch.is_once {
                must.remove(&place);
            } else if let Some(must) = must.get_mut(&place) {
                *must &= !events;
            }
        }
        Ok(())
    }

    fn someone_waits(&self, process: u32) -> bool {
        self.pending.iter().any(|p| p.process == process && matches!(p.call, Waiting::Epoll { .. }))
    }

    /// Begins a call that waits, in a thread of its own.
    fn sleep(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        if self.pending.len() >= 6 {
            return Ok(());
        }
        let (name, arguments, call) = match step.how % 3 {
            0 if !self.model.is_readable(end)
                && !self.model.ends[end].is_nonblocking
                && !self.someone_receives(end) =>
            {
                let size = SIZES[usize::from(step.size) % SIZES.len()].max(1);
                let (stream, position) = (1 - end as i64, self.model.ends[end].received as i64);
                let arguments = vec![place, i64::from(step.size % 6), 0, size, stream, position];
                ("receive", arguments, Waiting::Receive { end, size })
            }
            1 => {
                // Without events, nobody would wake it when another thread shuts down (docs/sockets.md).
                let events = [IN, IN | RDHUP, RDHUP][usize::from(step.size % 3)];
                let seen = self.model.may(end);
                let arguments = vec![place, i64::from(step.size % 2), events.into(), -1];
                ("poll", arguments, Waiting::Poll { end, events, seen })
            }
            2 if self.model.watches.keys().any(|(owner, _)| *owner == process)
                && !self.someone_waits(process) =>
            {
                ("wait", vec![-1], Waiting::Epoll { seen: BTreeMap::new() })
            }
            _ => return Ok(()),
        };
        let number = self.players.tell(process, true, name, &arguments);
        self.note(format!("process {process}: {name} {arguments:?} begins"));
        self.pending.push(Pending { process, number, call });
        Ok(())
    }

    /// Notes the events that calls which wait may see now.
    fn note_seen(&mut self) {
        for pending in &mut self.pending {
            match &mut pending.call {
                Waiting::Receive { .. } => {}
                Waiting::Poll { end, seen, .. } => *seen |= self.model.may(*end),
                Waiting::Epoll { seen } => {
                    let own = self.model.watches.iter().filter(|((owner, _), _)| *owner == pending.process);
                    for ((_, place), watch) in own {
                        let asked = watch.interest | HUP | ERR;
                        *seen.entry(*place).or_default() |= self.model.may(watch.end) & asked;
                    }
                }
            }
        }
    }

    /// Collects the answers of the calls that had to wait and have a reason to return.
    fn collect(&mut self) -> Outcome {
        self.note_seen();
        // Who receives changes what the others see.
        for wants_bytes in [true, false] {
            let mut index = 0;
            while index < self.pending.len() {
                let is_receive = matches!(self.pending[index].call, Waiting::Receive { .. });
                if is_receive != wants_bytes || !self.has_returned(index)? {
                    index += 1;
                }
            }
        }
        Ok(())
    }

    /// Returns whether the pending call with this index has returned. If it must, waits for it.
    fn has_returned(&mut self, index: usize) -> Result<bool, String> {
        let pending = &self.pending[index];
        let process = pending.process;
        let must = match pending.call {
            Waiting::Receive { end, .. } => self.model.is_readable(end),
            Waiting::Poll { end, events, .. } => self.model.must(end) & (events | HUP | ERR) != 0,
            Waiting::Epoll { .. } => !self.expected(process).is_empty(),
        };
        let patience = if must { PATIENCE } else { Duration::ZERO };
        let Some(answer) = self.players.hear(process, pending.number, patience) else {
            let what = match pending.call {
                Waiting::Receive { .. } => "receive",
                Waiting::Poll { .. } => "poll",
                Waiting::Epoll { .. } => "epoll_wait",
            };
            return if must {
                fail(format!("{what} of process {process} sleeps for ever"))
            } else {
                Ok(false)
            };
        };
        self.note(format!("process {process}: a call has returned {answer:?}"));
        match self.pending.remove(index).call {
            Waiting::Receive { end, size } => self.has_received(end, size, &answer, false)?,
            Waiting::Poll { events, seen, .. } => {
                let found = *answer.more.first().unwrap_or(&0) as i16;
                if answer.result != 1 || found == 0 || found & !(seen & (events | HUP | ERR)) != 0 {
                    return fail(format!("poll has returned {answer:?}, of {seen:#x}"));
                }
            }
            Waiting::Epoll { seen } => {
                if answer.result == 0 {
                    return fail("epoll_wait has returned nothing");
                }
                self.was_told(process, &answer, &seen, &mut BTreeMap::new())?;
            }
        }
        Ok(true)
    }

    fn shutdown(&mut self, process: u32, place: i64, end: usize, how: i64) -> Outcome {
        let answer = self.ask(process, "shutdown", &[place, how])?;
        let is_gone = self.model.ends[end].reset != Reset::No
            || (self.model.ends[end].has_ended && self.model.peer_has_ended(end));
        match (answer.result, answer.error) {
            (0, _) => {}
            (-1, libc::ENOTCONN) if is_gone => return Ok(()),
            other => return fail(format!("shutdown: {other:?}")),
        }
        self.model.shut_down(end, how != i64::from(libc::SHUT_WR), how != i64::from(libc::SHUT_RD));
        Ok(())
    }

    fn close(&mut self, process: u32, place: i64) -> Outcome {
        // A call under way keeps a socket open. A watch stays while another descriptor of the socket does, but nobody can change it.
        if self.is_waiting(process) {
            return Ok(());
        }
        if self.model.watches.contains_key(&(process, place)) {
            self.unwatch(process, place)?;
        }
        if self.ask(process, "close", &[place])?.result != 0 {
            return fail("close");
        }
        self.model.close(process, place);
        Ok(())
    }

    fn fork(&mut self, process: u32) -> Outcome {
        // A process ends with the one that has made it, and that one ends when another gets its number.
        let Some(child) = (2..=LAST_PROCESS).find(|id| self.model.open.keys().all(|(owner, _)| owner < id))
        else {
            return Ok(());
        };
        if self.ask(process, "fork", &[child.into()])?.result != 0 || !self.players.meet() {
            return fail("fork");
        }
        // The child has the parent's epoll instance, which the model does not follow there.
        self.ask(child, "forget", &[])?;
        let own: Vec<_> = self.model.open.iter().filter(|((owner, _), _)| *owner == process).collect();
        let own: Vec<_> = own.into_iter().map(|((_, place), end)| ((child, *place), *end)).collect();
        self.model.open.extend(own);
        Ok(())
    }

    /// Does something for which another process must take part: a connection goes back to TCP only then. Meanwhile, that process makes
    /// calls with the other end.
    fn with_peer<T>(&mut self, end: usize, what: impl FnOnce(&mut Self) -> T) -> Result<T, String> {
        let peer = self.model.open.iter().find(|(_, other)| **other != end).map(|(at, _)| *at);
        let attending =
            peer.map(|(process, place)| (process, self.players.tell(process, true, "attend", &[place])));
        let result = what(self);
        if let Some((process, number)) = attending {
            let relaxed = self.players.ask(process, "relax", &[]);
            if relaxed.is_none() || self.players.hear(process, number, PATIENCE).is_none() {
                return fail("poll does not return");
            }
        }
        Ok(result)
    }

    /// Returns the processes that have an end.
    fn owners(&self, end: usize) -> Vec<u32> {
        let mut owners: Vec<u32> = self
            .model
            .open
            .iter()
            .filter(|(_, other)| **other == end)
            .map(|((owner, _), _)| *owner)
            .collect();
        owners.dedup();
        owners
    }

    fn exec(&mut self, process: u32) -> Outcome {
        let own = |run: &Self, end: usize| run.owners(end) == [process];
        let Some(end) = [0, 1].into_iter().find(|end| {
            let peers = self.owners(1 - end);
            let is_idle = self.model.available(*end) + self.model.outstanding(*end) == 0;
            is_idle && own(self, *end) && !peers.contains(&process)
        }) else {
            return Ok(());
        };
        if self.is_waiting(process) {
            return Ok(());
        }
        self.note(format!("process {process}: exec"));
        if !self.with_peer(end, |run| run.players.replace(process))? {
            return fail("exec");
        }
        self.model.watches.retain(|(owner, _), _| *owner != process);
        if process == 0 {
            // The listener was closed.
            self.players.port = self.ask(0, "listen", &[])?.result;
        }
        Ok(())
    }

    fn exit(&mut self, process: u32) -> Outcome {
        self.note(format!("process {process}: exit"));
        if !self.players.dismiss(process) {
            return fail("a process does not end");
        }
        self.model.exit(process);
        Ok(())
    }

    fn pass(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let others: Vec<u32> = (0..=LAST_PROCESS)
            .filter(|id| *id < 2 || self.model.open.keys().any(|(owner, _)| owner == id))
            .collect();
        let to = others[usize::from(step.how) % others.len()];
        let Some(new) = self.free_place(to) else { return Ok(()) };
        // The thread that passes a connection on cannot take part for the other end at the same time, and what is left of a broken
        // connection need not go back.
        let is_shared = self.owners(end).len() > 1
            || self.owners(1 - end) == [process]
            || self.model.ends[end].reset != Reset::No;
        let answer = self.with_peer(end, |run| run.ask(process, "pass", &[place, to.into()]))??;
        // Another process that has the connection may use it, and more may be unread than the kernel takes at once.
        let is_under_way = self.model.available(end) + self.model.outstanding(end) > 0;
        if (is_shared || is_under_way) && (answer.result, answer.error) == (-1, libc::EAGAIN) {
            return Ok(());
        }
        if answer.result != 1 || self.ask(to, "take", &[new])?.result != 1 {
            return fail(format!("pass: {answer:?}"));
        }
        self.model.open.insert((to, new), end);
        Ok(())
    }

    fn set(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let (what, value) = (i64::from(step.how % 6), i64::from(step.size % 2));
        // A call that waits would not end, or would change the way in which it waits.
        if what < 2 && self.someone_receives(end) || what == 3 && !step.size.is_multiple_of(4) {
            return Ok(());
        }
        let answer = self.ask(process, "set", &[place, what, value])?;
        let is_gone = self.model.ends[end].reset != Reset::No;
        if answer.result != 0 && !is_gone {
            return fail(format!("set: {answer:?}"));
        }
        match what {
            0 | 1 => self.model.ends[end].is_nonblocking = value == 1,
            3 if answer.result == 0 => self.model.ends[end].lingers_not = true,
            _ => {}
        }
        Ok(())
    }

    fn count(&mut self, process: u32, place: i64, end: usize, step: &Step) -> Outcome {
        let asks_input = step.how.is_multiple_of(2);
        let request = if asks_input { libc::FIONREAD } else { libc::TIOCOUTQ };
        let begun = Instant::now();
        let mut answer = self.ask(process, "count", &[place, request as i64])?;
        // What was sent may still be on its way.
        let reset = self.model.ends[end].reset;
        while asks_input
            && answer.result == 0
            && reset == Reset::No
            && self.model.available(end) > 0
            && begun.elapsed() < PATIENCE
        {
            pause(begun);
            answer = self.ask(process, "count", &[place, request as i64])?;
        }
        // The peer acknowledges bytes, the first ones and the end of the stream among them, some time after they have come.
        let most = match asks_input {
            true => self.model.available(end),
            false => self.model.ends[end].sent + 13,
        };
        if reset == Reset::No && (answer.result < 0 || answer.result > most as i64) {
            return fail(format!("ioctl: {answer:?} of {most}"));
        }
        if asks_input && self.is_settled && reset == Reset::No && most > 0 && answer.result == 0 {
            return fail(format!("FIONREAD says 0 of {most}"));
        }
        Ok(())
    }

    /// Both ends stop sending, and receive everything. Then everything is closed.
    fn finish(&mut self) -> Outcome {
        let ends: Vec<(usize, (u32, i64))> = [0, 1]
            .into_iter()
            .filter_map(|end| self.model.open.iter().find(|(_, e)| **e == end).map(|(at, _)| (end, *at)))
            .collect();
        for &(end, (process, place)) in &ends {
            if !self.model.ends[end].has_ended {
                self.shutdown(process, place, end, libc::SHUT_WR.into())?;
                self.collect()?;
            }
        }
        for &(end, (process, place)) in &ends {
            // Each turn receives something, or comes to the end.
            while self.model.available(end) > 0 {
                let before = self.model.ends[end].received;
                self.receive(process, place, end, 0, 100_000, 0)?;
                if self.model.ends[end].received == before {
                    if self.model.ends[end].reset == Reset::No {
                        return fail("bytes are lost");
                    }
                    break;
                }
            }
            if self.model.ends[end].reset == Reset::No {
                self.receive(process, place, end, 0, 1, 0)?;
                self.poll(process, place, end, 0, IN | OUT | RDHUP)?;
            }
        }
        // A watch that has reported once, or is edge-triggered, does not report the end again by itself.
        let waiting: Vec<u32> = self
            .pending
            .iter()
            .filter(|pending| matches!(pending.call, Waiting::Epoll { .. }))
            .map(|pending| pending.process)
            .collect();
        for process in waiting {
            let own = self.model.open.iter().find(|((owner, _), _)| *owner == process);
            if let Some((place, end)) = own.map(|((_, place), end)| (*place, *end)) {
                self.watch(process, place, end, &Step { what: Do::Watch, who: 0, how: 0, size: 3 })?;
            }
        }
        let begun = Instant::now();
        loop {
            self.collect()?;
            if self.pending.is_empty() {
                break;
            }
            // Of a connection that may be broken, the model does not say that they must return.
            pause(begun);
            if begun.elapsed() > PATIENCE {
                return fail("a call sleeps for ever");
            }
        }
        for process in (0..=LAST_PROCESS).rev() {
            let places: Vec<i64> = self
                .model
                .open
                .keys()
                .filter(|(owner, _)| *owner == process)
                .map(|(_, place)| *place)
                .collect();
            for place in places.iter().copied() {
                self.close(process, place)?;
            }
            if process < 2 {
                self.ask(process, "forget", &[])?;
            }
        }
        for process in 2..=LAST_PROCESS {
            if self.players.has(process) && !self.players.dismiss(process) {
                return fail("a process does not end");
            }
        }
        Ok(())
    }
}

/// Executes a program. Says what was called if it fails.
fn execute(players: &mut Players, is_settled: bool, turns: i64, steps: &[Step]) -> Outcome {
    let mut run = Run { players, model: Model::default(), pending: Vec::new(), log: Vec::new(), is_settled };
    let mut outcome = run.connect(turns);
    for step in steps {
        outcome = outcome.and_then(|()| run.step(step));
    }
    outcome = outcome.and_then(|()| run.finish());
    outcome.map_err(|error| format!("{error}\n{}\n{:?}", run.log.join("\n"), run.model.ends))
}

/// Players that are started anew after a failure.
struct Theatre<F> {
    start: F,
    players: Option<Players>,
}

impl<F: Fn() -> Players> Theatre<F> {
    fn execute(&mut self, is_settled: bool, turns: i64, steps: &[Step]) -> Outcome {
        let players = self.players.get_or_insert_with(&self.start);
        let outcome = execute(players, is_settled, turns, steps);
        if outcome.is_err() {
            self.players = None;
        }
        outcome
    }
}

/// Executes random programs, over TCP and on a stage.
fn compare(stage: &Stage, is_settled: bool, mut runner: TestRunner, length: &Length) {
    let source = [("player.c", include_str!("random/player.c"))];
    let program = stage.compile("player", &source, &["-O1", "-Wall", "-Werror", "-pthread"]);
    let program = program.to_str().unwrap();
    let path = |name: &str| stage.world.files().join(name);
    let over_tcp = || {
        Players::start(&path("tcp"), |arguments| {
            Command::new(program).args(arguments).stdin(Stdio::null()).spawn().unwrap()
        })
    };
    let over_rings = || {
        Players::start(&path("rings"), |arguments| {
            let mut command = stage.command(&[&[program], arguments].concat());
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
        })
    };
    let tcp = RefCell::new(Theatre { start: over_tcp, players: None });
    let rings = RefCell::new(Theatre { start: over_rings, players: None });
    let execute = |turns: i64, steps: &[Step]| {
        let over_tcp = tcp.borrow_mut().execute(true, turns, steps);
        over_tcp.map_err(|error| format!("{MODEL}{error}"))?;
        rings.borrow_mut().execute(is_settled, turns, steps)
    };
    if let Some(file) = std::env::var_os("GINNEL_RANDOM_PROGRAM") {
        let (turns, steps) = parse(&std::fs::read_to_string(file).unwrap());
        // It may fail now and then only.
        let repeat = |steps: &[Step]| (0..100).try_for_each(|_| execute(turns, steps));
        return repeat(&steps).unwrap_or_else(|error| {
            println!("to be shrunk: {}", report(turns, (steps.clone(), error.clone())));
            panic!("{}", report(turns, shrink(steps, error, LONG.shrinking, repeat)))
        });
    }
    let mut runs = 0;
    for file in std::fs::read_dir(FOUND).unwrap() {
        let file = file.unwrap().path();
        let (turns, steps) = parse(&std::fs::read_to_string(&file).unwrap());
        for _ in 0..REPEATS {
            runs += 1;
            execute(turns, &steps).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
    let programs = (1..12_i64, prop::collection::vec(step(), 1..200));
    let begun = Instant::now();
    let mut failures = 0;
    while begun.elapsed() < length.time && failures < length.failures {
        let (turns, steps) = programs.new_tree(&mut runner).unwrap().current();
        runs += 1;
        if let Err(error) = execute(turns, &steps) {
            failures += 1;
            // Shrinking may be cut short, so the whole program comes first.
            println!("to be shrunk: {}", report(turns, (steps.clone(), error.clone())));
            let shrunk = shrink(steps, error, length.shrinking, |steps| execute(turns, steps));
            println!("{}", report(turns, shrunk));
        }
    }
    println!("{runs} programs in {:?}", begun.elapsed());
    assert!(failures == 0, "{failures} of {runs} programs have failed; they are printed above");
    let connections = stage.all_connections();
    let ends = changed(&connections, "player").len();
    println!("{ends} ends changed over");
    // After the change, all connections do that, unless the program has closed one before.
    assert!(
        ends >= if is_settled { runs as usize } else { 1 },
        "{ends} ends of {runs} programs have changed over"
    );
}

/// Writes a program that fails in the way that [`parse`] reads.
fn report(turns: i64, (steps, error): (Vec<Step>, String)) -> String {
    let steps: Vec<String> = steps.iter().map(|step| format!("{step:?}")).collect();
    format!("{error}\nafter {turns} turns:\n{}", steps.join(",\n"))
}

/// Reads a program as a failure prints it, with or without the text around it. If there are several, reads the first.
fn parse(text: &str) -> (i64, Vec<Step>) {
    let mut lines = text.lines();
    let turns = lines.find_map(|line| line.strip_prefix("after ")?.strip_suffix(" turns:")?.parse().ok());
    let step = |line: &str| {
        let inner = line.trim().strip_prefix("Step { what: ")?.trim_end_matches(',').strip_suffix(" }")?;
        let mut words = inner.split(", ");
        let name = words.next()?;
        let what = CALLS.iter().find(|(_, what)| format!("{what:?}") == name)?.1;
        let mut number = || words.next()?.split(": ").nth(1)?.parse().ok();
        Some(Step { what, who: number()?, how: number()?, size: number()? })
    };
    let lines = lines.take_while(|line| line.trim().starts_with("Step {"));
    let steps = lines.map(|line| step(line).unwrap_or_else(|| panic!("{line:?} is no step")));
    (turns.expect("a line \"after ... turns:\""), steps.collect())
}

/// Removes steps from a program as long as it fails. Returns what is left, and how that fails.
fn shrink(
    mut steps: Vec<Step>,
    mut error: String,
    time: Duration,
    execute: impl Fn(&[Step]) -> Outcome,
) -> (Vec<Step>, String) {
    let is_models = error.starts_with(MODEL);
    let deadline = Instant::now() + time;
    let mut part = steps.len().div_ceil(2);
    loop {
        let mut begin = 0;
        while begin < steps.len() && Instant::now() < deadline {
            let end = (begin + part).min(steps.len());
            let fewer = [&steps[..begin], &steps[end..]].concat();
            match execute(&fewer) {
                // A mistake of the model and one of the library do not stand for each other.
                Err(new) if new.starts_with(MODEL) == is_models => (steps, error) = (fewer, new),
                _ => begin = end,
            }
        }
        if part <= 1 {
            return (steps, error);
        }
        part = part.div_ceil(2);
    }
}

/// Executes a fixed sequence of programs until the time is over; with `GINNEL_SOAK`, random programs.
fn run(stage: &Stage, is_settled: bool) {
    kit::require_programs!(&["cc"]);
    match std::env::var_os("GINNEL_SOAK") {
        Some(_) => compare(stage, is_settled, TestRunner::default(), &LONG),
        None => compare(stage, is_settled, TestRunner::deterministic(), &SHORT),
    }
}

#[test]
fn random_programs_see_tcp_after_the_change() {
    run(&Stage::new("eager").settling(), true);
}

#[test]
fn random_programs_see_tcp_during_the_change() {
    run(&Stage::new("eager"), false);
}
