//! Sessions with the daemon that are not endpoints.

use crate::connection::protocol;
use crate::endpoint::{AttachOptions, Endpoint, attach_request};
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

/// How long to wait for a daemon that is being restarted, or in a VM for the host's daemon.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long to wait for an answer of the daemon.
const ANSWER: Duration = Duration::from_secs(10);

/// A session with the daemon of this host or VM that is not attached to a segment. Use it to inspect or administer the
/// installation, or to choose a segment from what it reports and then attach over the same connection
/// ([`Daemon::attach`]).
///
/// [`Daemon::inspect`] and [`Daemon::admin`] wait for the answer, for at most 10 seconds. [`Daemon::begin_inspect`] and
/// [`Daemon::begin_admin`] do not wait, and any number of their questions may be under way at once.
pub struct Daemon {
    path: PathBuf,
    session: PerProcess<Session>,
    hello: wire::HelloOk,
    asked: Vec<Asked>,
    questions: u64,
}

/// Identifies a question that was put to a [`Daemon`], so that its answer can be recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Question(u64);

/// The daemon's answer to a question.
#[derive(Debug)]
pub struct Answer {
    /// The question that is answered.
    pub question: Question,
    /// The result that [`Daemon::inspect`] or [`Daemon::admin`] would have returned.
    pub answer: Result<String, Error>,
}

/// A question that the daemon has not answered yet.
struct Asked {
    question: Question,
    /// Number of the request; for an answer in pages, of the request for the next page.
    request: u32,
    /// The pages received so far, if the answer comes in pages.
    pages: Option<Pages>,
}

impl Daemon {
    /// Connects to the daemon at `$GINNEL_SOCKET`, or at [`wire::SOCKET`] if that is not set. Blocks as
    /// [`Daemon::connect_to`] does.
    ///
    /// # Errors
    ///
    /// As for [`Daemon::connect_to`].
    pub fn connect() -> Result<Self, Error> {
        Self::connect_to(&AttachOptions::default().socket)
    }

    /// Connects to the daemon whose socket is `path`. Waits up to 3 seconds for a daemon that is being restarted, and
    /// not at all if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] if no daemon answers, [`Error::Refused`] if the daemon refuses the connection,
    /// [`Error::Protocol`] if its protocol is of another version.
    pub fn connect_to(path: &Path) -> Result<Self, Error> {
        Self::begin_connect(path)?.wait()
    }

    /// Begins to connect to the daemon whose socket is `path`. Never waits; see [`Opening`].
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a system call fails.
    pub fn begin_connect(path: &Path) -> Result<Opening<Self>, Error> {
        let session = Session::open(path, None, PATIENCE)?;
        Ok(Opening::new(session, |session, greeting| {
            let path = session.path().to_owned();
            let (hello, _) = greeting.into_body::<wire::HelloOk>(Kind::HELLO_OK, &path)?;
            Ok(Self { path, session: PerProcess::new(session), hello, asked: Vec::new(), questions: 0 })
        }))
    }

    /// Returns the number of the member that this daemon serves; 0 is the host.
    pub fn member(&self) -> u32 {
        self.hello.member
    }

    /// Returns the name of the member that this daemon serves.
    pub fn member_name(&self) -> &str {
        self.hello.name.as_str()
    }

    /// Returns the daemon's state as JSON. Administrators of the host see everything, other users the segments to which
    /// they may attach, and programs in a VM the segments of that VM.
    ///
    /// The state comes in pages, so the result can mix old and new state if it changes meanwhile. Blocks for each page,
    /// for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the daemon refuses, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn inspect(&mut self) -> Result<String, Error> {
        let session = self.session();
        state(&self.path, |page| session.request(Kind::INSPECT, page, Instant::now() + ANSWER))
    }

    /// Changes the installation. `request` is JSON (see `docs/attach-protocol.md`). Returns the daemon's reply, which
    /// may be empty. Only administrators of the host may do this. Blocks for the answer, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the daemon refuses, [`Error::Protocol`] if `request` does not fit into a packet,
    /// [`Error::TimedOut`] or [`Error::NoDaemon`] if no answer comes.
    pub fn admin(&mut self, request: &str) -> Result<String, Error> {
        self.check_length(request)?;
        text(self.session().request(Kind::ADMIN, request.as_bytes(), Instant::now() + ANSWER)?, &self.path)
    }

    /// Begins [`Daemon::inspect`]: sends the question and returns without waiting for the answer, which
    /// [`Daemon::poll`] returns.
    ///
    /// # Errors
    ///
    /// The call does not fail at present; a failure is reported with the answer.
    pub fn begin_inspect(&mut self) -> Result<Question, Error> {
        Ok(self.ask(Kind::INSPECT, wire::Inspect::FIRST.as_bytes(), Some(Pages::default())))
    }

    /// Begins [`Daemon::admin`]: sends the request and returns without waiting for the answer, which [`Daemon::poll`]
    /// returns.
    ///
    /// A request that has been sent is not repeated if the connection is lost. Its answer is then [`Error::NoDaemon`],
    /// and the daemon may have executed it.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] if `request` does not fit into a packet.
    pub fn begin_admin(&mut self, request: &str) -> Result<Question, Error> {
        self.check_length(request)?;
        Ok(self.ask(Kind::ADMIN, request.as_bytes(), None))
    }

    /// Returns the next answer to any of the questions, or `None` if no answer has come. Never waits. While there is no
    /// daemon, questions wait for one without a limit; the caller decides how long to poll.
    ///
    /// # Errors
    ///
    /// The call itself does not fail at present. Failed questions are reported in [`Answer::answer`]; in the child of a
    /// fork, the questions of its parent are answered with [`Error::NoDaemon`].
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

    /// Returns a descriptor for poll and epoll that is readable when [`Daemon::poll`] has something to do. Another call
    /// of this session may receive an answer meanwhile, so call [`Daemon::poll`] once more after each such call.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the descriptor cannot be created.
    pub fn poll_fd(&self) -> Result<BorrowedFd<'_>, Error> {
        self.session().fd()
    }

    /// Begins to attach to a segment over this connection, with the given options except their socket. Questions that
    /// are not answered yet are dropped. Never waits; see [`Opening`].
    ///
    /// # Errors
    ///
    /// [`Error::Name`] for an invalid name.
    pub fn attach(self, segment: &str, options: &AttachOptions) -> Result<Opening<Endpoint>, Error> {
        self.attach_as(attach_request(segment, options)?, options)
    }

    pub(crate) fn attach_as(
        self,
        request: wire::Attach,
        options: &AttachOptions,
    ) -> Result<Opening<Endpoint>, Error> {
        let Ok(mut session) = self.session.into_own(Session::inherit);
        session.attach(request, inner::PATIENCE);
        Ok(Endpoint::opening(session, request.segment, options.mode))
    }

    /// Returns this process's session. The child of a fork makes its own at the first use.
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
