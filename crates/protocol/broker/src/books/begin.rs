//! The books of a new daemon.

use super::{Books, Member, Segment};
use crate::memory::MemoryFile;
use crate::objects::Change;
use crate::recipients::Recipients;
use crate::record::{FORMAT, Record};
use crate::text::{Hex16, Text};
use tracing::warn;

impl Books {
    /// Prepares the books for a new daemon. After a reboot of the host, nothing of the earlier programs and VMs is left.
    pub fn begin(&mut self, boot_id: Hex16) {
        let mut records = Vec::new();
        if self.boot_id != boot_id {
            // A reboot has emptied their memory.
            records.extend(Change::rebooted(self).map(Record::Object));
            records.extend(self.endpoints.keys().map(|&endpoint| Record::Dead { endpoint }));
            records.extend(self.members.keys().map(|&member| Record::Left { member }));
            // No file is left at an old place, and nobody has one.
            let nobody = Some(Recipients::default());
            let old = self.segments.values().filter(|old| !old.own_folder || old.recipients != nobody);
            records.extend(old.map(|old| {
                Segment { own_folder: true, recipients: nobody.clone(), ..old.clone() }.declaration()
            }));
            let waiting = self.segments.values().filter(|segment| segment.former.is_some());
            records.extend(waiting.map(|s| Record::SegmentFormer { name: Text(s.name), processes: None }));
        }
        records.push(Record::Start {
            boot_id,
            generation: self.generation + 1,
            next_epoch: self.numbers.latest(),
            next_listener: self.next_listener.max(1),
            next_channel: self.next_channel.max(1),
            next_object: self.next_object.max(1),
            epochs: self.numbers.dump(),
            format: FORMAT,
        });
        for record in records {
            if let Err(error) = self.apply(&record) {
                warn!(%error, ?record, "the books do not accept this; please report it");
            }
        }
    }

    /// Keeps what is declared, and nothing about programs, QEMUs and memory, because the journal does not say all of that. They may live,
    /// and have memory, but these books do not know of it.
    pub fn distrust(&mut self) {
        let old = std::mem::take(self);
        let members =
            old.members.values().map(|member| Member { qemu: None, session: None, ..member.clone() });
        let members: Vec<Member> = members.collect();
        let segments = old.segments.values().map(|segment| Segment {
            file: MemoryFile::Unknown,
            recipients: None,
            ..segment.clone()
        });
        let records = old.dump().take(1).chain(members.iter().flat_map(Member::dump));
        for record in records.chain(segments.map(|segment| segment.declaration())) {
            if let Err(error) = self.apply(&record) {
                warn!(%error, ?record, "the books do not accept this; please report it");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_reboot_no_file_is_at_an_old_place() {
        let old = r#"{"segment":{"name":"web","uuid":"000102030405060708090a0b0c0d0e0f","size":4194304,
            "members":[0],"runtime":null}}"#;
        let mut books = Books::default();
        books.begin(Hex16([1; 16]));
        books.apply(&serde_json::from_str(old).unwrap()).unwrap();
        for (boot, own_folder) in [(1, false), (2, true)] {
            books.begin(Hex16([boot; 16]));
            assert!(books.segments.values().all(|segment| segment.own_folder == own_folder));
            assert!(books.segments.values().all(|segment| segment.recipients.is_some() == own_folder));
        }
    }
}
