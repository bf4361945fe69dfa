//! The tables of names, `libibverbs.map` and `librdmacm.map`, as `build.rs` and the tests read them.

/// The implementation of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A function of this crate.
    Ours,
    /// Forwarded to the real library.
    Forward,
    /// A byte of data.
    Object,
}

/// A line of a table: a name in a version node.
#[derive(Clone, Debug)]
pub struct Line {
    /// The name of the function or object.
    pub name: String,
    /// The version node that contains it.
    pub node: String,
    /// How the name is implemented.
    pub what: What,
    /// The value that a call returns if there is no real library: a word such as `null`, which the head of the table explains.
    pub missing: String,
}

/// Returns the lines of a table that have a comment with the implementation of the name.
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
