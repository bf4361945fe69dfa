//! What the files of a crate with floors of its own use, against docs/pictures/architecture.floors.
//!
//! Tests may use what lies above: the tests in a file are left out. A file that is only compiled for tests lies on a floor, as any other.

use crate::floors::{FILE, House, Inside};
use crate::packages::Package;
use crate::{none, packages, tree};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;

#[test]
fn files_use_only_files_below_them() {
    let (house, packages) = (House::read(), packages::read());
    for inside in &house.inside {
        let of_it = |package: &&Package| package.place().is_some_and(|(_, name)| name == inside.name);
        let package = packages.iter().find(of_it).expect("a crate for each room, which another test checks");
        none(faults(inside, &read(&package.folder)));
    }
}

/// A file of a crate: the path of its module in the crate, and its text.
struct File {
    module: Vec<String>,
    text: String,
}

/// Reads the files of a crate. Its root, which only declares modules, is not among them.
fn read(folder: &str) -> Vec<File> {
    let sources = format!("{folder}/src");
    let file = |path: std::path::PathBuf| {
        let below = path.strip_prefix(&sources).ok()?.with_extension("");
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        let module: Vec<String> = below.iter().map(|name| name.to_string_lossy().into()).collect();
        let is_root = module == ["lib"] || module == ["main"];
        let text = || std::fs::read_to_string(tree::root().join(&path)).expect("a file of the repository");
        (is_source && !is_root).then(|| File { module, text: text() })
    };
    tree::files().into_iter().filter_map(file).collect()
}

/// A path that a file uses, and its line.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Path {
    names: Vec<String>,
    line: usize,
}

/// Returns the paths from the crate's root in what a file compiles without tests. What a macro is given counts too.
fn paths(file: &File) -> Vec<Path> {
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

fn faults(inside: &Inside, files: &[File]) -> Vec<String> {
    let level = |name: &String| inside.modules.iter().position(|module| module == name);
    let (mut faults, mut uses) = (Vec::new(), BTreeMap::new());
    for file in files {
        let Some(own) = level(&file.module[0]) else {
            faults.push(format!("{FILE}: the line `inside {}` lacks {}", inside.name, file.module[0]));
            continue;
        };
        let used: &mut BTreeSet<_> = uses.entry(file.module.clone()).or_default();
        for Path { names, line } in paths(file) {
            let Some(name) = names.first() else { continue };
            let Some(other) = level(name) else { continue };
            if other < own {
                faults.push(format!(
                    "{}.rs:{line}: {} lies above {}. Move what is used down, or let what lies above be told by a trait.",
                    file.module.join("/"),
                    names.join("::"),
                    file.module[0],
                ));
            }
            let longest = (1..=names.len()).rev().map(|n| &names[..n]);
            let target = longest.into_iter().find(|names| files.iter().any(|file| file.module == *names));
            // A module may declare, and name, the modules in it.
            used.extend(target.filter(|target| !target.starts_with(&file.module)).map(<[String]>::to_vec));
        }
    }
    for module in uses.keys() {
        if let Some(circle) = circle(&uses, module) {
            faults.push(format!("a circle: {}", circle.join(" uses ")));
        }
    }
    faults
}

type Uses = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

/// Returns a shortest way from a file to itself. It begins at the file of the circle that comes first, so each is found once.
fn circle(uses: &Uses, from: &Vec<String>) -> Option<Vec<String>> {
    let mut ways = vec![vec![from.clone()]];
    let mut seen = BTreeSet::new();
    while let Some(way) = (!ways.is_empty()).then(|| ways.remove(0)) {
        for next in way.last().and_then(|last| uses.get(last)).into_iter().flatten() {
            let further = || way.iter().chain([next]).cloned();
            if next == from {
                return Some(further().map(|names| names.join("::")).collect());
            }
            if next > from && seen.insert(next.clone()) {
                ways.push(further().collect());
            }
        }
    }
    None
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
    }

    fn house() -> Inside {
        Inside { name: "x".into(), modules: ["top", "low"].map(String::from).into() }
    }

    #[test]
    fn a_file_that_uses_a_higher_floor_is_found() {
        let files = [file("top", "use crate::low::f;"), file("low", "fn f() {\n    crate::top::g();\n}")];
        let found = faults(&house(), &files);
        assert!(found[0].starts_with("low.rs:2: top::g lies above low"), "{found:?}");
    }

    #[test]
    fn a_circle_of_files_is_found_once() {
        let files = [
            file("low::a", "use crate::low::b::f;"),
            file("low::b", "use super::c;"),
            file("low::c", "use crate::low::{a, c};"),
            file("low", "pub mod a;\nuse crate::low::a::f;"),
        ];
        let found = faults(&house(), &files);
        assert_eq!(found, ["a circle: low::a uses low::b uses low::c uses low::a"]);
    }

    #[test]
    fn a_module_that_is_on_no_floor_is_found() {
        let found = faults(&house(), &[file("other::a", "")]);
        assert!(found[0].contains("lacks other"), "{found:?}");
    }
}
