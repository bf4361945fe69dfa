//! The places where a server can be reached for changes.

use crate::error::Error;
use std::path::PathBuf;
use std::str::FromStr;

/// The most places that are accepted from the header of a cache.
const MOST_PLACES: usize = 16;

/// Where to send changes, and requests that memory cannot answer.
///
/// A program that may write the segment of a cache may also write the cache's header, and so choose where a client
/// connects that reads the header. Before the client sends anything else, the server there must state that it serves
/// this very cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Changes {
    /// To the places in the cache's header: the first that answers.
    #[default]
    Automatic,
    /// Over a stream channel of this segment, which has the name of the cache's block.
    Channel(String),
    /// Over TCP, to this address and port.
    Tcp(String),
    /// Over a Unix socket, at this path.
    Unix(PathBuf),
}

/// Parses `auto`, or a line as in the header of a cache: `channel SEGMENT`, `tcp ADDRESS:PORT`, `unix PATH`.
impl FromStr for Changes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "auto" {
            return Ok(Self::Automatic);
        }
        place(text).ok_or_else(|| Error::Address {
            given: text.into(),
            what: "no place for changes; write auto, channel SEGMENT, tcp ADDRESS:PORT or unix PATH",
        })
    }
}

fn place(line: &str) -> Option<Changes> {
    let (kind, rest) = line.split_once(' ')?;
    let rest = rest.trim();
    if rest.is_empty() {
        return None;
    }
    match kind {
        "channel" => Some(Changes::Channel(rest.into())),
        "tcp" => rest.contains(':').then(|| Changes::Tcp(rest.into())),
        "unix" => Some(Changes::Unix(rest.into())),
        _ => None,
    }
}

/// Returns the places in the header of a cache: channels first, since they do not need the kernel, and TCP last.
pub(crate) fn places(contact: &str) -> Vec<Changes> {
    let mut places: Vec<_> = contact.lines().filter_map(place).take(MOST_PLACES).collect();
    places.sort_by_key(|place| match place {
        Changes::Channel(_) => 0,
        Changes::Unix(_) => 1,
        _ => 2,
    });
    places
}

impl std::fmt::Display for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Automatic => f.write_str("auto"),
            Self::Channel(segment) => write!(f, "channel {segment}"),
            Self::Tcp(address) => write!(f, "tcp {address}"),
            Self::Unix(path) => write!(f, "unix {}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_sorted() {
        let contact = "tcp 127.0.0.1:11211\nnonsense\ntcp nowhere\nunix \nunix /run/x y\nchannel web\n";
        let places = places(contact);
        let names: Vec<_> = places.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["channel web", "unix /run/x y", "tcp 127.0.0.1:11211"]);
        for place in places {
            assert_eq!(place.to_string().parse::<Changes>().unwrap(), place);
        }
        assert_eq!("auto".parse::<Changes>().unwrap(), Changes::Automatic);
        assert!("web".parse::<Changes>().is_err() && "".parse::<Changes>().is_err());
        assert_eq!(super::places(&"channel a\n".repeat(1000)).len(), MOST_PLACES);
    }
}
