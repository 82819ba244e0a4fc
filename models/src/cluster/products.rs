//! Measured matrix products.

use super::{Device, Scaled};

/// Rows and columns of the output tiles that cuBLAS prefers for large products on GPUs that compute in [`Waves`],
/// either way round (NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization").
const TILE: [f64; 2] = [256.0, 128.0];
/// Tiles of half that size, which it takes where they fill the last wave better.
const HALF_TILES: [[f64; 2]; 2] = [[128.0, 128.0], [256.0, 64.0]];
/// Part of a whole tile's speed that these reach: of 0.75 to 0.95 what foretells widths best that are left out of
/// A100's table (from 7.1 % without waves to 4.2 %).
const HALF_TILE_SPEED: f64 = 0.75;

/// Output tiles that multiprocessors compute one wave after the other: the last wave takes as long as a full one
/// (NVIDIA, Matrix Multiplication Background User's Guide, "Wave Quantization").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waves {
    multiprocessors: f64,
}

impl Waves {
    /// The waves of a device.
    pub fn of(device: &Device) -> Self {
        Self { multiprocessors: device.sms as f64 }
    }

    /// Waves of whole tiles that a product with `m x n` outputs takes, tiled so that it takes the fewest.
    fn count(self, m: f64, n: f64) -> f64 {
        let waves = |[rows, columns]: [f64; 2]| {
            let tiles = (m / rows).ceil() * (n / columns).ceil();
            (tiles / self.multiprocessors).ceil()
        };
        let either_way = |[long, short]: [f64; 2]| waves([long, short]).min(waves([short, long]));
        let halves = HALF_TILES.map(either_way).into_iter().fold(f64::INFINITY, f64::min);
        either_way(TILE).min(halves / (2.0 * HALF_TILE_SPEED))
    }
}

/// Seconds of products over `m`, `n` and `k`: what was measured, between it what is near, never falling with a size.
///
/// Where products run in waves it is the time of a wave that is near between measured sizes, not that of a product.
#[derive(Clone, Debug, PartialEq)]
pub struct Products {
    seconds: Scaled<3>,
    waves: Option<Waves>,
}

impl Products {
    /// From seconds at each combination of the axes' sizes; `None` where one is missing, or not positive.
    pub(super) fn new(
        axes: [Vec<f64>; 3],
        waves: Option<Waves>,
        mut seconds: impl FnMut([f64; 3]) -> f64,
    ) -> Option<Self> {
        let each = |[m, n, k]: [f64; 3]| seconds([m, n, k]) / count(waves, m, n);
        let above = if waves.is_some() { [0.0, 0.0, 1.0] } else { [1.0; 3] };
        Some(Self { seconds: Scaled::new(axes, [[0.0; 3], above], each)?, waves })
    }

    /// Seconds of a product of `m x k` by `k x n`.
    pub fn at(&self, [m, n, k]: [f64; 3]) -> f64 {
        self.seconds.at([m, n, k]) * count(self.waves, m, n)
    }
}

fn count(waves: Option<Waves>, m: f64, n: f64) -> f64 {
    waves.map_or(1.0, |waves| waves.count(m, n))
}
