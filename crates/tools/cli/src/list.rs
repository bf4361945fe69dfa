//! The common part of `ginnel blocks` and `ginnel locks`: lists from the daemon's status, for one segment or for all.

use crate::inspect::Inspect;
use crate::output::{self, Table};
use anyhow::{Context, Result};
use ginnel::Daemon;
use serde_json::{Value, json};

// Which objects to list, and how. This type has a name of its own, because clap identifies groups of arguments by the
// names of their types.
#[derive(clap::Args)]
pub struct Which {
    /// Show only those of this segment.
    #[arg(value_name = "SEGMENT")]
    segment: Option<String>,
    /// Print the daemon's answer as JSON.
    #[arg(long)]
    json: bool,
}

/// An object of which the daemon has a list.
pub trait Listed {
    /// The list's name, in the daemon's answer and in messages.
    const NAME: &'static str;
    /// The titles of the columns.
    const TITLES: &'static [&'static str];

    /// Returns the objects in the daemon's answer, and how many there are in all.
    fn of(inspect: &Inspect) -> (&[Self], usize)
    where
        Self: Sized;
    /// Returns the name of its segment.
    fn segment(&self) -> &str;
    /// Returns its cells.
    fn row(&self) -> Vec<String>;
}

pub fn run<T: Listed>(which: &Which) -> Result<()> {
    let text = Daemon::connect()?.inspect().context("asking the daemon for its status")?;
    if which.json {
        return output::json(&selected(&text, T::NAME, which.segment.as_deref())?);
    }
    let inspect = crate::inspect::parse(&text)?;
    let table = table::<T>(&inspect, which.segment.as_deref());
    if table.is_empty() {
        output::note(format!("ginnel: there are no {}", T::NAME));
        return Ok(());
    }
    output::line(table.to_string())?;
    let (shown, total) = T::of(&inspect);
    if shown.len() < total {
        output::note(format!("ginnel: {} of {total} {} are shown", shown.len(), T::NAME));
    }
    Ok(())
}

pub fn table<T: Listed>(inspect: &Inspect, segment: Option<&str>) -> Table {
    let mut table = Table::new(T::TITLES);
    let all = T::of(inspect).0.iter();
    for one in all.filter(|one| segment.is_none_or(|segment| one.segment() == segment)) {
        table.row(one.row());
    }
    table
}

/// Returns one list of the daemon's answer, for one segment or for all.
fn selected(text: &str, list: &str, segment: Option<&str>) -> Result<Value> {
    let mut value: Value = serde_json::from_str(text).context("the daemon's status is not JSON")?;
    let Value::Array(mut all) = value[list].take() else { return Ok(json!([])) };
    all.retain(|one| segment.is_none_or(|segment| one["segment"] == segment));
    Ok(Value::Array(all))
}

/// Returns a text for a cell: a dash if it is empty.
pub fn or_dash(text: impl Into<String>) -> String {
    let text = text.into();
    if text.is_empty() { "-".into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_of_one_segment_or_of_all() {
        let text = r#"{"blocks": [{"segment": "web", "size": 1}, {"segment": "db", "size": 10}]}"#;
        assert_eq!(selected(text, "blocks", Some("db")).unwrap()[0]["size"], 10);
        assert_eq!(selected(text, "blocks", None).unwrap().as_array().unwrap().len(), 2);
        assert_eq!(selected("{}", "blocks", None).unwrap(), json!([]));
        assert!(selected("no", "blocks", None).is_err());
    }
}
