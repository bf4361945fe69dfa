//! `ginnel cp SRC... DST`.

use super::Args;
use super::frame::{Frame, Kind, MAX_CONTROL, flags, send_error};
use super::location::Location;
use super::peer::Peer;
use super::progress::{Progress, Summary};
use super::receiver::{Receiver, Target};
use super::relay::relay;
use super::root::Root;
use super::sender::{Options, Sender};
use crate::Usage;
use anyhow::{Context, Result};
use std::ffi::OsString;

/// Copies the files that the arguments name.
pub fn run(args: &Args, paths: &[OsString]) -> Result<Summary> {
    let usage = |text: &str| Usage(text.into());
    let locations =
        paths.iter().map(|p| Location::parse(p)).collect::<Result<Vec<_>, _>>().map_err(|e| usage(&e))?;
    let (target, sources) = locations
        .split_last()
        .filter(|(_, sources)| !sources.is_empty())
        .ok_or_else(|| usage("name at least one source and a target: `ginnel cp FILE MEMBER:PATH`"))?;
    if target.member.is_none() && sources.iter().any(|source| source.member.is_none()) {
        let text = "source and target are both on this machine; name a member as MEMBER:PATH, or use cp(1)";
        return Err(usage(text).into());
    }
    let mut copy = Copy { args, target, many: sources.len() > 1, progress: Progress::on_stderr() };
    let copied = groups(sources).into_iter().try_for_each(|group| copy.group(group));
    let summary = copy.progress.end();
    copied.map(|()| summary)
}

/// Splits the sources into groups that one conversation can copy: each is of one member, and fits into one message.
fn groups(sources: &[Location]) -> Vec<&[Location]> {
    let mut groups = Vec::new();
    let (mut begin, mut len) = (0, 0);
    for (i, source) in sources.iter().enumerate() {
        let one_more = source.path.len() + 1;
        if i > begin && (source.member != sources[begin].member || len + one_more > MAX_CONTROL - Frame::LEN)
        {
            groups.push(&sources[begin..i]);
            (begin, len) = (i, 0);
        }
        len += one_more;
    }
    groups.push(&sources[begin..]);
    groups
}

struct Copy<'a> {
    args: &'a Args,
    target: &'a Location,
    /// Whether there is more than one source. Several sources can only be copied into a folder.
    many: bool,
    progress: Progress,
}

impl Copy<'_> {
    fn group(&mut self, sources: &[Location]) -> Result<()> {
        let from = sources.first().and_then(|source| source.member.as_deref());
        match (from, self.target.member.as_deref()) {
            (None, Some(to)) => self.put(to, sources).with_context(|| to.to_owned()),
            (Some(from), None) => self.get(from, sources).with_context(|| from.to_owned()),
            (Some(from), Some(to)) => {
                self.between(from, to, sources).with_context(|| format!("{from} to {to}"))
            }
            // The caller has already rejected this case.
            (None, None) => Ok(()),
        }
    }

    fn connect(&self, member: &str) -> Result<Peer> {
        Peer::connect(member, self.args.segment.first().map(String::as_str))
    }

    fn flags(&self) -> u32 {
        let flag = |on, flag| if on { flag } else { 0 };
        flag(self.args.recursive, flags::RECURSIVE)
            | flag(self.many, flags::INTO_FOLDER)
            | flag(self.args.no_resume, flags::NO_RESUME)
            | flag(self.args.direct, flags::DIRECT)
    }

    fn put(&mut self, to: &str, sources: &[Location]) -> Result<()> {
        let mut peer = self.connect(to)?;
        peer.ask(Kind::PUT, self.flags(), &self.target.path)?;
        Frame::expect(&mut peer.input, Kind::READY)?;
        let mut sender = Sender {
            out: &mut peer.out,
            answers: &mut peer.input,
            root: &Root::Open,
            options: Options { recursive: self.args.recursive, resume: !self.args.no_resume },
            progress: &mut self.progress,
        };
        sender.send_all(sources.iter().map(|source| source.path.as_slice()))
    }

    fn get(&mut self, from: &str, sources: &[Location]) -> Result<()> {
        let target = Target::at(&Root::Open, &self.target.path, self.many)?;
        let mut peer = self.connect(from)?;
        peer.ask(Kind::GET, self.flags(), &paths(sources))?;
        let mut receiver = Receiver {
            input: &mut peer.input,
            answers: &mut peer.out,
            target,
            resume: !self.args.no_resume,
            direct: self.args.direct,
            recursive: self.args.recursive,
            expected: Some(sources.iter().map(|source| source.base().to_vec()).collect()),
            progress: &mut self.progress,
        };
        let received = receiver.receive_all();
        received.inspect_err(|error| send_error(&mut peer.out, error))
    }

    /// Copies from one member to another: passes the messages of the source on to the target unchanged, and the answers
    /// back.
    fn between(&mut self, from: &str, to: &str, sources: &[Location]) -> Result<()> {
        let (mut source, mut sink) = (self.connect(from)?, self.connect(to)?);
        sink.ask(Kind::PUT, self.flags(), &self.target.path)?;
        Frame::expect(&mut sink.input, Kind::READY)?;
        source.ask(Kind::GET, self.flags(), &paths(sources))?;
        relay(source, sink, &mut self.progress)
    }
}

/// Returns the paths as `GET` has them.
fn paths(sources: &[Location]) -> Vec<u8> {
    sources.iter().map(|source| source.path.as_slice()).collect::<Vec<_>>().join(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_has_one_member_and_fits_a_message() {
        let location = |text: &str| Location::parse(text.as_ref()).unwrap();
        let long = format!("a:{}", "x".repeat(5000));
        let sources = [
            location("a:1"),
            location("a:2"),
            location("b:3"),
            location(&long),
            location(&long),
            location(&long),
        ];
        let lens: Vec<_> = groups(&sources).iter().map(|g| g.len()).collect();
        assert_eq!(lens, [2, 1, 2, 1]);
        for group in groups(&sources) {
            assert!(paths(group).len() <= MAX_CONTROL - Frame::LEN);
        }
    }
}
