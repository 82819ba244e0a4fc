//! Rotary embedding.

use super::{close, down, numbers, out, up};
use kernels::Cpu;
use kernels::cuda::{Gpu, Memory, Storage, Stored, bf16};
use kernels::rope::{self as rotary, Pairing, Rope};

/// The device's table in f32, and in f64.
fn table(gpu: &Gpu, positions: &[u32], dim: usize) -> (Memory<f32>, Vec<f64>) {
    let cpu = Cpu::serial();
    let frequencies = rotary::inverse_frequencies(1e4, dim);
    let mut found = out::<f32>(gpu, positions.len() * dim);
    let there = gpu.upload(positions).unwrap();
    rotary::cuda::fill_table(gpu, &frequencies, there.view(), found.view_mut()).unwrap();
    let mut expected = vec![0.0; positions.len() * dim];
    rotary::reference::fill_table(&cpu, &frequencies, positions, &mut expected);
    // Rounded once.
    let table = down(gpu, &found);
    let same = |(a, b): (&f64, &f64)| (a - b).abs() < 6e-8;
    assert!(table.iter().zip(&expected).all(same), "{table:?}, not {expected:?}");
    (found, table)
}

const POSITIONS: [u32; 5] = [0, 7, 1, 120_000, 4];

pub fn rope(gpu: &Gpu) {
    in_each_storage!(rope_in(gpu));
}

fn rope_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for (head_dim, start, dim) in [(32, 0, 32), (64, 0, 16), (40, 8, 32), (12, 2, 6)] {
        let (gtable, table) = table(gpu, &POSITIONS, dim);
        for pairing in [Pairing::Half, Pairing::Interleaved] {
            let (tokens, heads) = (5, 3);
            let rope =
                Rope { tokens, heads, head_dim, rotary_start: start, rotary_dim: dim, pairing };
            let x = numbers::<S>(tokens * heads * head_dim, 1);
            let [mut gx, mut gback] = [(); 2].map(|()| up::<S>(gpu, &x));
            rotary::cuda::forward(gpu, &rope, gtable.view(), gx.view_mut()).unwrap();
            rotary::cuda::backward(gpu, &rope, gtable.view(), gback.view_mut()).unwrap();
            let (mut y, mut dx) = (x.clone(), x);
            rotary::reference::forward(&cpu, &rope, &table, &mut y);
            rotary::reference::backward(&cpu, &rope, &table, &mut dx);
            close("rotated", S::STORAGE, &down(gpu, &gx), &y);
            close("rotated back", S::STORAGE, &down(gpu, &gback), &dx);
        }
    }
}

/// Queries and keys of a fused projection in one launch; the values after them stay unchanged.
pub fn packed_rope(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let (tokens, heads, kv_heads, head_dim) = (5, 4, 2, 16);
    let (gtable, table) = table(gpu, &POSITIONS, head_dim);
    let rotated = Rope::half(tokens, heads + kv_heads, head_dim);
    let stride = (heads + 2 * kv_heads) * head_dim;
    let x = numbers::<bf16>(tokens * stride, 1);
    let mut gx = up::<bf16>(gpu, &x);
    rotary::cuda::forward_packed(gpu, &rotated, stride, gtable.view(), gx.view_mut()).unwrap();
    let width = rotated.heads * head_dim;
    let one = Rope { tokens: 1, ..rotated };
    let mut y = x.clone();
    for (row, table) in y.chunks_mut(stride).zip(table.chunks(head_dim)) {
        rotary::reference::forward(&cpu, &one, table, &mut row[..width]);
    }
    close("rotated", Storage::Bf16, &down(gpu, &gx), &y);
    let mut gdx = up::<bf16>(gpu, &x);
    rotary::cuda::backward_packed(gpu, &rotated, stride, gtable.view(), gdx.view_mut()).unwrap();
    let mut dx = x;
    for (row, table) in dx.chunks_mut(stride).zip(table.chunks(head_dim)) {
        rotary::reference::backward(&cpu, &one, table, &mut row[..width]);
    }
    close("rotated back", Storage::Bf16, &down(gpu, &gdx), &dx);
}
