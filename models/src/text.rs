//! Untrusted texts: which names are valid, and how any text is shown on a terminal.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// Longest name, characters.
pub const MAX_NAME_CHARS: usize = 100;

/// What a name may be, in words.
pub const VALID_NAME: &str = "1 to 100 printable characters on one line, for example llama70b";

/// What a line of text may be, in words.
pub const VALID_LINE: &str = "printable characters on one line";

/// Invisible characters besides control characters and white space. They hide text or change the
/// reading direction of their neighbours. Ranges include both ends.
const INVISIBLE: [(char, char); 20] = [
    ('\u{ad}', '\u{ad}'),        // soft hyphen
    ('\u{34f}', '\u{34f}'),      // combining grapheme joiner
    ('\u{61c}', '\u{61c}'),      // Arabic letter mark
    ('\u{115f}', '\u{1160}'),    // Hangul fillers
    ('\u{17b4}', '\u{17b5}'),    // Khmer inherent vowels
    ('\u{180b}', '\u{180f}'),    // Mongolian variation selectors and vowel separator
    ('\u{200b}', '\u{200f}'),    // zero-width space and joiners, direction marks
    ('\u{202a}', '\u{202e}'),    // embeddings and overrides of direction
    ('\u{2060}', '\u{206f}'),    // word joiner, invisible operators, isolates of direction
    ('\u{2800}', '\u{2800}'),    // blank Braille pattern
    ('\u{3164}', '\u{3164}'),    // Hangul filler
    ('\u{e000}', '\u{f8ff}'),    // private use
    ('\u{fdd0}', '\u{fdef}'),    // no characters
    ('\u{fe00}', '\u{fe0f}'),    // variation selectors
    ('\u{feff}', '\u{feff}'),    // byte order mark
    ('\u{ffa0}', '\u{ffa0}'),    // Hangul filler
    ('\u{fff0}', '\u{fffb}'),    // interlinear annotation
    ('\u{1bca0}', '\u{1bca3}'),  // shorthand format controls
    ('\u{1d173}', '\u{1d17a}'),  // musical format controls
    ('\u{e0000}', '\u{10ffff}'), // tags, variation selectors, private use
];

/// Whether a reader cannot see `c`, or sees its neighbours differently from how they are written.
/// Hidden are control characters (C0, DEL, C1), white space other than a blank, and Unicode's
/// format characters and fillers (bidirectional controls, zero-width characters, variation
/// selectors, tags, private use, noncharacters).
///
/// Letters of all scripts, combining marks and symbols are visible.
pub fn is_hidden(c: char) -> bool {
    let invisible = || INVISIBLE.iter().any(|&(first, last)| (first..=last).contains(&c));
    let no_character = c as u32 & 0xfffe == 0xfffe;
    c.is_control() || (c.is_whitespace() && c != ' ') || no_character || (c > '~' && invisible())
}

/// What keeps a text from being a name or a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Only blanks.
    Empty,
    /// Too many characters: this many.
    Long(usize),
    /// A hidden character ([`is_hidden`]), and its place, counted from 1.
    Hidden(char, usize),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("is empty"),
            Self::Long(chars) => write!(f, "has {chars} characters"),
            Self::Hidden(c, at) => {
                write!(f, "has the hidden character U+{:04X} at place {at}", *c as u32)
            }
        }
    }
}

/// The fault of `text` as a name of a model, cluster, device, link or program. A name has 1 to
/// [`MAX_NAME_CHARS`] characters, not all blank and none hidden ([`is_hidden`]).
pub fn name_fault(text: &str) -> Option<Fault> {
    let empty = text.trim().is_empty().then_some(Fault::Empty);
    let chars = text.chars().count();
    let long = (chars > MAX_NAME_CHARS).then_some(Fault::Long(chars));
    empty.or_else(|| line_fault(text)).or(long)
}

/// The fault of `text` as one line without hidden characters ([`is_hidden`]).
pub fn line_fault(text: &str) -> Option<Fault> {
    let hidden = text.chars().enumerate().find(|(_, c)| is_hidden(*c));
    hidden.map(|(index, c)| Fault::Hidden(c, index + 1))
}

/// A figure in words: short, whatever its size.
pub fn figure(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 || (1e-3..1e6).contains(&size) || !value.is_finite() {
        value.to_string()
    } else {
        format!("{value:e}")
    }
}

/// The text with every hidden character written out, such as `\u{1b}`: fit for one line of a
/// terminal.
pub fn shown(text: &str) -> Cow<'_, str> {
    written_out(text, is_hidden)
}

/// As [`shown`], for a text of several lines, which stay lines.
pub fn shown_lines(text: &str) -> Cow<'_, str> {
    written_out(text, |c| is_hidden(c) && c != '\n')
}

fn written_out(text: &str, hidden: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&hidden) {
        return Cow::Borrowed(text);
    }
    let mut all = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if hidden(c) { all.extend(c.escape_unicode()) } else { all.push(c) }
    }
    Cow::Owned(all)
}

/// The first sixty characters of a text to quote in a message, on one line.
pub fn quotable(text: &str) -> String {
    const MOST_CHARS: usize = 60;
    let (end, cut) = match text.char_indices().nth(MOST_CHARS) {
        Some((end, _)) => (end, "..."),
        None => (text.len(), ""),
    };
    format!("{}{cut}", shown(&text[..end]))
}

/// A double-quoted string of TOML and of YAML, which have the same escapes.
pub fn double_quoted(text: &str) -> String {
    let mut literal = String::from('"');
    for c in text.chars() {
        // Writing to a string cannot fail.
        let _ = match c {
            '"' | '\\' => write!(literal, "\\{c}"),
            c if is_hidden(c) => write!(literal, "\\U{:08X}", c as u32),
            c => write!(literal, "{c}"),
        };
    }
    literal + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_known() {
        // Unicode's Bidi_Control, and others that print nothing.
        let bidi = "\u{61c}\u{200e}\u{200f}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}";
        let blank = "\0\u{7}\u{1b}\u{7f}\u{85}\u{9b}\t\n\r\u{a0}\u{ad}\u{200b}\u{200d}\u{2028}\u{2029}\u{2060}\u{3000}";
        let rare = "\u{fe0f}\u{feff}\u{fffe}\u{ffff}\u{1fffe}\u{e0001}\u{e0100}\u{f0000}\u{10ffff}";
        for c in bidi.chars().chain(blank.chars()).chain(rare.chars()) {
            assert!(is_hidden(c), "U+{:04X}", c as u32);
        }
        for c in " aZ~!é模ß\u{301}עش\u{905}\u{93f}😀…·→├".chars() {
            assert!(!is_hidden(c), "U+{:04X} {c}", c as u32);
        }
    }

    #[test]
    fn names_have_1_to_100_visible_characters() {
        for good in ["a", "llama 70B (v2)", "模型", &"x".repeat(100), "\"#$(x)`{{ y }}*/'"] {
            assert_eq!(name_fault(good), None, "{good}");
        }
        assert_eq!(name_fault("  "), Some(Fault::Empty));
        assert_eq!(name_fault(&"é".repeat(101)), Some(Fault::Long(101)));
        assert_eq!(name_fault("a\u{202e}b"), Some(Fault::Hidden('\u{202e}', 2)));
    }

    #[test]
    fn what_is_shown_drives_no_terminal() {
        let hostile = "a\u{1b}]0;x\u{7}\nb\u{202e}c\u{9b}d";
        assert_eq!(shown(hostile), "a\\u{1b}]0;x\\u{7}\\u{a}b\\u{202e}c\\u{9b}d");
        assert_eq!(shown_lines("a\n\u{1b}b"), "a\n\\u{1b}b");
        assert!(matches!(shown("plain é"), Cow::Borrowed(_)));
        assert_eq!(quotable(&"y".repeat(100)).len(), 63);
    }
}
