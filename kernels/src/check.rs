//! Argument checks on entry to an operation.

/// Panics unless the argument `name` has exactly `want` elements.
#[track_caller]
pub(crate) fn length(name: &str, got: usize, want: usize) {
    assert!(got == want, "{name} has {got} elements where the shape says {want}");
}

/// Panics unless the argument `name` has at least `want` elements.
#[track_caller]
pub(crate) fn at_least(name: &str, got: usize, want: usize) {
    assert!(got >= want, "{name} has {got} elements where the shape needs {want}");
}
