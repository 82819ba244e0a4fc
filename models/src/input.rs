//! What a user got wrong, where, and what would be valid.

use std::fmt;

/// An error the user must act on: file, line, column, field, and what would be valid.
///
/// Prints as
/// ```text
/// error: heads (64) cannot be split over tp = 6
///   --> my-model.yaml:7:10
///    |
///  7 |   heads: 64
///    |          ^^ tp must divide this; --set tp= takes 1, 2, 4, 8, 16, 32, 64
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputError {
    /// What is wrong, naming field and value.
    pub message: String,
    /// Where, if it lies in a file.
    pub place: Option<Place>,
    /// What would be valid (printed at the caret, or as `help:` without a place).
    pub help: Option<String>,
}

/// A place in a file the user wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// File as the user named it.
    pub file: String,
    /// 1-based line.
    pub line: usize,
    /// 1-based column.
    pub column: usize,
    /// The line's text.
    pub text: String,
    /// Characters to underline.
    pub width: usize,
}

impl InputError {
    /// An error without a place in a file.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), place: None, help: None }
    }

    /// Adds what would be valid.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds where.
    #[must_use]
    pub fn at(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        let help = self.help.as_deref().unwrap_or("");
        let Some(place) = &self.place else {
            return if help.is_empty() { Ok(()) } else { write!(f, "\n  help: {help}") };
        };
        let gutter = " ".repeat(place.line.to_string().len());
        let indent = " ".repeat(place.column.saturating_sub(1));
        let carets = "^".repeat(place.width.max(1));
        write!(f, "\n {gutter}--> {}:{}:{}", place.file, place.line, place.column)?;
        write!(f, "\n {gutter} |\n {} | {}", place.line, place.text)?;
        write!(f, "\n {gutter} | {indent}{carets} {help}")
    }
}

impl std::error::Error for InputError {}
