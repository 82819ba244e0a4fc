//! A pool of reusable buffers.

use std::sync::{Mutex, PoisonError};

/// Buffers that are not in use.
#[derive(Debug, Default)]
pub struct Pool<T>(Mutex<Vec<Vec<T>>>);

impl<T> Pool<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    pub(crate) fn take(&self) -> Vec<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    pub(crate) fn give_back(&self, buffer: Vec<T>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}
