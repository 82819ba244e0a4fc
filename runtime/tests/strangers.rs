//! Strangers who connect to a run's ports, or listen where its ranks meet, do not end it, change it
//! or hold it up. Everything is on 127.0.0.1. The ports of a process are read from /proc, so these
//! tests run only on Linux.

#![cfg(target_os = "linux")]

mod trainer_runs;

use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use trainer_runs::{
    as_rank, comparable_lines, ended, endless_tokens, folder, golden, golden_on, wait_until,
};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// First number of a challenge and of a hello of this version.
const MAGIC: u64 = 0x6d65_7368_7772_0002;

/// First number of a hello of the previous version, which had no challenge.
const OLD_MAGIC: u64 = 0x6d65_7368_7772_0001;

/// Addresses at which a process listens, from its open files and the system's table of sockets.
fn listens_at(child: &Child) -> Vec<SocketAddr> {
    let files = std::fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten();
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let is_ours = |inode: &str| sockets.contains(&format!("socket:[{inode}]"));
    let v4 = |text: &str| {
        let (ip, port) = text.split_once(':')?;
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_le_bytes());
        Some(SocketAddr::from((ip, u16::from_str_radix(port, 16).ok()?)))
    };
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let listening = table.lines().skip(1).filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        (columns[3] == "0A" && is_ours(columns[9])).then(|| v4(columns[1]))?
    });
    listening.collect()
}

/// A port that was free a moment ago.
fn free_port() -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Process `rank` of four with a token, which meet at an address.
fn rank_of_four(mut command: Command, rank: usize, rendezvous: &str) -> Child {
    as_rank(&mut command, rank).args(["--rendezvous", rendezvous, "--time-limit-s", "50"]);
    command.env("MESHWRIGHT_TOKEN", TOKEN).spawn().unwrap()
}

/// A hello of the previous version: world size, rank and port.
fn old_hello(size: u64, rank: u64, port: u64) -> Vec<u8> {
    [OLD_MAGIC, size, rank, port].map(u64::to_le_bytes).concat()
}

/// A hello of this version with a wrong HMAC.
fn hello(size: u64, from: u64, to: u64, port: u64) -> Vec<u8> {
    [&[MAGIC, size, from, to, port].map(u64::to_le_bytes).concat()[..], &[7; 64]].concat()
}

/// A frame with an announced length.
fn frame(length: u64, bytes: &[u8]) -> Vec<u8> {
    [&length.to_le_bytes()[..], bytes].concat()
}

/// What strangers send, each over a connection of its own: ranks, worlds and ports that do not
/// exist, messages of the kinds that ranks send, and noise.
fn attacks() -> Vec<Vec<u8>> {
    let mut attacks = vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect(),
        MAGIC.to_le_bytes().to_vec(),
    ];
    let abort = [&[2][..], &2_u64.to_le_bytes(), b"pwned by a stranger"].concat();
    let gone = [&[1][..], &99_999_u64.to_le_bytes()].concat();
    let garbled = vec![255; 10];
    let messages = [&abort, &gone, &garbled].map(|bytes| frame(bytes.len() as u64, bytes));
    let long = frame(1 << 63, &vec![0; 1 << 20]);
    for (size, rank) in [(4, 0), (4, 1), (4, 2), (4, 3), (4, 99_999), (9, 3), (0, 0), (u64::MAX, 3)]
    {
        for port in [0, 1, 65_535, 1 << 40] {
            attacks.push(old_hello(size, rank, port));
            (0..4).for_each(|to| attacks.push(hello(size, rank, to, port)));
        }
        for message in messages.iter().chain([&long]) {
            attacks.push([old_hello(size, rank, 65_535), message.clone()].concat());
            attacks.push([hello(size, rank, 1, 0), message.clone()].concat());
        }
    }
    attacks
}

/// Connects and sends `bytes`; the caller keeps the connection open.
fn say(port: SocketAddr, bytes: &[u8]) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&port, Duration::from_secs(5)).ok()?;
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let _refused = stream.write_all(bytes);
    Some(stream)
}

/// The most memory that a process has held, in bytes.
fn peak_memory_bytes(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn strangers_neither_hold_up_a_start_nor_change_what_is_trained() {
    let (alone, disturbed) = (folder("alone"), folder("disturbed"));
    let (code, said) = ended(golden(&alone, 5).spawn().unwrap());
    assert_eq!(code, Some(0), "{said}");

    let rendezvous = free_port();
    let start = |rank| rank_of_four(golden(&disturbed, 5), rank, &rendezvous);
    let mut ranks: Vec<Child> = (0..3).map(start).collect();
    wait_until("three ranks that listen", || ranks.iter().all(|rank| listens_at(rank).len() == 1));
    let ports: Vec<SocketAddr> = ranks.iter().flat_map(listens_at).collect();
    // Only at the given address.
    assert!(ports.iter().all(|port| port.ip().is_loopback()), "{ports:?}");
    assert!(ports.iter().any(|port| port.to_string() == rendezvous), "{ports:?}");
    let mut open = Vec::new();
    for &port in &ports {
        for attack in attacks() {
            drop(say(port, &attack));
            open.extend(say(port, &attack));
        }
        (0..200).for_each(|_| open.extend(say(port, b"")));
    }
    // One that always sends a little more.
    let slow = ports.clone();
    let drips = std::thread::spawn(move || {
        let streams: Vec<TcpStream> = slow.iter().filter_map(|&port| say(port, b"")).collect();
        for _ in 0..100 {
            streams.iter().for_each(|mut stream| drop(stream.write_all(b"m")));
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    for rank in &ranks {
        let peak = peak_memory_bytes(rank);
        assert!(peak < 200 << 20, "{peak} bytes");
    }
    let begun = Instant::now();
    ranks.push(start(3));
    for child in ranks {
        let (code, said) = ended(child);
        assert_eq!(code, Some(0), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    drop(open);
    drips.join().unwrap();
    assert_eq!(comparable_lines(&disturbed.join("m")), comparable_lines(&alone.join("m")));
    let weights = |folder: &Path| std::fs::read(folder.join("w")).unwrap();
    assert!(weights(&disturbed) == weights(&alone));
}

#[test]
fn a_run_that_trains_listens_nowhere() {
    let (alone, disturbed) = (folder("alone-trains"), folder("trains"));
    let data = endless_tokens(&disturbed);
    let steps = 60;
    let (code, said) = ended(golden_on(&alone, steps, &data).spawn().unwrap());
    assert_eq!(code, Some(0), "{said}");

    let rendezvous = free_port();
    let start = |rank| rank_of_four(golden_on(&disturbed, steps, &data), rank, &rendezvous);
    let mut ranks: Vec<Child> = (0..3).map(start).collect();
    wait_until("three ranks that listen", || ranks.iter().all(|rank| listens_at(rank).len() == 1));
    let before: Vec<SocketAddr> = ranks.iter().flat_map(listens_at).collect();
    ranks.push(start(3));
    wait_until("a first step", || {
        std::fs::metadata(disturbed.join("m")).is_ok_and(|file| file.len() > 0)
    });
    let ports: Vec<SocketAddr> = ranks.iter().flat_map(listens_at).collect();
    assert!(ports.is_empty(), "{ports:?}");
    for port in before {
        attacks().iter().for_each(|attack| assert!(say(port, attack).is_none(), "{port}"));
    }
    for child in ranks {
        let (code, said) = ended(child);
        assert_eq!(code, Some(0), "{said}");
    }
    assert_eq!(comparable_lines(&disturbed.join("m")), comparable_lines(&alone.join("m")));
}

fn code(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let mut code = Hmac::<Sha256>::new_from_slice(key).unwrap();
    parts.iter().for_each(|part| code.update(part));
    code.finalize().into_bytes().to_vec()
}

/// Behaves like rank 0 without a token up to the list of addresses, and then sends `list` instead.
fn impostor(stream: &mut TcpStream, list: &[u8]) -> std::io::Result<()> {
    let nonce = [9; 32];
    stream.write_all(&[&MAGIC.to_le_bytes()[..], &nonce].concat())?;
    let mut said = [0; 104];
    stream.read_exact(&mut said)?;
    stream.write_all(&code(b"", &[b"accept", &nonce, &said]))?;
    stream.write_all(list)
}

/// How a rank ends if somebody else listens at the rendezvous.
fn meets(
    list: Option<Vec<u8>>,
    answer: &'static [u8],
    token: Option<&str>,
) -> (Option<i32>, String) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let rendezvous = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for mut stream in listener.incoming().flatten() {
            let _left = match &list {
                Some(list) => impostor(&mut stream, list),
                None => stream.write_all(answer),
            };
            open.push(stream);
        }
    });
    let mut command = golden(&folder("impostor"), 3);
    as_rank(&mut command, 1).args(["--rendezvous", &rendezvous, "--time-limit-s", "3"]);
    command.envs(token.map(|token| ("MESHWRIGHT_TOKEN", token)));
    let begun = Instant::now();
    let end = ended(command.spawn().unwrap());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(!end.1.contains("panicked"), "{}", end.1);
    end
}

#[test]
fn a_rank_does_not_wait_for_ever_for_what_is_no_rank_0() {
    let answers: [&[u8]; 4] = [b"", b"HTTP/1.1 200 OK\r\n\r\n", &[255; 4096], b"\x02\0rwhsem"];
    for answer in answers {
        let (code, said) = meets(None, answer, None);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("rank 1 cannot reach rank 0 at 127.0.0.1:"), "{said}");
    }
}

#[test]
fn lists_of_a_rank_0_that_cannot_be_are_errors() {
    let lists: [(Vec<u8>, &str); 6] = [
        (frame(1 << 62, &[]), "names a list of 4611686018427387904 bytes"),
        (frame(0, &[]), "names 0 other ranks; valid: 3"),
        (frame(11, b"127.0.0.1:1"), "names 1 other ranks; valid: 3"),
        (frame(5, b"a\nb\nc"), "addresses that are none"),
        (frame(6, &[255; 6]), "names 1 other ranks; valid: 3"),
        (frame(100, b"127"), "it waits for other ranks"),
    ];
    for (list, part) in lists {
        let (code, said) = meets(Some(list), b"", None);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(part), "no `{part}` in {said}");
    }
    // A rank with a token does not even read the list.
    let (code, said) = meets(Some(frame(0, &[])), b"", Some(TOKEN));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("has another MESHWRIGHT_TOKEN"), "{said}");
}

#[test]
fn a_rank_with_another_token_does_not_come_in() {
    let (folder, rendezvous) = (folder("token"), free_port());
    let start = |rank: usize| {
        let mut command = golden(&folder, 3);
        as_rank(&mut command, rank).args(["--rendezvous", &rendezvous, "--time-limit-s", "3"]);
        let token = if rank == 2 { "fedcba9876543210" } else { TOKEN };
        command.env("MESHWRIGHT_TOKEN", token).spawn().unwrap()
    };
    let told: Vec<_> = (0..4).map(start).collect::<Vec<_>>().into_iter().map(ended).collect();
    for (rank, (code, said)) in told.iter().enumerate() {
        assert_eq!(*code, Some(2), "rank {rank}: {said}");
    }
    let first = &told[0].1;
    assert!(
        first.contains("ranks [2] did not come") && first.contains("were turned away"),
        "{first}"
    );
    assert!(first.contains("ranks need the same MESHWRIGHT_TOKEN everywhere"), "{first}");
    assert!(told[2].1.contains("has another MESHWRIGHT_TOKEN"), "{}", told[2].1);
}

#[test]
fn a_file_to_meet_in_is_for_its_owner_and_holds_a_token() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder("file");
    let child = trainer_runs::process(&folder, 0, &["--time-limit-s", "2"]);
    let path = folder.join("meeting");
    wait_until("a file", || path.is_file());
    let text = std::fs::read_to_string(&path).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(words[0].starts_with("127.0.0.1:") && words[1].len() == 64, "{words:?}");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(ended(child).0, Some(2));
    assert!(!path.exists());
}
