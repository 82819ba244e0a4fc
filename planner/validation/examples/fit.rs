//! Fits the constants of software generations and devices to published runs. Reports errors with
//! all runs fitted, cross-validated by group, and with each source, each software generation or
//! each architecture left out.
//!
//!     cargo run --release -p meshwright-validation --example fit -- \
//!         tests/papers/measured.csv models/shipped/clusters
//!
//! The second argument is optional: the folder whose files are rewritten, with `measured_runs.yaml`
//! beside it. With `SHOW_ROWS` in the environment, the errors of every row are printed too.

use models::cluster::MeasuredRuns;
use std::path::Path;
use validation::architecture::architecture;
use validation::fit::write::{measured_runs_text, write};
use validation::fit::{
    Sample, ScaledBy, band, bands, calibrated, fit, folds, held_out, measured_runs, samples,
};
use validation::row;
use validation::score::{SourceScore, of_errors};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let measured =
        arguments.next().ok_or_else(|| anyhow::anyhow!("give a file of measurements"))?;
    let rows = row::read(Path::new(&measured))?;
    let samples = samples(&rows);
    eprintln!("{} rows", samples.len());
    let mut fitted = fit(&samples);
    let observations = fitted.observations(&samples);
    let fold = folds(&samples);
    let cross =
        held_out(&fitted, &samples, &observations, |sample| fold[&sample.row.group].to_string());
    let source = held_out(&fitted, &samples, &observations, |sample| sample.row.file.clone());
    fitted.bands = bands(&samples, &cross);
    let generation =
        held_out(&fitted, &samples, &observations, |sample| sample.setup.generation.clone());
    let model =
        held_out(&fitted, &samples, &observations, |sample| architecture(sample.row).to_owned());
    let scaled = [ScaledBy::All, ScaledBy::Others].map(|by| calibrated(&samples, &source, by));
    if std::env::var_os("SHOW_ROWS").is_some() {
        show_rows(&samples, [&fitted.errors(&samples), &cross, &source, &generation, &model]);
    }
    let own = fitted.errors(&samples);
    report(&samples, [&own, &cross, &source, &generation, &model, &scaled[0], &scaled[1]]);
    for (knob, value) in fitted.knobs.iter().zip(&fitted.values) {
        println!("{:?} {} {:.4} (prior {})", knob.owner, knob.field.key, value, knob.prior());
    }
    let unseen_band = band(&samples, &generation);
    let runs = MeasuredRuns { unseen_band, generations: measured_runs(&samples) };
    let runs = measured_runs_text(&runs);
    print!("{runs}");
    if let Some(folder) = arguments.next() {
        let folder = Path::new(&folder);
        write(&fitted, folder)?;
        std::fs::write(folder.with_file_name("measured_runs.yaml"), runs)?;
    }
    Ok(())
}

/// Signed errors of each row in %: fitted, cross-validated, and with its source, its software
/// generation or its architecture left out.
fn show_rows(samples: &[Sample<'_>], errors: [&[f64]; 5]) {
    for (index, Sample { row, setup, .. }) in samples.iter().enumerate() {
        print!("{} {} {} {}", row.file, row.id, setup.generation, row.group.replace(' ', "_"));
        for errors in errors {
            print!(" {:+.1}", 100.0 * errors[index]);
        }
        println!();
    }
}

fn report(samples: &[Sample<'_>], errors: [&[f64]; 7]) {
    let rows: Vec<&row::Row> = samples.iter().map(|sample| sample.row).collect();
    let scores: Vec<Vec<SourceScore>> =
        errors.iter().map(|errors| of_errors(&rows, errors)).collect();
    println!(
        "mean/median of |error|, %     fitted   5-fold   source left out   generation left out   architecture left out   source left out, one scale in hindsight   learnt from its other groups"
    );
    for (index, s) in scores[0].iter().enumerate() {
        print!("{:26} {:4}/{:3}", s.source, s.rows, s.groups);
        for score in &scores {
            print!(" {:6.2}/{:5.2}", 100.0 * score[index].mean, 100.0 * score[index].median);
        }
        println!();
    }
}
