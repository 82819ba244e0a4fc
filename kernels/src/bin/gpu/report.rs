//! Shared by the GPU programs: options, tables, JSON.

use kernels::cuda::{Gpu, Properties};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Command line options.
#[derive(Debug)]
pub struct Options {
    gpu: usize,
    json: PathBuf,
    /// Names of what is run; everything if empty.
    only: Vec<String>,
    /// Whether a GPU without cuDNN is an error.
    require_cudnn: bool,
    #[cfg(feature = "cpu_emulator")]
    on_cpu: bool,
}

impl Options {
    /// Reads the command line.
    pub fn read(json: &str) -> Result<Self, String> {
        let mut options = Self {
            gpu: 0,
            json: PathBuf::from(json),
            only: Vec::new(),
            require_cudnn: false,
            #[cfg(feature = "cpu_emulator")]
            on_cpu: false,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--gpu" => {
                    let number = value()?;
                    options.gpu =
                        number.parse().map_err(|_| format!("--gpu {number}: no number"))?;
                }
                "--json" => options.json = PathBuf::from(value()?),
                "--only" => options.only.extend(value()?.split(',').map(str::to_owned)),
                "--require-cudnn" => options.require_cudnn = true,
                // To try these programs without a GPU.
                #[cfg(feature = "cpu_emulator")]
                "--on-cpu" => options.on_cpu = true,
                _ => {
                    return Err(format!(
                        "{word}: valid: --gpu N, --json FILE, --only NAME,NAME, --require-cudnn"
                    ));
                }
            }
        }
        Ok(options)
    }

    /// Opens the GPU.
    pub fn open(&self) -> Result<Gpu, String> {
        #[cfg(feature = "cpu_emulator")]
        if self.on_cpu {
            let folder = std::env::temp_dir().join("meshwright-cuda-emulator");
            let emulator = kernels::cuda::cpu_emulator::CpuEmulator::new(&folder);
            let emulator = emulator.map_err(|error| error.to_string())?;
            return Ok(Gpu::on(std::sync::Arc::new(emulator)));
        }
        let gpu = Gpu::open(self.gpu).map_err(|error| error.to_string())?;
        let versions = &gpu.properties().versions;
        eprintln!("{}, {versions}", gpu.properties().name);
        if self.require_cudnn && gpu.fuser().is_none() {
            return Err(format!("--require-cudnn: {versions}"));
        }
        Ok(gpu)
    }

    /// Whether `name` is to be run.
    pub fn runs(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    /// Checks `--only` against the names there are.
    pub fn check(&self, names: &[&str]) -> Result<(), String> {
        match self.only.iter().find(|only| !names.contains(&only.as_str())) {
            Some(only) => Err(format!("--only {only}: valid: {}", names.join(", "))),
            None => Ok(()),
        }
    }
}

/// A cell of the table.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Words.
    Text(String),
    /// Printed with four digits, written to JSON in full.
    Number(f64),
    /// An empty cell.
    None,
}

impl Value {
    fn cell(&self) -> String {
        match self {
            Self::Text(text) => text.lines().next().unwrap_or("").chars().take(120).collect(),
            Self::None => String::new(),
            Self::Number(x) if x.abs() >= 1000.0 => format!("{x:.0}"),
            Self::Number(x) if x.abs() >= 1.0 => format!("{x:.2}"),
            Self::Number(x) => format!("{x:.4}"),
        }
    }

    fn json(&self) -> String {
        match self {
            Self::Text(text) => quoted(text),
            Self::Number(x) if x.is_finite() => format!("{x}"),
            Self::Number(_) | Self::None => "null".to_owned(),
        }
    }
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

/// Writes the rows so far to the file, so that a run that is cut short keeps them.
pub fn keep<const N: usize>(
    options: &Options,
    device: &Properties,
    name: &str,
    rows: &[[(&str, Value); N]],
) -> Result<(), String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let head = [
        ("date", quoted(&date(now / 86_400))),
        ("gpu", quoted(&device.name)),
        ("architecture", quoted(&device.architecture)),
        ("multiprocessors", device.multiprocessors.to_string()),
        ("versions", quoted(&device.versions)),
        ("program", quoted(env!("CARGO_PKG_VERSION"))),
    ];
    let object = |fields: &[(&str, String)]| {
        let fields: Vec<String> =
            fields.iter().map(|(name, value)| format!("{}: {value}", quoted(name))).collect();
        format!("{{{}}}", fields.join(", "))
    };
    let lines: Vec<String> = rows
        .iter()
        .map(|row| object(&row.each_ref().map(|(name, value)| (*name, value.json()))))
        .collect();
    let mut fields = head.to_vec();
    fields.push((name, format!("[\n  {}\n]", lines.join(",\n  "))));
    std::fs::write(&options.json, object(&fields) + "\n")
        .map_err(|error| format!("{}: {error}", options.json.display()))
}

/// Prints the table and writes the file.
pub fn write<const N: usize>(
    options: &Options,
    device: &Properties,
    name: &str,
    rows: &[[(&str, Value); N]],
) -> Result<(), String> {
    keep(options, device, name, rows)?;
    println!("\n{}, {}", device.name, device.versions);
    if let Some(first) = rows.first() {
        println!("| {} |", first.each_ref().map(|(name, _)| *name).join(" | "));
        println!("|{}", "---|".repeat(N));
    }
    for row in rows {
        println!("| {} |", row.each_ref().map(|(_, value)| value.cell()).join(" | "));
    }
    println!("written to {}", options.json.display());
    Ok(())
}

/// The date of a number of days since 1970-01-01 (Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", civil_from_days).
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", year + era * 400 + later)
}
