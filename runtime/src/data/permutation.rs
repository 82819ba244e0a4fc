//! A permutation of 0..n without a table: sample `i` of an epoch is `f(seed, epoch, i)`.

/// A Feistel network of four rounds over the next power of four, iterated until the result is below
/// `n` (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3).
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..n` for a key.
    pub fn new(n: u64, key: u64) -> Self {
        let bits = 64 - n.saturating_sub(1).leading_zeros();
        Self { n, half_bits: bits.div_ceil(2).max(1), key }
    }

    /// The image of `index`.
    pub fn of(&self, index: u64) -> u64 {
        let mut at = self.encrypt(index);
        while at >= self.n {
            at = self.encrypt(at);
        }
        at
    }

    fn encrypt(&self, index: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for round in 0..4 {
            (left, right) = (right, left ^ (mix(right ^ mix(self.key ^ round)) & mask));
        }
        (left << self.half_bits) | right
    }
}

/// splitmix64's finaliser (Steele et al. 2014).
pub(super) fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once() {
        for n in [1, 2, 3, 5, 64, 100, 1023, 1025] {
            let permutation = Permutation::new(n, 7);
            let mut seen: Vec<u64> = (0..n).map(|i| permutation.of(i)).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..n), "{n}");
        }
    }

    #[test]
    fn another_key_is_another_order() {
        let order = |key| (0..100).map(|i| Permutation::new(100, key).of(i)).collect::<Vec<_>>();
        assert_ne!(order(1), order(2));
        assert_ne!(order(1), (0..100).collect::<Vec<_>>());
    }
}
