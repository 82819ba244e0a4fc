//! The processes that `plan launch` starts: its signals reach them, and they end with it, however it ends.

use crate::failure::Failure;
use models::input::InputError;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Tells a trainer to end when its standard input does, whose other end this process holds.
const ENDS_WITH_INPUT: (&str, &str) = ("MESHWRIGHT_ENDS_WITH_STDIN", "1");

/// How long the others may go on where one has failed: they learn of it, and say so.
const GRACE: Duration = Duration::from_secs(20);

/// How long a process may take to end at once.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The exit code of a run that somebody ended.
const INTERRUPTED: u8 = 130;

/// How often the processes are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How often this process was asked to end.
#[derive(Clone, Default)]
pub struct Asked(Arc<AtomicUsize>);

impl Asked {
    /// Counts Ctrl-C, SIGTERM and SIGHUP from now on, instead of ending.
    pub fn listen() -> Result<Self, Failure> {
        let asked = Self::default();
        let count = asked.0.clone();
        let heard = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        ctrlc::set_handler(heard).map_err(|error| Failure::Bug(error.into()))?;
        Ok(asked)
    }

    fn times(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Starts a process.
pub fn started(command: &mut Command, what: &str, help: &str) -> Result<Child, Failure> {
    command
        .spawn()
        .map_err(|error| InputError::new(format!("cannot run {what}: {error}")).help(help).into())
}

/// Runs processes to their end, and ends the others some time after one has failed: gives the first failure's exit code.
/// Each signal to this process is passed on to them once: the first lets them end as they see fit, the second at once.
pub fn together(commands: Vec<Command>, help: &str, asked: &Asked) -> Result<(), Failure> {
    let mut running = Vec::with_capacity(commands.len());
    for mut command in commands {
        let what = command.get_program().to_string_lossy().into_owned();
        // The pipe is closed when this process ends, even where nothing can be passed on any more.
        command.env(ENDS_WITH_INPUT.0, ENDS_WITH_INPUT.1).stdin(Stdio::piped());
        apart(&mut command);
        running.push(started(&mut command, &what, help)?);
    }
    let (mut passed_on, mut last_signal, mut failed) = (0, None, None);
    let mut first_code = 0;
    while !running.is_empty() {
        if asked.times() > passed_on {
            passed_on += 1;
            last_signal = Some(Instant::now());
            running.iter_mut().for_each(ask);
        }
        let mut still = Vec::with_capacity(running.len());
        for mut child in running {
            match child.try_wait().map_err(|error| Failure::Bug(error.into()))? {
                None => still.push(child),
                Some(status) if status.success() => {}
                Some(status) => {
                    failed.get_or_insert_with(|| {
                        first_code = exit_code(status, passed_on > 0);
                        Instant::now()
                    });
                }
            }
        }
        let over = |since: Option<Instant>, limit| since.is_some_and(|t| t.elapsed() > limit);
        if over(failed, GRACE) || (passed_on > 1 && over(last_signal, AT_ONCE)) {
            // One that has ended meanwhile is as good as ended here.
            still.iter_mut().for_each(|child| drop(child.kill()));
        }
        running = still;
        std::thread::sleep(LOOK_EVERY);
    }
    match first_code {
        0 => Ok(()),
        code => Err(Failure::Trainer(code)),
    }
}

/// The trainer's own exit code. One that a signal ended has the shell's, 128 and the signal, or where it was passed on,
/// that of an interrupted run.
fn exit_code(status: ExitStatus, interrupted: bool) -> u8 {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status).map(|signal| 128 + signal);
    #[cfg(not(unix))]
    let signal = None;
    match (status.code(), signal) {
        (None, Some(_)) if interrupted => INTERRUPTED,
        (code, signal) => code.or(signal).and_then(|code| u8::try_from(code).ok()).unwrap_or(1),
    }
}

/// A terminal's Ctrl-C reaches all of a group: in one of its own a process gets it from here alone, and once.
#[cfg(unix)]
fn apart(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(not(unix))]
fn apart(_: &mut Command) {}

/// Asks a process to end.
#[cfg(unix)]
fn ask(child: &mut Child) {
    use rustix::process::{Pid, Signal, kill_process};
    // It may have ended meanwhile.
    let _ended = kill_process(Pid::from_child(child), Signal::TERM);
}

#[cfg(not(unix))]
fn ask(child: &mut Child) {
    // It may have ended meanwhile.
    let _ended = child.kill();
}
