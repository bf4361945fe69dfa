//! The manual and the example of the configuration name every key, and no key that does not exist.

use super::*;

const MAN: &str = include_str!("../../../../../../docs/man/ginneld.8");
const EXAMPLE: &str = include_str!("../../../../../../packaging/ginneld.toml");
/// The tables by their names in the manual, each with a text in which only the key `?` is wrong.
const TABLES: [(&str, &str); 6] = [
    ("[daemon]", "[daemon]\n\"?\" = 1"),
    ("[host]", "[host]\n\"?\" = 1"),
    ("[limits]", "[limits]\n\"?\" = 1"),
    ("[sockets]", "[sockets]\n\"?\" = 1"),
    ("[vm.NAME]", "[vm.a]\n\"?\" = 1"),
    ("[segment.NAME]", "[segment.a]\n\"?\" = 1"),
];

/// Returns the keys that a table can have: serde's error for an unknown key lists them all.
fn keys(text: &str) -> BTreeSet<String> {
    let error = toml::from_str::<FileSpec>(text).unwrap_err().message().to_owned();
    let (_, keys) = error.split_once("expected ").unwrap();
    keys.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Returns the keys of a section of the manual: those that begin an entry.
fn described(section: &str) -> BTreeSet<String> {
    let (_, text) = MAN.split_once(&format!(".SS {section}\n")).expect(section);
    let text = text.split("\n.S").next().unwrap();
    let entries = text.split(".TP\n").skip(1).map(|entry| entry.split_whitespace().nth(1).unwrap());
    entries.map(str::to_owned).collect()
}

/// Returns the example with every key that is commented out.
fn uncommented() -> String {
    let key = |line: &str| {
        let rest = line.strip_prefix('#')?.trim_start();
        let (key, _) = rest.split_once(" = ")?;
        let is_key = key.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        (is_key || rest.starts_with('[')).then(|| rest.to_owned())
    };
    let table =
        |line: &str| line.strip_prefix('#').map(str::trim).filter(|l| l.starts_with('[')).map(str::to_owned);
    EXAMPLE
        .lines()
        .map(|line| key(line).or_else(|| table(line)).unwrap_or_else(|| line.into()) + "\n")
        .collect()
}

#[test]
fn the_manual_has_every_key_and_no_other() {
    for (section, text) in TABLES {
        assert_eq!(described(section), keys(text), "{section}");
    }
    let of_a_vm = keys("[vm.a.limits]\n\"?\" = 1");
    let all = described("[limits]");
    assert!(of_a_vm.is_subset(&all), "{of_a_vm:?}");
    // "Those from endpoints_per_member on can also stand in [vm.NAME.limits]".
    let (_, from) = MAN.split_once(".BR endpoints_per_member").unwrap();
    let from = from.split("\n.S").next().unwrap();
    assert_eq!(from.matches(".TP").count() + 1, of_a_vm.len());
}

#[test]
fn the_manual_has_every_limit_with_its_default() {
    let rows = ginnel_broker::limits::rows();
    for ginnel_broker::limits::Row { name, default, .. } in &rows {
        let number = default.bytes().all(|b| b.is_ascii_digit());
        let value = if number { default.clone() } else { format!("\\(dq{default}\\(dq") };
        let entry = format!(".TP\n.BR {name} \" = {value}\"\n");
        assert_eq!(MAN.matches(&entry).count(), 1, "{entry}");
    }
    let order = |of_member| rows.iter().skip_while(move |row| row.of_member != of_member);
    assert!(order(true).all(|row| row.of_member));
    assert_eq!(order(true).next().map(|row| row.name), Some("endpoints_per_member"));
}

#[test]
fn an_impossible_limit_is_refused_in_each_table() {
    for text in
        ["[limits]\nmax_clients = 0\n", "[limits]\nqueue = \"1K\"\n", "[limits]\ndefault_ring = \"1\"\n"]
    {
        let problem = Config::parse(text, Path::new("file")).unwrap_err().to_string();
        assert!(problem.contains("file: limits.") && problem.contains("choose"), "{problem}");
    }
    let own = "[limits]\nbacklog = 7\n[vm.a]\n[vm.a.limits]\nendpoints_per_member = 3\n";
    let config = Config::parse(own, Path::new("file")).unwrap();
    let vm = config.vms.values().next().unwrap();
    assert_eq!((config.limits.backlog, config.limits.member.endpoints_per_member), (7, 4096));
    assert_eq!((vm.limits.endpoints_per_member, vm.limits.listeners_per_endpoint), (3, 64));
}

#[test]
fn the_example_has_every_key_and_no_other() {
    let text = uncommented();
    let tables: toml::Table = text.parse().unwrap();
    assert!(toml::from_str::<FileSpec>(&text).is_ok());
    for (section, lone) in TABLES {
        let name = section.trim_matches(['[', ']']);
        // All tables of the same kind are taken together: the example shows slices in a segment of their own.
        let there: BTreeSet<&String> = match name.strip_suffix(".NAME") {
            None => tables[name].as_table().unwrap().keys().collect(),
            Some(kind) => {
                tables[kind].as_table().unwrap().values().flat_map(|t| t.as_table().unwrap().keys()).collect()
            }
        };
        let mut wanted = keys(lone);
        wanted.remove("limits"); // For a VM this is a table of its own, as the example explains.
        assert_eq!(there, wanted.iter().collect(), "{section}");
    }
}
