//! A copy between two other members: messages are passed on from one channel to the other.

use super::frame::{Frame, Kind, plain};
use super::peer::Peer;
use super::progress::Progress;
use anyhow::{Result, anyhow, bail};
use ginnel::{Error, MessageReceiver, MessageSender};
use std::thread;
use zerocopy::FromBytes;

/// Passes on the messages of `source` until `sink` has stored everything, and the answers in the other direction.
pub fn relay(source: Peer, sink: Peer, progress: &mut Progress) -> Result<()> {
    let (mut from_source, mut to_source) = (source.input, source.out);
    let (mut from_sink, mut to_sink) = (sink.input, sink.out);
    let (sent, answered) = thread::scope(|scope| {
        let answers = scope.spawn(move || pass(&mut from_sink, &mut to_source, Kind::STORED, |_, _| {}));
        let sent =
            pass(&mut from_source, &mut to_sink, Kind::DONE, |frame, tail| watch(progress, frame, tail));
        // After an error, both ends learn from this that nothing more is passed on.
        drop((from_source, to_sink));
        (sent, answers.join().unwrap_or_else(|_| Err(anyhow!("the relay of answers has panicked"))))
    });
    match (sent, answered) {
        // The side that gave up first reports the reason; the other direction only sees the end.
        (Err(error), Ok(())) | (Ok(()), Err(error)) => Err(error),
        (Err(sent), Err(answered)) => Err(if only_noticed(&sent) { answered } else { sent }),
        (Ok(()), Ok(())) => Ok(()),
    }
}

fn only_noticed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Closed | Error::Finished))
}

/// Passes on messages up to the one of kind `last`. `ERROR` is passed on too, and returned as an error.
fn pass(
    from: &mut MessageReceiver,
    to: &mut MessageSender,
    last: Kind,
    mut watch: impl FnMut(&Frame, &[u8]),
) -> Result<()> {
    // No message is longer than a quarter of its ring.
    let mut buffer = vec![0; from.info().input_capacity / 4];
    loop {
        let len = from.recv_into(&mut buffer)?;
        let message = &buffer[..len];
        let Ok((frame, tail)) = Frame::read_from_prefix(message) else {
            bail!("a message that is too short");
        };
        to.send(message)?;
        watch(&frame, tail);
        match frame.kind {
            Kind::ERROR => bail!("{}", plain(tail)),
            kind if kind == last => return Ok(()),
            _ => {}
        }
    }
}

/// Shows the progress of the messages that are passed on.
fn watch(progress: &mut Progress, frame: &Frame, tail: &[u8]) {
    match frame.kind {
        Kind::FILE => progress.file(&plain(tail), frame.size),
        Kind::DATA => progress.moved(tail.len() as u64),
        Kind::END | Kind::LINK => progress.done(),
        Kind::REFUSED => progress.refused(&plain(tail)),
        _ => {}
    }
}
