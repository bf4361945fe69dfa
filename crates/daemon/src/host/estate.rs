//! What blocks and synchronisation objects have in common: memory in a segment, a name there, an account that pays for it, and
//! users. It is entered into the books, used and removed in one way.

use super::account::{Account, Tally};
use super::books::{Books, Misfit};
use ginnel_layout::Name;
use std::collections::BTreeMap;

/// All of one kind, by number, and their numbers by segment and name.
pub(super) type Shelf<'b, T> = (&'b mut BTreeMap<u64, T>, &'b mut BTreeMap<(Name, Name), u64>);

/// A block, or a synchronisation object.
pub(super) trait Estate: Clone {
    /// An open handle, or a slot.
    type User: Copy;

    /// Its number.
    fn number(&self) -> u64;
    /// Its segment, and its name; none if it has none.
    fn key(&self) -> (Name, Name);
    /// Who pays.
    fn account(&self) -> Account;
    /// Where its memory begins, and its bytes.
    fn place(&self) -> (u64, u64);
    /// Whether it makes sense by itself, and its users can be there at once.
    fn is_possible(&self) -> bool;
    /// Its users.
    fn users(&self) -> impl Iterator<Item = Self::User>;
    /// Adds a user.
    fn add(&mut self, user: Self::User);
    /// Whether another has the place of this user.
    fn is_taken(&self, user: &Self::User) -> bool;
    /// Whether there is somebody in the segment who can be this user.
    fn has_user(books: &Books, segment: &Name, user: &Self::User) -> bool;
    /// Writes down at the user's endpoint what it uses.
    fn used(books: &mut Books, number: u64, user: &Self::User);
    /// All of them.
    fn all(books: &Books) -> &BTreeMap<u64, Self>;
    /// The same, and their names.
    fn shelf(books: &mut Books) -> Shelf<'_, Self>;
}

impl Books {
    /// A new one. On error nothing has changed.
    pub(super) fn enter<T: Estate>(&mut self, new: &T) -> Result<(), Misfit> {
        let (number, key, (offset, len)) = (new.number(), new.key(), new.place());
        let (all, names) = T::shelf(self);
        if all.contains_key(&number) || names.contains_key(&key) {
            return Err(Misfit("two objects of one name"));
        }
        if !new.is_possible() {
            return Err(Misfit("an impossible object"));
        }
        if !self.members.contains_key(&new.account().member) {
            return Err(Misfit("an object of nobody"));
        }
        for user in new.users() {
            self.may_use::<T>(&key.0, &user)?;
        }
        let segment = self.segments.get_mut(&key.0).ok_or(Misfit("an object in no segment"))?;
        if !segment.arena.take(offset, len) {
            return Err(Misfit("an object without memory"));
        }
        self.charge(new.account(), Tally::block(len));
        self.next_object = self.next_object.max(number.saturating_add(1));
        new.users().for_each(|user| T::used(self, number, &user));
        let (all, names) = T::shelf(self);
        if !key.1.is_none() {
            names.insert(key, number);
        }
        all.insert(number, new.clone());
        Ok(())
    }

    fn may_use<T: Estate>(&self, segment: &Name, user: &T::User) -> Result<(), Misfit> {
        match T::has_user(self, segment, user) {
            true => Ok(()),
            false => Err(Misfit("an object used by nobody")),
        }
    }

    /// One more user.
    pub(super) fn open<T: Estate>(&mut self, number: u64, user: T::User) -> Result<(), Misfit> {
        let there = T::all(self).get(&number).ok_or(Misfit("an unknown object opened"))?;
        if there.is_taken(&user) {
            return Err(Misfit("two users in one place"));
        }
        self.may_use::<T>(&there.key().0, &user)?;
        T::used(self, number, &user);
        if let Some(there) = T::shelf(self).0.get_mut(&number) {
            there.add(user);
        }
        Ok(())
    }

    /// It is no more; nobody uses it.
    pub(super) fn remove<T: Estate>(&mut self, number: u64) -> Option<T> {
        let (all, names) = T::shelf(self);
        let gone = all.remove(&number)?;
        names.remove(&gone.key());
        let (offset, len) = gone.place();
        self.discharge(gone.account(), Tally::block(len));
        if let Some(segment) = self.segments.get_mut(&gone.key().0) {
            let given = segment.arena.give(offset, len);
            debug_assert!(given, "the memory of an object was taken");
        }
        Some(gone)
    }
}
