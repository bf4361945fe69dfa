//! Doorbell vectors: which vectors of a member serve which segment, and which of them the daemon announces to each QEMU.
//!
//! A program on the host holds the eventfd of its own vector and those of the peers that it rings, and can do to them whatever
//! the kernel allows; for example, it can swallow rings. Therefore a vector serves the programs of one segment, and nobody
//! outside that segment gets it: neither programs nor VMs.
//!
//! A VM's vectors are the MSI-X vectors of its control device, of which there are few. Its segments divide them among themselves,
//! and a segment that is declared when none is left has to share one. The host's vectors are plain eventfds, so each segment gets
//! new ones. They are numbered across all segments, because a lock's page names a doorbell by member and vector.
//!
//! For QEMU a peer is a list of eventfds, and a guest rings the n-th of them. The daemon announces to each QEMU the eventfds
//! that it may ring, and no others, so its lists differ from those of other QEMUs; [`Books::position`] translates.

use crate::books::{Books, InvalidRecord, Segment};
pub use crate::told::Told;
use ginnel_layout::control::DAEMON_VECTOR;
use ginnel_layout::{HOST_MEMBER, Name};
use std::collections::{BTreeMap, BTreeSet};

/// The vectors of the host for each segment. More of them mean fewer needless wake-ups of others in the segment, but a longer
/// list for each VM that joins.
const OF_HOST: usize = 8;
/// The vectors of a VM for each segment, as long as enough are free.
const OF_VM: usize = 4;
/// The largest vector: a doorbell in a lock's page has 16 bits for it.
const MAX_VECTOR: u32 = u16::MAX as u32;

impl Books {
    /// Returns whether a member can ring another member's vector directly.
    pub(crate) fn knows(&self, member: u32, peer: u32, vector: u32) -> bool {
        member == HOST_MEMBER || self.position(member, peer, vector).is_some()
    }

    /// Returns the vectors that serve a member's programs in a segment.
    pub fn vectors_of(&self, segment: &Name, member: u32) -> &[u32] {
        self.segments.get(segment).and_then(|s| s.vectors.get(&member)).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn vectors_allotted(
        &mut self,
        segment: &Name,
        member: u32,
        vectors: &[u32],
    ) -> Result<(), InvalidRecord> {
        let segment = self.segments.get_mut(segment).ok_or(InvalidRecord("vectors of an unknown segment"))?;
        if !segment.members.contains(&member) {
            return Err(InvalidRecord("vectors of a member without a share"));
        }
        segment.vectors.insert(member, vectors.to_vec());
        Ok(())
    }

    /// Chooses the vectors of a member for a segment. Each VM has `vectors` in all.
    pub fn allot(&self, segment: &Name, member: u32, vectors: u32) -> Vec<u32> {
        match member {
            HOST_MEMBER => self.allot_of_host(segment),
            _ => self.allot_of_vm(segment, member, vectors),
        }
    }

    /// Returns how often each vector of a member is allotted, not counting the segment `but`.
    pub fn allotted(&self, member: u32, but: &Name) -> BTreeMap<u32, u32> {
        let mut allotted = BTreeMap::new();
        let others = self.segments.values().filter(|s| s.name != *but);
        for vector in others.filter_map(|s| s.vectors.get(&member)).flatten() {
            *allotted.entry(*vector).or_default() += 1;
        }
        allotted
    }

    /// Chooses vectors of a VM from `1..vectors` for a segment that has none of them.
    fn allot_of_vm(&self, segment: &Name, member: u32, vectors: u32) -> Vec<u32> {
        let allotted = self.allotted(member, segment);
        let free: Vec<u32> = (1..vectors).filter(|vector| !allotted.contains_key(vector)).collect();
        let share = OF_VM.min(free.len() / 4).max(1);
        match free.is_empty() {
            false => free.into_iter().take(share).collect(),
            true => {
                allotted.into_iter().min_by_key(|(_, times)| *times).map(|(v, _)| v).into_iter().collect()
            }
        }
    }

    /// Chooses numbers for new vectors of the host. A QEMU may still have a vector of an earlier segment, so its number is not
    /// used again.
    fn allot_of_host(&self, segment: &Name) -> Vec<u32> {
        let mut taken: BTreeSet<u32> = self.allotted(HOST_MEMBER, segment).into_keys().collect();
        taken.extend(self.vectors_of(segment, HOST_MEMBER));
        let told = self.members.values().filter_map(|m| m.qemu.as_ref()?.told.get(&HOST_MEMBER));
        taken.extend(told.flatten());
        (1..=MAX_VECTOR).filter(|vector| !taken.contains(vector)).take(OF_HOST).collect()
    }

    /// Returns the doorbells that a QEMU of this member may ring and that were not announced to it yet. `vectors` is the
    /// largest number of doorbells that it accepts of one peer.
    pub fn untold(&self, member: u32, told: &Told, vectors: u32) -> Told {
        let mut untold = Told::new();
        for peer in self.neighbours(member) {
            let known = told.get(&peer).map_or(&[][..], Vec::as_slice);
            let daemon = (peer == HOST_MEMBER).then_some(DAEMON_VECTOR);
            let shared = self.segments.values().filter(|s| s.members.contains(&member));
            let lists: Vec<&[u32]> = shared.filter_map(|s| s.vectors.get(&peer)).map(Vec::as_slice).collect();
            // If there are more vectors than it accepts, it gets the first one of each segment before the second one of any.
            let longest = lists.iter().map(|list| list.len()).max().unwrap_or(0);
            let turns = (0..longest).flat_map(|n| lists.iter().filter_map(move |list| list.get(n).copied()));
            let mut new = Vec::new();
            for vector in daemon.into_iter().chain(turns) {
                if known.len() + new.len() < vectors as usize
                    && !known.contains(&vector)
                    && !new.contains(&vector)
                {
                    new.push(vector);
                }
            }
            if !new.is_empty() {
                untold.insert(peer, new);
            }
        }
        untold
    }

    /// Returns the index at which a member's programs ring a peer's vector; `None` if its QEMU was not told of the vector.
    pub fn position(&self, member: u32, peer: u32, vector: u32) -> Option<u32> {
        if member == peer {
            return Some(vector);
        }
        let told = self.members.get(&member)?.qemu.as_ref()?.told.get(&peer)?;
        (0..).zip(told).find(|(_, told)| **told == vector).map(|(position, _)| position)
    }

    /// Returns the vector for another program of a member in a segment: the least used of those that serve the segment and that
    /// can be announced to all of its VMs.
    pub fn least_used_vector(&self, segment: &Name, member: u32, vectors: u32) -> u32 {
        let serving = self.vectors_of(segment, member);
        let known = match member {
            HOST_MEMBER => &serving[..serving.len().min(self.known_of_host(segment, vectors))],
            _ => serving,
        };
        let users = |vector: &u32| self.index.users_of(segment, member, *vector);
        known.iter().copied().min_by_key(users).unwrap_or(DAEMON_VECTOR)
    }

    /// Returns how many of the host's vectors in a segment can be announced to all of its VMs.
    fn known_of_host(&self, segment: &Name, vectors: u32) -> usize {
        let Some(members) = self.segments.get(segment).map(|s| &s.members) else { return 0 };
        let with_host = |member: &u32| {
            let both = |s: &&Segment| s.members.contains(member) && s.members.contains(&HOST_MEMBER);
            self.segments.values().filter(both).count()
        };
        let most = members.iter().filter(|m| **m != HOST_MEMBER).map(with_host).max().unwrap_or(1);
        ((vectors.saturating_sub(1) as usize) / most.max(1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use crate::text::Text;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    /// Returns books with members 0 (the host), 1 and 2, and segments with these members and all their vectors.
    fn books(vectors: u32, segments: &[(&str, &[u32])]) -> Books {
        let mut books = Books::default();
        let members: BTreeSet<u32> =
            segments.iter().flat_map(|(_, members)| members.iter().copied()).collect();
        for number in members {
            let name = Text(name(&format!("m{number}")));
            books.apply(&Record::Member { number, name, runtime: None, retired: false }).unwrap();
        }
        for (segment, members) in segments {
            add(&mut books, vectors, segment, members);
        }
        books
    }

    fn add(books: &mut Books, vectors: u32, segment: &str, members: &[u32]) {
        let record = format!(
            r#"{{"segment":{{"name":"{segment}","uuid":"{:032x}","size":4194304,"members":{members:?},"runtime":null}}}}"#,
            1
        );
        books.apply(&serde_json::from_str(&record).unwrap()).unwrap();
        for &member in members {
            let vectors = books.allot(&name(segment), member, vectors);
            books.apply(&Record::Vectors { segment: Text(name(segment)), member, vectors }).unwrap();
        }
    }

    #[test]
    fn a_vector_serves_one_segment_as_long_as_there_are_enough() {
        let names: Vec<String> = (0..13).map(|n| format!("s{n:02}")).collect();
        let segments: Vec<(&str, &[u32])> = names.iter().map(|n| (n.as_str(), &[0, 1][..])).collect();
        let books = books(32, &segments);
        for member in [0, 1] {
            let mut all: Vec<u32> =
                segments.iter().flat_map(|(s, _)| books.vectors_of(&name(s), member).to_vec()).collect();
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count, "member {member}");
            assert!(all.iter().all(|v| *v > 0));
        }
        assert_eq!(books.vectors_of(&name("s00"), 1).len(), 4);
        assert_eq!(books.vectors_of(&name("s00"), 0).len(), 8);
    }

    #[test]
    fn a_vm_without_free_vectors_shares_the_least_shared() {
        let books = books(3, &[("a", &[1]), ("b", &[1]), ("c", &[1]), ("d", &[1])]);
        let of = |s: &str| books.vectors_of(&name(s), 1).to_vec();
        assert_eq!([of("a"), of("b"), of("c"), of("d")], [vec![1], vec![2], vec![1], vec![2]]);
    }

    #[test]
    fn a_qemu_is_told_of_segments_that_it_shares_and_of_nothing_else() {
        let mut books = books(32, &[("ab", &[0, 1, 2]), ("host", &[0]), ("b", &[0, 2])]);
        let told = books.untold(1, &Told::new(), 32);
        assert_eq!(told.keys().copied().collect::<Vec<_>>(), [0, 2]);
        let expected: Vec<u32> =
            std::iter::once(0).chain(books.vectors_of(&name("ab"), 0).iter().copied()).collect();
        assert_eq!(told[&0], expected);
        assert_eq!(told[&2], books.vectors_of(&name("ab"), 2));
        assert!(books.untold(1, &told, 32).is_empty());
        // The doorbells of a segment that is declared later come at the end of each list.
        let qemu = crate::process::Process { pid: 1, started: 1 };
        books.apply(&Record::joined(1, qemu, told.clone())).unwrap();
        add(&mut books, 32, "later", &[0, 1, 2]);
        let more = books.untold(1, &told, 32);
        assert_eq!(more[&0], books.vectors_of(&name("later"), 0));
        let first = books.vectors_of(&name("ab"), 0)[0];
        assert_eq!(books.position(1, 0, first), Some(1));
        assert_eq!(books.position(1, 0, more[&0][0]), None, "not told yet");
        assert_eq!(books.position(1, 0, books.vectors_of(&name("b"), 0)[0]), None, "not shared with it");
    }

    #[test]
    fn a_list_that_is_cut_has_vectors_of_each_segment() {
        let books = books(8, &[("a", &[0, 1]), ("b", &[0, 1]), ("c", &[0, 1])]);
        let told = books.untold(1, &Told::new(), 8);
        assert_eq!(told[&0].len(), 8);
        for segment in ["a", "b", "c"] {
            let vector = books.least_used_vector(&name(segment), 0, 8);
            assert!(told[&0].contains(&vector), "{segment}");
        }
    }

    #[test]
    fn a_number_that_a_qemu_may_have_is_not_used_again() {
        let mut books = books(32, &[("a", &[0, 1])]);
        let told = books.untold(1, &Told::new(), 32);
        let qemu = crate::process::Process { pid: 1, started: 1 };
        books.apply(&Record::joined(1, qemu, told.clone())).unwrap();
        books.apply(&Record::SegmentRemoved { name: Text(name("a")) }).unwrap();
        add(&mut books, 32, "b", &[0]);
        assert!(books.vectors_of(&name("b"), 0).iter().all(|v| !told[&0].contains(v)));
    }
}
