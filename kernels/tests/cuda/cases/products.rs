//! Matrix products.

use super::{down, numbers, out, up};
use kernels::cuda::{Gpu, Storage, Stored, bf16};
use kernels::gemm::{self, Batch, Shape};
use kernels::{Cpu, elementwise as sums};

/// For sums of many small products, which differ by the rounding of the largest. It is rounded
/// `times` times.
fn close_products(what: &str, storage: Storage, times: f64, found: &[f64], expected: &[f64]) {
    let most = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let relative = if storage == Storage::Bf16 { times / 256.0 } else { 2e-6 };
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = (found - expected).abs() <= relative * most;
        assert!(same, "{what} [{at}] {storage:?}: {found}, not {expected}");
    }
}

pub fn products(gpu: &Gpu) {
    products_in::<f32, f32>(gpu);
    products_in::<bf16, bf16>(gpu);
    products_in::<bf16, f32>(gpu);
}

fn products_in<S: Stored, O: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let (m, n, k) = (24, 40, 16);
    let shapes = [
        (Shape::nn(m, n, k), 1),
        (Shape::nt(m, n, k), 1),
        (Shape::tn(m, n, k), 1),
        // Rows with gaps, and batches.
        (Shape::nn(m, n, k).with_leading(k + 8, n + 16, n + 8), 1),
        (Shape::nt(m, n, k).with_leading(k + 8, k, n), 3),
        (Shape::tn(m, n, k), 2),
    ];
    for (number, (shape, count)) in shapes.into_iter().enumerate() {
        let rows = m.max(n).max(k);
        let strides = [rows * shape.lda, rows * shape.ldb, m * shape.ldc];
        // The batch shares its second factor.
        let stride_b = if count == 3 { 0 } else { strides[1] };
        let batch = Batch { count, stride_a: strides[0], stride_b, stride_c: strides[2] };
        let [a, b] = [0, 1].map(|i| numbers::<S>(count * strides[i], i + number));
        let c = numbers::<O>(count * strides[2], 7);
        let (ga, gb) = (up::<S>(gpu, &a), up::<S>(gpu, &b));
        for (alpha, beta) in [(1.0, 0.0), (0.5, 1.0), (1.0, -0.25)] {
            let (mut gc, mut expected) = (up::<O>(gpu, &c), c.clone());
            let (what, out) = (format!("{shape:?} {alpha} {beta}"), O::STORAGE);
            let (galpha, gbeta) = (alpha as f32, beta as f32);
            if count == 1 {
                gemm::cuda::gemm(gpu, &shape, galpha, ga.view(), gb.view(), gbeta, gc.view_mut())
                    .unwrap();
                gemm::reference::gemm(&cpu, &shape, alpha, &a, &b, beta, &mut expected);
            } else {
                gemm::cuda::gemm_batched(
                    gpu,
                    &shape,
                    &batch,
                    galpha,
                    ga.view(),
                    gb.view(),
                    gbeta,
                    gc.view_mut(),
                )
                .unwrap();
                gemm::reference::gemm_batched(
                    &cpu,
                    &shape,
                    &batch,
                    alpha,
                    &a,
                    &b,
                    beta,
                    &mut expected,
                );
            }
            // cuBLASLt may round a product before it adds the old result, as an H100 showed.
            let times = if beta == 0.0 { 1.0 } else { 2.0 };
            close_products(&what, out, times, &down(gpu, &gc), &expected);
        }
    }
}

pub fn biased_products(gpu: &Gpu) {
    in_each_storage!(biased_products_in(gpu));
}

fn biased_products_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let (m, n, k) = (24, 40, 16);
    for shape in [Shape::nt(m, n, k), Shape::nn(m, n, k)] {
        let (a, b, bias) = (numbers::<S>(m * k, 1), numbers::<S>(n * k, 2), numbers::<S>(n, 3));
        let [ga, gb, gbias] = [&a, &b, &bias].map(|tensor| up::<S>(gpu, tensor));
        let mut gc = out::<S>(gpu, m * n);
        gemm::cuda::gemm_bias(gpu, &shape, 1.0, ga.view(), gb.view(), gbias.view(), gc.view_mut())
            .unwrap();
        let mut c = vec![0.0; m * n];
        gemm::reference::gemm(&cpu, &shape, 1.0, &a, &b, 0.0, &mut c);
        sums::reference::add_bias(&cpu, &bias, &mut c);
        close_products("biased", S::STORAGE, 1.0, &down(gpu, &gc), &c);
    }
}
