//! Megatron's `.bin` and `.idx`, written here by their published layout.

use runtime::data::{Indexed, Samples, open};
use std::path::PathBuf;

struct Files(PathBuf);

impl Files {
    /// Writes documents of these lengths, whose tokens count up from 0, with the type of `code`.
    fn write(name: &str, code: u8, lengths: &[usize]) -> Self {
        let folder = std::env::temp_dir().join(format!("meshwright-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (mut bin, mut idx) = (Vec::new(), b"MMIDIDX\0\0".to_vec());
        idx.extend(1u64.to_le_bytes());
        idx.push(code);
        idx.extend((lengths.len() as u64).to_le_bytes());
        idx.extend((lengths.len() as u64 + 1).to_le_bytes());
        idx.extend(lengths.iter().flat_map(|&length| (length as i32).to_le_bytes()));
        let mut token = 0u32;
        for &length in lengths {
            idx.extend((bin.len() as u64).to_le_bytes());
            for _ in 0..length {
                match code {
                    8 => bin.extend((token as u16).to_le_bytes()),
                    4 => bin.extend(token.to_le_bytes()),
                    _ => bin.push(token as u8),
                }
                token += 1;
            }
        }
        idx.extend((0..=lengths.len() as u64).flat_map(u64::to_le_bytes));
        std::fs::write(folder.join("data.bin"), bin).unwrap();
        std::fs::write(folder.join("data.idx"), idx).unwrap();
        Self(folder)
    }

    fn bin(&self) -> PathBuf {
        self.0.join("data.bin")
    }

    fn idx(&self) -> PathBuf {
        self.0.join("data.idx")
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_epoch_is_every_window_once_in_an_order_of_its_own() {
    for code in [1, 4, 8] {
        let files = Files::write(&format!("epoch{code}"), code, &[5, 0, 17, 1, 58, 20]);
        let data = open(&files.bin(), 8, 3).unwrap();
        // 101 tokens: windows of 8 that overlap by one.
        assert_eq!(data.len(), 12);
        let epoch = |epoch: u64| -> Vec<Vec<i64>> {
            (0..12).map(|i| data.read(epoch * 12 + i).unwrap().tokens).collect()
        };
        let windows: Vec<Vec<i64>> = (0..12).map(|w| (w * 8..w * 8 + 8).collect()).collect();
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, windows, "not shuffled");
        assert_ne!(first, second, "each epoch its own order");
        for mut found in [first, second] {
            found.sort();
            assert_eq!(found, windows, "type {code}");
        }
        let sample = data.read(0).unwrap();
        let next: Vec<i64> = sample.tokens.iter().map(|token| token + 1).collect();
        assert_eq!(sample.labels, next);
        let other = Indexed::open(&files.idx(), 8, 4).unwrap();
        let order = |data: &dyn Samples| -> Vec<i64> {
            (0..12).map(|i| data.read(i).unwrap().tokens[0]).collect()
        };
        assert_ne!(order(&*data), order(&other), "the seed decides the order");
    }
}

fn refusal(path: &std::path::Path, seq_len: usize) -> String {
    open(path, seq_len, 0).err().unwrap().to_string()
}

#[test]
fn broken_files_are_refused() {
    let files = Files::write("broken", 8, &[50]);
    assert!(refusal(&files.bin(), 50).contains("make no sample of 51"));
    let bin = std::fs::read(files.bin()).unwrap();
    std::fs::write(files.bin(), &bin[..60]).unwrap();
    assert!(refusal(&files.bin(), 8).contains("truncated: 60 of 100 bytes"));
    let idx = std::fs::read(files.idx()).unwrap();
    let damaged = |at: usize, value: u8| {
        let mut damaged = idx.clone();
        damaged[at] = value;
        std::fs::write(files.idx(), damaged).unwrap();
        refusal(&files.idx(), 8)
    };
    assert!(damaged(0, b'X').contains("no Megatron index"));
    assert!(damaged(9, 2).contains("version 2; valid: 1"));
    assert!(damaged(17, 6).contains("type code 6"));
    assert!(damaged(25, 255).contains("absurd") || damaged(25, 255).contains("truncated"));
    std::fs::write(files.idx(), &idx[..36]).unwrap();
    assert!(refusal(&files.idx(), 8).contains("truncated"));
    std::fs::remove_file(files.idx()).unwrap();
    assert!(refusal(&files.bin(), 8).contains("data.idx"));
}
