//! Loops as vector code.
//!
//! `vectorized!` compiles a function once for each instruction set (AVX-512, AVX2 with FMA, the
//! build's own) and calls the widest that the processor supports, whatever `target-cpu` the crate
//! was built for. Inside, plain loops over slices and [`lanes`](LANES) are written so that the
//! compiler vectorises them: no early exits, one type, sums in a fixed number of lanes. All
//! functions called must be `#[inline(always)]`; otherwise they would be compiled for the build's
//! own instruction set.

use crate::Real;

/// Number of partial sums or maxima of a reduction: the same on every processor, so that results do
/// not depend on it. With fewer the compiler would unroll loops over them to scalars before its
/// vectoriser sees them.
pub(crate) const LANES: usize = 128;

/// Elements of a block of elementwise work: some microseconds of work, which fits in cache.
pub(crate) const BLOCK: usize = 16 * 1024;

/// Rows of a block.
pub(crate) fn block_rows(columns: usize) -> usize {
    (BLOCK / columns.max(1)).max(1)
}

/// See the [module](self). The function gets an [`Arch`](pulp::Arch) as first argument.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$($g:ident: $bound:path),+>
     ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
        $vis fn $name<'a, $($g: $bound),+>(arch: pulp::Arch, $($arg: $ty),*) $(-> $ret)? {
            struct Work<'a, $($g: $bound),+> {
                $($arg: $ty,)*
                generics: std::marker::PhantomData<(&'a (), $($g),+)>,
            }
            impl<'a, $($g: $bound),+> pulp::NullaryFnOnce for Work<'a, $($g),+> {
                type Output = vectorized!(@ret $($ret)?);
                #[inline(always)]
                fn call(self) -> Self::Output {
                    let Self { $($arg,)* .. } = self;
                    $body
                }
            }
            arch.dispatch(Work::<'_, $($g),+> { $($arg,)* generics: std::marker::PhantomData })
        }
    };
    (@ret) => { () };
    (@ret $ret:ty) => { $ret };
}
pub(crate) use vectorized;

/// Sum of `term(i)` for `i` in `0..n`, in lanes.
#[inline(always)]
pub(crate) fn sum<T: Real>(x: &[T], term: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane += term(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += term(x);
    }
    fold(lanes, |a, b| a + b)
}

/// Sum of products `a b` in lanes.
#[inline(always)]
pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((a_blocks, a_rest), (b_blocks, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane = a.fma(b, *lane);
        }
    }
    for ((lane, &a), &b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane = a.fma(b, *lane);
    }
    fold(lanes, |a, b| a + b)
}

/// Sum over three slices in lanes: `term` adds to its last argument.
#[inline(always)]
pub(crate) fn sum3<T: Real>(a: &[T], b: &[T], c: &[T], term: impl Fn(T, T, T, T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    let (c_blocks, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a_blocks.iter().zip(b_blocks).zip(c_blocks) {
        for (((lane, &a), &b), &c) in lanes.iter_mut().zip(a).zip(b).zip(c) {
            *lane = term(a, b, c, *lane);
        }
    }
    for (((lane, &a), &b), &c) in lanes.iter_mut().zip(a_rest).zip(b_rest).zip(c_rest) {
        *lane = term(a, b, c, *lane);
    }
    fold(lanes, |a, b| a + b)
}

/// The largest element; minus infinity if there is none.
#[inline(always)]
pub(crate) fn max<T: Real>(x: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = larger(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, x);
    }
    fold(lanes, larger)
}

/// The larger of two numbers.
#[inline(always)]
pub(crate) fn larger<T: Real>(a: T, b: T) -> T {
    if a > b { a } else { b }
}

/// Reduces the lanes to one by folding halves.
#[inline(always)]
fn fold<T: Real>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}
