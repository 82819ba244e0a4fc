//! Fast products against the reference.

use crate::support::{close, cpu, normal, poison, tolerance};
use kernels::Real;
use kernels::gemm::{Batch, Op, Shape, gemm, gemm_batched, reference};
use proptest::prelude::*;

fn shapes() -> impl Strategy<Value = Shape> {
    let size = || prop_oneof![1usize..9, 1usize..70, Just(127), Just(257), Just(300)];
    let op = || prop_oneof![Just(Op::None), Just(Op::Transpose)];
    let gap = || prop_oneof![Just(0usize), 1usize..5];
    (size(), size(), size(), op(), op(), gap(), gap(), gap()).prop_map(
        |(m, n, k, op_a, op_b, gap_a, gap_b, gap_c)| {
            let lda = gap_a + if op_a == Op::None { k } else { m };
            let ldb = gap_b + if op_b == Op::None { n } else { k };
            Shape { m, n, k, op_a, op_b, lda, ldb, ldc: n + gap_c }
        },
    )
}

fn stored(shape: &Shape) -> [usize; 3] {
    let a = if shape.op_a == Op::None { shape.m } else { shape.k };
    let b = if shape.op_b == Op::None { shape.k } else { shape.n };
    [a * shape.lda, b * shape.ldb, shape.m * shape.ldc]
}

fn compare<T: Real>(shape: &Shape, alpha: f64, beta: f64) {
    let [a, b, c] = stored(shape);
    let (a, b) = (normal::<T>(1, a), normal::<T>(2, b));
    let (alpha, beta) = (T::from_f64(alpha), T::from_f64(beta));
    let mut got = if beta == T::ZERO { poison(c) } else { normal(3, c) };
    // Elements between rows stay untouched, and with beta 0 nothing is read.
    let mut want = got.clone();
    gemm(&cpu(), shape, alpha, &a, &b, beta, &mut got);
    reference::gemm(&cpu(), shape, alpha, &a, &b, beta, &mut want);
    // The rounding error of a sum of k products grows like sqrt(k) if signs are random.
    let tolerance = tolerance::<T>() * (shape.k as f64).sqrt();
    for (got, want) in got.chunks(shape.ldc).zip(want.chunks(shape.ldc)) {
        close("c", &got[..shape.n], &want[..shape.n], tolerance);
        for (got, want) in got[shape.n..].iter().zip(&want[shape.n..]) {
            assert_eq!(got.to_f64().to_bits(), want.to_f64().to_bits(), "between rows");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn products(shape in shapes(), alpha in prop_oneof![Just(1.0), -2.0..2.0], beta in prop_oneof![Just(0.0), Just(1.0), -2.0..2.0]) {
        compare::<f64>(&shape, alpha, beta);
        compare::<f32>(&shape, alpha, beta);
    }

    #[test]
    fn batches(count in 0usize..5, m in 1usize..20, n in 1usize..20, k in 1usize..20, shared in any::<bool>()) {
        let shape = Shape::nn(m, n, k);
        let stride_b = if shared { 0 } else { n * k };
        let batch = Batch { count, stride_a: m * k + 3, stride_b, stride_c: m * n + 1 };
        let (a, b) = (normal::<f64>(1, count * (m * k + 3)), normal::<f64>(2, count.max(1) * n * k));
        let (mut got, mut want) = (vec![0.5; count * (m * n + 1)], vec![0.5; count * (m * n + 1)]);
        gemm_batched(&cpu(), &shape, &batch, 1.5, &a, &b, 1.0, &mut got);
        reference::gemm_batched(&cpu(), &shape, &batch, 1.5, &a, &b, 1.0, &mut want);
        close("c", &got, &want, 1e-12);
    }
}

#[test]
fn products_with_nothing_to_sum_are_zero_or_what_was_there() {
    let mut c = poison::<f32>(6);
    gemm(&cpu(), &Shape::nn(2, 3, 0), 1.0, &[], &[], 0.0, &mut c);
    assert_eq!(c, [0.0; 6]);
    let mut c = vec![2.0f32; 6];
    gemm(&cpu(), &Shape::nn(2, 3, 0), 1.0, &[], &[], 0.5, &mut c);
    assert_eq!(c, [1.0; 6]);
    gemm::<f32>(&cpu(), &Shape::nn(0, 3, 4), 1.0, &[], &[0.0; 12], 0.0, &mut []);
}

#[test]
#[should_panic(expected = "b has 11 elements where the shape needs 12")]
fn a_short_matrix_is_refused() {
    gemm(&cpu(), &Shape::nn(2, 3, 4), 1.0, &[0.0f32; 8], &[0.0; 11], 0.0, &mut [0.0; 6]);
}

#[test]
#[should_panic(expected = "ldc is 2 where rows have 3 elements")]
fn overlapping_rows_are_refused() {
    let shape = Shape::nn(2, 3, 4).with_leading(4, 3, 2);
    gemm(&cpu(), &shape, 1.0, &[0.0f32; 8], &[0.0; 12], 0.0, &mut [0.0; 6]);
}

/// A row of the result has the same bits whatever rows are beside it, so that cutting rows into
/// chunks changes nothing.
#[test]
fn rows_do_not_depend_on_how_many_there_are() {
    for (n, k) in [(8, 64), (32, 64), (64, 128), (515, 64)] {
        let (x, w) = (normal::<f32>(1, 512 * k), normal::<f32>(2, n * k));
        for shape in [Shape::nt, Shape::nn] {
            let run = |m: usize| {
                let mut y = vec![0.0; m * n];
                gemm(&cpu(), &shape(m, n, k), 1.0, &x[..m * k], &w, 0.0, &mut y);
                y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let whole = run(512);
            for m in [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33, 64, 256] {
                assert_eq!(run(m), whole[..m * n], "{m} rows of {n} columns, {k} summands");
            }
        }
    }
}
