//! Flags of a run's configuration that no column holds and a row's notes name.
//!
//! How a run was set up is configuration, whoever wrote it where; what came of it (rates, footnotes on regressions) is
//! a result, and nothing here reads it.

use super::row::Row;

/// What the notes say of how the run was set up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunFlags {
    /// Tuned from trained weights, by adapters or in whole: not planned.
    pub fine_tuning: bool,
    /// Ranks that share one sharded copy of the optimizer's state, where it stays in a part of the replicas.
    pub sharded_ways: Option<u64>,
    /// Weights are sharded inside the node and copied between nodes (PyTorch's hybrid sharding).
    pub hybrid_shard: bool,
    /// Tokens reach their experts by DeepEP, or by a plain all-to-all.
    pub flexible_dispatch: Option<bool>,
    /// Experts' all-to-alls run under another micro-batch's passes.
    pub under_passes: bool,
    /// Composer's mixed precision `PURE`: gradients are reduced in 16 bits, where `DEFAULT` has 32.
    pub pure_16_bits: bool,
    /// The optimizer's step waits for all stages, although the schedule's authors validate it afterwards.
    pub synchronous_step: bool,
}

impl RunFlags {
    /// Reads a row's notes.
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

/// The number behind `key`; none where it is not one (`zero1=-1` shards over all).
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
