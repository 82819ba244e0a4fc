//! Writes fitted constants into the shipped files, and leaves comments and all else unchanged.

use super::Fit;
use super::knobs::Owner;
use models::cluster::{MeasuredRuns, Runs};
use models::input::InputError;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Rewrites `software.yaml` and the cluster files of `folder` with the constants of a fit.
///
/// # Errors
/// A file cannot be read or written.
pub fn write(fit: &Fit, folder: &Path) -> Result<(), InputError> {
    let failed = |error: std::io::Error| {
        InputError::new(format!("cannot rewrite the files of {}: {error}", folder.display()))
    };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_software = path.file_name().is_some_and(|name| name == "software.yaml");
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(failed)?;
        let rewritten = if is_software { software(fit, &text) } else { cluster(fit, &text) };
        if rewritten != text {
            fs::write(&path, rewritten).map_err(failed)?;
        }
    }
    Ok(())
}

/// The text of `measured_runs.yaml`, which says for which runs the error bands hold.
pub fn measured_runs_text(found: &MeasuredRuns) -> String {
    let words = |all: &BTreeSet<String>| all.iter().cloned().collect::<Vec<_>>().join(", ");
    let mut text = String::from(
        "# What the measured runs of each generation of software had (tests/papers/measured.csv): where its error band\n\
         # holds. A plan with anything else has `unseen_band`: what four in five groups of runs lay within where no run of\n\
         # their software had been seen. Written by the fit (docs/validation.md); not to be edited.\n",
    );
    text += &format!("unseen_band: {:.2}\ngenerations:\n", found.unseen_band);
    for (name, Runs { gpus, seq_len, had }) in &found.generations {
        text += &format!(
            "  {name}:\n    gpus: {gpus:?}\n    seq_len: {seq_len:?}\n    had: [{}]\n",
            words(had)
        );
    }
    text
}

fn software(fit: &Fit, text: &str) -> String {
    let mut generation = String::new();
    let line = |line: &str| {
        if let Some((name, _)) = line.split_once(':').filter(|(name, _)| is_name(name)) {
            name.clone_into(&mut generation);
        }
        replaced(fit, &Owner::Software(generation.clone()), line)
    };
    text.lines().map(line).collect()
}

fn cluster(fit: &Fit, text: &str) -> String {
    let device = text.lines().filter_map(|line| line.strip_prefix("  name: ")).next();
    let owner = Owner::Device(device.unwrap_or_default().trim().to_owned());
    text.lines().map(|line| replaced(fit, &owner, line)).collect()
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A line, with its value replaced if it holds a constant of the owner.
fn replaced(fit: &Fit, owner: &Owner, line: &str) -> String {
    let found = fit.knobs.iter().zip(&fit.values).find(|(knob, _)| {
        knob.owner == *owner
            && line
                .trim_start()
                .strip_prefix(knob.field.key)
                .is_some_and(|rest| rest.starts_with(':'))
    });
    let band = match owner {
        Owner::Software(name) if line.starts_with("  error_band:") => fit.bands.get(name),
        _ => None,
    };
    if let Some(band) = band {
        return format!("  error_band: {band:.2}\n");
    }
    let Some((knob, value)) = found else { return format!("{line}\n") };
    let comment =
        line.split_once('#').map_or(String::new(), |(_, comment)| format!("  #{comment}"));
    format!("  {}: {}{comment}\n", knob.field.key, four_digits(*value))
}

/// Four significant digits: with three, a constant just above 1 would be off by up to half a
/// percent.
fn four_digits(value: f64) -> String {
    let decimals = (3.0 - value.abs().log10().floor()).max(0.0) as usize;
    let text = format!("{value:.decimals$}");
    if decimals == 0 { format!("{text}.0") } else { text }
}

#[cfg(test)]
mod tests {
    use super::four_digits;

    #[test]
    fn constants_have_four_digits() {
        assert_eq!(four_digits(1.083_44), "1.083");
        assert_eq!(four_digits(0.000_312_451), "0.0003125");
    }
}
