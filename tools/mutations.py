#!/usr/bin/env python3
"""Mutation check of training: plants one deliberate bug at a time and expects a test to fail.

    tools/mutations.py [-k WORD] [--list] [--markdown FILE]

Works on a copy of the repository (in $MUTATIONS_DIR, otherwise a temporary folder) and never
touches this one. Prints a line for each bug, and exits with 1 if one was not caught.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folders beside the runtime's sources.
LOWER = "../../codegen/src/lower/"
DIRECT = "../../codegen/direct/src/"

# Name, file, text to replace (must occur exactly once), replacement, tests that should catch it:
# `binary`, or `binary/name` if the bug would make the binary's other tests wait for their time
# limit.
MUTATIONS = [
    ("everything decays", "state/params.rs", "self.shape.len() == 2\n", "true\n", "golden"),
    ("nothing decays", "state/params.rs", "self.shape.len() == 2\n", "false\n", "golden"),
    ("copies counted in the norm", "state/params.rs",
     "!self.tied_copy && (0..rank).all(|other| self.extent(other, tp) != mine)", "!self.tied_copy", "equivalence/a_covering_set_of_splits"),
    ("tied matrix counted twice", "state/params.rs", "!self.tied_copy && (0..rank)", "(0..rank)", "equivalence/a_covering_set_of_splits"),
    ("gradients of key/value copies not summed", "ops/linear.rs",
     "let gradient = if copies { Gradient::Partial }", "let gradient = if copies && inputs == 0 { Gradient::Partial }",
     "equivalence/a_covering_set_of_splits"),
    ("partial gradients not summed", "rank/sums.rs",
     "if self.groups.tp.size() == 1 || !any {", "if self.groups.tp.size() < 99 || !any {", "equivalence/a_covering_set_of_splits"),
    ("tied gradients not summed", "rank/sums.rs",
     "if self.groups.ends.size() == 1 || !apart {", "if self.groups.ends.size() < 99 || !apart {", "equivalence/a_covering_set_of_splits"),
    ("bias added before the sum", LOWER + "layer.rs",
     "    let sum = b.leave(first.name(\"sum\"), part);\n    let (kept_1, middle) = first.leave(b, kept_1, sum);\n",
     "    let of = b.sizes.part();\n    let part = match first.bias {\n"
     "        Some(field) => b.op(\"part_1\", of, |to| Op::AddBias { field, x: part, to }),\n        None => part,\n    };\n"
     "    let sum = b.leave(first.name(\"sum\"), part);\n    let plain = Half { bias: None, ..*first };\n"
     "    let (kept_1, middle) = plain.leave(b, kept_1, sum);\n", "equivalence/a_covering_set_of_splits"),
    ("loss divided per replica", "rank/batches.rs", "if replicas.size() > 1 {\n            replicas.all_reduce(&mut total",
     "if replicas.size() > 99 {\n            replicas.all_reduce(&mut total", "plan_independence"),
    ("last bucket not reduced", "step/reduce.rs", "            self.start(gradients, &(complete..started))?;\n",
     "            let _ = (complete, started);\n", "equivalence/a_covering_set_of_splits"),
    ("sums not copied back", "step/reduce.rs",
     "scattered(self.device, &sum, gradients.sums_mut(), &parts);", "let _ = (&sum, parts);", "equivalence/a_covering_set_of_splits"),
    ("padded vocabulary in the maximum", "ops/loss.rs",
     "real_columns: columns.min(self.vocab - first_column),", "real_columns: columns,", "equivalence/a_covering_set_of_splits"),
    ("loss: sums of different maxima added", "ops/loss.rs",
     "ctx.device.rescale_sum_exp(own.view(), max.view(), sum_exp.view_mut());",
     "let _ = (own, max, sum_exp.view_mut());", "equivalence/a_covering_set_of_splits"),
    ("fused loss: targets of the first block", "ops/fused_loss.rs",
     "            let labels = ctx.batch.labels.part(block.start, block.len());\n            ctx.device.local_sums(",
     "            let labels = ctx.batch.labels.part(0, block.len());\n            ctx.device.local_sums(",
     "equivalence/a_covering_set_of_splits"),
    ("fused loss: weights of the first block", "ops/fused_loss.rs",
     "device.gemm_wide(&product, dlogits.view(), x.part(at), dweight, Output::Accumulate);",
     "device.gemm_wide(&product, dlogits.view(), x.part(0..at.len()), dweight, Output::Accumulate);",
     "equivalence/a_covering_set_of_splits"),
    ("gradients: what a product replaces is added to", "state/gradients.rs",
     "                Output::Overwrite\n            }\n            _ =>", "                Output::Accumulate\n            }\n            _ =>",
     "golden/llama_gqa"),
    ("recompute group: only its first layer runs again", DIRECT + "stage.rs",
     "let end = (first + 1..self.parts.len()).find(|&n| self.group_from(n) != Some(false));",
     "let end = Some(first + 1);", "equivalence/a_covering_set_of_splits"),
    ("vocabulary pieces overlap", "ops/embedding.rs", "let first_row = ctx.tp.rank() * rows;",
     "let first_row = ctx.tp.rank() * (rows - 1);", "equivalence/a_covering_set_of_splits"),
    ("other dropout in recomputation", LOWER + "recompute.rs", "        _ => op.clone(),\n",
     "        Op::Dropout { x, to, .. } => Op::Dropout { place: None, x, to },\n        _ => op.clone(),\n", "plan_independence"),
    ("dropout by local row", "ops/context.rs",
     "            let view = GlobalIndices::contiguous((token * width) as u64, at.len());", "            let _ = token;\n"
     "            let view = GlobalIndices::contiguous(at.start as u64, at.len());", "plan_independence"),
    ("the last columns of heads rotated", "ops/attention.rs", "None => (0, Pairing::Half),",
     "None => (head_dim - rotary_dim, Pairing::Half),", "partial_rotary"),
    ("whole heads rotated", LOWER + "sizes.rs", ".or(model.attention.rotary_dim)", ".or(None)", "partial_rotary"),
    ("attention dropout by local head", "ops/attention.rs",
     "head_offset: first_head as u64,", "head_offset: first_head as u64 * 0,", "plan_independence"),
    ("no dropout in the backward pass", LOWER + "half.rs", "        let mut dsum = dy;\n        if self.dropout {",
     "        let mut dsum = dy;\n        if self.dropout && self.number > 9 {", "finite_differences"),
    ("attention's dropout redrawn in the backward pass", "ops/attention.rs",
     "ctx.device.attention_backward(&shape,", "ctx.device.attention_backward(&Shape { dropout: None, ..shape },", "finite_differences"),
    ("swapped order of messages", "step/executor/transfers.rs",
     "self.send_to(to, tag(carried, to_stage, pass.micro_batch), pass, data)",
     "let swapped = match carried {\n            Carried::Stream if self.executor.spec.micro_batches.is_multiple_of(2) => "
     "pass.micro_batch ^ 1,\n            _ => pass.micro_batch,\n        };\n"
     "        self.send_to(to, tag(carried, to_stage, swapped), pass, data)", "golden/llama_gqa_on_two_pipeline_ranks"),
    ("messages of micro-batches confused", "step/executor/transfers.rs", "| u64::from(micro_batch)\n", "| u64::from(micro_batch % 2)\n",
     "plan_independence"),
    ("loss divided per micro-batch", "rank/batches.rs", "1.0 / (valid_tokens.max(1) as f64);",
     "read.len() as f64 / (valid_tokens.max(1) as f64);", "equivalence/a_covering_set_of_splits"),
    ("clip without regard to pipeline ranks", "rank/sums.rs",
     "self.groups.pp.start_all_reduce(sum, Op::Sum)",
     "self.groups.pp.start_all_reduce(sum, Op::Max)", "equivalence/a_covering_set_of_splits"),
    ("clip without regard to tensor-parallel ranks", "rank/sums.rs",
     "        self.groups.tp.all_reduce(&mut dense, Op::Sum)?;\n", "", "equivalence/a_covering_set_of_splits"),
    ("clip without regard to expert-parallel ranks", "rank/sums.rs", "[replicas.sharing(), &**etp, &**ep]", "[replicas.sharing(), &**etp]", "experts"),
    ("gradients of experts summed over dense replicas", "groups.rs", "(Division::Expert, Some(experts)) => &experts.replicas,",
     "(Division::Expert, Some(_)) => &self.dense,", "experts"),
    ("copies go to the wrong experts", "ops/router.rs", "runs.sort_by_key(|(expert, _)| *expert);", "", "experts"),
    ("weights of experts by row in place of by copy", "ops/router.rs", "places.iter().map(|&place| weights[place]).collect()",
     "(0..places.len()).map(|place| weights[place]).collect()", "experts"),
    ("the router's gradient without the divisor", "../../kernels/src/routing/mod.rs",
     "routing.scale * (dw - through_sum) / sum", "routing.scale * (dw - 0.0 * through_sum) / sum", "experts"),
    ("balance loss of a rank's own counts", "ops/router_losses.rs",
     "for group in [ctx.tp, ctx.cp.ring, ctx.cp.ulysses] {", "for group in [ctx.tp] {", "router_losses"),
    ("balance loss of a rank's own micro-batches", "ops/router_losses.rs",
     "        world.all_reduce(&mut counts, Op::Sum)?;\n", "        let _ = world;\n", "router_losses"),
    ("balance loss of one chunk's counts", "ops/router_losses.rs",
     "..(layer, sequence + 1, 0);", "..(layer, sequence, 1);", "router_losses"),
    ("gradient of the z loss halved", "ops/router_losses.rs", "2.0 * z / log.tokens", "z / log.tokens", "router_losses"),
    ("biases moved by the load of one micro-batch", "ops/expert_loads.rs",
     "of_layer.for_each(|counts| add(&mut sums, counts));", "let _ = (&mut sums, of_layer, add);", "bias_updates"),
    ("biases moved by a tensor-parallel rank's own load", "rank/biases.rs",
     "        self.groups.tp.all_reduce(counts, Op::Sum)?;\n", "", "bias_updates"),
    ("biases moved by the load of one copy of a stage", "rank/biases.rs",
     "for_each(|(count, other)| *count += other);", "for_each(|(count, other)| *count += 0 * other);", "bias_updates"),
    ("biases moved towards the load", "ops/expert_loads.rs", "(sum - count * experts).signum()", "(count * experts - sum).signum()", "bias_updates"),
    ("biases of one replica moved", "rank/biases.rs",
     "biases.get_mut(&held.part.index()) {", "biases.get_mut(&held.part.index()).filter(|_| self.groups.dense.all.rank() == 0) {", "bias_updates"),
    ("biases moved before weights that post-validation takes back", "rank/mod.rs",
     "                    self.state.restore_biases();\n", "", "bias_updates"),
    ("capacity of a rank's own rows", "ops/capacity.rs",
     "for group in [ctx.tp, ctx.cp.ring, ctx.cp.ulysses] {", "for group in [ctx.cp.ring] {", "experts"),
    ("gradient through shared experts left out", LOWER + "expert_layer.rs",
     "through_shared.map_or(x, sum)", "through_shared.filter(|_| false).map_or(x, sum)", "experts"),
    ("a chunk's queries at the beginning of the sequence", "ops/tiles.rs",
     "(start - begin..end - begin, document.start..end - begin)", "(0..end - start, document.start..end - begin)", "experts"),
    ("gradients of keys from one chunk", "ops/chunks.rs",
     "            ctx.device.accumulate(k_part.view(), dk.part_mut(k_at));\n",
     "            if chunk.index == 0 {\n                ctx.device.accumulate(k_part.view(), dk.part_mut(k_at));\n            }\n", "experts"),
    ("a chunk's gradient past its block left out", LOWER + "expert_layer.rs",
     "let dx = second.backward_norm(b, &blocks[n].kept, dh, dy);", "let dx = second.backward_norm(b, &blocks[n].kept, dh, dh);", "experts"),
    ("summands of an expert not added up", "ops/router.rs", "            for member in 0..etp.size() {\n                let part =",
     "            for member in 0..1 {\n                let part =", "experts"),
    ("sinks of other heads behind an exchange", "ops/sinks.rs", "let first = ctx.cp.ulysses.rank() * heads;", "let first = 0 * heads;", "experts/sinks_and_biases"),
    ("sinks left out of the log-sum-exp", "ops/sinks.rs", "        (out, new)\n", "        let _ = new;\n        (out, lse)\n", "experts/pytorchs_twenty_steps"),
    ("gradient of sinks by the log-sum-exp of other queries", "ops/sinks.rs",
     "            let at = scaled(&rows, of.heads);\n            let (lse, to)", "            let at = scaled(&rows, of.heads);\n            let of = Sinks { batch: 1, queries: of.batch * of.queries, ..of };\n            let (lse, to)", "experts/pytorchs_twenty_steps"),
    ("an expert's bias added by each of its ranks", "ops/experts.rs", "!sums || inventory.member(Division::Expert).rank == 0", "!sums || inventory.member(Division::Expert).rank < 99", "experts/sinks_and_biases"),
    ("stretched positions without the factor of scores", "../../models/src/model/spec.rs", "self.query_pre_attn_scalar.powf(-0.5) * stretched", "self.query_pre_attn_scalar.powf(-0.5) * stretched.signum()", "experts/pytorchs_twenty_steps"),
    ("activations come back to other layers", "../../codegen/direct/src/stage.rs",
     "kept.iter_mut().for_each(|(_, slot)| reload(slot, ctx.device));", "kept.iter_mut().skip(1).for_each(|(_, slot)| reload(slot, ctx.device));", "bitwise/what_host_memory_holds"),
    ("norms of heads: gradients of tensor-parallel ranks apart", "../../codegen/direct/src/parameters.rs", "let split = sizes.tp > 1;", "let split = sizes.tp > 99;", "experts"),
    ("never clips", "rank/state.rs", "(most / (norm + 1e-6)).min(1.0)", "(most / (norm + 1e-6)).max(1.0)", "golden"),
    ("no bias correction", "rank/state.rs", "step: self.updates,\n", "step: self.updates + 1000,\n", "golden"),
    ("gradients not cleared", "rank/mod.rs",
     "        gradients.clear(&self.device);\n", "", "golden"),
    ("reduce-scatter forgotten with sequence parallelism", "ops/collectives.rs",
     "start_reduce_scatter(part.into_memory(), Op::Sum)", "start_reduce_scatter(part.into_memory(), Op::Max)", "equivalence/a_covering_set_of_splits"),
    ("norm gradients whole with sequence parallelism", "ops/norm.rs",
     "let gradient = if split { Gradient::Partial }", "let gradient = if split { Gradient::Whole }", "equivalence/a_covering_set_of_splits"),
    ("window everywhere", DIRECT + "parameters.rs", ".filter(|_| windowed)", ".filter(|_| windowed || index > 0)", "golden"),
    ("scores divided by the hidden size", DIRECT + "parameters.rs",
     "model.numerics.score_scale()", "(model.hidden as f64).powf(-0.5)", "golden"),
    ("no backward rotation of keys", LOWER + "attention.rs",
     "in [(\"dq\", query), (\"dk\", key_value)].into_iter().enumerate()", "in [(\"dq\", query)].into_iter().enumerate()", "golden"),
    ("gate and up exchanged", "ops/activation.rs", "ctx.device.gated(f, gate.view(), up.view(), y.view_mut());",
     "ctx.device.gated(f, up.view(), gate.view(), y.view_mut());", "golden"),
    ("embedding not scaled", DIRECT + "parameters.rs",
     "let scale = model.numerics.embedding_scale;", "let scale = 1.0;", "golden"),
    ("norm behind the block skipped backward", LOWER + "half.rs",
     "if let (Some(field), Some(statistics)) = (self.post, kept.post) {",
     "if let (Some(field), Some(statistics)) = (self.post.filter(|_| false), kept.post) {", "golden"),
    ("replicas train on the same samples", "rank/batches.rs",
     "let first = self.groups.at.dp as usize * each * count;", "let first = 0;", "equivalence/a_covering_set_of_splits"),
    ("sums from the last rank on", "comm/combine.rs", "for of in &given[1..] {", "for of in given[1..].iter().rev() {", "comm"),
    ("transfers put together from the wrong part", "step/executor/transfers.rs",
     "data.part(rank * count..(rank + 1) * count)",
     "data.part((ways - 1 - rank) * count..(ways - rank) * count)", "equivalence/a_covering_set_of_splits"),
    ("counts of a call are not compared", "comm/call.rs",
     "&& self.dtype == other.dtype && self.count == other.count", "&& self.dtype == other.dtype", "comm"),
    ("recomputed layer reduces what it has", LOWER + "layer.rs",
     "let sums = if b.sizes.tp > 1 {", "let sums = if b.sizes.tp > 99 {", "recompute_traffic"),
    ("transposed tensors read as they are", "state/params.rs",
     "if self.transposed { column * rows + row }", "if false { column * rows + row }", "golden"),
    ("shards of a vocabulary overlap", "ops/vocabulary.rs", "let first_row = self.number * self.rows;",
     "let first_row = self.number * (self.rows - 1);", "schedules"),
    ("padding of shards in sums", "ops/vocabulary.rs", "real_columns: self.rows.min(self.vocab - first_column),",
     "real_columns: self.rows,", "schedules"),
    ("sums around different maxima", "ops/vocabulary.rs",
     "        device.rescale_sum_exp(all::<D>(&self.max), all::<D>(&max), sum_exp);\n",
     "        let _ = (device, sum_exp);\n", "schedules"),
    ("targets of other shards", "rank/batches.rs", "if label == IGNORED { IGNORED } else { i64::MAX }", "label", "schedules"),
    ("algorithm 2 without its factor", "../../kernels/src/cross_entropy/fast.rs", "let by = scale * factor;", "let by = scale; let _ = factor;", "schedules"),
    ("slope of capped targets", "../../kernels/src/cross_entropy/fast.rs", "1.0 - (z.to_f64() / cap).powi(2)", "1.0 - 0.0 * (z.to_f64() / cap)", "schedules/a_covering_set"),
    ("gradient of the input layer lost", "ops/vocabulary.rs",
     "device.embedding_backward(&shape, by_row, dx, dtable);", "let _ = (shape, by_row, dx, dtable);",
     "schedules"),
    ("lookups of the first step", "rank/batches.rs", "stays &= batch.by_token.set(device, by_token);",
     "let _ = by_token;", "golden"),
    ("lookups of the first rank's positions", "rank/batches.rs",
     "let first = if split == 1 { 0 } else { tp_rank * rows };", "let (first, _) = (0, tp_rank);",
     "golden"),
    ("losses told by all ranks", "step/executor/vocabulary.rs",
     "        if counts {\n            shard.add_loss(",
     "        let _ = counts;\n        if true {\n            shard.add_loss(", "schedules"),
    ("shared output layer reads another micro-batch", "step/executor/vocabulary.rs",
     "let h = self.receive_from(from, tag(Carried::Output, 0, pass.micro_batch), pass)?;",
     "let h = self.receive_from(from, tag(Carried::Output, 0, pass.micro_batch & !1), pass)?;", "schedules/a_covering_set"),
    ("every replica updates the first piece", "state/shards.rs", "let first = rank * piece;", "let first = rank * piece * 0;", "equivalence/a_covering_set_of_splits"),
    ("pieces that others updated are not gathered", "state/weights.rs",
     "if !self.shards.gathers_updates() {", "if true || !self.shards.gathers_updates() {",
     "equivalence/a_covering_set_of_splits"),
    ("a micro-batch's shared gradients replace those before", "step/reduce.rs",
     "self.device.add_wide(whole, gradients.sums_mut().range_mut(to));",
     "self.device.copy(whole, gradients.sums_mut().range_mut(to));", "equivalence/a_covering_set_of_splits"),
    ("copies of the state not summed", "step/reduce.rs",
     "        self.sum_across(gradients, Division::Dense)?;\n", "", "equivalence/a_covering_set_of_splits"),
    ("norm counts pieces twice", "rank/sums.rs", "        self.groups.sharing().dense.all_reduce(&mut dense, Op::Sum)?;\n",
     "        self.groups.sharing().dense.all_reduce(&mut dense, Op::Sum)?;\n        self.groups.sharing().dense.all_reduce(&mut dense, Op::Sum)?;\n",
     "equivalence/a_covering_set_of_splits"),
    ("optimizer on the host without weight decay", "rank/host_optimizer.rs", "m, v, decay };", "m, v, decay: 0.0 * decay };", "bitwise"),
    ("keys of the wrong member", "ops/around.rs", "meet(&held, 0..len, self.owner(step))?;",
     "meet(&held, 0..len, self.owner(0 * step))?;", "equivalence/a_covering_set_of_splits"),
    ("gradients of keys lost on the way home", "ops/around.rs",
     "device.add_wide(D::view(&theirs, 0..len), D::view_mut(&mut own, 0..len));", "let _ = (theirs, &mut own);",
     "equivalence/a_covering_set_of_splits"),
    ("mask by local position", "ops/tiles.rs", "q_offset: queries.start,", "q_offset: queries.start.min(4),",
     "equivalence/a_covering_set_of_splits"),
    ("rotation by local position", "rank/batches.rs", "flat_map(|_| held.iter().cloned().flatten())",
     "flat_map(|_| 0..held.iter().map(ExactSizeIterator::len).sum::<usize>())", "equivalence/a_covering_set_of_splits"),
    ("labels of another part of the sequence", "rank/batches.rs", "&sample.labels[held.clone()]",
     "&sample.labels[..held.len()]", "equivalence/a_covering_set_of_splits"),
    ("parts merged as if of equal weight", "../../kernels/src/attention/fast.rs",
     "(T::from_f64((mine - sum).exp()), T::from_f64((other - sum).exp()))", "(T::from_f64(0.5), T::from_f64(0.5 + 0.0 * sum))",
     "equivalence/a_covering_set_of_splits"),
    ("gradients of copied key heads not summed", "ops/around.rs", "            device.accumulate(part(rank), to);\n",
     "            if rank % self.copies() == 0 {\n                device.accumulate(part(rank), to);\n            }\n",
     "equivalence/a_covering_set_of_splits"),
    ("tokens of one sequence go to another", "ops/around.rs",
     "Ok(self.swapped([self.ranks, self.sequences, self.tokens * width], whole))",
     "Ok(self.swapped([1, self.ranks * self.sequences, self.tokens * width], whole))", "equivalence/a_covering_set_of_splits"),
    ("dropout of another part of the sequence", "ops/context.rs",
     "let token = sequence * self.seq_len + held.start + from - row;", "let token = sequence * self.seq_len + from - row;",
     "plan_independence"),
    ("attention across documents", "ops/tiles.rs",
     "batch.documents.get(sequence).map_or(&one[..], Vec::as_slice);\n            for document in documents {\n                for (q_row",
     "batch.documents.get(usize::MAX).map_or(&one[..], Vec::as_slice);\n            for document in documents {\n                for (q_row", "packed"),
    ("positions that go on over documents", "rank/batches.rs", "flat_map(|document| 0..document.len() as u32)",
     "flat_map(|document| document.start as u32..document.end as u32)", "packed"),
    ("a pair's backward reads the forward's micro-batch", "step/executor/mod.rs", "start_backward(&ctx_backward, kept", "start_backward(&ctx, kept", "experts"),
    ("the end of a document predicts the next one", "data/packed.rs", "sample.labels[at] = -1;", "sample.labels[at] = sample.labels[at];", "packed"),
    ("second epoch like the first", "data/indexed.rs", "mix(self.seed) ^ mix(!epoch)", "mix(self.seed) ^ (epoch & 0)", "indexed_data"),
]


def copy_to(folder: pathlib.Path) -> None:
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, files):
        source, target = ROOT / name, folder / name
        if source.is_file() and (not target.exists() or target.read_bytes() != source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def test(folder: pathlib.Path, tests: str):
    """Whether the tests pass, and their first error message."""
    binary, _, names = tests.partition("/")
    command = ["cargo", "test", "--quiet", "--offline", "-p", "meshwright-runtime", "--test", binary, names]
    # A build after an interrupted one does not always link.
    environment = {**os.environ, "CARGO_INCREMENTAL": "0"}
    try:
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return False, "ran too long"
    said = ran.stdout + ran.stderr
    if re.search(r"^error(\[E\d+\])?: ", said, re.M) and "test result: FAILED" not in said:
        return None, re.search(r"^error.*", said, re.M).group(0)
    failed = re.findall(r"^test (\S+) \.\.\. FAILED|^    (\S+)$", said, re.M)
    return ran.returncode == 0, next((a or b for a, b in failed), "failed")


def report(rows) -> str:
    caught = sum(verdict == "caught" for _, verdict, _, _ in rows)
    lines = ["# Mutations", "", "Written by `make mutations`, which plants one deliberate bug at a time and runs the tests that",
             "should catch it.", "",
             f"**{caught} of {len(rows)}** caught.", "", "| bug | verdict | tests | first to fail |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {verdict} | {tests} | `{said}` |" for name, verdict, tests, said in rows]) + "\n"


def listed(mutations) -> int:
    """Lists the bugs; returns 1 if the text of one does not occur exactly once."""
    lost = 0
    for name, file, old, _, _ in mutations:
        count = (ROOT / "runtime/src" / file).read_text().count(old)
        lost += count != 1
        print(name if count == 1 else f"BROKEN  {name}: {file} has the text {count} times")
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-k", action="append", default=[], help="only bugs with this word in their name")
    parser.add_argument("--list", action="store_true", help="only names them, and checks that each could be planted")
    parser.add_argument("--markdown", type=pathlib.Path, help="where to write the table of verdicts")
    chosen = parser.parse_args()
    mutations = [m for m in MUTATIONS if not chosen.k or any(word in m[0] for word in chosen.k)]
    if chosen.list:
        return listed(mutations)
    folder = pathlib.Path(os.environ.get("MUTATIONS_DIR") or tempfile.mkdtemp(prefix="mutations-"))
    copy_to(folder)
    missed, rows = 0, []
    for name, file, old, new, tests in mutations:
        path = folder / "runtime/src" / file
        text = path.read_text()
        if text.count(old) != 1:
            print(f"BROKEN  {name}: {file} has the text {text.count(old)} times", flush=True)
            missed += 1
            rows.append((name, "BROKEN", tests, "its text is not in the source once"))
            continue
        path.write_text(text.replace(old, new))
        passed, said = test(folder, tests)
        path.write_text(text)
        verdict = {False: "caught", True: "MISSED", None: "BROKEN"}[passed]
        missed += passed is not False
        print(f"{verdict}  {name}: {tests}{'' if passed else ', ' + said}", flush=True)
        rows.append((name, verdict, tests, said))
    print(f"{len(mutations) - missed} of {len(mutations)} caught")
    if chosen.markdown:
        chosen.markdown.write_text(report(rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
