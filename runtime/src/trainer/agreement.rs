//! Checks that ranks started as processes were given the same spec, flags and data. A rank that
//! differs is named in an error, instead of training on silently.

use super::{Flags, Job};
use crate::comm::{CommError, Communicator, host_name};
use crate::error::Error;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// How many ranks with the same value an error names.
const MOST_NAMED: usize = 4;

/// Bytes that are hashed at the beginning and at the end of a file.
const SAMPLE_BYTES: u64 = 1 << 16;

/// What a rank says of itself.
#[derive(Debug, Serialize, Deserialize)]
struct Introduction {
    /// Where it runs: `host a, pid 123`.
    process: String,
    /// What all ranks must have in common: name and value.
    settings: Vec<(String, String)>,
}

/// Exchanges with all ranks where each runs and what it was given.
///
/// # Errors
/// On all ranks: what differs.
pub(super) fn agree<S>(job: Job<'_, S>, world: &dyn Communicator) -> Result<(), Error> {
    let process = format!("host {}, pid {}", host_name(), std::process::id());
    let own = Introduction { process, settings: settings(job) };
    let mut all = Vec::with_capacity(world.size());
    for (rank, text) in
        exchange(world, &serde_json::to_string(&own).unwrap_or_default())?.into_iter().enumerate()
    {
        let introduction: Introduction = serde_json::from_str(&text).map_err(|_| Error::World {
            problem: format!("rank {rank} runs another version of the trainer; {SAME}"),
        })?;
        all.push(introduction);
    }
    world.introduce(all.iter().map(|one| one.process.clone()).collect());
    let differences = differences(&all, |rank| world.peer(rank).to_string());
    if differences.is_empty() {
        return Ok(());
    }
    // A rank that ends ends the others: not before all of them know what differs. Whether this
    // exchange itself is ended does not matter.
    let _ = world.all_gather(&[0_i64]);
    let problem = format!("ranks were not started alike: {}; {SAME}", differences.join("; "));
    Err(Error::World { problem })
}

const SAME: &str = "start all ranks with the same trainer, the same flags and the same files";

/// Every rank's text, by rank.
fn exchange(world: &dyn Communicator, text: &str) -> Result<Vec<String>, CommError> {
    let lengths = world.all_gather(&[text.len() as i64])?;
    let longest = lengths.iter().copied().max().unwrap_or_default() as usize;
    let mut padded = text.as_bytes().to_vec();
    padded.resize(longest, b' ');
    let all = world.all_gather(&padded)?;
    Ok(all.chunks(longest.max(1)).map(|text| String::from_utf8_lossy(text).into_owned()).collect())
}

/// One line for each value that differs between ranks.
fn differences(all: &[Introduction], name: impl Fn(usize) -> String) -> Vec<String> {
    let Some(first) = all.first() else { return Vec::new() };
    let value = |rank: usize, what: &str| {
        let mut settings = all[rank].settings.iter();
        settings.find(|(known, _)| known == what).map_or("nothing", |(_, value)| value)
    };
    let names = |ranks: &[usize]| {
        let named: Vec<String> = ranks.iter().take(MOST_NAMED).map(|&rank| name(rank)).collect();
        match ranks.len().saturating_sub(MOST_NAMED) {
            0 => named.join(", "),
            more => format!("{} and {more} more", named.join(", ")),
        }
    };
    let difference = |(what, _): &(String, String)| {
        // Ranks by value, in the order of their first rank.
        let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
        for rank in 0..all.len() {
            let value = value(rank, what);
            match groups.iter_mut().find(|(known, _)| *known == value) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((value, vec![rank])),
            }
        }
        let said = |(value, ranks): &(&str, Vec<usize>)| format!("{value} on {}", names(ranks));
        (groups.len() > 1).then(|| {
            // Fewest ranks first: the majority is probably right.
            groups.sort_by_key(|(_, ranks)| ranks.len());
            format!("{what} is {}", groups.iter().map(said).collect::<Vec<_>>().join(", but "))
        })
    };
    first.settings.iter().filter_map(difference).collect()
}

/// What all ranks must have in common, in words. Every flag is either listed or may differ.
fn settings<S>(job: Job<'_, S>) -> Vec<(String, String)> {
    let Flags {
        init_from,
        data,
        document_end,
        steps,
        lr,
        betas,
        eps,
        weight_decay,
        clip,
        lr_schedule,
        lr_warmup,
        seed,
        dump_gradients,
        dump_weights,
        rank_report,
        trace,
        gpu,
        cuda_graphs,
        // Only rank 0 uses it.
        metrics: _,
        // May differ between processes.
        threads: _,
        rendezvous: _,
        time_limit_s: _,
    } = job.flags;
    let given = |path: &Option<PathBuf>| if path.is_some() { "given" } else { "not given" };
    let version = env!("CARGO_PKG_VERSION");
    let spec = short(&Sha256::digest(format!("{version} {:?}", job.spec)));
    let init_from = init_from.as_deref().map_or_else(|| "not given".to_owned(), identity);
    [
        ("the trainer's plan", spec),
        ("the data of --data", identity(data)),
        ("--init-from", init_from),
        (
            "--document-end",
            document_end.map_or_else(|| "not given".to_owned(), |id| id.to_string()),
        ),
        ("--steps", steps.to_string()),
        ("--lr", lr.to_string()),
        ("--betas", format!("{},{}", betas.0, betas.1)),
        ("--eps", eps.to_string()),
        ("--weight-decay", weight_decay.to_string()),
        ("--clip", clip.to_string()),
        ("--lr-schedule", format!("{lr_schedule:?}").to_lowercase()),
        ("--lr-warmup", lr_warmup.to_string()),
        ("--seed", seed.to_string()),
        ("--dump-gradients", given(dump_gradients).to_owned()),
        ("--dump-weights", given(dump_weights).to_owned()),
        ("--rank-report", given(rank_report).to_owned()),
        ("--trace", given(trace).to_owned()),
        ("--gpu", if gpu.is_some() { "given" } else { "not given" }.to_owned()),
        ("--cuda-graphs", format!("{cuda_graphs:?}").to_lowercase()),
    ]
    .map(|(what, value)| (what.to_owned(), value))
    .to_vec()
}

fn short(digest: &[u8]) -> String {
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Identifies files without reading them whole: total length, and a hash of beginnings and ends.
/// For a directory these are its checkpoint files, for Megatron's data also the index.
fn identity(path: &Path) -> String {
    let files = match path.is_dir() {
        true => weights(path),
        false => Ok(vec![path.to_owned(), path.with_extension("idx")]),
    };
    let mut digest = Sha256::new();
    let mut sampled = |file: &PathBuf| match sample(file, &mut digest) {
        // The index may be absent.
        Err(error) if error.kind() == io::ErrorKind::NotFound && file != path => Ok(0),
        read => read,
    };
    let bytes: io::Result<u64> = files.and_then(|files| files.iter().map(&mut sampled).sum());
    match bytes {
        Ok(bytes) => format!("{bytes} bytes with hash {}", short(&digest.finalize())),
        Err(error) => format!("unreadable ({error})"),
    }
}

/// The checkpoint files of a folder.
pub(super) fn weights(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut paths: Vec<PathBuf> = paths.collect::<io::Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|of| of == "safetensors"));
    paths.sort();
    Ok(paths)
}

/// Hashes a file's length, beginning and end; returns its length in bytes.
fn sample(path: &Path, digest: &mut Sha256) -> io::Result<u64> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut file = File::open(path)?;
    let (length, mut bytes) = (file.metadata()?.len(), Vec::new());
    file.by_ref().take(SAMPLE_BYTES).read_to_end(&mut bytes)?;
    file.seek(SeekFrom::Start(length.saturating_sub(SAMPLE_BYTES)))?;
    file.take(SAMPLE_BYTES).read_to_end(&mut bytes)?;
    digest.update(length.to_le_bytes());
    digest.update(bytes);
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_differs_is_named_first() {
        let introduction = |seed: &str, lr: &str| Introduction {
            process: String::new(),
            settings: [("--seed", seed), ("--lr", lr)].map(|(a, b)| (a.into(), b.into())).to_vec(),
        };
        let name = |rank: usize| format!("rank {rank}");
        let alike: Vec<_> = (0..9).map(|_| introduction("1", "2")).collect();
        assert!(differences(&alike, name).is_empty());
        let mut one = alike;
        one[0] = introduction("7", "2");
        assert_eq!(
            differences(&one, name),
            ["--seed is 7 on rank 0, but 1 on rank 1, rank 2, rank 3, rank 4 and 4 more"]
        );
        let all: Vec<_> = ["1", "2", "3"].map(|lr| introduction("1", lr)).into();
        assert_eq!(
            differences(&all, name),
            ["--lr is 1 on rank 0, but 2 on rank 1, but 3 on rank 2"]
        );
    }
}
