//! Norms, rotations, activations, embeddings, dropout and random numbers: fast against reference.

use crate::support::{close, cpu, integers, normal, poison, tolerance};
use kernels::activation::Activation;
use kernels::dropout::Dropout;
use kernels::embedding::{Embedding, by_row};
use kernels::latent_heads::LatentHeads;
use kernels::layer_norm::LayerNorm;
use kernels::random::{GlobalIndices, Stream};
use kernels::rms_norm::RmsNorm;
use kernels::rope::{Pairing, Rope, inverse_frequencies};
use kernels::sinks::Sinks;
use kernels::{Output, Real};
use kernels::{
    activation, dropout, elementwise, embedding, latent_heads, layer_norm, random, rms_norm, rope,
    sinks, transpose, weighted_rows,
};
use proptest::prelude::*;

fn sizes() -> impl Strategy<Value = (usize, usize)> {
    let rows = prop_oneof![1usize..10, Just(97), Just(300)];
    (rows, prop_oneof![1usize..40, Just(64), Just(127), Just(512)])
}

/// Calls an operation of both implementations with the same arguments, and compares the outputs.
macro_rules! both {
    ($t:ident, $what:literal, $tolerance:expr, $op:ident :: $function:ident($($argument:expr),*; $($len:expr),+)) => {{
        let cpu = cpu();
        let (got, want) = (
            write_to(&[$($len),+], |out: &mut [Vec<$t>]| both!(@call $op::$function, cpu, [$($argument),*], out, $($len),+)),
            write_to(&[$($len),+], |out: &mut [Vec<$t>]| both!(@call $op::reference::$function, cpu, [$($argument),*], out, $($len),+)),
        );
        for (got, want) in got.iter().zip(&want) {
            close($what, got, want, $tolerance);
        }
    }};
    (@call $($path:ident)::+, $cpu:ident, [$($argument:expr),*], $out:ident, $a:expr) => {{
        let [a] = $out else { unreachable!() };
        $($path)::+(&$cpu, $($argument,)* a)
    }};
    (@call $($path:ident)::+, $cpu:ident, [$($argument:expr),*], $out:ident, $a:expr, $b:expr) => {{
        let [a, b] = $out else { unreachable!() };
        $($path)::+(&$cpu, $($argument,)* a, b)
    }};
    (@call $($path:ident)::+, $cpu:ident, [$($argument:expr),*], $out:ident, $a:expr, $b:expr, $c:expr) => {{
        let [a, b, c] = $out else { unreachable!() };
        $($path)::+(&$cpu, $($argument,)* a, b, c)
    }};
}

fn write_to<T: Real>(lengths: &[usize], work: impl FnOnce(&mut [Vec<T>])) -> Vec<Vec<T>> {
    let mut out: Vec<Vec<T>> = lengths.iter().map(|&len| normal(99, len)).collect();
    work(&mut out);
    out
}

fn norms<T: Real>(rows: usize, columns: usize, unit_offset: bool) {
    let n = rows * columns;
    let (x, dy) = (normal::<T>(1, n), normal::<T>(2, n));
    let (w, bias) = (normal::<T>(3, columns), normal::<T>(4, columns));
    let (mean, r) = (normal::<T>(5, rows), normal::<T>(6, rows));
    let tolerance = tolerance::<T>();
    let norm = RmsNorm { rows, columns, eps: 1e-5, unit_offset };
    both!(T, "rms", tolerance, rms_norm::forward(&norm, &x, &w; n, rows));
    both!(T, "rms dw", tolerance, rms_norm::backward_weight(&norm, &x, &r, &dy; columns));
    let norm = LayerNorm { rows, columns, eps: 1e-5 };
    // A row of one or two elements may have almost no variance; compare only where the problem is
    // well conditioned.
    if columns > 8 {
        both!(T, "layer", 10.0 * tolerance, layer_norm::forward(&norm, &x, &w, &bias; n, rows, rows));
    }
    both!(T, "layer dw", tolerance, layer_norm::backward_weight(&norm, &x, &mean, &r, &dy; columns, columns));
    for output in [Output::Overwrite, Output::Accumulate] {
        let cpu = cpu();
        let (mut got, mut want) = (normal::<T>(7, n), normal::<T>(7, n));
        let norm = RmsNorm { rows, columns, eps: 1e-5, unit_offset };
        rms_norm::backward_input(&cpu, &norm, &x, &w, &r, &dy, &mut got, output);
        rms_norm::reference::backward_input(&cpu, &norm, &x, &w, &r, &dy, &mut want, output);
        close("rms dx", &got, &want, tolerance);
        let norm = LayerNorm { rows, columns, eps: 1e-5 };
        layer_norm::backward_input(&cpu, &norm, &x, &w, &mean, &r, &dy, &mut got, output);
        layer_norm::reference::backward_input(
            &cpu, &norm, &x, &w, &mean, &r, &dy, &mut want, output,
        );
        close("layer dx", &got, &want, 10.0 * tolerance);
    }
}

fn activations<T: Real>(n: usize, spread: f64) {
    let wide = |x: Vec<T>| -> Vec<T> { x.into_iter().map(|x| x * T::from_f64(spread)).collect() };
    let (x, up, dy) = (wide(normal(1, n)), normal::<T>(2, n), normal::<T>(3, n));
    for f in Activation::ALL {
        let tolerance = tolerance::<T>();
        both!(T, "y", tolerance, activation::forward(f, &x; n));
        both!(T, "dx", tolerance, activation::backward(f, &x, &dy; n));
        both!(T, "gated", tolerance, activation::gated_forward(f, &x, &up; n));
        both!(T, "dgate, dup", tolerance, activation::gated_backward(f, &x, &up, &dy; n, n));
    }
}

fn rotations<T: Real>(tokens: usize, heads: usize, [head_dim, start, pairs]: [usize; 3]) {
    let positions: Vec<u32> = (0..tokens as u32).map(|i| i * i % 5000).collect();
    let frequencies = inverse_frequencies(10_000.0, 2 * pairs);
    both!(T, "table", tolerance::<T>(), rope::fill_table(&frequencies, &positions; 2 * tokens * pairs));
    let mut table = poison::<T>(2 * tokens * pairs);
    rope::fill_table(&cpu(), &frequencies, &positions, &mut table);
    for pairing in [Pairing::Half, Pairing::Interleaved] {
        let (rotary_start, rotary_dim) = (start, 2 * pairs);
        let rope = Rope { tokens, heads, head_dim, rotary_start, rotary_dim, pairing };
        both!(T, "forward", tolerance::<T>(), rope::forward(&rope, &table; tokens * heads * head_dim));
        both!(T, "backward", tolerance::<T>(), rope::backward(&rope, &table; tokens * heads * head_dim));
    }
}

fn heads_of_latents<T: Real>(of: &LatentHeads) {
    let heads = of.tokens * of.heads;
    let [up, k, v] = [of.up(), of.key(), of.value].map(|width| heads * width);
    let shared = of.tokens * of.rotary;
    let (x, rotary) = (normal::<T>(1, up), normal::<T>(2, shared));
    both!(T, "k, v", 0.0, latent_heads::join(of, &x, &rotary; k, v));
    let (dk, dv) = (normal::<T>(3, k), normal::<T>(4, v));
    both!(T, "dup, drotary", tolerance::<T>(), latent_heads::split(of, &dk, &dv; up, shared));
}

fn extra_logits<T: Real>(of: &Sinks) {
    let rows = of.rows();
    let (logits, lse) = (normal::<T>(1, of.heads), normal::<T>(2, rows));
    let tolerance = tolerance::<T>();
    both!(T, "sinks", tolerance, sinks::apply(of, &logits, &lse; rows, rows * of.width));
    both!(T, "dsinks", tolerance, sinks::gradient(of, &logits, &lse; rows));
}

fn embeddings<T: Real>(tokens: usize, columns: usize, rows: usize, first_row: usize) {
    let e = Embedding { tokens, columns, rows, first_row, scale: 1.25 };
    let ids = integers(1, tokens, -1..(rows + first_row + 3) as i64);
    let (table, dout) = (normal::<T>(1, rows * columns), normal::<T>(2, tokens * columns));
    both!(T, "out", tolerance::<T>(), embedding::forward(&e, &ids, &table; tokens * columns));
    let order = by_row(&ids);
    both!(T, "dtable", tolerance::<T>(), embedding::backward(&e, &order, &dout; rows * columns));
}

fn elements<T: Real>(rows: usize, columns: usize) {
    let n = rows * columns;
    let (a, b) = (normal::<T>(1, n), normal::<T>(2, n));
    let bias = normal::<T>(3, columns);
    let tolerance = tolerance::<T>();
    both!(T, "add", tolerance, elementwise::add(&a, &b; n));
    both!(T, "axpy", tolerance, elementwise::axpy(T::from_f64(0.3), &a; n));
    both!(T, "scale", tolerance, elementwise::scale(T::from_f64(0.3); n));
    let by: Vec<T> = b.iter().map(|&b| b * b + T::ONE).collect();
    both!(T, "divide", tolerance, elementwise::divide(&by; n));
    both!(T, "bias", tolerance, elementwise::add_bias(&bias; n));
    both!(T, "dbias", tolerance, elementwise::bias_gradient(&a; columns));
    let weights = normal::<T>(4, rows);
    both!(T, "scaled rows", tolerance, weighted_rows::scale(&weights, &a; n));
    both!(T, "dots of rows", tolerance, weighted_rows::dot(&a, &b; rows));
    both!(T, "swap", 0.0, transpose::swap_leading([rows, columns, 1], &a; n));
    let cpu = cpu();
    let (sum, squares) = (elementwise::sum(&cpu, &a), elementwise::sum_of_squares(&cpu, &a));
    close("sum", &[sum], &[elementwise::reference::sum(&cpu, &a)], 1e-10);
    close("squares", &[squares], &[elementwise::reference::sum_of_squares(&cpu, &a)], 1e-12);
}

fn draws<T: Real>(view: &GlobalIndices) {
    let stream = Stream { seed: 0x1234_5678_9ABC_DEF0, tensor: 3, step: 4 };
    let n = view.len();
    let x = normal::<T>(1, n);
    let drop = Dropout { p: 0.4, stream };
    both!(T, "dropout", tolerance::<T>(), dropout::apply(&drop, view, &x; n));
    let (cpu, mut got, mut want) = (cpu(), poison::<T>(n), poison::<T>(n));
    random::fill_normal(&cpu, &mut got, view, stream, 0.02);
    random::reference::fill_normal(&cpu, &mut want, view, stream, 0.02);
    close("normal", &got, &want, 0.0);
    random::fill_uniform(&cpu, &mut got, view, stream, -1.0, 2.0);
    random::reference::fill_uniform(&cpu, &mut want, view, stream, -1.0, 2.0);
    close("uniform", &got, &want, 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn norms_are_the_reference((rows, columns) in sizes(), unit_offset in any::<bool>()) {
        norms::<f64>(rows, columns, unit_offset);
        norms::<f32>(rows, columns, unit_offset);
    }

    #[test]
    fn activations_are_the_reference(n in prop_oneof![0usize..70, Just(40_000)], spread in prop_oneof![Just(1.0), Just(30.0)]) {
        activations::<f64>(n, spread);
        activations::<f32>(n, spread);
    }

    #[test]
    fn rotations_are_the_reference(tokens in 1usize..200, heads in 1usize..4, pairs in 0usize..20, before in 0usize..3, behind in 0usize..3) {
        let dims = [(before + 2 * pairs + behind).max(1), before.min((before + 2 * pairs + behind).max(1)), pairs];
        rotations::<f64>(tokens, heads, dims);
        rotations::<f32>(tokens, heads, dims);
    }

    #[test]
    fn heads_of_latents_are_the_reference(tokens in 1usize..300, heads in 1usize..20, content in 0usize..40, rotary in 1usize..20, value in 1usize..40) {
        let of = LatentHeads { tokens, heads, content, rotary, value };
        heads_of_latents::<f64>(&of);
        heads_of_latents::<f32>(&of);
    }

    #[test]
    fn sinks_are_the_reference(batch in 1usize..4, heads in 1usize..20, queries in 1usize..100, width in 1usize..40) {
        let of = Sinks { batch, heads, queries, width };
        extra_logits::<f64>(&of);
        extra_logits::<f32>(&of);
    }

    #[test]
    fn embeddings_are_the_reference(tokens in 1usize..300, columns in 1usize..100, rows in 1usize..100, first_row in 0usize..20) {
        embeddings::<f64>(tokens, columns, rows, first_row);
        embeddings::<f32>(tokens, columns, rows, first_row);
    }

    #[test]
    fn elements_are_the_reference((rows, columns) in sizes()) {
        elements::<f64>(rows, columns);
        elements::<f32>(rows, columns);
    }

    #[test]
    fn draws_are_the_reference(
        offset in prop_oneof![0u64..9, Just((1u64 << 34) - 3)], sizes in [1usize..5, 1usize..30, 1usize..300],
        strides in [0u64..100_000, 0u64..1000, 1u64..3],
    ) {
        draws::<f64>(&GlobalIndices { offset, sizes, strides });
        draws::<f32>(&GlobalIndices { offset, sizes, strides });
    }
}

/// Moments of a million draws lie within five standard errors, and every shard has the same
/// numbers.
#[test]
fn normal_numbers_are_normal_and_the_same_in_any_shard() {
    let stream = Stream { seed: 11, tensor: 0, step: 0 };
    let (cpu, n) = (cpu(), 1_000_000);
    let mut x = poison::<f64>(n);
    random::fill_normal(&cpu, &mut x, &GlobalIndices::contiguous(0, n), stream, 2.0);
    let moment = |power: i32| x.iter().map(|x| (x / 2.0).powi(power)).sum::<f64>() / n as f64;
    assert!(moment(1).abs() < 5e-3);
    assert!((moment(2) - 1.0).abs() < 5.0 * 2f64.sqrt() / 1e3);
    assert!(moment(3).abs() < 5.0 * 15f64.sqrt() / 1e3);
    assert!((moment(4) - 3.0).abs() < 5.0 * 96f64.sqrt() / 1e3);
    let neighbours: f64 = x.windows(2).map(|x| x[0] * x[1] / 4.0).sum::<f64>() / n as f64;
    assert!(neighbours.abs() < 5e-3);
    let mut shard = poison::<f64>(30 * 17);
    random::fill_normal(&cpu, &mut shard, &GlobalIndices::matrix(5, 30, 3, 17, 1000), stream, 2.0);
    for (r, row) in shard.chunks(17).enumerate() {
        assert_eq!(row, &x[(5 + r) * 1000 + 3..][..17]);
    }
    let mut single = poison::<f32>(n);
    random::fill_normal(&cpu, &mut single, &GlobalIndices::contiguous(0, n), stream, 2.0);
    assert!(single.iter().zip(&x).all(|(&single, &x)| single == x as f32));
}
