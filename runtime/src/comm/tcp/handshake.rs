//! The handshake by which two ranks authenticate each other before anything else is read.
//!
//! The listener sends a challenge of 32 random bytes. The connecting rank answers with its rank, a
//! challenge of its own, and an HMAC-SHA-256 of both under the run's key. The listener proves in
//! the same way that it has the key. So the key never crosses the network, and neither side trusts
//! the other without it. Later traffic is neither signed nor encrypted: this keeps strangers out,
//! not somebody who can read or alter packets.

use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt::{self, Debug};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// First number that each side sends; the last digits are the protocol's version.
const MAGIC: u64 = 0x6d65_7368_7772_0002;

/// How long a handshake may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How often a read checks whether to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Bytes of an HMAC-SHA-256.
const MAC_BYTES: usize = 32;

/// Bytes of a challenge: the magic number and a nonce.
pub(super) const CHALLENGE_BYTES: usize = 40;

/// Bytes of a hello: five numbers, a nonce, and their HMAC.
pub(super) const HELLO_BYTES: usize = 40 + 32 + MAC_BYTES;

/// The secret that the ranks of a run share. An empty key proves nothing.
#[derive(Clone, Default)]
pub struct Key(Vec<u8>);

impl Key {
    /// The environment variable that holds a run's token.
    pub const VARIABLE: &'static str = "MESHWRIGHT_TOKEN";

    /// Shorter tokens could be guessed.
    const LEAST_BYTES: usize = 16;

    /// The key of a token.
    ///
    /// # Errors
    /// A token that is too short, with what would be valid.
    pub fn new(token: &str) -> Result<Self, String> {
        let (token, least) = (token.trim().as_bytes(), Self::LEAST_BYTES);
        if token.len() < least {
            let (name, found) = (Self::VARIABLE, token.len());
            return Err(format!(
                "{name} has {found} characters; valid: {least} or more that nobody can guess, such as what `openssl rand \
                 -hex 32` prints, or none at all"
            ));
        }
        Ok(Self(token.to_vec()))
    }

    /// A token of 64 random hexadecimal digits.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub fn random_token() -> io::Result<String> {
        Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Whether there is no secret.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn code(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut code =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        parts.iter().for_each(|part| code.update(part));
        code
    }
}

impl Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "Key(none)" } else { "Key(secret)" })
    }
}

/// Random bytes that are used once.
pub(super) fn nonce() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Time limit of the rendezvous, and whether somebody has ended it.
#[derive(Clone, Copy)]
pub(super) struct Deadline<'a> {
    pub begun: Instant,
    pub limit: Duration,
    pub interrupted: &'a (dyn Fn() -> bool + Sync),
}

impl Deadline<'_> {
    /// The remaining time; zero if somebody has ended the run.
    pub fn left(&self) -> Duration {
        match (self.interrupted)() {
            true => Duration::ZERO,
            false => self.limit.saturating_sub(self.begun.elapsed()),
        }
    }

    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Fills `bytes` within `patience` and the remaining time, however slowly they arrive.
    pub fn read(&self, from: &TcpStream, bytes: &mut [u8], patience: Duration) -> io::Result<()> {
        from.set_read_timeout(Some(LOOK_EVERY))?;
        let (begun, mut filled) = (Instant::now(), 0);
        while filled < bytes.len() {
            if begun.elapsed() > patience || self.is_over() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it says nothing"));
            }
            match (&*from).read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if is_timeout(&error) || error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        from.set_read_timeout(None)
    }
}

/// Whether a read or a write has reached its time limit.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// What a connecting rank says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Number of ranks of its world.
    pub size: u64,
    /// Its rank.
    pub from: u64,
    /// The rank that it wants to reach.
    pub to: u64,
    /// The port at which it listens; 0 if it does not.
    pub port: u64,
}

impl Hello {
    fn encode(self, nonce: &[u8; 32]) -> Vec<u8> {
        let numbers = [MAGIC, self.size, self.from, self.to, self.port].map(u64::to_le_bytes);
        [numbers.as_flattened(), nonce].concat()
    }

    /// Decodes the answer to challenge `nonce`; `None` unless it proves that the sender has the
    /// key.
    pub fn checked(bytes: &[u8; HELLO_BYTES], key: &Key, nonce: &[u8; 32]) -> Option<Self> {
        let (said, code) = bytes.split_at(HELLO_BYTES - MAC_BYTES);
        key.code(&[b"connect", nonce, said]).verify_slice(code).ok()?;
        let mut numbers = said.as_chunks::<8>().0.iter().map(|chunk| u64::from_le_bytes(*chunk));
        let mut next = || numbers.next();
        let (magic, hello) =
            (next()?, Self { size: next()?, from: next()?, to: next()?, port: next()? });
        (magic == MAGIC).then_some(hello)
    }
}

/// The listener's first message.
pub(super) fn challenge(nonce: &[u8; 32]) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..].copy_from_slice(nonce);
    bytes
}

/// The listener's proof that it has the key.
pub(super) fn prove(
    mut stream: &TcpStream,
    key: &Key,
    nonce: &[u8; 32],
    said: &[u8; HELLO_BYTES],
) -> io::Result<()> {
    let proof = key.code(&[b"accept", nonce, said]).finalize().into_bytes();
    stream.write_all(&proof)
}

/// The connecting side: introduces itself and authenticates the listener.
pub(super) fn introduce(
    mut stream: &TcpStream,
    hello: Hello,
    key: &Key,
    deadline: &Deadline<'_>,
) -> io::Result<()> {
    let mut theirs = [0; CHALLENGE_BYTES];
    let no_rank = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::TimedOut => other("no rank listens there"),
        _ => error,
    };
    deadline.read(stream, &mut theirs, PATIENCE).map_err(no_rank)?;
    if theirs[..8] != MAGIC.to_le_bytes() {
        return Err(other("what listens there is no rank of this version"));
    }
    let said = hello.encode(&nonce()?);
    let code = key.code(&[b"connect", &theirs[8..], &said]).finalize().into_bytes();
    let said = [&said[..], &code].concat();
    stream.write_all(&said)?;
    let mut proof = [0; MAC_BYTES];
    let unproven = format!("the rank that listens there has another {} or world", Key::VARIABLE);
    let refused = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => other(&unproven),
        _ => error,
    };
    deadline.read(stream, &mut proof, PATIENCE).map_err(refused)?;
    let expected = key.code(&[b"accept", &theirs[8..], &said]);
    expected.verify_slice(&proof).map_err(|_| other(&unproven))
}

fn other(what: &str) -> io::Error {
    io::Error::other(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(key: &Key, nonce: &[u8; 32], hello: Hello) -> [u8; HELLO_BYTES] {
        let said = hello.encode(&[7; 32]);
        let code = key.code(&[b"connect", nonce, &said]).finalize().into_bytes();
        [&said[..], &code].concat().try_into().unwrap()
    }

    #[test]
    fn a_hello_proves_the_key_the_challenge_and_every_byte() {
        let key = |token: &str| Key::new(token).unwrap();
        let (ours, nonce) = (key("0123456789abcdef"), [1; 32]);
        let hello = Hello { size: 4, from: 2, to: 0, port: 99 };
        let bytes = answer(&ours, &nonce, hello);
        assert_eq!(Hello::checked(&bytes, &ours, &nonce), Some(hello));
        assert_eq!(Hello::checked(&bytes, &key("another token, as long"), &nonce), None);
        assert_eq!(Hello::checked(&bytes, &Key::default(), &nonce), None);
        assert_eq!(Hello::checked(&bytes, &ours, &[2; 32]), None);
        for at in 0..HELLO_BYTES {
            let mut altered = bytes;
            altered[at] ^= 1;
            assert_eq!(Hello::checked(&altered, &ours, &nonce), None, "byte {at}");
        }
    }

    #[test]
    fn a_token_that_could_be_guessed_is_refused() {
        let said = Key::new("secret").unwrap_err();
        assert!(said.contains("MESHWRIGHT_TOKEN has 6 characters; valid: 16 or more"), "{said}");
        let [one, two] = [(); 2].map(|()| Key::random_token().unwrap());
        assert!(one.len() == 64 && one != two, "{one} {two}");
        assert_eq!(format!("{:?}", Key::new(&one).unwrap()), "Key(secret)");
    }
}
