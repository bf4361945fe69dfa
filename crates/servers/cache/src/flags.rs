//! The command line of `ginnel-cache`.

use clap::Parser;
use ginnel_config::{Bytes, LogFormat, Mode, Problem};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// Serves a cache that speaks memcached's protocol, and whose items clients can read directly from memory.
///
/// The items are in the block cache.NAME of a segment, which clients join as readers. The server runs until SIGTERM;
/// a successor serves the same items. See ginnel-cache(8).
#[derive(Debug, Parser)]
#[command(name = "ginnel-cache", version, max_term_width = 100)]
pub struct Flags {
    /// The segment that contains the items. This host or VM must be a member of it, not only a reader.
    #[arg(long, value_name = "SEGMENT")]
    pub segment: String,
    /// The name of the cache.
    #[arg(long, default_value = "main")]
    pub name: String,
    /// The memory of a new cache, including its index, such as 900M. An existing cache keeps its size.
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub memory: Bytes,
    /// Listens for TCP at this address and port, such as 127.0.0.1:11211. May be given several times.
    #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
    pub listen: Vec<SocketAddr>,
    /// Listens at this Unix socket.
    #[arg(long, value_name = "PATH")]
    pub unix: Option<PathBuf>,
    /// Permissions of the Unix socket, in octal.
    #[arg(long, value_name = "MODE", default_value = "0600")]
    pub unix_mode: Mode,
    /// Listens for channels in this segment. May be given several times. Default: the segment of the items; `none`
    /// for no channels.
    #[arg(long, value_name = "SEGMENT")]
    pub channel: Vec<String>,
    /// The most bytes of an item, as memcached counts them: including its key and 59 bytes more.
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    pub max_item_size: Bytes,
    /// The usual size of an item, including its key. The number of entries in a new cache's index depends on it.
    #[arg(long, value_name = "SIZE", default_value = "200")]
    pub usual_item_size: Bytes,
    /// The most clients at the same time.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub max_connections: usize,
    /// The daemon's socket. Default: $GINNEL_SOCKET, else the usual place.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The log level: error, warn, info, debug or trace.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: String,
    /// The log format: text or json.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

impl Flags {
    /// Returns what nobody can mean.
    pub fn doubt(&self) -> Option<Problem> {
        self.unix_mode.doubt_of_socket("--unix-mode", "only root's clients can connect")
    }

    /// Returns the segments in which the server listens for channels.
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
    fn the_mode_of_a_socket_is_one_that_somebody_can_mean() {
        let doubt = |mode: &str| {
            let words = ["ginnel-cache", "--segment", "s"].into_iter().chain(mode.split_whitespace());
            Flags::try_parse_from(words).unwrap().doubt().map(|problem| problem.to_string())
        };
        for good in ["", "--unix-mode 0660", "--unix-mode 0666"] {
            assert_eq!(doubt(good), None, "{good}");
        }
        assert!(doubt("--unix-mode 0000").unwrap().starts_with("--unix-mode: 0000: only root's clients"));
        assert!(doubt("--unix-mode 0777").unwrap().ends_with("write 0666"));
    }

    #[test]
    fn channels_are_in_the_segments_of_the_flags() {
        let channels = |line: &str| {
            let words = ["ginnel-cache", "--segment", "s"].into_iter().chain(line.split_whitespace());
            Flags::try_parse_from(words).unwrap().channels()
        };
        assert_eq!(channels(""), ["s"]);
        assert_eq!(channels("--channel a --channel b"), ["a", "b"]);
        assert!(channels("--channel none").is_empty());
    }
}
