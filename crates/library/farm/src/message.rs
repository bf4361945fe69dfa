//! Parsing the farm's messages in a ring. The peer is not trusted: a message may have any length and any content, and
//! may change while it is read. So its header is read only once.

use ginnel::{Mapping, SharedSlice};
use ginnel_layout::farm::{Header, Kind, VERSION};
use zerocopy::FromBytes;

pub(super) const HEADER: usize = size_of::<Header>();

/// A worker's answer to a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The worker has completed the piece with this number. The message's content is the result.
    Result(u64),
    /// The worker has failed at the piece with this number. The message's content is the reason.
    Failed(u64),
}

impl Answer {
    /// Reads an answer, and replaces `content` with the bytes that follow its header. An error describes what is wrong
    /// with the message.
    pub fn read(message: SharedSlice<'_, Mapping>, content: &mut Vec<u8>) -> Result<Self, String> {
        let header = header(message)?;
        let rest = message.skip(HEADER);
        content.resize(rest.len(), 0);
        rest.read(0, content);
        match header.kind {
            Kind::RESULT => Ok(Self::Result(header.piece)),
            Kind::FAILED => Ok(Self::Failed(header.piece)),
            Kind(kind) => Err(format!("a message of kind {kind}")),
        }
    }
}

/// A message from a manager.
pub enum Order<'a> {
    /// All pieces that follow belong to the job with this name.
    Job(String),
    /// A piece to work on: its header, and its bytes, which are still in the ring.
    Piece(Header, SharedSlice<'a, Mapping>),
}

impl<'a> Order<'a> {
    /// Reads an order. An error describes what is wrong with the message.
    pub fn read(message: SharedSlice<'a, Mapping>) -> Result<Self, String> {
        let header = header(message)?;
        let rest = message.skip(HEADER);
        match header.kind {
            Kind::JOB => {
                String::from_utf8(rest.to_vec()).map(Self::Job).map_err(|_| "a job without a name".into())
            }
            Kind::PIECE => Ok(Self::Piece(header, rest)),
            Kind(kind) => Err(format!("a message of kind {kind}")),
        }
    }
}

fn header(message: SharedSlice<'_, Mapping>) -> Result<Header, String> {
    let mut bytes = [0; HEADER];
    if message.read(0, &mut bytes) < HEADER {
        return Err("a message without a header".into());
    }
    match Header::read_from_bytes(&bytes) {
        Ok(header) if header.version == VERSION => Ok(header),
        Ok(header) => Err(format!("version {} of the protocol, and not {VERSION}", header.version)),
        Err(_) => Err("a message without a header".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn message<T>(
        kind: u32,
        version: u32,
        content: &[u8],
        read: impl FnOnce(SharedSlice<'_, Mapping>) -> T,
    ) -> T {
        let memory = Mapping::anonymous(4096).unwrap();
        let header = Header { kind: Kind(kind), version, piece: 7, offset: 9 };
        let slice = SharedSlice::new(&memory, 8, HEADER + content.len());
        slice.write(0, header.as_bytes());
        slice.write(HEADER, content);
        read(slice)
    }

    #[test]
    fn each_side_understands_what_the_other_may_say_and_nothing_else() {
        for kind in 0..6 {
            let mut content = Vec::new();
            let answer = message(kind, VERSION, b"abc", |slice| Answer::read(slice, &mut content));
            let order = message(kind, VERSION, b"abc", |slice| match Order::read(slice)? {
                Order::Job(name) => Ok(name),
                Order::Piece(header, data) => {
                    Ok(format!("{} {} {}", header.piece, header.offset, data.len()))
                }
            });
            let unknown = Err(format!("a message of kind {kind}"));
            match kind {
                3 => assert_eq!((answer, content.as_slice()), (Ok(Answer::Result(7)), &b"abc"[..])),
                4 => assert_eq!((answer, content.as_slice()), (Ok(Answer::Failed(7)), &b"abc"[..])),
                _ => assert_eq!(answer, unknown.clone().map(|_: String| Answer::Result(0))),
            }
            match kind {
                1 => assert_eq!(order, Ok("abc".into())),
                2 => assert_eq!(order, Ok("7 9 3".into())),
                _ => assert_eq!(order, unknown),
            }
        }
    }

    #[test]
    fn short_foreign_and_garbled_messages_are_errors() {
        let memory = Mapping::anonymous(4096).unwrap();
        for len in 0..HEADER {
            let slice = SharedSlice::new(&memory, 8, len);
            assert!(Answer::read(slice, &mut Vec::new()).unwrap_err().contains("without a header"));
            assert!(Order::read(slice).is_err_and(|why| why.contains("without a header")));
        }
        let why = message(3, VERSION + 1, b"", |slice| Answer::read(slice, &mut Vec::new())).unwrap_err();
        assert!(why.contains("version 2"), "{why}");
        assert!(message(1, VERSION, &[0xff], |slice| Order::read(slice).is_err()));
    }
}
