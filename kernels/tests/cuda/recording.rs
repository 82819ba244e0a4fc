//! Work that is recorded and replayed, on asynchronous queues.

use super::folder;
use kernels::Cpu;
use kernels::cross_entropy::{self, Logits};
use kernels::cuda::cpu_emulator::CpuEmulator;
use kernels::cuda::{AsyncEmulator, Driver, Gpu, GpuError, Memory, OF_STEP, StepNumbers};
use kernels::dropout::{self, Dropout};
use kernels::elementwise::cuda::axpy;
use kernels::random::{GlobalIndices, Stream};
use std::sync::Arc;
use std::time::Duration;

fn async_emulator() -> AsyncEmulator {
    let emulator = CpuEmulator::new(&folder()).expect("a folder for compiled sources");
    AsyncEmulator::new(emulator, Duration::from_micros(300))
}

fn gpu() -> Gpu {
    Gpu::on(Arc::new(async_emulator()))
}

/// The error message.
fn refused<R>(result: Result<R, GpuError>) -> String {
    result.err().map_or_else(|| "nothing was refused".to_owned(), |error| error.to_string())
}

#[test]
fn what_is_recorded_is_done_when_it_is_replayed() {
    let gpu = gpu();
    let ones = gpu.upload(&[1.0_f32; 100]).unwrap();
    let mut sum: Memory<f32> = gpu.zeros(100).unwrap();
    gpu.start_recording().unwrap();
    axpy(&gpu, 2.0, ones.view(), sum.view_mut()).unwrap();
    axpy(&gpu, 0.5, ones.view(), sum.view_mut()).unwrap();
    let graph = gpu.finish_recording().unwrap();
    assert_eq!(gpu.download(sum.view()).unwrap(), [0.0; 100]);
    graph.replay().unwrap();
    graph.replay().unwrap();
    // A replay uses the recorded arguments and the current contents of memory.
    assert_eq!(gpu.download(sum.view()).unwrap(), [5.0; 100]);
    let mut ones = ones;
    gpu.copy_in(&[10.0; 100], ones.view_mut()).unwrap();
    graph.replay().unwrap();
    assert_eq!(gpu.download(sum.view()).unwrap(), [30.0; 100]);
}

/// Dropout's draws and the loss-gradient scale are those of the current step, though the launches
/// are recorded.
#[test]
fn numbers_of_a_step_are_read_each_time() {
    let gpu = gpu().with_step_numbers().unwrap();
    let (cpu, stream) = (Cpu::serial(), Stream { seed: 5, tensor: 3, step: 0 });
    let view = GlobalIndices::contiguous(40, 200);
    let x: Vec<f32> = (0..200).map(|i| i as f32 + 1.0).collect();
    let (given, mut dropped) = (gpu.upload(&x).unwrap(), gpu.zeros::<f32>(200).unwrap());
    let shape = Logits::whole(2, 5);
    let logits: Vec<f32> = (0..10).map(|i| (i as f32).sin()).collect();
    let (max, sums) = (gpu.upload(&[1.0_f32; 2]).unwrap(), gpu.upload(&[4.0_f32; 2]).unwrap());
    let (targets, logits) = (gpu.upload(&[3_i64, -1]).unwrap(), gpu.upload(&logits).unwrap());
    let mut gradient = gpu.zeros::<f32>(10).unwrap();
    let mut plain = gpu.zeros::<f32>(10).unwrap();

    let half = Dropout { p: 0.5, stream };
    gpu.start_recording().unwrap();
    dropout::cuda::apply(&gpu, &half, &view, given.view(), dropped.view_mut()).unwrap();
    gpu.copy(logits.view(), gradient.view_mut()).unwrap();
    let (to, read) = (gradient.view_mut(), targets.view());
    let (max, sums) = (max.view(), sums.view());
    cross_entropy::cuda::gradient_in_place(&gpu, &shape, to, read, max, sums, OF_STEP).unwrap();
    gpu.copy(logits.view(), plain.view_mut()).unwrap();
    let to = plain.view_mut();
    cross_entropy::cuda::gradient_in_place(&gpu, &shape, to, read, max, sums, 2.0).unwrap();
    let graph = gpu.finish_recording().unwrap();

    let mut before = Vec::new();
    for (step, loss_scale) in [(7, 0.25_f32), (8, 1.0 / 3.0)] {
        gpu.set_step_numbers(StepNumbers { step, loss_scale }).unwrap();
        graph.replay().unwrap();
        let mut wanted = vec![0.0; 200];
        let of_step = Dropout { stream: Stream { step, ..stream }, ..half };
        dropout::apply(&cpu, &of_step, &view, &x, &mut wanted);
        assert_eq!(gpu.download(dropped.view()).unwrap(), wanted, "draws of step {step}");
        assert_ne!(wanted, before);
        before = wanted;
        let row = gpu.download(gradient.view()).unwrap();
        let p = (logits_at(3) - 1.0).exp() * 0.25;
        assert_eq!((row[3], row[8]), (loss_scale * (p - 1.0), 0.0));
        // An explicit scale is used as it is.
        assert_eq!(gpu.download(plain.view()).unwrap()[3], 2.0 * (p - 1.0));
    }
}

fn logits_at(i: usize) -> f32 {
    (i as f32).sin()
}

/// Another queue joins the recording when it is used, and events order its work.
#[test]
fn other_queues_join() {
    let gpu = gpu();
    let (side, ones) = (gpu.fork().unwrap(), gpu.upload(&[1.0_f32; 64]).unwrap());
    let zeros = || gpu.zeros::<f32>(64).unwrap();
    let (mut a, mut b, mut c) = (zeros(), zeros(), zeros());
    gpu.start_recording().unwrap();
    axpy(&gpu, 1.0, ones.view(), a.view_mut()).unwrap();
    side.wait(&gpu.record().unwrap()).unwrap();
    // b += a on the other queue, then a += b on the first, ordered by an event.
    axpy(&side, 1.0, a.view(), b.view_mut()).unwrap();
    let there = side.record().unwrap();
    assert!(there.is_recorded());
    gpu.wait(&there).unwrap();
    axpy(&gpu, 1.0, b.view(), a.view_mut()).unwrap();
    // Only the end of the recording waits for this.
    axpy(&side, 3.0, ones.view(), c.view_mut()).unwrap();
    let graph = gpu.finish_recording().unwrap();
    let (mut wanted_a, mut wanted_b) = (0.0, 0.0);
    for _ in 0..4 {
        graph.replay().unwrap();
        wanted_a += 1.0;
        wanted_b += wanted_a;
        wanted_a += wanted_b;
    }
    assert_eq!(gpu.download(a.view()).unwrap(), [wanted_a; 64]);
    assert_eq!(gpu.download(b.view()).unwrap(), [wanted_b; 64]);
    assert_eq!(gpu.download(c.view()).unwrap(), [12.0; 64]);
}

/// Memory taken and returned during a recording stays the recording's own until the recording is
/// dropped.
#[test]
fn memory_of_recorded_work_is_nobody_elses() {
    let gpu = gpu();
    let ones = gpu.upload(&[1.0_f32; 64]).unwrap();
    let mut sum = gpu.zeros::<f32>(64).unwrap();
    let given_before = gpu.zeros::<f32>(64).unwrap();
    gpu.start_recording().unwrap();
    // Two at a time, and one from before that is returned meanwhile.
    for _ in 0..3 {
        let (mut one, mut other) = (gpu.zeros::<f32>(64).unwrap(), gpu.zeros::<f32>(64).unwrap());
        axpy(&gpu, 1.0, ones.view(), one.view_mut()).unwrap();
        axpy(&gpu, 2.0, one.view(), other.view_mut()).unwrap();
        axpy(&gpu, 1.0, other.view(), sum.view_mut()).unwrap();
    }
    drop(given_before);
    let last = gpu.zeros::<f32>(64).unwrap();
    let graph = gpu.finish_recording().unwrap();
    drop(last);
    let others: Vec<Memory<f32>> = (0..8).map(|_| gpu.upload(&[7.0; 64]).unwrap()).collect();
    graph.replay().unwrap();
    assert_eq!(gpu.download(sum.view()).unwrap(), [6.0; 64]);
    for other in &others {
        assert_eq!(gpu.download(other.view()).unwrap(), [7.0; 64]);
    }
    let taken = gpu.bytes_beyond_arena();
    drop(graph);
    let _again: Vec<Memory<f32>> = (0..3).map(|_| gpu.zeros(64).unwrap()).collect();
    assert_eq!(gpu.bytes_beyond_arena(), taken);
}

#[test]
fn what_cannot_be_recorded_is_refused_by_name() {
    let mut memory = Vec::new();
    type Call = fn(&Gpu, &mut Memory<f32>) -> String;
    let calls: [(&str, Call); 5] = [
        ("copy_in", |gpu, memory| refused(gpu.copy_in(&[1.0; 8], memory.view_mut()))),
        ("copy_out", |gpu, memory| refused(gpu.download(memory.view()))),
        ("synchronize", |gpu, _| refused(gpu.synchronize())),
        ("Event::synchronize", |gpu, _| refused(gpu.record().unwrap().synchronize())),
        ("another queue", |gpu, _| refused(gpu.fork().unwrap().start_recording())),
    ];
    for (name, call) in calls {
        let gpu = gpu();
        let mut own = gpu.zeros::<f32>(8).unwrap();
        gpu.start_recording().unwrap();
        let said = call(&gpu, &mut own);
        assert!(said.contains(name) && said.contains("recorded"), "{name}: {said}");
        let ended = refused(gpu.finish_recording());
        assert!(name == "another queue" || ended.contains(name), "{name}: {ended}");
        // Afterwards everything works as before.
        gpu.copy_in(&[2.0; 8], own.view_mut()).unwrap();
        assert_eq!(gpu.download(own.view()).unwrap(), [2.0; 8]);
        memory.push(own);
    }
    let gpu = gpu();
    gpu.start_recording().unwrap();
    assert!(!gpu.record().unwrap().is_complete());
    assert!(refused(gpu.finish_recording()).contains("Event::is_complete"));
    assert!(refused(gpu.finish_recording()).contains("nothing is being recorded"));
    let at_once = Gpu::on(Arc::new(CpuEmulator::new(&folder()).unwrap()));
    assert!(!at_once.records());
    assert!(refused(at_once.start_recording()).contains("records nothing"));
}

/// Errors for queues that are not joined back, and for events from outside.
#[test]
fn queues_must_come_back() {
    let origin = async_emulator();
    let (side, at) = (origin.fork().unwrap(), origin.allocate(256).unwrap());
    let before = side.record().unwrap();
    origin.start_recording().unwrap();
    side.wait(&origin.record().unwrap()).unwrap();
    side.fill(at, 1, 256).unwrap();
    assert!(refused(origin.finish_recording()).contains("never waited for"));
    origin.start_recording().unwrap();
    assert!(refused(origin.wait(&before)).contains("an event from before"));
    assert!(refused(origin.finish_recording()).contains("an event from before"));
    origin.start_recording().unwrap();
    let inside = origin.record().unwrap();
    drop(origin.finish_recording().unwrap());
    assert!(refused(side.wait(&inside)).contains("has ended"));
    origin.free(at);
}
