//! Finds the member at the other end, and opens a channel to it.

use super::frame::{Frame, Kind, MAX_CONTROL, VERSION};
use anyhow::{Context, Result, anyhow, bail};
use ginnel::{
    AttachOptions, ChannelOptions, Daemon, Endpoint, Error, ErrorCode, MessageChannel, MessageReceiver,
    MessageSender, Opening,
};

/// The preferred size of a copy's rings in bytes, and the smallest that suffices.
const CAPACITY: usize = 4 << 20;
const LEAST_CAPACITY: usize = 64 << 10;

/// The name of a copy's endpoints.
const NAME: &str = "ginnel-cp";

/// Returns the name at which a member's server listens.
pub fn listener(member: &str) -> String {
    format!("cp@{member}")
}

/// An open channel to a member's server.
pub struct Peer {
    pub member: String,
    pub out: MessageSender,
    pub input: MessageReceiver,
}

impl Peer {
    /// Connects to `ginnel cp --serve` of a member, in the given segment or in one that both members have.
    pub fn connect(member: &str, segment: Option<&str>) -> Result<Self> {
        let mut daemon = Daemon::connect()?;
        let segment = match segment {
            Some(segment) => segment.to_owned(),
            None => find_segment(&mut daemon, member)?,
        };
        let endpoint = attach(daemon, &segment)?;
        let mut capacity = CAPACITY;
        let channel: MessageChannel = loop {
            let options = ChannelOptions { capacity, ..ChannelOptions::default() };
            match endpoint.connect_with(&listener(member), &options) {
                Err(Error::Refused {
                    code: ErrorCode::LIMIT | ErrorCode::NO_MEMORY | ErrorCode::INVALID,
                    ..
                }) if capacity > LEAST_CAPACITY => {
                    capacity /= 2;
                }
                Err(error) if error.code() == Some(ErrorCode::REFUSED) => {
                    bail!("serves no copies in segment {segment}; start `ginnel cp --serve` there");
                }
                other => break other.with_context(|| format!("segment {segment}"))?,
            }
        };
        let (out, input) = channel.split();
        Ok(Self { member: member.to_owned(), out, input })
    }

    /// Sends a request: `PUT` or `GET`.
    pub fn ask(&mut self, kind: Kind, flags: u32, tail: &[u8]) -> Result<()> {
        if Frame::LEN + tail.len() > MAX_CONTROL {
            bail!("paths of {} bytes are too long for {}", tail.len(), self.member);
        }
        Ok(Frame { mode: flags, extra: VERSION, ..Frame::new(kind) }.send(&mut self.out, tail)?)
    }
}

/// Attaches to a segment over an existing connection to the daemon.
pub fn attach(daemon: Daemon, segment: &str) -> Result<Endpoint> {
    let options = AttachOptions { name: Some(NAME.into()), ..AttachOptions::default() };
    let attached = daemon.attach(segment, &options).and_then(Opening::wait);
    attached.with_context(|| format!("segment {segment}"))
}

/// Returns a segment in which the member serves copies, preferably its home segment.
fn find_segment(daemon: &mut Daemon, member: &str) -> Result<String> {
    let own = daemon.member_name().to_owned();
    let inspect = crate::inspect::ask(daemon)?;
    let name = listener(member);
    let mut found: Vec<_> = inspect.listeners.iter().filter(|l| l.name == name).map(|l| &l.segment).collect();
    found.sort_by_key(|segment| (**segment != home(member), **segment != home(&own), *segment));
    if let Some(segment) = found.first() {
        return Ok((*segment).clone());
    }
    let shared: Vec<_> = inspect
        .segments
        .iter()
        .filter(|s| s.members.iter().any(|m| m == member))
        .map(|s| s.name.as_str())
        .collect();
    Err(if shared.is_empty() {
        anyhow!(
            "{own} shares no segment with a member {member:?}; `ginnel segment list` shows who shares what, and \
             `ginnel segment create` creates one"
        )
    } else {
        anyhow!(
            "{member} serves no copies; start `ginnel cp --serve` there (segments shared with it: {})",
            shared.join(", ")
        )
    })
}

/// Returns the name of the segment that a VM shares only with the host.
pub fn home(member: &str) -> String {
    format!("home-{member}")
}
