//! What no source file contains: a skip that no run counts, a test that no run runs, and a module of another package.

use crate::{none, tree};
use std::path::{Component, Path, PathBuf};

#[test]
fn only_the_kit_and_the_scripts_that_count_print_skips() {
    none(skips(&read()));
}

#[test]
fn no_test_is_ignored() {
    none(ignored(&read()));
}

#[test]
fn no_test_is_in_a_program_whose_tests_are_not_built() {
    let manifests = tree::files().into_iter().filter(|path| path.ends_with("Cargo.toml"));
    let read = |path: PathBuf| std::fs::read_to_string(tree::root().join(&path)).map(|text| (path, text));
    let manifests: Vec<_> = manifests.filter_map(|path| read(path).ok()).collect();
    none(not_built(&self::read(), &manifests));
}

#[test]
fn no_package_includes_a_module_of_another_one() {
    let files = tree::files();
    let packages: Vec<&Path> =
        files.iter().filter(|path| path.ends_with("Cargo.toml")).filter_map(|path| path.parent()).collect();
    none(borrowed_modules(&read(), &packages));
}

/// The word with which the line of a skipped test begins. In two pieces, so that this file does not contain it.
const WORD: &str = concat!("SKIP", "PED");

/// Who prints that word for all others, or counts it.
const MAY_SKIP: &[&str] = &["tests/kit", "scripts/skip", "scripts/test"];

struct Source {
    path: PathBuf,
    kind: Kind,
    text: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Rust,
    C,
    /// A language in which a comment begins with `#`.
    Script,
}

impl Source {
    fn new(path: &Path, text: String) -> Option<Self> {
        let kind = match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => Kind::Rust,
            Some("c" | "h" | "cpp") => Kind::C,
            Some("py" | "sh") => Kind::Script,
            None if text.starts_with("#!") => Kind::Script,
            _ => return None,
        };
        Some(Self { path: path.into(), kind, text })
    }

    /// Returns the lines that are not comments: the place of each, and its text without the blanks in front.
    fn lines(&self) -> impl Iterator<Item = (String, &str)> {
        let comment = if self.kind == Kind::Script { "#" } else { "//" };
        let numbered = self.text.lines().map(str::trim_start).zip(1..);
        numbered
            .filter(move |(line, _)| !line.starts_with(comment))
            .map(|(line, number)| (format!("{}:{number}", self.path.display()), line))
    }
}

/// Reads the source files of the repository.
fn read() -> Vec<Source> {
    let source = |path: PathBuf| {
        let bytes = std::fs::read(tree::root().join(&path)).expect("a file of the repository");
        Source::new(&path, String::from_utf8(bytes).ok()?)
    };
    tree::files().into_iter().filter_map(source).collect()
}

/// Returns the Rust sources.
fn rust(sources: &[Source]) -> impl Iterator<Item = &Source> {
    sources.iter().filter(|source| source.kind == Kind::Rust)
}

fn skips(sources: &[Source]) -> Vec<String> {
    let others =
        sources.iter().filter(|source| !MAY_SKIP.iter().any(|allowed| source.path.starts_with(allowed)));
    let lines = others.flat_map(Source::lines).filter(|(_, line)| line.contains(WORD));
    let fault = |(place, _): (String, &str)| {
        format!(
            "{place}: a literal {WORD}, which no run counts. Use kit::require! or kit::skip!, or \
             scripts/skip in a script."
        )
    };
    lines.map(fault).collect()
}

fn ignored(sources: &[Source]) -> Vec<String> {
    let is_ignored = |line: &str| {
        line.starts_with("#[ignore") || line.starts_with("#[cfg_attr") && line.contains(", ignore")
    };
    let lines = rust(sources).flat_map(Source::lines).filter(|(_, line)| is_ignored(line));
    let fault = |(place, _): (String, &str)| {
        format!(
            "{place}: a test that is ignored. Make a child process a program with kit::program!, and a long test a \
             part of `make soak`."
        )
    };
    lines.map(fault).collect()
}

/// Finds tests in the programs for which a manifest says `test = false`.
fn not_built(sources: &[Source], manifests: &[(PathBuf, String)]) -> Vec<String> {
    let value = |table: &str, key: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    let mut faults = Vec::new();
    for (manifest, text) in manifests {
        let folder = manifest.parent().unwrap_or(Path::new(""));
        let tables = text.split("\n[").filter_map(|table| table.strip_prefix("[bin]]"));
        for table in tables.filter(|table| value(table, "test").as_deref() == Some("false")) {
            let name = value(table, "name").unwrap_or_default();
            let root = folder.join(value(table, "path").unwrap_or_else(|| format!("src/bin/{name}.rs")));
            // The modules of `main.rs` lie beside it, and those of another root in a folder of its name.
            let modules = match root.file_name().is_some_and(|name| name == "main.rs") {
                true => root.parent().unwrap_or(folder).to_owned(),
                false => root.with_extension(""),
            };
            let own = rust(sources).filter(|source| source.path == root || source.path.starts_with(&modules));
            let tests = own.flat_map(Source::lines).filter(|(_, line)| line.starts_with("#[test]"));
            faults.extend(tests.map(|(place, _)| {
                format!("{place}: a test that is not built: {} says `test = false`", manifest.display())
            }));
        }
    }
    faults
}

fn borrowed_modules(sources: &[Source], packages: &[&Path]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in rust(sources) {
        let folder = source.path.parent().expect("a file lies in a folder");
        let Some(package) = folder.ancestors().find(|folder| packages.contains(folder)) else { continue };
        for (place, line) in source.lines() {
            let attribute = line.starts_with("#[path") || line.starts_with("#[cfg_attr");
            let Some((_, rest)) = line.split_once("path = \"").filter(|_| attribute) else { continue };
            let to = resolve(&folder.join(rest.split('"').next().unwrap_or_default()));
            if !to.starts_with(package) {
                faults.push(format!(
                    "{place}: the module {} does not belong to the package {}. Move it to tests/kit.",
                    to.display(),
                    package.display(),
                ));
            }
        }
    }
    faults
}

/// Returns the path without `..`.
fn resolve(path: &Path) -> PathBuf {
    let mut resolved = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => _ = resolved.pop(),
            other => resolved.push(other),
        }
    }
    resolved
}

mod made_up {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Vec<Source> {
        let source =
            |(path, text): &(&str, &str)| Source::new(Path::new(path), text.replace("THE-WORD", WORD));
        files.iter().filter_map(source).collect()
    }

    fn places(faults: Vec<String>) -> Vec<String> {
        faults.iter().map(|fault| fault.split(": ").next().unwrap_or_default().into()).collect()
    }

    #[test]
    fn a_test_that_is_not_built_is_found() {
        let test = "#[test]\nfn f() {}\n";
        let sources = sources(&[
            ("a/src/bin/one.rs", test),
            ("a/src/bin/one/part.rs", test),
            ("a/src/bin/two.rs", test),
            ("a/src/agent/main.rs", "fn main() {}"),
            ("a/src/agent/part.rs", test),
            ("a/src/other.rs", test),
        ]);
        let manifest = "[package]\nname = \"a\"\n\n[[bin]]\nname = \"one\"\ntest = false\n\n[[bin]]\nname = \"two\"\n\n\
                        [[bin]]\nname = \"three\"\npath = \"src/agent/main.rs\"\ntest = false\n\n[dependencies]\n";
        let found = not_built(&sources, &[("a/Cargo.toml".into(), manifest.into())]);
        let expected = ["a/src/bin/one.rs:1", "a/src/bin/one/part.rs:1", "a/src/agent/part.rs:1"];
        assert_eq!(places(found), expected);
    }

    #[test]
    fn a_skip_that_is_not_counted_is_found_in_each_language() {
        let found = skips(&sources(&[
            ("crates/a/tests/x.rs", "//! THE-WORD\nfn f() {\n    println!(\"THE-WORD x\");\n}\n"),
            ("crates/a/tests/y.c", "// THE-WORD\nint main(void) { puts(\"THE-WORD y\"); }\n"),
            ("crates/a/tests/z.py", "# THE-WORD\nprint('THE-WORD z')\n"),
            ("a/run", "#!/bin/sh\n# THE-WORD\necho THE-WORD\n"),
            ("tests/kit/src/skip.rs", "print(\"THE-WORD\")"),
            ("scripts/skip", "#!/bin/sh\necho THE-WORD\n"),
            ("scripts/test", "#!/bin/sh\ngrep THE-WORD\n"),
            ("scripts/testing", "#!/bin/sh\necho THE-WORD\n"),
            ("README.md", "THE-WORD"),
        ]));
        let expected = [
            "crates/a/tests/x.rs:3",
            "crates/a/tests/y.c:2",
            "crates/a/tests/z.py:2",
            "a/run:3",
            "scripts/testing:2",
        ];
        assert_eq!(places(found), expected);
    }

    #[test]
    fn an_ignored_test_is_found() {
        let found = ignored(&sources(&[
            ("a.rs", "// #[ignore]\n#[test]\n#[ignore = \"long\"]\nfn a() {}\n  #[ignore]\n"),
            ("b.rs", "#[cfg_attr(miri, ignore)]\n#[cfg_attr(miri, inline)]\nlet ignore = 1;\n"),
            ("c.py", "#[ignore]\n"),
        ]));
        assert_eq!(places(found), ["a.rs:3", "a.rs:5", "b.rs:1"]);
    }

    #[test]
    fn a_module_of_another_package_is_found() {
        let text = "#[path = \"../../b/x.rs\"]\nmod x;\n#[path = \"../tests/y.rs\"]\nmod y;\n#[path = \"z.rs\"]\nmod z;\n";
        let more =
            "#[cfg_attr(loom, path = \"../../../ab/x.rs\")]\nmod x;\n// #[path = \"../../../../x.rs\"]\n";
        let sources = sources(&[("a/src/lib.rs", text), ("a/src/deep/mod.rs", more)]);
        let packages = ["", "a", "b", "ab"].map(Path::new);
        let found = borrowed_modules(&sources, &packages);
        assert!(found[0].contains("b/x.rs does not belong to the package a"), "{found:?}");
        assert_eq!(places(found), ["a/src/lib.rs:1", "a/src/deep/mod.rs:1"]);
    }
}
