//! `ginnel cp`.

mod checksum;
mod client;
mod direct;
mod frame;
mod litter;
mod partial;
mod peer;
mod place;
mod progress;
mod receiver;
mod relay;
mod root;
mod sender;
mod serve;

use crate::{AlreadySaid, Usage, output};
use anyhow::Result;
use std::ffi::OsString;
use std::path::PathBuf;

/// Copies files and folders between this machine and a VM, or between VMs.
///
/// A remote end is written MEMBER:PATH, where MEMBER is `host` or the name of a VM that runs `ginnel cp --serve`; its
/// paths begin at the folder that is served there. As with cp(1), the target is a folder to copy into or the new name of
/// the one source.
///
/// Every block is checked with XXH64, up to the checksum of the whole file. A file is written beside its place under a
/// hidden name and renamed when it is complete: a broken copy leaves nothing visible, and the next one continues it if
/// the checksum of the part agrees. Permissions (without set-id bits) and times are kept, symbolic links stay links,
/// special files are refused. The checksum finds accidents; against members of the segment who write where they should
/// not, only a segment without them helps, such as a VM's home segment.
#[derive(clap::Args)]
#[command(
    override_usage = "ginnel cp [OPTIONS] SOURCE... TARGET\n       ginnel cp --serve [--root DIR] [--write] [--segment NAME]..."
)]
pub struct Args {
    /// Sources, then the target; each PATH or MEMBER:PATH.
    #[arg(required_unless_present = "serve", conflicts_with = "serve", value_name = "PATH")]
    paths: Vec<OsString>,

    /// Copy folders with all that they contain.
    #[arg(short, long)]
    recursive: bool,

    /// Begin files anew, even if an earlier copy has left a part of them.
    #[arg(long, conflicts_with = "resume")]
    no_resume: bool,

    /// Continue what an earlier copy has left; this is the default.
    #[arg(long)]
    resume: bool,

    /// Write files of 1M and more past the target's page cache, straight to its disk (O_DIRECT). By default this is done
    /// for files of 64M and more where it turns out to be faster, as in VMs with a slow processor and a fast disk.
    #[arg(long, conflicts_with = "serve")]
    direct: bool,

    /// Say on stderr what was copied and how fast.
    #[arg(short, long)]
    verbose: bool,

    /// Print what was copied as JSON.
    #[arg(long, conflicts_with = "serve")]
    json: bool,

    /// The segment to use. Default: one in which the member serves; with --serve: the home segment, else the only one.
    /// With --serve, can be given several times.
    #[arg(long, value_name = "NAME")]
    segment: Vec<String>,

    /// Serve copies to and from this machine, with the rights of whoever runs this.
    #[arg(long)]
    serve: bool,

    /// The folder to serve; nothing outside it can be reached. Default: the current folder.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Serve writing too.
    #[arg(long, conflicts_with = "read_only")]
    write: bool,

    /// Serve reading only; this is the default.
    #[arg(long)]
    read_only: bool,
}

pub fn run(args: Args) -> Result<()> {
    if args.serve {
        return serve::run(&args);
    }
    let only_serving = args.write || args.read_only || args.root.is_some() || args.segment.len() > 1;
    if only_serving {
        let text = "--root, --write, --read-only and more than one --segment are for --serve only";
        return Err(Usage(text.into()).into());
    }
    let summary = client::run(&args, &args.paths)?;
    if args.json {
        output::json(&summary)?;
    }
    if args.verbose {
        output::note(summary.to_string());
    }
    // What was refused has been named on stderr.
    if summary.refused > 0 { Err(AlreadySaid.into()) } else { Ok(()) }
}
