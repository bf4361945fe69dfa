//! `ginnel cp --serve`: the remote side.

use super::Args;
use super::frame::{Frame, Kind, VERSION, flags, plain, send_error};
use super::peer::{attach, home, listener};
use super::progress::Progress;
use super::receiver::{Receiver, Target};
use super::root::Root;
use super::sender::{Options, Sender};
use crate::output;
use anyhow::{Context, Result, anyhow, bail, ensure};
use ginnel::{Daemon, Error, Listener, MessageChannel, MessageReceiver, MessageSender};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// The number of copies that run at once. Further clients are told to try again later.
const MAX_COPIES: usize = 64;
/// A peer that sends nothing for this long is disconnected. The next copy continues the part that it has copied so far.
const SILENCE: Duration = Duration::from_secs(600);

/// Serves copies until the daemon rejects this program or a signal ends it.
pub fn run(args: &Args) -> Result<()> {
    let path = args.root.as_deref().unwrap_or(Path::new("."));
    let root = Root::at(path)?;
    let mut daemon = Daemon::connect()?;
    let member = daemon.member_name().to_owned();
    let segments = segments(args, &mut daemon, &member)?;
    let name = listener(&member);
    let mut listeners = Vec::new();
    for segment in &segments {
        let listener = attach(Daemon::connect()?, segment)?.listen::<MessageChannel>(&name);
        listeners.push(listener.with_context(|| format!("segment {segment}"))?);
    }
    let rights = if args.write { "reading and writing" } else { "reading" };
    let place = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    output::ready(format!("serving {} for {rights} as {name} in {}", place.display(), segments.join(", ")));
    let server = Server { root, write: args.write, copies: AtomicUsize::new(0) };
    thread::scope(|scope| {
        let server = &server;
        let accepts: Vec<_> = listeners
            .into_iter()
            .map(|listener| scope.spawn(move || server.accept(scope, &listener)))
            .collect();
        let ends =
            accepts.into_iter().map(|a| a.join().unwrap_or_else(|_| Err(anyhow!("a listener has panicked"))));
        ends.fold(Ok(()), Result::and)
    })
}

/// Returns the segments to serve: those that are named, or else the home segment, or else the only one.
fn segments(args: &Args, daemon: &mut Daemon, member: &str) -> Result<Vec<String>> {
    if !args.segment.is_empty() {
        return Ok(args.segment.clone());
    }
    let all: Vec<_> = crate::inspect::ask(daemon)?.segments.into_iter().map(|segment| segment.name).collect();
    let home = home(member);
    match all.as_slice() {
        _ if all.contains(&home) => Ok(vec![home]),
        [only] => Ok(vec![only.clone()]),
        [] => bail!("{member} has no segment; `ginnel segment create` on the host creates one"),
        _ => bail!("{member} has several segments; name those to serve with --segment: {}", all.join(", ")),
    }
}

struct Server {
    root: Root,
    write: bool,
    /// Number of copies that are running.
    copies: AtomicUsize,
}

impl Server {
    fn accept<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        listener: &Listener<MessageChannel>,
    ) -> Result<()> {
        loop {
            let channel = match listener.accept() {
                Ok(channel) => channel,
                // The daemon no longer knows this endpoint, so no client can reach this listener again.
                Err(error @ (Error::Refused { .. } | Error::NoDaemon { .. })) => return Err(error.into()),
                Err(error) => {
                    output::note(format!("ginnel: a connection failed: {error}"));
                    continue;
                }
            };
            let running = self.copies.fetch_add(1, Ordering::Relaxed);
            let served = thread::Builder::new().name("copy".into()).spawn_scoped(scope, move || {
                self.serve(channel, running < MAX_COPIES);
                self.copies.fetch_sub(1, Ordering::Relaxed);
            });
            if let Err(error) = served {
                self.copies.fetch_sub(1, Ordering::Relaxed);
                output::note(format!("ginnel: cannot start a thread for a copy: {error}"));
            }
        }
    }

    /// Serves one conversation.
    fn serve(&self, mut channel: MessageChannel, welcome: bool) {
        channel.set_timeout(Some(SILENCE));
        let who = channel.info().peer.member_name.clone();
        let (mut out, mut input) = channel.split();
        let mut progress = Progress::silent();
        let done = if welcome {
            self.converse(&mut out, &mut input, &mut progress)
        } else {
            Err(anyhow!("{MAX_COPIES} copies are already running here; try again later"))
        };
        match done {
            Ok(what) => output::note(format!("{who}: {what}, {}", progress.end())),
            Err(error) => {
                send_error(&mut out, &error);
                output::note(format!("{who}: {error:#}; {}", progress.end()));
            }
        }
    }

    /// Executes the client's request. Returns a description for the log.
    fn converse(
        &self,
        out: &mut MessageSender,
        input: &mut MessageReceiver,
        progress: &mut Progress,
    ) -> Result<String> {
        let (request, tail) = Frame::receive(input)?;
        ensure!(
            request.extra == VERSION,
            "the client uses version {} of the copy protocol, and this side {VERSION}; install the same `ginnel` on both",
            request.extra
        );
        let has = |flag| request.mode & flag != 0;
        let (recursive, resume) = (has(flags::RECURSIVE), !has(flags::NO_RESUME));
        match request.kind {
            Kind::PUT => {
                ensure!(
                    self.write,
                    "only reading is allowed here; start `ginnel cp --serve --write` to allow this"
                );
                let target = Target::at(&self.root, &tail, has(flags::INTO_FOLDER))?;
                Frame::new(Kind::READY).send(out, &[])?;
                let mut receiver = Receiver {
                    input,
                    answers: out,
                    target,
                    resume,
                    direct: has(flags::DIRECT),
                    recursive,
                    expected: None,
                    progress,
                };
                receiver.receive_all()?;
                Ok(format!("wrote {:?}", plain(&tail)))
            }
            Kind::GET => {
                let root = &self.root;
                let options = Options { recursive, resume };
                let mut sender = Sender { out, answers: input, root, options, progress };
                let paths =
                    tail.split(|&b| b == 0).map(|path| if path.is_empty() { b".".as_slice() } else { path });
                sender.send_all(paths)?;
                Ok(format!("read {:?}", plain(&tail)))
            }
            other => bail!("kind {} does not begin a copy", other.0),
        }
    }
}
