//! What another process needs to continue a channel.

use crate::error::Error;
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::Cursor;
use std::fmt;
use std::str::FromStr;

/// A channel that waits to be resumed: its number, and the position of its two directions. It is not secret, because
/// only the owners of its endpoint can use it. Its text form ([`fmt::Display`], [`FromStr`]) is one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedChannel {
    pub(crate) kind: ChannelKind,
    pub(crate) channel: u64,
    pub(crate) is_initiator: bool,
    pub(crate) output: Cursor,
    pub(crate) input: Cursor,
}

/// The version of the text form.
const FORM: u64 = 1;

impl SavedChannel {
    /// Returns the channel's number.
    pub fn id(&self) -> u64 {
        self.channel
    }

    /// Returns the channel's kind.
    pub fn kind(&self) -> ChannelKind {
        self.kind
    }
}

impl fmt::Display for SavedChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FORM},{},{},{}", self.kind.0, self.channel, u8::from(self.is_initiator))?;
        for Cursor { position, pending, released, token, rung } in [self.output, self.input] {
            write!(f, ",{position},{pending},{released},{token},{rung}")?;
        }
        Ok(())
    }
}

impl FromStr for SavedChannel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let read = || {
            let fields: Result<Vec<u64>, _> = text.trim().split(',').map(str::parse).collect();
            let fields: [u64; 14] = fields.ok()?.try_into().ok()?;
            let (&[form, kind, channel, initiator], cursors) = fields.split_first_chunk()?;
            let (output, input) = cursors.split_at(cursors.len() / 2);
            let saved = Self {
                kind: ChannelKind(u32::try_from(kind).ok()?),
                channel,
                is_initiator: initiator == 1,
                output: cursor(output)?,
                input: cursor(input)?,
            };
            (form == FORM && initiator <= 1).then_some(saved)
        };
        read().ok_or_else(|| Error::unreadable("reading a saved channel"))
    }
}

/// Makes a cursor from its five numbers. Resuming the ring checks whether they are plausible.
fn cursor(fields: &[u64]) -> Option<Cursor> {
    let &[position, pending, released, token, rung] = fields else { return None };
    let (token, rung) = (u32::try_from(token).ok()?, u32::try_from(rung).ok()?);
    Some(Cursor { position, pending, released, token, rung })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_channel_survives_its_text_form() {
        let output = Cursor { position: 1 << 40, pending: 64, released: 3, token: 4, rung: u32::MAX };
        let input = Cursor { position: 6, pending: 0, released: 5, token: 9, rung: 1 };
        for is_initiator in [true, false] {
            let saved =
                SavedChannel { kind: ChannelKind::STREAM, channel: u64::MAX, is_initiator, output, input };
            assert_eq!(saved.to_string().parse::<SavedChannel>().unwrap(), saved);
        }
        for bad in [
            "",
            "1,1,1,1,0,0,0,0,0,0,0,0,0",
            "1,1,1,1,0,0,0,0,0,0,0,0,0,0,0",
            "2,1,1,1,0,0,0,0,0,0,0,0,0,0",
            "1,1,1,2,0,0,0,0,0,0,0,0,0,0",
            "1,1,1,1,0,0,0,4294967296,0,0,0,0,0,0",
            "1,1,1,1,0,0,0,-1,0,0,0,0,0,0",
        ] {
            assert!(matches!(bad.parse::<SavedChannel>(), Err(Error::System { .. })), "{bad:?}");
        }
    }
}
