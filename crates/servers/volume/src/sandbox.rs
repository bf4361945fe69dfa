//! The sandbox. The process gives up its rights once everything is open, so an attacker who takes it over has its
//! image, its sockets and the guest's memory, but no access to anything else. (Of an NVMe device that it drives, it has all.)
//!
//! It is entered in this order, while there is only one thread: [`leave_root`], then [`enter`], which uses Landlock and
//! then seccomp. Threads that start later are restricted as well.
//!
//! - **Landlock**: no path can be opened any more, and no name can be made or removed, not even those of the volume's own
//!   sockets: other volumes have theirs in the same folder. So they stay, and the next process replaces them. Where the
//!   kernel supports it, there is no TCP, no abstract socket, and no signal to other processes. Landlock does not cover
//!   sockets with a path, UDP, or the attributes of files: seccomp blocks those.
//! - **seccomp**: the system calls of a running volume are allowed, see `calls.rs`. Any other ends the process, after
//!   one line on standard error that names the call (without the line if the call came from a thread that blocks all
//!   signals).
//!
//! Neither covers the operations of an io_uring, so rings are restricted when they are created, before the sandbox is
//! entered.

mod calls;
mod trap;

use ginnel_config::{Account, Problem};
use ginnel_volume_control::config::SandboxMode;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use rustix::fs::{Gid, Uid};

/// The restrictions of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restrictions {
    /// Whether Landlock is in force: no path can be opened.
    pub landlock: bool,
    /// Whether the seccomp filter is in force: only few system calls are allowed.
    pub seccomp: bool,
}

impl Restrictions {
    /// Returns the word for the statistics.
    pub fn word(self) -> &'static str {
        match (self.landlock, self.seccomp) {
            (true, true) => "landlock+seccomp",
            (true, false) => "landlock",
            (false, true) => "seccomp",
            (false, false) => "none",
        }
    }
}

/// What the process does, which decides about its system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It serves requests.
    Volume,
    /// It serves requests, and drives NVMe devices.
    Driver,
    /// It holds the connection of an NVMe volume: it has no thread, no image, no io_uring, and maps no file.
    Holder,
}

/// Enters the sandbox. `name` is the volume's. If the kernel lacks something, that is an error if the sandbox is required, and a
/// log message otherwise. Must be called before other threads start.
pub fn enter(mode: SandboxMode, role: Role, name: &str) -> Result<Restrictions, Problem> {
    if mode == SandboxMode::Off {
        return Ok(Restrictions::default());
    }
    let missing = |what: &str, why: String| {
        let fix = "use a kernel that has it, or write sandbox = \"auto\"";
        let problem = Problem::new("sandbox", format!("no {what} here: {why}"), fix);
        if mode == SandboxMode::Require {
            return Err(problem);
        }
        tracing::warn!("{problem}; continuing without it");
        Ok(false)
    };
    let landlock = match landlock() {
        Ok(true) => true,
        Ok(false) => missing("Landlock", "the kernel does not support it, or has it disabled".into())?,
        Err(error) => missing("Landlock", error.to_string())?,
    };
    let seccomp = match seccomp(role, name) {
        Ok(()) => true,
        Err(error) => missing("seccomp filter", error)?,
    };
    Ok(Restrictions { landlock, seccomp })
}

/// Enters Landlock. Returns whether the kernel supports it.
fn landlock() -> Result<bool, landlock::RulesetError> {
    let abi = ABI::V6;
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

fn seccomp(role: Role, name: &str) -> Result<(), String> {
    trap::install(name).map_err(|e| e.to_string())?;
    for filter in calls::filters(role).map_err(|e| e.to_string())? {
        seccompiler::apply_filter_all_threads(&filter).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// The user and group of the process once everything is open.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    user: Uid,
    group: Gid,
}

impl Identity {
    /// Looks up the `user` and `group` of a configuration. The default group is the user's own.
    pub fn find(user: &Account, group: Option<&Account>) -> Result<Self, Problem> {
        let uid = user.user("user")?;
        let gid = match group {
            Some(group) => group.group("group")?,
            None => user.own_group().ok_or_else(|| {
                Problem::new("user", format!("the group of user {uid} is unknown"), "write `group` too")
            })?,
        };
        Ok(Self { user: Uid::from_raw(uid), group: Gid::from_raw(gid) })
    }

    /// Returns user and group.
    pub fn ids(self) -> (Uid, Gid) {
        (self.user, self.group)
    }

    /// Becomes this ordinary user permanently, without any capability. Only root can do this, and only before other
    /// threads start.
    pub fn assume(self) -> Result<(), Problem> {
        let Self { user, group } = self;
        let failed = |error: rustix::io::Errno| {
            let (uid, gid) = (user.as_raw(), group.as_raw());
            let what = format!("the process cannot become user {uid} of group {gid}: {error}");
            Problem::new("user", what, "start it as root, or remove `user`")
        };
        rustix::thread::set_thread_groups(&[group]).map_err(failed)?;
        rustix::thread::set_thread_res_gid(group, group, group).map_err(failed)?;
        rustix::thread::set_thread_res_uid(user, user, user).map_err(failed)
    }
}

/// Becomes the user of the configuration, if it names one. Otherwise root stays root, with a warning, or with an error
/// if the sandbox is required.
pub fn leave_root(identity: Option<Identity>, sandbox: SandboxMode) -> Result<(), Problem> {
    if let Some(identity) = identity {
        return identity.assume();
    }
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let problem = Problem::new(
        "user",
        "the volume was started as root, and no other user is named",
        "name a user that has no other purpose, such as user = \"ginnel-volume\"",
    );
    match sandbox {
        SandboxMode::Require => Err(problem),
        SandboxMode::Auto => {
            tracing::warn!("{problem}; continuing as root");
            Ok(())
        }
        SandboxMode::Off => Ok(()),
    }
}

#[cfg(test)]
mod tests;
