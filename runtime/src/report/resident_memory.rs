//! Resident memory of this process, as the operating system counts it.

use std::fs;

/// The process's resident set, from Linux (proc_pid_status(5)): pages of tensors, communicator
/// buffers, code and everything else. Ranks that are threads of one process share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resident {
    /// Now (`VmRSS`).
    pub now_bytes: u64,
    /// The largest since the process began (`VmHWM`).
    pub peak_bytes: u64,
}

impl Resident {
    /// Reads it; zeros if the system does not say.
    pub fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |name| field_kib(&status, name).map_or(0, |kib| kib << 10);
        Self { now_bytes: bytes("VmRSS:"), peak_bytes: bytes("VmHWM:") }
    }
}

fn field_kib(status: &str, name: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_written_is_resident() {
        let before = Resident::read();
        let held = vec![1u8; 64 << 20];
        let during = Resident::read();
        assert!(during.now_bytes >= before.now_bytes + (60 << 20), "{before:?} {during:?}");
        drop(held);
        assert!(Resident::read().peak_bytes >= before.now_bytes + (60 << 20));
    }
}
