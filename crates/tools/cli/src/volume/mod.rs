//! `ginnel volume`.

mod bind;
mod dump;
mod serve;
mod show;

use crate::output::{self, Table};
use crate::{AlreadyReported, Usage};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use ginnel_config::{Bytes, Period};
use ginnel_volume_control::config::{Config, Spec};
use ginnel_volume_control::{Answer, Client, LimitChange, Limits, Request, Stat, VolumePaths, prometheus};
use std::path::PathBuf;
use std::time::Duration;

/// Serves, shows and changes volumes: virtual disks over vhost-user.
///
/// Each volume is a process of its own, `ginnel-volume`, and needs no daemon. See ginnel-volume(8).
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the sockets of volumes.
    #[arg(long, global = true, value_name = "DIR", env = "GINNEL_VOLUME_SOCKETS", hide_env_values = true)]
    sockets: Option<PathBuf>,
    /// Folder of the configurations of volumes.
    #[arg(long, global = true, value_name = "DIR", env = "GINNEL_VOLUME_CONFIGS", hide_env_values = true)]
    configs: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::Args),
    List(List),
    Stat(StatArgs),
    Limit(LimitArgs),
    Resize(Resize),
    ResetErrors(ResetErrors),
    Resume(Resume),
    Dump(dump::Args),
    Bind(bind::Bind),
    Unbind(bind::Unbind),
}

/// Lists volumes: those that are running, and those that have a configuration.
#[derive(clap::Args)]
struct List {
    /// Print the volumes as JSON.
    #[arg(long)]
    json: bool,
}

/// Shows the properties and statistics of volumes.
///
/// Without a name, shows all running volumes. A latency is the time from taking a request to giving it back.
#[derive(clap::Args)]
struct StatArgs {
    /// Names of volumes.
    #[arg(value_name = "VOLUME")]
    names: Vec<String>,
    /// Print the statistics as JSON: one object for each volume.
    #[arg(long, conflicts_with_all = ["prometheus", "watch"])]
    json: bool,
    /// Print the statistics as Prometheus text, for a textfile collector.
    #[arg(long, conflicts_with = "watch")]
    prometheus: bool,
    /// Print the activity of each interval of this many seconds, until interrupted. For one volume.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch: Option<u64>,
}

/// Changes the limits of a running volume until it is restarted. Without any option, shows them.
#[derive(clap::Args)]
struct LimitArgs {
    /// Name of the volume.
    volume: String,
    /// Requests per second; 0 means no limit.
    #[arg(long, value_name = "N")]
    iops: Option<u64>,
    /// Bytes per second, such as 200M; 0 means no limit.
    #[arg(long, value_name = "SIZE")]
    bandwidth: Option<Bytes>,
    /// How much unused allowance may be used later at once, such as 10ms.
    #[arg(long, value_name = "TIME")]
    burst: Option<Period>,
    /// Remove all limits.
    #[arg(long, conflicts_with_all = ["iops", "bandwidth"])]
    off: bool,
}

/// Changes the size of a disk of a running volume, and tells the guest.
///
/// Without a size, uses the present size of the file or device, which may have changed. Growing is safe; shrink a disk
/// only after its file system.
#[derive(clap::Args)]
struct Resize {
    /// Name of the volume.
    volume: String,
    /// The new size, such as 20G.
    size: Option<Bytes>,
    /// The disk, by its LUN.
    #[arg(long, default_value_t = 0, value_name = "LUN")]
    disk: u32,
}

/// Accepts that a disk has lost writes, so that flushes succeed again.
///
/// A disk that could not write back acknowledged data fails all flushes from then on. First check what the guest has
/// lost: it cannot find out later. Waits until the disk has written what it can.
#[derive(clap::Args)]
struct ResetErrors {
    /// Name of the volume.
    volume: String,
    /// The disk, by its LUN.
    #[arg(long, default_value_t = 0, value_name = "LUN")]
    disk: u32,
}

/// Continues requests that a volume holds because a disk was full or had failed (on-error = "hold").
///
/// They are tried again, in the order in which they arrived; those that fail again are held again.
#[derive(clap::Args)]
struct Resume {
    /// Name of the volume.
    volume: String,
    /// Fail the requests instead: the guest gets the errors.
    #[arg(long)]
    fail: bool,
}

pub fn run(args: Args) -> Result<()> {
    let mut paths = VolumePaths::default();
    paths.sockets = args.sockets.unwrap_or(paths.sockets);
    paths.configurations = args.configs.unwrap_or(paths.configurations);
    match args.command {
        Command::Serve(args) => serve::run(&paths, &args),
        Command::List(args) => list(&paths, &args),
        Command::Stat(args) => stat(&paths, &args),
        Command::Limit(args) => limit(&paths, &args),
        Command::Resize(args) => resize(&paths, &args),
        Command::ResetErrors(args) => reset_errors(&paths, &args),
        Command::Resume(args) => resume(&paths, &args),
        Command::Dump(args) => dump::run(&paths, &args),
        Command::Bind(args) => bind::bind(&args),
        Command::Unbind(args) => bind::unbind(&args),
    }
}

/// Connects to a volume: by its name or, if that contains a slash, by the path of its control socket.
fn connect(paths: &VolumePaths, name: &str) -> Result<Client> {
    let path = if name.contains('/') { PathBuf::from(name) } else { control_socket(paths, name) };
    Ok(Client::connect(name, &path)?)
}

/// Returns the path of a control socket, which may be set in the volume's configuration.
fn control_socket(paths: &VolumePaths, name: &str) -> PathBuf {
    let standard = paths.control(name);
    if standard.exists() {
        return standard;
    }
    configured(paths, name).map_or(standard, |config| config.control)
}

fn configured(paths: &VolumePaths, name: &str) -> Result<Config> {
    let file = paths.configuration(name);
    Ok(Spec::read(&file)?.check(name, paths, &file.display().to_string())?)
}

fn ask_stat(client: &mut Client) -> Result<Stat> {
    match client.ask(&Request::Stat)? {
        Answer::Stat(stat) => Ok(*stat),
        _ => bail!("the volume's answer is not understood: use the `ginnel` of its version"),
    }
}

/// A volume in the list.
#[derive(serde::Serialize)]
struct Listed {
    volume: String,
    /// `connected`, `waiting` (for a VM), `not running`, or an error.
    state: String,
    device: String,
    vm: Option<String>,
    bytes: Option<u64>,
    disks: usize,
    queues: usize,
    threads: usize,
    socket: String,
}

fn list(paths: &VolumePaths, args: &List) -> Result<()> {
    let folder = |what: &std::path::Path| format!("cannot read {}", what.display());
    let mut names = paths.running().with_context(|| folder(&paths.sockets))?;
    names.extend(paths.configured().with_context(|| folder(&paths.configurations))?);
    names.sort();
    names.dedup();
    let volumes: Vec<Listed> = names.iter().map(|name| listed(paths, name)).collect();
    if args.json {
        return output::json(&volumes);
    }
    let mut table =
        Table::new(&["VOLUME", "DEVICE", "VM", "STATE", "DISKS", "SIZE", "QUEUES", "THREADS", "SOCKET"]);
    for v in volumes {
        table.row([
            v.volume,
            v.device,
            v.vm.unwrap_or_else(|| "-".into()),
            v.state,
            v.disks.to_string(),
            v.bytes.map_or_else(|| "-".into(), output::bytes),
            v.queues.to_string(),
            v.threads.to_string(),
            v.socket,
        ]);
    }
    if table.is_empty() {
        output::note("ginnel: there are no volumes");
        return Ok(());
    }
    output::line(table.to_string())
}

fn listed(paths: &VolumePaths, name: &str) -> Listed {
    match connect(paths, name).and_then(|mut client| ask_stat(&mut client)) {
        Ok(stat) => Listed {
            volume: name.into(),
            state: if stat.front_end.is_some() { "connected" } else { "waiting" }.into(),
            device: stat.device.word().into(),
            vm: stat.vm,
            bytes: Some(stat.disks.iter().map(|d| d.size).fold(0, u64::saturating_add)),
            disks: stat.disks.len(),
            queues: stat.queues.len(),
            threads: stat.threads.len(),
            socket: stat.socket,
        },
        Err(error) => {
            let away = matches!(
                error.downcast_ref::<ginnel_volume_control::Error>(),
                Some(ginnel_volume_control::Error::NotRunning(..))
            );
            let state = if away { "not running".into() } else { crate::one_line(&error) };
            not_running(paths, name, state)
        }
    }
}

/// Returns what the configuration of a volume says, if it has one.
fn not_running(paths: &VolumePaths, name: &str, state: String) -> Listed {
    let unknown = |state| Listed {
        volume: name.into(),
        state,
        device: "-".into(),
        vm: None,
        bytes: None,
        disks: 0,
        queues: 0,
        threads: 0,
        socket: paths.socket(name).display().to_string(),
    };
    match configured(paths, name) {
        Ok(config) => Listed {
            device: config.device.word().into(),
            vm: config.vm,
            disks: config.disks.len(),
            queues: config.queues.into(),
            threads: config.threads,
            socket: config.socket.display().to_string(),
            ..unknown(state)
        },
        Err(_) if !paths.configuration(name).exists() => unknown(state),
        Err(error) => unknown(format!("{state}; {}", crate::one_line(&error))),
    }
}

fn stat(paths: &VolumePaths, args: &StatArgs) -> Result<()> {
    if let Some(seconds) = args.watch {
        let [name] = &args.names[..] else {
            return Err(Usage("--watch takes the name of one volume".into()).into());
        };
        return show::watch(&mut connect(paths, name)?, Duration::from_secs(seconds));
    }
    let (names, all) = match args.names.is_empty() {
        true => (paths.running()?, true),
        false => (args.names.clone(), false),
    };
    let (mut stats, mut failed) = (Vec::new(), false);
    for name in &names {
        match connect(paths, name).and_then(|mut client| ask_stat(&mut client)) {
            Ok(stat) => stats.push(stat),
            // The command without names does not fail because of a socket that a killed volume has left.
            Err(error) => {
                failed |= !all;
                output::note(format!("ginnel: {}", crate::one_line(&error)));
            }
        }
    }
    if args.prometheus {
        output::line(prometheus(&stats).trim_end())?;
    } else if args.json {
        stats.iter().try_for_each(output::json)?;
    } else if !stats.is_empty() {
        output::line(stats.iter().map(show::page).collect::<Vec<_>>().join("\n\n\n"))?;
    } else if all {
        output::note("ginnel: no volume is running");
    }
    if failed { Err(AlreadyReported.into()) } else { Ok(()) }
}

fn limit(paths: &VolumePaths, args: &LimitArgs) -> Result<()> {
    let none = args.off.then_some(0);
    let change = LimitChange {
        iops: args.iops.or(none),
        bandwidth: args.bandwidth.or(none.map(Bytes)),
        burst: args.burst,
    };
    match connect(paths, &args.volume)?.ask(&Request::Limit(change)).context("limits not changed")? {
        Answer::Limits(limits) => output::line(format!("volume {}: {}", args.volume, limits_text(&limits))),
        _ => bail!("the volume's answer is not understood: use the `ginnel` of its version"),
    }
}

fn limits_text(limits: &Limits) -> String {
    let mut parts = Vec::new();
    if limits.iops > 0 {
        parts.push(format!("{} requests/s", limits.iops));
    }
    if limits.bandwidth.0 > 0 {
        parts.push(format!("{}/s", output::bytes(limits.bandwidth.0)));
    }
    if parts.is_empty() {
        return "no limits".into();
    }
    parts.push(format!("burst {}", limits.burst));
    parts.join(", ")
}

fn resize(paths: &VolumePaths, args: &Resize) -> Result<()> {
    let request = Request::Resize { disk: args.disk, size: args.size };
    match connect(paths, &args.volume)?.ask(&request).context("disk not resized")? {
        Answer::Size(bytes) => output::line(format!(
            "volume {}, disk {}: {bytes} bytes ({})",
            args.volume,
            args.disk,
            output::bytes(bytes)
        )),
        _ => bail!("the volume's answer is not understood: use the `ginnel` of its version"),
    }
}

fn reset_errors(paths: &VolumePaths, args: &ResetErrors) -> Result<()> {
    let request = Request::ResetErrors { disk: args.disk };
    let what = match connect(paths, &args.volume)?.ask(&request).context("errors not reset")? {
        Answer::Reset(true) => "lost writes are accepted",
        Answer::Reset(false) => "no writes were lost",
        _ => bail!("the volume's answer is not understood: use the `ginnel` of its version"),
    };
    output::line(format!("volume {}, disk {}: {what}", args.volume, args.disk))
}

fn resume(paths: &VolumePaths, args: &Resume) -> Result<()> {
    let request = Request::Resume { fail: args.fail };
    match connect(paths, &args.volume)?.ask(&request).context("not resumed")? {
        Answer::Resumed(held) => {
            let what = if args.fail { "fail now" } else { "are tried again" };
            output::line(format!("volume {}: {held} requests were held, and {what}", args.volume))
        }
        _ => bail!("the volume's answer is not understood: use the `ginnel` of its version"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_told() {
        assert_eq!(limits_text(&Limits::default()), "no limits");
        let limits = Limits { iops: 500, bandwidth: Bytes(100 << 20), ..Limits::default() };
        assert_eq!(limits_text(&limits), "500 requests/s, 100 MiB/s, burst 10ms");
    }

    #[test]
    fn stopped_volumes_are_listed_by_their_configurations() {
        let folder = tempfile::tempdir().unwrap();
        let paths = VolumePaths { sockets: folder.path().into(), configurations: folder.path().into() };
        std::fs::write(paths.configuration("a"), "vm = \"x\"\nqueues = 2\n[[disk]]\npath = \"/a\"").unwrap();
        std::fs::write(paths.configuration("b"), "qeues = 2").unwrap();
        let a = listed(&paths, "a");
        assert_eq!((a.state.as_str(), a.vm.as_deref(), a.queues), ("not running", Some("x"), 2));
        let b = listed(&paths, "b");
        assert!(b.state.starts_with("not running; ") && b.state.contains("qeues"), "{}", b.state);
        assert_eq!(listed(&paths, "c").state, "not running");
    }
}
