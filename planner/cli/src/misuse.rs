//! What is said of flags that clap refuses.

use crate::args::TOO_LARGE;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use models::text::{is_hidden, shown_lines};
use std::error::Error as _;

/// Prints what is wrong with the flags, or the help that was asked for. Hidden characters of
/// arguments, which a message quotes, are escaped.
pub fn misused(error: &Error) -> ! {
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(text) = unreadable(error).or_else(|| stray(error, &arguments)) {
        eprintln!("error: {}", shown_lines(&text));
        std::process::exit(error.exit_code());
    }
    if arguments.iter().any(|argument| argument.contains(is_hidden)) {
        eprint!("{}", shown_lines(&error.render().to_string()));
        std::process::exit(error.exit_code());
    }
    error.exit()
}

/// A flag's value that cannot be read: the flag, what it needs and what it has.
fn unreadable(error: &Error) -> Option<String> {
    let said = error.source().filter(|_| error.kind() == ErrorKind::ValueValidation)?.to_string();
    let flag = context(error, ContextKind::InvalidArg)?.split(' ').next()?;
    let value = context(error, ContextKind::InvalidValue)?;
    Some(format!("{flag} needs {}, not `{value}`", needed(&said)))
}

/// What a value that cannot be read should be, in our words for what parsers say.
fn needed(said: &str) -> &str {
    match said {
        "invalid float literal" | "cannot parse float from empty string" => "a number",
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            "a whole number, 0 or more"
        }
        "number too large to fit in target type" => TOO_LARGE,
        ours => ours,
    }
}

/// A setting in two words or without its `--set`, or a flag with one dash.
fn stray(error: &Error, arguments: &[String]) -> Option<String> {
    let kinds =
        [ErrorKind::UnknownArgument, ErrorKind::InvalidSubcommand, ErrorKind::ArgumentConflict];
    kinds.contains(&error.kind()).then_some(())?;
    let apart = |words: &&[String]| {
        words[0] == "--set" && !words[1].contains('=') && !words[2].starts_with('-')
    };
    if let Some([_, name, value]) = arguments.windows(3).find(apart) {
        let help = format!("a setting is one word: --set {name}={value}");
        return Some(format!("--set {name} has no value\n  help: {help}"));
    }
    let said = error.to_string();
    let sets = |command: &String| command.starts_with('-') || command == "estimate";
    let setting = |word: &&String| {
        arguments.first().is_some_and(sets)
            && word.contains('=')
            && !word.starts_with('-')
            && said.contains(&format!("'{word}'"))
    };
    if let Some(word) = arguments.iter().find(setting) {
        let help = format!("each setting has a --set of its own: --set {word}");
        return Some(format!("`{word}` stands alone\n  help: {help}"));
    }
    let letter = context(error, ContextKind::InvalidArg)?;
    let one_dash = |word: &&String| {
        letter.len() == 2 && word.len() > 3 && word.starts_with(letter) && !letter.ends_with('-')
    };
    let word = arguments.iter().find(one_dash)?;
    Some(format!("unexpected argument `{word}`\n  help: names have two dashes: -{word}"))
}

fn context(error: &Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    }
}
