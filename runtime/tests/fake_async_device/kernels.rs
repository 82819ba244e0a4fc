//! Operations: each is a job that runs the host's kernels on copies of its inputs.

use super::FakeAsyncDevice;
use super::memory::{Part, into, of};
use runtime::device::{
    Device, Gradients, Ids, Parameter, Proposal, RowSums, Saved, Stored, StoredMut, Target, Wide,
    WideMut,
};
use runtime::kernels::Output;
use runtime::kernels::activation::Activation;
use runtime::kernels::adamw::AdamW;
use runtime::kernels::attention::Attention;
use runtime::kernels::cross_entropy::Logits;
use runtime::kernels::dropout::Dropout;
use runtime::kernels::embedding::Embedding;
use runtime::kernels::gemm::Shape;
use runtime::kernels::latent_heads::LatentHeads;
use runtime::kernels::layer_norm::LayerNorm;
use runtime::kernels::random::{GlobalIndices as Numbered, Stream as Draws};
use runtime::kernels::rms_norm::RmsNorm;
use runtime::kernels::rope::Rope;
use runtime::kernels::sinks::Sinks;
use runtime::{Number, Scalar};
use std::sync::{Arc, Mutex};

impl<S: Number, W: Scalar, const M: bool> Device for FakeAsyncDevice<S, W, M> {
    fn gemm(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
        output: Output,
    ) {
        let shape = *shape;
        let (a, b, c) = (of(a), of(b), into(c));
        self.run(move |host| {
            let mut to_c: Vec<W> = c.get();
            host.gemm(&shape, &a.get::<W>(), &b.get::<W>(), &mut to_c, output);
            c.put(&to_c);
        });
    }

    fn gemm_wide(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: WideMut<'_, Self>,
        output: Output,
    ) {
        let shape = *shape;
        let (a, b, c) = (of(a), of(b), into(c));
        self.run(move |host| {
            let mut to_c: Vec<W> = c.get();
            host.gemm_wide(&shape, &a.get::<W>(), &b.get::<W>(), &mut to_c, output);
            c.put(&to_c);
        });
    }

    fn gemm_bias(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        bias: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
    ) {
        let shape = *shape;
        let (a, b, bias, c) = (of(a), of(b), of(bias), into(c));
        self.run(move |host| {
            let mut to_c: Vec<W> = c.get();
            host.gemm_bias(&shape, &a.get::<W>(), &b.get::<W>(), &bias.get::<W>(), &mut to_c);
            c.put(&to_c);
        });
    }

    fn add_bias(&self, bias: Stored<'_, Self>, x: StoredMut<'_, Self>) {
        let (bias, x) = (of(bias), into(x));
        self.run(move |host| {
            let mut to_x: Vec<W> = x.get();
            host.add_bias(&bias.get::<W>(), &mut to_x);
            x.put(&to_x);
        });
    }

    fn bias_gradient(&self, dy: Stored<'_, Self>, dbias: WideMut<'_, Self>) {
        let (dy, dbias) = (of(dy), into(dbias));
        self.run(move |host| {
            let mut to_dbias: Vec<W> = dbias.get();
            host.bias_gradient(&dy.get::<W>(), &mut to_dbias);
            dbias.put(&to_dbias);
        });
    }

    fn sum_rows(&self, x: Wide<'_, Self>, sums: WideMut<'_, Self>) {
        let (x, sums) = (of(x), into(sums));
        self.run(move |host| {
            let mut to_sums: Vec<W> = sums.get();
            host.sum_rows(&x.get::<W>(), &mut to_sums);
            sums.put(&to_sums);
        });
    }

    fn add(&self, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.add(&x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn add_wide(&self, x: Wide<'_, Self>, y: WideMut<'_, Self>) {
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.add_wide(&x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn dropout(
        &self,
        dropout: &Dropout,
        view: &Numbered,
        x: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        let dropout = *dropout;
        let view = *view;
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.dropout(&dropout, &view, &x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn rms_norm(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    ) {
        let norm = *norm;
        let (x, w, y, inverse_rms) = (of(x), of(w), into(y), into(inverse_rms));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            let mut to_inverse_rms: Vec<W> = inverse_rms.get();
            host.rms_norm(&norm, &x.get::<W>(), &w.get::<W>(), &mut to_y, &mut to_inverse_rms);
            y.put(&to_y);
            inverse_rms.put(&to_inverse_rms);
        });
    }

    fn merge_attention(
        &self,
        attention: &Attention,
        sums: WideMut<'_, Self>,
        lse: WideMut<'_, Self>,
        part: Stored<'_, Self>,
        part_lse: Wide<'_, Self>,
    ) {
        let attention = *attention;
        let (sums, lse, part, part_lse) = (into(sums), into(lse), of(part), of(part_lse));
        self.run(move |host| {
            let (mut to_sums, mut to_lse): (Vec<W>, Vec<W>) = (sums.get(), lse.get());
            let (part, part_lse) = (part.get::<W>(), part_lse.get::<W>());
            host.merge_attention(&attention, &mut to_sums, &mut to_lse, &part, &part_lse);
            sums.put(&to_sums);
            lse.put(&to_lse);
        });
    }

    fn accumulate(&self, x: Stored<'_, Self>, sum: WideMut<'_, Self>) {
        let (x, sum) = (of(x), into(sum));
        self.run(move |host| {
            let mut to_sum: Vec<W> = sum.get();
            host.accumulate(&x.get::<W>(), &mut to_sum);
            sum.put(&to_sum);
        });
    }

    fn join_latent_heads(
        &self,
        shape: &LatentHeads,
        up: Stored<'_, Self>,
        rotary: Stored<'_, Self>,
        k: StoredMut<'_, Self>,
        v: StoredMut<'_, Self>,
    ) {
        let shape = *shape;
        let (up, rotary, k, v) = (of(up), of(rotary), into(k), into(v));
        self.run(move |host| {
            let (mut to_k, mut to_v): (Vec<W>, Vec<W>) = (k.get(), v.get());
            let from = [up.get::<W>(), rotary.get::<W>()];
            host.join_latent_heads(&shape, &from[0], &from[1], &mut to_k, &mut to_v);
            k.put(&to_k);
            v.put(&to_v);
        });
    }

    fn split_latent_heads(
        &self,
        shape: &LatentHeads,
        dk: Stored<'_, Self>,
        dv: Stored<'_, Self>,
        dup: StoredMut<'_, Self>,
        drotary: StoredMut<'_, Self>,
    ) {
        let shape = *shape;
        let (dk, dv, dup, drotary) = (of(dk), of(dv), into(dup), into(drotary));
        self.run(move |host| {
            let (mut to_dup, mut to_drotary): (Vec<W>, Vec<W>) = (dup.get(), drotary.get());
            let from = [dk.get::<W>(), dv.get::<W>()];
            host.split_latent_heads(&shape, &from[0], &from[1], &mut to_dup, &mut to_drotary);
            dup.put(&to_dup);
            drotary.put(&to_drotary);
        });
    }

    fn sinks(
        &self,
        shape: &Sinks,
        sinks: Stored<'_, Self>,
        lse: Wide<'_, Self>,
        new: WideMut<'_, Self>,
        out: StoredMut<'_, Self>,
    ) {
        let shape = *shape;
        let (sinks, lse, new, out) = (of(sinks), of(lse), into(new), into(out));
        self.run(move |host| {
            let (mut to_new, mut to_out): (Vec<W>, Vec<W>) = (new.get(), out.get());
            host.sinks(&shape, &sinks.get::<W>(), &lse.get::<W>(), &mut to_new, &mut to_out);
            new.put(&to_new);
            out.put(&to_out);
        });
    }

    fn sinks_gradient(
        &self,
        shape: &Sinks,
        sinks: Stored<'_, Self>,
        new: Wide<'_, Self>,
        by_row: WideMut<'_, Self>,
    ) {
        let shape = *shape;
        let (sinks, new, by_row) = (of(sinks), of(new), into(by_row));
        self.run(move |host| {
            let mut to_rows: Vec<W> = by_row.get();
            host.sinks_gradient(&shape, &sinks.get::<W>(), &new.get::<W>(), &mut to_rows);
            by_row.put(&to_rows);
        });
    }

    fn scale_rows(&self, w: Wide<'_, Self>, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        let (w, x, y) = (of(w), of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.scale_rows(&w.get::<W>(), &x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn dot_rows(&self, x: Stored<'_, Self>, y: Stored<'_, Self>, w: WideMut<'_, Self>) {
        let (x, y, w) = (of(x), of(y), into(w));
        self.run(move |host| {
            let mut to_w: Vec<W> = w.get();
            host.dot_rows(&x.get::<W>(), &y.get::<W>(), &mut to_w);
            w.put(&to_w);
        });
    }

    fn swap_leading(&self, shape: [usize; 3], x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.swap_leading(shape, &x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    const ADDS_BEFORE_NORM: bool = true;

    fn add_and_rms_norm(
        &self,
        norm: &RmsNorm,
        parts: [Stored<'_, Self>; 2],
        w: Stored<'_, Self>,
        sum: StoredMut<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    ) {
        let norm = *norm;
        let (parts, w) = (parts.map(of), of(w));
        let (sum, y, inverse_rms) = (into(sum), into(y), into(inverse_rms));
        self.run(move |host| {
            let [x, branch] = parts.each_ref().map(Part::get::<W>);
            let mut to_sum: Vec<W> = branch;
            host.add(&x, &mut to_sum);
            sum.put(&to_sum);
            // The sum as it is stored.
            let rounded: Vec<W> = sum.get();
            let (mut to_y, mut to_inverse): (Vec<W>, Vec<W>) = (y.get(), inverse_rms.get());
            host.rms_norm(&norm, &rounded, &w.get::<W>(), &mut to_y, &mut to_inverse);
            y.put(&to_y);
            inverse_rms.put(&to_inverse);
        });
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
        let norm = *norm;
        let (x, w, inverse_rms, dy, dx) = (of(x), of(w), of(inverse_rms), of(dy), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.rms_norm_backward_input(
                &norm,
                &x.get::<W>(),
                &w.get::<W>(),
                &inverse_rms.get::<W>(),
                &dy.get::<W>(),
                &mut to_dx,
                output,
            );
            dx.put(&to_dx);
        });
    }

    fn rms_norm_backward_weight(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
    ) {
        let norm = *norm;
        let (x, inverse_rms, dy, dw) = (of(x), of(inverse_rms), of(dy), into(dw));
        self.run(move |host| {
            let mut to_dw: Vec<W> = dw.get();
            host.rms_norm_backward_weight(
                &norm,
                &x.get::<W>(),
                &inverse_rms.get::<W>(),
                &dy.get::<W>(),
                &mut to_dw,
            );
            dw.put(&to_dw);
        });
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
        let norm = *norm;
        let (x, w, bias, y, mean, inverse_std) =
            (of(x), of(w), of(bias), into(y), into(mean), into(inverse_std));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            let mut to_mean: Vec<W> = mean.get();
            let mut to_inverse_std: Vec<W> = inverse_std.get();
            host.layer_norm(
                &norm,
                &x.get::<W>(),
                &w.get::<W>(),
                &bias.get::<W>(),
                &mut to_y,
                &mut to_mean,
                &mut to_inverse_std,
            );
            y.put(&to_y);
            mean.put(&to_mean);
            inverse_std.put(&to_inverse_std);
        });
    }

    fn add_and_layer_norm(
        &self,
        norm: &LayerNorm,
        parts: [Stored<'_, Self>; 2],
        weights: [Stored<'_, Self>; 2],
        to: [StoredMut<'_, Self>; 2],
        mean: WideMut<'_, Self>,
        inverse_std: WideMut<'_, Self>,
    ) {
        let norm = *norm;
        let (parts, weights) = (parts.map(of), weights.map(of));
        let ([sum, y], mean, inverse_std) = (to.map(into), into(mean), into(inverse_std));
        self.run(move |host| {
            let [x, branch] = parts.each_ref().map(Part::get::<W>);
            let [w, bias] = weights.each_ref().map(Part::get::<W>);
            let mut to_sum: Vec<W> = branch;
            host.add(&x, &mut to_sum);
            sum.put(&to_sum);
            // The sum as it is stored.
            let rounded: Vec<W> = sum.get();
            let [mut to_y, mut to_mean, mut to_std]: [Vec<W>; 3] =
                [y.get(), mean.get(), inverse_std.get()];
            host.layer_norm(&norm, &rounded, &w, &bias, &mut to_y, &mut to_mean, &mut to_std);
            y.put(&to_y);
            mean.put(&to_mean);
            inverse_std.put(&to_std);
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
        let norm = *norm;
        let (x, w, mean, inverse_std, dy, dx) =
            (of(x), of(w), of(mean), of(inverse_std), of(dy), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.layer_norm_backward_input(
                &norm,
                &x.get::<W>(),
                &w.get::<W>(),
                &mean.get::<W>(),
                &inverse_std.get::<W>(),
                &dy.get::<W>(),
                &mut to_dx,
                output,
            );
            dx.put(&to_dx);
        });
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
        let norm = *norm;
        let (x, mean, inverse_std, dy, dw, dbias) =
            (of(x), of(mean), of(inverse_std), of(dy), into(dw), into(dbias));
        self.run(move |host| {
            let mut to_dw: Vec<W> = dw.get();
            let mut to_dbias: Vec<W> = dbias.get();
            host.layer_norm_backward_weight(
                &norm,
                &x.get::<W>(),
                &mean.get::<W>(),
                &inverse_std.get::<W>(),
                &dy.get::<W>(),
                &mut to_dw,
                &mut to_dbias,
            );
            dw.put(&to_dw);
            dbias.put(&to_dbias);
        });
    }

    fn rope(&self, rope: &Rope, table: Wide<'_, Self>, x: StoredMut<'_, Self>) {
        let rope = *rope;
        let (table, x) = (of(table), into(x));
        self.run(move |host| {
            let mut to_x: Vec<W> = x.get();
            host.rope(&rope, &table.get::<W>(), &mut to_x);
            x.put(&to_x);
        });
    }

    fn rope_backward(&self, rope: &Rope, table: Wide<'_, Self>, dx: StoredMut<'_, Self>) {
        let rope = *rope;
        let (table, dx) = (of(table), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.rope_backward(&rope, &table.get::<W>(), &mut to_dx);
            dx.put(&to_dx);
        });
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
        let attention = *attention;
        let (q, k, v, out, lse) = (of(q), of(k), of(v), into(out), into(lse));
        self.run(move |host| {
            let mut to_out: Vec<W> = out.get();
            let mut to_lse: Vec<W> = lse.get();
            host.attention(
                &attention,
                &q.get::<W>(),
                &k.get::<W>(),
                &v.get::<W>(),
                &mut to_out,
                &mut to_lse,
            );
            out.put(&to_out);
            lse.put(&to_lse);
        });
    }

    fn activation(&self, activation: Activation, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.activation(activation, &x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn activation_backward(
        &self,
        activation: Activation,
        x: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
    ) {
        let (x, dy, dx) = (of(x), of(dy), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.activation_backward(activation, &x.get::<W>(), &dy.get::<W>(), &mut to_dx);
            dx.put(&to_dx);
        });
    }

    fn gated(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        let (gate, up, y) = (of(gate), of(up), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.gated(activation, &gate.get::<W>(), &up.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
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
        let (gate, up, dy, dgate, dup) = (of(gate), of(up), of(dy), into(dgate), into(dup));
        self.run(move |host| {
            let mut to_dgate: Vec<W> = dgate.get();
            let mut to_dup: Vec<W> = dup.get();
            host.gated_backward(
                activation,
                &gate.get::<W>(),
                &up.get::<W>(),
                &dy.get::<W>(),
                &mut to_dgate,
                &mut to_dup,
            );
            dgate.put(&to_dgate);
            dup.put(&to_dup);
        });
    }

    fn embedding(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        table: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
    ) {
        let embedding = *embedding;
        let (ids, table, out) = (of(ids), of(table), into(out));
        self.run(move |host| {
            let mut to_out: Vec<W> = out.get();
            host.embedding(&embedding, &ids.values(), &table.get::<W>(), &mut to_out);
            out.put(&to_out);
        });
    }

    fn embedding_backward(
        &self,
        embedding: &Embedding,
        by_row: Ids<'_, Self>,
        dout: Stored<'_, Self>,
        dtable: WideMut<'_, Self>,
    ) {
        let embedding = *embedding;
        let (by_row, dout, dtable) = (of(by_row), of(dout), into(dtable));
        self.run(move |host| {
            let mut to_dtable: Vec<W> = dtable.get();
            let (by_row, dout) = (by_row.values(), dout.get::<W>());
            host.embedding_backward(&embedding, &by_row, &dout, &mut to_dtable);
            dtable.put(&to_dtable);
        });
    }

    fn local_max(&self, shape: &Logits, logits: Stored<'_, Self>, max: WideMut<'_, Self>) {
        let shape = *shape;
        let (logits, max) = (of(logits), into(max));
        self.run(move |host| {
            let mut to_max: Vec<W> = max.get();
            host.local_max(&shape, &logits.get::<W>(), &mut to_max);
            max.put(&to_max);
        });
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
        let shape = *shape;
        let (logits, targets, max, sum_exp, target_logit) =
            (of(logits), of(targets), of(max), into(sum_exp), into(target_logit));
        self.run(move |host| {
            let mut to_sum_exp: Vec<W> = sum_exp.get();
            let mut to_target_logit: Vec<W> = target_logit.get();
            host.local_sum_exp(
                &shape,
                &logits.get::<W>(),
                &targets.values(),
                &max.get::<W>(),
                &mut to_sum_exp,
                &mut to_target_logit,
            );
            sum_exp.put(&to_sum_exp);
            target_logit.put(&to_target_logit);
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
        let shape = *shape;
        let (logits, targets, max, sum_exp, target_logit) =
            (of(logits), of(targets), into(max), into(sum_exp), into(target_logit));
        self.run(move |host| {
            let [mut to_max, mut to_sum_exp, mut to_target]: [Vec<W>; 3] =
                [max.get(), sum_exp.get(), target_logit.get()];
            host.local_sums(
                &shape,
                &logits.get::<W>(),
                &targets.values(),
                &mut to_max,
                &mut to_sum_exp,
                &mut to_target,
            );
            max.put(&to_max);
            sum_exp.put(&to_sum_exp);
            target_logit.put(&to_target);
        });
    }

    fn rescale_sum_exp(
        &self,
        local_max: Wide<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
    ) {
        let (local_max, max, sum_exp) = (of(local_max), of(max), into(sum_exp));
        self.run(move |host| {
            let mut to_sum_exp: Vec<W> = sum_exp.get();
            host.rescale_sum_exp(&local_max.get::<W>(), &max.get::<W>(), &mut to_sum_exp);
            sum_exp.put(&to_sum_exp);
        });
    }

    fn fill_normal(&self, to: WideMut<'_, Self>, view: &Numbered, stream: Draws, std: f64) {
        let (to, view) = (into(to), *view);
        self.run(move |host| {
            let mut values: Vec<W> = to.get();
            host.fill_normal(&mut values, &view, stream, std);
            to.put(&values);
        });
    }

    fn divide(&self, by: Wide<'_, Self>, x: WideMut<'_, Self>) {
        let (by, x) = (of(by), into(x));
        self.run(move |host| {
            let mut to_x: Vec<W> = x.get();
            host.divide(&by.get::<W>(), &mut to_x);
            x.put(&to_x);
        });
    }

    fn attention_backward(
        &self,
        attention: &Attention,
        saved: Saved<'_, Self>,
        dout: Stored<'_, Self>,
        gradients: Gradients<'_, Self>,
    ) {
        let attention = *attention;
        let (q, k, v, out) = (of(saved.q), of(saved.k), of(saved.v), of(saved.out));
        let (lse, dout) = (of(saved.lse), of(dout));
        let (dq, dk, dv) = (into(gradients.dq), into(gradients.dk), into(gradients.dv));
        self.run(move |host| {
            let [q, k, v, out]: [Vec<W>; 4] = [q.get(), k.get(), v.get(), out.get()];
            let [mut to_q, mut to_k, mut to_v]: [Vec<W>; 3] = [dq.get(), dk.get(), dv.get()];
            let lse: Vec<W> = lse.get();
            let saved = Saved { q: &q[..], k: &k[..], v: &v[..], out: &out[..], lse: &lse[..] };
            let gradients = Gradients { dq: &mut to_q[..], dk: &mut to_k[..], dv: &mut to_v[..] };
            host.attention_backward(&attention, saved, &dout.get::<W>(), gradients);
            dq.put(&to_q);
            dk.put(&to_k);
            dv.put(&to_v);
        });
    }

    fn loss(
        &self,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        target_logit: Wide<'_, Self>,
        loss: WideMut<'_, Self>,
    ) {
        let (targets, max, sum_exp) = (of(targets), of(sums.max), of(sums.sum_exp));
        let (target_logit, loss) = (of(target_logit), into(loss));
        self.run(move |host| {
            let (max, sum_exp): (Vec<W>, Vec<W>) = (max.get(), sum_exp.get());
            let mut to: Vec<W> = loss.get();
            let sums = RowSums { max: &max[..], sum_exp: &sum_exp[..] };
            host.loss(&targets.values(), sums, &target_logit.get::<W>(), &mut to);
            loss.put(&to);
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
        let (shape, logits, targets) = (*shape, into(logits), of(targets));
        let (max, sum_exp) = (of(sums.max), of(sums.sum_exp));
        self.run(move |host| {
            let (max, sum_exp): (Vec<W>, Vec<W>) = (max.get(), sum_exp.get());
            let mut to: Vec<W> = logits.get();
            let sums = RowSums { max: &max[..], sum_exp: &sum_exp[..] };
            host.cross_entropy_gradient(&shape, &mut to, &targets.values(), sums, scale);
            logits.put(&to);
        });
    }

    fn scale_by_slope(
        &self,
        soft_cap: Option<f64>,
        target_logit: Wide<'_, Self>,
        rows: StoredMut<'_, Self>,
    ) {
        let (target_logit, rows) = (of(target_logit), into(rows));
        self.run(move |host| {
            let mut to: Vec<W> = rows.get();
            host.scale_by_slope(soft_cap, &target_logit.get::<W>(), &mut to);
            rows.put(&to);
        });
    }

    fn softmax_to_gradient(
        &self,
        shape: &Logits,
        softmax: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        factor: Wide<'_, Self>,
        target_logit: Wide<'_, Self>,
        scale: f64,
    ) {
        let (shape, softmax, targets) = (*shape, into(softmax), of(targets));
        let (factor, target_logit) = (of(factor), of(target_logit));
        self.run(move |host| {
            let mut to: Vec<W> = softmax.get();
            let (factor, target): (Vec<W>, Vec<W>) = (factor.get(), target_logit.get());
            host.softmax_to_gradient(&shape, &mut to, &targets.values(), &factor, &target, scale);
            softmax.put(&to);
        });
    }

    fn join_gradient(
        &self,
        weighted: StoredMut<'_, Self>,
        hits: Stored<'_, Self>,
        factor: Wide<'_, Self>,
        scale: f64,
    ) {
        let (weighted, hits, factor) = (into(weighted), of(hits), of(factor));
        self.run(move |host| {
            let mut to: Vec<W> = weighted.get();
            host.join_gradient(&mut to, &hits.get::<W>(), &factor.get::<W>(), scale);
            weighted.put(&to);
        });
    }

    fn add_sum(&self, x: Wide<'_, Self>, total: &mut Arc<Mutex<f64>>) {
        let (x, total) = (of(x), total.clone());
        self.run(move |host| host.add_sum(&x.get::<W>(), &mut total.lock().unwrap()));
    }

    fn add_squares(&self, tensors: &[Wide<'_, Self>], total: &mut Arc<Mutex<f64>>) {
        for x in tensors {
            let (x, total) = (of(*x), total.clone());
            self.run(move |host| host.add_squares(&[&x.get::<W>()], &mut total.lock().unwrap()));
        }
    }

    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>) {
        for Parameter { w, g, m, v, decay } in parameters {
            let (adamw, g, m, v) = (*adamw, of(g), into(m), into(v));
            let (exact, read) = match w {
                Target::Read(read) => (None, Some(into(read))),
                Target::Exact(exact) => (Some(into(exact)), None),
                Target::Both(exact, read) => (Some(into(exact)), Some(into(read))),
            };
            self.run(move |host| {
                let mut to: Vec<W> = match (&exact, &read) {
                    (Some(exact), _) => exact.get(),
                    (None, Some(read)) => read.get(),
                    (None, None) => Vec::new(),
                };
                let [g, mut to_m, mut to_v]: [Vec<W>; 3] = [g.get(), m.get(), v.get()];
                let w = Target::Read(&mut to[..]);
                let parameter =
                    Parameter { w, g: &g[..], m: &mut to_m[..], v: &mut to_v[..], decay };
                host.adamw(&adamw, vec![parameter]);
                m.put(&to_m);
                v.put(&to_v);
                exact.iter().for_each(|exact| exact.put(&to));
                read.iter().for_each(|read| read.put(&to));
            });
        }
    }

    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>) {
        for Proposal { to, w, g, m, v, decay } in parameters {
            let (adamw, read) = (*adamw, into(to));
            let (w, g, m, v) = (of(w), of(g), of(m), of(v));
            self.run(move |host| {
                let mut to: Vec<W> = read.get();
                let [w, g, m, v]: [Vec<W>; 4] = [w.get(), g.get(), m.get(), v.get()];
                let proposal =
                    Proposal { to: &mut to[..], w: &w[..], g: &g[..], m: &m[..], v: &v[..], decay };
                host.adamw_proposal(&adamw, vec![proposal]);
                read.put(&to);
            });
        }
    }
}
