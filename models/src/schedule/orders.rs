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
    /// its micro-batch and, behind `@`, its stage. Vocabulary passes have no stage: `S:0`. Where there are
    /// two directions, a mark stands behind those of the second, `F0@3'`, whose micro-batches count from 0,
    /// too. What runs together stands in brackets: `(F3@0&BW1@3)`.
    pub fn orders(&self) -> String {
        let line = |device| format!("d{device}: {}\n", self.order_words(device).join(" "));
        (0..self.passes.len()).map(line).collect()
    }

    /// The passes of one device in that notation; none for a device that does not exist.
    pub fn order_words(&self, device: usize) -> Vec<String> {
        let (Some(passes), Some(pairs)) = (self.passes.get(device), self.pairs.get(device)) else {
            return Vec::new();
        };
        let mut words: Vec<String> = Vec::with_capacity(passes.len());
        let mut pairs = pairs.iter().peekable();
        let mut passes = passes.iter().enumerate();
        while let Some((n, &pass)) = passes.next() {
            let word = self.word(device, pass);
            let paired = pairs.next_if(|&&place| place as usize == n).and_then(|_| passes.next());
            words.push(match paired {
                Some((_, &other)) => format!("({word}&{})", self.word(device, other)),
                None => word,
            });
        }
        words
    }

    fn word(&self, device: usize, pass: Pass) -> String {
        let Pass { kind, micro_batch, chunk } = pass;
        if matches!(kind, PassKind::S | PassKind::S2 | PassKind::T) {
            return format!("{kind}:{micro_batch}");
        }
        let stage = self.stage_of(device, usize::from(chunk));
        match self.direction(micro_batch) {
            0 => format!("{kind}{micro_batch}@{stage}"),
            _ => {
                let first = self.micro_batches.div_ceil(2) as u32;
                format!("{kind}{}@{stage}'", micro_batch - first)
            }
        }
    }
}
