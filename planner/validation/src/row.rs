//! One published measurement, as its file states it.

use super::run_flags::Preset;
use csv::{ErrorKind, StringRecord};
use models::input::{InputError, Source};
use models::text::quotable;
use serde::{Deserialize, Deserializer};
use std::path::Path;

/// Why a row cannot be expressed.
pub type Reason = String;

/// A row of a file of measurements. Empty cells are what the source did not state.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// Name of the row.
    pub id: String,
    /// Model name in the source.
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
    /// Tokens per sequence.
    pub seq_len: Option<u64>,
    /// Vocabulary size.
    pub vocab: Option<u64>,
    /// Routed experts.
    pub n_experts: Option<u64>,
    /// Experts per token.
    pub top_k: Option<u64>,
    /// Feed-forward width of a routed expert.
    pub moe_ffn_hidden: Option<u64>,
    /// GPUs.
    pub n_gpus: Option<u64>,
    /// GPU model.
    pub gpu: String,
    /// Interconnect, in words.
    pub interconnect: String,
    /// Number format.
    pub precision: String,
    /// Tensor parallel degree.
    pub tp: Option<u64>,
    /// Pipeline parallel degree.
    pub pp: Option<u64>,
    /// Chunks per pipeline rank.
    pub vpp: Option<u64>,
    /// Context parallel degree.
    pub cp: Option<u64>,
    /// Expert parallel degree.
    pub ep: Option<u64>,
    /// Tensor parallel degree within an expert.
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
    /// Sequences per micro-batch.
    #[serde(default, deserialize_with = "whole")]
    pub micro_batch: Option<u64>,
    /// Sequences per iteration.
    #[serde(default, deserialize_with = "whole")]
    pub global_batch: Option<u64>,
    /// Seconds per iteration.
    pub iteration_s: Option<f64>,
    /// Peak memory in the source's unit.
    pub peak_mem_gb: Option<f64>,
    /// What that unit means.
    pub memory_unit: String,
    /// Remarks of whoever collected the row.
    pub notes: String,
    /// What the collector found odd or corrected, and failures of the run.
    #[serde(default)]
    pub flags: String,
    /// 1: everything is known; 2: something is missing; 3: not scored.
    pub tier: u8,
    /// Group of rows that differ only in vocabulary, batch or repetition.
    pub group: String,
    /// Software generation that ran it.
    pub software: String,
    /// Short name of the source.
    pub file: String,
    /// dense, moe or hybrid.
    pub kind: String,
    /// What the preset of its release sets beyond its columns.
    #[serde(skip)]
    pub preset: Option<Preset>,
}

/// What a measurement of memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// All memory in use on the device.
    ByDriver,
    /// Tensors that the allocator handed out.
    ByAllocator,
}

impl Row {
    /// Measured seconds, for rows whose time is scored.
    pub fn measured_s(&self) -> Option<f64> {
        self.iteration_s.filter(|s| self.tier == 1 && s.is_finite() && *s > 0.0)
    }

    /// Whether the source reports that the run was out of memory.
    pub fn ran_out_of_memory(&self) -> bool {
        self.iteration_s.is_none() && self.flags.contains("OOM")
    }

    /// Measured bytes on the fullest device, and what they count. Sources that say GB print what
    /// PyTorch or the driver count in units of 1024 (otherwise Zero Bubble's figures would be 6 %
    /// off).
    pub fn measured_bytes(&self) -> Option<(f64, Counted)> {
        let bytes = self.peak_mem_gb.filter(|_| self.tier <= 2)? * f64::from(1 << 30);
        let by_driver = self.memory_unit.contains("nvidia-smi");
        Some((bytes, if by_driver { Counted::ByDriver } else { Counted::ByAllocator }))
    }
}

/// The value of a required cell.
///
/// # Errors
/// The cell is empty.
pub fn required<T>(cell: Option<T>, name: &str) -> Result<T, Reason> {
    cell.ok_or_else(|| format!("{name} is not stated"))
}

/// Whole numbers, which some sources print with a decimal point. Other values count as empty.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let value: Option<f64> = Option::deserialize(deserializer)?;
    Ok(value.filter(|value| *value >= 0.0 && value.fract() == 0.0).map(|value| value as u64))
}

/// Reads rows from CSV, with the presets that lie beside it.
///
/// # Errors
/// A file cannot be read, a column is missing, or a cell has the wrong type or exceeds its limits
/// ([`LIMITS`]); the error names the line.
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
    let mut presets = Preset::beside(path)?;
    let mut rows = vec![];
    for record in reader.records() {
        let record = record.map_err(|error| refused(&error))?;
        within_limits(&source, &header, &record)?;
        let row: Row = record.deserialize(Some(&header)).map_err(|error| match error.kind() {
            ErrorKind::Deserialize { err, .. } => {
                let column = err.field().map_or(0, |column| column as usize);
                let error = bad_cell(&source, &header, &record, column);
                error.help(format!("valid: what its column has elsewhere ({})", err.kind()))
            }
            _ => refused(&error),
        })?;
        rows.push(Row { preset: presets.remove(&row.id), ..row });
    }
    if rows.is_empty() {
        return Err(InputError::new(format!("{} has no rows", source.name()))
            .help("give a row for each measured run"));
    }
    Ok(rows)
}

/// Refuses a number beyond the limits of its column. Empty cells are valid.
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

/// Columns of numbers with their least and greatest valid value. They are the limits of models,
/// clusters and plans, so that no product of a few values overflows and no list of that length
/// fills the memory.
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

/// Columns that every file must have.
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
