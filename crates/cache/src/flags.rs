//! The command line of `ginnel-cache`.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use clap::Parser;
use ginnel_config::{Bytes, LogFormat, Mode};

/// Serves a cache that speaks memcached's protocol, and whose items others read out of memory.
///
/// The items lie in the block cache.NAME of a segment, which clients join as readers. Runs until SIGTERM; a successor serves the same
/// items. See ginnel-cache(8).
#[derive(Debug, Parser)]
#[command(name = "ginnel-cache", version, max_term_width = 100)]
pub struct Flags {
    /// The segment in which the items lie. This host or VM must be a member of it, not only a reader.
    #[arg(long, value_name = "SEGMENT")]
    pub segment: String,
    /// What the cache is called.
    #[arg(long, default_value = "main")]
    pub name: String,
    /// How much memory a new cache gets, index included, such as 900M. One that is there keeps what it has.
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub memory: Bytes,
    /// Listens for TCP at this address and port, such as 127.0.0.1:11211. May come several times.
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    pub listen: Vec<SocketAddr>,
    /// Listens at this Unix socket.
    #[arg(long, value_name = "PATH")]
    pub unix: Option<PathBuf>,
    /// Permissions of the Unix socket, in octal.
    #[arg(long, value_name = "MODE", default_value = "0700")]
    pub unix_mode: Mode,
    /// Listens for channels in this segment. May come several times. Default: the segment of the items; `none` for no channels.
    #[arg(long, value_name = "SEGMENT")]
    pub channel: Vec<String>,
    /// The most bytes of an item, as memcached counts them: with its key and 59 bytes more.
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    pub max_item_size: Bytes,
    /// What an item usually has, key included: how many entries the index of a new cache gets depends on it.
    #[arg(long, value_name = "SIZE", default_value = "200")]
    pub usual_item_size: Bytes,
    /// The most clients at a time.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub max_connections: usize,
    /// The daemon's socket. Default: $GINNEL_SOCKET, else the usual place.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// What is logged: error, warn, info, debug, trace.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: String,
    /// text or json.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

impl Flags {
    /// Segments in which channels are listened for.
    pub fn channels(&self) -> Vec<String> {
        match &self.channel[..] {
            [] => vec![self.segment.clone()],
            [none] if none == "none" => Vec::new(),
            some => some.to_vec(),
        }
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let found = text.to_socket_addrs().map_err(|error| format!("{error}; write it as 127.0.0.1:11211"))?;
    found.into_iter().next().ok_or_else(|| "it names no address".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Flags::command().debug_assert();
    }

    #[test]
    fn channels_are_where_they_are_wished_for() {
        let channels = |line: &str| {
            let words = ["ginnel-cache", "--segment", "s"].into_iter().chain(line.split_whitespace());
            Flags::try_parse_from(words).unwrap().channels()
        };
        assert_eq!(channels(""), ["s"]);
        assert_eq!(channels("--channel a --channel b"), ["a", "b"]);
        assert!(channels("--channel none").is_empty());
    }
}
