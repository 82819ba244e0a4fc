//! Device memory, and the errors that the emulator detects.

use super::emulator;
use kernels::Output;
use kernels::cuda::bf16;
use kernels::elementwise::cuda as elementwise;

#[test]
fn memory_is_cut_from_the_arena_and_comes_back() {
    let gpu = emulator();
    gpu.reserve(4096).unwrap();
    assert_eq!(gpu.bytes_reserved(), 4096);
    let first = gpu.upload(&[1.0_f32; 100]).unwrap();
    let second = gpu.memory::<bf16>(200).unwrap();
    assert_eq!(gpu.bytes_of_arena(), 1024);
    drop((first, second));
    // The same number of bytes, of another type.
    let [a, b] = [(); 2].map(|()| gpu.memory::<i64>(50).unwrap());
    assert_eq!((gpu.bytes_of_arena(), gpu.bytes_beyond_arena()), (1024, 0));
    drop((a, b));
    let large = gpu.memory::<f32>(1000).unwrap();
    assert_eq!((gpu.bytes_of_arena(), gpu.bytes_beyond_arena()), (1024, 4096));
    drop(large);
    let again = gpu.memory::<f32>(1000).unwrap();
    assert_eq!((again.len(), gpu.bytes_beyond_arena()), (1000, 4096));
    // Another queue shares the arena, but not the memory returned to this one.
    let other = gpu.fork().unwrap();
    let third = other.memory::<f32>(100).unwrap();
    assert_eq!((third.len(), gpu.bytes_of_arena()), (100, 1536));
    // Once it is gone, any queue may take its memory.
    drop((third, other));
    let fourth = gpu.fork().unwrap().memory::<bf16>(200).unwrap();
    assert_eq!((fourth.len(), gpu.bytes_of_arena()), (200, 1536));
}

/// As the rows of experts, step after step. Blocks are as many as in a layer, and come back in
/// another order.
#[test]
fn sizes_that_differ_from_step_to_step_share_memory() {
    let (gpu, largest) = (emulator(), 6_000_000);
    gpu.reserve(largest * 3 / 2).unwrap();
    for step in 0..300 {
        let len = |n: usize| 1 + (step * 7919 + n * n * 104_729) % (largest / 6);
        let mut live: Vec<_> = (0..6).map(|n| gpu.memory::<u8>(len(n)).unwrap()).collect();
        // Memory in use keeps its contents.
        for (n, memory) in live.iter_mut().enumerate() {
            gpu.copy_in(&vec![n as u8; memory.len()], memory.view_mut()).unwrap();
        }
        for (n, memory) in live.iter().enumerate() {
            let held = gpu.download(memory.view()).unwrap();
            assert!(held.iter().all(|&byte| byte == n as u8), "block {n} of step {step}");
        }
        assert_eq!(gpu.bytes_beyond_arena(), 0, "in step {step}");
        live.swap(step % 6, (step / 6) % 6);
    }
}

#[test]
fn unwritten_memory_is_no_number_in_debug_builds() {
    let gpu = emulator();
    let memory = gpu.memory::<f32>(10).unwrap();
    let found = gpu.download(memory.view()).unwrap();
    assert_eq!(found.iter().all(|x| x.is_nan()), cfg!(debug_assertions));
}

#[test]
fn views_are_parts() {
    let gpu = emulator();
    let numbers: Vec<i64> = (0..10).collect();
    let mut memory = gpu.upload(&numbers).unwrap();
    assert_eq!(gpu.download(memory.slice(3..5)).unwrap(), [3, 4]);
    assert_eq!(gpu.download(memory.slice(..).slice(8..)).unwrap(), [8, 9]);
    gpu.copy_in(&[-1, -2], memory.slice_mut(4..=5)).unwrap();
    gpu.zero(memory.slice_mut(9..)).unwrap();
    let (mut low, high) = memory.view_mut().split_at(2);
    gpu.copy(high.view().slice(2..4), low.view_mut()).unwrap();
    assert_eq!(gpu.download(memory.view()).unwrap(), [-1, -2, 2, 3, -1, -2, 6, 7, 8, 0]);
    let empty = gpu.memory::<f32>(0).unwrap();
    assert!(gpu.download(empty.view()).unwrap().is_empty());
}

#[test]
#[should_panic(expected = "elements 5..11 of 10")]
fn views_end_where_memory_does() {
    let _ = emulator().memory::<f32>(10).unwrap().slice(5..11);
}

#[test]
#[should_panic(expected = "y has 9 elements where the shape says 10")]
fn lengths_are_checked_at_the_door() {
    let gpu = emulator();
    let x = gpu.zeros::<f32>(10).unwrap();
    let mut y = gpu.zeros::<f32>(9).unwrap();
    let _ = elementwise::axpy(&gpu, 1.0, x.view(), y.view_mut());
}

/// Views with any alignment work, with smaller packs.
#[test]
fn views_need_no_alignment() {
    let gpu = emulator();
    let numbers: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let x = gpu.upload(&numbers).unwrap();
    for start in 0..5 {
        let mut y = gpu.zeros::<f32>(64).unwrap();
        elementwise::axpy(&gpu, 2.0, x.slice(start..start + 32), y.slice_mut(3..35)).unwrap();
        let found = gpu.download(y.view()).unwrap();
        let expected =
            |i: usize| if (3..35).contains(&i) { 2.0 * (i - 3 + start) as f32 } else { 0.0 };
        assert!((0..64).all(|i| found[i] == expected(i)), "{start}: {found:?}");
    }
}

#[test]
fn sums_stay_on_the_device() {
    let gpu = emulator();
    let [x, y] = [3.0_f32, 4.0].map(|value| gpu.upload(&[value; 2]).unwrap());
    let mut total = gpu.memory::<f64>(1).unwrap();
    elementwise::sum_of_squares_into(&gpu, x.view(), total.view_mut(), Output::Overwrite).unwrap();
    elementwise::sum_of_squares_into(&gpu, y.view(), total.view_mut(), Output::Accumulate).unwrap();
    assert_eq!(gpu.download(total.view()).unwrap(), [50.0]);
    assert_eq!(elementwise::sum(&gpu, y.view()).unwrap(), 8.0);
    assert_eq!(elementwise::sum(&gpu, gpu.memory::<f32>(0).unwrap().view()).unwrap(), 0.0);
}

/// A build or a machine without GPUs reports that.
#[test]
fn a_missing_gpu_is_named() {
    use kernels::cuda::Gpu;
    // Even with GPUs there is none with this number.
    let error = Gpu::open(1000).expect_err("there are fewer").to_string();
    let known =
        ["the feature `cuda`", "libcuda.so.1 is not here", "there is no GPU 1000", "cuInit"];
    assert!(known.iter().any(|words| error.contains(words)), "{error}");
}
