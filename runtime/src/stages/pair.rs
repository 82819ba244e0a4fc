//! Pairs of passes: a forward and a backward of different micro-batches on one rank, of which one
//! computes while the other's rows are on their way (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).
//!
//! A pass that can be one of a pair is a future. It runs until [`other_pass`], where it would wait
//! for other ranks; then the other one runs up to where that would wait, and so on by turns. The
//! turns depend on the layers alone, so all ranks with the same stages make their calls in the same
//! order.

use crate::comm::CommError;
use crate::device::Device;
use crate::ops::{Gradients, PassContext, Reduced};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Poll, Waker};

use super::Held;

/// A pass in progress.
pub type Running<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Lets the other pass of a pair run. A pass that runs alone goes on at once.
pub async fn other_pass() {
    let mut asked = false;
    poll_fn(|_| match std::mem::replace(&mut asked, true) {
        false => Poll::Pending,
        true => Poll::Ready(()),
    })
    .await;
}

/// Runs a pass alone.
pub fn alone<T>(pass: impl Future<Output = T>) -> T {
    let mut pass = pin!(pass);
    loop {
        if let Some(result) = go_on(pass.as_mut()) {
            return result;
        }
    }
}

/// Runs two passes by turns; the first one begins.
pub fn together<A, B>(first: impl Future<Output = A>, second: impl Future<Output = B>) -> (A, B) {
    let (mut first, mut second) = (pin!(first), pin!(second));
    let (mut of_first, mut of_second) = (None, None);
    loop {
        of_first = of_first.or_else(|| go_on(first.as_mut()));
        of_second = of_second.or_else(|| go_on(second.as_mut()));
        match (of_first, of_second) {
            (Some(a), Some(b)) => return (a, b),
            still => (of_first, of_second) = still,
        }
    }
}

/// Runs a pass up to where it would wait; its result if it ends.
fn go_on<T>(pass: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    // Nothing wakes a pass: each turn asks it again.
    let mut turn = std::task::Context::from_waker(Waker::noop());
    match pass.poll(&mut turn) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

/// As [`super::Layer`], for passes of pairs.
#[expect(async_fn_in_trait, reason = "passes stay on the thread of their rank")]
pub trait Layer<D: Device> {
    /// The residual stream.
    type Stream;
    /// Its gradient.
    type Gradient;
    /// What the layer keeps of a micro-batch.
    type Kept: Held;

    /// From stream to stream.
    ///
    /// # Errors
    /// Those of any collective call.
    async fn forward(
        &self,
        ctx: &PassContext<'_, D>,
        stream: Self::Stream,
    ) -> Result<(Self::Stream, Self::Kept), CommError>;

    /// From the output's gradient to the input's, as [`super::Layer::backward`].
    ///
    /// # Errors
    /// Those of any collective call.
    async fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Self::Kept,
        dy: Self::Gradient,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<(Self::Gradient, Reduced), CommError>;
}

/// Forward through layers.
///
/// # Errors
/// Those of any collective call.
pub async fn forward_all<D: Device, L: Layer<D>>(
    layers: &[L],
    ctx: &PassContext<'_, D>,
    mut stream: L::Stream,
) -> Result<(L::Stream, Vec<L::Kept>), CommError> {
    let mut all = Vec::with_capacity(layers.len());
    for layer in layers {
        let (next, kept) = layer.forward(ctx, stream).await?;
        all.push(kept);
        stream = next;
    }
    Ok((stream, all))
}

/// Backward through layers.
///
/// # Errors
/// Those of any collective call.
pub async fn backward_all<D: Device, L: Layer<D>>(
    layers: &[L],
    ctx: &PassContext<'_, D>,
    kept: Vec<L::Kept>,
    mut dy: L::Gradient,
    gradients: &mut Gradients<'_, D>,
) -> Result<L::Gradient, CommError> {
    for (layer, kept) in layers.iter().zip(kept).rev() {
        (dy, _) = layer.backward(ctx, kept, dy, gradients).await?;
    }
    Ok(dy)
}

#[cfg(test)]
mod tests {
    use super::{alone, other_pass, together};
    use std::cell::RefCell;

    #[test]
    fn passes_take_turns_where_they_would_wait() {
        let log = RefCell::new(String::new());
        let pass = async |name: &str, turns: usize| {
            for turn in 0..turns {
                log.borrow_mut().push_str(&format!("{name}{turn} "));
                other_pass().await;
            }
            turns
        };
        assert_eq!(together(pass("a", 2), pass("b", 4)), (2, 4));
        assert_eq!(log.take(), "a0 b0 a1 b1 b2 b3 ");
        assert_eq!(alone(pass("a", 3)), 3);
        assert_eq!(log.take(), "a0 a1 a2 ");
    }
}
