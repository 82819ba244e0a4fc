//! Ctrl-C: a run that is asked to end does so behind its step, with everything written that was asked for.

use crate::error::Error;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody wants the run to end.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
}

/// Writes a line for whoever watches; nobody need.
pub(crate) fn say(line: &str) {
    let _nobody_reads = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// The exit code of an interrupted run: what a shell reports of a program that Ctrl-C ended.
pub const INTERRUPTED: u8 = 130;

impl Interrupt {
    /// Listens for Ctrl-C and a polite kill. The second time the process ends at once.
    ///
    /// # Errors
    /// The system does not let it, or this process listens already.
    pub fn listen() -> Result<Self, Error> {
        let interrupt = Self::default();
        let asked = interrupt.asked.clone();
        let heard = move || {
            if asked.swap(true, Ordering::Relaxed) {
                std::process::exit(i32::from(INTERRUPTED));
            }
            say("interrupted: ends behind this step; once more to end at once");
        };
        let deaf = |error: ctrlc::Error| Error::World {
            problem: format!("cannot listen for Ctrl-C: {error}"),
        };
        ctrlc::set_handler(heard).map_err(deaf)?;
        Ok(interrupt)
    }

    /// Asks the run to end once `input` does: a launcher holds its other end, however the launcher ends.
    pub fn ask_at_end_of(&self, mut input: impl Read + Send + 'static) {
        let interrupt = self.clone();
        std::thread::spawn(move || {
            // An input that cannot be read has ended, too.
            let _ended = std::io::copy(&mut input, &mut std::io::sink());
            if !interrupt.is_asked() {
                interrupt.ask();
                say("interrupted: the launcher has ended; ends behind this step");
            }
        });
    }

    /// Asks the run to end.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Whether it has been asked to.
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }
}
