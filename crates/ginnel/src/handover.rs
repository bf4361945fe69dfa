//! Handing an endpoint and its channels over: to the program that this process executes next, or to another process.
//!
//! Nothing here is on the way of data. A channel is saved where it stands, as a few numbers; the rings stay as they are, with
//! all that is on its way in them, and whoever resumes it goes on at the same byte.

use crate::channel::{Channel, Pipe};
use crate::daemon::Daemon;
use crate::endpoint::{AttachOptions, Endpoint, parse_name, wish};
use crate::error::Error;
use crate::inner::PATIENCE;
use crate::opening::Opening;
use crate::session::Session;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_ring::Cursor;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fmt;
use std::io::ErrorKind;
use std::str::FromStr;
use std::time::Duration;
use zerocopy::IntoBytes;

/// What a process has to know to adopt an endpoint that is held ([`Endpoint::hold`]).
///
/// A secret: whoever has it, and is the same user or may use the segment, can be the endpoint. It is good for one process, of the
/// same host or VM, and for the time of its hold. Pass it through a pipe, a socket or a file that nobody else can read, or through
/// the environment; never on a command line, which every user can read.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    segment: String,
    endpoint: u32,
    epoch: u32,
    secret: [u8; 16],
}

impl Token {
    /// The token as a line of text, for another process: [`Token::from_str`] reads it.
    pub fn reveal(&self) -> String {
        let Self { segment, endpoint, epoch, secret } = self;
        format!("{segment}:{endpoint}:{epoch}:{:032x}", u128::from_be_bytes(*secret))
    }

    /// The segment of the endpoint.
    pub fn segment(&self) -> &str {
        &self.segment
    }

    fn wish(&self, options: &AttachOptions) -> Result<wire::Attach, Error> {
        let &Self { ref segment, endpoint, epoch, secret } = self;
        Ok(wire::Attach { endpoint, epoch, token: secret, ..wish(segment, options)? })
    }
}

/// Without the secret, so that it does not get into logs.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({}:{}:{}:..)", self.segment, self.endpoint, self.epoch)
    }
}

impl FromStr for Token {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let read = || {
            let mut fields = text.trim().split(':');
            let segment = fields.next()?.to_owned();
            let (endpoint, epoch) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            let is_hex = |digits: &&str| digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
            let secret = fields.next().filter(is_hex)?;
            let secret = u128::from_str_radix(secret, 16).ok()?.to_be_bytes();
            // An endpoint of number 0 would be a new one.
            let good = fields.next().is_none() && parse_name(&segment).is_ok() && endpoint != 0;
            good.then_some(Self { segment, endpoint, epoch, secret })
        };
        read().ok_or_else(|| unreadable("reading the token of a held endpoint"))
    }
}

/// A channel that waits to be resumed: which it is, and where its two directions stand. No secret, and of no use to anybody but the
/// owners of its endpoint. As text ([`fmt::Display`], [`FromStr`]) it is one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedChannel {
    pub(crate) kind: ChannelKind,
    pub(crate) channel: u64,
    pub(crate) is_initiator: bool,
    pub(crate) output: Cursor,
    pub(crate) input: Cursor,
}

/// The form of the text.
const FORM: u64 = 1;

impl SavedChannel {
    /// Number of the channel.
    pub fn id(&self) -> u64 {
        self.channel
    }

    /// Kind of the channel.
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
        read().ok_or_else(|| unreadable("reading a saved channel"))
    }
}

/// A cursor of its five numbers. Where they lead is checked when the ring is resumed.
fn cursor(fields: &[u64]) -> Option<Cursor> {
    let &[position, pending, released, token, rung] = fields else { return None };
    let (token, rung) = (u32::try_from(token).ok()?, u32::try_from(rung).ok()?);
    Some(Cursor { position, pending, released, token, rung })
}

fn unreadable(what: &'static str) -> Error {
    Error::System { what, source: ErrorKind::InvalidInput.into() }
}

impl Endpoint {
    /// Has this endpoint live for `time` even if no process owns it, so that the program which this process executes next, or
    /// another process, can adopt it ([`Endpoint::adopt`]) with the token that is returned. Its peers notice nothing meanwhile. If
    /// nobody does in time, it ends with its last process, or at the end of that time.
    ///
    /// Save its channels ([`crate::MessageChannel::save`], [`crate::StreamChannel::save`]) and pass them on with the token. What
    /// else it has stays with the endpoint and does not come to the adopter: close its locks and blocks before, leave its listeners
    /// ([`crate::Listener::leave`]), and listen at their names again afterwards.
    ///
    /// Asks the daemon, and waits for it at most 10 seconds. [`Error::Refused`] with [`ErrorCode::LIMIT`] if `time` is longer than
    /// the daemon allows (`max_hold`, 5 seconds by default), or there are too many holds. A daemon that ends meanwhile leaves the
    /// hold to its successor, which counts the time anew. Any thread may call it.
    pub fn hold(&self, time: Duration) -> Result<Token, Error> {
        let mut secret = [0; 16];
        getrandom(&mut secret, GetRandomFlags::empty()).map_err(Error::system("making a token"))?;
        let millis = u32::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX).max(1);
        let inner = self.inner();
        inner.order(Kind::HOLD, wire::Hold { token: secret, millis, reserved: 0 }.as_bytes())?;
        let (endpoint, epoch) = self.number();
        Ok(Token { segment: inner.segment().to_owned(), endpoint, epoch, secret })
    }

    /// Ends a hold of this endpoint before its time, because nobody needs it any more. Never waits. Without effect if somebody has
    /// adopted the endpoint with this token.
    pub fn release(&self, token: &Token) {
        if (token.endpoint, token.epoch) == self.number() {
            let end = wire::Hold { token: token.secret, millis: 0, reserved: 0 };
            self.inner().tell(Kind::HOLD, end.as_bytes());
        }
    }

    /// Becomes an owner of the endpoint that is held with this token, and ends that hold. The process that has held it must not
    /// use it any more if it is this one: the connection to the daemon that it has left open is closed. If it is another process
    /// both own the endpoint, as after `fork`.
    ///
    /// Asks the daemon, and waits as [`Endpoint::attach`] does. [`Error::Refused`] with [`ErrorCode::STALE`] if the hold is over, or
    /// another process was faster; with [`ErrorCode::DENIED`] if this user is neither that of the endpoint nor one who may use the
    /// segment. [`Error::Broken`] if the segment's memory is gone.
    pub fn adopt(token: &Token) -> Result<Self, Error> {
        Self::adopt_with(token, &AttachOptions::default())
    }

    /// Adopts as `options` say; their name is of no importance.
    pub fn adopt_with(token: &Token, options: &AttachOptions) -> Result<Self, Error> {
        Self::begin_adopt(token, options)?.wait()
    }

    /// The same without waiting for the daemon.
    pub fn begin_adopt(token: &Token, options: &AttachOptions) -> Result<Opening<Self>, Error> {
        let wish = token.wish(options)?;
        let session = Session::open(&options.socket, Some(wish), PATIENCE)?;
        Ok(Self::opening(session, wish.segment, options.mode))
    }

    /// Goes on with a channel of this endpoint where it was saved: nothing that was on its way is lost, or comes twice. Nobody
    /// else may use it any more, and each saved channel is resumed once: rings in which two work are corrupt. What was set of its
    /// halves (mode, timeout, a ready set) is to be set again.
    ///
    /// Asks the daemon, and waits for it at most 10 seconds. [`Error::Refused`] with [`ErrorCode::NOT_FOUND`] if this endpoint has no
    /// such channel, with [`ErrorCode::KIND`] if it is of another kind. [`Error::Corrupt`] if the channel does not stand where it
    /// was saved; it is closed then. An end of the peer is told by the first operation, as else.
    pub fn resume<C: Channel>(&self, saved: &SavedChannel) -> Result<C, Error> {
        if saved.kind != C::KIND {
            let text = format!("channel {} was saved as one of another kind", saved.channel);
            return Err(Error::Refused { code: ErrorCode::KIND, text });
        }
        let inner = self.inner();
        inner.may_write()?;
        let &SavedChannel { channel, is_initiator, output, input, .. } = saved;
        let wish = wire::ChannelSide { channel, initiator: is_initiator.into(), reserved: 0 };
        let packet = inner.request(Kind::RESUME, wish.as_bytes())?;
        let (answer, fds) = packet.into_body::<wire::Channel>(Kind::CHANNEL, &inner.path)?;
        if (answer.channel, answer.kind) != (channel, saved.kind.0) {
            return Err(inner.protocol("another channel than the one that was asked for"));
        }
        // The daemon may have announced it as one that waits to be accepted.
        inner.with_endpoint_state(|state| state.resumed(channel));
        Ok(C::resume(Pipe::new(inner.clone(), &answer, fds)?, output, input)?)
    }
}

impl Daemon {
    /// Adopts the endpoint that is held with this token ([`Endpoint::adopt`]) over this connection, as `options` say except for
    /// their socket. Questions that are not answered yet are dropped. Never waits: see [`Opening`].
    pub fn adopt(self, token: &Token, options: &AttachOptions) -> Result<Opening<Endpoint>, Error> {
        self.attach_as(token.wish(options)?, options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_was_written_and_hides_itself() {
        let token = Token { segment: "a-b.c@d".into(), endpoint: 7, epoch: 9, secret: [0xa5; 16] };
        let text = token.reveal();
        assert_eq!(text.parse::<Token>().unwrap(), token);
        assert_eq!(format!("{text}\n").parse::<Token>().unwrap(), token);
        assert!(!format!("{token:?}").contains("a5"));
        let hex = "a5".repeat(16);
        for bad in [
            String::new(),
            "web".into(),
            format!("web:0:1:{hex}"),
            format!("web:1:1:{hex}:1"),
            format!("web:1:1:{}", &hex[1..]),
            format!("web:1:1:+{}", &hex[1..]),
            format!("w b:1:1:{hex}"),
            format!("web:1:4294967296:{hex}"),
        ] {
            assert!(matches!(bad.parse::<Token>(), Err(Error::System { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_saved_channel_is_read_as_it_was_written() {
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
