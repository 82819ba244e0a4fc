//! Rust text in the shape that rustfmt gives it.

/// Columns of a line.
const WIDTH: usize = 100;

/// Columns that are left at `indent`.
pub fn in_width(indent: usize) -> usize {
    WIDTH - indent
}

/// `head item, item tail` on one line if it fits, else an item a line.
pub fn listed(indent: usize, head: &str, items: &[String], tail: &str) -> Vec<String> {
    let spaced = |text: &str| if text.ends_with('{') { " " } else { "" };
    let space = spaced(head);
    let line = format!("{head}{space}{}{space}{tail}", items.join(", "));
    if line.len() <= in_width(indent) || items.is_empty() {
        return vec![line];
    }
    // What is assigned goes to the next line if it fits there.
    if let Some((name, value)) = line.split_once(" = ").filter(|_| head.contains(" = "))
        && 4 + value.len() <= in_width(indent)
    {
        return vec![format!("{name} ="), format!("    {value}")];
    }
    let items = items.iter().map(|item| format!("    {item},"));
    std::iter::once(head.to_owned()).chain(items).chain([tail.to_owned()]).collect()
}

/// Lines with this indent; empty lines stay empty.
pub fn indented(indent: usize, lines: impl IntoIterator<Item = String>) -> Vec<String> {
    let pad = " ".repeat(indent);
    lines
        .into_iter()
        .map(|line| if line.is_empty() { line } else { format!("{pad}{line}") })
        .collect()
}

/// A text in lines of at most `width` columns.
pub fn filled(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last().map_or(0, String::len);
        if last > 0 && last + 1 + word.len() > width {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

/// Bytes in words, to two or three digits.
pub fn size(bytes: u64) -> String {
    let units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let value = bytes as f64;
    match units.into_iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) if value / unit < 100.0 => format!("{:.1} {name}", value / unit),
        Some((unit, name)) => format!("{:.0} {name}", value / unit),
        None => format!("{bytes} B"),
    }
}

/// Those names that occur in a text as whole words.
pub fn used<'a>(names: &[&'a str], text: &str) -> Vec<&'a str> {
    let words: std::collections::BTreeSet<&str> =
        text.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    names.iter().copied().filter(|name| words.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_take_a_line_an_item() {
        let items = ["a".to_owned(), "b".to_owned()];
        assert_eq!(listed(0, "let X {", &items, "} = y;"), ["let X { a, b } = y;"]);
        assert_eq!(listed(90, "f(", &items, ");"), ["f(a, b);"]);
        assert_eq!(listed(96, "f(", &items, ");"), ["f(", "    a,", "    b,", ");"]);
        assert_eq!(listed(86, "let x = f(", &items, ");"), ["let x =", "    f(a, b);"]);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!([999, 6_291_456, 150_000].map(size), ["999 B", "6.3 MB", "150 kB"]);
    }
}
