//! Vectorised, with blocks of elements on threads.

use super::check_rows;
use crate::simd::{BLOCK, LANES, block_rows, vectorized};
use crate::{Cpu, Real, columns};

/// `y = a + b`.
///
/// # Panics
/// If the slices differ in length.
pub fn add<T: Real>(cpu: &Cpu, a: &[T], b: &[T], y: &mut [T]) {
    crate::check::length("b", b.len(), a.len());
    crate::check::length("y", y.len(), a.len());
    let blocks = a.chunks(BLOCK).zip(b.chunks(BLOCK)).zip(y.chunks_mut(BLOCK));
    cpu.each(blocks, |((a, b), y)| add_block(cpu.arch(), a, b, y));
}

vectorized! {
    fn add_block<T: Real>(a: &'a [T], b: &'a [T], y: &'a mut [T]) {
        for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
            *y = a + b;
        }
    }
}

/// `y += factor x`.
///
/// # Panics
/// If the slices differ in length.
pub fn axpy<T: Real>(cpu: &Cpu, factor: T, x: &[T], y: &mut [T]) {
    crate::check::length("y", y.len(), x.len());
    cpu.each(x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)), |(x, y)| {
        axpy_block(cpu.arch(), factor, x, y);
    });
}

vectorized! {
    fn axpy_block<T: Real>(factor: T, x: &'a [T], y: &'a mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = factor.fma(x, *y);
        }
    }
}

/// `x *= factor`.
pub fn scale<T: Real>(cpu: &Cpu, factor: T, x: &mut [T]) {
    cpu.each(x.chunks_mut(BLOCK), |x| scale_block(cpu.arch(), factor, x));
}

vectorized! {
    fn scale_block<T: Real>(factor: T, x: &'a mut [T]) {
        for x in x {
            *x *= factor;
        }
    }
}

/// `x /= by`.
///
/// # Panics
/// If the slices differ in length.
pub fn divide<T: Real>(cpu: &Cpu, by: &[T], x: &mut [T]) {
    crate::check::length("by", by.len(), x.len());
    cpu.each(by.chunks(BLOCK).zip(x.chunks_mut(BLOCK)), |(by, x)| {
        x.iter_mut().zip(by).for_each(|(x, &by)| *x = *x / by);
    });
}

/// `x[rows, columns] += bias[columns]`, for as many rows as `x` has.
///
/// # Panics
/// If the length of `x` is not a multiple of the length of `bias`.
pub fn add_bias<T: Real>(cpu: &Cpu, bias: &[T], x: &mut [T]) {
    check_rows("x", x.len(), bias.len());
    if bias.is_empty() {
        return;
    }
    let size = block_rows(bias.len()) * bias.len();
    cpu.each(x.chunks_mut(size), |x| add_bias_block(cpu.arch(), bias, x));
}

vectorized! {
    fn add_bias_block<T: Real>(bias: &'a [T], x: &'a mut [T]) {
        for row in x.chunks_exact_mut(bias.len()) {
            for (x, &b) in row.iter_mut().zip(bias) {
                *x += b;
            }
        }
    }
}

/// `dbias[columns] += sum over rows of dy[rows, columns]`.
///
/// # Panics
/// If the length of `dy` is not a multiple of the length of `dbias`.
pub fn bias_gradient<T: Real>(cpu: &Cpu, dy: &[T], dbias: &mut [T]) {
    check_rows("dy", dy.len(), dbias.len());
    let width = dbias.len();
    columns::add_sums(cpu, dy.len() / width.max(1), dbias, |rows, sums| {
        bias_rows(cpu.arch(), &dy[rows.start * width..rows.end * width], sums);
    });
}

vectorized! {
    fn bias_rows<T: Real>(dy: &'a [T], sums: &'a mut [T]) {
        for row in dy.chunks_exact(sums.len()) {
            for (sum, &dy) in sums.iter_mut().zip(row) {
                *sum += dy;
            }
        }
    }
}

/// `sum of x`, in f64.
#[must_use]
pub fn sum<T: Real>(cpu: &Cpu, x: &[T]) -> f64 {
    total(cpu, x, |x| sum_block(cpu.arch(), x))
}

vectorized! {
    fn sum_block<T: Real>(x: &'a [T]) -> f64 {
        wide_sum(x, |x| x)
    }
}

/// `sum of x^2`, in f64.
#[must_use]
pub fn sum_of_squares<T: Real>(cpu: &Cpu, x: &[T]) -> f64 {
    total(cpu, x, |x| sum_of_squares_block(cpu.arch(), x))
}

vectorized! {
    fn sum_of_squares_block<T: Real>(x: &'a [T]) -> f64 {
        wide_sum(x, |x| x * x)
    }
}

/// Sum of `term` in f64 lanes.
#[inline(always)]
fn wide_sum<T: Real>(x: &[T], term: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, x) in lanes.iter_mut().zip(block) {
            *lane += term(x.to_f64());
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|x| term(x.to_f64())).sum::<f64>()
}

/// The sum of the blocks' sums, in block order.
fn total<T: Real>(cpu: &Cpu, x: &[T], of_block: impl Fn(&[T]) -> f64 + Sync) -> f64 {
    cpu.scratch(x.len().div_ceil(BLOCK), |sums: &mut [f64]| {
        cpu.each(x.chunks(BLOCK).zip(sums.iter_mut()), |(x, sum)| *sum = of_block(x));
        sums.iter().sum()
    })
}
