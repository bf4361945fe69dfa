//! What can go wrong, for callers.

use ginnel_cache_store::store::NotACache;
use thiserror::Error;

/// Why something was not done. That there is no such item is no error.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The address, or the place for changes, is none.
    #[error("{given:?} is {what}")]
    Address {
        /// As given.
        given: String,
        /// What is wrong, and what is right.
        what: &'static str,
    },
    /// Attaching to the segment, or opening the block of the cache.
    #[error("cache {cache}: {source}")]
    Segment {
        /// Which cache.
        cache: String,
        /// What the library of channels says.
        source: ginnel::Error,
    },
    /// There is such a block, and no cache in it.
    #[error("cache {cache}: {source}; is a ginnel-cache of this version its server?")]
    NotACache {
        /// Which cache.
        cache: String,
        /// Why not.
        source: NotACache,
    },
    /// A key that no item can have.
    #[error(
        "a key of {0} bytes: a key has 1 to 250 bytes, or up to 186 if there are blanks or control characters in it"
    )]
    Key(usize),
    /// More bytes than any item of this cache can have.
    #[error(
        "a value of {len} bytes is more than an item of cache {cache} may have; its server says how many that are"
    )]
    TooLarge {
        /// Which cache.
        cache: String,
        /// Its length; 0 if it is not known here, as of a value that others have made.
        len: usize,
    },
    /// No server of the cache answers. Nothing was changed.
    #[error(
        "no server of cache {cache} answers ({tried}); start ginnel-cache, or name another way for changes"
    )]
    NoServer {
        /// Which cache.
        cache: String,
        /// Where it was looked for, and what was found there.
        tried: String,
    },
    /// The connection ended, or the time was over, before the answer came: the server may have done what it was asked for, or not.
    #[error("the answer of cache {cache} is lost ({why}): it may have been done or not")]
    Lost {
        /// Which cache.
        cache: String,
        /// What happened.
        why: String,
    },
    /// The server refuses.
    #[error("cache {cache} says: {text}")]
    Refused {
        /// Which cache.
        cache: String,
        /// Its words.
        text: String,
    },
    /// The server's answer is none to what it was asked.
    #[error("the server of cache {cache} answers {what}")]
    Nonsense {
        /// Which cache.
        cache: String,
        /// What was wrong.
        what: &'static str,
    },
}
