//! What the generators share: checked counts and the making of passes.

use super::{Pass, PassKind, ScheduleError};

/// Pipeline devices, micro-batches and chunks, all within what a [`Pass`] can hold.
#[derive(Clone, Copy)]
pub(super) struct Counts {
    pub devices: usize,
    pub micro_batches: usize,
    pub chunks: usize,
}

impl Counts {
    pub fn new(devices: usize, micro_batches: usize, chunks: usize) -> Result<Self, ScheduleError> {
        within("devices", devices, 1 << 20)?;
        within("micro-batches", micro_batches, 1 << 24)?;
        within("chunks a device", chunks, 1 << 10)?;
        Ok(Self { devices, micro_batches, chunks })
    }
}

fn within(what: &'static str, value: usize, most: usize) -> Result<(), ScheduleError> {
    match value {
        0 => Err(ScheduleError::Count { what, value, most }),
        _ if value > most => Err(ScheduleError::Count { what, value, most }),
        _ => Ok(()),
    }
}

/// A pass; [`Counts`] has made sure that the numbers fit.
pub(super) fn pass(kind: PassKind, micro_batch: usize, chunk: usize) -> Pass {
    Pass { kind, micro_batch: micro_batch as u32, chunk: chunk as u16 }
}

/// Forwards then backwards, of which `warm_up` forwards come first and the rest alternate: forward,
/// backward, forward, backward.
pub(super) fn one_forward_one_backward(
    forwards: impl Iterator<Item = Pass>,
    backwards: impl Iterator<Item = Pass>,
    warm_up: usize,
) -> Vec<Pass> {
    let (mut forwards, mut backwards) = (forwards, backwards);
    let mut order: Vec<Pass> = forwards.by_ref().take(warm_up).collect();
    for forward in forwards {
        order.push(forward);
        order.extend(backwards.next());
    }
    order.extend(backwards);
    order
}
