//! Programs: sequences of calls.

use proptest::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Do {
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
pub struct Step {
    pub what: Do,
    pub who: u8,
    pub how: u8,
    pub size: u8,
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

pub fn step() -> impl Strategy<Value = Step> {
    let what: Vec<Do> = CALLS.iter().flat_map(|(weight, what)| (0..*weight).map(|_| *what)).collect();
    (prop::sample::select(what), any::<u8>(), any::<u8>(), any::<u8>())
        .prop_map(|(what, who, how, size)| Step { what, who, how, size })
}

/// Writes a program that fails in the way that [`parse`] reads.
pub fn report(turns: i64, (steps, error): (Vec<Step>, String)) -> String {
    let steps: Vec<String> = steps.iter().map(|step| format!("{step:?}")).collect();
    format!("{error}\nafter {turns} turns:\n{}", steps.join(",\n"))
}

/// Reads a program as a failure prints it, with or without the text around it. If there are several, reads the first.
pub fn parse(text: &str) -> (i64, Vec<Step>) {
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
