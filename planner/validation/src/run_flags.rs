//! Settings of a run that only the notes of its row mention.
//!
//! How a run was set up is configuration, wherever it is written. Its outcome (rates, footnotes on
//! regressions) is a result and is not read here.

use super::row::Row;

/// Settings read from the notes of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunFlags {
    /// Fine-tuning, with or without adapters, which is not planned.
    pub fine_tuning: bool,
    /// Ranks that share one sharded copy of the optimizer state, where not all replicas do.
    pub sharded_ways: Option<u64>,
    /// Whether weights are sharded within a host and replicated between hosts (PyTorch's hybrid
    /// sharding).
    pub hybrid_shard: bool,
    /// Whether tokens are dispatched by DeepEP rather than by a plain all-to-all, if stated.
    pub flexible_dispatch: Option<bool>,
    /// Whether the experts' all-to-alls overlap another micro-batch's passes.
    pub under_passes: bool,
    /// Composer's mixed precision `PURE`: gradients are reduced in 16 bits, in 32 with `DEFAULT`.
    pub pure_16_bits: bool,
    /// Whether the optimizer step waits for all stages. The schedule's authors validate it
    /// afterwards by default.
    pub synchronous_step: bool,
}

impl RunFlags {
    /// Reads the notes of a row.
    pub fn of(row: &Row) -> Self {
        let says = |words: &str| row.notes.contains(words);
        Self {
            fine_tuning: says("LoRA") || says("Fine-Tuning"),
            sharded_ways: leading_number(&row.notes, "zero1="),
            hybrid_shard: row.notes.starts_with("HSDP"),
            flexible_dispatch: match (says("DeepEP"), says("dispatcher A2A")) {
                (true, _) => Some(true),
                (false, true) => Some(false),
                (false, false) => None,
            },
            under_passes: says("1f1b overlap"),
            pure_16_bits: says("mp mode PURE"),
            synchronous_step: says("WITHOUT optimizer post-validation"),
        }
    }
}

/// The number after `key`; `None` for anything else (`zero1=-1` shards over all ranks).
fn leading_number(text: &str, key: &str) -> Option<u64> {
    let (_, after) = text.split_once(key)?;
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::leading_number;

    #[test]
    fn numbers_behind_a_key_are_read() {
        assert_eq!(leading_number("(tp=1, zero1=8): sharded", "zero1="), Some(8));
        assert_eq!(leading_number("(tp=1, zero1=-1): sharded", "zero1="), None);
        assert_eq!(leading_number("sharded", "zero1="), None);
    }
}
