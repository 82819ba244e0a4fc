//! Files that come with the program, compiled in.

use crate::input::{InputError, Source};
use std::sync::OnceLock;

/// A file, read when first asked for: validation asks for each row.
pub(crate) struct Shipped<T> {
    name: &'static str,
    text: &'static str,
    read: OnceLock<Result<T, InputError>>,
}

impl<T: Clone> Shipped<T> {
    /// A file `name.yaml`.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text, read: OnceLock::new() }
    }

    /// Its name, without an ending.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its text, to read or to copy.
    pub fn source(&self) -> Result<Source, InputError> {
        Source::from_bytes(format!("{}.yaml", self.name), self.text.as_bytes().to_vec())
    }

    /// What `read` makes of it.
    pub fn get(&self, read: fn(&Source) -> Result<T, InputError>) -> Result<T, InputError> {
        self.read.get_or_init(|| self.source().and_then(|source| read(&source))).clone()
    }

    /// The file of a name, with or without its ending; `None` where there is none.
    pub fn find<'a>(all: &'a [Self], name: &str) -> Option<&'a Self> {
        let wanted = name.strip_suffix(".yaml").unwrap_or(name);
        all.iter().find(|shipped| shipped.name == wanted)
    }
}
