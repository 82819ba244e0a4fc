//! The plans that are run.

/// Golden case, number of GPUs, and pinned settings.
pub const PLANS: [(&str, u64, &str); 43] = [
    (
        "llama_gqa",
        8,
        "tp=2 pp=2 dp=2 zero_stage=0 schedule=1f1b micro_batch=1 sequence_parallel=false",
    ),
    (
        "llama_gqa",
        8,
        "tp=2 pp=2 dp=2 zero_stage=0 schedule=1f1b micro_batch=1 sequence_parallel=true",
    ),
    (
        "gpt2",
        4,
        "tp=2 pp=2 vpp=2 schedule=interleaved_1f1b micro_batch=1 sequence_parallel=false \
         recompute=full",
    ),
    ("qwen2", 8, "tp=4 pp=1 dp=2 zero_stage=0 micro_batch=2 sequence_parallel=false"),
    (
        "gemma2",
        4,
        "tp=2 pp=2 dp=1 schedule=gpipe micro_batch=2 sequence_parallel=true \
         recompute=selective",
    ),
    ("llama_tied", 4, "tp=1 pp=2 vpp=2 dp=2 zero_stage=0 schedule=looped_bfs micro_batch=1"),
    ("llama_tied", 4, "tp=2 pp=2 dp=1 schedule=naive micro_batch=8 sequence_parallel=false"),
    (
        "llama_tied",
        8,
        "tp=2 pp=2 dp=2 zero_stage=0 schedule=1f1b vocab=parallel_1 micro_batch=1 \
         sequence_parallel=false",
    ),
    (
        "llama_gqa",
        8,
        "tp=2 pp=4 dp=1 schedule=1f1b vocab=parallel_2 micro_batch=1 sequence_parallel=true",
    ),
    ("gpt2", 2, "tp=1 pp=2 schedule=1f1b vocab=parallel_naive micro_batch=2"),
    ("llama_gqa", 2, "tp=1 pp=2 vpp=2 schedule=v_half vocab=parallel_1 micro_batch=1"),
    ("llama_tied", 4, "tp=1 pp=4 schedule=1f1b vocab=interlaced micro_batch=1"),
    ("llama_gqa", 4, "tp=1 pp=4 schedule=zb_h1 vocab=tensor micro_batch=1"),
    ("gpt2", 2, "tp=1 pp=2 vpp=2 schedule=dualpipe_v vocab=tensor micro_batch=1"),
    ("llama_gqa", 4, "tp=1 pp=4 schedule=dualpipe micro_batch=1"),
    (
        "llama_gqa",
        8,
        "tp=2 pp=2 dp=2 zero_stage=0 schedule=chimera micro_batch=1 sequence_parallel=false \
         recompute=selective",
    ),
    ("llama_gqa", 4, "tp=2 pp=2 schedule=dualpipe micro_batch=1 sequence_parallel=true"),
    (
        "llama_gqa",
        8,
        "tp=2 pp=2 dp=2 zero_stage=1 schedule=1f1b micro_batch=1 sequence_parallel=true",
    ),
    ("gpt2", 4, "pp=1 tp=1 dp=4 zero_stage=2 micro_batch=1"),
    ("qwen2", 4, "tp=1 pp=2 dp=2 zero_stage=3 schedule=zb_h1 micro_batch=1"),
    ("llama_gqa", 4, "tp=1 pp=1 cp=2 cp_style=zigzag dp=2 zero_stage=3 dp_shard=4 micro_batch=2"),
    ("gemma2", 4, "tp=1 pp=1 cp=4 cp_style=hybrid cp_ulysses=2 zero_stage=0"),
    (
        "llama_gqa",
        8,
        "tp=2 pp=2 cp=2 cp_style=ring zero_stage=0 schedule=1f1b micro_batch=1 \
         sequence_parallel=true",
    ),
    ("llama_gqa", 2, "cp=2 cp_style=all_gather zero_stage=0 micro_batch=2"),
    (
        "llama_tied",
        4,
        "tp=2 pp=2 schedule=1f1b micro_batch=2 sequence_parallel=true fused_loss=true",
    ),
    (
        "qwen2",
        4,
        "tp=2 pp=2 schedule=1f1b micro_batch=1 sequence_parallel=true recompute=full \
         recompute_group=2",
    ),
    ("latent", 8, "tp=2 pp=2 dp=2 zero_stage=0 schedule=1f1b micro_batch=1 sequence_parallel=true"),
    (
        "latent",
        4,
        "tp=2 pp=1 cp=2 cp_style=zigzag zero_stage=0 micro_batch=2 sequence_parallel=false \
         recompute=selective",
    ),
    ("latent", 4, "tp=1 pp=1 cp=4 cp_style=hybrid cp_ulysses=2 zero_stage=0 micro_batch=2"),
    ("llama_gqa", 4, "tp=1 pp=1 dp=4 zero_stage=1 dp_shard=2 micro_batch=1"),
    ("llama_tied", 4, "tp=1 pp=1 dp=4 zero_stage=2 dp_shard=2 micro_batch=2"),
    ("gpt2", 4, "tp=1 pp=1 dp=4 zero_stage=3 micro_batch=1"),
    ("llama_gqa", 4, "tp=1 pp=1 dp=4 zero_stage=3 recompute=full recompute_group=2 micro_batch=1"),
    ("qwen2", 8, "tp=1 pp=2 dp=4 zero_stage=3 dp_shard=2 schedule=1f1b micro_batch=1"),
    ("llama_gqa", 4, "tp=1 pp=2 dp=2 zero_stage=0 schedule=1f1b micro_batch=1 dp_reduction=naive"),
    ("qwen2", 4, "tp=1 pp=2 dp=2 zero_stage=0 schedule=1f1b micro_batch=1 dp_reduction=overlapped"),
    ("gemma2", 2, "tp=1 pp=1 dp=2 zero_stage=1 micro_batch=2 dp_reduction=overlapped"),
    ("llama_gqa", 2, "tp=1 pp=1 dp=2 zero_stage=2 micro_batch=2 dp_reduction=naive"),
    ("llama_gqa", 4, "tp=1 pp=2 dp=2 zero_stage=1 schedule=dualpipe micro_batch=1"),
    ("llama_tied", 4, "tp=1 pp=2 dp=2 zero_stage=2 schedule=chimera micro_batch=1"),
    ("qwen2", 4, "tp=2 pp=1 dp=2 zero_stage=2 micro_batch=1 sequence_parallel=true"),
    ("llama_gqa", 4, "tp=2 pp=1 dp=2 zero_stage=3 micro_batch=2 sequence_parallel=true"),
    ("llama_tied", 2, "tp=1 pp=1 dp=2 zero_stage=3 micro_batch=2"),
];
