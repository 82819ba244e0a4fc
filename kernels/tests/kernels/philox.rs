//! Published test vectors of the generator.

use kernels::random::philox::block;

/// Random123's `kat_vectors`, the three lines `philox 4x32 10` (Salmon et al.;
/// github.com/DEShawResearch/random123,
/// `tests/kat_vectors`): counter, key, result.
#[test]
fn philox_gives_the_published_answers() {
    let ones = u32::MAX;
    let vectors = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (counter, key, answer) in vectors {
        assert_eq!(block(counter, key), answer);
    }
}
