//! Schedules that repeat one micro-batch's pattern of passes, on a V of stages with two chunks a
//! pipeline rank (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3).
//!
//! Time is counted in slots, one for each forward, backward to inputs and backward to weights of a
//! chunk. A block gives the slots of the first micro-batch on each pipeline rank; the next
//! micro-batch follows [`PERIOD`] slots later. A micro-batch lives as long as its block, and its
//! lifetime decides the memory. Warm-up and cooldown are then shortened as far as no pipeline rank
//! holds more: the greedy reordering and the squeezing of the paper's published code.

use super::generate::pass;
use super::{Pass, PassKind};

/// Slots between micro-batches: two chunks of three passes.
pub(super) const PERIOD: usize = 6;

/// The slots of a pipeline rank's forwards of chunk 0 and 1 and backwards of chunk 1 and 0, in the
/// order in which a micro-batch passes.
pub(super) type Block = [usize; 4];

/// Kinds of pass by index; the first four as in a [`Block`].
const KINDS: [(PassKind, usize); 4] =
    [(PassKind::F, 0), (PassKind::F, 1), (PassKind::B, 1), (PassKind::B, 0)];
const FIRST_BACKWARD: usize = 2;
const LAST: usize = 3;
const WEIGHTS: usize = 4;

/// The order of every pipeline rank for a repeated block, with warm-up and cooldown as short as
/// memory allows. The last stage's forward and its backward stay at least `apart` slots apart.
pub(super) fn shortened(blocks: &[Block], micro_batches: usize, apart: usize) -> Vec<Vec<Pass>> {
    let mut ranks = repeat(blocks, micro_batches);
    fill_early(&mut ranks, apart);
    squeeze(&mut ranks, apart);
    drain_early(&mut ranks, apart);
    squeeze(&mut ranks, apart);
    ranks.iter().map(RankSlots::order).collect()
}

/// The order for a repeated block, where only free moves are made.
pub(super) fn repeated(blocks: &[Block], micro_batches: usize) -> Vec<Vec<Pass>> {
    repeat(blocks, micro_batches).iter().map(RankSlots::order).collect()
}

/// Slots of one pipeline rank's passes, by kind and micro-batch; weight gradients without chunk.
struct RankSlots {
    slots: [Vec<usize>; 5],
}

fn repeat(blocks: &[Block], micro_batches: usize) -> Vec<RankSlots> {
    let rank = |block: &Block| {
        let every = |first: usize| (0..micro_batches).map(|k| first + k * PERIOD).collect();
        let [f0, f1, b1, b0] = block.map(every);
        RankSlots { slots: [f0, f1, b1, b0, Vec::new()] }
    };
    blocks.iter().map(rank).collect()
}

impl RankSlots {
    /// End of its last pass other than weight gradients.
    fn end(&self) -> usize {
        let last = self.slots[..WEIGHTS].iter().filter_map(|slots| slots.last());
        last.max().map_or(0, |last| last + 1)
    }

    /// The pass in each slot up to [`Self::end`], weight gradients aside.
    fn occupants(&self) -> Vec<Option<usize>> {
        let mut occupants = vec![None; self.end()];
        for (kind, slots) in self.slots[..WEIGHTS].iter().enumerate() {
            slots.iter().for_each(|&slot| occupants[slot] = Some(kind));
        }
        occupants
    }

    /// Weight gradients in the first free slots after their backwards, by chunk; those of chunk 1
    /// first.
    fn weight_slots(&self) -> [Vec<usize>; 2] {
        let (mut waiting, mut slots) = ([0_usize; 2], [Vec::new(), Vec::new()]);
        let mut put = |waiting: &mut [usize; 2], slot: usize| {
            let Some(chunk) = (0..2).rev().find(|&chunk| waiting[chunk] > 0) else { return false };
            waiting[chunk] -= 1;
            slots[chunk].push(slot);
            true
        };
        for (slot, occupant) in self.occupants().into_iter().enumerate() {
            match occupant {
                Some(FIRST_BACKWARD) => waiting[1] += 1,
                Some(LAST) => waiting[0] += 1,
                Some(_) => {}
                None => drop(put(&mut waiting, slot)),
            }
        }
        let mut slot = self.end();
        while put(&mut waiting, slot) {
            slot += 1;
        }
        slots
    }

    /// Sets the slots of weight gradients, whichever chunk they are of.
    fn place_weights(&mut self) {
        let mut slots = self.weight_slots().concat();
        slots.sort_unstable();
        self.slots[WEIGHTS] = slots;
    }

    /// Its passes by slot, with weight gradients in the first free ones.
    fn order(&self) -> Vec<Pass> {
        let mut timed: Vec<(usize, Pass)> = Vec::new();
        for ((kind, chunk), slots) in KINDS.into_iter().zip(&self.slots) {
            timed.extend(slots.iter().enumerate().map(|(k, &slot)| (slot, pass(kind, k, chunk))));
        }
        for (chunk, slots) in self.weight_slots().iter().enumerate() {
            let weights = |(k, &slot): (usize, &usize)| (slot, pass(PassKind::W, k, chunk));
            timed.extend(slots.iter().enumerate().map(weights));
        }
        timed.sort_unstable_by_key(|&(slot, _)| slot);
        timed.into_iter().map(|(_, pass)| pass).collect()
    }
}

/// A pass in its slot.
#[derive(Clone, Copy)]
struct Event {
    slot: usize,
    rank: usize,
    kind: usize,
    k: usize,
}

/// All passes by time.
fn events(ranks: &[RankSlots]) -> Vec<Event> {
    let kinds =
        || ranks.iter().enumerate().flat_map(|(d, own)| own.slots.iter().map(move |s| (d, s)));
    let end = kinds().filter_map(|(_, slots)| slots.last()).max().map_or(0, |last| last + 1);
    // Slots are few and dense: each gets its place by counting instead of comparing.
    let mut places = vec![0_usize; end + 1];
    kinds().flat_map(|(_, slots)| slots).for_each(|&slot| places[slot + 1] += 1);
    for slot in 0..end {
        places[slot + 1] += places[slot];
    }
    let none = Event { slot: 0, rank: 0, kind: 0, k: 0 };
    let mut events = vec![none; places[end]];
    for (at, (rank, slots)) in kinds().enumerate() {
        let kind = at % (WEIGHTS + 1);
        for (k, &slot) in slots.iter().enumerate() {
            events[places[slot]] = Event { slot, rank, kind, k };
            places[slot] += 1;
        }
    }
    events
}

/// The first slot after everything that a pass needs, other passes of its own pipeline rank aside.
/// `apart` slots lie between the last stage's forward and its backward, both on the first pipeline
/// rank.
fn ready(ranks: &[RankSlots], Event { rank, kind, k, .. }: Event, apart: usize) -> usize {
    let own = &ranks[rank].slots;
    let after = |slot: usize| slot + 1;
    let same = k.checked_sub(1).map_or(0, |k| after(own[kind][k]));
    if kind == WEIGHTS {
        return same.max(after(nth_of_two(&own[FIRST_BACKWARD], &own[LAST], k)));
    }
    let gap = if kind == FIRST_BACKWARD && rank == 0 { apart } else { 0 };
    let here = kind.checked_sub(1).map_or(0, |before| after(own[before][k]) + gap);
    let down = kind == 0 || kind == FIRST_BACKWARD;
    let other = if down { rank.checked_sub(1) } else { Some(rank + 1) };
    let other = other.and_then(|other| ranks.get(other));
    same.max(here).max(other.map_or(0, |other| after(other.slots[kind][k])))
}

/// The `n`-th of all values of two ascending lists, 0-based.
fn nth_of_two(one: &[usize], other: &[usize], n: usize) -> usize {
    // Number of the values before it that come from `one`: the fewest for which the next value
    // there is at least the last one then taken from `other`.
    let (mut low, mut high) = (n.saturating_sub(other.len()), n.min(one.len()));
    while low < high {
        let middle = low.midpoint(high);
        if one[middle] >= other[n - middle - 1] { high = middle } else { low = middle + 1 }
    }
    let next = [one.get(low), other.get(n - low)];
    next.into_iter().flatten().copied().min().unwrap_or(0)
}

/// State of the pipeline as passes go by: warm-up, steady state or cooldown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Filling,
    Steady,
    Draining,
}

impl Phase {
    /// The state for this event, and the next one. The steady state lasts from the first
    /// micro-batch's return to pipeline rank 0 to the last one's start.
    fn pass(&mut self, event: Event, micro_batches: usize) -> Self {
        if *self == Self::Filling && event.kind == LAST && event.rank == 0 {
            *self = Self::Steady;
        }
        let now = *self;
        if now == Self::Steady && event.kind == 0 && event.k + 1 == micro_batches {
            *self = Self::Draining;
        }
        now
    }
}

/// Activations a pipeline rank holds after each slot, up to weight gradients.
struct Held(Vec<usize>);

impl Held {
    fn new(rank: &RankSlots) -> Self {
        let end = rank.slots.iter().filter_map(|slots| slots.last()).max();
        let mut change = vec![0_isize; end.map_or(0, |end| end + 1)];
        for (kind, slots) in rank.slots.iter().enumerate() {
            let by = [1, 1, 0, 0, -1][kind];
            slots.iter().for_each(|&slot| change[slot] += by);
        }
        let running = change.iter().scan(0_isize, |held, by| {
            *held += by;
            Some(*held as usize)
        });
        Self(running.collect())
    }

    fn peak(&self) -> usize {
        self.0.iter().copied().max().unwrap_or(0)
    }
}

/// Moves passes of warm-up and cooldown to earlier free slots, where no pipeline rank then holds
/// more than the fullest did, weight gradients included.
fn fill_early(ranks: &mut [RankSlots], apart: usize) {
    ranks.iter_mut().for_each(RankSlots::place_weights);
    let mut held: Vec<Held> = ranks.iter().map(Held::new).collect();
    let most = held.iter().map(Held::peak).max().unwrap_or(0);
    let mut taken: Vec<Vec<bool>> = held.iter().map(|held| vec![false; held.0.len()]).collect();
    let mut phase = Phase::Filling;
    for event in events(ranks) {
        let Event { slot, rank, kind, k } = event;
        let micro_batches = ranks[rank].slots[0].len();
        let mut to = slot;
        if phase.pass(event, micro_batches) != Phase::Steady {
            let held = &held[rank].0;
            let free = |&t: &usize| !taken[rank][t];
            let fits = |&t: &usize| kind > 1 || held[t..slot].iter().all(|&held| held < most);
            to = (ready(ranks, event, apart)..slot).filter(free).find(fits).unwrap_or(slot);
        }
        match kind {
            0 | 1 => held[rank].0[to..slot].iter_mut().for_each(|held| *held += 1),
            WEIGHTS => held[rank].0[to..slot].iter_mut().for_each(|held| *held -= 1),
            _ => {}
        }
        taken[rank][to] = true;
        ranks[rank].slots[kind][k] = to;
    }
}

/// Moves passes of the cooldown to earlier free slots, with weight gradients wherever these leave
/// room.
fn drain_early(ranks: &mut [RankSlots], apart: usize) {
    ranks.iter_mut().for_each(|rank| rank.slots[WEIGHTS].clear());
    let mut occupants: Vec<_> = ranks.iter().map(RankSlots::occupants).collect();
    let most = occupants.iter().map(|slots| peak_without_weights(slots)).max().unwrap_or(0);
    let mut phase = Phase::Filling;
    for event in events(ranks) {
        let Event { slot, rank, kind, k } = event;
        let micro_batches = ranks[rank].slots[0].len();
        if phase.pass(event, micro_batches) != Phase::Draining {
            continue;
        }
        let slots = &mut occupants[rank];
        for to in ready(ranks, event, apart)..slot {
            // Slots before this event's hold only passes already visited.
            if slots[to].is_none() {
                slots.swap(to, slot);
                if peak_without_weights(slots) <= most {
                    ranks[rank].slots[kind][k] = to;
                    break;
                }
                slots.swap(to, slot);
            }
        }
    }
}

/// Most activations held where weight gradients run in every free slot in which one waits.
fn peak_without_weights(occupants: &[Option<usize>]) -> usize {
    let (mut held, mut waiting, mut most) = (0_usize, 0_usize, 0_usize);
    for occupant in occupants {
        match occupant {
            Some(0 | 1) => held += 1,
            Some(_) => waiting += 1,
            None if waiting > 0 => {
                held -= 1;
                waiting -= 1;
            }
            None => {}
        }
        most = most.max(held);
    }
    most
}

/// Runs every pipeline rank's order as early as it can, with weight gradients in their place.
fn squeeze(ranks: &mut [RankSlots], apart: usize) {
    if ranks.iter().any(|rank| rank.slots[WEIGHTS].is_empty()) {
        ranks.iter_mut().for_each(RankSlots::place_weights);
    }
    let mut free = vec![0; ranks.len()];
    for event in events(ranks) {
        let Event { rank, kind, k, .. } = event;
        let slot = ready(ranks, event, apart).max(free[rank]);
        ranks[rank].slots[kind][k] = slot;
        free[rank] = slot + 1;
    }
}
