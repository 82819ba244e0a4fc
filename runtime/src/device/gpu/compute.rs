//! Computation on a GPU: the CUDA twins of the kernels.

use super::Gpu;
use super::memory::Memory;
use crate::device::{
    Device, DeviceError, Gradients, Ids, Parameter, Proposal, RowSums, Saved, Stored, StoredMut,
    Target, Wide, WideMut,
};
use crate::scalar::Number;
use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW};
use kernels::attention::{self, Attention};
use kernels::cross_entropy::{self, Logits};
use kernels::cuda;
use kernels::dropout::{self, Dropout};
use kernels::embedding::{self, Embedding};
use kernels::gemm::{self, Shape};
use kernels::latent_heads::{self, LatentHeads};
use kernels::layer_norm::{self, LayerNorm};
use kernels::random::{self, GlobalIndices as Numbered, Stream};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Rope};
use kernels::sinks::{self, Sinks};
use kernels::{Output, elementwise, transpose, weighted_rows};

impl<S: Number + cuda::Stored> Device for Gpu<S> {
    fn gemm(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
        output: Output,
    ) {
        let beta = if output == Output::Accumulate { 1.0 } else { 0.0 };
        call!(self, [a, b, c], |gpu| gemm::cuda::gemm(gpu, shape, 1.0, a, b, beta, c));
    }

    fn gemm_wide(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: WideMut<'_, Self>,
        output: Output,
    ) {
        let beta = if output == Output::Accumulate { 1.0 } else { 0.0 };
        call!(self, [a, b, c], |gpu| gemm::cuda::gemm(gpu, shape, 1.0, a, b, beta, c));
    }

    fn gemm_bias(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        bias: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
    ) {
        call!(self, [a, b, bias, c], |gpu| gemm::cuda::gemm_bias(gpu, shape, 1.0, a, b, bias, c));
    }

    fn add_bias(&self, bias: Stored<'_, Self>, x: StoredMut<'_, Self>) {
        call!(self, [bias, x], |gpu| elementwise::cuda::add_bias(gpu, bias, x));
    }

    fn bias_gradient(&self, dy: Stored<'_, Self>, dbias: WideMut<'_, Self>) {
        call!(self, [dy, dbias], |gpu| elementwise::cuda::bias_gradient(gpu, dy, dbias));
    }

    fn sum_rows(&self, x: Wide<'_, Self>, sums: WideMut<'_, Self>) {
        call!(self, [x, sums], |gpu| elementwise::cuda::bias_gradient(gpu, x, sums));
    }

    fn add(&self, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        call!(self, [x, y], |gpu| elementwise::cuda::axpy(gpu, 1.0, x, y));
    }

    fn add_wide(&self, x: Wide<'_, Self>, y: WideMut<'_, Self>) {
        call!(self, [x, y], |gpu| elementwise::cuda::axpy(gpu, 1.0, x, y));
    }

    fn dropout(
        &self,
        dropout: &Dropout,
        view: &Numbered,
        x: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        call!(self, [x, y], |gpu| dropout::cuda::apply(gpu, dropout, view, x, y));
    }

    fn rms_norm(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    ) {
        call!(self, [x, w, y, inverse_rms], |gpu| rms_norm::cuda::forward(
            gpu,
            norm,
            x,
            w,
            y,
            inverse_rms
        ));
    }

    const ADDS_BEFORE_NORM: bool = true;

    fn add_and_rms_norm(
        &self,
        norm: &RmsNorm,
        [x, branch]: [Stored<'_, Self>; 2],
        w: Stored<'_, Self>,
        sum: StoredMut<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    ) {
        call!(self, [x, branch, w, sum, y, inverse_rms], |gpu| rms_norm::cuda::forward_residual(
            gpu,
            norm,
            x,
            branch,
            w,
            sum,
            y,
            inverse_rms
        ));
    }

    fn rms_norm_backward_input(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
        output: Output,
    ) {
        call!(self, [x, w, inverse_rms, dy, dx], |gpu| rms_norm::cuda::backward_input(
            gpu,
            norm,
            x,
            w,
            inverse_rms,
            dy,
            dx,
            output
        ));
    }

    fn rms_norm_backward_weight(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
    ) {
        call!(self, [x, inverse_rms, dy, dw], |gpu| rms_norm::cuda::backward_weight(
            gpu,
            norm,
            x,
            inverse_rms,
            dy,
            dw
        ));
    }

    fn layer_norm(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        bias: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        mean: WideMut<'_, Self>,
        inverse_std: WideMut<'_, Self>,
    ) {
        call!(self, [x, w, bias, y, mean, inverse_std], |gpu| layer_norm::cuda::forward(
            gpu,
            norm,
            x,
            w,
            bias,
            y,
            mean,
            inverse_std
        ));
    }

    fn add_and_layer_norm(
        &self,
        norm: &LayerNorm,
        [x, branch]: [Stored<'_, Self>; 2],
        [w, bias]: [Stored<'_, Self>; 2],
        [sum, y]: [StoredMut<'_, Self>; 2],
        mean: WideMut<'_, Self>,
        inverse_std: WideMut<'_, Self>,
    ) {
        call!(self, [x, branch, w, bias, sum, y, mean, inverse_std], |gpu| {
            layer_norm::cuda::forward_residual(
                gpu,
                norm,
                x,
                branch,
                w,
                bias,
                sum,
                y,
                mean,
                inverse_std,
            )
        });
    }

    fn layer_norm_backward_input(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        mean: Wide<'_, Self>,
        inverse_std: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
        output: Output,
    ) {
        call!(self, [x, w, mean, inverse_std, dy, dx], |gpu| layer_norm::cuda::backward_input(
            gpu,
            norm,
            x,
            w,
            mean,
            inverse_std,
            dy,
            dx,
            output
        ));
    }

    fn layer_norm_backward_weight(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        mean: Wide<'_, Self>,
        inverse_std: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
        dbias: WideMut<'_, Self>,
    ) {
        call!(
            self,
            [x, mean, inverse_std, dy, dw, dbias],
            |gpu| layer_norm::cuda::backward_weight(gpu, norm, x, mean, inverse_std, dy, dw, dbias)
        );
    }

    fn rope(&self, rope: &Rope, table: Wide<'_, Self>, x: StoredMut<'_, Self>) {
        call!(self, [table, x], |gpu| rope::cuda::forward(gpu, rope, table, x));
    }

    fn rope_backward(&self, rope: &Rope, table: Wide<'_, Self>, dx: StoredMut<'_, Self>) {
        call!(self, [table, dx], |gpu| rope::cuda::backward(gpu, rope, table, dx));
    }

    fn attention(
        &self,
        attention: &Attention,
        q: Stored<'_, Self>,
        k: Stored<'_, Self>,
        v: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
        lse: WideMut<'_, Self>,
    ) {
        call!(self, [q, k, v, out, lse], |gpu| attention::cuda::forward(
            gpu, attention, q, k, v, out, lse
        ));
    }

    fn merge_attention(
        &self,
        attention: &Attention,
        sums: WideMut<'_, Self>,
        lse: WideMut<'_, Self>,
        part: Stored<'_, Self>,
        part_lse: Wide<'_, Self>,
    ) {
        call!(self, [sums, lse, part, part_lse], |gpu| attention::cuda::merge(
            gpu, attention, sums, lse, part, part_lse
        ));
    }

    fn accumulate(&self, x: Stored<'_, Self>, sum: WideMut<'_, Self>) {
        call!(self, [x, sum], |gpu| elementwise::cuda::accumulate(gpu, x, sum));
    }

    fn join_latent_heads(
        &self,
        of: &LatentHeads,
        up: Stored<'_, Self>,
        rotary: Stored<'_, Self>,
        k: StoredMut<'_, Self>,
        v: StoredMut<'_, Self>,
    ) {
        call!(self, [up, rotary, k, v], |gpu| latent_heads::cuda::join(gpu, of, up, rotary, k, v));
    }

    fn split_latent_heads(
        &self,
        of: &LatentHeads,
        dk: Stored<'_, Self>,
        dv: Stored<'_, Self>,
        dup: StoredMut<'_, Self>,
        drotary: StoredMut<'_, Self>,
    ) {
        call!(self, [dk, dv, dup, drotary], |gpu| latent_heads::cuda::split(
            gpu, of, dk, dv, dup, drotary
        ));
    }

    fn sinks(
        &self,
        of: &Sinks,
        sinks: Stored<'_, Self>,
        lse: Wide<'_, Self>,
        new: WideMut<'_, Self>,
        out: StoredMut<'_, Self>,
    ) {
        call!(self, [sinks, lse, new, out], |gpu| sinks::cuda::apply(
            gpu, of, sinks, lse, new, out
        ));
    }

    fn sinks_gradient(
        &self,
        of: &Sinks,
        sinks: Stored<'_, Self>,
        new: Wide<'_, Self>,
        by_row: WideMut<'_, Self>,
    ) {
        call!(self, [sinks, new, by_row], |gpu| sinks::cuda::gradient(gpu, of, sinks, new, by_row));
    }

    fn scale_rows(&self, w: Wide<'_, Self>, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        call!(self, [w, x, y], |gpu| weighted_rows::cuda::scale(gpu, w, x, y));
    }

    fn dot_rows(&self, x: Stored<'_, Self>, y: Stored<'_, Self>, w: WideMut<'_, Self>) {
        call!(self, [x, y, w], |gpu| weighted_rows::cuda::dot(gpu, x, y, w));
    }

    fn swap_leading(&self, shape: [usize; 3], x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        call!(self, [x, y], |gpu| transpose::cuda::swap_leading(gpu, shape, x, y));
    }

    fn activation(&self, activation: Activation, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        call!(self, [x, y], |gpu| activation::cuda::forward(gpu, activation, x, y));
    }

    fn activation_backward(
        &self,
        activation: Activation,
        x: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
    ) {
        call!(self, [x, dy, dx], |gpu| activation::cuda::backward(gpu, activation, x, dy, dx));
    }

    fn gated(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        call!(self, [gate, up, y], |gpu| activation::cuda::gated_forward(
            gpu, activation, gate, up, y
        ));
    }

    fn gated_backward(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dgate: StoredMut<'_, Self>,
        dup: StoredMut<'_, Self>,
    ) {
        call!(self, [gate, up, dy, dgate, dup], |gpu| activation::cuda::gated_backward(
            gpu, activation, gate, up, dy, dgate, dup
        ));
    }

    fn embedding(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        table: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
    ) {
        call!(self, [ids, table, out], |gpu| embedding::cuda::forward(
            gpu, embedding, ids, table, out
        ));
    }

    fn embedding_backward(
        &self,
        embedding: &Embedding,
        by_row: Ids<'_, Self>,
        dout: Stored<'_, Self>,
        dtable: WideMut<'_, Self>,
    ) {
        call!(self, [by_row, dout, dtable], |gpu| embedding::cuda::backward(
            gpu, embedding, by_row, dout, dtable
        ));
    }

    fn local_max(&self, shape: &Logits, logits: Stored<'_, Self>, max: WideMut<'_, Self>) {
        call!(self, [logits, max], |gpu| cross_entropy::cuda::local_max(gpu, shape, logits, max));
    }

    fn local_sum_exp(
        &self,
        shape: &Logits,
        logits: Stored<'_, Self>,
        targets: Ids<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
        target_logit: WideMut<'_, Self>,
    ) {
        call!(self, [logits, targets, max, sum_exp, target_logit], |gpu| {
            cross_entropy::cuda::local_sum_exp(
                gpu,
                shape,
                logits,
                targets,
                max,
                sum_exp,
                target_logit,
            )
        });
    }

    fn local_sums(
        &self,
        shape: &Logits,
        logits: Stored<'_, Self>,
        targets: Ids<'_, Self>,
        max: WideMut<'_, Self>,
        sum_exp: WideMut<'_, Self>,
        target_logit: WideMut<'_, Self>,
    ) {
        call!(self, [logits, targets, max, sum_exp, target_logit], |gpu| {
            cross_entropy::cuda::statistics(gpu, shape, logits, targets, max, sum_exp, target_logit)
        });
    }

    fn rescale_sum_exp(
        &self,
        local_max: Wide<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
    ) {
        call!(self, [local_max, max, sum_exp], |gpu| cross_entropy::cuda::rescale_sum_exp(
            gpu, local_max, max, sum_exp
        ));
    }

    fn attention_backward(
        &self,
        attention: &Attention,
        saved: Saved<'_, Self>,
        dout: Stored<'_, Self>,
        gradients: Gradients<'_, Self>,
    ) {
        let (Saved { q, k, v, out, lse }, Gradients { dq, dk, dv }) = (saved, gradients);
        call!(self, [q, k, v, out, lse, dout, dq, dk, dv], |gpu| {
            let saved = attention::cuda::Saved { q, k, v, out, lse };
            let mut gradients = attention::cuda::Gradients { dq, dk, dv };
            let output = Output::Overwrite;
            attention::cuda::backward(gpu, attention, &saved, dout, &mut gradients, output)
        });
    }

    fn loss(
        &self,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        target_logit: Wide<'_, Self>,
        loss: WideMut<'_, Self>,
    ) {
        let RowSums { max, sum_exp } = sums;
        call!(self, [targets, max, sum_exp, target_logit, loss], |gpu| {
            cross_entropy::cuda::loss(gpu, targets, max, sum_exp, target_logit, loss)
        });
    }

    fn cross_entropy_gradient(
        &self,
        shape: &Logits,
        logits: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        scale: f64,
    ) {
        let RowSums { max, sum_exp } = sums;
        call!(self, [logits, targets, max, sum_exp], |gpu| {
            cross_entropy::cuda::gradient_in_place(gpu, shape, logits, targets, max, sum_exp, scale)
        });
    }

    fn scale_by_slope(
        &self,
        soft_cap: Option<f64>,
        target_logit: Wide<'_, Self>,
        rows: StoredMut<'_, Self>,
    ) {
        call!(self, [target_logit, rows], |gpu| {
            cross_entropy::cuda::scale_by_slope(gpu, soft_cap, target_logit, rows)
        });
    }

    fn softmax_to_gradient(
        &self,
        shape: &Logits,
        softmax: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        factor: Wide<'_, Self>,
        target: Wide<'_, Self>,
        scale: f64,
    ) {
        call!(self, [softmax, targets, factor, target], |gpu| {
            cross_entropy::cuda::softmax_to_gradient(
                gpu, shape, softmax, targets, factor, target, scale,
            )
        });
    }

    fn join_gradient(
        &self,
        weighted: StoredMut<'_, Self>,
        hits: Stored<'_, Self>,
        factor: Wide<'_, Self>,
        scale: f64,
    ) {
        call!(self, [weighted, hits, factor], |gpu| {
            cross_entropy::cuda::join_gradient(gpu, weighted, hits, factor, scale)
        });
    }

    fn divide(&self, by: Wide<'_, Self>, x: WideMut<'_, Self>) {
        call!(self, [by, x], |gpu| elementwise::cuda::divide(gpu, by, x));
    }

    fn fill_normal(&self, to: WideMut<'_, Self>, view: &Numbered, stream: Stream, std: f64) {
        call!(self, [to], |gpu| random::cuda::fill_normal(gpu, to, view, stream, std));
    }

    fn add_sum(&self, x: Wide<'_, Self>, total: &mut Memory<f64>) {
        let total = total.all_mut();
        call!(self, [x, total], |gpu| {
            elementwise::cuda::sum_into(gpu, x, total, Output::Accumulate)
        });
    }

    fn add_squares(&self, tensors: &[Wide<'_, Self>], total: &mut Memory<f64>) {
        // Gradients lie one behind the other: a launch for all, not one for each.
        let mut runs: Vec<cuda::View<'_, f32>> = Vec::new();
        for x in tensors.iter().filter_map(|x| x.0) {
            match runs.last_mut().and_then(|last| Some((last.followed_by(x)?, last))) {
                Some((both, last)) => *last = both,
                None => runs.push(x),
            }
        }
        for x in runs {
            let total = total.all_mut();
            call!(self, [total], |gpu| {
                elementwise::cuda::sum_of_squares_into(gpu, x, total, Output::Accumulate)
            });
        }
    }

    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>) {
        let mut updates = Vec::with_capacity(parameters.len());
        for Parameter { w, g, m, v, decay } in parameters {
            let (w, copy) = match w {
                Target::Exact(w) => (w, None),
                Target::Both(w, copy) => (w, copy.0),
                Target::Read(_) => {
                    let reason = "a GPU's exact weights are apart: our bug".to_owned();
                    self.queue.failure.get_or_init(|| DeviceError(reason));
                    return;
                }
            };
            let (Some(w), Some(g), Some(m), Some(v)) = (w.0, g.0, m.0, v.0) else { return };
            updates.push(adamw::cuda::Parameter { w, g, m, v, copy, decay });
        }
        self.queue.kept(adamw::cuda::update(&self.queue.gpu, adamw, &mut updates));
    }

    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>) {
        let lengths = parameters.iter().map(|of| of.w.0.map_or(0, |w| w.len()));
        // The proposal in f32, before it is rounded to what layers read.
        let mut wide: Vec<Memory<f32>> =
            lengths.map(|len| self.queue.memory(len, |gpu| gpu.memory(len))).collect();
        let mut proposals = Vec::with_capacity(parameters.len());
        for (Proposal { to: copy, w, g, m, v, decay }, to) in parameters.into_iter().zip(&mut wide)
        {
            let views = (to.all_mut().0, w.0, g.0, m.0, v.0);
            let (Some(to), Some(w), Some(g), Some(m), Some(v)) = views else { return };
            proposals.push(adamw::cuda::Proposal { to, w, g, m, v, copy: copy.0, decay });
        }
        self.queue.kept(adamw::cuda::proposal(&self.queue.gpu, adamw, &mut proposals));
    }
}
