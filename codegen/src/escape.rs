//! Escapes texts for generated files: one function for each place where a text can stand.
//!
//! Templates call them as filters of the same names; no text may enter a file without one. They
//! accept any text, so that a file keeps its meaning even if a name was not checked before
//! ([`models::text`]).

use models::text::{double_quoted, shown};

/// A Rust string literal, with quotes, backslashes and invisible characters escaped.
pub fn rust(text: &str) -> String {
    format!("{text:?}")
}

/// A TOML basic string, with quotes, backslashes and hidden characters escaped.
pub fn toml(text: &str) -> String {
    double_quoted(text)
}

/// A word of a POSIX shell: unchanged without special characters, else in single quotes. A NUL,
/// which no argument can contain, is left out.
pub fn shell(text: &str) -> String {
    let text = text.replace('\0', "");
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Part of a line of Markdown, also in a table or in Rust documentation: markup is escaped, and
/// invisible characters are spelled out.
pub fn markdown(text: &str) -> String {
    let text: Vec<char> = shown(text).chars().collect();
    let inside_word = |at: usize| {
        let letter = |at: usize| text.get(at).is_some_and(|c| c.is_alphanumeric());
        at > 0 && letter(at - 1) && letter(at + 1)
    };
    let mut escaped = String::with_capacity(text.len());
    for (at, &c) in text.iter().enumerate() {
        if "\\`*[]<>&|#~".contains(c) || (c == '_' && !inside_word(at)) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Part of a line comment, which ends with its line: hidden characters, including line ends, are
/// spelled out.
pub fn comment(text: &str) -> String {
    shown(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harmless_texts_stay_as_they_are() {
        assert_eq!(rust("llama_gqa"), "\"llama_gqa\"");
        assert_eq!(toml("../../runtime"), "\"../../runtime\"");
        assert_eq!(shell("trainer-llama-gqa"), "trainer-llama-gqa");
        assert_eq!(markdown("llama_gqa"), "llama_gqa");
        assert_eq!(comment("meshwright 0.1.0"), "meshwright 0.1.0");
    }

    #[test]
    fn every_text_stays_where_it_is() {
        let text = "a\"b\\c\nd\u{1b}e\u{202e}f\0'g";
        assert_eq!(rust(text), r#""a\"b\\c\nd\u{1b}e\u{202e}f\0'g""#);
        assert_eq!(toml(text), r#""a\"b\\c\U0000000Ad\U0000001Be\U0000202Ef\U00000000'g""#);
        assert_eq!(shell(text), "'a\"b\\c\nd\u{1b}e\u{202e}f'\\''g'");
        assert_eq!(comment(text), r#"a"b\c\u{a}d\u{1b}e\u{202e}f\u{0}'g"#);
        assert_eq!(markdown("_a_ `b` [c](d) <e> | *f*"), r"\_a\_ \`b\` \[c\](d) \<e\> \| \*f\*");
        assert_eq!((shell(""), shell("$(x)")), ("''".to_owned(), "'$(x)'".to_owned()));
    }
}
