//! Element types of device memory.

use super::Storage;
use bytemuck::Pod;
use half::bf16;
use std::fmt::Debug;

/// An element of device memory: plain bytes.
pub trait Element: Pod + Debug + Send + Sync {}

impl Element for f32 {}
impl Element for f64 {}
impl Element for bf16 {}
impl Element for i32 {}
impl Element for i64 {}
impl Element for u32 {}
impl Element for u64 {}
impl Element for u8 {}

/// A type that tensors are stored in. Arithmetic is in f32 either way.
pub trait Stored: Element {
    /// The storage type.
    const STORAGE: Storage;

    /// The nearest value of this type.
    fn narrowed(x: f32) -> Self;
    /// The same value in f32, exactly.
    fn widened(self) -> f32;
}

impl Stored for f32 {
    const STORAGE: Storage = Storage::F32;

    fn narrowed(x: f32) -> Self {
        x
    }

    fn widened(self) -> f32 {
        self
    }
}

impl Stored for bf16 {
    const STORAGE: Storage = Storage::Bf16;

    fn narrowed(x: f32) -> Self {
        Self::from_f32(x)
    }

    fn widened(self) -> f32 {
        self.to_f32()
    }
}
