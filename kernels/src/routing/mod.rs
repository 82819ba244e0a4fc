//! Which experts a token is sent to, and with which weights, from a router's logits.
//!
//! ```text
//! softmax:  p = softmax over all experts;  chosen: the k largest p
//! sigmoid:  s = sigmoid of each logit;     chosen: the k largest s + bias within the groups kept
//! w_j = scale score_j / sum of chosen scores       renormalised, else  scale score_j
//! ```
//!
//! | tensor | shape |
//! |---|---|
//! | `logits`, `scores`, `dlogits` | `[tokens, experts]` |
//! | `chosen`, `weights`, `dweights` | `[tokens, top_k]` |
//! | `log_sums`, `dlog_sums` | `[tokens]`: log-sum-exp of the logits |
//!
//! Groups are runs of `experts / groups` experts. A group's score is the sum of its two best; the
//! `kept` best groups remain, and experts of others count as 0 (DeepSeek-V3, arXiv 2412.19437,
//! section 2.1.2). The bias takes no part in weights or gradients. Chosen experts are in ascending
//! order. Of equal scores the first wins.

use crate::{Cpu, Real};

/// Added to the sum of sigmoids before dividing by it, as DeepSeek's code does.
const LEAST_SUM: f64 = 1e-20;

/// How experts are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// How logits become scores.
    pub scoring: Scoring,
    /// Whether a token's weights are divided by their sum.
    pub renormalised: bool,
    /// Factor of all weights.
    pub scale: f64,
}

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each, chosen within groups.
    Sigmoid {
        /// Groups of experts.
        groups: usize,
        /// Groups that a token's experts may be of.
        kept: usize,
    },
}

/// What is chosen for each token.
pub struct Chosen<'a, T> {
    /// Scores of all experts.
    pub scores: &'a mut [T],
    /// Experts, in ascending order.
    pub chosen: &'a mut [u32],
    /// Their weights.
    pub weights: &'a mut [T],
    /// The log-sum-exp of the logits.
    pub log_sums: &'a mut [T],
}

/// Gradients of what losses of the router read, besides those of the weights.
#[derive(Clone, Copy, Default)]
pub struct LossGradients<'a, T> {
    /// Of each expert's summed shares, `[experts]`. Its share of a token is the softmax score, or
    /// the sigmoid score divided by the sum of all ([`Routing::shares`]).
    pub shares: Option<&'a [T]>,
    /// Of each token's log-sum-exp. Sigmoid scores do not have it.
    pub log_sums: Option<&'a [T]>,
}

/// Chooses experts for every row of `logits`. `bias` is added to scores for the choice alone.
///
/// # Panics
/// If a slice has the wrong length.
pub fn forward<T: Real>(
    cpu: &Cpu,
    routing: &Routing,
    logits: &[T],
    bias: Option<&[T]>,
    Chosen { scores, chosen, weights, log_sums }: Chosen<'_, T>,
) {
    let (experts, top_k) = (routing.experts, routing.top_k);
    crate::check::length("scores", scores.len(), logits.len());
    let tokens = logits.len() / experts;
    crate::check::length("logits", logits.len(), tokens * experts);
    crate::check::length("chosen", chosen.len(), tokens * top_k);
    crate::check::length("weights", weights.len(), tokens * top_k);
    crate::check::length("log_sums", log_sums.len(), tokens);
    let rows = logits.chunks_exact(experts).zip(scores.chunks_exact_mut(experts));
    let rows = rows.zip(chosen.chunks_exact_mut(top_k)).zip(weights.chunks_exact_mut(top_k));
    let rows = rows.zip(log_sums);
    cpu.each(rows, |((((logits, scores), chosen), weights), log_sum)| {
        *log_sum = T::from_f64(log_sum_of(logits));
        let of_token = routing.scores(logits);
        routing.choose(&of_token, bias, chosen);
        let sum = routing.sum(chosen.iter().map(|&expert| of_token[expert as usize]));
        for (weight, &expert) in weights.iter_mut().zip(&*chosen) {
            *weight = T::from_f64(routing.scale * of_token[expert as usize] / sum);
        }
        for (score, value) in scores.iter_mut().zip(of_token) {
            *score = T::from_f64(value);
        }
    });
}

/// Gradient of the logits, from that of the weights and those of the router's losses.
///
/// # Panics
/// If a slice has the wrong length, or if sigmoid scores have gradients of log-sums.
pub fn backward<T: Real>(
    cpu: &Cpu,
    routing: &Routing,
    scores: &[T],
    chosen: &[u32],
    dweights: &[T],
    losses: LossGradients<'_, T>,
    dlogits: &mut [T],
) {
    let (experts, top_k) = (routing.experts, routing.top_k);
    let tokens = scores.len() / experts;
    crate::check::length("dlogits", dlogits.len(), tokens * experts);
    crate::check::length("chosen", chosen.len(), tokens * top_k);
    crate::check::length("dweights", dweights.len(), tokens * top_k);
    if let Some(log_sums) = losses.log_sums {
        crate::check::length("dlog_sums", log_sums.len(), tokens);
        assert!(routing.scoring == Scoring::Softmax, "sigmoid scores do not have log-sums");
    }
    let rows = scores.chunks_exact(experts).zip(dlogits.chunks_exact_mut(experts));
    let rows = rows.zip(chosen.chunks_exact(top_k)).zip(dweights.chunks_exact(top_k));
    let dlog_sum = |row: usize| losses.log_sums.map_or(0.0, |of| of[row].to_f64());
    cpu.each(rows.enumerate(), |(row, (((scores, dlogits), chosen), dweights))| {
        let scores: Vec<f64> = scores.iter().map(|score| score.to_f64()).collect();
        let of = |expert: u32| scores[expert as usize];
        let sum = routing.sum(chosen.iter().map(|&expert| of(expert)));
        let mut dscores = vec![0.0; experts];
        let each = || chosen.iter().copied().zip(dweights.iter().map(|dw| dw.to_f64()));
        // Every chosen score also lies in the divisor.
        let through_sum = match routing.renormalised {
            true => each().map(|(expert, dw)| dw * of(expert)).sum::<f64>() / sum,
            false => 0.0,
        };
        for (expert, dw) in each() {
            dscores[expert as usize] = routing.scale * (dw - through_sum) / sum;
        }
        if let Some(of) = losses.shares {
            routing.add_through_shares(&scores, of, &mut dscores);
        }
        let dlog_sum = dlog_sum(row);
        let mean: f64 = dscores.iter().zip(&scores).map(|(ds, score)| ds * score).sum();
        for ((to, ds), score) in dlogits.iter_mut().zip(dscores).zip(&scores) {
            *to = T::from_f64(match routing.scoring {
                Scoring::Softmax => score * (ds - mean + dlog_sum),
                Scoring::Sigmoid { .. } => ds * score * (1.0 - score),
            });
        }
    });
}

impl Routing {
    fn scores<T: Real>(&self, logits: &[T]) -> Vec<f64> {
        let logits = logits.iter().map(|logit| logit.to_f64());
        match self.scoring {
            Scoring::Softmax => {
                let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
                let mut scores: Vec<f64> = logits.map(|logit| (logit - largest).exp()).collect();
                let sum: f64 = scores.iter().sum();
                scores.iter_mut().for_each(|score| *score /= sum);
                scores
            }
            Scoring::Sigmoid { .. } => logits.map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        }
    }

    /// Each expert's share of a token with these scores.
    pub fn shares<T: Real>(&self, scores: &[T]) -> Vec<f64> {
        let scores: Vec<f64> = scores.iter().map(|score| score.to_f64()).collect();
        let sum = self.sum_of_all(&scores);
        scores.into_iter().map(|score| score / sum).collect()
    }

    fn sum_of_all(&self, scores: &[f64]) -> f64 {
        match self.scoring {
            Scoring::Softmax => 1.0,
            Scoring::Sigmoid { .. } => scores.iter().sum::<f64>() + LEAST_SUM,
        }
    }

    /// Adds the gradient of scores, from that of their shares.
    fn add_through_shares<T: Real>(&self, scores: &[f64], dshares: &[T], dscores: &mut [f64]) {
        let sum = self.sum_of_all(scores);
        // Every score also lies in the divisor.
        let through_sum = match self.scoring {
            Scoring::Softmax => 0.0,
            Scoring::Sigmoid { .. } => {
                let products = dshares.iter().zip(scores).map(|(d, score)| d.to_f64() * score);
                products.sum::<f64>() / sum
            }
        };
        for (to, d) in dscores.iter_mut().zip(dshares) {
            *to += (d.to_f64() - through_sum) / sum;
        }
    }

    /// What weights are divided by.
    fn sum(&self, chosen: impl Iterator<Item = f64>) -> f64 {
        match (self.renormalised, self.scoring) {
            (false, _) => 1.0,
            (true, Scoring::Softmax) => chosen.sum(),
            (true, Scoring::Sigmoid { .. }) => chosen.sum::<f64>() + LEAST_SUM,
        }
    }

    fn choose<T: Real>(&self, scores: &[f64], bias: Option<&[T]>, chosen: &mut [u32]) {
        let mut choice = scores.to_vec();
        if let Some(bias) = bias {
            choice.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias.to_f64());
        }
        if let Scoring::Sigmoid { groups, kept } = self.scoring {
            let size = self.experts / groups;
            let value = |group: &[f64]| {
                largest(group, size.min(2)).into_iter().map(|n| group[n]).sum::<f64>()
            };
            let values: Vec<f64> = choice.chunks_exact(size).map(value).collect();
            let stay = largest(&values, kept);
            for (n, group) in choice.chunks_exact_mut(size).enumerate() {
                if !stay.contains(&n) {
                    group.fill(0.0);
                }
            }
        }
        for (to, expert) in chosen.iter_mut().zip(largest(&choice, self.top_k)) {
            *to = u32::try_from(expert).expect("experts are few");
        }
    }
}

fn log_sum_of<T: Real>(logits: &[T]) -> f64 {
    let logits = logits.iter().map(|logit| logit.to_f64());
    let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
    largest + logits.map(|logit| (logit - largest).exp()).sum::<f64>().ln()
}

/// The places of the `count` largest values, in ascending order of place. Of equal values the first
/// counts as larger; NaN is smaller than any number.
fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    let key = |at: usize| if values[at].is_nan() { f64::NEG_INFINITY } else { values[at] };
    places.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
    places.truncate(count);
    places.sort_unstable();
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOFTMAX: Routing =
        Routing { experts: 8, top_k: 3, scoring: Scoring::Softmax, renormalised: true, scale: 1.0 };
    const SIGMOID: Routing =
        Routing { scoring: Scoring::Sigmoid { groups: 4, kept: 2 }, scale: 2.5, ..SOFTMAX };

    fn logits(tokens: usize) -> Vec<f64> {
        (0..tokens * 8).map(|n| ((n * 37 + n * n * 11) % 97) as f64 / 20.0 - 2.4).collect()
    }

    /// Scores, choice, weights, log-sums.
    type Made = (Vec<f64>, Vec<u32>, Vec<f64>, Vec<f64>);

    fn run(routing: &Routing, logits: &[f64], bias: &[f64]) -> Made {
        let tokens = logits.len() / 8;
        let (mut scores, mut weights) = (vec![0.0; logits.len()], vec![0.0; tokens * 3]);
        let (mut chosen, mut log_sums) = (vec![0; tokens * 3], vec![0.0; tokens]);
        let to = Chosen {
            scores: &mut scores,
            chosen: &mut chosen,
            weights: &mut weights,
            log_sums: &mut log_sums,
        };
        forward(&Cpu::serial(), routing, logits, Some(bias), to);
        (scores, chosen, weights, log_sums)
    }

    #[test]
    fn groups_and_bias_decide_the_choice_and_not_the_weights() {
        // Groups (0, 1), (2, 3), (4, 5), (6, 7): the first has the best expert, but not the best
        // two.
        let logits = [3.0, -9.0, 1.0, 1.1, 1.2, 0.9, -1.0, -1.0];
        let (scores, chosen, weights, _) = run(&SIGMOID, &logits, &[0.0; 8]);
        assert_eq!(chosen, [2, 3, 4]);
        let sum: f64 = chosen.iter().map(|&expert| scores[expert as usize]).sum();
        assert!((weights[0] - 2.5 * scores[2] / sum).abs() < 1e-15);
        let mut bias = [0.0; 8];
        bias[1] = 9.0;
        let (scores, chosen, weights, _) = run(&SIGMOID, &logits, &bias);
        assert_eq!(chosen, [0, 1, 3]);
        let sum = scores[0] + scores[1] + scores[3];
        assert!((weights[1] - 2.5 * scores[1] / sum).abs() < 1e-15);
        assert!(scores[1] < 2e-4);
    }

    #[test]
    fn equal_scores_go_to_the_first() {
        assert_eq!(run(&SOFTMAX, &[0.5; 8], &[0.0; 8]).1, [0, 1, 2]);
        assert_eq!(largest(&[f64::NAN, 1.0, f64::NAN], 2), [0, 1]);
    }

    /// `backward` against differences, also where weights are not renormalised, and with losses of
    /// the router's own.
    #[test]
    fn gradients_are_those_of_the_weights() {
        let (tokens, delta) = (6, 1e-6);
        for routing in [
            SOFTMAX,
            Routing { renormalised: false, scale: 0.7, ..SOFTMAX },
            SIGMOID,
            Routing { renormalised: false, ..SIGMOID },
        ] {
            let logits = logits(tokens);
            let of_shares = [0.3, -0.2, 0.0, 0.5, 0.1, -0.4, 0.2, 0.6];
            let of_sums = [0.2, -0.1, 0.4, 0.3, -0.5, 0.1];
            let log_sums = (routing.scoring == Scoring::Softmax).then_some(&of_sums[..]);
            let factors: Vec<f64> = (0..tokens * 3).map(|n| (n % 7) as f64 - 2.5).collect();
            let value = |logits: &[f64]| -> f64 {
                let (scores, _, weights, sums) = run(&routing, logits, &[0.0; 8]);
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let of_token = |scores: &[f64]| dot(&routing.shares(scores), &of_shares);
                let through_shares: f64 = scores.chunks(8).map(of_token).sum();
                dot(&weights, &factors)
                    + through_shares
                    + log_sums.map_or(0.0, |factors| dot(&sums, factors))
            };
            let (scores, chosen, ..) = run(&routing, &logits, &[0.0; 8]);
            let mut dlogits = vec![0.0; logits.len()];
            let cpu = Cpu::serial();
            let losses = LossGradients { shares: Some(&of_shares), log_sums };
            backward(&cpu, &routing, &scores, &chosen, &factors, losses, &mut dlogits);
            for (n, found) in dlogits.iter().enumerate() {
                let moved = |by: f64| {
                    let mut logits = logits.clone();
                    logits[n] += by;
                    value(&logits)
                };
                let expected = (moved(delta) - moved(-delta)) / (2.0 * delta);
                assert!((found - expected).abs() < 1e-7, "{routing:?}, {n}: {found} {expected}");
            }
        }
    }
}
