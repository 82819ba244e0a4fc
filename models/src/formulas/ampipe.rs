//! Overlapping attention, experts and their all-to-alls inside a block, chunk by chunk (AMPipe §3;
//! Tutel, as AMPipe §1 describes it).
//!
//! Two streams run in order, each step once the steps that it needs are done. Forward, computation
//! does every chunk's attention and then every chunk's experts, the network every dispatch and then
//! every combine. Backward, the gradients of the combines come first and attention last
//! (`AttMoEPipe` of AMPipe's code).

/// Seconds of the steps of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Attention and what follows it up to the dispatch; backward, what follows the second
    /// all-to-all.
    pub attention_s: f64,
    /// First all-to-all of the pass.
    pub dispatch_s: f64,
    /// The experts' MLP.
    pub experts_s: f64,
    /// Second all-to-all of the pass.
    pub combine_s: f64,
}

impl Chunk {
    /// Seconds of the steps that the GPU computes.
    pub fn computed_s(&self) -> f64 {
        self.attention_s + self.experts_s
    }
}

/// How the two streams disturb each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interference {
    /// Slowdown of computation while an all-to-all runs beside it.
    pub slowdown: f64,
    /// Whether an all-to-all waits for the next chunk's kernels as well, which start as soon as its
    /// own chunk is computed and fill the GPU before it.
    pub late: bool,
}

impl Interference {
    /// The step after which the all-to-all of chunk `number` of `count` starts.
    fn needs(self, number: usize, count: usize) -> usize {
        (number + usize::from(self.late)).min(count - 1)
    }
}

/// A step of one stream: its seconds, and the step of the other stream that it needs.
type Step = (f64, Option<usize>);

/// Seconds of a forward pass.
pub fn forward_s(chunks: &[Chunk], how: Interference) -> f64 {
    let count = chunks.len();
    let numbered = || chunks.iter().enumerate();
    let attention = numbered().map(|(_, chunk)| (chunk.attention_s, None));
    let experts = numbered().map(|(i, chunk)| (chunk.experts_s, Some(i)));
    let dispatches = numbered().map(|(i, chunk)| (chunk.dispatch_s, Some(how.needs(i, count))));
    let combines =
        numbered().map(|(i, chunk)| (chunk.combine_s, Some(count + how.needs(i, count))));
    let compute: Vec<Step> = attention.chain(experts).collect();
    let network: Vec<Step> = dispatches.chain(combines).collect();
    two_streams_s(&compute, &network, how.slowdown)
}

/// Seconds of a backward pass.
pub fn backward_s(chunks: &[Chunk], how: Interference) -> f64 {
    let count = chunks.len();
    let numbered = || chunks.iter().enumerate();
    let experts = numbered().map(|(i, chunk)| (chunk.experts_s, Some(i)));
    let attention = numbered().map(|(i, chunk)| (chunk.attention_s, Some(count + i)));
    let dispatches = numbered().map(|(_, chunk)| (chunk.dispatch_s, None));
    let combines = numbered().map(|(i, chunk)| (chunk.combine_s, Some(how.needs(i, count))));
    let compute: Vec<Step> = experts.chain(attention).collect();
    let network: Vec<Step> = dispatches.chain(combines).collect();
    two_streams_s(&compute, &network, how.slowdown)
}

/// Where one stream is.
struct Stream<'a> {
    steps: &'a [Step],
    done: usize,
    /// Seconds left of the step under way.
    left_s: f64,
}

impl<'a> Stream<'a> {
    fn new(steps: &'a [Step]) -> Self {
        Self { steps, done: 0, left_s: steps.first().map_or(0.0, |step| step.0) }
    }

    fn runs(&self, other_done: usize) -> bool {
        let step = self.steps.get(self.done);
        step.is_some_and(|(_, needs)| needs.is_none_or(|needed| needed < other_done))
    }

    fn advance(&mut self, seconds: f64) {
        self.left_s -= seconds;
        if self.left_s <= 0.0 {
            self.done += 1;
            self.left_s = self.steps.get(self.done).map_or(0.0, |step| step.0);
        }
    }
}

/// Seconds until both streams are done, computation running `slowdown` times slower beside the
/// network.
fn two_streams_s(compute: &[Step], network: &[Step], slowdown: f64) -> f64 {
    let (mut compute, mut network) = (Stream::new(compute), Stream::new(network));
    let mut now_s = 0.0;
    loop {
        let (computes, sends) = (compute.runs(network.done), network.runs(compute.done));
        let slowed = if computes && sends { slowdown } else { 1.0 };
        let step_s = match (computes, sends) {
            (true, true) => network.left_s.min(compute.left_s * slowed),
            (true, false) => compute.left_s,
            (false, true) => network.left_s,
            (false, false) => return now_s,
        };
        now_s += step_s;
        if computes {
            // Written so that the step that ends is left with exactly nothing.
            let ends = compute.left_s * slowed <= step_s;
            compute.advance(if ends { compute.left_s } else { step_s / slowed });
        }
        if sends {
            network.advance(step_s);
        }
    }
}
