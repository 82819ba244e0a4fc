//! Fast cross-entropy against the reference, and shards against the whole.

use crate::support::{close, cpu, integers, normal, poison, tolerance};
use kernels::Real;
use kernels::cross_entropy::{self as fast, Logits, reference};
use proptest::prelude::*;

struct Run<T> {
    max: Vec<T>,
    sum: Vec<T>,
    hit: Vec<T>,
    loss: Vec<T>,
    gradient: Vec<T>,
}

macro_rules! run {
    ($op:ident, $shape:expr, $logits:expr, $targets:expr) => {{
        let (cpu, rows) = (cpu(), $shape.rows);
        let (mut max, mut sum, mut hit, mut loss) =
            (poison(rows), poison(rows), poison(rows), poison(rows));
        $op::local_max(&cpu, $shape, $logits, &mut max);
        $op::local_sum_exp(&cpu, $shape, $logits, $targets, &max, &mut sum, &mut hit);
        $op::loss(&cpu, $targets, &max, &sum, &hit, &mut loss);
        let mut gradient = $logits.to_vec();
        $op::gradient_in_place(&cpu, $shape, &mut gradient, $targets, &max, &sum, 0.5);
        Run { max, sum, hit, loss, gradient }
    }};
}

fn compare<T: Real>(shape: &Logits, spread: f64, targets: &[i64]) {
    let logits: Vec<T> = normal::<T>(1, shape.rows * shape.columns);
    let logits: Vec<T> = logits.into_iter().map(|z| z * T::from_f64(spread)).collect();
    let (got, want) =
        (run!(fast, shape, &logits, targets), run!(reference, shape, &logits, targets));
    let tolerance = tolerance::<T>() * spread.max(1.0);
    for (what, got, want) in [
        ("max", &got.max, &want.max),
        ("sum", &got.sum, &want.sum),
        ("hit", &got.hit, &want.hit),
        ("loss", &got.loss, &want.loss),
        ("gradient", &got.gradient, &want.gradient),
    ] {
        close(what, got, want, tolerance);
    }
}

/// The elementwise work of algorithm 2 for a split vocabulary.
fn compare_split<T: Real>(shape: &Logits, targets: &[i64]) {
    let (cpu, elements) = (cpu(), shape.rows * shape.columns);
    let (x, hits) = (normal::<T>(3, elements), normal::<T>(4, elements));
    let (factor, target) = (normal::<T>(5, shape.rows), normal::<T>(6, shape.rows));
    let both = |what: &str, fast: &dyn Fn(&mut [T]), reference: &dyn Fn(&mut [T])| {
        let [mut got, mut want] = [x.clone(), x.clone()];
        fast(&mut got);
        reference(&mut want);
        close(what, &got, &want, 4.0 * tolerance::<T>());
    };
    both("slope", &|x| fast::scale_by_slope(&cpu, shape.soft_cap, &target, x), &|x| {
        reference::scale_by_slope(&cpu, shape.soft_cap, &target, x);
    });
    both(
        "softmax to gradient",
        &|x| fast::softmax_to_gradient(&cpu, shape, x, targets, &factor, &target, 0.5),
        &|x| reference::softmax_to_gradient(&cpu, shape, x, targets, &factor, &target, 0.5),
    );
    both("joined", &|x| fast::join_gradient(&cpu, x, &hits, &factor, 0.5), &|x| {
        reference::join_gradient(&cpu, x, &hits, &factor, 0.5);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn rows_are_the_reference(
        rows in 1usize..20, real_columns in 1usize..400, padding in 0usize..40, first_column in 0usize..50,
        spread in prop_oneof![Just(1.0), Just(20.0)], soft_cap in prop_oneof![Just(None), (1.0..50.0).prop_map(Some)],
    ) {
        let shape = Logits { rows, columns: real_columns + padding, real_columns, first_column, soft_cap };
        let targets = integers(2, rows, -1..(real_columns + first_column + padding) as i64);
        compare::<f64>(&shape, spread, &targets);
        compare::<f32>(&shape, spread, &targets);
        compare_split::<f64>(&shape, &targets);
        compare_split::<f32>(&shape, &targets);
    }

    /// Three shards of columns (the last with padding, the middle one possibly empty), each with
    /// its local maximum first.
    #[test]
    fn shards_are_the_whole(rows in 1usize..9, a in 1usize..40, b in 0usize..40, c in 1usize..40, padding in 0usize..5,
        soft_cap in prop_oneof![Just(None), (1.0..50.0).prop_map(Some)], late in any::<bool>()) {
        let cpu = cpu();
        let columns = a + b + c;
        let whole = Logits { soft_cap, ..Logits::whole(rows, columns) };
        let (logits, targets) = (normal::<f64>(1, rows * columns), integers(2, rows, -1..columns as i64));
        let want = run!(reference, &whole, &logits, &targets);
        let shards: Vec<(Logits, Vec<f64>)> = [(0, a, 0), (a, b, 0), (a + b, c, padding)]
            .map(|(first_column, real_columns, padding)| {
                let shape = Logits { rows, columns: real_columns + padding, real_columns, first_column, soft_cap };
                let row = |row: &[f64]| [&row[first_column..first_column + real_columns], &vec![1e3; padding]].concat();
                (shape, logits.chunks(columns).flat_map(row).collect())
            })
            .into();
        let local: Vec<Vec<f64>> = shards.iter().map(|(shape, logits)| {
            let mut max = poison(rows);
            fast::local_max(&cpu, shape, logits, &mut max);
            max
        }).collect();
        let max: Vec<f64> = (0..rows).map(|r| local.iter().map(|max| max[r]).fold(f64::NEG_INFINITY, f64::max)).collect();
        let (mut sum, mut hit) = (vec![0.0; rows], vec![0.0; rows]);
        for ((shape, logits), local) in shards.iter().zip(&local) {
            let (mut part, mut part_hit) = (poison(rows), poison(rows));
            // An empty shard has no maximum of its own.
            let around = if late && shape.real_columns > 0 { local } else { &max };
            fast::local_sum_exp(&cpu, shape, logits, &targets, around, &mut part, &mut part_hit);
            if late {
                fast::rescale_sum_exp(&cpu, local, &max, &mut part);
            }
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            hit.iter_mut().zip(part_hit).for_each(|(hit, part)| *hit += part);
        }
        let mut loss = poison(rows);
        fast::loss(&cpu, &targets, &max, &sum, &hit, &mut loss);
        close("loss", &loss, &want.loss, 1e-12);
        for (shape, logits) in shards {
            let mut gradient = logits;
            fast::gradient_in_place(&cpu, &shape, &mut gradient, &targets, &max, &sum, 0.5);
            for r in 0..rows {
                let got = &gradient[r * shape.columns..r * shape.columns + shape.real_columns];
                let start = r * columns + shape.first_column;
                close("gradient", got, &want.gradient[start..start + shape.real_columns], 1e-12);
            }
        }
    }
}
