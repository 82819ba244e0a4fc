//! The CPU as a device: tensors are vectors, streams are threads, and every call completes at once.

use super::{Device, DeviceError, Gradients, Parameter, Proposal, RowSums, Saved, Space, Target};
use crate::comm::{CommError, Communicator, Element, Payload};
use crate::scalar::{Number, Scalar};
use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW};
use kernels::attention::{self, Attention};
use kernels::cross_entropy::{self, Logits};
use kernels::dropout::{self, Dropout};
use kernels::embedding::{self, Embedding};
use kernels::gemm::{self, Shape};
use kernels::latent_heads::{self, LatentHeads};
use kernels::layer_norm::{self, LayerNorm};
use kernels::random::{self, GlobalIndices as Numbered, Stream};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Rope};
use kernels::sinks::{self, Sinks};
use kernels::{Cpu, Output, elementwise, transpose, weighted_rows};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// One rank's CPU threads and memory. Weights and activations are of type `S`, everything else of
/// type `W`, in which it computes: `Host<f64>`, `Host<f32>` or `Host<bf16, f32>`.
#[derive(Debug)]
pub struct Host<S, W = S> {
    cpu: Arc<Cpu>,
    elements: PhantomData<fn() -> (S, W)>,
}

impl<S, W> Host<S, W> {
    /// A device that computes with these threads.
    pub fn new(cpu: Cpu) -> Self {
        Self { cpu: Arc::new(cpu), elements: PhantomData }
    }

    /// A device that computes on the calling thread.
    pub fn serial() -> Self {
        Self::new(Cpu::serial())
    }

    /// The same threads, which compute in `W` what they store in `W`.
    pub(super) fn exact(&self) -> Host<W> {
        Host { cpu: self.cpu.clone(), elements: PhantomData }
    }
}

impl<S: Number, W: Scalar> Space for Host<S, W> {
    type Stored = S;
    type Wide = W;
    const MASTERS: bool = size_of::<S>() != size_of::<W>();
    type Memory<E: Element> = Vec<E>;
    type View<'a, E: Element> = &'a [E];
    type ViewMut<'a, E: Element> = &'a mut [E];
    type Total = f64;
    type Mark = ();
    type Recording = ();

    fn empty<E: Element>() -> Vec<E> {
        Vec::new()
    }

    fn len<E: Element>(memory: &Vec<E>) -> usize {
        memory.len()
    }

    fn view<E: Element>(memory: &Vec<E>, range: Range<usize>) -> &[E] {
        &memory[range]
    }

    fn view_mut<E: Element>(memory: &mut Vec<E>, range: Range<usize>) -> &mut [E] {
        &mut memory[range]
    }

    fn split<'a, E: Element>(
        view: Self::ViewMut<'a, E>,
        at: usize,
    ) -> (Self::ViewMut<'a, E>, Self::ViewMut<'a, E>) {
        view.split_at_mut(at)
    }

    fn fork_stream(&self) -> Self {
        Self::serial()
    }

    fn host(&self) -> &Cpu {
        &self.cpu
    }

    fn zeros<E: Element>(&self, len: usize) -> Vec<E> {
        vec![E::default(); len]
    }

    fn taken<E: Element>(&self, values: Vec<E>) -> Vec<E> {
        values
    }

    fn copied<E: Element>(&self, from: &[E]) -> Vec<E> {
        from.to_vec()
    }

    fn copy<E: Element>(&self, from: &[E], to: &mut [E]) {
        to.copy_from_slice(from);
    }

    fn fill<E: Element>(&self, to: &mut [E], value: E) {
        to.fill(value);
    }

    fn upload<E: Element>(&self, from: &[E], to: &mut [E]) {
        to.copy_from_slice(from);
    }

    fn download<E: Element>(&self, from: &[E]) -> Result<Vec<E>, DeviceError> {
        Ok(from.to_vec())
    }

    fn round(&self, from: &[W], to: &mut [S]) {
        for (from, to) in from.iter().zip(to) {
            *to = S::nearest(from.value());
        }
    }

    fn total(&self) -> f64 {
        0.0
    }

    fn read(&self, total: &f64) -> Result<f64, DeviceError> {
        Ok(*total)
    }

    fn mark(&self) {}

    fn wait_for(&self, (): &()) {}

    fn wrap<E: Element>(
        &self,
        memory: Vec<E>,
        _comm: &dyn Communicator,
    ) -> Result<Payload, CommError> {
        Ok(E::wrap(memory))
    }

    fn unwrap<E: Element>(&self, payload: Payload) -> Option<Vec<E>> {
        E::unwrap(payload)
    }

    fn health(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl<T: Scalar> Device for Host<T> {
    fn gemm(&self, shape: &Shape, a: &[T], b: &[T], c: &mut [T], output: Output) {
        let beta = if output == Output::Accumulate { T::ONE } else { T::ZERO };
        gemm::gemm(&self.cpu, shape, T::ONE, a, b, beta, c);
    }

    fn gemm_wide(&self, shape: &Shape, a: &[T], b: &[T], c: &mut [T], output: Output) {
        self.gemm(shape, a, b, c, output);
    }

    fn gemm_bias(&self, shape: &Shape, a: &[T], b: &[T], bias: &[T], c: &mut [T]) {
        self.gemm(shape, a, b, c, Output::Overwrite);
        self.add_bias(bias, c);
    }

    fn add_bias(&self, bias: &[T], x: &mut [T]) {
        elementwise::add_bias(&self.cpu, bias, x);
    }

    fn bias_gradient(&self, dy: &[T], dbias: &mut [T]) {
        elementwise::bias_gradient(&self.cpu, dy, dbias);
    }

    fn sum_rows(&self, x: &[T], sums: &mut [T]) {
        elementwise::bias_gradient(&self.cpu, x, sums);
    }

    fn add(&self, x: &[T], y: &mut [T]) {
        elementwise::axpy(&self.cpu, T::ONE, x, y);
    }

    fn add_wide(&self, x: &[T], y: &mut [T]) {
        elementwise::axpy(&self.cpu, T::ONE, x, y);
    }

    fn dropout(&self, dropout: &Dropout, view: &Numbered, x: &[T], y: &mut [T]) {
        dropout::apply(&self.cpu, dropout, view, x, y);
    }

    fn rms_norm(&self, norm: &RmsNorm, x: &[T], w: &[T], y: &mut [T], inverse_rms: &mut [T]) {
        rms_norm::forward(&self.cpu, norm, x, w, y, inverse_rms);
    }

    /// A fused kernel would save nothing: the sum is still in the core's cache.
    const ADDS_BEFORE_NORM: bool = false;

    fn add_and_rms_norm(
        &self,
        norm: &RmsNorm,
        [x, branch]: [&[T]; 2],
        w: &[T],
        sum: &mut [T],
        y: &mut [T],
        inverse_rms: &mut [T],
    ) {
        sum.copy_from_slice(branch);
        self.add(x, sum);
        self.rms_norm(norm, sum, w, y, inverse_rms);
    }

    fn rms_norm_backward_input(
        &self,
        norm: &RmsNorm,
        x: &[T],
        w: &[T],
        inverse_rms: &[T],
        dy: &[T],
        dx: &mut [T],
        output: Output,
    ) {
        rms_norm::backward_input(&self.cpu, norm, x, w, inverse_rms, dy, dx, output);
    }

    fn rms_norm_backward_weight(
        &self,
        norm: &RmsNorm,
        x: &[T],
        inverse_rms: &[T],
        dy: &[T],
        dw: &mut [T],
    ) {
        rms_norm::backward_weight(&self.cpu, norm, x, inverse_rms, dy, dw);
    }

    fn layer_norm(
        &self,
        norm: &LayerNorm,
        x: &[T],
        w: &[T],
        bias: &[T],
        y: &mut [T],
        mean: &mut [T],
        inverse_std: &mut [T],
    ) {
        layer_norm::forward(&self.cpu, norm, x, w, bias, y, mean, inverse_std);
    }

    fn add_and_layer_norm(
        &self,
        norm: &LayerNorm,
        [x, branch]: [&[T]; 2],
        [w, bias]: [&[T]; 2],
        [sum, y]: [&mut [T]; 2],
        mean: &mut [T],
        inverse_std: &mut [T],
    ) {
        sum.copy_from_slice(branch);
        self.add(x, sum);
        self.layer_norm(norm, sum, w, bias, y, mean, inverse_std);
    }

    fn layer_norm_backward_input(
        &self,
        norm: &LayerNorm,
        x: &[T],
        w: &[T],
        mean: &[T],
        inverse_std: &[T],
        dy: &[T],
        dx: &mut [T],
        output: Output,
    ) {
        layer_norm::backward_input(&self.cpu, norm, x, w, mean, inverse_std, dy, dx, output);
    }

    fn layer_norm_backward_weight(
        &self,
        norm: &LayerNorm,
        x: &[T],
        mean: &[T],
        inverse_std: &[T],
        dy: &[T],
        dw: &mut [T],
        dbias: &mut [T],
    ) {
        layer_norm::backward_weight(&self.cpu, norm, x, mean, inverse_std, dy, dw, dbias);
    }

    fn rope(&self, rope: &Rope, table: &[T], x: &mut [T]) {
        rope::forward(&self.cpu, rope, table, x);
    }

    fn rope_backward(&self, rope: &Rope, table: &[T], dx: &mut [T]) {
        rope::backward(&self.cpu, rope, table, dx);
    }

    fn attention(
        &self,
        attention: &Attention,
        q: &[T],
        k: &[T],
        v: &[T],
        out: &mut [T],
        lse: &mut [T],
    ) {
        attention::forward(&self.cpu, attention, q, k, v, out, lse);
    }

    fn attention_backward(
        &self,
        attention: &Attention,
        saved: Saved<'_, Self>,
        dout: &[T],
        gradients: Gradients<'_, Self>,
    ) {
        let Saved { q, k, v, out, lse } = saved;
        let saved = attention::Saved { q, k, v, out, lse };
        let Gradients { dq, dk, dv } = gradients;
        let mut gradients = attention::Gradients { dq, dk, dv };
        let output = Output::Overwrite;
        attention::backward(&self.cpu, attention, &saved, dout, &mut gradients, output);
    }

    fn activation(&self, activation: Activation, x: &[T], y: &mut [T]) {
        activation::forward(&self.cpu, activation, x, y);
    }

    fn activation_backward(&self, activation: Activation, x: &[T], dy: &[T], dx: &mut [T]) {
        activation::backward(&self.cpu, activation, x, dy, dx);
    }

    fn gated(&self, activation: Activation, gate: &[T], up: &[T], y: &mut [T]) {
        activation::gated_forward(&self.cpu, activation, gate, up, y);
    }

    fn gated_backward(
        &self,
        activation: Activation,
        gate: &[T],
        up: &[T],
        dy: &[T],
        dgate: &mut [T],
        dup: &mut [T],
    ) {
        activation::gated_backward(&self.cpu, activation, gate, up, dy, dgate, dup);
    }

    fn embedding(&self, embedding: &Embedding, ids: &[i64], table: &[T], out: &mut [T]) {
        embedding::forward(&self.cpu, embedding, ids, table, out);
    }

    fn embedding_backward(
        &self,
        embedding: &Embedding,
        by_row: &[i64],
        dout: &[T],
        dtable: &mut [T],
    ) {
        embedding::backward(&self.cpu, embedding, by_row, dout, dtable);
    }

    fn local_max(&self, shape: &Logits, logits: &[T], max: &mut [T]) {
        cross_entropy::local_max(&self.cpu, shape, logits, max);
    }

    fn local_sum_exp(
        &self,
        shape: &Logits,
        logits: &[T],
        targets: &[i64],
        max: &[T],
        sum_exp: &mut [T],
        target_logit: &mut [T],
    ) {
        cross_entropy::local_sum_exp(&self.cpu, shape, logits, targets, max, sum_exp, target_logit);
    }

    fn local_sums(
        &self,
        shape: &Logits,
        logits: &[T],
        targets: &[i64],
        max: &mut [T],
        sum_exp: &mut [T],
        target_logit: &mut [T],
    ) {
        self.local_max(shape, logits, max);
        self.local_sum_exp(shape, logits, targets, max, sum_exp, target_logit);
    }

    fn rescale_sum_exp(&self, local_max: &[T], max: &[T], sum_exp: &mut [T]) {
        cross_entropy::rescale_sum_exp(&self.cpu, local_max, max, sum_exp);
    }

    fn loss(&self, targets: &[i64], sums: RowSums<'_, Self>, target_logit: &[T], loss: &mut [T]) {
        let RowSums { max, sum_exp } = sums;
        cross_entropy::loss(&self.cpu, targets, max, sum_exp, target_logit, loss);
    }

    fn cross_entropy_gradient(
        &self,
        shape: &Logits,
        logits: &mut [T],
        targets: &[i64],
        sums: RowSums<'_, Self>,
        scale: f64,
    ) {
        let RowSums { max, sum_exp } = sums;
        cross_entropy::gradient_in_place(&self.cpu, shape, logits, targets, max, sum_exp, scale);
    }

    fn scale_by_slope(&self, soft_cap: Option<f64>, target_logit: &[T], rows: &mut [T]) {
        cross_entropy::scale_by_slope(&self.cpu, soft_cap, target_logit, rows);
    }

    fn softmax_to_gradient(
        &self,
        shape: &Logits,
        softmax: &mut [T],
        targets: &[i64],
        factor: &[T],
        target: &[T],
        scale: f64,
    ) {
        let cpu = &self.cpu;
        cross_entropy::softmax_to_gradient(cpu, shape, softmax, targets, factor, target, scale);
    }

    fn join_gradient(&self, weighted: &mut [T], hits: &[T], factor: &[T], scale: f64) {
        cross_entropy::join_gradient(&self.cpu, weighted, hits, factor, scale);
    }

    fn merge_attention(
        &self,
        attention: &Attention,
        sums: &mut [T],
        lse: &mut [T],
        part: &[T],
        part_lse: &[T],
    ) {
        attention::merge(&self.cpu, attention, sums, lse, part, part_lse);
    }

    fn accumulate(&self, x: &[T], sum: &mut [T]) {
        elementwise::axpy(&self.cpu, T::ONE, x, sum);
    }

    fn swap_leading(&self, shape: [usize; 3], x: &[T], y: &mut [T]) {
        transpose::swap_leading(&self.cpu, shape, x, y);
    }

    fn join_latent_heads(
        &self,
        of: &LatentHeads,
        up: &[T],
        rotary: &[T],
        k: &mut [T],
        v: &mut [T],
    ) {
        latent_heads::join(&self.cpu, of, up, rotary, k, v);
    }

    fn split_latent_heads(
        &self,
        of: &LatentHeads,
        dk: &[T],
        dv: &[T],
        dup: &mut [T],
        drotary: &mut [T],
    ) {
        latent_heads::split(&self.cpu, of, dk, dv, dup, drotary);
    }

    fn sinks(&self, of: &Sinks, sinks: &[T], lse: &[T], new: &mut [T], out: &mut [T]) {
        sinks::apply(&self.cpu, of, sinks, lse, new, out);
    }

    fn sinks_gradient(&self, of: &Sinks, sinks: &[T], new: &[T], by_row: &mut [T]) {
        sinks::gradient(&self.cpu, of, sinks, new, by_row);
    }

    fn scale_rows(&self, w: &[T], x: &[T], y: &mut [T]) {
        weighted_rows::scale(&self.cpu, w, x, y);
    }

    fn dot_rows(&self, x: &[T], y: &[T], w: &mut [T]) {
        weighted_rows::dot(&self.cpu, x, y, w);
    }

    fn divide(&self, by: &[T], x: &mut [T]) {
        elementwise::divide(&self.cpu, by, x);
    }

    fn fill_normal(&self, to: &mut [T], view: &Numbered, stream: Stream, std: f64) {
        random::fill_normal(&self.cpu, to, view, stream, std);
    }

    fn add_sum(&self, x: &[T], total: &mut f64) {
        *total += x.iter().map(|x| x.to_f64()).sum::<f64>();
    }

    fn add_squares(&self, tensors: &[&[T]], total: &mut f64) {
        for x in tensors {
            *total += elementwise::sum_of_squares(&self.cpu, x);
        }
    }

    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>) {
        let mut rounded = Vec::new();
        let mut updates = Vec::with_capacity(parameters.len());
        for Parameter { w, g, m, v, decay } in parameters {
            let w = match w {
                Target::Read(w) | Target::Exact(w) => w,
                Target::Both(w, to) => {
                    rounded.push((updates.len(), to));
                    w
                }
            };
            updates.push(adamw::Parameter { w, g, m, v, decay });
        }
        adamw::update(&self.cpu, adamw, &mut updates);
        for (n, to) in rounded {
            to.copy_from_slice(updates[n].w);
        }
    }

    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>) {
        let proposal =
            |Proposal { to, w, g, m, v, decay }| adamw::Proposal { to, w, g, m, v, decay };
        let mut proposals: Vec<_> = parameters.into_iter().map(proposal).collect();
        adamw::proposal(&self.cpu, adamw, &mut proposals);
    }
}
