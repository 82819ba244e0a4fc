//! The GPU bench without a GPU: its kernels run as C++ on the CPU, at tiny sizes. This shows that
//! each part runs to its end; only a GPU shows whether the figures are right.

use measure::{BenchPart, GpuBench, Sweep, measure};
use models::cluster::{CollectiveKind, MeasuredGpu};
use runtime::kernels::cuda::{Gpu, cpu_emulator::CpuEmulator};
use runtime::models;
use std::path::Path;
use std::sync::Arc;

#[test]
fn every_part_is_measured() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-machine");
    let open = move || Ok(Gpu::on(Arc::new(CpuEmulator::new(&folder)?)));
    let mut bench = GpuBench::new(open).expect("it opens").hasty();
    let (sweep, mut found) = (Sweep::small(2), MeasuredGpu::default());
    for part in [
        BenchPart::Memory,
        BenchPart::Products,
        BenchPart::Attention,
        BenchPart::Collectives,
        BenchPart::Steps,
    ] {
        measure(&mut bench, &sweep, part, &mut found, &mut |_| Ok(()))
            .unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(found.launch_s.is_some_and(|s| s > 0.0));
    assert!(found.sustained_slowdown.is_some_and(|slowdown| slowdown >= 1.0));
    assert!(found.adamw.is_some_and(|adamw| adamw.s > 0.0));
    assert_eq!((found.copies.len(), found.elementwise.len()), (2, 4));
    assert_eq!((found.products.len(), found.attention.len()), (16, 8));
    let kinds: Vec<CollectiveKind> = found.collectives.iter().map(|of| of.kind).collect();
    let (reduced, gathered) = (CollectiveKind::AllReduce, CollectiveKind::AllGather);
    let scattered = CollectiveKind::ReduceScatter;
    assert_eq!(kinds, [reduced, reduced, gathered, gathered, scattered, scattered]);
    assert_eq!(found.steps.len(), 1);
    let times = found.products.iter().map(|of| of.s).chain(found.steps.iter().map(|of| of.s));
    assert!(times.chain(found.collectives.iter().map(|of| of.s)).all(|s| s > 0.0));
}
