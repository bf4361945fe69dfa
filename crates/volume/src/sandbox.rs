//! The process locks itself in, once everything is open: whoever gets hold of it finds its image, its sockets and the guest's
//! memory, and no way to anything else.
//!
//! In this order, on the only thread that there is: [`leave_root`], then [`enter`]: Landlock, then seccomp.
//! Threads that are started later are held as well.
//!
//! - **Landlock**: no path can be opened any more; names may be removed from the folders of the sockets, nothing else.
//!   No TCP, no abstract socket, no signal to other processes, where the kernel has that. It knows nothing of sockets that have
//!   a path, of UDP, or of the attributes of files: those are for seccomp to close.
//! - **seccomp**: the system calls of a volume that serves, see `calls.rs`. Any other ends the process, with one line on
//!   standard error that names it (without the line if it came from a thread that blocks all signals).
//!
//! Neither sees all that an io_uring can do, so rings are restricted when they are made, before the sandbox closes.

mod calls;
mod trap;

use ginnel_config::{Account, Problem};
use ginnel_volume_control::config::SandboxMode;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::fs::{Gid, Uid};
use std::path::Path;

/// What holds a process now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// No path leads anywhere.
    pub landlock: bool,
    /// Few system calls.
    pub seccomp: bool,
}

impl Held {
    /// In a word, for the statistics.
    pub fn word(self) -> &'static str {
        match (self.landlock, self.seccomp) {
            (true, true) => "landlock+seccomp",
            (true, false) => "landlock",
            (false, true) => "seccomp",
            (false, false) => "none",
        }
    }
}

/// Locks the process in. `name` is the volume's, `folders` hold its sockets. What the kernel lacks is an error if the sandbox
/// is required, and a line in the log otherwise. Must be called before other threads start.
pub fn enter(mode: SandboxMode, name: &str, folders: &[&Path]) -> Result<Held, Problem> {
    if mode == SandboxMode::Off {
        return Ok(Held::default());
    }
    let missing = |what: &str, why: String| {
        let fix = "use a kernel that has it, or write sandbox = \"auto\"";
        let problem = Problem::new("sandbox", format!("no {what} here: {why}"), fix);
        if mode == SandboxMode::Require {
            return Err(problem);
        }
        tracing::warn!("{problem}; going on without it");
        Ok(false)
    };
    let landlock = match landlock(folders) {
        Ok(true) => true,
        Ok(false) => missing("Landlock", "the kernel does not have it, or not enabled".into())?,
        Err(error) => missing("Landlock", error.to_string())?,
    };
    let seccomp = match seccomp(name) {
        Ok(()) => true,
        Err(error) => missing("seccomp filter", error)?,
    };
    Ok(Held { landlock, seccomp })
}

/// Whether the kernel has it.
fn landlock(folders: &[&Path]) -> Result<bool, landlock::RulesetError> {
    let abi = ABI::V6;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    for folder in folders {
        // A folder that is not there has nothing to remove.
        if let Ok(folder) = PathFd::new(folder) {
            rules = rules.add_rule(PathBeneath::new(folder, AccessFs::RemoveFile))?;
        }
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

fn seccomp(name: &str) -> Result<(), String> {
    trap::install(name).map_err(|e| e.to_string())?;
    for filter in calls::filters().map_err(|e| e.to_string())? {
        seccompiler::apply_filter_all_threads(&filter).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Who a volume is once everything is open.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    user: Uid,
    group: Gid,
}

impl Identity {
    /// Looks up whom a configuration names as `user` and `group`; without a group it is the user's own.
    pub fn find(user: &Account, group: Option<&Account>) -> Result<Self, Problem> {
        let uid = user.user("user")?;
        let gid = match group {
            Some(group) => group.group("group")?,
            None => user.own_group().ok_or_else(|| {
                Problem::new("user", format!("nobody knows the group of user {uid}"), "write `group` too")
            })?,
        };
        Ok(Self { user: Uid::from_raw(uid), group: Gid::from_raw(gid) })
    }

    /// Becomes this ordinary user for good, without any capability. Only root can, and only before other threads start.
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

/// Becomes somebody else, if the configuration names one. Root without one stays root, which is said so, or refused if the
/// sandbox is required.
pub fn leave_root(identity: Option<Identity>, sandbox: SandboxMode) -> Result<(), Problem> {
    if let Some(identity) = identity {
        return identity.assume();
    }
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let problem = Problem::new(
        "user",
        "the volume was started as root, and nobody else is named",
        "write a user that has no other use, such as user = \"ginnel-volume\"",
    );
    match sandbox {
        SandboxMode::Require => Err(problem),
        SandboxMode::Auto => {
            tracing::warn!("{problem}; going on as root");
            Ok(())
        }
        SandboxMode::Off => Ok(()),
    }
}

#[cfg(test)]
mod tests;
