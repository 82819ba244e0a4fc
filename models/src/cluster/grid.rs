//! Interpolation between measured points.

/// Values on a rectangular grid. Interpolation is multilinear in the logarithms of axes and values,
/// and constant outside.
///
/// After [`Grid::monotone`] the interpolated function never falls along any axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid<const N: usize> {
    ln_axes: [Vec<f64>; N],
    /// Row-major, the last axis fastest.
    ln_values: Vec<f64>,
}

/// Most points of a grid. A short file with a few sizes on each line could ask for many more.
const MOST_POINTS: usize = 1 << 22;

impl<const N: usize> Grid<N> {
    /// A grid with `value` at each combination of the axes' points. Axes must be positive, rising
    /// and not empty, values positive. With more than [`MOST_POINTS`] combinations it has no
    /// values.
    pub fn new(axes: [Vec<f64>; N], mut value: impl FnMut([f64; N]) -> f64) -> Self {
        let count = axes.iter().try_fold(1_usize, |count, axis| count.checked_mul(axis.len()));
        let count = count.filter(|&count| count <= MOST_POINTS).unwrap_or(0);
        let point = |index| Self::point(&axes, index);
        let ln_values = (0..count).map(|index| value(point(index)).ln()).collect();
        let ln_axes = axes.map(|axis| axis.iter().map(|x| x.ln()).collect());
        Self { ln_axes, ln_values }
    }

    /// Whether there is a positive value everywhere.
    pub fn is_whole(&self) -> bool {
        !self.ln_values.is_empty() && self.ln_values.iter().all(|value| value.is_finite())
    }

    /// Coordinates of the value at `index`.
    fn point(axes: &[Vec<f64>; N], mut index: usize) -> [f64; N] {
        let mut point = [0.0; N];
        for (x, axis) in point.iter_mut().zip(axes).rev() {
            *x = axis[index % axis.len()];
            index /= axis.len();
        }
        point
    }

    /// The value at `point`; outside the grid that of the nearest point on it.
    pub fn at(&self, point: [f64; N]) -> f64 {
        let mut corner = 0;
        let mut steps = [(0, 0.0); N];
        let mut stride = 1;
        for axis in (0..N).rev() {
            let (cell, share) = bracket(&self.ln_axes[axis], point[axis].ln());
            corner += cell * stride;
            steps[axis] = (stride, share);
            stride *= self.ln_axes[axis].len();
        }
        self.blend(corner, &steps).exp()
    }

    /// Blends the corners of a cell, one axis after the other.
    fn blend(&self, corner: usize, steps: &[(usize, f64)]) -> f64 {
        let Some(((stride, share), rest)) = steps.split_first() else {
            return self.ln_values[corner];
        };
        let low = self.blend(corner, rest);
        if *share == 0.0 {
            return low;
        }
        low + share * (self.blend(corner + stride, rest) - low)
    }

    /// The nearest grid that never falls along any axis: the mean of the largest value before each
    /// point and the smallest after it.
    #[must_use]
    pub fn monotone(mut self) -> Self {
        let mut above = self.ln_values.clone();
        let mut below = self.ln_values.clone();
        let mut stride = 1;
        for axis in self.ln_axes.iter().rev() {
            sweep(&mut above, &mut below, stride, axis.len());
            stride *= axis.len();
        }
        self.ln_values = above.iter().zip(&below).map(|(a, b)| 0.5 * (a + b)).collect();
        self
    }
}

/// Running maximum upwards and running minimum downwards along one axis.
fn sweep(above: &mut [f64], below: &mut [f64], stride: usize, length: usize) {
    let position = |index: usize| index / stride % length;
    for index in (0..above.len()).filter(|index| position(*index) > 0) {
        above[index] = above[index].max(above[index - stride]);
    }
    for index in (0..below.len()).rev().filter(|index| position(*index) + 1 < length) {
        below[index] = below[index].min(below[index + stride]);
    }
}

/// Cell of a rising axis that holds `x`, and how far into it; clamped to the ends.
fn bracket(axis: &[f64], x: f64) -> (usize, f64) {
    let above = axis.partition_point(|point| *point <= x);
    if above == 0 || x.is_nan() {
        return (0, 0.0);
    }
    if above == axis.len() {
        return (axis.len() - 1, 0.0);
    }
    let (low, high) = (axis[above - 1], axis[above]);
    (above - 1, (x - low) / (high - low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_of_powers_is_met_exactly() {
        let axes = [vec![1.0, 4.0, 64.0], vec![2.0, 8.0]];
        let grid = Grid::new(axes, |[x, y]| 3.0 * x * y.sqrt());
        for (x, y) in [(1.0, 2.0), (2.0, 3.0), (10.0, 5.0), (64.0, 8.0)] {
            assert!((grid.at([x, y]) / (3.0 * x * f64::sqrt(y)) - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn outside_is_the_nearest_point() {
        let grid = Grid::new([vec![1.0, 2.0]], |[x]| x);
        assert_eq!((grid.at([0.5]), grid.at([9.0])), (1.0, 2.0));
    }

    #[test]
    fn a_dent_is_filled_and_a_rising_grid_is_kept() {
        let values = [1.0, 4.0, 2.0, 8.0];
        let mut next = values.iter();
        let axis = vec![1.0, 2.0, 3.0, 4.0];
        let grid = Grid::new([axis.clone()], |_| *next.next().unwrap()).monotone();
        assert!((grid.at([2.0]) - 8f64.sqrt()).abs() < 1e-12);
        assert!((grid.at([3.0]) - 8f64.sqrt()).abs() < 1e-12);
        let rising = Grid::new([axis], |[x]| x * x);
        assert_eq!(rising.clone().monotone(), rising);
    }
}
