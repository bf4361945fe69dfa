//! The server, and how this process reaches it.

use crate::answer::Answer;
use crate::cache_block::{CacheBlock, Opened};
use crate::connection::{Broken, Connection};
use crate::error::Error;
use crate::place::{Changes, places};
use ginnel::{AttachOptions, Endpoint, Error as Ginnel, ErrorCode};
use std::time::{Duration, Instant};

/// The pauses between attempts to reach the server.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LAST_PAUSE: Duration = Duration::from_millis(100);
/// A connection that was used less than this long ago is assumed to work.
const MOMENT: Duration = Duration::from_millis(5);
/// The time limit of a connection attempt while a caller waits that only wants to read.
const BRIEFLY: Duration = Duration::from_millis(50);
/// The same for attaching to a segment, which happens once.
const ATTACHING: Duration = Duration::from_millis(200);
/// The most lines of an answer that has several.
const MOST_LINES: usize = 4096;

/// A request, and what the client may do if no answer comes.
pub struct Ask<'a> {
    /// The bytes of one or more requests.
    pub bytes: &'a [u8],
    /// The number of answers to expect.
    pub answers: usize,
    /// The request may be repeated without harm.
    pub is_harmless: bool,
}

/// A connection to the server. It is opened when it is needed, and again when another server has taken over.
pub struct Server {
    changes: Changes,
    attach: AttachOptions,
    patience: Duration,
    timeout: Duration,
    /// Only attempts that take a moment are made.
    is_brief: bool,
    connection: Option<Connection>,
    /// The process that has opened the connection.
    process: u32,
    /// When the connection was last used.
    used: Instant,
    endpoint: Option<(String, Endpoint)>,
    /// Where the header of the cache said that the server is, when it could last be read.
    contact: String,
    pub connections: u64,
    /// A buffer that is kept, so that no request needs new memory.
    pub request: Vec<u8>,
}

impl Server {
    pub fn new(changes: Changes, attach: AttachOptions, patience: Duration, timeout: Duration) -> Self {
        Self {
            changes,
            attach,
            patience,
            timeout,
            is_brief: false,
            connection: None,
            process: 0,
            used: Instant::now(),
            endpoint: None,
            contact: String::new(),
            connections: 0,
            request: Vec::new(),
        }
    }

    /// Sends a request, and passes each answer to `take` with its number. An error of `take` ends the connection.
    pub fn ask(
        &mut self,
        memory: &CacheBlock,
        ask: &Ask<'_>,
        take: &mut dyn FnMut(usize, Answer<'_>) -> Result<(), &'static str>,
    ) -> Result<(), Error> {
        let cache = || memory.address.clone();
        self.ready();
        let end = Instant::now() + self.patience;
        let mut is_second = false;
        loop {
            let connection = self.reach(memory, end.saturating_duration_since(Instant::now()))?;
            let mut taken = 0;
            let asked = connection.send(ask.bytes).and_then(|()| {
                while taken < ask.answers {
                    connection.answer(|answer| take(taken, answer))?.map_err(Broken::Nonsense)?;
                    taken += 1;
                }
                if connection.is_empty() {
                    Ok(())
                } else {
                    Err(Broken::Nonsense("more than it was asked for"))
                }
            });
            let Err(broken) = asked else { return Ok(()) };
            self.connection = None;
            match broken {
                Broken::Nonsense(what) => return Err(Error::Nonsense { cache: cache(), what }),
                // The server has gone since the connection was last used, or just after it was opened.
                Broken::Before(_) if !is_second || Instant::now() < end => {}
                Broken::After(_) if !is_second && ask.is_harmless && taken == 0 => {}
                Broken::Before(why) => return Err(no_server(memory, why)),
                Broken::After(why) => return Err(Error::Lost { cache: cache(), why }),
            }
            is_second = true;
        }
    }

    /// Sends a harmless request whose answer has several lines. `take` returns true for the last line.
    pub fn lines(
        &mut self,
        memory: &CacheBlock,
        request: &[u8],
        most: usize,
        take: &mut dyn FnMut(Answer<'_>) -> Result<bool, &'static str>,
    ) -> Result<(), Error> {
        self.ready();
        let patience = self.patience;
        let end = self.timeout;
        let connection = self.reach(memory, patience)?;
        let mut lines = || {
            let end = Instant::now() + end;
            connection.send(request)?;
            for _ in 0..most {
                if connection.answer_by(end, &mut *take)?.map_err(Broken::Nonsense)? {
                    return Ok(());
                }
            }
            Err(Broken::Nonsense("without an end"))
        };
        lines().map_err(|broken| {
            self.connection = None;
            let cache = memory.address.clone();
            match broken {
                Broken::Nonsense(what) => Error::Nonsense { cache, what },
                Broken::Before(why) | Broken::After(why) => Error::Lost { cache, why },
            }
        })
    }

    /// Sends bytes that have no answer, unless that would block. Without a connection, this function makes one brief
    /// attempt to open one.
    pub fn hint(&mut self, memory: &CacheBlock, bytes: &[u8]) -> bool {
        self.ready();
        if self.connection.is_none() {
            let timeout = self.timeout;
            (self.timeout, self.is_brief) = (timeout.min(BRIEFLY), true);
            let reached = self.reach(memory, Duration::ZERO).is_ok();
            (self.timeout, self.is_brief) = (timeout, false);
            let is_set =
                self.connection.as_mut().is_some_and(|connection| connection.set_timeout(timeout).is_ok());
            if !reached || !is_set {
                self.connection = None;
                return false;
            }
        }
        let Ok(connection) = self.reach(memory, Duration::ZERO) else { return false };
        let said = connection.hint(bytes).is_ok();
        if !said {
            self.connection = None;
        }
        said
    }

    /// Drops a connection that seems to be broken.
    fn ready(&mut self) {
        let is_ours = self.process == std::process::id();
        if !is_ours {
            // The connection belongs to the process that has forked this one.
            (self.connection, self.endpoint) = (None, None);
        }
        let now = Instant::now();
        let is_tried = now.saturating_duration_since(self.used) < MOMENT;
        self.used = now;
        if self.connection.as_mut().is_some_and(|connection| !is_tried && !connection.is_alive()) {
            self.connection = None;
        }
    }

    /// Returns a connection. Waits up to `patience` for a server.
    fn reach(&mut self, memory: &CacheBlock, patience: Duration) -> Result<&mut Connection, Error> {
        if self.connection.is_none() {
            let connection = self.open(memory, patience)?;
            self.connections += 1;
            self.process = std::process::id();
            return Ok(self.connection.insert(connection));
        }
        self.connection.as_mut().ok_or_else(|| no_server(memory, "nowhere".into()))
    }

    fn open(&mut self, memory: &CacheBlock, patience: Duration) -> Result<Connection, Error> {
        let end = Instant::now() + patience;
        let mut pause = FIRST_PAUSE;
        loop {
            let places = match &self.changes {
                Changes::Automatic => self.places_of_header(memory),
                place => vec![place.clone()],
            };
            let (mut tried, mut is_hopeless) = (Vec::new(), !places.is_empty());
            let began = Instant::now();
            for place in places {
                if self.is_brief && began.elapsed() >= BRIEFLY {
                    break;
                }
                match self.try_open(memory, &place) {
                    Ok(connection) => return Ok(connection),
                    Err(Failed { why, is_final }) => {
                        tried.push(format!("{place}: {why}"));
                        is_hopeless &= is_final;
                    }
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || is_hopeless {
                let tried = if tried.is_empty() { "its header names none".into() } else { tried.join("; ") };
                return Err(no_server(memory, tried));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LAST_PAUSE);
            memory.look_again();
        }
    }

    fn places_of_header(&mut self, memory: &CacheBlock) -> Vec<Changes> {
        let contact = memory.now().as_ref().map(|opened| opened.reader.contact());
        if let Some(contact) = contact.filter(|contact| !contact.is_empty()) {
            self.contact = contact;
        }
        places(&self.contact)
    }

    fn try_open(&mut self, memory: &CacheBlock, place: &Changes) -> Result<Connection, Failed> {
        let timeout = self.timeout;
        let mut connection = match place {
            Changes::Channel(segment) => {
                let endpoint = self.endpoint_of(memory, segment)?;
                Connection::channel(&endpoint, &memory.name, timeout)?
            }
            Changes::Tcp(address) => Connection::tcp(address, timeout)?,
            Changes::Unix(path) => Connection::unix(path, timeout)?,
            Changes::Automatic => return Err(Failed::for_now("no place")),
        };
        self.greet(memory, &mut connection)?;
        Ok(connection)
    }

    fn endpoint_of(&mut self, memory: &CacheBlock, segment: &str) -> Result<Endpoint, Failed> {
        let known = |endpoint: &Endpoint| endpoint.check().is_ok() && !endpoint.is_read_only();
        if let (of, Some(endpoint)) = memory.endpoint()
            && of == segment
            && known(&endpoint)
        {
            return Ok(endpoint);
        }
        if let Some((of, endpoint)) = &self.endpoint
            && of == segment
            && known(endpoint)
        {
            return Ok(endpoint.clone());
        }
        let endpoint = match self.is_brief {
            true => attach_briefly(segment, &self.attach)?,
            false => Endpoint::attach_with(segment, &self.attach)?,
        };
        self.endpoint = Some((segment.into(), endpoint.clone()));
        Ok(endpoint)
    }

    /// Asks for the server's identity. Whatever listens at a port, or an earlier server of another cache, must get no
    /// other request.
    fn greet(&self, memory: &CacheBlock, connection: &mut Connection) -> Result<(), Failed> {
        let mut who = None;
        let end = Instant::now() + self.timeout;
        connection.send(b"stats ginnel\r\n")?;
        for _ in 0..MOST_LINES {
            let is_last = connection.answer_by(end, |answer| match answer {
                Answer::Stat(name, text) => {
                    if name == b"ginnel" {
                        who = Some(String::from_utf8_lossy(text).into_owned());
                    }
                    false
                }
                _ => true,
            })?;
            if is_last {
                break;
            }
        }
        let Some(who) = who else {
            return Err(Failed::final_("there is another server, not a ginnel-cache"));
        };
        let (_, id) = who.rsplit_once(' ').unwrap_or_default();
        let is_this = |opened: &Opened| {
            let [first, second] = opened.reader.id();
            opened.reader.is_current() && id.eq_ignore_ascii_case(&format!("{first:016x}{second:016x}"))
        };
        memory.look_now(is_this);
        // Without the memory, the name is the only thing to compare.
        let is_this = memory.now().as_ref().is_none_or(|opened| is_this(opened));
        if is_this { Ok(()) } else { Err(Failed::for_now(format!("there is the cache {who}"))) }
    }
}

/// Does the same as [`Endpoint::attach_with`], but does not wait for a daemon that is being restarted.
fn attach_briefly(segment: &str, options: &AttachOptions) -> Result<Endpoint, Failed> {
    let end = Instant::now() + ATTACHING;
    let mut opening = Endpoint::begin_attach(segment, options)?;
    loop {
        match opening.poll()? {
            Some(endpoint) => return Ok(endpoint),
            None if Instant::now() >= end => return Err(Failed::for_now("the daemon does not answer")),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn no_server(memory: &CacheBlock, tried: String) -> Error {
    Error::NoServer { cache: memory.address.clone(), tried }
}

/// Why there is no connection.
struct Failed {
    why: String,
    /// Another attempt is pointless.
    is_final: bool,
}

impl Failed {
    fn for_now(why: impl Into<String>) -> Self {
        Self { why: why.into(), is_final: false }
    }

    fn final_(why: impl Into<String>) -> Self {
        Self { why: why.into(), is_final: true }
    }
}

impl From<Ginnel> for Failed {
    fn from(error: Ginnel) -> Self {
        let is_final = match &error {
            Ginnel::Refused { code, .. } => {
                matches!(
                    *code,
                    ErrorCode::NO_SEGMENT | ErrorCode::DENIED | ErrorCode::READ_ONLY | ErrorCode::KIND
                )
            }
            Ginnel::ReadOnly { .. } | Ginnel::Name { .. } => true,
            _ => false,
        };
        Self { why: error.to_string(), is_final }
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Self::for_now(error.to_string())
    }
}

impl From<Broken> for Failed {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Before(why) | Broken::After(why) => Self::for_now(why),
            Broken::Nonsense(what) => Self::final_(format!("there is another server, which answers {what}")),
        }
    }
}
