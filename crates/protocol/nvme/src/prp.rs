//! PRPs: where the data of a command lie in the guest's memory (4.3).
//!
//! The first entry names the first page, and may begin within it. If the rest needs one page, the second entry names it. If it needs
//! more, the second entry names a list of entries, which may begin within a page; only a page's last entry can name a further list, and it
//! does so exactly if more entries are needed than fit. Pages are of 4096 bytes (`CC.MPS` 0).

use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{PAGE, Status};
use ginnel_shmem::SharedMemory;

const PAGE_BYTES: u32 = PAGE as u32;
/// Bytes of an entry.
const ENTRY: u32 = 8;
/// Entries that are copied out of a list at once.
const PART: u32 = 32;

/// Stores the pieces of memory in `into`, in the place of what is there: `len` bytes, which two PRP entries describe. Pages that follow one
/// another in memory are one piece. Lists are read once.
///
/// Fails if an entry has an offset that is not allowed, if a page or a list is outside of the guest's memory, or if there are more
/// than `limit` pieces. The work is bounded by `len`, which the caller has limited, whatever the lists contain.
#[inline]
pub fn buffers<M: SharedMemory>(
    memory: &GuestMemory<M>,
    prp1: u64,
    prp2: u64,
    len: u32,
    limit: usize,
    into: &mut Vec<Buffer>,
) -> Result<(), Status> {
    into.clear();
    let offset = (prp1 % PAGE) as u32;
    let first = len.min(PAGE_BYTES - offset);
    let mut pieces = Pieces { memory, limit, region: 0, into };
    if first > 0 {
        if !prp1.is_multiple_of(4) {
            return Err(Status::PRP_OFFSET.for_good());
        }
        pieces.add(prp1, first)?;
    }
    match len - first {
        0 => Ok(()),
        rest if rest <= PAGE_BYTES => pieces.add_page(prp2, rest),
        rest => list(pieces, prp2, rest),
    }
}

/// Adds the pages of a list for `rest` bytes.
fn list<M: SharedMemory>(mut pieces: Pieces<'_, M>, prp2: u64, mut rest: u32) -> Result<(), Status> {
    if !prp2.is_multiple_of(ENTRY.into()) {
        return Err(Status::PRP_OFFSET.for_good());
    }
    let mut at = prp2;
    while rest > 0 {
        let room = (PAGE_BYTES - (at % PAGE) as u32) / ENTRY;
        let needed = rest.div_ceil(PAGE_BYTES);
        // If not all fit, the last one names the next list.
        let follows = needed > room;
        let mut left = if follows { room - 1 } else { needed };
        while left > 0 {
            let mut bytes = [0; (PART * ENTRY) as usize];
            let count = left.min(PART);
            let part = &mut bytes[..(count * ENTRY) as usize];
            pieces.copy_out(at, part)?;
            for entry in part.chunks_exact(ENTRY as usize) {
                let len = rest.min(PAGE_BYTES);
                pieces.add_page(word(entry), len)?;
                rest -= len;
            }
            left -= count;
            at += u64::from(count * ENTRY);
        }
        if follows {
            let mut next = [0; ENTRY as usize];
            pieces.copy_out(at, &mut next)?;
            at = word(&next);
            if !at.is_multiple_of(PAGE) {
                return Err(Status::PRP_OFFSET.for_good());
            }
        }
    }
    Ok(())
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; ENTRY as usize];
    word.copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// The pieces found so far.
struct Pieces<'a, M: SharedMemory> {
    memory: &'a GuestMemory<M>,
    limit: usize,
    /// The region of the last piece, which probably has the next one too.
    region: u16,
    into: &'a mut Vec<Buffer>,
}

impl<M: SharedMemory> Pieces<'_, M> {
    /// Adds a page that begins at its beginning.
    #[inline]
    fn add_page(&mut self, address: u64, len: u32) -> Result<(), Status> {
        if !address.is_multiple_of(PAGE) {
            return Err(Status::PRP_OFFSET.for_good());
        }
        self.add(address, len)
    }

    #[inline]
    fn add(&mut self, address: u64, len: u32) -> Result<(), Status> {
        match self.memory.whole(address, len, self.region) {
            Some(piece) => self.push(piece),
            None => self.add_slowly(address, len),
        }
    }

    /// Adds memory that lies in another region than the last piece, or in several.
    #[cold]
    fn add_slowly(&mut self, mut address: u64, len: u32) -> Result<(), Status> {
        let mut left = len;
        while left > 0 {
            let piece = self.memory.piece(address, left).ok_or(Status::DATA_TRANSFER.for_good())?;
            self.region = piece.region;
            self.push(piece)?;
            // A region ends within the address space, so after an overflow no piece follows.
            address = address.wrapping_add(piece.len.into());
            left -= piece.len;
        }
        Ok(())
    }

    #[inline]
    fn push(&mut self, piece: Buffer) -> Result<(), Status> {
        if let Some(last) = self.into.last_mut()
            && last.region == piece.region
            && last.at + last.len as usize == piece.at
        {
            // All pieces together have at most 4 GiB - 1 bytes.
            last.len += piece.len;
            return Ok(());
        }
        if self.into.len() >= self.limit {
            return Err(Status::INVALID_FIELD.for_good());
        }
        self.into.push(piece);
        Ok(())
    }

    fn copy_out(&self, address: u64, into: &mut [u8]) -> Result<(), Status> {
        let found = self.memory.copy_out(address, self.region, into);
        found.then_some(()).ok_or(Status::DATA_TRANSFER.for_good())
    }
}

/// Describes memory for a command, as a driver does: `pages` are guest addresses, the first one with any offset that is a multiple of
/// 4, the others multiples of 4096; the data end in the last one. `lists` are free pages for the lists; the first list begins `skip`
/// entries into its page. Returns both PRP entries; `None` if there are too few lists, or one is outside of the guest's memory.
pub fn describe<M: SharedMemory>(
    memory: &GuestMemory<M>,
    pages: &[u64],
    lists: &[u64],
    skip: usize,
) -> Option<(u64, u64)> {
    let (first, rest) = pages.split_first()?;
    let [_, _, ..] = rest else { return Some((*first, rest.first().copied().unwrap_or(0))) };
    const ENTRIES: usize = PAGE as usize / ENTRY as usize;
    let mut lists = lists.iter();
    let mut begin = skip % ENTRIES;
    let prp2 = lists.next()? + (begin * ENTRY as usize) as u64;
    let (mut at, mut left) = (prp2, rest);
    loop {
        let room = ENTRIES - begin;
        let follows = left.len() > room;
        let (here, behind) = left.split_at(if follows { room - 1 } else { left.len() });
        let next = if follows { Some(*lists.next()?) } else { None };
        let words: Vec<u8> = here.iter().chain(&next).flat_map(|word| word.to_le_bytes()).collect();
        let area = memory.at_guest(at, words.len())?;
        area.memory.write(area.at, &words);
        match next {
            None => return Some((*first, prp2)),
            Some(next) => (at, begin, left) = (next, 0, behind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_guest_memory::Region;
    use ginnel_shmem::Mapping;

    const GUEST: u64 = 0x10_0000;
    const PAGES: u64 = 600;
    /// The pages from here on are for lists.
    const LISTS: u64 = 590;

    fn page(number: u64) -> u64 {
        GUEST + PAGE * number
    }

    fn guest() -> GuestMemory<Mapping> {
        let region = |guest, pages| Region {
            guest,
            user: guest,
            memory: Mapping::anonymous((pages * PAGE) as usize).unwrap(),
        };
        // Two regions that meet.
        GuestMemory::new(vec![region(GUEST, 580), region(page(580), PAGES - 580)]).unwrap()
    }

    fn find(memory: &GuestMemory<Mapping>, prps: (u64, u64), len: u32) -> Result<Vec<(u64, u32)>, Status> {
        let mut found = vec![Buffer { region: 9, len: 9, at: 9 }];
        buffers(memory, prps.0, prps.1, len, 600, &mut found)?;
        Ok(found.iter().map(|b| (memory.guest_address(b), b.len)).collect())
    }

    #[test]
    fn one_or_two_pages_need_no_list() {
        let m = guest();
        assert_eq!(find(&m, (1, 1), 0), Ok(vec![]));
        assert_eq!(find(&m, (page(1), 7), 4096), Ok(vec![(page(1), 4096)]), "the second entry is not used");
        assert_eq!(find(&m, (page(1) + 4092, 0), 4), Ok(vec![(page(1) + 4092, 4)]));
        assert_eq!(find(&m, (page(1) + 512, page(7)), 4096), Ok(vec![(page(1) + 512, 3584), (page(7), 512)]));
        assert_eq!(find(&m, (page(1) + 512, page(2)), 4096), Ok(vec![(page(1) + 512, 4096)]), "merged");
        assert_eq!(find(&m, (page(579), page(580)), 8192), Ok(vec![(page(579), 4096), (page(580), 4096)]));
    }

    #[test]
    fn bad_entries_are_refused() {
        let m = guest();
        let (offset, outside) = (Status::PRP_OFFSET.for_good(), Status::DATA_TRANSFER.for_good());
        assert_eq!(find(&m, (page(1) + 2, 0), 512), Err(offset));
        assert_eq!(
            find(&m, (page(1), page(2) + 4), 4100),
            Err(offset),
            "the second page begins at its beginning"
        );
        assert_eq!(find(&m, (page(1), page(LISTS) + 4), 8196), Err(offset), "a list is aligned to 8");
        for address in [0, GUEST - PAGE, page(PAGES), u64::MAX - 4095] {
            assert_eq!(find(&m, (address, 0), 4096), Err(outside), "{address:#x}");
            assert_eq!(find(&m, (page(0), address), 8192), Err(outside), "{address:#x}");
            assert_eq!(find(&m, (page(0), address), 8193), Err(outside), "{address:#x}");
        }
        let prps = describe(&m, &[page(1), page(2), page(3) + 8], &[page(LISTS)], 0).unwrap();
        assert_eq!(find(&m, prps, 8200), Err(offset), "an entry of a list has no offset");
        let prps = describe(&m, &[page(1), page(3), page(5)], &[page(LISTS)], 0).unwrap();
        let mut into = Vec::new();
        assert_eq!(buffers(&m, prps.0, prps.1, 8200, 2, &mut into), Err(Status::INVALID_FIELD.for_good()));
        assert_eq!(buffers(&m, prps.0, prps.1, 8200, 3, &mut into), Ok(()));
    }

    #[test]
    fn lists_continue_in_the_last_entry_of_a_page() {
        let m = guest();
        for skip in [0, 1, 300, 510, 511] {
            for count in [3, 4, 211, 212, 213, 214, 512, 513, 514, 515, 578] {
                // Every second page, so that nothing is merged; each page is used twice.
                let pages: Vec<u64> = (0..count).map(|i| page(2 * i % 580)).collect();
                let prps =
                    describe(&m, &pages, &[page(LISTS), page(LISTS + 3), page(LISTS + 1)], skip).unwrap();
                let len = (count * PAGE) as u32 - 1;
                let found = find(&m, prps, len).unwrap();
                let mut wanted: Vec<_> = pages.iter().map(|page| (*page, 4096)).collect();
                wanted.last_mut().unwrap().1 -= 1;
                assert_eq!(found, wanted, "{count} pages, {skip} entries skipped");
            }
        }
    }

    #[test]
    fn a_list_that_names_itself_ends_with_the_data() {
        let m = guest();
        let list = page(LISTS);
        let words: Vec<u8> = (0..512).flat_map(|_| list.to_le_bytes()).collect();
        let area = m.at_guest(list, 4096).unwrap();
        area.memory.write(area.at, &words);
        let mut into = Vec::new();
        assert_eq!(buffers(&m, page(1), list, 2 << 20, 10_000, &mut into), Ok(()));
        assert_eq!(into.len(), 512);
        // The next list is never one with an offset.
        area.memory.store_relaxed_u64(area.at + 4088, list + 8);
        assert_eq!(
            buffers(&m, page(1), list, 3 << 20, 10_000, &mut into),
            Err(Status::PRP_OFFSET.for_good())
        );
    }
}
