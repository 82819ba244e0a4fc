//! Differences between two JSON values, field by field.

use serde_json::Value;

/// A field with different values. Absent ones are null.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The field, as in plan.yaml: `stages[0].memory.total`.
    pub field: String,
    /// Value in the first.
    pub a: Value,
    /// Value in the second.
    pub b: Value,
}

/// Fields with different values, in the order of the first, then those only in the second.
pub fn changes(a: &Value, b: &Value) -> Vec<Change> {
    let mut found = vec![];
    compare("", a, b, &mut found);
    found
}

fn compare(path: &str, a: &Value, b: &Value, found: &mut Vec<Change>) {
    match (a, b) {
        _ if a == b => {}
        (Value::Object(x), Value::Object(y)) => {
            let more = y.keys().filter(|key| !x.contains_key(*key));
            for key in x.keys().chain(more) {
                let at = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                compare(&at, &a[key], &b[key], found);
            }
        }
        (Value::Array(x), Value::Array(y)) => {
            for index in 0..x.len().max(y.len()) {
                let at = |list: &[Value]| list.get(index).cloned().unwrap_or(Value::Null);
                compare(&format!("{path}[{index}]"), &at(x), &at(y), found);
            }
        }
        _ => found.push(Change { field: path.to_owned(), a: a.clone(), b: b.clone() }),
    }
}
