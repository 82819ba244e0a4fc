//! bf16 on the CPU: weights and activations are stored in bf16, and computed with in f32.
//!
//! It is as exact as a GPU in bf16, and slow: every operation widens what it reads and rounds what
//! it writes. Programs of real plans run so anywhere, at small sizes.

use super::{Device, Gradients, Host, Parameter, Proposal, RowSums, Saved, Space, Target};
use half::bf16;
use kernels::Output;
use kernels::activation::Activation;
use kernels::adamw::AdamW;
use kernels::attention::Attention;
use kernels::cross_entropy::Logits;
use kernels::dropout::Dropout;
use kernels::embedding::Embedding;
use kernels::gemm::Shape;
use kernels::latent_heads::LatentHeads;
use kernels::layer_norm::LayerNorm;
use kernels::random::{GlobalIndices as Numbered, Stream};
use kernels::rms_norm::RmsNorm;
use kernels::rope::Rope;
use kernels::sinks::Sinks;

/// What is read, in f32.
fn wide(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

/// Rounds `from` to `to`.
fn round(from: &[f32], to: &mut [bf16]) {
    for (from, to) in from.iter().zip(to) {
        *to = bf16::from_f32(*from);
    }
}

/// Calls `work` with what `y` holds, in f32, and rounds what it writes.
fn rounded(y: &mut [bf16], work: impl FnOnce(&mut [f32])) {
    let mut exact = wide(y);
    work(&mut exact);
    round(&exact, y);
}

impl Device for Host<bf16, f32> {
    const ADDS_BEFORE_NORM: bool = false;

    fn gemm(&self, shape: &Shape, a: &[bf16], b: &[bf16], c: &mut [bf16], output: Output) {
        let a = wide(a);
        let b = wide(b);
        rounded(c, |c| self.exact().gemm(shape, &a, &b, c, output));
    }

    fn gemm_wide(&self, shape: &Shape, a: &[bf16], b: &[bf16], c: &mut [f32], output: Output) {
        let a = wide(a);
        let b = wide(b);
        self.exact().gemm_wide(shape, &a, &b, c, output);
    }

    fn gemm_bias(&self, shape: &Shape, a: &[bf16], b: &[bf16], bias: &[bf16], c: &mut [bf16]) {
        let [a, b, bias] = [a, b, bias].map(wide);
        rounded(c, |c| self.exact().gemm_bias(shape, &a, &b, &bias, c));
    }

    fn add_bias(&self, bias: &[bf16], x: &mut [bf16]) {
        let bias = wide(bias);
        rounded(x, |x| self.exact().add_bias(&bias, x));
    }

    fn bias_gradient(&self, dy: &[bf16], dbias: &mut [f32]) {
        let dy = wide(dy);
        self.exact().bias_gradient(&dy, dbias);
    }

    fn sum_rows(&self, x: &[f32], sums: &mut [f32]) {
        self.exact().sum_rows(x, sums);
    }

    fn add(&self, x: &[bf16], y: &mut [bf16]) {
        let x = wide(x);
        rounded(y, |y| self.exact().add(&x, y));
    }

    fn add_wide(&self, x: &[f32], y: &mut [f32]) {
        self.exact().add_wide(x, y);
    }

    fn dropout(&self, dropout: &Dropout, view: &Numbered, x: &[bf16], y: &mut [bf16]) {
        let x = wide(x);
        rounded(y, |y| self.exact().dropout(dropout, view, &x, y));
    }

    fn rms_norm(
        &self,
        norm: &RmsNorm,
        x: &[bf16],
        w: &[bf16],
        y: &mut [bf16],
        inverse_rms: &mut [f32],
    ) {
        let x = wide(x);
        let w = wide(w);
        rounded(y, |y| self.exact().rms_norm(norm, &x, &w, y, inverse_rms));
    }

    fn add_and_rms_norm(
        &self,
        norm: &RmsNorm,
        parts: [&[bf16]; 2],
        w: &[bf16],
        sum: &mut [bf16],
        y: &mut [bf16],
        inverse_rms: &mut [f32],
    ) {
        let parts = parts.map(wide);
        let w = wide(w);
        rounded(sum, |sum| {
            rounded(y, |y| {
                self.exact().add_and_rms_norm(
                    norm,
                    [&parts[0], &parts[1]],
                    &w,
                    sum,
                    y,
                    inverse_rms,
                );
            });
        });
    }

    #[allow(clippy::too_many_arguments)]
    fn rms_norm_backward_input(
        &self,
        norm: &RmsNorm,
        x: &[bf16],
        w: &[bf16],
        inverse_rms: &[f32],
        dy: &[bf16],
        dx: &mut [bf16],
        output: Output,
    ) {
        let x = wide(x);
        let w = wide(w);
        let dy = wide(dy);
        rounded(dx, |dx| {
            self.exact().rms_norm_backward_input(norm, &x, &w, inverse_rms, &dy, dx, output);
        });
    }

    fn rms_norm_backward_weight(
        &self,
        norm: &RmsNorm,
        x: &[bf16],
        inverse_rms: &[f32],
        dy: &[bf16],
        dw: &mut [f32],
    ) {
        let x = wide(x);
        let dy = wide(dy);
        self.exact().rms_norm_backward_weight(norm, &x, inverse_rms, &dy, dw);
    }

    #[allow(clippy::too_many_arguments)]
    fn layer_norm(
        &self,
        norm: &LayerNorm,
        x: &[bf16],
        w: &[bf16],
        bias: &[bf16],
        y: &mut [bf16],
        mean: &mut [f32],
        inverse_std: &mut [f32],
    ) {
        let x = wide(x);
        let w = wide(w);
        let bias = wide(bias);
        rounded(y, |y| self.exact().layer_norm(norm, &x, &w, &bias, y, mean, inverse_std));
    }

    fn add_and_layer_norm(
        &self,
        norm: &LayerNorm,
        parts: [&[bf16]; 2],
        weights: [&[bf16]; 2],
        to: [&mut [bf16]; 2],
        mean: &mut [f32],
        inverse_std: &mut [f32],
    ) {
        let parts = parts.map(wide);
        let weights = weights.map(wide);
        let [one, other] = to;
        rounded(one, |one| {
            rounded(other, |other| {
                self.exact().add_and_layer_norm(
                    norm,
                    [&parts[0], &parts[1]],
                    [&weights[0], &weights[1]],
                    [one, other],
                    mean,
                    inverse_std,
                );
            });
        });
    }

    #[allow(clippy::too_many_arguments)]
    fn layer_norm_backward_input(
        &self,
        norm: &LayerNorm,
        x: &[bf16],
        w: &[bf16],
        mean: &[f32],
        inverse_std: &[f32],
        dy: &[bf16],
        dx: &mut [bf16],
        output: Output,
    ) {
        let x = wide(x);
        let w = wide(w);
        let dy = wide(dy);
        rounded(dx, |dx| {
            self.exact().layer_norm_backward_input(
                norm,
                &x,
                &w,
                mean,
                inverse_std,
                &dy,
                dx,
                output,
            );
        });
    }

    #[allow(clippy::too_many_arguments)]
    fn layer_norm_backward_weight(
        &self,
        norm: &LayerNorm,
        x: &[bf16],
        mean: &[f32],
        inverse_std: &[f32],
        dy: &[bf16],
        dw: &mut [f32],
        dbias: &mut [f32],
    ) {
        let x = wide(x);
        let dy = wide(dy);
        self.exact().layer_norm_backward_weight(norm, &x, mean, inverse_std, &dy, dw, dbias);
    }

    fn rope(&self, rope: &Rope, table: &[f32], x: &mut [bf16]) {
        rounded(x, |x| self.exact().rope(rope, table, x));
    }

    fn rope_backward(&self, rope: &Rope, table: &[f32], dx: &mut [bf16]) {
        rounded(dx, |dx| self.exact().rope_backward(rope, table, dx));
    }

    fn attention(
        &self,
        attention: &Attention,
        q: &[bf16],
        k: &[bf16],
        v: &[bf16],
        out: &mut [bf16],
        lse: &mut [f32],
    ) {
        let q = wide(q);
        let k = wide(k);
        let v = wide(v);
        rounded(out, |out| self.exact().attention(attention, &q, &k, &v, out, lse));
    }

    fn merge_attention(
        &self,
        attention: &Attention,
        sums: &mut [f32],
        lse: &mut [f32],
        part: &[bf16],
        part_lse: &[f32],
    ) {
        let part = wide(part);
        self.exact().merge_attention(attention, sums, lse, &part, part_lse);
    }

    fn accumulate(&self, x: &[bf16], sum: &mut [f32]) {
        let x = wide(x);
        self.exact().accumulate(&x, sum);
    }

    fn join_latent_heads(
        &self,
        of: &LatentHeads,
        up: &[bf16],
        rotary: &[bf16],
        k: &mut [bf16],
        v: &mut [bf16],
    ) {
        let [up, rotary] = [up, rotary].map(wide);
        rounded(k, |k| {
            rounded(v, |v| self.exact().join_latent_heads(of, &up, &rotary, k, v));
        });
    }

    fn split_latent_heads(
        &self,
        of: &LatentHeads,
        dk: &[bf16],
        dv: &[bf16],
        dup: &mut [bf16],
        drotary: &mut [bf16],
    ) {
        let [dk, dv] = [dk, dv].map(wide);
        rounded(dup, |dup| {
            rounded(drotary, |sums| self.exact().split_latent_heads(of, &dk, &dv, dup, sums));
        });
    }

    fn sinks(&self, of: &Sinks, sinks: &[bf16], lse: &[f32], new: &mut [f32], out: &mut [bf16]) {
        let sinks = wide(sinks);
        rounded(out, |out| self.exact().sinks(of, &sinks, lse, new, out));
    }

    fn sinks_gradient(&self, of: &Sinks, sinks: &[bf16], new: &[f32], by_row: &mut [f32]) {
        self.exact().sinks_gradient(of, &wide(sinks), new, by_row);
    }

    fn scale_rows(&self, w: &[f32], x: &[bf16], y: &mut [bf16]) {
        let x = wide(x);
        rounded(y, |y| self.exact().scale_rows(w, &x, y));
    }

    fn dot_rows(&self, x: &[bf16], y: &[bf16], w: &mut [f32]) {
        let [x, y] = [x, y].map(wide);
        self.exact().dot_rows(&x, &y, w);
    }

    fn swap_leading(&self, shape: [usize; 3], x: &[bf16], y: &mut [bf16]) {
        let x = wide(x);
        rounded(y, |y| self.exact().swap_leading(shape, &x, y));
    }

    fn activation(&self, activation: Activation, x: &[bf16], y: &mut [bf16]) {
        let x = wide(x);
        rounded(y, |y| self.exact().activation(activation, &x, y));
    }

    fn activation_backward(
        &self,
        activation: Activation,
        x: &[bf16],
        dy: &[bf16],
        dx: &mut [bf16],
    ) {
        let x = wide(x);
        let dy = wide(dy);
        rounded(dx, |dx| self.exact().activation_backward(activation, &x, &dy, dx));
    }

    fn gated(&self, activation: Activation, gate: &[bf16], up: &[bf16], y: &mut [bf16]) {
        let gate = wide(gate);
        let up = wide(up);
        rounded(y, |y| self.exact().gated(activation, &gate, &up, y));
    }

    fn gated_backward(
        &self,
        activation: Activation,
        gate: &[bf16],
        up: &[bf16],
        dy: &[bf16],
        dgate: &mut [bf16],
        dup: &mut [bf16],
    ) {
        let gate = wide(gate);
        let up = wide(up);
        let dy = wide(dy);
        rounded(dgate, |dgate| {
            rounded(dup, |dup| {
                self.exact().gated_backward(activation, &gate, &up, &dy, dgate, dup);
            });
        });
    }

    fn embedding(&self, embedding: &Embedding, ids: &[i64], table: &[bf16], out: &mut [bf16]) {
        let table = wide(table);
        rounded(out, |out| self.exact().embedding(embedding, ids, &table, out));
    }

    fn embedding_backward(
        &self,
        embedding: &Embedding,
        by_row: &[i64],
        dout: &[bf16],
        dtable: &mut [f32],
    ) {
        let dout = wide(dout);
        self.exact().embedding_backward(embedding, by_row, &dout, dtable);
    }

    fn local_max(&self, shape: &Logits, logits: &[bf16], max: &mut [f32]) {
        let logits = wide(logits);
        self.exact().local_max(shape, &logits, max);
    }

    fn local_sum_exp(
        &self,
        shape: &Logits,
        logits: &[bf16],
        targets: &[i64],
        max: &[f32],
        sum_exp: &mut [f32],
        target_logit: &mut [f32],
    ) {
        let logits = wide(logits);
        self.exact().local_sum_exp(shape, &logits, targets, max, sum_exp, target_logit);
    }

    fn local_sums(
        &self,
        shape: &Logits,
        logits: &[bf16],
        targets: &[i64],
        max: &mut [f32],
        sum_exp: &mut [f32],
        target_logit: &mut [f32],
    ) {
        let logits = wide(logits);
        self.exact().local_sums(shape, &logits, targets, max, sum_exp, target_logit);
    }

    fn rescale_sum_exp(&self, local_max: &[f32], max: &[f32], sum_exp: &mut [f32]) {
        self.exact().rescale_sum_exp(local_max, max, sum_exp);
    }

    fn loss(
        &self,
        targets: &[i64],
        sums: RowSums<'_, Self>,
        target_logit: &[f32],
        loss: &mut [f32],
    ) {
        let RowSums { max, sum_exp } = sums;
        self.exact().loss(targets, RowSums { max, sum_exp }, target_logit, loss);
    }

    fn cross_entropy_gradient(
        &self,
        shape: &Logits,
        logits: &mut [bf16],
        targets: &[i64],
        sums: RowSums<'_, Self>,
        scale: f64,
    ) {
        let RowSums { max, sum_exp } = sums;
        rounded(logits, |logits| {
            self.exact().cross_entropy_gradient(
                shape,
                logits,
                targets,
                RowSums { max, sum_exp },
                scale,
            );
        });
    }

    fn scale_by_slope(&self, soft_cap: Option<f64>, target_logit: &[f32], rows: &mut [bf16]) {
        rounded(rows, |rows| self.exact().scale_by_slope(soft_cap, target_logit, rows));
    }

    fn softmax_to_gradient(
        &self,
        shape: &Logits,
        softmax: &mut [bf16],
        targets: &[i64],
        factor: &[f32],
        target_logit: &[f32],
        scale: f64,
    ) {
        rounded(softmax, |softmax| {
            self.exact().softmax_to_gradient(shape, softmax, targets, factor, target_logit, scale);
        });
    }

    fn join_gradient(&self, weighted: &mut [bf16], hits: &[bf16], factor: &[f32], scale: f64) {
        let hits = wide(hits);
        rounded(weighted, |weighted| self.exact().join_gradient(weighted, &hits, factor, scale));
    }

    fn divide(&self, by: &[f32], x: &mut [f32]) {
        self.exact().divide(by, x);
    }

    fn fill_normal(&self, to: &mut [f32], view: &Numbered, stream: Stream, std: f64) {
        self.exact().fill_normal(to, view, stream, std);
    }

    fn add_sum(&self, x: &[f32], total: &mut f64) {
        self.exact().add_sum(x, total);
    }

    fn add_squares(&self, tensors: &[&[f32]], total: &mut f64) {
        self.exact().add_squares(tensors, total);
    }

    fn attention_backward(
        &self,
        attention: &Attention,
        saved: Saved<'_, Self>,
        dout: &[bf16],
        gradients: Gradients<'_, Self>,
    ) {
        let Saved { q, k, v, out, lse } = saved;
        let [q, k, v, out, dout] = [q, k, v, out, dout].map(wide);
        let saved = Saved { q: &q[..], k: &k[..], v: &v[..], out: &out[..], lse };
        let Gradients { dq, dk, dv } = gradients;
        rounded(dq, |dq| {
            rounded(dk, |dk| {
                rounded(dv, |dv| {
                    let gradients = Gradients { dq, dk, dv };
                    self.exact().attention_backward(attention, saved, &dout, gradients);
                });
            });
        });
    }

    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>) {
        let mut to_round = Vec::new();
        let mut updates = Vec::with_capacity(parameters.len());
        let mut read: Vec<Vec<f32>> = Vec::new();
        for parameter in &parameters {
            if let Target::Read(w) = &parameter.w {
                read.push(wide(w));
            }
        }
        let mut in_f32 = read.iter_mut();
        for Parameter { w, g, m, v, decay } in parameters {
            let w: &mut [f32] = match w {
                Target::Exact(w) => w,
                Target::Both(w, to) => {
                    to_round.push((updates.len(), to));
                    w
                }
                Target::Read(to) => {
                    to_round.push((updates.len(), to));
                    in_f32.next().expect("one for each that is read")
                }
            };
            updates.push(kernels::adamw::Parameter { w, g, m, v, decay });
        }
        kernels::adamw::update(self.host(), adamw, &mut updates);
        for (n, to) in to_round {
            round(updates[n].w, to);
        }
    }

    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>) {
        for Proposal { to, w, g, m, v, decay } in parameters {
            rounded(to, |to| {
                let proposal = Proposal { to, w, g, m, v, decay };
                self.exact().adamw_proposal(adamw, vec![proposal]);
            });
        }
    }
}
