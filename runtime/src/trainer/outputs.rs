//! The files that a run writes.
//!
//! All are opened before the first step, so that a path that cannot be written is known before any
//! work is done. A file that is written at the end is made next to its final path under a temporary
//! name and renamed when it is complete; until then the old file stays.

use super::{Flags, agreement};
use crate::error::Error;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::{File, TryLockError};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The files that rank 0 writes; other ranks write none.
#[derive(Default)]
pub(super) struct Outputs {
    pub metrics: Option<MetricsFile>,
    pub gradients: Option<NewFile>,
    pub weights: Option<NewFile>,
    pub rank_report: Option<NewFile>,
    pub trace: Option<NewFile>,
}

impl Outputs {
    /// Opens the files that the flags name. Whole weights and gradients take at least `model_bytes`
    /// each, for which there must be room.
    pub fn open(flags: &Flags, model_bytes: u64) -> Result<Self, Error> {
        refuse_inputs(flags)?;
        refuse_one_file_twice(flags)?;
        let open = |flag: &'static str, path: &Option<PathBuf>, bytes| {
            path.as_deref().map(|path| NewFile::open(flag, path, bytes)).transpose()
        };
        Ok(Self {
            metrics: flags.metrics.as_deref().map(MetricsFile::open).transpose()?,
            gradients: open("dump-gradients", &flags.dump_gradients, model_bytes)?,
            weights: open("dump-weights", &flags.dump_weights, model_bytes)?,
            rank_report: open("rank-report", &flags.rank_report, 0)?,
            trace: open("trace", &flags.trace, 0)?,
        })
    }

    /// Temporary files.
    pub fn unfinished(&self) -> Vec<PathBuf> {
        let made = [&self.gradients, &self.weights, &self.rank_report, &self.trace];
        let moves = made.into_iter().flatten().filter_map(|file| file.moves.as_ref());
        moves.map(|[part, _]| part.clone()).collect()
    }
}

const BUSY: &str = "another run, or another flag of this one, writes this file";

/// Refuses outputs that are also inputs: their data would be lost.
fn refuse_inputs(flags: &Flags) -> Result<(), Error> {
    let id = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let data = match flags.data.extension().is_some_and(|of| of == "bin" || of == "idx") {
        true => vec![flags.data.with_extension("bin"), flags.data.with_extension("idx")],
        false => vec![flags.data.clone()],
    };
    let checkpoint = flags.init_from.as_deref().map(|path| match path.is_dir() {
        true => agreement::weights(path).unwrap_or_default(),
        false => vec![path.to_owned()],
    });
    let inputs = data.into_iter().map(|path| ("data", path));
    let inputs = inputs.chain(checkpoint.into_iter().flatten().map(|path| ("init-from", path)));
    let inputs: Vec<_> = inputs.filter_map(|(of, path)| Some((of, id(&path)?))).collect();
    for (flag, path) in named(flags) {
        let Some(path) = path else { continue };
        let found = id(path);
        if let Some((of, _)) = inputs.iter().find(|(_, input)| Some(*input) == found) {
            let path = path.display();
            let problem = format!("{path} is read by --{of}; valid: a file of its own");
            return Err(Error::Flag { flag, problem });
        }
    }
    Ok(())
}

/// Refuses two flags that name one file: the second to be written would replace the first.
fn refuse_one_file_twice(flags: &Flags) -> Result<(), Error> {
    let place = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        let file = folder.join(path.file_name()?);
        let is_file = file.metadata().map_or(true, |found| found.is_file());
        is_file.then(|| file.canonicalize().unwrap_or(file))
    };
    let mut known: Vec<(&str, PathBuf)> = Vec::new();
    for (flag, path) in named(flags) {
        let Some((path, file)) = path.and_then(|path| Some((path, place(path)?))) else { continue };
        if let Some((other, _)) = known.iter().find(|(_, known)| *known == file) {
            let path = path.display();
            let problem = format!("{path} is written by --{other}; valid: a file of its own");
            return Err(Error::Flag { flag, problem });
        }
        known.push((flag, file));
    }
    Ok(())
}

/// The files that flags name, by flag.
pub(super) fn named(flags: &Flags) -> [(&'static str, Option<&Path>); 5] {
    [
        ("metrics", flags.metrics.as_deref()),
        ("dump-gradients", flags.dump_gradients.as_deref()),
        ("dump-weights", flags.dump_weights.as_deref()),
        ("rank-report", flags.rank_report.as_deref()),
        ("trace", flags.trace.as_deref()),
    ]
}

/// The error of a flag whose file cannot be written.
fn refused(flag: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.display().to_string();
    move |error| {
        let error = error.to_string();
        let valid = match error == BUSY {
            true => "a file of its own",
            false => "a file in a folder that exists, with room and the right to write",
        };
        Error::Flag { flag, problem: format!("{path}: {error}; valid: {valid}") }
    }
}

/// Locks the file against other runs until it is closed.
fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(io::Error::other(BUSY)),
        // Some network file systems have no locks; then no run is kept out.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Opens a device or a pipe. An empty write shows whether a device accepts data.
fn open_device(path: &Path) -> io::Result<File> {
    let mut file = File::options().write(true).open(path)?;
    // Not `write_all`, which makes no system call for an empty slice.
    let _nothing = file.write(&[])?;
    Ok(file)
}

/// Metadata of a path, following links; `None` if nothing is there.
fn found(path: &Path) -> io::Result<Option<std::fs::Metadata>> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A file that is renamed to its path when complete, and removed if dropped before.
pub(super) struct NewFile {
    /// The path, as the user named it.
    path: PathBuf,
    file: File,
    /// Temporary and final path; `None` for devices and pipes, which are written in place.
    moves: Option<[PathBuf; 2]>,
}

impl NewFile {
    /// Checks that `bytes` can be written to the path.
    pub fn open(flag: &'static str, path: &Path, bytes: u64) -> Result<Self, Error> {
        Self::begin(path, bytes).map_err(refused(flag, path))
    }

    fn begin(path: &Path, bytes: u64) -> io::Result<Self> {
        let target = match found(path)? {
            Some(metadata) if !metadata.is_file() => {
                return Ok(Self { path: path.to_owned(), file: open_device(path)?, moves: None });
            }
            // A link stays; the file that it points to is replaced.
            Some(_) => {
                File::options().write(true).open(path)?;
                path.canonicalize()?
            }
            None => path.to_owned(),
        };
        let name = target.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        let part = target.with_file_name(format!(".{}.unfinished", name.display()));
        // A temporary file left by a killed run is used again.
        let file = File::options().write(true).create(true).truncate(false).open(&part)?;
        lock(&file)?;
        if std::fs::metadata(&part)?.ino() != file.metadata()?.ino() {
            return Err(io::Error::other(BUSY));
        }
        let new = Self { path: path.to_owned(), file, moves: Some([part, target]) };
        new.file.set_len(0)?;
        reserve(&new.file, bytes)?;
        Ok(new)
    }

    /// Writes the file and renames it to its path.
    pub fn write(
        mut self,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Error> {
        let path = self.path.clone();
        self.put(fill).map_err(Error::io(&path))
    }

    fn put(&mut self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let mut writer = BufWriter::with_capacity(1 << 20, &self.file);
        fill(&mut writer)?;
        writer.flush()?;
        drop(writer);
        if let Some([part, target]) = &self.moves {
            let length = (&self.file).stream_position()?;
            self.file.set_len(length)?;
            self.file.sync_all()?;
            std::fs::rename(part, target)?;
            self.moves = None;
        }
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some([part, _]) = &self.moves {
            // If it cannot be removed, nothing can be done.
            let _stays = std::fs::remove_file(part);
        }
    }
}

/// Reserves disk space, if the file system can.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let length = i64::try_from(bytes).unwrap_or(i64::MAX);
    match fallocate(file, FallocateFlags::empty(), 0, length) {
        Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(()),
        Err(error) => {
            let problem = format!("{bytes} bytes: {}", error.desc());
            Err(io::Error::other(problem))
        }
    }
}

/// A file to which JSON objects are appended, one a line.
pub(super) struct MetricsFile {
    path: PathBuf,
    file: File,
    /// Bytes of complete lines, if the file can be truncated.
    whole_bytes: Option<u64>,
    /// Number of lines that could not be written, and why the first could not.
    lost: u64,
    why: Option<io::Error>,
}

impl MetricsFile {
    /// Opens a file to append to.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::begin(path).map_err(refused("metrics", path))
    }

    fn begin(path: &Path) -> io::Result<Self> {
        let new = |file, whole_bytes| Self {
            path: path.to_owned(),
            file,
            whole_bytes,
            lost: 0,
            why: None,
        };
        if found(path)?.is_some_and(|metadata| !metadata.is_file()) {
            return Ok(new(open_device(path)?, None));
        }
        let mut file = File::options().read(true).append(true).create(true).open(path)?;
        lock(&file)?;
        end_line(&mut file)?;
        let whole_bytes = file.metadata()?.len();
        Ok(new(file, Some(whole_bytes)))
    }

    /// Appends a line. If that fails, the run goes on without it, and the user is told once.
    pub fn line(&mut self, text: &str) {
        let line = format!("{text}\n");
        match self.file.write_all(line.as_bytes()) {
            Ok(()) => self.whole_bytes = self.whole_bytes.map(|bytes| bytes + line.len() as u64),
            Err(error) => self.lose(error),
        }
    }

    /// Whether it has all lines.
    pub fn is_whole(&self) -> bool {
        self.lost == 0
    }

    /// The error of a file that lacks lines.
    pub fn lost(mut self) -> Option<Error> {
        let lines = std::mem::take(&mut self.lost);
        self.why.take().map(|source| Error::Metrics { path: self.path.clone(), lines, source })
    }

    fn lose(&mut self, error: io::Error) {
        self.lost += 1;
        if self.lost == 1 {
            let path = self.path.display();
            eprintln!(
                "warning: --metrics: {path}: {error}; the run goes on, without lines that cannot be written"
            );
            self.why = Some(error);
        }
        if let Some(bytes) = self.whole_bytes {
            // If truncation fails, the next line completes the partial one and is lost with it.
            let _stays = self.file.set_len(bytes);
        }
    }
}

impl Drop for MetricsFile {
    fn drop(&mut self) {
        if self.lost > 0 {
            eprintln!(
                "warning: --metrics: {}: {} lines are missing",
                self.path.display(),
                self.lost
            );
        }
    }
}

/// Ends a partial last line that a killed run left.
fn end_line(file: &mut File) -> io::Result<()> {
    let mut last = [b'\n'];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    if last == [b'\n'] { Ok(()) } else { file.write_all(b"\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_a_file_is_taken_before_it_is_written() {
        let folder = std::env::temp_dir().join(format!("meshwright-room-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("weights");
        // More than any disk has.
        let refused = NewFile::open("dump-weights", &path, 1 << 60).err().unwrap().to_string();
        for part in ["--dump-weights", "weights: 1152921504606846976 bytes: ", "valid: "] {
            assert!(refused.contains(part), "{refused}");
        }
        let file = NewFile::open("dump-weights", &path, 1 << 20).unwrap();
        assert!(file.file.metadata().unwrap().blocks() * 512 >= 1 << 20);
        file.write(|to| to.write_all(b"short")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
