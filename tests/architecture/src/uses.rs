//! What the files of a crate use of each other.
//!
//! Tests may use what lies above: the tests in a file are left out. A file that is only compiled for tests counts as any other.

use crate::tree;
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter::Peekable;

/// A file of a crate: the path of its module in the crate, and its text.
pub struct File {
    pub module: Vec<String>,
    pub text: String,
}

/// Reads the files of a crate. Its root, which only declares modules, is not among them.
pub fn read(folder: &str) -> Vec<File> {
    let sources = format!("{folder}/src");
    let file = |path: std::path::PathBuf| {
        let below = path.strip_prefix(&sources).ok()?.with_extension("");
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        let mut module: Vec<String> = below.iter().map(|name| name.to_string_lossy().into()).collect();
        if module.len() > 1 {
            module.pop_if(|name| name == "mod");
        }
        let is_root = module == ["lib"] || module == ["main"];
        let text = || std::fs::read_to_string(tree::root().join(&path)).expect("a file of the repository");
        (is_source && !is_root).then(|| File { module, text: text() })
    };
    tree::files().into_iter().filter_map(file).collect()
}

/// A path that a file uses, and its line.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path {
    pub names: Vec<String>,
    pub line: usize,
}

/// Returns the paths from the crate's root in what a file compiles without tests. What a macro is given counts too.
pub fn paths(file: &File) -> Vec<Path> {
    let tokens: TokenStream = file.text.parse().expect("a source file that compiles");
    let mut found = Vec::new();
    collect(tokens, &file.module, &mut found);
    found
}

fn collect(tokens: TokenStream, here: &[String], found: &mut Vec<Path>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(ref punct) if punct.as_char() == '#' => skip_if_test(&mut tokens),
            TokenTree::Group(group) => collect(group.stream(), here, found),
            TokenTree::Ident(ident) if ident == "pub" => drop(tokens.next_if(is_scope)),
            TokenTree::Ident(ident) => {
                let base = match ident.to_string().as_str() {
                    "crate" => Some(Vec::new()),
                    "super" => Some(here[..here.len() - 1].to_vec()),
                    "self" => Some(here.to_vec()),
                    _ => None,
                };
                if let Some(base) = base {
                    follow(base, ident.span().start().line, &mut tokens, found);
                }
            }
            _ => {}
        }
    }
}

type Tokens = Peekable<proc_macro2::token_stream::IntoIter>;

/// Skips the attribute `[cfg(test)]`, if it comes next, and the item behind it.
fn skip_if_test(tokens: &mut Tokens) {
    let is_test = matches!(tokens.peek(), Some(TokenTree::Group(group))
        if group.stream().to_string().replace(' ', "") == "cfg(test)");
    if !is_test {
        return;
    }
    for token in tokens.by_ref() {
        let is_end = match token {
            TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
            TokenTree::Punct(punct) => punct.as_char() == ';',
            _ => false,
        };
        if is_end {
            return;
        }
    }
}

/// Returns whether this, behind `pub`, says where a name is visible. It uses nothing of what lies there.
fn is_scope(token: &TokenTree) -> bool {
    let TokenTree::Group(group) = token else { return false };
    let scope = group.stream().to_string();
    matches!(scope.as_str(), "crate" | "super" | "self") || scope.starts_with("in ")
}

/// Follows a path, of which `base` has been read. A group in braces stands for several paths.
fn follow(mut base: Vec<String>, line: usize, tokens: &mut Tokens, found: &mut Vec<Path>) {
    let is_colon =
        |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    while is_colon(tokens.peek()) {
        tokens.next();
        if !is_colon(tokens.peek()) {
            break;
        }
        tokens.next();
        match tokens.peek() {
            Some(TokenTree::Ident(name)) if *name == "super" => drop(base.pop()),
            Some(TokenTree::Ident(name)) => base.push(name.to_string()),
            Some(TokenTree::Group(group)) => {
                let mut inner = group.stream().into_iter().peekable();
                tokens.next();
                while let Some(token) = inner.next() {
                    match token {
                        // The name behind it is a new one.
                        TokenTree::Ident(name) if name == "as" => drop(inner.next()),
                        TokenTree::Ident(name) => {
                            let own = (name != "self").then(|| name.to_string());
                            follow(base.iter().cloned().chain(own).collect(), line, &mut inner, found);
                        }
                        _ => {}
                    }
                }
                return;
            }
            _ => break,
        }
        tokens.next();
    }
    found.push(Path { names: base, line });
}

/// Which files each file uses. A module may declare, and name, the modules in it: this does not count.
pub type Uses = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

pub fn uses(files: &[File]) -> Uses {
    let modules: BTreeSet<_> = files.iter().map(|file| &file.module).collect();
    let used = |file: &File| {
        let target = |Path { names, .. }: Path| {
            let mut longest = (1..=names.len()).rev().map(|n| names[..n].to_vec());
            longest.find(|names| modules.contains(names)).filter(|target| !target.starts_with(&file.module))
        };
        (file.module.clone(), paths(file).into_iter().filter_map(target).collect())
    };
    files.iter().map(used).collect()
}

/// Returns a shortest way from a file to itself over files that may be `on` it.
pub fn circle(uses: &Uses, from: &[String], on: impl Fn(&[String]) -> bool) -> Option<Vec<String>> {
    let mut ways = VecDeque::from([vec![from]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop_front() {
        for next in way.last().and_then(|last| uses.get(*last)).into_iter().flatten() {
            let further = || way.iter().copied().chain([next.as_slice()]);
            if next == from {
                return Some(further().map(|names| names.join("::")).collect());
            }
            if on(next) && seen.insert(next) {
                ways.push_back(further().collect());
            }
        }
    }
    None
}

/// Returns what a file uses, also through others.
pub fn reach<'a>(uses: &'a Uses, from: &'a [String]) -> BTreeSet<&'a [String]> {
    let (mut seen, mut rest) = (BTreeSet::new(), vec![from]);
    while let Some(file) = rest.pop() {
        rest.extend(
            uses.get(file).into_iter().flatten().map(Vec::as_slice).filter(|next| seen.insert(*next)),
        );
    }
    seen
}

mod made_up {
    use super::*;

    fn file(module: &str, text: &str) -> File {
        File { module: module.split("::").map(String::from).collect(), text: text.into() }
    }

    fn found(text: &str) -> Vec<String> {
        paths(&file("a::b", text)).into_iter().map(|path| path.names.join("::")).collect()
    }

    #[test]
    fn every_way_to_name_a_path_is_found() {
        assert_eq!(found("use crate::c::{self, d, e::{f, g as h}};"), ["c", "c::d", "c::e::f", "c::e::g"]);
        assert_eq!(found("fn x() { crate::c::d(super::e::F, self::g); }"), ["c::d", "a::e::F", "a::b::g"]);
        assert_eq!(found("fn x(&self) { self.y.z(vec![crate::c::D]) }"), ["a::b", "a::b", "c::D"]);
        assert_eq!(found("use super::super::c::d;"), ["c::d"]);
        assert_eq!(found("// crate::c\n/// [`crate::c`]\nfn x() { \"crate::c\"; }"), [""; 0]);
        let test = "#[cfg(test)]\nuse crate::c;\n#[cfg(test)]\nmod tests { use crate::d; }\nuse crate::e;";
        assert_eq!(found(test), ["e"]);
        assert_eq!(found("#[cfg(not(test))]\nuse crate::c;"), ["c"]);
        assert_eq!(
            found("pub(super) struct C { pub(in crate::a) c: u8, pub(crate) d: crate::c::D }"),
            ["c::D"]
        );
        assert_eq!(found("struct C(pub (crate::c::D, super::E));"), ["c::D", "a::E"]);
    }

    #[test]
    fn a_file_in_a_folder_is_found_by_its_module() {
        let files = [
            file("a", "use self::b::f; use crate::c::f;"),
            file("a::b", "use super::f;"),
            file("c", "use crate::F;"),
        ];
        let used: Vec<String> = uses(&files).into_values().flatten().map(|names| names.join("::")).collect();
        assert_eq!(used, ["c", "a"]);
    }
}
