//! The tables of names, `libibverbs.map` and `librdmacm.map`, as `build.rs` and the tests read them.

/// What stands behind a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A function of this crate.
    Ours,
    /// The real library's.
    Forward,
    /// A byte of data.
    Object,
}

/// A name in a node.
#[derive(Clone, Debug)]
pub struct Line {
    /// The name.
    pub name: String,
    /// The node of versions that it is in.
    pub node: String,
    /// What it is.
    pub what: What,
    /// What a call gives if there is no real library.
    pub missing: String,
}

/// The lines of a table that have a comment which says what they are.
pub fn parse(text: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut node = "";
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_suffix(" {") {
            node = name;
        }
        let Some((name, comment)) = line.split_once("; ") else { continue };
        let mut words = comment.trim_start().trim_start_matches("# ").split(' ');
        let what = match words.next() {
            Some("ours") => What::Ours,
            Some("forward") => What::Forward,
            Some("object") => What::Object,
            other => panic!("{line}: what is {other:?}?"),
        };
        let missing = words.next().unwrap_or("void").to_owned();
        assert!(
            ["null", "errno", "void", "minus", "negative", "zero"].contains(&missing.as_str()),
            "{line}: what is {missing}?"
        );
        lines.push(Line { name: name.trim().to_owned(), node: node.to_owned(), what, missing });
    }
    lines
}
