//! Views of device memory: the counterpart of slices on the host.

use super::Element;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

/// Device memory to read: the counterpart of `&[E]`.
#[derive(Debug)]
pub struct View<'a, E> {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) memory: PhantomData<&'a E>,
}

impl<E> Clone for View<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for View<'_, E> {}

/// A range of elements of device memory, for a library that moves them. The caller ensures that the
/// memory is live, and not written elsewhere, until the move is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    pub(super) address: u64,
    pub(super) len: usize,
}

impl Span {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of it, whose elements have the given type.
    ///
    /// # Panics
    /// If the range is outside.
    #[track_caller]
    #[must_use]
    pub fn part(self, range: Range<usize>, of: super::nccl::DataType) -> Self {
        let range = within(range, self.len);
        Self { address: self.address + (range.start * of.bytes()) as u64, len: range.len() }
    }
}

/// Device memory to write: the counterpart of `&mut [E]`.
#[derive(Debug)]
pub struct ViewMut<'a, E> {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) memory: PhantomData<&'a mut E>,
}

#[track_caller]
fn within(range: impl RangeBounds<usize>, len: usize) -> Range<usize> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last + 1,
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "elements {start}..{end} of {len}");
    start..end
}

impl<'a, E: Element> View<'a, E> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range is outside.
    #[track_caller]
    #[must_use]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Self {
        let range = within(range, self.len);
        let address = self.address + (range.start * size_of::<E>()) as u64;
        Self { address, len: range.len(), memory: PhantomData }
    }

    /// Both views as one, if `next` begins where this one ends.
    #[must_use]
    pub fn followed_by(self, next: Self) -> Option<Self> {
        let follows = next.address == self.address + (self.len * size_of::<E>()) as u64;
        follows.then_some(Self { len: self.len + next.len, ..self })
    }

    /// Its address and length, for a library that moves the elements.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { address: self.address, len: self.len }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn argument(&self) -> super::Argument {
        super::Argument::Address(self.address)
    }
}

impl<'a, E: Element> ViewMut<'a, E> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A shared reborrow, to read.
    #[must_use]
    pub fn view(&self) -> View<'_, E> {
        View { address: self.address, len: self.len, memory: PhantomData }
    }

    /// A mutable reborrow.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, E> {
        ViewMut { address: self.address, len: self.len, memory: PhantomData }
    }

    /// A mutable reborrow of a part.
    ///
    /// # Panics
    /// If the range is outside; the same holds for the methods below.
    #[track_caller]
    #[must_use]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, E> {
        self.view_mut().into_slice(range)
    }

    /// A part, with the lifetime of the whole.
    #[track_caller]
    #[must_use]
    pub fn into_slice(self, range: impl RangeBounds<usize>) -> ViewMut<'a, E> {
        let range = within(range, self.len);
        let address = self.address + (range.start * size_of::<E>()) as u64;
        ViewMut { address, len: range.len(), memory: PhantomData }
    }

    /// Two disjoint parts, which may be written at the same time.
    #[track_caller]
    #[must_use]
    pub fn split_at(self, middle: usize) -> (ViewMut<'a, E>, ViewMut<'a, E>) {
        assert!(middle <= self.len, "element {middle} of {}", self.len);
        let address = self.address + (middle * size_of::<E>()) as u64;
        (
            ViewMut { address: self.address, len: middle, memory: PhantomData },
            ViewMut { address, len: self.len - middle, memory: PhantomData },
        )
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The address, for a launch or a product that writes there. Consumes the view.
    pub(crate) fn into_address(self) -> u64 {
        self.address
    }

    pub(crate) fn argument(self) -> super::Argument {
        super::Argument::Address(self.into_address())
    }
}
