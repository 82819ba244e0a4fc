//! Every collective against its serial definition, in groups of 1 to 8, and the errors of ranks
//! that disagree, vanish or are late.

mod channels;

use channels::{run_over_tcp, run_wired};
use proptest::prelude::*;
use runtime::comm::{CommError, Communicator, Delays, Op, Options, Solo, run_ranks};
use std::time::{Duration, Instant};

type Comm = Box<dyn Communicator>;

/// Runs on all backends, one after the other.
fn run_all<R: Send>(size: usize, options: Options, program: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    let (threads, wired) = (run_ranks(size, options, &program), run_wired(size, options, &program));
    threads.into_iter().chain(wired).chain(run_over_tcp(size, options, &program)).collect()
}

fn quick() -> Options {
    Options { time_limit: Duration::from_millis(300), ..Options::default() }
}

fn delayed(seed: u64) -> Options {
    let longest = Duration::from_micros(300);
    Options { delays: Some(Delays { seed, longest }), ..Options::default() }
}

/// Element `i` of rank `r`'s buffer: sums of these are inexact, so their order shows.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 37 + i * 11 + 1) as f32).sin() * 10f32.powi((rank % 5) as i32 - 2)
}

fn buffer(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| value(rank, i)).collect()
}

/// Sum in the order of ranks.
fn sums(size: usize, count: usize) -> Vec<f32> {
    let add = |i: usize| (1..size).fold(value(0, i), |sum, rank| sum + value(rank, i));
    (0..count).map(add).collect()
}

fn maxima(size: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| (0..size).map(|rank| value(rank, i)).fold(f32::NEG_INFINITY, f32::max))
        .collect()
}

fn all(size: usize, count: usize) -> Vec<f32> {
    (0..size).flat_map(|rank| buffer(rank, count)).collect()
}

/// One of every collective, against its definition; bit for bit.
fn every_collective(comm: &dyn Communicator, count: usize, root: usize) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let mine = buffer(rank, count);
    let at_root = |expected: Vec<f32>| if rank == root { expected } else { Vec::new() };

    let mut data = mine.clone();
    comm.all_reduce(&mut data, Op::Sum)?;
    assert_eq!(data, sums(size, count));

    let mut data = mine.clone();
    comm.all_reduce(&mut data, Op::Max)?;
    assert_eq!(data, maxima(size, count));

    let mut data = mine.clone();
    comm.broadcast(&mut data, root)?;
    assert_eq!(data, buffer(root, count));

    let pieces = buffer(rank, count * size);
    let piece = comm.scatter(&pieces, count, root)?;
    assert_eq!(piece, buffer(root, count * size)[rank * count..(rank + 1) * count]);

    assert_eq!(comm.gather(&mine, root)?, at_root(all(size, count)));
    assert_eq!(comm.reduce(&mine, Op::Sum, root)?, at_root(sums(size, count)));
    assert_eq!(comm.all_gather(&mine)?, all(size, count));

    let piece = comm.reduce_scatter(&pieces, Op::Sum)?;
    assert_eq!(piece, sums(size, count * size)[rank * count..(rank + 1) * count]);

    let from = |r: usize| buffer(r, count * size)[rank * count..(rank + 1) * count].to_vec();
    assert_eq!(comm.all_to_all(&pieces)?, (0..size).flat_map(from).collect::<Vec<_>>());

    every_length(comm, count)?;
    comm.barrier()
}

/// All-to-all-v where rank `r` sends `(r + 2j + count) % 4` elements to rank `j`.
fn every_length(comm: &dyn Communicator, count: usize) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let length = |from: usize, to: usize| (from + 2 * to + count) % 4;
    let counts: Vec<usize> = (0..size).map(|to| length(rank, to)).collect();
    let sent = buffer(rank, counts.iter().sum());
    let expected: Vec<f32> = (0..size)
        .flat_map(|from| {
            let begin: usize = (0..rank).map(|to| length(from, to)).sum();
            let all = buffer(from, begin + length(from, rank));
            all[begin..].to_vec()
        })
        .collect();
    assert_eq!(comm.all_to_all_v(&sent, &counts)?, expected);
    Ok(())
}

/// A message to and from each rank, several in flight, waited for in reverse order.
fn ring(comm: &dyn Communicator, count: usize) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let others = || (0..size).filter(|&other| other != rank);
    let received: Vec<_> = others()
        .map(|from| Ok((from, comm.start_recv::<f32>(count, from, 7)?)))
        .collect::<Result<_, CommError>>()?;
    for to in others() {
        comm.send(&buffer(rank, count), to, 7)?;
    }
    for (from, request) in received.into_iter().rev() {
        assert_eq!(request.wait()?, buffer(from, count));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn collectives_are_their_definitions(
        size in 1usize..=8, count in 0usize..40, seed in any::<u64>(), root in 0usize..8,
    ) {
        let root = root % size;
        let run = |comm: Comm| {
            every_collective(&*comm, count, root)?;
            ring(&*comm, count)
        };
        for result in run_all(size, delayed(seed), run) {
            result.unwrap();
        }
    }

    #[test]
    fn split_groups_are_groups(
        size in 1usize..=8, colors in 1usize..4, count in 0usize..20, reversed in any::<bool>(),
    ) {
        let run = |comm: Comm| -> Result<(), CommError> {
            let rank = comm.rank();
            let key = if reversed { size - rank } else { rank };
            let part = comm.split("part", rank % colors, key)?;
            let mut members: Vec<usize> = (0..size).filter(|r| r % colors == rank % colors).collect();
            if reversed {
                members.reverse();
            }
            assert_eq!(part.size(), members.len());
            assert_eq!(members[part.rank()], rank);
            every_collective(&*part, count, part.size() - 1)?;
            ring(&*part, count)?;
            let told = part.all_gather(&[rank as i64])?;
            assert_eq!(told, members.iter().map(|&r| r as i64).collect::<Vec<_>>());
            every_collective(&*comm, count, 0)
        };
        for result in run_all(size, Options::default(), run) {
            result.unwrap();
        }
    }
}

#[test]
fn long_buffers_are_summed_in_pieces() {
    let count = 100_003;
    for data in run_all(3, Options::default(), |comm| {
        let mut data = buffer(comm.rank(), count);
        comm.all_reduce(&mut data, Op::Sum).unwrap();
        data
    }) {
        assert_eq!(data, sums(3, count));
    }
}

#[test]
fn one_rank_alone_gets_back_what_it_gives() {
    let comm: Comm = Box::new(Solo::new());
    every_collective(&*comm, 5, 0).unwrap();
    every_collective(&*comm.split("part", 3, 3).unwrap(), 5, 0).unwrap();
    assert!(matches!(comm.send(&[1.0f32], 0, 0), Err(CommError::Invalid { .. })));
}

#[test]
fn requests_may_be_waited_for_in_any_order() {
    let run = |comm: Comm| -> Result<Vec<f32>, CommError> {
        let a = comm.start_all_reduce(buffer(comm.rank(), 4), Op::Sum)?;
        let b = comm.start_all_reduce(buffer(comm.rank(), 4), Op::Max)?;
        if comm.rank() == 0 {
            let b = b.wait()?;
            Ok([a.wait()?, b].concat())
        } else {
            let a = a.wait()?;
            Ok([a, b.wait()?].concat())
        }
    };
    for result in run_all(4, Options::default(), run) {
        assert_eq!(result.unwrap(), [sums(4, 4), maxima(4, 4)].concat());
    }
}

#[test]
fn calls_that_differ_are_refused_and_both_places_named() {
    type Wrong = fn(&dyn Communicator) -> Result<(), CommError>;
    let wrongs: [(Wrong, Wrong, &str); 4] = [
        (
            |c| c.all_reduce(&mut [1.0f32; 4], Op::Sum),
            |c| c.all_reduce(&mut [1.0f32; 5], Op::Sum),
            "all_reduce of 5 x f32",
        ),
        (
            |c| c.all_reduce(&mut [1.0f32; 4], Op::Sum),
            |c| c.all_reduce(&mut [1.0f64; 4], Op::Sum),
            "all_reduce of 4 x f64",
        ),
        (
            |c| c.all_reduce(&mut [1.0f32; 4], Op::Sum),
            |c| c.all_reduce(&mut [1.0f32; 4], Op::Max),
            "4 x f32, max",
        ),
        (|c| c.broadcast(&mut [1i64; 4], 0), |c| c.broadcast(&mut [1i64; 4], 1), "root 1"),
    ];
    for (usual, odd, named) in wrongs {
        let run = |comm: Comm| if comm.rank() == 2 { odd(&*comm) } else { usual(&*comm) };
        for result in run_all(3, Options::default(), run) {
            // Between processes, some learn of it from others.
            let both = match result {
                Err(CommError::Mismatch { group, first, second }) if group == "world" => {
                    format!("{first} {second}")
                }
                Err(CommError::Aborted { reason, .. }) => reason,
                _ => panic!("{result:?} is no mismatch"),
            };
            assert!(both.contains(named), "{both}");
            assert_eq!(both.matches("tests/comm.rs:").count(), 2, "{both}");
            assert!(both.contains("rank 2 called"), "{both}");
        }
    }
}

#[test]
fn a_message_of_another_length_is_refused_at_both_places() {
    let run = |comm: Comm| match comm.rank() {
        0 => comm.send(&[1.0f32; 3], 1, 0),
        _ => comm.recv::<f32>(4, 0, 0).map(drop),
    };
    let results = run_all(2, Options::default(), run);
    for text in [1, 3].map(|rank| results[rank].as_ref().unwrap_err().to_string()) {
        assert!(text.contains("send of 3 x f32") && text.contains("recv of 4 x f32"), "{text}");
        assert_eq!(text.matches("tests/comm.rs:").count(), 2, "{text}");
    }
}

#[test]
fn a_lost_rank_is_an_error_on_the_others_at_once() {
    let begun = Instant::now();
    let run = |comm: Comm| match comm.rank() {
        1 => Ok(()),
        _ => comm.barrier(),
    };
    for (rank, result) in run_all(4, Options::default(), run).into_iter().enumerate() {
        match rank % 4 {
            1 => result.unwrap(),
            _ => {
                // Between processes, some learn of it from others.
                let text = result.unwrap_err().to_string();
                assert!(text.contains("rank 1 is gone"), "{text}");
            }
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn what_a_rank_sent_before_it_ended_arrives() {
    let run = |comm: Comm| match comm.rank() {
        0 => comm.send(&[5i64], 1, 0).map(|()| 0),
        _ => {
            std::thread::sleep(Duration::from_millis(100));
            Ok(comm.recv::<i64>(1, 0, 0)?[0])
        }
    };
    let results = run_all(2, Options::default(), run);
    assert_eq!((&results[1], &results[3]), (&Ok(5), &Ok(5)));
}

#[test]
fn a_late_rank_is_an_error_after_the_time_limit() {
    let run = |comm: Comm| match comm.rank() {
        2 => {
            std::thread::sleep(Duration::from_millis(1500));
            comm.barrier()
        }
        _ => comm.barrier(),
    };
    for result in run_all(3, quick(), run) {
        // Between processes, the late one learns of it from the others.
        let text = result.unwrap_err().to_string();
        assert!(text.contains("nothing from rank 2 within"), "{text}");
    }
}

#[test]
fn a_rank_that_gives_up_tells_the_others_why() {
    let run = |comm: Comm| {
        if comm.rank() == 0 {
            comm.abort("no space left");
        }
        comm.split("all", 0, 0)?.barrier()
    };
    for result in run_all(3, Options::default(), run) {
        let text = result.unwrap_err().to_string();
        assert_eq!(text, "rank 0 gave up: no space left");
    }
}

#[test]
fn lengths_that_do_not_divide_are_refused() {
    let run = |comm: Comm| comm.reduce_scatter(&[1.0f32; 5], Op::Sum).map(drop);
    for result in run_all(2, Options::default(), run) {
        assert!(matches!(result, Err(CommError::Invalid { .. })), "{result:?}");
    }
}

#[test]
fn time_in_calls_is_counted_by_group() {
    const LATE: Duration = Duration::from_millis(200);
    let run = |comm: Comm| -> Result<_, CommError> {
        let pair = comm.split("pair", 0, 0)?;
        comm.barrier()?;
        let world_s = comm.stats().waited_s(&["world"]);
        if comm.rank() == 1 {
            std::thread::sleep(LATE);
        }
        pair.all_reduce(&mut [0.0f32; 10], Op::Sum)?;
        let request = pair.start_all_reduce(vec![0.0f32; 10], Op::Sum)?;
        // Time between the start of a call and its wait is the rank's own.
        std::thread::sleep(LATE);
        request.wait()?;
        let [pair_s, both_s] =
            [&["pair"][..], &["pair", "world"]].map(|groups| comm.stats().waited_s(groups));
        assert!((both_s - pair_s - world_s).abs() < 1e-9);
        Ok(pair_s)
    };
    for (n, waited_s) in run_all(2, Options::default(), run).into_iter().enumerate() {
        let waited_s = waited_s.unwrap();
        let expected_s = if n % 2 == 0 { LATE.as_secs_f64() } else { 0.0 };
        assert!((waited_s - expected_s).abs() < 0.15, "{n}: {waited_s}");
    }
}

#[test]
fn calls_and_bytes_are_counted_by_group() {
    let run = |comm: Comm| -> Result<_, CommError> {
        let pair = comm.split("pair", comm.rank() / 2, 0)?;
        pair.all_reduce(&mut [0.0f32; 10], Op::Sum)?;
        pair.all_reduce(&mut [0.0f32; 20], Op::Sum)?;
        comm.all_gather(&[1.0f64; 3])?;
        Ok(comm.stats().traffic())
    };
    for result in run_all(4, Options::default(), run) {
        let traffic = result.unwrap();
        let pair = traffic[&("pair".to_owned(), "all_reduce")];
        assert_eq!((pair.calls, pair.bytes), (2, 120));
        // The split exchanged colours and keys.
        let world = traffic[&("world".to_owned(), "all_gather")];
        assert_eq!((world.calls, world.bytes), (2, 16 + 24));
    }
}
