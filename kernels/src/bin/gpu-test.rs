//! `gpu-test [--gpu N] [--json FILE] [--only CASE,CASE]`: tests every launch function of the
//! kernels on a GPU against the reference kernels on the CPU. Needs only the GPU's driver and
//! CUDA's libraries. Writes JSON after each case, then prints a table; exits with 1 if a case
//! fails, with 2 if there is no GPU. An illegal access fails all later cases of a process: `--only`
//! runs a case in one of its own.

#[path = "../../tests/cuda/cases/mod.rs"]
mod cases;
#[path = "gpu/report.rs"]
mod report;

use kernels::cuda::Gpu;
use report::{Options, Value};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failures) => {
            eprintln!("{failures} cases failed");
            ExitCode::from(1)
        }
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<usize, String> {
    let options = Options::read("gpu-test.json")?;
    options.check(&cases::ALL.map(|(name, _)| name))?;
    let gpu = options.open()?;
    let mut rows = Vec::new();
    for (name, case) in cases::ALL.iter().filter(|(name, _)| options.runs(name)) {
        let start = Instant::now();
        let what = judge(&gpu, *case);
        // Timed up to its failure if it fails.
        let seconds = match what {
            None => Value::Number(start.elapsed().as_secs_f64()),
            Some(_) => Value::None,
        };
        eprintln!("{name}: {}", what.as_deref().unwrap_or("ok"));
        rows.push([
            ("case", Value::Text((*name).to_owned())),
            ("result", Value::Text(what.clone().unwrap_or_else(|| "ok".to_owned()))),
            ("seconds", seconds),
        ]);
        report::keep(&options, gpu.properties(), "cases", &rows)?;
    }
    let failures =
        rows.iter().filter(|[_, (_, result), _]| *result != Value::Text("ok".to_owned()));
    let failures = failures.count();
    report::write(&options, gpu.properties(), "cases", &rows)?;
    Ok(failures)
}

/// The failure of a case, if any.
fn judge(gpu: &Gpu, case: cases::Case) -> Option<String> {
    let done = catch_unwind(AssertUnwindSafe(|| {
        case(gpu);
        gpu.synchronize()
    }));
    match done {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Some(text.unwrap_or_else(|| "panicked".to_owned()))
        }
    }
}
