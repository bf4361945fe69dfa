//! `ginnel blocks`.

use crate::inspect::{Block, Inspect};
use crate::output::{self, Table};
use crate::status::period;
use anyhow::{Context, Result};
use ginnel::Daemon;
use serde_json::{Value, json};

/// Shows the blocks of segments: owner, rights, size, age, who has them open.
///
/// On the host: all. In a VM: those of the segments that it has a share in.
#[derive(clap::Args)]
pub struct Args {
    /// Those of this segment only.
    #[arg(value_name = "SEGMENT")]
    segment: Option<String>,
    /// Print what the daemon says of them, as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    let text = Daemon::connect()?.inspect().context("asking the daemon for its status")?;
    if args.json {
        return output::json(&selected(&text, "blocks", args.segment.as_deref())?);
    }
    let inspect = Inspect::parse(&text)?;
    let table = table(&inspect, args.segment.as_deref());
    if table.is_empty() {
        output::note("ginnel: there are no blocks");
        return Ok(());
    }
    output::line(table.to_string())?;
    let (shown, total) = (inspect.blocks.len(), inspect.blocks_total);
    if shown < total {
        output::note(format!("ginnel: {shown} of {total} blocks are shown"));
    }
    Ok(())
}

/// One list of the daemon's answer, of one segment or of all.
pub fn selected(text: &str, list: &str, segment: Option<&str>) -> Result<Value> {
    let mut value: Value = serde_json::from_str(text).context("the daemon's status is no JSON")?;
    let Value::Array(mut all) = value[list].take() else { return Ok(json!([])) };
    all.retain(|one| segment.is_none_or(|segment| one["segment"] == segment));
    Ok(Value::Array(all))
}

fn table(inspect: &Inspect, segment: Option<&str>) -> Table {
    let mut table = Table::new(&["SEGMENT", "BLOCK", "SIZE", "OWNER", "RIGHTS", "AGE", "OPEN"]);
    let blocks = inspect.blocks.iter().filter(|b| segment.is_none_or(|segment| b.segment == segment));
    for block in blocks {
        let open: Vec<String> = block.handles.iter().map(|user| format!("{user}: {}", user.rights)).collect();
        table.row([
            block.segment.clone(),
            if block.name.is_empty() { "-".into() } else { block.name.clone() },
            output::bytes(block.size),
            owner(block),
            rights(block),
            period(block.age_s),
            if open.is_empty() { "-".into() } else { open.join(", ") },
        ]);
    }
    table
}

fn owner(block: &Block) -> String {
    let owner = match &block.owner {
        Some(owner) => owner.to_string(),
        None => format!("(ended)@{}", block.owner_member),
    };
    if block.persistent { owner + ", persistent" } else { owner }
}

/// What everybody may, then who may something else.
fn rights(block: &Block) -> String {
    let mut rights = vec![block.others.clone()];
    rights.extend(block.grants.iter().map(|grant| match grant.endpoint {
        Some(endpoint) => format!("{endpoint}@{}: {}", grant.member, grant.rights),
        None => format!("{}: {}", grant.member, grant.rights),
    }));
    rights.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"blocks_total": 3, "blocks": [
        {"segment": "web", "name": "x", "size": 4096, "age_s": 61, "persistent": true, "others": "read",
         "owner": null, "owner_member": "host", "grants": [{"member": "vm-a", "endpoint": null, "rights": "read-write"},
          {"member": "vm-a", "endpoint": 7, "rights": "none"}], "handles": []},
        {"segment": "db", "name": "", "size": 10, "age_s": 1, "persistent": false, "others": "none",
         "owner": {"endpoint": 3, "name": "p", "member": "vm-a", "pid": 9}, "owner_member": "vm-a", "grants": [],
         "handles": [{"endpoint": 3, "name": "p", "member": "vm-a", "pid": 9, "rights": "read-write", "left": null}]}]}"#;

    #[test]
    fn blocks_are_shown_with_owner_and_rights() {
        let inspect = Inspect::parse(ANSWER).unwrap();
        let all = table(&inspect, None).to_string();
        for line in [
            "web      x      4 KiB  (ended)@host, persistent  read, vm-a: read-write, 7@vm-a: none  1 min  -",
            "db       -      10 B   3 p@vm-a                  none                                  1 s    3 p@vm-a: read-write",
        ] {
            assert!(all.lines().any(|l| l == line), "{line:?} is missing in\n{all}");
        }
        assert_eq!(table(&inspect, Some("db")).to_string().lines().count(), 2);
        assert!(table(&inspect, Some("none")).is_empty());
        assert_eq!(selected(ANSWER, "blocks", Some("db")).unwrap()[0]["size"], 10);
        assert_eq!(selected("{}", "blocks", None).unwrap(), json!([]));
    }
}
