//! Ctrl-C and SIGTERM: an interrupted run ends after its current step, with all requested files
//! written.

use crate::error::Error;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Whether somebody has asked the run to end.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    asked: AtomicBool,
    /// When it was asked first.
    since: OnceLock<Instant>,
    progress: AtomicU8,
    /// Files that are worthless if the process ends at once.
    unfinished: Mutex<Vec<PathBuf>>,
}

/// Signals that follow the first within this time are the same request: `timeout` signals its
/// child, then the child's process group.
const ONE_REQUEST: Duration = Duration::from_millis(500);

/// No step is done yet, so there is nothing to wait for.
const STARTING: u8 = 0;
/// Between the first step and the last.
const STEPPING: u8 = 1;
/// All steps are done; files are being written.
const FINISHING: u8 = 2;

/// Writes a line to standard error; it does not matter if nobody reads it.
pub(crate) fn say(line: &str) {
    let _nobody_reads = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Exit code of an interrupted run: what shells report of a program that Ctrl-C ended.
pub const INTERRUPTED: u8 = 130;

impl Interrupt {
    /// Listens for Ctrl-C, SIGTERM and SIGHUP. The first ends the run after its current step, at
    /// the latest after `patience`, or at once if no step is done yet. The second ends it at once.
    ///
    /// # Errors
    /// The system refuses, or this process listens already.
    pub fn listen(patience: Duration) -> Result<Self, Error> {
        let interrupt = Self::default();
        let state = interrupt.state.clone();
        let deaf = |error: ctrlc::Error| Error::World {
            problem: format!("cannot listen for Ctrl-C: {error}"),
        };
        ctrlc::set_handler(move || State::interrupted(&state, patience)).map_err(deaf)?;
        Ok(interrupt)
    }

    /// Asks the run to end when `input` ends, like a first Ctrl-C. A launcher holds the other end
    /// of `input`, which closes however the launcher ends.
    pub fn ask_at_end_of(&self, mut input: impl Read + Send + 'static, patience: Duration) {
        let interrupt = self.clone();
        std::thread::spawn(move || {
            // An input that cannot be read counts as ended.
            let _ended = std::io::copy(&mut input, &mut std::io::sink());
            if !interrupt.is_asked() {
                say("the launcher has ended");
                State::interrupted(&interrupt.state, patience);
            }
        });
    }

    /// Asks the run to end.
    pub fn ask(&self) {
        self.state.asked.store(true, Ordering::Relaxed);
    }

    /// Whether the run has been asked to end.
    pub fn is_asked(&self) -> bool {
        self.state.asked.load(Ordering::Relaxed)
    }

    /// Notes that a step is done.
    pub(crate) fn stepped(&self) {
        self.state.progress.fetch_max(STEPPING, Ordering::Relaxed);
    }

    /// Notes that no more steps follow.
    pub(crate) fn finishing(&self) {
        self.state.progress.store(FINISHING, Ordering::Relaxed);
    }

    /// Adds files to remove if the process ends at once.
    pub(crate) fn removes(&self, unfinished: Vec<PathBuf>) {
        self.state.unfinished.lock().unwrap_or_else(PoisonError::into_inner).extend(unfinished);
    }
}

impl State {
    fn interrupted(state: &Arc<Self>, patience: Duration) {
        let since = *state.since.get_or_init(Instant::now);
        if state.asked.swap(true, Ordering::Relaxed) {
            if since.elapsed() < ONE_REQUEST {
                return;
            }
            state.quit("interrupted again: ends at once");
        }
        match state.progress.load(Ordering::Relaxed) {
            STARTING => state.quit("interrupted: ends at once, no step is done yet"),
            STEPPING => {
                say("interrupted: ends after this step; once more to end at once");
                let state = state.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(patience);
                    if state.progress.load(Ordering::Relaxed) == STEPPING {
                        let waited = patience.as_secs();
                        state.quit(&format!(
                            "the step has not ended within {waited} s: ends at once"
                        ));
                    }
                });
            }
            _ => {
                say("interrupted: all steps are done; once more to end before all is written");
            }
        }
    }

    fn quit(&self, why: &str) -> ! {
        say(why);
        let unfinished = self.unfinished.lock().unwrap_or_else(PoisonError::into_inner);
        for path in unfinished.iter() {
            // Files that are already renamed are no longer there.
            let _gone = std::fs::remove_file(path);
        }
        std::process::exit(i32::from(INTERRUPTED));
    }
}
