//! The element types.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

mod sealed {
    /// Keeps the set of element types closed: kernels are tested for these and no others.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// An element type: `f32` or `f64`.
pub trait Real:
    sealed::Sealed
    + Copy
    + Default
    + PartialOrd
    + Debug
    + Display
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + Sum
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Minus infinity: the maximum of nothing, the log of an empty sum.
    const NEG_INFINITY: Self;

    /// The nearest value.
    fn from_f64(x: f64) -> Self;
    /// Exact for both types.
    fn to_f64(self) -> f64;
    /// Square root.
    fn sqrt(self) -> Self;
    /// The larger one; the other where one is not a number.
    fn max(self, other: Self) -> Self;
}

macro_rules! real {
    ($t:ident) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;

            #[inline(always)]
            #[allow(clippy::cast_possible_truncation, clippy::cast_lossless)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            #[allow(clippy::cast_lossless)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                $t::max(self, other)
            }
        }
    };
}

real!(f32);
real!(f64);
