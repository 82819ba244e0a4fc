//! The processes that `plan launch` starts. They get its signals, and they end when it ends,
//! however it ends.

use crate::failure::Failure;
use crate::output::say;
use models::input::InputError;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Tells a trainer to end when its standard input is closed. This process holds the other end of
/// the pipe.
const ENDS_WITH_INPUT: (&str, &str) = ("MESHWRIGHT_ENDS_WITH_STDIN", "1");

/// How long the other processes may go on after one has failed: enough to notice and report it.
const GRACE: Duration = Duration::from_secs(20);

/// How long processes may take to end after a second signal.
const KILL_AFTER: Duration = Duration::from_secs(5);

/// The exit code of an interrupted run.
const INTERRUPTED: u8 = 130;

/// Polling interval.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Counts the signals that asked this process to end.
#[derive(Clone, Default)]
pub struct Asked(Arc<AtomicUsize>);

/// Signals that follow another within this time are the same request: `timeout` signals its child,
/// then the child's process group.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// A trainer's exit code for invalid input.
const INPUT: u8 = 2;

impl Asked {
    /// Counts Ctrl-C, SIGTERM and SIGHUP from now on, instead of ending.
    pub fn listen() -> Result<Self, Failure> {
        let asked = Self::default();
        let count = asked.0.clone();
        let mut last: Option<Instant> = None;
        let heard = move || {
            if last.is_none_or(|last| last.elapsed() >= ONE_REQUEST) {
                last = Some(Instant::now());
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        ctrlc::set_handler(heard).map_err(|error| Failure::Bug(error.into()))?;
        Ok(asked)
    }

    fn times(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Starts a process.
pub fn start(command: &mut Command, what: &str, help: &str) -> Result<Child, Failure> {
    command
        .spawn()
        .map_err(|error| InputError::new(format!("cannot run {what}: {error}")).help(help).into())
}

/// Runs processes to their end, and returns the first failure's exit code, or that of invalid input
/// where any process has it. After a failure the
/// others are killed when the grace period is over. Each signal to this process is passed on once:
/// the first lets the trainers end in their own way, the second ends them at once.
pub fn run_all(commands: Vec<Command>, help: &str, asked: &Asked) -> Result<(), Failure> {
    let mut running = Vec::with_capacity(commands.len());
    let several = commands.len() > 1;
    for (rank, mut command) in commands.into_iter().enumerate() {
        let what = command.get_program().to_string_lossy().into_owned();
        // The pipe closes when this process ends, even if it is killed.
        command.env(ENDS_WITH_INPUT.0, ENDS_WITH_INPUT.1).stdin(Stdio::piped());
        in_own_group(&mut command);
        let name = if several { format!("rank {rank}") } else { "the trainer".to_owned() };
        running.push((name, start(&mut command, &what, help)?));
    }
    let (mut passed_on, mut last_signal, mut failed, mut killed) = (0, None, None, false);
    let mut first_code = 0;
    while !running.is_empty() {
        if asked.times() > passed_on {
            passed_on += 1;
            last_signal = Some(Instant::now());
            running.iter_mut().for_each(|(_, child)| ask(child));
        }
        let mut still = Vec::with_capacity(running.len());
        for (name, mut child) in running {
            match child.try_wait().map_err(|error| Failure::Bug(error.into()))? {
                None => still.push((name, child)),
                Some(status) if status.success() => {}
                Some(status) => {
                    if let Some(signal) = signal(status).filter(|_| passed_on == 0 && !killed) {
                        say(&format!("error: {name} was ended by {}", in_words(signal)));
                    }
                    let code = exit_code(status, passed_on > 0);
                    // A rank that refuses its input makes the others fail, perhaps earlier.
                    if first_code == 0 || (code == INPUT && !killed) {
                        first_code = code;
                    }
                    failed.get_or_insert_with(Instant::now);
                }
            }
        }
        let over = |since: Option<Instant>, limit| since.is_some_and(|t| t.elapsed() > limit);
        if over(failed, GRACE) || (passed_on > 1 && over(last_signal, KILL_AFTER)) {
            killed = true;
            // Killing fails if the process has just ended, which is fine.
            still.iter_mut().for_each(|(_, child)| drop(child.kill()));
        }
        running = still;
        std::thread::sleep(LOOK_EVERY);
    }
    match first_code {
        0 => Ok(()),
        code => Err(Failure::Trainer(code)),
    }
}

/// The trainer's own exit code; for a process ended by a signal that of an interrupted run if this
/// process passed the signal on, else 1.
fn exit_code(status: ExitStatus, interrupted: bool) -> u8 {
    match status.code() {
        None if interrupted => INTERRUPTED,
        code => code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1),
    }
}

/// The signal that ended a process.
#[cfg(unix)]
fn signal(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

#[cfg(not(unix))]
fn signal(_: ExitStatus) -> Option<i32> {
    None
}

/// A signal by number, and by name where that helps.
fn in_words(signal: i32) -> String {
    let name = match signal {
        6 => "SIGABRT",
        9 => "SIGKILL; out of memory?",
        11 => "SIGSEGV",
        15 => "SIGTERM",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

/// Puts the process into a group of its own. Ctrl-C reaches a terminal's whole process group, and
/// the process would get it twice.
#[cfg(unix)]
fn in_own_group(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(not(unix))]
fn in_own_group(_: &mut Command) {}

/// Asks a process to end.
#[cfg(unix)]
fn ask(child: &mut Child) {
    use rustix::process::{Pid, Signal, kill_process};
    // It may have ended in the meantime.
    let _ended = kill_process(Pid::from_child(child), Signal::TERM);
}

#[cfg(not(unix))]
fn ask(child: &mut Child) {
    // It may have ended in the meantime.
    let _ended = child.kill();
}
