//! Measurements of a GPU as efficiency tables: the lines that [`super::EfficiencyTables::read`]
//! takes.

use super::limits::MOST_OF_PEAK;
use super::tables::{BACKWARD_FLOPS, FRACTION, attention_flops};
use super::{CollectiveKind, Device, Dtype, MeasuredGpu};
use crate::formulas::flops::product_flops;
use crate::input::InputError;
use std::collections::BTreeMap;
use std::fmt::{Display, Write};

/// Measurements as tables, in fractions of what `device` could do; links take `link_lines` where
/// none were measured. Looked up on the same device, a measured point gives its measured time.
///
/// # Errors
/// Sizes that are not each measured with each, and times that `device` cannot have.
pub fn table_text(
    measured: &MeasuredGpu,
    device: &Device,
    link_lines: &str,
    link_bytes_per_s: f64,
) -> Result<String, InputError> {
    let mut text = String::new();
    products(&mut text, measured, device)?;
    attention(&mut text, measured, device)?;
    let mut copies = measured.copies.clone();
    copies.sort_by(|a, b| a.bytes.total_cmp(&b.bytes));
    for copy in &copies {
        let share = share(copy.bytes / device.hbm_bytes_per_s, copy.s, || {
            format!("a copy of {} bytes", copy.bytes)
        })?;
        line(&mut text, "stream", &[&copy.bytes, &share]);
    }
    match measured.collectives.is_empty() {
        true => text.push_str(link_lines),
        false => collectives(&mut text, measured, link_bytes_per_s)?,
    }
    Ok(text)
}

fn line(text: &mut String, key: &str, cells: &[&dyn Display]) {
    text.push_str(key);
    for cell in cells {
        // Writing to a string cannot fail.
        let _ = write!(text, ",{cell}");
    }
    text.push('\n');
}

/// The least possible time over the measured one, as files write it.
fn share(least_s: f64, s: f64, what: impl Fn() -> String) -> Result<String, InputError> {
    let share = least_s / s;
    // A kernel that is faster was measured on another device.
    if share > 0.0 && share < MOST_OF_PEAK {
        return Ok(format!("{:.4}", share / FRACTION));
    }
    let message = format!("{} took {s:e} s, {share:.3} of what this cluster's device can", what());
    Err(InputError::new(message).help("valid: --cluster with the GPU that was measured"))
}

fn missing(what: &str) -> InputError {
    InputError::new(format!("{what} was not measured"))
        .help("measure again: each size is needed with each other")
}

fn products(text: &mut String, measured: &MeasuredGpu, device: &Device) -> Result<(), InputError> {
    let mut by_format: BTreeMap<Dtype, BTreeMap<[u64; 2], BTreeMap<u64, f64>>> = BTreeMap::new();
    for product in &measured.products {
        let rows = by_format.entry(product.dtype).or_default();
        rows.entry([product.m, product.n]).or_default().insert(product.k, product.s);
    }
    for (dtype, rows) in by_format {
        let name = dtype.name();
        let Some(&peak) = device.peak_flops.get(&dtype) else {
            let message = format!("the cluster gives no peak for {name}, which was measured");
            return Err(InputError::new(message).help("add it to `peak_flops`"));
        };
        let depths: Vec<u64> = rows.values().flat_map(|row| row.keys().copied()).collect();
        let depths = sorted(depths);
        let cells: Vec<&dyn Display> = depths.iter().map(|k| k as &dyn Display).collect();
        line(text, &format!("gemm_k:{name}"), &cells);
        for ([m, n], row) in rows {
            let mut cells = vec![m.to_string(), n.to_string()];
            for &k in &depths {
                let what = || format!("a product {m} x {n} x {k} in {name}");
                let s = *row.get(&k).ok_or_else(|| missing(&what()))?;
                cells.push(share(product_flops(m as f64, n as f64, k as f64) / peak, s, what)?);
            }
            let cells: Vec<&dyn Display> = cells.iter().map(|cell| cell as &dyn Display).collect();
            line(text, &format!("gemm:{name}"), &cells);
        }
    }
    Ok(())
}

fn sorted(mut values: Vec<u64>) -> Vec<u64> {
    values.sort_unstable();
    values.dedup();
    values
}

fn attention(text: &mut String, measured: &MeasuredGpu, device: &Device) -> Result<(), InputError> {
    for (key, products) in [("attention", 1.0), ("attention_backward", BACKWARD_FLOPS)] {
        for core in &measured.attention {
            let heads = core.batch * core.heads;
            let [width, sequence, count] =
                [core.head_dim, core.seq_len, heads].map(|size| size as f64);
            let s = if products == 1.0 { core.forward_s } else { core.backward_s };
            let flops = products * attention_flops(width, sequence, count);
            let what = || format!("{key} of {heads} heads of {width} over {sequence} tokens");
            let share = share(flops / device.peak_flops(Dtype::Bf16), s, what)?;
            line(text, key, &[&core.head_dim, &core.seq_len, &heads, &share]);
        }
    }
    Ok(())
}

fn collectives(
    text: &mut String,
    measured: &MeasuredGpu,
    link_bytes_per_s: f64,
) -> Result<(), InputError> {
    let found = &measured.collectives;
    let ranks = sorted(found.iter().map(|of| of.ranks).collect());
    let mut sizes: Vec<f64> = found.iter().map(|of| of.bytes).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    line(text, "link", &[&link_bytes_per_s]);
    let cells: Vec<&dyn Display> = sizes.iter().map(|bytes| bytes as &dyn Display).collect();
    line(text, "collective_bytes", &cells);
    // Collectives that ranks on one GPU cannot do yet have no table.
    for kind in CollectiveKind::ALL {
        if !found.iter().any(|of| of.kind == kind) {
            continue;
        }
        for &ranks in &ranks {
            let mut cells = vec![ranks.to_string()];
            for &bytes in &sizes {
                let same = |of: &&super::Collective| {
                    (of.kind, of.ranks, of.bytes.to_bits()) == (kind, ranks, bytes.to_bits())
                };
                let what = format!("{} of {bytes} bytes over {ranks} ranks", kind.name());
                let of = found.iter().find(same).ok_or_else(|| missing(&what))?;
                cells.push(format!("{:.4}", of.s * 1e6));
            }
            let cells: Vec<&dyn Display> = cells.iter().map(|cell| cell as &dyn Display).collect();
            line(text, &format!("collective:{}", kind.name()), &cells);
        }
    }
    Ok(())
}
