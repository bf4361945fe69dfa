//! Compares the server with a real memcached: both must answer the same requests with the same bytes, except for versions
//! and for times that depend on the clock.

mod support;

use ginnel_cache_protocol::binary::{self, Header, opcode};
use kit::skip::missing;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::collections::HashMap;
use std::io::{Read, Write};
use support::{Served, World, memcached};

kit::test_that_skips_are_seen!();

/// Maps each version to its place in the order in which versions were first seen.
#[derive(Default)]
struct Versions(HashMap<u64, usize>);

impl Versions {
    fn place(&mut self, version: u64) -> usize {
        let next = self.0.len() + 1;
        if version == 0 { 0 } else { *self.0.entry(version).or_insert(next) }
    }
}

/// Returns a text answer in which versions and times are replaced so that two servers' answers can be compared.
fn comparable(answer: &[u8]) -> String {
    let mut versions = Versions::default();
    let mut out = String::new();
    for line in answer.split_inclusive(|byte| *byte == b'\n') {
        let text = line.escape_ascii().to_string();
        let words: Vec<&str> = text.split(' ').collect();
        let meta = matches!(words[0], "HD" | "VA" | "NS" | "EX" | "NF" | "EN");
        for (at, word) in words.iter().enumerate() {
            let (digits, end) = match word.strip_suffix("\\r\\n") {
                Some(digits) => (digits, "\\r\\n"),
                None => (*word, ""),
            };
            let number =
                |prefix: &str| digits.strip_prefix(prefix).and_then(|digits| digits.parse::<u64>().ok());
            let shown = match words[0] {
                "VALUE" if at == 4 => number("").map(|version| format!("#{}", versions.place(version))),
                // The servers differ in whether they show a key that came in base64 as base64.
                "ME" if at == 1 => Some("KEY".into()),
                "ME" => number("cas=")
                    .map(|version| format!("cas=#{}", versions.place(version)))
                    .or_else(|| (digits.starts_with("exp=") && digits != "exp=-1").then(|| "exp=T".into()))
                    .or_else(|| number("la=").map(|_| "la=T".into())),
                _ if meta && at > 0 => number("c")
                    .map(|version| format!("c#{}", versions.place(version)))
                    .or_else(|| number("t").map(|left| format!("t{}", left > 1 << 31)))
                    .or_else(|| number("l").map(|_| "lT".into())),
                _ => None,
            };
            if at > 0 {
                out.push(' ');
            }
            out += &shown.unwrap_or_else(|| digits.to_owned());
            out += end;
        }
        out.push('\n');
    }
    out
}

/// Returns the version in the last answer that contains one, or 0 if no answer does.
fn last_version(answer: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(answer);
    let of_line = |line: &str| match line.split(' ').collect::<Vec<_>>()[..] {
        ["VALUE", _, _, _, version] => version.parse().ok(),
        ["HD" | "VA", ..] => {
            line.split(' ').find_map(|word| word.strip_prefix('c').and_then(|version| version.parse().ok()))
        }
        _ => None,
    };
    text.lines().rev().find_map(of_line).unwrap_or(0)
}

/// Sends the parts of a script, each after the answer to the previous one, and returns all answers. In the parts, `@`
/// stands for the last version that was seen.
fn play(server: &Served, parts: &[&[u8]]) -> Vec<u8> {
    let mut stream = server.connect();
    let mut all = Vec::new();
    let mut part_of = |bytes: &[u8], all: &mut Vec<u8>| -> bool {
        let begin = all.len();
        if stream.write_all(&[bytes, b"mn\r\n"].concat()).is_err() {
            return false;
        }
        let mut buffer = [0; 65536];
        while !all[begin..].ends_with(b"MN\r\n") {
            match stream.read(&mut buffer) {
                Ok(0) | Err(_) => {
                    all.extend_from_slice(b"<closed>");
                    return false;
                }
                Ok(count) => all.extend_from_slice(&buffer[..count]),
            }
        }
        true
    };
    for part in parts {
        let version = last_version(&all).to_string();
        let mut bytes = Vec::new();
        for byte in *part {
            match byte {
                b'@' => bytes.extend_from_slice(version.as_bytes()),
                byte => bytes.push(*byte),
            }
        }
        // The empty second part makes sure that memcached has released the items of the answers that it has sent.
        if !part_of(&bytes, &mut all) || !part_of(b"", &mut all) {
            break;
        }
    }
    all
}

struct Pair {
    _world: World,
    ours: Served,
    theirs: Served,
}

impl Pair {
    fn new() -> Self {
        let theirs = memcached();
        let world = World::new();
        let ours = world.serve("--channel none");
        // This uses up the small versions, so no item of the scripts gets one that a script names.
        for server in [&ours, &theirs] {
            server.text(&"set a 0 0 1 noreply\r\n1\r\n".repeat(20));
        }
        Self { _world: world, ours, theirs }
    }

    fn fresh(&self) {
        for server in [&self.ours, &self.theirs] {
            assert_eq!(server.text("flush_all\r\n"), "OK\r\n");
        }
    }
}

/// Returns the scripts of text requests. Each string of a script is one part, which is sent at once.
fn scripts() -> Vec<Vec<Vec<u8>>> {
    let mut scripts: Vec<Vec<Vec<u8>>> = Vec::new();
    let mut add = |parts: &[&str]| scripts.push(parts.iter().map(|part| part.as_bytes().to_vec()).collect());
    let future = "4000000000";
    // These scripts store and get values.
    add(&["set a 5 0 3\r\nabc\r\nget a\r\ngets a\r\nget a b a\r\n"]);
    add(&[
        "add a 0 0 1\r\n1\r\nadd a 0 0 1\r\n2\r\nget a\r\nreplace a 1 0 1\r\n3\r\nreplace b 0 0 1\r\n1\r\nget a b\r\n",
    ]);
    add(&[
        "append a 0 0 1\r\n1\r\nprepend a 0 0 1\r\n1\r\nset a 7 0 2\r\nbc\r\nappend a 9 9 1\r\nd\r\nprepend a 9 9 1\r\na\r\nget a\r\n",
    ]);
    add(&["set a 0 0 0\r\n\r\nget a\r\nappend a 0 0 0\r\n\r\nget a\r\n"]);
    add(&["set a 0 0 1 noreply\r\n1\r\nadd a 0 0 1 noreply\r\n1\r\nget a\r\n"]);
    add(&["set a 0 0 1 xx\r\n1\r\n", "set a 0 0\r\n", "set a 0 0 1 2 3\r\n"]);
    add(&[
        "set a 4294967295 0 1\r\n1\r\nget a\r\nset a 4294967296 0 1\r\n1\r\nget a\r\nset a -1 0 1\r\n1\r\n",
    ]);
    add(&[
        "set a 0 x 1\r\n1\r\n",
        "set a 0 0 x\r\n1\r\n",
        "set a 0 0 -1\r\n1\r\n",
        "set a 0 0 2147483647\r\n",
        "set a x 0 1 noreply\r\n",
    ]);
    add(&[
        "set a 0 0 3\r\n12345\r\n",
        "get a\r\n",
        "set a 0 0 3\r\n1\r\n2\r\n",
        "set a 0 0 3 noreply\r\n12345\r\n",
        "set a 0 0 1\r\n1\rX",
    ]);
    add(&["set a 0 0 1\r\n1\r\n", "set a 0 0 3\r\n12345\r\n", "get a\r\n"]);
    // These scripts use expiry times.
    add(&[
        "set a 0 -1 1\r\n1\r\nget a\r\n",
        "set a 0 2147483648 1\r\n1\r\nget a\r\n",
        "set a 0 2592001 1\r\n1\r\nget a\r\n",
    ]);
    add(&[
        "set a 0 2592000 1\r\n1\r\nget a\r\nmg a t\r\n",
        &format!("set a 0 {future} 1\r\n1\r\nget a\r\nmg a t\r\n"),
    ]);
    add(&["set a 0 1893456000 1\r\n1\r\nget a\r\nmg a t\r\n"]);
    add(&[
        "touch a 0\r\nset a 0 0 1\r\n1\r\ntouch a 100\r\nmg a t\r\ntouch a 0\r\nmg a t\r\ntouch a -1\r\nget a\r\n",
    ]);
    add(&["touch a\r\n", "touch a x\r\n", "touch a 1 noreply\r\n", "touch a 1 2 3\r\n"]);
    add(&[
        "set a 0 0 1\r\n1\r\ngat 100 a b\r\nmg a t\r\ngats 0 a\r\nmg a t\r\ngat -1 a\r\nget a\r\n",
        "gat a\r\n",
        "gat 0\r\n",
        "gat\r\n",
        "gats x a\r\n",
    ]);
    // These scripts use versions.
    add(&[
        "set a 0 0 1\r\n1\r\ngets a\r\n",
        "cas a 1 0 1 @\r\n2\r\ngets a\r\n",
        "cas a 0 0 1 1\r\n3\r\nget a\r\ncas b 0 0 1 1\r\n1\r\n",
    ]);
    add(&[
        "cas a 0 0 1\r\n1\r\n",
        "cas a 0 0 1 x\r\n1\r\n",
        "cas a 0 0 1 5 noreply\r\n1\r\n",
        "set a 0 0 1\r\n1\r\ncas a 0 0 1 0\r\n2\r\nget a\r\n",
    ]);
    add(&["cas a 0 0 1 18446744073709551615\r\n1\r\n", "cas a 0 0 1 18446744073709551616\r\n1\r\n"]);
    // These scripts increment and decrement numbers.
    for (value, line) in [
        ("5", "incr a 1"),
        ("5", "decr a 9"),
        ("10", "decr a 1"),
        ("99", "incr a 1"),
        ("18446744073709551615", "incr a 3"),
        ("18446744073709551615", "incr a 18446744073709551615"),
        ("18446744073709551616", "incr a 1"),
        ("x", "incr a 1"),
        ("1x", "incr a 1"),
        (" 1", "incr a 1"),
        ("1 ", "incr a 1"),
        ("1 x", "incr a 1"),
        ("-1", "incr a 1"),
        ("+1", "incr a 1"),
        ("", "incr a 1"),
        ("1\r\n", "incr a 1"),
        ("0000000000000000000000001", "incr a 1"),
        ("1", "incr a -1"),
        ("1", "incr a x"),
        ("1", "incr a 18446744073709551616"),
        ("1", "incr a"),
        ("1", "incr a 1 2"),
        ("1", "incr a 1 2 3"),
        ("1", "incr a 1 noreply"),
        ("1", "incr b 1"),
        ("1", "decr b 1"),
        ("1", "incr a noreply"),
    ] {
        let set = format!("set a 3 100 {}\r\n{value}\r\n{line}\r\nget a\r\nmg a t h f\r\n", value.len());
        add(&[&set]);
    }
    // These scripts remove items.
    add(&[
        "delete a\r\nset a 0 0 1\r\n1\r\ndelete a\r\nget a\r\n",
        "delete a 0\r\n",
        "delete a 1\r\n",
        "delete a noreply\r\n",
        "delete a 0 noreply\r\n",
        "delete a 1 noreply\r\n",
        "delete a b c\r\n",
        "delete a b c d\r\n",
        "delete\r\n",
    ]);
    add(&[
        "set a 0 0 1\r\n1\r\nflush_all\r\nget a\r\nset a 0 0 1\r\n1\r\nget a\r\n",
        "flush_all noreply\r\n",
        "flush_all 0\r\n",
        "flush_all -1\r\n",
        "flush_all x\r\n",
        "flush_all x noreply\r\n",
        "flush_all 1 2 3\r\n",
    ]);
    add(&["set a 0 0 1\r\n1\r\nflush_all 1000\r\nget a\r\nflush_all\r\nget a\r\n"]);
    // These scripts contain malformed, long or unusual lines.
    add(&[
        "\r\n",
        "\n",
        " \r\n",
        "a\r\n",
        "get\r\n",
        "get \r\n",
        " get  a \r\n",
        "GET a\r\n",
        "bget a\r\n",
        "getx a\r\n",
        "get a\0b\r\n",
        "x\0\r\n",
    ]);
    let key = |len: usize| "k".repeat(len);
    for len in [250, 251] {
        let key = key(len);
        add(&[
            &format!("set {key} 0 0 1\r\n1\r\n"),
            &format!("get {key}\r\n"),
            &format!("get a {key} b\r\n"),
            &format!("delete {key}\r\n"),
        ]);
        add(&[
            &format!("incr {key} 1\r\n"),
            &format!("touch {key} 1\r\n"),
            &format!("gat 0 {key}\r\n"),
            &format!("cas {key} 0 0 1 1 noreply\r\n1\r\n"),
        ]);
        add(&[
            &format!("mg {key} v\r\n"),
            &format!("ms {key} 1\r\n1\r\n"),
            &format!("md {key}\r\n"),
            &format!("ma {key}\r\n"),
            &format!("me {key}\r\n"),
        ]);
    }
    add(&[&format!("{}\r\n", "x".repeat(3000))]);
    add(&[&format!("get {}\r\n", "k ".repeat(20_000))]);
    add(&["set k 0 0 3\r\nabc\r\n", &format!("get {}\r\n", "k ".repeat(20_000))]);
    add(&[&format!("{}get {}\r\n", " ".repeat(50), "k ".repeat(20_000))]);
    add(&["set a 0 0 1\r\n1\r\nget 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 a\r\n"]);
    // These scripts store values around the size limit.
    for len in [1_048_514, 1_048_515, 1_048_516, 1_048_517, 2_000_000] {
        let value = "v".repeat(len);
        add(&["set a 0 0 1\r\n1\r\n", &format!("set a 0 0 {len}\r\n{value}\r\n"), "get a\r\n"]);
    }
    let value = "v".repeat(600_000);
    add(&[
        &format!("set a 0 0 600000\r\n{value}\r\nappend a 0 0 600000\r\n{value}\r\n"),
        "mg a s\r\n",
        "incr a 1\r\n",
    ]);
    add(&[
        "set a 0 0 1\r\n1\r\n",
        &format!("add a 0 0 2000000\r\n{}\r\n", "v".repeat(2_000_000)),
        "get a\r\n",
    ]);
    add(&["set a 0 0 1\r\n1\r\n", &format!("ms a 2000000\r\n{}\r\n", "v".repeat(2_000_000)), "get a\r\n"]);
    add(&[
        "set a 0 0 1\r\n1\r\n",
        &format!("set a 0 0 2000000 noreply\r\n{}\r\n", "v".repeat(2_000_000)),
        "get a\r\n",
    ]);
    // These scripts use the other commands.
    add(&[
        "version\r\n",
        "version x\r\n",
        "verbosity 1\r\n",
        "verbosity\r\n",
        "verbosity x\r\n",
        "verbosity 1 noreply\r\n",
        "verbosity 9 9 9\r\n",
        "quit\r\n",
    ]);
    add(&[
        "cache_memlimit\r\n",
        "cache_memlimit x\r\n",
        "cache_memlimit 1\r\n",
        "cache_memlimit 2000000000\r\n",
        "cache_memlimit 64\r\n",
        "cache_memlimit 64 noreply\r\n",
        "cache_memlimit 1 2 3\r\n",
    ]);
    add(&[
        "shutdown\r\n",
        "shutdown graceful\r\n",
        "misbehave\r\n",
        "refresh_certs\r\n",
        "extstore x\r\n",
        "lru\r\n",
        "lru x\r\n",
        "lru_crawler\r\n",
        "slabs\r\n",
        "slabs x\r\n",
    ]);
    add(&[
        "stats foo\r\n",
        "stats reset\r\n",
        "stats detail\r\n",
        "stats detail on\r\n",
        "stats detail off\r\n",
        "stats detail x\r\n",
        "stats sizes\r\n",
    ]);
    // These scripts use the meta commands.
    let ask = "mg a s t f k c h l v O7\r\n";
    add(&[
        "mn\r\n",
        "mn x\r\n",
        "mx a\r\n",
        "mg\r\n",
        "ms\r\n",
        "md\r\n",
        "ma\r\n",
        "me\r\n",
        "me a\r\n",
        "ms a\r\n",
        "ms a x\r\n",
        "ms a -1\r\n",
        "ms a 2147483647\r\n",
    ]);
    add(&[
        "mg a\r\nmg a v\r\nmg a k O1\r\nmg a q\r\nmg a q k v O2\r\n",
        "ms a 2 F5 T100 c k O1\r\nhi\r\n",
        ask,
        ask,
        "me a\r\n",
    ]);
    add(&[
        "ms a 2 ME\r\nhi\r\nms a 2 ME k O1 c\r\nho\r\nms a 1 MA\r\n!\r\nms a 1 MP\r\n>\r\nms a 1 MR T90\r\nx\r\nms a 1 MS\r\ny\r\n",
        ask,
        "ms b 1 MA\r\n1\r\nms b 1 MP c k\r\n1\r\nms b 1 MR\r\n1\r\n",
    ]);
    add(&[
        "ms a 1 c\r\n1\r\n",
        "ms a 1 C@ c\r\n2\r\nms a 1 C1 c k O9\r\n3\r\nms b 1 C1\r\n1\r\nms a 1 ME C1\r\n1\r\nms a 1 MA C1\r\n1\r\nms a 1 MR C1\r\n1\r\n",
        ask,
        "mg a c\r\n",
        "ms a 1 MA C@\r\n4\r\n",
        ask,
    ]);
    add(&[
        "ms a 1 MX\r\n1\r\n",
        "ms a 1 M\r\n1\r\n",
        "ms a 1 MSS\r\n1\r\n",
        "ms a 1 Fx\r\n1\r\n",
        "ms a 1 Tx\r\n1\r\n",
        "ms a 1 Cx\r\n1\r\n",
        "ms a 1 z\r\n1\r\n",
        "ms a 1 k k\r\n1\r\n",
        "ms a 1 S5\r\n1\r\n",
        "ms a 1 I\r\n1\r\n",
        "ms a 1 1\r\n1\r\n",
    ]);
    add(&[
        "ms a 1 q\r\n1\r\nms a 1 q ME\r\n2\r\nms b 1 q MA\r\n1\r\nms a 3 q\r\n12345\r\n",
        "ms a 1\r\n12\r\n",
    ]);
    add(&[
        "ms a 1\r\n1\r\nmd a I T50 k O3\r\n",
        "mg a t c v\r\nmg a t v\r\nmg a R60\r\n",
        "ms a 1 C1 I c\r\n2\r\n",
        "mg a t c v\r\nmg a c\r\n",
        "ms a 1 C@\r\n3\r\nmg a t v\r\n",
    ]);
    add(&[
        "ms a 1\r\n1\r\nms a 1 C1 I\r\n2\r\n",
        "mg a v\r\nmg a v\r\nms a 1\r\n3\r\nmg a v\r\n",
        "ms a 1 C99999999 I\r\n4\r\nmg a v\r\n",
    ]);
    add(&[
        "md a\r\nmd a k O1\r\nmd a q\r\nms a 1 c\r\n1\r\n",
        "md a C1\r\nmd a C@ k\r\nmg a v\r\n",
        "md a x\r\n",
        "md a k k\r\n",
        "md a Cx\r\n",
        "md a q I\r\n",
        "ms a 1\r\n1\r\nmd a q\r\nmg a\r\n",
    ]);
    add(&[
        "mg a N100 v t c k h l\r\nmg a N100 v t h\r\nmg a v\r\nms a 1\r\n1\r\nmg a N100 v t\r\n",
        "mg a T100 t\r\nmg a t R200\r\nmg a t R200\r\nmg a R50 t\r\nmg a t T0\r\nmg a t\r\nmg a T-1 v\r\nmg a v\r\n",
    ]);
    add(&["mg a N-1 v t\r\nmg a v\r\n", "mg b N0 t\r\nmg b t\r\n"]);
    add(&["ms a 1\r\n1\r\nmg a u h\r\nmg a h\r\nmg a h\r\nme a\r\n"]);
    add(&[
        "set a 0 0 1\r\n1\r\nmg a h\r\nget a\r\nmg a h\r\ntouch a 0\r\nms a 1\r\n1\r\ntouch a 0\r\nmg a h\r\n",
        "set a 0 0 1\r\n1\r\ngat 0 a\r\nmg a h\r\n",
        "set a 0 0 1\r\n1\r\nadd a 0 0 1\r\n1\r\nmg a h\r\n",
        "get a\r\nappend a 0 0 1\r\n2\r\nmg a h\r\n",
        "incr a 1\r\nmg a h\r\nincr a 999\r\nmg a h\r\n",
    ]);
    add(&[
        "ma a\r\nma a k O1\r\nma a N0 v\r\nma a v\r\nma a D10 v t c k O2\r\nma a MD D3 v\r\nma a M- D100 v\r\nma a M+ v\r\nma a MI v\r\nma a q\r\nma b q\r\nmg a v t\r\n",
    ]);
    add(&[
        "ma a N100 J13 v t\r\nma a N100 J13 v t\r\nma b N100 J13 t v T5\r\nma c N100 T50 J7 t v\r\n",
        "mg c t\r\n",
        "ma c T0 t\r\n",
        "mg c t v\r\n",
        "ma d q N0\r\nma d q N0\r\n",
    ]);
    add(&[
        "ma a Mx\r\n",
        "ma a Dx\r\n",
        "ma a Jx\r\n",
        "ma a D\r\n",
        "ma a z\r\n",
        "set a 0 0 1\r\nx\r\nma a\r\nma a v q\r\n",
        "ms a 1 c\r\n1\r\n",
        "ma a C1\r\n",
        "ma a C@ c v\r\n",
        "ma a C0 v\r\n",
    ]);
    add(&[
        "ms YWI= 2 b k c\r\nhi\r\nmg YWI= b k v\r\nmg ab k v\r\nme ab\r\nme YWI= b\r\nmd YWI= b k\r\n",
        "mg YWI= b k\r\nmd YWI= b k O1\r\nma YWI= b k\r\nma YWI= b k N0 v\r\nma YWI= b k v\r\nmg ab k v\r\n",
    ]);
    add(&[
        "mg a b\r\n",
        "mg ==== b\r\n",
        "mg YQ=X b k\r\n",
        "mg YQ==YQ== b k\r\n",
        "me a b\r\n",
        "ms aa b b\r\n",
        "ms aa 1 b\r\n1\r\n",
        "mg a O123456789012345678901234567890 v\r\n",
        "mg a O1234567890123456789012345678901\r\n",
        "mg a O12345678901234567890123456789012\r\n",
        "md a O12345678901234567890123456789012\r\n",
        "ms a 1 O12345678901234567890123456789012\r\n1\r\n",
    ]);
    add(&[
        "mg a v k f c t h l s q O a b c d e f g h i j k\r\n",
        "ms a 1 a b c d e f g h i j k l m n o p q r s t\r\n1\r\n",
        "mg a P5 Lx D1 J1 F5 C1 MX I\r\n",
        "ms a 1 P L v h l s t f N5 R5 J5 D5 u\r\n1\r\n",
    ]);
    scripts
}

#[test]
fn every_command_and_error_in_text() {
    kit::require!(missing(&["memcached"]).is_none(), "no memcached: `scripts/setup test` installs it");
    let pair = Pair::new();
    let mut wrong = String::new();
    for script in scripts() {
        pair.fresh();
        let parts: Vec<_> = script.iter().map(|part| &part[..]).collect();
        let (ours, theirs) = (play(&pair.ours, &parts), play(&pair.theirs, &parts));
        let (ours, theirs) = (comparable(&ours), comparable(&theirs));
        if ours != theirs {
            let short = |text: &str| text.chars().take(1500).collect::<String>();
            let parts: Vec<_> = parts.iter().map(|part| short(&part.escape_ascii().to_string())).collect();
            wrong += &format!("{parts:#?}\nmemcached:\n{}\nours:\n{}\n\n", short(&theirs), short(&ours));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn answers_are_the_same_however_requests_are_cut() {
    kit::require!(missing(&["memcached"]).is_none(), "no memcached: `scripts/setup test` installs it");
    let pair = Pair::new();
    for script in scripts() {
        // The script is sent as one pipeline. Skipped are scripts that need a version from an answer, long scripts, and
        // scripts with `quit`.
        let all: Vec<u8> = script.concat();
        if all.contains(&b'@') || all.len() > 2000 || all.windows(4).any(|word| word == b"quit") {
            continue;
        }
        pair.fresh();
        let whole = comparable(&pair.ours.ask(&all));
        pair.fresh();
        let mut stream = pair.ours.connect();
        let mut answer = Vec::new();
        for byte in &all {
            stream.write_all(&[*byte]).unwrap();
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!(comparable(&answer), whole, "{}", all.escape_ascii());
    }
}

#[test]
fn a_line_without_an_end_closes_the_connection() {
    kit::require!(missing(&["memcached"]).is_none(), "no memcached: `scripts/setup test` installs it");
    let pair = Pair::new();
    for server in [&pair.ours, &pair.theirs] {
        for line in ["x".repeat(3000), format!("{}get {}", " ".repeat(101), "k ".repeat(3000))] {
            let mut stream = server.connect();
            stream.write_all(line.as_bytes()).unwrap();
            assert_eq!(stream.read(&mut [0; 10]).unwrap_or(0), 0);
        }
    }
}

/// Generates a text request, which may or may not be valid.
fn line() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec!["a", "b", "c"]);
    let end = prop::sample::select(vec!["0", "100", "-1", "2592000", "4000000000", "x"]);
    let verb = prop::sample::select(vec!["set", "add", "replace", "append", "prepend"]);
    let value = prop::sample::select(vec!["", "1", "99", "abc", "18446744073709551615", " 5"]);
    let quiet = prop::sample::select(vec!["", " noreply"]);
    let by = prop::sample::select(vec!["1", "7", "18446744073709551615", "-1", "x", ""]);
    let letters = "[vkfcthlsqubI]";
    let word = prop_oneof![
        6 => letters.prop_map(|word: String| word),
        1 => "[TNR](0|100|-1|50)".prop_map(|word: String| word),
        1 => "[CDJF](0|1|5|x)".prop_map(|word: String| word),
        1 => "M[EAPRSIDX+-]".prop_map(|word: String| word),
        1 => "O[a-z]{0,3}".prop_map(|word: String| word),
        1 => "[a-zA-Z]".prop_filter("versions", |word: &String| word != "w").prop_map(|word| word),
    ];
    // memcached forgets for an item that it creates by itself that the key came in base64, and shows the decoded key.
    let words = prop::collection::vec(word, 0..6).prop_map(|mut words| {
        if words.iter().any(|word| word.starts_with('b')) {
            words.retain(|word| !word.starts_with('k'));
        }
        words.join(" ")
    });
    let meta_key = prop::sample::select(vec!["a", "b", "YQ==", "YWFh", "aaaa"]);
    prop_oneof![
        4 => (verb, key.clone(), end.clone(), value.clone(), quiet.clone())
            .prop_map(|(verb, key, end, value, quiet)| format!("{verb} {key} 5 {end} {}{quiet}\r\n{value}\r\n", value.len())),
        1 => (key.clone(), value.clone(), quiet.clone())
            .prop_map(|(key, value, quiet)| format!("cas {key} 1 0 {} 1{quiet}\r\n{value}\r\n", value.len())),
        2 => (prop::sample::select(vec!["incr", "decr"]), key.clone(), by, quiet.clone())
            .prop_map(|(verb, key, by, quiet)| format!("{verb} {key} {by}{quiet}\r\n")),
        1 => (key.clone(), end.clone(), quiet.clone()).prop_map(|(key, end, quiet)| format!("touch {key} {end}{quiet}\r\n")),
        1 => (key.clone(), quiet).prop_map(|(key, quiet)| format!("delete {key}{quiet}\r\n")),
        2 => Just("gets a b c\r\n".to_owned()),
        1 => (end, key).prop_map(|(end, key)| format!("gats {end} {key} b\r\n")),
        3 => (meta_key.clone(), words.clone()).prop_map(|(key, words)| format!("mg {key} {words}\r\n")),
        3 => (meta_key.clone(), words.clone(), value)
            .prop_map(|(key, words, value)| format!("ms {key} {} {words}\r\n{value}\r\n", value.len())),
        2 => (meta_key.clone(), words.clone()).prop_map(|(key, words)| format!("md {key} {words}\r\n")),
        2 => (meta_key.clone(), words).prop_map(|(key, words)| format!("ma {key} {words}\r\n")),
        1 => meta_key.prop_map(|key| format!("me {key}\r\n")),
        1 => Just("flush_all\r\n".to_owned()),
        1 => "[a-z0-9 ]{0,12}\r\n",
    ]
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(150)
}

#[test]
fn random_requests_in_text() {
    kit::require!(missing(&["memcached"]).is_none(), "no memcached: `scripts/setup test` installs it");
    let pair = Pair::new();
    let mut runner =
        TestRunner::new(Config { cases: cases(), failure_persistence: None, ..Config::default() });
    runner
        .run(&prop::collection::vec(line(), 1..30), |lines| {
            pair.fresh();
            // The requests are sent one by one, because the way in which memcached changes an item depends on whether
            // answers with this item are still being sent.
            let parts: Vec<_> = lines.iter().map(|line| line.as_bytes()).collect();
            let (ours, theirs) = (play(&pair.ours, &parts), play(&pair.theirs, &parts));
            prop_assert_eq!(comparable(&ours), comparable(&theirs));
            Ok(())
        })
        .unwrap();
}

/// Returns a request packet of the binary protocol.
fn packet(opcode: u8, extras: &[u8], key: &[u8], value: &[u8], cas: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let header = Header {
        magic: binary::REQUEST,
        opcode,
        key: key.len() as u16,
        extras: extras.len() as u8,
        status: 0,
        body: (extras.len() + key.len() + value.len()) as u32,
        opaque: 0x0102_0304,
        cas,
    };
    header.append(&mut out);
    for part in [extras, key, value] {
        out.extend_from_slice(part);
    }
    out
}

/// Returns the answers of the binary protocol as text, with versions replaced so that two servers' answers can be compared.
fn packets(mut answer: &[u8]) -> Vec<String> {
    let mut versions = Versions::default();
    let mut out = Vec::new();
    while let Some(header) = Header::parse(answer) {
        let end = (binary::HEADER + header.body as usize).min(answer.len());
        let header = Header { cas: versions.place(header.cas) as u64, ..header };
        out.push(format!("{header:?} {}", answer[binary::HEADER..end].escape_ascii()));
        answer = &answer[end..];
    }
    out.push(answer.escape_ascii().to_string());
    out
}

fn compare_packets(pair: &Pair, requests: &[Vec<u8>]) -> Result<(), TestCaseError> {
    pair.fresh();
    let bytes = requests.concat();
    let (ours, theirs) = (pair.ours.ask(&bytes), pair.theirs.ask(&bytes));
    let shown: Vec<_> = requests.iter().map(|request| request.escape_ascii().to_string()).collect();
    prop_assert_eq!(packets(&ours), packets(&theirs), "{:#?}", shown);
    Ok(())
}

fn store_extras(flags: u32, end: u32) -> Vec<u8> {
    [flags.to_be_bytes(), end.to_be_bytes()].concat()
}

fn count_extras(by: u64, initial: u64, end: u32) -> Vec<u8> {
    [&by.to_be_bytes()[..], &initial.to_be_bytes(), &end.to_be_bytes()].concat()
}

#[test]
fn every_command_and_error_in_binary() {
    use opcode::*;
    kit::require!(missing(&["memcached"]).is_none(), "no memcached: `scripts/setup test` installs it");
    let pair = Pair::new();
    let set = |key: &str, value: &str| packet(SET, &store_extras(7, 0), key.as_bytes(), value.as_bytes(), 0);
    let plain = |code: u8, key: &str| packet(code, &[], key.as_bytes(), b"", 0);
    let noop = plain(NOOP, "");
    let mut scripts: Vec<Vec<Vec<u8>>> = Vec::new();
    for code in [GET, GETQ, GETK, GETKQ, DELETE, DELETEQ] {
        scripts.push(vec![
            plain(code, "a"),
            noop.clone(),
            set("a", "value"),
            plain(code, "a"),
            plain(code, "a"),
            noop.clone(),
        ]);
    }
    for code in [SET, SETQ, ADD, ADDQ, REPLACE, REPLACEQ] {
        let store = |cas| packet(code, &store_extras(9, 100), b"a", b"new", cas);
        scripts.push(vec![store(0), plain(GETK, "a"), store(0), plain(GET, "a"), store(77), noop.clone()]);
        scripts.push(vec![store(77), set("a", "1"), store(0), plain(GET, "a"), noop.clone()]);
        scripts.push(vec![
            packet(code, &store_extras(0, 0), b"a", &vec![b'v'; 2_000_000], 0),
            plain(GET, "a"),
            noop.clone(),
        ]);
    }
    for code in [APPEND, APPENDQ, PREPEND, PREPENDQ] {
        let more = |cas| packet(code, &[], b"a", b"more", cas);
        scripts.push(vec![more(0), set("a", "1"), more(0), plain(GET, "a"), more(99), noop.clone()]);
        scripts.push(vec![
            set("a", "1"),
            packet(code, &[], b"a", &vec![b'v'; 2_000_000], 0),
            plain(GET, "a"),
            noop.clone(),
        ]);
    }
    for code in [INCREMENT, INCREMENTQ, DECREMENT, DECREMENTQ] {
        let count = |end, cas| packet(code, &count_extras(3, 10, end), b"a", b"", cas);
        scripts.push(vec![
            count(u32::MAX, 0),
            count(0, 0),
            count(0, 0),
            plain(GET, "a"),
            count(0, 99),
            noop.clone(),
        ]);
        scripts.push(vec![
            set("a", "x"),
            count(0, 0),
            set("a", "100"),
            count(0, 0),
            plain(GET, "a"),
            noop.clone(),
        ]);
    }
    for code in [TOUCH, GAT, GATQ, GATK, GATKQ] {
        let touch = |end: u32| packet(code, &end.to_be_bytes(), b"a", b"", 0);
        scripts.push(vec![
            touch(0),
            set("a", "value"),
            touch(100),
            touch(0),
            touch(u32::MAX),
            plain(GET, "a"),
            touch(3_000_000),
            plain(GET, "a"),
            noop.clone(),
        ]);
    }
    for code in [FLUSH, FLUSHQ] {
        scripts.push(vec![set("a", "1"), plain(code, ""), plain(GET, "a"), noop.clone()]);
        scripts.push(vec![
            set("a", "1"),
            packet(code, &1000_u32.to_be_bytes(), b"", b"", 0),
            plain(GET, "a"),
            plain(code, ""),
            noop.clone(),
        ]);
        scripts.push(vec![packet(code, &[1], b"", b"", 0), noop.clone()]);
    }
    for code in [QUIT, QUITQ] {
        scripts.push(vec![noop.clone(), plain(code, ""), noop.clone()]);
    }
    scripts.push(vec![plain(VERSION, ""), plain(VERSION, "x"), noop.clone()]);
    scripts.push(vec![plain(NOOP, "x"), noop.clone()]);
    for code in [SASL_LIST, SASL_AUTH, SASL_STEP] {
        scripts.push(vec![plain(code, ""), noop.clone()]);
        scripts.push(vec![packet(code, &[], b"PLAIN", b"user", 0), noop.clone()]);
    }
    for key in ["foo", "reset", "detail", "detail on", "detail off", "sizes"] {
        scripts.push(vec![plain(STAT, key), noop.clone()]);
    }
    scripts.push(vec![packet(STAT, &[1], b"a", b"", 0), noop.clone()]);
    // These packets have lengths that their commands do not allow.
    for code in 0..=0x30 {
        for (extras, key, value) in
            [(0, 0, 0), (3, 1, 1), (8, 0, 1), (0, 1, 5), (4, 1, 1), (20, 1, 3), (0, 251, 0)]
        {
            // Skipped are `stats`, because the two servers' numbers differ, and packets after which memcached loses its
            // place in the stream: an unknown command with a key or extras, and a value where none belongs.
            let is_unknown = code > GATKQ || [0x1b, 0x1f].contains(&code);
            let has_too_much = matches!(code, TOUCH..=GATQ | GATK..=GATKQ) && (extras, value) == (4, 1);
            if code == STAT && extras == 0 || is_unknown && key + extras > 0 || has_too_much {
                continue;
            }
            let bytes = packet(code, &vec![0; extras], &vec![b'k'; key], &vec![b'v'; value], 0);
            scripts.push(vec![bytes, noop.clone(), noop.clone(), noop.clone()]);
        }
        // The body of this packet is shorter than the sum of its parts.
        let mut bytes = packet(code, &[], b"abc", b"", 0);
        bytes[11] = 1;
        scripts.push(vec![bytes, noop.clone()]);
    }
    let mut bad = noop.clone();
    bad[0] = 0x7f;
    scripts.push(vec![noop.clone(), bad]);
    let mut wrong = String::new();
    for script in scripts {
        if let Err(error) = compare_packets(&pair, &script) {
            wrong += &format!("{}\n\n", error.to_string().chars().take(3000).collect::<String>());
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn random_requests_in_binary() {
    use opcode::*;
    kit::require!(missing(&["memcached"]).is_none(), "no memcached: `scripts/setup test` installs it");
    let pair = Pair::new();
    let key = prop::sample::select(vec!["a", "b", "c"]);
    // No number becomes shorter, because whether memcached then stores a new item depends on whether another thread is
    // using the old one.
    let value = prop::sample::select(vec!["", "1", "99", "abc"]);
    let end = prop::sample::select(vec![0, 100, 3_000_000, 4_000_000_000, u32::MAX]);
    let cas = prop::sample::select(vec![0, 0, 0, 1]);
    let request = (0..=GATKQ, key, value, end, cas).prop_map(|(code, key, value, end, cas)| {
        let (key, value) = (key.as_bytes(), value.as_bytes());
        match code {
            SET..=REPLACE | SETQ..=REPLACEQ => packet(code, &store_extras(3, end), key, value, cas),
            INCREMENT | DECREMENT | INCREMENTQ | DECREMENTQ => {
                packet(code, &count_extras(u64::from(code & 1), 50, end), key, b"", cas)
            }
            APPEND | PREPEND | APPENDQ | PREPENDQ => packet(code, &[], key, value, cas),
            GAT | GATQ | GATK | GATKQ | TOUCH => packet(code, &end.to_be_bytes(), key, b"", 0),
            GET | GETQ | GETK | GETKQ | DELETE | DELETEQ => packet(code, &[], key, b"", cas),
            FLUSH | FLUSHQ => packet(code, &[], b"", b"", 0),
            VERSION => packet(code, &[], b"", b"", 0),
            _ => packet(NOOP, &[], b"", b"", 0),
        }
    });
    let mut runner =
        TestRunner::new(Config { cases: cases(), failure_persistence: None, ..Config::default() });
    runner.run(&prop::collection::vec(request, 1..40), |requests| compare_packets(&pair, &requests)).unwrap();
}
