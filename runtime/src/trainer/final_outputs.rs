//! What a run writes after its last step: weights, rank report, trace, and a line that names them.

use super::outputs::{MetricsFile, NewFile, named};
use super::run::{Failure, TrainingRun};
use crate::comm::{CommError, Communicator, Traffic};
use crate::device::Device;
use crate::error::Error;
use crate::launch::interrupt::say;
use crate::report::{DeviceMemory, ProcessMemory, RankReport, Resident};
use crate::scalar::Scalar;
use crate::state::checkpoint::{self, Tensors};

impl<D: Device> TrainingRun<'_, '_, D> {
    /// Prints which files were written, other than `lost`.
    pub(super) fn say_written(&self, lost: &[&str]) {
        let whole = self.outputs.metrics.as_ref().is_none_or(MetricsFile::is_whole);
        let written = named(self.job.flags).into_iter();
        let written = written.filter(|(flag, _)| whole || *flag != "metrics");
        let written = written.filter(|(flag, _)| !lost.contains(flag));
        let written = written.filter_map(|(flag, path)| Some((flag, path?)));
        let written = written.map(|(flag, path)| format!("{} (--{flag})", path.display()));
        let written: Vec<String> = written.collect();
        if self.progress.is_some() && !written.is_empty() {
            say(&format!("wrote     {}", written.join(", ")));
        }
    }

    /// Writes the weights if asked for.
    pub(super) fn write_weights(&mut self) -> Result<(), Error> {
        if self.job.flags.dump_weights.is_none() {
            return Ok(());
        }
        let weights = self.rank.whole_weights()?;
        write_tensors(self.outputs.weights.take(), weights)
    }

    /// After a failure, writes the weights if they can still be gathered; rank 0 prints what became
    /// of them.
    pub(super) fn save_weights(&mut self, failure: &Failure) {
        let Some(path) = &self.job.flags.dump_weights else { return };
        let (steps, ranks) = (self.rank.completed_steps(), self.rank.ranks_of_model());
        let device_failed = matches!(failure.error, Error::Comm(CommError::Device(_)));
        let why_not = if steps == 0 {
            Some("no step was completed".to_owned())
        } else if device_failed {
            Some("the device that holds the weights failed".to_owned())
        } else if !failure.together && ranks > 1 {
            let lost = "ranks that ended in the middle of a step, or are gone";
            Some(format!("the weights of step {steps} are split over {ranks} {lost}"))
        } else {
            self.write_weights().err().map(|error| error.to_string())
        };
        if self.rank.groups().world.rank() > 0 {
            return;
        }
        let path = path.display();
        match why_not {
            None => eprintln!("--dump-weights: the weights after step {steps} are in {path}"),
            Some(why_not) => eprintln!("--dump-weights: {path} is not written: {why_not}"),
        }
    }

    pub(super) fn write_rank_report(&mut self, traffic: &Traffic) -> Result<(), Error> {
        let (Some(_), Some(last)) = (&self.job.flags.rank_report, &self.last) else {
            return Ok(());
        };
        let (groups, inventory) = (self.rank.groups(), self.rank.inventory());
        let mut outcome = last.outcome.clone();
        outcome.peak_bytes = self.peak_bytes;
        let bytes = self.rank.state_memory();
        let Resident { now_bytes, peak_bytes } = Resident::read();
        let process_memory = ProcessMemory {
            resident_bytes: now_bytes,
            peak_resident_bytes: peak_bytes,
            ranks: self.job.ranks_in_process,
        };
        let steps = self.rank.completed_steps();
        let mut report =
            RankReport::new(groups, inventory, bytes, &outcome, steps, process_memory, traffic);
        let planned_bytes = self.job.spec.planned_memory_bytes();
        report.device_memory =
            self.rank.memory_use().map(|seen| DeviceMemory { planned_bytes, seen });
        report.cuda_graphs = self.job.flags.gpu.map(|_| self.rank.replays());
        report.chosen_kernels = self.rank.chosen_kernels();
        let line = serde_json::to_string(&report).unwrap_or_default();
        let lines = gather_text(&*groups.world, &line)?;
        write_lines(self.outputs.rank_report.take(), lines)
    }

    pub(super) fn write_trace(&mut self) -> Result<(), Error> {
        let Some(trace) = &self.trace else { return Ok(()) };
        let text = trace.lines().join(",\n");
        let ranks = gather_text(&*self.rank.groups().world, &text)?;
        let events = |ranks: Vec<String>| {
            let events: Vec<String> = ranks.into_iter().filter(|text| !text.is_empty()).collect();
            vec![format!("{{\"traceEvents\":[\n{}\n]}}", events.join(",\n"))]
        };
        write_lines(self.outputs.trace.take(), ranks.map(events))
    }
}

/// Gathers every rank's text on rank 0.
pub(super) fn gather_text(
    world: &dyn Communicator,
    text: &str,
) -> Result<Option<Vec<String>>, CommError> {
    const TAG: u64 = (1 << 61) + 1;
    let lengths = world.gather(&[text.len() as i64], 0)?;
    if world.rank() > 0 {
        world.send(text.as_bytes(), 0, TAG)?;
        return Ok(None);
    }
    let mut all = vec![text.to_owned()];
    for (from, &length) in lengths.iter().enumerate().skip(1) {
        let bytes: Vec<u8> = world.recv(length as usize, from, TAG)?;
        all.push(String::from_utf8_lossy(&bytes).into_owned());
    }
    Ok(Some(all))
}

/// Writes lines on rank 0, the only rank that has both arguments.
fn write_lines(file: Option<NewFile>, lines: Option<Vec<String>>) -> Result<(), Error> {
    let (Some(file), Some(lines)) = (file, lines) else { return Ok(()) };
    file.write(|to| lines.iter().try_for_each(|line| writeln!(to, "{line}")))
}

/// Writes tensors on rank 0, the only rank that has both arguments.
pub(super) fn write_tensors<T: Scalar>(
    file: Option<NewFile>,
    tensors: Option<Tensors<T>>,
) -> Result<(), Error> {
    let (Some(file), Some(tensors)) = (file, tensors) else { return Ok(()) };
    file.write(|to| checkpoint::write(to, &tensors))
}
