//! `ginnel cp`.

mod checksum;
mod client;
mod direct;
mod frame;
mod hidden_file;
mod location;
mod partial;
mod peer;
mod progress;
mod receiver;
mod relay;
mod root;
mod sender;
mod serve;

use crate::{AlreadyReported, Usage, output};
use anyhow::Result;
use std::ffi::OsString;
use std::path::PathBuf;

/// Copies files and folders between this machine and a VM, or between VMs.
///
/// A remote path is written MEMBER:PATH, where MEMBER is `host` or the name of a VM that runs `ginnel cp --serve`; PATH
/// begins at the folder that is served there. As with cp(1), the target is a folder to copy into, or the new name of
/// the only source.
///
/// Every block is checked with XXH64, and so is the whole file. A file is written in the target folder under a hidden
/// name and renamed when it is complete: an interrupted copy leaves nothing visible, and the next copy continues it if
/// the checksum of the existing part matches. Permissions (without set-id bits) and times are kept, symbolic links stay
/// links, and special files are refused. The checksum detects accidents. It does not protect against other members of
/// the segment that write to it maliciously; use a segment without them for that, such as a VM's home segment.
#[derive(clap::Args)]
#[command(
    override_usage = "ginnel cp [OPTIONS] SOURCE... TARGET\n       ginnel cp --serve [--root DIR] [--write] [--segment NAME]..."
)]
pub struct Args {
    /// Sources, then the target; each is PATH or MEMBER:PATH.
    #[arg(required_unless_present = "serve", conflicts_with = "serve", value_name = "PATH")]
    paths: Vec<OsString>,

    /// Copy folders with their contents.
    #[arg(short, long)]
    recursive: bool,

    /// Begin files anew, even if an earlier copy has left a part of them.
    #[arg(long, conflicts_with = "resume")]
    no_resume: bool,

    /// Continue files of which an earlier copy has left a part; this is the default.
    #[arg(long)]
    resume: bool,

    /// Write files of 1M and more directly to the target's disk, without its page cache (O_DIRECT). By default this is
    /// done for files of 64M and more where it turns out to be faster, as in VMs with a slow processor and a fast disk.
    #[arg(long, conflicts_with = "serve")]
    direct: bool,

    /// Print on stderr what was copied and how fast.
    #[arg(short, long)]
    verbose: bool,

    /// Print what was copied as JSON.
    #[arg(long, conflicts_with = "serve")]
    json: bool,

    /// The segment to use. Default: one in which the member serves; with --serve, the home segment, or else the only
    /// one. With --serve, this can be given several times.
    #[arg(long, value_name = "NAME")]
    segment: Vec<String>,

    /// Serve copies to and from this machine, with the rights of the user who runs this.
    #[arg(long)]
    serve: bool,

    /// The folder to serve; no file outside it is accessible. Default: the current folder.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Allow clients to write, too.
    #[arg(long, conflicts_with = "read_only")]
    write: bool,

    /// Allow clients only to read; this is the default.
    #[arg(long)]
    read_only: bool,
}

pub fn run(args: Args) -> Result<()> {
    if args.serve {
        return serve::run(&args);
    }
    let only_serving = args.write || args.read_only || args.root.is_some() || args.segment.len() > 1;
    if only_serving {
        let text = "--root, --write, --read-only and more than one --segment are only for --serve";
        return Err(Usage(text.into()).into());
    }
    let summary = client::run(&args, &args.paths)?;
    if args.json {
        output::json(&summary)?;
    }
    if args.verbose {
        output::note(summary.to_string());
    }
    // Refused files were named on stderr.
    if summary.refused > 0 { Err(AlreadyReported.into()) } else { Ok(()) }
}
