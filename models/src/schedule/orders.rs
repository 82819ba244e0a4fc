//! Schedules in print: one line a device.

use super::{Pass, PassKind, Schedule};
use std::fmt;

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F => "F",
            Self::B => "B",
            Self::W => "W",
            Self::BW => "BW",
            Self::S => "S",
            Self::S2 => "S2",
            Self::T => "T",
        })
    }
}

impl Schedule {
    /// The order of every device, one line each: `d0: F0@0 F1@0 BW0@0`, where a pass is its kind,
    /// its micro-batch and, behind `@`, its stage. Vocabulary passes have no stage: `S:0`.
    pub fn orders(&self) -> String {
        let line = |device| format!("d{device}: {}\n", self.order_words(device).join(" "));
        (0..self.passes.len()).map(line).collect()
    }

    /// The passes of one device in that notation; none for a device that does not exist.
    pub fn order_words(&self, device: usize) -> Vec<String> {
        let passes = self.passes.get(device).map_or(&[][..], Vec::as_slice);
        passes.iter().map(|pass| self.word(device, *pass)).collect()
    }

    fn word(&self, device: usize, pass: Pass) -> String {
        let Pass { kind, micro_batch, chunk } = pass;
        match kind {
            PassKind::S | PassKind::S2 | PassKind::T => format!("{kind}:{micro_batch}"),
            _ => format!("{kind}{micro_batch}@{}", self.stage_of(device, usize::from(chunk))),
        }
    }
}
