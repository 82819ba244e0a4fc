//! Schedules with the output layer split over all pipeline ranks.

mod greedy;
mod interlaced;
mod times;

pub use times::{PassRatios, PassTimes};

use super::building_block::{Block, PERIOD, repeated, shortened};
use super::generate::{Counts, one_forward_one_backward, pass, split_backward};
use super::interleaved_1f1b::rounds;
use super::run::Run;
use super::{AutoCosts, Release, ScheduleName, gpipe, looped_bfs, v_half, v_min, zb_auto};
use super::{Pass, PassKind, Schedule, ScheduleError, StageLayout, VocabPasses};
use greedy::Greedy;
use interlaced::interlaced;

/// The forwards and backwards of a schedule, in an order with room for vocabulary passes and their
/// barriers. Interlaced vocabulary passes are in it already.
pub(super) fn with_room(
    name: ScheduleName,
    counts: Counts,
    vocab: VocabPasses,
) -> Result<Schedule, ScheduleError> {
    let Counts { ranks, micro_batches, chunks } = counts;
    match name {
        ScheduleName::OneFOneB if vocab == VocabPasses::Interlaced => {
            interlaced(ranks, micro_batches)
        }
        _ if vocab == VocabPasses::Interlaced => {
            Err(ScheduleError::NotInterlaced { schedule: name })
        }
        ScheduleName::OneFOneB => Ok(one_f_one_b(counts, vocab)),
        ScheduleName::GPipe => gpipe(ranks, micro_batches),
        ScheduleName::LoopedBfs => breadth_first(counts),
        ScheduleName::Interleaved1F1B => Ok(interleaved(counts, vocab)),
        ScheduleName::ZbH1 | ScheduleName::ZbH2 | ScheduleName::InterleavedZb => {
            Ok(zero_bubble(counts, name == ScheduleName::ZbH2, vocab))
        }
        ScheduleName::VHalf | ScheduleName::VMin => {
            let blocks = delayed_blocks(ranks, name, vocab);
            Ok(counts.schedule(StageLayout::V, repeated(&blocks, micro_batches)))
        }
        ScheduleName::ZbAuto
        | ScheduleName::ZbV
        | ScheduleName::V1F1B
        | ScheduleName::DualPipeV => {
            let build = |micro_batches| name.build(ranks, micro_batches, chunks);
            delayed_order(micro_batches, build, vocab)
        }
        _ => Err(ScheduleError::NoVocab { schedule: name, vocab: vocab.name() }),
    }
}

/// Other orders with room than that of [`with_room`], some of which are shorter for these times.
pub(super) fn other_orders(
    name: ScheduleName,
    counts: Counts,
    (room, vocab): (&Schedule, VocabPasses),
    times: PassTimes,
) -> Result<Vec<Schedule>, ScheduleError> {
    if !name.room_depends_on_times() {
        return Ok(vec![]);
    }
    times.check()?;
    let blocks = delayed_blocks(counts.ranks, name, vocab);
    let shorter = |apart| shortened(&blocks, counts.micro_batches, apart);
    let short = APART.map(|apart| counts.schedule(StageLayout::V, shorter(apart)));
    Ok(short.into_iter().chain(searched(counts, room, vocab, times)).collect())
}

/// 1F1B with one more micro-batch in flight for each barrier (Vocabulary Parallelism, arXiv
/// 2411.05288, section 5), `min(m, p − i + barriers)` on pipeline rank `i`. With the vocabulary
/// passes of each rank's slice of the output layer, the makespan is `m(F + B + W + S + T) + (p −
/// 1)(F + B + W)` where nothing takes time between passes.
fn one_f_one_b(counts: Counts, vocab: VocabPasses) -> Schedule {
    let Counts { ranks, micro_batches, .. } = counts;
    let all = |kind| (0..micro_batches).map(move |k| pass(kind, k, 0));
    let order = |i: usize| {
        let warm_up = ranks - 1 - i + vocab.barriers();
        one_forward_one_backward(all(PassKind::F), all(PassKind::BW), warm_up)
    };
    let passes = (0..ranks).map(order).collect();
    counts.schedule(StageLayout::RoundRobin, passes)
}

/// Interleaved 1F1B with one more round of warm-up forwards for each barrier.
fn interleaved(counts: Counts, vocab: VocabPasses) -> Schedule {
    let Counts { ranks, chunks, .. } = counts;
    let order = |i: usize| {
        let forwards = rounds(counts).map(|(k, chunk)| pass(PassKind::F, k, chunk));
        let backwards = rounds(counts).map(|(k, chunk)| pass(PassKind::BW, k, chunks - 1 - chunk));
        let warm_up = 2 * (ranks - 1 - i) + (chunks - 1) * ranks + vocab.barriers() * chunks;
        one_forward_one_backward(forwards, backwards, warm_up)
    };
    let passes = (0..ranks).map(order).collect();
    counts.schedule(StageLayout::RoundRobin, passes)
}

/// ZB-H1, ZB-H2 (`eager`) and interleaved zero bubble with more warm-up forwards.
fn zero_bubble(counts: Counts, eager: bool, vocab: VocabPasses) -> Schedule {
    let Counts { ranks, chunks, .. } = counts;
    let order = |i: usize| {
        let backwards = rounds(counts).map(move |(k, chunk)| (k, chunks - 1 - chunk));
        let depth = if eager { 2 * (ranks - i) - 1 } else { ranks - i };
        let warm_up = depth + (chunks - 1) * ranks + vocab.barriers() * chunks;
        split_backward(rounds(counts), backwards, warm_up, if eager { 2 * i } else { i })
    };
    let passes = (0..ranks).map(order).collect();
    counts.schedule(StageLayout::RoundRobin, passes)
}

/// The blocks of V-Half or V-Min, in which backwards come one period later for each barrier, so
/// that every pipeline rank holds as many micro-batches more (Vocabulary Parallelism, arXiv
/// 2411.05288, section 5.3).
fn delayed_blocks(ranks: usize, name: ScheduleName, vocab: VocabPasses) -> Vec<Block> {
    let least = name == ScheduleName::VMin;
    let blocks = if least { v_min::blocks(ranks) } else { v_half::blocks(ranks) };
    let later = vocab.barriers() * PERIOD;
    let delayed = |[f0, f1, b1, b0]: Block| [f0, f1, b1 + later, b0 + later];
    blocks.into_iter().map(delayed).collect()
}

/// The best order of greedy runs for these times that holds no more than a block's, if there is
/// one. A repeated block also repeats its idle time where transfers are long or passes unequal.
fn searched(
    counts: Counts,
    block: &Schedule,
    vocab: VocabPasses,
    times: PassTimes,
) -> Option<Schedule> {
    let held = |rank| block.peak_activations(rank, Release::AtW);
    let most = (0..counts.ranks).map(held).fold(0.0, f64::max);
    let PassTimes { forward, backward, weight, link: latency, .. } = times;
    let even = AutoCosts::even(counts.ranks);
    let limit = most - vocab.barriers() as f64;
    let costs = AutoCosts { forward, backward, weight, latency, limit, ..even };
    let build = |micro_batches| zb_auto(counts.ranks, micro_batches, counts.chunks, costs);
    delayed_order(counts.micro_batches, build, vocab).ok()
}

/// Distances, in slots, between the last stage's forward and its backward to try when warm-up and
/// cooldown are shortened: the room that vocabulary passes and barriers need there depends on their
/// times.
const APART: [usize; 4] = [0, 2, 4, 5];

/// The order of any other schedule with one copy of each stage: that for `barriers` more
/// micro-batches, in which each backward belongs to a micro-batch that many earlier. So every
/// pipeline rank's backwards come one micro-batch later for each barrier, and it holds as many more
/// (the building block of Vocabulary Parallelism, arXiv 2411.05288, section 5.1, for an order that
/// need not repeat a block).
///
/// `build` makes the order for a number of micro-batches.
fn delayed_order(
    micro_batches: usize,
    build: impl FnOnce(usize) -> Result<Schedule, ScheduleError>,
    vocab: VocabPasses,
) -> Result<Schedule, ScheduleError> {
    let longer = build(micro_batches + vocab.barriers())?;
    let delay = |order: &Vec<Pass>, pairs: &Vec<u32>| {
        let (mut kept, mut kept_pairs) = (Vec::new(), Vec::new());
        let delayed = |pass: &Pass| delayed(*pass, micro_batches, vocab.barriers());
        for (place, pass) in order.iter().enumerate() {
            let Some(pass) = delayed(pass) else { continue };
            // If only one of a pair is left, it runs alone.
            let behind = order.get(place + 1).and_then(delayed);
            if pairs.binary_search(&(place as u32)).is_ok() && behind.is_some() {
                kept_pairs.push(kept.len() as u32);
            }
            kept.push(pass);
        }
        (kept, kept_pairs)
    };
    let orders = longer.passes.iter().zip(&longer.pairs).map(|(order, pairs)| delay(order, pairs));
    let (passes, pairs) = orders.unzip();
    Ok(Schedule { micro_batches, passes, pairs, ..longer })
}

/// A pass of the longer order as one of the order with later backwards; `None` where there is no
/// such micro-batch.
fn delayed(pass: Pass, micro_batches: usize, by: usize) -> Option<Pass> {
    if pass.kind == PassKind::F {
        return ((pass.micro_batch as usize) < micro_batches).then_some(pass);
    }
    let micro_batch = pass.micro_batch.checked_sub(by as u32)?;
    Some(Pass { micro_batch, ..pass })
}

/// Breadth-first loops have room already. Vocabulary passes come micro-batch by micro-batch, and so
/// must the backwards that wait for them.
fn breadth_first(
    Counts { ranks, micro_batches, chunks }: Counts,
) -> Result<Schedule, ScheduleError> {
    let mut order = looped_bfs(ranks, micro_batches, chunks)?;
    let last = micro_batches as u32 - 1;
    let backwards = order.passes.iter_mut().flatten().filter(|pass| pass.kind == PassKind::BW);
    backwards.for_each(|pass| pass.micro_batch = last - pass.micro_batch);
    Ok(order)
}

/// Inserts vocabulary passes into one of `schedules`. Without known times: into the first one,
/// whose order leaves room for the barriers, for usual times. With times: into the one that is
/// shortest for them, unless the order for usual times is as short. As in the reference `T` of one
/// micro-batch runs in one step with `S` of the next, or, with known times, separately if that is
/// shorter. With several rounds of chunks the next micro-batch may come much later, and they run
/// separately.
pub(super) fn insert(
    schedules: &[Schedule],
    vocab: VocabPasses,
    times: Option<PassTimes>,
) -> Result<Schedule, ScheduleError> {
    // The first has room for any times.
    let usual = || {
        let first = schedules.first()?;
        Greedy::new(first, vocab, usual_times(first), fusable(first)).run()
    };
    let no_room = ScheduleError::NoRoom { vocab: vocab.name() };
    let Some(times) = times else {
        return usual().map(|(_, schedule)| schedule).ok_or(no_room);
    };
    times.check()?;
    let runs = schedules.iter().flat_map(|schedule| {
        let ways = if fusable(schedule) { &[true, false][..] } else { &[false] };
        let run = move |&fused: &bool| Greedy::new(schedule, vocab, times, fused).run();
        ways.iter().filter_map(run)
    });
    let usual = usual().and_then(|(_, schedule)| {
        let end = Run::new(&schedule, times).ok()?.end();
        Some((end, schedule))
    });
    let shortest = runs.chain(usual).min_by(|(one, _), (other, _)| one.total_cmp(other));
    shortest.map(|(_, schedule)| schedule).ok_or(no_room)
}

/// Times for orders without known times. On a V a chunk's backward lies between the last stage's
/// output and `S`, which the reference keeps free for the broadcast (sail-sg's
/// zero-bubble-pipeline-parallelism, branch `v-half-vocab`, `scheduler/passes.py`): otherwise
/// unequal passes would make pipeline ranks wait for each other in every repetition.
fn usual_times(schedule: &Schedule) -> PassTimes {
    let usual = PassTimes::default();
    let on_v = schedule.layout == StageLayout::V;
    let broadcast = if on_v { usual.backward / schedule.chunks as f64 } else { 0.0 };
    PassTimes { broadcast, ..usual }
}

/// Whether one micro-batch's `T` may run in one step with `S` of the next.
fn fusable(schedule: &Schedule) -> bool {
    schedule.chunks == 1 || schedule.layout == StageLayout::V
}
