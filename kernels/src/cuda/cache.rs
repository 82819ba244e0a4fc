//! A persistent cache between runs: compiled kernels, chosen algorithms. Each file begins with its
//! full key, so a collision of hashes or a newer library is detected.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// A folder of the user's. Without one nothing is stored.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// `$MESHWRIGHT_CACHE`, or `meshwright` in the user's cache folder.
    pub(super) fn of_user() -> Self {
        let given = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let folder = given("MESHWRIGHT_CACHE").map(PathBuf::from).or_else(|| {
            let home = || Some(PathBuf::from(given("HOME")?).join(".cache"));
            let caches = given("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
            Some(caches.join("meshwright"))
        });
        Self { folder }
    }

    fn path(&self, what: &str) -> Option<PathBuf> {
        let mut hasher = DefaultHasher::new();
        what.hash(&mut hasher);
        Some(self.folder.as_ref()?.join(format!("{:016x}", hasher.finish())))
    }

    /// The value stored under `what`, if the full key matches.
    pub(super) fn get(&self, what: &str) -> Option<Vec<u8>> {
        let file = fs::read(self.path(what)?).ok()?;
        let (length, rest) = file.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (key, value) = rest.split_at_checked(length)?;
        (key == what.as_bytes()).then(|| value.to_vec())
    }

    /// Stores a value. Errors are ignored: the next run computes it again.
    pub(super) fn put(&self, what: &str, value: &[u8]) {
        let Some(path) = self.path(what) else { return };
        let Some(folder) = &self.folder else { return };
        if fs::create_dir_all(folder).is_err() {
            return;
        }
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let length = (what.len() as u64).to_le_bytes();
        if fs::write(&part, [&length[..], what.as_bytes(), value].concat()).is_ok() {
            let _ = fs::rename(part, path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Cache;

    #[test]
    fn keeps_what_it_is_given_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("meshwright-cache-{}", std::process::id()));
        let cache = Cache { folder: Some(folder.clone()) };
        assert_eq!(cache.get("a"), None);
        cache.put("a", b"first");
        cache.put("a", b"second");
        assert_eq!(cache.get("a").as_deref(), Some(&b"second"[..]));
        assert_eq!(cache.get("b"), None);
        // Another key's file under this name.
        let (from, to) = (cache.path("a").unwrap(), cache.path("b").unwrap());
        std::fs::rename(from, to).unwrap();
        assert_eq!(cache.get("b"), None);
        std::fs::write(cache.path("c").unwrap(), b"cut").unwrap();
        assert_eq!(cache.get("c"), None);
        Cache { folder: None }.put("a", b"nowhere");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
