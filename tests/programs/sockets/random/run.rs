//! One run of a program: makes each call, and compares what it returns with the model.

mod bytes;
mod connections;
mod events;
mod finish;
mod processes;
mod sleeping;

use crate::random::model::{IN, Model, OUT, RDHUP};
use crate::random::players::{Answer, PATIENCE, Players};
use crate::random::program::{Do, Step};
use std::collections::BTreeMap;
use std::time::Instant;

const SIZES: [i64; 12] = [1, 2, 64, 1000, 4096, 5000, 16384, 16385, 20000, 70000, 200_000, 0];
/// A message of this size is taken whole if nothing is under way.
const SMALL: i64 = 4096;
const PLACES: i64 = 32;
/// The largest number of a process.
const LAST_PROCESS: u32 = 3;

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

pub type Outcome = Result<(), String>;

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
}

/// Executes a program. Says what was called if it fails.
pub fn execute(players: &mut Players, is_settled: bool, turns: i64, steps: &[Step]) -> Outcome {
    let mut run = Run { players, model: Model::default(), pending: Vec::new(), log: Vec::new(), is_settled };
    let mut outcome = run.connect(turns);
    for step in steps {
        outcome = outcome.and_then(|()| run.step(step));
    }
    outcome = outcome.and_then(|()| run.finish());
    outcome.map_err(|error| format!("{error}\n{}\n{:?}", run.log.join("\n"), run.model.ends))
}
