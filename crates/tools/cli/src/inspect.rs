//! The daemon's status, as it answers `INSPECT`.

use anyhow::{Context, Result, anyhow};
use ginnel::Daemon;
pub use ginnel_status::{
    Block, Channel, Holder, Inspect, Lock, Mapping, Member, MemoryKind, Segment, Side, User,
};

/// Asks the daemon for its status.
pub fn ask(daemon: &mut Daemon) -> Result<Inspect> {
    let text = daemon.inspect().context("asking the daemon for its status")?;
    parse(&text)
}

/// Parses an answer of the daemon.
pub fn parse(text: &str) -> Result<Inspect> {
    serde_json::from_str(text)
        .context("the daemon's status is not in a form that this version of `ginnel` understands")
}

/// Returns the VM of this name. The error lists the VMs that are declared.
pub fn vm<'a>(inspect: &'a Inspect, name: &str) -> Result<&'a Member> {
    let vms = || inspect.members.iter().filter(|member| member.number != ginnel_layout::HOST_MEMBER);
    vms().find(|member| member.name == name).ok_or_else(|| {
        let names: Vec<_> = vms().map(|member| member.name.as_str()).collect();
        let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        anyhow!("there is no VM {name:?} (declared VMs: {known}); declare it in the configuration, or with `ginnel vm add`")
    })
}
