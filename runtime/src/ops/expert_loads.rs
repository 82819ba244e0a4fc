//! How often experts are chosen in a step, by which selection biases are updated: balance without
//! a loss (Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section
//! 2.1.2).

use super::router_losses::{Place, add};
use kernels::Real;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// How often this rank's rows have chosen each expert in a step.
#[derive(Default)]
pub struct ExpertLoads(RefCell<BTreeMap<Place, Vec<i64>>>);

impl ExpertLoads {
    /// Forgets a step.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    /// Notes the choices of a layer's rows. Passes that run again choose again: their choices
    /// replace the first ones.
    pub(super) fn note(&self, place: Place, counts: Vec<i64>) {
        self.0.borrow_mut().insert(place, counts);
    }

    /// Choices of each expert of a layer, in all micro-batches; `None` if none were noted.
    pub fn of_layer(&self, layer: usize) -> Option<Vec<i64>> {
        let noted = self.0.borrow();
        let mut of_layer = noted.range((layer, 0, 0)..(layer + 1, 0, 0)).map(|(_, counts)| counts);
        let mut sums = of_layer.next()?.clone();
        of_layer.for_each(|counts| add(&mut sums, counts));
        Some(sums)
    }
}

/// Moves a selection bias by `rate`: up where an expert has less load than the mean, down where it
/// has more. `counts` are those of the global batch.
pub fn update_bias<T: Real>(bias: &mut [T], counts: &[i64], rate: f64) {
    let (sum, experts) = (counts.iter().sum::<i64>(), counts.len() as i64);
    for (bias, count) in bias.iter_mut().zip(counts) {
        // The sign of the mean less the count, in whole numbers.
        let sign = (sum - count * experts).signum();
        *bias = T::from_f64(bias.to_f64() + rate * sign as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::update_bias;

    #[test]
    fn biases_move_against_the_load() {
        let mut bias = [0.5, 0.5, 0.5, -0.25];
        update_bias(&mut bias, &[1, 3, 2, 2], 0.125);
        assert_eq!(bias, [0.625, 0.375, 0.5, -0.25]);
        // The mean is 5/3.
        let mut bias = [0.0_f32; 3];
        update_bias(&mut bias, &[1, 2, 2], 1e-3);
        assert_eq!(bias, [1e-3, -1e-3, -1e-3]);
    }
}
