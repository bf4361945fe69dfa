//! `ginnel segment`.

use crate::output::{self, Table};
use anyhow::{Context, Result};
use clap::Subcommand;
use ginnel::Daemon;
use ginnel_config::{Account, Bytes, Mode};
use serde::Deserialize;
use serde_json::json;

/// Makes, lists and removes segments at run time.
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

/// Makes a segment.
///
/// It stays until it is removed or the machine is shut down, also across restarts of the daemon. A VM of its members needs a device for it: see `ginnel qemu-args`. For the host's administrators.
#[derive(clap::Args)]
struct Create {
    /// Its name.
    name: String,

    /// Its size, such as 256M; rounded up to a multiple of 2M of at least 4M (16M for the DAX segment of a VM), for a bar to a power of two.
    #[arg(long)]
    size: Bytes,

    /// Who shares it: VMs, and `host`.
    #[arg(long, value_delimiter = ',', required = true, value_name = "NAME")]
    members: Vec<String>,

    /// Who sees it and cannot write.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    readers: Vec<String>,

    /// By which kind of device it comes to VMs: `dax` (cached, needs maxmem) or `bar` (can be unplugged, for guests without DAX). Default: dax.
    #[arg(long, value_name = "KIND")]
    memory: Option<String>,

    /// Where its file is: `tmpfs`, or a folder on a hugetlbfs.
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

    /// Users whose programs on the host may attach, beside root and the daemon's user.
    #[arg(long, value_delimiter = ',', value_name = "USER")]
    allow_users: Vec<Account>,

    /// Groups whose members' programs on the host may attach.
    #[arg(long, value_delimiter = ',', value_name = "GROUP")]
    allow_groups: Vec<Account>,

    /// The unit in which it is mapped: 2M or 4K. Default: 2M; a bar has 4K.
    #[arg(long)]
    page: Option<Bytes>,
}

/// Lists segments: all on the host, those of this VM in a VM.
#[derive(clap::Args)]
struct List {
    /// Print them as JSON.
    #[arg(long)]
    json: bool,
}

/// Removes a segment that was made at run time, with its file.
#[derive(clap::Args)]
struct Remove {
    /// Its name.
    name: String,

    /// Even if programs are attached, or VMs run that have it. They keep their memory, and lose their channels.
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

/// What the daemon answers to `segment-create`.
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

/// Keys that were not given are left to the daemon.
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
            serde_json::from_str(&text).context("the daemon's status is no JSON")?;
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
