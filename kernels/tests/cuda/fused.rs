//! Attention by a library that fuses graphs: an emulated device whose library is the graph
//! interpreter.

use super::cases;
use super::interpreter::{self, Memory};
use kernels::attention::{self, Attention};
use kernels::cuda::Product;
use kernels::cuda::cpu_emulator::CpuEmulator;
use kernels::cuda::fused::{FusedPlan, Fuser, Kind, Pass, Place, Preference, Role, Sdpa};
use kernels::cuda::{Driver, Event, Gpu, GpuError, Launch, Properties, bf16};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Which of the kernels is slow.
#[derive(Clone, Copy, Debug, Default)]
struct Slow {
    own_forward: bool,
    own_backward: bool,
    forward: bool,
    repeatable: bool,
    fastest: bool,
}

#[derive(Debug)]
struct Fusing {
    emulator: CpuEmulator,
    preference: Preference,
    slow: Slow,
    workspace_bytes: usize,
    settled: Mutex<BTreeMap<String, Arc<str>>>,
    /// Number of graphs run.
    fused: AtomicUsize,
    own: AtomicUsize,
    asked: Mutex<Vec<Pass>>,
}

fn device(preference: Preference, slow: Slow, workspace_bytes: usize) -> Arc<Fusing> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-emulator");
    Arc::new(Fusing {
        emulator: CpuEmulator::new(&folder).expect("a folder for compiled sources"),
        preference,
        slow,
        workspace_bytes,
        settled: Mutex::default(),
        fused: AtomicUsize::new(0),
        own: AtomicUsize::new(0),
        asked: Mutex::default(),
    })
}

fn wait(slow: bool) {
    if slow {
        std::thread::sleep(Duration::from_millis(800));
    }
}

impl Driver for Fusing {
    fn properties(&self) -> &Properties {
        self.emulator.properties()
    }
    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        self.emulator.allocate(bytes)
    }
    fn free(&self, address: u64) {
        self.emulator.free(address);
    }
    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError> {
        self.emulator.copy_in(from, to)
    }
    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.emulator.copy_out(from, to)
    }
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.emulator.copy(from, to, bytes)
    }
    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.emulator.fill(to, byte, bytes)
    }
    fn fill_words(&self, to: u64, word: u32, words: usize) -> Result<(), GpuError> {
        self.emulator.fill_words(to, word, words)
    }
    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        self.own.fetch_add(1, Ordering::Relaxed);
        wait(match launch.kernel() {
            "attention_forward" => self.slow.own_forward,
            "attention_backward_query" => self.slow.own_backward,
            _ => false,
        });
        self.emulator.launch(launch)
    }
    fn product(&self, product: &Product) -> Result<(), GpuError> {
        self.emulator.product(product)
    }
    fn synchronize(&self) -> Result<(), GpuError> {
        self.emulator.synchronize()
    }
    fn quiesce(&self) -> Result<(), GpuError> {
        self.emulator.quiesce()
    }
    fn record(&self) -> Result<Event, GpuError> {
        self.emulator.record()
    }
    fn wait(&self, event: &Event) -> Result<(), GpuError> {
        self.emulator.wait(event)
    }
    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError> {
        self.emulator.fork()
    }
    fn fuser(&self) -> Option<&dyn Fuser> {
        Some(self)
    }
}

impl Fuser for Fusing {
    fn preference(&self) -> Preference {
        self.preference
    }

    fn name(&self) -> String {
        "the interpreter".to_owned()
    }

    /// Heads of 48 get no plan.
    fn plans(&self, sdpa: &Sdpa, pass: Pass) -> Result<Vec<FusedPlan>, GpuError> {
        self.asked.lock().unwrap().push(pass);
        if sdpa.qk_dim == 48 {
            return Err(GpuError::Call { call: "plans", what: "no such\npattern".to_owned() });
        }
        let scratch: usize = sdpa.graph(pass).scratch().map(|(_, bytes)| bytes).sum();
        let workspace_bytes = self.workspace_bytes.max(scratch);
        Ok(vec![FusedPlan { name: "loops".to_owned(), workspace_bytes }])
    }

    fn run(
        &self,
        (sdpa, pass, number): (&Sdpa, Pass, usize),
        tensors: &[(Role, u64)],
        workspace: u64,
    ) -> Result<(), GpuError> {
        assert_eq!(number, 0);
        self.fused.fetch_add(1, Ordering::Relaxed);
        wait(match pass {
            Pass::Forward => self.slow.forward,
            Pass::Backward { repeatable: true } => self.slow.repeatable,
            Pass::Backward { repeatable: false } => self.slow.fastest,
        });
        let graph = sdpa.graph(pass);
        let bytes: usize = graph.scratch().map(|(_, bytes)| bytes).sum();
        match self.workspace_bytes.max(bytes) {
            0 => assert_eq!(workspace, 0),
            bytes => self.emulator.fill(workspace, 0, bytes)?,
        }
        let written: &[Role] = match pass {
            Pass::Forward => &[Role::Out, Role::Lse],
            Pass::Backward { .. } => &[Role::Dq, Role::Dk, Role::Dv],
        };
        let mut memory = Memory::new();
        let mut places = Vec::new();
        for tensor in &graph.tensors {
            let Place::Memory(role) = tensor.place else { continue };
            let Some(&(_, address)) = tensors.iter().find(|(given, _)| *given == role) else {
                assert!(role.is_scratch(), "no memory for {role:?}");
                continue;
            };
            match written.contains(&role) {
                true => places.push((role, address, tensor.kind)),
                false => {
                    let mut bytes = vec![0; tensor.elements() * tensor.kind.bytes()];
                    self.emulator.copy_out(address, &mut bytes)?;
                    memory.insert(role, read(&bytes, tensor.kind));
                }
            }
        }
        interpreter::run(&graph, &mut memory);
        for (role, address, kind) in places {
            self.emulator.copy_in(&written_as(&memory[&role], kind), address)?;
        }
        Ok(())
    }

    fn recall(&self, what: &str) -> Option<Arc<str>> {
        self.settled.lock().unwrap().get(what).cloned()
    }

    fn settle(&self, what: &str, found: &str) -> Arc<str> {
        let mut settled = self.settled.lock().unwrap();
        settled.entry(what.to_owned()).or_insert_with(|| found.into()).clone()
    }

    fn settled(&self) -> Vec<(String, Arc<str>)> {
        self.settled.lock().unwrap().clone().into_iter().collect()
    }
}

fn read(bytes: &[u8], kind: Kind) -> Vec<f64> {
    match kind {
        Kind::Bf16 => {
            let values = bytes.chunks_exact(2).map(|two| bf16::from_le_bytes([two[0], two[1]]));
            values.map(bf16::to_f64).collect()
        }
        Kind::F32 => {
            let four = |four: &[u8]| f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            bytes.chunks_exact(4).map(four).map(f64::from).collect()
        }
        other => panic!("{other:?} in memory"),
    }
}

fn written_as(values: &[f64], kind: Kind) -> Vec<u8> {
    match kind {
        Kind::Bf16 => values.iter().flat_map(|&x| bf16::from_f64(x).to_le_bytes()).collect(),
        Kind::F32 => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        other => panic!("{other:?} in memory"),
    }
}

/// The first lines of the choices made: forward, then backward.
fn chosen(gpu: &Gpu) -> Vec<String> {
    let all = gpu.attention_choices();
    let of = |direction: &str| {
        let start = format!("attention {direction} ");
        let found = all.iter().find(|(what, _)| what.starts_with(&start));
        found.map_or("nothing", |(_, found)| found.lines().next().unwrap()).to_owned()
    };
    vec![of("forward"), of("backward")]
}

const SMALL: Attention = Attention {
    batch: 1,
    q_len: 9,
    kv_len: 23,
    q_heads: 2,
    kv_heads: 1,
    qk_dim: 16,
    v_dim: 32,
    scale: 0.25,
    causal: true,
    window: None,
    soft_cap: None,
    q_offset: 14,
    kv_offset: 0,
    dropout: None,
};

/// Forward and backward are chosen independently; the numbers are right with every choice, and the
/// chosen kernel runs from then on.
#[test]
fn the_fastest_runs() {
    let none = Slow::default();
    for (preference, slow, expected) in [
        (
            Preference::Repeatable,
            Slow { own_forward: true, own_backward: true, ..none },
            ["forward 0", "repeatable 0"],
        ),
        (
            Preference::Repeatable,
            Slow { own_forward: true, repeatable: true, ..none },
            ["forward 0", "own"],
        ),
        (
            Preference::Fastest,
            Slow { forward: true, own_backward: true, repeatable: true, ..none },
            ["own", "fastest 0"],
        ),
    ] {
        let device = device(preference, slow, 0);
        let gpu = Gpu::on(device.clone());
        cases::attention::check_attention::<bf16>(&gpu, &SMALL);
        let found = chosen(&gpu);
        assert_eq!(found, expected, "{slow:?}");
        let asked = device.asked.lock().unwrap().clone();
        let unrepeatable = asked.contains(&Pass::Backward { repeatable: false });
        assert_eq!(unrepeatable, preference == Preference::Fastest);

        let before = [&device.fused, &device.own].map(|count| count.load(Ordering::Relaxed));
        cases::attention::check_attention::<bf16>(&gpu, &SMALL);
        let after = [&device.fused, &device.own].map(|count| count.load(Ordering::Relaxed));
        // Forward, backward, and an accumulating backward, which is always our own: one launch
        // forward, three backward.
        let runs = |of: &str| usize::from(of != "own");
        let graphs = runs(&found[0]) + runs(&found[1]);
        let launches = (1 - runs(&found[0])) + 3 * (1 - runs(&found[1])) + 3;
        assert_eq!([after[0] - before[0], after[1] - before[1]], [graphs, launches], "{slow:?}");
    }
}

/// If the library takes no graph or its plans need too much memory, our own kernel runs and the
/// reason is recorded.
#[test]
fn what_cannot_run_is_said() {
    let slow = Slow { own_forward: true, own_backward: true, ..Slow::default() };
    let gpu = Gpu::on(device(Preference::Repeatable, slow, 0));
    cases::attention::check_attention::<bf16>(&gpu, &Attention { qk_dim: 48, ..SMALL });
    assert_eq!(chosen(&gpu), ["own", "own"]);
    let said = &gpu.attention_choices()[1].1;
    assert!(said.contains("Forward: plans: no such; pattern"), "{said}");

    let device = device(Preference::Repeatable, slow, (1 << 30) + 1);
    let gpu = Gpu::on(device.clone());
    cases::attention::check_attention::<bf16>(&gpu, &SMALL);
    assert_eq!(chosen(&gpu), ["own", "own"]);
    let said = &gpu.attention_choices()[1].1;
    assert!(said.contains("forward 0 (loops): attention: it needs 1073741825 bytes"), "{said}");
    assert_eq!(device.fused.load(Ordering::Relaxed), 0);
}

/// Our own kernels run for f32, and for tensors with an alignment that no library takes.
#[test]
fn what_the_library_is_not_asked() {
    let device = device(Preference::Fastest, Slow::default(), 0);
    let gpu = Gpu::on(device.clone());
    cases::attention::check_attention::<f32>(&gpu, &SMALL);
    let a = SMALL;
    let [q, k, v] =
        [a.q_elements(), a.k_elements(), a.v_elements()].map(|len| gpu.zeros::<bf16>(len).unwrap());
    let mut out = gpu.zeros::<bf16>(a.out_elements()).unwrap();
    let mut lse = gpu.zeros::<f32>(a.lse_elements() + 1).unwrap();
    let lse = lse.slice_mut(1..);
    attention::cuda::forward(&gpu, &a, q.view(), k.view(), v.view(), out.view_mut(), lse).unwrap();
    assert_eq!(
        (device.fused.load(Ordering::Relaxed), chosen(&gpu)),
        (0, vec!["nothing".to_owned(); 2])
    );
}

/// The case of `gpu-test`, with a library.
#[test]
fn every_kernel_that_a_library_has_is_tried() {
    let device = device(Preference::Own, Slow::default(), 0);
    cases::fused_attention(&Gpu::on(device.clone()));
    assert_eq!(device.fused.load(Ordering::Relaxed), (1 + 2 * 2) * cases::attention::FUSED_SHAPES);
}
