//! The list of who may depend on whom, docs/pictures/architecture.floors. Its head describes the format.

use crate::tree;

/// Where the list lies in the repository.
pub const FILE: &str = "docs/pictures/architecture.floors";

/// The whole list.
#[derive(Debug, Default, PartialEq)]
pub struct House {
    /// From top to bottom.
    pub floors: Vec<Floor>,
    pub apart: Vec<Apart>,
    pub inside: Vec<Inside>,
    pub circles: Vec<Circle>,
}

/// A floor: its crates use only crates of the floors below it.
#[derive(Debug, PartialEq)]
pub struct Floor {
    /// The folders of `crates` in which its crates lie.
    pub folders: Vec<String>,
    pub title: String,
    /// The crates, by the names of their folders.
    pub rooms: Vec<String>,
}

/// Two crates of which the first must not use the second, not even through others.
#[derive(Debug, PartialEq)]
pub struct Apart {
    pub user: String,
    pub used: String,
    pub why: String,
}

/// The floors inside of a crate.
#[derive(Debug, PartialEq)]
pub struct Inside {
    pub name: String,
    /// Its modules, from top to bottom.
    pub modules: Vec<String>,
}

/// Files of a crate that still use each other in a circle.
#[derive(Debug, PartialEq)]
pub struct Circle {
    pub name: String,
    /// The modules of the files. None: the line only says that the crate has no other circle.
    pub files: Vec<String>,
}

impl House {
    /// Reads the list of this repository.
    pub fn read() -> Self {
        let text = std::fs::read_to_string(tree::root().join(FILE)).expect("the list of floors");
        Self::parse(&text).unwrap_or_else(|fault| panic!("{fault}"))
    }

    /// Reads a list. Fails with the first line that is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut house = Self::default();
        for (at, line) in text.lines().enumerate() {
            if !line.trim().is_empty() && !line.starts_with('#') {
                house.add(line.trim()).map_err(|fault| format!("{FILE}:{}: {fault}: {line}", at + 1))?;
            }
        }
        let apart = house.apart.iter().flat_map(|apart| [&apart.user, &apart.used]);
        let inside = house.inside.iter().map(|inside| &inside.name);
        for name in apart.chain(inside).chain(house.circles.iter().map(|circle| &circle.name)) {
            if house.level(name).is_none() {
                return Err(format!("{FILE}: there is no room {name}, of which another line tells"));
            }
        }
        Ok(house)
    }

    fn add(&mut self, line: &str) -> Result<(), &'static str> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        if word == "title" {
            return Ok(());
        }
        let (names, text) = rest.split_once(": ").ok_or("there is no colon with a text behind it")?;
        let names: Vec<String> = names.split_whitespace().map(String::from).collect();
        match (word, &names[..]) {
            ("floor", [_, ..]) => {
                self.floors.push(Floor { folders: names, title: text.into(), rooms: Vec::new() })
            }
            ("room", [name]) => {
                if self.level(name).is_some() {
                    return Err("this crate has a room already");
                }
                self.floors.last_mut().ok_or("this room is above the first floor")?.rooms.push(name.clone());
            }
            ("apart", [user, used]) => {
                self.apart.push(Apart { user: user.clone(), used: used.clone(), why: text.into() });
            }
            ("inside", [name]) => {
                let modules = text.split_whitespace().map(String::from).collect();
                self.inside.push(Inside { name: name.clone(), modules });
            }
            ("circle", [name]) => {
                let files =
                    text.split_whitespace().filter(|file| *file != "none").map(String::from).collect();
                self.circles.push(Circle { name: name.clone(), files });
            }
            _ => {
                return Err(
                    "this is not a title, a floor, a room, a pair of crates to keep apart, the inside of a crate or a circle",
                );
            }
        }
        Ok(())
    }

    /// Returns on which floor a crate is, counted from the top.
    pub fn level(&self, name: &str) -> Option<usize> {
        self.floors.iter().position(|floor| floor.rooms.iter().any(|room| room == name))
    }
}

#[test]
fn a_list_is_read() {
    let text = "# head\n\ntitle T\nfloor a b: Top\nroom x: it: is|so\nfloor c: Low\nroom y: this\napart x y: because\ninside y: a b\n\
                circle x: none\ncircle y: a b::c\n";
    let floor = |folders: &[&str], title: &str, room: &str| Floor {
        folders: folders.iter().map(|name| name.to_string()).collect(),
        title: title.into(),
        rooms: vec![room.into()],
    };
    let house = House::parse(text).expect("a list");
    assert_eq!(house.floors, [floor(&["a", "b"], "Top", "x"), floor(&["c"], "Low", "y")]);
    assert_eq!(house.apart, [Apart { user: "x".into(), used: "y".into(), why: "because".into() }]);
    assert_eq!(house.inside, [Inside { name: "y".into(), modules: vec!["a".into(), "b".into()] }]);
    let circle = |name: &str, files: &[&str]| Circle {
        name: name.into(),
        files: files.iter().map(|file| file.to_string()).collect(),
    };
    assert_eq!(house.circles, [circle("x", &[]), circle("y", &["a", "b::c"])]);
    assert_eq!((house.level("x"), house.level("y"), house.level("z")), (Some(0), Some(1), None));
}

#[test]
fn a_line_that_is_wrong_is_named() {
    for (text, line, fault) in [
        ("floor a: A\nroof b: B", ":2: ", "not a title"),
        ("floor a", ":1: ", "no colon"),
        ("floor : A", ":1: ", "not a title"),
        ("room x: X", ":1: ", "above the first floor"),
        ("inside x: a", ": ", "no room x"),
        ("circle x: none", ": ", "no room x"),
        ("floor a: A\nroom x y: X", ":2: ", "not a title"),
        ("floor a: A\nroom x: X\nfloor b: B\nroom x: X", ":4: ", "has a room already"),
        ("floor a: A\nroom x: X\napart x: why", ":3: ", "not a title"),
        ("floor a: A\nroom x: X\napart x y: why", ": ", "no room y"),
    ] {
        let error = House::parse(text).expect_err(text);
        assert!(error.starts_with(&format!("{FILE}{line}")) && error.contains(fault), "{text}: {error}");
    }
}
