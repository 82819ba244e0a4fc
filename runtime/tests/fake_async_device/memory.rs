//! Memory that only the jobs of streams can reach.

use runtime::Number;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Memory of the device. Only jobs look inside.
#[derive(Debug)]
pub struct Memory<E> {
    pub(super) block: Arc<Mutex<Vec<E>>>,
    pub(super) len: usize,
}

impl<E> Memory<E> {
    pub(super) fn new(values: Vec<E>) -> Self {
        Self { len: values.len(), block: Arc::new(Mutex::new(values)) }
    }

    pub(super) fn all(&self) -> Part<E> {
        Part { block: self.block.clone(), range: 0..self.len }
    }
}

/// A view to read.
pub struct View<'a, E> {
    pub(super) memory: &'a Memory<E>,
    pub(super) begin: usize,
    pub(super) len: usize,
}

impl<E> Clone for View<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for View<'_, E> {}

/// A view to write.
pub struct ViewMut<'a, E> {
    pub(super) block: Arc<Mutex<Vec<E>>>,
    pub(super) begin: usize,
    pub(super) len: usize,
    pub(super) exclusive: PhantomData<&'a mut E>,
}

/// A view for a job.
pub(super) struct Part<E> {
    pub(super) block: Arc<Mutex<Vec<E>>>,
    pub(super) range: Range<usize>,
}

impl<E: Copy> Part<E> {
    pub(super) fn values(&self) -> Vec<E> {
        self.block.lock().unwrap()[self.range.clone()].to_vec()
    }

    pub(super) fn set(&self, values: &[E]) {
        self.block.lock().unwrap()[self.range.clone()].copy_from_slice(values);
    }
}

impl<E: Number> Part<E> {
    /// Values in the type that kernels compute in.
    pub(super) fn get<W: Number>(&self) -> Vec<W> {
        self.values().into_iter().map(|value| W::nearest(value.value())).collect()
    }

    /// Rounds values to the stored type.
    pub(super) fn put<W: Number>(&self, values: &[W]) {
        let rounded: Vec<E> = values.iter().map(|value| E::nearest(value.value())).collect();
        self.set(&rounded);
    }
}

pub(super) fn of<E>(view: View<'_, E>) -> Part<E> {
    Part { block: view.memory.block.clone(), range: view.begin..view.begin + view.len }
}

pub(super) fn into<E>(view: ViewMut<'_, E>) -> Part<E> {
    Part { block: view.block, range: view.begin..view.begin + view.len }
}
