//! Round trip of the GPU calibration: a GPU whose times follow formulas is measured, and its
//! cluster file is written and read. At every measured point the cost model then gives the measured
//! time.

use measure::{Bench, BenchPart, LayerSize, Sweep, measure};
use models::cluster::{
    self, ClusterSpec, CollectiveKind, Core, Dtype, MeasuredGpu, Moved, Product, Step,
};
use models::input::Source;
use models::mesh::GroupShape;
use planner::cost::attention::{self, AttentionShape};
use planner::cost::collective::{Collective, time_s};
use planner::cost::{gemm, memory_bound};
use runtime::Error;
use runtime::kernels::attention::Attention;
use validation::calibrate::{gpu, priced_s};

/// Times of no real device; they rise with every size, as curves of tables must.
struct Formulas;

const SUSTAINED: f64 = 1.07;
const COPY_BYTES_PER_S: f64 = 4.1e12;

fn flops(sizes: &[usize]) -> f64 {
    sizes.iter().map(|&size| size as f64).product()
}

impl Bench for Formulas {
    fn launch_s(&mut self) -> Result<f64, Error> {
        Ok(2.5e-6)
    }

    fn copy_s(&mut self, bytes: usize) -> Result<f64, Error> {
        Ok(4e-6 + bytes as f64 / COPY_BYTES_PER_S)
    }

    fn elementwise(&mut self, layer: LayerSize) -> Result<Vec<Moved>, Error> {
        let bytes = (layer.tokens * layer.hidden * 10) as f64;
        Ok(vec![Moved { bytes, s: 1.25 * (4e-6 + bytes / COPY_BYTES_PER_S) }])
    }

    fn adamw_s(&mut self, parameters: usize) -> Result<f64, Error> {
        Ok(parameters as f64 * 36.0 / COPY_BYTES_PER_S)
    }

    fn product_s(&mut self, dtype: Dtype, size: [usize; 3]) -> Result<f64, Error> {
        let flops_per_s = if dtype == Dtype::F32 { 5.3e13 } else { 7.1e14 };
        Ok(5e-6 + 2.0 * flops(&size) / flops_per_s)
    }

    fn sustained_s(&mut self, size: [usize; 3]) -> Result<f64, Error> {
        Ok(SUSTAINED * self.product_s(Dtype::Bf16, size)?)
    }

    fn attention_s(&mut self, a: &Attention) -> Result<[f64; 2], Error> {
        let pairs = flops(&[a.batch, a.q_heads, a.q_len, a.q_len, a.qk_dim]);
        Ok([1e-5 + 2.0 * pairs / 5.4e14, 2e-5 + 5.0 * pairs / 4.1e14])
    }

    fn collective_s(
        &mut self,
        kind: CollectiveKind,
        ranks: usize,
        bytes: usize,
    ) -> Result<Option<f64>, Error> {
        let s = 1e-5 * ranks as f64 + bytes as f64 / 3.3e11;
        Ok((kind != CollectiveKind::AllToAll).then_some(s))
    }

    fn step_s(&mut self, model: &str, _global_batch: u64) -> Result<f64, Error> {
        Ok(if model.starts_with("name: tiny") { 3e-3 } else { 0.2 })
    }
}

fn base() -> ClusterSpec {
    cluster::shipped("dgx_h200").expect("it is shipped").expect("it reads")
}

/// All measurements, or all but collectives.
fn measured(ranks: usize) -> MeasuredGpu {
    let mut found =
        MeasuredGpu { gpu: "formulas".to_owned(), multiprocessors: 132, ..MeasuredGpu::default() };
    let parts = [
        BenchPart::Memory,
        BenchPart::Products,
        BenchPart::Attention,
        BenchPart::Collectives,
        BenchPart::Steps,
    ];
    for part in parts {
        measure(&mut Formulas, &Sweep::full(ranks), part, &mut found, &mut |_| Ok(()))
            .expect("formulas do not fail");
    }
    // Through the JSON file that the measuring program writes.
    serde_json::from_str(&serde_json::to_string(&found).expect("JSON")).expect("the same")
}

/// The cluster after writing and reading.
fn read_back(measured: &MeasuredGpu) -> ClusterSpec {
    read_back_of(&base(), measured)
}

fn read_back_of(base: &ClusterSpec, measured: &MeasuredGpu) -> ClusterSpec {
    let calibrated = gpu::calibrated(base, measured).unwrap_or_else(|error| panic!("{error}"));
    let text = gpu::yaml(&calibrated, measured);
    let source = Source::from_bytes("found.yaml", text.clone().into_bytes()).expect("it is text");
    cluster::read(&source).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn near(what: &str, found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-4, "{what}: {found} is not {expected}");
}

#[test]
fn a_measured_point_is_priced_as_measured() {
    let measured = measured(8);
    let cluster = read_back(&measured);
    let mut formats = std::collections::BTreeMap::new();
    // The largest product is the one that was repeated, so slower ones need no slowdown.
    let rate = |product: &Product| {
        let flops = 2.0 * (product.m * product.n * product.k) as f64;
        flops / (product.s * cluster.device.peak_flops(product.dtype))
    };
    let wide = measured.products.iter().filter(|product| product.dtype == Dtype::Bf16);
    let repeated = wide.max_by_key(|product| product.m * product.n * product.k).expect("some");
    for product in &measured.products {
        let &Product { dtype, m, n, k, s } = product;
        let throttled = (rate(product) / rate(repeated)).cbrt() * SUSTAINED;
        *formats.entry(dtype).or_insert(0) += 1;
        let found = gemm::gemm_s(&cluster, dtype, m, n, k);
        near(&format!("product {m} x {n} x {k} in {dtype:?}"), found, throttled.max(1.0) * s);
    }
    assert_eq!(formats, [(Dtype::Bf16, 1331), (Dtype::F32, 125)].into());
    assert_eq!(measured.attention.len(), 36);
    for core in &measured.attention {
        let &Core { batch, seq_len, heads, kv_heads, head_dim, forward_s, backward_s } = core;
        let shape = AttentionShape {
            batch,
            heads,
            kv_heads,
            query_len: seq_len,
            key_len: seq_len,
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
            causal: true,
            last_queries: false,
            window: None,
            sinks: false,
        };
        let what = format!("attention of {heads} heads of {head_dim} over {seq_len}");
        near(&what, attention::forward_s(&cluster, &shape, Dtype::Bf16), forward_s);
        near(&what, attention::backward_s(&cluster, &shape, Dtype::Bf16), backward_s);
    }
    for copy in &measured.copies {
        near("copy", memory_bound::streaming_s(&cluster, copy.bytes), copy.s);
    }
    let moved = measured.elementwise[0];
    near("elementwise", memory_bound::elementwise_s(&cluster, moved.bytes), moved.s);
    let adamw = measured.adamw.expect("it was measured");
    near("AdamW", memory_bound::optimizer_s(&cluster, adamw.parameters), adamw.s);
    near("launch", cluster.device.kernel_launch_s, 2.5e-6);
    assert_eq!(measured.collectives.len(), 3 * 3 * 8);
    for of in &measured.collectives {
        let kind = match of.kind {
            CollectiveKind::AllReduce => Collective::AllReduce,
            CollectiveKind::AllGather => Collective::AllGather,
            CollectiveKind::ReduceScatter => Collective::ReduceScatter,
            CollectiveKind::AllToAll => panic!("there is none"),
        };
        let group = GroupShape { within: vec![of.ranks] };
        near(of.kind.name(), time_s(&cluster, kind, of.bytes, &group), of.s);
    }
}

#[test]
fn the_shortest_step_gives_what_a_step_costs_and_the_others_are_predicted() {
    let measured = measured(1);
    let cluster = read_back(&measured);
    let tiny: &Step = &measured.steps[0];
    near("tiny", priced_s(&cluster, tiny).expect("it can be priced"), tiny.s);
    let steps = gpu::predictions(&cluster, &measured).expect("they can be priced");
    let names: Vec<&str> = steps.iter().map(|step| step.model.as_str()).collect();
    assert_eq!(names, ["GPT-2 124M", "GPT-2 1.5B", "Llama 3 8B, 4 layers"]);
    let tokens: Vec<u64> = steps.iter().map(|step| step.tokens).collect();
    assert_eq!(tokens, [16_384, 8192, 8192]);
    for step in &steps {
        // At the peak of 989 TFLOP/s the step takes more than 10 ms, and well below a second.
        assert!((0.01..1.0).contains(&step.predicted_s), "{step:?}");
    }
}

#[test]
fn links_that_were_not_measured_stay() {
    let cluster = read_back(&measured(1));
    let group = GroupShape { within: vec![8] };
    for bytes in [1e4, 1e6, 3e8] {
        for kind in [Collective::AllReduce, Collective::AllGather, Collective::AllToAll] {
            let [found, expected] =
                [&cluster, &base()].map(|cluster| time_s(cluster, kind, bytes, &group));
            near("a link", found, expected);
        }
    }
    let mut shared = base();
    shared.levels.last_mut().expect("a network").gpus_an_adapter = 4;
    let found = read_back_of(&shared, &measured(1)).levels;
    assert_eq!(found.last(), shared.levels.last());
}

#[test]
fn what_cannot_be_is_refused() {
    let good = measured(1);
    let refused = |bad: MeasuredGpu| match gpu::calibrated(&base(), &bad) {
        Ok(_) => panic!("it was taken"),
        Err(error) => error.to_string(),
    };
    let mut bad = good.clone();
    bad.products.remove(700);
    assert!(refused(bad).contains("was not measured"));
    let mut bad = good.clone();
    bad.products[3].s /= 100.0;
    let message = refused(bad);
    assert!(message.contains("of what this cluster's device can"), "{message}");
    let mut bad = good;
    bad.attention.remove(5);
    let calibrated = gpu::calibrated(&base(), &bad).expect("the nearest number of heads serves");
    let text = gpu::yaml(&calibrated, &bad).replace("  stream,", "  stream;");
    let source = Source::from_bytes("found.yaml", text.into_bytes()).expect("it is text");
    let message = match cluster::read(&source) {
        Ok(_) => panic!("a damaged line was taken"),
        Err(error) => error.to_string(),
    };
    assert!(
        message.contains("of the efficiency tables is no name of theirs followed by numbers"),
        "{message}"
    );
}
