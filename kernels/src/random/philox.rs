//! The Philox4x32-10 bijection.

use super::Stream;

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Ten rounds on one counter (Salmon et al., SC'11, section 3.3; constants of the Random123
/// library).
#[inline(always)]
#[must_use]
pub const fn block(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut done = 0;
    while done < ROUNDS {
        counter = round(counter, key);
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        done += 1;
    }
    counter
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the rounds use both halves of products
const fn round(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let low = MULTIPLIERS[0] * counter[0] as u64;
    let high = MULTIPLIERS[1] * counter[2] as u64;
    [
        (high >> 32) as u32 ^ counter[1] ^ key[0],
        high as u32,
        (low >> 32) as u32 ^ counter[3] ^ key[1],
        low as u32,
    ]
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

/// Groups that [`many`] computes at once: enough that the compiler vectorises the loops over them.
pub(crate) const MANY: usize = 32;

/// The words of the groups `group .. group + MANY`, in element order. The rounds of all groups run
/// side by side, as vectors.
#[inline(always)]
// Halves of 64-bit words, in four parallel arrays.
#[allow(clippy::cast_possible_truncation, clippy::needless_range_loop)]
pub(crate) fn many(stream: Stream, group: u64, words: &mut [u32; 4 * MANY]) {
    let mut counters = [[0; MANY], [0; MANY], [stream.tensor; MANY], [stream.step; MANY]];
    for i in 0..MANY {
        let group = group + i as u64;
        (counters[0][i], counters[1][i]) = (group as u32, (group >> 32) as u32);
    }
    let mut key = [stream.seed as u32, (stream.seed >> 32) as u32];
    for _ in 0..ROUNDS {
        for i in 0..MANY {
            let next = round([counters[0][i], counters[1][i], counters[2][i], counters[3][i]], key);
            for (counter, next) in counters.iter_mut().zip(next) {
                counter[i] = next;
            }
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    for (i, words) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *words = [counters[0][i], counters[1][i], counters[2][i], counters[3][i]];
    }
}
