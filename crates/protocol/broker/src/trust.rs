//! Whether a journal says all about the memory that is in use.
//!
//! If it does not, its daemon would give out memory that others have. Its lines show what is wrong within it. Nothing in it shows that its
//! end is missing, or that it is an older copy. So the daemon keeps a [`Mark`] apart from it, which lives as long as the host runs.

use crate::lines::Replayed;
use crate::text::Hex16;

/// The name of a journal for which no mark could be made.
pub const NO_MARK: Hex16 = Hex16([0; 16]);

/// How far a daemon has written which journal since the host was booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The boot identity of the host.
    pub boot_id: Hex16,
    /// The name of the journal. A journal gets another one if its predecessor is not believed.
    pub journal: Hex16,
    /// The number of the last record that the journal has got; 0 if there was no such journal yet. A record is written to the journal
    /// first.
    pub last: u64,
}

impl Mark {
    /// Returns whether it says something about this journal on a host with this boot identity. A mark for a journal that was still to be
    /// written does so if that journal is there: its daemon was killed before it could mark anything else.
    pub fn is_about(&self, journal: &Replayed, boot_id: Hex16) -> bool {
        self.boot_id == boot_id && (self.last > 0 || journal.journal == Some(self.journal))
    }
}

/// Returns why the journal does not say all about the memory that is in use on a host with this boot identity. `mark` is what is kept apart
/// from it.
pub fn doubt(journal: &Replayed, mark: Option<Mark>, boot_id: Hex16) -> Option<String> {
    let mark = mark.filter(|mark| mark.is_about(journal, boot_id));
    let Replayed { damaged, misplaced, invalid_records, .. } = *journal;
    if journal.is_empty() {
        return mark.map(|_| "it was removed or emptied".to_owned());
    }
    if damaged > 0 {
        return Some(format!("{damaged} of its lines are damaged"));
    }
    if misplaced > 0 {
        return Some(format!("lines are lost, or not in their places, in {misplaced} places"));
    }
    if invalid_records > 0 {
        return Some(format!("{invalid_records} of its records contradict those before them"));
    }
    let Some(name) = journal.journal else {
        if journal.format >= 3 {
            return Some("it ends within its first part".to_owned());
        }
        // Older daemons made no mark.
        return mark.map(|_| "it is an older one, which somebody has put back".to_owned());
    };
    match mark {
        Some(mark) if mark.journal != name => Some("it is not the one that the last daemon wrote".to_owned()),
        Some(mark) if journal.last < mark.last => {
            let missing = mark.last - journal.last;
            Some(format!(
                "its last {missing} records are missing, or it is an older copy that somebody has put back"
            ))
        }
        Some(_) => None,
        // After a reboot there is neither a mark nor a program.
        None if journal.books.boot_id != boot_id => None,
        None if name == NO_MARK => None,
        None => Some("the file that says how far it goes is missing".to_owned()),
    }
}
