//! Untrusted text and the user's errors in it: where they are, and what would be valid.

use std::fmt;
use std::fs::{self, File, FileType};
use std::io::Read;
use std::path::Path;

use serde::de::{DeserializeOwned, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_yaml::{
    Error as YamlError, Location, MessageFormatter, Options, Spanned, UserMessageFormatter,
};

use crate::text::{is_hidden, quotable, shown, shown_lines};

/// Largest file that is read, bytes.
pub const MAX_SOURCE_BYTES: usize = 16 << 20;

/// Characters of a line that an error shows; longer lines are cut around the caret.
const SHOWN_CHARS: usize = 120;

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
/// with every hidden character ([`is_hidden`]) written out: what it quotes cannot drive a terminal.
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
        write!(f, "error: {}", shown_lines(&self.message))?;
        let help = shown_lines(self.help.as_deref().unwrap_or(""));
        let Some(place) = &self.place else {
            return if help.is_empty() { Ok(()) } else { write!(f, "\n  help: {help}") };
        };
        let gutter = " ".repeat(place.line.to_string().len());
        let (text, before) = place.shown();
        let indent = " ".repeat(before);
        let carets = "^".repeat(place.width.clamp(1, SHOWN_CHARS));
        let underline = format!(" {gutter} | {indent}{carets} {help}");
        let file = shown(&place.file);
        write!(f, "\n {gutter}--> {file}:{}:{}", place.line, place.column)?;
        write!(f, "\n {gutter} |\n {} | {text}\n{}", place.line, underline.trim_end())
    }
}

impl std::error::Error for InputError {}

impl Place {
    /// The part of the line to print, and how many of its characters lie before the caret.
    ///
    /// Hidden characters become blanks, so that the caret stays under its character.
    fn shown(&self) -> (String, usize) {
        let before = self.column.saturating_sub(1);
        let start = before.saturating_sub(SHOWN_CHARS / 2);
        let printable = |c: char| if is_hidden(c) { ' ' } else { c };
        let text = self.text.chars().skip(start).take(SHOWN_CHARS).map(printable).collect();
        (text, before - start)
    }
}

/// A text that came from outside, with the name the user gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    name: String,
    text: String,
}

impl Source {
    /// Takes bytes already read, for example from standard input.
    ///
    /// # Errors
    /// More than [`MAX_SOURCE_BYTES`], not UTF-8 (with byte offset and line), nothing in it, or a
    /// control character other than tabs and ends of lines.
    pub fn from_bytes(name: impl Into<String>, bytes: Vec<u8>) -> Result<Self, InputError> {
        let name = name.into();
        if bytes.len() > MAX_SOURCE_BYTES {
            return Err(too_large(&name));
        }
        let text = String::from_utf8(bytes).map_err(|error| not_utf8(&name, &error))?;
        if text.trim().is_empty() {
            return Err(InputError::new(format!("{name} is empty"))
                .help("give a model, cluster or plan; `plan models` lists the shipped models"));
        }
        // A byte order mark is no part of the first key.
        let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
        let source = Self { name, text };
        // Old systems end lines with a carriage return alone.
        source.without(|c| c.is_control() && c != '\r')?;
        Ok(source)
    }

    /// Refuses a text with a character that `refused` names, tabs and ends of lines aside.
    ///
    /// # Errors
    /// The first such character, at its place.
    pub fn without(&self, refused: impl Fn(char) -> bool) -> Result<(), InputError> {
        let ends_line =
            |at: usize| matches!(self.text.as_bytes()[at..], [b'\n', ..] | [b'\r', b'\n', ..]);
        let mut hidden = self.text.char_indices().filter(|&(_, c)| c != '\t' && refused(c));
        let Some((at, _)) = hidden.find(|&(at, _)| !ends_line(at)) else { return Ok(()) };
        let (before, c) = (&self.text[..at], self.text[at..].chars().next().unwrap_or_default());
        let start = before.rfind('\n').map_or(0, |end| end + 1);
        let line = 1 + before.bytes().filter(|&byte| byte == b'\n').count();
        let place = self.place(line, 1 + before[start..].chars().count(), 1);
        let message = format!("the hidden character U+{:04X} stands here", c as u32);
        Err(InputError::new(message).at(place).help("remove it: valid is text that can be seen"))
    }

    /// Reads a regular file, or one that this process has open already, such as `/dev/stdin` and a
    /// shell's `<(command)`. Other pipes and devices could block, or never end.
    ///
    /// # Errors
    /// Missing, unreadable or no regular file, and those of [`Source::from_bytes`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, InputError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        if path.is_dir() {
            let known = ["config.json", "plan.yaml"].map(|file| path.join(file));
            let example = known.iter().find(|file| file.is_file());
            let example =
                example.map_or_else(String::new, |file| format!(", such as {}", file.display()));
            return Err(InputError::new(format!("{name} is a directory"))
                .help(format!("give a file in it{example}")));
        }
        let kind = fs::metadata(path).map_err(|error| unreadable(&name, &error))?.file_type();
        if !kind.is_file() && !is_open_already(path) {
            return Err(InputError::new(format!("{name} is {}, no regular file", in_words(kind)))
                .help("give a regular file; what another program writes goes through /dev/stdin or <(command)"));
        }
        let file = File::open(path).map_err(|error| unreadable(&name, &error))?;
        let mut bytes = Vec::new();
        // One byte more than the limit shows that a file is too large; a device file may never end.
        let limited = &mut file.take(MAX_SOURCE_BYTES as u64 + 1);
        limited.read_to_end(&mut bytes).map_err(|error| unreadable(&name, &error))?;
        Self::from_bytes(name, bytes)
    }

    /// Name as the user gave it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The place at 1-based `line` and `column`, underlining `width` characters but not more than
    /// the line has.
    pub fn place(&self, line: usize, column: usize, width: usize) -> Place {
        let text = self.line(line).to_owned();
        let rest = text.chars().count().saturating_sub(column.saturating_sub(1));
        let width = width.clamp(1, rest.max(1));
        Place { file: self.name.clone(), line, column, text, width }
    }

    /// The place of a parsed value; `None` where the parser did not know it.
    pub fn place_of(&self, location: Location) -> Option<Place> {
        let (line, column) = (location.line() as usize, location.column() as usize);
        let value = self.value_at(location);
        let width = value.lines().next().unwrap_or_default().trim_end().chars().count();
        (location != Location::UNKNOWN).then(|| self.place(line, column, width))
    }

    /// An error about a parsed value, at its place; at the start of the file where that is unknown.
    pub fn error_at(&self, location: Location, message: impl Into<String>) -> InputError {
        let place = self.place_of(location).unwrap_or_else(|| self.place(1, 1, 1));
        InputError::new(message).at(place)
    }

    /// Key of the value at `location`, read back from the text; `None` where there is none.
    ///
    /// The parser reports a value without its key, so this looks left, then upwards.
    pub fn key_at(&self, location: Location) -> Option<&str> {
        let (line, column) = (location.line() as usize, location.column() as usize);
        let text = self.line(line);
        let start = text.char_indices().nth(column.saturating_sub(1));
        let left = start.map_or(text, |(byte, _)| &text[..byte]);
        let opens = |text: &&str| text.ends_with(':');
        let above = self.text.lines().take(line.saturating_sub(1)).map(uncommented);
        last_key(left).or_else(|| above.filter(opens).last().and_then(last_key))
    }

    /// Text of the value at `location`, as written.
    pub(crate) fn value_at(&self, location: Location) -> &str {
        let span = location.span();
        let (Some(start), Some(length)) = (span.byte_offset(), span.byte_len()) else { return "" };
        let (start, length) = (start as usize, length as usize);
        self.text.get(start..start.saturating_add(length)).unwrap_or_default()
    }

    /// Line `number`, 1-based; empty past the end.
    fn line(&self, number: usize) -> &str {
        number.checked_sub(1).and_then(|skip| self.text.lines().nth(skip)).unwrap_or_default()
    }
}

/// Reads YAML, or JSON (which YAML contains), into `T`.
///
/// # Errors
/// Every fault of syntax, keys, types and size, with its place and what would be valid. Anchors
/// that expand without bound, and nesting deeper than 64, are refused.
pub fn parse_yaml<T: DeserializeOwned>(source: &Source) -> Result<T, InputError> {
    let parsed = if source.text.trim_start().starts_with('{') {
        // JSON may be indented by tabs, YAML may not; a tab and a space are one column each.
        serde_yaml::from_str_with_options(&source.text.replace('\t', " "), limits())
    } else {
        serde_yaml::from_str_with_options(&source.text, limits())
    };
    parsed.map_err(|error| explain(source, error.without_snippet()))
}

/// The place of a field such as `stages[3].memory.total`; `None` where the text has no such field.
pub fn place_of_field(source: &Source, field: &str) -> Option<Place> {
    let root: Spanned<YamlValue> = parse_yaml(source).ok()?;
    let steps = field.split(['.', '[']).map(|step| step.trim_end_matches(']'));
    let found = steps.into_iter().try_fold(&root, |node, step| node.value.child(step))?;
    source.place_of(found.referenced)
}

/// A YAML value with the places of its parts.
enum YamlValue {
    Map(Vec<(String, Spanned<YamlValue>)>),
    List(Vec<Spanned<YamlValue>>),
    Leaf,
}

impl YamlValue {
    /// The value of a key, or at an index.
    fn child(&self, step: &str) -> Option<&Spanned<Self>> {
        match self {
            Self::Map(entries) => Some(&entries.iter().find(|(key, _)| key == step)?.1),
            Self::List(items) => items.get(step.parse::<usize>().ok()?),
            Self::Leaf => None,
        }
    }
}

impl<'de> Deserialize<'de> for YamlValue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

/// Visitor methods for scalars.
macro_rules! leaves {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E>(self, _: $type) -> Result<YamlValue, E> { Ok(YamlValue::Leaf) })*
    };
}

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = YamlValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    leaves! { visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_i128: i128, visit_u128: u128, visit_f64: f64, visit_str: &str }

    fn visit_unit<E>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Leaf)
    }

    fn visit_none<E>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Leaf)
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<YamlValue, D::Error> {
        YamlValue::deserialize(from)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<YamlValue, A::Error> {
        let mut items = vec![];
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(YamlValue::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<YamlValue, A::Error> {
        let mut entries = vec![];
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(YamlValue::Map(entries))
    }
}

/// Parser limits: enough for the plan of a large cluster, too little for documents that expand
/// without bound.
fn limits() -> Options {
    serde_yaml::options! {
        budget: serde_yaml::budget! {
            max_nodes: 4_000_000,
            max_events: 8_000_000,
            max_buffered_comment_events: 10_000,
        },
        with_snippet: false,
    }
}

/// The parser's error in our words.
fn explain(source: &Source, error: &YamlError) -> InputError {
    let (at, error) = (error.location().unwrap_or(Location::UNKNOWN), innermost(error));
    let (message, help) = match error {
        YamlError::SerdeUnknownField { field, expected, .. } => {
            (format!("unknown key `{}`", quotable(field)), one_of("keys", field, expected))
        }
        YamlError::SerdeUnknownVariant { variant, expected, .. } => (
            format!("{} cannot be `{}`", key(source, at), quotable(variant)),
            one_of("values", variant, expected),
        ),
        YamlError::SerdeMissingField { field, .. } => {
            (format!("missing required key `{field}`"), format!("add `{field}: ...`"))
        }
        YamlError::DuplicateMappingKey { key, .. } => {
            let key = key.as_deref().unwrap_or("?");
            (format!("key `{}` is given twice", quotable(key)), "keep one of the two".to_owned())
        }
        _ => mistyped(source, at, error).unwrap_or_else(|| unparsable(error)),
    };
    source.error_at(at, message).help(help)
}

/// The error itself, without the wrappers that add where an alias was used.
fn innermost(error: &YamlError) -> &YamlError {
    match error {
        YamlError::AliasError { error, .. } | YamlError::WithSnippet { error, .. } => {
            innermost(error)
        }
        _ => error,
    }
}

/// Message and help for a value of the wrong type; `None` for other errors.
fn mistyped(source: &Source, at: Location, error: &YamlError) -> Option<(String, String)> {
    let expected = match error {
        YamlError::InvalidScalar { ty, .. } => ty,
        YamlError::Unexpected { expected, .. } => expected,
        YamlError::SerdeInvalidType { expected, .. }
        | YamlError::SerdeInvalidValue { expected, .. } => expected.as_str(),
        YamlError::NonFiniteFloat { .. } => "finite float",
        YamlError::InvalidBooleanStrict { .. } => "bool",
        YamlError::NullIntoString { .. } => "string",
        _ => return None,
    };
    let valid = type_in_words(expected);
    let valid = match is_too_large(expected, source.value_at(at).trim()) {
        true => "a smaller whole number",
        false => valid,
    };
    let found = quotable(source.value_at(at).trim().lines().next().unwrap_or_default());
    let message = match (found.as_str(), without_value(source, at)) {
        ("", Some(key)) => format!("`{}` has no value", quotable(key)),
        ("", None) => format!("{} cannot be what is here", key(source, at)),
        _ => format!("{} cannot be `{found}`", key(source, at)),
    };
    Some((message, format!("valid: {valid}")))
}

/// The key of a line that ends behind it.
fn without_value(source: &Source, at: Location) -> Option<&str> {
    let (key, rest) = uncommented(source.line(at.line() as usize)).split_once(':')?;
    rest.trim().is_empty().then_some(key.trim())
}

/// Message and help for text that is no YAML, or too much of it.
fn unparsable(error: &YamlError) -> (String, String) {
    let (text, help) = match error {
        YamlError::Budget { .. }
        | YamlError::AliasReplayLimitExceeded { .. }
        | YamlError::AliasReplayStackDepthExceeded { .. }
        | YamlError::AliasExpansionLimitExceeded { .. } => (
            "it is too deep, too long, or expands too far".into(),
            "write values out instead of nesting aliases; at most 64 levels, 4 million values",
        ),
        YamlError::MultipleDocuments { .. } => {
            ("a second document begins".into(), "give one document a file: no second `---`")
        }
        _ => {
            (UserMessageFormatter.format_message(error), "valid: YAML `key: value` lines, or JSON")
        }
    };
    (format!("cannot read this: {}", quotable(&text)), help.to_owned())
}

/// A Rust type, or serde's description of one, in the user's words: the first line that fits.
fn type_in_words(expected: &str) -> &str {
    let words = [
        (["u8", "u16", "u32", "u64", "usize"].as_slice(), "a whole number, not negative"),
        (&["i32", "i64", "isize"], "a whole number"),
        (&["string scalar"], "one value, not a list or a mapping"),
        (&["finite"], "a finite number"),
        (&["f32", "f64", "float"], "a number"),
        (&["bool"], "true or false"),
        (&["struct", "map"], "a mapping of keys to values"),
        (&["seq", "tuple", "array"], "a list"),
        (&["str"], "text"),
    ];
    let fits = |names: &[&str]| names.iter().any(|name| expected.contains(name));
    words.iter().find(|(names, _)| fits(names)).map_or(expected, |(_, words)| words)
}

/// Whether a whole number as written is more than its type holds. What is valid is often far less.
fn is_too_large(expected: &str, found: &str) -> bool {
    let types = [
        ("u8", u64::from(u8::MAX)),
        ("u16", u64::from(u16::MAX)),
        ("u32", u64::from(u32::MAX)),
        ("u64", u64::MAX),
        ("usize", usize::MAX as u64),
    ];
    let of = types.iter().find(|(name, _)| expected.contains(name));
    let is_number = !found.is_empty() && found.bytes().all(|byte| byte.is_ascii_digit());
    let above = |(_, most): &(&str, u64)| found.parse().map_or(true, |number: u64| number > *most);
    is_number && of.is_some_and(above)
}

/// The key at `at` in quotes, or a word for the whole file.
fn key(source: &Source, at: Location) -> String {
    source.key_at(at).map_or_else(|| "the file".to_owned(), |key| format!("`{}`", quotable(key)))
}

/// "valid keys: ...", led by the one that `given` resembles.
fn one_of(what: &str, given: &str, expected: &[&'static str]) -> String {
    let nearest =
        nearest(given, expected).map(|best| format!("did you mean `{best}`? ")).unwrap_or_default();
    format!("{nearest}valid {what}: {}", expected.join(", "))
}

/// The candidate that `given` probably misspells: the first that it is a piece of, or one of which
/// at most a third is wrong.
pub fn nearest<'a>(given: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let given = given.to_lowercase();
    let whole = candidates.iter().find(|candidate| candidate.contains(&given));
    if let Some(whole) = whole.filter(|_| given.len() >= 3) {
        return Some(whole);
    }
    let given: Vec<char> = given.chars().take(64).collect();
    let scored = candidates.iter().map(|candidate| (edits(&given, candidate), *candidate));
    let (distance, best) = scored.min_by_key(|(distance, _)| *distance)?;
    (distance * 3 <= given.len().max(3)).then_some(best)
}

/// Insertions, deletions and substitutions between two words (Levenshtein).
fn edits(from: &[char], to: &str) -> usize {
    let mut row: Vec<usize> = (0..=from.len()).collect();
    for (i, c) in to.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &d) in from.iter().enumerate() {
            let cost = (diagonal + usize::from(c != d)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], cost);
        }
    }
    row[from.len()]
}

/// The last `key:` of a piece of a line, without its quotes.
fn last_key(text: &str) -> Option<&str> {
    let colons = text.char_indices().rev().filter(|(_, c)| *c == ':');
    let ends_key = |i: usize| {
        text[i + 1..].chars().next().is_none_or(char::is_whitespace) || text[..i].ends_with('"')
    };
    let colon = colons.map(|(i, _)| i).find(|&i| ends_key(i))?;
    let key = text[..colon]
        .trim_end()
        .rsplit(|c: char| c == '{' || c == ',' || c.is_whitespace())
        .next()
        .unwrap_or_default();
    let key = key.trim_matches(['"', '\'']);
    (!key.is_empty()).then_some(key)
}

/// A line without its comment and the blanks around it.
fn uncommented(line: &str) -> &str {
    line.split(" #").next().unwrap_or_default().trim()
}

/// Whether a path names a file that this process has open.
fn is_open_already(path: &Path) -> bool {
    path == Path::new("/dev/stdin")
        || path.starts_with("/dev/fd")
        || path.starts_with("/proc/self/fd")
}

/// A kind of special file, in words.
pub fn in_words(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    match (kind.is_dir(), kind.is_symlink()) {
        (true, _) => "a directory",
        (_, true) => "a symbolic link",
        _ => "something else",
    }
}

fn too_large(name: &str) -> InputError {
    let limit = MAX_SOURCE_BYTES >> 20;
    InputError::new(format!("{name} is larger than {limit} MiB"))
        .help("a model, cluster or plan is a few kB to a few MB of text")
}

fn not_utf8(name: &str, error: &std::string::FromUtf8Error) -> InputError {
    let offset = error.utf8_error().valid_up_to();
    let valid = &error.as_bytes()[..offset];
    let line = 1 + valid.iter().filter(|&&byte| byte == b'\n').count();
    InputError::new(format!("{name} is not UTF-8 text: byte {offset} (line {line}) is invalid"))
        .help("give a text file, YAML or JSON, in UTF-8")
}

fn unreadable(name: &str, error: &std::io::Error) -> InputError {
    let help = match error.kind() {
        std::io::ErrorKind::NotFound => {
            "give an existing file: a plan that `plan ... -o FILE` wrote, or a model or cluster, which may also be a shipped name (`plan models`, `plan clusters`)"
        }
        _ => "give a readable file",
    };
    InputError::new(format!("cannot read {name}: {error}")).help(help)
}
