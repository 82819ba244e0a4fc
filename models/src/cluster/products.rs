//! Measured matrix products.

use super::{Device, Scaled};

/// Rows and columns of the output tiles that cuBLAS prefers for large products on GPUs that compute
/// in [`Waves`], either way round (NVIDIA, Matrix Multiplication Background User's Guide, "Tile
/// Quantization").
const TILE: [f64; 2] = [256.0, 128.0];
/// Tiles of half that size, which cuBLAS takes where they fill the last wave better.
const HALF_TILES: [[f64; 2]; 2] = [[128.0, 128.0], [256.0, 64.0]];
/// Part of a whole tile's speed that half tiles reach. With [`FOLLOWED`], the power with which time
/// follows the waves (some products are split along their depth instead), it best predicts widths
/// left out of the A100 table: an error of 3.9 %; with a power of 0.5 or 1 4.4 and 4.2 %, without
/// waves 7.3 %.
const HALF_TILE_SPEED: f64 = 0.75;
const FOLLOWED: f64 = 0.75;

/// Waves of output tiles: multiprocessors compute them one wave after the other, and the last wave
/// takes as long as a full one (NVIDIA, Matrix Multiplication Background User's Guide, "Wave
/// Quantization").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waves {
    multiprocessors: f64,
}

impl Waves {
    /// The waves of a device.
    pub fn of(device: &Device) -> Self {
        Self { multiprocessors: device.sms as f64 }
    }

    /// Share of the time of a product with `m x n` outputs that whole waves explain, for the tiling
    /// with the fewest waves.
    fn share(self, m: f64, n: f64) -> f64 {
        let waves = |[rows, columns]: [f64; 2]| {
            let tiles = (m / rows).ceil() * (n / columns).ceil();
            (tiles / self.multiprocessors).ceil()
        };
        let either_way = |[long, short]: [f64; 2]| waves([long, short]).min(waves([short, long]));
        let halves = HALF_TILES.map(either_way).into_iter().fold(f64::INFINITY, f64::min);
        either_way(TILE).min(halves / (2.0 * HALF_TILE_SPEED)).powf(FOLLOWED)
    }
}

/// Seconds of products over `m`, `n` and `k`: measured points, interpolated between, never falling
/// with a size.
///
/// Where products run in waves, the time relative to the waves is interpolated.
#[derive(Clone, Debug, PartialEq)]
pub struct Products {
    seconds: Scaled<3>,
    waves: Option<Waves>,
}

impl Products {
    /// Builds the table from seconds at each combination of the axes' sizes; `None` where one is
    /// missing or not positive.
    pub(super) fn new(
        axes: [Vec<f64>; 3],
        waves: Option<Waves>,
        mut seconds: impl FnMut([f64; 3]) -> f64,
    ) -> Option<Self> {
        let each = |[m, n, k]: [f64; 3]| seconds([m, n, k]) / share(waves, m, n);
        let followed = if waves.is_some() { FOLLOWED } else { 0.0 };
        let above = [1.0 - followed, 1.0 - followed, 1.0];
        Some(Self { seconds: Scaled::new(axes, [[0.0; 3], above], each)?, waves })
    }

    /// Seconds of a product of `m x k` by `k x n`.
    pub fn at(&self, [m, n, k]: [f64; 3]) -> f64 {
        self.seconds.at([m, n, k]) * share(self.waves, m, n)
    }
}

fn share(waves: Option<Waves>, m: f64, n: f64) -> f64 {
    waves.map_or(1.0, |waves| waves.share(m, n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_last_wave_takes_as_long_as_a_full_one() {
        let waves = Waves { multiprocessors: 108.0 };
        let alike = |a: f64, b: f64| (a - b).abs() < 1e-12;
        // 8 x 40 tiles are 2.96 waves, 8 x 41 are 3.04: half as large ones, slower, take 3.6
        // instead of 4.
        let [three, more] = [5120.0, 5248.0].map(|n| waves.share(2048.0, n).powf(1.0 / FOLLOWED));
        assert!(alike(three, 3.0) && alike(more, 4.0_f64.min(7.0 / 1.5)), "{three} {more}");
        // The other way round there are as many.
        assert!(alike(waves.share(5120.0, 2048.0), waves.share(2048.0, 5120.0)));
    }

    #[test]
    fn sizes_measured_are_met_and_larger_ones_never_faster() {
        let waves = Some(Waves { multiprocessors: 108.0 });
        let axes = [vec![512.0, 4096.0], vec![512.0, 4096.0], vec![512.0, 4096.0]];
        let seconds = |[m, n, k]: [f64; 3]| m * n * (k + 100.0);
        let products = Products::new(axes, waves, seconds).expect("a whole grid");
        let at = |m, n, k| products.at([m, n, k]);
        assert!((at(4096.0, 512.0, 512.0) / seconds([4096.0, 512.0, 512.0]) - 1.0).abs() < 1e-12);
        let mut before = 0.0;
        for n in (256..16384).step_by(64) {
            let now = at(1024.0, f64::from(n), 2048.0);
            assert!(now >= before, "{n}: {now} after {before}");
            before = now;
        }
    }
}
