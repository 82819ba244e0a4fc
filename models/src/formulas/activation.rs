//! Bytes of activations kept for the backward pass (Korthikanti §4, §5), and the same count for
//! today's blocks.

/// One GPT layer on one tensor parallel rank (Korthikanti §4): 16-bit activations, dropout,
/// feed-forward width `4h`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Sequence length `s`, tokens.
    pub sequence: f64,
    /// Micro-batch `b`, sequences.
    pub micro_batch: f64,
    /// Hidden size `h`.
    pub hidden: f64,
    /// Attention heads `a`.
    pub heads: f64,
    /// Tensor parallel degree `t`.
    pub tensor: f64,
}

/// What is recomputed in the backward pass (Korthikanti §5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// The attention core: scores, softmax, dropout, and their product with the values.
    Selective,
    /// The whole layer, from its input.
    Full,
}

/// Where the 34 bytes a token and hidden unit of a layer lie (Korthikanti §4.1), in units of `sbh`.
pub mod breakdown {
    /// Attention outside its core: input of QKV 2, Q and K 4, V 2, input of the projection 2,
    /// dropout mask 1.
    pub const ATTENTION: f64 = 11.0;
    /// Feed-forward: input 2, input of GeLU 8, input of the second linear 8, dropout mask 1.
    pub const MLP: f64 = 19.0;
    /// Inputs of the two LayerNorms.
    pub const NORMS: f64 = 4.0;
    /// Of the three above, what tensor parallelism divides: 8 in attention, 16 in the MLP.
    pub const TENSOR_SHARDED: f64 = 24.0;
    /// The rest: two linear inputs, two dropout masks, two LayerNorms.
    pub const TENSOR_REPLICATED: f64 = ATTENTION + MLP + NORMS - TENSOR_SHARDED;
    /// Bytes a score of the attention core: softmax output 2, dropout mask 1, dropout output 2.
    pub const CORE: f64 = 5.0;
}

/// Elements of one micro-batch's hidden states, `sbh`.
fn elements(layer: &Layer) -> f64 {
    layer.sequence * layer.micro_batch * layer.hidden
}

/// Bytes of the attention core, `5as²b`, before tensor parallelism (Korthikanti §4.1).
pub fn core_bytes(layer: &Layer) -> f64 {
    breakdown::CORE * layer.heads * layer.sequence * layer.sequence * layer.micro_batch
}

/// [`core_bytes`] in units of `sbh`: `5as/h` (Korthikanti eq. 1).
pub fn core_units(layer: &Layer) -> f64 {
    core_bytes(layer) / elements(layer)
}

/// Bytes one layer keeps of one micro-batch on one rank (Korthikanti Table 2).
///
/// | recompute | tensor parallel | with sequence parallelism |
/// |---|---|---|
/// | none | `sbh(10 + 24/t + 5as/(ht))` | `sbh(34 + 5as/h)/t` |
/// | selective | `sbh(10 + 24/t)` | `34sbh/t` |
/// | full | `2sbh` | `2sbh/t`, the input being stored sharded |
pub fn layer_bytes(layer: &Layer, sequence_parallel: bool, recompute: Recompute) -> f64 {
    let t = layer.tensor;
    let replicas = if sequence_parallel { t } else { 1.0 };
    let linear = breakdown::TENSOR_REPLICATED / replicas + breakdown::TENSOR_SHARDED / t;
    match recompute {
        Recompute::None => linear * elements(layer) + core_bytes(layer) / t,
        Recompute::Selective => linear * elements(layer),
        Recompute::Full => 2.0 * elements(layer) / replicas,
    }
}

/// Factor by which interleaving raises the first stage's activations, `1 + (p − 1)/(p·v)`
/// (Korthikanti §4.2.3); 1 without interleaving (`v = 1`).
pub fn interleaved_factor(stages: f64, chunks: f64) -> f64 {
    if chunks > 1.0 { 1.0 + (stages - 1.0) / (stages * chunks) } else { 1.0 }
}

/// Bytes of layer activations on the first stage of 1F1B: its `L/p` layers hold `p` micro-batches,
/// so those of `L` layers, whatever `p` (Korthikanti §4.2.3).
pub fn first_stage_bytes(layer_bytes: f64, layers: f64, stages: f64, chunks: f64) -> f64 {
    layer_bytes * layers * interleaved_factor(stages, chunks)
}

/// Bytes of the embedding's dropout masks on the first stage, `sbhp/t` (Korthikanti §4.3, with
/// sequence parallelism).
pub fn embedding_bytes(layer: &Layer, stages: f64) -> f64 {
    elements(layer) * stages / layer.tensor
}

/// Bytes of the last norm, the head's input and the fp32 logits, `4sbh(1 + V/h)/t` (Korthikanti
/// §4.3, with sequence parallelism). They lie on the last stage.
pub fn head_bytes(layer: &Layer, vocab: f64) -> f64 {
    4.0 * elements(layer) * (1.0 + vocab / layer.hidden) / layer.tensor
}

/// Widths of a block with RMSNorm, grouped-query attention, a gated MLP and fused attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// Hidden size `h`.
    pub hidden: f64,
    /// Query width, heads times head size.
    pub query_width: f64,
    /// Key width, key/value heads times head size.
    pub kv_width: f64,
    /// Query heads `a`.
    pub heads: f64,
    /// Feed-forward width `f`.
    pub ffn: f64,
}

/// Bytes a token keeps in one [`Block`], 16-bit and no dropout, before any sharding. Derived from
/// what each operator's backward pass reads; rotary positions are linear and the output projection
/// reads what attention saved, so neither adds anything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockBytes {
    /// Inputs of the two norms, `4h`.
    pub norm_inputs: f64,
    /// Inputs of QKV and of gate and up (the norms' outputs), `4h`.
    pub linear_inputs: f64,
    /// Q, K, V, `2(q + 2k)`.
    pub qkv: f64,
    /// Attention's output, `2q`, and its fp32 log-sum-exp, `4a`.
    pub attention: f64,
    /// Gate and up, `4f`.
    pub gate_and_up: f64,
    /// Their product, `2f`: 0 if recomputed.
    pub product: f64,
}

/// The parts of [`BlockBytes`] with nothing recomputed.
pub fn block_bytes(block: &Block) -> BlockBytes {
    BlockBytes {
        norm_inputs: 4.0 * block.hidden,
        linear_inputs: 4.0 * block.hidden,
        qkv: 2.0 * (block.query_width + 2.0 * block.kv_width),
        attention: 2.0 * block.query_width + 4.0 * block.heads,
        gate_and_up: 4.0 * block.ffn,
        product: 2.0 * block.ffn,
    }
}

impl BlockBytes {
    /// Bytes a token on one rank, with `tensor` ranks: norms and linear inputs are whole on each
    /// unless sequence parallelism shards them too.
    pub fn rank_bytes(&self, tensor: f64, sequence_parallel: bool) -> f64 {
        let replicated = self.norm_inputs + self.linear_inputs;
        let sharded = self.qkv + self.attention + self.gate_and_up + self.product;
        replicated / if sequence_parallel { tensor } else { 1.0 } + sharded / tensor
    }

    /// Bytes a token, unsharded: `8h + 4q + 4k + 4a + 6f`.
    pub fn total(&self) -> f64 {
        self.rank_bytes(1.0, false)
    }

    /// With the gated product recomputed in the backward pass: `2f` less.
    pub fn product_recomputed(self) -> Self {
        Self { product: 0.0, ..self }
    }

    /// With the norms' outputs recomputed from their inputs: `4h` less.
    pub fn norms_recomputed(self) -> Self {
        Self { linear_inputs: 0.0, ..self }
    }

    /// With the residual stream in fp32: the two norm inputs double.
    pub fn fp32_residual(self) -> Self {
        Self { norm_inputs: 2.0 * self.norm_inputs, ..self }
    }
}

/// Bytes a token keeps in the experts of a mixture-of-experts layer, in place of a block's gate, up
/// and product: router logits and probabilities `8E` (fp32), and for each of `copies` of the token
/// its permuted input `2h`, gate and up `4f_e`, product `2f_e`, expert output `2h`.
///
/// `copies` is top-k where nothing is dropped and routing is even, top-k times the capacity factor
/// where experts are padded; uneven routing multiplies it.
pub fn moe_bytes(hidden: f64, experts: f64, expert_ffn: f64, copies: f64) -> f64 {
    8.0 * experts + copies * (4.0 * hidden + 6.0 * expert_ffn)
}

/// Bytes a token keeps in the output layer: its 16-bit input `2h`, and logits and softmax of
/// `logit_bytes` and `softmax_bytes` an entry (2 or 4; 0 if fused away), divided over
/// `vocab_shards` ranks (tensor parallelism, or all pipeline devices: Vocabulary Parallelism §3).
pub fn output_bytes(
    hidden: f64,
    vocab: f64,
    logit_bytes: f64,
    softmax_bytes: f64,
    vocab_shards: f64,
) -> f64 {
    2.0 * hidden + (logit_bytes + softmax_bytes) * vocab / vocab_shards
}
