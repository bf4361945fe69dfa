//! Handing an endpoint and its channels over to the program that this process executes next, or to another process.
//!
//! Nothing here is on the data path. A saved channel is a few numbers, which contain the position of each ring. The
//! rings and the data in them stay as they are, and the process that resumes the channel continues at the same byte.

use crate::channel::{Channel, Pipe};
use crate::daemon::Daemon;
use crate::endpoint::{AttachOptions, Endpoint, attach_request, parse_name};
use crate::error::Error;
use crate::inner::PATIENCE;
use crate::opening::Opening;
use crate::saved_channel::SavedChannel;
use crate::session::Session;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use rustix::rand::{GetRandomFlags, getrandom};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The credential with which a process can adopt an endpoint that is held ([`Endpoint::hold`]).
///
/// A token is secret: any process that has it, and that runs as the same user or may use the segment, can become the
/// endpoint. It is valid for one process of the same host or VM, until the hold ends. Pass it through a pipe, a socket,
/// a file that nobody else can read, or the environment; never on a command line, which every user can read.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    segment: String,
    endpoint: u32,
    epoch: u32,
    secret: [u8; 16],
}

impl Token {
    /// Returns the token as a line of text, which [`Token::from_str`] reads.
    pub fn reveal(&self) -> String {
        let Self { segment, endpoint, epoch, secret } = self;
        format!("{segment}:{endpoint}:{epoch}:{:032x}", u128::from_be_bytes(*secret))
    }

    /// Returns the name of the endpoint's segment.
    pub fn segment(&self) -> &str {
        &self.segment
    }

    fn attach_request(&self, options: &AttachOptions) -> Result<wire::Attach, Error> {
        let &Self { ref segment, endpoint, epoch, secret } = self;
        Ok(wire::Attach { endpoint, epoch, token: secret, ..attach_request(segment, options)? })
    }
}

/// Omits the secret, so that it does not appear in logs.
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
            // Endpoint number 0 would ask for a new endpoint.
            let good = fields.next().is_none() && parse_name(&segment).is_ok() && endpoint != 0;
            good.then_some(Self { segment, endpoint, epoch, secret })
        };
        read().ok_or_else(|| Error::unreadable("reading the token of a held endpoint"))
    }
}

impl Endpoint {
    /// Keeps this endpoint alive for `time` even if no process owns it, so that the program that this process executes
    /// next, or another process, can adopt it ([`Endpoint::adopt`]) with the returned token. Its peers notice nothing.
    /// If no process adopts it in time, the endpoint ends with its last process, or at the end of the hold.
    ///
    /// Save the channels ([`crate::MessageChannel::save`], [`crate::StreamChannel::save`]) and pass them on together
    /// with the token. Everything else stays with the endpoint and does not reach the adopter: close the locks and
    /// blocks before, leave the listeners ([`crate::Listener::leave`]), and listen at their names again afterwards.
    ///
    /// Any thread may call this. It blocks for the daemon, for at most 10 seconds. If the daemon ends meanwhile, its
    /// successor keeps the hold and starts the time again.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::LIMIT`] if `time` is longer than the daemon allows (`max_hold`, 5 seconds
    /// by default) or there are too many holds, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn hold(&self, time: Duration) -> Result<Token, Error> {
        let mut secret = [0; 16];
        getrandom(&mut secret, GetRandomFlags::empty()).map_err(Error::system("making a token"))?;
        let millis = u32::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX).max(1);
        let inner = self.inner();
        inner.order(Kind::HOLD, wire::Hold { token: secret, millis, reserved: 0 }.as_bytes())?;
        let (endpoint, epoch) = self.number();
        Ok(Token { segment: inner.segment().to_owned(), endpoint, epoch, secret })
    }

    /// Ends a hold of this endpoint early. Never waits. Has no effect if a process has adopted the endpoint with this
    /// token.
    pub fn release(&self, token: &Token) {
        if (token.endpoint, token.epoch) == self.number() {
            let end = wire::Hold { token: token.secret, millis: 0, reserved: 0 };
            self.inner().tell(Kind::HOLD, end.as_bytes());
        }
    }

    /// Becomes an owner of the endpoint that is held with this token, and ends that hold.
    ///
    /// If the process that made the hold is this one, it must not use the old endpoint any more: its open connection to
    /// the daemon is closed. If it is another process, both own the endpoint, as after `fork`.
    ///
    /// Blocks for the daemon, like [`Endpoint::attach`].
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::STALE`] if the hold is over or another process was faster, or with
    /// [`ErrorCode::DENIED`] if this user is neither the endpoint's user nor allowed to use the segment;
    /// [`Error::Broken`] if the segment's memory is gone; otherwise as [`Endpoint::attach`].
    pub fn adopt(token: &Token) -> Result<Self, Error> {
        Self::adopt_with(token, &AttachOptions::default())
    }

    /// Adopts an endpoint with the given options; their name is ignored. Otherwise like [`Endpoint::adopt`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::adopt`].
    pub fn adopt_with(token: &Token, options: &AttachOptions) -> Result<Self, Error> {
        Self::begin_adopt(token, options)?.wait()
    }

    /// Begins to adopt an endpoint without waiting for the daemon; see [`Opening`].
    ///
    /// # Errors
    ///
    /// [`Error::Name`] if the name in `options` is invalid, or [`Error::System`] if a system call fails.
    pub fn begin_adopt(token: &Token, options: &AttachOptions) -> Result<Opening<Self>, Error> {
        let request = token.attach_request(options)?;
        let session = Session::open(&options.socket, Some(request), PATIENCE)?;
        Ok(Self::opening(session, request.segment, options.mode))
    }

    /// Continues a channel of this endpoint at the position where it was saved: no data is lost or received twice. Each
    /// saved channel must be resumed only once, and no other process may still use it: a ring in which two processes
    /// work becomes corrupt. Settings of its halves (wait mode, timeout, ready set) must be made again. If the peer has
    /// ended meanwhile, the first operation reports it as usual.
    ///
    /// Blocks for the daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with [`ErrorCode::NOT_FOUND`] if this endpoint has no such channel, or with
    /// [`ErrorCode::KIND`] if it is of another kind; [`Error::Corrupt`] if the channel is not at the saved position, in
    /// which case it is closed; [`Error::ReadOnly`] if this member may only read the segment; [`Error::TimedOut`] or
    /// [`Error::NoDaemon`] if no daemon answers.
    pub fn resume<C: Channel>(&self, saved: &SavedChannel) -> Result<C, Error> {
        if saved.kind != C::KIND {
            let text = format!("channel {} was saved as one of another kind", saved.channel);
            return Err(Error::Refused { code: ErrorCode::KIND, text });
        }
        let inner = self.inner();
        inner.may_write()?;
        let &SavedChannel { channel, is_initiator, output, input, .. } = saved;
        let body = wire::ChannelSide { channel, initiator: is_initiator.into(), reserved: 0 };
        let packet = inner.request(Kind::RESUME, body.as_bytes())?;
        let (answer, fds) = packet.into_body::<wire::Channel>(Kind::CHANNEL, &inner.path)?;
        if (answer.channel, answer.kind) != (channel, saved.kind.0) {
            return Err(inner.protocol("a channel that was not asked for"));
        }
        // The daemon may have announced this channel as one that waits to be accepted.
        inner.with_endpoint_state(|state| state.resumed(channel));
        Ok(C::resume(Pipe::new(inner.clone(), &answer, fds)?, output, input)?)
    }
}

impl Daemon {
    /// Begins to adopt the endpoint that is held with this token ([`Endpoint::adopt`]) over this connection, with the
    /// given options except their socket. Questions that are not answered yet are dropped. Never waits; see
    /// [`Opening`].
    ///
    /// # Errors
    ///
    /// [`Error::Name`] if the name in `options` is invalid.
    pub fn adopt(self, token: &Token, options: &AttachOptions) -> Result<Opening<Endpoint>, Error> {
        self.attach_as(token.attach_request(options)?, options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_its_text_form_and_hides_its_secret() {
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
}
