//! Runs kernels on `machine.h`: a small C++ program for each test, whose buffers come and go by pipes.

use kernels::cuda::{Baked, Source, Storage, program};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Kernels to run one after the other, on buffers.
pub struct Run {
    source: Source,
    baked: Baked,
    launches: String,
    buffers: Vec<Vec<u8>>,
}

impl Run {
    pub fn new(
        operation: &str,
        storage: Storage,
        row: usize,
        threads: usize,
        constants: &[(&'static str, f64)],
    ) -> Self {
        let source = Source::of(operation).expect("it has a twin");
        let baked =
            Baked { storage, pack: storage.pack(row), threads, constants: constants.to_vec() };
        Self { source, baked, launches: String::new(), buffers: Vec::new() }
    }

    pub fn pack(&self) -> usize {
        self.baked.pack
    }

    /// A buffer in the storage type; its place among all.
    pub fn stored(&mut self, values: &[f32]) -> usize {
        let bytes = match self.baked.storage {
            Storage::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Storage::Bf16 => values.iter().flat_map(|&x| narrowed(x).to_le_bytes()).collect(),
        };
        self.bytes(bytes)
    }

    pub fn floats(&mut self, values: &[f32]) -> usize {
        self.bytes(values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn doubles(&mut self, count: usize) -> usize {
        self.bytes(vec![0; 8 * count])
    }

    pub fn longs(&mut self, values: &[i64]) -> usize {
        self.bytes(values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn ints(&mut self, values: &[i32]) -> usize {
        self.bytes(values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn bytes(&mut self, bytes: Vec<u8>) -> usize {
        self.buffers.push(bytes);
        self.buffers.len() - 1
    }

    /// A launch over a grid. In `arguments`, `s0` is buffer 0 in the storage type, `f0` in f32, `d0` in f64, `l0` of 64-bit
    /// and `i0` of 32-bit integers; anything else is C++.
    pub fn launch(&mut self, kernel: &str, grid: (usize, usize), arguments: &str) {
        assert!(self.source.kernels().any(|name| name == kernel), "no kernel {kernel}");
        let arguments: Vec<String> = arguments.split(", ").map(argument).collect();
        let (x, y, threads) = (grid.0, grid.1, self.baked.threads);
        let arguments = arguments.join(", ");
        let _ = writeln!(
            self.launches,
            "  machine::launch({{{x}, {y}}}, {threads}, [&] {{ {kernel}({arguments}); }});"
        );
    }

    /// Lines that run before the launches, for what buffers of numbers do not give.
    pub fn prepare(&mut self, line: &str) {
        let _ = writeln!(self.launches, "  {line}");
    }

    /// Compiles, runs, and gives the buffers back.
    pub fn finish(self) -> Results {
        let folder = tempfile();
        let (main, built) = (folder.join("main.cpp"), folder.join("main"));
        let text = format!(
            "#include \"{}/tests/cuda/machine.h\"\n{}\nint main() {{\n  auto b = machine::buffers();\n{}  machine::give_back(b);\n}}\n",
            env!("CARGO_MANIFEST_DIR"),
            program(self.source, &self.baked),
            self.launches
        );
        std::fs::write(&main, text).unwrap();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-o"];
        let status = Command::new(compiler).args(flags).arg(&built).arg(&main).status().unwrap();
        assert!(status.success(), "{} does not compile as C++", self.source.operation);
        let mut child =
            Command::new(&built).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        for buffer in &self.buffers {
            input.write_all(&(buffer.len() as u64).to_le_bytes()).unwrap();
            input.write_all(buffer).unwrap();
        }
        drop(input);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}: {}", self.source.operation, output.status);
        std::fs::remove_dir_all(folder).unwrap();
        let mut rest = &output.stdout[..];
        let mut cut = |bytes: &Vec<u8>| {
            let (own, more) = rest.split_at(bytes.len());
            rest = more;
            own.to_vec()
        };
        let buffers = self.buffers.iter().map(&mut cut).collect();
        Results { storage: self.baked.storage, buffers }
    }
}

/// What buffers hold in the end.
pub struct Results {
    storage: Storage,
    buffers: Vec<Vec<u8>>,
}

impl Results {
    pub fn stored(&self, buffer: usize) -> Vec<f64> {
        match self.storage {
            Storage::F32 => self.floats(buffer),
            Storage::Bf16 => {
                let (pairs, _) = self.buffers[buffer].as_chunks::<2>();
                pairs.iter().map(|pair| f64::from(widened(u16::from_le_bytes(*pair)))).collect()
            }
        }
    }

    pub fn floats(&self, buffer: usize) -> Vec<f64> {
        let (words, _) = self.buffers[buffer].as_chunks::<4>();
        words.iter().map(|word| f64::from(f32::from_le_bytes(*word))).collect()
    }

    pub fn doubles(&self, buffer: usize) -> Vec<f64> {
        let (words, _) = self.buffers[buffer].as_chunks::<8>();
        words.iter().map(|word| f64::from_le_bytes(*word)).collect()
    }
}

fn argument(text: &str) -> String {
    let kind = match text.as_bytes().first() {
        Some(b's') => "stored",
        Some(b'f') => "float",
        Some(b'd') => "double",
        Some(b'l') => "long long",
        Some(b'i') => "int",
        _ => return text.to_owned(),
    };
    match text[1..].parse::<usize>() {
        Ok(buffer) => format!("reinterpret_cast<{kind}*>(b[{buffer}].data())"),
        Err(_) => text.to_owned(),
    }
}

fn tempfile() -> PathBuf {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("cuda-on-cpu-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The nearest bf16, ties to even.
pub fn narrowed(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

pub fn widened(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}
