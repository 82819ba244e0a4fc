//! Messages between two ranks.

use crate::comm::liveness::{Liveness, Members, Waiter, lock};
use crate::comm::{Call, CommError, Payload, Pending};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

/// Messages in flight between two ranks with one tag, oldest first.
#[derive(Default)]
pub(super) struct Mailbox {
    messages: Mutex<VecDeque<(Call, Payload)>>,
    arrived: Condvar,
}

impl Mailbox {
    pub fn put(&self, call: Call, payload: Payload) {
        lock(&self.messages).push_back((call, payload));
        self.arrived.notify_one();
    }
}

/// A receive in flight.
pub(super) struct Receipt {
    pub mailbox: Arc<Mailbox>,
    pub call: Call,
    pub from: usize,
    pub rank: usize,
    pub members: Arc<Members>,
    pub liveness: Arc<Liveness>,
}

impl Pending for Receipt {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        let guard = lock(&self.mailbox.messages);
        let waiter = Waiter { members: &self.members, rank: self.rank, call: &self.call };
        let (sent, payload) = self.liveness.wait(
            guard,
            &self.mailbox.arrived,
            VecDeque::pop_front,
            |_| vec![self.from],
            &waiter,
        )?;
        if payload.dtype() == self.call.dtype && payload.len() == self.call.count {
            return Ok(payload);
        }
        Err(self.liveness.fail(self.liveness.mismatch(&waiter, self.from, &sent)))
    }
}
