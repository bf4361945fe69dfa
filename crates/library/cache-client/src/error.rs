//! The errors that callers get.

use ginnel_cache_store::store::NotACache;
use thiserror::Error;

/// Why a request was not done. A missing item is no error.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The address of the cache, or the place for changes, is not valid.
    #[error("{given:?} is {what}")]
    Address {
        /// The text as given.
        given: String,
        /// What is wrong with it, and what a valid one looks like.
        what: &'static str,
    },
    /// Attaching to the segment failed, or opening the block of the cache did.
    #[error("cache {cache}: {source}")]
    Segment {
        /// The address of the cache.
        cache: String,
        /// The error of the `ginnel` library.
        source: ginnel::Error,
    },
    /// The block exists, but contains no cache.
    #[error("cache {cache}: {source}; is a ginnel-cache of this version its server?")]
    NotACache {
        /// The address of the cache.
        cache: String,
        /// Why the block is not a cache.
        source: NotACache,
    },
    /// The key has a length that no item's key can have.
    #[error(
        "a key of {0} bytes: a key has 1 to 250 bytes, or up to 186 if there are blanks or control characters in it"
    )]
    Key(usize),
    /// The value is longer than any item's of this cache can be.
    #[error(
        "a value of {len} bytes is more than an item of cache {cache} may have; its server says how many that are"
    )]
    TooLarge {
        /// The address of the cache.
        cache: String,
        /// The value's length in bytes; 0 if it is not known here, as for a value that the server has put together.
        len: usize,
    },
    /// No server of the cache answers. Nothing was changed.
    #[error(
        "no server of cache {cache} answers ({tried}); start ginnel-cache, or name another way for changes"
    )]
    NoServer {
        /// The address of the cache.
        cache: String,
        /// Where the client has looked for a server, and what it has found there.
        tried: String,
    },
    /// The connection ended, or the time ran out, before the answer came. The server may have done the request or
    /// not.
    #[error("the answer of cache {cache} is lost ({why}): it may have been done or not")]
    Lost {
        /// The address of the cache.
        cache: String,
        /// The reason, in words.
        why: String,
    },
    /// The server has refused the request.
    #[error("cache {cache} says: {text}")]
    Refused {
        /// The address of the cache.
        cache: String,
        /// The server's words.
        text: String,
    },
    /// The server's answer does not fit the request.
    #[error("the server of cache {cache} answers {what}")]
    Nonsense {
        /// The address of the cache.
        cache: String,
        /// What was wrong with the answer.
        what: &'static str,
    },
}
