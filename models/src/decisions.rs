//! Everything a plan decides, by the names users type.
