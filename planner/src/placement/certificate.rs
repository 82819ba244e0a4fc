//! A lower bound for every placement on one pipeline, found once and then a product of three sums.
//!
//! Every chain of passes that must follow one another bounds the iteration from below, and so does any
//! average of chains. If in an average each stage's forward counts at least `forward` times and each
//! stage's backward at least `backward` times, then for every placement
//! `iteration ≥ forward·Σ_q F_q + backward·Σ_q B_q + links·c`,
//! and the sums are those of the whole model, however it is cut into stages. Chains are found by
//! simulating and then lengthening the stages that the average covers least (fictitious play of the
//! game whose value is the best continuous placement); any number of rounds gives a valid bound.

use super::Pipeline;
use crate::simulate::{Durations, VocabDurations, Workspace};

/// Coefficients of the bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Certificate {
    /// Times the whole model's forward of one micro-batch counts.
    pub forward: f64,
    /// Times the whole model's backward of one micro-batch counts.
    pub backward: f64,
    /// Times the latency of one boundary counts.
    pub links: f64,
}

/// Rounds of play: enough for a few per mille on the pipelines of practice.
const ROUNDS: usize = 48;

impl Certificate {
    /// Finds chains for a pipeline without vocabulary passes.
    pub fn find(pipeline: &Pipeline) -> Self {
        let stages = pipeline.device_of.len();
        let mut play = Play::new(stages);
        let mut workspace = Workspace::default();
        for round in 1..=ROUNDS {
            let path = pipeline.prepared.critical_path(&play.durations(), &mut workspace);
            play.add(&path.forward_count, &path.backward_count, &path.link_count);
            play.lengthen(round);
        }
        play.certificate()
    }

    /// The bound for a model whose stages take `forward_s` and `backward_s` in all, with latency
    /// `link_s` at every boundary.
    pub fn bound_s(&self, forward_s: f64, backward_s: f64, link_s: f64) -> f64 {
        self.forward * forward_s + self.backward * backward_s + self.links * link_s
    }
}

/// The state of play: how often each stage was covered, and the stage times to try next.
struct Play {
    forward: Vec<f64>,
    backward: Vec<f64>,
    links: f64,
    rounds: f64,
    weight: Vec<f64>,
}

impl Play {
    fn new(stages: usize) -> Self {
        Self {
            forward: vec![0.0; stages],
            backward: vec![0.0; stages],
            links: 0.0,
            rounds: 0.0,
            weight: vec![1.0; stages],
        }
    }

    /// Backward about two forwards, a small latency.
    fn durations(&self) -> Durations {
        Durations {
            forward: self.weight.clone(),
            backward: self.weight.iter().map(|weight| 2.0 * weight).collect(),
            weight: vec![],
            link_s: vec![0.02; self.weight.len() - 1],
            vocab: VocabDurations::default(),
        }
    }

    fn add(&mut self, forward: &[u32], backward: &[u32], links: &[u32]) {
        let count = |sums: &mut [f64], counts: &[u32]| {
            for (sum, &count) in sums.iter_mut().zip(counts) {
                *sum += f64::from(count);
            }
        };
        count(&mut self.forward, forward);
        count(&mut self.backward, backward);
        self.links += links.iter().copied().map(f64::from).sum::<f64>();
        self.rounds += 1.0;
    }

    /// Lengthens stages that the chains so far cover less than the average, by ever smaller steps.
    fn lengthen(&mut self, round: usize) {
        let covered: Vec<f64> =
            self.forward.iter().zip(&self.backward).map(|(f, b)| f + 2.0 * b).collect();
        let mean = covered.iter().sum::<f64>() / covered.len() as f64;
        let step = 0.1 / (round as f64).sqrt();
        for (weight, covered) in self.weight.iter_mut().zip(&covered) {
            *weight = 1.0 + step * (1.0 - covered / mean);
        }
    }

    fn certificate(&self) -> Certificate {
        let least = |sums: &[f64]| sums.iter().copied().fold(f64::INFINITY, f64::min) / self.rounds;
        Certificate {
            forward: least(&self.forward),
            backward: least(&self.backward),
            links: self.links / self.rounds,
        }
    }
}
