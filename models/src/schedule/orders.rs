//! Schedules in print: one line a device.

use super::{Pass, PassKind, Schedule};
use std::fmt;
use std::fmt::Write;

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
        let mut text = String::new();
        for (device, passes) in self.passes.iter().enumerate() {
            let words: Vec<String> = passes.iter().map(|pass| self.word(device, *pass)).collect();
            // Writing to a string cannot fail.
            let _ = writeln!(text, "d{device}: {}", words.join(" "));
        }
        text
    }

    fn word(&self, device: usize, pass: Pass) -> String {
        let Pass { kind, micro_batch, chunk } = pass;
        match kind {
            PassKind::S | PassKind::S2 | PassKind::T => format!("{kind}:{micro_batch}"),
            _ => format!("{kind}{micro_batch}@{}", self.stage_of(device, usize::from(chunk))),
        }
    }
}
