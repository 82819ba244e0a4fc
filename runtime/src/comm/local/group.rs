//! Groups of ranks that are threads.

use super::collect::Slot;
use super::mailbox::Mailbox;
use crate::comm::Tag;
use crate::comm::liveness::{Liveness, Members, lock};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Marks a rank as present; dropped when its thread ends, in whatever way.
pub(super) struct Presence {
    liveness: Arc<Liveness>,
    rank: usize,
}

impl Presence {
    pub fn new(liveness: Arc<Liveness>, rank: usize) -> Self {
        Self { liveness, rank }
    }

    /// World rank.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.liveness.set_gone(self.rank);
    }
}

/// A group of ranks.
pub(super) struct Group {
    pub members: Arc<Members>,
    slots: Mutex<HashMap<u64, Arc<Slot>>>,
    mailboxes: Mutex<HashMap<(usize, usize, Tag), Arc<Mailbox>>>,
    /// By number of the splitting call, and colour.
    subgroups: Mutex<HashMap<(u64, usize), Arc<Group>>>,
}

impl Group {
    pub fn new(name: &str, ranks: Vec<usize>) -> Self {
        Self {
            members: Arc::new(Members { name: name.to_owned(), ranks }),
            slots: Mutex::default(),
            mailboxes: Mutex::default(),
            subgroups: Mutex::default(),
        }
    }

    /// The slot of collective `number`.
    pub fn slot(&self, number: u64) -> Arc<Slot> {
        let mut slots = lock(&self.slots);
        slots.entry(number).or_insert_with(|| Arc::new(Slot::new(self.members.ranks.len()))).clone()
    }

    /// Forgets a collective that all ranks have joined.
    pub fn retire(&self, number: u64) {
        lock(&self.slots).remove(&number);
    }

    pub fn mailbox(&self, from: usize, to: usize, tag: Tag) -> Arc<Mailbox> {
        lock(&self.mailboxes).entry((from, to, tag)).or_default().clone()
    }

    /// The subgroup of one colour, created by the first rank that asks.
    pub fn subgroup(&self, number: u64, color: usize, make: impl FnOnce() -> Self) -> Arc<Self> {
        lock(&self.subgroups).entry((number, color)).or_insert_with(|| Arc::new(make())).clone()
    }
}
