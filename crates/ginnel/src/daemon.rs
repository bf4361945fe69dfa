//! Talking to the daemon without being an endpoint.

use crate::connection::protocol;
use crate::endpoint::{AttachOptions, Endpoint, wish};
use crate::error::Error;
use crate::fork::PerProcess;
use crate::inner::{self, Pages, state, text};
use crate::opening::Opening;
use crate::session::Session;
use ginnel_layout::wire::{self, Kind};
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a daemon that is being restarted is waited for, or in a VM that of the host.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a daemon may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// A session with the daemon of this host or VM that has no segment yet: for those who want to know or to change something,
/// and for those who choose a segment by what they learn, and then attach ([`Daemon::attach`]) over the same connection.
///
/// [`Daemon::inspect`] and [`Daemon::admin`] wait for their answer, at most 10 seconds. [`Daemon::begin_inspect`] and
/// [`Daemon::begin_admin`] do not; any number of their questions may be under way at once.
pub struct Daemon {
    path: PathBuf,
    session: PerProcess<Session>,
    hello: wire::HelloOk,
    asked: Vec<Asked>,
    questions: u64,
}

/// Which of a [`Daemon`]'s questions an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Question(u64);

/// What the daemon says to a question.
#[derive(Debug)]
pub struct Answer {
    /// The question.
    pub question: Question,
    /// What [`Daemon::inspect`] or [`Daemon::admin`] would have returned.
    pub answer: Result<String, Error>,
}

/// A question under way.
struct Asked {
    question: Question,
    /// Number of its request; with pages, of that for the next one.
    request: u32,
    /// What has come of a text that comes in pages.
    pages: Option<Pages>,
}

impl Daemon {
    /// Connects to `$GINNEL_SOCKET`, else [`wire::SOCKET`]. Waits a moment for a daemon that is being restarted.
    pub fn connect() -> Result<Self, Error> {
        Self::connect_to(&AttachOptions::default().socket)
    }

    /// Connects to the daemon at `path`.
    pub fn connect_to(path: &Path) -> Result<Self, Error> {
        Self::begin_connect(path)?.wait()
    }

    /// Begins to connect to the daemon at `path`. Never waits.
    pub fn begin_connect(path: &Path) -> Result<Opening<Self>, Error> {
        let session = Session::open(path, None, PATIENCE)?;
        Ok(Opening::new(session, |session, greeting| {
            let path = session.path().to_owned();
            let (hello, _) = greeting.into_body::<wire::HelloOk>(Kind::HELLO_OK, &path)?;
            Ok(Self { path, session: PerProcess::new(session), hello, asked: Vec::new(), questions: 0 })
        }))
    }

    /// Number of the member that this daemon serves; 0 is the host.
    pub fn member(&self) -> u32 {
        self.hello.member
    }

    /// Name of that member.
    pub fn member_name(&self) -> &str {
        self.hello.name.as_str()
    }

    /// What the daemon knows, as JSON: administrators of the host are shown everything, other users the segments that they may
    /// attach to, programs in a VM the segments of that VM. It comes in pages: what changes meanwhile may be seen by half.
    /// Waits for each page, at most 10 seconds.
    pub fn inspect(&mut self) -> Result<String, Error> {
        let session = self.session();
        state(&self.path, |page| session.request(Kind::INSPECT, page, Instant::now() + ANSWER))
    }

    /// Changes the installation; `request` is JSON (see `docs/attach-protocol.md`). Returns what the daemon says to it,
    /// which may be nothing. For the host's administrators. Waits for the answer, at most 10 seconds.
    pub fn admin(&mut self, request: &str) -> Result<String, Error> {
        self.check_length(request)?;
        text(self.session().request(Kind::ADMIN, request.as_bytes(), Instant::now() + ANSWER)?, &self.path)
    }

    /// Asks what [`Daemon::inspect`] returns, without waiting for the answer.
    pub fn begin_inspect(&mut self) -> Result<Question, Error> {
        Ok(self.ask(Kind::INSPECT, wire::Inspect::FIRST.as_bytes(), Some(Pages::default())))
    }

    /// Orders what [`Daemon::admin`] does, without waiting for the answer. An order that the daemon has received is not repeated
    /// if the connection is lost: the answer is [`Error::NoDaemon`] then, and the order may have been carried out.
    pub fn begin_admin(&mut self, request: &str) -> Result<Question, Error> {
        self.check_length(request)?;
        Ok(self.ask(Kind::ADMIN, request.as_bytes(), None))
    }

    /// The next answer, of whichever question; `None` if none has come. Never waits. While there is no daemon, questions wait for
    /// one, for as long as the caller likes. A child of a fork is told [`Error::NoDaemon`] for what its parent has asked.
    pub fn poll(&mut self) -> Result<Option<Answer>, Error> {
        let Ok(session) = self.session.get(Session::inherit);
        for (i, asked) in self.asked.iter_mut().enumerate() {
            let Some(answer) = session.answer(asked.request) else { continue };
            let answer = match &mut asked.pages {
                None => answer.and_then(|packets| text(packets, &self.path)),
                Some(pages) => match answer.and_then(|packets| pages.add(packets, &self.path)) {
                    Ok(ControlFlow::Continue(next)) => {
                        asked.request = session.ask(Kind::INSPECT, next.as_bytes());
                        continue;
                    }
                    Ok(ControlFlow::Break(text)) => Ok(text),
                    Err(error) => Err(error),
                },
            };
            return Ok(Some(Answer { question: self.asked.remove(i).question, answer }));
        }
        Ok(None)
    }

    /// For poll and epoll: readable when [`Daemon::poll`] has something to do. Another call may receive an answer meanwhile, so
    /// poll once more after each.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>, Error> {
        self.session().fd()
    }

    /// Attaches to a segment over this connection, as `options` say except for their socket. Questions that are not answered yet are
    /// dropped. Never waits: see [`Opening`].
    pub fn attach(self, segment: &str, options: &AttachOptions) -> Result<Opening<Endpoint>, Error> {
        self.attach_as(wish(segment, options)?, options)
    }

    pub(crate) fn attach_as(
        self,
        wish: wire::Attach,
        options: &AttachOptions,
    ) -> Result<Opening<Endpoint>, Error> {
        let Ok(mut session) = self.session.into_own(Session::inherit);
        session.attach(wish, inner::PATIENCE);
        Ok(Endpoint::opening(session, wish.segment, options.mode))
    }

    /// This process's session. The child of a fork makes its own at the first use.
    fn session(&self) -> &Session {
        let Ok(session) = self.session.get(Session::inherit);
        session
    }

    fn ask(&mut self, kind: Kind, body: &[u8], pages: Option<Pages>) -> Question {
        let request = self.session().ask(kind, body);
        self.questions += 1;
        let question = Question(self.questions);
        self.asked.push(Asked { question, request, pages });
        question
    }

    fn check_length(&self, request: &str) -> Result<(), Error> {
        if request.len() > wire::MAX_PACKET - size_of::<wire::Header>() {
            return Err(protocol(&self.path, "a request that is longer than a packet"));
        }
        Ok(())
    }
}
