//! The element types.

use crate::pool::Pool;
use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

/// What kernels need of an element type and callers do not. It seals [`Real`]: kernels
/// are tested for f32 and f64 only.
pub(crate) mod sealed {
    use super::Pool;

    pub trait Sealed: Sized {
        /// `self a + b`, rounded once.
        fn fma(self, a: Self, b: Self) -> Self;
        /// `e^self` to about 1 ulp. Underflows to exactly 0; saturates near the largest power of
        /// two. Written so that loops over it are vectorised.
        fn vexp(self) -> Self;
        /// `tanh` to a few ulp, also near 0; vectorised likewise.
        fn vtanh(self) -> Self;
        /// `erf` to about 1 ulp; vectorised in f32 only.
        fn verf(self) -> Self;
        /// Scratch memory of this type.
        fn pool(pools: &super::Pools) -> &Pool<Self>;
    }
}

/// Scratch memory of each type.
#[derive(Debug, Default)]
pub struct Pools {
    f32s: Pool<f32>,
    f64s: Pool<f64>,
}

impl Pools {
    pub(crate) const fn new() -> Self {
        Self { f32s: Pool::new(), f64s: Pool::new() }
    }
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
    /// Minus infinity: the maximum of nothing, the logarithm of an empty sum.
    const NEG_INFINITY: Self;

    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// The value in f64, which is exact for both types.
    fn to_f64(self) -> f64;
    /// Square root.
    fn sqrt(self) -> Self;
}

/// Range reduction of `vexp` and `vtanh`: `e^x = 2^n e^r`, `n = round(x / ln 2)`, `|r| <= ln 2 /
/// 2`. Adding `$magic` leaves `n` in the low bits of the sum, which makes `2^n` a shift away.
macro_rules! real {
    ($t:ident, $bits:ident, $mantissa:literal, $magic:literal, $ln2_high:literal, $ln2_low:literal,
     $low:literal, $high:literal, $saturated:literal, $pool:ident, $erf:path, [$($c:expr),*]) => {
        /// Returns `2^n` and `expm1(r) = r + r^2 p(r)`.
        #[inline(always)]
        fn $pool(x: $t) -> ($t, $t) {
            let shifted = x.mul_add(std::$t::consts::LOG2_E, $magic);
            let n = shifted - $magic;
            let r = n.mul_add(-$ln2_low, n.mul_add(-$ln2_high, x));
            let one = (1.0 as $t).to_bits();
            let power = $t::from_bits((shifted.to_bits() << $mantissa).wrapping_add(one));
            let mut p: $t = 0.0;
            $( p = p.mul_add(r, (1.0 / $c) as $t); )*
            (power, (r * r).mul_add(p, r))
        }

        impl sealed::Sealed for $t {
            #[inline(always)]
            fn fma(self, a: Self, b: Self) -> Self {
                self.mul_add(a, b)
            }
            #[inline(always)]
            fn vexp(self) -> Self {
                // Comparisons in this direction let NaN through.
                let x = if self < $low { $low } else { self };
                let x = if x > $high { $high } else { x };
                let (power, expm1) = $pool(x);
                let value = power.mul_add(expm1, power);
                if self < $low { 0.0 } else { value }
            }
            #[inline(always)]
            fn vtanh(self) -> Self {
                let x = self.abs();
                let x = if x > $saturated { $saturated } else { x };
                let (power, expm1) = $pool(x + x);
                let expm1 = power.mul_add(expm1, power - 1.0);
                (expm1 / (expm1 + 2.0)).copysign(self)
            }
            #[inline(always)]
            fn verf(self) -> Self {
                $erf(self)
            }
            fn pool(pools: &Pools) -> &Pool<Self> {
                &pools.$pool
            }
        }

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
        }
    };
}

// ln 2 is split as by Cody and Waite: `n` times the high part is exact. The divisors are
// factorials; the first omitted term is below a quarter ulp of the result.
real!(
    f32,
    u32,
    23,
    12_582_912.0,
    0.693_359_4,
    -2.121_944_4e-4,
    -87.3,
    88.3,
    9.2,
    f32s,
    erf_f32,
    [5040.0, 720.0, 120.0, 24.0, 6.0, 2.0]
);
real!(
    f64,
    u64,
    52,
    6_755_399_441_055_744.0,
    6.931_471_803_691_238e-1,
    1.908_214_929_270_587_7e-10,
    -708.0,
    709.0,
    19.1,
    f64s,
    libm::erf,
    [
        6_227_020_800.0,
        479_001_600.0,
        39_916_800.0,
        3_628_800.0,
        362_880.0,
        40_320.0,
        5040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0
    ]
);

/// `erf x = x + x p(x^2)` below 1 and `1 - e^-q(x)` above. `p` and `q` interpolate `erf(sqrt u) /
/// sqrt u - 1` on [0, 1] and `-ln erfc x` on [1, 4] at Chebyshev nodes (computed with 40 digits);
/// the absolute error is at most 6e-8.
#[inline(always)]
fn erf_f32(x: f32) -> f32 {
    const P: [f32; 7] = [
        7.875_875_6e-5,
        -8.016_864e-4,
        5.189_087_4e-3,
        -2.685_421_3e-2,
        0.112_835_95,
        -0.376_126_26,
        0.128_379_17,
    ];
    const Q: [f32; 9] = [
        -1.637_151_4e-6,
        4.605_804e-5,
        -5.968_056_3e-4,
        4.759_596e-3,
        -2.642_113_6e-2,
        0.110_080_08,
        0.631_826_04,
        1.130_233_4,
        -3.201_380_5e-4,
    ];
    let a = x.abs();
    let square = a * a;
    let p = P.iter().fold(0.0f32, |p, &c| p.mul_add(square, c));
    let b = if a > 4.0 { 4.0 } else { a };
    let q = Q.iter().fold(0.0f32, |q, &c| q.mul_add(b, c));
    let above = 1.0 - sealed::Sealed::vexp(-q);
    (if a < 1.0 { a.mul_add(p, a) } else { above }).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::sealed::Sealed;

    /// Compares every function with libm's in f64 over its range, in irregular steps.
    #[test]
    fn functions_are_within_few_ulp() {
        for i in -400_000..400_000 {
            let x = f64::from(i) * 2.371e-4;
            let single = f64::from(x as f32);
            let relative = |got: f64, want: f64| ((got - want) / want.abs().max(1e-30)).abs();
            if x.abs() < 87.0 {
                assert!(relative(f64::from((x as f32).vexp()), libm::exp(single)) < 1.5e-7, "{x}");
            }
            assert!(relative(x.vexp(), libm::exp(x)) < 4e-16, "{x}");
            if i != 0 {
                assert!(relative(f64::from((x as f32).vtanh()), libm::tanh(single)) < 3e-7, "{x}");
                assert!(relative(x.vtanh(), libm::tanh(x)) < 1e-15, "{x}");
                assert!(relative(f64::from((x as f32).verf()), libm::erf(single)) < 2e-7, "{x}");
            }
        }
    }

    #[test]
    fn functions_keep_to_their_limits() {
        assert_eq!((-1e9f32).vexp(), 0.0);
        assert_eq!(f32::NEG_INFINITY.vexp(), 0.0);
        assert_eq!(f64::NEG_INFINITY.vexp(), 0.0);
        assert_eq!((-89.0f32).vexp(), 0.0);
        assert!(1e9f32.vexp().is_finite() && 1e9f64.vexp().is_finite());
        assert!(f32::NAN.vexp().is_nan() && f64::NAN.vtanh().is_nan() && f32::NAN.verf().is_nan());
        assert_eq!((f32::MAX.vtanh(), f64::MIN.vtanh(), 50f32.verf()), (1.0, -1.0, 1.0));
        assert_eq!((0f32.vtanh(), 0f64.vtanh(), 0f32.verf()), (0.0, 0.0, 0.0));
        assert_eq!((0f32.vexp(), 0f64.vexp()), (1.0, 1.0));
    }
}
