//! The NCCL communicator without GPUs: a fake NCCL transfers between emulated queues that lag at
//! random. Sends hold their queue until they are received, and groups become ready only after a few
//! polls.

mod channels;
mod common;

use channels::{run_over_tcp, run_wired};
use common::{Split, check, model, open, train_on};
use models::decisions::Vocab;
use runtime::comm::{
    Call, CommError, Communicator, Delays, Element, Kind, NcclComm, Op, Options, Pending, Tag,
    Traffic, run_ranks,
};
use runtime::device::{Gpu, MemoryUse, Space};
use runtime::kernels::cuda::{self, AsyncEmulator, FakeNccl, cpu_emulator::CpuEmulator};
use runtime::{Device, Host, bf16};
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Comm = Box<dyn Communicator>;

/// Emulated GPUs, and the fake NCCL between them.
struct EmulatedGpus {
    gpu: cuda::Gpu,
    library: FakeNccl,
}

impl EmulatedGpus {
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-machine");
        let machine = CpuEmulator::new(&folder).expect("a folder for compiled sources");
        let lagging = AsyncEmulator::new(machine.clone(), Duration::from_micros(200));
        let gpu = cuda::Gpu::on(Arc::new(lagging));
        // Little, so that blocks are divided and joined.
        gpu.reserve(1 << 20).expect("a megabyte");
        Self { gpu, library: FakeNccl::new(machine) }
    }

    /// A queue for a rank.
    fn queue(&self) -> cuda::Gpu {
        self.gpu.fork().expect("a queue")
    }

    /// A rank's world.
    fn world(&self, control: Comm, options: Options) -> Result<(Comm, Gpu<f32>), CommError> {
        let gpu = self.queue();
        let world = NcclComm::new(control, Arc::new(self.library.clone()), &gpu, options)?;
        Ok((Box::new(world), Gpu::new(gpu)))
    }
}

/// Runs `program` on ranks as threads with a control between them.
fn run_nccl<R: Send>(
    size: usize,
    options: Options,
    program: impl Fn(&dyn Communicator, &Gpu<f32>) -> Result<R, CommError> + Sync,
) -> Vec<Result<R, CommError>> {
    let gpus = EmulatedGpus::new();
    run_ranks(size, options, |control| {
        let (world, device) = gpus.world(control, options)?;
        program(&*world, &device)
    })
}

fn quick() -> Options {
    Options { time_limit: Duration::from_millis(400), ..Options::default() }
}

/// Starts a call on memory of the device.
#[track_caller]
fn start<E: Element>(
    comm: &dyn Communicator,
    device: &Gpu<f32>,
    kind: Kind,
    count: usize,
    given: &[E],
) -> Result<Box<dyn Pending>, CommError> {
    let call = Call { kind, dtype: E::DTYPE, count, site: Location::caller() };
    comm.start(call, device.wrap(device.taken(given.to_vec()), comm)?)
}

/// Makes a call on device memory; returns its result.
#[track_caller]
fn call<E: Element>(
    comm: &dyn Communicator,
    device: &Gpu<f32>,
    kind: Kind,
    count: usize,
    given: &[E],
) -> Result<Vec<E>, CommError> {
    let came = start(comm, device, kind, count, given)?.wait()?;
    let memory = device.unwrap::<E>(came).expect("memory of that type");
    let values = device.download(Gpu::<f32>::view(&memory, 0..Gpu::<f32>::len(&memory)))?;
    // An aborted call leaves arbitrary data.
    comm.health().map(|()| values)
}

/// Element `i` of rank `r`'s buffer: sums of these are inexact, so their order shows.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 37 + i * 11 + 1) as f32).sin() * 10f32.powi((rank % 5) as i32 - 2)
}

fn buffer(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| value(rank, i)).collect()
}

fn sums(size: usize, count: usize) -> Vec<f32> {
    let add = |i: usize| (1..size).fold(value(0, i), |sum, rank| sum + value(rank, i));
    (0..count).map(add).collect()
}

fn maxima(size: usize, count: usize) -> Vec<f32> {
    let most = |i: usize| (0..size).map(|rank| value(rank, i)).fold(f32::NEG_INFINITY, f32::max);
    (0..count).map(most).collect()
}

/// One of every collective on device memory, against its definition.
fn every_collective(
    comm: &dyn Communicator,
    device: &Gpu<f32>,
    count: usize,
    root: usize,
) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let (mine, pieces) = (buffer(rank, count), buffer(rank, count * size));
    let all: Vec<f32> = (0..size).flat_map(|rank| buffer(rank, count)).collect();
    let own = |whole: &[f32]| whole[rank * count..(rank + 1) * count].to_vec();
    let at_root = |expected: Vec<f32>| if rank == root { expected } else { Vec::new() };
    let ask = |kind, count, given: &[f32]| call(comm, device, kind, count, given);

    assert_eq!(ask(Kind::AllReduce { op: Op::Sum }, count, &mine)?, sums(size, count));
    assert_eq!(ask(Kind::AllReduce { op: Op::Max }, count, &mine)?, maxima(size, count));
    assert_eq!(ask(Kind::Broadcast { root }, count, &mine)?, buffer(root, count));
    let reduced = ask(Kind::Reduce { root, op: Op::Sum }, count, &mine)?;
    assert_eq!(reduced, at_root(sums(size, count)));
    assert_eq!(ask(Kind::Gather { root }, count, &mine)?, at_root(all.clone()));
    assert_eq!(ask(Kind::AllGather, count, &mine)?, all);
    let scattered = at_root(pieces.clone());
    let piece = ask(Kind::Scatter { root }, count, &scattered)?;
    assert_eq!(piece, own(&buffer(root, count * size)));
    let piece = ask(Kind::ReduceScatter { op: Op::Sum }, count * size, &pieces)?;
    assert_eq!(piece, own(&sums(size, count * size)));
    let expected: Vec<f32> = (0..size).flat_map(|from| own(&buffer(from, count * size))).collect();
    assert_eq!(ask(Kind::AllToAll, count * size, &pieces)?, expected);

    // Rank `r` sends `(r + 2j + count) % 4` elements to rank `j`.
    let length = |from: usize, to: usize| (from + 2 * to + count) % 4;
    let send_counts: Vec<usize> = (0..size).map(|to| length(rank, to)).collect();
    let sent = buffer(rank, send_counts.iter().sum());
    let expected: Vec<f32> = (0..size)
        .flat_map(|from| {
            let begin: usize = (0..rank).map(|to| length(from, to)).sum();
            buffer(from, begin + length(from, rank))[begin..].to_vec()
        })
        .collect();
    assert_eq!(ask(Kind::AllToAllV { send_counts }, 0, &sent)?, expected);
    comm.barrier()
}

#[test]
fn collectives_are_their_definitions() {
    for (size, count) in [(1, 3), (2, 1), (2, 0), (3, 7), (5, 33), (8, 4)] {
        let delays = Some(Delays { seed: size as u64, longest: Duration::from_micros(300) });
        let options = Options { delays, ..Options::default() };
        for end in run_nccl(size, options, |world, device| {
            every_collective(world, device, count, size - 1)?;
            every_collective(world, device, count, 0)
        }) {
            end.unwrap();
        }
    }
}

/// Groups of a split, with keys in reverse order, used together with the world.
#[test]
fn split_groups_are_groups() {
    for end in run_nccl(5, Options::default(), |world, device| {
        let rank = world.rank();
        // Ranks 0, 2, 4; ranks 1, 3; and each rank alone.
        let part = world.split("part", rank % 2, 5 - rank)?;
        assert_eq!(part.size(), [3, 2][rank % 2]);
        assert_eq!(part.rank(), part.size() - 1 - rank / 2);
        let alone = world.split("alone", rank, 0)?;
        every_collective(&*part, device, 6, 0)?;
        every_collective(&*alone, device, 6, 0)?;
        every_collective(world, device, 3, 2)?;
        let told = call(&*part, device, Kind::AllGather, 1, &[rank as i64])?;
        let backwards: Vec<i64> =
            (0..5).rev().filter(|other| other % 2 == rank as i64 % 2).collect();
        assert_eq!(told, backwards);
        Ok(())
    }) {
        end.unwrap();
    }
}

/// Every rank sends to every rank before it receives, in one order, and receives in another. A
/// library whose sends wait for their receiver would deadlock here.
#[test]
fn messages_are_found_by_tag_and_nobody_waits_to_send() {
    for end in run_nccl(4, Options::default(), |world, device| {
        let (rank, size) = (world.rank(), world.size());
        let others: Vec<usize> = (0..size).filter(|&other| other != rank).collect();
        let tags: [Tag; 3] = [7, 1 << 60, 0];
        let content = |from: usize, tag: Tag| buffer(from * 10 + (tag % 5) as usize, 5 + from);
        for &to in &others {
            for tag in tags {
                let given = content(rank, tag);
                let _sent = start(world, device, Kind::Send { to, tag }, given.len(), &given)?;
            }
        }
        for &from in others.iter().rev() {
            for tag in tags.into_iter().rev() {
                let found = call::<f32>(world, device, Kind::Recv { from, tag }, 5 + from, &[])?;
                assert_eq!(found, content(from, tag));
            }
        }
        // Two messages with one tag, in their order, then an empty one.
        for given in [vec![bf16::from_f32(1.0)], vec![bf16::from_f32(2.0)], vec![]] {
            let to = (rank + 1) % size;
            let _sent = start(world, device, Kind::Send { to, tag: 9 }, given.len(), &given)?;
        }
        let from = (rank + size - 1) % size;
        let next = |count| call::<bf16>(world, device, Kind::Recv { from, tag: 9 }, count, &[]);
        assert_eq!([next(1)?, next(1)?].concat(), [1.0, 2.0].map(bf16::from_f32));
        assert!(next(0)?.is_empty());
        world.barrier()
    }) {
        end.unwrap();
    }
}

/// A golden case on ranks with devices, and the traffic of each.
fn train<D: Device>(
    case: &str,
    split: &Split,
    devices: impl Fn(Comm) -> (Comm, D) + Sync,
) -> (common::Run, Vec<Traffic>) {
    let (program, samples) = (split.program(&model(case)), open(case));
    let run = |control: Comm| {
        let (world, device) = devices(control);
        let stats = world.stats().clone();
        let run = train_on(device, &program, split, 1, Some(case), &*samples, world);
        let mut traffic = stats.traffic();
        // The broadcast of the world's NCCL id.
        traffic.remove(&("world".to_owned(), "broadcast"));
        (run, traffic)
    };
    let (mut runs, traffic): (Vec<_>, Vec<_>) =
        run_ranks(split.ranks(), Options::default(), run).into_iter().unzip();
    (runs.swap_remove(0).unwrap(), traffic)
}

/// PyTorch's numbers, with the calls and bytes of ranks as threads.
#[test]
fn golden_case_on_gpus_of_their_own() {
    let split = Split { tp: 2, pp: 2, dp: 2, micro_batch: 2, ..Split::default() };
    let split = Split { sequence_parallel: true, ..split };
    let gpus = EmulatedGpus::new();
    let own = |control| gpus.world(control, Options::default()).unwrap();
    let (run, traffic) = train("llama_gqa", &split, own);
    check("llama_gqa", &run);
    let (_, wanted) = train("llama_gqa", &split, |world| (world, Host::<f32>::serial()));
    assert_eq!(traffic, wanted);
    // Ranks that share a GPU give the same bits, also on queues that lag.
    let one = EmulatedGpus::new();
    let (shared, _) = train("llama_gqa", &split, |world| (world, Gpu::<f32>::new(one.queue())));
    assert!(run == shared);
}

/// Collectives and passes hand each other memory, which must not be reused while the other's queue
/// still reads it.
#[test]
fn a_vocabulary_over_the_pipeline_on_queues_that_lag() {
    let split = Split { pp: 2, micro_batch: 4, vocab: Vocab::Parallel2, ..Split::default() };
    let one = EmulatedGpus::new();
    let (run, _) = train("llama_tied", &split, |world| (world, Gpu::<f32>::new(one.queue())));
    check("llama_tied", &run);
}

/// The control is TCP, as between processes.
#[test]
fn what_lies_on_the_host_goes_over_tcp() {
    let gpus = EmulatedGpus::new();
    let run = |control: Comm| {
        let (world, device) = gpus.world(control, Options::default())?;
        let part = world.split("part", world.rank() % 2, 0)?;
        every_collective(&*part, &device, 6, 1)?;
        ring(&*world, &device)
    };
    for end in run_over_tcp(4, Options::default(), run) {
        end.unwrap();
    }
}

/// The exchange of pipeline neighbours, and a sum.
fn ring(world: &dyn Communicator, device: &Gpu<f32>) -> Result<(), CommError> {
    let (rank, size) = (world.rank(), world.size());
    let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
    start(world, device, Kind::Send { to, tag: 5 }, 9, &buffer(rank, 9))?.wait()?;
    let came: Vec<f32> = call(world, device, Kind::Recv { from, tag: 5 }, 9, &[])?;
    assert_eq!(came, buffer(from, 9));
    let sum = call(world, device, Kind::AllReduce { op: Op::Sum }, 9, &buffer(rank, 9))?;
    assert_eq!(sum, sums(size, 9));
    world.barrier()
}

/// Exchanges until `disturb` does something to a rank; returns the results of the others.
fn disturbed(
    options: Options,
    disturb: impl Fn(&FakeNccl, &dyn Communicator) -> bool + Sync,
) -> Vec<Result<(), String>> {
    let gpus = EmulatedGpus::new();
    let run = |control: Comm| -> Result<(), CommError> {
        let (world, device) = gpus.world(control, options)?;
        (0..3).try_for_each(|_| ring(&*world, &device))?;
        if disturb(&gpus.library, &*world) {
            return Ok(());
        }
        (0..3).try_for_each(|_| ring(&*world, &device))
    };
    let ends = run_wired(4, options, run);
    ends.into_iter().map(|end| end.map_err(|error| error.to_string())).collect()
}

#[test]
fn a_rank_that_ends_ends_the_others() {
    let begun = Instant::now();
    let ends = disturbed(Options::default(), |_, world| world.rank() == 3);
    for (rank, end) in ends.into_iter().enumerate() {
        if rank != 3 {
            let text = end.unwrap_err();
            assert!(text.contains(" is gone, seen by"), "{text}");
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn a_rank_that_is_silent_is_an_error_after_the_time_limit() {
    let options = Options { time_limit: Duration::from_secs(2), ..Options::default() };
    let ends = disturbed(options, |_, world| {
        if world.rank() == 2 {
            std::thread::sleep(Duration::from_secs(6));
        }
        false
    });
    let texts: Vec<String> = ends.into_iter().map(Result::unwrap_err).collect();
    let cause = |text: &String| text.contains("within 2 s, seen by rank ") && text.contains(".rs:");
    assert!(texts.iter().any(cause), "{texts:?}");
    // A rank that has waited too long ends, and some ranks learn that it ended before they learn
    // why.
    let known = |text: &String| cause(text) || text.contains("is gone") || text.contains("gave up");
    assert!(texts.iter().all(known), "{texts:?}");
}

#[test]
fn what_the_library_reports_ends_all_ranks() {
    let ends = disturbed(Options::default(), |library, world| {
        if world.rank() == 0 {
            library.fail(1);
        }
        std::thread::sleep(Duration::from_millis(100));
        false
    });
    for end in ends {
        let text = end.unwrap_err();
        assert!(text.contains("a cable was pulled") || text.contains("gave up"), "{text}");
    }
}

#[test]
fn a_rank_that_gives_up_tells_the_others_why() {
    let ends = disturbed(Options::default(), |_, world| {
        if world.rank() == 1 {
            world.abort("no space left");
        }
        world.rank() == 1
    });
    for (rank, end) in ends.into_iter().enumerate() {
        if rank != 1 {
            assert_eq!(end.unwrap_err(), "rank 1 gave up: no space left");
        }
    }
}

/// Two ranks; a message that is not received blocks a queue. A rank may learn of a failure, and
/// end, before anything has released its queues.
#[test]
fn a_rank_that_ends_at_once_after_a_failure_leaves_no_queue_blocked() {
    let program = |world: &dyn Communicator, device: &Gpu<f32>| {
        if world.rank() == 0 {
            for tag in [6, 7] {
                start(world, device, Kind::Send { to: 1, tag }, 3, &buffer(0, 3))?.wait()?;
            }
            world.settle()?;
        } else {
            call::<f32>(world, device, Kind::Recv { from: 0, tag: 6 }, 3, &[])?;
        }
        world.barrier()?;
        if world.rank() == 1 {
            world.abort("no space left");
        }
        while world.health().is_ok() {
            std::thread::yield_now();
        }
        Ok(())
    };
    let (ended, ends) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for _ in 0..20 {
            run_nccl(2, Options::default(), program).into_iter().for_each(Result::unwrap);
        }
        ended.send(())
    });
    ends.recv_timeout(Duration::from_secs(60)).expect("a rank does not end");
}

/// Collectives that differ are not detected. They end at the time limit, and every rank reports
/// where it was.
#[test]
fn calls_that_differ_end_at_the_time_limit() {
    for end in run_nccl(3, quick(), |world, device| {
        let kind = Kind::AllReduce { op: Op::Sum };
        if world.rank() == 2 {
            // Holds its queue, not its host.
            std::thread::sleep(Duration::from_secs(2));
            return world.barrier();
        }
        call(world, device, kind, 4, &buffer(0, 4))?;
        world.barrier()
    }) {
        let text = end.unwrap_err().to_string();
        assert!(
            text.contains("all_reduce of 4 x f32, sum at") && text.contains("nccl.rs:"),
            "{text}"
        );
    }
}

#[test]
fn a_message_of_another_length_is_refused() {
    for end in run_nccl(2, Options::default(), |world, device| match world.rank() {
        0 => {
            let _sent = start(world, device, Kind::Send { to: 1, tag: 3 }, 3, &buffer(0, 3))?;
            world.barrier()
        }
        _ => call::<f32>(world, device, Kind::Recv { from: 0, tag: 3 }, 4, &[]).map(drop),
    }) {
        let text = end.unwrap_err().to_string();
        assert!(text.contains("rank 0 sent 3 x f32") && text.contains("recv of 4 x f32"), "{text}");
    }
}

/// Transfers have a queue of their own: computation does not wait for other ranks meanwhile.
#[test]
fn computation_goes_on_beside_a_transfer() {
    let late = Duration::from_millis(1500);
    for end in run_nccl(2, Options::default(), |world, device| {
        if world.rank() == 1 {
            std::thread::sleep(late);
        }
        let begun = Instant::now();
        let sum = start(world, device, Kind::AllReduce { op: Op::Sum }, 4, &buffer(0, 4))?;
        let mut own = device.taken(buffer(5, 100));
        device.add_wide(
            Gpu::<f32>::view(&device.taken(buffer(5, 100)), 0..100),
            Gpu::<f32>::view_mut(&mut own, 0..100),
        );
        let twice = device.download(Gpu::<f32>::view(&own, 0..100))?;
        assert!(begun.elapsed() < late / 2, "{:?}", begun.elapsed());
        assert!(twice.iter().zip(buffer(5, 100)).all(|(twice, once)| *twice == 2.0 * once));
        let memory = device.unwrap::<f32>(sum.wait()?).expect("memory of f32");
        let sum = device.download(Gpu::<f32>::view(&memory, 0..4))?;
        assert!(sum.iter().zip(buffer(0, 4)).all(|(twice, once)| *twice == 2.0 * once));
        world.barrier()
    }) {
        end.unwrap();
    }
}

/// Reserved memory is counted, and what ranks allocate beyond it.
#[test]
fn memory_is_counted() {
    let gpus = EmulatedGpus::new();
    let device = Gpu::<f32>::new(gpus.queue());
    let _within = device.zeros::<f32>(200);
    let seen = |used_bytes, beyond_bytes| {
        Some(MemoryUse { reserved_bytes: 1 << 20, used_bytes, beyond_bytes })
    };
    assert_eq!(device.memory_use(), seen(1280, 0));
    let _beyond = device.zeros::<f32>(1 << 18);
    assert_eq!(device.memory_use(), seen(1280, 1 << 20));
    assert_eq!(Host::<f32>::serial().memory_use(), None);
}

/// One rank needs no group, and no library.
#[test]
fn a_world_of_one() {
    for end in run_nccl(1, Options::default(), |world, device| {
        every_collective(&*world.split("alone", 0, 0)?, device, 4, 0)?;
        let wrong = start(world, device, Kind::Send { to: 0, tag: 0 }, 1, &[1.0_f32]).err();
        assert!(matches!(wrong, Some(CommError::Invalid { .. })));
        Ok(())
    }) {
        end.unwrap();
    }
    let none = cuda::open_nccl().unwrap_err().to_string();
    assert!(none.contains("`cuda`") || none.contains("libnccl.so.2"), "{none}");
}
