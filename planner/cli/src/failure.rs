//! Why a command ended early, and its exit code.

use models::input::InputError;
use models::text::shown_lines;
use std::fmt;

/// A failure, by who has to act.
#[derive(Debug)]
pub enum Failure {
    /// The user has to correct the input: exit code 2.
    Input(InputError),
    /// Nothing fits: exit code 3.
    Infeasible(String),
    /// The time limit was reached without a result: exit code 4.
    Undecided(&'static str),
    /// A check failed and has printed what it found: exit code 2.
    Refused,
    /// The user interrupted the command, which has printed what it knew: exit code 130.
    Interrupted(&'static str),
    /// A trainer failed and has printed why: its own exit code.
    Trainer(u8),
    /// A bug in Meshwright: exit code 1.
    Bug(anyhow::Error),
}

impl Failure {
    /// The exit code of the process.
    pub fn code(&self) -> u8 {
        match self {
            Self::Bug(_) => 1,
            Self::Input(_) | Self::Refused => 2,
            Self::Infeasible(_) => 3,
            Self::Undecided(_) => 4,
            Self::Interrupted(_) => 130,
            Self::Trainer(code) => *code,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(error) => writeln!(f, "{error}"),
            Self::Infeasible(text) => f.write_str(&shown_lines(text)),
            Self::Undecided(text) => f.write_str(text),
            Self::Interrupted(text) => writeln!(f, "interrupted: {text}"),
            Self::Refused | Self::Trainer(_) => Ok(()),
            Self::Bug(error) => {
                let error = format!("{error:#}");
                writeln!(f, "error: {}\n  this is a bug of ours", shown_lines(&error))
            }
        }
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Self {
        Self::Input(error)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Bug(error)
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::Bug(error.into())
    }
}

impl From<serde_yaml::ser::Error> for Failure {
    fn from(error: serde_yaml::ser::Error) -> Self {
        Self::Bug(anyhow::anyhow!("{error}"))
    }
}
