//! The start: from a configuration and a journal to a running daemon.

use super::accepted::Chosen;
use super::config::{self, Config};
use super::journal::{Journal, MarkFile};
use super::own_folder::Folders;
use super::pulse::Pulse;
use super::server::Server;
use super::{random, segments};
use crate::closer::Closer;
use crate::folder_lock::{Refused, lock};
use crate::hangup::Hangup;
use crate::keeper::{Held, Keeper};
use crate::namer::{Namer, Unnamed};
use anyhow::Context;
use ginnel_broker::books::Books;
use ginnel_broker::declared::SegmentSpec;
use ginnel_broker::record::FORMAT;
use ginnel_broker::text::Hex16;
use ginnel_broker::trust::{self, Mark, NO_MARK};
use ginnel_config::{Bytes, Problem};
use ginnel_layout::{HOST_MEMBER, Name};
use sd_notify::NotifyState;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tracing::{error, info, warn};

/// Checks whether the daemon could start with this configuration. Changes nothing.
pub fn check(config: &Config) -> anyhow::Result<()> {
    for segment in config.segments.values() {
        segments::check(segment, &place(config, "segment", &segment.name))?;
        if segment.size != segment.requested {
            let (name, requested, size) = (segment.name, Bytes(segment.requested), Bytes(segment.size));
            println!("segment {name}: size {requested} is rounded up to {size}");
        }
    }
    let mut doubts = config.doubts();
    if !doubts.is_empty() {
        let last = doubts.remove(doubts.len() - 1);
        doubts.iter().for_each(|doubt| eprintln!("ginneld: {doubt}"));
        return Err(last.into());
    }
    if let Some(text) = empty(config) {
        println!("{}: {text}", config.file.display());
    }
    println!("{}: good: {} VMs, {} segments", config.file.display(), config.vms.len(), config.segments.len());
    Ok(())
}

/// Returns what a configuration means that declares nothing. Perhaps it is not the file that was meant.
fn empty(config: &Config) -> Option<String> {
    let dirs = [&config.runtime_dir, &config.state_dir, &config.shm_dir];
    let [runtime, state, shm] = dirs.map(|dir| dir.display());
    let empty = config.vms.is_empty() && config.segments.is_empty();
    empty.then(|| format!("it declares no VM and no segment; the folders are {runtime}, {state} and {shm}"))
}

fn place(config: &Config, kind: &str, name: &Name) -> String {
    format!("{}: {kind}.{name}", config.file.display())
}

/// Serves until the daemon is told to end.
pub fn run(chosen: Chosen, stop_keeper: bool, closer: Closer, hangup: &Hangup) -> anyhow::Result<()> {
    let mut config = chosen.config.clone();
    // Whoever can list a folder can hold its lock, and so the making of sockets there.
    let mut namer = Namer::default();
    prepare(&mut namer, &config.runtime_dir, 0o711, "daemon.runtime_dir")?;
    prepare(&mut namer, &config.state_dir, 0o700, "daemon.state_dir")?;
    check_private(&config.state_dir);
    let locks = [(&config.runtime_dir, "ginneld.lock"), (&config.state_dir, "journal.lock")];
    for path in locks.iter().map(|(dir, name)| dir.join(name)).chain([MarkFile::path(&config.runtime_dir)]) {
        is_free(&path, namer.file(&path))?;
    }
    let _locks = locks.into_iter().map(|(dir, name)| lock(dir, name, true).map_err(Problem::from));
    let _locks = _locks.collect::<Result<Vec<_>, _>>()?;
    // Not before: it may be the new journal of a daemon that runs.
    let unnamed = Journal::unnamed(&config.state_dir);
    is_free(&unnamed, namer.remove(&unnamed))?;
    let folders = own_folder(&config)?;
    let signals = signals()?;

    let (books, journal, mut distrusted) = books(&config)?;
    let (mut keeper, mut held) = Keeper::open(&config.keeper_socket(), &mut namer)?;
    // Without the mark, an empty journal looks like that of a first start. But then there would be nothing to keep.
    if !distrusted && books.members.is_empty() && !held.is_empty() {
        let (path, mark) = (config.state_dir.join("journal"), config.runtime_dir.join("journal.mark"));
        error!(path = %path.display(), mark = %mark.display(), "the journal and its mark are gone, but a daemon ran here before: VMs that run must be restarted, and programs must attach again. Find out who has removed these files");
        distrusted = true;
    }
    if distrusted {
        // Nobody knows any more which VM has which of these doorbells and control memories.
        for name in std::mem::take(&mut held).into_keys() {
            keeper.remove(&name)?;
        }
    }
    info!(
        version = env!("CARGO_PKG_VERSION"),
        config = %config.file.display(),
        generation = books.generation,
        endpoints = books.endpoints.len(),
        channels = books.channels.len(),
        "starting"
    );
    if let Some(text) = empty(&config) {
        warn!(config = %config.file.display(), "{text}");
    }
    for doubt in config.doubts() {
        error!("{doubt}; it is obeyed nevertheless");
    }
    keep_vectors(&mut config, &books, &held);
    // It is not dropped: the heir ends what is left open, which may take as long as a program likes.
    let mut server =
        ManuallyDrop::new(Server::new(config, books, journal, (keeper, held), namer, closer, folders)?);
    if distrusted {
        server.segments.doubt();
    }
    server.take_over()?;

    match server.listen_for_programs() {
        Ok(()) => {}
        Err((Unnamed::Held, problem)) => {
            error!("{problem}; until then only VMs are served, and those that start must wait");
        }
        Err((Unnamed::Failed(_), problem)) => return Err(problem.into()),
    }
    chosen.accepted();
    let status = chosen.config.mistake.as_deref().unwrap_or("serving");
    let _ = sd_notify::notify(false, &[NotifyState::Ready, NotifyState::Status(status)]);

    server.segments.serve();
    server.namer.serves();
    let served = server.serve(&signals, hangup);
    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
    server.members.finish_ringing();
    info!("ending; VMs and programs keep what they have");
    server.remove_sockets();
    if stop_keeper {
        server.keeper.stop().context("stopping the keeper")?;
    }
    Ok(served?)
}

/// Reads the books, and makes the new journal. Returns whether the old one is not believed, so that the books have only what is declared.
fn books(config: &Config) -> anyhow::Result<(Books, Journal, bool)> {
    let boot_id = boot_id()?;
    let mut found = Journal::read(&config.state_dir)?;
    let file = MarkFile::open(&config.runtime_dir).and_then(|file| file.read().map(|mark| (file, mark)));
    let (mut file, mark) = file.map(|(file, mark)| (Some(file), mark)).unwrap_or_else(|error| {
        let dir = config.runtime_dir.display();
        warn!(%dir, %error, "the journal's mark cannot be read or made: it is not noticed if the journal loses its end");
        (None, None)
    });
    let mark = mark.filter(|mark| mark.is_about(&found, boot_id));
    let doubt = trust::doubt(&found, mark, boot_id);
    let last = mark.map_or(0, |mark| mark.last).max(found.last);
    let mut books = std::mem::take(&mut found.books);
    if let Some(why) = &doubt {
        let path = config.state_dir.join("journal");
        error!(path = %path.display(), "the journal is not believed: {why}. What is declared stays. Programs must attach again, and VMs that run must be restarted. Memory is given out again when nobody has it any more. A crash of the daemon does not do this: check the disk, and who writes there");
        books.distrust();
    }
    let at = match (&mark, &file) {
        (Some(mark), Some(_)) if doubt.is_none() => Mark { last, ..*mark },
        (_, Some(_)) => Mark { boot_id, journal: Hex16(random::bytes()), last },
        (_, None) => Mark { boot_id, journal: NO_MARK, last },
    };
    // A journal that names its mark must have one. As long as there is an old mark, the old journal is in force. If this daemon is killed
    // before it has marked the new one, the next one believes it, unless it is in place of one that is not believed: then all doubts
    // must come again, for which the mark gets a name that no journal has.
    let name = if doubt.is_none() { at.journal } else { Hex16(random::bytes()) };
    if let (None, Some(made)) = (&mark, &file)
        && let Err(error) = made.write(&Mark { journal: name, last: 0, ..at })
    {
        warn!(%error, "the journal's mark cannot be written: it is not noticed if the journal loses its end");
        file = None;
    }
    let at = if file.is_none() { Mark { journal: NO_MARK, ..at } } else { at };
    // (A journal of another boot has much that is not needed any more.)
    let goes_on = doubt.is_none()
        && (found.format, found.journal) == (FORMAT, Some(at.journal))
        && books.boot_id == boot_id;
    books.begin(boot_id);
    let dir = &config.state_dir;
    if goes_on && let Ok(journal) = Journal::resume(dir, &found, &books, at, &mut file) {
        return Ok((books, journal, false));
    }
    let journal = Journal::create(&config.state_dir, &books, at, &mut file).or_else(|error| {
        let dir = config.state_dir.display();
        error!(%dir, %error, "the journal cannot be written: what exists is served, and requests for anything new are refused; make room there, and let the daemon's user write there");
        Journal::behind(&config.state_dir, at, file)
    })?;
    Ok((books, journal, doubt.is_some()))
}

/// Keeps the number of doorbells that running VMs were given, whatever the configuration says now.
fn keep_vectors(config: &mut Config, books: &Books, held: &Held) {
    let running =
        books.members.values().filter(|m| m.qemu.is_some()).map(|m| format!("vectors-{}", m.number));
    let has =
        running.filter_map(|name| held.get(&name)).map(Vec::len).find(|&n| n != config.vectors as usize);
    if let Some(n) = has.and_then(|n| u32::try_from(n).ok()) {
        error!(
            requested = config.vectors,
            vectors = n,
            "daemon.vectors stays as it is while VMs run: write the old number, or stop them all before the daemon is restarted"
        );
        config.vectors = n;
    }
}

/// Returns a descriptor that becomes readable when the daemon is told to end.
fn signals() -> std::io::Result<OwnedFd> {
    let (read, write) = std::os::unix::net::UnixStream::pair()?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read.into())
}

/// Returns the boot identity of this machine.
fn boot_id() -> anyhow::Result<Hex16> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).context(path)?;
    let digits: String = text.trim().chars().filter(|&c| c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).context(path)?;
    Ok(Hex16(number.to_be_bytes()))
}

/// Makes the daemon's own folder in `shm_dir`. Another daemon there is a mistake, as in the other folders. Anything else may pass, and
/// meanwhile this daemon serves the segments that it can open.
fn own_folder(config: &Config) -> Result<Folders, Problem> {
    let mut folders = Folders::new();
    match folders.prepare(&config.own_folder(), &format!("{}: daemon.shm_dir", config.file.display())) {
        Ok(()) => {}
        Err(Refused::Taken(problem)) => return Err(problem),
        Err(Refused::Failed(problem)) => error!("{problem}; until then, no file can be made there"),
    }
    Ok(folders)
}

fn prepare(namer: &mut Namer, path: &Path, mode: u32, key: &str) -> Result<(), Problem> {
    namer.folder(path, mode).map_err(|error| {
        let what = format!("{} cannot be created: {error}", path.display());
        Problem::new(key, what, error.fix("create it, or name another"))
    })
}

/// Warns if others may pass through the folder of the journal. Only then can they hold its lock, while the daemon writes the journal anew.
fn check_private(dir: &Path) {
    if std::fs::metadata(dir).is_ok_and(|dir| dir.permissions().mode() & 0o077 != 0) {
        warn!(path = %dir.display(), "other users may pass through this folder, and so hold up the daemon there: chmod 0700");
    }
}

/// Checks that the lock of the folder of this file is free. What else went wrong is found when the file is used.
fn is_free(path: &Path, named: Result<(), Unnamed>) -> Result<(), Problem> {
    match named {
        Err(error @ Unnamed::Held) => {
            Err(Problem::new(path.display(), format!("it cannot be made or removed: {error}"), error.fix("")))
        }
        _ => Ok(()),
    }
}

impl Server {
    /// Declares the members and segments of the configuration and the journal, and continues where the last daemon has
    /// stopped.
    fn take_over(&mut self) -> anyhow::Result<()> {
        self.declare_host()?;
        self.note_former();
        self.take_over_vms()?;
        self.take_over_segments()?;
        let vms: Vec<u32> = self.vms.keys().copied().collect();
        for &member in &vms {
            self.resume_vm(member);
            // Opening the segments may have taken long, and no guest was heard meanwhile.
            if let Some(vm) = self.vms.get_mut(&member) {
                vm.pulse = Pulse::new();
            }
        }
        self.broker.close_unheard();
        let endpoints = self.broker.books().endpoints.values().filter(|e| e.member == HOST_MEMBER);
        let owners = endpoints.flat_map(|e| e.owners.iter().map(|process| (e.number, e.epoch, *process)));
        for (endpoint, epoch, process) in owners.collect::<Vec<_>>() {
            self.watch_owner(endpoint, epoch, process);
        }
        self.broker.time_holds();
        self.broker.end_abandoned();
        self.run_effects();
        for member in vms {
            self.tell_doorbells(member);
        }
        // Descriptors that no member or segment has taken are not needed any more.
        for name in std::mem::take(&mut self.held).into_keys() {
            self.keeper.remove(&name)?;
        }
        self.run_effects();
        self.step_links();
        self.ring_again();
        Ok(())
    }

    /// Rings for all endpoints, because the last daemon may have ended before it rang.
    fn ring_again(&self) {
        let books = self.broker.books();
        let running = |member: &u32| {
            *member == HOST_MEMBER || books.members.get(member).is_some_and(|member| member.qemu.is_some())
        };
        for endpoint in books.endpoints.values().filter(|endpoint| running(&endpoint.member)) {
            self.members.ring(endpoint.member, endpoint.vector);
        }
    }

    fn take_over_vms(&mut self) -> anyhow::Result<()> {
        let mut wanted: BTreeMap<Name, _> = BTreeMap::new();
        for vm in self.config.vms.values() {
            wanted.insert(vm.name, (vm.clone(), None, place(&self.config, "vm", &vm.name)));
        }
        for member in self.broker.books().members.values() {
            let Some(spec) = &member.runtime else { continue };
            let place = format!("VM {}, declared at run time", member.name);
            if wanted.contains_key(&member.name) {
                warn!(vm = %member.name, "{place}: the configuration file declares it too, and takes precedence");
                continue;
            }
            match self.config.vm(member.name.as_str(), spec, &place) {
                Ok((vm, _)) => drop(wanted.insert(member.name, (vm, Some(spec.clone()), place))),
                Err(problem) => warn!("{problem}; it is ignored"),
            }
        }
        let members = self.broker.books().members.values();
        let retired: Vec<u32> = members
            .filter(|m| m.number != HOST_MEMBER && !m.retired && !wanted.contains_key(&m.name))
            .map(|m| m.number)
            .collect();
        for number in retired {
            self.retire_vm(number);
        }
        let taken: BTreeSet<u32> = wanted.values().filter_map(|(vm, ..)| vm.number).collect();
        // VMs with a configured number come first, so that no other VM gets it.
        let mut wanted: Vec<_> = wanted.into_values().collect();
        wanted.sort_by_key(|(vm, ..)| vm.number.is_none());
        for (vm, runtime, place) in wanted {
            let old = self.broker.books().member_named(&vm.name).map(|member| member.number);
            let number = match (self.choose_number(&vm, &taken, &place), old) {
                (Ok(number), _) => number,
                // The VM may be running, with the number that it had.
                (Err(problem), Some(old)) => {
                    error!(vm = %vm.name, number = old, "{problem}; it keeps the number that it has");
                    old
                }
                (Err(problem), None) => {
                    error!(vm = %vm.name, "{problem}; this VM is ignored");
                    continue;
                }
            };
            self.declare_vm(&vm, number, runtime, &place, true)?;
        }
        Ok(())
    }

    fn take_over_segments(&mut self) -> anyhow::Result<()> {
        let mut wanted: BTreeMap<Name, _> = BTreeMap::new();
        for segment in self.config.segments.values() {
            wanted
                .insert(segment.name, (segment.clone(), None, place(&self.config, "segment", &segment.name)));
        }
        let books = self.broker.books();
        let mut late = Vec::new();
        for member in books.members.values().filter(|m| !m.retired) {
            let Some(spec) = &member.runtime else { continue };
            let place = format!("the home of VM {}, declared at run time", member.name);
            if let Ok((_, Some(home))) = self.config.vm(member.name.as_str(), spec, &place) {
                late.push((home, None, place));
            }
        }
        for segment in books.segments.values() {
            let Some(spec) = &segment.runtime else { continue };
            let place = format!("segment {}, declared at run time", segment.name);
            match self.config.segment(segment.name.as_str(), spec, &place) {
                Ok(config) => late.push((config, Some(spec.clone()), place)),
                Err(problem) => warn!("{problem}; it is ignored"),
            }
        }
        for (segment, runtime, place) in late {
            if wanted.contains_key(&segment.name) {
                warn!(segment = %segment.name, "{place}: the configuration file declares it too, and takes precedence");
                continue;
            }
            let stranger = segment.sharers().find(|m| books.member_named(m).is_none_or(|m| m.retired));
            if let Some(stranger) = stranger {
                warn!("{place}: there is no VM {stranger} any more; the segment is ignored");
                continue;
            }
            wanted.insert(segment.name, (segment, runtime, place));
        }
        let ended: Vec<Name> =
            books.segments.keys().filter(|name| !wanted.contains_key(name)).copied().collect();
        for name in ended {
            self.open_abandoned(&name);
            warn!(segment = %name, "no longer declared; its file stays where it is: remove it when no VM uses it");
            self.end_segment(&name);
        }
        for (segment, runtime, place) in wanted.into_values() {
            if let Err(error) = self.declare_segment(&segment, runtime, &place, true) {
                error!(segment = %segment.name, error = format!("{error:#}"), "segment ignored");
            }
        }
        Ok(())
    }

    /// Opens a segment once more that is not declared any more, so that its endpoints can be told.
    fn open_abandoned(&mut self, name: &Name) {
        let Some(known) = self.broker.books().segments.get(name).filter(|s| s.arena.used() > 0) else {
            return;
        };
        let spec = known.runtime.clone().unwrap_or_default();
        let spec = SegmentSpec {
            size: Some(Bytes(known.size)),
            members: vec![config::HOST.into()],
            readers: Vec::new(),
            ..spec
        };
        let place = format!("segment {name}");
        let (part, own) = (known.part.clone(), known.file);
        let segment = self.config.segment(name.as_str(), &spec, &place);
        let at_old_place = !known.own_folder;
        let segment = segment.map(|segment| if at_old_place { segment.at_old_place() } else { segment });
        let segment = segment.map(|segment| match part {
            Some(part) => segment.at(&part.file, part.offset),
            None => segment,
        });
        if let Err(problem) =
            segment.and_then(|segment| self.segments.open(&segment, own, &place, false, true))
        {
            warn!("{problem}");
        }
    }
}
