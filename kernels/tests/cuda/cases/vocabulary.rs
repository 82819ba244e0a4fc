//! Embedding and cross-entropy.

use super::{close, down, numbers, out, up};
use kernels::Cpu;
use kernels::cross_entropy::{self, Logits};
use kernels::cuda::{Gpu, Storage, Stored, bf16};
use kernels::embedding::{self, Embedding};

pub fn embedding(gpu: &Gpu) {
    in_each_storage!(embedding_in(gpu));
}

fn embedding_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    // Ids beyond both ends, ids that recur, and unique ids.
    let few: Vec<i64> =
        (0..80).map(|i| if i == 70 { 8 } else { [5, 9, 5, 2, 12, 7, 5, 9, 3][i % 9] }).collect();
    // A third of the tokens has one id: runs over many blocks, and ids that are not in the range
    // on both sides.
    let many: Vec<i64> = (0..2500).map(|i| 6 + i * i % 700 * (i % 3).min(1)).collect();
    let cases = [(&few, 64, 6), (&few, 33, 6), (&few, 2100, 6), (&many, 24, 690)];
    for (ids, columns, rows) in cases {
        let order = embedding::by_row(ids);
        let (gids, gorder) = (gpu.upload(ids).unwrap(), gpu.upload(&order).unwrap());
        let embedding = Embedding { tokens: ids.len(), columns, rows, first_row: 4, scale: 1.5 };
        let (table, dout) = (numbers::<S>(rows * columns, 1), numbers::<S>(ids.len() * columns, 2));
        let start = numbers::<f32>(rows * columns, 3);
        let [gtable, gdout] = [&table, &dout].map(|tensor| up::<S>(gpu, tensor));
        let (mut gout, mut gdtable) = (out::<S>(gpu, ids.len() * columns), up::<f32>(gpu, &start));
        embedding::cuda::forward(gpu, &embedding, gids.view(), gtable.view(), gout.view_mut())
            .unwrap();
        let mut out = vec![0.0; ids.len() * columns];
        embedding::reference::forward(&cpu, &embedding, ids, &table, &mut out);
        close("out", S::STORAGE, &down(gpu, &gout), &out);
        let (order_view, to) = (gorder.view(), gdtable.view_mut());
        embedding::cuda::backward(gpu, &embedding, order_view, gdout.view(), to).unwrap();
        let mut dtable = start;
        embedding::reference::backward(&cpu, &embedding, &order, &dout, &mut dtable);
        close("dtable", Storage::F32, &down(gpu, &gdtable), &dtable);
    }
}

pub fn cross_entropy(gpu: &Gpu) {
    in_each_storage!(cross_entropy_in(gpu));
}

fn cross_entropy_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    // A target on this shard, one on another, an ignored one, and the last real column.
    let targets = [103_i64, 5, -1, 100 + 46];
    let gtargets = gpu.upload(&targets).unwrap();
    for (columns, real, cap) in
        [(64, 47, None), (48, 47, Some(3.0)), (51, 47, None), (64, 0, None), (9000, 8990, None)]
    {
        let rows = targets.len();
        let shape = Logits { rows, columns, real_columns: real, first_column: 100, soft_cap: cap };
        let logits: Vec<f64> =
            numbers::<S>(rows * columns, 1).into_iter().map(|x| 8.0 * x).collect();
        let mut glogits = up::<S>(gpu, &logits);
        let [mut gmax, mut gsum, mut gtarget, mut gloss] = [(); 4].map(|()| out::<f32>(gpu, rows));
        let [mut gmax2, mut gsum2, mut gtarget2] = [(); 3].map(|()| out::<f32>(gpu, rows));
        let mut z = logits;
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
        cross_entropy::cuda::local_max(gpu, &shape, glogits.view(), gmax.view_mut()).unwrap();
        close("max", Storage::F32, &down(gpu, &gmax), &max);
        cross_entropy::cuda::local_sum_exp(
            gpu,
            &shape,
            glogits.view(),
            gtargets.view(),
            gmax.view(),
            gsum.view_mut(),
            gtarget.view_mut(),
        )
        .unwrap();
        cross_entropy::cuda::statistics(
            gpu,
            &shape,
            glogits.view(),
            gtargets.view(),
            gmax2.view_mut(),
            gsum2.view_mut(),
            gtarget2.view_mut(),
        )
        .unwrap();
        for (gmax, gsum, gtarget) in [(&gmax, &gsum, &gtarget), (&gmax2, &gsum2, &gtarget2)] {
            close("max", Storage::F32, &down(gpu, gmax), &max);
            close("sum", Storage::F32, &down(gpu, gsum), &sum);
            close("target", Storage::F32, &down(gpu, gtarget), &target);
        }
        // As if another shard had a larger maximum.
        let common = vec![8.5; rows];
        let gcommon = up::<f32>(gpu, &common);
        cross_entropy::cuda::rescale_sum_exp(gpu, gmax.view(), gcommon.view(), gsum.view_mut())
            .unwrap();
        cross_entropy::reference::rescale_sum_exp(&cpu, &max, &common, &mut sum);
        close("rescaled", Storage::F32, &down(gpu, &gsum), &sum);
        if real == 0 {
            continue;
        }
        let total: Vec<f64> = down(gpu, &gsum);
        cross_entropy::cuda::loss(
            gpu,
            gtargets.view(),
            gcommon.view(),
            gsum.view(),
            gtarget.view(),
            gloss.view_mut(),
        )
        .unwrap();
        cross_entropy::reference::loss(&cpu, &targets, &common, &total, &target, &mut loss);
        close("loss", Storage::F32, &down(gpu, &gloss), &loss);
        cross_entropy::cuda::gradient_in_place(
            gpu,
            &shape,
            glogits.view_mut(),
            gtargets.view(),
            gcommon.view(),
            gsum.view(),
            0.25,
        )
        .unwrap();
        cross_entropy::reference::gradient_in_place(
            &cpu, &shape, &mut z, &targets, &common, &total, 0.25,
        );
        close("gradient", S::STORAGE, &down(gpu, &glogits), &z);
    }
}

pub fn vocabulary_split(gpu: &Gpu) {
    in_each_storage!(vocabulary_split_in(gpu));
}

/// The elementwise work of algorithm 2 for a split vocabulary.
fn vocabulary_split_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let targets = [103_i64, 5, -1, 100 + 46, 100 + 47];
    let gtargets = gpu.upload(&targets).unwrap();
    let rows = targets.len();
    let (factor, target) = (numbers::<f32>(rows, 1), numbers::<f32>(rows, 2));
    let [gfactor, gtarget] = [&factor, &target].map(|tensor| up::<f32>(gpu, tensor));
    for (columns, real, soft_cap) in [(64, 47, None), (48, 47, Some(3.0)), (51, 47, Some(1.5))] {
        let shape = Logits { rows, columns, real_columns: real, first_column: 100, soft_cap };
        let [x, hits] = [3, 4].map(|seed| numbers::<S>(rows * columns, seed));
        let ghits = up::<S>(gpu, &hits);

        let (mut gx, mut y) = (up::<S>(gpu, &x), x.clone());
        cross_entropy::cuda::scale_by_slope(gpu, soft_cap, gtarget.view(), gx.view_mut()).unwrap();
        cross_entropy::reference::scale_by_slope(&cpu, soft_cap, &target, &mut y);
        close("slope", S::STORAGE, &down(gpu, &gx), &y);

        let (mut gx, mut y) = (up::<S>(gpu, &x), x.clone());
        cross_entropy::cuda::softmax_to_gradient(
            gpu,
            &shape,
            gx.view_mut(),
            gtargets.view(),
            gfactor.view(),
            gtarget.view(),
            0.25,
        )
        .unwrap();
        cross_entropy::reference::softmax_to_gradient(
            &cpu, &shape, &mut y, &targets, &factor, &target, 0.25,
        );
        close("softmax to gradient", S::STORAGE, &down(gpu, &gx), &y);

        let (mut gx, mut y) = (up::<S>(gpu, &x), x);
        let (to, hit) = (gx.view_mut(), ghits.view());
        cross_entropy::cuda::join_gradient(gpu, to, hit, gfactor.view(), 0.25).unwrap();
        cross_entropy::reference::join_gradient(&cpu, &mut y, &hits, &factor, 0.25);
        close("joined", S::STORAGE, &down(gpu, &gx), &y);
    }
}
