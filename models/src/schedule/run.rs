//! A run of passes with the same times on every pipeline rank. It decides or completes an order
//! before the planner knows the times of each stage.

use super::{Graph, Latency, NO_NODE, Pass, PassKind, PassTimes, Schedule, ScheduleError, Work};

/// A pass in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    pub pass: Pass,
    pub start: f64,
    pub end: f64,
}

/// A run in which every pass starts as early as its pipeline rank's order and what it waits for
/// allow.
pub(super) struct Run {
    /// By pipeline rank, in order; both of a pair have the pair's times.
    pub ranks: Vec<Vec<Timed>>,
}

impl Run {
    /// # Errors
    /// The order cannot run.
    pub fn new(schedule: &Schedule, times: PassTimes) -> Result<Self, ScheduleError> {
        let graph = Graph::new(schedule)?;
        let mut ends = vec![0.0_f64; graph.nodes.len()];
        let mut ranks: Vec<Vec<Timed>> = vec![Vec::new(); schedule.ranks];
        let share = schedule.share_chunks() as f64;
        for (n, node) in graph.nodes.iter().enumerate() {
            let ended = |node: u32| if node == NO_NODE { 0.0 } else { ends[node as usize] };
            let arrival = ended(node.needs) + latency(times, node.latency);
            let start = ended(node.before).max(arrival);
            let length = |pass: Pass| length(times, pass.kind, share);
            let passes = match node.work {
                Work::Join => [None; 2],
                Work::Pass(pass) => [Some(pass), None],
                Work::Pair(one, other) => [Some(one), Some(other)],
            };
            let end = start + passes.into_iter().flatten().map(length).sum::<f64>();
            ends[n] = end;
            let timed = passes.into_iter().flatten().map(|pass| Timed { pass, start, end });
            ranks[node.rank as usize].extend(timed);
        }
        Ok(Self { ranks })
    }

    /// End of the last pass.
    pub fn end(&self) -> f64 {
        self.ranks.iter().filter_map(|own| own.last()).map(|last| last.end).fold(0.0, f64::max)
    }
}

fn length(times: PassTimes, kind: PassKind, share: f64) -> f64 {
    match kind {
        PassKind::F => times.forward / share,
        PassKind::B => times.backward / share,
        PassKind::W => times.weight / share,
        PassKind::BW => (times.backward + times.weight) / share,
        PassKind::S => times.vocab[0],
        PassKind::S2 => times.vocab[1],
        PassKind::T => times.vocab[2],
        PassKind::IF | PassKind::IB => 0.0,
    }
}

fn latency(times: PassTimes, latency: Latency) -> f64 {
    match latency {
        Latency::None | Latency::InputGradient | Latency::Barrier(PassKind::IF) => 0.0,
        Latency::Link(_) => times.link,
        Latency::Broadcast => times.broadcast,
        Latency::Barrier(PassKind::S) => times.barriers[0],
        Latency::Barrier(PassKind::S2) => times.barriers[1],
        Latency::Barrier(_) => times.barriers[2],
    }
}
