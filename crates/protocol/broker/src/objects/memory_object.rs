//! The common part of blocks and synchronisation objects: memory in a segment, a name there, an account that is charged, and
//! users. Objects of both kinds are entered into the books, used and removed in the same way.

use crate::account::{Account, Tally};
use crate::books::{Books, Endpoint, InvalidRecord};
use ginnel_layout::Name;
use std::collections::BTreeMap;

/// All objects of one kind by number, and their numbers by segment and name.
pub(crate) type Tables<'b, T> = (&'b mut BTreeMap<u64, T>, &'b mut BTreeMap<(Name, Name), u64>);

/// A block or a synchronisation object.
pub(crate) trait MemoryObject: Clone {
    /// A user of the object: an open handle or a slot.
    type User: Copy;

    /// Returns the object's number.
    fn number(&self) -> u64;
    /// Returns its segment and its name, which may be empty.
    fn key(&self) -> (Name, Name);
    /// Returns the account that is charged.
    fn account(&self) -> Account;
    /// Returns the offset and the length of its memory, in bytes.
    fn place(&self) -> (u64, u64);
    /// Returns whether its fields are consistent, and all of its users can exist at the same time.
    fn is_possible(&self) -> bool;
    /// Returns its users.
    fn users(&self) -> impl Iterator<Item = Self::User>;
    /// Adds a user.
    fn add(&mut self, user: Self::User);
    /// Returns whether another user has the place of this one.
    fn is_taken(&self, user: &Self::User) -> bool;
    /// Returns whether an endpoint in the segment can be this user.
    fn has_user(books: &Books, segment: &Name, user: &Self::User) -> bool;
    /// Notes at the user's endpoint that it uses the object.
    fn used(books: &mut Books, number: u64, user: &Self::User);
    /// Returns all objects of the kind.
    fn all(books: &Books) -> &BTreeMap<u64, Self>;
    /// Returns all objects of the kind, and their names.
    fn tables(books: &mut Books) -> Tables<'_, Self>;
}

impl Books {
    /// Enters a new object into the books. On an error nothing has changed.
    pub(crate) fn enter<T: MemoryObject>(&mut self, new: &T) -> Result<(), InvalidRecord> {
        let (number, key, (offset, len)) = (new.number(), new.key(), new.place());
        let (all, names) = T::tables(self);
        if all.contains_key(&number) || names.contains_key(&key) {
            return Err(InvalidRecord("two objects of one name"));
        }
        if !new.is_possible() {
            return Err(InvalidRecord("an impossible object"));
        }
        if !self.members.contains_key(&new.account().member) {
            return Err(InvalidRecord("an object of an unknown member"));
        }
        for user in new.users() {
            self.may_use::<T>(&key.0, &user)?;
        }
        let segment = self.segments.get_mut(&key.0).ok_or(InvalidRecord("an object in no segment"))?;
        if !segment.arena.take(offset, len) {
            return Err(InvalidRecord("an object without memory"));
        }
        self.charge(new.account(), Tally::block(len));
        self.next_object = self.next_object.max(number.saturating_add(1));
        new.users().for_each(|user| T::used(self, number, &user));
        let (all, names) = T::tables(self);
        if !key.1.is_none() {
            names.insert(key, number);
        }
        all.insert(number, new.clone());
        Ok(())
    }

    fn may_use<T: MemoryObject>(&self, segment: &Name, user: &T::User) -> Result<(), InvalidRecord> {
        match T::has_user(self, segment, user) {
            true => Ok(()),
            false => Err(InvalidRecord("an object used by an unknown endpoint")),
        }
    }

    /// Adds a user of an object.
    pub(crate) fn open<T: MemoryObject>(&mut self, number: u64, user: T::User) -> Result<(), InvalidRecord> {
        let there = T::all(self).get(&number).ok_or(InvalidRecord("an unknown object opened"))?;
        if there.is_taken(&user) {
            return Err(InvalidRecord("two users in one place"));
        }
        self.may_use::<T>(&there.key().0, &user)?;
        T::used(self, number, &user);
        if let Some(there) = T::tables(self).0.get_mut(&number) {
            there.add(user);
        }
        Ok(())
    }

    /// Charges an account for a handle that the endpoint has opened.
    pub(crate) fn one_more_handle(&mut self, endpoint: u32) {
        if let Some(account) = self.endpoints.get(&endpoint).map(Endpoint::account) {
            self.charge(account, Tally::HANDLE);
        }
    }

    /// Removes the charge for a handle that the endpoint has closed.
    pub(crate) fn one_less_handle(&mut self, endpoint: u32) {
        if let Some(account) = self.endpoints.get(&endpoint).map(Endpoint::account) {
            self.discharge(account, Tally::HANDLE);
        }
    }

    /// Removes all objects of the kind in a segment; they must not have users any more.
    pub(crate) fn remove_all<T: MemoryObject>(&mut self, segment: &Name) {
        let there = T::all(self).values().filter(|there| there.key().0 == *segment);
        for number in there.map(T::number).collect::<Vec<_>>() {
            self.remove::<T>(number);
        }
    }

    /// Removes an object; it must not have users any more.
    pub(crate) fn remove<T: MemoryObject>(&mut self, number: u64) -> Option<T> {
        let (all, names) = T::tables(self);
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
