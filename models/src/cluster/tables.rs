//! Measured efficiency of kernels and collectives, shipped as small tables.
//!
//! `tools/compact_tables.py` makes the files; their headers say whose numbers they are. Everything is
//! turned into seconds on one device and made monotone once, so that a lookup is one interpolation.

use std::collections::BTreeMap;

use super::{Device, Dtype, Grid, roofline};
use crate::input::InputError;

macro_rules! tables {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../shipped/efficiency/", $name, ".csv")))),*]
    };
}

const SHIPPED: &[(&str, &str)] = tables!["a100" "h100" "h200" "b200" "gb200"];

/// Name of the tables that hold nothing.
const NONE: &str = "none";

/// Files write fractions in this unit.
const FRACTION: f64 = 1e-4;

/// Names that `efficiency:` takes in a cluster file.
pub fn table_names() -> impl Iterator<Item = &'static str> {
    std::iter::once(NONE).chain(SHIPPED.iter().map(|(name, _)| *name))
}

/// What was measured, in seconds on one device. Where a part is missing, the formulas stand alone.
#[derive(Clone, Debug, Default)]
pub struct EfficiencyTables {
    /// Name in `efficiency:` of a cluster file.
    pub name: String,
    /// Matrix products, by the format they run in: seconds over `m`, `n`, `k`.
    pub gemm: BTreeMap<Dtype, Scaled<3>>,
    /// The attention core, causal and fused.
    pub attention: Option<AttentionTable>,
    /// Elementwise kernels: seconds over bytes.
    pub stream: Option<Scaled<1>>,
    /// Collectives inside one domain of the innermost level.
    pub links: Option<LinkTable>,
}

/// Seconds of fused causal attention over head width, sequence, and sequences times heads.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionTable {
    /// Forward pass.
    pub forward: Scaled<3>,
    /// Backward pass.
    pub backward: Scaled<3>,
}

/// Seconds of collectives over ranks and bytes of the whole tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkTable {
    /// Bandwidth that large messages reached on the machines measured, per GPU and direction,
    /// bytes/s. A link of half that takes as long as this one for twice the bytes.
    pub bytes_per_s: f64,
    /// All-reduce.
    pub all_reduce: Scaled<2>,
    /// All-gather.
    pub all_gather: Scaled<2>,
    /// Reduce-scatter.
    pub reduce_scatter: Scaled<2>,
    /// All-to-all.
    pub all_to_all: Scaled<2>,
}

/// A monotone grid that grows beyond its ends with a power of each axis, and shrinks so below its
/// start.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaled<const N: usize> {
    grid: Grid<N>,
    first: [f64; N],
    last: [f64; N],
    below: [f64; N],
    above: [f64; N],
}

impl<const N: usize> Scaled<N> {
    fn new(
        axes: [Vec<f64>; N],
        [below, above]: [[f64; N]; 2],
        value: impl FnMut([f64; N]) -> f64,
    ) -> Self {
        let first = std::array::from_fn(|i| axes[i].first().copied().unwrap_or(1.0));
        let last = std::array::from_fn(|i| axes[i].last().copied().unwrap_or(1.0));
        Self { grid: Grid::new(axes, value).monotone(), first, last, below, above }
    }

    /// The largest point of each axis.
    pub fn last(&self) -> [f64; N] {
        self.last
    }

    /// Seconds at `point`.
    pub fn at(&self, point: [f64; N]) -> f64 {
        let mut scale = 1.0;
        for (i, x) in point.iter().enumerate() {
            if *x > self.last[i] {
                scale *= (x / self.last[i]).powf(self.above[i]);
            } else if *x < self.first[i] && self.below[i] != 0.0 {
                scale *= (x / self.first[i]).powf(self.below[i]);
            }
        }
        scale * self.grid.at(point)
    }
}

impl EfficiencyTables {
    /// The shipped tables `name` on `device`; `None` where there are none of that name.
    ///
    /// # Errors
    /// A shipped table that cannot be read, which the tests exclude.
    pub fn shipped(name: &str, device: &Device) -> Result<Option<Self>, InputError> {
        if name == NONE {
            return Ok(Some(Self { name: name.to_owned(), ..Self::default() }));
        }
        let Some((_, text)) = SHIPPED.iter().find(|(shipped, _)| *shipped == name) else {
            return Ok(None);
        };
        let bug = || InputError::new(format!("the shipped efficiency table {name} is damaged"));
        let lines = Lines::parse(text).ok_or_else(bug)?;
        let base = match lines.like {
            Some(like) => Self::shipped(like, device)?.ok_or_else(bug)?,
            None => kernels(&lines, device).ok_or_else(bug)?,
        };
        let links = Some(links(&lines).ok_or_else(bug)?);
        Ok(Some(Self { name: name.to_owned(), links, ..base }))
    }
}

/// The lines of a file: numbers under the key in their first column.
struct Lines<'a> {
    like: Option<&'a str>,
    numbers: BTreeMap<&'a str, Vec<Vec<f64>>>,
}

impl<'a> Lines<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut lines = Self { like: None, numbers: BTreeMap::new() };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (key, rest) = line.split_once(',')?;
            if key == "like" {
                lines.like = Some(rest);
                continue;
            }
            let row = rest.split(',').map(|cell| cell.parse().ok()).collect::<Option<_>>()?;
            lines.numbers.entry(key).or_default().push(row);
        }
        Some(lines)
    }

    fn rows(&self, key: &str) -> &[Vec<f64>] {
        self.numbers.get(key).map_or(&[], Vec::as_slice)
    }
}

/// Everything but the links.
fn kernels(lines: &Lines<'_>, device: &Device) -> Option<EfficiencyTables> {
    let measured = Dtype::ALL.into_iter().filter(|dtype| !gemm_rows(lines, *dtype).is_empty());
    let gemm = measured.map(|dtype| Some((dtype, gemm(lines, dtype, device)?)));
    Some(EfficiencyTables {
        name: String::new(),
        gemm: gemm.collect::<Option<_>>()?,
        attention: attention(lines, device),
        stream: stream(lines, device),
        links: None,
    })
}

fn gemm_rows<'a>(lines: &'a Lines<'_>, dtype: Dtype) -> &'a [Vec<f64>] {
    lines.rows(&format!("gemm:{}", dtype.name()))
}

/// Sizes below the smallest measured ones, where the formula continues the table.
const SMALL: [f64; 4] = [16.0, 64.0, 128.0, 256.0];

/// Seconds of products: measured where it was, and below that what was measured at the nearest size
/// times what the formula says of the difference. Above, the efficiency stays.
fn gemm(lines: &Lines<'_>, dtype: Dtype, device: &Device) -> Option<Scaled<3>> {
    let depths = lines.rows(&format!("gemm_k:{}", dtype.name())).first()?;
    let mut fraction = BTreeMap::new();
    for row in gemm_rows(lines, dtype) {
        let (shape, cells) = row.split_at_checked(2)?;
        for (k, cell) in depths.iter().zip(cells) {
            fraction.insert([shape[0], shape[1], *k].map(f64::to_bits), cell * FRACTION);
        }
    }
    let axes = [0, 1, 2].map(|i| axis(fraction.keys().map(|key| f64::from_bits(key[i]))));
    let first = [0, 1, 2].map(|i| axes[i].first().copied().unwrap_or(1.0));
    let extended = axes.map(|axis| axis_of([SMALL.to_vec(), axis].concat()));
    let seconds = |point: [f64; 3]| {
        let near = [0, 1, 2].map(|i| point[i].max(first[i]));
        let share = fraction.get(&near.map(f64::to_bits)).copied().unwrap_or(f64::NAN);
        let measured_s = 2.0 * near.iter().product::<f64>() / (device.peak_flops(dtype) * share);
        measured_s * roofline::gemm_s(device, dtype, point) / roofline::gemm_s(device, dtype, near)
    };
    Some(Scaled::new(extended, [[0.0; 3], [1.0; 3]], seconds))
}

/// The distinct values, rising.
fn axis(values: impl Iterator<Item = f64>) -> Vec<f64> {
    axis_of(values.collect())
}

fn axis_of(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// Tokens at which the forward efficiency halves on short sequences, below the measured ones.
const HALF_TOKENS: f64 = 1000.0;
/// Sequences below the measured ones.
const SHORT: [f64; 4] = [16.0, 128.0, 256.0, 512.0];
/// Time below the narrowest and above the widest measured head grows with these powers of the width:
/// narrow heads are bound by the softmax, not by the products.
const HEAD_POWERS: [f64; 2] = [0.7, 1.0];
/// FLOPs of a backward pass over those of a forward pass: five products instead of two.
const BACKWARD_FLOPS: f64 = 2.5;
/// Few heads slow a backward pass less than a forward pass, since it also runs in parallel over keys: it
/// loses the factor that the forward pass loses, less this power of it (SimuMax's A100 and B200: .4 to .75).
const BACKWARD_FILLS: f64 = 0.5;

fn attention(lines: &Lines<'_>, device: &Device) -> Option<AttentionTable> {
    let rows = lines.rows("attention");
    let column = |i: usize| axis(rows.iter().filter_map(|row| row.get(i).copied()));
    let (widths, sequences, heads) = (column(0), column(1), column(2));
    let first = *sequences.first()?;
    let peak = device.peak_flops(Dtype::Bf16);
    let forward = |[width, sequence, heads]: [f64; 3]| {
        let flops = 2.0 * width * sequence * sequence * heads;
        let short = |tokens: f64| tokens / (tokens + HALF_TOKENS);
        let measured = sequence.max(first);
        let share = nearest_heads(rows, [width, measured, heads]).unwrap_or(f64::NAN) * FRACTION;
        flops / (peak * share * short(sequence) / short(measured))
    };
    let most = *heads.last()?;
    let backward = |point: [f64; 3]| {
        let ratio = backward_ratio(lines.rows("backward"), point[1]).unwrap_or(f64::NAN);
        let filled = forward([point[0], point[1], most]) / most * point[2] / forward(point);
        BACKWARD_FLOPS * forward(point) * filled.min(1.0).powf(BACKWARD_FILLS) / ratio
    };
    let axes = [widths, axis_of([SHORT.to_vec(), sequences].concat()), heads];
    let powers = [[HEAD_POWERS[0], 0.0, 0.0], [HEAD_POWERS[1], 2.0, 1.0]];
    Some(AttentionTable {
        forward: Scaled::new(axes.clone(), powers, forward),
        backward: Scaled::new(axes, powers, backward),
    })
}

/// Fraction of peak measured at a head width and sequence for the nearest number of heads.
fn nearest_heads(rows: &[Vec<f64>], [width, sequence, heads]: [f64; 3]) -> Option<f64> {
    let same = rows.iter().filter(|row| row[0] == width && row[1] == sequence);
    let distance = |row: &&Vec<f64>| (row[2] / heads).ln().abs();
    same.min_by(|a, b| distance(a).total_cmp(&distance(b)))?.get(3).copied()
}

/// Backward over forward efficiency at the nearest measured sequence.
fn backward_ratio(rows: &[Vec<f64>], sequence: f64) -> Option<f64> {
    let distance = |row: &&Vec<f64>| (row[0] / sequence).ln().abs();
    let near = rows.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
    Some(near.get(1)? * FRACTION)
}

fn stream(lines: &Lines<'_>, device: &Device) -> Option<Scaled<1>> {
    let rows = lines.rows("stream");
    let mut shares = rows.iter().map(|row| row.get(1).map_or(f64::NAN, |cell| cell * FRACTION));
    let bytes = axis(rows.iter().filter_map(|row| row.first().copied()));
    (!bytes.is_empty()).then(|| {
        let seconds = |[bytes]: [f64; 1]| {
            bytes / (device.hbm_bytes_per_s * shares.next().unwrap_or(f64::NAN))
        };
        Scaled::new([bytes], [[0.0], [1.0]], seconds)
    })
}

fn links(lines: &Lines<'_>) -> Option<LinkTable> {
    let collective = |name: &str| {
        let rows = lines.rows(&format!("collective:{name}"));
        let ranks = axis(rows.iter().filter_map(|row| row.first().copied()));
        let bytes = lines.rows("collective_bytes").first()?.clone();
        let mut micros = rows.iter().flat_map(|row| row.iter().skip(1).copied());
        let seconds = |_| micros.next().unwrap_or(f64::NAN) * 1e-6;
        Some(Scaled::new([ranks, bytes], [[0.0; 2], [0.0, 1.0]], seconds))
    };
    Some(LinkTable {
        bytes_per_s: *lines.rows("link").first()?.first()?,
        all_reduce: collective("all_reduce")?,
        all_gather: collective("all_gather")?,
        reduce_scatter: collective("reduce_scatter")?,
        all_to_all: collective("all_to_all")?,
    })
}
