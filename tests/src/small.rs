//! Random small models and clusters on which every decision matters, with restrictions that keep
//! the space small enough for brute force.

use crate::random::Random;
use models::cluster::ClusterSpec;
use models::input::Source;
use models::model::ModelSpec;
use planner::request::restrictions::Restrictions;
use std::fmt::Write;

/// A model, a cluster and restrictions.
#[derive(Clone, Debug)]
pub struct Instance {
    /// The model.
    pub model: ModelSpec,
    /// The cluster.
    pub cluster: ClusterSpec,
    /// Number of GPUs.
    pub gpus: u64,
    /// Restrictions, as a user would write them.
    pub settings: Vec<String>,
}

impl Instance {
    /// A random instance.
    pub fn random(random: &mut Random) -> Self {
        let model = model(random);
        let gpus = random.pick(&[1, 2, 2, 3, 4, 4, 4, 6, 8]);
        let cluster = cluster(random, &model);
        let settings = settings(random);
        Self { model, cluster, gpus, settings }
    }

    /// The parsed restrictions.
    pub fn restrictions(&self) -> Restrictions {
        Restrictions::parse(&self.settings).expect("the settings are valid")
    }
}

/// A model of this description.
///
/// # Panics
/// The description is not valid.
pub fn read_model(text: &str) -> ModelSpec {
    let source = Source::from_bytes("small.yaml", text.as_bytes().to_vec()).expect("not empty");
    models::model::read(&source).unwrap_or_else(|error| panic!("{error}"))
}

fn read_cluster(text: &str) -> ClusterSpec {
    let source = Source::from_bytes("small.yaml", text.as_bytes().to_vec()).expect("not empty");
    models::cluster::read(&source).unwrap_or_else(|error| panic!("{error}"))
}

/// A model of two to six layers, one in four of up to twelve. One in six is a mixture of experts;
/// some have windows or tied embeddings.
pub fn model(random: &mut Random) -> ModelSpec {
    let layers = if random.percent(25) { random.whole(7, 12) } else { random.whole(2, 6) };
    model_of(random, layers)
}

/// As [`model`], with a given number of layers.
pub fn model_of(random: &mut Random, layers: usize) -> ModelSpec {
    let hidden = random.pick(&[64, 128, 256]);
    let mut text = format!(
        "name: small\nlayers: {layers}\nhidden: {hidden}\nheads: {}\nkv_heads: 2\nffn: {}\nvocab: {}\n\
         seq_len: {}\nmax_positions: 1024\nglobal_batch: {}\ntied_embeddings: {}\ndropout: {}\n",
        random.pick(&[4, 8]),
        hidden * random.pick(&[3, 4]),
        random.pick(&[500, 2000, 8000]),
        random.pick(&[64, 96, 128, 256]),
        random.pick(&[2, 4, 6, 8]),
        random.percent(50),
        random.pick(&["0", "0.1"]),
    );
    if random.percent(15) {
        text += "window: {tokens: 32, full_every: 2}\n";
    }
    if random.percent(20) {
        let first = random.whole(0, 1);
        let imbalance = if layers.is_multiple_of(2) { 1.5 } else { 1.0 };
        writeln!(
            text,
            "moe: {{experts: 4, top_k: 2, ffn: {hidden}, first_dense: {first}, \
             imbalance: {imbalance}}}"
        )
        .expect("text can grow");
    }
    read_model(&text)
}

/// A model with one kind of layer.
pub fn plain_model(layers: usize, batch: u64, experts: Option<u64>) -> ModelSpec {
    let moe = experts.map_or(String::new(), |experts| {
        format!("moe: {{experts: {experts}, top_k: 1, ffn: 48, shared_ffn: 24}}\n")
    });
    read_model(&format!(
        "name: plain\nlayers: {layers}\nhidden: 96\nheads: 12\nkv_heads: 6\nffn: 144\nvocab: 500\n\
         seq_len: 48\nmax_positions: 48\nglobal_batch: {batch}\n{moe}"
    ))
}

/// A cluster whose memory is close to what the model needs.
pub fn cluster(random: &mut Random, model: &ModelSpec) -> ClusterSpec {
    let needed = needed_bytes(model);
    cluster_of(&Sizes {
        hbm_bytes: needed * random.scaled(0.2, 6.0),
        host_bytes: needed * 10.0,
        inner_gpus: random.pick(&[2, 4]),
        inner_bytes_per_s: random.scaled(1e9, 1e11),
        outer_bytes_per_s: random.scaled(1e8, 1e10),
        base: random.pick(&[
            "megatron_2021",
            "megatron_2023",
            "megatron_2024",
            "torchtitan_2024",
            "internevo_2024",
        ]),
    })
}

/// State and activations of the whole model, bytes, roughly.
fn needed_bytes(model: &ModelSpec) -> f64 {
    let parameters = models::model::params::total(model) as f64;
    let tokens = (model.seq_len * model.global_batch) as f64;
    18.0 * parameters + 34.0 * tokens * model.hidden as f64 * model.layers as f64
}

/// The parameters in which small clusters differ.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Memory of a device, bytes.
    pub hbm_bytes: f64,
    /// Host memory for each device, bytes.
    pub host_bytes: f64,
    /// GPUs in the inner domain.
    pub inner_gpus: u64,
    /// Bandwidth inside the inner domain, bytes/s.
    pub inner_bytes_per_s: f64,
    /// Bandwidth outside, bytes/s.
    pub outer_bytes_per_s: f64,
    /// Cluster that gives the software constants.
    pub base: &'static str,
}

/// The cluster with these parameters. Devices are slow, so that small models keep them busy.
pub fn cluster_of(s: &Sizes) -> ClusterSpec {
    read_cluster(&format!(
        "name: small\n\
         device: {{name: small, peak_flops: {{bf16: 2e12}}, hbm_bytes: {:.1}, hbm_bytes_per_s: 1e11, \
         sms: 16, kernel_launch_s: 1e-7, reserved_bytes: 0}}\n\
         levels:\n  \
         - {{name: inner, gpus: {}, bytes_per_s: {:.1}, latency_s: 1e-7, efficiency: 0.8, in_network: false}}\n  \
         - {{name: outer, bytes_per_s: {:.1}, latency_s: 1e-6, efficiency: 0.9, in_network: false}}\n\
         host: {{memory_bytes: {:.1}, memory_bytes_per_s: 2e10, link_bytes_per_s: 1e10}}\n\
         storage_bytes_per_s: 1e9\nfailures_per_node_day: 0\nefficiency: none\n\
         software: {{base: {}, host_s_per_layer: 1e-7, routing_s: 1e-7, pass_gap_s: 1e-7, step_overhead_s: 1e-6, buffer_bytes: 0}}\n",
        s.hbm_bytes, s.inner_gpus, s.inner_bytes_per_s, s.outer_bytes_per_s, s.host_bytes, s.base
    ))
}

/// Decisions to restrict at random, each with values to choose from.
const NARROWED: [(&str, &[&str]); 12] = [
    ("tp", &["1", "2", "1,2", "4"]),
    ("pp", &["1", "2", "3", "4", "2,4", "2,3,4"]),
    ("cp", &["1", "1", "2"]),
    ("micro_batch", &["1", "1", "2"]),
    ("zero_stage", &["0", "1", "2", "3", "0,1", "2,3"]),
    ("sequence_parallel", &["true", "false"]),
    (
        "schedule",
        &[
            "1f1b",
            "gpipe",
            "interleaved_1f1b",
            "looped_bfs",
            "1f1b,gpipe",
            "zb_h1",
            "zb_h2",
            "zb_h1,1f1b",
            "interleaved_zb",
            "zb_v",
            "v_half",
            "v_min,v_1f1b",
            "dualpipe_v",
        ],
    ),
    ("recompute", &["none", "selective", "full", "per_layer", "none,full"]),
    (
        "vocab",
        &["first_last", "redistribute", "tensor", "parallel_1,tensor", "parallel_2", "interlaced"],
    ),
    ("offload", &["none", "none", "optimizer", "activations"]),
    ("rank_order", &["tp-cp-dp-pp", "tp-cp-pp-dp"]),
    ("cp_style", &["zigzag", "all_gather", "ring,ulysses"]),
];

/// Restricts each decision with a probability that is itself random.
fn settings(random: &mut Random) -> Vec<String> {
    let share = random.pick(&[10, 30, 50, 70]);
    let mut settings = vec![];
    for (name, values) in NARROWED {
        if random.percent(share) {
            settings.push(format!("{name}={}", random.pick(values)));
        }
    }
    settings
}
