//! `ginnel segment`.

use crate::output::{self, Table};
use anyhow::{Context, Result};
use clap::Subcommand;
use ginnel::Daemon;
use ginnel_config::{Account, Bytes, Mode};
use serde::Deserialize;
use serde_json::json;

/// Creates, lists and removes segments at run time.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Create(Box<Create>),
    List(List),
    Remove(Remove),
}

/// Creates a segment.
///
/// The segment exists until it is removed or the machine is shut down, also across restarts of the daemon. Each member
/// VM needs a device for it: see `ginnel qemu-args`. Only the host's administrators may do this.
#[derive(clap::Args)]
struct Create {
    /// Name of the segment.
    name: String,

    /// Size of the segment, such as 256M. It is rounded up to a multiple of 2M that is at least 4M (16M for the DAX
    /// segment of a VM), and for a bar to a power of two.
    #[arg(long)]
    size: Bytes,

    /// The members that share it: names of VMs, and `host`.
    #[arg(long, value_delimiter = ',', required = true, num_args = 1, value_name = "NAME,NAME...")]
    members: Vec<String>,

    /// The members that may read it and cannot write to it.
    #[arg(long, value_delimiter = ',', num_args = 1, value_name = "NAME,NAME...")]
    readers: Vec<String>,

    /// The kind of device by which VMs get it: `dax` (cached, needs maxmem) or `bar` (can be unplugged, for guests
    /// without DAX). Default: dax.
    #[arg(long, value_name = "KIND")]
    memory: Option<String>,

    /// Where its file is stored: `tmpfs`, or a folder on a hugetlbfs.
    #[arg(long, value_name = "DIR")]
    backing: Option<String>,

    /// Owner of its file: QEMU's user.
    #[arg(long, value_name = "USER")]
    owner: Option<Account>,

    /// Group of its file.
    #[arg(long)]
    group: Option<Account>,

    /// Permissions of its file, in octal. Default: 0660.
    #[arg(long)]
    mode: Option<Mode>,

    /// Users whose programs on the host may attach, in addition to root and the daemon's user.
    #[arg(long, value_delimiter = ',', num_args = 1, value_name = "USER,USER...")]
    allow_users: Vec<Account>,

    /// Groups whose members' programs on the host may attach.
    #[arg(long, value_delimiter = ',', num_args = 1, value_name = "GROUP,GROUP...")]
    allow_groups: Vec<Account>,

    /// The unit in which it is mapped: 2M or 4K. Default: 2M, and 4K for a bar.
    #[arg(long)]
    page: Option<Bytes>,
}

/// Lists segments: all of them on the host, and in a VM those of this VM.
#[derive(clap::Args)]
struct List {
    /// Print the segments as JSON.
    #[arg(long)]
    json: bool,
}

/// Removes a segment that was created at run time, and its file.
#[derive(clap::Args)]
struct Remove {
    /// Name of the segment.
    name: String,

    /// Remove it even if programs are attached, or VMs that have it are running. They keep their memory, and lose their
    /// channels.
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Result<()> {
    let mut daemon = Daemon::connect()?;
    match args.command {
        Command::Create(args) => create(&mut daemon, &args),
        Command::List(args) => list(&mut daemon, &args),
        Command::Remove(args) => {
            let request = json!({ "op": "segment-remove", "name": args.name, "force": args.force });
            daemon.admin(&request.to_string()).map(drop).context("segment not removed")
        }
    }
}

/// The daemon's answer to `segment-create`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    segment: Created,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Created {
    size: u64,
    path: String,
}

fn create(daemon: &mut Daemon, args: &Create) -> Result<()> {
    let answer = daemon.admin(&request(args).to_string()).context("segment not created")?;
    let created: Answer = serde_json::from_str(&answer).unwrap_or_default();
    let (size, path) = (created.segment.size, created.segment.path);
    let rounded = if size == args.size.0 { "" } else { ", rounded up as its devices need" };
    output::line(format!("segment {}: {}{rounded}, {path}", args.name, output::bytes(size)))
}

/// Returns the request. The daemon chooses values for keys that are not given.
fn request(args: &Create) -> serde_json::Value {
    let mut request = json!({
        "op": "segment-create",
        "name": args.name,
        "size": args.size,
        "members": args.members,
        "readers": args.readers,
        "allow_users": args.allow_users,
        "allow_groups": args.allow_groups,
    });
    let optional = [
        ("memory", args.memory.as_ref().map(|text| json!(text))),
        ("backing", args.backing.as_ref().map(|text| json!(text))),
        ("owner", args.owner.as_ref().map(|owner| json!(owner))),
        ("group", args.group.as_ref().map(|group| json!(group))),
        ("mode", args.mode.map(|mode| json!(mode))),
        ("page", args.page.map(|page| json!(page))),
    ];
    for (key, value) in optional {
        if let Some(value) = value {
            request[key] = value;
        }
    }
    request
}

fn list(daemon: &mut Daemon, args: &List) -> Result<()> {
    let text = daemon.inspect().context("asking the daemon for its segments")?;
    if args.json {
        let value: serde_json::Value =
            serde_json::from_str(&text).context("the daemon's status is not JSON")?;
        return output::json(&value["segments"]);
    }
    let mut table =
        Table::new(&["SEGMENT", "KIND", "SIZE", "IN USE", "MEMBERS", "READERS", "MADE BY", "STATE", "FILE"]);
    for segment in crate::inspect::parse(&text)?.segments {
        table.row([
            segment.name,
            segment.memory.to_string(),
            output::bytes(segment.size),
            output::bytes(segment.used),
            segment.members.join(","),
            if segment.readers.is_empty() { "-".into() } else { segment.readers.join(",") },
            if segment.runtime { "command" } else { "configuration" }.into(),
            if segment.broken { "BROKEN" } else { "good" }.into(),
            segment.path.unwrap_or_else(|| "-".into()),
        ]);
    }
    output::line(table.to_string())
}
