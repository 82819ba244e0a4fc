//! Learning-rate schedules.

use clap::ValueEnum;

/// Shape of the learning rate after its warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LrShape {
    /// Stays constant.
    Constant,
    /// Falls linearly to 0 after the last step.
    Linear,
    /// Falls along half a cosine to a tenth (Hoffmann et al. 2022, appendix B).
    Cosine,
    /// Stays constant, then falls linearly over the last tenth of the steps (Hu et al. 2024,
    /// section 4).
    Wsd,
    /// Falls with the square root of the step (Vaswani et al. 2017, section 5.3).
    InverseSqrt,
}

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    /// Highest rate.
    pub peak: f64,
    /// Shape after the warm-up.
    pub shape: LrShape,
    /// Steps over which the rate rises linearly.
    pub warmup: u64,
    /// Steps of the whole run.
    pub steps: u64,
}

impl LrSchedule {
    /// The learning rate of step `step`, 0-based.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let (behind, length) = (step - self.warmup, self.steps.saturating_sub(self.warmup).max(1));
        let done = (behind as f64 / length as f64).min(1.0);
        self.peak
            * match self.shape {
                LrShape::Constant => 1.0,
                LrShape::Linear => 1.0 - done,
                LrShape::Cosine => 0.1 + 0.45 * (1.0 + (std::f64::consts::PI * done).cos()),
                LrShape::Wsd => ((1.0 - done) / 0.1).min(1.0),
                LrShape::InverseSqrt => {
                    (self.warmup.max(1) as f64 / (step + 1).max(self.warmup) as f64).sqrt()
                }
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(shape: LrShape) -> Vec<f64> {
        let schedule = LrSchedule { peak: 2.0, shape, warmup: 4, steps: 104 };
        [0, 3, 4, 54, 94, 99, 103].map(|step| schedule.at(step)).to_vec()
    }

    #[test]
    fn rates_are_those_of_the_formulas() {
        let near = |shape, expected: [f64; 7]| {
            for (rate, expected) in rates(shape).into_iter().zip(expected) {
                assert!((rate - expected).abs() < 1e-12, "{shape:?}: {rate} is not {expected}");
            }
        };
        near(LrShape::Constant, [0.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
        near(LrShape::Linear, [0.5, 2.0, 2.0, 1.0, 0.2, 0.1, 0.02]);
        near(LrShape::Wsd, [0.5, 2.0, 2.0, 2.0, 2.0, 1.0, 0.2]);
        let cosine = |done: f64| 0.2 + 0.9 * (1.0 + (std::f64::consts::PI * done).cos());
        near(LrShape::Cosine, [0.5, 2.0, 2.0, 1.1, cosine(0.9), cosine(0.95), cosine(0.99)]);
        let root = |step: f64| 2.0 * (4.0 / (step + 1.0)).sqrt();
        near(
            LrShape::InverseSqrt,
            [0.5, 2.0, root(4.0), root(54.0), root(94.0), root(99.0), root(103.0)],
        );
    }

    #[test]
    fn without_warm_up_the_first_rate_is_the_peak() {
        for &shape in LrShape::value_variants() {
            let schedule = LrSchedule { peak: 3.0, shape, warmup: 0, steps: 10 };
            assert!((schedule.at(0) - 3.0).abs() < 1e-12, "{shape:?}");
        }
    }
}
