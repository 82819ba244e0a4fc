//! 1F1B on a V of stages: two thirds of the activations without splitting backward.

use super::generate::{Counts, pass};
use super::{Pass, PassKind, Schedule, ScheduleError, ScheduleName, StageLayout};

/// A building block of 1F1B's passes over a V of stages, with shortened warm-up and cooldown
/// (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3.3; the order of its
/// published code).
///
/// Every pipeline rank holds about two thirds of what the first of 1F1B does.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn v_1f1b(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::V1F1B.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let passes = Shortening::new(&first_slots(ranks), micro_batches).run();
    Ok(counts.schedule(StageLayout::V, passes))
}

/// Slots between micro-batches: two forwards of one slot, two backwards of two.
const PERIOD: usize = 6;

/// Content of a slot; backwards take two, of which the second frees activations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Forward(usize),
    Backward(usize),
    BackwardEnd(usize),
}

impl Part {
    const ALL: [Self; 6] = [
        Self::Forward(0),
        Self::Forward(1),
        Self::Backward(1),
        Self::BackwardEnd(1),
        Self::Backward(0),
        Self::BackwardEnd(0),
    ];

    fn index(self) -> usize {
        match self {
            Self::Forward(chunk) => chunk,
            Self::Backward(chunk) => 4 - 2 * chunk,
            Self::BackwardEnd(chunk) => 5 - 2 * chunk,
        }
    }
}

/// By pipeline rank, the slots of the first micro-batch's forwards of chunk 0 and 1 and backwards
/// of chunk 1 and 0.
fn first_slots(p: usize) -> Vec<[usize; 4]> {
    let mut first = vec![[0; 4]; p];
    // A period of empty slots to move into.
    let mut slot = PERIOD + 1;
    for rank in 0..p {
        first[rank][0] = slot + rank;
        first[p - 1 - rank][1] = slot + p + rank;
    }
    slot += 2 * p + if p.is_multiple_of(3) { 3 } else { 0 };
    // Three backwards fill a period; then forwards have three slots.
    let mut filled = (3 - (p + 2) % 3) % 3;
    let mut next = || {
        let at = slot;
        (filled, slot) = if filled == 2 { (0, slot + 5) } else { (filled + 1, slot + 2) };
        at
    };
    for block in &mut first {
        block[2] = next();
    }
    for block in first.iter_mut().rev() {
        block[3] = next();
    }
    first
}

/// A pass over all slots in which each pass moves to an earlier free slot if its needs and memory
/// allow.
struct Shortening {
    /// By pipeline rank and slot.
    slots: Vec<Vec<Option<Part>>>,
    /// By pipeline rank and slot, activations held after it.
    held: Vec<Vec<usize>>,
    most: usize,
    /// By pipeline rank and part, the slots so far: one for each micro-batch.
    done: Vec<[Vec<usize>; 6]>,
}

impl Shortening {
    fn new(first: &[[usize; 4]], micro_batches: usize) -> Self {
        let longest = first.iter().flatten().max().map_or(0, |slot| slot + 2);
        let length = longest + PERIOD * micro_batches;
        let mut slots = vec![vec![None; length]; first.len()];
        for (slots, &[f0, f1, b1, b0]) in slots.iter_mut().zip(first) {
            for (part, at) in Part::ALL.into_iter().zip([f0, f1, b1, b1 + 1, b0, b0 + 1]) {
                (0..micro_batches).for_each(|k| slots[at + k * PERIOD] = Some(part));
            }
        }
        let held: Vec<Vec<usize>> = slots.iter().map(|slots| held(slots)).collect();
        let most = held.iter().flatten().copied().max().unwrap_or(0);
        let done = vec![Default::default(); first.len()];
        Self { slots, held, most, done }
    }

    fn run(mut self) -> Vec<Vec<Pass>> {
        let length = self.slots.first().map_or(0, Vec::len);
        for slot in 0..length {
            for rank in 0..self.slots.len() {
                if let Some(part) = self.slots[rank][slot] {
                    let to = self.place(rank, part, slot);
                    self.shift(rank, part, slot, to);
                }
            }
        }
        self.slots.iter().map(|slots| order(slots)).collect()
    }

    /// The slot after everything that this part needs.
    fn ready(&self, rank: usize, part: Part) -> usize {
        let index = part.index();
        let k = self.done[rank][index].len();
        let behind = |rank: usize, part: Part| self.done[rank][part.index()][k] + 1;
        let last = rank + 1 == self.slots.len();
        let need = match part {
            Part::Forward(0) => rank.checked_sub(1).map_or(0, |above| behind(above, part)),
            Part::Forward(_) if last => behind(rank, Part::Forward(0)),
            Part::Backward(1) if rank == 0 => behind(rank, Part::Forward(1)),
            Part::Backward(1) => behind(rank - 1, Part::BackwardEnd(1)),
            Part::Backward(_) if last => behind(rank, Part::BackwardEnd(1)),
            Part::Backward(_) => behind(rank + 1, Part::BackwardEnd(0)),
            Part::BackwardEnd(chunk) => behind(rank, Part::Backward(chunk)),
            Part::Forward(_) => behind(rank + 1, part),
        };
        need.max(self.done[rank][index].last().map_or(0, |slot| slot + 1))
    }

    fn place(&self, rank: usize, part: Part, slot: usize) -> usize {
        let (slots, held) = (&self.slots[rank], &self.held[rank]);
        let first_free = |from: usize| (from..slot).find(|&at| slots[at].is_none()).unwrap_or(slot);
        let ready = self.ready(rank, part).min(slot);
        match part {
            Part::BackwardEnd(_) => first_free(ready),
            Part::Backward(_) => {
                let two = |&at: &usize| slots[at].is_none() && slots[at + 1].is_none();
                (ready..slot).find(two).unwrap_or(slot)
            }
            Part::Forward(_) => {
                let ready = first_free(ready);
                let full = (ready..slot).rev().find(|&at| held[at] >= self.most);
                first_free(full.map_or(ready, |at| at + 1))
            }
        }
    }

    fn shift(&mut self, rank: usize, part: Part, from: usize, to: usize) {
        self.slots[rank][from] = None;
        self.slots[rank][to] = Some(part);
        self.done[rank][part.index()].push(to);
        let between = &mut self.held[rank][to..from];
        match part {
            Part::Forward(_) => between.iter_mut().for_each(|held| *held += 1),
            Part::BackwardEnd(_) => between.iter_mut().for_each(|held| *held -= 1),
            Part::Backward(_) => {}
        }
    }
}

fn held(slots: &[Option<Part>]) -> Vec<usize> {
    let mut held = 0;
    let mut behind = |part: &Option<Part>| {
        match part {
            Some(Part::Forward(_)) => held += 1,
            Some(Part::BackwardEnd(_)) => held -= 1,
            Some(Part::Backward(_)) | None => {}
        }
        held
    };
    slots.iter().map(&mut behind).collect()
}

fn order(slots: &[Option<Part>]) -> Vec<Pass> {
    let mut counts = [0; 6];
    let mut numbered = |part: Part| {
        let k = counts[part.index()];
        counts[part.index()] += 1;
        match part {
            Part::Forward(chunk) => Some(pass(PassKind::F, k, chunk)),
            Part::Backward(chunk) => Some(pass(PassKind::BW, k, chunk)),
            Part::BackwardEnd(_) => None,
        }
    };
    slots.iter().flatten().filter_map(|&part| numbered(part)).collect()
}
