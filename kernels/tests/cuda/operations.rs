//! Each operation's kernels.

use super::machine::{Run, narrowed, widened};
use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW, Parameter};
use kernels::attention::{self, Attention, Gradients, Saved};
use kernels::cross_entropy::{self, Logits};
use kernels::cuda::Storage;
use kernels::dropout::{self, Dropout};
use kernels::embedding::{self, Embedding};
use kernels::layer_norm::{self, LayerNorm};
use kernels::random::{Stream, View};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Pairing, Rope};
use kernels::{Cpu, Output, elementwise};

const STORAGES: [Storage; 2] = [Storage::F32, Storage::Bf16];

/// Numbers between -1 and 1 that the storage holds exactly.
fn numbers(storage: Storage, len: usize, seed: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    (0..len)
        .map(number)
        .map(|x| if storage == Storage::Bf16 { widened(narrowed(x)) } else { x })
        .collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Compares; a value in bf16 may be off by its rounding.
fn close(what: &str, storage: Storage, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let relative = if storage == Storage::Bf16 { 1.0 / 256.0 } else { 2e-6 };
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs();
        assert!(
            off <= relative * expected.abs() + 3e-6,
            "{what} [{at}] {storage:?}: {found}, not {expected}"
        );
    }
}

/// Rows, columns, threads: rows that fill a block and rows that do not, several packs a thread, packs of one.
const SHAPES: [(usize, usize, usize); 4] = [(3, 256, 32), (5, 96, 64), (2, 1000, 64), (4, 33, 32)];

#[test]
fn rms_norm_is_the_references() {
    let cpu = Cpu::serial();
    for storage in STORAGES {
        for (number, (rows, columns, threads)) in SHAPES.into_iter().enumerate() {
            let unit_offset = number % 2 == 1;
            let norm = RmsNorm { rows, columns, eps: 1e-5, unit_offset };
            let offset = if unit_offset { 1.0 } else { 0.0 };
            let constants = [("COLUMNS", columns as f64), ("EPS", 1e-5), ("OFFSET", offset)];
            let tensor = |seed| numbers(storage, rows * columns, seed);
            let (x, more, dy, old) = (tensor(1), tensor(2), tensor(3), tensor(4));
            let (w, dw) = (numbers(storage, columns, 5), numbers(Storage::F32, columns, 6));
            let mut run = Run::new("rms_norm", storage, columns, threads, &constants);
            let [bx, bmore, bdy, bdx] = [&x, &more, &dy, &old].map(|tensor| run.stored(tensor));
            let bw = run.stored(&w);
            let [bsum, by, bplain] = [(); 3].map(|()| run.stored(&vec![9.0; rows * columns]));
            let parts = 2;
            let [br, br_plain] = [(); 2].map(|()| run.floats(&vec![0.0; rows]));
            let (bpart, bdw) = (run.floats(&vec![9.0; parts * columns]), run.floats(&dw));
            run.launch(
                "rms_norm_forward",
                (rows, 1),
                &format!("s{bx}, nullptr, s{bw}, nullptr, s{bplain}, f{br_plain}"),
            );
            run.launch(
                "rms_norm_forward",
                (rows, 1),
                &format!("s{bx}, s{bmore}, s{bw}, s{bsum}, s{by}, f{br}"),
            );
            run.launch(
                "rms_norm_backward_input",
                (rows, 1),
                &format!("s{bsum}, s{bw}, f{br}, s{bdy}, s{bdx}, 1"),
            );
            run.launch(
                "rms_norm_backward_weight",
                (parts, 1),
                &format!("s{bsum}, f{br}, s{bdy}, f{bpart}, {rows}"),
            );
            let blocks = columns.div_ceil(threads);
            run.launch("rms_norm_column_sum", (blocks, 1), &format!("f{bpart}, f{bdw}, {parts}"));
            let found = run.finish();

            let (mut y, mut r) = (vec![0.0; rows * columns], vec![0.0; rows]);
            rms_norm::reference::forward(&cpu, &norm, &wide(&x), &wide(&w), &mut y, &mut r);
            close("plain y", storage, &found.stored(bplain), &y);
            close("plain r", Storage::F32, &found.floats(br_plain), &r);
            let sum: Vec<f32> = x.iter().zip(&more).map(|(a, b)| a + b).collect();
            close("sum", storage, &found.stored(bsum), &wide(&sum));
            // From here on of the sum as it is stored.
            let sum = found.stored(bsum);
            rms_norm::reference::forward(&cpu, &norm, &sum, &wide(&w), &mut y, &mut r);
            close("y", storage, &found.stored(by), &y);
            close("r", Storage::F32, &found.floats(br), &r);
            let mut dx = wide(&old);
            rms_norm::reference::backward_input(
                &cpu,
                &norm,
                &sum,
                &wide(&w),
                &r,
                &wide(&dy),
                &mut dx,
                Output::Accumulate,
            );
            close("dx", storage, &found.stored(bdx), &dx);
            let mut dw = wide(&dw);
            rms_norm::reference::backward_weight(&cpu, &norm, &sum, &r, &wide(&dy), &mut dw);
            close("dw", Storage::F32, &found.floats(bdw), &dw);
        }
    }
}

#[test]
fn layer_norm_is_the_references() {
    let cpu = Cpu::serial();
    for storage in STORAGES {
        for (rows, columns, threads) in SHAPES {
            let norm = LayerNorm { rows, columns, eps: 1e-5 };
            let tensor = |seed| numbers(storage, rows * columns, seed);
            let (x, more, dy) = (tensor(1), tensor(2), tensor(3));
            let (w, bias) = (numbers(storage, columns, 4), numbers(storage, columns, 5));
            let start = numbers(Storage::F32, columns, 6);
            let mut run = Run::new(
                "layer_norm",
                storage,
                columns,
                threads,
                &[("COLUMNS", columns as f64), ("EPS", 1e-5)],
            );
            let [bx, bmore, bdy] = [&x, &more, &dy].map(|tensor| run.stored(tensor));
            let [bw, bbias] = [&w, &bias].map(|tensor| run.stored(tensor));
            let [bsum, by, bdx] = [(); 3].map(|()| run.stored(&vec![9.0; rows * columns]));
            let parts = 2;
            let [bm, br] = [(); 2].map(|()| run.floats(&vec![0.0; rows]));
            let bpart = run.floats(&vec![9.0; parts * 2 * columns]);
            let [bdw, bdbias] = [(); 2].map(|()| run.floats(&start));
            run.launch(
                "layer_norm_forward",
                (rows, 1),
                &format!("s{bx}, s{bmore}, s{bw}, s{bbias}, s{bsum}, s{by}, f{bm}, f{br}"),
            );
            run.launch(
                "layer_norm_backward_input",
                (rows, 1),
                &format!("s{bsum}, s{bw}, f{bm}, f{br}, s{bdy}, s{bdx}, 0"),
            );
            run.launch(
                "layer_norm_backward_weight",
                (parts, 1),
                &format!("s{bsum}, f{bm}, f{br}, s{bdy}, f{bpart}, {rows}"),
            );
            let blocks = columns.div_ceil(threads);
            run.launch(
                "layer_norm_column_sum",
                (blocks, 1),
                &format!("f{bpart}, f{bdw}, f{bdbias}, {parts}"),
            );
            let found = run.finish();

            let sum = found.stored(bsum);
            let whole: Vec<f32> = x.iter().zip(&more).map(|(a, b)| a + b).collect();
            close("sum", storage, &sum, &wide(&whole));
            let (mut y, mut m, mut r) =
                (vec![0.0; rows * columns], vec![0.0; rows], vec![0.0; rows]);
            layer_norm::reference::forward(
                &cpu,
                &norm,
                &sum,
                &wide(&w),
                &wide(&bias),
                &mut y,
                &mut m,
                &mut r,
            );
            close("y", storage, &found.stored(by), &y);
            close("mean", Storage::F32, &found.floats(bm), &m);
            close("r", Storage::F32, &found.floats(br), &r);
            let mut dx = vec![0.0; rows * columns];
            let output = Output::Overwrite;
            layer_norm::reference::backward_input(
                &cpu,
                &norm,
                &sum,
                &wide(&w),
                &m,
                &r,
                &wide(&dy),
                &mut dx,
                output,
            );
            close("dx", storage, &found.stored(bdx), &dx);
            let (mut dw, mut dbias) = (wide(&start), wide(&start));
            layer_norm::reference::backward_weight(
                &cpu,
                &norm,
                &sum,
                &m,
                &r,
                &wide(&dy),
                &mut dw,
                &mut dbias,
            );
            close("dw", Storage::F32, &found.floats(bdw), &dw);
            close("dbias", Storage::F32, &found.floats(bdbias), &dbias);
        }
    }
}

#[test]
fn activations_are_the_references() {
    let cpu = Cpu::serial();
    let elements = 200;
    for storage in STORAGES {
        for (kind, activation) in Activation::ALL.into_iter().enumerate() {
            let tensor = |seed| -> Vec<f32> {
                numbers(storage, elements, seed).iter().map(|x| 4.0 * x).collect()
            };
            let (gate, up, dy) = (tensor(1), tensor(2), tensor(3));
            let mut run = Run::new("activation", storage, elements, 32, &[("KIND", kind as f64)]);
            let [bgate, bup, bdy] = [&gate, &up, &dy].map(|tensor| run.stored(tensor));
            let [by, bdx, bgated, bdgate, bdup] =
                [(); 5].map(|()| run.stored(&vec![9.0; elements]));
            let grid = ((elements / run.pack()).div_ceil(32), 1);
            run.launch("activation_forward", grid, &format!("s{bgate}, s{by}, {elements}"));
            run.launch(
                "activation_backward",
                grid,
                &format!("s{bgate}, s{bdy}, s{bdx}, {elements}"),
            );
            run.launch(
                "activation_gated_forward",
                grid,
                &format!("s{bgate}, s{bup}, s{bgated}, {elements}"),
            );
            run.launch(
                "activation_gated_backward",
                grid,
                &format!("s{bgate}, s{bup}, s{bdy}, s{bdgate}, s{bdup}, {elements}"),
            );
            let found = run.finish();

            let (gate, up, dy) = (wide(&gate), wide(&up), wide(&dy));
            let [mut y, mut dx, mut gated, mut dgate, mut dup] =
                [(); 5].map(|()| vec![0.0; elements]);
            activation::reference::forward(&cpu, activation, &gate, &mut y);
            activation::reference::backward(&cpu, activation, &gate, &dy, &mut dx);
            activation::reference::gated_forward(&cpu, activation, &gate, &up, &mut gated);
            activation::reference::gated_backward(
                &cpu, activation, &gate, &up, &dy, &mut dgate, &mut dup,
            );
            for (what, buffer, expected) in [
                ("y", by, y),
                ("dx", bdx, dx),
                ("gated", bgated, gated),
                ("dgate", bdgate, dgate),
                ("dup", bdup, dup),
            ] {
                close(&format!("{activation:?} {what}"), storage, &found.stored(buffer), &expected);
            }
        }
    }
}

#[test]
fn rope_is_the_references() {
    let cpu = Cpu::serial();
    for storage in STORAGES {
        for (head_dim, start, dim) in [(32, 0, 32), (40, 8, 32), (12, 2, 6)] {
            for (interleaved, pairing) in [(0.0, Pairing::Half), (1.0, Pairing::Interleaved)] {
                let (tokens, heads) = (5, 3);
                let rope =
                    Rope { tokens, heads, head_dim, rotary_start: start, rotary_dim: dim, pairing };
                let constants = [
                    ("HEADS", heads as f64),
                    ("HEAD_DIM", head_dim as f64),
                    ("ROTARY_START", start as f64),
                    ("ROTARY_DIM", dim as f64),
                    ("INTERLEAVED", interleaved),
                    ("TOKEN_STRIDE", (heads * head_dim) as f64),
                ];
                let x = numbers(storage, tokens * heads * head_dim, 1);
                let mut table = vec![0.0_f32; rope.table_elements()];
                let positions = [0, 7, 1, 30, 4];
                rope::reference::fill_table(
                    &cpu,
                    &rope::inverse_frequencies(1e4, dim),
                    &positions,
                    &mut table,
                );
                // Packs must divide half the pairs, and every offset.
                let row = [dim / 2, start, head_dim].into_iter().filter(|&n| n > 0).fold(8, gcd);
                let mut run = Run::new("rope", storage, row, 32, &constants);
                let (bx, btable) = (run.stored(&x), run.floats(&table));
                let back = run.stored(&x);
                let threads = tokens * heads * dim / 2 / run.pack();
                let grid = (threads.div_ceil(32), 1);
                run.launch("rope_rotate", grid, &format!("f{btable}, s{bx}, 1.0f, {tokens}"));
                run.launch("rope_rotate", grid, &format!("f{btable}, s{back}, -1.0f, {tokens}"));
                let found = run.finish();
                let (mut y, mut dx) = (wide(&x), wide(&x));
                rope::reference::forward(&cpu, &rope, &wide(&table), &mut y);
                rope::reference::backward(&cpu, &rope, &wide(&table), &mut dx);
                close("rotated", storage, &found.stored(bx), &y);
                close("rotated back", storage, &found.stored(back), &dx);
            }
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[test]
fn adamw_is_the_references() {
    let cpu = Cpu::serial();
    let step = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, step: 3, gradient_scale: 0.5 };
    for storage in STORAGES {
        let mut run = Run::new("adamw", storage, 1, 32, &[]);
        let tensors: Vec<_> = [(70, 0.1), (33, 0.0)]
            .into_iter()
            .map(|(elements, decay): (usize, f64)| {
                let [w, g, m] = [1, 2, 3].map(|seed| numbers(Storage::F32, elements, seed));
                let v: Vec<f32> = m.iter().map(|m| m * m).collect();
                let buffers = [&w, &g, &m, &v].map(|tensor| run.floats(tensor));
                let copy = run.stored(&vec![9.0; elements]);
                (elements, decay, [w, g, m, v], buffers, copy)
            })
            .collect();
        let t = f64::from(step.step);
        let rate = step.lr / (1.0 - step.beta1.powf(t));
        let root = 1.0 / (1.0 - step.beta2.powf(t)).sqrt();
        run.prepare(&format!(
            "Factors factors = {{{}f, {rate}f, {root}f, {}f, {}f, {}f, {:.9}f, 0}};",
            step.lr, step.gradient_scale, step.beta1, step.beta2, step.eps
        ));
        let rows: Vec<String> = tensors
            .iter()
            .map(|(elements, decay, _, [w, g, m, v], copy)| {
                let float = |buffer: &usize| format!("(float*)b[{buffer}].data()");
                let state = [w, g, m, v].map(float).join(", ");
                format!("{{{state}, (stored*)b[{copy}].data(), {elements}, {decay:?}f, 0}}")
            })
            .collect();
        run.prepare(&format!("Tensor tensors[] = {{{}}};", rows.join(", ")));
        run.launch("adamw_update", (2, tensors.len()), "tensors, &factors");
        let found = run.finish();
        for (elements, decay, [w, g, m, v], buffers, copy) in tensors {
            let [mut w, g, mut m, mut v] = [w, g, m, v].map(|tensor| wide(&tensor));
            let parameter = Parameter { w: &mut w, g: &g, m: &mut m, v: &mut v, decay };
            adamw::reference::update(&cpu, &step, &mut [parameter]);
            for (what, buffer, expected) in
                [("w", buffers[0], &w), ("m", buffers[2], &m), ("v", buffers[3], &v)]
            {
                close(
                    &format!("{what} of {elements}"),
                    Storage::F32,
                    &found.floats(buffer),
                    expected,
                );
            }
            close("copy", storage, &found.stored(copy), &w);
        }
    }
}

#[test]
fn elementwise_is_the_references() {
    let cpu = Cpu::serial();
    for storage in STORAGES {
        for (rows, columns) in [(6, 64), (5, 33)] {
            let elements = rows * columns;
            let [a, b] = [1, 2].map(|seed| numbers(storage, elements, seed));
            let (bias, start) = (numbers(storage, columns, 3), numbers(Storage::F32, elements, 4));
            let mut run =
                Run::new("elementwise", storage, columns, 32, &[("COLUMNS", columns as f64)]);
            let [ba, bb, by] = [&a, &b, &a].map(|tensor| run.stored(tensor));
            let (bbias, bbiased) = (run.stored(&bias), run.stored(&a));
            let (bsum, bwide) = (run.floats(&start), run.floats(&start));
            let (bpart, bdbias) =
                (run.floats(&vec![9.0; 2 * columns]), run.floats(&start[..columns]));
            let bsquares = run.doubles(3);
            let grid = ((elements / run.pack()).div_ceil(32), 1);
            run.launch("elementwise_add", grid, &format!("s{ba}, s{bb}, s{by}, {elements}"));
            run.launch("elementwise_add_bias", grid, &format!("s{bbias}, s{bbiased}, {elements}"));
            run.launch("elementwise_accumulate", grid, &format!("s{ba}, f{bsum}, {elements}"));
            run.launch("elementwise_column_partials", (2, 1), &format!("s{ba}, f{bpart}, {rows}"));
            run.launch(
                "elementwise_column_sum",
                (columns.div_ceil(32), 1),
                &format!("f{bpart}, f{bdbias}, 2"),
            );
            run.launch(
                "elementwise_squares",
                (3, 1),
                &format!("f{bwide}, d{bsquares}, {elements}"),
            );
            let found = run.finish();
            let mut y = vec![0.0; elements];
            elementwise::reference::add(&cpu, &wide(&a), &wide(&b), &mut y);
            close("sum", storage, &found.stored(by), &y);
            let mut biased = wide(&a);
            elementwise::reference::add_bias(&cpu, &wide(&bias), &mut biased);
            close("biased", storage, &found.stored(bbiased), &biased);
            let mut total = wide(&start);
            elementwise::reference::axpy(&cpu, 1.0, &wide(&a), &mut total);
            close("accumulated", Storage::F32, &found.floats(bsum), &total);
            let mut dbias = wide(&start[..columns]);
            elementwise::reference::bias_gradient(&cpu, &wide(&a), &mut dbias);
            close("dbias", Storage::F32, &found.floats(bdbias), &dbias);
            let squares = found.doubles(bsquares).iter().sum::<f64>();
            let expected = elementwise::reference::sum_of_squares(&cpu, &wide(&start));
            assert!((squares / expected - 1.0).abs() < 1e-14, "{squares} {expected}");
        }
    }
}

#[test]
fn embedding_is_the_references() {
    let cpu = Cpu::serial();
    let ids = [5_i64, 9, 5, 2, 12, 7, 5, 9, 3];
    for storage in STORAGES {
        for columns in [64, 33] {
            let embedding =
                Embedding { tokens: ids.len(), columns, rows: 6, first_row: 4, scale: 1.5 };
            let table = numbers(storage, 6 * columns, 1);
            let dout = numbers(storage, ids.len() * columns, 2);
            let start = numbers(Storage::F32, 6 * columns, 3);
            // Tokens by row, stably, as the host sorts them.
            let mut by_row: Vec<(i64, i32)> =
                ids.iter().zip(0..).map(|(&id, token)| (id - 4, token)).collect();
            by_row.retain(|(row, _)| (0..6).contains(row));
            by_row.sort_by_key(|&(row, _)| row);
            let order: Vec<i32> = by_row.iter().map(|&(_, token)| token).collect();
            let mut distinct: Vec<i32> = by_row.iter().map(|&(row, _)| row as i32).collect();
            distinct.dedup();
            let before = |row: i32| {
                by_row.iter().filter(|(other, _)| *other < i64::from(row)).count() as i32
            };
            let starts: Vec<i32> =
                distinct.iter().map(|&row| before(row)).chain([order.len() as i32]).collect();

            let constants = [("COLUMNS", columns as f64), ("SCALE", 1.5)];
            let mut run = Run::new("embedding", storage, columns, 32, &constants);
            let bids = run.longs(&ids);
            let [btable, bdout] = [&table, &dout].map(|tensor| run.stored(tensor));
            let bout = run.stored(&vec![9.0; ids.len() * columns]);
            let [border, bstarts, bdistinct] =
                [&order, &starts, &distinct].map(|list| run.ints(list));
            let bdtable = run.floats(&start);
            run.launch(
                "embedding_forward",
                (ids.len(), 1),
                &format!("l{bids}, s{btable}, s{bout}, 4, 6"),
            );
            run.launch(
                "embedding_backward",
                (distinct.len(), 1),
                &format!("i{border}, i{bstarts}, i{bdistinct}, s{bdout}, f{bdtable}"),
            );
            let found = run.finish();
            let mut out = vec![0.0; ids.len() * columns];
            embedding::reference::forward(&cpu, &embedding, &ids, &wide(&table), &mut out);
            close("out", storage, &found.stored(bout), &out);
            let mut dtable = wide(&start);
            embedding::reference::backward(&cpu, &embedding, &ids, &wide(&dout), &mut dtable);
            close("dtable", Storage::F32, &found.floats(bdtable), &dtable);
        }
    }
}

#[test]
fn cross_entropy_is_the_references() {
    let cpu = Cpu::serial();
    // A target on this shard, one on another, an ignored one, and the last real column.
    let targets = [103_i64, 5, -1, 100 + 46];
    for storage in STORAGES {
        for (columns, real, cap) in
            [(64, 47, None), (48, 47, Some(3.0)), (51, 47, None), (64, 0, None)]
        {
            let rows = targets.len();
            let shape =
                Logits { rows, columns, real_columns: real, first_column: 100, soft_cap: cap };
            let constants = [("COLUMNS", columns as f64), ("SOFT_CAP", cap.unwrap_or(0.0))];
            let logits: Vec<f32> =
                numbers(storage, rows * columns, 1).iter().map(|x| 8.0 * x).collect();
            let mut run = Run::new("cross_entropy", storage, columns, 32, &constants);
            let (blogits, btargets) = (run.stored(&logits), run.longs(&targets));
            let [bmax, bsum, btarget, bloss, bcommon] = [(); 5].map(|()| run.floats(&[9.0; 4]));
            run.launch(
                "cross_entropy_statistics",
                (rows, 1),
                &format!("s{blogits}, l{btargets}, f{bmax}, f{bsum}, f{btarget}, 100, {real}"),
            );
            // As if another shard had a larger maximum.
            run.prepare(&format!(
                "for (int i = 0; i < 4; ++i) ((float*)b[{bcommon}].data())[i] = 8.5f;"
            ));
            run.launch(
                "cross_entropy_rescale",
                (1, 1),
                &format!("f{bmax}, f{bcommon}, f{bsum}, {rows}"),
            );
            run.launch(
                "cross_entropy_loss",
                (1, 1),
                &format!("l{btargets}, f{bcommon}, f{bsum}, f{btarget}, f{bloss}, {rows}"),
            );
            if real > 0 {
                run.launch(
                    "cross_entropy_gradient",
                    (rows, 1),
                    &format!("s{blogits}, l{btargets}, f{bcommon}, f{bsum}, 0.25f, 100, {real}"),
                );
            }
            let found = run.finish();

            let mut z = wide(&logits);
            let [mut max, mut sum, mut target, mut loss] = [(); 4].map(|()| vec![0.0; rows]);
            cross_entropy::reference::local_max(&cpu, &shape, &z, &mut max);
            cross_entropy::reference::local_sum_exp(
                &cpu,
                &shape,
                &z,
                &targets,
                &max,
                &mut sum,
                &mut target,
            );
            let common = vec![8.5; rows];
            cross_entropy::reference::rescale_sum_exp(&cpu, &max, &common, &mut sum);
            close("target", Storage::F32, &found.floats(btarget), &target);
            if real == 0 {
                assert!(found.floats(bmax).iter().all(|&max| max == f64::NEG_INFINITY));
                assert!(found.floats(bsum).iter().all(|&sum| sum == 0.0));
                continue;
            }
            close("max", Storage::F32, &found.floats(bmax), &max);
            close("sum", Storage::F32, &found.floats(bsum), &sum);
            cross_entropy::reference::loss(&cpu, &targets, &common, &sum, &target, &mut loss);
            close("loss", Storage::F32, &found.floats(bloss), &loss);
            cross_entropy::reference::gradient_in_place(
                &cpu, &shape, &mut z, &targets, &common, &sum, 0.25,
            );
            close("gradient", storage, &found.stored(blogits), &z);
        }
    }
}

#[test]
fn dropout_draws_the_references_words() {
    let cpu = Cpu::serial();
    let (rows, columns, stride, offset) = (5, 40, 56, 1_u64 << 33 | 3);
    let stream = Stream { seed: 0x1234_5678_9abc_def0, tensor: 7, step: 11 };
    let dropout = Dropout { p: 0.3, stream };
    let threshold = (0.3 * 4_294_967_296.0) as u32;
    let view = View { offset, sizes: [1, rows, columns], strides: [0, stride, 1] };
    for storage in STORAGES {
        let x = numbers(storage, rows * columns, 1);
        let mut run = Run::new("dropout", storage, columns, 32, &[]);
        let (bx, by) = (run.stored(&x), run.stored(&x));
        let grid = ((rows * columns / run.pack()).div_ceil(32), 1);
        run.launch(
            "dropout_apply",
            grid,
            &format!(
                "s{bx}, s{by}, {}, {columns}, {offset}ull, {stride}, {}ull, 7, 11, {threshold}u, {}f",
                rows * columns,
                stream.seed,
                1.0 / 0.7
            ),
        );
        let found = run.finish();
        let mut y = vec![0.0; rows * columns];
        dropout::reference::apply(&cpu, &dropout, &view, &wide(&x), &mut y);
        close("y", storage, &found.stored(by), &y);
        let kept = y.iter().filter(|&&y| y != 0.0).count();
        assert!((100..180).contains(&kept), "{kept} of {}", rows * columns);
    }
}

/// Of tensor-core products with factors rounded to bf16: by norm, and no element far out.
fn close_by_norm(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let whole = norm(&mut expected.iter().copied());
    assert!(off <= 5e-3 * whole, "{what}: off by {off:e} of {whole:e}");
    let most = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= 0.02 * most, "{what} [{at}]: {found}, not {expected}");
    }
}

#[test]
fn attention_is_the_references() {
    let cpu = Cpu::serial();
    let causal = |q_len, kv_len, dims: (usize, usize)| Attention {
        q_len,
        kv_len,
        qk_dim: dims.0,
        v_dim: dims.1,
        ..Attention::causal(2, q_len, 4, 2, dims.0)
    };
    let shapes = [
        causal(70, 70, (32, 32)),
        Attention { causal: false, ..causal(17, 90, (48, 32)) },
        Attention { window: Some(20), ..causal(80, 80, (16, 16)) },
        Attention { soft_cap: Some(1.5), kv_heads: 4, ..causal(33, 33, (16, 32)) },
        Attention { kv_heads: 1, ..causal(40, 40, (32, 16)) },
        // A chunk of queries and of keys that begins before them and ends within; and keys that nobody sees.
        Attention { q_offset: 50, kv_offset: 30, ..causal(40, 45, (16, 16)) },
        Attention { q_offset: 0, kv_offset: 20, ..causal(40, 40, (16, 16)) },
    ];
    let storage = Storage::Bf16;
    for a in shapes {
        let [q, k, v, dout] = [a.q_elements(), a.k_elements(), a.v_elements(), a.out_elements()]
            .map(|len| numbers(storage, len, len % 97));
        let constants = [
            ("Q_HEADS", a.q_heads as f64),
            ("KV_HEADS", a.kv_heads as f64),
            ("QK_DIM", a.qk_dim as f64),
            ("V_DIM", a.v_dim as f64),
            ("SCALE", a.scale),
            ("CAUSAL", f64::from(u8::from(a.causal))),
            ("WINDOW", a.window.unwrap_or(0) as f64),
            ("SOFT_CAP", a.soft_cap.unwrap_or(0.0)),
        ];
        let threads = 64;
        let mut run = Run::new("attention", storage, 8, threads, &constants);
        let [bq, bk, bv, bdout] = [&q, &k, &v, &dout].map(|tensor| run.stored(tensor));
        let [bout, bdq, bdk, bdv] =
            [&dout, &q, &k, &v].map(|tensor| run.stored(&vec![9.0; tensor.len()]));
        let [blse, bdelta] = [(); 2].map(|()| run.floats(&vec![9.0; a.lse_elements()]));
        let lengths = format!("{}, {}, {}, {}", a.q_len, a.kv_len, a.q_offset, a.kv_offset);
        let blocks = |rows: usize| rows.div_ceil(threads / 2);
        let by_query = (blocks(a.q_len), a.batch * a.q_heads);
        run.launch(
            "attention_forward",
            by_query,
            &format!("s{bq}, s{bk}, s{bv}, s{bout}, f{blse}, {lengths}"),
        );
        let rows = a.batch * a.q_len * a.q_heads;
        let grid = (rows.div_ceil(threads / 32), 1);
        run.launch(
            "attention_delta",
            grid,
            &format!("s{bout}, s{bdout}, f{bdelta}, {}, {}", a.batch, a.q_len),
        );
        let saved = format!("s{bq}, s{bk}, s{bv}, s{bdout}, f{blse}, f{bdelta}");
        run.launch("attention_backward_query", by_query, &format!("{saved}, s{bdq}, {lengths}"));
        let by_key = (blocks(a.kv_len), a.batch * a.kv_heads);
        run.launch(
            "attention_backward_key_value",
            by_key,
            &format!("{saved}, s{bdk}, s{bdv}, {lengths}"),
        );
        let found = run.finish();

        let [q, k, v, dout] = [q, k, v, dout].map(|tensor| wide(&tensor));
        let (mut out, mut lse) = (vec![0.0; dout.len()], vec![0.0; a.lse_elements()]);
        attention::reference::forward(&cpu, &a, &q, &k, &v, &mut out, &mut lse);
        let what = format!("{a:?}");
        close_by_norm(&format!("out of {what}"), &found.stored(bout), &out);
        for (found, expected) in found.floats(blse).iter().zip(&lse) {
            let same =
                found == expected || (found - expected).abs() < 1e-5 * expected.abs().max(1.0);
            assert!(same, "lse {found}, not {expected}: {what}");
        }
        let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        attention::reference::backward(&cpu, &a, &saved, &dout, &mut gradients, Output::Overwrite);
        for (name, buffer, expected) in [("dq", bdq, &dq), ("dk", bdk, &dk), ("dv", bdv, &dv)] {
            close_by_norm(&format!("{name} of {what}"), &found.stored(buffer), expected);
        }
    }
}
