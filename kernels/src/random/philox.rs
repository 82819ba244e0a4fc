//! Philox4x32-10, the bijection itself.

use super::Stream;

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Ten rounds on one counter (Salmon et al., SC'11, section 3.3; constants of the Random123 library).
#[inline(always)]
#[must_use]
#[allow(clippy::cast_possible_truncation)] // the halves of products are what the rounds are made of
pub const fn block(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < ROUNDS {
        let low = MULTIPLIERS[0] * counter[0] as u64;
        let high = MULTIPLIERS[1] * counter[2] as u64;
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        round += 1;
    }
    counter
}

/// The four words of the elements `4 group .. 4 group + 4` of a stream.
#[inline(always)]
#[must_use]
#[allow(clippy::cast_possible_truncation)] // halves of 64-bit words
pub const fn words(stream: Stream, group: u64) -> [u32; 4] {
    let counter = [group as u32, (group >> 32) as u32, stream.tensor, stream.step];
    block(counter, [stream.seed as u32, (stream.seed >> 32) as u32])
}

/// The word of the element with global index `index`.
#[inline]
#[must_use]
pub const fn word(stream: Stream, index: u64) -> u32 {
    words(stream, index / 4)[(index % 4) as usize]
}
