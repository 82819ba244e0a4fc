//! The passes of each pipeline rank, as a trainer writes them.

use models::schedule::{PassOrder, parse_passes};
use std::ops::Deref;
use std::panic::Location;

/// A table with a line for each of `PP` pipeline ranks ([`models::schedule::write_passes`] says
/// how).
#[derive(Clone, Copy, Debug)]
pub struct PassTable<const PP: usize> {
    lines: [&'static str; PP],
    /// Where in the trainer it stands.
    at: &'static Location<'static>,
}

impl<const PP: usize> PassTable<PP> {
    /// A table that stands where this is called.
    #[track_caller]
    pub const fn new(lines: [&'static str; PP]) -> Self {
        Self { lines, at: Location::caller() }
    }

    /// The passes. What is wrong with them is reported when the trainer starts.
    pub fn read(&self) -> Passes {
        let mut orders = Vec::with_capacity(PP);
        let mut wrong = None;
        for (rank, line) in self.lines.iter().enumerate() {
            let read = parse_passes(line).map_err(|error| format!("pipeline rank {rank}: {error}"));
            orders.push(read.unwrap_or_else(|problem| {
                wrong.get_or_insert(problem);
                PassOrder::default()
            }));
        }
        Passes { orders, at: Some(self.at), wrong }
    }
}

/// For each pipeline rank, its passes in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Passes {
    orders: Vec<PassOrder>,
    /// Where in the trainer they stand, if they stand there.
    at: Option<&'static Location<'static>>,
    /// Why they cannot be read.
    wrong: Option<String>,
}

impl From<Vec<PassOrder>> for Passes {
    fn from(orders: Vec<PassOrder>) -> Self {
        Self { orders, at: None, wrong: None }
    }
}

impl Passes {
    /// File and line of the table, with a colon and a blank, if it stands in the trainer.
    pub(crate) fn place(&self) -> String {
        let of = |at: &Location<'_>| format!("{}:{}: ", at.file(), at.line());
        self.at.map_or_else(String::new, of)
    }

    /// Why they cannot be read, if they cannot.
    pub(crate) fn wrong(&self) -> Option<&str> {
        self.wrong.as_deref()
    }
}

impl Deref for Passes {
    type Target = [PassOrder];

    fn deref(&self) -> &[PassOrder] {
        &self.orders
    }
}
