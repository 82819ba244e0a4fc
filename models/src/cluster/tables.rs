//! Measured efficiency of kernels and collectives, shipped as small tables.

use std::sync::Arc;

use crate::input::InputError;

/// What was measured of one device, ready to interpolate. Empty tables leave the physical formulas.
#[derive(Clone, Debug, Default)]
pub struct EfficiencyTables {
    /// Name in `efficiency:` of a cluster file.
    pub name: String,
}

const NAMES: [&str; 3] = ["none", "a100", "h100"];

/// Names that `efficiency:` takes.
pub fn table_names() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter()
}

impl EfficiencyTables {
    /// The shipped tables `name`; `None` where there are none.
    ///
    /// # Errors
    /// A shipped table that cannot be read, which the tests exclude.
    pub fn shipped(name: &str) -> Result<Option<Arc<Self>>, InputError> {
        Ok(NAMES.contains(&name).then(|| Arc::new(Self { name: name.to_owned() })))
    }
}
