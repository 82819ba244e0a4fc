//! Which copies an expert takes where its capacity is limited.
//!
//! Of a micro-batch of `N` rows an expert takes at most `⌈f k N / E⌉` copies (Switch Transformers,
//! arXiv 2101.03961, equation 3, for `k` experts a row): those with the largest weights; of equal
//! weights, those of the first tokens. The others are dropped: their weights count as 0. The `N`
//! rows are those of all ranks that divide the micro-batch, so what is dropped does not depend on
//! how it is divided. Where rows pass through experts in chunks, each chunk has its own capacity.

use super::Context;
use super::chunks::Chunk;
use super::router::Router;
use crate::comm::CommError;
use crate::device::Device;
use kernels::Real;

/// A copy's weight and token. Larger is better: weights are not negative, so their bits are in
/// their order.
type Precedence = (u64, std::cmp::Reverse<i64>);

impl Router {
    /// Places in `chosen[r, k]` of the copies that experts take, in ascending order.
    pub(super) fn within_capacity<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        chosen: &[u32],
        weights: &[D::Wide],
    ) -> Result<Vec<usize>, CommError> {
        let Some(factor) = self.capacity_factor else { return Ok((0..chosen.len()).collect()) };
        let (experts, top_k) = (self.routing.experts, self.routing.top_k);
        let tokens = tokens_of_rows(ctx, chunk);
        let of = |place: usize| {
            let bits = weights[place].to_f64().to_bits();
            [i64::from(chosen[place]), bits as i64, tokens[place / top_k]]
        };
        let mut all: Vec<i64> = (0..chosen.len()).flat_map(of).collect();
        for group in [ctx.tp, ctx.cp.ring, ctx.cp.ulysses] {
            all = group.all_gather(&all)?;
        }
        let copies = all.len() / 3;
        let capacity = (factor * copies as f64 / experts as f64).ceil() as usize;
        let mut of_expert: Vec<Vec<Precedence>> = vec![Vec::new(); experts];
        for copy in all.chunks_exact(3) {
            of_expert[copy[0] as usize].push(precedence(copy[1], copy[2]));
        }
        let least: Vec<Option<Precedence>> =
            of_expert.into_iter().map(|copies| least_taken(copies, capacity)).collect();
        let taken = |&place: &usize| {
            let [expert, bits, token] = of(place);
            least[expert as usize].is_none_or(|least| precedence(bits, token) >= least)
        };
        Ok((0..chosen.len()).filter(taken).collect())
    }
}

fn precedence(bits: i64, token: i64) -> Precedence {
    (bits as u64, std::cmp::Reverse(token))
}

/// The worst copy that is taken; `None` if all are.
fn least_taken(mut copies: Vec<Precedence>, capacity: usize) -> Option<Precedence> {
    if copies.len() <= capacity {
        return None;
    }
    copies.sort_unstable_by(|a, b| b.cmp(a));
    Some(copies[capacity - 1])
}

/// Numbers in the global batch of the tokens of this rank's rows.
fn tokens_of_rows<D: Device>(ctx: &Context<'_, D>, chunk: Chunk) -> Vec<i64> {
    let (first, part) = (ctx.first_row(), chunk.part(ctx.rows()));
    let runs = ctx.batch.runs(first + part.start..first + part.end);
    runs.into_iter()
        .flat_map(|(rows, token)| (0..rows.len()).map(move |n| (token + n) as i64))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_weights_stay_and_of_equal_ones_the_first_tokens() {
        let of = |weight: f64, token| precedence(weight.to_bits() as i64, token);
        let copies = vec![of(0.5, 7), of(0.25, 0), of(0.5, 3), of(0.75, 9)];
        assert_eq!(least_taken(copies.clone(), 1), Some(of(0.75, 9)));
        assert_eq!(least_taken(copies.clone(), 2), Some(of(0.5, 3)));
        assert_eq!(least_taken(copies.clone(), 3), Some(of(0.5, 7)));
        assert_eq!(least_taken(copies, 4), None);
    }
}
