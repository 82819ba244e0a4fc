//! One published measurement, as its file has it.

use csv::{ErrorKind, StringRecord};
use models::input::{InputError, Source};
use models::text::quotable;
use serde::{Deserialize, Deserializer};
use std::path::Path;

/// Why a row cannot be expressed.
pub type Reason = String;

/// A row of a file of measurements. Absent cells are what the source did not state.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// Name of the row.
    pub id: String,
    /// Model as the source calls it.
    pub model_name: String,
    /// Transformer layers.
    pub layers: Option<u64>,
    /// Hidden size.
    pub hidden: Option<u64>,
    /// Feed-forward width.
    #[serde(default, deserialize_with = "whole")]
    pub ffn_hidden: Option<u64>,
    /// Query heads.
    pub heads: Option<u64>,
    /// Key/value heads.
    pub kv_heads: Option<u64>,
    /// Tokens a sequence.
    pub seq_len: Option<u64>,
    /// Vocabulary.
    pub vocab: Option<u64>,
    /// Routed experts.
    pub n_experts: Option<u64>,
    /// Experts a token is sent to.
    pub top_k: Option<u64>,
    /// Width of a routed expert.
    pub moe_ffn_hidden: Option<u64>,
    /// GPUs.
    pub n_gpus: Option<u64>,
    /// Kind of GPU.
    pub gpu: String,
    /// Links, in words.
    pub interconnect: String,
    /// Number format.
    pub precision: String,
    /// Tensor parallel degree.
    pub tp: Option<u64>,
    /// Pipeline parallel degree.
    pub pp: Option<u64>,
    /// Chunks a device.
    pub vpp: Option<u64>,
    /// Context parallel degree.
    pub cp: Option<u64>,
    /// Expert parallel degree.
    pub ep: Option<u64>,
    /// Tensor parallel degree inside an expert.
    pub etp: Option<u64>,
    /// Data parallel degree.
    #[serde(default, deserialize_with = "whole")]
    pub dp: Option<u64>,
    /// ZeRO stage.
    pub zero_stage: Option<u8>,
    /// Sequence parallelism, `True` or `False`.
    pub sequence_parallel: String,
    /// Recomputation.
    pub recompute: String,
    /// Pipeline schedule, in the source's words.
    pub schedule: String,
    /// Where the vocabulary layers live, in the source's words.
    pub vocab_strategy: String,
    /// Sequences a micro-batch.
    #[serde(default, deserialize_with = "whole")]
    pub micro_batch: Option<u64>,
    /// Sequences an iteration.
    #[serde(default, deserialize_with = "whole")]
    pub global_batch: Option<u64>,
    /// Seconds an iteration.
    pub iteration_s: Option<f64>,
    /// Peak memory in the source's unit.
    pub peak_mem_gb: Option<f64>,
    /// What that unit means.
    pub memory_unit: String,
    /// Remarks of the collector.
    pub notes: String,
    /// What the collector found odd, corrected, or saw fail.
    #[serde(default)]
    pub flags: String,
    /// 1: everything known; 2: something missing; 3: never scored.
    pub tier: u8,
    /// Rows that differ only in vocabulary, batch or repetition.
    pub group: String,
    /// Software generation that ran it.
    pub software: String,
    /// Source, shortly.
    pub file: String,
    /// dense, moe or hybrid.
    pub kind: String,
}

/// What a measurement of memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Everything on the device.
    ByDriver,
    /// Tensors.
    ByAllocator,
}

impl Row {
    /// Measured seconds of a row that is scored on time.
    pub fn measured_s(&self) -> Option<f64> {
        self.iteration_s.filter(|s| self.tier == 1 && s.is_finite() && *s > 0.0)
    }

    /// Whether the source says that this configuration does not fit.
    pub fn ran_out_of_memory(&self) -> bool {
        self.iteration_s.is_none() && self.flags.contains("OOM")
    }

    /// Measured bytes on the fullest device, and how they were counted. Sources that say GB print what
    /// PyTorch or the driver count in units of 1024 (Zero Bubble's would be 6 % off otherwise).
    pub fn measured_bytes(&self) -> Option<(f64, Counted)> {
        let bytes = self.peak_mem_gb.filter(|_| self.tier <= 2)? * f64::from(1 << 30);
        let by_driver = self.memory_unit.contains("nvidia-smi");
        Some((bytes, if by_driver { Counted::ByDriver } else { Counted::ByAllocator }))
    }
}

/// A cell that must be there.
///
/// # Errors
/// It is empty.
pub fn required<T>(cell: Option<T>, name: &str) -> Result<T, Reason> {
    cell.ok_or_else(|| format!("{name} is not stated"))
}

/// Whole numbers, which some sources print with a point; others count as absent.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let value: Option<f64> = Option::deserialize(deserializer)?;
    Ok(value.filter(|value| *value >= 0.0 && value.fract() == 0.0).map(|value| value as u64))
}

/// Reads rows from CSV.
///
/// # Errors
/// A file that cannot be read, a column that is missing, or a cell of the wrong type or beyond its limits ([`LIMITS`]),
/// with its line.
pub fn read(path: &Path) -> Result<Vec<Row>, InputError> {
    let source = Source::open(path)?;
    let refused = |error: &csv::Error| {
        InputError::new(format!("cannot read measurements from {}: {error}", source.name()))
            .help("give a CSV file with the columns of tests/papers/measured.csv")
    };
    let mut reader = csv::Reader::from_reader(source.text().as_bytes());
    let header = reader.headers().map_err(|error| refused(&error))?.clone();
    if let Some(missing) = COLUMNS.iter().find(|name| !header.iter().any(|cell| cell == **name)) {
        let message = format!("{} has no column `{missing}`", source.name());
        return Err(InputError::new(message).help("give the columns of tests/papers/measured.csv"));
    }
    let mut rows = vec![];
    for record in reader.records() {
        let record = record.map_err(|error| refused(&error))?;
        within_limits(&source, &header, &record)?;
        rows.push(record.deserialize(Some(&header)).map_err(|error| match error.kind() {
            ErrorKind::Deserialize { err, .. } => {
                let column = err.field().map_or(0, |column| column as usize);
                let error = bad_cell(&source, &header, &record, column);
                error.help(format!("valid: what its column has elsewhere ({})", err.kind()))
            }
            _ => refused(&error),
        })?);
    }
    if rows.is_empty() {
        return Err(InputError::new(format!("{} has no rows", source.name()))
            .help("give a row for each measured run"));
    }
    Ok(rows)
}

/// Refuses a number beyond its column's limits; an empty cell is a number that was not stated.
fn within_limits(
    source: &Source,
    header: &StringRecord,
    record: &StringRecord,
) -> Result<(), InputError> {
    for (at, (column, cell)) in header.iter().zip(record).enumerate() {
        let Some((_, least, most)) = LIMITS.iter().find(|(limited, ..)| *limited == column) else {
            continue;
        };
        let number: Option<f64> = cell.trim().parse().ok();
        if cell.trim().is_empty() || number.is_some_and(|number| (*least..=*most).contains(&number))
        {
            continue;
        }
        let help = format!("valid: {least} to {most}, or an empty cell where it is not stated");
        return Err(bad_cell(source, header, record, at).help(help));
    }
    Ok(())
}

/// An error about one cell of a row.
fn bad_cell(
    source: &Source,
    header: &StringRecord,
    record: &StringRecord,
    column: usize,
) -> InputError {
    let id = header.iter().position(|name| name == "id").and_then(|id| record.get(id));
    let [name, id, cell] =
        [header.get(column), id, record.get(column)].map(|text| quotable(text.unwrap_or_default()));
    let line = record.position().map_or(1, |position| position.line() as usize);
    InputError::new(format!("`{name}` of row `{id}` cannot be `{cell}`"))
        .at(source.place(line, 1, 1))
}

/// Columns of numbers with their least and most valid value: those of models, clusters and plans, so that no product
/// of a few of them overflows, nor any list made of them fills the memory.
const LIMITS: [(&str, f64, f64); 24] = [
    ("layers", 1.0, 2e3),
    ("hidden", 1.0, 1e6),
    ("ffn_hidden", 1.0, 1e7),
    ("heads", 1.0, 1e5),
    ("kv_heads", 1.0, 1e5),
    ("seq_len", 1.0, 1e9),
    ("vocab", 1.0, 1e8),
    ("n_experts", 0.0, 1e5),
    ("top_k", 0.0, 1e5),
    ("moe_ffn_hidden", 1.0, 1e7),
    ("n_gpus", 1.0, (1 << 20) as f64),
    ("tp", 1.0, (1 << 20) as f64),
    ("pp", 1.0, (1 << 20) as f64),
    ("vpp", 1.0, 2e3),
    ("cp", 1.0, (1 << 20) as f64),
    ("ep", 1.0, (1 << 20) as f64),
    ("etp", 1.0, (1 << 20) as f64),
    ("dp", 1.0, (1 << 20) as f64),
    ("zero_stage", 0.0, 3.0),
    ("micro_batch", 1.0, (1 << 24) as f64),
    ("global_batch", 1.0, (1 << 24) as f64),
    ("iteration_s", 1e-9, 1e9),
    ("peak_mem_gb", 1e-3, 1e6),
    ("tier", 1.0, 3.0),
];

/// Columns without which no row says what ran and how long it took.
const COLUMNS: [&str; 16] = [
    "id",
    "model_name",
    "layers",
    "hidden",
    "heads",
    "seq_len",
    "n_gpus",
    "gpu",
    "tp",
    "pp",
    "micro_batch",
    "global_batch",
    "iteration_s",
    "tier",
    "group",
    "software",
];
