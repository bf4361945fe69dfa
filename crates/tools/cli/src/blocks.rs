//! `ginnel blocks`.

use crate::inspect::{Block, Inspect};
use crate::list::{self, Listed, or_dash};
use crate::output;
use crate::status::period;
use anyhow::Result;

/// Shows the blocks of segments: owner, rights, size, age, and who has them open.
///
/// On the host, this shows all blocks. In a VM, it shows those of the segments in which the VM has a share.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    which: list::Which,
}

pub fn run(args: Args) -> Result<()> {
    list::run::<Block>(&args.which)
}

impl Listed for Block {
    const NAME: &'static str = "blocks";
    const TITLES: &'static [&'static str] = &["SEGMENT", "BLOCK", "SIZE", "OWNER", "RIGHTS", "AGE", "OPEN"];

    fn of(inspect: &Inspect) -> (&[Self], usize) {
        (&inspect.blocks, inspect.blocks_total)
    }

    fn segment(&self) -> &str {
        &self.segment
    }

    fn row(&self) -> Vec<String> {
        let mut open: Vec<String> =
            self.handles.iter().map(|user| format!("{user}: {}", user.rights)).collect();
        let more = self.handles_total.saturating_sub(self.handles.len());
        open.extend((more > 0).then(|| format!("{more} more")));
        vec![
            self.segment.clone(),
            or_dash(&*self.name),
            output::bytes(self.size),
            owner(self),
            rights(self),
            period(self.age_s),
            or_dash(open.join(", ")),
        ]
    }
}

fn owner(block: &Block) -> String {
    let owner = match &block.owner {
        Some(owner) => owner.to_string(),
        None => format!("(ended)@{}", block.owner_member),
    };
    if block.persistent { owner + ", persistent" } else { owner }
}

/// Returns the rights of everybody, and then the rights that differ for some.
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
    use crate::list::table;

    const ANSWER: &str = r#"{"blocks_total": 3, "blocks": [
        {"segment": "web", "name": "x", "size": 4096, "age_s": 61, "persistent": true, "others": "read",
         "owner": null, "owner_member": "host", "grants": [{"member": "vm-a", "endpoint": null, "rights": "read-write"},
          {"member": "vm-a", "endpoint": 7, "rights": "none"}], "handles": []},
        {"segment": "db", "name": "", "size": 10, "age_s": 1, "persistent": false, "others": "none",
         "owner": {"endpoint": 3, "name": "p", "member": "vm-a", "pid": 9}, "owner_member": "vm-a", "grants": [],
         "handles": [{"endpoint": 3, "name": "p", "member": "vm-a", "pid": 9, "rights": "read-write", "left": null}]}]}"#;

    #[test]
    fn blocks_are_shown_with_owner_and_rights() {
        let inspect = crate::inspect::parse(ANSWER).unwrap();
        let all = table::<Block>(&inspect, None).to_string();
        for line in [
            "web      x      4 KiB  (ended)@host, persistent  read, vm-a: read-write, 7@vm-a: none  1 min  -",
            "db       -      10 B   3 p@vm-a                  none                                  1 s    3 p@vm-a: read-write",
        ] {
            assert!(all.lines().any(|l| l == line), "{line:?} is missing in\n{all}");
        }
        assert_eq!(table::<Block>(&inspect, Some("db")).to_string().lines().count(), 2);
        assert!(table::<Block>(&inspect, Some("none")).is_empty());
    }
}
