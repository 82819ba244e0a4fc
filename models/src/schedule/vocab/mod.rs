//! Schedules with the output layer split over all devices.

mod greedy;
mod interlaced;
mod times;

pub use times::{PassRatios, PassTimes};

use super::building_block::{Block, PERIOD, repeated, shortened};
use super::generate::{Counts, one_forward_one_backward, pass, split_backward};
use super::interleaved_1f1b::rounds;
use super::run::Run;
use super::{AutoCosts, Release, gpipe, looped_bfs, v_half, v_min, zb_auto};
use super::{Pass, PassKind, Schedule, ScheduleError, StageLayout, VocabPasses};
use greedy::Greedy;
use interlaced::interlaced;

/// 1F1B where every device also runs the vocabulary passes of its slice of the output layer for every
/// micro-batch (Vocabulary Parallelism, arXiv 2411.05288, section 5).
///
/// Forwards and backwards keep their 1F1B order with one more micro-batch in flight for each barrier,
/// `min(m, p − i + barriers)` on device `i`; the vocabulary passes go where a greedy run with `times`
/// finds them ready, as in the reference implementation `T` of one micro-batch with `S` of the next.
/// While transfers and barriers take no time, the makespan is `m(F + B + W + S + T) + (p − 1)(F + B + W)`.
///
/// # Errors
/// No devices, no micro-batches, or a time that is negative or not finite.
pub fn one_f_one_b_with_vocab(
    devices: usize,
    micro_batches: usize,
    vocab: VocabPasses,
    times: Option<PassTimes>,
) -> Result<Schedule, ScheduleError> {
    if vocab == VocabPasses::Interlaced {
        return interlaced(devices, micro_batches);
    }
    let counts = Counts::new(devices, micro_batches, 1)?;
    let all = |kind| (0..micro_batches).map(move |k| pass(kind, k, 0));
    let order = |i: usize| {
        let warm_up = devices - 1 - i + vocab.barriers();
        one_forward_one_backward(all(PassKind::F), all(PassKind::BW), warm_up)
    };
    let passes = (0..devices).map(order).collect();
    insert(&[counts.schedule(StageLayout::RoundRobin, passes)], vocab, times)
}

/// Interleaved 1F1B with vocabulary passes: for each barrier a round more of forwards first.
pub(super) fn interleaved_with_vocab(
    counts: Counts,
    vocab: VocabPasses,
    times: Option<PassTimes>,
) -> Result<Schedule, ScheduleError> {
    let Counts { devices, chunks, .. } = counts;
    let order = |i: usize| {
        let forwards = rounds(counts).map(|(k, chunk)| pass(PassKind::F, k, chunk));
        let backwards = rounds(counts).map(|(k, chunk)| pass(PassKind::BW, k, chunks - 1 - chunk));
        let warm_up = 2 * (devices - 1 - i) + (chunks - 1) * devices + vocab.barriers() * chunks;
        one_forward_one_backward(forwards, backwards, warm_up)
    };
    let passes = (0..devices).map(order).collect();
    insert(&[counts.schedule(StageLayout::RoundRobin, passes)], vocab, times)
}

/// ZB-H1, ZB-H2 (`eager`) and interleaved zero bubble with vocabulary passes.
pub(super) fn zero_bubble_with_vocab(
    counts: Counts,
    eager: bool,
    vocab: VocabPasses,
    times: Option<PassTimes>,
) -> Result<Schedule, ScheduleError> {
    let Counts { devices, chunks, .. } = counts;
    let order = |i: usize| {
        let backwards = rounds(counts).map(move |(k, chunk)| (k, chunks - 1 - chunk));
        let depth = if eager { 2 * (devices - i) - 1 } else { devices - i };
        let warm_up = depth + (chunks - 1) * devices + vocab.barriers() * chunks;
        split_backward(rounds(counts), backwards, warm_up, if eager { 2 * i } else { i })
    };
    let passes = (0..devices).map(order).collect();
    insert(&[counts.schedule(StageLayout::RoundRobin, passes)], vocab, times)
}

/// V-Half and V-Min with vocabulary passes: backwards come a period later for each barrier, and every
/// device holds as many micro-batches more (Vocabulary Parallelism, arXiv 2411.05288, section 5.3).
pub(super) fn building_block_with_vocab(
    counts: Counts,
    blocks: Vec<Block>,
    vocab: VocabPasses,
    times: Option<PassTimes>,
) -> Result<Schedule, ScheduleError> {
    let later = vocab.barriers() * PERIOD;
    let delayed = |[f0, f1, b1, b0]: Block| [f0, f1, b1 + later, b0 + later];
    let blocks: Vec<Block> = blocks.into_iter().map(delayed).collect();
    let on_v = |passes| counts.schedule(StageLayout::V, passes);
    let plain = on_v(repeated(&blocks, counts.micro_batches));
    let Some(known) = times else { return insert(&[plain], vocab, times) };
    known.check()?;
    let short = APART.map(|apart| on_v(shortened(&blocks, counts.micro_batches, apart)));
    let searched = searched(counts, &plain, vocab, known);
    let all: Vec<Schedule> = std::iter::once(plain).chain(short).chain(searched).collect();
    insert(&all, vocab, times)
}

/// The best order of greedy runs for these times that holds no more than a block's, where there is one: blocks repeat
/// what they idle, where transfers take long or passes are unequal.
fn searched(
    counts: Counts,
    block: &Schedule,
    vocab: VocabPasses,
    times: PassTimes,
) -> Option<Schedule> {
    let held = |device| block.peak_activations(device, Release::AtW);
    let most = (0..counts.devices).map(held).fold(0.0, f64::max);
    let PassTimes { forward, backward, weight, link: latency, .. } = times;
    let even = AutoCosts::even(counts.devices);
    let limit = most - vocab.barriers() as f64;
    let costs = AutoCosts { forward, backward, weight, latency, limit, ..even };
    let build = |micro_batches| zb_auto(counts.devices, micro_batches, counts.chunks, costs);
    delayed_order(counts.micro_batches, build, vocab).ok()
}

/// Slots between the last stage's forward and its backward that shorter ways to fill and drain are tried with: what
/// room vocabulary passes and their barriers need there depends on their times.
const APART: [usize; 4] = [0, 2, 4, 5];

/// Any other schedule with one copy of each stage: its order for as many micro-batches more as there are
/// barriers, in which each backward is that of a micro-batch so many before. So every device's backwards
/// come later by a micro-batch for each barrier, and it holds as many more (the building block of Vocabulary
/// Parallelism, arXiv 2411.05288, section 5.1, of an order that need not repeat a block).
///
/// `build` makes the order of a number of micro-batches.
pub(super) fn delayed_with_vocab(
    micro_batches: usize,
    build: impl FnOnce(usize) -> Result<Schedule, ScheduleError>,
    vocab: VocabPasses,
    times: Option<PassTimes>,
) -> Result<Schedule, ScheduleError> {
    insert(&[delayed_order(micro_batches, build, vocab)?], vocab, times)
}

/// The order in which vocabulary passes then have room.
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
            // A pair of which only one is left runs alone.
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

/// A pass of the longer order as one of the order with later backwards; `None` where there is no such
/// micro-batch.
fn delayed(pass: Pass, micro_batches: usize, by: usize) -> Option<Pass> {
    if pass.kind == PassKind::F {
        return ((pass.micro_batch as usize) < micro_batches).then_some(pass);
    }
    let micro_batch = pass.micro_batch.checked_sub(by as u32)?;
    Some(Pass { micro_batch, ..pass })
}

/// Breadth-first schedules have room as they are: backwards begin behind all forwards.
pub(super) fn breadth_first_with_vocab(
    counts: Counts,
    looped: bool,
    vocab: VocabPasses,
    times: Option<PassTimes>,
) -> Result<Schedule, ScheduleError> {
    let Counts { devices, micro_batches, chunks } = counts;
    let base = if looped {
        // Vocabulary passes come micro-batch by micro-batch; so must the backwards that wait for them.
        let mut base = looped_bfs(devices, micro_batches, chunks)?;
        let last = micro_batches as u32 - 1;
        let backwards = base.passes.iter_mut().flatten().filter(|pass| pass.kind == PassKind::BW);
        backwards.for_each(|pass| pass.micro_batch = last - pass.micro_batch);
        base
    } else {
        gpipe(devices, micro_batches)?
    };
    insert(&[base], vocab, times)
}

/// The blocks of V-Half or V-Min.
pub(super) fn blocks(devices: usize, least: bool) -> Vec<Block> {
    if least { v_min::blocks(devices) } else { v_half::blocks(devices) }
}

/// Puts vocabulary passes into the first of some schedules, whose order leaves room for the barriers, by usual times;
/// where times are known, into the one of them that is shortest then, and as for usual times where none is
/// shorter than that. As in the reference `T` of one micro-batch runs in one step with `S` of the next, or, with
/// known times, apart if that is shorter. With several rounds of chunks the next micro-batch may come much later:
/// then they run apart.
fn insert(
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

/// What an order for unknown times is made for. On a V a chunk's backward lies between the last stage's output and `S`,
/// which the reference keeps free for the broadcast (sail-sg's zero-bubble-pipeline-parallelism, branch `v-half-vocab`,
/// `scheduler/passes.py`): where passes are unequal devices would wait for each other in every repetition without it.
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
