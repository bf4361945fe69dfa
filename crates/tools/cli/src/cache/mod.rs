//! `ginnel cache`.

mod prometheus;
mod show;
mod stat;

use crate::inspect::{self, Block};
use crate::list::or_dash;
use crate::output::{self, Table};
use crate::status::period;
use crate::{AlreadyReported, Usage, address};
use anyhow::{Result, bail};
use clap::{Subcommand, ValueEnum};
use ginnel::Daemon;
use ginnel_cache_client::{Cache, Changes, Options};
use ginnel_config::Bytes;
use stat::Stat;
use std::io::{Read, Write};
use std::time::Duration;

/// The prefix of the names of caches' blocks.
const PREFIX: &str = "cache.";

/// Shows caches, and works on their items.
///
/// A cache is a block of a segment. One server, `ginnel-cache`, writes it, and every program that may use the segment
/// can read it. The server executes all changes. See ginnel-cache(8).
#[derive(clap::Args)]
pub struct Args {
    /// Where to send changes: `channel SEGMENT`, `tcp ADDRESS:PORT` or `unix PATH`. Default: the address that the cache
    /// itself contains.
    #[arg(long, global = true, value_name = "PLACE", default_value = "auto", hide_default_value = true)]
    changes: Changes,
    /// How long to wait for a server that does not answer, in seconds.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 3)]
    patience: u64,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    List(List),
    Status(Status),
    Hot(Hot),
    Get(Get),
    Set(Set),
    Delete(Delete),
    Flush(Flush),
    Limit(Limit),
}

/// Lists caches, of one segment or of all.
#[derive(clap::Args)]
struct List {
    /// Show only those of this segment.
    #[arg(value_name = "SEGMENT")]
    segment: Option<String>,
    /// Print the caches as JSON.
    #[arg(long)]
    json: bool,
}

/// Shows what caches contain, how much memory they use, and what their servers have counted.
///
/// Without a name, shows all caches. What is in memory is also shown if the server does not answer; the exit status is
/// then 1.
#[derive(clap::Args)]
struct Status {
    /// The caches to show.
    #[arg(value_name = "SEGMENT/NAME")]
    caches: Vec<String>,
    /// Print the status as JSON: a list with one object for each cache.
    #[arg(long, conflicts_with = "prometheus")]
    json: bool,
    /// Print the status as Prometheus text, for a textfile collector.
    #[arg(long)]
    prometheus: bool,
}

/// Shows which keys are used most, according to the server's samples.
#[derive(clap::Args)]
struct Hot {
    #[command(flatten)]
    one: One,
    /// Print the keys as JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the value of a key, and a newline. The exit status is 1 if there is no such item.
#[derive(clap::Args)]
struct Get {
    #[command(flatten)]
    one: One,
    /// The key.
    key: String,
    /// Print only the bytes of the value.
    #[arg(long)]
    raw: bool,
}

/// Stores a value.
#[derive(clap::Args)]
struct Set {
    #[command(flatten)]
    one: One,
    /// The key.
    key: String,
    /// The value. Default: everything from stdin.
    value: Option<String>,
    /// Time after which the item expires, in seconds; 0 means never.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    ttl: u32,
    /// A number that clients store with the item.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    flags: u32,
    /// Under which condition to store the value, and how. The exit status is 1 if it is not stored.
    #[arg(long, value_enum, default_value_t = How::Set)]
    how: How,
}

/// How to store a value.
#[derive(Clone, Copy, ValueEnum)]
enum How {
    /// Whether or not there is an item.
    Set,
    /// Only if there is no item.
    Add,
    /// Only if there is an item.
    Replace,
    /// Append it to the item's value.
    Append,
    /// Put it before the item's value.
    Prepend,
}

/// Removes items. The exit status is 1 if one of them did not exist.
#[derive(clap::Args)]
struct Delete {
    #[command(flatten)]
    one: One,
    /// The keys.
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<String>,
}

/// Removes all items.
#[derive(clap::Args)]
struct Flush {
    #[command(flatten)]
    one: One,
}

// Has no doc comment, because clap would use it as the description of the whole command.
#[derive(clap::Args)]
struct One {
    /// The cache.
    #[arg(value_name = "SEGMENT/NAME")]
    cache: String,
}

/// Sets how much memory a cache uses for items, until its server is restarted.
///
/// If the memory shrinks, items are evicted as new ones are stored.
#[derive(clap::Args)]
struct Limit {
    #[command(flatten)]
    one: One,
    /// The memory, such as 200M, in whole MiB: at least 8M, and at most the size of its block.
    size: Bytes,
}

pub fn run(args: Args) -> Result<()> {
    let options =
        Options { changes: args.changes, patience: Duration::from_secs(args.patience), ..Options::default() };
    let open = |one: &One| {
        address::split(&one.cache)?;
        Ok::<_, anyhow::Error>(Cache::open_with(&one.cache, &options)?)
    };
    match args.command {
        Command::List(args) => list(&args),
        Command::Status(args) => status(&args, &options),
        Command::Hot(args) => hot(&open(&args.one)?, args.json),
        Command::Get(args) => get(&open(&args.one)?, &args),
        Command::Set(args) => set(&open(&args.one)?, &args),
        Command::Delete(args) => delete(&open(&args.one)?, &args.keys),
        Command::Flush(args) => Ok(open(&args.one)?.flush()?),
        Command::Limit(args) => limit(&open(&args.one)?, args.size),
    }
}

/// A cache in the list.
#[derive(serde::Serialize)]
struct Listed {
    segment: String,
    name: String,
    /// Size of its block.
    bytes: u64,
    /// The endpoint that writes it, and the number of others that have it open.
    server: Option<String>,
    readers: usize,
    age_s: u64,
}

fn listed(blocks: &[Block], segment: Option<&str>) -> Vec<Listed> {
    let of_caches = blocks.iter().filter_map(|block| Some((block, block.name.strip_prefix(PREFIX)?)));
    let wanted = of_caches.filter(|(block, _)| segment.is_none_or(|segment| block.segment == segment));
    let listed = wanted.map(|(block, name)| {
        let server = block.handles.iter().find(|user| user.rights.contains("write"));
        Listed {
            segment: block.segment.clone(),
            name: name.into(),
            bytes: block.size,
            server: server.map(ToString::to_string),
            readers: block.handles_total - usize::from(server.is_some()).min(block.handles_total),
            age_s: block.age_s,
        }
    });
    listed.collect()
}

fn caches(segment: Option<&str>) -> Result<Vec<Listed>> {
    Ok(listed(&inspect::ask(&mut Daemon::connect()?)?.blocks, segment))
}

fn list(args: &List) -> Result<()> {
    let caches = caches(args.segment.as_deref())?;
    if args.json {
        return output::json(&caches);
    }
    let mut table = Table::new(&["CACHE", "SIZE", "SERVER", "READERS", "AGE"]);
    for cache in caches {
        table.row([
            format!("{}/{}", cache.segment, cache.name),
            output::bytes(cache.bytes),
            or_dash(cache.server.unwrap_or_default()),
            cache.readers.to_string(),
            period(cache.age_s),
        ]);
    }
    if table.is_empty() {
        output::note("ginnel: there are no caches");
        return Ok(());
    }
    output::line(table.to_string())
}

fn status(args: &Status, options: &Options) -> Result<()> {
    let (mut stats, mut failed) = (Vec::new(), false);
    let names = match args.caches.is_empty() {
        true => caches(None)?.into_iter().map(|cache| format!("{}/{}", cache.segment, cache.name)).collect(),
        false => args.caches.clone(),
    };
    for name in &names {
        address::split(name)?;
        let stat = Cache::open_with(name, options).map_err(Into::into).and_then(|cache| Stat::of(&cache));
        match stat {
            Ok(stat) => {
                if let Some(error) = &stat.no_server {
                    output::note(format!("ginnel: {error}"));
                    failed = true;
                }
                stats.push(stat);
            }
            Err(error) => {
                output::note(format!("ginnel: {}", crate::one_line(&error)));
                failed = true;
            }
        }
    }
    if args.prometheus {
        output::line(prometheus::text(&stats).trim_end())?;
    } else if args.json {
        output::json(&stats)?;
    } else if !stats.is_empty() {
        output::line(stats.iter().map(show::page).collect::<Vec<_>>().join("\n\n\n"))?;
    } else if names.is_empty() {
        output::note("ginnel: there are no caches");
    }
    if failed { Err(AlreadyReported.into()) } else { Ok(()) }
}

fn hot(cache: &Cache, is_json: bool) -> Result<()> {
    let keys = cache.stats("hot")?;
    if is_json {
        let keys = keys.iter().map(|(key, uses)| serde_json::json!({"key": key, "uses": number(uses)}));
        return output::json(&keys.collect::<Vec<_>>());
    }
    let mut table = Table::new(&["USES", "KEY"]);
    for (key, uses) in keys {
        table.row([uses, shown(&key)]);
    }
    if table.is_empty() {
        output::note("ginnel: the server has not sampled any key yet");
        return Ok(());
    }
    output::line(table.to_string())
}

/// Returns a key with control characters replaced. A correct server escapes them, but a hostile one may not.
fn shown(key: &str) -> String {
    key.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Returns a number as a JSON number, and anything else as text.
fn number(text: &str) -> serde_json::Value {
    text.parse::<u64>().map_or_else(|_| text.into(), Into::into)
}

fn get(cache: &Cache, args: &Get) -> Result<()> {
    let mut value = Vec::new();
    if cache.get(args.key.as_bytes(), &mut value)?.is_none() {
        bail!("cache {} has no item {:?}", cache.address(), args.key);
    }
    if !args.raw {
        value.push(b'\n');
    }
    let mut out = std::io::stdout().lock();
    out.write_all(&value)?;
    Ok(out.flush()?)
}

fn set(cache: &Cache, args: &Set) -> Result<()> {
    let value = match &args.value {
        Some(value) => value.clone().into_bytes(),
        None => {
            let mut value = Vec::new();
            std::io::stdin().lock().read_to_end(&mut value)?;
            value
        }
    };
    let is_of_value = matches!(args.how, How::Append | How::Prepend);
    if is_of_value && (args.ttl != 0 || args.flags != 0) {
        let text = "--ttl and --flags cannot be used with --how append or --how prepend, which keep those of the item";
        return Err(Usage(text.into()).into());
    }
    let (key, ttl, flags) = (args.key.as_bytes(), args.ttl, args.flags);
    let stored = match args.how {
        How::Set => Some(cache.set(key, &value, flags, ttl)?),
        How::Add => cache.add(key, &value, flags, ttl)?,
        How::Replace => cache.replace(key, &value, flags, ttl)?,
        How::Append => cache.append(key, &value)?,
        How::Prepend => cache.prepend(key, &value)?,
    };
    if stored.is_none() {
        let is = if matches!(args.how, How::Add) { "has an item" } else { "has no item" };
        bail!("not stored: cache {} {is} {:?}", cache.address(), args.key);
    }
    Ok(())
}

fn delete(cache: &Cache, keys: &[String]) -> Result<()> {
    let mut missing = false;
    for key in keys {
        if !cache.delete(key.as_bytes())? {
            output::note(format!("ginnel: cache {} has no item {key:?}", cache.address()));
            missing = true;
        }
    }
    if missing { Err(AlreadyReported.into()) } else { Ok(()) }
}

fn limit(cache: &Cache, size: Bytes) -> Result<()> {
    let mebibytes = size.0 >> 20;
    if mebibytes == 0 {
        return Err(Usage("a cache uses at least 1M".into()).into());
    }
    Ok(cache.set_limit(mebibytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"blocks": [
        {"segment": "web", "name": "cache.a", "size": 4096, "age_s": 61, "handles_total": 3, "handles": [
          {"endpoint": 3, "name": "r", "member": "vm-a", "pid": 9, "rights": "read", "left": null},
          {"endpoint": 4, "name": "ginnel-cache", "member": "host", "pid": 8, "rights": "write-exclusive", "left": null}]},
        {"segment": "web", "name": "cache", "size": 1},
        {"segment": "db", "name": "cache.b", "size": 10, "handles": []}]}"#;

    #[test]
    fn caches_are_found_among_blocks() {
        let inspect = inspect::parse(ANSWER).unwrap();
        let all = listed(&inspect.blocks, None);
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].name.as_str(), all[0].readers, all[0].bytes), ("a", 2, 4096));
        assert_eq!(all[0].server.as_deref(), Some("4 ginnel-cache@host"));
        assert!(all[1].server.is_none() && all[1].readers == 0);
        assert_eq!(listed(&inspect.blocks, Some("db")).len(), 1);
    }
}
